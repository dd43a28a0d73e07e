//! Resident records as a whole, for what keeps copies of them in lower tiers; and who is told of new ones.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::index::ChunkIndex;
use crate::key::Key;
use crate::lease::{Hold, Meta, Pin};
use crate::store::Shared;

/// A resident record with all its parts, kept in memory for as long as this lives, whatever becomes of its key.
#[derive(Debug)]
pub struct Record(Hold);

impl Record {
    /// Of a published chunk.
    pub(crate) fn of(hold: Hold) -> Self {
        Self(hold)
    }

    pub(crate) fn find(store: &Arc<Shared>, key: &Key) -> Option<Self> {
        let mut found = None;
        store.index.find(key, |slot| {
            let hot = store.chunks.hot(slot);
            let generation = hot.has_key(key).then(|| hot.word.resident()).flatten();
            let hold = generation.and_then(|generation| Hold::new(store, Pin { slot, generation }));
            // The key may have changed before the hold was there; it can't any more.
            found = hold.filter(|_| hot.has_key(key));
            found.is_some()
        });
        found.map(Self)
    }

    pub(crate) fn slot(&self) -> u32 {
        self.0.slot
    }

    /// What it says about itself.
    pub fn meta(&self) -> Meta {
        self.0.meta()
    }

    /// Whether its key still leads to it: it was neither cleared nor replaced by a record of higher rank. Once false this
    /// stays false, and eviction passes over what is kept.
    pub fn is_resident(&self) -> bool {
        self.0.is_resident()
    }

    /// Its chain key.
    pub fn key(&self) -> Key {
        self.0.store().chunks.hot(self.0.slot).key()
    }

    /// Chain key of the chunk before it, or a root.
    pub fn parent(&self) -> Key {
        let parent = self.0.bytes(&self.0.layout().parent);
        parent.try_into().expect("32 bytes")
    }

    /// Digest of its namespace.
    pub fn namespace(&self) -> [u8; 32] {
        let namespace = self.0.bytes(&self.0.layout().namespace);
        namespace.try_into().expect("32 bytes")
    }

    /// Its token ids.
    pub fn tokens(&self) -> &[u32] {
        let bytes = self.0.bytes(&self.0.layout().tokens);
        // SAFETY: the part starts at a multiple of 4 in the arena, and every bit pattern is a u32.
        let (before, tokens, behind) = unsafe { bytes.align_to() };
        assert!(before.is_empty() && behind.is_empty(), "tokens are aligned");
        tokens
    }

    /// One score per token, if it was reserved with scores.
    pub fn scores(&self) -> Option<&[f32]> {
        let labels = self.0.store().chunks.cold(self.0.slot).labels();
        let bytes = self.0.bytes(&self.0.layout().scores);
        // SAFETY: the part starts at a multiple of 4 in the arena, and every bit pattern is an f32.
        let (before, scores, behind) = unsafe { bytes.align_to() };
        assert!(before.is_empty() && behind.is_empty(), "scores are aligned");
        labels.scores.then_some(scores)
    }

    /// Its KV payload. It starts at a multiple of 512 bytes.
    pub fn payload(&self) -> &[u8] {
        self.0.bytes(&self.0.layout().payload)
    }
}

type Observe = dyn Fn(Vec<Record>) + Send + Sync;

/// Who is told of committed records.
#[derive(Default)]
pub(crate) struct Observer(OnceLock<Box<Observe>>);

impl Observer {
    pub(crate) fn set(&self, observe: impl Fn(Vec<Record>) + Send + Sync + 'static) -> bool {
        self.0.set(Box::new(observe)).is_ok()
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    pub(crate) fn call(&self, records: Vec<Record>) {
        if let Some(observe) = self.0.get().filter(|_| !records.is_empty()) {
            observe(records);
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Observer(set: {})", self.is_set())
    }
}
