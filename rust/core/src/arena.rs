//! The arena: all records in one mapping, which the system commits page by page as they are first written.
//!
//! The allocator of ranges in it is a two-level segregated fit (Masmano et al., ECRTS 2004): free ranges are listed by size class,
//! a bitmap finds a class that fits, neighbours coalesce when freed. Both operations touch a bounded number of ranges, and
//! what mixed sizes leave over is joined again. Its bookkeeping lies outside of the mapping.

use crate::error::Result;
use crate::mapping::Mapping;

/// Granularity and alignment of records in the arena, bytes.
pub(crate) const UNIT: usize = 512;

/// Memory of the records. Reads and writes go through raw pointers; pins decide who may use which part.
#[derive(Debug)]
pub(crate) struct Arena(Mapping);

impl Arena {
    pub(crate) fn new(len: usize) -> Result<Self> {
        Mapping::new(len).map(Self)
    }

    /// Start and bytes of the whole.
    pub(crate) fn range(&self) -> (*const u8, usize) {
        (self.0.base(), self.0.len())
    }

    /// Start of `len` bytes at `offset` units.
    pub(crate) fn at(&self, offset: u32, len: usize) -> *mut u8 {
        let start = offset as usize * UNIT;
        assert!(
            start <= self.0.len() && len <= self.0.len() - start,
            "a record lies within the arena"
        );
        // SAFETY: just checked to be within the mapping.
        unsafe { self.0.base().add(start) }
    }
}

const NONE: u32 = u32::MAX;
/// In `previous_free` of a range that is in use.
const USED: u32 = u32::MAX - 1;

/// Each power of two is cut in this many classes.
const SPLIT_BITS: u32 = 4;
const SPLIT: u32 = 1 << SPLIT_BITS;
const CLASSES: usize = ((32 - SPLIT_BITS as usize) + 1) * SPLIT as usize;
/// Ranges looked at in a class whose members may or may not fit.
const TRIES: usize = 8;

/// A range of the arena, in units. Ranges tile the arena.
#[derive(Clone, Copy, Debug)]
struct Range {
    offset: u32,
    units: u32,
    previous: u32,
    next: u32,
    previous_free: u32,
    next_free: u32,
}

/// Which ranges are free.
#[derive(Debug)]
pub(crate) struct Allocator {
    ranges: Vec<Range>,
    /// Unused entries of `ranges`, linked through `next`.
    spare: u32,
    heads: [u32; CLASSES],
    occupied: [u64; CLASSES.div_ceil(64)],
    used_units: u64,
    units: u32,
}

/// Class of a free range of that many units.
fn class(units: u32) -> usize {
    if units < SPLIT {
        return units as usize;
    }
    let log = units.ilog2();
    ((log - SPLIT_BITS + 1) * SPLIT + (units >> (log - SPLIT_BITS)) % SPLIT) as usize
}

/// First class whose members all have at least that many units.
fn class_that_fits(units: u32) -> usize {
    if units < SPLIT {
        return units as usize;
    }
    class(units.saturating_add((1 << (units.ilog2() - SPLIT_BITS)) - 1))
}

impl Allocator {
    /// For `bytes`, rounded down to whole units.
    pub(crate) fn new(bytes: usize) -> Self {
        let units = u32::try_from(bytes / UNIT).unwrap_or(USED - 1);
        let mut allocator = Self {
            ranges: Vec::new(),
            spare: NONE,
            heads: [NONE; CLASSES],
            occupied: [0; CLASSES.div_ceil(64)],
            used_units: 0,
            units,
        };
        if units > 0 {
            let whole = allocator.new_range(Range {
                offset: 0,
                units,
                previous: NONE,
                next: NONE,
                previous_free: NONE,
                next_free: NONE,
            });
            allocator.list(whole);
        }
        allocator
    }

    /// Takes room for `bytes`; the result names it until `free`.
    pub(crate) fn alloc(&mut self, bytes: usize) -> Option<u32> {
        let units = u32::try_from(bytes.div_ceil(UNIT).max(1)).ok()?;
        if units > self.units {
            return None;
        }
        let found = self.fit(units)?;
        self.unlist(found);
        let range = self.ranges[found as usize];
        if range.units > units {
            let rest = self.new_range(Range {
                offset: range.offset + units,
                units: range.units - units,
                previous: found,
                next: range.next,
                previous_free: NONE,
                next_free: NONE,
            });
            if range.next != NONE {
                self.ranges[range.next as usize].previous = rest;
            }
            let taken = &mut self.ranges[found as usize];
            taken.units = units;
            taken.next = rest;
            self.list(rest);
        }
        self.used_units += u64::from(units);
        Some(found)
    }

    /// Gives room back.
    pub(crate) fn free(&mut self, id: u32) {
        debug_assert_eq!(self.ranges[id as usize].previous_free, USED);
        self.used_units -= u64::from(self.ranges[id as usize].units);
        let mut kept = id;
        let Range { previous, next, .. } = self.ranges[id as usize];
        if next != NONE && self.is_free(next) {
            self.unlist(next);
            self.join(kept, next);
        }
        if previous != NONE && self.is_free(previous) {
            self.unlist(previous);
            self.join(previous, kept);
            kept = previous;
        }
        self.list(kept);
    }

    /// Place of allocated room, in units.
    pub(crate) fn offset(&self, id: u32) -> u32 {
        self.ranges[id as usize].offset
    }

    /// Bytes in use, in whole units.
    pub(crate) fn used(&self) -> usize {
        self.used_units as usize * UNIT
    }

    /// Bytes there are.
    pub(crate) fn capacity(&self) -> usize {
        self.units as usize * UNIT
    }

    /// Memory of the bookkeeping.
    pub(crate) fn bytes(&self) -> usize {
        self.ranges.capacity() * size_of::<Range>() + size_of::<Self>()
    }

    /// A free range of at least `units`. Ranges of the request's own class come first, so that records of one size take
    /// each other's place exactly.
    fn fit(&self, units: u32) -> Option<u32> {
        let mut candidate = self.heads[class(units)];
        for _ in 0..TRIES {
            if candidate == NONE {
                break;
            }
            if self.ranges[candidate as usize].units >= units {
                return Some(candidate);
            }
            candidate = self.ranges[candidate as usize].next_free;
        }
        let from = class_that_fits(units);
        let (mut word, mut mask) = (from / 64, !0u64 << (from % 64));
        while word < self.occupied.len() {
            let bits = self.occupied[word] & mask;
            if bits != 0 {
                return Some(self.heads[word * 64 + bits.trailing_zeros() as usize]);
            }
            (word, mask) = (word + 1, !0);
        }
        None
    }

    fn is_free(&self, id: u32) -> bool {
        self.ranges[id as usize].previous_free != USED
    }

    fn list(&mut self, id: u32) {
        let class = class(self.ranges[id as usize].units);
        let head = self.heads[class];
        let range = &mut self.ranges[id as usize];
        range.previous_free = NONE;
        range.next_free = head;
        if head != NONE {
            self.ranges[head as usize].previous_free = id;
        }
        self.heads[class] = id;
        self.occupied[class / 64] |= 1 << (class % 64);
    }

    fn unlist(&mut self, id: u32) {
        let Range {
            units,
            previous_free,
            next_free,
            ..
        } = self.ranges[id as usize];
        let class = class(units);
        if next_free != NONE {
            self.ranges[next_free as usize].previous_free = previous_free;
        }
        if previous_free != NONE {
            self.ranges[previous_free as usize].next_free = next_free;
        } else {
            self.heads[class] = next_free;
            if next_free == NONE {
                self.occupied[class / 64] &= !(1 << (class % 64));
            }
        }
        self.ranges[id as usize].previous_free = USED;
    }

    /// Lengthens `left` by `right`, its neighbour, whose entry becomes spare. Neither is listed.
    fn join(&mut self, left: u32, right: u32) {
        let Range { units, next, .. } = self.ranges[right as usize];
        self.ranges[left as usize].units += units;
        self.ranges[left as usize].next = next;
        if next != NONE {
            self.ranges[next as usize].previous = left;
        }
        self.ranges[right as usize].next = self.spare;
        self.spare = right;
    }

    fn new_range(&mut self, range: Range) -> u32 {
        if self.spare == NONE {
            self.ranges.push(range);
            return (self.ranges.len() - 1) as u32;
        }
        let id = self.spare;
        self.spare = self.ranges[id as usize].next;
        self.ranges[id as usize] = range;
        id
    }
}

#[cfg(test)]
mod tests;
