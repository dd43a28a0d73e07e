//! Choices against a full search, and behaviour on what it is for.

use proptest::prelude::*;

use super::super::Uses;
use super::*;

const SLOTS: usize = 32;
const SECOND: u64 = 1_000_000_000;

fn arrival(key: u64) -> Arrival {
    Arrival {
        fingerprint: key.wrapping_mul(0x9e37_79b9_7f4a_7c15),
        tokens: 1,
        position: (key * 997 % 40_000) as u32,
        compute: 1.0,
        head: key.is_multiple_of(3),
        unfull: key.is_multiple_of(2),
        parent: None,
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(u32, u64),
    Hit(u32),
    Remove(u32),
    /// Its copy is at that place now.
    Copy(u32, usize),
    /// Loading from that place takes so long.
    Below(usize, f64),
    Pop,
    PopAndRestore,
}

fn steps() -> impl Strategy<Value = Vec<(Step, u64)>> {
    let slot = 0..SLOTS as u32;
    let step = prop_oneof![
        4 => (slot.clone(), 0..64_u64).prop_map(|(slot, key)| Step::Insert(slot, key)),
        4 => slot.clone().prop_map(Step::Hit),
        1 => slot.clone().prop_map(Step::Remove),
        2 => (slot, 0..PLACES).prop_map(|(slot, place)| Step::Copy(slot, place)),
        1 => (1..PLACES, 0.0..3.0).prop_map(|(place, load)| Step::Below(place, load)),
        2 => Just(Step::Pop),
        1 => Just(Step::PopAndRestore),
    ];
    prop::collection::vec((step, 0..20 * SECOND), 1..400)
}

proptest! {
    /// The victim's list comes first in the order of worth of all lists that have members, every chunk is in the list of
    /// its class and copy, and no list holds a chunk that is younger than its ages, or much older. Worth is what a plain
    /// search finds: the index of each chunk times what memory saves over its copy.
    #[test]
    fn the_victim_is_the_least_worth_of_all(steps in steps()) {
        let mut policy = Adaptive::new(SLOTS);
        let uses = Uses::new(SLOTS, CAP);
        let (mut inside, mut known) = ([false; SLOTS], [false; SLOTS]);
        let (mut copies, mut loads) = ([0; SLOTS], [f64::INFINITY; PLACES]);
        let mut now = 0;
        for (step, later) in steps {
            now += later;
            match step {
                Step::Insert(slot, key) if !inside[slot as usize] => {
                    uses.enter(slot, now);
                    policy.insert(slot, &arrival(key), &uses);
                    (inside[slot as usize], known[slot as usize], copies[slot as usize]) = (true, true, 0);
                }
                Step::Hit(slot) if inside[slot as usize] => uses.hit(slot, now),
                Step::Remove(slot) if inside[slot as usize] => {
                    policy.remove(slot, &uses);
                    inside[slot as usize] = false;
                    prop_assert_eq!(policy.facts[slot as usize].seen, tick(uses.touched(slot)));
                }
                Step::Copy(slot, place) if known[slot as usize] => {
                    policy.set_copy(slot, place, &uses);
                    copies[slot as usize] = place;
                }
                Step::Below(place, load) => {
                    policy.set_below(place, Below { load, found: 1.0 });
                    loads[place] = load;
                }
                Step::Pop | Step::PopAndRestore => {
                    policy.reorder();
                    let indices = policy.reuse.indices();
                    let popped = policy.pop(&uses);
                    prop_assert_eq!(popped.is_some(), inside.contains(&true));
                    let Some(slot) = popped else { continue };
                    prop_assert!(inside[slot as usize]);
                    inside[slot as usize] = false;
                    let place = |slot: u32| policy.places[usize::from(policy.facts[slot as usize].list)];
                    let least = policy.lowest as u16;
                    let worth = |list: usize, copy: usize| {
                        let (class, step) = (list / STEPS % CLASSES, list % STEPS);
                        let compute = policy.compute[class % DEPTHS].0;
                        indices[class][step] * compute.min(loads[copy])
                    };
                    let gone = worth(usize::from(policy.order[policy.lowest]), copies[slot as usize]);
                    for other in (0..SLOTS as u32).filter(|&slot| inside[slot as usize]) {
                        prop_assert!(least <= place(other), "{slot} went before {other}");
                        let facts = &policy.facts[other as usize];
                        prop_assert_eq!(usize::from(facts.copy), copies[other as usize]);
                        let kept = worth(facts.list.into(), copies[other as usize]);
                        prop_assert!(gone <= kept * (1.0 + 1e-6), "{} went before {}", gone, kept);
                        let (class, step) = (usize::from(facts.list) / STEPS % CLASSES, usize::from(facts.list) % STEPS);
                        prop_assert_eq!(usize::from(facts.list) / LISTS, usize::from(facts.copy));
                        prop_assert_eq!(class, facts.class());
                        let age = between(facts.seen, tick(policy.now));
                        prop_assert!(step == 0 || age >= end_of_step(step - 1));
                        // A younger one in front of it may hold it back for as long as a step lasts.
                        let late = end_of_step(step) / 8 * 17 + LOOK + (1 << TICK);
                        prop_assert!(step + 1 == STEPS || age <= late);
                    }
                    if matches!(step, Step::PopAndRestore) {
                        policy.restore(slot, &uses);
                        inside[slot as usize] = true;
                        prop_assert_eq!(policy.lists[usize::from(policy.facts[slot as usize].list)].oldest, Some(slot));
                    }
                }
                _ => {}
            }
            prop_assert_eq!(policy.len(), inside.iter().filter(|&&there| there).count());
        }
    }
}

/// Without experience, and with chunks that are all alike, the least recently used goes.
#[test]
fn newcomers_go_by_age() {
    let mut policy = Adaptive::new(8);
    let uses = Uses::new(8, CAP);
    for slot in 0..8 {
        uses.enter(slot, u64::from(slot) * 10 * SECOND);
        policy.insert(
            slot,
            &Arrival {
                fingerprint: slot.into(),
                ..arrival(1)
            },
            &uses,
        );
    }
    let popped: Vec<u32> = std::iter::from_fn(|| policy.pop(&uses)).collect();
    assert_eq!(popped, [0, 1, 2, 3, 4, 5, 6, 7]);
}

/// What a chunk was is remembered when it comes back: that is what tells a document that is asked for again and again from
/// one that passes by.
#[test]
fn a_chunk_that_comes_back_is_known() {
    let mut policy = Adaptive::new(4);
    let uses = Uses::new(4, CAP);
    for round in 0..6_u64 {
        uses.enter(0, round * SECOND);
        policy.insert(0, &arrival(5), &uses);
        assert_eq!(policy.facts[0].past.uses, round as u8);
        assert_eq!(policy.pop(&uses), Some(0));
    }
    let pace = f64::from(policy.facts[0].past.pace) / 256.0;
    assert!((pace - (SECOND as f64).log2()).abs() < 0.5, "{pace}");
}

/// Of chunks that are alike, that goes first which can be loaded in less time than it takes to compute it; a copy that is
/// slower, that was lost, or of whose tier nothing is known changes nothing.
#[test]
fn a_chunk_with_a_copy_below_goes_before_an_equal_one() {
    let order = |below: Option<Below>, lost: bool| {
        let mut policy = Adaptive::new(4);
        let uses = Uses::new(4, CAP);
        if let Some(below) = below {
            policy.set_below(1, below);
        }
        for slot in 0..4 {
            uses.enter(slot, u64::from(slot));
            let fingerprint = slot.into();
            policy.insert(
                slot,
                &Arrival {
                    fingerprint,
                    ..arrival(1)
                },
                &uses,
            );
        }
        policy.set_copy(2, 1, &uses);
        if lost {
            policy.set_copy(2, 0, &uses);
        }
        policy.reorder();
        std::iter::from_fn(|| policy.pop(&uses)).collect::<Vec<u32>>()
    };
    let (fast, slow) = (0.5, 1.5);
    let below = |load, found| Some(Below { load, found });
    assert_eq!(order(below(fast, 1.0), false), [2, 0, 1, 3]);
    assert_eq!(order(below(fast, 0.5), false), [2, 0, 1, 3]);
    for (below, lost) in [
        (below(slow, 1.0), false),
        (below(fast, 0.0), false),
        (below(fast, 1.0), true),
        (None, false),
    ] {
        let goes = order(below, lost);
        let others: Vec<u32> = goes.iter().copied().filter(|&slot| slot != 2).collect();
        assert_eq!(others, [0, 1, 3], "{below:?}");
        assert_ne!(goes[0], 2, "{below:?}, lost: {lost}");
    }
}
