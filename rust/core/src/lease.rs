//! Leases: pins on the chunks of one lookup, for a limited time; and views, which pin for as long as they live.
//!
//! A lease's pins may be taken by its time-out, so a lease never touches memory itself: every read first takes a hold of
//! its own, which fails when the chunk's generation is gone. Memory safety rests on holds alone.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::chunk::NIL;
use crate::error::{Error, Result};
use crate::key::Key;
use crate::record::{self, Layout};
use crate::stats::Read;
use crate::store::Shared;
use std::sync::atomic::Ordering::Relaxed;

/// A slot, and the life of it that is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pin {
    pub slot: u32,
    pub generation: u32,
}

const MISS: Pin = Pin {
    slot: NIL,
    generation: 0,
};

/// Pins on the chunks of one lookup. Released by `release`, drop or time-out.
#[derive(Debug)]
pub struct Lease {
    store: Arc<Shared>,
    pins: Box<[Pin]>,
    hits: Box<[u8]>,
    nbytes: u64,
    deadline: u64,
    released: AtomicBool,
}

/// What a record says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Chain key.
    pub key: Key,
    /// Position in its prompt of the record's first token.
    pub source_position: usize,
    /// Tokens of the chunk.
    pub ntokens: usize,
    /// 0 `HEAD`, 1 `LEAD_IN`, 2 `IN_CONTEXT`, 3 `BLENDED`.
    pub provenance: u8,
    /// Set by the capture policy: a record of higher rank replaces it.
    pub rank: u8,
    /// Context digest of the first token; zeros when unknown or blended.
    pub context: Key,
    /// Content ids of the documents' first chunks that stood before it.
    pub behind: Vec<Key>,
    /// Tokens that stood before it when it was captured, as the reservation said.
    pub behind_tokens: usize,
    /// KV payload bytes.
    pub nbytes: usize,
    /// Tokens of the same chain that come before this chunk.
    pub segment_offset: usize,
}

impl Lease {
    /// Of what was found for each key, with the bytes that this pinned first, at `now`.
    pub(crate) fn new(
        store: &Arc<Shared>,
        found: impl ExactSizeIterator<Item = Option<(Pin, u64)>>,
        now: u64,
    ) -> Self {
        let mut hits = Vec::with_capacity(found.len());
        let mut pins = Vec::with_capacity(found.len());
        let (mut nhits, mut nbytes, mut pinned) = (0, 0, 0);
        for pin in found {
            hits.push(u8::from(pin.is_some()));
            pins.push(pin.map_or(MISS, |(pin, _)| pin));
            if let Some((pin, first)) = pin {
                nhits += 1;
                nbytes += store.chunks.hot(pin.slot).nbytes() as u64;
                pinned += first;
            }
        }
        store.reads.add(Read::BytesPinned, pinned);
        store.reads.add(Read::Hits, nhits);
        store.reads.add(Read::Misses, pins.len() as u64 - nhits);
        store.reads.add(Read::Leases, 1);
        Self {
            store: store.clone(),
            pins: pins.into(),
            hits: hits.into(),
            nbytes,
            deadline: now.saturating_add(store.lease_timeout()),
            released: AtomicBool::new(false),
        }
    }

    /// Keys that were looked up.
    pub fn len(&self) -> usize {
        self.pins.len()
    }

    /// True for a lookup of no keys.
    pub fn is_empty(&self) -> bool {
        self.pins.is_empty()
    }

    /// One byte per key: 1 = hit, 0 = miss.
    pub fn hits(&self) -> &[u8] {
        &self.hits
    }

    /// KV payload bytes of the hits.
    pub fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// What a hit's record says about itself; `None` for a miss.
    pub fn meta(&self, index: usize) -> Result<Option<Meta>> {
        if self.pin(index)? == MISS {
            return Ok(None);
        }
        Ok(Some(self.hold(index)?.meta()))
    }

    /// A hit's KV payload.
    pub fn payload(&self, index: usize) -> Result<View> {
        self.view(index, |layout| layout.payload.clone())
    }

    /// A hit's tokens, u32.
    pub fn tokens(&self, index: usize) -> Result<View> {
        self.view(index, |layout| layout.tokens.clone())
    }

    /// The per-token scores (f32) kept with a hit, if any.
    pub fn scores(&self, index: usize) -> Result<Option<View>> {
        let scores = self.view(index, |layout| layout.scores.clone())?;
        let kept = self.store.chunks.cold(scores.hold.slot).labels().scores;
        Ok(kept.then_some(scores))
    }

    /// Copies a hit's KV payload into a buffer of exactly that many bytes.
    pub fn read_into(&self, index: usize, destination: &mut [u8]) -> Result<()> {
        let hold = self.hold(index)?;
        let payload = hold.bytes(&Layout::of(&self.store.chunks, hold.slot).payload);
        if payload.len() != destination.len() {
            let accepted = format!("a buffer of exactly {} bytes", payload.len());
            return Err(Error::argument(
                "destination",
                format!("{} bytes", destination.len()),
                accepted,
            ));
        }
        destination.copy_from_slice(payload);
        Ok(())
    }

    /// Gives the pins back. Views that are alive keep their own.
    pub fn release(&self) {
        self.give_back(self.store.now() > self.deadline);
    }

    fn give_back(&self, expired: bool) {
        if self.released.swap(true, Ordering::AcqRel) {
            return;
        }
        let (mut taken, mut unpinned) = (0, 0);
        for pin in self.pins.iter().filter(|pin| **pin != MISS) {
            let (done, nbytes) = self.store.unlease(*pin);
            taken += u64::from(done);
            unpinned += nbytes;
        }
        self.store.reads.subtract(Read::BytesPinned, unpinned);
        if expired {
            self.store.reads.add(Read::Expired, taken);
        }
        self.store.reads.subtract(Read::Leases, 1);
    }

    fn pin(&self, index: usize) -> Result<Pin> {
        self.pins.get(index).copied().ok_or_else(|| {
            Error::argument(
                "index",
                index,
                format!("an index below {} (the keys looked up)", self.pins.len()),
            )
        })
    }

    /// A hold on a hit, if the lease still counts.
    fn hold(&self, index: usize) -> Result<Hold> {
        let pin = self.pin(index)?;
        if pin == MISS {
            return Err(Error::argument(
                "index",
                index,
                "the index of a hit (this key was a miss)",
            ));
        }
        if self.store.now() > self.deadline {
            self.give_back(true);
        }
        if self.released.load(Ordering::Acquire) {
            return Err(Error::LeaseExpired);
        }
        Hold::new(&self.store, pin).ok_or(Error::LeaseExpired)
    }

    fn view(&self, index: usize, part: impl Fn(&Layout) -> Range<usize>) -> Result<View> {
        let hold = self.hold(index)?;
        let part = part(&Layout::of(&self.store.chunks, hold.slot));
        Ok(View {
            start: record::part(&self.store.arena, &self.store.chunks, hold.slot, &part),
            len: part.len(),
            hold: Arc::new(hold),
        })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.release();
    }
}

/// A pin of one's own on a chunk, until drop.
#[derive(Debug)]
pub(crate) struct Hold {
    store: Arc<Shared>,
    pub slot: u32,
    generation: u32,
}

impl Hold {
    /// On a resident or still pinned chunk of that generation.
    pub(crate) fn new(store: &Arc<Shared>, Pin { slot, generation }: Pin) -> Option<Self> {
        store.hold(slot, generation).then(|| Self {
            store: store.clone(),
            slot,
            generation,
        })
    }

    /// Takes over a hold that the caller has.
    pub(crate) fn adopt(store: &Arc<Shared>, Pin { slot, generation }: Pin) -> Self {
        Self {
            store: store.clone(),
            slot,
            generation,
        }
    }

    /// Whether a key still leads to the chunk.
    pub(crate) fn is_resident(&self) -> bool {
        self.store
            .chunks
            .word(self.slot)
            .is_resident(self.generation)
    }

    /// What a published record says about itself.
    pub(crate) fn meta(&self) -> Meta {
        let (hot, cold) = (
            self.store.chunks.hot(self.slot),
            self.store.chunks.cold(self.slot),
        );
        let labels = cold.labels();
        let layout = self.layout();
        Meta {
            key: hot.key(),
            source_position: cold.source_position.load(Relaxed) as usize,
            ntokens: hot.ntokens.load(Relaxed) as usize,
            provenance: labels.provenance,
            rank: labels.rank,
            context: self.bytes(&layout.context).try_into().expect("32 bytes"),
            behind: self.bytes(&layout.behind).as_chunks().0.to_vec(),
            behind_tokens: cold.behind_tokens.load(Relaxed) as usize,
            nbytes: hot.nbytes(),
            segment_offset: cold.segment_offset.load(Relaxed) as usize,
        }
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout::of(&self.store.chunks, self.slot)
    }

    pub(crate) fn store(&self) -> &Shared {
        &self.store
    }

    /// Part of a published record.
    pub(crate) fn bytes(&self, part: &Range<usize>) -> &[u8] {
        let start = record::part(&self.store.arena, &self.store.chunks, self.slot, part);
        // SAFETY: held, and published before the lease that led here was made; published bytes don't change.
        unsafe { std::slice::from_raw_parts(start, part.len()) }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.store.unhold(self.slot, self.generation);
    }
}

/// Read-only bytes of a record, pinned for as long as the view lives, whatever becomes of the lease or the key.
#[derive(Clone, Debug)]
pub struct View {
    start: *const u8,
    len: usize,
    hold: Arc<Hold>,
}

// SAFETY: the bytes are immutable while held, and the hold travels along.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl Deref for View {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` and `len` are a part of the held record, published and unchanging.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}
