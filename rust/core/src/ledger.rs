//! The ledger: what writers change under one lock. Readers never take it.
//!
//! Invariants, whenever the lock is free:
//! - a resident chunk is indexed, and the policy knows it exactly if it has no children and is not parked;
//! - links form trees; a child's parent is resident; a chunk whose parent is missing is an orphan until it comes;
//! - a slot is either free, reserved by one reservation, resident, or doomed and pinned (or about to be handed back).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use crate::arena::{Allocator, UNIT};
use crate::chunk::{Labels, NIL};
use crate::copies::{self, Speeds};
use crate::events::EventKind;
use crate::eviction::{Arrival, Cost, Heat};
use crate::index::ChunkIndex;
use crate::key::{HEAD_ROOT, Key, SEGMENT_ROOT};
use crate::namespace::Namespace;
use crate::record;
use crate::stats::Read;
use crate::store::Shared;
use crate::victims::{Room, Victims};
use crate::word::{Complete, Evict, Reserved};
use std::sync::atomic::Ordering::Relaxed;

/// Provenance of records that only exact reuse may take: the matcher doesn't know them.
pub(crate) const HEAD: u8 = 0;

/// Counters of the write path.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub chunks: u64,
    pub reservations: u64,
    pub stored: u64,
    pub replaced: u64,
    pub evicted: u64,
    pub aborted: u64,
    pub rejected_full: u64,
}

#[derive(Debug)]
pub(crate) struct Ledger {
    pub allocator: Allocator,
    pub victims: Victims,
    pub counts: Counts,
    pub closed: bool,
    speeds: Speeds,
    /// Keys that a reservation is writing.
    pub writing: HashSet<Key>,
    /// Slots below this one have been used.
    used_slots: u32,
    /// Free slots below it, linked through `next_sibling`.
    free_slot: u32,
    namespaces: Namespaces,
    orphans: Orphans,
    /// Holds that `pin` took, by slot.
    user_pins: HashMap<u32, u32>,
    /// Slots that a writer met pinned, by the time at which their leases will be overdue: (time, slot, generation).
    overdue: BinaryHeap<Reverse<(u64, u32, u32)>>,
}

impl Ledger {
    pub(crate) fn new(capacity_bytes: usize, victims: Victims, speeds: Speeds) -> Self {
        Self {
            allocator: Allocator::new(capacity_bytes),
            victims,
            counts: Counts::default(),
            closed: false,
            speeds,
            writing: HashSet::new(),
            used_slots: 0,
            free_slot: NIL,
            namespaces: Namespaces::default(),
            orphans: Orphans::default(),
            user_pins: HashMap::new(),
            overdue: BinaryHeap::new(),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.allocator.bytes() + self.victims.bytes()
    }

    /// When the next lease on a wanted chunk will be overdue.
    pub(crate) fn next_overdue(&self) -> Option<u64> {
        self.overdue.peek().map(|Reverse((due, ..))| *due)
    }

    /// The slot in which `key` is resident.
    pub(crate) fn resident(&self, store: &Shared, key: &Key) -> Option<(u32, u32)> {
        let slot = store
            .index
            .find(key, |slot| store.chunks.hot(slot).has_key(key))?;
        store
            .chunks
            .word(slot)
            .resident()
            .map(|generation| (slot, generation))
    }

    /// A slot with room for `bytes` in the arena for a tenant, evicting as much as that takes: its own chunks where it would
    /// have more than its share, else what the policy chooses.
    pub(crate) fn place(
        &mut self,
        store: &Shared,
        tenant: &Key,
        bytes: usize,
    ) -> Option<(u32, Reserved)> {
        self.settle(store);
        let taken = bytes.next_multiple_of(UNIT);
        loop {
            let own = match self.victims.room(tenant, taken) {
                Room::Never => return None,
                Room::Taken => Some(tenant),
                Room::Free => None,
            };
            let slot_left =
                self.free_slot != NIL || (self.used_slots as usize) < store.chunks.len();
            if own.is_none()
                && slot_left
                && let Some(block) = self.allocator.alloc(bytes)
            {
                let (slot, reserved) = self.take_slot(store, block);
                self.victims.charge(slot, tenant, taken);
                return Some((slot, reserved));
            }
            if !self.evict_one(store, own) {
                return None;
            }
        }
    }

    fn take_slot(&mut self, store: &Shared, block: u32) -> (u32, Reserved) {
        let slot = self.free_slot;
        let slot = if slot == NIL {
            self.used_slots += 1;
            self.used_slots - 1
        } else {
            self.free_slot = store.chunks.cold(slot).next_sibling.load(Relaxed);
            slot
        };
        let (hot, cold) = (store.chunks.hot(slot), store.chunks.cold(slot));
        let reserved = hot.word.reserve();
        hot.offset.store(self.allocator.offset(block), Relaxed);
        cold.block.store(block, Relaxed);
        for link in [
            &cold.parent,
            &cold.first_child,
            &cold.next_sibling,
            &cold.previous_sibling,
        ] {
            link.store(NIL, Relaxed);
        }
        (slot, reserved)
    }

    /// Frees a doomed slot without pins.
    fn release(&mut self, store: &Shared, slot: u32) {
        let cold = store.chunks.cold(slot);
        self.allocator.free(cold.block.load(Relaxed));
        self.victims.discharge(slot);
        cold.next_sibling.store(self.free_slot, Relaxed);
        store.chunks.word(slot).free();
        self.free_slot = slot;
    }

    /// Takes in what readers have handed back, and what time-outs have run out on.
    pub(crate) fn settle(&mut self, store: &Shared) {
        for (slot, generation) in store.returns.take() {
            let word = store.chunks.word(slot);
            if word.is_abandoned(generation) {
                self.release(store, slot);
            } else if word.is_resident(generation) {
                word.unpark();
                self.list_if_leaf(store, slot);
            }
        }
        let now = store.now();
        while self.next_overdue().is_some_and(|due| due <= now) {
            let Some(Reverse((_, slot, generation))) = self.overdue.pop() else {
                break;
            };
            self.expire(store, slot, generation, now);
        }
    }

    /// Takes the chunk from leases that are overdue; otherwise asks again later.
    fn expire(&mut self, store: &Shared, slot: u32, generation: u32, now: u64) {
        let word = store.chunks.word(slot);
        let timeout = store.lease_timeout();
        let due = || store.chunks.touched(slot).saturating_add(timeout);
        let was_resident = word.is_resident(generation);
        if was_resident && store.chunks.cold(slot).first_child.load(Relaxed) != NIL {
            // It has become a parent since: its turn comes when its children have gone.
            word.unpark();
            return;
        }
        let nbytes = store.chunks.hot(slot).nbytes() as u64;
        let taken = word.expire(generation, || due() <= now);
        if taken > 0 {
            store.reads.add(Read::Expired, u64::from(taken));
            store.reads.subtract(Read::BytesPinned, nbytes);
            if was_resident {
                self.detach(store, slot, Detach::Evicted);
                self.counts.evicted += 1;
            }
            self.release(store, slot);
        } else if word.is_pinned(generation) {
            let again = if due() > now {
                due()
            } else {
                now.saturating_add(timeout)
            };
            self.overdue.push(Reverse((again, slot, generation)));
        }
    }

    /// Remembers to look at a slot again that was met pinned.
    fn wait_for(&mut self, store: &Shared, slot: u32, generation: u32) {
        let due = store
            .chunks
            .touched(slot)
            .saturating_add(store.lease_timeout());
        self.overdue.push(Reverse((due, slot, generation)));
    }

    /// Evicts one chunk, of one tenant's if one is named; false when every such chunk is pinned.
    fn evict_one(&mut self, store: &Shared, tenant: Option<&Key>) -> bool {
        while let Some(slot) = self.victims.pop(tenant, &store.chunks) {
            self.set_labels(store, slot, |labels| labels.listed = false);
            let word = store.chunks.word(slot);
            let generation = word
                .resident()
                .expect("the policy knows resident chunks only");
            match word.evict() {
                Evict::Taken => {
                    self.detach(store, slot, Detach::Evicted);
                    self.counts.evicted += 1;
                    self.release(store, slot);
                    return true;
                }
                Evict::Pinned => self.wait_for(store, slot, generation),
            }
        }
        false
    }

    /// Makes a written chunk resident. False when the index has no room for it: the chunk is given up.
    pub(crate) fn publish(
        &mut self,
        store: &Shared,
        slot: u32,
        complete: Complete,
        namespace: &Namespace,
        parent_key: &Key,
    ) -> bool {
        let (hot, cold) = (store.chunks.hot(slot), store.chunks.cold(slot));
        let key = hot.key();
        self.writing.remove(&key);
        let old = self.resident(store, &key);
        let parent = self.resident(store, parent_key).map(|(parent, _)| parent);
        cold.namespace
            .store(self.namespaces.enter(namespace), Relaxed);
        hot.reset_use(store.now());
        let generation = complete.publish(&hot.word);
        match old {
            Some((old, _)) => store.index.replace(&key, old, slot),
            None if store.index.insert(&key, slot) => {}
            None => {
                self.namespaces.leave(cold.namespace.load(Relaxed));
                self.give_up(store, slot);
                self.counts.rejected_full += 1;
                return false;
            }
        }
        self.counts.chunks += 1;
        if let Some((old, _)) = old {
            self.adopt_all(store, old, slot);
            self.move_user_pins(store, old, slot, generation);
            let abandoned = store.chunks.word(old).doom();
            self.detach(store, old, Detach::Replaced);
            self.dispose(store, old, abandoned);
            self.counts.replaced += 1;
        } else {
            self.counts.stored += 1;
        }
        match parent {
            Some(parent) => self.link(store, slot, parent),
            None if *parent_key != SEGMENT_ROOT && *parent_key != HEAD_ROOT => {
                self.orphans.add(*parent_key, slot);
                self.set_labels(store, slot, |labels| labels.orphan = true);
            }
            None => {}
        }
        for orphan in self.orphans.claim(&key) {
            self.set_labels(store, orphan, |labels| labels.orphan = false);
            self.link(store, orphan, slot);
        }
        self.list_new(store, slot, parent);
        if cold.labels().provenance != HEAD {
            // SAFETY: resident under the lock, so it stays until the call ends.
            let tokens = unsafe { record::tokens(&store.arena, &store.chunks, slot) };
            store.matcher.insert(namespace.digest(), slot, tokens);
        }
        store.event(
            if old.is_some() {
                EventKind::Replaced
            } else {
                EventKind::Stored
            },
            key,
        );
        true
    }

    /// Gives up a slot that is not resident yet.
    pub(crate) fn abort(&mut self, store: &Shared, slot: u32, reserved: Reserved) {
        let hot = store.chunks.hot(slot);
        self.writing.remove(&hot.key());
        self.counts.aborted += 1;
        if reserved.abort(&hot.word) {
            self.release(store, slot);
        }
    }

    fn give_up(&mut self, store: &Shared, slot: u32) {
        let abandoned = store.chunks.word(slot).doom();
        self.dispose(store, slot, abandoned);
    }

    /// Frees a doomed slot now, or when its pins are gone or overdue.
    fn dispose(&mut self, store: &Shared, slot: u32, abandoned: bool) {
        if abandoned {
            self.release(store, slot);
        } else if let Some(generation) = store.chunks.word(slot).doomed() {
            self.wait_for(store, slot, generation);
        }
    }

    /// Undoes `publish` for a chunk that has just been doomed.
    fn detach(&mut self, store: &Shared, slot: u32, why: Detach) {
        let (hot, cold) = (store.chunks.hot(slot), store.chunks.cold(slot));
        let key = hot.key();
        let labels = cold.labels();
        let number = cold.namespace.load(Relaxed);
        if labels.listed {
            self.victims.remove(slot, &store.chunks);
            self.set_labels(store, slot, |labels| labels.listed = false);
        }
        if why != Detach::Replaced {
            store.index.remove(&key, slot);
        }
        if labels.provenance != HEAD {
            // SAFETY: doomed under the lock and not released yet, so its bytes stay until the call ends.
            let (digest, tokens) = unsafe {
                let (arena, chunks) = (&store.arena, &store.chunks);
                (
                    record::namespace(arena, chunks, slot),
                    record::tokens(arena, chunks, slot),
                )
            };
            store.matcher.remove(digest, slot, tokens);
        }
        if labels.orphan {
            self.orphans.remove(slot);
        }
        // A replaced chunk's parent is about to get the new one as its child, so it is no leaf in between.
        self.unlink(store, slot, why != Detach::Replaced);
        let mut child = cold.first_child.load(Relaxed);
        while child != NIL {
            // Only `clear` takes a parent before its children, and it is about to take them too.
            let cold = store.chunks.cold(child);
            cold.parent.store(NIL, Relaxed);
            cold.previous_sibling.store(NIL, Relaxed);
            child = cold.next_sibling.swap(NIL, Relaxed);
        }
        self.namespaces.leave(number);
        self.counts.chunks -= 1;
        match why {
            Detach::Evicted => store.event(EventKind::Evicted, key),
            Detach::Cleared => store.event(EventKind::Cleared, key),
            Detach::Replaced => {}
        }
    }

    /// Drops every chunk of a namespace, or all. Returns how many.
    pub(crate) fn clear(&mut self, store: &Shared, namespace: Option<&Namespace>) -> usize {
        self.settle(store);
        let only = match namespace.map(|namespace| self.namespaces.find(namespace)) {
            Some(None) => return 0,
            Some(found) => found,
            None => None,
        };
        let mut cleared = 0;
        for slot in 0..self.used_slots {
            let word = store.chunks.word(slot);
            let inside =
                only.is_none_or(|number| store.chunks.cold(slot).namespace.load(Relaxed) == number);
            let Some(generation) = word.resident().filter(|_| inside) else {
                continue;
            };
            for _ in 0..self.user_pins.remove(&slot).unwrap_or(0) {
                store.unhold(slot, generation);
            }
            let abandoned = word.doom();
            self.detach(store, slot, Detach::Cleared);
            self.dispose(store, slot, abandoned);
            cleared += 1;
        }
        cleared
    }

    /// Notes that the resident record in a slot has a copy in a tier, or none any more.
    pub(crate) fn set_copy(&mut self, store: &Shared, slot: u32, level: usize, there: bool) {
        let Some(bit) = 1_u8.checked_shl(level as u32) else {
            return;
        };
        let before = store.chunks.cold(slot).labels().copies;
        let after = if there { before | bit } else { before & !bit };
        self.set_labels(store, slot, |labels| labels.copies = after);
        if copies::place(before) != copies::place(after) {
            self.victims
                .set_copy(slot, copies::place(after), &store.chunks);
        }
    }

    /// Takes note of how fast things are, for the policy.
    pub(crate) fn set_speeds(&mut self, change: impl FnOnce(&mut Speeds)) {
        change(&mut self.speeds);
        for (place, below) in self.speeds.below() {
            self.victims.set_below(place, below);
        }
    }

    /// Pins a resident chunk until `unpin`.
    pub(crate) fn pin(&mut self, store: &Shared, key: &Key) -> bool {
        let Some((slot, generation)) = self.resident(store, key) else {
            return false;
        };
        let held = store.hold(slot, generation);
        if held {
            *self.user_pins.entry(slot).or_insert(0) += 1;
        }
        held
    }

    /// Takes one `pin` back.
    pub(crate) fn unpin(&mut self, store: &Shared, key: &Key) -> bool {
        let Some((slot, generation)) = self.resident(store, key) else {
            return false;
        };
        let Some(count) = self.user_pins.get_mut(&slot) else {
            return false;
        };
        *count -= 1;
        if *count == 0 {
            self.user_pins.remove(&slot);
        }
        store.unhold(slot, generation);
        true
    }

    /// The pins of users go with the key, to the record that replaces the one they were on.
    fn move_user_pins(&mut self, store: &Shared, old: u32, new: u32, new_generation: u32) {
        let Some(count) = self.user_pins.remove(&old) else {
            return;
        };
        let old_generation = store
            .chunks
            .word(old)
            .resident()
            .expect("replaced while resident");
        let moved = (0..count)
            .take_while(|_| store.hold(new, new_generation))
            .count() as u32;
        for _ in 0..count {
            store.unhold(old, old_generation);
        }
        if moved > 0 {
            self.user_pins.insert(new, moved);
        }
    }

    /// Makes `child` the newest child of `parent`.
    fn link(&mut self, store: &Shared, child: u32, parent: u32) {
        let (child_links, parent_links) = (store.chunks.cold(child), store.chunks.cold(parent));
        let next = parent_links.first_child.load(Relaxed);
        child_links.parent.store(parent, Relaxed);
        child_links.previous_sibling.store(NIL, Relaxed);
        child_links.next_sibling.store(next, Relaxed);
        if next != NIL {
            store
                .chunks
                .cold(next)
                .previous_sibling
                .store(child, Relaxed);
        }
        parent_links
            .first_child
            .store(child, std::sync::atomic::Ordering::Release);
        if parent_links.labels().listed {
            self.victims.remove(parent, &store.chunks);
            self.set_labels(store, parent, |labels| labels.listed = false);
        }
    }

    fn unlink(&mut self, store: &Shared, child: u32, restore_parent: bool) {
        let cold = store.chunks.cold(child);
        let parent = cold.parent.swap(NIL, Relaxed);
        if parent == NIL {
            return;
        }
        let previous = cold.previous_sibling.swap(NIL, Relaxed);
        let next = cold.next_sibling.swap(NIL, Relaxed);
        if previous == NIL {
            store.chunks.cold(parent).first_child.store(next, Relaxed);
        } else {
            store
                .chunks
                .cold(previous)
                .next_sibling
                .store(next, Relaxed);
        }
        if next != NIL {
            store
                .chunks
                .cold(next)
                .previous_sibling
                .store(previous, Relaxed);
        }
        if restore_parent {
            self.list_if_leaf(store, parent);
        }
    }

    /// Moves the children of `old` to `new`.
    fn adopt_all(&mut self, store: &Shared, old: u32, new: u32) {
        let mut child = store.chunks.cold(old).first_child.load(Relaxed);
        while child != NIL {
            let next = store.chunks.cold(child).next_sibling.load(Relaxed);
            self.unlink(store, child, false);
            self.link(store, child, new);
            child = next;
        }
    }

    /// Lets the policy have a chunk that has just been published.
    fn list_new(&mut self, store: &Shared, slot: u32, parent: Option<u32>) {
        let (hot, cold) = (store.chunks.hot(slot), store.chunks.cold(slot));
        let key = hot.key();
        let (tokens, position) = (
            hot.ntokens.load(Relaxed),
            cold.source_position.load(Relaxed),
        );
        let arrival = Arrival {
            fingerprint: u64::from_le_bytes(key[24..].try_into().expect("eight bytes")),
            tokens,
            position,
            compute: Cost::default().per_token(tokens, position),
            head: position == cold.segment_offset.load(Relaxed),
            unfull: (tokens as usize) < store.options.chunk_size,
            parent,
        };
        self.speeds.record(hot.bytes_per_token.load(Relaxed));
        self.victims.insert(slot, &arrival, &store.chunks);
        if cold.first_child.load(Relaxed) == NIL && hot.word.is_listable() {
            self.set_labels(store, slot, |labels| labels.listed = true);
        } else {
            self.victims.remove(slot, &store.chunks);
        }
    }

    /// Lets the policy have a resident chunk without children, unless it has it or the chunk waits for its last pin.
    fn list_if_leaf(&mut self, store: &Shared, slot: u32) {
        let (hot, cold) = (store.chunks.hot(slot), store.chunks.cold(slot));
        if cold.first_child.load(Relaxed) == NIL && !cold.labels().listed && hot.word.is_listable()
        {
            self.victims.restore(slot, &store.chunks);
            self.set_labels(store, slot, |labels| labels.listed = true);
        }
    }

    fn set_labels(&self, store: &Shared, slot: u32, change: impl FnOnce(&mut Labels)) {
        let cold = store.chunks.cold(slot);
        let mut labels = cold.labels();
        change(&mut labels);
        cold.set_labels(labels);
    }
}

/// Why a chunk leaves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Detach {
    Evicted,
    Cleared,
    Replaced,
}

/// Namespaces that have chunks, numbered.
#[derive(Debug, Default)]
struct Namespaces {
    numbers: HashMap<[u8; 32], u32>,
    entries: Vec<([u8; 32], u32)>,
    spare: Vec<u32>,
}

impl Namespaces {
    /// Number of the namespace, with one chunk more.
    fn enter(&mut self, namespace: &Namespace) -> u32 {
        let number = *self.numbers.entry(*namespace.digest()).or_insert_with(|| {
            let entry = (*namespace.digest(), 0);
            if let Some(number) = self.spare.pop() {
                self.entries[number as usize] = entry;
                return number;
            }
            self.entries.push(entry);
            (self.entries.len() - 1) as u32
        });
        self.entries[number as usize].1 += 1;
        number
    }

    /// One chunk less; the number may be given to another namespace after the last.
    fn leave(&mut self, number: u32) {
        let (digest, chunks) = &mut self.entries[number as usize];
        *chunks -= 1;
        if *chunks == 0 {
            self.numbers.remove(&*digest);
            self.spare.push(number);
        }
    }

    fn find(&self, namespace: &Namespace) -> Option<u32> {
        self.numbers.get(namespace.digest()).copied()
    }
}

/// Resident chunks whose parent is not, by its key.
#[derive(Debug, Default)]
struct Orphans {
    by_parent: HashMap<Key, Vec<u32>>,
    parents: HashMap<u32, Key>,
}

impl Orphans {
    fn add(&mut self, parent: Key, slot: u32) {
        self.by_parent.entry(parent).or_default().push(slot);
        self.parents.insert(slot, parent);
    }

    fn remove(&mut self, slot: u32) {
        let Some(parent) = self.parents.remove(&slot) else {
            return;
        };
        if let Some(slots) = self.by_parent.get_mut(&parent) {
            slots.retain(|&other| other != slot);
            if slots.is_empty() {
                self.by_parent.remove(&parent);
            }
        }
    }

    fn claim(&mut self, parent: &Key) -> Vec<u32> {
        let slots = self.by_parent.remove(parent).unwrap_or_default();
        for slot in &slots {
            self.parents.remove(slot);
        }
        slots
    }
}
