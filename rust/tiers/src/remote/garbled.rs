//! What a peer says, with some of it changed, left out or said twice.

use proptest::prelude::*;
use proptest::sample::Index;

/// Changes of something that was said: where, by what, and how.
pub(super) fn changes() -> impl Strategy<Value = Vec<(Index, u8, u8)>> {
    prop::collection::vec((any::<Index>(), any::<u8>(), 0..4u8), 1..6)
}

/// `bytes`, not empty, after `changes`, some of which put one of the `telling` bytes of the protocol.
pub(super) fn garbled(
    mut bytes: Vec<u8>,
    changes: Vec<(Index, u8, u8)>,
    telling: &[u8],
) -> Vec<u8> {
    for (at, byte, how) in changes {
        let at = at.index(bytes.len());
        match how {
            0 => bytes[at] = byte,
            1 => bytes[at] = telling[usize::from(byte) % telling.len()],
            2 => bytes.truncate(at.max(1)),
            _ => bytes.extend_from_within(at..),
        }
    }
    bytes
}
