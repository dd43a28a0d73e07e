//! S3-FIFO (Yang et al., SOSP 2023): newcomers pass through a small queue, and only those used more than once there, or
//! that come back while they are remembered as ghosts, enter the main queue, where use gives another round.

use super::{Arrival, Heat, Links, List, Policy};

/// Share of the chunks that the small queue keeps, one in this many.
const SMALL: usize = 10;

#[derive(Debug)]
pub(super) struct S3Fifo {
    links: Links,
    small: List,
    main: List,
    in_main: Vec<bool>,
    ghosts: Ghosts,
}

impl S3Fifo {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            links: Links::new(slots),
            small: List::default(),
            main: List::default(),
            in_main: vec![false; slots],
            ghosts: Ghosts::new(slots),
        }
    }

    fn queue(&mut self, slot: u32) -> (&mut List, &mut Links) {
        let list = if self.in_main[slot as usize] {
            &mut self.main
        } else {
            &mut self.small
        };
        (list, &mut self.links)
    }
}

impl Policy for S3Fifo {
    fn insert(&mut self, slot: u32, arrival: &Arrival, _heat: &dyn Heat) {
        self.in_main[slot as usize] = self.ghosts.take(arrival.fingerprint as u32, self.main.len);
        self.ghosts.name(slot, arrival.fingerprint as u32);
        let (list, links) = self.queue(slot);
        list.push_newest(links, slot);
    }

    fn restore(&mut self, slot: u32, _heat: &dyn Heat) {
        let (list, links) = self.queue(slot);
        list.push_oldest(links, slot);
    }

    fn remove(&mut self, slot: u32, _heat: &dyn Heat) {
        let (list, links) = self.queue(slot);
        list.remove(links, slot);
    }

    fn pop(&mut self, heat: &dyn Heat) -> Option<u32> {
        loop {
            let small_is_full = self.small.len * SMALL >= self.len();
            if self.main.len == 0 || self.small.len > 0 && small_is_full {
                let slot = self.small.pop_oldest(&mut self.links)?;
                if heat.hits(slot) <= 1 {
                    self.ghosts.remember(slot);
                    return Some(slot);
                }
                heat.set_hits(slot, 0);
                self.in_main[slot as usize] = true;
                self.main.push_newest(&mut self.links, slot);
            } else {
                let slot = self.main.pop_oldest(&mut self.links)?;
                let hits = heat.hits(slot);
                if hits == 0 {
                    return Some(slot);
                }
                heat.set_hits(slot, hits - 1);
                self.main.push_newest(&mut self.links, slot);
            }
        }
    }

    fn len(&self) -> usize {
        self.small.len + self.main.len
    }

    fn bytes(&self) -> usize {
        self.links.bytes() + self.in_main.len() + self.ghosts.bytes()
    }
}

/// Fingerprints of the last chunks that left the small queue, in a table where a new one overwrites whatever shares its
/// place. An entry counts while fewer than `main` others came after it.
#[derive(Debug)]
struct Ghosts {
    /// `fingerprint << 32 | number of the departure`, which counts from 1.
    table: Vec<u64>,
    departures: u32,
    /// Fingerprints of the chunks that are there, by slot.
    names: Vec<u32>,
}

impl Ghosts {
    fn new(slots: usize) -> Self {
        Self {
            table: vec![0; slots.next_power_of_two()],
            departures: 0,
            names: vec![0; slots],
        }
    }

    fn place(&self, fingerprint: u32) -> usize {
        fingerprint as usize & (self.table.len() - 1)
    }

    fn name(&mut self, slot: u32, fingerprint: u32) {
        self.names[slot as usize] = fingerprint;
    }

    fn remember(&mut self, slot: u32) {
        self.departures = self.departures.wrapping_add(1).max(1);
        let fingerprint = self.names[slot as usize];
        let place = self.place(fingerprint);
        self.table[place] = u64::from(fingerprint) << 32 | u64::from(self.departures);
    }

    /// True, once, when that chunk left lately.
    fn take(&mut self, fingerprint: u32, reach: usize) -> bool {
        let place = self.place(fingerprint);
        let (known, number) = ((self.table[place] >> 32) as u32, self.table[place] as u32);
        let lately = number != 0 && (self.departures.wrapping_sub(number) as usize) < reach.max(1);
        if known == fingerprint && lately {
            self.table[place] = 0;
            return true;
        }
        false
    }

    fn bytes(&self) -> usize {
        self.table.len() * size_of::<u64>() + self.names.len() * size_of::<u32>()
    }
}
