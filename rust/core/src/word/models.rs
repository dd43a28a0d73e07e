//! The state machine under every interleaving that loom finds. `memory` stands for the record's bytes: loom reports a read
//! of it that races with a write.
//!
//! `RUSTFLAGS="--cfg loom" cargo test --release -p blendstore-core --lib loom`

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU32;
use loom::thread;

use super::*;

/// One slot, its memory, and how often its owner freed it.
struct Slot {
    word: Word,
    memory: UnsafeCell<u32>,
    woken: AtomicU32,
}

impl Slot {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            word: Word::new(),
            memory: UnsafeCell::new(0),
            woken: AtomicU32::new(0),
        })
    }

    /// Reserves, writes `value` and publishes.
    fn store(&self, value: u32) -> u32 {
        let reserved = self.word.reserve();
        // SAFETY: reserved by this thread, so it alone uses the memory; loom checks that.
        self.memory.with_mut(|memory| unsafe { *memory = value });
        reserved.complete(&self.word).publish(&self.word)
    }

    fn read(&self) -> u32 {
        // SAFETY: the caller has a pin; loom checks that no write overlaps.
        self.memory.with(|memory| unsafe { *memory })
    }

    /// What the ledger does with an abandoned slot: free it, and give it to a new record.
    fn reuse(&self, value: u32) {
        self.word.free();
        self.store(value);
    }

    fn note(&self, unpinned: Unpinned) {
        if unpinned.wake {
            self.woken.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Pin against evict and reuse of the memory: old bytes, new bytes of a new life, or a miss; never a torn read.
#[test]
fn loom_pin_against_evict_and_reuse() {
    loom::model(|| {
        let slot = Slot::new();
        let first = slot.store(1);
        let reader = thread::spawn({
            let slot = slot.clone();
            move || {
                if let Some(pinned) = slot.word.lease() {
                    let expected = if pinned.generation == first { 1 } else { 2 };
                    assert_eq!(slot.read(), expected);
                    slot.note(slot.word.unlease(pinned.generation));
                }
            }
        });
        let taken = slot.word.evict() == Evict::Taken;
        if taken {
            slot.reuse(2);
        }
        reader.join().unwrap();
        // A chunk that was met pinned is handed back exactly once.
        assert_eq!(slot.woken.load(Ordering::Acquire), u32::from(!taken));
    });
}

/// Pin against publish: a reader sees the whole record or nothing.
#[test]
fn loom_pin_against_publish() {
    loom::model(|| {
        let slot = Slot::new();
        let reader = thread::spawn({
            let slot = slot.clone();
            move || {
                if let Some(pinned) = slot.word.lease() {
                    assert_eq!(slot.read(), 7);
                    slot.word.unlease(pinned.generation);
                }
            }
        });
        slot.store(7);
        reader.join().unwrap();
        assert!(slot.word.lease().is_some_and(|pinned| pinned.first));
    });
}

/// Replace (doom) against two readers, one of which holds by name: exactly one side comes to own the slot.
#[test]
fn loom_replace_against_readers() {
    // Three threads: every schedule with at most two preemptions, which is where bugs of this kind show.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let slot = Slot::new();
        let generation = slot.store(1);
        let leaser = thread::spawn({
            let slot = slot.clone();
            move || {
                if let Some(pinned) = slot.word.lease() {
                    let expected = if pinned.generation == generation {
                        1
                    } else {
                        2
                    };
                    assert_eq!(slot.read(), expected);
                    slot.note(slot.word.unlease(pinned.generation));
                }
            }
        });
        let holder = thread::spawn({
            let slot = slot.clone();
            move || {
                if slot.word.hold(generation).is_some() {
                    assert_eq!(slot.read(), 1);
                    slot.note(slot.word.unhold(generation));
                }
            }
        });
        let mine = slot.word.doom();
        if mine {
            slot.reuse(2);
        }
        leaser.join().unwrap();
        holder.join().unwrap();
        assert_eq!(slot.woken.load(Ordering::Acquire) + u32::from(mine), 1);
    });
}

/// A lease's time-out against its own read and release: the reader's hold succeeds and protects, or the slot is gone for
/// it; and the pin is taken back exactly once.
#[test]
fn loom_expiry_against_hold_and_release() {
    loom::model(|| {
        let slot = Slot::new();
        let generation = slot.store(1);
        assert!(slot.word.lease().is_some());
        let reader = thread::spawn({
            let slot = slot.clone();
            move || {
                if slot.word.hold(generation).is_some() {
                    assert_eq!(slot.read(), 1);
                    slot.note(slot.word.unhold(generation));
                }
                let released = slot.word.unlease(generation);
                slot.note(released);
                released.done
            }
        });
        let expired = slot.word.expire(generation, || true) == 1;
        if expired {
            slot.reuse(2);
        }
        let released = reader.join().unwrap();
        assert!(released != expired, "one of the two takes the pin");
        assert_eq!(slot.woken.load(Ordering::Acquire), 0, "nobody waits for it");
    });
}

/// An aborted reservation against the last writable view: one of the two hands the slot back.
#[test]
fn loom_abort_against_a_writable_view() {
    loom::model(|| {
        let slot = Slot::new();
        let reserved = slot.word.reserve();
        let generation = reserved.generation();
        assert!(slot.word.hold_reserved(&reserved).is_some());
        let writer = thread::spawn({
            let slot = slot.clone();
            move || {
                // SAFETY: the only writable view; loom checks that nobody else uses the memory.
                slot.memory.with_mut(|memory| unsafe { *memory = 3 });
                slot.note(slot.word.unhold(generation));
            }
        });
        let mine = reserved.abort(&slot.word);
        if mine {
            slot.reuse(4);
        }
        writer.join().unwrap();
        assert_eq!(slot.woken.load(Ordering::Acquire) + u32::from(mine), 1);
    });
}
