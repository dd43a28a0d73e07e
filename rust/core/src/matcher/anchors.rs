//! Where fingerprints lead: a table from fingerprint to (slot, anchor number) with a bound on everything.
//!
//! A fingerprint picks two buckets of ten cells, a bucket being a cache line. A cell is a slot and a mark, `tag:12 | anchor +
//! 1:4`, where zero is empty. Readers take no lock: a stale or mixed answer is possible and harmless, as every candidate is
//! confirmed by its tokens. There is one writer at a time. At most [`SAME`] cells carry one tag: the newest, kept newest
//! first, so boilerplate shared by a million chunks costs a prompt no more than that of eight.

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};

use crate::error::Result;
use crate::index::prefetch;
use crate::mapping::{Table, Zeroed};

const CELLS: usize = 10;

/// Most candidates of one fingerprint.
pub(super) const SAME: usize = 8;

/// Most anchors of one chunk: what a mark can tell apart.
pub(super) const MOST_ANCHORS: usize = 15;

/// Cells for each anchor that must fit, as a ratio: two million anchors with two choices of ten cells fill 3/4 of the table
/// without a loss (17 are lost at 4/5).
const SPARE: (usize, usize) = (4, 3);

/// Bits of a mark that tell the fingerprint.
const TAG: u16 = !0xf;

/// A candidate: the chunk in `slot` may hold the window at its anchor number `anchor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) slot: u32,
    pub(super) anchor: u8,
}

#[derive(Debug, Default)]
#[repr(align(64))]
struct Bucket {
    slots: [AtomicU32; CELLS],
    marks: [AtomicU16; CELLS],
}

// SAFETY: atomic integers, for which zero is a value.
unsafe impl Zeroed for Bucket {}

/// The table.
#[derive(Debug)]
pub(super) struct Anchors {
    buckets: Table<Bucket>,
}

impl Anchors {
    /// For `capacity` anchors.
    pub(super) fn new(capacity: usize) -> Result<Self> {
        const { assert!(size_of::<Bucket>() == 64) };
        let buckets = (capacity * SPARE.0).div_ceil(SPARE.1 * CELLS).max(2);
        Ok(Self {
            buckets: Table::new(buckets)?,
        })
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    /// Asks for the memory that `candidates` will read.
    #[inline]
    pub(super) fn prefetch(&self, fingerprint: u64) {
        self.pick(fingerprint)
            .into_iter()
            .flatten()
            .for_each(prefetch);
    }

    /// Calls `visit` with every candidate of a fingerprint, newest first.
    #[inline]
    pub(super) fn candidates(&self, fingerprint: u64, mut visit: impl FnMut(Candidate)) {
        let tag = tag(fingerprint);
        for bucket in self.pick(fingerprint).into_iter().flatten() {
            for cell in 0..CELLS {
                let mark = bucket.marks[cell].load(Ordering::Acquire);
                if mark & TAG == tag && mark != 0 {
                    let slot = bucket.slots[cell].load(Ordering::Acquire);
                    visit(Candidate {
                        slot,
                        anchor: (mark & !TAG) as u8 - 1,
                    });
                }
            }
        }
    }

    /// Adds a candidate as the newest of its fingerprint; the oldest goes when there are too many.
    pub(super) fn insert(&self, fingerprint: u64, candidate: Candidate) {
        let new = (mark(fingerprint, candidate), candidate.slot);
        let cells = self.cells(fingerprint);
        let held: Vec<(u16, u32)> = cells.iter().map(Cell::load).collect();
        if held.contains(&new) {
            return;
        }
        let alike = |mark: u16| mark != 0 && mark & TAG == tag(fingerprint);
        let mut places: Vec<usize> = (0..cells.len())
            .filter(|&place| alike(held[place].0))
            .collect();
        let hole = if places.len() < SAME {
            let place = free_place(&held);
            let position = places.partition_point(|&other| other < place);
            if places.get(position) != Some(&place) {
                places.insert(position, place);
            }
            position
        } else {
            SAME - 1
        };
        // Candidates only move to later cells, last first, so a reader that goes forward sees each at least once.
        for i in (1..=hole).rev() {
            cells[places[i]].store(held[places[i - 1]]);
        }
        cells[places[0]].store(new);
    }

    /// Removes a candidate, if it is still there.
    pub(super) fn remove(&self, fingerprint: u64, candidate: Candidate) {
        let gone = (mark(fingerprint, candidate), candidate.slot);
        for cell in self
            .cells(fingerprint)
            .iter()
            .filter(|cell| cell.load() == gone)
        {
            cell.store((0, 0));
        }
    }

    /// The cells of a fingerprint's buckets, in the order in which they are read.
    fn cells(&self, fingerprint: u64) -> Vec<Cell<'_>> {
        let buckets = self.pick(fingerprint).into_iter().flatten();
        buckets
            .flat_map(|bucket| bucket.marks.iter().zip(&bucket.slots))
            .map(|(mark, slot)| Cell { mark, slot })
            .collect()
    }

    /// The buckets of a fingerprint: two, unless they are the same. Either follows from the other and the tag, so cells of
    /// one tag in one bucket have both buckets in common, and may change places.
    #[inline]
    fn pick(&self, fingerprint: u64) -> [Option<&Bucket>; 2] {
        let count = self.buckets.len() as u64;
        let scale = |bits: u32| (u64::from(bits) * count) >> 32;
        let one = scale(fingerprint as u32);
        let sum = scale(u32::from(tag(fingerprint)).wrapping_mul(0x9e37_79b1));
        let other = if sum >= one {
            sum - one
        } else {
            sum + count - one
        };
        [
            Some(&self.buckets[one as usize]),
            (other != one).then(|| &self.buckets[other as usize]),
        ]
    }
}

/// One cell, as its writer sees it.
struct Cell<'a> {
    mark: &'a AtomicU16,
    slot: &'a AtomicU32,
}

impl Cell<'_> {
    fn load(&self) -> (u16, u32) {
        (
            self.mark.load(Ordering::Relaxed),
            self.slot.load(Ordering::Relaxed),
        )
    }

    fn store(&self, (mark, slot): (u16, u32)) {
        self.slot.store(slot, Ordering::Release);
        self.mark.store(mark, Ordering::Release);
    }
}

/// An empty cell in the emptier bucket. Both full does not happen at the load the table is made for; if it does, another
/// anchor goes.
fn free_place(held: &[(u16, u32)]) -> usize {
    let load = |bucket: &[(u16, u32)]| bucket.iter().filter(|(mark, _)| *mark != 0).count();
    let (one, other) = held.split_at(CELLS);
    let from = if !other.is_empty() && load(other) < load(one) {
        CELLS
    } else {
        0
    };
    (from..from + CELLS)
        .find(|&place| held[place].0 == 0)
        .unwrap_or(CELLS - 1)
}

fn tag(fingerprint: u64) -> u16 {
    (fingerprint.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 48) as u16 & TAG
}

fn mark(fingerprint: u64, candidate: Candidate) -> u16 {
    tag(fingerprint) | (u16::from(candidate.anchor) + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(table: &Anchors, fingerprint: u64) -> Vec<u32> {
        let mut slots = Vec::new();
        table.candidates(fingerprint, |candidate| slots.push(candidate.slot));
        slots
    }

    fn spread(i: u64) -> u64 {
        u64::from_le_bytes(
            blake3::hash(&i.to_le_bytes()).as_bytes()[..8]
                .try_into()
                .expect("8 bytes"),
        )
    }

    /// A full table still finds every anchor, and an emptied one finds none.
    #[test]
    fn a_table_filled_to_capacity_loses_nothing() {
        let capacity = 40_000;
        let table = Anchors::new(capacity).expect("memory");
        for i in 0..capacity as u32 {
            table.insert(
                spread(i.into()),
                Candidate {
                    slot: i,
                    anchor: (i % 15) as u8,
                },
            );
        }
        for i in 0..capacity as u32 {
            assert!(found(&table, spread(i.into())).contains(&i), "anchor {i}");
        }
        for i in 0..capacity as u32 {
            table.remove(
                spread(i.into()),
                Candidate {
                    slot: i,
                    anchor: (i % 15) as u8,
                },
            );
        }
        let marks = table.buckets.iter().flat_map(|bucket| &bucket.marks);
        assert!(
            marks
                .into_iter()
                .all(|mark| mark.load(Ordering::Relaxed) == 0)
        );
    }

    /// One fingerprint keeps its newest candidates, newest first, whatever shares its buckets.
    #[test]
    fn the_newest_candidates_of_a_fingerprint_stay() {
        let table = Anchors::new(64).expect("memory");
        let fingerprint = spread(1);
        for slot in 0..100 {
            table.insert(fingerprint, Candidate { slot, anchor: 0 });
            let expected: Vec<u32> = (0..=slot).rev().take(SAME).collect();
            assert_eq!(found(&table, fingerprint), expected);
        }
        table.remove(
            fingerprint,
            Candidate {
                slot: 97,
                anchor: 0,
            },
        );
        assert_eq!(found(&table, fingerprint), [99, 98, 96, 95, 94, 93, 92]);
        table.insert(
            fingerprint,
            Candidate {
                slot: 100,
                anchor: 0,
            },
        );
        assert_eq!(
            found(&table, fingerprint),
            [100, 99, 98, 96, 95, 94, 93, 92]
        );
    }

    /// A chunk found by several anchors is told apart by their numbers; the same anchor twice is one.
    #[test]
    fn anchors_of_one_chunk_are_apart() {
        let table = Anchors::new(8).expect("memory");
        for anchor in [3, 0, 14, 3] {
            table.insert(
                9,
                Candidate {
                    slot: u32::MAX,
                    anchor,
                },
            );
        }
        let mut anchors = Vec::new();
        table.candidates(9, |candidate| {
            anchors.push((candidate.slot, candidate.anchor))
        });
        assert_eq!(anchors, [(u32::MAX, 14), (u32::MAX, 0), (u32::MAX, 3)]);
    }
}
