//! Records through Redis on this machine, beside `redis-benchmark` with values of the same size on the same server.
//!
//! Prints a table: records stored and loaded in a second by the tier, with 1 and 2 threads, `redis-benchmark`'s best of several
//! numbers of clients, and the ratio. Each number is the median of rounds that take turns, so that other work on the machine
//! slows both alike. Before it is measured each fills the emptied server, so that neither pays for memory that the server
//! has not touched before. `--json FILE` writes the rows. What is loaded is proved as the store proves it: lengths, both
//! checksums.

#[path = "../tests/remote/records.rs"]
#[allow(dead_code)]
mod records;
#[path = "../tests/remote/servers.rs"]
#[allow(dead_code)]
mod servers;

use std::process::Command;
use std::time::{Duration, Instant};

use blendstore_codec::Head;
use blendstore_tiers::{Key, Shape, Sink, Tier, remote};

use records::{Record, keys, tenant};
use servers::{Server, program};

const ROUNDS: usize = 5;
/// Bytes moved in one round of one row.
const ROUND: usize = 768 << 20;
/// Records that take turns: more than any cache of the processor holds.
const LIVE: usize = 192 << 20;

/// One room that is used again and again, as the store's arena is.
struct Room {
    room: Vec<u8>,
    accepted: usize,
}

// SAFETY: the room stays as long as the sink, and keys are read one after the other.
unsafe impl Sink for Room {
    fn room(&mut self, _: usize, shape: &Shape) -> Option<std::ptr::NonNull<[u8]>> {
        let length = shape.ntokens * shape.bytes_per_token;
        self.room.get_mut(..length).map(std::ptr::NonNull::from)
    }

    fn filled(&mut self, _: usize, head: &[u8]) -> bool {
        let head = Head::parse(head).expect("our own records");
        let right = head
            .check_payload(&self.room[..head.payload_len as usize])
            .is_ok();
        self.accepted += usize::from(right);
        right
    }

    fn failed(&mut self, _: usize) {}

    fn frame(&mut self, _: usize, _: &[u8]) -> bool {
        false
    }
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

/// Records in a second, `count` of them on each of `threads`.
fn rate(threads: usize, count: usize, work: impl Fn(usize, usize) + Sync) -> f64 {
    let since = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let work = &work;
            scope.spawn(move || work(thread, count));
        }
    });
    (threads * count) as f64 / since.elapsed().as_secs_f64()
}

fn ours(
    tier: &dyn Tier,
    records: &[Record],
    size: usize,
    threads: usize,
    count: usize,
) -> (f64, f64) {
    // In batches, as the store writes and loads.
    let batch = (records.len() / threads).min(8);
    let turn = |thread: usize, at: usize| {
        (thread * records.len() / threads + at) % (records.len() - batch + 1)
    };
    // Parsed beforehand: a frame on its way down has just been made.
    let frames: Vec<_> = records.iter().map(Record::frame).collect();
    let stored = rate(threads, count.div_ceil(batch), |thread, count| {
        for at in 0..count {
            let from = turn(thread, at * batch);
            assert_eq!(tier.put(&frames[from..from + batch]), batch);
        }
    });
    let all: Vec<Key> = keys(records);
    let loaded = rate(threads, count.div_ceil(batch), |thread, count| {
        let mut sink = Room {
            room: vec![0; size + 64],
            accepted: 0,
        };
        for at in 0..count {
            let from = turn(thread, at * batch);
            tier.get(&all[from..from + batch], &mut sink);
        }
        assert_eq!(sink.accepted, count * batch);
    });
    (stored * batch as f64, loaded * batch as f64)
}

/// Requests in a second of `redis-benchmark`, `SET` and `GET`.
fn theirs(port: u16, size: usize, clients: usize, count: usize) -> [f64; 2] {
    ["set", "get"].map(|test| {
        let live = (LIVE / size).max(1);
        let output = Command::new(program("redis-benchmark"))
            .args([
                "-p",
                &port.to_string(),
                "-t",
                test,
                "-d",
                &size.to_string(),
                "-c",
                &clients.to_string(),
            ])
            .args(["-n", &count.to_string(), "-r", &live.to_string(), "--csv"])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let row = text.lines().last().unwrap_or_default();
        row.split('"')
            .nth(3)
            .and_then(|number| number.parse().ok())
            .unwrap_or_else(|| panic!("{text}"))
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let json = arguments
        .iter()
        .position(|text| text == "--json")
        .map(|at| arguments[at + 1].clone());
    let server = Server::start("redis-server", &[]);
    let tier = remote::open(
        &format!("redis://127.0.0.1:{}", server.port),
        Duration::from_secs(30),
    )
    .unwrap();
    let mut rows = Vec::new();
    println!(
        "| value | what | threads | blendstore, MB/s | redis-benchmark, MB/s (clients) | ratio |"
    );
    println!("|---|---|---|---|---|---|");
    // A round number, and 256 tokens of SmolLM2-135M in bf16.
    for (name, size) in [("1 MiB", 1 << 20), ("5.6 MiB", 256 * 23_040)] {
        let count = ROUND / size;
        let records = records::records(&tenant("bench"), (LIVE / size) as u32, size);
        for threads in [1, 2] {
            let mut own = [Vec::new(), Vec::new()];
            let clients = [1, 2, 8, 50];
            let mut other = [const { [const { Vec::new() }; 2] }; 4];
            for _ in 0..ROUNDS {
                server.say(&["FLUSHALL"]);
                ours(&*tier, &records, size, 1, records.len());
                let (stored, loaded) = ours(&*tier, &records, size, threads, count / threads);
                own[0].push(stored);
                own[1].push(loaded);
                server.say(&["FLUSHALL"]);
                theirs(server.port, size, 1, records.len());
                for (other, clients) in other.iter_mut().zip(clients) {
                    for (other, rate) in
                        other
                            .iter_mut()
                            .zip(theirs(server.port, size, clients, count))
                    {
                        other.push(rate);
                    }
                }
            }
            for (at, what) in ["store", "load"].into_iter().enumerate() {
                let best = |(index, other): (usize, &[Vec<f64>; 2])| {
                    (median(other[at].clone()), clients[index])
                };
                let (most, by) = other
                    .iter()
                    .enumerate()
                    .map(best)
                    .max_by(|a, b| a.0.total_cmp(&b.0))
                    .unwrap();
                let scale = size as f64 / 1e6;
                let (own, most) = (median(own[at].clone()) * scale, most * scale);
                println!(
                    "| {name} | {what} | {threads} | {own:.0} | {most:.0} ({by}) | {:.2} |",
                    own / most
                );
                rows.push(format!(
                    r#"{{"value_bytes": {size}, "what": "{what}", "threads": {threads}, "blendstore_mb_s": {own:.1}, "redis_benchmark_mb_s": {most:.1}, "clients": {by}, "ratio": {:.3}}}"#,
                    own / most
                ));
            }
        }
        assert!(tier.stats().errors.is_empty(), "{:?}", tier.stats());
    }
    if let Some(file) = json {
        std::fs::write(file, format!("[\n  {}\n]\n", rows.join(",\n  "))).unwrap();
    }
}
