use super::*;

fn resident() -> (Word, u32) {
    let word = Word::new();
    let generation = word.reserve().complete(&word).publish(&word);
    (word, generation)
}

/// Nothing can be pinned before it is published, and nothing after its slot was freed, not even by an old name.
#[test]
fn only_what_is_published_can_be_pinned() {
    let word = Word::new();
    assert_eq!(word.lease(), None);
    let reserved = word.reserve();
    assert_eq!((word.lease(), word.hold(0)), (None, None));
    let complete = reserved.complete(&word);
    assert_eq!((word.lease(), word.hold(0)), (None, None));
    let generation = complete.publish(&word);
    assert_eq!(
        word.lease(),
        Some(Pinned {
            generation,
            first: true
        })
    );
    assert_eq!(
        word.hold(generation),
        Some(Pinned {
            generation,
            first: false
        })
    );
    assert!(word.unlease(generation).done && word.unhold(generation).last);
    assert_eq!(word.evict(), Evict::Taken);
    assert_eq!((word.lease(), word.hold(generation)), (None, None));
    word.free();
    let generation = word.reserve().complete(&word).publish(&word);
    assert_eq!(word.hold(generation.wrapping_sub(1)), None);
    assert!(word.hold(generation).is_some());
}

/// A pinned chunk is parked instead of evicted, and its last pin says so.
#[test]
fn the_last_pin_of_a_parked_chunk_wakes() {
    let (word, generation) = resident();
    word.lease();
    word.hold(generation);
    assert_eq!(word.evict(), Evict::Pinned);
    assert!(!word.is_listable());
    assert_eq!(
        word.unlease(generation),
        Unpinned {
            done: true,
            last: false,
            wake: false
        }
    );
    assert_eq!(
        word.unhold(generation),
        Unpinned {
            done: true,
            last: true,
            wake: true
        }
    );
    word.unpark();
    assert_eq!(word.evict(), Evict::Taken);
}

/// A doomed chunk stays readable by those who have it, can be held by them once more, and is handed over by the last.
#[test]
fn doomed_chunks_stay_until_their_last_pin() {
    let (word, generation) = resident();
    word.lease();
    assert!(!word.doom());
    assert_eq!(word.lease(), None);
    assert!(word.hold(generation).is_some());
    assert!(!word.unlease(generation).wake);
    assert!(!word.is_abandoned(generation));
    assert!(word.unhold(generation).wake);
    assert!(word.is_abandoned(generation));
    assert_eq!(word.hold(generation), None);
}

/// A time-out takes the pins of leases but never a hold, only when they are overdue, and then the leases' own unpinning
/// takes nothing.
#[test]
fn expiry_takes_leases_and_spares_holds() {
    let (word, generation) = resident();
    word.lease();
    word.lease();
    assert_eq!(word.expire(generation, || false), 0);
    assert_eq!(word.expire(generation + 1, || true), 0);
    word.hold(generation);
    assert_eq!(word.expire(generation, || true), 0);
    word.unhold(generation);
    assert_eq!(word.expire(generation, || true), 2);
    assert_eq!(word.unlease(generation), Unpinned::default());
    assert!(word.is_abandoned(generation));
    word.free();
    assert_eq!(word.unlease(generation), Unpinned::default());
}

/// An aborted reservation is free at once, or when the last writable view is gone.
#[test]
fn aborting_waits_for_writable_views() {
    let word = Word::new();
    assert!(word.reserve().abort(&word));
    word.free();
    let reserved = word.reserve();
    let generation = reserved.generation();
    assert!(word.hold_reserved(&reserved).is_some());
    assert!(!reserved.abort(&word));
    assert!(word.unhold(generation).wake);
    assert!(word.is_abandoned(generation));
}

/// The pin counters stop at their width and leave the neighbouring bits alone.
#[test]
fn saturated_pins_refuse() {
    let (word, generation) = resident();
    (0..0xffff).for_each(|_| assert!(word.lease().is_some()));
    assert_eq!(word.lease(), None);
    assert!(word.hold(generation).is_some());
    assert_eq!(word.resident(), Some(generation));
    (0..0xffff).for_each(|_| assert!(word.unlease(generation).done));
    assert_eq!(word.unlease(generation), Unpinned::default());
    assert!(word.unhold(generation).last);
}
