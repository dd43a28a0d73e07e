//! Least recently used, exactly, though hits only stamp the chunk.
//!
//! A radix heap (Ahuja et al., J. ACM 37, 1990) of (stamp, slot). Stamps only grow, so an entry may be behind the truth but
//! never ahead of it: entries are brought up to date when the heap spreads a bucket, and one that is up to date when it
//! comes out is the least recently used. Times never fall below the last one popped, which is all that a radix heap
//! asks for; each entry moves at most 64 times whatever the number of chunks.

use super::{Arrival, Heat, Policy};

#[derive(Clone, Copy, Debug)]
struct Entry {
    stamp: u64,
    slot: u32,
    ticket: u32,
}

#[derive(Debug)]
pub(super) struct Lru {
    /// An entry whose stamp first differs from `last` in bit b is in bucket b + 1.
    buckets: [Vec<Entry>; 65],
    last: u64,
    /// Even: not there. An entry counts only with the slot's present ticket.
    tickets: Vec<u32>,
    len: usize,
    entries: usize,
}

impl Lru {
    pub(super) fn new(slots: usize) -> Self {
        Self {
            buckets: [const { Vec::new() }; 65],
            last: 0,
            tickets: vec![0; slots],
            len: 0,
            entries: 0,
        }
    }

    fn push(&mut self, entry: Entry) {
        let entry = Entry {
            stamp: entry.stamp.max(self.last),
            ..entry
        };
        let bucket = u64::BITS - (entry.stamp ^ self.last).leading_zeros();
        self.buckets[bucket as usize].push(entry);
        self.entries += 1;
    }

    fn is_current(&self, entry: &Entry) -> bool {
        self.tickets[entry.slot as usize] == entry.ticket
    }

    /// Drops the entries of chunks that were removed, when they are the most.
    fn sweep(&mut self) {
        if self.entries > 2 * self.len + 64 {
            for bucket in &mut self.buckets {
                bucket.retain(|entry| self.tickets[entry.slot as usize] == entry.ticket);
            }
            self.entries = self.len;
        }
    }
}

impl Policy for Lru {
    fn insert(&mut self, slot: u32, _arrival: &Arrival, heat: &dyn Heat) {
        self.restore(slot, heat);
    }

    fn restore(&mut self, slot: u32, heat: &dyn Heat) {
        let ticket = &mut self.tickets[slot as usize];
        *ticket = ticket.wrapping_add(1);
        let ticket = *ticket;
        self.len += 1;
        self.push(Entry {
            stamp: heat.touched(slot),
            slot,
            ticket,
        });
        self.sweep();
    }

    fn remove(&mut self, slot: u32, _heat: &dyn Heat) {
        let ticket = &mut self.tickets[slot as usize];
        *ticket = ticket.wrapping_add(1);
        self.len -= 1;
        self.sweep();
    }

    fn pop(&mut self, heat: &dyn Heat) -> Option<u32> {
        while self.len > 0 {
            if let Some(entry) = self.buckets[0].pop() {
                self.entries -= 1;
                if !self.is_current(&entry) {
                    continue;
                }
                if heat.touched(entry.slot) <= self.last {
                    self.remove(entry.slot, heat);
                    return Some(entry.slot);
                }
                self.push(Entry {
                    stamp: heat.touched(entry.slot),
                    ..entry
                });
                continue;
            }
            let lowest = self.buckets.iter().position(|bucket| !bucket.is_empty())?;
            let mut spread = std::mem::take(&mut self.buckets[lowest]);
            self.entries -= spread.len();
            spread.retain(|entry| self.is_current(entry));
            for entry in &mut spread {
                entry.stamp = entry.stamp.max(heat.touched(entry.slot));
            }
            // Entries that moved on must not pull `last` over those in higher buckets: only the bucket's own range counts.
            let ceiling = if lowest == 64 {
                u64::MAX
            } else {
                self.last | ((1 << lowest) - 1)
            };
            let least = spread
                .iter()
                .map(|entry| entry.stamp)
                .min()
                .unwrap_or(self.last);
            self.last = least.min(ceiling);
            for entry in spread.drain(..) {
                self.push(entry);
            }
        }
        None
    }

    fn len(&self) -> usize {
        self.len
    }

    fn bytes(&self) -> usize {
        let entries: usize = self.buckets.iter().map(Vec::capacity).sum();
        self.tickets.len() * size_of::<u32>() + entries * size_of::<Entry>()
    }
}
