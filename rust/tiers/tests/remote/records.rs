//! Records to store, and a sink that accepts what is provably them.

use std::collections::HashMap;
use std::ptr::NonNull;

use blendstore_codec::{Codec, Frame, Head, Header, Parts};
use blendstore_core::{Key, Namespace, key::SEGMENT_ROOT};
use blendstore_tiers::{Shape, Sink, Tier};

/// A record as it travels.
#[derive(Clone)]
pub struct Record {
    pub key: Key,
    pub bytes: Vec<u8>,
}

impl Record {
    pub fn frame(&self) -> Frame<'_> {
        Frame::parse(&self.bytes).expect("made here")
    }
}

pub fn tenant(name: &str) -> Namespace {
    Namespace::new(&[("model", "test")], name.as_bytes())
}

/// Record number `seed` of a tenant, with a payload of about `size` bytes.
pub fn record(tenant: &Namespace, seed: u32, size: usize) -> Record {
    let ntokens = 16;
    let tokens: Vec<u32> = (0..ntokens).map(|token| seed * 1000 + token).collect();
    let key = tenant.chain_key(&SEGMENT_ROOT, &tenant.content_id(&tokens));
    let bytes_per_token = size.div_ceil(ntokens as usize).max(1);
    let payload: Vec<u8> = (0..ntokens as usize * bytes_per_token)
        .map(|at| {
            (at as u32)
                .wrapping_mul(2_654_435_761)
                .wrapping_add(seed)
                .to_le_bytes()[3]
        })
        .collect();
    let header = Header {
        key,
        parent: SEGMENT_ROOT,
        namespace: tenant.name(),
        context: [7; 32],
        ntokens,
        bytes_per_token: bytes_per_token as u32,
        source_position: 3,
        segment_offset: 0,
        behind_tokens: 2,
        format: 0,
        codec: Codec::RAW,
        provenance: 1,
        rank: 2,
    };
    let parts = Parts {
        header,
        params: &[],
        tokens: &tokens,
        scores: None,
        behind: &[[9; 32]],
        payload: &payload,
    };
    Record {
        key,
        bytes: parts.encode(),
    }
}

pub fn records(tenant: &Namespace, count: u32, size: usize) -> Vec<Record> {
    (0..count).map(|seed| record(tenant, seed, size)).collect()
}

pub fn keys(records: &[Record]) -> Vec<Key> {
    records.iter().map(|record| record.key).collect()
}

pub fn put(tier: &dyn Tier, records: &[Record]) -> usize {
    let frames: Vec<_> = records.iter().map(Record::frame).collect();
    tier.put(&frames)
}

/// Whole frames by index, each accepted once; what is not the key's record is refused as the store refuses it.
#[derive(Default)]
pub struct Collected {
    keys: Vec<Key>,
    rooms: HashMap<usize, Vec<u8>>,
    pub frames: HashMap<usize, Vec<u8>>,
    pub failed: Vec<usize>,
    full: bool,
}

// SAFETY: a room is a vector of this sink that stays until `filled` or `failed`, and nobody touches it before.
unsafe impl Sink for Collected {
    fn room(&mut self, index: usize, shape: &Shape) -> Option<NonNull<[u8]>> {
        if self.full {
            return None;
        }
        let room = vec![0; shape.ntokens * shape.bytes_per_token];
        assert!(
            self.rooms.insert(index, room).is_none(),
            "room is asked for once"
        );
        self.rooms
            .get_mut(&index)
            .map(|room| NonNull::from(room.as_mut_slice()))
    }

    fn filled(&mut self, index: usize, head: &[u8]) -> bool {
        let payload = self.rooms.remove(&index).expect("room was given");
        self.frame(index, &[head, &payload].concat())
    }

    fn failed(&mut self, index: usize) {
        assert!(self.rooms.remove(&index).is_some(), "room was given");
        self.failed.push(index);
    }

    fn frame(&mut self, index: usize, frame: &[u8]) -> bool {
        let right = Head::parse(frame)
            .and_then(|head| {
                head.check_payload(&frame[head.bytes().len()..])
                    .map(|()| head.header.key)
            })
            .is_ok_and(|key| key == self.keys[index]);
        if right {
            assert!(
                self.frames.insert(index, frame.to_vec()).is_none(),
                "each record comes once"
            );
        }
        right
    }
}

pub fn get(tier: &dyn Tier, keys: &[Key]) -> Collected {
    let mut sink = Collected {
        keys: keys.to_vec(),
        ..Collected::default()
    };
    tier.get(keys, &mut sink);
    assert!(sink.rooms.is_empty(), "no room is left open");
    sink
}

/// The same, for a store without room.
pub fn get_without_room(tier: &dyn Tier, keys: &[Key]) -> Collected {
    let mut sink = Collected {
        keys: keys.to_vec(),
        full: true,
        ..Collected::default()
    };
    tier.get(keys, &mut sink);
    sink
}

/// Which of them come back, each with its own bytes.
pub fn hits(tier: &dyn Tier, records: &[Record]) -> Vec<bool> {
    let found = get(tier, &keys(records));
    records
        .iter()
        .enumerate()
        .map(|(index, record)| match found.frames.get(&index) {
            Some(bytes) => {
                assert_eq!(bytes, &record.bytes, "record {index} has other bytes");
                true
            }
            None => false,
        })
        .collect()
}

/// All of them come back.
pub fn assert_all(tier: &dyn Tier, records: &[Record]) {
    assert_eq!(
        hits(tier, records),
        vec![true; records.len()],
        "{:?}",
        tier.stats()
    );
}
