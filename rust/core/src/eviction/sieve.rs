//! SIEVE (Zhang et al., NSDI 2024): one queue in order of arrival and a hand that moves from old to new, clears the mark of
//! used chunks and evicts the first that has none.

use super::{Arrival, Heat, Links, List, Policy};

#[derive(Debug)]
pub(super) struct Sieve {
    links: Links,
    list: List,
    /// The chunk that is looked at next; none is the oldest.
    hand: Option<u32>,
}

impl Sieve {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            links: Links::new(slots),
            list: List::default(),
            hand: None,
        }
    }
}

impl Policy for Sieve {
    fn insert(&mut self, slot: u32, _arrival: &Arrival, _heat: &dyn Heat) {
        self.list.push_newest(&mut self.links, slot);
    }

    /// Under the hand.
    fn restore(&mut self, slot: u32, _heat: &dyn Heat) {
        let next = self.hand.or(self.list.oldest);
        self.list.push_older_than(&mut self.links, slot, next);
        self.hand = Some(slot);
    }

    fn remove(&mut self, slot: u32, _heat: &dyn Heat) {
        if self.hand == Some(slot) {
            self.hand = self.links.newer(slot);
        }
        self.list.remove(&mut self.links, slot);
    }

    fn pop(&mut self, heat: &dyn Heat) -> Option<u32> {
        loop {
            let slot = self.hand.or(self.list.oldest)?;
            if heat.hits(slot) == 0 {
                self.hand = Some(slot);
                self.remove(slot, heat);
                return Some(slot);
            }
            heat.set_hits(slot, 0);
            self.hand = self.links.newer(slot);
        }
    }

    fn len(&self) -> usize {
        self.list.len
    }

    fn bytes(&self) -> usize {
        self.links.bytes()
    }
}
