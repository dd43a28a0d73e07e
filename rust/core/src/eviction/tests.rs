//! Every policy against a naive model that recomputes its choice from the whole history.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;

const SLOTS: usize = 24;

/// Slots stand for keys.
fn arrival(slot: u32) -> Arrival {
    Arrival {
        fingerprint: slot.into(),
        tokens: 1,
        ..Arrival::default()
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(u32),
    Hit(u32),
    Remove(u32),
    Pop,
    /// Pop and put back, as for a chunk that was pinned.
    PopAndRestore,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let slot = 0..SLOTS as u32;
    let step = prop_oneof![
        4 => slot.clone().prop_map(Step::Insert),
        4 => slot.clone().prop_map(Step::Hit),
        1 => slot.prop_map(Step::Remove),
        2 => Just(Step::Pop),
        1 => Just(Step::PopAndRestore),
    ];
    prop::collection::vec(step, 1..400)
}

/// A policy as its paper describes it, on plain vectors: front = newest.
trait Model {
    fn insert(&mut self, slot: u32, uses: &Uses);
    fn restore(&mut self, slot: u32, uses: &Uses);
    fn remove(&mut self, slot: u32);
    fn pop(&mut self, uses: &Uses) -> Option<u32>;
}

#[derive(Default)]
struct NaiveFifo(VecDeque<u32>);

impl Model for NaiveFifo {
    fn insert(&mut self, slot: u32, _: &Uses) {
        self.0.push_front(slot);
    }

    fn restore(&mut self, slot: u32, _: &Uses) {
        self.0.push_back(slot);
    }

    fn remove(&mut self, slot: u32) {
        self.0.retain(|&other| other != slot);
    }

    fn pop(&mut self, _: &Uses) -> Option<u32> {
        self.0.pop_back()
    }
}

#[derive(Default)]
struct NaiveLru(Vec<u32>);

impl Model for NaiveLru {
    fn insert(&mut self, slot: u32, _: &Uses) {
        self.0.push(slot);
    }

    fn restore(&mut self, slot: u32, _: &Uses) {
        self.0.push(slot);
    }

    fn remove(&mut self, slot: u32) {
        self.0.retain(|&other| other != slot);
    }

    fn pop(&mut self, uses: &Uses) -> Option<u32> {
        let slot = self
            .0
            .iter()
            .copied()
            .min_by_key(|&slot| uses.touched(slot))?;
        self.remove(slot);
        Some(slot)
    }
}

#[derive(Default)]
struct NaiveSieve {
    queue: VecDeque<u32>,
    /// The chunk under the hand; none is the oldest.
    hand: Option<u32>,
}

impl NaiveSieve {
    fn newer(&self, slot: u32) -> Option<u32> {
        let at = self.queue.iter().position(|&other| other == slot)?;
        at.checked_sub(1).map(|at| self.queue[at])
    }
}

impl Model for NaiveSieve {
    fn insert(&mut self, slot: u32, _: &Uses) {
        self.queue.push_front(slot);
    }

    fn restore(&mut self, slot: u32, _: &Uses) {
        let next = self.hand.or(self.queue.back().copied());
        let at = next.map_or(0, |next| {
            self.queue
                .iter()
                .position(|&other| other == next)
                .expect("there")
                + 1
        });
        self.queue.insert(at, slot);
        self.hand = Some(slot);
    }

    fn remove(&mut self, slot: u32) {
        if self.hand == Some(slot) {
            self.hand = self.newer(slot);
        }
        self.queue.retain(|&other| other != slot);
    }

    fn pop(&mut self, uses: &Uses) -> Option<u32> {
        let mut slot = self.hand.or(self.queue.back().copied())?;
        while uses.hits(slot) > 0 {
            uses.set_hits(slot, 0);
            slot = self.newer(slot).or(self.queue.back().copied())?;
        }
        self.hand = self.newer(slot);
        self.queue.retain(|&other| other != slot);
        Some(slot)
    }
}

#[derive(Default)]
struct NaiveS3 {
    small: VecDeque<u32>,
    main: VecDeque<u32>,
    in_main: HashMap<u32, bool>,
    /// Slots that left the small queue, newest first; slots stand for keys in this test.
    ghosts: VecDeque<u32>,
}

impl Model for NaiveS3 {
    fn insert(&mut self, slot: u32, _: &Uses) {
        let reach = self.main.len().max(1);
        let known = self.ghosts.iter().position(|&ghost| ghost == slot);
        let lately = known.is_some_and(|age| age < reach);
        if lately {
            // The others keep their age, so the place stays as a gap.
            self.ghosts[known.expect("known")] = u32::MAX;
        }
        self.in_main.insert(slot, lately);
        if lately {
            &mut self.main
        } else {
            &mut self.small
        }
        .push_front(slot);
    }

    fn restore(&mut self, slot: u32, _: &Uses) {
        if self.in_main[&slot] {
            &mut self.main
        } else {
            &mut self.small
        }
        .push_back(slot);
    }

    fn remove(&mut self, slot: u32) {
        self.small.retain(|&other| other != slot);
        self.main.retain(|&other| other != slot);
    }

    fn pop(&mut self, uses: &Uses) -> Option<u32> {
        loop {
            let len = self.small.len() + self.main.len();
            if self.main.is_empty() || !self.small.is_empty() && self.small.len() * 10 >= len {
                let slot = self.small.pop_back()?;
                if uses.hits(slot) <= 1 {
                    if let Some(known) = self.ghosts.iter().position(|&ghost| ghost == slot) {
                        self.ghosts[known] = u32::MAX;
                    }
                    self.ghosts.push_front(slot);
                    return Some(slot);
                }
                uses.set_hits(slot, 0);
                self.in_main.insert(slot, true);
                self.main.push_front(slot);
            } else {
                let slot = self.main.pop_back()?;
                if uses.hits(slot) == 0 {
                    return Some(slot);
                }
                uses.set_hits(slot, uses.hits(slot) - 1);
                self.main.push_front(slot);
            }
        }
    }
}

/// Runs both over the same steps, each with uses of its own, and compares every choice.
fn compare(kind: PolicyKind, mut model: impl Model, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut policy = kind.build(SLOTS);
    let (uses, model_uses) = (
        Uses::new(SLOTS, kind.hit_cap()),
        Uses::new(SLOTS, kind.hit_cap()),
    );
    let mut inside = [false; SLOTS];
    for (now, step) in (1..).zip(steps) {
        match *step {
            Step::Insert(slot) if !inside[slot as usize] => {
                uses.enter(slot, now);
                model_uses.enter(slot, now);
                policy.insert(slot, &arrival(slot), &uses);
                model.insert(slot, &model_uses);
                inside[slot as usize] = true;
            }
            Step::Hit(slot) if inside[slot as usize] => {
                uses.hit(slot, now);
                model_uses.hit(slot, now);
            }
            Step::Remove(slot) if inside[slot as usize] => {
                policy.remove(slot, &uses);
                model.remove(slot);
                inside[slot as usize] = false;
            }
            Step::Pop | Step::PopAndRestore => {
                let popped = policy.pop(&uses);
                prop_assert_eq!(popped, model.pop(&model_uses), "at step {}", now);
                if let Some(slot) = popped {
                    prop_assert!(inside[slot as usize]);
                    inside[slot as usize] = matches!(step, Step::PopAndRestore);
                    if inside[slot as usize] {
                        policy.restore(slot, &uses);
                        model.restore(slot, &model_uses);
                    }
                }
            }
            _ => {}
        }
        prop_assert_eq!(policy.len(), inside.iter().filter(|&&there| there).count());
    }
    Ok(())
}

proptest! {
    #[test]
    fn fifo_is_the_naive_one(steps in steps()) {
        compare(PolicyKind::Fifo, NaiveFifo::default(), &steps)?;
    }

    #[test]
    fn lru_is_the_naive_one(steps in steps()) {
        compare(PolicyKind::Lru, NaiveLru::default(), &steps)?;
    }

    #[test]
    fn sieve_is_the_naive_one(steps in steps()) {
        compare(PolicyKind::Sieve, NaiveSieve::default(), &steps)?;
    }

    #[test]
    fn s3_fifo_is_the_naive_one(steps in steps()) {
        compare(PolicyKind::S3Fifo, NaiveS3::default(), &steps)?;
    }

    /// The victim has the fewest hits of all; which of several is up to the list.
    #[test]
    fn lfu_evicts_a_least_used_one(steps in steps()) {
        let mut policy = PolicyKind::Lfu.build(SLOTS);
        let uses = Uses::new(SLOTS, PolicyKind::Lfu.hit_cap());
        let mut inside = [false; SLOTS];
        for (now, step) in (1..).zip(steps) {
            match step {
                Step::Insert(slot) if !inside[slot as usize] => {
                    uses.enter(slot, now);
                    policy.insert(slot, &arrival(slot), &uses);
                    inside[slot as usize] = true;
                }
                Step::Hit(slot) => uses.hit(slot, now),
                Step::Remove(slot) if inside[slot as usize] => {
                    policy.remove(slot, &uses);
                    inside[slot as usize] = false;
                }
                Step::Pop | Step::PopAndRestore => {
                    let popped = policy.pop(&uses);
                    let least = (0..SLOTS as u32).filter(|&slot| inside[slot as usize]).map(|slot| uses.hits(slot)).min();
                    prop_assert_eq!(popped.map(|slot| uses.hits(slot)), least);
                    if let Some(slot) = popped {
                        prop_assert!(inside[slot as usize]);
                        inside[slot as usize] = matches!(step, Step::PopAndRestore);
                        if inside[slot as usize] {
                            policy.restore(slot, &uses);
                            prop_assert_eq!(policy.pop(&uses), Some(slot), "restored where it goes soonest");
                            policy.restore(slot, &uses);
                        }
                    }
                }
                _ => {}
            }
            prop_assert_eq!(policy.len(), inside.iter().filter(|&&there| there).count());
        }
    }
}

/// Names are those of the configuration, in any case; others are refused with the list.
#[test]
fn names() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.as_str().to_uppercase().parse(), Ok(kind));
    }
    let error = "arc".parse::<PolicyKind>().expect_err("not built");
    assert!(
        error.to_string().contains("\"arc\"") && error.to_string().contains("s3-fifo"),
        "{error}"
    );
}

/// Chunks that are looked at once don't push out those in use: what S3-FIFO and SIEVE are for.
#[test]
fn scans_pass_by() {
    for kind in [PolicyKind::S3Fifo, PolicyKind::Sieve, PolicyKind::Lfu] {
        let mut policy = kind.build(SLOTS);
        let uses = Uses::new(SLOTS, kind.hit_cap());
        for slot in 0..10 {
            uses.enter(slot, 0);
            policy.insert(slot, &arrival(slot), &uses);
        }
        for now in 1..4 {
            (0..4).for_each(|slot| uses.hit(slot, now));
        }
        let popped: Vec<u32> = (0..6).filter_map(|_| policy.pop(&uses)).collect();
        assert!(
            popped.iter().all(|&slot| slot >= 4),
            "{kind} popped {popped:?}"
        );
    }
}
