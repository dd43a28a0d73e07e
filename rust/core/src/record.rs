//! What lies where in a record: the KV payload first, then what is kept with it.
//!
//! ```text
//! payload (ntokens × bytes_per_token) | pad to 4 | tokens u32 × n | scores f32 × n, if any | namespace 32 | context 32 | parent 32 | behind 32 × m
//! ```

use std::ops::Range;

use crate::arena::Arena;
use crate::chunk::{Chunks, Labels};
use crate::key::Key;
use std::sync::atomic::Ordering;

/// Byte ranges of the parts of a record, from its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub payload: Range<usize>,
    pub tokens: Range<usize>,
    pub scores: Range<usize>,
    /// Digest of the namespace, so that readers can tell it without the ledger.
    pub namespace: Range<usize>,
    pub context: Range<usize>,
    /// Key of the chunk before it, or a root.
    pub parent: Range<usize>,
    pub behind: Range<usize>,
}

impl Layout {
    /// `None` when the record is larger than the address space.
    pub(crate) fn new(
        ntokens: usize,
        bytes_per_token: usize,
        scores: bool,
        nbehind: usize,
    ) -> Option<Self> {
        let payload = 0..ntokens.checked_mul(bytes_per_token)?;
        let start = payload.end.checked_next_multiple_of(4)?;
        let tokens = start..start.checked_add(ntokens.checked_mul(4)?)?;
        let scores = tokens.end
            ..tokens
                .end
                .checked_add(if scores { ntokens * 4 } else { 0 })?;
        let namespace = scores.end..scores.end.checked_add(32)?;
        let context = namespace.end..namespace.end.checked_add(32)?;
        let parent = context.end..context.end.checked_add(32)?;
        let behind = parent.end..parent.end.checked_add(nbehind.checked_mul(32)?)?;
        Some(Self {
            payload,
            tokens,
            scores,
            namespace,
            context,
            parent,
            behind,
        })
    }

    /// Of the record in a slot that the caller has pinned or reserved.
    pub(crate) fn of(chunks: &Chunks, slot: u32) -> Self {
        let (hot, cold) = (chunks.hot(slot), chunks.cold(slot));
        let ntokens = hot.ntokens.load(Ordering::Relaxed) as usize;
        let bytes_per_token = hot.bytes_per_token.load(Ordering::Relaxed) as usize;
        let Labels { scores, .. } = cold.labels();
        Self::new(
            ntokens,
            bytes_per_token,
            scores,
            cold.nbehind.load(Ordering::Relaxed) as usize,
        )
        .expect("it was laid out when it was reserved")
    }

    pub(crate) fn bytes(&self) -> usize {
        self.behind.end
    }
}

/// Start of a record's part; the caller has the slot pinned or reserved while it uses it.
pub(crate) fn part(arena: &Arena, chunks: &Chunks, slot: u32, part: &Range<usize>) -> *mut u8 {
    let start = arena.at(chunks.hot(slot).offset.load(Ordering::Relaxed), part.end);
    // SAFETY: `at` checked that the record reaches at least to the part's end.
    unsafe { start.add(part.start) }
}

/// Tokens of the record in a slot.
///
/// # Safety
/// The slot is pinned for as long as the slice lives, and was published (its tokens don't change any more).
pub(crate) unsafe fn tokens<'a>(arena: &Arena, chunks: &Chunks, slot: u32) -> &'a [u32] {
    let range = Layout::of(chunks, slot).tokens;
    let start = part(arena, chunks, slot, &range);
    // SAFETY: the part lies in the arena, starts at a multiple of 4, and the caller vouches for the pin.
    unsafe { std::slice::from_raw_parts(start.cast(), range.len() / 4) }
}

/// Digest of the namespace of the record in a slot.
///
/// # Safety
/// As for [`tokens`].
pub(crate) unsafe fn namespace<'a>(arena: &Arena, chunks: &Chunks, slot: u32) -> &'a [u8; 32] {
    let range = Layout::of(chunks, slot).namespace;
    // SAFETY: 32 bytes within the arena that don't change while the slot is pinned.
    unsafe { &*part(arena, chunks, slot, &range).cast() }
}

/// What is written with the payload when a chunk is reserved.
pub(crate) struct Tail<'a> {
    pub tokens: &'a [u32],
    pub namespace: &'a [u8; 32],
    pub context: &'a Key,
    pub parent: &'a Key,
    pub behind: &'a [Key],
}

/// Writes everything but payload and scores; scores start as zeros.
///
/// # Safety
/// The caller owns the reserved slot, whose fields are set.
pub(crate) unsafe fn write_tail(arena: &Arena, chunks: &Chunks, slot: u32, tail: &Tail<'_>) {
    let layout = Layout::of(chunks, slot);
    let base = part(arena, chunks, slot, &(0..layout.bytes()));
    // SAFETY: every part lies in the record, which is the caller's alone; the sources are slices of those lengths.
    unsafe {
        let to = |range: &Range<usize>| base.add(range.start);
        std::ptr::copy_nonoverlapping(
            tail.tokens.as_ptr().cast(),
            to(&layout.tokens),
            layout.tokens.len(),
        );
        to(&layout.scores).write_bytes(0, layout.scores.len());
        std::ptr::copy_nonoverlapping(
            tail.namespace.as_ptr(),
            to(&layout.namespace),
            layout.namespace.len(),
        );
        std::ptr::copy_nonoverlapping(
            tail.context.as_ptr(),
            to(&layout.context),
            layout.context.len(),
        );
        std::ptr::copy_nonoverlapping(
            tail.parent.as_ptr(),
            to(&layout.parent),
            layout.parent.len(),
        );
        std::ptr::copy_nonoverlapping(
            tail.behind.as_ptr().cast(),
            to(&layout.behind),
            layout.behind.len(),
        );
    }
}
