//! Positioned vectored reads and writes of many records at once: io_uring where the kernel has it, plain calls elsewhere.

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Mutex, PoisonError};

use super::format::BLOCK;

/// Operations in flight in one ring.
const DEPTH: u32 = 32;

/// Whole blocks of zeroed memory, aligned to a block.
#[derive(Debug)]
pub(crate) struct Blocks(Vec<Block>);

#[derive(Clone, Copy, Debug)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK]);

impl Blocks {
    /// For at least `bytes`.
    pub(crate) fn new(bytes: usize) -> Self {
        Self(vec![Block([0; BLOCK]); bytes.div_ceil(BLOCK)])
    }

    /// With a copy of `bytes`.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut blocks = Self::new(bytes.len());
        blocks.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        blocks
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory of as many whole blocks, all of it bytes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), self.0.len() * BLOCK) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), self.0.len() * BLOCK) }
    }
}

/// One read or write of pieces of memory at one place of a file.
#[derive(Debug)]
pub(crate) struct Op {
    fd: RawFd,
    offset: u64,
    write: bool,
    pieces: Vec<libc::iovec>,
}

impl Op {
    pub(crate) fn read(fd: RawFd, offset: u64) -> Self {
        Self {
            fd,
            offset,
            write: false,
            pieces: Vec::with_capacity(3),
        }
    }

    pub(crate) fn write(fd: RawFd, offset: u64) -> Self {
        Self {
            write: true,
            ..Self::read(fd, offset)
        }
    }

    /// Adds a piece; the memory is used by [`Io::run`].
    pub(crate) fn piece(&mut self, start: *mut u8, len: usize) {
        if len > 0 {
            self.pieces.push(libc::iovec {
                iov_base: start.cast(),
                iov_len: len,
            });
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.pieces.iter().map(|piece| piece.iov_len).sum()
    }

    /// Does by plain calls what is left behind the first `done` bytes.
    fn finish(&self, mut done: usize) -> io::Result<()> {
        let len = self.len();
        while done < len {
            let mut skip = done;
            let mut rest: Vec<libc::iovec> = Vec::with_capacity(self.pieces.len());
            for piece in &self.pieces {
                let skipped = skip.min(piece.iov_len);
                skip -= skipped;
                if skipped < piece.iov_len {
                    let start = piece.iov_base.cast::<u8>().wrapping_add(skipped);
                    rest.push(libc::iovec {
                        iov_base: start.cast(),
                        iov_len: piece.iov_len - skipped,
                    });
                }
            }
            let (count, at) = (
                rest.len() as i32,
                (self.offset + done as u64) as libc::off_t,
            );
            // SAFETY: pieces of memory that the caller of `run` vouches for.
            let moved = unsafe {
                if self.write {
                    libc::pwritev(self.fd, rest.as_ptr(), count, at)
                } else {
                    libc::preadv(self.fd, rest.as_ptr(), count, at)
                }
            };
            match moved {
                0 if self.write => return Err(io::ErrorKind::WriteZero.into()),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                1.. => done += moved as usize,
                _ => {
                    let error = io::Error::last_os_error();
                    if error.kind() != io::ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    /// `finish` after a first attempt that returned `result`, a count or a negated error.
    fn conclude(&self, result: i32) -> io::Result<()> {
        match result {
            0.. => self.finish(result as usize),
            _ if [libc::EINTR, libc::EAGAIN].contains(&-result) => self.finish(0),
            _ => Err(io::Error::from_raw_os_error(-result)),
        }
    }
}

/// How a directory is read and written.
pub(crate) enum Io {
    /// One call after the other.
    Plain,
    /// Rings, one for each thread at work.
    #[cfg(target_os = "linux")]
    Uring(Mutex<Vec<io_uring::IoUring>>),
}

impl fmt::Debug for Io {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Io {
    /// io_uring if the kernel lets us have it and it is `wanted`.
    pub(crate) fn new(wanted: bool) -> Self {
        #[cfg(target_os = "linux")]
        if wanted && let Ok(ring) = io_uring::IoUring::new(DEPTH) {
            return Self::Uring(Mutex::new(vec![ring]));
        }
        let _ = wanted;
        Self::Plain
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Plain => "plain",
            #[cfg(target_os = "linux")]
            Self::Uring(_) => "io_uring",
        }
    }

    /// Does all of `ops`, in any order, and tells each one's end. An op ends well when all of its bytes were moved.
    ///
    /// # Safety
    /// The pieces' memory is valid for the transfer and used by nobody else until `done` was called for their op.
    pub(crate) unsafe fn run(&self, ops: &[Op], done: &mut dyn FnMut(usize, io::Result<()>)) {
        match self {
            Self::Plain => {
                for (index, op) in ops.iter().enumerate() {
                    done(index, op.finish(0));
                }
            }
            #[cfg(target_os = "linux")]
            Self::Uring(rings) => {
                let spare = rings.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let ring = spare.map_or_else(|| io_uring::IoUring::new(DEPTH), Ok);
                let Ok(ring) = ring else {
                    // SAFETY: as for this call.
                    return unsafe { Self::Plain.run(ops, done) };
                };
                let mut flight = uring::Flight::new(ring);
                // SAFETY: as for this call; the flight ends every op that it began before it is dropped.
                unsafe { flight.run(ops, done) };
                if let Some(ring) = flight.into_ring() {
                    rings
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .push(ring);
                }
            }
        }
    }
}

#[cfg(target_os = "linux")]
mod uring {
    use io_uring::{IoUring, opcode, types};

    use super::*;

    /// A ring at work. Dropping it waits for what is in flight, so that no memory is given back too early.
    pub(super) struct Flight {
        ring: Option<IoUring>,
        in_flight: usize,
    }

    impl Flight {
        pub(super) fn new(ring: IoUring) -> Self {
            Self {
                ring: Some(ring),
                in_flight: 0,
            }
        }

        /// # Safety
        /// As for [`Io::run`].
        pub(super) unsafe fn run(
            &mut self,
            ops: &[Op],
            done: &mut dyn FnMut(usize, io::Result<()>),
        ) {
            let mut next = 0;
            while next < ops.len() || self.in_flight > 0 {
                let ring = self.ring.as_mut().expect("at work");
                while next < ops.len() && self.in_flight < DEPTH as usize {
                    let op = &ops[next];
                    let (fd, pieces, count) =
                        (types::Fd(op.fd), op.pieces.as_ptr(), op.pieces.len() as u32);
                    let entry = if op.write {
                        opcode::Writev::new(fd, pieces, count)
                            .offset(op.offset)
                            .build()
                    } else {
                        opcode::Readv::new(fd, pieces, count)
                            .offset(op.offset)
                            .build()
                    };
                    // SAFETY: the op and what its pieces point to outlive the flight, which ends before this returns.
                    if unsafe { ring.submission().push(&entry.user_data(next as u64)) }.is_err() {
                        break;
                    }
                    self.in_flight += 1;
                    next += 1;
                }
                if let Err(error) = ring.submit_and_wait(1)
                    && error.kind() != io::ErrorKind::Interrupted
                {
                    log::debug!("io_uring: {error}");
                    std::thread::yield_now();
                }
                while let Some(entry) = self.ring.as_mut().and_then(|ring| ring.completion().next())
                {
                    self.in_flight -= 1;
                    let index = entry.user_data() as usize;
                    done(index, ops[index].conclude(entry.result()));
                }
            }
        }

        pub(super) fn into_ring(mut self) -> Option<IoUring> {
            self.ring.take()
        }
    }

    impl Drop for Flight {
        fn drop(&mut self) {
            while self.in_flight > 0
                && let Some(ring) = &mut self.ring
            {
                // Interrupted or not, the completions decide.
                let _ = ring.submit_and_wait(1);
                self.in_flight -= ring.completion().count();
            }
        }
    }
}
