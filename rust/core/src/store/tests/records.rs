//! Records in and out: reservations, leases, views, and how wrong use is refused.

use super::*;

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
