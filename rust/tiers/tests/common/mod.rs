//! Records whose content follows from their number, a scratch directory, and a store above a disk tier.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use blendstore_core::{Key, Namespace, Options as MemoryOptions, Request, Store};
use blendstore_tiers::{Disk, DiskOptions, Level, Options, TieredStore};

/// Tokens of every record.
pub const TOKENS: usize = 16;

/// A directory that is gone afterwards.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("blendstore-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory for temporary files");
        Self(path)
    }

    /// Where files are memory, if there is such a place.
    #[allow(dead_code, reason = "this module is part of several programs")]
    pub fn in_memory(name: &str) -> Self {
        let path = Path::new("/dev/shm").join(format!("blendstore-{name}-{}", std::process::id()));
        match std::fs::create_dir_all(&path) {
            Ok(()) => Self(path),
            Err(_) => Self::new(name),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left is in the directory for temporary files.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn namespace() -> Namespace {
    Namespace::new(&[("model", b"weights")], b"salt")
}

pub fn tokens(number: u32) -> Vec<u32> {
    (0..TOKENS as u32)
        .map(|token| number * 64 + token)
        .collect()
}

pub fn key(number: u32) -> Key {
    namespace().chain_keys(&tokens(number), TOKENS, &blendstore_core::key::SEGMENT_ROOT)[0]
}

pub fn payload(number: u32) -> Vec<u8> {
    let per_token = 100 + (number as usize % 13) * 977;
    (0..TOKENS * per_token)
        .map(|at| ((at as u32 * 31) ^ number) as u8)
        .collect()
}

/// Memory for `memory` bytes above a disk tier of `disk` bytes.
pub fn open(directory: &Path, memory: usize, disk: u64) -> std::io::Result<TieredStore> {
    let memory = Store::open(MemoryOptions {
        capacity_bytes: memory,
        chunk_size: TOKENS,
        ..MemoryOptions::default()
    })
    .expect("memory");
    let tier = Disk::open(&DiskOptions {
        segment_bytes: Some(1 << 20),
        ..DiskOptions::new(directory, disk)
    })?;
    TieredStore::new(
        memory,
        vec![Level::raw(Arc::new(tier))],
        &Options::default(),
    )
}

pub fn store(store: &TieredStore, number: u32) {
    let bytes = payload(number);
    let request = Request {
        bytes_per_token: bytes.len() / TOKENS,
        ..Request::default()
    };
    let reservation = store
        .reserve(&namespace(), &tokens(number), &request)
        .expect("open");
    if reservation.wanted() == [1] {
        reservation.payload(0).expect("wanted").copy_from(&bytes);
    }
    reservation.commit(None).expect("one chunk");
}

/// Loads from below; whether it came. What comes is what was stored.
pub fn load(store: &TieredStore, numbers: &[u32]) -> Vec<bool> {
    let keys: Vec<Key> = numbers.iter().map(|&number| key(number)).collect();
    let ticket = store.prefetch(&namespace(), &keys);
    assert!(ticket.wait(Duration::from_secs(60)), "loads end");
    numbers
        .iter()
        .zip(&keys)
        .map(|(&number, key)| match store.record(key) {
            Some(record) => {
                assert_eq!(record.tokens(), tokens(number));
                assert!(
                    record.payload() == payload(number),
                    "record {number} has other bytes"
                );
                true
            }
            None => false,
        })
        .collect()
}
