//! Lookup + pin + unpin of resident keys: the store beside quick_cache, moka and foyer's memory cache.
//!
//! `cargo run --release --manifest-path benches/compare/Cargo.toml [-- THREADS… [--json FILE]]` (default: 1 2). Everybody
//! holds the same 65,536 random 32-byte keys and is asked for them by Zipf's law, 128 at a time as a long prompt asks; all
//! answers of a batch are kept (pinned) until the batch is over. All hash with the first eight bytes of the key. Rounds
//! alternate between the caches, and the median is printed: nanoseconds a key by the clock and by CPU time, which a busy
//! machine disturbs less.

use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use blendstore_core::{Key, Namespace, Options, PolicyKind, Request, Store};

const KEYS: usize = 1 << 16;
const BATCH: usize = 128;
const BATCHES: usize = 4096;
const ROUNDS: usize = 15;

/// Keys are hashes already.
#[derive(Clone, Default)]
struct First(u64);

impl Hasher for First {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    // The length of an array is hashed too.
    fn write_usize(&mut self, _: usize) {}
}

type Spread = BuildHasherDefault<First>;
type Value = Arc<u64>;

/// Looks all keys of a batch up, keeps the answers until the end, and says how many there were.
type Lookup = Box<dyn Fn(&[Key]) -> usize + Send + Sync>;

fn store(policy: PolicyKind) -> (Vec<Key>, Lookup) {
    let store = Store::open(Options {
        capacity_bytes: KEYS << 10,
        chunk_size: 1,
        policy,
        max_chunks: Some(KEYS),
        ..Options::default()
    })
    .expect("valid options");
    let namespace = Namespace::new(&[("model", b"compare")], b"salt");
    let mut keys = Vec::with_capacity(KEYS);
    for token in 0..KEYS as u32 {
        let reservation = store
            .reserve(&namespace, &[token], &Request::default())
            .expect("a valid request");
        keys.push(reservation.keys()[0]);
        assert_eq!(reservation.commit(None), Ok(1));
    }
    let lookup = move |keys: &[Key]| store.lookup(keys).hits().iter().map(|&hit| hit as usize).sum();
    (keys, Box::new(lookup))
}

fn quick_cache(keys: &[Key]) -> Lookup {
    let cache: quick_cache::sync::Cache<Key, Value, quick_cache::UnitWeighter, Spread> =
        quick_cache::sync::Cache::with(
            2 * KEYS,
            2 * KEYS as u64,
            quick_cache::UnitWeighter,
            Spread::default(),
            quick_cache::sync::DefaultLifecycle::default(),
        );
    for (value, key) in keys.iter().enumerate() {
        cache.insert(*key, Arc::new(value as u64));
    }
    Box::new(move |keys| {
        let kept: [Option<Value>; BATCH] = std::array::from_fn(|at| cache.get(&keys[at]));
        std::hint::black_box(&kept).iter().flatten().count()
    })
}

fn moka(keys: &[Key]) -> Lookup {
    let cache: moka::sync::Cache<Key, Value, Spread> = moka::sync::Cache::builder()
        .max_capacity(2 * KEYS as u64)
        .build_with_hasher(Spread::default());
    for (value, key) in keys.iter().enumerate() {
        cache.insert(*key, Arc::new(value as u64));
    }
    cache.run_pending_tasks();
    Box::new(move |keys| {
        let kept: [Option<Value>; BATCH] = std::array::from_fn(|at| cache.get(&keys[at]));
        std::hint::black_box(&kept).iter().flatten().count()
    })
}

fn foyer(keys: &[Key]) -> Lookup {
    let cache: foyer_memory::Cache<Key, u64, Spread> = foyer_memory::CacheBuilder::new(2 * KEYS)
        .with_shards(64)
        .with_eviction_config(foyer_memory::S3FifoConfig::default())
        .with_hash_builder(Spread::default())
        .build();
    for (value, key) in keys.iter().enumerate() {
        cache.insert(*key, value as u64);
    }
    Box::new(move |keys| {
        let kept: [Option<_>; BATCH] = std::array::from_fn(|at| cache.get(&keys[at]));
        std::hint::black_box(&kept).iter().flatten().count()
    })
}

/// Ranks by Zipf's law with exponent 1, by inversion; the same for everybody.
fn batches(keys: &[Key], seed: u64) -> Vec<Key> {
    let mut sums: Vec<f64> = (1..=keys.len())
        .scan(0.0, |sum, rank| {
            *sum += 1.0 / rank as f64;
            Some(*sum)
        })
        .collect();
    let total = *sums.last().expect("keys");
    sums.iter_mut().for_each(|sum| *sum /= total);
    let mut state = seed;
    let draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let draw = (state >> 11) as f64 / (1_u64 << 53) as f64;
        keys[sums.partition_point(|&sum| sum < draw).min(keys.len() - 1)]
    };
    std::iter::repeat_with(draw).take(BATCH * BATCHES).collect()
}

/// CPU time of this thread in nanoseconds.
fn cpu_time() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to the given struct only.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// (nanoseconds a key by the clock, by CPU time) of one thread while `threads` do the same.
fn round(lookup: &Lookup, asked: &[Vec<Key>]) -> (f64, f64) {
    let start = Barrier::new(asked.len());
    let times: Vec<(u64, u64)> = std::thread::scope(|scope| {
        let run = |keys: &[Key]| {
            start.wait();
            let (clock, cpu) = (Instant::now(), cpu_time());
            let hits: usize = keys.chunks_exact(BATCH).map(lookup).sum();
            assert_eq!(hits, keys.len(), "all keys are resident");
            (clock.elapsed().as_nanos() as u64, cpu_time() - cpu)
        };
        let threads: Vec<_> = asked
            .iter()
            .map(|keys| scope.spawn(move || run(keys)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    });
    let keys = (BATCH * BATCHES) as f64;
    let clock = times.iter().map(|time| time.0).max().unwrap_or(0) as f64 / keys;
    let cpu = times.iter().map(|time| time.1).sum::<u64>() as f64 / keys / asked.len() as f64;
    (clock, cpu)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let json = arguments.iter().position(|word| word == "--json").map(|at| {
        let file = arguments.get(at + 1).expect("--json FILE").clone();
        arguments.drain(at..at + 2);
        file
    });
    let mut threads: Vec<usize> = arguments
        .iter()
        .map(|word| word.parse().unwrap_or_else(|_| panic!("{word}: give numbers of threads")))
        .collect();
    if threads.is_empty() {
        threads = vec![1, 2];
    }
    let (keys, adaptive) = store(PolicyKind::Adaptive);
    let caches: [(&str, Lookup); 5] = [
        ("blendstore, adaptive", adaptive),
        ("blendstore, s3-fifo", store(PolicyKind::S3Fifo).1),
        ("quick_cache", quick_cache(&keys)),
        ("moka", moka(&keys)),
        ("foyer-memory, s3-fifo", foyer(&keys)),
    ];
    let mut rows = Vec::new();
    println!("{:24}{:>8}{:>14}{:>12}{:>14}", "cache", "threads", "ns/key, clock", "ns/key, CPU", "M keys/s, all");
    for &count in &threads {
        let asked: Vec<Vec<Key>> = (0..count).map(|n| batches(&keys, 0x9e37_79b9 + n as u64)).collect();
        let mut times: [(Vec<f64>, Vec<f64>); 5] = Default::default();
        for _ in 0..ROUNDS {
            for ((_, lookup), times) in caches.iter().zip(&mut times) {
                let (clock, cpu) = round(lookup, &asked);
                times.0.push(clock);
                times.1.push(cpu);
            }
        }
        for ((name, _), (clock, cpu)) in caches.iter().zip(times) {
            let (clock, cpu) = (median(clock), median(cpu));
            let all = count as f64 * 1e3 / clock;
            println!("{name:24}{count:>8}{clock:>14.1}{cpu:>12.1}{all:>14.1}");
            rows.push(format!(
                "{{\"cache\": \"{name}\", \"threads\": {count}, \"ns_per_key\": {clock:.2}, \"cpu_ns_per_key\": {cpu:.2}}}"
            ));
        }
    }
    if let Some(file) = json {
        let text = format!("{{\"rows\": [\n  {}\n]}}\n", rows.join(",\n  "));
        std::fs::write(&file, text).unwrap_or_else(|error| panic!("{file}: {error}"));
    }
}
