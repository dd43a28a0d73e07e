//! The protocol of Redis and Valkey (RESP2): commands out, replies in. Replies may be anybody's: nothing here panics, recurses
//! without bound or keeps more than a whole reply may hold.

use std::io::{self, ErrorKind, IoSlice};

use super::wire::Wire;

/// Longest line: an error with its text.
const LINE: usize = 4 << 10;
/// Longest bulk of a reply that is no record, and how deep arrays may lie in each other.
const BULK: u64 = 1 << 20;
const DEPTH: u32 = 8;

/// What a whole reply may still hold, a record apart.
struct Room {
    items: u64,
    bytes: u64,
}

impl Room {
    fn new() -> Self {
        Self {
            items: 1 << 16,
            bytes: 16 << 20,
        }
    }

    fn take_items(&mut self, count: u64) -> io::Result<()> {
        let left = self.items.checked_sub(count);
        self.items = left.ok_or_else(|| broken("more items than this command has"))?;
        Ok(())
    }

    fn take_bytes(&mut self, count: u64) -> io::Result<()> {
        let left = self.bytes.checked_sub(count);
        self.bytes = left.ok_or_else(|| broken("a longer reply than this command has"))?;
        Ok(())
    }
}

/// A reply without records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// `+OK` and the like, and bulks.
    Text(Vec<u8>),
    /// `:1`
    Number(i64),
    /// An empty reply.
    Nil,
    /// Several.
    Array(Vec<Reply>),
    /// `-ERR …`: the server refused the command; the connection is fine.
    Error(String),
}

/// What a reply begins with.
pub(super) enum Start {
    /// Everything but a bulk is whole.
    Reply(Reply),
    /// So many bytes follow, then CR LF.
    Bulk(u64),
}

impl Reply {
    /// Text of a reply that has one.
    pub fn text(&self) -> Option<String> {
        match self {
            Self::Text(text) => String::from_utf8(text.clone()).ok(),
            _ => None,
        }
    }

    /// Items of an array.
    pub fn items(&self) -> &[Reply] {
        match self {
            Self::Array(items) => items,
            _ => &[],
        }
    }
}

/// A command in one piece.
pub(super) fn command(parts: &[&[u8]], out: &mut Vec<u8>) {
    head(parts.len(), out);
    for part in parts {
        bulk_head(part.len(), out);
        out.extend_from_slice(part);
        out.extend_from_slice(b"\r\n");
    }
}

/// Sends `SET key value [PX milliseconds]` without copying the value.
pub(super) fn send_set(
    wire: &mut Wire,
    key: &[u8],
    value: [IoSlice<'_>; 2],
    milliseconds: Option<u128>,
) -> io::Result<()> {
    let milliseconds = milliseconds.map(|number| number.to_string());
    let mut before = Vec::with_capacity(key.len() + 64);
    head(if milliseconds.is_some() { 5 } else { 3 }, &mut before);
    for part in [b"SET".as_slice(), key] {
        bulk_head(part.len(), &mut before);
        before.extend_from_slice(part);
        before.extend_from_slice(b"\r\n");
    }
    bulk_head(value.iter().map(|part| part.len()).sum(), &mut before);
    let mut behind = b"\r\n".to_vec();
    if let Some(milliseconds) = &milliseconds {
        for part in ["PX", milliseconds] {
            bulk_head(part.len(), &mut behind);
            behind.extend_from_slice(part.as_bytes());
            behind.extend_from_slice(b"\r\n");
        }
    }
    let [first, second] = value;
    wire.write_all(&mut [IoSlice::new(&before), first, second, IoSlice::new(&behind)])
}

fn head(parts: usize, out: &mut Vec<u8>) {
    out.extend_from_slice(format!("*{parts}\r\n").as_bytes());
}

fn bulk_head(length: usize, out: &mut Vec<u8>) {
    out.extend_from_slice(format!("${length}\r\n").as_bytes());
}

/// A whole reply.
pub(super) fn reply(wire: &mut Wire) -> io::Result<Reply> {
    nested(wire, 0, &mut Room::new())
}

/// The first line of a reply; a bulk is left to the caller, who ends it with [`end_of_bulk`].
pub(super) fn start(wire: &mut Wire) -> io::Result<Start> {
    start_at(wire, 0, &mut Room::new())
}

/// The CR LF behind a bulk.
pub(super) fn end_of_bulk(wire: &mut Wire) -> io::Result<()> {
    let mut end = [0; 2];
    wire.read_exact(&mut end)?;
    if end == *b"\r\n" {
        Ok(())
    } else {
        Err(broken("a bulk of another length"))
    }
}

fn nested(wire: &mut Wire, depth: u32, room: &mut Room) -> io::Result<Reply> {
    match start_at(wire, depth, room)? {
        Start::Reply(reply) => Ok(reply),
        Start::Bulk(length) if length <= BULK => {
            room.take_bytes(length)?;
            let mut text = vec![0; length as usize];
            wire.read_exact(&mut text)?;
            end_of_bulk(wire)?;
            Ok(Reply::Text(text))
        }
        Start::Bulk(_) => Err(broken("a longer reply than this command has")),
    }
}

fn start_at(wire: &mut Wire, depth: u32, room: &mut Room) -> io::Result<Start> {
    let line = wire.read_line(LINE)?;
    room.take_bytes(line.len() as u64)?;
    let Some((&kind, rest)) = line.split_first() else {
        return Err(broken("an empty line"));
    };
    Ok(Start::Reply(match kind {
        b'+' => Reply::Text(rest.to_vec()),
        b'-' => Reply::Error(String::from_utf8_lossy(rest).into_owned()),
        b':' => Reply::Number(number(rest)?),
        b'$' => match number(rest)? {
            -1 => Reply::Nil,
            length => return Ok(Start::Bulk(count(length)?)),
        },
        b'*' => match number(rest)? {
            -1 => Reply::Nil,
            length => {
                let length = count(length)?;
                room.take_items(length)?;
                if depth == DEPTH {
                    return Err(broken("deeper arrays than this command has"));
                }
                let mut items = Vec::new();
                for _ in 0..length {
                    items.push(nested(wire, depth + 1, room)?);
                }
                Reply::Array(items)
            }
        },
        _ => return Err(broken("no reply of Redis")),
    }))
}

fn number(digits: &[u8]) -> io::Result<i64> {
    std::str::from_utf8(digits)
        .ok()
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| broken("no number where one belongs"))
}

fn count(number: i64) -> io::Result<u64> {
    u64::try_from(number).map_err(|_| broken("a negative length"))
}

fn broken(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests;
