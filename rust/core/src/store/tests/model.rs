//! Random histories of a small store against a map of what was published.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::Lease;

type Outcome = std::result::Result<(), TestCaseError>;

/// Documents are prefixes of one of these, so that chains share parents.
const FAMILIES: u32 = 4;

#[derive(Clone, Debug)]
enum Step {
    Reserve {
        family: u32,
        chunks: usize,
        rank: u8,
    },
    Commit {
        which: prop::sample::Index,
        mask: u8,
    },
    Abort {
        which: prop::sample::Index,
    },
    Lookup {
        family: u32,
        chunks: usize,
    },
    Release {
        which: prop::sample::Index,
    },
    Pin {
        family: u32,
        chunk: usize,
    },
    Unpin {
        family: u32,
        chunk: usize,
    },
    Clear {
        family: u32,
    },
    Copy {
        family: u32,
        chunk: usize,
        level: usize,
        there: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let (family, chunks, which) = (0..FAMILIES, 1..5usize, any::<prop::sample::Index>());
    prop_oneof![
        6 => (family.clone(), chunks.clone(), 0..3u8).prop_map(|(family, chunks, rank)| Step::Reserve { family, chunks, rank }),
        6 => (which.clone(), any::<u8>()).prop_map(|(which, mask)| Step::Commit { which, mask }),
        1 => which.clone().prop_map(|which| Step::Abort { which }),
        6 => (family.clone(), chunks.clone()).prop_map(|(family, chunks)| Step::Lookup { family, chunks }),
        4 => which.prop_map(|which| Step::Release { which }),
        1 => (family.clone(), 0..4usize).prop_map(|(family, chunk)| Step::Pin { family, chunk }),
        1 => (family.clone(), 0..4usize).prop_map(|(family, chunk)| Step::Unpin { family, chunk }),
        1 => family.clone().prop_map(|family| Step::Clear { family }),
        3 => (family, 0..4usize, 0..9usize, any::<bool>())
            .prop_map(|(family, chunk, level, there)| Step::Copy { family, chunk, level, there }),
    ]
}

/// A tenant of its own for every other family.
fn space(family: u32) -> Namespace {
    tenant(["a", "b"][family as usize % 2])
}

fn family_keys(family: u32, chunks: usize) -> Vec<Key> {
    keys(&space(family), &document(family, chunks * CHUNK))
}

/// A reservation, what it will write, and its chain.
struct Writing {
    reservation: crate::Reservation,
    fill: u8,
    rank: u8,
    family: u32,
}

fn run(policy: PolicyKind, steps: Vec<Step>) -> Outcome {
    const RECORDS: usize = 7;
    let options = Options {
        policy,
        reserve_wait: Duration::ZERO,
        events_capacity: 1 << 16,
        ..options(RECORDS)
    };
    let store = Store::open(options).expect("a small store");
    // Fill and rank of what is resident as far as the events say; and user pins.
    let mut resident: HashMap<Key, (u8, u8)> = HashMap::new();
    let mut pins: HashMap<Key, usize> = HashMap::new();
    // Tiers that have copies of a record (by key and fill), as far as the store was told.
    let mut copies: HashMap<(Key, u8), HashSet<usize>> = HashMap::new();
    let mut writing: Vec<Writing> = Vec::new();
    let mut leases: Vec<(Lease, Vec<Option<u8>>)> = Vec::new();
    let mut fill = 0u8;
    for step in steps {
        match step {
            Step::Reserve {
                family,
                chunks,
                rank,
            } => {
                fill = fill.wrapping_add(1);
                let request = Request {
                    rank,
                    provenance: rank,
                    ..request()
                };
                let reservation = store
                    .reserve(&space(family), &document(family, chunks * CHUNK), &request)
                    .expect("valid");
                forget_evicted(&store, &mut resident, &pins)?;
                for (index, key) in reservation.keys().iter().enumerate() {
                    let taken = writing.iter().any(|other| {
                        other
                            .reservation
                            .keys()
                            .iter()
                            .zip(other.reservation.wanted())
                            .any(|(k, w)| k == key && *w == 1)
                    });
                    let better = resident
                        .get(key)
                        .is_some_and(|(_, resident)| *resident >= rank);
                    if taken || better {
                        prop_assert_eq!(reservation.wanted()[index], 0);
                    }
                    if reservation.wanted()[index] == 1 {
                        let view = reservation.payload(index).expect("wanted");
                        prop_assert!(view.copy_from(&vec![fill; view.len()]));
                    }
                }
                writing.push(Writing {
                    reservation,
                    fill,
                    rank,
                    family,
                });
            }
            Step::Commit { which, mask } if !writing.is_empty() => {
                let Writing {
                    reservation,
                    fill,
                    rank,
                    ..
                } = writing.swap_remove(which.index(writing.len()));
                let mask: Vec<u8> = (0..reservation.len())
                    .map(|index| mask >> index & 1)
                    .collect();
                let chosen: Vec<usize> = (0..mask.len())
                    .filter(|&index| mask[index] & reservation.wanted()[index] == 1)
                    .collect();
                prop_assert_eq!(reservation.commit(Some(&mask)), Ok(chosen.len()));
                for index in chosen {
                    resident.insert(reservation.keys()[index], (fill, rank));
                }
            }
            Step::Abort { which } if !writing.is_empty() => {
                writing.swap_remove(which.index(writing.len()));
            }
            Step::Lookup { family, chunks } => {
                let keys = family_keys(family, chunks);
                let expected: Vec<Option<u8>> = keys
                    .iter()
                    .map(|key| resident.get(key).map(|(fill, _)| *fill))
                    .collect();
                let lease = store.lookup(&keys);
                let hits: Vec<u8> = expected
                    .iter()
                    .map(|fill| u8::from(fill.is_some()))
                    .collect();
                prop_assert_eq!(lease.hits(), &hits);
                leases.push((lease, expected));
            }
            Step::Release { which } if !leases.is_empty() => {
                leases.swap_remove(which.index(leases.len()));
            }
            Step::Pin { family, chunk } => {
                let key = family_keys(family, 4)[chunk];
                prop_assert_eq!(store.pin(&[key]), usize::from(resident.contains_key(&key)));
                if resident.contains_key(&key) {
                    *pins.entry(key).or_default() += 1;
                }
            }
            Step::Unpin { family, chunk } => {
                let key = family_keys(family, 4)[chunk];
                let pinned = pins.get(&key).copied().unwrap_or(0);
                prop_assert_eq!(store.unpin(&[key]), pinned.min(1));
                if pinned > 0 {
                    pins.insert(key, pinned - 1);
                }
            }
            Step::Clear { family } => {
                let keys: HashSet<Key> = (0..FAMILIES)
                    .filter(|f| f % 2 == family % 2)
                    .flat_map(|f| family_keys(f, 4))
                    .collect();
                let before = resident.len();
                resident.retain(|key, _| !keys.contains(key));
                pins.retain(|key, _| !keys.contains(key));
                prop_assert_eq!(store.clear(Some(&space(family))), before - resident.len());
            }
            Step::Copy {
                family,
                chunk,
                level,
                there,
            } => {
                let key = family_keys(family, 4)[chunk];
                if there {
                    store.copied(level, &store.record(&key));
                } else {
                    store.uncopied(level, &[key]);
                }
                if let Some(&(fill, _)) = resident.get(&key) {
                    let copies = copies.entry((key, fill)).or_default();
                    match there {
                        true if level < 8 => copies.insert(level),
                        _ => copies.remove(&level),
                    };
                }
            }
            _ => {}
        }
        forget_evicted(&store, &mut resident, &pins)?;
        check(&store, &resident, &leases)?;
        for (key, (fill, _)) in &resident {
            let (slot, _) = store
                .shared
                .ledger()
                .resident(&store.shared, key)
                .expect("resident");
            let told = store.shared.chunks.cold(slot).labels().copies;
            let expected = copies.get(&(*key, *fill)).into_iter().flatten();
            prop_assert_eq!(told, expected.fold(0, |bits, level| bits | 1 << level));
        }
    }
    // At the end everything is given back, and nothing is left pinned, written or taken.
    prop_assert_eq!(store.stats().reservations as usize, writing.len());
    prop_assert!(writing.iter().all(|writing| writing.family < FAMILIES));
    drop((writing, leases));
    store.clear(None);
    let stats = store.stats();
    prop_assert_eq!(
        (stats.chunks, stats.bytes_used, stats.bytes_pinned),
        (0, 0, 0)
    );
    prop_assert_eq!((stats.leases, stats.reservations), (0, 0));
    Ok(())
}

/// Takes evictions from the events; what users have pinned is never among them.
fn forget_evicted(
    store: &Store,
    resident: &mut HashMap<Key, (u8, u8)>,
    pins: &HashMap<Key, usize>,
) -> Outcome {
    let (events, lost) = store.events(usize::MAX);
    prop_assert_eq!(lost, 0);
    for event in events {
        if event.kind == EventKind::Evicted {
            prop_assert!(resident.remove(&event.key).is_some(), "evicted once");
            prop_assert_eq!(
                pins.get(&event.key).copied().unwrap_or(0),
                0,
                "a pinned chunk was evicted"
            );
        }
    }
    Ok(())
}

/// What is resident is exactly what the model says; leases read what they found; no child outlives a parent that was there.
fn check(
    store: &Store,
    resident: &HashMap<Key, (u8, u8)>,
    leases: &[(Lease, Vec<Option<u8>>)],
) -> Outcome {
    for family in 0..FAMILIES {
        let keys = family_keys(family, 4);
        let expected: Vec<u8> = keys
            .iter()
            .map(|key| resident.contains_key(key).into())
            .collect();
        prop_assert_eq!(store.contains(&keys), expected);
    }
    prop_assert_eq!(store.stats().chunks as usize, resident.len());
    for (lease, expected) in leases {
        for (index, fill) in expected.iter().enumerate() {
            if let Some(fill) = fill {
                let payload = lease.payload(index).expect("not expired");
                prop_assert!(payload.iter().all(|byte| byte == fill));
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    /// Reserve, commit, abort, lookup, release, pin, clear and eviction in any order.
    #[test]
    fn behaves_like_a_map(policy in prop::sample::select(PolicyKind::ALL.to_vec()), steps in prop::collection::vec(step(), 1..80)) {
        run(policy, steps)?;
    }
}
