use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// Ranges tile the arena, free neighbours are joined, and the lists hold exactly the free ranges.
fn check(allocator: &Allocator) {
    let mut offset = 0;
    let mut id = (0..allocator.ranges.len() as u32)
        .filter(|id| !spares(allocator).contains(id))
        .find(|&id| allocator.ranges[id as usize].previous == NONE);
    let (mut used, mut free, mut was_free) = (0, Vec::new(), false);
    while let Some(at) = id {
        let range = allocator.ranges[at as usize];
        assert_eq!(range.offset, offset);
        assert!(range.units > 0);
        let is_free = allocator.is_free(at);
        assert!(!(is_free && was_free), "free neighbours are joined");
        if is_free {
            free.push(at);
        } else {
            used += u64::from(range.units);
        }
        offset += range.units;
        was_free = is_free;
        id = (range.next != NONE).then_some(range.next);
    }
    assert_eq!((offset, used), (allocator.units, allocator.used_units));
    let mut listed = Vec::new();
    for (class_number, &head) in allocator.heads.iter().enumerate() {
        assert_eq!(
            allocator.occupied[class_number / 64] >> (class_number % 64) & 1 == 1,
            head != NONE
        );
        let mut at = head;
        while at != NONE {
            assert_eq!(class(allocator.ranges[at as usize].units), class_number);
            listed.push(at);
            at = allocator.ranges[at as usize].next_free;
        }
    }
    listed.sort_unstable();
    free.sort_unstable();
    assert_eq!(listed, free);
}

fn spares(allocator: &Allocator) -> Vec<u32> {
    let mut spares = Vec::new();
    let mut at = allocator.spare;
    while at != NONE {
        spares.push(at);
        at = allocator.ranges[at as usize].next;
    }
    spares
}

/// Classes are ordered by size, and a class that is said to fit does.
#[test]
fn classes_are_monotone_and_fit() {
    let sizes: Vec<u32> = (1..5000)
        .chain((5..31).flat_map(|log| [(1 << log) - 1, 1 << log, (1 << log) + 1]))
        .collect();
    for &units in &sizes {
        assert!(class(units) < CLASSES);
        assert!(class(units) <= class(units + 1));
        assert!(class_that_fits(units) >= class(units));
        for &other in &sizes {
            if class(other) >= class_that_fits(units) {
                assert!(other >= units, "{other} is in a class that fits {units}");
            }
        }
    }
}

/// A pool sized for whole records keeps exactly that many, again and again, whatever sizes came in between.
#[test]
fn mixed_sizes_strand_nothing() {
    let record = 2051 * UNIT;
    let mut allocator = Allocator::new(8 * record);
    for round in 0..50u32 {
        let ids: Vec<u32> = (0..8)
            .map(|_| allocator.alloc(record).expect("room for eight"))
            .collect();
        assert_eq!(allocator.alloc(1), None);
        ids.into_iter().for_each(|id| allocator.free(id));
        let mut tails = Vec::new();
        let mut size = round + 1;
        while let Some(id) = allocator.alloc(size as usize * UNIT) {
            tails.push(id);
            size = size * 7 % 311 + 1;
        }
        tails.into_iter().rev().for_each(|id| allocator.free(id));
        check(&allocator);
    }
    assert_eq!(allocator.used(), 0);
}

/// Requests of nothing take a unit, requests beyond the arena take nothing.
#[test]
fn extremes() {
    let mut allocator = Allocator::new(UNIT + UNIT / 2);
    assert_eq!(allocator.capacity(), UNIT);
    assert_eq!(allocator.alloc(UNIT + 1), None);
    assert_eq!(allocator.alloc(usize::MAX), None);
    let id = allocator.alloc(0).expect("one unit");
    assert_eq!(allocator.alloc(0), None);
    allocator.free(id);
    check(&allocator);
    assert_eq!(Allocator::new(10).alloc(1), None);
}

proptest! {
    /// Against a map of what is taken: nothing overlaps, nothing leaks, nothing is refused that the whole arena could hold.
    #[test]
    fn behaves_like_a_set_of_ranges(steps in prop::collection::vec((any::<bool>(), 1..40usize, any::<prop::sample::Index>()), 1..300)) {
        const UNITS: usize = 200;
        let mut allocator = Allocator::new(UNITS * UNIT);
        let mut taken: HashMap<u32, (usize, usize)> = HashMap::new();
        for (alloc, units, pick) in steps {
            if alloc {
                match allocator.alloc(units * UNIT) {
                    Some(id) => {
                        let start = allocator.offset(id) as usize;
                        for &(other, len) in taken.values() {
                            prop_assert!(start + units <= other || other + len <= start, "overlap");
                        }
                        prop_assert!(start + units <= UNITS);
                        prop_assert!(taken.insert(id, (start, units)).is_none());
                    }
                    None => {
                        let mut map = [false; UNITS];
                        for &(start, len) in taken.values() {
                            map[start..start + len].fill(true);
                        }
                        let longest = map.split(|&used| used).map(<[bool]>::len).max().unwrap_or(0);
                        // Good fit looks at a few ranges of the request's own class only, so it may pass by a fitting one,
                        // but never by one of the next class up.
                        prop_assert!(class(longest as u32) <= class(units as u32), "{units} refused beside {longest}");
                    }
                }
            } else if !taken.is_empty() {
                let mut ids: Vec<u32> = taken.keys().copied().collect();
                ids.sort_unstable();
                let id = ids[pick.index(ids.len())];
                taken.remove(&id);
                allocator.free(id);
            }
            prop_assert_eq!(allocator.used(), taken.values().map(|(_, units)| units * UNIT).sum::<usize>());
            check(&allocator);
        }
        for id in taken.into_keys() {
            allocator.free(id);
        }
        check(&allocator);
        prop_assert!(allocator.alloc(UNITS * UNIT).is_some(), "all of it again");
    }
}
