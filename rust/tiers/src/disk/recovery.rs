//! What a directory holds after a start: footers of sealed segments are believed, a segment without one is scanned and sealed.
//!
//! Sealed segments cost one read of their footer; no payload is read. In a segment that was open when the process ended, a
//! record counts only if its payload is the one that was written; what lies between whole records is skipped.

use std::fs::File;
use std::io;
use std::sync::Arc;

use blendstore_codec::Frame;

use super::directory::{Directory, file_len, read_blocks, write_blocks};
use super::format::{
    BLOCK, ENTRY, Entry, Kind, PREFIX, footer, parse_entries, parse_record_prefix,
    parse_segment_header, parse_trailer,
};
use super::io::{Blocks, Io};
use super::log::{Index, Known, Segment};

/// Bytes looked at together in a scan.
const WINDOW: usize = 1 << 20;

#[derive(Debug)]
pub(crate) struct Recovered {
    pub index: Index,
    /// The highest there is.
    pub sequence: u64,
    pub next_number: u64,
}

pub(crate) fn recover(directory: &Directory, io: &Io) -> io::Result<Recovered> {
    let mut recovered = Recovered {
        index: Index::default(),
        sequence: 0,
        next_number: 1,
    };
    for number in directory.segments()? {
        recovered.next_number = number + 1;
        match read_segment(directory, io, number) {
            Some((file, salt, entries)) => {
                let bytes = file_len(&file)?;
                let segment = Segment {
                    file: Arc::new(file),
                    salt,
                    bytes,
                };
                recovered.index.segments.insert(number, segment);
                for entry in entries {
                    recovered.sequence = recovered.sequence.max(entry.sequence);
                    apply(&mut recovered.index, number, entry);
                }
            }
            None => directory.remove_segment(number),
        }
    }
    Ok(recovered)
}

/// Entries come in the order in which they were written.
fn apply(index: &mut Index, segment: u64, entry: Entry) {
    match entry.kind {
        Kind::Record => {
            index.records.insert(
                entry.key,
                Known {
                    entry,
                    segment,
                    hot: false,
                },
            );
        }
        Kind::Removed => {
            index.records.remove(&entry.key);
        }
        Kind::Cleared => index
            .records
            .retain(|_, known| known.entry.namespace != entry.namespace),
    }
}

/// `None` for a file that holds nothing of use.
fn read_segment(directory: &Directory, io: &Io, number: u64) -> Option<(File, u64, Vec<Entry>)> {
    let file = directory.open_segment(number, false).ok()?;
    let header = read_blocks(io, &file, 0, BLOCK).ok()?;
    let salt = parse_segment_header(header.bytes(), number)?;
    if let Some(entries) = read_footer(io, &file, number, salt) {
        return Some((file, salt, entries));
    }
    let (entries, end) = scan(io, &file, salt);
    if entries.is_empty() {
        return None;
    }
    let bytes = footer(&entries, number, salt, end);
    let sealed = write_blocks(io, &file, end, &mut Blocks::of(&bytes))
        .and_then(|()| file.set_len(end + bytes.len() as u64));
    if let Err(error) = sealed {
        log::warn!(
            "{}: not sealed: {error}",
            directory.segment_path(number).display()
        );
    }
    Some((file, salt, entries))
}

fn read_footer(io: &Io, file: &File, number: u64, salt: u64) -> Option<Vec<Entry>> {
    let len = file_len(file).ok()?;
    let last = len
        .checked_sub(BLOCK as u64)
        .filter(|last| last.is_multiple_of(BLOCK as u64))?;
    let trailer = read_blocks(io, file, last, BLOCK).ok()?;
    let (count, start, sum) = parse_trailer(trailer.bytes(), number, salt, len)?;
    let blocks = read_blocks(io, file, start, count * ENTRY).ok()?;
    let entries = parse_entries(&blocks.bytes()[..count * ENTRY], sum)?;
    entries
        .iter()
        .all(|entry| entry.offset + entry.bytes() <= start)
        .then_some(entries)
}

/// Whole records of a segment without a footer, and where the last one ends.
fn scan(io: &Io, file: &File, salt: u64) -> (Vec<Entry>, u64) {
    let len = file_len(file).unwrap_or(0) / BLOCK as u64 * BLOCK as u64;
    let (mut entries, mut at, mut end) = (Vec::new(), BLOCK as u64, BLOCK as u64);
    while at < len {
        let window = (len - at).min(WINDOW as u64) as usize;
        let Ok(blocks) = read_blocks(io, file, at, window) else {
            break;
        };
        let mut next = at + window as u64;
        for block in (0..window).step_by(BLOCK) {
            let place = at + block as u64;
            let whole = parse_record_prefix(&blocks.bytes()[block..], salt)
                .filter(|entry| entry.offset == place && entry.bytes() <= len - place)
                .filter(|entry| is_whole(io, file, entry));
            if let Some(entry) = whole {
                end = place + entry.bytes();
                entries.push(entry);
                next = end;
                break;
            }
        }
        at = next;
    }
    entries.sort_unstable_by_key(|entry| entry.sequence);
    (entries, end)
}

/// Whether head and payload are as they were written.
fn is_whole(io: &Io, file: &File, entry: &Entry) -> bool {
    if entry.kind != Kind::Record {
        return true;
    }
    let Ok(mut blocks) = read_blocks(io, file, entry.offset, entry.bytes() as usize) else {
        return false;
    };
    frame_of(&mut blocks, entry).is_some_and(|frame| Frame::parse(frame).is_ok())
}

/// The frame in the blocks of a record, in one piece.
pub(crate) fn frame_of<'a>(blocks: &'a mut Blocks, entry: &Entry) -> Option<&'a [u8]> {
    let (room, head) = (entry.head_room(), entry.head_len as usize);
    let payload = usize::try_from(entry.payload_len).ok()?;
    let bytes = blocks.bytes_mut();
    bytes.copy_within(PREFIX..PREFIX + head, room - head);
    bytes.get(room - head..room + payload)
}
