//! Known chunks at any offset of a prompt.

use crate::Namespace;

/// A chunk kept alive while it is looked at; dropping it unpins.
pub trait Known {
    /// Digest of its namespace.
    fn namespace(&self) -> &[u8; 32];
    /// Key of the chunk.
    fn key(&self) -> crate::Key;
    /// Its tokens.
    fn tokens(&self) -> &[u32];
    /// (slot, generation) of the chunk before it in its chain, when that is resident.
    fn parent(&self) -> Option<(u32, u32)>;
    /// (slot, generation) of resident chunks after it in its chain (at most 64, newest first).
    fn children(&self) -> Vec<(u32, u32)>;
}

/// What the matcher needs from the store: pin a chunk that it knows by slot and generation.
pub trait Resolver {
    /// The pin.
    type Pinned<'a>: Known
    where
        Self: 'a;
    /// `None` when that generation is gone. Takes no lock.
    fn pin(&self, slot: u32, generation: u32) -> Option<Self::Pinned<'_>>;
}

/// A run of prompt tokens that equals rows of one known chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Key of the chunk.
    pub key: crate::Key,
    /// First prompt position.
    pub start: usize,
    /// One past the last prompt position.
    pub stop: usize,
    /// Row of the record that holds `start`.
    pub row: usize,
}

/// Fingerprints of the resident chunks of every namespace.
#[derive(Debug, Default)]
pub struct Matcher {}

impl Matcher {
    /// For at most `max_chunks` chunks (slots below `max_chunks`) of at most `chunk_size` tokens.
    pub fn new(_max_chunks: usize, _chunk_size: usize) -> Self {
        Self {}
    }

    /// Makes a published chunk findable. Calls to `insert` and `remove` never overlap (the store's writer lock).
    pub fn insert(&self, _ns: &Namespace, _slot: u32, _generation: u32, _tokens: &[u32], _parent: Option<u32>) {}

    /// Forgets a chunk; `tokens` are those given to `insert`.
    pub fn remove(&self, _ns_digest: &[u8; 32], _slot: u32, _tokens: &[u32]) {}

    /// Every occurrence, left to right, without overlap.
    pub fn find<R: Resolver>(&self, _ns: &Namespace, _tokens: &[u32], _min_tokens: usize, _chunks: &R) -> Vec<Match> {
        Vec::new()
    }

    /// Bytes of memory that the fingerprints take.
    pub fn bytes(&self) -> usize {
        0
    }
}
