//! Which chunk goes: the policy's choice, or one of the tenant's own when it would take more than its share.
//!
//! The chunks of each tenant that may go are a list of their own besides, in order of last use, brought up to date when it
//! is searched: a chunk that was used since it was put there moves to the newer end. So both choices take amortised
//! constant time. Without a share nothing is kept for it.

use std::collections::HashMap;

use crate::eviction::{Arrival, Below, Heat, Links, List, Policy};
use crate::key::Key;

#[derive(Debug)]
pub(crate) struct Victims {
    policy: Box<dyn Policy>,
    shares: Option<Shares>,
}

impl Victims {
    /// `limit` is the bytes that one tenant may take.
    pub(crate) fn new(policy: Box<dyn Policy>, slots: usize, limit: Option<u64>) -> Self {
        Self {
            policy,
            shares: limit.map(|limit| Shares::new(slots, limit)),
        }
    }

    /// What keeps a tenant from taking that many bytes more.
    pub(crate) fn room(&self, tenant: &Key, bytes: usize) -> Room {
        let Some(shares) = &self.shares else {
            return Room::Free;
        };
        let used = shares
            .number(tenant)
            .map_or(0, |number| shares.used[number]);
        match bytes as u64 {
            bytes if used + bytes <= shares.limit => Room::Free,
            bytes if bytes <= shares.limit => Room::Taken,
            _ => Room::Never,
        }
    }

    /// A slot has been taken for a tenant.
    pub(crate) fn charge(&mut self, slot: u32, tenant: &Key, bytes: usize) {
        if let Some(shares) = &mut self.shares {
            shares.charge(slot, tenant, bytes as u64);
        }
    }

    /// A slot has been freed.
    pub(crate) fn discharge(&mut self, slot: u32) {
        if let Some(shares) = &mut self.shares {
            shares.discharge(slot);
        }
    }

    /// See [`Policy::insert`].
    pub(crate) fn insert(&mut self, slot: u32, arrival: &Arrival, heat: &dyn Heat) {
        self.policy.insert(slot, arrival, heat);
        if let Some(shares) = &mut self.shares {
            shares.list(slot, heat);
        }
    }

    /// See [`Policy::restore`].
    pub(crate) fn restore(&mut self, slot: u32, heat: &dyn Heat) {
        self.policy.restore(slot, heat);
        if let Some(shares) = &mut self.shares {
            shares.list(slot, heat);
        }
    }

    /// See [`Policy::remove`].
    pub(crate) fn remove(&mut self, slot: u32, heat: &dyn Heat) {
        self.policy.remove(slot, heat);
        if let Some(shares) = &mut self.shares {
            shares.unlist(slot);
        }
    }

    /// See [`Policy::set_copy`].
    pub(crate) fn set_copy(&mut self, slot: u32, place: usize, heat: &dyn Heat) {
        self.policy.set_copy(slot, place, heat);
    }

    /// See [`Policy::set_below`].
    pub(crate) fn set_below(&mut self, place: usize, below: Below) {
        self.policy.set_below(place, below);
    }

    /// Takes out the chunk to go next; of one tenant's, if one is named.
    pub(crate) fn pop(&mut self, tenant: Option<&Key>, heat: &dyn Heat) -> Option<u32> {
        match (&mut self.shares, tenant) {
            (Some(shares), Some(tenant)) => {
                let number = shares.number(tenant)?;
                let slot = shares.oldest(number, heat)?;
                shares.unlist(slot);
                self.policy.give_up(slot, heat);
                Some(slot)
            }
            (shares, _) => {
                let slot = self.policy.pop(heat)?;
                if let Some(shares) = shares {
                    shares.unlist(slot);
                }
                Some(slot)
            }
        }
    }

    /// Memory taken.
    pub(crate) fn bytes(&self) -> usize {
        self.policy.bytes() + self.shares.as_ref().map_or(0, Shares::bytes)
    }
}

/// What a tenant may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Its share has room.
    Free,
    /// It has to give up some of its own first.
    Taken,
    /// It is more than its share.
    Never,
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    tenant: u32,
    bytes: u64,
    /// Its last use when it was put in the list.
    stamp: u64,
}

#[derive(Debug)]
struct Shares {
    limit: u64,
    /// Tenants that have chunks, numbered.
    numbers: HashMap<Key, u32>,
    keys: Vec<Key>,
    used: Vec<u64>,
    lists: Vec<List>,
    spare: Vec<u32>,
    slots: Vec<Slot>,
    links: Links,
}

impl Shares {
    fn new(slots: usize, limit: u64) -> Self {
        Self {
            limit,
            numbers: HashMap::new(),
            keys: Vec::new(),
            used: Vec::new(),
            lists: Vec::new(),
            spare: Vec::new(),
            slots: vec![Slot::default(); slots],
            links: Links::new(slots),
        }
    }

    fn number(&self, tenant: &Key) -> Option<usize> {
        self.numbers.get(tenant).map(|&number| number as usize)
    }

    fn charge(&mut self, slot: u32, tenant: &Key, bytes: u64) {
        let number = *self.numbers.entry(*tenant).or_insert_with(|| {
            if let Some(number) = self.spare.pop() {
                self.keys[number as usize] = *tenant;
                return number;
            }
            self.keys.push(*tenant);
            self.used.push(0);
            self.lists.push(List::default());
            (self.keys.len() - 1) as u32
        });
        self.slots[slot as usize].tenant = number;
        self.slots[slot as usize].bytes = bytes;
        self.used[number as usize] += bytes;
    }

    /// A number may be given to another tenant after the last chunk.
    fn discharge(&mut self, slot: u32) {
        let slot = &mut self.slots[slot as usize];
        let used = &mut self.used[slot.tenant as usize];
        *used -= std::mem::take(&mut slot.bytes);
        if *used == 0
            && self
                .numbers
                .remove(&self.keys[slot.tenant as usize])
                .is_some()
        {
            self.spare.push(slot.tenant);
        }
    }

    fn list(&mut self, slot: u32, heat: &dyn Heat) {
        let at = &mut self.slots[slot as usize];
        at.stamp = heat.touched(slot);
        self.lists[at.tenant as usize].push_newest(&mut self.links, slot);
    }

    fn unlist(&mut self, slot: u32) {
        let tenant = self.slots[slot as usize].tenant;
        self.lists[tenant as usize].remove(&mut self.links, slot);
    }

    /// The least recently used of a tenant's, nearly: what was used since it was listed goes to the newer end first.
    fn oldest(&mut self, tenant: usize, heat: &dyn Heat) -> Option<u32> {
        loop {
            let slot = self.lists[tenant].oldest?;
            if heat.touched(slot) <= self.slots[slot as usize].stamp {
                return Some(slot);
            }
            self.unlist(slot);
            self.list(slot, heat);
        }
    }

    fn bytes(&self) -> usize {
        self.slots.len() * size_of::<Slot>()
            + self.links.bytes()
            + self.used.len() * (size_of::<u64>() + size_of::<List>() + 2 * size_of::<(Key, u32)>())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::eviction::PolicyKind;

    struct Still(Vec<u64>);

    impl Heat for Still {
        fn hits(&self, _: u32) -> u32 {
            0
        }

        fn set_hits(&self, _: u32, _: u32) {}

        fn touched(&self, slot: u32) -> u64 {
            self.0[slot as usize]
        }
    }

    const A: Key = [1; 32];
    const B: Key = [2; 32];

    fn filled(limit: Option<u64>, heat: &Still) -> Victims {
        let mut victims = Victims::new(PolicyKind::Fifo.build(8), 8, limit);
        for slot in 0..6 {
            victims.charge(slot, if slot < 3 { &A } else { &B }, 10);
            victims.insert(slot, &Arrival::default(), heat);
        }
        victims
    }

    #[test]
    fn a_tenant_at_its_share_gives_up_its_own() {
        let heat = Still(vec![0; 8]);
        let mut victims = filled(Some(30), &heat);
        assert_eq!(
            (victims.room(&B, 10), victims.room(&B, 40)),
            (Room::Taken, Room::Never)
        );
        assert_eq!(victims.room(&[3; 32], 30), Room::Free);
        let popped: Vec<_> = (0..4).map(|_| victims.pop(Some(&B), &heat)).collect();
        assert_eq!(
            popped,
            [Some(3), Some(4), Some(5), None],
            "and nobody else's"
        );
        assert_eq!(
            victims.pop(None, &heat),
            Some(0),
            "the policy's own choice for anybody"
        );
        for slot in [3, 4, 5] {
            victims.discharge(slot);
        }
        assert_eq!(victims.room(&B, 30), Room::Free);
        assert_eq!(victims.pop(Some(&B), &heat), None);
        // Its number goes to the next one.
        victims.charge(6, &[4; 32], 30);
        assert_eq!(
            (victims.room(&[4; 32], 1), victims.room(&B, 30)),
            (Room::Taken, Room::Free)
        );
    }

    #[test]
    fn what_was_used_meanwhile_goes_later() {
        let mut heat = Still(vec![0; 8]);
        let mut victims = filled(Some(30), &heat);
        heat.0[0] = 5;
        let popped: Vec<_> = (0..3).map(|_| victims.pop(Some(&A), &heat)).collect();
        assert_eq!(popped, [Some(1), Some(2), Some(0)]);
    }

    #[test]
    fn without_a_share_there_is_room_for_anybody() {
        let heat = Still(vec![0; 8]);
        let mut victims = filled(None, &heat);
        assert_eq!(victims.room(&A, usize::MAX), Room::Free);
        assert_eq!(victims.pop(Some(&B), &heat), Some(0));
    }
}
