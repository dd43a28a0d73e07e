//! Memory above lower tiers, as one store.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use blendstore_codec::{Codec, Coder, Raw};
use blendstore_core::{Key, Namespace, Record, Store};

use crate::loads::{LoadStats, Loads, Ticket};
use crate::meter::TierStats;
use crate::process::Owner;
use crate::tier::Tier;
use crate::writes::Writes;

/// One tier, and how records are coded on their way down to it.
#[derive(Clone, Debug)]
pub struct Level {
    /// The tier.
    pub tier: Arc<dyn Tier>,
    /// Coding of what is written to it.
    pub coder: Arc<dyn Coder>,
}

impl Level {
    /// With payloads as they lie in memory.
    pub fn raw(tier: Arc<dyn Tier>) -> Self {
        Self {
            tier,
            coder: Arc::new(Raw),
        }
    }
}

/// How a store with tiers is made.
#[derive(Clone, Debug)]
pub struct Options {
    /// Most bytes of records that wait to be written to one tier; they are pinned in memory meanwhile. A quarter of the
    /// memory by default.
    pub queue_bytes: Option<u64>,
    /// Threads that load.
    pub loaders: usize,
    /// Codings that can be read, besides raw and those of the levels.
    pub coders: Vec<Arc<dyn Coder>>,
    /// Longest time that `close` goes on writing what is queued.
    pub drain: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queue_bytes: None,
            loaders: 2,
            coders: Vec::new(),
            drain: Duration::from_secs(5),
        }
    }
}

/// Codings by their number.
pub(crate) type Coders = BTreeMap<Codec, Arc<dyn Coder>>;

/// A chunk store in memory with tiers below it. Everything of the memory's own is reached through it by `Deref`; clones
/// share it. The tiers are those of the process that opened it: in a child that was forked since it has its copy of the memory
/// and none below, and leaves its parent's files and connections alone.
#[derive(Clone, Debug)]
pub struct TieredStore {
    memory: Store,
    tiers: Arc<TierSet>,
}

/// What lies below memory: ended by the last handle.
#[derive(Debug)]
struct TierSet {
    levels: Vec<Level>,
    writes: Arc<Vec<Writes>>,
    loads: Arc<Loads>,
    threads: Vec<JoinHandle<()>>,
    drain: Duration,
    owner: Owner,
    /// A child was told that it has no tiers.
    told: AtomicBool,
}

impl TieredStore {
    /// `memory` above `levels`, the fastest first. Only one of these can be made of one store.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn new(memory: Store, levels: Vec<Level>, options: &Options) -> std::io::Result<Self> {
        let queue_bytes = options
            .queue_bytes
            .unwrap_or(memory.options().capacity_bytes as u64 / 4);
        let mut coders = Coders::from([(Codec::RAW, Arc::new(Raw) as Arc<dyn Coder>)]);
        let all = options
            .coders
            .iter()
            .chain(levels.iter().map(|level| &level.coder));
        coders.extend(all.map(|coder| (coder.codec(), coder.clone())));
        let writes: Arc<Vec<Writes>> = Arc::new(
            levels
                .iter()
                .enumerate()
                .map(|(number, level)| Writes::new(level.clone(), number, queue_bytes))
                .collect(),
        );
        let loads = Arc::new(Loads::new(
            memory.clone(),
            levels.clone(),
            coders,
            writes.clone(),
        ));
        let mut threads = Vec::new();
        let owner = Owner::this();
        if !levels.is_empty() {
            for at in 0..writes.len() {
                let (writes, memory) = (writes.clone(), memory.clone());
                let named = format!("bs-write-{}", levels[at].tier.name());
                threads.push(
                    std::thread::Builder::new()
                        .name(named)
                        .spawn(move || writes[at].run(&memory))?,
                );
            }
            for _ in 0..options.loaders.max(1) {
                let loads = loads.clone();
                let named = "bs-load".to_owned();
                threads.push(
                    std::thread::Builder::new()
                        .name(named)
                        .spawn(move || loads.run())?,
                );
            }
            let below: Weak<Vec<Writes>> = Arc::downgrade(&writes);
            memory.observe(move |records: Vec<Record>| {
                let Some(below) = below.upgrade().filter(|_| owner.is_this()) else {
                    return;
                };
                let records: Vec<Arc<Record>> = records.into_iter().map(Arc::new).collect();
                for writes in below.iter() {
                    writes.push(&records);
                }
            });
        }
        let tiers = TierSet {
            levels,
            writes,
            loads,
            threads,
            drain: options.drain,
            owner,
            told: AtomicBool::new(false),
        };
        Ok(Self {
            memory,
            tiers: Arc::new(tiers),
        })
    }

    /// The memory alone.
    pub fn memory(&self) -> &Store {
        &self.memory
    }

    /// Names of the tiers, the fastest first.
    pub fn tiers(&self) -> Vec<String> {
        self.tiers
            .levels
            .iter()
            .map(|level| level.tier.name().to_owned())
            .collect()
    }

    /// Whether there is a tier below memory.
    pub fn has_tiers(&self) -> bool {
        !self.tiers.levels.is_empty()
    }

    /// Starts loading what is not in memory. Keys that are on their way already are waited for, not loaded again. What was
    /// loaded stays in memory for as long as the ticket lives.
    pub fn prefetch(&self, namespace: &Namespace, keys: &[Key]) -> Ticket {
        if self.tiers.are_here() {
            self.tiers.loads.request(namespace, keys)
        } else {
            Ticket::of_memory(&self.memory, keys)
        }
    }

    /// Number of the fastest place of each key: 0 memory, 1 the first tier, …; 255 nowhere that is known cheaply.
    pub fn tier_of(&self, keys: &[Key]) -> Vec<u8> {
        let mut places: Vec<u8> = vec![u8::MAX; keys.len()];
        let memory = std::iter::once(self.memory.contains(keys));
        let levels: &[Level] = if self.tiers.are_here() {
            &self.tiers.levels
        } else {
            &[]
        };
        let below = levels.iter().map(|level| level.tier.contains(keys));
        for (number, found) in memory.chain(below).enumerate() {
            for (place, _) in places
                .iter_mut()
                .zip(found)
                .filter(|(place, found)| **place == u8::MAX && *found != 0)
            {
                *place = number.min(254) as u8;
            }
        }
        places
    }

    /// Drops every chunk (of one namespace) in memory and in the tiers; returns how many there were in memory. Nothing that was
    /// committed before comes back, however far its writes and loads had come; loads asked for meanwhile are misses.
    pub fn clear(&self, namespace: Option<&Namespace>) -> usize {
        if !self.tiers.are_here() {
            return self.memory.clear(namespace);
        }
        let _clearing = self.tiers.loads.void(namespace);
        let cleared = self.memory.clear(namespace);
        for (writes, level) in self.tiers.writes.iter().zip(&self.tiers.levels) {
            writes.discard(namespace, || {
                level.tier.clear(namespace.map(Namespace::name).as_ref());
            });
        }
        cleared
    }

    /// Waits until everything queued is written, or for `at_most`; whether it is.
    pub fn flush(&self, at_most: Duration) -> bool {
        self.tiers.are_here() && self.tiers.flush(Instant::now() + at_most)
    }

    /// Counters of each tier, in order.
    pub fn tier_stats(&self) -> Vec<(String, TierStats)> {
        let stats = |(level, writes): (&Level, &Writes)| {
            let mut stats = level.tier.stats();
            writes.add_to(&mut stats);
            (level.tier.name().to_owned(), stats)
        };
        self.tiers
            .levels
            .iter()
            .zip(self.tiers.writes.iter())
            .map(stats)
            .collect()
    }

    /// Counters of loading.
    pub fn load_stats(&self) -> LoadStats {
        self.tiers.loads.stats()
    }

    /// Writes what is queued, for a limited time, and closes tiers and memory: every later lookup misses.
    pub fn close(&self) {
        if self.tiers.are_here() {
            self.tiers.end();
        }
        self.memory.close();
    }
}

impl Deref for TieredStore {
    type Target = Store;

    fn deref(&self) -> &Store {
        &self.memory
    }
}

impl TierSet {
    /// False in a forked child, where locks may be held by threads that aren't there: nothing below memory is touched.
    fn are_here(&self) -> bool {
        let here = self.levels.is_empty() || self.owner.is_this();
        if !here && !self.told.swap(true, Relaxed) {
            log::warn!(
                "this process was forked from the one that opened the store, and has none of its tiers: open a store in \
                 each process, after the fork"
            );
        }
        here
    }

    fn flush(&self, deadline: Instant) -> bool {
        self.writes.iter().all(|writes| writes.flush(deadline))
    }

    fn end(&self) {
        self.loads.end();
        self.flush(Instant::now() + self.drain);
        for (writes, level) in self.writes.iter().zip(&self.levels) {
            writes.end();
            level.tier.close();
        }
    }
}

impl Drop for TierSet {
    fn drop(&mut self) {
        if !self.are_here() {
            std::mem::forget(std::mem::take(&mut self.threads));
            return;
        }
        self.end();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
