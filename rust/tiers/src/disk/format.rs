//! Bytes of a segment file. Numbers are little-endian; everything starts at a multiple of [`BLOCK`].
//!
//! ```text
//! segment   header block | record | record | … | footer                     the footer is written when the segment is sealed
//! header    "blendseg" 8 | version 2 | zeros 6 | number 8 | salt 8 | xxh3-64 of these 8
//! record    "blendrec" 8 | salt 8 | entry 112 | xxh3-64 of these 8 | head of the frame | zeros to a block | payload | zeros to a block
//! footer    entry 112 × n | zeros | trailer 64, which ends the file
//! trailer   "blendend" 8 | version 2 | zeros 6 | number 8 | salt 8 | n 8 | start of the footer 8 | xxh3-64 of the entries 8 | xxh3-64 of these 8
//! entry     sequence 8 | payload length 8 | key 32 | namespace name 32 | head length 4 | tokens 4 | bytes per token 4 |
//!           documents before it 4 | codec 2 | kind 1 | rank 1 | with scores 1 | zeros 3 | offset in the segment 8
//! ```
//!
//! The salt is random for each segment, so that no payload can pass for a record when a torn segment is scanned.

use blendstore_codec::{Codec, Frame};
use blendstore_core::{Key, Shape};
use xxhash_rust::xxh3::xxh3_64;

/// Alignment of everything, bytes.
pub(crate) const BLOCK: usize = 4096;
/// Bytes of an entry.
pub(crate) const ENTRY: usize = 112;
/// Bytes of a record before the frame's head.
pub(crate) const PREFIX: usize = 16 + ENTRY + 8;
/// Bytes of the trailer.
pub(crate) const TRAILER: usize = 64;

const VERSION: u16 = 1;

/// What an entry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// A record.
    Record = 0,
    /// The record of that key is gone.
    Removed = 1,
    /// Every record of that namespace before it is gone.
    Cleared = 2,
}

/// What there is to know about one record without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Grows with every entry of a directory.
    pub sequence: u64,
    pub payload_len: u64,
    pub key: Key,
    pub namespace: Key,
    pub head_len: u32,
    pub ntokens: u32,
    pub bytes_per_token: u32,
    pub nbehind: u32,
    pub codec: Codec,
    pub kind: Kind,
    pub rank: u8,
    pub scores: bool,
    pub offset: u64,
}

impl Entry {
    pub(crate) fn of(frame: &Frame<'_>, sequence: u64, offset: u64) -> Self {
        let header = &frame.head.header;
        Self {
            sequence,
            payload_len: frame.payload.len() as u64,
            key: header.key,
            namespace: header.namespace,
            head_len: frame.head.bytes().len() as u32,
            ntokens: header.ntokens,
            bytes_per_token: header.bytes_per_token,
            nbehind: frame.head.nbehind() as u32,
            codec: header.codec,
            kind: Kind::Record,
            rank: header.rank,
            scores: frame.head.has_scores(),
            offset,
        }
    }

    /// Says that something is gone.
    pub(crate) fn gone(kind: Kind, name: Key, sequence: u64, offset: u64) -> Self {
        Self {
            sequence,
            payload_len: 0,
            key: name,
            namespace: name,
            head_len: 0,
            ntokens: 0,
            bytes_per_token: 0,
            nbehind: 0,
            codec: Codec::RAW,
            kind,
            rank: 0,
            scores: false,
            offset,
        }
    }

    pub(crate) fn shape(&self) -> Shape {
        Shape {
            ntokens: self.ntokens as usize,
            bytes_per_token: self.bytes_per_token as usize,
            scores: self.scores,
            nbehind: self.nbehind as usize,
        }
    }

    /// Bytes of the blocks before the payload.
    pub(crate) fn head_room(&self) -> usize {
        (PREFIX + self.head_len as usize).next_multiple_of(BLOCK)
    }

    /// Bytes of all its blocks.
    pub(crate) fn bytes(&self) -> u64 {
        self.head_room() as u64 + self.payload_len.next_multiple_of(BLOCK as u64)
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.sequence.to_le_bytes());
        out.extend_from_slice(&self.payload_len.to_le_bytes());
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&self.namespace);
        for number in [
            self.head_len,
            self.ntokens,
            self.bytes_per_token,
            self.nbehind,
        ] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&self.codec.0.to_le_bytes());
        out.extend_from_slice(&[self.kind as u8, self.rank, self.scores.into(), 0, 0, 0]);
        out.extend_from_slice(&self.offset.to_le_bytes());
    }

    /// `None` for what no writer writes.
    fn take(bytes: &[u8; ENTRY]) -> Option<Self> {
        let entry = Self {
            sequence: u64_at(bytes, 0)?,
            payload_len: u64_at(bytes, 8)?,
            key: *bytes[16..].first_chunk()?,
            namespace: *bytes[48..].first_chunk()?,
            head_len: u32_at(bytes, 80)?,
            ntokens: u32_at(bytes, 84)?,
            bytes_per_token: u32_at(bytes, 88)?,
            nbehind: u32_at(bytes, 92)?,
            codec: Codec(u16::from_le_bytes(*bytes[96..].first_chunk()?)),
            kind: match bytes[98] {
                0 => Kind::Record,
                1 => Kind::Removed,
                2 => Kind::Cleared,
                _ => return None,
            },
            rank: bytes[99],
            scores: bytes[100] != 0,
            offset: u64_at(bytes, 104)?,
        };
        let end = entry
            .offset
            .checked_add(entry.payload_len)?
            .checked_add(1 << 33)?;
        (entry.offset.is_multiple_of(BLOCK as u64) && end < i64::MAX as u64).then_some(entry)
    }
}

/// The first bytes of a record, behind which the frame's head follows.
pub(crate) fn record_prefix(entry: &Entry, salt: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PREFIX);
    bytes.extend_from_slice(b"blendrec");
    bytes.extend_from_slice(&salt.to_le_bytes());
    entry.put(&mut bytes);
    seal(bytes)
}

/// The entry of a record that begins here, in the segment of that salt.
pub(crate) fn parse_record_prefix(bytes: &[u8], salt: u64) -> Option<Entry> {
    let bytes: &[u8; PREFIX] = bytes.first_chunk()?;
    let whole = bytes.starts_with(b"blendrec") && u64_at(bytes, 8)? == salt && is_sealed(bytes);
    Entry::take(bytes[16..].first_chunk()?).filter(|_| whole)
}

/// The first block of a segment.
pub(crate) fn segment_header(number: u64, salt: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BLOCK);
    bytes.extend_from_slice(b"blendseg");
    bytes.extend_from_slice(&u64::from(VERSION).to_le_bytes());
    bytes.extend_from_slice(&number.to_le_bytes());
    bytes.extend_from_slice(&salt.to_le_bytes());
    let mut bytes = seal(bytes);
    bytes.resize(BLOCK, 0);
    bytes
}

/// The salt of segment `number`, from its first block.
pub(crate) fn parse_segment_header(bytes: &[u8], number: u64) -> Option<u64> {
    let bytes: &[u8; 40] = bytes.first_chunk()?;
    let ours = bytes.starts_with(b"blendseg")
        && u64_at(bytes, 8)? == u64::from(VERSION)
        && u64_at(bytes, 16)? == number
        && is_sealed(bytes);
    u64_at(bytes, 24).filter(|_| ours)
}

/// Bytes of a footer of so many entries.
pub(crate) fn footer_len(entries: usize) -> u64 {
    (entries * ENTRY + TRAILER).next_multiple_of(BLOCK) as u64
}

/// The footer of a segment, to be written at `start`.
pub(crate) fn footer(entries: &[Entry], number: u64, salt: u64, start: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(footer_len(entries.len()) as usize);
    for entry in entries {
        entry.put(&mut bytes);
    }
    let sum = xxh3_64(&bytes);
    bytes.resize(footer_len(entries.len()) as usize - TRAILER, 0);
    let mut trailer = Vec::with_capacity(TRAILER);
    trailer.extend_from_slice(b"blendend");
    for field in [
        u64::from(VERSION),
        number,
        salt,
        entries.len() as u64,
        start,
        sum,
    ] {
        trailer.extend_from_slice(&field.to_le_bytes());
    }
    bytes.extend(seal(trailer));
    bytes
}

/// (Entries, start of the footer, checksum of the entries) from the last bytes of a segment file of `len` bytes.
pub(crate) fn parse_trailer(
    bytes: &[u8],
    number: u64,
    salt: u64,
    len: u64,
) -> Option<(usize, u64, u64)> {
    let bytes: &[u8; TRAILER] = bytes.last_chunk()?;
    let ours = bytes.starts_with(b"blendend")
        && u64_at(bytes, 8)? == u64::from(VERSION)
        && u64_at(bytes, 16)? == number
        && u64_at(bytes, 24)? == salt
        && is_sealed(bytes);
    let (entries, start) = (u64_at(bytes, 32)?, u64_at(bytes, 40)?);
    let fits = entries
        .checked_mul(ENTRY as u64)?
        .checked_add(start)?
        .checked_add(TRAILER as u64)?
        <= len;
    let found = (usize::try_from(entries).ok()?, start, u64_at(bytes, 48)?);
    (ours && fits).then_some(found)
}

/// The entries of a footer, if they are as they were written.
pub(crate) fn parse_entries(bytes: &[u8], sum: u64) -> Option<Vec<Entry>> {
    if xxh3_64(bytes) != sum {
        return None;
    }
    bytes.as_chunks().0.iter().map(Entry::take).collect()
}

/// Appends the checksum.
fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = xxh3_64(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// Whether the last 8 bytes are the checksum of the others.
fn is_sealed(bytes: &[u8]) -> bool {
    let Some((content, sum)) = bytes.split_last_chunk::<8>() else {
        return false;
    };
    xxh3_64(content) == u64::from_le_bytes(*sum)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}
