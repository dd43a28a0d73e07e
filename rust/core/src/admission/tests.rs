use std::sync::Mutex;

use super::*;
use crate::key::SEGMENT_ROOT;
use crate::{Options, Request, Store};

const SHAPE: Shape = Shape {
    ntokens: 8,
    bytes_per_token: 64,
    scores: true,
    nbehind: 1,
};

fn store(records: usize) -> Store {
    Store::open(Options {
        capacity_bytes: records * 1024,
        chunk_size: 8,
        reserve_wait: std::time::Duration::from_millis(5),
        ..Options::default()
    })
    .expect("a store")
}

fn namespace() -> Namespace {
    Namespace::new(&[("model", b"weights")], b"salt")
}

fn key(tokens: &[u32]) -> Key {
    namespace().chain_key(&SEGMENT_ROOT, &namespace().content_id(tokens))
}

fn facts<'a>(tokens: &'a [u32], rank: u8) -> Facts<'a> {
    Facts {
        parent: &SEGMENT_ROOT,
        tokens,
        scores: Some(&[0.5; 8]),
        context: &[3; 32],
        behind: &[[4; 32]],
        behind_tokens: 11,
        source_position: 40,
        segment_offset: 0,
        provenance: 2,
        rank,
    }
}

/// Admits, fills and publishes.
fn bring(store: &Store, tokens: &[u32]) -> Option<Record> {
    let Admitted::Room(mut admission) = store.admit(&namespace(), &key(tokens), &SHAPE) else {
        return None;
    };
    // SAFETY: the admission's room is ours until it is published.
    unsafe { admission.payload().as_mut() }.fill(tokens[0] as u8);
    admission.publish(&facts(tokens, 1))
}

/// What was admitted and published is found like what was committed, with everything that its facts say.
#[test]
fn an_admitted_record_is_resident_with_its_facts() {
    let store = store(4);
    let tokens: Vec<u32> = (5..13).collect();
    let record = bring(&store, &tokens).expect("room");
    let meta = record.meta();
    assert_eq!(
        (meta.key, meta.source_position, meta.ntokens),
        (key(&tokens), 40, 8)
    );
    assert_eq!((meta.provenance, meta.rank, meta.behind_tokens), (2, 1, 11));
    assert_eq!((meta.context, meta.behind), ([3; 32], vec![[4; 32]]));
    assert_eq!(
        (record.parent(), record.namespace()),
        (SEGMENT_ROOT, *namespace().digest())
    );
    assert_eq!(
        (record.tokens(), record.scores()),
        (&tokens[..], Some(&[0.5; 8][..]))
    );
    assert_eq!(record.payload(), [5; 512]);
    let lease = store.lookup(&[key(&tokens)]);
    assert_eq!(lease.hits(), [1]);
    assert_eq!(
        store.matches(&namespace(), &tokens, 8).len(),
        1,
        "the matcher knows it"
    );
    let again = store.admit(&namespace(), &key(&tokens), &SHAPE);
    assert!(matches!(again, Admitted::Resident(_)));
}

/// Room that is not published is given back, and a key that is being written is not admitted twice.
#[test]
fn a_dropped_admission_leaves_nothing() {
    let store = store(4);
    let tokens: Vec<u32> = (5..13).collect();
    let first = store.admit(&namespace(), &key(&tokens), &SHAPE);
    let second = store.admit(&namespace(), &key(&tokens), &SHAPE);
    assert!(matches!(second, Admitted::BeingWritten));
    assert_eq!(store.stats().reservations, 1);
    drop(first);
    let stats = store.stats();
    assert_eq!(
        (stats.reservations, stats.bytes_used, stats.aborted),
        (0, 0, 1)
    );
    assert_eq!(store.contains(&[key(&tokens)]), [0]);
    assert!(bring(&store, &tokens).is_some());
}

/// A full store says so after its wait; shapes that no record has are refused, whatever their numbers.
#[test]
fn there_is_not_always_room() {
    let store = store(2);
    let held: Vec<Record> = (0..2)
        .filter_map(|number| bring(&store, &[number; 8]))
        .collect();
    assert_eq!(held.len(), 2);
    assert!(bring(&store, &[9; 8]).is_none(), "everything is pinned");
    drop(held);
    assert!(bring(&store, &[9; 8]).is_some());
    for shape in [
        Shape {
            ntokens: 0,
            ..SHAPE
        },
        Shape {
            bytes_per_token: 0,
            ..SHAPE
        },
        Shape {
            ntokens: usize::MAX,
            ..SHAPE
        },
        Shape {
            ntokens: 1 << 20,
            bytes_per_token: u32::MAX as usize,
            ..SHAPE
        },
        Shape {
            nbehind: usize::MAX,
            ..SHAPE
        },
    ] {
        let admitted = store.admit(&namespace(), &[1; 32], &shape);
        assert!(matches!(admitted, Admitted::Full), "{shape:?}");
    }
    store.close();
    assert!(bring(&store, &[10; 8]).is_none());
}

/// A record outlives its key: after eviction, replacement or clear its bytes are still its own.
#[test]
fn a_record_is_kept_while_it_is_held() {
    let store = store(4);
    let record = bring(&store, &[5; 8]).expect("room");
    assert_eq!(store.clear(None), 1);
    for number in 10..20 {
        bring(&store, &[number; 8]);
    }
    assert!(store.record(&key(&[5; 8])).is_none());
    assert_eq!(record.payload(), [5; 512]);
    drop(record);
    assert_eq!(store.stats().bytes_pinned, 0);
}

/// The observer gets each committed record once, published; what is admitted from below is no news to it.
#[test]
fn commits_are_observed() {
    let store = store(16);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (to, watched) = (seen.clone(), store.clone());
    let watched = Mutex::new(Some(watched));
    let observed = store.observe(move |records| {
        let store = watched.lock().expect("no panic");
        for record in records {
            let resident = store.as_ref().map(|store| store.contains(&[record.key()]));
            assert_eq!(resident, Some(vec![1]), "published before it is told");
            to.lock().expect("no panic").push(record.key());
        }
    });
    assert!(observed);
    assert!(!store.observe(|_| {}), "one observer");
    let tokens: Vec<u32> = (0..20).collect();
    let request = Request {
        bytes_per_token: 4,
        ..Request::default()
    };
    let reservation = store
        .reserve(&namespace(), &tokens, &request)
        .expect("open");
    let keys = reservation.keys().to_vec();
    assert_eq!(reservation.commit(Some(&[1, 0, 1])).expect("open"), 2);
    bring(&store, &[5; 8]);
    assert_eq!(*seen.lock().expect("no panic"), [keys[0], keys[2]]);
    assert_eq!(
        store.stats().bytes_pinned,
        0,
        "what is observed is held no longer"
    );
}
