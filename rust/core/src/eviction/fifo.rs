//! First in, first out: use doesn't matter.

use super::{Arrival, Heat, Links, List, Policy};

#[derive(Debug)]
pub(super) struct Fifo {
    links: Links,
    list: List,
}

impl Fifo {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            links: Links::new(slots),
            list: List::default(),
        }
    }
}

impl Policy for Fifo {
    fn insert(&mut self, slot: u32, _arrival: &Arrival, _heat: &dyn Heat) {
        self.list.push_newest(&mut self.links, slot);
    }

    fn restore(&mut self, slot: u32, _heat: &dyn Heat) {
        self.list.push_oldest(&mut self.links, slot);
    }

    fn remove(&mut self, slot: u32, _heat: &dyn Heat) {
        self.list.remove(&mut self.links, slot);
    }

    fn pop(&mut self, _heat: &dyn Heat) -> Option<u32> {
        self.list.pop_oldest(&mut self.links)
    }

    fn len(&self) -> usize {
        self.list.len
    }

    fn bytes(&self) -> usize {
        self.links.bytes()
    }
}
