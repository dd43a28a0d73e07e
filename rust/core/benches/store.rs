//! Benches of the core against its bars: keys and lookups of a long prompt, records against memcpy, two readers, metadata.
//!
//! `cargo bench -p blendstore-core` runs all; `cargo bench -p blendstore-core -- lookup` some. What is not a time of one call
//! (scaling, bytes a chunk) is printed as a line of its own.

use std::hint::black_box;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use blendstore_core::eviction::PolicyKind;
use blendstore_core::index::{ChunkIndex, SlotTable};
use blendstore_core::{Key, Namespace, Options, Request, Store};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

const CHUNK: usize = 256;
const MIB: usize = 1 << 20;

fn namespace() -> Namespace {
    Namespace::new(&[("model", b"bench")], b"salt")
}

/// Tokens of document `n`, different from every other's.
fn document(n: u32, ntokens: usize) -> Vec<u32> {
    (0..ntokens as u32)
        .map(|i| i.wrapping_mul(2_654_435_761) ^ n.wrapping_mul(40_503))
        .collect()
}

/// Stores `documents` documents of `chunks` chunks with `bytes_per_token`.
fn fill(store: &Store, documents: u32, chunks: usize, bytes_per_token: usize) {
    let ns = namespace();
    for n in 0..documents {
        let tokens = document(n, chunks * CHUNK);
        let reservation = store
            .reserve(
                &ns,
                &tokens,
                &Request {
                    bytes_per_token,
                    ..Request::default()
                },
            )
            .expect("a valid request");
        assert_eq!(reservation.commit(None), Ok(chunks));
    }
}

/// A prompt of 128 chunks of 256 tokens, all hits: keys alone, then with the lookup, in a small and a large store.
fn lookup(c: &mut Criterion) {
    let ns = namespace();
    let tokens = document(3, 128 * CHUNK);
    let bounds = [(0, tokens.len())];
    let mut group = c.benchmark_group("lookup 128x256");
    group.bench_function("keys", |b| {
        b.iter(|| ns.segment_keys(black_box(&tokens), &bounds, CHUNK, false))
    });
    let contents = |chunk: &[u32]| ns.content_id(chunk);
    group.bench_function("content ids one by one", |b| {
        b.iter(|| tokens.chunks(CHUNK).map(contents).collect::<Vec<_>>());
    });
    for (name, documents) in [("small store", 8), ("100k chunks", 800)] {
        let options = Options {
            capacity_bytes: documents as usize * 128 * 2048,
            max_chunks: Some(documents as usize * 128),
            ..Options::default()
        };
        let store = Store::open(options).expect("a store");
        fill(&store, documents, 128, 1);
        let keys = ns
            .segment_keys(&tokens, &bounds, CHUNK, false)
            .expect("valid bounds");
        assert_eq!(store.lookup(&keys).hits(), [1; 128]);
        group.bench_function(format!("lookup by key, {name}"), |b| {
            b.iter(|| store.lookup(black_box(&keys)))
        });
        let mut n = 0;
        group.bench_function(
            format!("keys and lookup, another document each time, {name}"),
            |b| {
                b.iter_batched(
                    || {
                        n = (n + 7) % documents;
                        document(n, 128 * CHUNK)
                    },
                    |tokens| store.lookup_segments(&ns, &tokens, &bounds, false),
                    criterion::BatchSize::LargeInput,
                );
            },
        );
    }
    // The same prompt as one document and as sixteen: chains of several documents advance side by side.
    let store = Store::open(Options::default()).expect("a store");
    fill(&store, 8, 128, 1);
    let many: Vec<_> = (0..16)
        .map(|n| (n * 8 * CHUNK, (n + 1) * 8 * CHUNK))
        .collect();
    for &(start, stop) in &many {
        let reservation = store
            .reserve(&ns, &tokens[start..stop], &Request::default())
            .expect("a valid request");
        reservation.commit(None).expect("no mask");
    }
    for (name, bounds) in [("1 document", bounds.as_slice()), ("16 documents", &many)] {
        let hits = store
            .lookup_segments(&ns, &tokens, bounds, false)
            .expect("valid bounds")
            .hits()
            .to_vec();
        assert_eq!(hits, [1; 128]);
        group.bench_function(format!("keys and lookup, {name}"), |b| {
            b.iter(|| store.lookup_segments(&ns, black_box(&tokens), bounds, false));
        });
    }
    group.finish();
}

/// 1 MiB records in and out, beside memcpy over as many buffers. The arena has been written before, as in steady state.
fn records(c: &mut Criterion) {
    const RECORDS: usize = 64;
    const BYTES_PER_TOKEN: usize = MIB / CHUNK;
    let ns = namespace();
    let source: Vec<Vec<u8>> = (0..RECORDS).map(|n| vec![n as u8; MIB]).collect();
    let mut target: Vec<Vec<u8>> = (0..RECORDS).map(|_| vec![1; MIB]).collect();
    let documents: Vec<Vec<u32>> = (0..4 * RECORDS as u32)
        .map(|n| document(n, CHUNK))
        .collect();
    let store = Store::open(Options {
        capacity_bytes: RECORDS * (MIB + 2048),
        policy: PolicyKind::Fifo,
        max_chunks: Some(2 * RECORDS),
        ..Options::default()
    })
    .expect("a store");
    let put = |n: usize| {
        let request = Request {
            bytes_per_token: BYTES_PER_TOKEN,
            ..Request::default()
        };
        let reservation = store
            .reserve(&ns, &documents[n % documents.len()], &request)
            .expect("a valid request");
        assert_eq!(reservation.wanted(), [1]);
        assert!(
            reservation
                .payload(0)
                .expect("wanted")
                .copy_from(&source[n % RECORDS])
        );
        assert_eq!(reservation.commit(None), Ok(1));
    };
    (0..2 * RECORDS).for_each(put);
    let mut group = c.benchmark_group("records 1 MiB");
    group.throughput(Throughput::Bytes(MIB as u64));
    let mut n = 0;
    group.bench_function("memcpy", |b| {
        b.iter(|| {
            n += 1;
            target[n % RECORDS].copy_from_slice(&source[n * 7 % RECORDS]);
            black_box(&target);
        });
    });
    let mut n = 2 * RECORDS;
    group.bench_function("reserve + commit", |b| {
        b.iter(|| {
            put(n);
            n += 1;
        });
    });
    let resident: Vec<Key> = documents
        .iter()
        .map(|tokens| ns.chain_keys(tokens, CHUNK, &blendstore_core::key::SEGMENT_ROOT)[0])
        .collect();
    let held: Vec<Key> = resident
        .iter()
        .filter(|key| store.contains(&[**key]) == [1])
        .copied()
        .collect();
    group.bench_function("lookup + read", |b| {
        b.iter(|| {
            n += 1;
            let lease = store.lookup(&held[n * 7 % held.len()..][..1]);
            lease.read_into(0, &mut target[n % RECORDS]).expect("a hit");
            black_box(&target);
        });
    });
    group.finish();
}

/// Calls of `work(thread, round)` a second by that many threads together, over half a second.
fn rate(threads: usize, work: impl Fn(usize, usize) + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    let each = |thread: usize| {
        barrier.wait();
        let (start, mut rounds) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_millis(500) {
            (0..16).for_each(|n| work(thread, rounds + n));
            rounds += 16;
        }
        rounds as f64 / start.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let each = &each;
        let workers: Vec<_> = (0..threads)
            .map(|thread| scope.spawn(move || each(thread)))
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().expect("no panic"))
            .sum()
    })
}

/// How much more two threads do than one: median of seven pairs.
fn print_scaling(name: &str, work: impl Fn(usize, usize) + Sync) {
    let mut ratios: Vec<f64> = (0..7)
        .map(|_| rate(1, &work))
        .map(|one| rate(2, &work) / one)
        .collect();
    ratios.sort_by(f64::total_cmp);
    println!(
        "two threads do {:.2} x ({:.2} to {:.2}) of one: {name}",
        ratios[3], ratios[0], ratios[6]
    );
}

/// Readers of different chunks, beside what two threads reach here without sharing anything at all: where the two
/// processors are threads of one core, that is far below 2.
fn scaling(_: &mut Criterion) {
    let ns = namespace();
    let store = Store::open(Options {
        capacity_bytes: 1 << 30,
        ..Options::default()
    })
    .expect("a store");
    fill(&store, 64, 16, 1);
    let keys: Vec<Vec<Key>> = (0..64)
        .map(|n| {
            ns.segment_keys(&document(n, 16 * CHUNK), &[(0, 16 * CHUNK)], CHUNK, false)
                .expect("valid bounds")
        })
        .collect();
    print_scaling("lookup and release of 16 chunks", |thread, n| {
        black_box(store.lookup(&keys[n * 2 % 64 + thread]));
    });
    let words: Vec<[AtomicU64; 32]> = (0..64).map(|_| [const { AtomicU64::new(0) }; 32]).collect();
    print_scaling("compare-and-swaps on lines of one's own", |thread, n| {
        let word = &words[n * 2 % 64 + thread][16];
        for _ in 0..64 {
            let old = word.load(Relaxed);
            let _ = black_box(word.compare_exchange(old, old + 1, AcqRel, Acquire));
        }
    });
    print_scaling("hashing of one's own 16 KiB", |thread, n| {
        let bytes = [(thread + n) as u8; 16 << 10];
        black_box(blake3::hash(&bytes));
    });

    let store = Store::open(Options {
        capacity_bytes: 1 << 28,
        ..Options::default()
    })
    .expect("a store");
    fill(&store, 64, 1, MIB / CHUNK);
    let keys: Vec<Key> = (0..64)
        .map(|n| {
            ns.chain_keys(
                &document(n, CHUNK),
                CHUNK,
                &blendstore_core::key::SEGMENT_ROOT,
            )[0]
        })
        .collect();
    let targets: Vec<Mutex<Vec<u8>>> = (0..64).map(|_| Mutex::new(vec![1; MIB])).collect();
    print_scaling("lookup and read of 1 MiB", |thread, n| {
        let lease = store.lookup(&keys[n * 2 % 64 + thread..][..1]);
        lease
            .read_into(
                0,
                &mut targets[n * 2 % 64 + thread].lock().expect("no panic"),
            )
            .expect("a hit");
    });
    let sources: Vec<Vec<u8>> = (0..64).map(|n| vec![n; MIB]).collect();
    print_scaling("memcpy of 1 MiB", |thread, n| {
        let at = n * 2 % 64 + thread;
        targets[at]
            .lock()
            .expect("no panic")
            .copy_from_slice(&sources[at]);
    });
}

/// Bytes of metadata and time of an eviction with few and with a million chunks.
fn million(_: &mut Criterion) {
    let ns = namespace();
    for policy in PolicyKind::ALL {
        let mut line = format!("{policy}:");
        for count in [10_000usize, 1_000_000] {
            let options = Options {
                capacity_bytes: (count + 1) * 512,
                chunk_size: 16,
                policy,
                max_chunks: Some(count),
                events_capacity: 0,
                ..Options::default()
            };
            let store = Store::open(options).expect("a store");
            let put = |n: usize| {
                let tokens = document(n as u32, 4 * 16);
                let reservation = store
                    .reserve(&ns, &tokens, &Request::default())
                    .expect("a valid request");
                assert_eq!(reservation.commit(None), Ok(4));
            };
            (0..count / 4).for_each(put);
            let stats = store.stats();
            assert_eq!((stats.chunks, stats.evicted), (count as u64, 0));
            let each = stats.metadata_bytes as f64 / count as f64;
            let rounds = 5_000;
            let start = Instant::now();
            (count / 4..count / 4 + rounds).for_each(put);
            let put_time = start.elapsed().as_secs_f64() * 1e9 / (4 * rounds) as f64;
            let evicted = store.stats().evicted;
            assert_eq!(evicted, 4 * rounds as u64);
            line += &format!(
                " {count} chunks: {:.0} B each beyond the key, reserve + commit + evict {put_time:.0} ns a chunk;",
                each - 32.0
            );
        }
        println!("{line}");
    }
}

/// The slot table against papaya, a million keys, hits in random order.
fn index(c: &mut Criterion) {
    const COUNT: u32 = 1_000_000;
    let keys: Vec<Key> = (0..COUNT)
        .map(|n| *blake3::hash(&n.to_le_bytes()).as_bytes())
        .collect();
    let table = SlotTable::new(COUNT as usize).expect("memory");
    let papaya = papaya::HashMap::builder().capacity(COUNT as usize).build();
    for (key, slot) in keys.iter().zip(0..) {
        assert!(table.insert(key, slot));
        papaya.pin().insert(*key, slot);
    }
    let mut group = c.benchmark_group("index, 128 keys of 1M");
    let mut from = 0;
    let mut batch = move || {
        from = (from + 7919 * 128) % (COUNT as usize - 128);
        from
    };
    group.bench_function("slot table", |b| {
        b.iter(|| {
            let from = batch();
            keys[from..from + 128]
                .iter()
                .filter_map(|key| table.find(key, |_| true))
                .map(u64::from)
                .sum::<u64>()
        });
    });
    group.bench_function("papaya", |b| {
        b.iter(|| {
            let from = batch();
            let map = papaya.pin();
            keys[from..from + 128]
                .iter()
                .filter_map(|key| map.get(key))
                .map(|slot| u64::from(*slot))
                .sum::<u64>()
        });
    });
    group.finish();
}

fn config() -> Criterion {
    Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
}

criterion_group! { name = timed; config = config(); targets = lookup, records, index }
criterion_group! { name = printed; config = config(); targets = scaling, million }
criterion_main!(timed, printed);
