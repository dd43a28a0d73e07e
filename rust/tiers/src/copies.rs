//! What memory is told of the copies in one tier: which of its records have one, how fast they come, how sure they are. By
//! that its eviction knows what it costs to let a record go.
//!
//! A copy counts once it is written, or when its record came from it. A tier that knows of copies it has lost says so
//! ([`Tier::lost`]); for the others, and while a server is away, the share of copies that come when they are asked for makes
//! all of them count for less.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blendstore_core::{Fetch, Key, Record, Store};

use crate::tier::Tier;

/// Copies remembered, to tell a lost one from a key that was never there. Another one overwrites what shares its place.
const REMEMBERED: usize = 1 << 16;
/// Weight of the newest call, and of the newest copy asked for, in the running means.
const WEIGHT: f64 = 1.0 / 16.0;

#[derive(Debug)]
pub(crate) struct Copies {
    /// The tier's, from 0 on.
    number: usize,
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Known {
    /// Parts of the keys of copies.
    tags: Vec<u32>,
    /// Of calls that brought something, weighted.
    seconds: f64,
    bytes: f64,
    /// Share of copies that came.
    found: f64,
}

impl Copies {
    pub(crate) fn new(number: usize) -> Self {
        let known = Known {
            tags: vec![0; REMEMBERED],
            seconds: 0.0,
            bytes: 0.0,
            found: 1.0,
        };
        Self {
            number,
            known: Mutex::new(known),
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// These were given to the tier, which has kept so many of them.
    pub(crate) fn written(
        &self,
        memory: &Store,
        tier: &dyn Tier,
        records: &[Arc<Record>],
        kept: usize,
    ) {
        self.settle(memory, tier);
        let keys: Vec<Key> = records.iter().map(|record| record.key()).collect();
        // Who kept some of them only, or had some already, is asked which; a tier that doesn't know has none.
        let there = if kept == keys.len() {
            vec![1; keys.len()]
        } else {
            tier.contains(&keys)
        };
        let there = |(at, _): &(usize, &Arc<Record>)| there[*at] != 0;
        self.are_there(
            memory,
            records.iter().enumerate().filter(there).map(|(_, r)| r),
        );
    }

    /// These have a copy in the tier.
    pub(crate) fn are_there<'a>(
        &self,
        memory: &Store,
        records: impl Iterator<Item = &'a Arc<Record>> + Clone,
    ) {
        let mut known = self.known();
        for record in records.clone() {
            let (place, tag) = place_of(&record.key());
            known.tags[place] = tag;
        }
        drop(known);
        memory.copied(self.number, records.map(Arc::as_ref));
    }

    /// Tells memory what the tier has lost.
    pub(crate) fn settle(&self, memory: &Store, tier: &dyn Tier) {
        let lost = tier.lost();
        if !lost.is_empty() {
            memory.uncopied(self.number, &lost);
        }
    }

    /// These were asked for, each of which `came` or not; so many bytes took so long.
    pub(crate) fn read(
        &self,
        memory: &Store,
        keys: &[Key],
        came: &[bool],
        bytes: u64,
        took: Duration,
    ) {
        let mut known = self.known();
        for (key, &came) in keys.iter().zip(came) {
            let (place, tag) = place_of(key);
            if known.tags[place] == tag {
                known.found += WEIGHT * (f64::from(u8::from(came)) - known.found);
            }
        }
        if bytes > 0 {
            let before = 1.0 - WEIGHT;
            known.seconds = known.seconds * before + took.as_secs_f64();
            known.bytes = known.bytes * before + bytes as f64;
        }
        drop(known);
        if let Some(fetch) = self.fetch() {
            memory.set_fetch(self.number, fetch);
        }
    }

    /// What it takes to bring a copy up, once one has been.
    pub(crate) fn fetch(&self) -> Option<Fetch> {
        let known = self.known();
        (known.bytes > 0.0).then(|| Fetch {
            seconds_per_byte: known.seconds / known.bytes,
            found: known.found,
        })
    }

    /// The tier was cleared.
    pub(crate) fn forget(&self) {
        self.known().tags.fill(0);
    }
}

/// Keys are uniform; a tag is never 0.
fn place_of(key: &Key) -> (usize, u32) {
    let [place, tag, ..] = key.as_chunks::<4>().0 else {
        unreachable!("a key has 32 bytes");
    };
    (
        u32::from_le_bytes(*place) as usize % REMEMBERED,
        u32::from_le_bytes(*tag) | 1,
    )
}
