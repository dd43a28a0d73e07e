//! Known chunks at any offset of a prompt.
//!
//! Each chunk has a few *anchors*: windows of [`WINDOW`] tokens at rows 0, 128, 256, … whose keyed fingerprints lead to it.
//! [`Matcher::find`] rolls over the prompt once; where a fingerprint is known, the chunk is pinned, compared token by token
//! and extended to both sides, along its chain too. So every run of a chunk's tokens that no other match covers is found
//! when it has [`Matcher::certain`] tokens (it then holds a whole anchor), shorter ones when they happen to hold one.
//!
//! Work is O(prompt) whatever is stored and whatever is asked: a fingerprint has at most eight candidates, windows inside a
//! run that is confirmed are not looked up again, and comparisons are paid from a credit that grows with the prompt.

mod anchors;
mod fingerprint;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};

use crate::{Namespace, Result};
use anchors::{Anchors, Candidate, MOST_ANCHORS, SAME};
use fingerprint::{Fingerprint, Roll};

/// Tokens of an anchor (fewer when chunks are smaller than that).
const WINDOW: usize = 32;

/// Rows between anchors, unless a full chunk would have more than [`MOST_ANCHORS`].
const STRIDE: usize = 128;

/// Tokens that may be compared for each token of the prompt, and at its start.
const CREDIT: usize = 16;
const FIRST_CREDIT: usize = 1 << 14;

/// Fingerprints made at a time.
const BATCH: usize = 16;

/// What pinning a chunk costs, in compared tokens.
const PIN_COST: usize = 32;

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

/// What the matcher needs from the store: chunks by slot. Takes no lock.
pub trait Resolver {
    /// The pin.
    type Pinned<'a>: Known
    where
        Self: 'a;
    /// Generation of the chunk that is resident in a slot.
    fn resident(&self, slot: u32) -> Option<u32>;
    /// `None` when that generation is gone, or is a `HEAD` record, which is not for reuse elsewhere.
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
#[derive(Debug)]
pub struct Matcher {
    window: usize,
    stride: usize,
    anchors: Anchors,
}

impl Matcher {
    /// For at most `max_chunks` chunks of at most `chunk_size` tokens.
    pub fn new(max_chunks: usize, chunk_size: usize) -> Result<Self> {
        let window = chunk_size.clamp(1, WINDOW);
        let stride = STRIDE.max(chunk_size.div_ceil(MOST_ANCHORS));
        let each = anchor_rows(window, stride, chunk_size.max(1)).count();
        Ok(Self {
            window,
            stride,
            anchors: Anchors::new(max_chunks * each)?,
        })
    }

    /// Tokens from which on a run of one chunk's rows is found for certain, if no other match covers a part of it and at
    /// most eight chunks share its anchors.
    pub fn certain(&self) -> usize {
        self.stride + self.window - 1
    }

    /// Makes a published chunk findable. Calls to `insert` and `remove` never overlap (the store's writer lock).
    ///
    /// A chunk shorter than a window has no anchor and is only found by extension from its parent.
    pub fn insert(&self, ns_digest: &[u8; 32], slot: u32, tokens: &[u32]) {
        // Last anchor first, so that the chunk's start is the newest where they are alike.
        for (fingerprint, candidate) in self.anchors_of(ns_digest, slot, tokens).rev() {
            self.anchors.insert(fingerprint, candidate);
        }
    }

    /// Forgets a chunk; the arguments are those given to `insert`.
    pub fn remove(&self, ns_digest: &[u8; 32], slot: u32, tokens: &[u32]) {
        for (fingerprint, candidate) in self.anchors_of(ns_digest, slot, tokens) {
            self.anchors.remove(fingerprint, candidate);
        }
    }

    /// Every occurrence of at least `min_tokens` tokens (of a chain, not of each chunk), left to right, without overlap.
    ///
    /// Where occurrences overlap, the longest has its tokens first, then the leftmost; what is left of the others counts as
    /// an occurrence of its own.
    pub fn find<R: Resolver>(
        &self,
        ns: &Namespace,
        tokens: &[u32],
        min_tokens: usize,
        chunks: &R,
    ) -> Vec<Match> {
        let function = Fingerprint::new(ns.digest(), self.window);
        let mut search = Search {
            matcher: self,
            ns,
            tokens,
            chunks,
            spent: 0,
            verified: HashMap::new(),
        };
        let runs = self.runs(&mut function.roll(tokens), &mut search);
        resolve(runs, min_tokens)
    }

    /// Bytes of memory that the fingerprints take.
    pub fn bytes(&self) -> usize {
        self.anchors.bytes()
    }

    /// Every run that a window leads to, in the order of those windows.
    fn runs<R: Resolver>(&self, windows: &mut Roll<'_>, search: &mut Search<'_, R>) -> Vec<Run> {
        let mut runs = Vec::new();
        let mut candidates = Vec::with_capacity(2 * SAME);
        let mut position = 0;
        // Fingerprints come in batches, so that their buckets are on the way from memory while others are looked at.
        let mut batch = [0; BATCH];
        loop {
            let mut count = 0;
            while count < BATCH {
                let Some(fingerprint) = windows.at(position + count) else {
                    break;
                };
                self.anchors.prefetch(fingerprint);
                batch[count] = fingerprint;
                count += 1;
            }
            if count == 0 {
                return runs;
            }
            let mut resume = position + count;
            for (place, &fingerprint) in (position..).zip(&batch[..count]) {
                self.anchors
                    .candidates(fingerprint, |candidate| candidates.push(candidate));
                let found = runs.len();
                for candidate in candidates.drain(..) {
                    if search.spent > FIRST_CREDIT + CREDIT * place {
                        break;
                    }
                    runs.extend(search.verify(candidate, place));
                }
                if let Some(reached) = runs[found..].iter().map(Run::stop).max() {
                    resume = (place + 1).max((reached + 1).saturating_sub(self.window));
                    break;
                }
            }
            position = resume;
        }
    }

    fn anchors_of(
        &self,
        ns_digest: &[u8; 32],
        slot: u32,
        tokens: &[u32],
    ) -> impl DoubleEndedIterator<Item = (u64, Candidate)> {
        let function = Fingerprint::new(ns_digest, self.window);
        let window = self.window;
        anchor_rows(self.window, self.stride, tokens.len()).map(move |(anchor, row)| {
            (
                function.of(&tokens[row..row + window]),
                Candidate { slot, anchor },
            )
        })
    }
}

/// (number, row) of the anchors of a chunk of `ntokens` tokens.
fn anchor_rows(
    window: usize,
    stride: usize,
    ntokens: usize,
) -> impl DoubleEndedIterator<Item = (u8, usize)> {
    let count = if ntokens < window {
        0
    } else {
        (ntokens - window) / stride + 1
    };
    (0..count.min(MOST_ANCHORS)).map(move |number| (number as u8, number * stride))
}

/// Neighbouring pieces of one chain that equal the prompt, from left to right. Never empty.
struct Run(Vec<Match>);

impl Run {
    fn start(&self) -> usize {
        self.0[0].start
    }

    fn stop(&self) -> usize {
        self.0[self.0.len() - 1].stop
    }

    fn len(&self) -> usize {
        self.stop() - self.start()
    }
}

/// The state of one `find`.
struct Search<'a, R> {
    matcher: &'a Matcher,
    ns: &'a Namespace,
    tokens: &'a [u32],
    chunks: &'a R,
    /// Compared tokens so far.
    spent: usize,
    /// (slot, prompt position of its row 0) → where its last run stops.
    verified: HashMap<(u32, isize), usize>,
}

impl<'a, R: Resolver> Search<'a, R> {
    /// The whole run around a window at `position` that may be a candidate's anchor; `None` if it is not, or if the
    /// window lies in a run that is known.
    fn verify(&mut self, candidate: Candidate, position: usize) -> Option<Run> {
        let row = usize::from(candidate.anchor) * self.matcher.stride;
        let origin = position as isize - row as isize;
        let window = self.matcher.window;
        if self
            .verified
            .get(&(candidate.slot, origin))
            .is_some_and(|&stop| position + window <= stop)
        {
            return None;
        }
        let generation = self.chunks.resident(candidate.slot)?;
        let chunk = self.pin(candidate.slot, generation)?;
        let known = chunk.tokens();
        if known.len() < row + window
            || known[row..row + window] != self.tokens[position..position + window]
        {
            return None;
        }
        let left = common_suffix(&known[..row], &self.tokens[..position]);
        let right = common_prefix(&known[row..], &self.tokens[position..]);
        let piece = Match {
            key: chunk.key(),
            start: position - left,
            stop: position + right,
            row: row - left,
        };
        let at_end = row + right == known.len();
        self.note(candidate.slot, &piece);

        let mut pieces = if piece.row == 0 {
            self.before(&chunk, piece.start)
        } else {
            Vec::new()
        };
        pieces.reverse();
        pieces.push(piece);
        if at_end {
            self.after(chunk, piece.stop, &mut pieces);
        }
        Some(Run(pieces))
    }

    /// Pieces to the left of `start`, where row 0 of `chunk` lies, from right to left.
    fn before(&mut self, chunk: &R::Pinned<'a>, mut start: usize) -> Vec<Match> {
        let mut pieces = Vec::new();
        let mut link = chunk.parent();
        while let Some((slot, generation)) = link {
            let Some(parent) = self.pin(slot, generation) else {
                break;
            };
            let known = parent.tokens();
            let same = common_suffix(known, &self.tokens[..start]);
            if same == 0 {
                break;
            }
            let piece = Match {
                key: parent.key(),
                start: start - same,
                stop: start,
                row: known.len() - same,
            };
            self.note(slot, &piece);
            pieces.push(piece);
            start = piece.start;
            link = if piece.row == 0 {
                parent.parent()
            } else {
                None
            };
        }
        pieces
    }

    /// Appends the pieces to the right of `stop`, where the last row of `chunk` lies: at each step the child that equals
    /// most of the prompt, the newest of equals.
    fn after(&mut self, mut chunk: R::Pinned<'a>, mut stop: usize, pieces: &mut Vec<Match>) {
        while stop < self.tokens.len() {
            let mut best: Option<(usize, u32, R::Pinned<'a>)> = None;
            for (slot, generation) in chunk.children() {
                let Some(child) = self.pin(slot, generation) else {
                    continue;
                };
                let same = common_prefix(child.tokens(), &self.tokens[stop..]);
                self.spent += same;
                if same > best.as_ref().map_or(0, |(most, ..)| *most) {
                    best = Some((same, slot, child));
                }
            }
            let Some((same, slot, child)) = best else {
                return;
            };
            let piece = Match {
                key: child.key(),
                start: stop,
                stop: stop + same,
                row: 0,
            };
            self.note(slot, &piece);
            pieces.push(piece);
            if same < child.tokens().len() {
                return;
            }
            stop = piece.stop;
            chunk = child;
        }
    }

    /// Pins a chunk of this namespace.
    fn pin(&mut self, slot: u32, generation: u32) -> Option<R::Pinned<'a>> {
        self.spent += PIN_COST;
        self.chunks
            .pin(slot, generation)
            .filter(|chunk| chunk.namespace() == self.ns.digest())
    }

    fn note(&mut self, slot: u32, piece: &Match) {
        self.spent += piece.stop - piece.start;
        self.verified.insert(
            (slot, piece.start as isize - piece.row as isize),
            piece.stop,
        );
    }
}

/// Tokens at the start that are equal.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    // Blocks compare as one memcmp.
    const BLOCK: usize = 16;
    let blocks = a
        .chunks_exact(BLOCK)
        .zip(b.chunks_exact(BLOCK))
        .take_while(|(a, b)| a == b)
        .count()
        * BLOCK;
    blocks
        + a[blocks..]
            .iter()
            .zip(&b[blocks..])
            .take_while(|(a, b)| a == b)
            .count()
}

/// Tokens at the end that are equal.
fn common_suffix(a: &[u32], b: &[u32]) -> usize {
    const BLOCK: usize = 16;
    let blocks = a
        .rchunks_exact(BLOCK)
        .zip(b.rchunks_exact(BLOCK))
        .take_while(|(a, b)| a == b)
        .count()
        * BLOCK;
    let (a, b) = (&a[..a.len() - blocks], &b[..b.len() - blocks]);
    blocks
        + a.iter()
            .rev()
            .zip(b.iter().rev())
            .take_while(|(a, b)| a == b)
            .count()
}

/// Gives every prompt token to at most one run and returns the pieces in order.
fn resolve(mut runs: Vec<Run>, min_tokens: usize) -> Vec<Match> {
    runs.sort_by_key(|run| (std::cmp::Reverse(run.len()), run.start(), run.0[0].key));
    let mut taken: BTreeMap<usize, usize> = BTreeMap::new();
    let mut matches = Vec::new();
    for run in &runs {
        for (start, stop) in gaps(&taken, run.start(), run.stop()) {
            if stop - start < min_tokens.max(1) {
                continue;
            }
            taken.insert(start, stop);
            matches.extend(run.0.iter().filter_map(|piece| clip(piece, start, stop)));
        }
    }
    matches.sort_unstable_by_key(|piece| piece.start);
    matches
}

/// The parts of start..stop that are not taken.
fn gaps(taken: &BTreeMap<usize, usize>, start: usize, stop: usize) -> Vec<(usize, usize)> {
    let before = taken
        .range(..=start)
        .next_back()
        .map_or(start, |(_, &stop)| stop.max(start));
    let mut free = Vec::new();
    let mut from = before;
    for (&next, &after) in taken.range(start..stop) {
        if from < next {
            free.push((from, next));
        }
        from = from.max(after);
    }
    if from < stop {
        free.push((from, stop));
    }
    free
}

/// The part of a piece within start..stop.
fn clip(piece: &Match, start: usize, stop: usize) -> Option<Match> {
    let (from, to) = (piece.start.max(start), piece.stop.min(stop));
    (from < to).then(|| Match {
        key: piece.key,
        start: from,
        stop: to,
        row: piece.row + from - piece.start,
    })
}
