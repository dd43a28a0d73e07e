//! The life of a slot: free → reserved → complete → resident → (doomed →) free.
//!
//! State, pins and generation of a slot are one atomic word, so that "resident, and of that generation, and now pinned" is
//! one compare-and-swap. Publishing releases what the owner of a reserved slot wrote, pinning acquires it; unpinning
//! releases what a reader read, and freeing acquires that before the memory is written again.
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

use crate::sync::{AtomicU64, Ordering};

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
            (expirable && overdue()).then_some(word & !(STATE | PARKED | PINS) | DOOMED)
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

#[cfg(all(test, loom))]
mod models;
#[cfg(all(test, not(loom)))]
mod tests;
