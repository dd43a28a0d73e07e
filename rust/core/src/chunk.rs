//! Slots of chunks and their life: free → reserved → complete → resident → (doomed →) free.
//!
//! State, pins and generation of a slot are one atomic word, so that "resident, and of that generation, and now pinned" is
//! one compare-and-swap. A slot's other fields are written only while it is reserved (by its one owner) or under the
//! ledger's lock, and are stable for whoever has a pin: publishing releases them, pinning acquires them.
//!
//! | bits | part | meaning |
//! |---|---|---|
//! | 0-2 | state | below |
//! | 3 | parked | the evictor met the chunk pinned: the last pin hands it back |
//! | 4-19 | leases | pins of leases; a time-out may take them |
//! | 20-35 | holds | pins of views, reservations and users; nothing takes them |
//! | 36-63 | generation | counts the lives of the slot |
//!
//! *Doomed* is a chunk that no key leads to any more: its bytes stay until its last pin goes, then the slot is free.

use crate::key::Key;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// No slot.
pub(crate) const NIL: u32 = u32::MAX;

const STATE: u64 = 0b111;
const FREE: u64 = 0;
const RESERVED: u64 = 1;
const COMPLETE: u64 = 2;
const RESIDENT: u64 = 3;
const DOOMED: u64 = 4;
const PARKED: u64 = 1 << 3;
const LEASE: u64 = 1 << 4;
const LEASES: u64 = 0xffff << 4;
const HOLD: u64 = 1 << 20;
const HOLDS: u64 = 0xffff << 20;
const PINS: u64 = LEASES | HOLDS;
const GENERATION: u64 = 1 << 36;

fn generation(word: u64) -> u32 {
    (word >> 36) as u32
}

/// What a pin found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pinned {
    pub generation: u32,
    /// No other pin was there.
    pub first: bool,
}

/// What an unpin left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unpinned {
    /// There was a pin to take (a time-out had not taken it).
    pub done: bool,
    /// No other pin is left.
    pub last: bool,
    /// The slot waits for its last pin, which this was: hand it to the ledger.
    pub wake: bool,
}

/// What came of an attempt to evict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Evict {
    /// Doomed without pins: the caller owns the slot.
    Taken,
    /// Pinned, and parked now.
    Pinned,
}

/// State, pins and generation of one slot.
#[derive(Debug)]
pub(crate) struct Word(AtomicU64);

impl Word {
    #[cfg(any(loom, test))]
    pub(crate) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Applies `step` until it wins or declines; the old word is returned when it won.
    fn update(&self, step: impl Fn(u64) -> Option<u64>) -> Result<u64, u64> {
        let mut word = self.0.load(Ordering::Acquire);
        loop {
            let Some(next) = step(word) else {
                return Err(word);
            };
            match self
                .0
                .compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Ok(word),
                Err(now) => word = now,
            }
        }
    }

    /// Free → reserved. The caller took the slot from the free list.
    pub(crate) fn reserve(&self) -> Reserved {
        let word = self.0.load(Ordering::Acquire);
        debug_assert_eq!(word & (STATE | PINS), FREE);
        self.0.store(word & !STATE | RESERVED, Ordering::Release);
        Reserved {
            generation: generation(word),
        }
    }

    /// Doomed without pins → free, one generation on.
    pub(crate) fn free(&self) {
        let word = self.0.load(Ordering::Acquire);
        debug_assert_eq!(word & (STATE | PINS), DOOMED);
        self.0.store(
            (word & !(GENERATION - 1)).wrapping_add(GENERATION) | FREE,
            Ordering::Release,
        );
    }

    /// Pins a resident chunk for a lease.
    pub(crate) fn lease(&self) -> Option<Pinned> {
        self.update(|word| {
            (word & STATE == RESIDENT && word & LEASES != LEASES).then(|| word + LEASE)
        })
        .ok()
        .map(|word| Pinned {
            generation: generation(word),
            first: word & PINS == 0,
        })
    }

    /// Pins that generation for good: while it is resident, or still pinned.
    pub(crate) fn hold(&self, wanted: u32) -> Option<Pinned> {
        self.update(|word| {
            let readable = word & STATE == RESIDENT || word & STATE == DOOMED && word & PINS != 0;
            (readable && generation(word) == wanted && word & HOLDS != HOLDS).then(|| word + HOLD)
        })
        .ok()
        .map(|word| Pinned {
            generation: wanted,
            first: word & PINS == 0,
        })
    }

    /// Pins a slot that the caller has reserved, for a writable view.
    pub(crate) fn hold_reserved(&self, reserved: &Reserved) -> Option<Pinned> {
        self.update(|word| {
            debug_assert_eq!(
                (word & STATE, generation(word)),
                (RESERVED, reserved.generation)
            );
            (word & HOLDS != HOLDS).then(|| word + HOLD)
        })
        .ok()
        .map(|word| Pinned {
            generation: reserved.generation,
            first: word & PINS == 0,
        })
    }

    fn unpin(&self, of: u32, one: u64, all: u64) -> Unpinned {
        match self.update(|word| (generation(word) == of && word & all != 0).then(|| word - one)) {
            Err(_) => Unpinned::default(),
            Ok(word) => {
                let last = word & PINS == one;
                let waited_for = word & PARKED != 0 || word & STATE == DOOMED;
                Unpinned {
                    done: true,
                    last,
                    wake: last && waited_for,
                }
            }
        }
    }

    /// Takes back a lease's pin, if no time-out has.
    pub(crate) fn unlease(&self, of: u32) -> Unpinned {
        self.unpin(of, LEASE, LEASES)
    }

    /// Takes back a hold.
    pub(crate) fn unhold(&self, of: u32) -> Unpinned {
        let unpinned = self.unpin(of, HOLD, HOLDS);
        debug_assert!(unpinned.done, "a hold lives as long as its owner");
        unpinned
    }

    /// Resident without pins → doomed; with pins it is parked.
    pub(crate) fn evict(&self) -> Evict {
        let before = self.update(|word| {
            debug_assert_eq!(word & STATE, RESIDENT);
            Some(if word & PINS == 0 {
                word & !(STATE | PARKED) | DOOMED
            } else {
                word | PARKED
            })
        });
        match before {
            Ok(word) if word & PINS == 0 => Evict::Taken,
            _ => Evict::Pinned,
        }
    }

    /// No longer parked.
    pub(crate) fn unpark(&self) {
        let _ = self.update(|word| Some(word & !PARKED));
    }

    /// Reserved, complete or resident → doomed. True when no pin is left: the caller owns the slot; otherwise the last
    /// pin hands it over.
    pub(crate) fn doom(&self) -> bool {
        let before = self.update(|word| Some(word & !(STATE | PARKED) | DOOMED));
        before.is_ok_and(|word| word & PINS == 0)
    }

    /// Takes the pins of leases from that generation, unless it has holds, if `overdue` says so after the pins were seen;
    /// the slot is doomed then and the caller's. Returns how many pins were taken.
    pub(crate) fn expire(&self, of: u32, overdue: impl Fn() -> bool) -> u32 {
        let taken = self.update(|word| {
            let expirable = generation(word) == of && word & HOLDS == 0 && word & LEASES != 0;
            (expirable && overdue()).then(|| word & !(STATE | PARKED | PINS) | DOOMED)
        });
        taken.map_or(0, |word| ((word & LEASES) / LEASE) as u32)
    }

    /// Generation, when resident.
    pub(crate) fn resident(&self) -> Option<u32> {
        let word = self.0.load(Ordering::Acquire);
        (word & STATE == RESIDENT).then(|| generation(word))
    }

    /// A resident chunk of that generation.
    pub(crate) fn is_resident(&self, of: u32) -> bool {
        self.resident() == Some(of)
    }

    /// Generation, when doomed.
    pub(crate) fn doomed(&self) -> Option<u32> {
        let word = self.0.load(Ordering::Acquire);
        (word & STATE == DOOMED).then(|| generation(word))
    }

    /// Resident and not parked.
    pub(crate) fn is_listable(&self) -> bool {
        self.0.load(Ordering::Acquire) & (STATE | PARKED) == RESIDENT
    }

    /// A doomed slot of that generation whose last pin is gone.
    pub(crate) fn is_abandoned(&self, of: u32) -> bool {
        let word = self.0.load(Ordering::Acquire);
        word & (STATE | PINS) == DOOMED && generation(word) == of
    }

    /// That generation is pinned.
    pub(crate) fn is_pinned(&self, of: u32) -> bool {
        let word = self.0.load(Ordering::Acquire);
        generation(word) == of && word & PINS != 0
    }
}

/// A slot whose record is being written, by the one owner of this value.
#[derive(Debug)]
pub(crate) struct Reserved {
    generation: u32,
}

/// A slot whose record is written and that no key leads to yet.
#[derive(Debug)]
pub(crate) struct Complete {
    generation: u32,
}

impl Reserved {
    /// The record is written.
    pub(crate) fn complete(self, word: &Word) -> Complete {
        let before = word.update(|word| Some(word & !STATE | COMPLETE));
        debug_assert!(before.is_ok_and(|word| word & STATE == RESERVED));
        Complete {
            generation: self.generation,
        }
    }

    /// Gives the slot up; see [`Word::doom`].
    pub(crate) fn abort(self, word: &Word) -> bool {
        word.doom()
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }
}

impl Complete {
    /// From now on the chunk can be pinned. Returns its generation.
    pub(crate) fn publish(self, word: &Word) -> u32 {
        let before = word.update(|word| Some(word & !STATE | RESIDENT));
        debug_assert!(before.is_ok_and(|word| word & STATE == COMPLETE));
        self.generation
    }
}

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
}

/// All slots, made once for the life of the store; pages are committed as slots are used for the first time.
#[derive(Debug)]
pub(crate) struct Chunks {
    hot: Box<[Hot]>,
    cold: Box<[Cold]>,
    hit_cap: u32,
}

/// # Safety
/// All-zero bytes must be a valid `T`.
#[cfg(not(loom))]
unsafe fn zeroed<T>(len: usize) -> Box<[T]> {
    // SAFETY: the caller vouches for zeros. Large zeroed allocations are fresh pages that cost nothing until touched.
    unsafe { Box::new_zeroed_slice(len).assume_init() }
}

impl Chunks {
    #[cfg(not(loom))]
    pub(crate) fn new(max_chunks: usize, hit_cap: u32) -> Self {
        // SAFETY: `Hot` and `Cold` consist of atomic integers, for which zero is a value.
        let (hot, cold) = unsafe { (zeroed(max_chunks), zeroed(max_chunks)) };
        Self { hot, cold, hit_cap }
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

    /// Counts a use at `now`. Before a lease pins, it stamps: whoever sees the pin sees a stamp that is at least as new, so
    /// a time-out never takes a fresh pin.
    pub(crate) fn stamp(&self, slot: u32, now: u64) {
        self.hot(slot).touched.fetch_max(now, Ordering::Relaxed);
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
        self.key() == *key
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
        }
    }

    pub(crate) fn set_labels(&self, labels: Labels) {
        let bits = u32::from(labels.provenance)
            | u32::from(labels.rank) << 8
            | u32::from(labels.scores) << 16
            | u32::from(labels.listed) << 17
            | u32::from(labels.orphan) << 18;
        self.labels.store(bits, Ordering::Relaxed);
    }
}
