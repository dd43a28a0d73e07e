//! Takes a record off a stream and puts it where it will stay, without a copy in between when it is not coded.

use std::fmt::Display;
use std::io::{self, Read};

use blendstore_codec::frame::{FIXED, FrameError, MAGIC};
use blendstore_codec::{Codec, Head};

use super::wire::Wire;
use crate::tier::{Key, Shape, Sink};

/// Memory for bytes that are only announced is taken in steps of so many.
const STEP: usize = 1 << 20;
/// Where a frame keeps the length of its head.
const HEAD_LENGTH: std::ops::Range<usize> = 12..16;
/// Where it keeps the name of its namespace.
const NAMESPACE: std::ops::Range<usize> = 112..144;

/// A stream of known length, or of known place.
pub(super) trait Source {
    fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()>;
}

impl Source for Wire {
    fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        Self::read_exact(self, into)
    }
}

impl Source for std::fs::File {
    fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        Read::read_exact(self, into)
    }
}

impl Source for &[u8] {
    fn read_exact(&mut self, into: &mut [u8]) -> io::Result<()> {
        Read::read_exact(self, into)
    }
}

/// What became of a record.
#[derive(Debug)]
pub(super) enum Delivery {
    /// Accepted; nothing of it is left in the stream.
    Taken,
    /// There was no room for it. So many of its bytes are left.
    Unwanted(u64),
    /// It is not what was asked for: a word for counters, and the reason. So many of its bytes are left.
    Bad(&'static str, String, u64),
}

fn bad(error: impl Into<Option<FrameError>>, left: u64) -> Delivery {
    match error.into() {
        Some(error) => Delivery::Bad(error.kind(), error.to_string(), left),
        None => refused("not the record of this key", left),
    }
}

fn refused(why: impl Display, left: u64) -> Delivery {
    Delivery::Bad("record", why.to_string(), left)
}

/// Delivers the record of `key`, of which `length` bytes come. After an error of the stream nothing was delivered.
pub(super) fn deliver(
    source: &mut impl Source,
    length: u64,
    key: &Key,
    index: usize,
    sink: &mut dyn Sink,
) -> io::Result<Delivery> {
    if length < FIXED as u64 {
        return Ok(refused(
            format_args!("{length} bytes, too few for a record"),
            length,
        ));
    }
    let mut bytes = Vec::new();
    take(source, &mut bytes, FIXED)?;
    let head_length = bytes[HEAD_LENGTH]
        .try_into()
        .map(u32::from_le_bytes)
        .expect("four bytes");
    // What is wrong with the fixed part is told before the rest is read. A right one ends too early.
    match Head::parse(&bytes) {
        Err(FrameError::Length {
            what: "the record", ..
        })
        | Ok(_) => {}
        Err(error) => return Ok(bad(error, length - FIXED as u64)),
    }
    if u64::from(head_length) > length {
        return Ok(refused(
            format_args!("a head of {head_length} bytes in {length}"),
            length - FIXED as u64,
        ));
    }
    take(source, &mut bytes, head_length as usize - FIXED)?;
    let left = length - u64::from(head_length);
    let head = match Head::parse(&bytes) {
        Ok(head) => head,
        Err(error) => return Ok(bad(error, left)),
    };
    let header = head.header;
    if header.key != *key {
        return Ok(bad(FrameError::Identity("key"), left));
    }
    if head.payload_len != left || left > header.raw_len() {
        return Ok(refused(
            format_args!("a payload of {} bytes in {left}", head.payload_len),
            left,
        ));
    }
    if header.codec != Codec::RAW {
        take(source, &mut bytes, left as usize)?;
        return Ok(if sink.frame(index, &bytes) {
            Delivery::Taken
        } else {
            bad(None, 0)
        });
    }
    let shape = Shape {
        ntokens: header.ntokens as usize,
        bytes_per_token: header.bytes_per_token as usize,
        scores: head.has_scores(),
        nbehind: head.nbehind(),
    };
    let Some(mut room) = sink.room(index, &shape) else {
        return Ok(Delivery::Unwanted(left));
    };
    // SAFETY: the sink's room is writable and ours alone until `filled` or `failed` of this index, which come after the last
    // use of this reference; its memory is part of a mapping and therefore initialised.
    let payload = unsafe { room.as_mut() };
    let read = if payload.len() as u64 == left {
        source.read_exact(payload)
    } else {
        Err(io::Error::other("room of another size than the record's"))
    };
    if let Err(error) = read {
        sink.failed(index);
        return Err(error);
    }
    Ok(if sink.filled(index, &bytes) {
        Delivery::Taken
    } else {
        bad(None, 0)
    })
}

/// Whether bytes that begin with a record's fixed part say that it belongs to that namespace.
pub(super) fn is_of(namespace: &Key, bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC) && bytes.get(NAMESPACE).is_some_and(|name| name == namespace)
}

/// Appends `count` bytes of the stream.
fn take(source: &mut impl Source, bytes: &mut Vec<u8>, count: usize) -> io::Result<()> {
    let whole = bytes.len() + count;
    while bytes.len() < whole {
        let from = bytes.len();
        bytes.resize(whole.min(from + STEP), 0);
        source.read_exact(&mut bytes[from..])?;
    }
    Ok(())
}
