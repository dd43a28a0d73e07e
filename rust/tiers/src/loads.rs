//! Loading on demand: tickets, one load for all who ask for a key, and the proof of what comes.
//!
//! A ticket's owner waits for as long as it likes; the loads go on in threads of their own, so a tier that hangs holds
//! nobody but its ticket. Every record is proved before it is published: both checksums, the key and the namespace asked
//! for, and the key as the hash of namespace, parent and tokens.

use std::collections::{HashMap, VecDeque};
use std::io::{PipeReader, PipeWriter, Write, pipe};
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use blendstore_codec::{Codec, Frame, FrameError, Head};
use blendstore_core::{Admission, Admitted, Facts, Key, Namespace, Record, Shape, Store};

use crate::copies::Copies;
use crate::store::{Coders, Level};
use crate::tier::Sink;
use crate::writes::Writes;

/// Keys of one call of a tier.
const BATCH: usize = 64;
/// Keys that may wait to be loaded; more are misses.
const WAITING: usize = 1 << 16;

/// What became of one key of a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// Not known yet.
    Pending = 0,
    /// It was in memory when it was asked for.
    Resident = 1,
    /// It is in memory now.
    Loaded = 2,
    /// No tier has it, or none could bring it.
    Missed = 3,
    /// The ticket was cancelled first.
    Cancelled = 4,
}

/// Keys on their way into memory. What was loaded stays there until the ticket is dropped; so does interest in the rest.
#[derive(Debug)]
pub struct Ticket(Arc<Awaited>);

#[derive(Debug)]
struct Awaited {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Debug)]
struct State {
    outcomes: Vec<Outcome>,
    pending: usize,
    /// Pins of what was loaded.
    records: Vec<Arc<Record>>,
    pipe: Option<(PipeReader, Option<PipeWriter>)>,
}

impl Awaited {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn settle(&self, index: usize, outcome: Outcome, record: Option<&Arc<Record>>) {
        let mut state = self.state();
        if state.outcomes[index] != Outcome::Pending {
            return;
        }
        state.outcomes[index] = outcome;
        state.records.extend(record.cloned());
        state.pending -= 1;
        if state.pending == 0 {
            ring(&mut state);
            self.bell.notify_all();
        }
    }
}

/// Makes the pipe readable: a byte, and its end.
fn ring(state: &mut State) {
    if let Some(mut writer) = state.pipe.as_mut().and_then(|(_, writer)| writer.take()) {
        // A reader who is gone needs no byte.
        let _ = writer.write_all(&[1]);
    }
}

impl Ticket {
    /// What is not in memory is pending, or missed if there is nothing `below`.
    fn new(memory: &Store, keys: &[Key], below: bool) -> Self {
        let outcomes: Vec<Outcome> = memory
            .contains(keys)
            .iter()
            .map(|&found| match found {
                0 if below => Outcome::Pending,
                0 => Outcome::Missed,
                _ => Outcome::Resident,
            })
            .collect();
        let pending = outcomes
            .iter()
            .filter(|outcome| **outcome == Outcome::Pending)
            .count();
        Self(Arc::new(Awaited {
            state: Mutex::new(State {
                outcomes,
                pending,
                records: Vec::new(),
                pipe: None,
            }),
            bell: Condvar::new(),
        }))
    }

    /// Of a store without tiers.
    pub(crate) fn of_memory(memory: &Store, keys: &[Key]) -> Self {
        Self::new(memory, keys, false)
    }

    /// Waits until nothing is pending, or for `at_most`; whether nothing is.
    pub fn wait(&self, at_most: Duration) -> bool {
        let state = self.0.state();
        let waiting = self
            .0
            .bell
            .wait_timeout_while(state, at_most, |state| state.pending > 0);
        waiting.unwrap_or_else(PoisonError::into_inner).0.pending == 0
    }

    /// Whether nothing is pending.
    pub fn poll(&self) -> bool {
        self.0.state().pending == 0
    }

    /// What became of each key so far, in the order asked for.
    pub fn outcomes(&self) -> Vec<Outcome> {
        self.0.state().outcomes.clone()
    }

    /// A file descriptor that becomes readable when nothing is pending, for `poll` and event loops. It is the ticket's: valid
    /// while that lives, and not to be read from or closed.
    ///
    /// # Errors
    /// If the process has no descriptor left.
    pub fn fd(&self) -> std::io::Result<RawFd> {
        let mut state = self.0.state();
        if state.pipe.is_none() {
            let (reader, writer) = pipe()?;
            state.pipe = Some((reader, Some(writer)));
            if state.pending == 0 {
                ring(&mut state);
            }
        }
        let (reader, _) = state.pipe.as_ref().expect("just made");
        Ok(reader.as_raw_fd())
    }

    /// Waits for nothing any more. Loads that nobody else waits for are not begun.
    pub fn cancel(&self) {
        let mut state = self.0.state();
        for outcome in &mut state.outcomes {
            if *outcome == Outcome::Pending {
                *outcome = Outcome::Cancelled;
            }
        }
        state.pending = 0;
        ring(&mut state);
        drop(state);
        self.0.bell.notify_all();
    }
}

/// Counters of loading. `in_flight` is a gauge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadStats {
    /// Keys asked for that were not in memory.
    pub requested: u64,
    /// Records brought into memory.
    pub loaded: u64,
    /// Keys that no tier brought.
    pub missed: u64,
    /// Keys that somebody was loading already.
    pub coalesced: u64,
    /// Keys that nobody waited for any more when their turn came.
    pub cancelled: u64,
    /// Records that were refused: damaged, or not the one asked for.
    pub refused: u64,
    /// Keys queued or being loaded.
    pub in_flight: u64,
}

impl LoadStats {
    /// Names and values.
    pub fn rows(&self) -> [(&'static str, u64); 7] {
        [
            ("requested", self.requested),
            ("loaded", self.loaded),
            ("missed", self.missed),
            ("coalesced", self.coalesced),
            ("cancelled", self.cancelled),
            ("refused", self.refused),
            ("in_flight", self.in_flight),
        ]
    }
}

#[derive(Debug, Default)]
struct Counters {
    requested: AtomicU64,
    loaded: AtomicU64,
    missed: AtomicU64,
    coalesced: AtomicU64,
    cancelled: AtomicU64,
    refused: AtomicU64,
}

/// A key on its way.
#[derive(Debug)]
struct Flight {
    namespace: Namespace,
    waiting: Vec<(Weak<Awaited>, usize)>,
    /// Cleared meanwhile: what comes is not wanted.
    void: bool,
}

#[derive(Debug, Default)]
struct Traffic {
    flights: HashMap<Key, Flight>,
    queue: VecDeque<Key>,
    /// Namespaces (`None`: all) that are being cleared.
    clearing: Vec<Option<Namespace>>,
    ended: bool,
}

impl Traffic {
    fn clears(&self, namespace: &Namespace) -> bool {
        self.clearing
            .iter()
            .any(|cleared| cleared.is_none_or(|cleared| cleared == *namespace))
    }
}

/// While this lives nothing of a namespace (or nothing at all) is loaded: a tier that is still to be cleared would bring back
/// what the clear has taken from those above it.
#[derive(Debug)]
pub(crate) struct Clearing<'a> {
    loads: &'a Loads,
    namespace: Option<Namespace>,
}

impl Drop for Clearing<'_> {
    fn drop(&mut self) {
        let mut traffic = self.loads.traffic();
        let here = traffic
            .clearing
            .iter()
            .position(|cleared| *cleared == self.namespace);
        if let Some(here) = here {
            traffic.clearing.swap_remove(here);
        }
    }
}

/// Loads of one store.
#[derive(Debug)]
pub(crate) struct Loads {
    memory: Store,
    levels: Vec<Level>,
    coders: Coders,
    writes: Arc<Vec<Writes>>,
    traffic: Mutex<Traffic>,
    bell: Condvar,
    counters: Counters,
}

impl Loads {
    pub(crate) fn new(
        memory: Store,
        levels: Vec<Level>,
        coders: Coders,
        writes: Arc<Vec<Writes>>,
    ) -> Self {
        Self {
            memory,
            levels,
            coders,
            writes,
            traffic: Mutex::default(),
            bell: Condvar::new(),
            counters: Counters::default(),
        }
    }

    fn traffic(&self) -> MutexGuard<'_, Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn request(&self, namespace: &Namespace, keys: &[Key]) -> Ticket {
        let ticket = Ticket::new(&self.memory, keys, !self.levels.is_empty());
        let outcomes = ticket.outcomes();
        let pending = outcomes
            .iter()
            .filter(|outcome| **outcome == Outcome::Pending)
            .count();
        if pending == 0 {
            return ticket;
        }
        self.counters.requested.fetch_add(pending as u64, Relaxed);
        let mut refused = Vec::new();
        let mut traffic = self.traffic();
        for (index, key) in keys
            .iter()
            .enumerate()
            .filter(|(index, _)| outcomes[*index] == Outcome::Pending)
        {
            let waiter = (Arc::downgrade(&ticket.0), index);
            if let Some(flight) = traffic
                .flights
                .get_mut(key)
                .filter(|flight| flight.namespace == *namespace)
            {
                flight.waiting.push(waiter);
                self.counters.coalesced.fetch_add(1, Relaxed);
            } else if traffic.ended
                || traffic.clears(namespace)
                || traffic.queue.len() >= WAITING
                || traffic.flights.contains_key(key)
            {
                refused.push(index);
            } else {
                let flight = Flight {
                    namespace: *namespace,
                    waiting: vec![waiter],
                    void: false,
                };
                traffic.flights.insert(*key, flight);
                traffic.queue.push_back(*key);
            }
        }
        drop(traffic);
        self.bell.notify_all();
        for index in refused {
            self.counters.missed.fetch_add(1, Relaxed);
            ticket.0.settle(index, Outcome::Missed, None);
        }
        ticket
    }

    /// What is on its way of a namespace (or at all) is not wanted any more, and nothing is begun until the result is dropped.
    pub(crate) fn void(&self, namespace: Option<&Namespace>) -> Clearing<'_> {
        let mut traffic = self.traffic();
        for flight in traffic.flights.values_mut() {
            flight.void |= namespace.is_none_or(|namespace| *namespace == flight.namespace);
        }
        traffic.clearing.push(namespace.copied());
        Clearing {
            loads: self,
            namespace: namespace.copied(),
        }
    }

    /// Loads until the end.
    pub(crate) fn run(&self) {
        while let Some((namespace, keys)) = self.next() {
            // A tier that panics has misses, like any that fails.
            let loading = AssertUnwindSafe(|| self.load(&namespace, keys.clone()));
            if catch_unwind(loading).is_err() {
                for key in &keys {
                    self.land(key, None);
                }
            }
        }
    }

    /// The next keys of one namespace that somebody still waits for.
    fn next(&self) -> Option<(Namespace, Vec<Key>)> {
        let mut traffic = self.traffic();
        loop {
            if traffic.ended {
                return None;
            }
            let mut batch: Option<(Namespace, Vec<Key>)> = None;
            while let Some(key) = traffic.queue.front().copied() {
                let Some(flight) = traffic.flights.get_mut(&key) else {
                    traffic.queue.pop_front();
                    continue;
                };
                flight.waiting.retain(|(ticket, index)| {
                    ticket
                        .upgrade()
                        .is_some_and(|ticket| ticket.state().outcomes[*index] == Outcome::Pending)
                });
                if flight.waiting.is_empty() {
                    self.counters.cancelled.fetch_add(1, Relaxed);
                    traffic.flights.remove(&key);
                    traffic.queue.pop_front();
                    continue;
                }
                let (namespace, keys) = batch.get_or_insert_with(|| (flight.namespace, Vec::new()));
                if *namespace != flight.namespace || keys.len() == BATCH {
                    break;
                }
                keys.push(key);
                traffic.queue.pop_front();
            }
            if batch.is_some() {
                return batch;
            }
            traffic = self
                .bell
                .wait(traffic)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn load(&self, namespace: &Namespace, mut missing: Vec<Key>) {
        for (number, level) in self.levels.iter().enumerate() {
            if missing.is_empty() {
                return;
            }
            let mut arrivals = Arrivals {
                loads: self,
                namespace,
                keys: &missing,
                above: &self.writes[..number],
                copies: &self.writes[number].copies,
                admissions: missing.iter().map(|_| None).collect(),
                done: vec![false; missing.len()],
                bytes: 0,
                full: false,
                tier: level.tier.name(),
            };
            let since = Instant::now();
            level.tier.get(&missing, &mut arrivals);
            let Arrivals {
                copies,
                done,
                bytes,
                full,
                ..
            } = arrivals;
            // To wait for room in memory is no fault of the tier's.
            let bytes = if full { 0 } else { bytes };
            copies.read(&self.memory, &missing, &done, bytes, since.elapsed());
            copies.settle(&self.memory, &*level.tier);
            let mut done = done.into_iter();
            missing.retain(|_| !done.next().unwrap_or(false));
        }
        for key in missing {
            self.land(&key, None);
        }
    }

    /// Tells everybody who waits for a key what became of it.
    fn land(&self, key: &Key, record: Option<&Arc<Record>>) {
        let Some(flight) = self.traffic().flights.remove(key) else {
            return;
        };
        let (counter, outcome) = match record {
            Some(_) => (&self.counters.loaded, Outcome::Loaded),
            None => (&self.counters.missed, Outcome::Missed),
        };
        counter.fetch_add(1, Relaxed);
        for (ticket, index) in flight.waiting {
            if let Some(ticket) = ticket.upgrade() {
                ticket.settle(index, outcome, record);
            }
        }
    }

    /// Takes a record that was proved and queues it for the tiers above the one it came from, unless it was cleared meanwhile.
    /// Under the lock, so that `void` comes before or after both.
    fn keep(
        &self,
        key: &Key,
        above: &[Writes],
        record: impl FnOnce() -> Option<Record>,
    ) -> Option<Arc<Record>> {
        let traffic = self.traffic();
        if traffic.flights.get(key).is_none_or(|flight| flight.void) {
            return None;
        }
        let record = Arc::new(record()?);
        for writes in above {
            writes.push(std::slice::from_ref(&record));
        }
        Some(record)
    }

    /// Begins no more loads; what was not begun is missed.
    pub(crate) fn end(&self) {
        let mut traffic = self.traffic();
        traffic.ended = true;
        let queue = std::mem::take(&mut traffic.queue);
        drop(traffic);
        self.bell.notify_all();
        for key in queue {
            self.land(&key, None);
        }
    }

    /// Keys that no loader has taken yet.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.traffic().queue.len()
    }

    pub(crate) fn stats(&self) -> LoadStats {
        let counters = &self.counters;
        LoadStats {
            requested: counters.requested.load(Relaxed),
            loaded: counters.loaded.load(Relaxed),
            missed: counters.missed.load(Relaxed),
            coalesced: counters.coalesced.load(Relaxed),
            cancelled: counters.cancelled.load(Relaxed),
            refused: counters.refused.load(Relaxed),
            in_flight: self.traffic().flights.len() as u64,
        }
    }
}

/// Records of one call of a tier, on their way into memory.
struct Arrivals<'a> {
    loads: &'a Loads,
    namespace: &'a Namespace,
    keys: &'a [Key],
    /// Queues of the tiers above this one.
    above: &'a [Writes],
    /// What memory knows of this one.
    copies: &'a Copies,
    admissions: Vec<Option<Admission>>,
    /// The tier has it.
    done: Vec<bool>,
    /// Of payloads that came.
    bytes: u64,
    /// A record found no room: the next ones would only wait for it in vain, too.
    full: bool,
    tier: &'a str,
}

impl Arrivals<'_> {
    fn admit(&mut self, index: usize, shape: &Shape) -> Option<Admission> {
        if self.done[index] {
            return None;
        }
        let admitted = if self.full {
            Admitted::Full
        } else {
            self.loads
                .memory
                .admit(self.namespace, &self.keys[index], shape)
        };
        match admitted {
            Admitted::Room(admission) => Some(admission),
            Admitted::Resident(record) => {
                self.arrive(index, || Some(record));
                None
            }
            Admitted::BeingWritten | Admitted::Full => {
                self.full |= matches!(admitted, Admitted::Full);
                // No other tier would find room either.
                self.done[index] = true;
                self.loads.land(&self.keys[index], None);
                None
            }
        }
    }

    /// Whoever waits for a record is told of it last, so that a `flush` after that covers its writes.
    fn arrive(
        &mut self,
        index: usize,
        record: impl FnOnce() -> Option<Record>,
    ) -> Option<Arc<Record>> {
        let key = &self.keys[index];
        let record = self.loads.keep(key, self.above, record)?;
        self.done[index] = true;
        self.loads.land(key, Some(&record));
        Some(record)
    }

    /// Publishes what lies in the admission's room, if head and tokens prove that it belongs there.
    fn finish(&mut self, index: usize, head: &Head<'_>, tokens: &[u32], admission: Admission) {
        let header = &head.header;
        let scores = head.scores();
        let facts = Facts {
            parent: &header.parent,
            tokens,
            scores: scores.as_deref(),
            context: &header.context,
            behind: head.behind(),
            behind_tokens: header.behind_tokens,
            source_position: header.source_position,
            segment_offset: header.segment_offset,
            provenance: header.provenance,
            rank: header.rank,
        };
        let Shape {
            ntokens,
            bytes_per_token,
            ..
        } = admission.shape();
        let record = self.arrive(index, || admission.publish(&facts));
        self.bytes += (ntokens * bytes_per_token) as u64;
        self.copies.are_there(&self.loads.memory, record.iter());
    }

    fn refuse(&self, why: impl std::fmt::Display) -> bool {
        self.loads.counters.refused.fetch_add(1, Relaxed);
        log::debug!("a record of tier {} is refused: {why}", self.tier);
        false
    }
}

impl Arrivals<'_> {
    /// A record of another namespace is in its place: it is who asked for it that isn't, and must not make it go.
    fn refuse_proof(&self, error: &FrameError) -> bool {
        self.refuse(error) || *error == FrameError::Identity("namespace")
    }
}

fn shape_of(head: &Head<'_>) -> Shape {
    Shape {
        ntokens: head.header.ntokens as usize,
        bytes_per_token: head.header.bytes_per_token as usize,
        scores: head.has_scores(),
        nbehind: head.nbehind(),
    }
}

// SAFETY: an admission keeps its room until it is taken by `filled`, `failed` or the drop, and `room` gives each index one.
unsafe impl Sink for Arrivals<'_> {
    fn room(&mut self, index: usize, shape: &Shape) -> Option<NonNull<[u8]>> {
        if self.admissions[index].is_some() {
            return None;
        }
        let mut admission = self.admit(index, shape)?;
        let room = admission.payload();
        self.admissions[index] = Some(admission);
        Some(room)
    }

    fn filled(&mut self, index: usize, head: &[u8]) -> bool {
        let Some(mut admission) = self.admissions[index].take() else {
            return false;
        };
        let head = match Head::parse(head) {
            Ok(head) => head,
            Err(error) => return self.refuse(error),
        };
        // SAFETY: ours alone from here on, and initialised: the arena's pages are.
        let payload = unsafe { admission.payload().as_ref() };
        let tokens = head.tokens();
        let proved = head.check_payload(payload).and_then(|()| {
            head.header
                .verify(self.namespace, &self.keys[index], &tokens)
        });
        if let Err(error) = proved {
            return self.refuse_proof(&error);
        }
        if head.header.codec != Codec::RAW || admission.shape() != shape_of(&head) {
            return self.refuse("its shape is not the one that was announced");
        }
        self.finish(index, &head, &tokens, admission);
        true
    }

    fn failed(&mut self, index: usize) {
        self.admissions[index] = None;
    }

    fn frame(&mut self, index: usize, frame: &[u8]) -> bool {
        if self.done[index] {
            return true;
        }
        let frame = match Frame::parse(frame) {
            Ok(frame) => frame,
            Err(error) => return self.refuse(error),
        };
        let (head, tokens) = (frame.head, frame.head.tokens());
        let proved = head
            .header
            .verify(self.namespace, &self.keys[index], &tokens);
        if let Err(error) = proved {
            return self.refuse_proof(&error);
        }
        let Some(coder) = self.loads.coders.get(&head.header.codec).cloned() else {
            return self.refuse(format_args!("coding {} is not known", head.header.codec.0));
        };
        let Some(mut admission) = self.admit(index, &shape_of(&head)) else {
            return true;
        };
        // SAFETY: ours alone, and initialised: the arena's pages are.
        let payload = unsafe { admission.payload().as_mut() };
        if let Err(error) = coder.decode(&head.header, head.params, frame.payload, payload) {
            return self.refuse(error);
        }
        self.finish(index, &head, &tokens, admission);
        true
    }
}
