//! The chunk index: from a key to the slot that holds it. Readers take no lock; writers come one at a time.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::error::Result;
use crate::key::Key;
use crate::mapping::{Table, Zeroed};

/// Map from keys to slots. An entry is a hint: the reader verifies the full key at the slot, under a pin.
///
/// `insert`, `replace` and `remove` are called by one writer at a time.
pub trait ChunkIndex: Send + Sync {
    /// The first slot that may hold `key` and that `accept` takes.
    fn find(&self, key: &Key, accept: impl FnMut(u32) -> bool) -> Option<u32>;
    /// False when there is no room.
    fn insert(&self, key: &Key, slot: u32) -> bool;
    /// Puts `new` where `old` was, without a moment in which neither is found.
    fn replace(&self, key: &Key, old: u32, new: u32);
    /// Forgets that `slot` holds `key`.
    fn remove(&self, key: &Key, slot: u32);
    /// Memory taken.
    fn bytes(&self) -> usize;
    /// Begins to fetch what `find` will read.
    fn prefetch(&self, _key: &Key) {}
}

const WAYS: usize = 8;

/// One cache line of entries: `tag << 32 | slot + 1`, or 0 when empty.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket([AtomicU64; WAYS]);

// SAFETY: atomic integers, for which zero is a value.
unsafe impl Zeroed for Bucket {}

/// Fixed table of two-choice buckets, half full at most.
///
/// An entry never moves, so a reader can't miss a key that is there, and there are no tombstones to clean. Keys are
/// uniform (BLAKE3), so both buckets of a key being full is rarer than one in 10⁹ at that load; a stash of one bucket
/// takes those.
#[derive(Debug)]
pub struct SlotTable {
    buckets: Table<Bucket>,
    stash: Bucket,
    stashed: AtomicUsize,
}

impl SlotTable {
    /// For at most `max_chunks` keys.
    pub fn new(max_chunks: usize) -> Result<Self> {
        let buckets = Table::new(max_chunks.div_ceil(WAYS / 2).max(2))?;
        Ok(Self {
            buckets,
            stash: Bucket::default(),
            stashed: AtomicUsize::new(0),
        })
    }

    fn word(key: &Key, index: usize) -> u64 {
        u64::from_le_bytes(key.as_chunks::<8>().0[index])
    }

    fn tag(key: &Key) -> u64 {
        Self::word(key, 2) & !(u64::from(u32::MAX))
    }

    fn entry(key: &Key, slot: u32) -> u64 {
        Self::tag(key) | u64::from(slot + 1)
    }

    fn choices(&self, key: &Key) -> [&Bucket; 2] {
        [0, 1].map(|index| {
            let scaled = u128::from(Self::word(key, index)) * self.buckets.len() as u128;
            &self.buckets[(scaled >> 64) as usize]
        })
    }

    /// The place of an entry.
    fn place(&self, key: &Key, slot: u32) -> Option<&AtomicU64> {
        let entry = Self::entry(key, slot);
        let [first, second] = self.choices(key);
        [first, second, &self.stash]
            .into_iter()
            .flat_map(|b| &b.0)
            .find(|way| way.load(Ordering::Relaxed) == entry)
    }
}

impl ChunkIndex for SlotTable {
    fn find(&self, key: &Key, mut accept: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = Self::tag(key);
        let mut search = |bucket: &Bucket| {
            bucket.0.iter().find_map(|way| {
                let entry = way.load(Ordering::Acquire);
                let slot = (entry as u32).wrapping_sub(1);
                (entry as u32 != 0 && entry & !u64::from(u32::MAX) == tag && accept(slot))
                    .then_some(slot)
            })
        };
        let [first, second] = self.choices(key);
        search(first).or_else(|| search(second)).or_else(|| {
            if self.stashed.load(Ordering::Acquire) == 0 {
                None
            } else {
                search(&self.stash)
            }
        })
    }

    fn insert(&self, key: &Key, slot: u32) -> bool {
        let empty = |bucket: &Bucket| {
            bucket
                .0
                .iter()
                .filter(|way| way.load(Ordering::Relaxed) == 0)
                .count()
        };
        let [first, second] = self.choices(key);
        let stash = empty(first) == 0 && empty(second) == 0;
        let bucket = match stash {
            true => &self.stash,
            false if empty(first) >= empty(second) => first,
            false => second,
        };
        let Some(way) = bucket.0.iter().find(|way| way.load(Ordering::Relaxed) == 0) else {
            return false;
        };
        if stash {
            self.stashed.fetch_add(1, Ordering::Release);
        }
        way.store(Self::entry(key, slot), Ordering::Release);
        true
    }

    fn replace(&self, key: &Key, old: u32, new: u32) {
        let way = self.place(key, old);
        debug_assert!(way.is_some(), "only what is indexed is replaced");
        if let Some(way) = way {
            way.store(Self::entry(key, new), Ordering::Release);
        }
    }

    fn remove(&self, key: &Key, slot: u32) {
        let way = self.place(key, slot);
        debug_assert!(way.is_some(), "only what is indexed is removed");
        if let Some(way) = way {
            way.store(0, Ordering::Release);
            if self
                .stash
                .0
                .as_ptr_range()
                .contains(&std::ptr::from_ref(way))
            {
                self.stashed.fetch_sub(1, Ordering::Release);
            }
        }
    }

    fn bytes(&self) -> usize {
        (self.buckets.len() + 1) * size_of::<Bucket>()
    }

    fn prefetch(&self, key: &Key) {
        self.choices(key).into_iter().for_each(prefetch);
    }
}

/// Asks for the cache line of `at`.
pub(crate) fn prefetch<T>(at: &T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that the program sees, and `at` is a live reference.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
            std::ptr::from_ref(at).cast(),
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests;
