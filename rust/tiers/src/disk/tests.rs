//! The disk log against a model; `faults`: against what happens to its files.

use std::collections::{HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use blendstore_codec::{Head, Header, Parts};
use blendstore_core::{Namespace, Shape, key::SEGMENT_ROOT};
use proptest::prelude::*;

use super::*;

mod faults;

/// A directory that is gone afterwards.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static NUMBER: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Relaxed);
        let path =
            std::env::temp_dir().join(format!("blendstore-disk-{}-{number}", std::process::id()));
        fs::create_dir_all(&path).expect("a directory for temporary files");
        Self(path)
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = fs::read_dir(self.0.join("blendstore-v1"))
            .expect("opened before")
            .map(|entry| entry.expect("readable").path())
            .filter(|path| path.extension().is_some_and(|end| end == "seg"))
            .collect();
        files.sort();
        files
    }

    fn bytes(&self) -> u64 {
        self.files()
            .iter()
            .map(|file| fs::metadata(file).expect("there").len())
            .sum()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What is left is in the directory for temporary files.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A frame in one piece.
#[derive(Clone, Debug, PartialEq)]
struct Made {
    key: Key,
    head: Vec<u8>,
    payload: Vec<u8>,
}

fn namespace(number: u8) -> Namespace {
    Namespace::new(&[("model", [number])], b"salt")
}

fn made(tenant: u8, seed: u32, ntokens: u32, per_token: u32, rank: u8, codec: Codec) -> Made {
    let namespace = namespace(tenant);
    let tokens: Vec<u32> = (0..ntokens).map(|n| seed * 4096 + n).collect();
    let key = namespace.chain_key(&SEGMENT_ROOT, &namespace.content_id(&tokens));
    let payload: Vec<u8> = (0..ntokens * per_token)
        .map(|n| (n.wrapping_mul(31) ^ n >> 8 ^ seed ^ u32::from(rank) << 3) as u8)
        .collect();
    let header = Header {
        key,
        parent: SEGMENT_ROOT,
        namespace: namespace.name(),
        context: [3; 32],
        ntokens,
        bytes_per_token: per_token,
        source_position: seed,
        segment_offset: 0,
        behind_tokens: 0,
        format: 0,
        codec,
        provenance: 1,
        rank,
    };
    let parts = Parts {
        header,
        params: &[],
        tokens: &tokens,
        scores: None,
        behind: &[[1; 32]],
        payload: &payload,
    };
    Made {
        key,
        head: parts.encode_head(),
        payload,
    }
}

fn put(disk: &Disk, records: &[&Made]) -> usize {
    let frames: Vec<Frame<'_>> = records
        .iter()
        .map(|made| Frame {
            head: Head::parse(&made.head).expect("ours"),
            payload: &made.payload,
        })
        .collect();
    disk.put(&frames)
}

/// Takes everything, and proves it as memory would.
#[derive(Default)]
struct Taker {
    rooms: HashMap<usize, Blocks>,
    taken: HashMap<usize, Made>,
    failed: usize,
    refused: usize,
}

impl Taker {
    fn take(&mut self, index: usize, head: &[u8], payload: &[u8]) -> bool {
        let whole = Head::parse(head)
            .and_then(|head| head.check_payload(payload).map(|()| head.header.key));
        match whole {
            Ok(key) => {
                let made = Made {
                    key,
                    head: head.to_vec(),
                    payload: payload.to_vec(),
                };
                assert!(self.taken.insert(index, made).is_none(), "delivered once");
                true
            }
            Err(_) => {
                self.refused += 1;
                false
            }
        }
    }
}

// SAFETY: the blocks of a room are kept until it is filled or failed.
unsafe impl Sink for Taker {
    fn room(&mut self, index: usize, shape: &Shape) -> Option<NonNull<[u8]>> {
        let mut blocks = Blocks::new(shape.ntokens * shape.bytes_per_token);
        let room = NonNull::from(&mut blocks.bytes_mut()[..shape.ntokens * shape.bytes_per_token]);
        self.rooms.insert(index, blocks);
        Some(room)
    }

    fn filled(&mut self, index: usize, head: &[u8]) -> bool {
        let room = self.rooms.remove(&index).expect("asked for");
        let len = Head::parse(head).map_or(0, |head| head.payload_len as usize);
        self.take(index, head, room.bytes().get(..len).unwrap_or(&[]))
    }

    fn failed(&mut self, index: usize) {
        self.failed += 1;
        self.rooms.remove(&index).expect("asked for");
    }

    fn frame(&mut self, index: usize, frame: &[u8]) -> bool {
        let Ok(frame) = Frame::parse(frame) else {
            self.refused += 1;
            return false;
        };
        self.take(index, frame.head.bytes(), frame.payload)
    }
}

fn get(disk: &Disk, keys: &[Key]) -> Vec<Option<Made>> {
    let mut taker = Taker::default();
    disk.get(keys, &mut taker);
    assert!(taker.rooms.is_empty(), "every room is given back");
    (0..keys.len())
        .map(|index| taker.taken.remove(&index))
        .collect()
}

fn options(scratch: &Scratch) -> DiskOptions {
    DiskOptions {
        segment_bytes: Some(1 << 20),
        ..DiskOptions::new(&scratch.0, 64 << 20)
    }
}

fn open(scratch: &Scratch) -> Disk {
    Disk::open(&options(scratch)).expect("a disk tier")
}

/// A process that ended without a word: nothing is sealed, the lock is free.
fn crash(disk: Disk) {
    for log in &disk.logs {
        log.abandon();
    }
}

fn documents(count: u32) -> Vec<Made> {
    (0..count)
        .map(|seed| made(0, seed, 1 + seed % 7, 700 + 513 * seed, 1, Codec::RAW))
        .collect()
}

fn check_equal(disk: &Disk, records: &[Made]) {
    let keys: Vec<Key> = records.iter().map(|made| made.key).collect();
    for (found, made) in get(disk, &keys).iter().zip(records) {
        assert_eq!(found.as_ref(), Some(made));
    }
}

/// Every way of reading and writing gives back what was put: sizes around blocks, raw and coded, through the page cache and
/// past it.
#[test]
fn records_come_back_whole_by_every_way() {
    for (direct, io_uring) in [(true, true), (true, false), (false, true), (false, false)] {
        let scratch = Scratch::new();
        let disk = Disk::open(&DiskOptions {
            direct,
            io_uring,
            ..options(&scratch)
        })
        .expect("a disk tier");
        let mut records: Vec<Made> = [1, 511, 4095, 4096, 4097, 8192, 100_000]
            .iter()
            .enumerate()
            .map(|(seed, &bytes)| made(0, seed as u32, 1, bytes, 1, Codec::RAW))
            .collect();
        records.push(made(0, 90, 2, 3000, 1, Codec::LOSSLESS));
        let all: Vec<&Made> = records.iter().collect();
        assert_eq!(put(&disk, &all), records.len(), "{}", disk.describe());
        check_equal(&disk, &records);
        assert_eq!(disk.contains(&[records[0].key, [9; 32]]), [1, 0]);
        let stats = disk.stats();
        assert_eq!(
            (stats.puts, stats.hits, stats.misses, stats.dropped),
            (8, 8, 0, 0)
        );
        assert_eq!(stats.bytes_used, scratch.bytes());
        assert!(stats.errors.is_empty(), "{:?}", stats.errors);
    }
}

/// Case f06: after a restart every sealed record is found again, and files that are none of ours are swept.
#[test]
fn case_f06_sealed_records_survive_and_orphans_are_swept() {
    let scratch = Scratch::new();
    let records = documents(60);
    let disk = open(&scratch);
    put(&disk, &records.iter().collect::<Vec<_>>());
    drop(disk);
    let inside = scratch.0.join("blendstore-v1");
    fs::write(inside.join("leftover.tmp"), "x").expect("writable");
    fs::write(inside.join("00000000000000ff.seg"), "not a segment").expect("writable");
    let disk = open(&scratch);
    check_equal(&disk, &records);
    assert!(!inside.join("leftover.tmp").exists());
    assert!(!inside.join("00000000000000ff.seg").exists());
    assert_eq!(disk.stats().bytes_used, scratch.bytes());
    assert_eq!(disk.stats().records, 60);
}

/// The directory is its owner's alone.
#[test]
fn directories_and_files_are_private() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    put(&disk, &documents(3).iter().collect::<Vec<_>>());
    assert_eq!(scratch.files().len(), 1);
    let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
    assert_eq!(mode(&scratch.0.join("blendstore-v1")), 0o700);
    assert_eq!(mode(&scratch.0.join("blendstore-v1/lock")), 0o600);
    for file in scratch.files() {
        assert_eq!(mode(&file), 0o600);
    }
}

/// A link in the directory's place, which another user may have put there, is not followed: nothing behind it is touched.
#[test]
fn a_link_in_place_of_the_directory_is_refused() {
    let (scratch, other) = (Scratch::new(), Scratch::new());
    fs::write(other.0.join("precious"), "x").expect("writable");
    std::os::unix::fs::symlink(&other.0, scratch.0.join("blendstore-v1")).expect("a link");
    let error = Disk::open(&options(&scratch)).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(other.0.join("precious").exists());
}

/// Two processes can't use one directory; the second is told who has it.
#[test]
fn a_directory_in_use_is_refused() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let error = Disk::open(&options(&scratch)).expect_err("in use");
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    assert!(
        error.to_string().contains(&std::process::id().to_string()),
        "{error}"
    );
    drop(disk);
    open(&scratch);
}

/// A record stays until one of higher rank comes, also over a restart.
#[test]
fn a_record_is_replaced_by_higher_rank_only() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let [low, equal, high] = [1, 1, 2].map(|rank| made(0, 5, 3, 500, rank, Codec::RAW));
    assert_eq!(put(&disk, &[&low]), 1);
    let other = made(0, 6, 3, 500, 1, Codec::RAW);
    assert_eq!(put(&disk, &[&equal, &other]), 1);
    assert_eq!(put(&disk, &[&high]), 1);
    assert_eq!(put(&disk, &[&low]), 0);
    check_equal(&disk, std::slice::from_ref(&high));
    drop(disk);
    check_equal(&open(&scratch), &[high, other]);
}

/// Case s13: what a tenant clears is gone, also after a crash; the other's is not.
#[test]
fn case_s13_a_cleared_namespace_stays_cleared() {
    let scratch = Scratch::new();
    let disk = open(&scratch);
    let (a, b) = (
        made(1, 5, 3, 500, 1, Codec::RAW),
        made(2, 5, 3, 500, 1, Codec::RAW),
    );
    put(&disk, &[&a, &b]);
    disk.clear(Some(&namespace(1).name()));
    assert_eq!(get(&disk, &[a.key, b.key]), [None, Some(b.clone())]);
    crash(disk);
    let disk = open(&scratch);
    assert_eq!(get(&disk, &[a.key, b.key]), [None, Some(b.clone())]);
    disk.remove(&[b.key]);
    drop(disk);
    let disk = open(&scratch);
    assert_eq!(disk.contains(&[a.key, b.key]), [0, 0]);
    put(&disk, &[&a]);
    disk.clear(None);
    assert_eq!(scratch.bytes(), 0);
    put(&disk, &[&b]);
    check_equal(&disk, std::slice::from_ref(&b));
}

/// The cap holds at every moment, the oldest go first, and what was read lately is kept.
#[test]
fn the_cap_holds_and_what_is_read_stays() {
    let scratch = Scratch::new();
    let capacity = 4 << 20;
    let few = DiskOptions {
        capacity_bytes: capacity,
        segment_bytes: Some(512 << 10),
        ..options(&scratch)
    };
    let disk = Disk::open(&few).expect("a disk tier");
    let hot = made(0, 999, 1, 60_000, 1, Codec::RAW);
    put(&disk, &[&hot]);
    let mut there = HashSet::from([hot.key]);
    for seed in 0..200 {
        let new = made(0, seed, 1, 60_000, 1, Codec::RAW);
        put(&disk, &[&new]);
        there.insert(new.key);
        // What made room is told, once, and what was written again is not.
        for key in disk.lost() {
            assert!(there.remove(&key), "round {seed}");
        }
        let all: Vec<Key> = there.iter().copied().collect();
        assert!(!disk.contains(&all).contains(&0), "round {seed}");
        assert_eq!(get(&disk, &[hot.key]), [Some(hot.clone())], "round {seed}");
        assert!(scratch.bytes() <= capacity);
        assert_eq!(disk.stats().bytes_used, scratch.bytes());
    }
    let stats = disk.stats();
    assert!(stats.evicted >= 100, "{stats:?}");
    let newest = made(0, 199, 1, 60_000, 1, Codec::RAW);
    assert_eq!(get(&disk, &[newest.key]), [Some(newest)]);
    assert_eq!(
        disk.contains(&[made(0, 0, 1, 60_000, 1, Codec::RAW).key]),
        [0]
    );
    drop(disk);
    // A smaller cap at the next start counts from what is on disk.
    let less = DiskOptions {
        capacity_bytes: 2 << 20,
        ..few
    };
    let disk = Disk::open(&less).expect("a disk tier");
    assert!(scratch.bytes() <= 2 << 20);
    assert_eq!(disk.stats().bytes_used, scratch.bytes());
}

/// A record larger than a segment has one to itself; one larger than the cap is not stored.
#[test]
fn large_records_have_segments_of_their_own() {
    let scratch = Scratch::new();
    let few = DiskOptions {
        capacity_bytes: 4 << 20,
        segment_bytes: Some(512 << 10),
        ..options(&scratch)
    };
    let disk = Disk::open(&few).expect("a disk tier");
    let large = made(0, 1, 1, 2 << 20, 1, Codec::RAW);
    let huge = made(0, 2, 1, 5 << 20, 1, Codec::RAW);
    assert_eq!(put(&disk, &[&large, &huge]), 1);
    check_equal(&disk, &[large]);
    assert_eq!(disk.stats().dropped, 1);
    // Several segments of records in use make room for one large record: what is kept of them stays within the cap.
    let hot: Vec<Made> = (10..60)
        .map(|seed| made(0, seed, 1, 60_000, 1, Codec::RAW))
        .collect();
    put(&disk, &hot.iter().collect::<Vec<_>>());
    let keys: Vec<Key> = hot.iter().map(|made| made.key).collect();
    for (found, made) in get(&disk, &keys).into_iter().zip(&hot) {
        assert!(found.is_none_or(|found| found == *made));
    }
    let other = made(0, 3, 1, 2 << 20, 1, Codec::RAW);
    assert_eq!(put(&disk, &[&other]), 1);
    assert!(scratch.bytes() <= 4 << 20);
    assert_eq!(disk.stats().bytes_used, scratch.bytes());
    check_equal(&disk, &[other]);
}

#[derive(Clone, Debug)]
enum Step {
    Put(u8, u32, u8),
    Get(u8, u32),
    Remove(u8, u32),
    Clear(u8),
    Reopen,
    Crash,
}

fn step() -> impl Strategy<Value = Step> {
    let (tenant, seed, rank) = (0..3u8, 0..12u32, 0..3u8);
    prop_oneof![
        6 => (tenant.clone(), seed.clone(), rank).prop_map(|(tenant, seed, rank)| Step::Put(tenant, seed, rank)),
        4 => (tenant.clone(), seed.clone()).prop_map(|(tenant, seed)| Step::Get(tenant, seed)),
        1 => (tenant.clone(), seed).prop_map(|(tenant, seed)| Step::Remove(tenant, seed)),
        1 => tenant.prop_map(Step::Clear),
        1 => Just(Step::Reopen),
        1 => Just(Step::Crash),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The log is a map that keeps the highest rank, over restarts and crashes; with a small cap it may have less, never other
    /// bytes, and never what was removed.
    #[test]
    fn the_log_is_a_map(steps in proptest::collection::vec(step(), 1..60), roomy in any::<bool>()) {
        let scratch = Scratch::new();
        let options = DiskOptions {
            capacity_bytes: if roomy { 64 << 20 } else { 2 << 20 },
            segment_bytes: Some(256 << 10),
            ..options(&scratch)
        };
        let record = |tenant: u8, seed: u32, rank: u8| made(tenant, seed, 1 + seed, 9000, rank, Codec::RAW);
        let mut disk = Disk::open(&options).expect("a disk tier");
        let mut model: HashMap<Key, (u8, u8, Made)> = HashMap::new();
        for step in steps {
            match step {
                Step::Put(tenant, seed, rank) => {
                    let made = record(tenant, seed, rank);
                    put(&disk, &[&made]);
                    let there = roomy || disk.contains(&[made.key])[0] != 0;
                    let better = model.get(&made.key).is_none_or(|(_, known, _)| *known < rank);
                    // With a small cap the known one may have gone, and then any comes in.
                    let evicted = !roomy && get(&disk, &[made.key]) == [Some(made.clone())];
                    if there && (better || evicted) {
                        model.insert(made.key, (tenant, rank, made));
                    }
                }
                Step::Get(tenant, seed) => {
                    let key = record(tenant, seed, 0).key;
                    let found = get(&disk, &[key]).remove(0);
                    let expected = model.get(&key).map(|(_, _, made)| made.clone());
                    prop_assert!(found == expected || (!roomy && found.is_none()));
                }
                Step::Remove(tenant, seed) => {
                    let key = record(tenant, seed, 0).key;
                    disk.remove(&[key]);
                    model.remove(&key);
                }
                Step::Clear(tenant) => {
                    disk.clear(Some(&namespace(tenant).name()));
                    model.retain(|_, (other, _, _)| *other != tenant);
                }
                Step::Reopen | Step::Crash => {
                    if matches!(step, Step::Crash) { crash(disk) } else { drop(disk) }
                    disk = Disk::open(&options).expect("a disk tier");
                }
            }
            let stats = disk.stats();
            prop_assert_eq!(stats.bytes_used, scratch.bytes());
            prop_assert!(stats.bytes_used <= options.capacity_bytes);
            prop_assert_eq!(stats.records, disk.logs[0].index().records.len() as u64);
        }
        for (key, (_, _, made)) in &model {
            let found = get(&disk, &[*key]).remove(0);
            prop_assert!(found.as_ref() == Some(made) || (!roomy && found.is_none()));
        }
    }

    /// Case c03: whatever a segment file holds, a start neither panics nor serves anything that fails its proof.
    #[test]
    fn case_c03_hostile_segment_files(
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..40),
        cut in any::<proptest::sample::Index>(),
    ) {
        let scratch = Scratch::new();
        let disk = open(&scratch);
        let records = documents(8);
        put(&disk, &records.iter().collect::<Vec<_>>());
        drop(disk);
        let file = scratch.files().remove(0);
        let mut bytes = fs::read(&file).expect("there");
        bytes.truncate(bytes.len() - cut.index(bytes.len().min(9000)));
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        fs::write(&file, &bytes).expect("writable");
        let disk = open(&scratch);
        let keys: Vec<Key> = records.iter().map(|made| made.key).collect();
        for (found, made) in get(&disk, &keys).into_iter().zip(&records) {
            prop_assert!(found.is_none_or(|found| found == *made));
        }
    }
}

/// Records of several directories are found again in each.
#[test]
fn several_directories_share_the_records() {
    let (a, b) = (Scratch::new(), Scratch::new());
    let options = DiskOptions {
        directories: vec![a.0.clone(), b.0.clone()],
        ..options(&a)
    };
    let records = documents(40);
    let disk = Disk::open(&options).expect("a disk tier");
    put(&disk, &records.iter().collect::<Vec<_>>());
    assert!(a.bytes() > 0 && b.bytes() > 0);
    assert_eq!(disk.stats().bytes_used, a.bytes() + b.bytes());
    drop(disk);
    check_equal(&Disk::open(&options).expect("a disk tier"), &records);
}

/// Wrong options are told by what is wrong.
#[test]
fn impossible_options_are_errors() {
    let scratch = Scratch::new();
    for options in [
        DiskOptions {
            capacity_bytes: 4096,
            ..options(&scratch)
        },
        DiskOptions {
            directories: vec![],
            ..options(&scratch)
        },
    ] {
        let error = Disk::open(&options).expect_err("refused");
        assert!(error.to_string().contains("2 MiB"), "{error}");
    }
    let file = scratch.0.join("file");
    fs::write(&file, "x").expect("writable");
    assert!(
        Disk::open(&DiskOptions::new(&file, 64 << 20)).is_err(),
        "a file is no directory"
    );
}
