//! A log of records in one directory: what is where, reading, appending, and making room.
//!
//! One segment is open for appending; the others are sealed. Records are in the index once their write has ended, never
//! before. When the directory is full the oldest segment goes as a whole; its records that were read since they were
//! written are written again, in front of the newest. As the oldest goes first, what says that a record is gone outlives it.

use std::collections::{BTreeMap, HashMap, hash_map::RandomState};
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blendstore_codec::Frame;
use blendstore_core::Key;

use super::directory::{Directory, allocate, read_blocks, write_blocks};
use super::format::{
    BLOCK, Entry, Kind, PREFIX, footer, footer_len, record_prefix, segment_header,
};
use super::io::{Blocks, Io, Op};
use super::recovery::{self, Recovered};
use crate::meter::Meter;

/// Stores pause for that long after the device had no space left.
const PAUSE: Duration = Duration::from_secs(5);
/// Alignment of memory that the device takes, as probed when the directory was opened.
const ALIGNED: usize = 512;
/// Most bytes that are written again when a segment goes.
const REINSERT: u64 = 64 << 20;

/// How a log is made.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub capacity: u64,
    /// Bytes of a segment; one record that is larger has a segment to itself.
    pub segment: u64,
}

#[derive(Debug)]
pub(crate) struct Log {
    pub directory: Directory,
    pub io: Io,
    limits: Limits,
    meter: Arc<Meter>,
    index: Mutex<Index>,
    writer: Mutex<Writer>,
    /// Records that went with their segments, or could not be read.
    lost: Mutex<Vec<Key>>,
}

/// What is where.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub records: HashMap<Key, Known>,
    pub segments: BTreeMap<u64, Segment>,
}

#[derive(Debug)]
pub(crate) struct Known {
    pub entry: Entry,
    pub segment: u64,
    /// Read since it was written.
    pub hot: bool,
}

#[derive(Debug)]
pub(crate) struct Segment {
    pub file: Arc<File>,
    pub salt: u64,
    /// Of its file.
    pub bytes: u64,
}

#[derive(Debug, Default)]
struct Writer {
    open: Option<Open>,
    sequence: u64,
    next_number: u64,
    paused: Option<Instant>,
    closed: bool,
}

/// The segment that is appended to.
#[derive(Debug)]
struct Open {
    number: u64,
    salt: u64,
    file: Arc<File>,
    /// Where the next record goes.
    end: u64,
    size: u64,
    /// Records that have been given a place, written or not.
    placed: usize,
    entries: Vec<Entry>,
}

/// A record on its way to its place.
struct Placed<'a> {
    entry: Entry,
    head: Blocks,
    /// What is written from where it lies: whole blocks.
    payload: &'a [u8],
    /// A copy of the rest of the payload.
    rest: Blocks,
}

/// Where to read a record.
pub(crate) struct Place {
    pub entry: Entry,
    pub file: Arc<File>,
    pub salt: u64,
}

impl Log {
    pub(crate) fn open(
        parent: &Path,
        limits: Limits,
        direct: bool,
        io: Io,
        meter: Arc<Meter>,
    ) -> io::Result<Self> {
        let directory = Directory::open(parent, direct)?;
        let Recovered {
            index,
            sequence,
            next_number,
        } = recovery::recover(&directory, &io)?;
        let log = Self {
            directory,
            io,
            limits,
            meter,
            index: Mutex::new(index),
            writer: Mutex::new(Writer {
                sequence,
                next_number,
                ..Writer::default()
            }),
            lost: Mutex::default(),
        };
        log.report();
        log.measure(|index| {
            while index.bytes() > limits.capacity
                && let Some(dropped) = log.drop_oldest(index, 0)
            {
                log.meter.evicted.fetch_add(dropped.gone, Relaxed);
            }
        });
        Ok(log)
    }

    pub(crate) fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the index and keeps the gauges equal to it.
    fn measure<T>(&self, change: impl FnOnce(&mut Index) -> T) -> T {
        let mut index = self.index();
        let before = (index.records.len() as u64, index.bytes());
        let result = change(&mut index);
        let after = (index.records.len() as u64, index.bytes());
        self.meter
            .records
            .fetch_add(after.0.wrapping_sub(before.0), Relaxed);
        self.meter
            .bytes_used
            .fetch_add(after.1.wrapping_sub(before.1), Relaxed);
        result
    }

    /// Tells the gauges of what was found at the start.
    fn report(&self) {
        let index = self.index();
        self.meter
            .records
            .fetch_add(index.records.len() as u64, Relaxed);
        self.meter.bytes_used.fetch_add(index.bytes(), Relaxed);
    }

    pub(crate) fn contains(&self, key: &Key) -> bool {
        self.index().records.contains_key(key)
    }

    /// Keys of records that went by themselves since this was last asked, and did not come back.
    pub(crate) fn lost(&self) -> Vec<Key> {
        let mut lost = std::mem::take(&mut *self.losses());
        let index = self.index();
        lost.retain(|key| !index.records.contains_key(key));
        lost
    }

    fn losses(&self) -> MutexGuard<'_, Vec<Key>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where a record is; counts as a use of it.
    pub(crate) fn place(&self, key: &Key) -> Option<Place> {
        let mut index = self.index();
        let known = index.records.get_mut(key)?;
        known.hot = true;
        let (entry, number) = (known.entry, known.segment);
        let segment = index.segments.get(&number)?;
        Some(Place {
            entry,
            file: segment.file.clone(),
            salt: segment.salt,
        })
    }

    /// Forgets a record that could not be read, unless another has come in its place.
    pub(crate) fn forget(&self, entry: &Entry) {
        self.measure(|index| {
            if index
                .records
                .get(&entry.key)
                .is_some_and(|known| known.entry.sequence == entry.sequence)
            {
                index.records.remove(&entry.key);
                self.losses().push(entry.key);
            }
        });
    }

    /// Appends those that are not there already at their rank or a better one. Returns (stored, already there).
    pub(crate) fn put(&self, frames: &[&Frame<'_>]) -> (usize, usize) {
        let mut writer = self.writer();
        if writer.is_paused() {
            return (0, 0);
        }
        let (mut stored, mut there) = (0, 0);
        let mut batch: Vec<Placed<'_>> = Vec::with_capacity(frames.len());
        for frame in frames {
            let header = &frame.head.header;
            if self
                .index()
                .records
                .get(&header.key)
                .is_some_and(|known| known.entry.rank >= header.rank)
            {
                there += 1;
                continue;
            }
            let entry = Entry::of(frame, 0, 0);
            if !writer.has_room(&entry) {
                stored += self.write(&mut writer, std::mem::take(&mut batch));
                if !self.roll(&mut writer, &entry) {
                    continue;
                }
            }
            batch.extend(writer.enter(entry, frame.head.bytes(), frame.payload));
        }
        stored += self.write(&mut writer, batch);
        (stored, there)
    }

    /// Drops a record, also for later starts.
    pub(crate) fn remove(&self, key: &Key) {
        let mut writer = self.writer();
        if self.contains(key) {
            self.bury(&mut writer, Kind::Removed, key, |known| {
                known.entry.key == *key
            });
        }
    }

    /// Drops every record (of the namespace with that name), also for later starts, and after the power has failed.
    pub(crate) fn clear(&self, namespace: Option<&Key>) {
        let mut writer = self.writer();
        // Records that are forgotten because they could not be read are in their segments, and a start may find them.
        if self.index().segments.is_empty() {
            return;
        }
        let synced = match namespace {
            None => {
                writer.open = None;
                self.measure(|index| while self.drop_oldest(index, 0).is_some() {});
                self.directory.sync()
            }
            Some(name) => {
                self.bury(&mut writer, Kind::Cleared, name, |known| {
                    known.entry.namespace == *name
                });
                let open = writer.open.as_ref();
                open.map_or(Ok(()), |open| open.file.sync_data())
                    .and_then(|()| self.directory.sync())
            }
        };
        if let Err(error) = synced {
            self.failed(&mut writer, "sync", &error);
        }
    }

    /// Writes that some records are gone and forgets them. Where that can't be written, their segments go.
    fn bury(&self, writer: &mut Writer, kind: Kind, name: &Key, gone: impl Fn(&Known) -> bool) {
        let entry = Entry::gone(kind, *name, 0, 0);
        let ready = writer.has_room(&entry) || self.roll(writer, &entry);
        let written = ready && {
            let batch = writer.enter(entry, &[], &[]).into_iter().collect();
            self.write(writer, batch) == 1
        };
        self.measure(|index| {
            let mut segments: Vec<u64> = Vec::new();
            index.records.retain(|_, known| {
                let gone = gone(known);
                if gone {
                    segments.push(known.segment);
                }
                !gone
            });
            if !written {
                if writer
                    .open
                    .as_ref()
                    .is_some_and(|open| segments.contains(&open.number))
                {
                    writer.open = None;
                }
                self.lose(index, |known| segments.contains(&known.segment));
                for number in segments {
                    index.segments.remove(&number);
                    self.directory.remove_segment(number);
                }
            }
        });
    }

    /// Seals what is open and leaves the directory to others: nothing is stored or found any more.
    pub(crate) fn close(&self) {
        let mut writer = self.writer();
        writer.closed = true;
        self.seal(&mut writer);
        self.measure(|index| *index = Index::default());
        self.directory.unlock();
    }

    /// Ends like a process that is killed: nothing is sealed.
    #[cfg(test)]
    pub(crate) fn abandon(&self) {
        let mut writer = self.writer();
        writer.closed = true;
        writer.open = None;
    }

    /// Writes records to their places, and knows them afterwards. Returns how many it could write.
    fn write(&self, writer: &mut Writer, mut batch: Vec<Placed<'_>>) -> usize {
        let Some(open) = writer.open.as_mut().filter(|_| !batch.is_empty()) else {
            return 0;
        };
        let ops: Vec<Op> = batch
            .iter_mut()
            .map(|placed| placed.op(&open.file))
            .collect();
        let mut written: Vec<Entry> = Vec::with_capacity(batch.len());
        let mut failure = None;
        let mut done = |index: usize, ended: io::Result<()>| match ended {
            Ok(()) => written.push(batch[index].entry),
            Err(error) => failure = Some(error),
        };
        // SAFETY: the blocks of the batch and the payloads outlive the call; writes only read them.
        unsafe { self.io.run(&ops, &mut done) };
        if let Some(error) = failure {
            self.failed(writer, "write", &error);
        }
        let Some(open) = &mut writer.open else {
            return 0;
        };
        open.entries.extend(&written);
        self.measure(|index| {
            for entry in written.iter().filter(|entry| entry.kind == Kind::Record) {
                index.records.insert(
                    entry.key,
                    Known {
                        entry: *entry,
                        segment: open.number,
                        hot: false,
                    },
                );
            }
        });
        written.len()
    }

    /// Counts a failure; without space on the device, stores pause.
    fn failed(&self, writer: &mut Writer, kind: &'static str, error: &io::Error) {
        let full = matches!(
            error.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
        );
        if full {
            writer.paused = Some(Instant::now() + PAUSE);
        }
        let kind = if full { "no_space" } else { kind };
        let path = self.directory.path().display();
        self.meter
            .error("disk", kind, format_args!("{path}: {error}"));
    }

    /// A new open segment with room for the entry; false when there can't be one now.
    fn roll(&self, writer: &mut Writer, entry: &Entry) -> bool {
        self.seal(writer);
        let needed = BLOCK as u64 + entry.bytes() + footer_len(2);
        let size = self.limits.segment.max(needed);
        if writer.closed || writer.is_paused() || size > self.limits.capacity {
            return false;
        }
        let again = self.make_room(size, (size - needed) / 2);
        let number = writer.next_number;
        let mut opened = self.open_new(number, size);
        if let Err(error) = &opened
            && error.kind() == io::ErrorKind::NotFound
        {
            // Somebody has removed the directory, to have its space: the open files go too.
            self.failed(writer, "removed", error);
            self.measure(|index| {
                self.lose(index, |_| true);
                *index = Index::default();
            });
            opened = self
                .directory
                .restore()
                .and_then(|()| self.open_new(number, size));
        }
        let (file, salt) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                if error.kind() == io::ErrorKind::AlreadyExists {
                    // Not ours, whoever put it there.
                    writer.next_number += 1;
                }
                self.failed(writer, "open", &error);
                return false;
            }
        };
        writer.next_number += 1;
        let segment = Segment {
            file: file.clone(),
            salt,
            bytes: size,
        };
        self.measure(|index| index.segments.insert(number, segment));
        writer.open = Some(Open {
            number,
            salt,
            file,
            end: BLOCK as u64,
            size,
            placed: 0,
            entries: Vec::new(),
        });
        let mut batch = Vec::with_capacity(again.len());
        for (entry, blocks) in &again {
            // The record that the segment was opened for comes after them.
            if writer.has_room_beside(entry, needed) {
                let (head, payload) = (
                    &blocks.bytes()[PREFIX..],
                    &blocks.bytes()[entry.head_room()..],
                );
                let head = &head[..entry.head_len as usize];
                batch.extend(writer.enter(*entry, head, &payload[..entry.payload_len as usize]));
            }
        }
        self.write(writer, batch);
        true
    }

    /// A new segment's file, with its header. What can't be finished is removed again.
    fn open_new(&self, number: u64, size: u64) -> io::Result<(Arc<File>, u64)> {
        let file = self.directory.open_segment(number, true)?;
        let salt = RandomState::new().build_hasher().finish();
        let header = segment_header(number, salt);
        let begun = allocate(&file, size)
            .and_then(|()| write_blocks(&self.io, &file, 0, &mut Blocks::of(&header)));
        if begun.is_err() {
            self.directory.remove_segment(number);
        }
        begun.map(|()| (Arc::new(file), salt))
    }

    /// Ends the open segment with its footer.
    fn seal(&self, writer: &mut Writer) {
        let Some(mut open) = writer.open.take() else {
            return;
        };
        if open.entries.is_empty() {
            self.measure(|index| index.segments.remove(&open.number));
            self.directory.remove_segment(open.number);
            return;
        }
        open.entries.sort_unstable_by_key(|entry| entry.sequence);
        let bytes = footer(&open.entries, open.number, open.salt, open.end);
        let end = open.end + bytes.len() as u64;
        // Data before the footer that vouches for it, also on the device.
        let sealed = open
            .file
            .sync_data()
            .and_then(|()| write_blocks(&self.io, &open.file, open.end, &mut Blocks::of(&bytes)))
            .and_then(|()| open.file.set_len(end));
        match sealed {
            Ok(()) => self.measure(|index| {
                if let Some(segment) = index.segments.get_mut(&open.number) {
                    segment.bytes = end;
                }
            }),
            Err(error) => self.failed(writer, "seal", &error),
        }
    }

    /// Drops the oldest segments until another of `size` bytes fits. Returns the records that were read since they were
    /// written, up to `hot_bytes`.
    fn make_room(&self, size: u64, hot_bytes: u64) -> Vec<(Entry, Blocks)> {
        let dropped = self.measure(|index| {
            let mut dropped = Vec::new();
            while index.bytes() + size > self.limits.capacity
                && let Some(oldest) = self.drop_oldest(index, hot_bytes.min(REINSERT))
            {
                dropped.push(oldest);
            }
            dropped
        });
        let mut again = Vec::new();
        for Dropped { file, hot, gone } in dropped {
            self.meter.evicted.fetch_add(gone, Relaxed);
            for entry in hot {
                let blocks = read_blocks(&self.io, &file, entry.offset, entry.bytes() as usize);
                again.extend(blocks.ok().map(|blocks| (entry, blocks)));
            }
        }
        again
    }

    /// Forgets records that went with their segments.
    fn lose(&self, index: &mut Index, mut gone: impl FnMut(&Known) -> bool) {
        let mut losses = self.losses();
        losses.extend(
            index
                .records
                .extract_if(|_, known| gone(known))
                .map(|(key, _)| key),
        );
    }

    /// Takes the oldest segment away; its hot records are returned, up to so many bytes, the others are gone.
    fn drop_oldest(&self, index: &mut Index, hot_bytes: u64) -> Option<Dropped> {
        let (number, Segment { file, .. }) = index.segments.pop_first()?;
        let (mut hot, mut bytes, mut gone) = (Vec::new(), 0, 0);
        self.lose(index, |known| {
            if known.segment != number {
                return false;
            }
            let size = known.entry.bytes();
            if known.hot && bytes + size <= hot_bytes {
                bytes += size;
                hot.push(known.entry);
            } else {
                gone += 1;
            }
            true
        });
        self.directory.remove_segment(number);
        hot.sort_unstable_by_key(|entry| entry.sequence);
        Some(Dropped { file, hot, gone })
    }
}

/// A segment that made room.
struct Dropped {
    file: Arc<File>,
    hot: Vec<Entry>,
    gone: u64,
}

impl Index {
    /// Bytes of all segment files.
    pub(crate) fn bytes(&self) -> u64 {
        self.segments.values().map(|segment| segment.bytes).sum()
    }
}

impl Writer {
    /// The device had no space a moment ago.
    fn is_paused(&self) -> bool {
        self.paused.is_some_and(|until| Instant::now() < until)
    }

    fn has_room(&self, entry: &Entry) -> bool {
        self.has_room_beside(entry, 0)
    }

    /// Whether it fits before `other` bytes and a footer.
    fn has_room_beside(&self, entry: &Entry, other: u64) -> bool {
        !self.closed
            && self.open.as_ref().is_some_and(|open| {
                let entries = (open.end / BLOCK as u64) as usize + 1;
                open.end
                    + entry.bytes()
                    + other
                    + footer_len(entries.min(open.entries.len() + 4096))
                    <= open.size
            })
    }

    /// Gives an entry its place in the open segment.
    fn enter<'a>(
        &mut self,
        mut entry: Entry,
        head: &[u8],
        payload: &'a [u8],
    ) -> Option<Placed<'a>> {
        let open = self.open.as_mut()?;
        self.sequence += 1;
        (entry.sequence, entry.offset) = (self.sequence, open.end);
        open.end += entry.bytes();
        open.placed += 1;
        let mut prefix = record_prefix(&entry, open.salt);
        prefix.extend_from_slice(head);
        // Coded payloads lie anywhere; only the arena's are aligned for the device.
        let aligned = payload.as_ptr().align_offset(ALIGNED) == 0;
        let whole = if aligned {
            payload.len() / BLOCK * BLOCK
        } else {
            0
        };
        let (payload, rest) = payload.split_at(whole);
        Some(Placed {
            entry,
            head: Blocks::of(&prefix),
            payload,
            rest: Blocks::of(rest),
        })
    }
}

impl Placed<'_> {
    fn op(&mut self, file: &File) -> Op {
        let mut op = Op::write(file.as_raw_fd(), self.entry.offset);
        let head = self.head.bytes_mut();
        op.piece(head.as_mut_ptr(), head.len());
        op.piece(self.payload.as_ptr().cast_mut(), self.payload.len());
        let rest = self.rest.bytes_mut();
        op.piece(rest.as_mut_ptr(), rest.len());
        op
    }
}
