//! Items that threads take one after the other, until none is left.

use std::sync::{Mutex, PoisonError};

/// Does `work` with each of `items`, taken in their order, on this thread and up to `helpers` more. Each thread has a
/// `Scratch` of its own.
pub(crate) fn share<Items, Scratch>(
    items: Items,
    helpers: usize,
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
    std::thread::scope(|scope| {
        for _ in 0..helpers {
            // Where no thread can be had, the others do its part.
            let started = std::thread::Builder::new().spawn_scoped(scope, on_a_thread);
            if started.is_err() {
                break;
            }
        }
        on_a_thread();
    });
}
