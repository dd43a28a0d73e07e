//! What happened to chunks, in a bounded ring: a reader who comes too late learns how much was lost.

use std::collections::VecDeque;

use crate::key::Key;

/// Kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A new chunk is resident.
    Stored,
    /// A record of higher rank took the place of the resident one.
    Replaced,
    /// The chunk made room.
    Evicted,
    /// The chunk was dropped on request.
    Cleared,
}

impl EventKind {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stored => "stored",
            Self::Replaced => "replaced",
            Self::Evicted => "evicted",
            Self::Cleared => "cleared",
        }
    }
}

/// Something that happened to a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub kind: EventKind,
    /// To which chunk.
    pub key: Key,
    /// Counts all events of a store from 0.
    pub sequence: u64,
}

#[derive(Debug)]
pub(crate) struct Events {
    ring: VecDeque<Event>,
    capacity: usize,
    next: u64,
    lost: u64,
}

impl Events {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            ring: VecDeque::new(),
            capacity,
            next: 0,
            lost: 0,
        }
    }

    pub(crate) fn push(&mut self, kind: EventKind, key: Key) {
        if self.ring.len() == self.capacity {
            self.lost += 1;
            self.ring.pop_front();
        }
        if self.capacity > 0 {
            self.ring.push_back(Event {
                kind,
                key,
                sequence: self.next,
            });
        }
        self.next += 1;
    }

    /// Oldest events not yet read, and how many were lost since the last call.
    pub(crate) fn take(&mut self, limit: usize) -> (Vec<Event>, u64) {
        let count = limit.min(self.ring.len());
        (
            self.ring.drain(..count).collect(),
            std::mem::take(&mut self.lost),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slow reader gets the newest events in order and the exact number that it missed.
    #[test]
    fn the_ring_keeps_the_newest_and_counts_the_lost() {
        let mut events = Events::new(3);
        for n in 0..5 {
            events.push(EventKind::Stored, [n; 32]);
        }
        let (first, lost) = events.take(2);
        assert_eq!(
            first.iter().map(|event| event.sequence).collect::<Vec<_>>(),
            [2, 3]
        );
        assert_eq!(lost, 2);
        let (rest, lost) = events.take(10);
        assert_eq!((rest.len(), rest[0].key, lost), (1, [4; 32], 0));
    }

    /// Without room every event is lost, and counted.
    #[test]
    fn no_capacity_keeps_nothing() {
        let mut events = Events::new(0);
        events.push(EventKind::Evicted, [0; 32]);
        assert_eq!(events.take(10), (vec![], 1));
    }
}
