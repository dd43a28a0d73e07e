//! Copies of resident records in tiers below, as far as eviction cares: which tiers have one, and what it takes to get it.
//!
//! Whoever keeps the tiers tells ([`Store::copied`](crate::Store::copied) and its neighbours); a record that nothing was
//! told of has no copy. What is told late errs on the safe side if it is a copy that has come; a copy that has gone makes
//! its record go too early until that is told.

use crate::eviction::{Below, PLACES};

/// What it takes to bring records up from one tier.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fetch {
    /// Seconds for each byte of payload, all that it waits for included.
    pub seconds_per_byte: f64,
    /// Share of the copies thought to be there that came when they were asked for.
    pub found: f64,
}

/// Speeds, and what follows from them for the policy.
#[derive(Debug)]
pub(crate) struct Speeds {
    /// Tokens that a prefill computes in a second at position 0.
    prefill: f64,
    /// Running mean over new records.
    bytes_per_token: f64,
    records: f64,
    fetch: [Option<Fetch>; PLACES - 1],
}

/// Records that the mean is taken over, about.
const MEAN: f64 = 1024.0;

/// The policy's place for a tier. Tiers beyond the last place share it.
pub(crate) fn place_of(level: usize) -> usize {
    (level + 1).min(PLACES - 1)
}

/// The place of a record with these copies: that of the first tier that has one, which loads ask first.
pub(crate) fn place(copies: u8) -> usize {
    match copies {
        0 => 0,
        _ => place_of(copies.trailing_zeros() as usize),
    }
}

impl Speeds {
    pub(crate) fn new(prefill: f64) -> Self {
        Self {
            prefill,
            bytes_per_token: 0.0,
            records: 0.0,
            fetch: [None; PLACES - 1],
        }
    }

    pub(crate) fn set_prefill(&mut self, tokens_per_second: f64) {
        self.prefill = tokens_per_second;
    }

    pub(crate) fn set_fetch(&mut self, place: usize, fetch: Fetch) {
        self.fetch[place - 1] = Some(fetch);
    }

    /// A record has come.
    pub(crate) fn record(&mut self, bytes_per_token: u32) {
        self.records = (self.records + 1.0).min(MEAN);
        self.bytes_per_token += (f64::from(bytes_per_token) - self.bytes_per_token) / self.records;
    }

    /// What copies are good for, by place from 1 on, as far as that has been told.
    pub(crate) fn below(&self) -> impl Iterator<Item = (usize, Below)> {
        let unit = self.bytes_per_token * self.prefill;
        let known = self.fetch.iter().copied().enumerate();
        known.filter_map(move |(at, fetch)| {
            let Fetch {
                seconds_per_byte,
                found,
            } = fetch?;
            let load = seconds_per_byte * unit;
            Some((at + 1, Below { load, found }))
        })
    }
}
