//! Eviction policies over slot numbers, one a file.
//!
//! A policy orders the slots that may go: resident chunks without children. A parent is taken out when it gets a child and
//! restored when the last one has gone, so chains shrink from their leaves. What was popped but turned out to be pinned is
//! restored when the pins are gone. A hit never comes here: it only sets a counter and a stamp at the chunk (`Heat`), which
//! the policy reads when it looks for a victim.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

mod adaptive;
mod fifo;
mod lfu;
mod lru;
mod reuse;
mod s3fifo;
mod sieve;
mod uses;

pub use uses::Uses;

/// How chunks were used; updated by hits at any time.
pub trait Heat {
    /// Hits since the count was last set, up to the policy's cap.
    fn hits(&self, slot: u32) -> u32;
    /// Sets the count.
    fn set_hits(&self, slot: u32, hits: u32);
    /// Time of the last use; never falls while a slot is in the policy.
    fn touched(&self, slot: u32) -> u64;
}

/// What chunks cost, in times that one token at position 0 takes to compute: a chunk of L tokens at position p takes
/// `L · (1 + (p + L/2) / attention_tokens)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// Position at which attention takes as long as everything else.
    pub attention_tokens: f64,
}

impl Default for Cost {
    fn default() -> Self {
        Self {
            attention_tokens: 30_000.0,
        }
    }
}

impl Cost {
    /// Of computing `tokens` tokens from `position` on.
    pub fn compute(&self, tokens: u32, position: u32) -> f64 {
        let (tokens, position) = (f64::from(tokens), f64::from(position));
        tokens * (1.0 + (position + tokens / 2.0) / self.attention_tokens)
    }

    /// Of computing one of these tokens, which stands for its bytes.
    pub fn per_token(&self, tokens: u32, position: u32) -> f32 {
        (self.compute(tokens, position) / f64::from(tokens.max(1))) as f32
    }
}

/// Where else than in memory a chunk may be: nowhere, in the first tier below, in a later one.
pub const PLACES: usize = 3;

/// What copies in one of the tiers below are good for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Below {
    /// Time that loading a token takes, in the unit of [`Cost`].
    pub load: f64,
    /// Share of the copies thought to be there that come when they are asked for.
    pub found: f64,
}

impl Below {
    /// What keeping a token in memory saves that takes `compute` to compute and has a copy there. A copy that is slower than
    /// computing changes nothing: it is not waited for.
    pub fn saves(&self, compute: f64) -> f64 {
        compute - self.found * (compute - self.load).max(0.0)
    }
}

impl Default for Below {
    /// Of a tier about which nothing is known: no good.
    fn default() -> Self {
        Self {
            load: f64::INFINITY,
            found: 1.0,
        }
    }
}

/// What a policy is told of a chunk when it comes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Arrival {
    /// Stands for its key.
    pub fingerprint: u64,
    /// Tokens that it holds.
    pub tokens: u32,
    /// Position of its first token in the prompt that it came from.
    pub position: u32,
    /// Time that computing it takes, for each token of it, in the unit of [`Cost`].
    pub compute: f32,
    /// Belongs to a chain that begins at position 0 of its prompt.
    pub head: bool,
    /// Holds fewer tokens than a chunk can.
    pub unfull: bool,
    /// The slot of the chunk before it in its chain.
    pub parent: Option<u32>,
}

/// Order in which chunks go. Called by one thread at a time.
pub trait Policy: Send + fmt::Debug {
    /// Adds a new chunk.
    fn insert(&mut self, slot: u32, arrival: &Arrival, heat: &dyn Heat);
    /// Adds a chunk that was removed or popped and has stayed resident, where it would go soonest.
    fn restore(&mut self, slot: u32, heat: &dyn Heat);
    /// Takes out a chunk that is there.
    fn remove(&mut self, slot: u32, heat: &dyn Heat);
    /// Takes out a chunk that is there and goes for another reason than this order.
    fn give_up(&mut self, slot: u32, heat: &dyn Heat) {
        self.remove(slot, heat);
    }
    /// A chunk that was inserted, whether it is there now or not, has another copy at `place` below [`PLACES`]: 0 nowhere.
    fn set_copy(&mut self, _slot: u32, _place: usize, _heat: &dyn Heat) {}
    /// What the copies at `place` are good for from now on.
    fn set_below(&mut self, _place: usize, _below: Below) {}
    /// Takes out the chunk to go next. Amortised constant time.
    fn pop(&mut self, heat: &dyn Heat) -> Option<u32>;
    /// Chunks that are there.
    fn len(&self) -> usize;
    /// True without chunks.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Memory taken.
    fn bytes(&self) -> usize;
}

/// Names of the policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Least frequently used.
    Lfu,
    /// First in, first out.
    Fifo,
    /// Three static queues: small, main, ghost.
    S3Fifo,
    /// One queue with a moving hand.
    Sieve,
    /// What is least worth its room, by learned times of reuse and what a use saves.
    #[default]
    Adaptive,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: [Self; 6] = [
        Self::Lru,
        Self::Lfu,
        Self::Fifo,
        Self::S3Fifo,
        Self::Sieve,
        Self::Adaptive,
    ];

    /// Its name in configurations.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Fifo => "fifo",
            Self::S3Fifo => "s3-fifo",
            Self::Sieve => "sieve",
            Self::Adaptive => "adaptive",
        }
    }

    /// A policy over slots `0..max_chunks`.
    pub fn build(self, max_chunks: usize) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(lru::Lru::new(max_chunks)),
            Self::Lfu => Box::new(lfu::Lfu::new(max_chunks)),
            Self::Fifo => Box::new(fifo::Fifo::new(max_chunks)),
            Self::S3Fifo => Box::new(s3fifo::S3Fifo::new(max_chunks)),
            Self::Sieve => Box::new(sieve::Sieve::new(max_chunks)),
            Self::Adaptive => Box::new(adaptive::Adaptive::new(max_chunks)),
        }
    }

    /// Hits beyond this count don't matter to the policy.
    pub fn hit_cap(self) -> u32 {
        match self {
            Self::Lru | Self::Fifo => 0,
            Self::Sieve => 1,
            Self::S3Fifo => 3,
            Self::Lfu => lfu::CAP,
            Self::Adaptive => adaptive::CAP,
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|kind| name.eq_ignore_ascii_case(kind.as_str()))
            .ok_or_else(|| {
                let names = Self::ALL.map(Self::as_str).join(", ");
                Error::argument(
                    "policy",
                    format!("{name:?}"),
                    format!("one of {names} (any case)"),
                )
            })
    }
}

/// Neighbours of every slot in the one list that it is in. Kept as slot + 1, so that unused slots are untouched zeros.
#[derive(Debug)]
pub(crate) struct Links {
    newer: Vec<u32>,
    older: Vec<u32>,
}

impl Links {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            newer: vec![0; slots],
            older: vec![0; slots],
        }
    }

    fn newer(&self, slot: u32) -> Option<u32> {
        self.newer[slot as usize].checked_sub(1)
    }

    fn older(&self, slot: u32) -> Option<u32> {
        self.older[slot as usize].checked_sub(1)
    }

    fn set_newer(&mut self, slot: u32, other: Option<u32>) {
        self.newer[slot as usize] = other.map_or(0, |other| other + 1);
    }

    fn set_older(&mut self, slot: u32, other: Option<u32>) {
        self.older[slot as usize] = other.map_or(0, |other| other + 1);
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.newer.len() + self.older.len()) * size_of::<u32>()
    }
}

/// A list of slots from the newest to the oldest end.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct List {
    newest: Option<u32>,
    pub(crate) oldest: Option<u32>,
    len: usize,
}

impl List {
    pub(crate) fn push_newest(&mut self, links: &mut Links, slot: u32) {
        links.set_newer(slot, None);
        links.set_older(slot, self.newest);
        match self.newest.replace(slot) {
            Some(next) => links.set_newer(next, Some(slot)),
            None => self.oldest = Some(slot),
        }
        self.len += 1;
    }

    fn push_oldest(&mut self, links: &mut Links, slot: u32) {
        links.set_older(slot, None);
        links.set_newer(slot, self.oldest);
        match self.oldest.replace(slot) {
            Some(next) => links.set_older(next, Some(slot)),
            None => self.newest = Some(slot),
        }
        self.len += 1;
    }

    /// Puts `slot` on the older side of `next`, or at the newest end without one.
    fn push_older_than(&mut self, links: &mut Links, slot: u32, next: Option<u32>) {
        let Some(next) = next else {
            return self.push_newest(links, slot);
        };
        let Some(older) = links.older(next) else {
            return self.push_oldest(links, slot);
        };
        links.set_newer(slot, Some(next));
        links.set_older(slot, Some(older));
        links.set_older(next, Some(slot));
        links.set_newer(older, Some(slot));
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, links: &mut Links, slot: u32) {
        let (newer, older) = (links.newer(slot), links.older(slot));
        match newer {
            Some(newer) => links.set_older(newer, older),
            None => self.newest = older,
        }
        match older {
            Some(older) => links.set_newer(older, newer),
            None => self.oldest = newer,
        }
        self.len -= 1;
    }

    fn pop_oldest(&mut self, links: &mut Links) -> Option<u32> {
        let slot = self.oldest?;
        self.remove(links, slot);
        Some(slot)
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
