//! The directory of a disk log: made for its owner alone, used by one process at a time, holding segment files and a lock.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::format::BLOCK;
use super::io::{Blocks, Io, Op};

/// Own directory within the one that was configured.
const NAME: &str = "blendstore-v1";
const SEGMENT: &str = "seg";

/// A directory that this process alone uses, until it is unlocked or dropped.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    /// Files bypass the page cache.
    pub direct: bool,
    lock: Mutex<Option<File>>,
}

impl Directory {
    /// Makes it if need be. With `direct` the page cache is bypassed where the file system lets us.
    pub(crate) fn open(parent: &Path, direct: bool) -> io::Result<Self> {
        let path = parent.join(NAME);
        make(&path)?;
        // What is in it will be read, believed as far as its checksums go, and swept: it must not be somebody else's, and no
        // link that leads to other things of ours.
        let about = fs::symlink_metadata(&path)?;
        // SAFETY: a call without arguments that can't fail.
        if !about.is_dir() || about.uid() != unsafe { libc::geteuid() } {
            let message = format!("{} is no directory of this user's", path.display());
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
        let lock = lock(&path)?;
        let mut directory = Self {
            path,
            direct: false,
            lock: Mutex::new(Some(lock)),
        };
        directory.direct = direct && directory.takes_direct();
        Ok(directory)
    }

    /// Makes it again, and locks it, after somebody removed it while it was in use.
    pub(crate) fn restore(&self) -> io::Result<()> {
        make(&self.path)?;
        let lock = lock(&self.path)?;
        *self.lock.lock().unwrap_or_else(PoisonError::into_inner) = Some(lock);
        Ok(())
    }

    /// Has the device know which files there are.
    pub(crate) fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }

    /// Lets other processes have it.
    pub(crate) fn unlock(&self) {
        self.lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Numbers of the segments there are, ascending. Files that are none of ours are removed: they are leftovers.
    pub(crate) fn segments(&self) -> io::Result<Vec<u64>> {
        let mut numbers = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            let number = path
                .file_stem()
                .and_then(|stem| stem.to_str())
                .filter(|stem| {
                    stem.len() == 16 && path.extension().is_some_and(|end| end == SEGMENT)
                })
                .and_then(|stem| u64::from_str_radix(stem, 16).ok());
            match number {
                Some(number) => numbers.push(number),
                None if path.ends_with("lock") => {}
                None => {
                    log::warn!("{}: removed, it is none of ours", path.display());
                    fs::remove_file(&path)?;
                }
            }
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    pub(crate) fn segment_path(&self, number: u64) -> PathBuf {
        self.path.join(format!("{number:016x}.{SEGMENT}"))
    }

    /// An existing segment's file, or a new one.
    pub(crate) fn open_segment(&self, number: u64, new: bool) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(new).mode(0o600);
        if self.direct {
            options.custom_flags(direct_flag());
        }
        options.open(self.segment_path(number))
    }

    pub(crate) fn remove_segment(&self, number: u64) {
        let path = self.segment_path(number);
        if let Err(error) = fs::remove_file(&path)
            && error.kind() != io::ErrorKind::NotFound
        {
            log::warn!("{}: {error}", path.display());
        }
    }

    /// Whether one block goes in and out without the page cache, from and to memory aligned as records in the arena are.
    fn takes_direct(&self) -> bool {
        let path = self.path.join("probe");
        let probe = || -> io::Result<bool> {
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600);
            let file = options.custom_flags(direct_flag()).open(&path)?;
            let mut memory = Blocks::new(2 * BLOCK);
            let bytes = &mut memory.bytes_mut()[512..512 + BLOCK];
            bytes.fill(7);
            file.write_all_at(bytes, 0)?;
            bytes.fill(0);
            file.read_exact_at(bytes, 0)?;
            Ok(bytes.iter().all(|&byte| byte == 7))
        };
        let taken = probe().unwrap_or(false);
        // Swept at the next start if it can't be removed now.
        let _ = fs::remove_file(&path);
        taken
    }
}

fn make(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn direct_flag() -> i32 {
    #[cfg(target_os = "linux")]
    return libc::O_DIRECT;
    #[cfg(not(target_os = "linux"))]
    return 0;
}

/// The lock file, locked.
fn lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let path = path.join("lock");
    let mut file = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)?;
    // SAFETY: a call on a descriptor that we own.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } != 0 {
        let mut owner = String::new();
        // Only for the message.
        let _ = file.read_to_string(&mut owner);
        let message = format!(
            "{} is in use by process {}: give each process a directory",
            path.display(),
            owner.trim()
        );
        return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
    }
    file.set_len(0)?;
    file.rewind()?;
    write!(file, "{}", std::process::id())?;
    Ok(file)
}

/// Gives a file its blocks in advance where the file system can, else its length.
pub(crate) fn allocate(file: &File, len: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: a call on a descriptor that we own.
        if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len as libc::off_t) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EOPNOTSUPP) {
            return Err(error);
        }
    }
    file.set_len(len)
}

/// Reads `len` bytes at `offset` (a multiple of the block) into blocks. Short files are errors.
pub(crate) fn read_blocks(io: &Io, file: &File, offset: u64, len: usize) -> io::Result<Blocks> {
    let mut blocks = Blocks::new(len);
    let mut op = Op::read(file.as_raw_fd(), offset);
    let bytes = blocks.bytes_mut();
    op.piece(bytes.as_mut_ptr(), bytes.len());
    run_one(io, &op)?;
    Ok(blocks)
}

/// Writes blocks at `offset`.
pub(crate) fn write_blocks(
    io: &Io,
    file: &File,
    offset: u64,
    blocks: &mut Blocks,
) -> io::Result<()> {
    let mut op = Op::write(file.as_raw_fd(), offset);
    let bytes = blocks.bytes_mut();
    op.piece(bytes.as_mut_ptr(), bytes.len());
    run_one(io, &op)
}

fn run_one(io: &Io, op: &Op) -> io::Result<()> {
    let mut result = Ok(());
    // SAFETY: the callers' blocks, borrowed mutably by them, outlive the call.
    unsafe { io.run(std::slice::from_ref(op), &mut |_, ended| result = ended) };
    result
}

/// Bytes of a file now.
pub(crate) fn file_len(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.size())
}
