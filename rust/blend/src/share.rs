//! Items that threads take one after the other, until none is left.

mod team;

use std::sync::{Mutex, PoisonError};

pub use team::settle;

/// More threads than this gain nothing anywhere, and a team of very many ends the process.
const MOST: usize = 256;

/// Does `work` with each of `items`, of which there are about `count`, taken in their order, on up to `threads` threads, this
/// one included. Each thread has a `Scratch` of its own.
///
/// Where the process computes with an OpenMP team, its threads do it: between two pieces of work they spin for a while, so
/// that they are there at once, and threads beside them would have to share their cores. The team is taken as large as
/// `threads` says even for fewer items, because where its size changes it ends and starts threads.
pub(crate) fn share<Items, Scratch>(
    items: Items,
    count: usize,
    threads: usize,
    work: impl Fn(&mut Scratch, Items::Item) + Sync,
) where
    Items: Iterator + Send,
    Scratch: Default,
{
    let items = Mutex::new(items);
    let on_a_thread = || {
        let mut scratch = Scratch::default();
        loop {
            let next = items.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(item) = next else { return };
            work(&mut scratch, item);
        }
    };
    let threads = threads.min(MOST);
    let helpers = threads.min(count).saturating_sub(1);
    if helpers == 0 {
        on_a_thread();
    } else if !team::run(threads, &on_a_thread) {
        on_threads_of_its_own(helpers, &on_a_thread);
    }
}

/// `work` on this thread and up to `helpers` more.
fn on_threads_of_its_own(helpers: usize, work: &(impl Fn() + Sync)) {
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // Where no thread can be had, the others do its part.
            let started = std::thread::Builder::new().spawn_scoped(scope, work);
            if started.is_err() {
                break;
            }
        }
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_taken_once_on_any_number_of_threads() {
        for threads in 0..5 {
            let taken = Mutex::new(Vec::new());
            share(0..100, 100, threads, |seen: &mut usize, item| {
                *seen += 1;
                taken.lock().unwrap().push(item);
            });
            let mut taken = taken.into_inner().unwrap();
            taken.sort_unstable();
            assert!(taken.into_iter().eq(0..100), "{threads} threads");
        }
    }
}
