//! Use of chunks in plain cells, by slot, for what drives a policy outside of a store: the simulator, tests and benches.

use std::cell::Cell;

use super::Heat;

/// Hits and the time of the last use of each slot.
#[derive(Debug)]
pub struct Uses {
    hits: Vec<Cell<u32>>,
    touched: Vec<Cell<u64>>,
    cap: u32,
}

impl Uses {
    /// Of `slots` slots that were never used; hits are counted up to `cap`.
    pub fn new(slots: usize, cap: u32) -> Self {
        Self {
            hits: vec![Cell::new(0); slots],
            touched: vec![Cell::new(0); slots],
            cap,
        }
    }

    /// A chunk enters the slot at time `now`.
    pub fn enter(&self, slot: u32, now: u64) {
        self.touched[slot as usize].set(now);
        self.hits[slot as usize].set(0);
    }

    /// The slot's chunk is used at time `now`.
    pub fn hit(&self, slot: u32, now: u64) {
        let (hits, touched) = (&self.hits[slot as usize], &self.touched[slot as usize]);
        touched.set(touched.get().max(now));
        hits.set((hits.get() + 1).min(self.cap));
    }
}

impl Heat for Uses {
    fn hits(&self, slot: u32) -> u32 {
        self.hits[slot as usize].get()
    }

    fn set_hits(&self, slot: u32, hits: u32) {
        self.hits[slot as usize].set(hits);
    }

    fn touched(&self, slot: u32) -> u64 {
        self.touched[slot as usize].get()
    }
}
