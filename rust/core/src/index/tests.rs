use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

fn key(n: u32) -> Key {
    *blake3::hash(&n.to_le_bytes()).as_bytes()
}

/// As many keys as it was made for go in, at any size, and each is found at its slot; a stash takes what buckets can't.
#[test]
fn holds_what_it_was_made_for() {
    for count in [1, 2, 7, 100, 200_000] {
        let table = SlotTable::new(count as usize).expect("memory");
        assert!(
            (0..count).all(|n| table.insert(&key(n), n)),
            "room for {count}"
        );
        assert!((0..count).all(|n| table.find(&key(n), |slot| slot == n) == Some(n)));
        (0..count).for_each(|n| table.remove(&key(n), n));
        assert!((0..count).all(|n| table.find(&key(n), |_| true).is_none()));
    }
}

/// Keys that share both buckets and the tag overflow into the stash, and after that are refused; freeing makes room again.
#[test]
fn the_stash_takes_the_overflow() {
    let table = SlotTable::new(64).expect("memory");
    let same = key(5);
    let fits = (0..100).filter(|&slot| table.insert(&same, slot)).count() as u32;
    let buckets = if std::ptr::eq(table.choices(&same)[0], table.choices(&same)[1]) {
        1
    } else {
        2
    };
    assert_eq!(fits as usize, WAYS * (buckets + 1));
    assert!((0..fits).all(|slot| table.find(&same, |found| found == slot) == Some(slot)));
    table.remove(&same, fits - 1);
    assert!(table.insert(&same, 100));
    assert_eq!(table.find(&same, |found| found == 100), Some(100));
    (0..fits - 1)
        .chain([100])
        .for_each(|slot| table.remove(&same, slot));
    assert_eq!(table.stashed.load(Ordering::Relaxed), 0);
    assert_eq!(table.find(&same, |_| true), None);
}

proptest! {
    /// Against a hash map, over inserts, replacements and removals.
    #[test]
    fn behaves_like_a_map(steps in prop::collection::vec((0..3u8, 0..40u32), 1..200)) {
        let table = SlotTable::new(40).expect("memory");
        let mut model: HashMap<u32, u32> = HashMap::new();
        for (next, (step, n)) in (0..).zip(steps) {
            match (step, model.get(&n).copied()) {
                (0, None) => {
                    prop_assert!(table.insert(&key(n), next));
                    model.insert(n, next);
                }
                (1, Some(old)) => {
                    table.replace(&key(n), old, next);
                    model.insert(n, next);
                }
                (2, Some(old)) => {
                    table.remove(&key(n), old);
                    model.remove(&n);
                }
                _ => {}
            }
            for n in 0..40 {
                prop_assert_eq!(table.find(&key(n), |_| true), model.get(&n).copied());
            }
        }
    }
}
