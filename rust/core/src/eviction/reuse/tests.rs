//! The life table against one made from whole histories, and the index against what it means.

use proptest::prelude::*;

use super::*;

const CLASSES: usize = 4;

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A key is used, as a class, some time later.
    Use(u32, usize, u64),
    /// Time passes, in nanoseconds.
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Powers of two and their neighbours: where buckets end.
    let time = (20..46_u32, -1..2_i64).prop_map(|(bits, off)| ((1_i64 << bits) + off) as u64);
    let step = prop_oneof![
        2 => (0..8_u32, 0..CLASSES, time.clone()).prop_map(|(key, class, time)| Step::Use(key, class, time)),
        1 => time.prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..60)
}

proptest! {
    /// Whatever was watched for some time counts as having reached every age up to then, and as used where it was.
    #[test]
    fn the_life_table_is_that_of_whole_histories(steps in steps()) {
        let mut reuse = Reuse::new(CLASSES, 2, 1000);
        // (class, since, end), the last of each key open.
        let mut open: HashMap<u32, (usize, u64)> = HashMap::new();
        let mut closed: Vec<(usize, u64, bool)> = Vec::new();
        let (mut now, mut used) = (0, Vec::new());
        for step in steps {
            match step {
                Step::Use(key, class, time) => {
                    now += time;
                    if let Some((class, since)) = open.insert(key, (class, now)) {
                        closed.push((class, now - since, true));
                    }
                    reuse.used(key, None, now);
                    reuse.wait(key, class, now, 0);
                }
                Step::Pass(time) => {
                    now += time;
                    reuse.advance(now, |_, _| false, &mut used);
                    open.retain(|_, &mut (class, since)| {
                        // Who waits for longer than the last bucket is not watched any more.
                        let over = now - since >= end_of(AGES - 1);
                        if over {
                            closed.push((class, now - since, false));
                        }
                        !over
                    });
                }
            }
        }
        reuse.advance(now, |_, _| false, &mut used);
        prop_assert!(used.is_empty());
        closed.extend(open.values().map(|&(class, since)| (class, now - since, false)));
        let mut table = vec![[(0.0, 0.0); AGES]; CLASSES];
        for (class, age, was_used) in closed {
            for reached in &mut table[class][..=age_of(age)] {
                reached.0 += 1.0;
            }
            table[class][age_of(age)].1 += f64::from(u8::from(was_used));
        }
        let found: Vec<_> = reuse.table.iter().map(|row| row.map(|lives| (lives.reached, lives.used))).collect();
        prop_assert_eq!(found, table);
    }

    /// A bucket's steps follow each other without gaps, and hold the ages that end where they say.
    #[test]
    fn steps_of_age_partition_time(age in 0..1_u64 << 46) {
        let step = step_of(age);
        prop_assert!(step + 1 == STEPS || age < end_of_step(step));
        prop_assert!(step == 0 || age >= end_of_step(step - 1));
    }

    /// Over all waits: brute force over every age to begin and every age to give up at.
    #[test]
    fn the_index_is_the_best_ratio(chances in prop::array::uniform20(0.0..1.0_f64)) {
        let found = index(&chances);
        for (from, &found) in found.iter().enumerate() {
            let ratio = |until: usize| {
                let (mut alive, mut hits, mut time) = (1.0, 0.0, 0.0);
                for (age, chance) in chances.iter().enumerate().take(until + 1).skip(from) {
                    let begin = if age == 0 { 0 } else { end_of(age - 1) };
                    let after = alive * (1.0 - chance);
                    hits += alive - after;
                    time += (alive + after) / 2.0 * (end_of(age) - begin) as f64 / 1e9;
                    alive = after;
                }
                hits / time
            };
            let best = (from..AGES).map(ratio).fold(0.0, f64::max);
            prop_assert!((found - best).abs() <= 1e-9 * best.max(1e-12), "{found} against {best}");
        }
    }
}

/// Uses that were noticed late are put where they happened: ages counted as reached meanwhile are taken back.
#[test]
fn a_use_that_is_noticed_late_counts_where_it_was() {
    let mut reuse = Reuse::new(1, 1, 10);
    reuse.wait(0, 0, 0, 5);
    let mut used = Vec::new();
    reuse.advance(end_of(3), |_, _| false, &mut used);
    assert_eq!(reuse.table[0][4].reached, 1.0, "four buckets have passed");
    // Used in the second bucket, seen when the fifth ends.
    reuse.advance(end_of(4), |slot, key| slot == 5 && key == 0, &mut used);
    assert_eq!(used, [5]);
    reuse.used(0, Some(end_of(1) - 1), end_of(4));
    let reached: Vec<f64> = reuse.table[0][..5]
        .iter()
        .map(|lives| lives.reached)
        .collect();
    assert_eq!(reached, [1.0, 1.0, 0.0, 0.0, 0.0]);
    assert_eq!(reuse.table[0][1].used, 1.0);
}

/// What is watched stays within the limit, whatever comes.
#[test]
fn the_sample_thins_out() {
    let mut reuse = Reuse::new(1, 1, 100);
    for key in 0..10_000_u32 {
        reuse.wait(key << 16, 0, key.into(), 0);
        assert!(reuse.watched.len() <= 100);
    }
    assert!(
        reuse.watched.len() > 20,
        "{} keys are watched",
        reuse.watched.len()
    );
    assert!(reuse.waiting.iter().map(VecDeque::len).sum::<usize>() <= 100);
}

/// Without any experience the older is worth less, which is LRU; where use peaks late, the young are worth waiting for.
#[test]
fn the_index_falls_unless_there_is_something_to_wait_for() {
    let mut reuse = Reuse::new(2, 1, 10);
    let blank = reuse.indices();
    assert!(blank[0].windows(2).all(|pair| pair[0] >= pair[1]));
    for key in 0..100 {
        reuse.wait(key << 18, 1, 0, 0);
        reuse.used(key << 18, Some(end_of(9) + 1), end_of(9) + 1);
    }
    let learned = reuse.indices();
    let (young, due) = (learned[1][4 * PARTS], learned[1][10 * PARTS]);
    assert!(
        due > young && young > learned[1][12 * PARTS],
        "{:?}",
        learned[1]
    );
    assert!(young > blank[0][4 * PARTS]);
}

/// Queues that all keys have gone through don't keep room for them.
#[test]
fn memory_stays_that_of_what_is_watched() {
    let limit = 10_000;
    let mut reuse = Reuse::new(1, 1, limit);
    let mut used = Vec::new();
    for key in 0..limit as u32 - 1 {
        reuse.wait(key & 0xffff, 0, 0, key);
    }
    let one_queue = reuse.bytes();
    for age in 0..AGES {
        reuse.advance(end_of(age), |_, _| false, &mut used);
    }
    assert!(
        reuse.bytes() <= one_queue + one_queue / 2,
        "{one_queue} {}",
        reuse.bytes()
    );
}
