//! Namespaces: what must be equal for KV bytes to be interchangeable, and the keys that follow from it.
//!
//! Every key is a keyed BLAKE3 hash under a key derived from the namespace, so keys of two namespaces are never equal and
//! can't be computed without the tenant salt. Content ids of many chunks are hashed side by side in SIMD lanes, which is
//! why a chain key covers the content id (64 bytes, one compression) and not the tokens themselves.

use std::borrow::Cow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;

use blake3::IncrementCounter;
use blake3::platform::{MAX_SIMD_DEGREE, Platform, le_bytes_from_words_32, words_from_le_bytes_32};

use crate::error::{Error, Result};
use crate::key::{HEAD_ROOT, Key, SEGMENT_ROOT};

const NAMESPACE_CONTEXT: &str = "blendstore 2026 namespace v1";
const CHAIN_CONTEXT: &str = "blendstore 2026 chain key v1";
const PREFIX_CONTEXT: &str = "blendstore 2026 context key v1";
const TENANT_CONTEXT: &str = "blendstore 2026 tenant v1";
const NAME_CONTEXT: &str = "blendstore 2026 namespace name v1";

/// Bytes of one BLAKE3 block and of one BLAKE3 chunk (its leaf, not ours).
const BLOCK: usize = 64;
const LEAF: usize = 1024;

// Domain flags of BLAKE3 (section 2.2 of its specification).
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 1 << 1;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

/// Identity of interchangeable KV bytes.
#[derive(Clone, Copy)]
pub struct Namespace {
    digest: [u8; 32],
    chain_key: [u8; 32],
    context_key: [u8; 32],
    tenant: Key,
}

impl Namespace {
    /// From named fields and a tenant salt. Fields and salt are length-framed: no two different lists hash alike.
    pub fn new<N: AsRef<str>, V: AsRef<[u8]>>(fields: &[(N, V)], salt: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(NAMESPACE_CONTEXT);
        let mut frame = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        frame(salt);
        for (name, value) in fields {
            frame(name.as_ref().as_bytes());
            frame(value.as_ref());
        }
        Self {
            tenant: blake3::derive_key(TENANT_CONTEXT, salt),
            ..Self::from_digest(*hasher.finalize().as_bytes())
        }
    }

    /// The namespace with that digest, as a tenant of its own: what it is in can't be told from a digest.
    pub fn from_digest(digest: [u8; 32]) -> Self {
        Self {
            digest,
            chain_key: blake3::derive_key(CHAIN_CONTEXT, &digest),
            context_key: blake3::derive_key(PREFIX_CONTEXT, &digest),
            tenant: blake3::derive_key(TENANT_CONTEXT, &digest),
        }
    }

    /// 32 bytes that tell it from all others, and from which every key is derived: a secret where the salt is one.
    pub fn digest(&self) -> &[u8; 32] {
        &self.digest
    }

    /// Whose it is: the same for all namespaces with the same salt.
    pub fn tenant(&self) -> &Key {
        &self.tenant
    }

    /// What it is called outside of this process: derived from the digest, of which it tells nothing.
    pub fn name(&self) -> Key {
        blake3::derive_key(NAME_CONTEXT, &self.digest)
    }

    /// Content id of one chunk.
    pub fn content_id(&self, tokens: &[u32]) -> Key {
        *blake3::keyed_hash(&self.digest, &le_bytes(tokens)).as_bytes()
    }

    /// Chain key of the chunk with that content behind `parent`.
    pub fn chain_key(&self, parent: &Key, content: &Key) -> Key {
        *blake3::keyed_hash(&self.chain_key, &link(parent, content)).as_bytes()
    }

    /// Chain keys of the chunks of one segment that continues `parent` (one of the roots for a whole segment). The last
    /// chunk may be short; no tokens have no chunks.
    pub fn chain_keys(&self, tokens: &[u32], chunk_size: usize, parent: &Key) -> Vec<Key> {
        let mut keys = self.content_ids(tokens.chunks(chunk_size.max(1)));
        let all = 0..keys.len();
        self.chain(&mut keys, vec![(all, *parent)]);
        keys
    }

    /// Chain keys of all chunks of all segments, given as (start, stop) in `tokens`. With `head`, a segment that starts
    /// at 0 begins a head chain.
    pub fn segment_keys(
        &self,
        tokens: &[u32],
        bounds: &[(usize, usize)],
        chunk_size: usize,
        head: bool,
    ) -> Result<Vec<Key>> {
        let chunk_size = chunk_size.max(1);
        for &(start, stop) in bounds {
            if start > stop || stop > tokens.len() {
                return Err(Error::argument(
                    "bounds",
                    format!("({start}, {stop})"),
                    format!("start <= stop <= {} (the number of tokens)", tokens.len()),
                ));
            }
        }
        let mut keys = self.content_ids(
            bounds
                .iter()
                .flat_map(|&(start, stop)| tokens[start..stop].chunks(chunk_size)),
        );
        let mut first = 0;
        let chains = bounds.iter().map(|&(start, stop)| {
            let chunks = first..first + (stop - start).div_ceil(chunk_size);
            first = chunks.end;
            (
                chunks,
                if head && start == 0 {
                    HEAD_ROOT
                } else {
                    SEGMENT_ROOT
                },
            )
        });
        self.chain(&mut keys, chains.collect());
        Ok(keys)
    }

    /// Context digests of the prefixes `tokens[..p]` for sorted positions.
    pub fn context_digests(&self, tokens: &[u32], positions: &[usize]) -> Result<Vec<Key>> {
        let mut hasher = blake3::Hasher::new_keyed(&self.context_key);
        let mut done = 0;
        let mut digests = Vec::with_capacity(positions.len());
        for &position in positions {
            if position < done || position > tokens.len() {
                return Err(Error::argument(
                    "positions",
                    position,
                    format!(
                        "positions in ascending order, up to {} (the number of tokens)",
                        tokens.len()
                    ),
                ));
            }
            hasher.update(&le_bytes(&tokens[done..position]));
            digests.push(*hasher.finalize().as_bytes());
            done = position;
        }
        Ok(digests)
    }

    /// Turns content ids in place into chain keys; each chain is a range of them and what comes before it. Chains advance
    /// side by side in SIMD lanes; a chain alone goes link by link.
    fn chain(&self, keys: &mut [Key], mut chains: Vec<(Range<usize>, Key)>) {
        let platform = Platform::detect();
        let chain_key = words_from_le_bytes_32(&self.chain_key);
        chains.retain(|(chunks, _)| !chunks.is_empty());
        while chains.len() > 1 {
            let mut links = [[0; BLOCK]; MAX_SIMD_DEGREE];
            let mut made = [[0; 32]; MAX_SIMD_DEGREE];
            for lanes in chains.chunks_mut(MAX_SIMD_DEGREE) {
                for ((chunks, parent), input) in lanes.iter().zip(&mut links) {
                    *input = link(parent, &keys[chunks.start]);
                }
                hash_leaves(
                    platform,
                    &chain_key,
                    links[..lanes.len()].iter(),
                    &mut made[..lanes.len()],
                );
                for ((chunks, parent), key) in lanes.iter_mut().zip(&made) {
                    keys[chunks.start] = *key;
                    *parent = *key;
                    chunks.start += 1;
                }
            }
            chains.retain(|(chunks, _)| !chunks.is_empty());
        }
        for (chunks, mut parent) in chains {
            for key in &mut keys[chunks] {
                let mut state = chain_key;
                let flags = KEYED_HASH | CHUNK_START | CHUNK_END | ROOT;
                platform.compress_in_place(&mut state, &link(&parent, key), BLOCK as u8, 0, flags);
                *key = le_bytes_from_words_32(&state);
                parent = *key;
            }
        }
    }

    /// Content ids of many chunks; runs of equal length that fill whole blocks of one leaf go through SIMD lanes.
    fn content_ids<'a>(&self, chunks: impl Iterator<Item = &'a [u32]>) -> Vec<Key> {
        let platform = Platform::detect();
        let key = words_from_le_bytes_32(&self.digest);
        let mut ids = Vec::with_capacity(chunks.size_hint().0);
        let mut lanes: [&[u32]; MAX_SIMD_DEGREE] = [&[]; MAX_SIMD_DEGREE];
        let mut waiting = 0;
        for chunk in chunks {
            if waiting == MAX_SIMD_DEGREE || (waiting > 0 && lanes[0].len() != chunk.len()) {
                self.hash_lanes(platform, &key, &lanes[..waiting], &mut ids);
                waiting = 0;
            }
            lanes[waiting] = chunk;
            waiting += 1;
        }
        self.hash_lanes(platform, &key, &lanes[..waiting], &mut ids);
        ids
    }

    /// Appends the content ids of chunks of equal length.
    fn hash_lanes(&self, platform: Platform, key: &[u32; 8], lanes: &[&[u32]], ids: &mut Vec<Key>) {
        let from = ids.len();
        macro_rules! by_length {
            ($($bytes:literal)*) => {
                match lanes.first().map_or(0, |lane| lane.len() * 4) {
                    $($bytes if cfg!(target_endian = "little") => {
                        ids.resize(from + lanes.len(), [0; 32]);
                        let whole = lanes.iter().map(|lane| bytes_of(lane).try_into().expect("lanes of one length"));
                        hash_leaves::<$bytes>(platform, key, whole, &mut ids[from..]);
                    })*
                    _ => ids.extend(lanes.iter().map(|lane| self.content_id(lane))),
                }
            };
        }
        by_length!(64 128 192 256 320 384 448 512 576 640 704 768 832 896 960 1024);
    }
}

/// What a chain key is the hash of.
fn link(parent: &Key, content: &Key) -> [u8; BLOCK] {
    let mut input = [0; BLOCK];
    input[..32].copy_from_slice(parent);
    input[32..].copy_from_slice(content);
    input
}

/// Keyed hashes of at most `MAX_SIMD_DEGREE` inputs of `N` bytes, whole blocks within one leaf: such a hash is one chain of
/// compressions from the key, with the root flag on the last, so it vectorises across inputs.
fn hash_leaves<'a, const N: usize>(
    platform: Platform,
    key: &[u32; 8],
    lanes: impl Iterator<Item = &'a [u8; N]>,
    hashes: &mut [Key],
) {
    const { assert!(N.is_multiple_of(BLOCK) && N > 0 && N <= LEAF) };
    let mut inputs = [&[0; N]; MAX_SIMD_DEGREE];
    for (input, lane) in inputs.iter_mut().zip(lanes) {
        *input = lane;
    }
    platform.hash_many(
        &inputs[..hashes.len()],
        key,
        0,
        IncrementCounter::No,
        KEYED_HASH,
        CHUNK_START,
        CHUNK_END | ROOT,
        hashes.as_flattened_mut(),
    );
}

/// The bytes of tokens, as they lie in memory.
fn bytes_of(tokens: &[u32]) -> &[u8] {
    // SAFETY: u32 has no padding, u8 needs no alignment, and the length is that of the same memory in bytes.
    unsafe { std::slice::from_raw_parts(tokens.as_ptr().cast(), size_of_val(tokens)) }
}

/// Tokens as u32 little-endian.
fn le_bytes(tokens: &[u32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytes_of(tokens))
    } else {
        Cow::Owned(
            tokens
                .iter()
                .flat_map(|token| token.to_le_bytes())
                .collect(),
        )
    }
}

impl PartialEq for Namespace {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Namespace {}

impl Hash for Namespace {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

impl fmt::Debug for Namespace {
    /// The first bytes of the digest only: the digest keys the hashes, so it is a secret of the tenant.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Namespace({:02x}{:02x}…)",
            self.digest[0], self.digest[1]
        )
    }
}

#[cfg(test)]
mod tests;
