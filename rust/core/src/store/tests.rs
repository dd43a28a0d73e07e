//! The store as a whole. Here is what its tests share: small records of known size.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;
use crate::key::{HEAD_ROOT, NO_CONTEXT, SEGMENT_ROOT};

mod cases;
mod eviction;
mod model;
mod records;

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
