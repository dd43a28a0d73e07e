//! The disk tier: append-only segment files in one or several directories.
//!
//! Payloads move between the device and the store's memory without a copy, as far as they fill whole blocks and the file
//! system lets the page cache be bypassed. Bytes on disk are never trusted: a torn, changed or exchanged record is a miss.

mod directory;
mod format;
mod io;
mod log;
mod recovery;

use std::io::{Error, ErrorKind};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use blendstore_codec::{Codec, Frame};
use blendstore_core::Key;

use self::format::{BLOCK, Entry, PREFIX, parse_record_prefix};
use self::io::{Blocks, Io, Op};
use self::log::{Limits, Log, Place};
use self::recovery::frame_of;
use crate::meter::{Meter, TierStats};
use crate::process::Owner;
use crate::tier::{Sink, Tier};

/// Records read together.
const WINDOW: usize = 32;
const SEGMENT: std::ops::RangeInclusive<u64> = 1 << 20..=256 << 20;

/// How a disk tier is made.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// Directories to spread records over; each gets a directory `blendstore-v1` of its owner's alone.
    pub directories: Vec<PathBuf>,
    /// Most bytes of files in all of them.
    pub capacity_bytes: u64,
    /// Bypass the page cache where the file systems let us.
    pub direct: bool,
    /// Use io_uring where the kernel lets us.
    pub io_uring: bool,
    /// Bytes of a segment file; by default a sixteenth of a directory's share, 1 to 256 MiB.
    pub segment_bytes: Option<u64>,
}

impl DiskOptions {
    /// One directory, with everything else as it should be.
    pub fn new(directory: impl Into<PathBuf>, capacity_bytes: u64) -> Self {
        Self {
            directories: vec![directory.into()],
            capacity_bytes,
            direct: true,
            io_uring: true,
            segment_bytes: None,
        }
    }
}

/// Records in files.
#[derive(Debug)]
pub struct Disk {
    logs: Vec<Log>,
    meter: Arc<Meter>,
    owner: Owner,
}

impl Disk {
    /// Opens the directories, making them if need be, and finds what they hold.
    ///
    /// # Errors
    /// If a directory can't be used or another process uses it (`AddrInUse`), or the capacity is too small.
    pub fn open(options: &DiskOptions) -> std::io::Result<Self> {
        let share = options.capacity_bytes / options.directories.len().max(1) as u64;
        let segment = options
            .segment_bytes
            .unwrap_or((share / 16).clamp(*SEGMENT.start(), *SEGMENT.end()))
            .next_multiple_of(BLOCK as u64);
        if options.directories.is_empty() || share < 2 * segment.min(*SEGMENT.start()) {
            let message = format!(
                "{} bytes for {} directories: a disk tier needs a directory, and 2 MiB for each",
                options.capacity_bytes,
                options.directories.len()
            );
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        let meter = Arc::new(Meter::default());
        meter.bytes_capacity.store(options.capacity_bytes, Relaxed);
        let limits = Limits {
            capacity: share,
            segment: segment.min(share / 2),
        };
        let logs: std::io::Result<Vec<Log>> = options
            .directories
            .iter()
            .map(|directory| {
                Log::open(
                    directory,
                    limits,
                    options.direct,
                    Io::new(options.io_uring),
                    meter.clone(),
                )
            })
            .collect();
        Ok(Self {
            logs: logs?,
            meter,
            owner: Owner::this(),
        })
    }

    /// How files are read and written, for logs: `io_uring, direct`.
    pub fn describe(&self) -> String {
        let how = |log: &Log| {
            let cache = if log.directory.direct {
                "direct"
            } else {
                "buffered"
            };
            format!(
                "{} ({}, {cache})",
                log.directory.path().display(),
                log.io.name()
            )
        };
        self.logs.iter().map(how).collect::<Vec<_>>().join("; ")
    }

    fn log(&self, key: &Key) -> &Log {
        let number = u64::from_le_bytes(*key.first_chunk().expect("32 bytes"));
        &self.logs[(number % self.logs.len() as u64) as usize]
    }

    /// Reads the records of some keys of one log.
    fn read(&self, log: &Log, keys: &[(usize, &Key)], sink: &mut dyn Sink) -> (usize, u64) {
        let mut reads: Vec<Read> = Vec::with_capacity(keys.len());
        for &(index, key) in keys {
            reads.extend(
                log.place(key)
                    .and_then(|place| Read::new(index, place, sink)),
            );
        }
        let ops: Vec<Op> = reads.iter_mut().map(Read::op).collect();
        let (mut hits, mut bytes) = (0, 0);
        let mut done = |number: usize, ended: std::io::Result<()>| {
            let read: &mut Read = &mut reads[number];
            let entry = read.place.entry;
            let delivered = match ended {
                Ok(()) => read.deliver(sink),
                Err(error) => {
                    read.give_up(sink);
                    Err(("read", error.to_string()))
                }
            };
            match delivered {
                Ok(()) => {
                    hits += 1;
                    bytes += entry.bytes();
                }
                Err((kind, what)) => {
                    log.forget(&entry);
                    self.meter.error(
                        "disk",
                        kind,
                        format_args!("{}: {what}", log.directory.path().display()),
                    );
                }
            }
        };
        // SAFETY: blocks and rooms are there until `deliver` or `give_up`, and nobody else uses them.
        unsafe { log.io.run(&ops, &mut done) };
        (hits, bytes)
    }
}

/// One record being read: its head into blocks, its payload into the room where it will stay, or behind the head.
struct Read {
    index: usize,
    place: Place,
    blocks: Blocks,
    room: Option<std::ptr::NonNull<[u8]>>,
    /// For the payload's last, unfull block.
    tail: Blocks,
}

impl Read {
    fn new(index: usize, place: Place, sink: &mut dyn Sink) -> Option<Self> {
        let entry = &place.entry;
        if entry.codec != Codec::RAW {
            let blocks = Blocks::new(entry.bytes() as usize);
            return Some(Self {
                index,
                blocks,
                room: None,
                tail: Blocks::new(0),
                place,
            });
        }
        let room = sink.room(index, &entry.shape())?;
        if room.len() as u64 != entry.payload_len {
            sink.failed(index);
            return None;
        }
        let (blocks, tail) = (
            Blocks::new(entry.head_room()),
            Blocks::new(room.len() % BLOCK),
        );
        Some(Self {
            index,
            blocks,
            room: Some(room),
            tail,
            place,
        })
    }

    fn op(&mut self) -> Op {
        let mut op = Op::read(self.place.file.as_raw_fd(), self.place.entry.offset);
        let blocks = self.blocks.bytes_mut();
        op.piece(blocks.as_mut_ptr(), blocks.len());
        if let Some(room) = self.room {
            op.piece(room.as_ptr().cast(), room.len() / BLOCK * BLOCK);
        }
        let tail = self.tail.bytes_mut();
        op.piece(tail.as_mut_ptr(), tail.len());
        op
    }

    /// Hands a record over that was read; what is wrong with it otherwise.
    fn deliver(&mut self, sink: &mut dyn Sink) -> Result<(), (&'static str, String)> {
        let entry: Entry = self.place.entry;
        let refused = |why: &str| Err(("damaged", format!("the record at {} {why}", entry.offset)));
        if parse_record_prefix(self.blocks.bytes(), self.place.salt) != Some(entry) {
            self.give_up(sink);
            return refused("is not the one that was written there");
        }
        let accepted = if let Some(room) = self.room {
            let whole = room.len() / BLOCK * BLOCK;
            let rest = &self.tail.bytes()[..room.len() - whole];
            // SAFETY: the room's last bytes, ours until `filled`; as many as are copied.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    rest.as_ptr(),
                    room.as_ptr().cast::<u8>().add(whole),
                    rest.len(),
                );
            }
            sink.filled(
                self.index,
                &self.blocks.bytes()[PREFIX..][..entry.head_len as usize],
            )
        } else {
            frame_of(&mut self.blocks, &entry).is_some_and(|frame| sink.frame(self.index, frame))
        };
        if accepted {
            Ok(())
        } else {
            refused("has changed")
        }
    }

    fn give_up(&self, sink: &mut dyn Sink) {
        if self.room.is_some() {
            sink.failed(self.index);
        }
    }
}

impl Tier for Disk {
    fn name(&self) -> &str {
        "disk"
    }

    fn contains(&self, keys: &[Key]) -> Vec<u8> {
        keys.iter()
            .map(|key| self.log(key).contains(key).into())
            .collect()
    }

    fn get(&self, keys: &[Key], sink: &mut dyn Sink) {
        let since = Instant::now();
        let (mut hits, mut bytes) = (0, 0);
        for log in &self.logs {
            let here = |(_, key): &(usize, &Key)| std::ptr::eq(self.log(key), log);
            let here: Vec<(usize, &Key)> = keys.iter().enumerate().filter(here).collect();
            for window in here.chunks(WINDOW) {
                let read = self.read(log, window, sink);
                hits += read.0;
                bytes += read.1;
            }
        }
        self.meter.got(keys.len(), hits, bytes, since);
    }

    fn put(&self, frames: &[Frame<'_>]) -> usize {
        let since = Instant::now();
        let (mut stored, mut there) = (0, 0);
        for log in &self.logs {
            let here = |frame: &&Frame<'_>| std::ptr::eq(self.log(&frame.head.header.key), log);
            let here: Vec<&Frame<'_>> = frames.iter().filter(here).collect();
            let put = log.put(&here);
            stored += put.0;
            there += put.1;
        }
        let bytes = if stored > 0 {
            frames.iter().map(|frame| frame.len() as u64).sum()
        } else {
            0
        };
        self.meter.put(frames.len() - there, stored, bytes, since);
        stored
    }

    fn remove(&self, keys: &[Key]) {
        for key in keys {
            self.log(key).remove(key);
        }
    }

    fn clear(&self, namespace: Option<&Key>) {
        for log in &self.logs {
            log.clear(namespace);
        }
    }

    fn lost(&self) -> Vec<Key> {
        self.logs.iter().flat_map(Log::lost).collect()
    }

    fn stats(&self) -> TierStats {
        self.meter.stats()
    }

    fn close(&self) {
        // A forked child has the parent's open segments, and must not seal them.
        if self.owner.is_this() {
            for log in &self.logs {
                log.close();
            }
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests;
