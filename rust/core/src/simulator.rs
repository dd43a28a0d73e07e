//! What a policy would have saved on a trace: the store's life of chunks, with numbers instead of bytes.
//!
//! The policies are the store's own, behind the same trait, and meet what they meet there: a prompt looks its chunks up,
//! which pins what is found and stamps it; room for the rest is taken, leaf by leaf; then the rest is published. A chunk
//! hits only if those before it in its chain do. [`clairvoyant`] knows the future instead. There may be a tier below that
//! keeps part of the chunks for good ([`Lower`]).

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::eviction::{Arrival, Below, Cost, PolicyKind, Uses};

/// No chunk, no slot.
pub const NONE: u32 = u32::MAX;

/// Requests and the chunks that they ask for.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// Nanoseconds of each request, not falling.
    pub times: Vec<u64>,
    /// Where each request's accesses begin, and the end of the last.
    pub starts: Vec<usize>,
    /// Chunk of each access; a chunk comes right behind its parent.
    pub blocks: Vec<u32>,
    /// Position of its first token in that prompt.
    pub positions: Vec<u32>,
    /// Parent of each chunk, or `NONE`.
    pub parents: Vec<u32>,
    /// Tokens of each chunk.
    pub tokens: Vec<u32>,
}

/// What came of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Chunks asked for, and those found.
    pub accesses: u64,
    /// Found in memory, with all before them in their chain.
    pub hits: u64,
    /// Found below, with all before them in their chain.
    pub loads: u64,
    /// Tokens asked for.
    pub tokens: u64,
    /// Of chunks that hit.
    pub hit_tokens: u64,
    /// To compute everything, by [`Cost::compute`].
    pub cost: f64,
    /// Of what hit, and of what was loaded in less time.
    pub saved: f64,
    /// Chunks evicted.
    pub evicted: u64,
    /// Chunks that found no room.
    pub rejected: u64,
}

/// A tier below memory. What a prompt brings that nobody asked for before is written down whole or not at all, at once, and
/// stays.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lower {
    /// Share of the prompts whose chunks are written down.
    pub share: f64,
    /// Time to load a token, in the unit of [`Cost`].
    pub load: f64,
    /// The policy is told what lies below and what loading takes.
    pub told: bool,
}

impl Lower {
    fn keeps(&self, request: usize) -> bool {
        let draw = (fingerprint(!(request as u32)) >> 11) as f64 / (1_u64 << 53) as f64;
        draw < self.share
    }
}

impl Trace {
    /// An error that names what is wrong with the arrays.
    pub fn check(&self) -> Result<()> {
        let wrong =
            |name, value: String, accepted: &str| Err(Error::argument(name, value, accepted));
        if self.starts.len() != self.times.len() + 1 || self.starts.first() != Some(&0) {
            let found = format!("{} for {} requests", self.starts.len(), self.times.len());
            return wrong("starts", found, "one more than requests, from 0 on");
        }
        if self.starts.last() != Some(&self.blocks.len()) || !self.starts.is_sorted() {
            let accepted = "ascending, ending at the number of accesses";
            return wrong(
                "starts",
                format!("{:?} at the end", self.starts.last()),
                accepted,
            );
        }
        if self.positions.len() != self.blocks.len() {
            return wrong(
                "positions",
                format!("{} values", self.positions.len()),
                "one for each access",
            );
        }
        if self.parents.len() != self.tokens.len() {
            return wrong(
                "parents",
                format!("{} values", self.parents.len()),
                "one for each chunk",
            );
        }
        if !self.times.is_sorted() {
            return wrong("times", "falling".into(), "not falling");
        }
        if self.tokens.contains(&0) {
            return wrong("tokens", "0".into(), "at least one token in every chunk");
        }
        for (&start, &stop) in self.starts.iter().zip(&self.starts[1..]) {
            let mut before = NONE;
            for &block in &self.blocks[start..stop] {
                let parent = self.parents.get(block as usize).copied();
                if parent.is_none_or(|parent| parent != NONE && parent != before) {
                    return wrong(
                        "blocks",
                        block.to_string(),
                        "numbers of chunks, each right behind its parent",
                    );
                }
                before = block;
            }
        }
        Ok(())
    }

    fn requests(&self) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let ranges = self.starts.windows(2).map(|pair| pair[0]..pair[1]);
        self.times.iter().copied().zip(ranges)
    }

    /// Counts what a prompt finds: the time to get at each chunk that is there, and nothing behind a gap in its chain.
    fn look_up(
        &self,
        range: std::ops::Range<usize>,
        cost: &Cost,
        outcome: &mut Outcome,
        found: impl Fn(u32) -> Option<Found>,
    ) {
        let mut unbroken = true;
        for at in range {
            let block = self.blocks[at];
            let tokens = self.tokens[block as usize];
            let found = found(block);
            unbroken = found.is_some() && (unbroken || self.parents[block as usize] == NONE);
            let work = cost.compute(tokens, self.positions[at]);
            outcome.accesses += 1;
            outcome.tokens += u64::from(tokens);
            outcome.cost += work;
            match found.filter(|_| unbroken) {
                Some(Found::InMemory) => {
                    outcome.hits += 1;
                    outcome.hit_tokens += u64::from(tokens);
                    outcome.saved += work;
                }
                Some(Found::Below(load)) => {
                    outcome.loads += 1;
                    outcome.saved += (work - load * f64::from(tokens)).max(0.0);
                }
                None => {}
            }
        }
    }
}

/// Where a chunk is found.
#[derive(Clone, Copy)]
enum Found {
    InMemory,
    /// With the time that a token of it takes.
    Below(f64),
}

/// Runs a policy over the trace with room for `capacity` tokens. Chunks larger than a chunk's `full` tokens don't exist.
pub fn simulate(trace: &Trace, kind: PolicyKind, capacity: u64, cost: &Cost) -> Outcome {
    simulate_above(trace, kind, capacity, cost, &Lower::default())
}

/// [`simulate`] with a tier below.
pub fn simulate_above(
    trace: &Trace,
    kind: PolicyKind,
    capacity: u64,
    cost: &Cost,
    lower: &Lower,
) -> Outcome {
    let chunks = trace.tokens.len();
    let full = trace.tokens.iter().copied().max().unwrap_or(1);
    let mut policy = kind.build(chunks);
    // A chunk's slot is its own number: slots are a store's business, and policies don't care for which they get.
    let uses = Uses::new(chunks, kind.hit_cap());
    let mut slots: Vec<Slot> = vec![Slot::default(); chunks];
    let (mut used, mut outcome) = (0_u64, Outcome::default());
    let (mut fresh, mut parked) = (Vec::new(), Vec::new());
    if lower.told {
        let below = Below {
            load: lower.load,
            found: 1.0,
        };
        policy.set_below(1, below);
    }
    for (number, (time, range)) in trace.requests().enumerate() {
        trace.look_up(range.clone(), cost, &mut outcome, |block| {
            match &slots[block as usize] {
                Slot { resident: true, .. } => Some(Found::InMemory),
                Slot { below: true, .. } => Some(Found::Below(lower.load)),
                _ => None,
            }
        });
        for (at, now) in range.clone().zip(time..) {
            let block = trace.blocks[at] as usize;
            if slots[block].resident {
                slots[block].pinned = true;
                uses.hit(trace.blocks[at], now);
            }
        }
        'access: for at in range.clone() {
            let block = trace.blocks[at];
            let (slot, parent) = (&slots[block as usize], trace.parents[block as usize]);
            if slot.resident || slot.reserved {
                continue;
            }
            let orphan = parent != NONE && {
                let parent = &slots[parent as usize];
                !parent.resident && !parent.reserved
            };
            let tokens = u64::from(trace.tokens[block as usize]);
            while used + tokens > capacity {
                let victim = if orphan { None } else { policy.pop(&uses) };
                let Some(victim) = victim else {
                    outcome.rejected += 1;
                    continue 'access;
                };
                let gone = &mut slots[victim as usize];
                gone.listed = false;
                if gone.pinned {
                    parked.push(victim);
                    continue;
                }
                gone.resident = false;
                used -= u64::from(trace.tokens[victim as usize]);
                outcome.evicted += 1;
                let parent = trace.parents[victim as usize];
                if parent != NONE {
                    let above = &mut slots[parent as usize];
                    above.children -= 1;
                    if above.children == 0 {
                        above.listed = true;
                        policy.restore(parent, &uses);
                    }
                }
            }
            used += tokens;
            slots[block as usize].reserved = true;
            fresh.push(at);
        }
        for at in fresh.drain(..) {
            let block = trace.blocks[at];
            let parent = trace.parents[block as usize];
            uses.enter(block, time + at as u64 - range.start as u64);
            if parent != NONE {
                let above = &mut slots[parent as usize];
                above.children += 1;
                if std::mem::take(&mut above.listed) {
                    policy.remove(parent, &uses);
                }
            }
            let known = &slots[block as usize];
            slots[block as usize] = Slot {
                resident: true,
                listed: true,
                known: true,
                below: known.below || !known.known && lower.keeps(number),
                ..Slot::default()
            };
            let arrival = Arrival {
                fingerprint: fingerprint(block),
                tokens: trace.tokens[block as usize],
                position: trace.positions[at],
                compute: cost.per_token(trace.tokens[block as usize], trace.positions[at]),
                head: trace.positions[at] == 0 || parent != NONE && slots[parent as usize].head,
                unfull: trace.tokens[block as usize] < full,
                parent: (parent != NONE).then_some(parent),
            };
            slots[block as usize].head = arrival.head;
            policy.insert(block, &arrival, &uses);
            if lower.told && slots[block as usize].below {
                policy.set_copy(block, 1, &uses);
            }
        }
        for at in range {
            slots[trace.blocks[at] as usize].pinned = false;
        }
        for slot in parked.drain(..) {
            if slots[slot as usize].children == 0 {
                slots[slot as usize].listed = true;
                policy.restore(slot, &uses);
            }
        }
    }
    outcome
}

/// Where a chunk is in its life.
#[derive(Clone, Debug, Default)]
struct Slot {
    resident: bool,
    reserved: bool,
    pinned: bool,
    listed: bool,
    head: bool,
    /// It was resident before.
    known: bool,
    /// It lies below.
    below: bool,
    children: u32,
}

/// Spreads a chunk's number as a key's bytes are spread (splitmix64).
fn fingerprint(block: u32) -> u64 {
    let mut word = u64::from(block).wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ word >> 31
}

/// Keeps what is used soonest, of what is there and what has just been computed (Belady's rule with bypass). A chunk's next
/// use is never before its parent's, and of one prompt's chunks the deepest goes first, so chains shrink from their leaves
/// by themselves. For chunks of equal size no policy has more hits; for unequal ones, or for time, it is a close guide.
pub fn clairvoyant(trace: &Trace, capacity: u64, cost: &Cost) -> Outcome {
    let next = next_uses(trace);
    let mut outcome = Outcome::default();
    // By next use, the place in its prompt, and number: the last goes first.
    let mut kept: BTreeSet<(u32, u32, u32)> = BTreeSet::new();
    let mut entry: Vec<Option<(u32, u32, u32)>> = vec![None; trace.tokens.len()];
    let mut used = 0;
    for (_, range) in trace.requests() {
        trace.look_up(range.clone(), cost, &mut outcome, |block| {
            entry[block as usize].map(|_| Found::InMemory)
        });
        for at in range.clone() {
            let block = trace.blocks[at];
            let tokens = u64::from(trace.tokens[block as usize]);
            if let Some(old) = entry[block as usize].take() {
                kept.remove(&old);
                used -= tokens;
            }
            if next[at] != NONE {
                let new = (next[at], (at - range.start) as u32, block);
                entry[block as usize] = Some(new);
                kept.insert(new);
                used += tokens;
            }
        }
        while used > capacity {
            let Some((_, _, block)) = kept.pop_last() else {
                break;
            };
            entry[block as usize] = None;
            used -= u64::from(trace.tokens[block as usize]);
            outcome.evicted += 1;
        }
    }
    outcome
}

/// For each access the number of the next request that asks for that chunk, or `NONE`.
fn next_uses(trace: &Trace) -> Vec<u32> {
    let mut next = vec![NONE; trace.blocks.len()];
    let mut coming = vec![NONE; trace.tokens.len()];
    for (number, pair) in trace.starts.windows(2).enumerate().rev() {
        for at in (pair[0]..pair[1]).rev() {
            next[at] = coming[trace.blocks[at] as usize];
        }
        for at in pair[0]..pair[1] {
            coming[trace.blocks[at] as usize] = number as u32;
        }
    }
    next
}

#[cfg(all(test, not(loom)))]
mod tests;
