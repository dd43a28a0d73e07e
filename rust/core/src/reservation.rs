//! Reservations: room for the chunks of one segment, published chunk by chunk as a whole, or given back.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::chunk::Labels;
use crate::error::{Error, Result};
use crate::key::{HEAD_ROOT, Key, NO_CONTEXT, SEGMENT_ROOT};
use crate::lease::{Hold, Pin};
use crate::ledger::Ledger;
use crate::namespace::Namespace;
use crate::record::{self, Layout, Tail};
use crate::resident::Record;
use crate::stats::Read;
use crate::store::Shared;
use crate::word::Reserved;
use std::sync::atomic::Ordering::Relaxed;

/// What is to be stored, besides the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// KV payload bytes of one token, all layers.
    pub bytes_per_token: usize,
    /// Position in its prompt of the segment's first token.
    pub source_position: usize,
    /// 0 `HEAD`, 1 `LEAD_IN`, 2 `IN_CONTEXT`, 3 `BLENDED`.
    pub provenance: u8,
    /// A resident record is replaced only by one of higher rank.
    pub rank: u8,
    /// Context digest of each chunk's first token; zeros without.
    pub contexts: Option<&'a [Key]>,
    /// Content ids of the documents' first chunks that stand before the segment.
    pub behind: &'a [Key],
    /// Tokens that stand before the segment.
    pub behind_tokens: usize,
    /// A chain that begins at position 0 of a prompt.
    pub head: bool,
    /// Chain key of the chunk that the segment continues.
    pub parent: Option<Key>,
    /// Tokens of the chain before the segment, with `parent`.
    pub parent_offset: usize,
    /// Keep one f32 per token with each record.
    pub with_scores: bool,
    /// Want the last chunk too when it is not full.
    pub save_unfull_chunk: bool,
}

impl Default for Request<'_> {
    fn default() -> Self {
        Self {
            bytes_per_token: 1,
            source_position: 0,
            provenance: 1,
            rank: 0,
            contexts: None,
            behind: &[],
            behind_tokens: 0,
            head: false,
            parent: None,
            parent_offset: 0,
            with_scores: false,
            save_unfull_chunk: true,
        }
    }
}

impl Request<'_> {
    fn check(&self, tokens: usize, chunks: usize) -> Result<()> {
        let fits = |name, value: usize| match u32::try_from(value) {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::argument(name, value, "a number below 2^32")),
        };
        fits(
            "source_position",
            self.source_position.saturating_add(tokens),
        )?;
        fits("parent_offset", self.parent_offset.saturating_add(tokens))?;
        fits("behind_tokens", self.behind_tokens)?;
        fits("bytes_per_token", self.bytes_per_token)?;
        if self.bytes_per_token == 0 {
            return Err(Error::argument("bytes_per_token", 0, "at least one byte"));
        }
        if self.provenance > 3 {
            return Err(Error::argument(
                "provenance",
                self.provenance,
                "0 HEAD, 1 LEAD_IN, 2 IN_CONTEXT or 3 BLENDED",
            ));
        }
        if let Some(contexts) = self.contexts
            && contexts.len() != chunks
        {
            let accepted = format!("one digest for each of the segment's {chunks} chunks, or none");
            return Err(Error::argument(
                "contexts",
                format!("{} digests", contexts.len()),
                accepted,
            ));
        }
        if self.head && self.parent.is_some() {
            return Err(Error::argument(
                "head",
                true,
                "false with a parent: a chain has one root",
            ));
        }
        Ok(())
    }

    fn first_parent(&self) -> Key {
        self.parent
            .unwrap_or(if self.head { HEAD_ROOT } else { SEGMENT_ROOT })
    }
}

/// Room for the chunks of one segment. What is not committed is given back on drop.
#[derive(Debug)]
pub struct Reservation {
    store: Arc<Shared>,
    namespace: Namespace,
    keys: Vec<Key>,
    wanted: Vec<u8>,
    ntokens: usize,
    first_parent: Key,
    pending: Arc<Mutex<Pending>>,
}

/// What the reservation has of the store.
#[derive(Debug, Default)]
struct Pending {
    chunks: Vec<Option<(u32, Reserved)>>,
    /// Resident chunks of the same chain: they are not evicted to make room for what comes after them.
    held: Vec<Hold>,
    open: bool,
}

/// What is to be had for one chunk.
pub(crate) enum Room {
    Taken(u32, Reserved),
    Resident(Pin),
    BeingWritten,
    Full,
}

pub(crate) fn reserve(
    store: &Arc<Shared>,
    namespace: &Namespace,
    tokens: &[u32],
    request: &Request<'_>,
) -> Result<Reservation> {
    let chunk_size = store.options.chunk_size;
    request.check(tokens.len(), tokens.len().div_ceil(chunk_size))?;
    let first_parent = request.first_parent();
    let keys = namespace.chain_keys(tokens, chunk_size, &first_parent);
    let deadline = store
        .now()
        .saturating_add(store.options.reserve_wait.as_nanos() as u64);
    let mut ledger = store.ledger();
    if ledger.closed {
        return Err(Error::Closed);
    }
    ledger.counts.reservations += 1;
    let mut pending = Pending {
        open: true,
        ..Pending::default()
    };
    if let Some((slot, generation)) = request
        .parent
        .and_then(|parent| ledger.resident(store, &parent))
    {
        pending
            .held
            .extend(Hold::new(store, Pin { slot, generation }));
    }
    for (index, chunk) in tokens.chunks(chunk_size).enumerate() {
        let layout = Layout::new(
            chunk.len(),
            request.bytes_per_token,
            request.with_scores,
            request.behind.len(),
        );
        let unfull = chunk.len() < chunk_size && !request.save_unfull_chunk;
        let room = match layout.filter(|_| !unfull) {
            Some(layout) => {
                let (room, relocked) = find_room(
                    store,
                    ledger,
                    namespace.tenant(),
                    &keys[index],
                    request.rank,
                    layout.bytes(),
                    deadline,
                );
                ledger = relocked;
                room
            }
            None if unfull => {
                pending.chunks.push(None);
                continue;
            }
            None => Room::Full,
        };
        pending.chunks.push(match room {
            Room::Taken(slot, reserved) => {
                ledger.writing.insert(keys[index]);
                fill(
                    store,
                    slot,
                    &keys[index],
                    chunk.len(),
                    index * chunk_size,
                    request,
                );
                Some((slot, reserved))
            }
            Room::Resident(pin) => {
                pending.held.extend(Hold::new(store, pin));
                None
            }
            Room::BeingWritten => None,
            Room::Full => {
                ledger.counts.rejected_full += 1;
                None
            }
        });
    }
    drop(ledger);
    for (index, chunk) in tokens.chunks(chunk_size).enumerate() {
        let Some((slot, _)) = &pending.chunks[index] else {
            continue;
        };
        let context = request
            .contexts
            .map_or(&NO_CONTEXT, |contexts| &contexts[index]);
        let tail = Tail {
            tokens: chunk,
            namespace: namespace.digest(),
            context,
            parent: index
                .checked_sub(1)
                .map_or(&first_parent, |before| &keys[before]),
            behind: request.behind,
        };
        // SAFETY: just reserved by us, its fields filled in.
        unsafe { record::write_tail(&store.arena, &store.chunks, *slot, &tail) };
    }
    Ok(Reservation {
        store: store.clone(),
        namespace: *namespace,
        wanted: pending
            .chunks
            .iter()
            .map(|chunk| u8::from(chunk.is_some()))
            .collect(),
        keys,
        ntokens: tokens.len(),
        first_parent,
        pending: Arc::new(Mutex::new(pending)),
    })
}

/// Room for one chunk, waiting for it until `deadline`. The lock is free while it waits.
pub(crate) fn find_room<'a>(
    store: &'a Shared,
    mut ledger: MutexGuard<'a, Ledger>,
    tenant: &Key,
    key: &Key,
    rank: u8,
    bytes: usize,
    deadline: u64,
) -> (Room, MutexGuard<'a, Ledger>) {
    loop {
        if let Some((slot, generation)) = ledger.resident(store, key)
            && store.chunks.cold(slot).labels().rank >= rank
        {
            return (Room::Resident(Pin { slot, generation }), ledger);
        }
        if ledger.writing.contains(key) {
            return (Room::BeingWritten, ledger);
        }
        let rung = store.returns.rung();
        if bytes <= ledger.allocator.capacity()
            && let Some((slot, reserved)) = ledger.place(store, tenant, bytes)
        {
            return (Room::Taken(slot, reserved), ledger);
        }
        let now = store.now();
        if now >= deadline || bytes > ledger.allocator.capacity() || ledger.closed {
            return (Room::Full, ledger);
        }
        let until = ledger
            .next_overdue()
            .map_or(deadline, |due| due.clamp(now, deadline));
        drop(ledger);
        store.returns.wait(rung, Duration::from_nanos(until - now));
        ledger = store.ledger();
    }
}

/// Sets the fields of a slot that was just reserved.
fn fill(
    store: &Shared,
    slot: u32,
    key: &Key,
    ntokens: usize,
    offset: usize,
    request: &Request<'_>,
) {
    let (hot, cold) = (store.chunks.hot(slot), store.chunks.cold(slot));
    hot.set_key(key);
    hot.ntokens.store(ntokens as u32, Relaxed);
    hot.bytes_per_token
        .store(request.bytes_per_token as u32, Relaxed);
    cold.source_position
        .store((request.source_position + offset) as u32, Relaxed);
    let parent_offset = if request.parent.is_some() {
        request.parent_offset
    } else {
        0
    };
    cold.segment_offset
        .store((parent_offset + offset) as u32, Relaxed);
    cold.behind_tokens
        .store(request.behind_tokens as u32, Relaxed);
    cold.nbehind.store(request.behind.len() as u32, Relaxed);
    cold.set_labels(Labels {
        provenance: request.provenance,
        rank: request.rank,
        scores: request.with_scores,
        ..Labels::default()
    });
}

impl Reservation {
    /// Chunks of the segment.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// True for a segment without tokens.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Their chain keys.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// One byte per chunk: 1 = write me, 0 = already resident at this rank or better, being written, or no room.
    pub fn wanted(&self) -> &[u8] {
        &self.wanted
    }

    /// Token offsets of a chunk within the segment.
    pub fn bounds(&self, index: usize) -> Result<Range<usize>> {
        self.check(index)?;
        let chunk_size = self.store.options.chunk_size;
        Ok(index * chunk_size..self.ntokens.min((index + 1) * chunk_size))
    }

    /// Writable room for a wanted chunk's KV payload. It keeps its memory while it lives, even if the chunk is aborted.
    pub fn payload(&self, index: usize) -> Result<ViewMut> {
        self.check(index)?;
        let pending = lock(&self.pending);
        let Some((slot, reserved)) = &pending.chunks.get(index).and_then(Option::as_ref) else {
            return Err(Error::argument(
                "index",
                index,
                "the index of a wanted chunk, before commit or abort",
            ));
        };
        let pin = Pin {
            slot: *slot,
            generation: reserved.generation(),
        };
        let hot = self.store.chunks.hot(pin.slot);
        let Some(pinned) = hot.word.hold_reserved(reserved) else {
            return Err(Error::argument(
                "index",
                index,
                "a chunk with fewer than 65,535 views",
            ));
        };
        if pinned.first {
            self.store.reads.add(Read::BytesPinned, hot.nbytes() as u64);
        }
        let hold = Hold::adopt(&self.store, pin);
        let payload = Layout::of(&self.store.chunks, pin.slot).payload;
        let start = record::part(&self.store.arena, &self.store.chunks, pin.slot, &payload);
        Ok(ViewMut {
            start,
            len: payload.len(),
            index,
            pending: self.pending.clone(),
            _hold: hold,
        })
    }

    /// Sets the per-token scores of a wanted chunk of a reservation made with scores.
    pub fn set_scores(&self, index: usize, scores: &[f32]) -> Result<()> {
        let ntokens = self.bounds(index)?.len();
        let pending = lock(&self.pending);
        let Some((slot, _)) = &pending.chunks.get(index).and_then(Option::as_ref) else {
            return Err(Error::argument(
                "index",
                index,
                "the index of a wanted chunk, before commit or abort",
            ));
        };
        let layout = Layout::of(&self.store.chunks, *slot);
        if layout.scores.is_empty() {
            return Err(Error::argument(
                "scores",
                "given",
                "nothing, unless reserved with_scores",
            ));
        }
        if scores.len() != ntokens {
            let accepted = format!("one for each of the chunk's {ntokens} tokens");
            return Err(Error::argument(
                "scores",
                format!("{} values", scores.len()),
                accepted,
            ));
        }
        let start = record::part(&self.store.arena, &self.store.chunks, *slot, &layout.scores);
        // SAFETY: the scores of a reserved record, written by one thread at a time (the lock); as many as there is room for.
        unsafe {
            std::ptr::copy_nonoverlapping(scores.as_ptr().cast(), start, layout.scores.len())
        };
        Ok(())
    }

    /// Publishes the wanted chunks (those with a non-zero byte in `mask`, if given) and gives the others back. Returns how
    /// many were published. Their bytes must not be written any more.
    pub fn commit(&self, mask: Option<&[u8]>) -> Result<usize> {
        if let Some(mask) = mask
            && mask.len() != self.keys.len()
        {
            let accepted = format!("one byte for each of the {} chunks", self.keys.len());
            return Err(Error::argument(
                "mask",
                format!("{} bytes", mask.len()),
                accepted,
            ));
        }
        Ok(self.finish(|index| mask.is_none_or(|mask| mask[index] != 0)))
    }

    /// Gives everything back.
    pub fn abort(&self) {
        self.finish(|_| false);
    }

    fn finish(&self, publish: impl Fn(usize) -> bool) -> usize {
        let mut pending = lock(&self.pending);
        if !std::mem::take(&mut pending.open) {
            return 0;
        }
        let Pending { chunks, held, .. } = std::mem::take(&mut *pending);
        let store = &self.store;
        let mut ledger = store.ledger();
        let mut published = 0;
        let mut observed = Vec::new();
        for (index, chunk) in chunks.into_iter().enumerate() {
            let Some((slot, reserved)) = chunk else {
                continue;
            };
            if publish(index) && !ledger.closed {
                let parent = index
                    .checked_sub(1)
                    .map_or(&self.first_parent, |before| &self.keys[before]);
                let generation = reserved.generation();
                let complete = reserved.complete(store.chunks.word(slot));
                if ledger.publish(store, slot, complete, &self.namespace, parent) {
                    published += 1;
                    if store.observer.is_set() {
                        observed.extend(Hold::new(store, Pin { slot, generation }).map(Record::of));
                    }
                }
            } else {
                ledger.abort(store, slot, reserved);
            }
        }
        ledger.counts.reservations -= 1;
        drop(ledger);
        drop(held);
        store.returns.wake();
        store.observer.call(observed);
        published
    }

    fn check(&self, index: usize) -> Result<()> {
        if index < self.keys.len() {
            return Ok(());
        }
        Err(Error::argument(
            "index",
            index,
            format!("an index below {} (the segment's chunks)", self.keys.len()),
        ))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.abort();
    }
}

fn lock(pending: &Mutex<Pending>) -> MutexGuard<'_, Pending> {
    pending.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writable bytes of a reserved chunk's payload.
#[derive(Debug)]
pub struct ViewMut {
    start: *mut u8,
    len: usize,
    index: usize,
    pending: Arc<Mutex<Pending>>,
    _hold: Hold,
}

// SAFETY: the bytes are written through `copy_from`, which locks, or by unsafe code that keeps to `as_mut_ptr`'s terms.
unsafe impl Send for ViewMut {}
// SAFETY: as above.
unsafe impl Sync for ViewMut {}

impl ViewMut {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// False: a record has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Start of the bytes, valid while the view lives. Whoever writes through it does so before `commit`, and not while
    /// another thread writes the same bytes.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Copies a whole payload in. After commit or abort it does nothing, and says so by `false`.
    ///
    /// # Panics
    /// If `payload` is not exactly as long as the view.
    pub fn copy_from(&self, payload: &[u8]) -> bool {
        assert_eq!(payload.len(), self.len, "a payload of the chunk's size");
        let pending = lock(&self.pending);
        let writable = pending.chunks.get(self.index).is_some_and(Option::is_some);
        if writable {
            // SAFETY: the chunk is still reserved and stays so under the lock; the view's hold keeps its memory.
            unsafe { std::ptr::copy_nonoverlapping(payload.as_ptr(), self.start, self.len) };
        }
        writable
    }
}
