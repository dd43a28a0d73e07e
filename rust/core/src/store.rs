//! The store: chunks in memory, found by key without a lock.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::admission::{self, Admitted, Shape};
use crate::arena::{Arena, UNIT};
use crate::chunk::{Chunks, NIL};
use crate::copies::{self, Fetch, Speeds};
use crate::error::{Error, Result};
use crate::events::{Event, EventKind, Events};
use crate::eviction::PolicyKind;
use crate::index::{self, ChunkIndex, SlotTable};
use crate::key::Key;
use crate::lease::{Lease, Pin};
use crate::ledger::{HEAD, Ledger};
use crate::matcher::{Known, Match, Matcher, Resolver};
use crate::namespace::Namespace;
use crate::record;
use crate::reservation::{self, Request, Reservation};
use crate::resident::{Observer, Record};
use crate::stats::{Read, ReadCounters, Stats};
use crate::victims::Victims;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

/// Children of a chunk that the matcher is told of.
const MAX_CHILDREN: usize = 64;

/// How a store is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Bytes of the arena. A record takes its KV payload, 4 bytes a token (8 with scores) and 96 bytes, rounded up to 512.
    pub capacity_bytes: usize,
    /// Tokens of a full chunk.
    pub chunk_size: usize,
    /// Which chunk goes when room is needed.
    pub policy: PolicyKind,
    /// Share of the capacity that the namespaces of one tenant (one salt) may take together, above 0 and up to 1: no limit.
    pub tenant_share: f64,
    /// Most chunks at a time; by default one for each 16 KiB of capacity, 1,024 at least.
    pub max_chunks: Option<usize>,
    /// Time after which a lease no longer pins its chunks.
    pub lease_timeout: Duration,
    /// Longest wait for room of one `reserve`.
    pub reserve_wait: Duration,
    /// Events kept for a reader.
    pub events_capacity: usize,
    /// Tokens that a prefill computes in a second at position 0, until [`Store::set_prefill_speed`] tells: what loading from
    /// a tier below is compared with.
    pub prefill_speed: f64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            capacity_bytes: 1 << 30,
            chunk_size: 256,
            policy: PolicyKind::default(),
            tenant_share: 1.0,
            max_chunks: None,
            lease_timeout: Duration::from_secs(60),
            reserve_wait: Duration::from_millis(50),
            events_capacity: 4096,
            prefill_speed: 10_000.0,
        }
    }
}

impl Options {
    fn max_chunks(&self) -> usize {
        self.max_chunks
            .unwrap_or_else(|| (self.capacity_bytes >> 14).clamp(1 << 10, 1 << 24))
    }

    fn check(&self) -> Result<()> {
        let most = (u32::MAX as usize - 2).saturating_mul(UNIT);
        if !(UNIT..=most).contains(&self.capacity_bytes) {
            return Err(Error::argument(
                "capacity_bytes",
                self.capacity_bytes,
                format!("{UNIT} to {most} bytes"),
            ));
        }
        if !(1..=1 << 20).contains(&self.chunk_size) {
            return Err(Error::argument(
                "chunk_size",
                self.chunk_size,
                "1 to 1048576 tokens",
            ));
        }
        if !(self.tenant_share > 0.0 && self.tenant_share <= 1.0) {
            return Err(Error::argument(
                "tenant_share",
                self.tenant_share,
                "a share above 0 and up to 1",
            ));
        }
        if !(1..=1 << 30).contains(&self.max_chunks()) {
            return Err(Error::argument(
                "max_chunks",
                self.max_chunks(),
                "1 to 1073741824 chunks, or none to derive it",
            ));
        }
        check_speed(self.prefill_speed)
    }
}

fn check_speed(tokens_per_second: f64) -> Result<()> {
    if tokens_per_second.is_finite() && tokens_per_second > 0.0 {
        return Ok(());
    }
    let accepted = "tokens a second, a number above 0";
    Err(Error::argument(
        "prefill_tokens_per_s",
        tokens_per_second,
        accepted,
    ))
}

/// Chunk store in memory. Clones share it. Reads never take a lock, and a miss is never an error.
#[derive(Clone, Debug)]
pub struct Store {
    shared: Arc<Shared>,
}

/// What a store's handles, leases, views and reservations have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    pub options: Options,
    pub arena: Arena,
    pub chunks: Chunks,
    pub index: SlotTable,
    pub matcher: Matcher,
    pub reads: ReadCounters,
    pub returns: Returns,
    pub observer: Observer,
    ledger: Mutex<Ledger>,
    events: Mutex<Events>,
    opened: Instant,
}

impl Store {
    /// An empty store. Address space is taken at once, memory as it is used.
    pub fn open(options: Options) -> Result<Self> {
        options.check()?;
        let max_chunks = options.max_chunks();
        let share = options.tenant_share;
        let limit = (share < 1.0).then_some((options.capacity_bytes as f64 * share) as u64);
        let victims = Victims::new(options.policy.build(max_chunks), max_chunks, limit);
        let shared = Shared {
            options,
            arena: Arena::new(options.capacity_bytes)?,
            chunks: Chunks::new(max_chunks, options.policy.hit_cap())?,
            index: SlotTable::new(max_chunks)?,
            matcher: Matcher::new(max_chunks, options.chunk_size)?,
            reads: ReadCounters::default(),
            returns: Returns::default(),
            observer: Observer::default(),
            ledger: Mutex::new(Ledger::new(
                options.capacity_bytes,
                victims,
                Speeds::new(options.prefill_speed),
            )),
            events: Mutex::new(Events::new(options.events_capacity)),
            opened: Instant::now(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// How it was made.
    pub fn options(&self) -> &Options {
        &self.shared.options
    }

    /// Finds and pins the chunks of these keys.
    pub fn lookup(&self, keys: &[Key]) -> Lease {
        let shared = &self.shared;
        let now = shared.now();
        for key in keys {
            shared.index.prefetch(key);
        }
        for key in keys {
            // Looks at the first entry with the right tag only, to have its slot's line on the way.
            shared.index.find(key, |slot| {
                index::prefetch(shared.chunks.hot(slot));
                true
            });
        }
        Lease::new(
            shared,
            keys.iter()
                .enumerate()
                .map(|(index, key)| shared.lease(key, now + index as u64)),
            now,
        )
    }

    /// `lookup` of [`Namespace::segment_keys`].
    pub fn lookup_segments(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        bounds: &[(usize, usize)],
        head: bool,
    ) -> Result<Lease> {
        Ok(self.lookup(&namespace.segment_keys(
            tokens,
            bounds,
            self.shared.options.chunk_size,
            head,
        )?))
    }

    /// One byte per key, 1 for a resident chunk; pins and touches nothing.
    pub fn contains(&self, keys: &[Key]) -> Vec<u8> {
        let shared = &self.shared;
        keys.iter()
            .map(|key| {
                shared
                    .index
                    .find(key, |slot| shared.chunks.matches(slot, key))
                    .is_some()
                    .into()
            })
            .collect()
    }

    /// Room for every chunk of one segment. When the store is full it evicts, waits for at most `reserve_wait`, and then
    /// marks chunks as not wanted.
    pub fn reserve(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        request: &Request<'_>,
    ) -> Result<Reservation> {
        reservation::reserve(&self.shared, namespace, tokens, request)
    }

    /// Room for one record whose key is known and whose content is on its way from elsewhere. Evicts and waits as
    /// [`Store::reserve`] does.
    pub fn admit(&self, namespace: &Namespace, key: &Key, shape: &Shape) -> Admitted {
        admission::admit(&self.shared, namespace, key, shape)
    }

    /// The resident record of a key, kept for as long as the result lives. Counts as no lookup and no use.
    pub fn record(&self, key: &Key) -> Option<Record> {
        Record::find(&self.shared, key)
    }

    /// Has `observe` called with the records of every commit, on the thread that commits, after they are published. Once in
    /// the life of a store; false when somebody observes already.
    pub fn observe(&self, observe: impl Fn(Vec<Record>) + Send + Sync + 'static) -> bool {
        self.shared.observer.set(observe)
    }

    /// Notes that these records have a copy in the tier of that number, the first below memory being 0: they may go more
    /// cheaply. What is no longer resident is passed over.
    pub fn copied<'a>(&self, level: usize, records: impl IntoIterator<Item = &'a Record>) {
        let mut ledger = self.shared.ledger();
        for record in records.into_iter().filter(|record| record.is_resident()) {
            ledger.set_copy(&self.shared, record.slot(), level, true);
        }
    }

    /// Notes that the tier has no copy of these any more.
    pub fn uncopied(&self, level: usize, keys: &[Key]) {
        // Readers don't wait for the lock, writers do: not for long.
        for keys in keys.chunks(1024) {
            let mut ledger = self.shared.ledger();
            for key in keys {
                if let Some((slot, _)) = ledger.resident(&self.shared, key) {
                    ledger.set_copy(&self.shared, slot, level, false);
                }
            }
        }
    }

    /// Tells what it takes to bring records up from that tier. Before that its copies count for nothing.
    pub fn set_fetch(&self, level: usize, fetch: Fetch) {
        let place = copies::place_of(level);
        self.shared
            .ledger()
            .set_speeds(|speeds| speeds.set_fetch(place, fetch));
    }

    /// Tells how many tokens a prefill computes in a second at position 0, as measured.
    ///
    /// # Errors
    /// If that is no number above 0.
    pub fn set_prefill_speed(&self, tokens_per_second: f64) -> Result<()> {
        check_speed(tokens_per_second)?;
        self.shared
            .ledger()
            .set_speeds(|speeds| speeds.set_prefill(tokens_per_second));
        Ok(())
    }

    /// Every occurrence of known chunks at any offset, left to right without overlap; see [`Matcher::find`].
    pub fn matches(&self, namespace: &Namespace, tokens: &[u32], min_tokens: usize) -> Vec<Match> {
        let matches = self
            .shared
            .matcher
            .find(namespace, tokens, min_tokens, &*self.shared);
        self.shared.reads.add(Read::Matches, matches.len() as u64);
        matches
    }

    /// Counts a use of these chunks without pinning them.
    pub fn touch(&self, keys: &[Key]) {
        let shared = &self.shared;
        for (key, now) in keys.iter().zip(shared.now()..) {
            if let Some(slot) = shared
                .index
                .find(key, |slot| shared.chunks.matches(slot, key))
            {
                shared.chunks.stamp(slot, now);
                shared.chunks.count_hit(slot);
            }
        }
    }

    /// Pins chunks until `unpin`; a record that replaces a pinned one inherits its pins, `clear` ends them. Returns how
    /// many were found.
    pub fn pin(&self, keys: &[Key]) -> usize {
        let mut ledger = self.shared.ledger();
        keys.iter()
            .filter(|key| ledger.pin(&self.shared, key))
            .count()
    }

    /// Takes back one `pin` of each chunk. Returns how many were pinned.
    pub fn unpin(&self, keys: &[Key]) -> usize {
        let mut ledger = self.shared.ledger();
        keys.iter()
            .filter(|key| ledger.unpin(&self.shared, key))
            .count()
    }

    /// Drops every chunk (of one namespace); returns how many. Pinned bytes stay readable until released.
    pub fn clear(&self, namespace: Option<&Namespace>) -> usize {
        let cleared = self.shared.ledger().clear(&self.shared, namespace);
        self.shared.returns.wake();
        cleared
    }

    /// Oldest events not yet read, and how many were lost because nobody read them in time.
    pub fn events(&self, limit: usize) -> (Vec<Event>, u64) {
        self.shared
            .events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(limit)
    }

    /// Start and bytes of the memory that all records lie in, for registering it with a device. It stays where it is for as
    /// long as a handle, lease, view or reservation of this store lives.
    pub fn arena(&self) -> (*const u8, usize) {
        self.shared.arena.range()
    }

    /// Counters and gauges now.
    pub fn stats(&self) -> Stats {
        let shared = &self.shared;
        let mut ledger = shared.ledger();
        ledger.settle(shared);
        let counts = &ledger.counts;
        let (hits, misses) = (shared.reads.sum(Read::Hits), shared.reads.sum(Read::Misses));
        Stats {
            chunks: counts.chunks,
            bytes_used: ledger.allocator.used() as u64,
            bytes_capacity: ledger.allocator.capacity() as u64,
            bytes_pinned: shared.reads.sum(Read::BytesPinned),
            leases: shared.reads.sum(Read::Leases),
            reservations: counts.reservations,
            lookups: hits + misses,
            hits,
            misses,
            stored: counts.stored,
            replaced: counts.replaced,
            evicted: counts.evicted,
            aborted: counts.aborted,
            rejected_full: counts.rejected_full,
            expired_leases: shared.reads.sum(Read::Expired),
            matches: shared.reads.sum(Read::Matches),
            metadata_bytes: (shared.chunks.bytes()
                + shared.index.bytes()
                + ledger.bytes()
                + shared.matcher.bytes()) as u64,
        }
    }

    /// Drops every chunk; from now on every lookup misses and `reserve` is an error.
    pub fn close(&self) {
        let mut ledger = self.shared.ledger();
        ledger.closed = true;
        ledger.clear(&self.shared, None);
        drop(ledger);
        self.shared.returns.wake();
    }
}

impl Shared {
    pub(crate) fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("no writer has panicked half way")
    }

    /// Nanoseconds since the store was opened.
    pub(crate) fn now(&self) -> u64 {
        self.opened.elapsed().as_nanos() as u64
    }

    pub(crate) fn lease_timeout(&self) -> u64 {
        u64::try_from(self.options.lease_timeout.as_nanos()).unwrap_or(u64::MAX)
    }

    pub(crate) fn event(&self, kind: EventKind, key: Key) {
        self.events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(kind, key);
    }

    /// Pins the chunk of a key for a lease and counts the use. Also says how many bytes that pinned first.
    fn lease(&self, key: &Key, now: u64) -> Option<(Pin, u64)> {
        // A second look if the first met the key in a slot that was going: it may have been replaced by another one.
        for _ in 0..2 {
            let (mut leased, mut raced) = (None, false);
            self.index.find(key, |slot| {
                let hot = self.chunks.hot(slot);
                if !hot.has_key(key) {
                    return false;
                }
                self.chunks.stamp(slot, now);
                raced = true;
                let Some(pinned) = hot.word.lease() else {
                    return false;
                };
                let pin = Pin {
                    slot,
                    generation: pinned.generation,
                };
                let first = if pinned.first { hot.nbytes() as u64 } else { 0 };
                if !hot.has_key(key) {
                    self.reads.add(Read::BytesPinned, first);
                    self.reads.subtract(Read::BytesPinned, self.unlease(pin).1);
                    return false;
                }
                self.chunks.count_hit(slot);
                leased = Some((pin, first));
                true
            });
            if leased.is_some() || !raced {
                return leased;
            }
        }
        None
    }

    /// Takes back a lease's pin: whether a time-out had not already, and how many bytes are no longer pinned (the caller
    /// accounts for them, many at a time).
    pub(crate) fn unlease(&self, pin: Pin) -> (bool, u64) {
        let hot = self.chunks.hot(pin.slot);
        // Read while the pin keeps it; without one the number is not used.
        let nbytes = hot.nbytes() as u64;
        let unpinned = hot.word.unlease(pin.generation);
        if unpinned.wake {
            self.returns.push(pin.slot, pin.generation);
        }
        (unpinned.done, if unpinned.last { nbytes } else { 0 })
    }

    /// Pins for good; false when that generation is gone.
    pub(crate) fn hold(&self, slot: u32, generation: u32) -> bool {
        let hot = self.chunks.hot(slot);
        let pinned = hot.word.hold(generation);
        if pinned.is_some_and(|pinned| pinned.first) {
            self.reads.add(Read::BytesPinned, hot.nbytes() as u64);
        }
        pinned.is_some()
    }

    pub(crate) fn unhold(&self, slot: u32, generation: u32) {
        let hot = self.chunks.hot(slot);
        let nbytes = hot.nbytes() as u64;
        let unpinned = hot.word.unhold(generation);
        if unpinned.last {
            self.reads.subtract(Read::BytesPinned, nbytes);
        }
        if unpinned.wake {
            self.returns.push(slot, generation);
        }
    }
}

/// Slots that a writer waits for, handed back by their last reader, and the bell for writers who wait for room.
#[derive(Debug, Default)]
pub(crate) struct Returns {
    state: Mutex<Returned>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Returned {
    slots: Vec<(u32, u32)>,
    rung: u64,
}

impl Returns {
    fn state(&self) -> MutexGuard<'_, Returned> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, slot: u32, generation: u32) {
        self.state().slots.push((slot, generation));
        self.wake();
    }

    /// There may be room now.
    pub(crate) fn wake(&self) {
        self.state().rung += 1;
        self.bell.notify_all();
    }

    pub(crate) fn take(&self) -> Vec<(u32, u32)> {
        std::mem::take(&mut self.state().slots)
    }

    /// How often the bell has rung.
    pub(crate) fn rung(&self) -> u64 {
        self.state().rung
    }

    /// Waits until it has rung since `rung`, or for `at_most`.
    pub(crate) fn wait(&self, rung: u64, at_most: Duration) {
        let waited = self
            .bell
            .wait_timeout_while(self.state(), at_most, |state| state.rung == rung);
        drop(waited);
    }
}

/// A hold for the time of a look by the matcher.
pub(crate) struct Held<'a> {
    store: &'a Shared,
    slot: u32,
    generation: u32,
}

impl Resolver for Shared {
    type Pinned<'a> = Held<'a>;

    fn resident(&self, slot: u32) -> Option<u32> {
        self.chunks.word(slot).resident()
    }

    fn pin(&self, slot: u32, generation: u32) -> Option<Held<'_>> {
        let held = self.hold(slot, generation).then(|| Held {
            store: self,
            slot,
            generation,
        });
        held.filter(|held| self.chunks.cold(held.slot).labels().provenance != HEAD)
    }
}

impl Known for Held<'_> {
    fn namespace(&self) -> &[u8; 32] {
        // SAFETY: held, and published before anybody learned its generation.
        unsafe { record::namespace(&self.store.arena, &self.store.chunks, self.slot) }
    }

    fn key(&self) -> Key {
        self.store.chunks.hot(self.slot).key()
    }

    fn tokens(&self) -> &[u32] {
        // SAFETY: held, and published before anybody learned its generation.
        unsafe { record::tokens(&self.store.arena, &self.store.chunks, self.slot) }
    }

    fn parent(&self) -> Option<(u32, u32)> {
        let chunks = &self.store.chunks;
        let parent = chunks.cold(self.slot).parent.load(Relaxed);
        if parent == NIL {
            return None;
        }
        let generation = chunks.word(parent).resident()?;
        // While a chunk is resident and linked its parent is resident too: so what was just read is that parent's.
        let linked = chunks.cold(self.slot).parent.load(Relaxed) == parent;
        (linked && chunks.word(self.slot).is_resident(self.generation))
            .then_some((parent, generation))
    }

    fn children(&self) -> Vec<(u32, u32)> {
        let chunks = &self.store.chunks;
        let mut children = Vec::new();
        let mut child = chunks.cold(self.slot).first_child.load(Acquire);
        while child != NIL && children.len() < MAX_CHILDREN {
            let generation = chunks.word(child).resident();
            // A slot that is no child (any more) ends the walk: its links lead elsewhere.
            let cold = chunks.cold(child);
            if cold.parent.load(Relaxed) != self.slot {
                break;
            }
            children.extend(generation.map(|generation| (child, generation)));
            child = cold.next_sibling.load(Relaxed);
        }
        children
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.store.unhold(self.slot, self.generation);
    }
}

#[cfg(test)]
mod tests;
