//! The disk tier against fio in the same directory, turn by turn, and the time of a start over many records.
//!
//! `cargo bench -p blendstore-tiers --bench disk [-- --directory DIR] [--json FILE] [--mib 512] [--rounds 5] [--records 100000]`.
//! fio (Debian package `fio`) writes and reads files of 1 MiB blocks with direct I/O, io_uring and 32 in flight: what the tier
//! does with records of 1 MiB, 32 in a batch. Without fio only the tier is measured.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::NonNull;
use std::time::Instant;

use blendstore_codec::{Codec, Frame, Head, Header, Parts};
use blendstore_core::{Key, Namespace, Options, Shape, Store};
use blendstore_tiers::{Disk, DiskOptions, Sink, Tier};

const MIB: usize = 1 << 20;
const BATCH: usize = 32;

/// What the records of one run are made of; a record is framed when it is put, as the store does it.
struct Records {
    tokens: u32,
    keys: Vec<Key>,
}

impl Records {
    fn new(count: usize, tokens: u32) -> Self {
        let mut records = Self {
            tokens,
            keys: Vec::new(),
        };
        records.keys = (0..count as u32)
            .map(|number| records.header(number, 1).key)
            .collect();
        records
    }

    fn tokens(&self, number: u32) -> Vec<u32> {
        let first = number.wrapping_mul(self.tokens);
        (0..self.tokens).map(|token| first + token).collect()
    }

    fn header(&self, number: u32, bytes_per_token: u32) -> Header {
        let namespace = Namespace::new(&[("model", b"bench")], b"salt");
        let parent = blendstore_core::key::SEGMENT_ROOT;
        Header {
            key: namespace.chain_key(&parent, &namespace.content_id(&self.tokens(number))),
            parent,
            namespace: namespace.name(),
            context: [0; 32],
            ntokens: self.tokens,
            bytes_per_token,
            source_position: 0,
            segment_offset: 0,
            behind_tokens: 0,
            format: 0,
            codec: Codec::RAW,
            provenance: 1,
            rank: 0,
        }
    }

    /// Puts all of them, `payloads.len()` in a batch, each with other bytes in every block.
    fn put(&self, disk: &Disk, payloads: &mut [&mut [u8]]) {
        let all: Vec<u32> = (0..self.keys.len() as u32).collect();
        for numbers in all.chunks(payloads.len()) {
            for (payload, number) in payloads.iter_mut().zip(numbers) {
                for block in payload.chunks_mut(4096) {
                    block[..4].copy_from_slice(&number.to_le_bytes());
                }
            }
            let head = |(payload, &number): (&&mut [u8], &u32)| {
                let parts = Parts {
                    header: self.header(number, payload.len() as u32 / self.tokens),
                    params: &[],
                    tokens: &self.tokens(number),
                    scores: None,
                    behind: &[],
                    payload,
                };
                parts.encode_head()
            };
            let heads: Vec<Vec<u8>> = payloads.iter().zip(numbers).map(head).collect();
            let frames: Vec<Frame<'_>> = heads
                .iter()
                .zip(payloads.iter())
                .map(|(head, payload)| Frame {
                    head: Head::parse(head).expect("ours"),
                    payload,
                })
                .collect();
            assert_eq!(disk.put(&frames), frames.len(), "all are stored");
        }
    }
}

/// Takes payloads where the store would have them, and checks them as it would.
struct Rooms {
    rooms: Vec<NonNull<[u8]>>,
    filled: usize,
}

// SAFETY: each index has a room of its own in the arena, which outlives the sink.
unsafe impl Sink for Rooms {
    fn room(&mut self, index: usize, _shape: &Shape) -> Option<NonNull<[u8]>> {
        Some(self.rooms[index])
    }

    fn filled(&mut self, index: usize, head: &[u8]) -> bool {
        // SAFETY: the read has ended, so the room is ours.
        let payload = unsafe { self.rooms[index].as_ref() };
        let whole = Head::parse(head).and_then(|head| head.check_payload(payload));
        self.filled += usize::from(whole.is_ok());
        whole.is_ok()
    }

    fn failed(&mut self, _index: usize) {}

    fn frame(&mut self, _index: usize, _frame: &[u8]) -> bool {
        false
    }
}

struct Settings {
    directory: PathBuf,
    json: Option<PathBuf>,
    mib: usize,
    rounds: usize,
    records: usize,
}

fn settings() -> Settings {
    let mut found = Settings {
        directory: std::env::temp_dir(),
        json: None,
        mib: 512,
        rounds: 5,
        records: 100_000,
    };
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    while let Some(word) = words.next() {
        let value = words
            .next()
            .unwrap_or_else(|| panic!("{word} needs a value"));
        let number = || {
            let number = value.parse();
            number.unwrap_or_else(|_| panic!("{word} {value}: a number is needed"))
        };
        match word.as_str() {
            "--directory" => found.directory = value.into(),
            "--json" => found.json = Some(value.into()),
            "--mib" => found.mib = number(),
            "--rounds" => found.rounds = number(),
            "--records" => found.records = number(),
            _ => panic!("{word} is no flag: --directory, --json, --mib, --rounds, --records"),
        }
    }
    found
}

/// MiB per second of fio over a file of `mib` MiB: the better of its two ways, one after the other and 32 in a batch.
fn fio(directory: &Path, mode: &str, mib: usize) -> Option<f64> {
    let batch = [
        "--iodepth_batch_submit=32",
        "--iodepth_batch_complete_min=32",
    ];
    let both = [&[][..], &batch[..]].map(|more| fio_job(directory, mode, mib, more));
    both.into_iter().flatten().max_by(f64::total_cmp)
}

fn fio_job(directory: &Path, mode: &str, mib: usize, more: &[&str]) -> Option<f64> {
    let output = Command::new("fio")
        .args([
            "--name=bench",
            "--bs=1M",
            "--direct=1",
            "--ioengine=io_uring",
            "--iodepth=32",
        ])
        .args(["--output-format=json", "--end_fsync=1", "--fallocate=posix"])
        .args(more)
        .args([format!("--rw={mode}"), format!("--size={mib}M")])
        .arg(format!("--directory={}", directory.display()))
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let side = if mode.contains("read") {
        "\"read\" : {"
    } else {
        "\"write\" : {"
    };
    let (_, behind) = text.split_once(side)?;
    let (_, behind) = behind.split_once("\"bw_bytes\" :")?;
    let bytes: f64 = behind.split(',').next()?.trim().parse().ok()?;
    Some(bytes / MIB as f64)
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn shuffled(count: usize) -> Vec<usize> {
    let (mut order, mut random) = ((0..count).collect::<Vec<_>>(), 88_172_645_463_325_252u64);
    for at in (1..count).rev() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        order.swap(at, (random % (at as u64 + 1)) as usize);
    }
    order
}

fn main() {
    let settings = settings();
    let root = settings
        .directory
        .join(format!("blendstore-bench-{}", std::process::id()));
    std::fs::create_dir_all(&root).expect("a directory to write to");
    let memory = Store::open(Options {
        capacity_bytes: 2 * BATCH * MIB,
        ..Options::default()
    })
    .expect("memory");
    let (start, _) = memory.arena();
    let room = |index: usize| {
        let start = NonNull::new(start.cast_mut()).expect("mapped");
        // SAFETY: within the arena of two batches, which nothing else uses.
        NonNull::slice_from_raw_parts(unsafe { start.add(index * MIB) }, MIB)
    };
    let mut payloads: Vec<&mut [u8]> = (BATCH..2 * BATCH)
        // SAFETY: rooms of their own, not lent to any read.
        .map(|index| unsafe { room(index).as_mut() })
        .collect();
    let mut random = 1u64;
    for word in payloads
        .iter_mut()
        .flat_map(|payload| payload.chunks_mut(8))
    {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        word.copy_from_slice(&random.to_le_bytes());
    }
    let records = Records::new(settings.mib, 256);
    let order = shuffled(settings.mib);
    let (mut writes, mut reads, mut fio_writes, mut fio_reads) = (vec![], vec![], vec![], vec![]);
    let mut how = String::new();
    for round in 0..settings.rounds {
        let directory = root.join(format!("round-{round}"));
        let options = DiskOptions::new(&directory, 4 * (settings.mib * MIB) as u64);
        let disk = Disk::open(&options).expect("a disk tier");
        how = disk.describe();
        let begin = Instant::now();
        records.put(&disk, &mut payloads);
        disk.close();
        writes.push(settings.mib as f64 / begin.elapsed().as_secs_f64());
        drop(disk);
        fio_writes.extend(fio(&root, "write", settings.mib));
        let disk = Disk::open(&options).expect("a disk tier");
        let begin = Instant::now();
        for batch in order.chunks(BATCH) {
            let keys: Vec<Key> = batch.iter().map(|&number| records.keys[number]).collect();
            let mut rooms = Rooms {
                rooms: (0..BATCH).map(room).collect(),
                filled: 0,
            };
            disk.get(&keys, &mut rooms);
            assert_eq!(rooms.filled, keys.len(), "all are whole");
        }
        reads.push(settings.mib as f64 / begin.elapsed().as_secs_f64());
        drop(disk);
        fio_reads.extend(fio(&root, "randread", settings.mib));
        std::fs::remove_dir_all(&directory).expect("ours");
    }
    // Smallest records, so that their number alone counts.
    let directory = root.join("many");
    let options = DiskOptions::new(&directory, settings.records as u64 * 9000 + (1 << 30));
    let many = Records::new(settings.records, 2);
    let mut small: Vec<&mut [u8]> = payloads
        .iter_mut()
        .map(|payload| &mut payload[..128])
        .collect();
    many.put(&Disk::open(&options).expect("a disk tier"), &mut small);
    let mut starts = vec![];
    for _ in 0..settings.rounds {
        let begin = Instant::now();
        let disk = Disk::open(&options).expect("a disk tier");
        starts.push(begin.elapsed().as_secs_f64());
        assert_eq!(disk.stats().records as usize, settings.records);
    }
    std::fs::remove_dir_all(&root).expect("ours");

    let (rounds, mib) = (settings.rounds, settings.mib);
    println!("{how}; medians of {rounds} rounds of {mib} MiB");
    let mut rows = vec![];
    for (what, ours, theirs) in [
        ("write", &writes, &fio_writes),
        ("random read", &reads, &fio_reads),
    ] {
        let speed = median(ours);
        if theirs.len() < ours.len() {
            println!("{what}: {speed:.0} MiB/s; fio is not installed");
            rows.push(format!("{{\"what\": \"{what}\", \"mib_s\": {speed:.1}}}"));
            continue;
        }
        let ratios: Vec<f64> = ours
            .iter()
            .zip(theirs)
            .map(|(ours, theirs)| ours / theirs)
            .collect();
        let (fio, ratio) = (median(theirs), median(&ratios));
        let percent = ratio * 100.0;
        println!(
            "{what}: {speed:.0} MiB/s, fio {fio:.0} MiB/s, turn by turn {percent:.0} % of fio (goal: 85 %)"
        );
        rows.push(format!(
            "{{\"what\": \"{what}\", \"mib_s\": {speed:.1}, \"fio_mib_s\": {fio:.1}, \"of_fio\": {ratio:.3}}}"
        ));
    }
    let start = median(&starts);
    let records = settings.records;
    println!("start over {records} records: {start:.3} s (goal: 2 s for 100,000)");
    rows.push(format!(
        "{{\"what\": \"start\", \"records\": {records}, \"seconds\": {start:.4}}}"
    ));
    if let Some(file) = settings.json {
        std::fs::write(file, format!("[{}]\n", rows.join(",\n "))).expect("a file to write to");
    }
}
