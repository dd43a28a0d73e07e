//! How soon chunks are used again, learned from what happens, and what that makes keeping one worth.
//!
//! Chunks are told apart by class. For each class and age (in powers of two) a life table counts how many reached that age
//! without being used and how many were used there, as in survival analysis: what is evicted or still waits counts for as
//! long as it was watched. Only a sample of the keys is watched, chosen by the key itself, so that a key stays watched
//! when its chunk has gone and comes back; the sample thins out when it grows too large (Waldspurger et al., FAST 2015).
//!
//! From the table follows the index of Gittins (J. R. Stat. Soc. B 41, 1979) of a chunk of some class and age: over all
//! times that one could go on waiting, the best ratio of the chance of a use within that time to the expected wait. It is
//! the rate at which room pays. A falling chance of use makes it the chance right now, and evicts like LRU; a chance that
//! is yet to peak, as with people who think before they answer, is waited for; classes that are used often stay.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use crate::chunk::NIL;

/// Ages told apart: below 0.13 s, then powers of two, the last from ten hours on.
const AGES: usize = 20;
const FIRST: u32 = 27;
/// A class's own counts weigh as much as its parent's chances when it has watched this many.
const OWN: f64 = 50.0;
/// The same for groups against everything.
const GROUP: f64 = 20.0;
/// Uses after which all counts are halved.
const WINDOW: f64 = 20_000.0;

/// Age bucket of a chunk that was last used `age` nanoseconds ago.
fn age_of(age: u64) -> usize {
    let bits = u64::BITS - age.leading_zeros();
    (bits.saturating_sub(FIRST) as usize).min(AGES - 1)
}

/// Nanoseconds at which a bucket ends.
fn end_of(age: usize) -> u64 {
    1 << (FIRST as usize + age)
}

/// Parts of an age bucket in which worth is interpolated.
const PARTS: usize = 4;
/// Parts of all buckets.
pub(super) const STEPS: usize = AGES * PARTS;

/// The part of a bucket that an age of `age` nanoseconds falls in.
pub(super) fn step_of(age: u64) -> usize {
    let bucket = age_of(age);
    let begin = if bucket == 0 { 0 } else { end_of(bucket - 1) };
    let part = (age - begin) / ((end_of(bucket) - begin) / PARTS as u64);
    bucket * PARTS + (part as usize).min(PARTS - 1)
}

/// Nanoseconds at which a step ends.
pub(super) fn end_of_step(step: usize) -> u64 {
    let (bucket, part) = (step / PARTS, step % PARTS);
    let begin = if bucket == 0 { 0 } else { end_of(bucket - 1) };
    begin + (end_of(bucket) - begin) / PARTS as u64 * (part as u64 + 1)
}

#[derive(Clone, Copy, Debug, Default)]
struct Lives {
    reached: f64,
    used: f64,
}

#[derive(Debug)]
struct Watched {
    since: u64,
    class: u16,
    /// Bucket up to which it counts as having reached.
    reached: u8,
    /// Where it is if it is resident, else `NIL`.
    slot: u32,
}

#[derive(Debug)]
pub(super) struct Reuse {
    /// Classes of one group stand side by side.
    group: usize,
    table: Vec<[Lives; AGES]>,
    uses: f64,
    /// Keys with any of these bits are not watched.
    skip: u32,
    limit: usize,
    watched: HashMap<u32, Watched, BuildHasherDefault<Spread>>,
    /// Who waits in each age bucket, by fingerprint and since when; those used since then are skipped.
    waiting: [VecDeque<(u32, u64)>; AGES],
}

impl Reuse {
    /// For `classes`, each `group` of which are alike, watching `limit` keys at most.
    pub(super) fn new(classes: usize, group: usize, limit: usize) -> Self {
        Self {
            group,
            table: vec![[Lives::default(); AGES]; classes],
            uses: 0.0,
            skip: 0b11,
            limit,
            watched: HashMap::default(),
            waiting: Default::default(),
        }
    }

    fn watches(&self, fingerprint: u32) -> bool {
        fingerprint >> 16 & self.skip == 0
    }

    /// A chunk of that class begins to wait for its next use.
    pub(super) fn wait(&mut self, fingerprint: u32, class: usize, since: u64, slot: u32) {
        if !self.watches(fingerprint) {
            return;
        }
        let watched = Watched {
            since,
            class: class as u16,
            reached: 0,
            slot,
        };
        self.table[class][0].reached += 1.0;
        self.watched.insert(fingerprint, watched);
        self.waiting[0].push_back((fingerprint, since));
        if self.watched.len() > self.limit {
            self.thin_out();
        }
    }

    fn thin_out(&mut self) {
        self.skip = self.skip << 1 | 1;
        let skip = self.skip;
        self.watched
            .retain(|fingerprint, _| fingerprint >> 16 & skip == 0);
        for waiting in &mut self.waiting {
            waiting.retain(|(fingerprint, _)| fingerprint >> 16 & skip == 0);
        }
        (0..AGES).for_each(|age| self.give_back(age));
    }

    /// Every queue has been as long as all that is watched: together they would keep many times that.
    fn give_back(&mut self, age: usize) {
        let waiting = &mut self.waiting[age];
        if waiting.capacity() > 1024 && waiting.len() < waiting.capacity() / 2 {
            waiting.shrink_to(waiting.len() + waiting.len() / 4);
        }
    }

    /// Its wait has ended after `age`, or at `now` without one.
    pub(super) fn used(&mut self, fingerprint: u32, age: Option<u64>, now: u64) {
        if !self.watches(fingerprint) {
            return;
        }
        let Some(watched) = self.watched.remove(&fingerprint) else {
            return;
        };
        let age = age_of(age.unwrap_or(now.saturating_sub(watched.since)));
        let reached = usize::from(watched.reached);
        let row = &mut self.table[usize::from(watched.class)];
        for lives in row.iter_mut().take(age + 1).skip(reached + 1) {
            lives.reached += 1.0;
        }
        for lives in row.iter_mut().take(reached + 1).skip(age + 1) {
            lives.reached = (lives.reached - 1.0).max(0.0);
        }
        row[age].used += 1.0;
        self.uses += 1.0;
    }

    /// Its chunk has been evicted. It goes on waiting.
    pub(super) fn evicted(&mut self, fingerprint: u32) {
        if self.watches(fingerprint)
            && let Some(watched) = self.watched.get_mut(&fingerprint)
        {
            watched.slot = NIL;
        }
    }

    /// Its chunk is still, or again, in that slot.
    pub(super) fn resident(&mut self, fingerprint: u32, slot: u32) {
        if self.watches(fingerprint)
            && let Some(watched) = self.watched.get_mut(&fingerprint)
        {
            watched.slot = slot;
        }
    }

    /// Lets those who wait grow older. `is_used` tells whether a slot that has that key was used since its wait began; such
    /// slots are added to `used`.
    pub(super) fn advance(
        &mut self,
        now: u64,
        is_used: impl Fn(u32, u32) -> bool,
        used: &mut Vec<u32>,
    ) {
        for age in 0..AGES {
            while let Some(&(fingerprint, since)) = self.waiting[age].front() {
                if since.saturating_add(end_of(age)) > now {
                    break;
                }
                self.waiting[age].pop_front();
                let Some(watched) = self.watched.get_mut(&fingerprint) else {
                    continue;
                };
                if watched.since != since {
                    continue;
                }
                match watched.slot {
                    slot if slot != NIL && is_used(slot, fingerprint) => used.push(slot),
                    _ if age + 1 < AGES => {
                        watched.reached = (age + 1) as u8;
                        self.table[usize::from(watched.class)][age + 1].reached += 1.0;
                        self.waiting[age + 1].push_back((fingerprint, since));
                    }
                    _ => {
                        self.watched.remove(&fingerprint);
                    }
                }
            }
            self.give_back(age);
        }
    }

    /// The index of every class and step of age, in uses a second.
    pub(super) fn indices(&mut self) -> Vec<[f64; STEPS]> {
        if self.uses > WINDOW {
            for lives in self.table.as_flattened_mut() {
                lives.reached /= 2.0;
                lives.used /= 2.0;
            }
            self.uses /= 2.0;
        }
        // Without any counts every age is as likely, per power of two, as any other: the chance falls, as for LRU.
        let all = chances(&pooled(&self.table), &[0.01; AGES], 1.0);
        let groups = self.table.chunks(self.group).flat_map(|classes| {
            let group = chances(&pooled(classes), &all, GROUP);
            classes.iter().map(move |class| chances(class, &group, OWN))
        });
        groups
            .map(|chances| interpolated(&index(&chances)))
            .collect()
    }

    pub(super) fn bytes(&self) -> usize {
        let waiting: usize = self.waiting.iter().map(VecDeque::capacity).sum();
        self.table.len() * size_of::<[Lives; AGES]>()
            + self.watched.capacity() * size_of::<(u32, Watched)>()
            + waiting * size_of::<(u32, u64)>()
    }
}

fn pooled(classes: &[[Lives; AGES]]) -> [Lives; AGES] {
    std::array::from_fn(|age| Lives {
        reached: classes.iter().map(|class| class[age].reached).sum(),
        used: classes.iter().map(|class| class[age].used).sum(),
    })
}

/// Chance of a use at each age of those that reach it, drawn towards `prior` as if that had been seen `strength` times.
fn chances(lives: &[Lives; AGES], prior: &[f64; AGES], strength: f64) -> [f64; AGES] {
    std::array::from_fn(|age| {
        let Lives { reached, used } = lives[age];
        ((used + strength * prior[age]) / (reached.max(used) + strength)).min(1.0)
    })
}

/// Over all ages to give up at, the best of chance of a use / expected wait in seconds, for each age to begin at.
fn index(chances: &[f64; AGES]) -> [f64; AGES] {
    std::array::from_fn(|from| {
        let (mut alive, mut used, mut waited, mut best) = (1.0, 0.0, 0.0, 0.0_f64);
        for (age, chance) in chances.iter().enumerate().skip(from) {
            let begin = if age == 0 { 0 } else { end_of(age - 1) };
            let length = (end_of(age) - begin) as f64 / 1e9;
            let here = alive * chance;
            used += here;
            waited += (alive - here / 2.0) * length;
            alive -= here;
            best = best.max(used / waited);
        }
        best
    })
}

/// From the beginnings of buckets to the middles of their parts.
fn interpolated(index: &[f64; AGES]) -> [f64; STEPS] {
    std::array::from_fn(|step| {
        let (bucket, part) = (step / PARTS, step % PARTS);
        let next = index[(bucket + 1).min(AGES - 1)];
        index[bucket] + (next - index[bucket]) * (part as f64 + 0.5) / PARTS as f64
    })
}

/// Fingerprints are spread already, over their own bits.
#[derive(Debug, Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u32(&mut self, word: u32) {
        self.0 = u64::from(word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
