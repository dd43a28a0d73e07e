//! Keys of chunks: 32 bytes of keyed BLAKE3, never truncated.

/// A chain key, content id or context digest.
pub type Key = [u8; 32];

/// Parent of the first chunk of a document.
pub const SEGMENT_ROOT: Key = *b"blendstore/chain-root/segment/v1";

/// Parent of the first chunk of a chain that begins at position 0 of a prompt.
pub const HEAD_ROOT: Key = *b"blendstore/chain-root/at-head/v1";

/// A context digest that is not known, or of KV that stood behind blended KV.
pub const NO_CONTEXT: Key = [0; 32];
