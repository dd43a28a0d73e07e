//! What goes, what stays, and in which order: chains, pins, time-outs, capacity.

use super::*;

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
        chunk_size: 1,
        ..options(1)
    };
    let store = Store::open(options).expect("address space");
    let ns = tenant("a");
    // Part of it grows as chunks come.
    for first in (0..million as u32).step_by(1000) {
        let tokens: Vec<u32> = (first..first + 1000).collect();
        let reservation = store.reserve(&ns, &tokens, &request()).expect("room");
        reservation.commit(None).expect("bytes don't matter");
    }
    let stats = store.stats();
    let each = stats.metadata_bytes as f64 / stats.chunks as f64 - 32.0;
    println!("{each:.0} bytes of metadata a chunk beyond the key");
    assert!(each <= 160.0, "{each:.1}");
}

/// A tenant that stores without end takes at most its share: its own chunks make room, and its neighbour's stay. What it has
/// pinned stays too, so then there is no room, and pins of one tenant never cost another one its chunks.
#[test]
fn a_tenant_keeps_to_its_share() {
    for policy in PolicyKind::ALL {
        let store = Store::open(Options {
            policy,
            tenant_share: 0.5,
            reserve_wait: Duration::ZERO,
            ..options(12)
        })
        .expect("a small store");
        let (quiet, loud) = (tenant("quiet"), tenant("loud"));
        for n in 0..4 {
            assert_eq!(put(&store, &quiet, &document(n, 8), 1, &request()), 1);
        }
        for n in 0..30 {
            assert_eq!(
                put(&store, &loud, &document(n, 8), 1, &request()),
                1,
                "{policy}"
            );
        }
        let resident = |ns: &Namespace, documents: std::ops::Range<u32>| {
            let found = documents.map(|n| store.contains(&keys(ns, &document(n, 8)))[0]);
            found.map(usize::from).sum::<usize>()
        };
        assert_eq!(resident(&quiet, 0..4), 4, "{policy}");
        assert_eq!(resident(&loud, 0..30), 6, "{policy}");
        let pinned: Vec<_> = (0..30).flat_map(|n| keys(&loud, &document(n, 8))).collect();
        assert_eq!(store.pin(&pinned), 6);
        assert_eq!(
            put(&store, &loud, &document(99, 8), 1, &request()),
            0,
            "{policy}"
        );
        assert_eq!(
            put(&store, &quiet, &document(99, 8), 1, &request()),
            1,
            "{policy}"
        );
        store.unpin(&pinned);
        assert_eq!(
            put(&store, &loud, &document(99, 8), 1, &request()),
            1,
            "{policy}"
        );
        store.clear(Some(&loud));
        assert_eq!(
            put(&store, &loud, &document(50, 48), 1, &request()),
            6,
            "all of it is free again"
        );
    }
}
