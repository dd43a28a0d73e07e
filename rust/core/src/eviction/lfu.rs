//! Least frequently used; among equals the one that has been at its count for longest.
//!
//! One list per count. A chunk moves up when the search for a victim meets it with more hits than its list says: lists are
//! searched from the lowest, a count never falls, so whatever is found up to date has the fewest hits of all.

use super::{Arrival, Heat, Links, List, Policy};

/// Counts stop here.
pub(super) const CAP: u32 = 255;

#[derive(Debug)]
pub(super) struct Lfu {
    links: Links,
    count: Vec<u8>,
    lists: [List; CAP as usize + 1],
    /// No list below this one has members.
    lowest: usize,
    len: usize,
}

impl Lfu {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            links: Links::new(slots),
            count: vec![0; slots],
            lists: [List::default(); CAP as usize + 1],
            lowest: 0,
            len: 0,
        }
    }

    /// The list that the slot belongs to by its hits, which becomes the one it is in.
    fn place(&mut self, slot: u32, heat: &dyn Heat) -> usize {
        let count = heat.hits(slot).min(CAP) as usize;
        self.count[slot as usize] = count as u8;
        self.lowest = self.lowest.min(count);
        count
    }
}

impl Policy for Lfu {
    fn insert(&mut self, slot: u32, _arrival: &Arrival, heat: &dyn Heat) {
        let count = self.place(slot, heat);
        self.lists[count].push_newest(&mut self.links, slot);
        self.len += 1;
    }

    fn restore(&mut self, slot: u32, heat: &dyn Heat) {
        let count = self.place(slot, heat);
        self.lists[count].push_oldest(&mut self.links, slot);
        self.len += 1;
    }

    fn remove(&mut self, slot: u32, _heat: &dyn Heat) {
        self.lists[self.count[slot as usize] as usize].remove(&mut self.links, slot);
        self.len -= 1;
    }

    fn pop(&mut self, heat: &dyn Heat) -> Option<u32> {
        while self.len > 0 {
            let from = self.lowest;
            match self.lists[from].pop_oldest(&mut self.links) {
                None => self.lowest += 1,
                Some(slot) if heat.hits(slot).min(CAP) as usize > from => {
                    let count = self.place(slot, heat);
                    self.lists[count].push_newest(&mut self.links, slot);
                }
                Some(slot) => {
                    self.len -= 1;
                    return Some(slot);
                }
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.len
    }

    fn bytes(&self) -> usize {
        self.links.bytes() + self.count.len() + size_of::<Self>()
    }
}
