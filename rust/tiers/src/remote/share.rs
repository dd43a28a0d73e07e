//! A directory that several machines mount, as a tier: one file is one record.
//!
//! `DIRECTORY/ab/abcd….blend`, named by the key in hexadecimal digits. A file is written under another name and renamed, so
//! that a reader finds all of a record or none. Directories are made for their owner alone (0700), files too (0600). A mount
//! that hangs holds the tier's thread, not the engine's; mount it so that it gives up in time.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use blendstore_codec::Frame;
use blendstore_codec::frame::FIXED;

use super::breaker::{Breaker, Turn};
use super::delivery::{Delivery, deliver, is_of};
use crate::meter::{Meter, TierStats};
use crate::tier::{Key, Sink, Tier};

/// What a writer left behind is swept when it is older than that.
const ABANDONED: Duration = Duration::from_secs(3600);
const NAME: &str = "share";
const RECORD: &str = "blend";
const UNFINISHED: &str = "part";

/// A tier on a shared directory.
#[derive(Debug)]
pub struct Share {
    directory: PathBuf,
    timeout: Duration,
    breaker: Breaker,
    meter: Meter,
    /// Makes the names of unfinished files differ.
    writer: u64,
    written: AtomicU64,
    closed: AtomicBool,
}

impl Share {
    /// Makes the directory if it is not there. An error names it.
    pub fn open(directory: &Path, timeout: Duration) -> Result<Self, String> {
        let why = |error: io::Error| {
            format!(
                "{}: {error}: give a directory that can be written",
                directory.display()
            )
        };
        make_directory(directory).map_err(why)?;
        let share = Self {
            directory: directory.to_path_buf(),
            timeout,
            breaker: Breaker::default(),
            meter: Meter::default(),
            writer: std::hash::BuildHasher::hash_one(
                &std::hash::RandomState::new(),
                std::process::id(),
            ),
            written: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        };
        // Proves at start that it can be written, and not only by whom it is owned.
        let probe = share.unfinished(&share.directory);
        create(&probe)
            .and_then(|_| fs::remove_file(&probe))
            .map_err(why)?;
        Ok(share)
    }

    fn path_of(&self, key: &Key) -> PathBuf {
        let digits: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let mut path = self.directory.join(&digits[..2]);
        path.push(format!("{digits}.{RECORD}"));
        path
    }

    fn unfinished(&self, directory: &Path) -> PathBuf {
        let number = self.written.fetch_add(1, Relaxed);
        directory.join(format!("{:016x}-{number}.{UNFINISHED}", self.writer))
    }

    /// Runs `work` unless the share is left alone; what is returned says whether the share is there.
    fn guarded(&self, work: impl FnOnce() -> io::Result<()>) {
        if self.closed.load(Relaxed) {
            return;
        }
        let Some(pass) = self.breaker.pass(Instant::now()) else {
            return;
        };
        let turn = match work() {
            Ok(()) => pass.succeeded(),
            Err(error) => {
                self.meter.error(
                    NAME,
                    kind(&error),
                    format_args!("{}: {error}", self.directory.display()),
                );
                pass.failed()
            }
        };
        match turn {
            Turn::None => {}
            Turn::Off => self.meter.error(
                NAME,
                "off",
                format_args!("{}: left alone for a while", self.directory.display()),
            ),
            Turn::On => log::info!("tier {NAME}: {}: back", self.directory.display()),
        }
    }

    /// One record, if it is there and whole; its bytes.
    fn read(&self, key: &Key, index: usize, sink: &mut dyn Sink) -> io::Result<Option<u64>> {
        let path = self.path_of(key);
        let (mut file, length) = match open(&path) {
            Ok(opened) => opened,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        match deliver(&mut file, length, key, index, sink) {
            Ok(Delivery::Taken) => return Ok(Some(length)),
            Ok(Delivery::Unwanted(_)) => {}
            Ok(Delivery::Bad(kind, why, _)) => {
                self.meter
                    .error(NAME, kind, format_args!("{}: {why}", path.display()))
            }
            // Shorter than it was a moment ago.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                self.meter.error(
                    NAME,
                    "length",
                    format_args!("{}: it ends early", path.display()),
                );
            }
            Err(error) => return Err(error),
        }
        Ok(None)
    }

    fn write(&self, frame: &Frame<'_>) -> io::Result<()> {
        let path = self.path_of(&frame.head.header.key);
        let directory = path.parent().expect("a file in a directory");
        let unfinished = self.unfinished(directory);
        let mut file = match create(&unfinished) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                make_directory(directory)?;
                create(&unfinished)?
            }
            file => file?,
        };
        let written = frame
            .slices()
            .iter()
            .try_for_each(|part| file.write_all(part));
        let renamed = written.and_then(|()| fs::rename(&unfinished, &path));
        if renamed.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        renamed
    }

    /// Calls `visit` with every file in our directories.
    fn walk(&self, mut visit: impl FnMut(&Path)) -> io::Result<()> {
        for directory in fs::read_dir(&self.directory)? {
            let directory = directory?;
            let name = directory.file_name();
            let ours = name.len() == 2 && name.as_encoded_bytes().iter().all(u8::is_ascii_hexdigit);
            if ours && directory.file_type()?.is_dir() {
                for file in fs::read_dir(directory.path())? {
                    visit(&file?.path());
                }
            }
        }
        Ok(())
    }

    /// Removes what writers left behind long ago.
    fn sweep(&self, path: &Path) {
        let age = |path: &Path| {
            SystemTime::now()
                .duration_since(fs::metadata(path).ok()?.modified().ok()?)
                .ok()
        };
        if age(path).is_some_and(|age| age > ABANDONED) {
            let _ = fs::remove_file(path);
        }
    }
}

impl Tier for Share {
    fn name(&self) -> &str {
        NAME
    }

    fn contains(&self, keys: &[Key]) -> Vec<u8> {
        let mut found = vec![0; keys.len()];
        self.guarded(|| {
            for (found, key) in found.iter_mut().zip(keys) {
                *found = u8::from(self.path_of(key).try_exists()?);
            }
            Ok(())
        });
        found
    }

    fn get(&self, keys: &[Key], sink: &mut dyn Sink) {
        let since = Instant::now();
        let (mut hits, mut bytes) = (0, 0);
        self.guarded(|| {
            for (index, key) in keys.iter().enumerate() {
                if since.elapsed() >= self.timeout {
                    return Err(io::Error::new(ErrorKind::TimedOut, "no answer in time"));
                }
                if let Some(length) = self.read(key, index, sink)? {
                    hits += 1;
                    bytes += length;
                }
            }
            Ok(())
        });
        self.meter.got(keys.len(), hits, bytes, since);
    }

    fn put(&self, frames: &[Frame<'_>]) -> usize {
        let since = Instant::now();
        let (mut stored, mut bytes) = (0, 0);
        self.guarded(|| {
            for frame in frames {
                match self.write(frame) {
                    Ok(()) => {
                        stored += 1;
                        bytes += frame.len() as u64;
                    }
                    // Reading goes on.
                    Err(error) if kind(&error) == "full" => {
                        self.meter.error(
                            NAME,
                            "full",
                            format_args!("{}: {error}", self.directory.display()),
                        );
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        self.meter.put(frames.len(), stored, bytes, since);
        stored
    }

    fn remove(&self, keys: &[Key]) {
        self.guarded(|| {
            for key in keys {
                match fs::remove_file(self.path_of(key)) {
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            Ok(())
        });
    }

    fn clear(&self, namespace: Option<&Key>) {
        self.guarded(|| {
            self.walk(|path| {
                let extension = path.extension().and_then(|extension| extension.to_str());
                match (extension, namespace) {
                    (Some(RECORD), None) => drop(fs::remove_file(path)),
                    (Some(RECORD), Some(namespace)) => {
                        let mut head = Vec::new();
                        let read = open(path)
                            .and_then(|(file, _)| file.take(FIXED as u64).read_to_end(&mut head));
                        if read.is_ok() && is_of(namespace, &head) {
                            let _ = fs::remove_file(path);
                        }
                    }
                    (Some(UNFINISHED), _) => self.sweep(path),
                    _ => {}
                }
            })
        });
    }

    fn stats(&self) -> TierStats {
        self.meter.stats()
    }

    fn close(&self) {
        self.closed.store(true, Relaxed);
    }
}

/// A regular file and its length. What else may stand there, links and pipes, is refused rather than followed or waited for.
fn open(path: &Path) -> io::Result<(File, u64)> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let about = file.metadata()?;
    if !about.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidData, "not a regular file"));
    }
    Ok((file, about.len()))
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
}

fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn kind(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "full",
        ErrorKind::TimedOut => "timeout",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "permission",
        _ => "io",
    }
}
