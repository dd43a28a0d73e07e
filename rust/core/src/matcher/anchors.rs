//! Where fingerprints lead: a table from fingerprint to (slot, anchor number) with a bound on everything.
//!
//! A fingerprint picks two buckets of eight cells. A cell packs `slot:32 | anchor + 1:8 | tag:24` into one atomic word, so
//! readers take no lock: a torn or stale answer can't exist, only one that no longer holds, and every candidate is
//! confirmed by its tokens anyway. There is one writer at a time. At most [`SAME`] cells carry one tag: the newest, kept
//! newest first, so boilerplate shared by a million chunks costs a prompt no more than that of eight.

use std::sync::atomic::{AtomicU64, Ordering};

const BUCKET: usize = 8;
const LINE: usize = 64;

/// Most candidates of one fingerprint.
pub(super) const SAME: usize = 8;

/// Cells for each anchor that must fit, as a ratio: with two choices of eight cells, a table of two million anchors that is
/// filled to 3/4 loses 21, filled to 2/3 none.
const SPARE: (usize, usize) = (3, 2);

/// A candidate: the chunk in `slot` may hold the window at its anchor number `anchor`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) slot: u32,
    pub(super) anchor: u8,
}

/// The table.
#[derive(Debug)]
pub(super) struct Anchors {
    /// Zero is an empty cell. Buckets begin at `first`, on a cache line of their own.
    cells: Box<[AtomicU64]>,
    first: usize,
    buckets: u64,
}

impl Anchors {
    /// For `capacity` anchors.
    pub(super) fn new(capacity: usize) -> Self {
        let buckets = (capacity * SPARE.0).div_ceil(SPARE.1 * BUCKET).max(2);
        let cells = zeroed(buckets * BUCKET + LINE / size_of::<AtomicU64>() - 1);
        let first = cells.as_ptr().align_offset(LINE);
        Self { cells, first, buckets: buckets as u64 }
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.cells)
    }

    /// Calls `visit` with every candidate of a fingerprint, newest first.
    #[inline]
    pub(super) fn candidates(&self, fingerprint: u64, mut visit: impl FnMut(Candidate)) {
        let tag = tag(fingerprint);
        for bucket in self.pick(fingerprint) {
            for cell in bucket {
                let word = cell.load(Ordering::Acquire);
                if word & TAG == tag && word != 0 {
                    visit(unpack(word));
                }
            }
        }
    }

    /// Adds a candidate as the newest of its fingerprint; the oldest goes when there are too many.
    pub(super) fn insert(&self, fingerprint: u64, candidate: Candidate) {
        let tag = tag(fingerprint);
        let word = pack(candidate, tag);
        let buckets = self.pick(fingerprint);
        let cells: Vec<&AtomicU64> = buckets.iter().flat_map(|bucket| bucket.iter()).collect();
        let words: Vec<u64> = cells.iter().map(|cell| cell.load(Ordering::Relaxed)).collect();
        let alike = |word: u64| word != 0 && word & TAG == tag;
        if words.contains(&word) {
            return;
        }
        let mut places: Vec<usize> = (0..cells.len()).filter(|&place| alike(words[place])).collect();
        let hole = if places.len() < SAME {
            let load = |bucket: usize| {
                words.chunks(BUCKET).nth(bucket).map_or(BUCKET, |b| b.iter().filter(|&&w| w != 0).count())
            };
            let emptier = usize::from(load(1) < load(0)) * BUCKET;
            // Both full does not happen at the load the table is made for; if it does, another anchor goes.
            let place = (emptier..emptier + BUCKET).find(|&place| words[place] == 0).unwrap_or(BUCKET - 1);
            let position = places.partition_point(|&other| other < place);
            if places.get(position) != Some(&place) {
                places.insert(position, place);
            }
            position
        } else {
            SAME - 1
        };
        // Words only move to later cells, last first, so a reader that goes forward sees each at least once.
        for i in (1..=hole).rev() {
            cells[places[i]].store(words[places[i - 1]], Ordering::Release);
        }
        cells[places[0]].store(word, Ordering::Release);
    }

    /// Removes a candidate, if it is still there.
    pub(super) fn remove(&self, fingerprint: u64, candidate: Candidate) {
        let word = pack(candidate, tag(fingerprint));
        for bucket in self.pick(fingerprint) {
            for cell in bucket {
                if cell.load(Ordering::Relaxed) == word {
                    cell.store(0, Ordering::Release);
                }
            }
        }
    }

    /// The buckets of a fingerprint: two, or the same one and nothing.
    #[inline]
    fn pick(&self, fingerprint: u64) -> [&[AtomicU64]; 2] {
        let scale = |half: u64| ((half * self.buckets) >> 32) as usize;
        let (one, other) = (scale(fingerprint & u64::from(u32::MAX)), scale(fingerprint >> 32));
        let bucket = |number: usize| &self.cells[self.first + number * BUCKET..][..BUCKET];
        [bucket(one), if other == one { &[] } else { bucket(other) }]
    }
}

const TAG: u64 = (1 << 24) - 1;

fn tag(fingerprint: u64) -> u64 {
    fingerprint.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 40
}

fn pack(candidate: Candidate, tag: u64) -> u64 {
    u64::from(candidate.slot) << 32 | (u64::from(candidate.anchor) + 1) << 24 | tag
}

fn unpack(word: u64) -> Candidate {
    Candidate { slot: (word >> 32) as u32, anchor: ((word >> 24) as u8).wrapping_sub(1) }
}

/// Zero words whose memory the system hands out when it is first touched.
fn zeroed(words: usize) -> Box<[AtomicU64]> {
    const { assert!(align_of::<AtomicU64>() == align_of::<u64>()) };
    let plain = Box::into_raw(vec![0_u64; words].into_boxed_slice());
    // SAFETY: AtomicU64 has the size, the alignment (asserted above) and the bit validity of u64, and nobody else holds
    // this memory.
    unsafe { Box::from_raw(plain as *mut [AtomicU64]) }
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
        u64::from_le_bytes(blake3::hash(&i.to_le_bytes()).as_bytes()[..8].try_into().expect("8 bytes"))
    }

    /// A full table still finds every anchor, and an emptied one finds none.
    #[test]
    fn a_table_filled_to_capacity_loses_nothing() {
        let capacity = 40_000;
        let table = Anchors::new(capacity);
        for i in 0..capacity as u32 {
            table.insert(spread(i.into()), Candidate { slot: i, anchor: (i % 255) as u8 });
        }
        for i in 0..capacity as u32 {
            assert!(found(&table, spread(i.into())).contains(&i), "anchor {i}");
        }
        for i in 0..capacity as u32 {
            table.remove(spread(i.into()), Candidate { slot: i, anchor: (i % 255) as u8 });
        }
        assert!(table.cells.iter().all(|cell| cell.load(Ordering::Relaxed) == 0));
    }

    /// One fingerprint keeps its newest candidates, newest first, whatever shares its buckets.
    #[test]
    fn the_newest_candidates_of_a_fingerprint_stay() {
        let table = Anchors::new(64);
        let fingerprint = spread(1);
        for slot in 0..100 {
            table.insert(fingerprint, Candidate { slot, anchor: 0 });
            let expected: Vec<u32> = (0..=slot).rev().take(SAME).collect();
            assert_eq!(found(&table, fingerprint), expected);
        }
        table.remove(fingerprint, Candidate { slot: 97, anchor: 0 });
        assert_eq!(found(&table, fingerprint), [99, 98, 96, 95, 94, 93, 92]);
        table.insert(fingerprint, Candidate { slot: 100, anchor: 0 });
        assert_eq!(found(&table, fingerprint), [100, 99, 98, 96, 95, 94, 93, 92]);
    }

    /// A chunk found by several anchors is told apart by their numbers; the same anchor twice is one.
    #[test]
    fn anchors_of_one_chunk_are_apart() {
        let table = Anchors::new(8);
        for anchor in [3, 0, 254, 3] {
            table.insert(9, Candidate { slot: u32::MAX, anchor });
        }
        let mut anchors = Vec::new();
        table.candidates(9, |candidate| anchors.push((candidate.slot, candidate.anchor)));
        assert_eq!(anchors, [(u32::MAX, 254), (u32::MAX, 0), (u32::MAX, 3)]);
    }
}
