//! The store as a whole: cases from the field, chains, and random histories against a plain map.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;
use crate::key::{HEAD_ROOT, NO_CONTEXT, SEGMENT_ROOT};

mod model;

/// Payload of a record: 64 bytes a token, in chunks of 8 tokens.
const BYTES_PER_TOKEN: usize = 64;
const CHUNK: usize = 8;
/// What such a record takes of the arena.
const RECORD: usize = 1024;

fn options(records: usize) -> Options {
    Options {
        capacity_bytes: records * RECORD,
        chunk_size: CHUNK,
        reserve_wait: Duration::from_millis(5),
        ..Options::default()
    }
}

fn store(records: usize) -> Store {
    Store::open(options(records)).expect("a small store")
}

fn tenant(name: &str) -> Namespace {
    Namespace::new(&[("model", b"weights")], name.as_bytes())
}

fn document(n: u32, ntokens: usize) -> Vec<u32> {
    (0..ntokens as u32).map(|row| n * 1000 + row).collect()
}

fn request() -> Request<'static> {
    Request {
        bytes_per_token: BYTES_PER_TOKEN,
        ..Request::default()
    }
}

/// Stores a segment whose payload is `fill`; returns how many chunks were published.
fn put(store: &Store, ns: &Namespace, tokens: &[u32], fill: u8, request: &Request<'_>) -> usize {
    let reservation = store.reserve(ns, tokens, request).expect("a valid request");
    for index in (0..reservation.len()).filter(|&index| reservation.wanted()[index] == 1) {
        let view = reservation.payload(index).expect("wanted");
        assert!(view.copy_from(&vec![fill; view.len()]));
    }
    reservation.commit(None).expect("no mask")
}

fn keys(ns: &Namespace, tokens: &[u32]) -> Vec<Key> {
    ns.chain_keys(tokens, CHUNK, &SEGMENT_ROOT)
}

/// Everything that can be pinned is not, and nothing is half done.
fn assert_idle(store: &Store) {
    let stats = store.stats();
    assert_eq!(
        (stats.bytes_pinned, stats.leases, stats.reservations),
        (0, 0, 0),
        "{stats:?}"
    );
}

/// A record comes back as it was stored: bytes, tokens, scores and all it says about itself.
#[test]
fn a_record_says_what_was_stored() {
    let store = store(16);
    let ns = tenant("a");
    let tokens = document(1, 20);
    let contexts = ns
        .context_digests(&document(9, 100), &[10, 18, 26])
        .expect("sorted");
    let behind = [ns.content_id(&[1]), ns.content_id(&[2])];
    let parent = ns.content_id(&[3]);
    let request = Request {
        source_position: 10,
        provenance: 2,
        rank: 7,
        contexts: Some(&contexts),
        behind: &behind,
        behind_tokens: 10,
        parent: Some(parent),
        parent_offset: 40,
        with_scores: true,
        ..request()
    };
    let reservation = store
        .reserve(&ns, &tokens, &request)
        .expect("a valid request");
    assert_eq!(reservation.bounds(2), Ok(16..20));
    for index in 0..3 {
        let rows = reservation.bounds(index).expect("in range").len();
        reservation
            .payload(index)
            .expect("wanted")
            .copy_from(&vec![index as u8 + 1; rows * BYTES_PER_TOKEN]);
        reservation
            .set_scores(index, &vec![index as f32 + 0.5; rows])
            .expect("reserved with scores");
    }
    assert_eq!(reservation.commit(None), Ok(3));
    let lease = store.lookup(reservation.keys());
    assert_eq!(
        (lease.hits(), lease.nbytes()),
        ([1, 1, 1].as_slice(), 20 * BYTES_PER_TOKEN as u64)
    );
    let meta = lease.meta(2).expect("alive").expect("a hit");
    let expected = crate::Meta {
        key: ns.chain_keys(&tokens, CHUNK, &parent)[2],
        source_position: 26,
        ntokens: 4,
        provenance: 2,
        rank: 7,
        context: contexts[2],
        behind: behind.to_vec(),
        behind_tokens: 10,
        nbytes: 4 * BYTES_PER_TOKEN,
        segment_offset: 56,
    };
    assert_eq!(meta, expected);
    assert_eq!(*lease.payload(2).expect("a hit"), [3; 4 * BYTES_PER_TOKEN]);
    let read: Vec<u32> = lease
        .tokens(1)
        .expect("a hit")
        .as_chunks()
        .0
        .iter()
        .map(|b| u32::from_le_bytes(*b))
        .collect();
    assert_eq!(read, tokens[8..16]);
    let scores = lease.scores(1).expect("a hit").expect("kept");
    assert_eq!(
        scores
            .as_chunks()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect::<Vec<_>>(),
        [1.5; 8]
    );
    let mut copy = vec![0; 8 * BYTES_PER_TOKEN];
    lease.read_into(0, &mut copy).expect("of that size");
    assert_eq!(copy, [1; 8 * BYTES_PER_TOKEN]);
    assert!(lease.read_into(0, &mut copy[1..]).is_err());
    drop((lease, scores, reservation));
    assert_idle(&store);
}

/// Without scores and contexts there are none, and a bytes count that is no multiple of 4 keeps tokens apart from payload.
#[test]
fn odd_sizes_and_absent_parts() {
    let store = store(16);
    let ns = tenant("a");
    assert_eq!(
        put(
            &store,
            &ns,
            &document(1, 5),
            0xff,
            &Request {
                bytes_per_token: 3,
                ..request()
            }
        ),
        1
    );
    let lease = store.lookup(&keys(&ns, &document(1, 5)));
    assert_eq!(*lease.payload(0).expect("a hit"), [0xff; 15]);
    assert_eq!(lease.tokens(0).expect("a hit").len(), 20);
    assert!(lease.scores(0).expect("a hit").is_none());
    let meta = lease.meta(0).expect("alive").expect("a hit");
    assert_eq!((meta.context, meta.behind), (NO_CONTEXT, vec![]));
}

/// Case s10 and s13: nothing of one tenant is found by another, by key, by tokens or by the matcher; the owner finds it.
#[test]
fn case_s13_tenants_share_nothing() {
    let store = store(64);
    let (a, b) = (tenant("a"), tenant("b"));
    let tokens = document(1, 40);
    assert_eq!(put(&store, &a, &tokens, 1, &request()), 5);
    assert_eq!(
        store
            .lookup_segments(&b, &tokens, &[(0, 40)], false)
            .expect("valid")
            .hits(),
        [0; 5]
    );
    assert_eq!(store.matches(&b, &tokens, 8), []);
    assert_eq!(
        store
            .lookup_segments(&a, &tokens, &[(0, 40)], false)
            .expect("valid")
            .hits(),
        [1; 5]
    );
    assert_eq!(put(&store, &b, &tokens, 2, &request()), 5);
    assert_eq!(store.clear(Some(&a)), 5);
    assert_eq!(store.clear(Some(&a)), 0);
    assert_eq!(
        store
            .lookup_segments(&a, &tokens, &[(0, 40)], false)
            .expect("valid")
            .hits(),
        [0; 5]
    );
    let lease = store
        .lookup_segments(&b, &tokens, &[(0, 40)], false)
        .expect("valid");
    assert_eq!(lease.hits(), [1; 5]);
    assert!(
        lease
            .payload(4)
            .expect("a hit")
            .iter()
            .all(|&byte| byte == 2)
    );
}

/// The matcher learns of published chunks and forgets those that leave; records of provenance `HEAD` it never hears of.
#[test]
fn the_matcher_follows_the_store() {
    let mut options = options(64);
    options.chunk_size = 64;
    let store = Store::open(options).expect("a store");
    let ns = tenant("a");
    let tokens = document(1, 150);
    let prompt: Vec<u32> = [document(8, 11), tokens.clone(), document(9, 5)].concat();
    assert_eq!(
        put(
            &store,
            &ns,
            &tokens,
            1,
            &Request {
                provenance: 0,
                ..request()
            }
        ),
        3
    );
    assert_eq!(store.matches(&ns, &prompt, 32), []);
    assert_eq!(
        put(
            &store,
            &ns,
            &tokens,
            1,
            &Request {
                rank: 1,
                ..request()
            }
        ),
        3
    );
    let covered = |matches: Vec<Match>| matches.iter().map(|m| m.stop - m.start).sum::<usize>();
    assert_eq!(covered(store.matches(&ns, &prompt, 32)), 150);
    assert!(store.stats().matches > 0);
    store.clear(None);
    assert_eq!(store.matches(&ns, &prompt, 32), []);
    assert_idle(&store);
}

/// A key is written by one reservation at a time, kept once it is resident, and replaced only by a higher rank.
#[test]
fn reservations_of_one_key() {
    let store = store(16);
    let ns = tenant("a");
    let tokens = document(1, 8);
    let first = store.reserve(&ns, &tokens, &request()).expect("valid");
    assert_eq!(
        store
            .reserve(&ns, &tokens, &request())
            .expect("valid")
            .wanted(),
        [0],
        "being written"
    );
    assert_eq!(store.lookup(first.keys()).hits(), [0], "not yet published");
    assert_eq!(first.commit(None), Ok(1));
    assert_eq!(
        store
            .reserve(&ns, &tokens, &request())
            .expect("valid")
            .wanted(),
        [0],
        "resident"
    );
    let old = store.lookup(first.keys());
    assert_eq!(
        put(
            &store,
            &ns,
            &tokens,
            9,
            &Request {
                rank: 1,
                ..request()
            }
        ),
        1
    );
    assert!(
        old.payload(0)
            .expect("still pinned")
            .iter()
            .all(|&byte| byte != 9),
        "old bytes for old leases"
    );
    let new = store.lookup(first.keys());
    assert!(new.payload(0).expect("a hit").iter().all(|&byte| byte == 9));
    assert_eq!(store.stats().chunks, 1);
    drop((old, new));
    let stats = store.stats();
    assert_eq!(
        (stats.stored, stats.replaced, stats.bytes_used),
        (1, 1, RECORD as u64)
    );
    let kinds: Vec<_> = store
        .events(10)
        .0
        .into_iter()
        .map(|event| event.kind)
        .collect();
    assert_eq!(kinds, [EventKind::Stored, EventKind::Replaced]);
}

/// Commit publishes what the mask says and gives the rest back; abort and drop publish nothing.
#[test]
fn masks_aborts_and_drops() {
    let store = store(16);
    let ns = tenant("a");
    let tokens = document(1, 24);
    let reservation = store.reserve(&ns, &tokens, &request()).expect("valid");
    assert!(
        reservation.commit(Some(&[1])).is_err(),
        "a mask of another length"
    );
    assert_eq!(reservation.commit(Some(&[1, 0, 2])), Ok(2));
    assert_eq!(reservation.commit(None), Ok(0), "once");
    assert!(reservation.payload(0).is_err());
    assert_eq!(store.contains(reservation.keys()), [1, 0, 1]);
    store
        .reserve(&ns, &document(2, 24), &request())
        .expect("valid")
        .abort();
    drop(
        store
            .reserve(&ns, &document(2, 24), &request())
            .expect("valid"),
    );
    assert_eq!(store.contains(&keys(&ns, &document(2, 24))), [0; 3]);
    let stats = store.stats();
    assert_eq!(
        (stats.aborted, stats.chunks, stats.bytes_used),
        (7, 2, 2 * RECORD as u64)
    );
    assert_idle(&store);
}

/// A writable view keeps its memory after an abort, until it is dropped; and what is written then reaches nobody.
#[test]
fn a_writable_view_outlives_its_reservation_safely() {
    let store = store(1);
    let ns = tenant("a");
    let reservation = store
        .reserve(&ns, &document(1, 8), &request())
        .expect("valid");
    let view = reservation.payload(0).expect("wanted");
    drop(reservation);
    assert!(!view.copy_from(&[1; 512]), "no longer writable");
    assert_eq!(
        put(&store, &ns, &document(2, 8), 2, &request()),
        0,
        "the memory is still the view's"
    );
    drop(view);
    assert_eq!(put(&store, &ns, &document(2, 8), 2, &request()), 1);
    assert_idle(&store);
}

/// Tails are left out on request, and an empty segment has no chunks.
#[test]
fn unfull_tails_and_empty_segments() {
    let store = store(16);
    let ns = tenant("a");
    let reservation = store
        .reserve(
            &ns,
            &document(1, 12),
            &Request {
                save_unfull_chunk: false,
                ..request()
            },
        )
        .expect("valid");
    assert_eq!(reservation.wanted(), [1, 0]);
    assert_eq!(reservation.commit(None), Ok(1));
    let empty = store.reserve(&ns, &[], &request()).expect("valid");
    assert_eq!((empty.len(), empty.commit(None)), (0, Ok(0)));
    assert_eq!(store.lookup(&[]).len(), 0);
}

/// Wrong requests are refused by name before anything is reserved.
#[test]
fn wrong_requests_are_named() {
    let store = store(4);
    let ns = tenant("a");
    let tokens = document(1, 16);
    let one = [NO_CONTEXT];
    let wrong = [
        (
            "bytes_per_token",
            Request {
                bytes_per_token: 0,
                ..request()
            },
        ),
        (
            "provenance",
            Request {
                provenance: 4,
                ..request()
            },
        ),
        (
            "source_position",
            Request {
                source_position: usize::MAX,
                ..request()
            },
        ),
        (
            "contexts",
            Request {
                contexts: Some(&one),
                ..request()
            },
        ),
        (
            "head",
            Request {
                head: true,
                parent: Some(HEAD_ROOT),
                ..request()
            },
        ),
    ];
    for (name, request) in wrong {
        let error = store.reserve(&ns, &tokens, &request).expect_err(name);
        assert!(error.to_string().starts_with(name), "{error}");
    }
    for (name, options) in [
        (
            "capacity_bytes",
            Options {
                capacity_bytes: 0,
                ..options(1)
            },
        ),
        (
            "chunk_size",
            Options {
                chunk_size: 0,
                ..options(1)
            },
        ),
        (
            "max_chunks",
            Options {
                max_chunks: Some(0),
                ..options(1)
            },
        ),
    ] {
        let error = Store::open(options).expect_err(name);
        assert!(error.to_string().starts_with(name), "{error}");
    }
    assert_idle(&store);
}

/// Case f03: a pool of two chunks and three wanted: a bounded wait, then a miss; all is unwound, also when chunk 2 of a
/// batch finds no room.
#[test]
fn case_f03_two_chunks_three_wanted() {
    let store = store(2);
    let ns = tenant("a");
    let reservation = store
        .reserve(&ns, &document(1, 24), &request())
        .expect("valid");
    assert_eq!(reservation.wanted(), [1, 1, 0]);
    assert_eq!(reservation.commit(None), Ok(2));
    let pinned = store.lookup(&keys(&ns, &document(1, 16)));
    let full = store
        .reserve(&ns, &document(2, 24), &request())
        .expect("valid");
    assert_eq!(full.wanted(), [0; 3]);
    drop(full);
    assert_eq!(store.stats().rejected_full, 4);
    drop(pinned);
    assert_eq!(put(&store, &ns, &document(2, 16), 2, &request()), 2);
    assert_eq!(
        put(&store, &ns, &document(3, 8 * 100), 3, &request()),
        2,
        "as much as fits"
    );
    let huge = Request {
        bytes_per_token: u32::MAX as usize,
        ..request()
    };
    assert_eq!(
        put(&store, &ns, &document(4, 8), 3, &huge),
        0,
        "larger than the arena"
    );
    assert_idle(&store);
}

/// A writer who waits for room gets it as soon as a reader lets go.
#[test]
fn a_waiting_writer_is_woken() {
    let store = Store::open(Options {
        reserve_wait: Duration::from_secs(60),
        ..options(1)
    })
    .expect("a store");
    let ns = tenant("a");
    assert_eq!(put(&store, &ns, &document(1, 8), 1, &request()), 1);
    let lease = store.lookup(&keys(&ns, &document(1, 8)));
    thread::scope(|scope| {
        let writer = scope.spawn(|| put(&store, &ns, &document(2, 8), 2, &request()));
        while store.stats().reservations == 0 {
            thread::yield_now();
        }
        lease.release();
        assert_eq!(writer.join().expect("no panic"), 1);
    });
    assert_eq!(store.stats().evicted, 1);
}

/// After its time-out a lease gives no bytes, and its pins don't keep a writer out; a view that was taken before does, and
/// stays readable.
#[test]
fn leases_time_out_and_views_do_not() {
    let timeout = Duration::from_millis(20);
    let wait = Duration::from_secs(60);
    let store = Store::open(Options {
        lease_timeout: timeout,
        reserve_wait: wait,
        ..options(2)
    })
    .expect("a store");
    let ns = tenant("a");
    assert_eq!(put(&store, &ns, &document(1, 8), 1, &request()), 1);
    assert_eq!(put(&store, &ns, &document(2, 8), 2, &request()), 1);
    let leaked = store.lookup(&[keys(&ns, &document(1, 8)), keys(&ns, &document(2, 8))].concat());
    let view = leaked.payload(0).expect("alive");
    assert_eq!(
        put(&store, &ns, &document(3, 8), 3, &request()),
        1,
        "in the place of the second"
    );
    assert_eq!(
        store.contains(&keys(&ns, &document(1, 8))),
        [1],
        "the view keeps the first"
    );
    assert_eq!(store.contains(&keys(&ns, &document(2, 8))), [0]);
    assert_eq!(leaked.payload(0).err(), Some(Error::LeaseExpired));
    assert_eq!(leaked.meta(1).err(), Some(Error::LeaseExpired));
    assert!(view.iter().all(|&byte| byte == 1));
    assert_eq!(store.stats().expired_leases, 2);
    drop((view, leaked));
    assert_eq!(put(&store, &ns, &document(4, 16), 4, &request()), 2);
    assert_idle(&store);
}

/// A lease that was released gives no bytes; one that is alive says what is wrong with an index.
#[test]
fn released_leases_and_wrong_indices() {
    let store = store(4);
    let ns = tenant("a");
    put(&store, &ns, &document(1, 8), 1, &request());
    let lease = store.lookup(&[keys(&ns, &document(1, 8)), vec![[7; 32]]].concat());
    assert!(lease.meta(1).expect("alive").is_none());
    assert!(
        lease
            .payload(1)
            .expect_err("a miss")
            .to_string()
            .contains("miss")
    );
    assert!(
        lease
            .payload(2)
            .expect_err("out of range")
            .to_string()
            .contains("below 2")
    );
    lease.release();
    assert_eq!(lease.payload(0).err(), Some(Error::LeaseExpired));
    drop(lease);
    let stats = store.stats();
    assert_eq!(
        (
            stats.lookups,
            stats.hits,
            stats.misses,
            stats.expired_leases
        ),
        (2, 1, 1, 0)
    );
    assert_idle(&store);
}

/// Case f02: slow readers while the same keys are evicted and their memory is reused: old bytes or a miss, never bytes of
/// another record.
#[test]
fn case_f02_slow_readers_never_see_reused_memory() {
    for policy in [PolicyKind::S3Fifo, PolicyKind::Lru] {
        let store = Store::open(Options {
            policy,
            reserve_wait: Duration::ZERO,
            ..options(3)
        })
        .expect("a small store");
        let ns = tenant("a");
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for reader in 0..3u32 {
                let (store, done) = (&store, &done);
                scope.spawn(move || {
                    let mut n = reader;
                    while !done.load(Ordering::Relaxed) {
                        n = (n + 1) % 8;
                        let lease = store.lookup(&keys(&ns, &document(n, 8)));
                        if lease.hits() == [1] {
                            let view = lease.payload(0).expect("a fresh lease");
                            lease.release();
                            for _ in 0..20 {
                                assert!(
                                    view.iter().all(|&byte| byte == n as u8),
                                    "bytes of another record"
                                );
                                std::hint::spin_loop();
                            }
                        }
                    }
                });
            }
            for round in 0..4000 {
                let n = round % 8;
                put(&store, &ns, &document(n, 8), n as u8, &request());
            }
            done.store(true, Ordering::Relaxed);
        });
        assert!(store.stats().evicted > 100, "{policy}: memory was reused");
        assert_idle(&store);
    }
}

/// Case f10: 8 threads put, get and delete one key 10,000 times: at idle all counts are 0.
#[test]
fn case_f10_eight_threads_on_one_key() {
    let store = Store::open(Options {
        reserve_wait: Duration::ZERO,
        ..options(4)
    })
    .expect("a small store");
    let ns = tenant("a");
    let tokens = document(1, 8);
    thread::scope(|scope| {
        for worker in 0..8u8 {
            let (store, tokens) = (&store, &tokens);
            scope.spawn(move || {
                let key = keys(&ns, tokens);
                for round in 0..10_000 / 8 {
                    match (round + usize::from(worker)) % 4 {
                        0 => drop(put(
                            store,
                            &ns,
                            tokens,
                            worker,
                            &Request {
                                rank: round as u8,
                                ..request()
                            },
                        )),
                        1 => drop(store.clear(Some(&ns))),
                        2 => {
                            store.pin(&key);
                            store.unpin(&key);
                        }
                        _ => {
                            let lease = store.lookup(&key);
                            if lease.hits() == [1] {
                                let bytes = lease.payload(0).expect("a fresh lease");
                                assert!(
                                    bytes.iter().all(|&byte| byte == bytes[0]),
                                    "whole records only"
                                );
                            }
                        }
                    }
                }
            });
        }
    });
    store.clear(None);
    let stats = store.stats();
    assert_eq!((stats.chunks, stats.bytes_used), (0, 0), "{stats:?}");
    assert_idle(&store);
}

/// Chains go from their leaves: whatever the policy and the uses, a child never stays behind its parent.
#[test]
fn chains_shrink_from_their_leaves() {
    for policy in PolicyKind::ALL {
        let store = Store::open(Options {
            policy,
            ..options(12)
        })
        .expect("a small store");
        let ns = tenant("a");
        for n in 0..40 {
            let tokens = document(n, 8 * (1 + n as usize % 5));
            put(&store, &ns, &tokens, 1, &request());
            // Parents are used more than their children.
            store.lookup(&keys(&ns, &tokens)[..1]);
            for other in 0..=n {
                let present =
                    store.contains(&keys(&ns, &document(other, 8 * (1 + other as usize % 5))));
                assert!(
                    present.is_sorted_by(|a, b| a >= b),
                    "{policy}: {present:?} of document {other}"
                );
            }
        }
        assert_eq!(store.stats().chunks, 12, "{policy}");
    }
}

/// One chain longer than the store: its head stays, its own earlier chunks are not evicted for its later ones.
#[test]
fn a_long_chain_keeps_its_head() {
    let store = store(8);
    let ns = tenant("a");
    let tokens = document(1, 8 * 20);
    assert_eq!(put(&store, &ns, &tokens, 1, &request()), 8);
    assert_eq!(
        put(&store, &ns, &tokens, 1, &request()),
        0,
        "nothing of it gives way to the rest"
    );
    assert_eq!(
        store.contains(&keys(&ns, &tokens))[..9],
        [1, 1, 1, 1, 1, 1, 1, 1, 0]
    );
}

/// Children that were stored before their parent count as its children once it comes.
#[test]
fn a_parent_that_comes_late_adopts() {
    let store = Store::open(Options {
        policy: PolicyKind::Fifo,
        ..options(3)
    })
    .expect("a small store");
    let ns = tenant("a");
    let tokens = document(1, 16);
    let reservation = store.reserve(&ns, &tokens, &request()).expect("valid");
    assert_eq!(reservation.commit(Some(&[0, 1])), Ok(1));
    assert_eq!(put(&store, &ns, &tokens[..8], 1, &request()), 1);
    put(&store, &ns, &document(2, 16), 2, &request());
    assert_eq!(
        store.contains(&keys(&ns, &tokens)),
        [1, 0],
        "the child went first, though it is older"
    );
}

/// A replaced parent keeps its children, and they still protect the new record.
#[test]
fn a_replaced_parent_keeps_its_children() {
    let store = Store::open(Options {
        policy: PolicyKind::Fifo,
        ..options(4)
    })
    .expect("a small store");
    let ns = tenant("a");
    let tokens = document(1, 16);
    assert_eq!(put(&store, &ns, &tokens, 1, &request()), 2);
    assert_eq!(
        put(
            &store,
            &ns,
            &tokens[..8],
            2,
            &Request {
                rank: 1,
                ..request()
            }
        ),
        1
    );
    put(&store, &ns, &document(2, 8 * 3), 2, &request());
    assert_eq!(store.contains(&keys(&ns, &tokens)), [1, 0]);
    assert_eq!(put(&store, &ns, &document(3, 8), 2, &request()), 1);
    assert_eq!(store.contains(&keys(&ns, &tokens)), [0, 0]);
}

/// Users' pins keep chunks from eviction until they are taken back, follow a replacement, and end with a clear.
#[test]
fn pins_of_users() {
    let store = store(2);
    let ns = tenant("a");
    let pinned = document(1, 8);
    let key = keys(&ns, &pinned);
    assert_eq!((store.pin(&key), store.unpin(&key)), (0, 0));
    put(&store, &ns, &pinned, 1, &request());
    assert_eq!((store.pin(&key), store.pin(&key)), (1, 1));
    assert_eq!(
        put(
            &store,
            &ns,
            &pinned,
            2,
            &Request {
                rank: 1,
                ..request()
            }
        ),
        1
    );
    for n in 2..10 {
        assert_eq!(put(&store, &ns, &document(n, 8), 3, &request()), 1);
    }
    assert_eq!(store.contains(&key), [1]);
    assert_eq!(
        (store.unpin(&key), store.unpin(&key), store.unpin(&key)),
        (1, 1, 0)
    );
    for n in 2..14 {
        put(&store, &ns, &document(n, 8), 3, &request());
    }
    assert_eq!(store.contains(&key), [0]);
    put(&store, &ns, &pinned, 1, &request());
    assert_eq!(store.pin(&key), 1);
    assert_eq!(store.clear(None), 2);
    assert_eq!(store.stats().bytes_used, 0);
    assert_idle(&store);
}

/// Cleared chunks stay readable for those who have them, and their memory comes back after that.
#[test]
fn cleared_chunks_stay_readable_until_released() {
    let store = store(4);
    let ns = tenant("a");
    put(&store, &ns, &document(1, 16), 5, &request());
    let lease = store.lookup(&keys(&ns, &document(1, 16)));
    assert_eq!(store.clear(None), 2);
    assert_eq!(store.contains(&keys(&ns, &document(1, 16))), [0, 0]);
    assert!(
        lease
            .payload(1)
            .expect("still pinned")
            .iter()
            .all(|&byte| byte == 5)
    );
    assert_eq!(store.stats().bytes_used, 2 * RECORD as u64);
    drop(lease);
    assert_eq!(store.stats().bytes_used, 0);
    let kinds: HashSet<_> = store
        .events(10)
        .0
        .into_iter()
        .map(|event| event.kind.as_str())
        .collect();
    assert_eq!(kinds, HashSet::from(["stored", "cleared"]));
}

/// A use counts for the policy, by lookup and by touch.
#[test]
fn uses_keep_chunks() {
    let store = Store::open(Options {
        policy: PolicyKind::Lru,
        ..options(3)
    })
    .expect("a small store");
    let ns = tenant("a");
    for n in 1..4 {
        put(&store, &ns, &document(n, 8), 1, &request());
    }
    store.touch(&keys(&ns, &document(1, 8)));
    drop(store.lookup(&keys(&ns, &document(2, 8))));
    put(&store, &ns, &document(4, 8), 1, &request());
    let present = |n| store.contains(&keys(&ns, &document(n, 8)))[0];
    assert_eq!([1, 2, 3, 4].map(present), [1, 1, 0, 1]);
}

/// A closed store misses and refuses; leases of before stay readable.
#[test]
fn closing() {
    let store = store(4);
    let ns = tenant("a");
    put(&store, &ns, &document(1, 8), 5, &request());
    let open = store
        .reserve(&ns, &document(2, 8), &request())
        .expect("still open");
    let lease = store.lookup(&keys(&ns, &document(1, 8)));
    store.close();
    assert!(
        lease
            .payload(0)
            .expect("still pinned")
            .iter()
            .all(|&byte| byte == 5)
    );
    assert_eq!(store.lookup(&keys(&ns, &document(1, 8))).hits(), [0]);
    assert_eq!(
        store.reserve(&ns, &document(3, 8), &request()).err(),
        Some(Error::Closed)
    );
    assert_eq!(open.commit(None), Ok(0));
    drop(lease);
    assert_eq!(store.stats().bytes_used, 0);
}

/// Slots run out like bytes do: the oldest makes room.
#[test]
fn max_chunks_bounds_the_number() {
    let store = Store::open(Options {
        max_chunks: Some(3),
        ..options(64)
    })
    .expect("a small store");
    let ns = tenant("a");
    for n in 0..20 {
        assert_eq!(put(&store, &ns, &document(n, 8), 1, &request()), 1);
    }
    let stats = store.stats();
    assert_eq!((stats.chunks, stats.evicted), (3, 17));
}

/// What a store for a million chunks keeps about each, beyond its key, with the default policy.
#[test]
fn metadata_of_a_million_chunks() {
    let million = 1_000_000;
    let options = Options {
        capacity_bytes: million * RECORD,
        max_chunks: Some(million),
        ..options(1)
    };
    let store = Store::open(options).expect("address space");
    // The allocator's ranges are counted as they come to be: one a record, 24 bytes.
    let each = store.stats().metadata_bytes as f64 / million as f64 - 32.0 + 24.0;
    println!("{each:.0} bytes of metadata a chunk beyond the key");
    assert!(each <= 160.0, "{each:.1}");
}
