//! Memory above a tier that is a map of frames, with faults on demand.

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use blendstore_codec::Frame;
use blendstore_core::{Options as MemoryOptions, Request};

use super::*;
use crate::loads::Outcome;
use crate::meter::Meter;
use crate::tier::Sink;

const PER_TOKEN: usize = 64;
const CHUNK: usize = 8;

type Damage = fn(&Key, &mut Vec<u8>);

/// A tier in memory. `damage` is done to each frame on its way out; `gate` holds each `get` until it is opened, and
/// `broom` each `clear`.
#[derive(Debug, Default)]
struct Shelf {
    frames: Mutex<HashMap<Key, Vec<u8>>>,
    damage: Mutex<Option<Damage>>,
    gate: Mutex<()>,
    broom: Mutex<()>,
    clears: AtomicU64,
    gets: AtomicU64,
    /// Stores nothing.
    full: AtomicBool,
    /// What it says that it has lost.
    lost: Mutex<Vec<Key>>,
    meter: Meter,
}

impl Tier for Shelf {
    fn name(&self) -> &str {
        "shelf"
    }

    fn contains(&self, keys: &[Key]) -> Vec<u8> {
        let frames = self.frames.lock().expect("no panic");
        keys.iter()
            .map(|key| frames.contains_key(key).into())
            .collect()
    }

    fn get(&self, keys: &[Key], sink: &mut dyn Sink) {
        let _gate = self.gate.lock();
        self.gets.fetch_add(keys.len() as u64, SeqCst);
        for (index, key) in keys.iter().enumerate() {
            let found = self.frames.lock().expect("no panic").get(key).cloned();
            if let Some(mut frame) = found {
                if let Some(damage) = *self.damage.lock().expect("no panic") {
                    damage(key, &mut frame);
                }
                sink.frame(index, &frame);
            }
        }
    }

    fn put(&self, frames: &[Frame<'_>]) -> usize {
        if self.full.load(SeqCst) {
            return 0;
        }
        let mut shelf = self.frames.lock().expect("no panic");
        for frame in frames {
            let bytes = [frame.head.bytes(), frame.payload].concat();
            shelf.insert(frame.head.header.key, bytes);
        }
        frames.len()
    }

    fn remove(&self, keys: &[Key]) {
        let mut shelf = self.frames.lock().expect("no panic");
        for key in keys {
            shelf.remove(key);
        }
    }

    fn clear(&self, namespace: Option<&Key>) {
        self.clears.fetch_add(1, SeqCst);
        let _broom = self.broom.lock();
        self.frames.lock().expect("no panic").retain(|_, frame| {
            let head = Frame::parse(frame).expect("ours").head;
            namespace.is_some_and(|namespace| *namespace != head.header.namespace)
        });
    }

    fn lost(&self) -> Vec<Key> {
        std::mem::take(&mut *self.lost.lock().expect("no panic"))
    }

    fn stats(&self) -> TierStats {
        self.meter.stats()
    }

    fn close(&self) {}
}

fn namespace(salt: &[u8]) -> Namespace {
    Namespace::new(&[("model", b"weights")], salt)
}

fn memory(records: usize) -> Store {
    Store::open(MemoryOptions {
        capacity_bytes: records * 1024,
        chunk_size: CHUNK,
        reserve_wait: Duration::from_millis(20),
        ..MemoryOptions::default()
    })
    .expect("memory")
}

fn above(shelves: &[Arc<Shelf>], records: usize) -> TieredStore {
    let levels = shelves
        .iter()
        .map(|shelf| Level::raw(shelf.clone()))
        .collect();
    TieredStore::new(memory(records), levels, &Options::default()).expect("threads")
}

fn document(seed: u32, chunks: usize) -> Vec<u32> {
    (0..(chunks * CHUNK) as u32)
        .map(|n| seed * 1000 + n)
        .collect()
}

fn payload(key: &Key) -> Vec<u8> {
    key.iter()
        .copied()
        .cycle()
        .take(CHUNK * PER_TOKEN)
        .collect()
}

/// Stores a document and returns its keys.
fn put(store: &TieredStore, salt: &[u8], tokens: &[u32]) -> Vec<Key> {
    let request = Request {
        bytes_per_token: PER_TOKEN,
        source_position: 5,
        provenance: 2,
        rank: 3,
        behind: &[[9; 32]],
        behind_tokens: 5,
        with_scores: true,
        ..Request::default()
    };
    let reservation = store
        .reserve(&namespace(salt), tokens, &request)
        .expect("room");
    for index in 0..reservation.len() {
        if reservation.wanted()[index] != 0 {
            reservation
                .payload(index)
                .expect("wanted")
                .copy_from(&payload(&reservation.keys()[index]));
            reservation
                .set_scores(index, &[index as f32; CHUNK])
                .expect("scores");
        }
    }
    reservation.commit(None).expect("published");
    reservation.keys().to_vec()
}

fn flush(store: &TieredStore) {
    assert!(
        store.flush(Duration::from_secs(30)),
        "everything is written"
    );
}

fn load(store: &TieredStore, salt: &[u8], keys: &[Key]) -> Vec<Outcome> {
    let ticket = store.prefetch(&namespace(salt), keys);
    assert!(ticket.wait(Duration::from_secs(30)), "loads end");
    ticket.outcomes()
}

/// What was committed comes back from below, whole: payload, tokens, scores, labels and links.
#[test]
fn records_come_back_as_they_went() {
    let shelf = Arc::new(Shelf::default());
    let first = above(std::slice::from_ref(&shelf), 16);
    let tokens = document(1, 3);
    let keys = put(&first, b"a", &tokens);
    flush(&first);
    let before: Vec<_> = keys
        .iter()
        .map(|key| first.record(key).expect("resident").meta())
        .collect();
    drop(first);
    let second = above(&[shelf], 16);
    assert_eq!(second.tier_of(&keys), [1; 3]);
    assert_eq!(load(&second, b"a", &keys), [Outcome::Loaded; 3]);
    assert_eq!(second.tier_of(&keys), [0; 3]);
    for (index, key) in keys.iter().enumerate() {
        let record = second.record(key).expect("loaded");
        assert_eq!(record.meta(), before[index]);
        assert_eq!(record.payload(), payload(key));
        assert_eq!(record.tokens(), &tokens[index * CHUNK..][..CHUNK]);
        assert_eq!(record.scores(), Some(&[index as f32; CHUNK][..]));
        let parent = if index == 0 {
            blendstore_core::key::SEGMENT_ROOT
        } else {
            keys[index - 1]
        };
        assert_eq!(record.parent(), parent);
    }
    let found = second.matches(&namespace(b"a"), &[document(7, 1), tokens].concat(), 8);
    assert_eq!(found.len(), 3, "the matcher knows loaded chunks");
    let stats = second.load_stats();
    assert_eq!(
        (stats.requested, stats.loaded, stats.missed, stats.in_flight),
        (3, 3, 0, 0)
    );
}

/// Case f01: a damaged, truncated or foreign record is a miss; the others of the same request arrive.
#[test]
fn case_f01_one_bad_record_of_five_is_one_miss() {
    let damages: [fn(&mut Vec<u8>); 4] = [
        |frame| *frame.last_mut().expect("bytes") ^= 1,
        |frame| frame.truncate(300),
        |frame| frame.extend([0; 8]),
        |frame| frame.clear(),
    ];
    for (number, damage) in damages.iter().enumerate() {
        let shelf = Arc::new(Shelf::default());
        let store = above(std::slice::from_ref(&shelf), 32);
        let keys = put(&store, b"a", &document(1, 5));
        flush(&store);
        store.memory().clear(None);
        damage(
            shelf
                .frames
                .lock()
                .expect("no panic")
                .get_mut(&keys[3])
                .expect("there"),
        );
        let outcomes = load(&store, b"a", &keys);
        let expected = [
            Outcome::Loaded,
            Outcome::Loaded,
            Outcome::Loaded,
            Outcome::Missed,
            Outcome::Loaded,
        ];
        assert_eq!(outcomes, expected, "damage {number}");
        assert_eq!(store.load_stats().refused, 1);
        assert_eq!(store.lookup(&keys).hits(), [1, 1, 1, 0, 1]);
        assert_eq!(
            store.stats().reservations,
            0,
            "the room of the refused record is given back"
        );
    }
}

/// Case c03: another key's record under a key, and another tenant's, are refused whatever the tier says.
#[test]
fn case_c03_another_keys_record_is_a_miss() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 32);
    let keys = put(&store, b"a", &document(1, 1));
    let others = put(&store, b"b", &document(1, 1));
    flush(&store);
    store.memory().clear(None);
    let mut frames = shelf.frames.lock().expect("no panic");
    let foreign = frames[&others[0]].clone();
    frames.insert(keys[0], foreign);
    drop(frames);
    assert_eq!(load(&store, b"a", &keys), [Outcome::Missed]);
    assert_eq!(load(&store, b"b", &others), [Outcome::Loaded]);
}

/// Case s13: a tenant that somehow knows another's key gets nothing by it, from any tier, and clears only its own.
#[test]
fn case_s13_tenants_share_nothing_below_memory() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 32);
    let (a, b) = (
        put(&store, b"a", &document(1, 2)),
        put(&store, b"b", &document(1, 2)),
    );
    assert!(
        a.iter().all(|key| !b.contains(key)),
        "equal documents have other keys"
    );
    flush(&store);
    store.memory().clear(None);
    assert_eq!(load(&store, b"b", &a), [Outcome::Missed; 2]);
    assert_eq!(
        load(&store, b"a", &a),
        [Outcome::Loaded; 2],
        "asking for it has not made it go"
    );
    store.clear(Some(&namespace(b"a")));
    assert_eq!(store.tier_of(&a), [255; 2]);
    assert_eq!(store.tier_of(&b), [1; 2]);
    assert_eq!(load(&store, b"a", &a), [Outcome::Missed; 2]);
    assert_eq!(load(&store, b"b", &b), [Outcome::Loaded; 2]);
}

/// Two who want the same missing chunk share one load; both get it.
#[test]
fn two_loads_of_one_key_are_one() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 32);
    let keys = put(&store, b"a", &document(1, 2));
    flush(&store);
    store.memory().clear(None);
    let gate = shelf.gate.lock().expect("no panic");
    let first = store.prefetch(&namespace(b"a"), &keys);
    let second = store.prefetch(&namespace(b"a"), &keys);
    assert!(
        !first.wait(Duration::from_millis(20)),
        "a tier that hangs holds nobody longer than asked"
    );
    assert!(!second.poll());
    drop(gate);
    for ticket in [&first, &second] {
        assert!(ticket.wait(Duration::from_secs(30)));
        assert_eq!(ticket.outcomes(), [Outcome::Loaded; 2]);
    }
    assert_eq!(shelf.gets.load(SeqCst), 2, "each key was read once");
    assert_eq!(store.load_stats().coalesced, 2);
}

/// A ticket's records stay in memory while it lives, and its descriptor tells of the end without a wait.
#[test]
fn a_ticket_pins_and_tells_by_descriptor() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 4);
    let keys = put(&store, b"a", &document(1, 2));
    flush(&store);
    store.memory().clear(None);
    let gate = shelf.gate.lock().expect("no panic");
    let ticket = store.prefetch(&namespace(b"a"), &keys);
    let readable = |at_most: i32| {
        let mut poll = libc::pollfd {
            fd: ticket.fd().expect("a pipe"),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one descriptor that lives through the call.
        unsafe { libc::poll(&mut poll, 1, at_most) == 1 }
    };
    assert!(!readable(0));
    drop(gate);
    assert!(readable(30_000));
    assert!(readable(0), "it stays readable");
    for seed in 2..9 {
        put(&store, b"a", &document(seed, 2));
    }
    assert_eq!(store.contains(&keys), [1, 1], "pinned by the ticket");
    drop(ticket);
    for seed in 12..19 {
        put(&store, b"a", &document(seed, 2));
    }
    assert_eq!(store.contains(&keys), [0, 0], "and no longer");
}

/// Who cancels waits no more; keys that nobody waits for are not loaded.
#[test]
fn cancelled_keys_are_not_loaded() {
    let shelf = Arc::new(Shelf::default());
    let levels = vec![Level::raw(shelf.clone())];
    let options = Options {
        loaders: 1,
        ..Options::default()
    };
    let store = TieredStore::new(memory(32), levels, &options).expect("threads");
    let (a, b) = (
        put(&store, b"a", &document(1, 1)),
        put(&store, b"a", &document(2, 1)),
    );
    flush(&store);
    store.memory().clear(None);
    let gate = shelf.gate.lock().expect("no panic");
    let first = store.prefetch(&namespace(b"a"), &a);
    while store.tiers.loads.waiting() > 0 {
        std::thread::yield_now();
    }
    let second = store.prefetch(&namespace(b"a"), &b);
    second.cancel();
    assert!(second.poll());
    assert_eq!(second.outcomes(), [Outcome::Cancelled]);
    drop(gate);
    assert!(first.wait(Duration::from_secs(30)));
    let third = store.prefetch(&namespace(b"a"), &[[1; 32]]);
    assert!(
        third.wait(Duration::from_secs(30)),
        "behind the cancelled one in the queue"
    );
    assert_eq!(store.contains(&b), [0]);
    assert_eq!(store.load_stats().cancelled, 1);
}

/// What is cleared while it is on its way does not come back.
#[test]
fn a_clear_overtakes_loads_and_writes() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 32);
    let keys = put(&store, b"a", &document(1, 2));
    flush(&store);
    store.memory().clear(None);
    let gate = shelf.gate.lock().expect("no panic");
    let ticket = store.prefetch(&namespace(b"a"), &keys);
    store.clear(Some(&namespace(b"a")));
    drop(gate);
    assert!(ticket.wait(Duration::from_secs(30)));
    assert_eq!(ticket.outcomes(), [Outcome::Missed; 2]);
    let queued = put(&store, b"a", &document(2, 2));
    store.clear(None);
    flush(&store);
    assert_eq!(store.tier_of(&queued), [255; 2]);
}

/// A writer who was slow to tell the tiers of its commit does not bring back what was cleared since.
#[test]
fn what_is_queued_after_its_clear_reaches_no_tier() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 32);
    let keys = put(&store, b"a", &document(1, 2));
    flush(&store);
    let late: Vec<_> = keys
        .iter()
        .map(|key| Arc::new(store.record(key).expect("resident")))
        .collect();
    store.clear(Some(&namespace(b"a")));
    store.tiers.writes[0].push(&late);
    flush(&store);
    assert_eq!(store.tier_of(&keys), [255; 2]);
    let again = put(&store, b"a", &document(1, 2));
    store.tiers.writes[0].push(&late);
    flush(&store);
    assert_eq!(shelf.contains(&again), [1; 2], "what was stored since is");
    let (_, stats) = &store.tier_stats()[0];
    assert_eq!((stats.dropped, stats.queued, stats.queued_bytes), (0, 0, 0));
}

/// A load that is asked for while a clear is under way finds nothing in the tiers that are still to be cleared.
#[test]
fn a_load_during_a_clear_brings_nothing_back() {
    let (near, far) = (Arc::new(Shelf::default()), Arc::new(Shelf::default()));
    let store = above(&[near.clone(), far.clone()], 32);
    let (mine, theirs) = (
        put(&store, b"a", &document(1, 2)),
        put(&store, b"b", &document(1, 2)),
    );
    flush(&store);
    store.memory().clear(None);
    let broom = near.broom.lock().expect("no panic");
    std::thread::scope(|scope| {
        let clearing = scope.spawn(|| store.clear(Some(&namespace(b"a"))));
        while near.clears.load(SeqCst) == 0 {
            std::thread::yield_now();
        }
        assert_eq!(far.contains(&mine), [1; 2], "not cleared yet");
        assert_eq!(load(&store, b"a", &mine), [Outcome::Missed; 2]);
        assert_eq!(load(&store, b"b", &theirs), [Outcome::Loaded; 2]);
        drop(broom);
        clearing.join().expect("no panic");
    });
    flush(&store);
    assert_eq!(store.tier_of(&mine), [255; 2]);
    let again = put(&store, b"a", &document(1, 2));
    flush(&store);
    store.memory().clear(None);
    assert_eq!(load(&store, b"a", &again), [Outcome::Loaded; 2]);
}

/// A record from a lower tier is written to those above it, too.
#[test]
fn what_comes_from_far_is_kept_near() {
    let (near, far) = (Arc::new(Shelf::default()), Arc::new(Shelf::default()));
    let store = above(&[near.clone(), far.clone()], 32);
    let keys = put(&store, b"a", &document(1, 2));
    flush(&store);
    store.memory().clear(None);
    near.remove(&keys);
    assert_eq!(store.tier_of(&keys), [2, 2]);
    assert_eq!(load(&store, b"a", &keys), [Outcome::Loaded; 2]);
    flush(&store);
    assert_eq!(near.contains(&keys), [1, 1]);
}

/// A queue that is full drops nothing that memory still has: it is written once there is room.
#[test]
fn a_full_queue_is_made_up_for_while_memory_has_the_records() {
    let shelf = Arc::new(Shelf::default());
    let options = Options {
        queue_bytes: Some((3 * CHUNK * PER_TOKEN) as u64),
        ..Options::default()
    };
    let store =
        TieredStore::new(memory(64), vec![Level::raw(shelf.clone())], &options).expect("threads");
    let keys: Vec<Key> = (0..20)
        .flat_map(|seed| put(&store, b"a", &document(seed, 2)))
        .collect();
    flush(&store);
    assert_eq!(shelf.contains(&keys), [1; 40]);
    let (_, stats) = &store.tier_stats()[0];
    assert_eq!((stats.dropped, stats.queued, stats.queued_bytes), (0, 0, 0));
}

/// Loads into a store that is full of pinned chunks are misses after a bounded wait, and leave nothing behind.
#[test]
fn case_f03_no_room_for_a_load_is_a_miss() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 2);
    let keys = put(&store, b"a", &document(1, 1));
    flush(&store);
    store.memory().clear(None);
    let others = put(&store, b"a", &document(2, 2));
    assert_eq!(store.pin(&others), 2);
    flush(&store);
    assert_eq!(load(&store, b"a", &keys), [Outcome::Missed]);
    assert_eq!(store.unpin(&others), 2);
    assert_eq!(load(&store, b"a", &keys), [Outcome::Loaded]);
}

/// A tier whose calls panic has misses, and the next ones are served.
#[test]
fn a_tier_that_panics_has_misses() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 32);
    let keys = put(&store, b"a", &document(1, 1));
    flush(&store);
    store.memory().clear(None);
    *shelf.damage.lock().expect("no panic") = Some(|_, _| panic!("a fault of the tier"));
    assert_eq!(load(&store, b"a", &keys), [Outcome::Missed]);
    shelf.damage.clear_poison();
    *shelf.damage.lock().expect("poison is cleared") = None;
    assert_eq!(load(&store, b"a", &keys), [Outcome::Loaded]);
}

/// After `close` everything misses, nothing hangs, and no thread is left waiting.
#[test]
fn closed_means_misses() {
    let shelf = Arc::new(Shelf::default());
    let store = above(std::slice::from_ref(&shelf), 32);
    let keys = put(&store, b"a", &document(1, 2));
    store.close();
    assert_eq!(
        shelf.contains(&keys),
        [1, 1],
        "what was queued is written first"
    );
    assert_eq!(load(&store, b"a", &keys), [Outcome::Missed; 2]);
    assert_eq!(store.lookup(&keys).hits(), [0, 0]);
}

/// With one loader: a load that was missed ends behind all that came before.
fn one_by_one(shelf: &Arc<Shelf>, records: usize) -> TieredStore {
    let options = Options {
        loaders: 1,
        ..Options::default()
    };
    let levels = vec![Level::raw(shelf.clone())];
    TieredStore::new(memory(records), levels, &options).expect("threads")
}

/// Memory lets go first what it can have back from below, and not what the tier has lost.
#[test]
fn what_lies_below_goes_first() {
    // Stores three documents of which the second only lies below, and returns those that stay when a fourth comes.
    let stay = |meanwhile: fn(&Shelf, &TieredStore, &[Key])| {
        let shelf = Arc::new(Shelf::default());
        let store = one_by_one(&shelf, 3);
        // Nothing is slower than computing.
        store.set_prefill_speed(1e-3).expect("above 0");
        let put = |seed| put(&store, b"a", &document(seed, 1));
        // A first load tells how long they take.
        let first = put(9);
        flush(&store);
        store.memory().clear(None);
        assert_eq!(load(&store, b"a", &first), [Outcome::Loaded]);
        assert_eq!(load(&store, b"a", &[[7; 32]]), [Outcome::Missed]);
        store.memory().clear(None);
        let mut keys = Vec::new();
        for seed in 0..3 {
            shelf.full.store(seed != 1, SeqCst);
            keys.extend(put(seed));
            flush(&store);
        }
        meanwhile(&shelf, &store, &keys);
        shelf.full.store(true, SeqCst);
        put(3);
        store.memory().contains(&keys)
    };
    assert_eq!(stay(|_, _, _| {}), [1, 0, 1], "the one that lies below");
    let lost = stay(|shelf, store, keys| {
        shelf.lost.lock().expect("no panic").push(keys[1]);
        // It is asked at the next load.
        load(store, b"a", &[[7; 32]]);
    });
    assert_eq!(lost, [0, 1, 1], "the oldest");
}

/// Copies that don't come count for less, and for all again when they come; keys that were never there say nothing.
#[test]
fn copies_that_do_not_come_count_for_less() {
    let shelf = Arc::new(Shelf::default());
    let store = one_by_one(&shelf, 8);
    let keys = put(&store, b"a", &document(1, 1));
    flush(&store);
    let ask = |damage: Option<Damage>, times| {
        *shelf.damage.lock().expect("no panic") = damage;
        for _ in 0..times {
            store.memory().clear(None);
            load(&store, b"a", &keys);
            load(&store, b"a", &[[7; 32]]);
        }
        store.tiers.writes[0].copies.fetch()
    };
    assert_eq!(ask(Some(|_, frame| frame.clear()), 1), None, "never seen");
    let all = ask(None, 99).expect("loads were measured");
    assert!(all.found > 0.99 && all.seconds_per_byte > 0.0, "{all:?}");
    let few = ask(Some(|_, frame| frame.clear()), 40).expect("measured before");
    assert!(few.found < 0.1, "{few:?}");
    assert_eq!(few.seconds_per_byte, all.seconds_per_byte);
    assert!(ask(None, 99).expect("measured").found > 0.99);
}
