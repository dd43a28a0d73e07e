//! Slots of chunks: the life of each (`word`), and its fields.
//!
//! A slot's fields are written only while it is reserved (by its one owner) or under the ledger's lock, and are stable for
//! whoever has a pin.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::error::Result;
use crate::key::Key;
use crate::mapping::{Table, Zeroed};
use crate::word::Word;

/// No slot.
pub(crate) const NIL: u32 = u32::MAX;

/// What a lookup touches of a slot: one cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Hot {
    pub word: Word,
    /// Nanoseconds since the store was opened, of the last lookup that hit.
    touched: AtomicU64,
    key: [AtomicU64; 4],
    /// Place in the arena, in units of it.
    pub offset: AtomicU32,
    pub ntokens: AtomicU32,
    pub bytes_per_token: AtomicU32,
    /// Hits, counted up to the policy's cap.
    hits: AtomicU32,
}

/// The rest of a slot. Links are slots or `NIL`, changed under the ledger's lock and read by anybody.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Cold {
    pub block: AtomicU32,
    pub source_position: AtomicU32,
    pub segment_offset: AtomicU32,
    pub behind_tokens: AtomicU32,
    /// Content ids kept with the record.
    pub nbehind: AtomicU32,
    /// Number of its namespace in the ledger.
    pub namespace: AtomicU32,
    pub parent: AtomicU32,
    pub first_child: AtomicU32,
    pub next_sibling: AtomicU32,
    pub previous_sibling: AtomicU32,
    labels: AtomicU32,
}

/// Small facts about a record, packed in one field.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels {
    pub provenance: u8,
    pub rank: u8,
    pub scores: bool,
    /// The eviction policy knows the slot (ledger's use).
    pub listed: bool,
    /// Its parent was not resident when it was published (ledger's use).
    pub orphan: bool,
    /// Tiers below that have a copy, a bit each (ledger's use).
    pub copies: u8,
}

/// All slots, made once for the life of the store; pages are committed as slots are used for the first time.
#[derive(Debug)]
pub(crate) struct Chunks {
    hot: Table<Hot>,
    cold: Table<Cold>,
    hit_cap: u32,
}

// SAFETY: atomic integers, for which zero is a value. (Not so under loom, where no slots are made, only single words.)
unsafe impl Zeroed for Hot {}
// SAFETY: as above.
unsafe impl Zeroed for Cold {}

impl Chunks {
    pub(crate) fn new(max_chunks: usize, hit_cap: u32) -> Result<Self> {
        Ok(Self {
            hot: Table::new(max_chunks)?,
            cold: Table::new(max_chunks)?,
            hit_cap,
        })
    }

    pub(crate) fn hot(&self, slot: u32) -> &Hot {
        &self.hot[slot as usize]
    }

    pub(crate) fn cold(&self, slot: u32) -> &Cold {
        &self.cold[slot as usize]
    }

    pub(crate) fn word(&self, slot: u32) -> &Word {
        &self.hot(slot).word
    }

    pub(crate) fn len(&self) -> usize {
        self.hot.len()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.hot.len() * (size_of::<Hot>() + size_of::<Cold>())
    }

    /// Counts a use at `now`. Before a lease pins, it stamps: whoever sees the pin sees its stamp or that of another use,
    /// so a time-out doesn't take a fresh pin. (Two uses at once may leave the older stamp: they are as close as two
    /// threads on their way through this function.)
    pub(crate) fn stamp(&self, slot: u32, now: u64) {
        let touched = &self.hot(slot).touched;
        if touched.load(Ordering::Relaxed) < now {
            touched.store(now, Ordering::Relaxed);
        }
    }

    /// Counts a hit, for the policy.
    pub(crate) fn count_hit(&self, slot: u32) {
        let counter = &self.hot(slot).hits;
        let hits = counter.load(Ordering::Relaxed);
        if hits < self.hit_cap {
            counter.store(hits + 1, Ordering::Relaxed);
        }
    }

    /// Resident, with that key. A hint: it may be gone the next moment.
    pub(crate) fn matches(&self, slot: u32, key: &Key) -> bool {
        let hot = self.hot(slot);
        let Some(generation) = hot.word.resident() else {
            return false;
        };
        hot.has_key(key) && hot.word.is_resident(generation)
    }
}

impl crate::eviction::Heat for Chunks {
    fn hits(&self, slot: u32) -> u32 {
        self.hot(slot).hits.load(Ordering::Relaxed)
    }

    fn set_hits(&self, slot: u32, hits: u32) {
        self.hot(slot).hits.store(hits, Ordering::Relaxed);
    }

    fn touched(&self, slot: u32) -> u64 {
        self.hot(slot).touched.load(Ordering::Relaxed)
    }
}

impl Hot {
    pub(crate) fn set_key(&self, key: &Key) {
        for (word, bytes) in self.key.iter().zip(key.as_chunks::<8>().0) {
            word.store(u64::from_ne_bytes(*bytes), Ordering::Relaxed);
        }
    }

    pub(crate) fn key(&self) -> Key {
        let mut key = [0; 32];
        for (word, bytes) in self.key.iter().zip(key.as_chunks_mut::<8>().0) {
            *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
        }
        key
    }

    pub(crate) fn has_key(&self, key: &Key) -> bool {
        let words = self.key.iter().zip(key.as_chunks::<8>().0);
        words.fold(0, |differs, (word, bytes)| {
            differs | word.load(Ordering::Relaxed) ^ u64::from_ne_bytes(*bytes)
        }) == 0
    }

    /// Starts a life's use count.
    pub(crate) fn reset_use(&self, now: u64) {
        self.touched.store(now, Ordering::Relaxed);
        self.hits.store(0, Ordering::Relaxed);
    }

    /// KV payload bytes of the record.
    pub(crate) fn nbytes(&self) -> usize {
        self.ntokens.load(Ordering::Relaxed) as usize
            * self.bytes_per_token.load(Ordering::Relaxed) as usize
    }
}

impl Cold {
    pub(crate) fn labels(&self) -> Labels {
        let bits = self.labels.load(Ordering::Relaxed);
        Labels {
            provenance: bits as u8,
            rank: (bits >> 8) as u8,
            scores: bits & 1 << 16 != 0,
            listed: bits & 1 << 17 != 0,
            orphan: bits & 1 << 18 != 0,
            copies: (bits >> 24) as u8,
        }
    }

    pub(crate) fn set_labels(&self, labels: Labels) {
        let bits = u32::from(labels.provenance)
            | u32::from(labels.rank) << 8
            | u32::from(labels.scores) << 16
            | u32::from(labels.listed) << 17
            | u32::from(labels.orphan) << 18
            | u32::from(labels.copies) << 24;
        self.labels.store(bits, Ordering::Relaxed);
    }
}
