//! Cases from the field.

use super::*;

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
