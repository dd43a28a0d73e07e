//! Adaptive: evicts what is least worth its room, by how soon such chunks are used again (`reuse`) times the time that a
//! use in memory saves: to compute the chunk, or to load it where a tier below has it and is faster.
//!
//! A chunk's class is its kind (document, chain from position 0, unfull end of such a chain), how often it was used, which
//! is remembered for a while after it has gone, and how deep in the prompt it stood. Chunks of one class, age bucket and
//! place of their other copy are one list, oldest first; lists are ordered by worth. A chunk moves when it has grown out of
//! its bucket, is found used or gets or loses its copy, so finding a victim takes amortised constant time.

use super::reuse::{Reuse, STEPS, end_of_step, step_of};
use super::{Arrival, Below, Heat, Links, List, PLACES, Policy};

/// Hits beyond this are not told apart.
pub(super) const CAP: u32 = 255;

const DEPTHS: usize = 4;
/// Uses from which on a chunk has a pace, and how many are told apart, each four times as slow as the one before, the first
/// below half a second (2 ** 29 ns).
const FEW: usize = 4;
const PACES: usize = 8;
const SLOW: usize = 13;
/// Times between uses that a pace is the mean of, older ones fading, by kind: documents are asked for at a steady pace,
/// conversations at one that changes.
const MEMORY: [u8; KINDS] = [16, 4, 4];
const HABITS: usize = FEW + PACES;
const KINDS: usize = 3;
const CLASSES: usize = KINDS * HABITS * DEPTHS;
/// Lists of the chunks of one place.
const LISTS: usize = CLASSES * STEPS;
/// Most keys watched for learning.
const WATCHED: usize = 1 << 16;
/// Most places for chunks that have gone.
const REMEMBERED: usize = 1 << 19;
/// New chunks from one ordering of the lists to the next.
const REORDER: u64 = 1024;
/// Lists are searched for chunks that have grown out of them after an eighth of the age at which they do, and never more
/// often than this, in nanoseconds.
const LOOK: u64 = 1 << 25;

/// What is known of the chunk in a slot, in 16 bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Facts {
    fingerprint: u32,
    /// The last use that was taken note of, in ticks.
    seen: u32,
    past: Past,
    /// Its list, or `NOWHERE`.
    list: u16,
    /// Kind and depth, as `kind * DEPTHS + depth`.
    place: u8,
    /// Where its other copy is.
    copy: u8,
}

/// The list of chunks that are in none.
const NOWHERE: u16 = u16::MAX;

/// Uses of a chunk so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Past {
    uses: u8,
    /// Running mean of the binary logarithm of the nanoseconds from one to the next, in 256ths.
    pace: u16,
}

impl Past {
    fn add(&mut self, gap: u64, kind: usize) {
        let gap = ((gap.max(1) as f32).log2() * 256.0) as i32;
        let pace = i32::from(self.pace);
        self.pace = (pace + (gap - pace) / i32::from(self.uses.min(MEMORY[kind] - 1) + 1)) as u16;
        self.uses = self.uses.saturating_add(1);
    }
}

impl Facts {
    fn kind(&self) -> usize {
        usize::from(self.place) / DEPTHS
    }

    /// Chunks that were seldom used so far are told apart by how often, the others by how fast.
    fn class(&self) -> usize {
        let (kind, depth) = (self.kind(), usize::from(self.place) % DEPTHS);
        let habit = match usize::from(self.past.uses) {
            few @ 0..FEW => few,
            _ => FEW + (usize::from(self.past.pace / 512).saturating_sub(SLOW)).min(PACES - 1),
        };
        (kind * HABITS + habit) * DEPTHS + depth
    }
}

/// Times are kept in ticks of 4 ms, which go around after 208 days.
const TICK: u32 = 22;

fn tick(time: u64) -> u32 {
    (time >> TICK) as u32
}

/// Nanoseconds from one tick to a later one.
fn between(from: u32, to: u32) -> u64 {
    let ticks = to.wrapping_sub(from);
    // What seems to lie half an age ahead is a little behind.
    u64::from(if ticks > u32::MAX / 2 { 0 } else { ticks }) << TICK
}

#[derive(Debug)]
pub(super) struct Adaptive {
    links: Links,
    facts: Vec<Facts>,
    /// One for each class and age, for each place up to the last that has had a copy.
    lists: Vec<List>,
    /// Lists from the least worth on, and the place of each there.
    order: Vec<u16>,
    places: Vec<u16>,
    /// No list before this place has members.
    lowest: usize,
    /// Mean time to compute a token, by depth, and how many chunks it is the mean of.
    compute: [(f64, f64); DEPTHS],
    /// What copies are good for, by place; the first is none.
    below: [Below; PLACES],
    reuse: Reuse,
    gone: Remembered,
    /// Time of the newest chunk.
    now: u64,
    /// When the lists of each age are searched next.
    due: [u64; STEPS],
    arrivals: u64,
    len: usize,
    found: Vec<u32>,
}

impl Adaptive {
    pub(super) fn new(slots: usize) -> Self {
        let mut policy = Self {
            links: Links::new(slots),
            facts: vec![Facts::default(); slots],
            lists: vec![List::default(); LISTS],
            order: vec![0; LISTS],
            places: vec![0; LISTS],
            lowest: 0,
            compute: [(1.0, 1.0); DEPTHS],
            below: [Below::default(); PLACES],
            reuse: Reuse::new(CLASSES, DEPTHS, WATCHED),
            gone: Remembered::new(slots),
            now: 0,
            due: [0; STEPS],
            arrivals: 0,
            len: 0,
            found: Vec::new(),
        };
        policy.reorder();
        policy
    }

    /// Orders the lists anew by what has been learned.
    fn reorder(&mut self) {
        let indices = self.reuse.indices();
        let mut keys: Vec<u64> = Vec::with_capacity(self.order.len());
        for copy in 0..self.lists.len() / LISTS {
            for (class, steps) in indices.iter().enumerate() {
                let saves = self.below[copy].saves(self.compute[class % DEPTHS].0);
                for (step, index) in steps.iter().enumerate() {
                    let worth = (index * saves) as f32;
                    // Numbers that are not negative are in the order of their bits. Of equals the older comes first, then
                    // the less used.
                    let list = (copy * LISTS + class * STEPS + step) as u64;
                    keys.push(
                        u64::from(worth.to_bits()) << 32 | ((STEPS - step) as u64) << 16 | list,
                    );
                }
            }
        }
        keys.sort_unstable();
        for (place, key) in keys.into_iter().enumerate() {
            self.order[place] = key as u16;
            self.places[usize::from(key as u16)] = place as u16;
        }
        self.lowest = 0;
    }

    /// The list that a slot belongs to now, which becomes the one it is in.
    fn place(&mut self, slot: u32) -> usize {
        let facts = &mut self.facts[slot as usize];
        let age = between(facts.seen, tick(self.now));
        let list = usize::from(facts.copy) * LISTS + facts.class() * STEPS + step_of(age);
        facts.list = list as u16;
        self.lowest = self.lowest.min(usize::from(self.places[list]));
        list
    }

    /// Takes note of uses since the last look: of several, all but the last are taken to be evenly spread.
    fn observe(&mut self, slot: u32, heat: &dyn Heat) {
        let uses = heat.hits(slot);
        if uses == 0 {
            return;
        }
        heat.set_hits(slot, 0);
        let touched = heat.touched(slot);
        let mut facts = self.facts[slot as usize];
        let gap = between(facts.seen, tick(touched)) / u64::from(uses);
        for left in (0..u64::from(uses)).rev() {
            self.reuse.used(facts.fingerprint, Some(gap), touched);
            facts.past.add(gap, facts.kind());
            let since = touched.saturating_sub(left * gap);
            self.reuse
                .wait(facts.fingerprint, facts.class(), since, slot);
        }
        facts.seen = tick(touched);
        self.facts[slot as usize] = facts;
    }

    /// A chunk goes: what is known of it stays for a while.
    fn forget(&mut self, slot: u32) {
        let facts = &self.facts[slot as usize];
        self.gone.remember(facts);
        self.reuse.evicted(facts.fingerprint);
    }

    /// Moves chunks that have grown out of their lists, and lets the watched ones grow older.
    fn grow_older(&mut self, heat: &dyn Heat) {
        let mut found = std::mem::take(&mut self.found);
        let facts = &self.facts;
        let is_used = |slot: u32, fingerprint| {
            facts[slot as usize].fingerprint == fingerprint && heat.hits(slot) > 0
        };
        self.reuse.advance(self.now, is_used, &mut found);
        for slot in found.drain(..) {
            let list = self.facts[slot as usize].list;
            self.observe(slot, heat);
            if list != NOWHERE {
                self.lists[usize::from(list)].remove(&mut self.links, slot);
                let list = self.place(slot);
                self.lists[list].push_newest(&mut self.links, slot);
            }
        }
        self.found = found;
        for step in 0..STEPS - 1 {
            if self.now < self.due[step] {
                continue;
            }
            self.due[step] = self.now + (end_of_step(step) / 8).max(LOOK);
            for list in (step..self.lists.len()).step_by(STEPS) {
                while let Some(slot) = self.lists[list].oldest {
                    let age = between(self.facts[slot as usize].seen, tick(self.now));
                    if age < end_of_step(step) {
                        break;
                    }
                    self.lists[list].pop_oldest(&mut self.links);
                    self.observe(slot, heat);
                    let list = self.place(slot);
                    self.lists[list].push_newest(&mut self.links, slot);
                }
            }
        }
    }
}

impl Policy for Adaptive {
    fn insert(&mut self, slot: u32, arrival: &Arrival, heat: &dyn Heat) {
        let now = heat.touched(slot);
        let fingerprint = arrival.fingerprint as u32;
        self.now = self.now.max(now);
        self.reuse.used(fingerprint, None, now);
        let depth = match arrival.position {
            0..2048 => 0,
            2048..8192 => 1,
            8192..32768 => 2,
            _ => 3,
        };
        let kind = usize::from(arrival.head) + usize::from(arrival.head && arrival.unfull);
        let (mean, count) = &mut self.compute[depth];
        *count = (*count + 1.0).min(REORDER as f64);
        *mean += (f64::from(arrival.compute) - *mean) / *count;
        let mut past = Past::default();
        if let Some((gap, known)) = self.gone.take(fingerprint, now) {
            past = known;
            past.add(gap, kind);
        }
        let facts = Facts {
            fingerprint,
            seen: tick(now),
            past,
            list: 0,
            place: (kind * DEPTHS + depth) as u8,
            copy: 0,
        };
        self.facts[slot as usize] = facts;
        self.reuse.wait(fingerprint, facts.class(), now, slot);
        let list = self.place(slot);
        self.lists[list].push_newest(&mut self.links, slot);
        self.len += 1;
        self.arrivals += 1;
        if self.arrivals.is_power_of_two() || self.arrivals.is_multiple_of(REORDER) {
            self.reorder();
        }
    }

    fn restore(&mut self, slot: u32, heat: &dyn Heat) {
        self.observe(slot, heat);
        self.reuse
            .resident(self.facts[slot as usize].fingerprint, slot);
        let list = self.place(slot);
        self.lists[list].push_oldest(&mut self.links, slot);
        self.len += 1;
    }

    fn remove(&mut self, slot: u32, heat: &dyn Heat) {
        let list = std::mem::replace(&mut self.facts[slot as usize].list, NOWHERE);
        self.lists[usize::from(list)].remove(&mut self.links, slot);
        self.len -= 1;
        self.observe(slot, heat);
    }

    fn give_up(&mut self, slot: u32, heat: &dyn Heat) {
        self.remove(slot, heat);
        self.forget(slot);
    }

    fn set_copy(&mut self, slot: u32, place: usize, heat: &dyn Heat) {
        if self.lists.len() <= place * LISTS {
            let lists = (place + 1) * LISTS;
            self.lists.resize(lists, List::default());
            self.order.resize(lists, 0);
            self.places.resize(lists, 0);
            self.reorder();
        }
        self.facts[slot as usize].copy = place as u8;
        let list = self.facts[slot as usize].list;
        if list != NOWHERE {
            self.lists[usize::from(list)].remove(&mut self.links, slot);
            self.observe(slot, heat);
            let list = self.place(slot);
            self.lists[list].push_newest(&mut self.links, slot);
        }
    }

    fn set_below(&mut self, place: usize, below: Below) {
        let before = std::mem::replace(&mut self.below[place], below);
        // Small changes wait for the next order.
        let load = before.load.max(below.load) > 1.25 * before.load.min(below.load);
        let found = (before.found - below.found).abs() > 0.1;
        if self.lists.len() > place * LISTS && (load || found) {
            self.reorder();
        }
    }

    fn pop(&mut self, heat: &dyn Heat) -> Option<u32> {
        self.grow_older(heat);
        while self.len > 0 {
            let list = usize::from(self.order[self.lowest]);
            let Some(slot) = self.lists[list].pop_oldest(&mut self.links) else {
                self.lowest += 1;
                continue;
            };
            if heat.hits(slot) > 0 {
                self.observe(slot, heat);
                let list = self.place(slot);
                self.lists[list].push_newest(&mut self.links, slot);
                continue;
            }
            self.len -= 1;
            self.facts[slot as usize].list = NOWHERE;
            self.forget(slot);
            return Some(slot);
        }
        None
    }

    fn len(&self) -> usize {
        self.len
    }

    fn bytes(&self) -> usize {
        self.links.bytes()
            + self.facts.len() * size_of::<Facts>()
            + self.lists.len() * (size_of::<List>() + 2 * size_of::<u16>())
            + self.gone.bytes()
            + self.reuse.bytes()
    }
}

/// What is known of chunks that have gone, in a table where a new one overwrites whatever shares its place.
///
/// An entry is 24 bits of the fingerprint (the lower eight follow from the place), 24 bits of the time in units of 67 ms,
/// the uses and the pace in quarters, eight bits each. Zero is nothing.
#[derive(Debug)]
struct Remembered(Vec<u64>);

/// Units of time of the table, in bits of nanoseconds; it goes around after 13 days.
const UNIT: u32 = 26;

impl Remembered {
    fn new(slots: usize) -> Self {
        Self(vec![0; slots.next_power_of_two().clamp(256, REMEMBERED)])
    }

    fn place(&self, fingerprint: u32) -> usize {
        fingerprint as usize & (self.0.len() - 1)
    }

    fn remember(&mut self, facts: &Facts) {
        let place = self.place(facts.fingerprint);
        let seen = facts.seen >> (UNIT - TICK) & 0xff_ffff;
        let past = u64::from(facts.past.uses) << 8 | u64::from(facts.past.pace >> 6).min(255);
        self.0[place] = u64::from(facts.fingerprint >> 8) << 40 | u64::from(seen) << 16 | past;
    }

    /// Nanoseconds since its last use, and what was known; once.
    fn take(&mut self, fingerprint: u32, now: u64) -> Option<(u64, Past)> {
        let place = self.place(fingerprint);
        let entry = self.0[place];
        if entry == 0 || (entry >> 40) as u32 != fingerprint >> 8 {
            return None;
        }
        self.0[place] = 0;
        let seen = (entry >> 16) as u32 & 0xff_ffff;
        let units = ((now >> UNIT) as u32).wrapping_sub(seen) & 0xff_ffff;
        let past = Past {
            uses: (entry >> 8) as u8,
            pace: u16::from(entry as u8) << 6,
        };
        Some((u64::from(units) << UNIT, past))
    }

    fn bytes(&self) -> usize {
        self.0.len() * size_of::<u64>()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
