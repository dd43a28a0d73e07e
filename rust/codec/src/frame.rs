//! The frame: a record in its self-contained form, as it lies on disk and travels over the network.
//!
//! All numbers are little-endian. `head` is everything before the payload, so that a reader can verify it, find room, and
//! have the payload delivered where it belongs.
//!
//! ```text
//!   0  magic "blendfrm"      8     48  chain key          32    176  tokens n            4    200  params length     4
//!   8  version = 1           2     80  parent key         32    180  bytes per token     4    204  memory format     2
//!  10  flags: 1 = scores     2    112  namespace name     32    184  source position     4    206  codec             2
//!  12  head length           4    144  context digest     32    188  segment offset      4    208  provenance        1
//!  16  frame length          8                                  192  tokens before it    4    209  rank              1
//!  24  xxh3-64 of the head   8                                  196  documents before m  4    210  zeros             6
//!  32  xxh3-64 of payload    8
//!  40  payload length        8
//! 216  params | tokens u32 × n | scores f32 × n, if any | behind 32 × m | zeros up to a multiple of 8 | payload
//! ```
//!
//! The head's checksum is taken with its own 8 bytes as zeros; it covers the payload's. Checksums are for accidents; identity
//! is [`Header::verify`]: the key must be the hash of namespace, parent and tokens, which nobody can forge without the salt.

use std::fmt;
use std::io::IoSlice;
use std::ops::Range;

use blendstore_core::{Key, Namespace};
use xxhash_rust::xxh3::xxh3_64;

use crate::coder::{Codec, MAX_EXPANSION};

/// First bytes of every frame.
pub const MAGIC: [u8; 8] = *b"blendfrm";
/// The only version there is.
pub const VERSION: u16 = 1;
/// Bytes before the variable parts.
pub const FIXED: usize = 216;
/// Most tokens of a record, as the store has it.
pub const MAX_TOKENS: u32 = 1 << 20;

const SCORES: u16 = 1;
const HEAD_SUM: Range<usize> = 24..32;

/// What is wrong with bytes that should be a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// They end too early, or go on too long.
    Length {
        /// What has that length.
        what: &'static str,
        /// As it should be.
        expected: u64,
        /// As it is.
        found: u64,
    },
    /// They don't begin like a frame.
    Magic,
    /// A version that this one can't read.
    Version(u16),
    /// A number with a value that it can't have.
    Value {
        /// Which.
        what: &'static str,
        /// The value.
        found: u64,
    },
    /// Bytes have changed since they were written.
    Checksum(&'static str),
    /// It is a record, but not the one that was asked for.
    Identity(&'static str),
}

impl FrameError {
    /// A word for counters.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Length { .. } => "length",
            Self::Magic => "magic",
            Self::Version(_) => "version",
            Self::Value { .. } => "value",
            Self::Checksum(_) => "checksum",
            Self::Identity(_) => "identity",
        }
    }
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length {
                what,
                expected,
                found,
            } => write!(f, "{what} is {found} bytes, not {expected}"),
            Self::Magic => f.write_str("not a record: it begins with other bytes"),
            Self::Version(found) => write!(
                f,
                "record version {found}, but this program reads version {VERSION}"
            ),
            Self::Value { what, found } => write!(f, "{what} is {found}, which no record has"),
            Self::Checksum(what) => {
                write!(f, "the checksum of the {what} is wrong: bytes have changed")
            }
            Self::Identity(what) => {
                write!(f, "another record: its {what} is not the one asked for")
            }
        }
    }
}

impl std::error::Error for FrameError {}

/// Result of reading a frame.
pub type Result<T> = std::result::Result<T, FrameError>;

/// The fixed facts of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Chain key.
    pub key: Key,
    /// Chain key of the chunk before it, or one of the roots.
    pub parent: Key,
    /// [`Namespace::name`].
    pub namespace: Key,
    /// Context digest of the first token; zeros when it is not known.
    pub context: Key,
    /// Tokens, 1 to [`MAX_TOKENS`].
    pub ntokens: u32,
    /// Payload bytes of one token in memory, at least 1.
    pub bytes_per_token: u32,
    /// Position in its prompt of the first token.
    pub source_position: u32,
    /// Tokens of the chain before it.
    pub segment_offset: u32,
    /// Tokens of the prompt before the chain.
    pub behind_tokens: u32,
    /// Format of the payload in memory; 0 is the engine's own elements.
    pub format: u16,
    /// Coding of the payload in this frame.
    pub codec: Codec,
    /// 0 `HEAD`, 1 `LEAD_IN`, 2 `IN_CONTEXT`, 3 `BLENDED`.
    pub provenance: u8,
    /// A record of higher rank replaces it.
    pub rank: u8,
}

impl Header {
    /// Bytes of the payload in memory.
    pub fn raw_len(&self) -> u64 {
        u64::from(self.ntokens) * u64::from(self.bytes_per_token)
    }

    /// Proves that a record of these tokens is the one that `key` of `namespace` names.
    pub fn verify(&self, namespace: &Namespace, key: &Key, tokens: &[u32]) -> Result<()> {
        if self.key != *key {
            return Err(FrameError::Identity("key"));
        }
        if self.namespace != namespace.name() {
            return Err(FrameError::Identity("namespace"));
        }
        if namespace.chain_key(&self.parent, &namespace.content_id(tokens)) != *key {
            return Err(FrameError::Identity("content"));
        }
        Ok(())
    }
}

/// A record to be framed.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// The fixed facts; `codec` says how `payload` is coded.
    pub header: Header,
    /// Parameter block of the memory format.
    pub params: &'a [u8],
    /// `ntokens` token ids.
    pub tokens: &'a [u32],
    /// `ntokens` scores, if it has any.
    pub scores: Option<&'a [f32]>,
    /// Content ids of the documents before it.
    pub behind: &'a [Key],
    /// The coded payload.
    pub payload: &'a [u8],
}

impl Parts<'_> {
    /// The head, to be followed by `payload`. Its length is a multiple of 8.
    ///
    /// # Panics
    /// If `tokens` or `scores` are not `ntokens`.
    pub fn encode_head(&self) -> Vec<u8> {
        let header = &self.header;
        assert_eq!(
            self.tokens.len(),
            header.ntokens as usize,
            "tokens of the header"
        );
        assert!(
            self.scores
                .is_none_or(|scores| scores.len() == self.tokens.len()),
            "a score for each token"
        );
        let lengths = Lengths {
            params: self.params.len() as u64,
            ntokens: u64::from(header.ntokens),
            scores: self.scores.is_some(),
            nbehind: self.behind.len() as u64,
        };
        let head_len = usize::try_from(lengths.head()).expect("parts in memory");
        let mut head = Vec::with_capacity(head_len);
        head.extend_from_slice(&MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(if lengths.scores { SCORES } else { 0 }).to_le_bytes());
        head.extend_from_slice(&(head_len as u32).to_le_bytes());
        head.extend_from_slice(&(head_len as u64 + self.payload.len() as u64).to_le_bytes());
        head.extend_from_slice(&[0; 8]);
        head.extend_from_slice(&xxh3_64(self.payload).to_le_bytes());
        head.extend_from_slice(&(self.payload.len() as u64).to_le_bytes());
        for key in [
            &header.key,
            &header.parent,
            &header.namespace,
            &header.context,
        ] {
            head.extend_from_slice(key);
        }
        for number in [
            header.ntokens,
            header.bytes_per_token,
            header.source_position,
            header.segment_offset,
            header.behind_tokens,
            self.behind.len() as u32,
            self.params.len() as u32,
        ] {
            head.extend_from_slice(&number.to_le_bytes());
        }
        head.extend_from_slice(&header.format.to_le_bytes());
        head.extend_from_slice(&header.codec.0.to_le_bytes());
        head.extend_from_slice(&[header.provenance, header.rank, 0, 0, 0, 0, 0, 0]);
        debug_assert_eq!(head.len(), FIXED);
        head.extend_from_slice(self.params);
        head.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        head.extend(
            self.scores
                .unwrap_or(&[])
                .iter()
                .flat_map(|score| score.to_le_bytes()),
        );
        head.extend_from_slice(self.behind.as_flattened());
        head.resize(head_len, 0);
        let sum = xxh3_64(&head);
        head[HEAD_SUM].copy_from_slice(&sum.to_le_bytes());
        head
    }

    /// Head and payload in one piece.
    pub fn encode(&self) -> Vec<u8> {
        let mut frame = self.encode_head();
        frame.extend_from_slice(self.payload);
        frame
    }
}

/// A frame on its way out: an encoded head, and the payload where it lies.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    /// Parsed from the encoded head.
    pub head: Head<'a>,
    /// The coded payload.
    pub payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// From a whole frame of anybody's; both checksums are verified. Never panics, never reads beyond `bytes`, allocates
    /// nothing.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let head = Head::parse(bytes)?;
        let payload = &bytes[head.bytes.len()..];
        head.check_payload(payload)?;
        Ok(Self { head, payload })
    }

    /// Both parts, for vectored writes.
    pub fn slices(&self) -> [IoSlice<'a>; 2] {
        [IoSlice::new(self.head.bytes), IoSlice::new(self.payload)]
    }

    /// Bytes of the whole.
    pub fn len(&self) -> usize {
        self.head.bytes.len() + self.payload.len()
    }

    /// False: a frame has a head.
    pub fn is_empty(&self) -> bool {
        false
    }
}

/// A verified head: lengths are consistent, the checksum holds.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a> {
    /// The fixed facts.
    pub header: Header,
    /// Parameter block of the memory format.
    pub params: &'a [u8],
    /// Bytes of the payload behind the head.
    pub payload_len: u64,
    bytes: &'a [u8],
    payload_sum: u64,
    scores: bool,
    nbehind: u32,
}

impl<'a> Head<'a> {
    /// From bytes that begin with a frame of anybody's; what comes behind the head is not looked at.
    pub fn parse(bytes: &'a [u8]) -> Result<Self> {
        let fixed: &[u8; FIXED] = bytes.first_chunk().ok_or(FrameError::Length {
            what: "the record",
            expected: FIXED as u64,
            found: bytes.len() as u64,
        })?;
        if fixed[..8] != MAGIC {
            return Err(FrameError::Magic);
        }
        let version = u16_at(fixed, 8);
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let flags = u16_at(fixed, 10);
        check("flags", flags.into(), flags & !SCORES == 0)?;
        let header = Header {
            key: key_at(fixed, 48),
            parent: key_at(fixed, 80),
            namespace: key_at(fixed, 112),
            context: key_at(fixed, 144),
            ntokens: u32_at(fixed, 176),
            bytes_per_token: u32_at(fixed, 180),
            source_position: u32_at(fixed, 184),
            segment_offset: u32_at(fixed, 188),
            behind_tokens: u32_at(fixed, 192),
            format: u16_at(fixed, 204),
            codec: Codec(u16_at(fixed, 206)),
            provenance: fixed[208],
            rank: fixed[209],
        };
        let n = u64::from(header.ntokens);
        check("tokens", n, (1..=MAX_TOKENS.into()).contains(&n))?;
        check(
            "bytes per token",
            header.bytes_per_token.into(),
            header.bytes_per_token > 0,
        )?;
        check(
            "provenance",
            header.provenance.into(),
            header.provenance <= 3,
        )?;
        check(
            "reserved bytes",
            1,
            fixed[210..].iter().all(|&byte| byte == 0),
        )?;
        for (what, number) in [
            ("source position", header.source_position),
            ("segment offset", header.segment_offset),
        ] {
            check(
                what,
                number.into(),
                number.checked_add(header.ntokens).is_some(),
            )?;
        }
        let nbehind = u32_at(fixed, 196);
        let lengths = Lengths {
            params: u32_at(fixed, 200).into(),
            ntokens: n,
            scores: flags & SCORES != 0,
            nbehind: nbehind.into(),
        };
        let (head_len, payload_len) = (u64::from(u32_at(fixed, 12)), u64_at(fixed, 40));
        same("the head", lengths.head(), head_len)?;
        let whole = head_len.saturating_add(payload_len);
        same("the frame", whole, u64_at(fixed, 16))?;
        if header.codec == Codec::RAW {
            same("the payload", header.raw_len(), payload_len)?;
        }
        let most = payload_len.saturating_mul(MAX_EXPANSION);
        check("payload length", payload_len, header.raw_len() <= most)?;
        let head = usize::try_from(head_len)
            .ok()
            .and_then(|head_len| bytes.get(..head_len));
        let head = head.ok_or(FrameError::Length {
            what: "the record",
            expected: whole,
            found: bytes.len() as u64,
        })?;
        let mut hasher = xxhash_rust::xxh3::Xxh3Default::new();
        hasher.update(&head[..HEAD_SUM.start]);
        hasher.update(&[0; 8]);
        hasher.update(&head[HEAD_SUM.end..]);
        if hasher.digest() != u64_at(fixed, HEAD_SUM.start) {
            return Err(FrameError::Checksum("head"));
        }
        let params = &head[FIXED..FIXED + lengths.params as usize];
        Ok(Self {
            header,
            params,
            payload_len,
            bytes: head,
            payload_sum: u64_at(fixed, 32),
            scores: lengths.scores,
            nbehind,
        })
    }

    /// Proves that `payload` is the one that was written behind this head.
    pub fn check_payload(&self, payload: &[u8]) -> Result<()> {
        same("the payload", self.payload_len, payload.len() as u64)?;
        if xxh3_64(payload) != self.payload_sum {
            return Err(FrameError::Checksum("payload"));
        }
        Ok(())
    }

    /// The encoded head.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Bytes of head and payload.
    pub fn frame_len(&self) -> u64 {
        self.bytes.len() as u64 + self.payload_len
    }

    /// Whether it has scores.
    pub fn has_scores(&self) -> bool {
        self.scores
    }

    /// Content ids in [`Head::behind`].
    pub fn nbehind(&self) -> usize {
        self.nbehind as usize
    }

    /// The token ids.
    pub fn tokens(&self) -> Vec<u32> {
        words(self.part(0)).map(u32::from_le_bytes).collect()
    }

    /// One score per token, if it has any.
    pub fn scores(&self) -> Option<Vec<f32>> {
        self.scores
            .then(|| words(self.part(1)).map(f32::from_le_bytes).collect())
    }

    /// Content ids of the documents before it.
    pub fn behind(&self) -> &'a [Key] {
        self.part(2).as_chunks().0
    }

    /// Tokens, scores, content ids.
    fn part(&self, which: usize) -> &'a [u8] {
        let tokens = 4 * self.header.ntokens as usize;
        let lengths = [
            tokens,
            if self.scores { tokens } else { 0 },
            32 * self.nbehind as usize,
        ];
        let start = FIXED + self.params.len() + lengths[..which].iter().sum::<usize>();
        &self.bytes[start..start + lengths[which]]
    }
}

struct Lengths {
    params: u64,
    ntokens: u64,
    scores: bool,
    nbehind: u64,
}

impl Lengths {
    /// Bytes of the head. Each factor is below 2^32, so nothing overflows.
    fn head(&self) -> u64 {
        let words = self.ntokens * if self.scores { 2 } else { 1 };
        (FIXED as u64 + self.params + 4 * words + 32 * self.nbehind).next_multiple_of(8)
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.as_chunks::<4>().0.iter().copied()
}

fn check(what: &'static str, found: u64, holds: bool) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(FrameError::Value { what, found })
    }
}

fn same(what: &'static str, expected: u64, found: u64) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(FrameError::Length {
        what,
        expected,
        found,
    })
}

fn u16_at(bytes: &[u8; FIXED], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8; FIXED], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; FIXED], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn key_at(bytes: &[u8; FIXED], at: usize) -> Key {
    let mut key = [0; 32];
    key.copy_from_slice(&bytes[at..at + 32]);
    key
}

#[cfg(test)]
mod tests;
