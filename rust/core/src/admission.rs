//! Admissions: room for a record that comes from a lower tier. Its key and size are known before its content is.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::chunk::Labels;
use crate::key::Key;
use crate::lease::{Hold, Pin};
use crate::namespace::Namespace;
use crate::record::{self, Layout, Tail};
use crate::reservation::{Room, find_room};
use crate::resident::Record;
use crate::store::Shared;
use crate::word::Reserved;
use std::sync::atomic::Ordering::Relaxed;

/// What decides the size of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens.
    pub ntokens: usize,
    /// Payload bytes of one token.
    pub bytes_per_token: usize,
    /// One f32 per token is kept with it.
    pub scores: bool,
    /// Content ids kept with it.
    pub nbehind: usize,
}

impl Shape {
    fn layout(&self) -> Option<Layout> {
        let fits = self.ntokens > 0
            && self.bytes_per_token > 0
            && [self.ntokens, self.bytes_per_token, self.nbehind]
                .iter()
                .all(|&number| u32::try_from(number).is_ok());
        let Self {
            ntokens,
            bytes_per_token,
            scores,
            nbehind,
        } = *self;
        fits.then(|| Layout::new(ntokens, bytes_per_token, scores, nbehind))?
    }
}

/// What is known about a record once it has arrived. Lengths are those of its shape.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// Chain key of the chunk before it, or a root.
    pub parent: &'a Key,
    /// Its tokens.
    pub tokens: &'a [u32],
    /// Its scores, if its shape has some.
    pub scores: Option<&'a [f32]>,
    /// Context digest of its first token, or zeros.
    pub context: &'a Key,
    /// Content ids of the documents that stood before its chain.
    pub behind: &'a [Key],
    /// Tokens that stood before its chain.
    pub behind_tokens: u32,
    /// Position in its prompt of its first token.
    pub source_position: u32,
    /// Tokens of its chain before it.
    pub segment_offset: u32,
    /// 0 `HEAD`, 1 `LEAD_IN`, 2 `IN_CONTEXT`, 3 `BLENDED`.
    pub provenance: u8,
    /// A record of higher rank replaces it.
    pub rank: u8,
}

/// What came of asking for room.
#[derive(Debug)]
pub enum Admitted {
    /// Fill it.
    Room(Admission),
    /// It is there already.
    Resident(Record),
    /// Somebody is writing it.
    BeingWritten,
    /// There is no room, or the store is closed.
    Full,
}

/// Room for one record, given back on drop unless it is published.
#[derive(Debug)]
pub struct Admission {
    store: Arc<Shared>,
    namespace: Namespace,
    shape: Shape,
    slot: u32,
    reserved: Option<Reserved>,
}

pub(crate) fn admit(
    store: &Arc<Shared>,
    namespace: &Namespace,
    key: &Key,
    shape: &Shape,
) -> Admitted {
    let Some(layout) = shape.layout() else {
        return Admitted::Full;
    };
    let wait = store.options.reserve_wait.as_nanos() as u64;
    let deadline = store.now().saturating_add(wait);
    let ledger = store.ledger();
    if ledger.closed {
        return Admitted::Full;
    }
    let (room, mut ledger) = find_room(
        store,
        ledger,
        namespace.tenant(),
        key,
        0,
        layout.bytes(),
        deadline,
    );
    let (slot, reserved) = match room {
        Room::Taken(slot, reserved) => (slot, reserved),
        Room::Resident(pin) => {
            let hold = Hold::new(store, pin);
            drop(ledger);
            return hold.map_or(Admitted::Full, |hold| Admitted::Resident(Record::of(hold)));
        }
        Room::BeingWritten => return Admitted::BeingWritten,
        Room::Full => {
            ledger.counts.rejected_full += 1;
            return Admitted::Full;
        }
    };
    ledger.writing.insert(*key);
    ledger.counts.reservations += 1;
    let (hot, cold) = (store.chunks.hot(slot), store.chunks.cold(slot));
    hot.set_key(key);
    hot.ntokens.store(shape.ntokens as u32, Relaxed);
    hot.bytes_per_token
        .store(shape.bytes_per_token as u32, Relaxed);
    cold.nbehind.store(shape.nbehind as u32, Relaxed);
    cold.set_labels(Labels {
        scores: shape.scores,
        ..Labels::default()
    });
    drop(ledger);
    Admitted::Room(Admission {
        store: store.clone(),
        namespace: *namespace,
        shape: *shape,
        slot,
        reserved: Some(reserved),
    })
}

impl Admission {
    /// As it was asked for.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The room for its payload, which starts at a multiple of 512 bytes and stays for as long as the admission lives. Nobody
    /// else reads or writes it until `publish`.
    pub fn payload(&mut self) -> NonNull<[u8]> {
        let payload = Layout::of(&self.store.chunks, self.slot).payload;
        let start = record::part(&self.store.arena, &self.store.chunks, self.slot, &payload);
        let start = NonNull::new(start).expect("the arena is mapped");
        NonNull::slice_from_raw_parts(start, payload.len())
    }

    /// Makes the record resident; its payload has been written. `None` when the index has no room or the store was closed.
    ///
    /// # Panics
    /// If `facts` are not of the shape that was admitted.
    pub fn publish(mut self, facts: &Facts<'_>) -> Option<Record> {
        let shape = &self.shape;
        assert_eq!(facts.tokens.len(), shape.ntokens, "tokens as admitted");
        assert_eq!(facts.behind.len(), shape.nbehind, "content ids as admitted");
        let nscores = facts.scores.map(<[f32]>::len);
        assert_eq!(
            nscores,
            shape.scores.then_some(shape.ntokens),
            "scores as admitted"
        );
        let (store, slot) = (&self.store, self.slot);
        let cold = store.chunks.cold(slot);
        cold.source_position.store(facts.source_position, Relaxed);
        cold.segment_offset.store(facts.segment_offset, Relaxed);
        cold.behind_tokens.store(facts.behind_tokens, Relaxed);
        cold.set_labels(Labels {
            provenance: facts.provenance,
            rank: facts.rank,
            scores: shape.scores,
            ..Labels::default()
        });
        let tail = Tail {
            tokens: facts.tokens,
            namespace: self.namespace.digest(),
            context: facts.context,
            parent: facts.parent,
            behind: facts.behind,
        };
        // SAFETY: reserved by us, its fields set.
        unsafe { record::write_tail(&store.arena, &store.chunks, slot, &tail) };
        if let Some(scores) = facts.scores {
            let part = Layout::of(&store.chunks, slot).scores;
            let start = record::part(&store.arena, &store.chunks, slot, &part);
            // SAFETY: the scores of a record that is reserved by us; there is room for one per token, as just checked.
            unsafe { std::ptr::copy_nonoverlapping(scores.as_ptr().cast(), start, part.len()) };
        }
        let reserved = self.reserved.take().expect("published once");
        let mut ledger = store.ledger();
        ledger.counts.reservations -= 1;
        if ledger.closed {
            ledger.abort(store, slot, reserved);
            return None;
        }
        let generation = reserved.generation();
        let complete = reserved.complete(store.chunks.word(slot));
        let published = ledger.publish(store, slot, complete, &self.namespace, facts.parent);
        let hold = published.then(|| Hold::new(store, Pin { slot, generation }));
        drop(ledger);
        store.returns.wake();
        hold.flatten().map(Record::of)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let Some(reserved) = self.reserved.take() else {
            return;
        };
        let mut ledger = self.store.ledger();
        ledger.counts.reservations -= 1;
        ledger.abort(&self.store, self.slot, reserved);
        drop(ledger);
        self.store.returns.wake();
    }
}

#[cfg(test)]
mod tests;
