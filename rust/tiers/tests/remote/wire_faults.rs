//! Case f08 and f09: servers that stop, stall, answer half or forget. Time is bounded, half a record is none, and the tier comes
//! back by itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blendstore_tiers::{Tier, remote};

use crate::records::{Record, assert_all, get, hits, keys, put, record, records, tenant};
use crate::servers::{Mischief, Proxy, Server, eventually};
use crate::{errors, open};

/// Short, so that faults show. What a call may take at most on a busy machine is far above it, and far below any stall.
const IMPATIENT: Duration = Duration::from_millis(400);
const BOUND: Duration = Duration::from_secs(8);

fn impatient(port: u16) -> Arc<dyn Tier> {
    remote::open(&format!("redis://127.0.0.1:{port}"), IMPATIENT).unwrap()
}

/// `work`, which must end in bounded time.
fn bounded<T>(work: impl FnOnce() -> T) -> T {
    let since = Instant::now();
    let result = work();
    assert!(
        since.elapsed() < BOUND,
        "{:?} for a time-out of {IMPATIENT:?}",
        since.elapsed()
    );
    result
}

fn stored(server: &Server, count: u32, size: usize) -> Vec<Record> {
    let ours = records(&tenant("ours"), count, size);
    assert_eq!(
        put(&*open(&format!("redis://127.0.0.1:{}", server.port)), &ours),
        count as usize
    );
    ours
}

#[test]
fn case_f08_a_value_that_is_cut_is_dropped_and_asked_for_again() {
    let server = Server::start("redis-server", &[]);
    let ours = stored(&server, 3, 400_000);
    let proxy = Proxy::before(server.port);
    // In the first line, in the head, in the payload, in the CR LF behind it, in the second record.
    let length = ours[0].bytes.len();
    let line = format!("${length}\r\n").len();
    for limit in [
        3,
        line + 100,
        line + length / 2,
        line + length + 1,
        2 * line + length + 2 + length / 2,
    ] {
        let tier = open(&format!("redis://127.0.0.1:{}", proxy.port));
        proxy.set(Mischief::Cut(limit));
        assert_eq!(hits(&*tier, &ours[..1]).len(), 1, "whatever came was whole");
        proxy.set(Mischief::None);
        eventually("it comes back", || hits(&*tier, &ours) == [true; 3]);
        assert!(
            errors(&*tier, "closed") > 0 || limit > line + length + 2,
            "{limit}: {:?}",
            tier.stats()
        );
    }
    // One cut, then a whole connection, within one call: the call itself repeats what is missing.
    let tier = open(&format!("redis://127.0.0.1:{}", proxy.port));
    proxy.set(Mischief::Cut(2 * line + length + 2 + length / 2));
    let found = std::thread::scope(|scope| {
        let reading = scope.spawn(|| get(&*tier, &keys(&ours)));
        eventually("the first connection is there", || {
            proxy.connections.load(std::sync::atomic::Ordering::SeqCst) > 0
        });
        proxy.set(Mischief::None);
        reading.join().unwrap()
    });
    for (index, bytes) in &found.frames {
        assert_eq!(bytes, &ours[*index].bytes);
    }
}

#[test]
fn case_f08_a_stalled_or_trickling_server_costs_the_time_out_and_no_more() {
    let server = Server::start("redis-server", &[]);
    let ours = stored(&server, 2, 300_000);
    let proxy = Proxy::before(server.port);
    for mischief in [
        Mischief::Stall(0),
        Mischief::Stall(100_000),
        Mischief::Trickle(50),
        Mischief::Trickle(350_000),
    ] {
        let tier = impatient(proxy.port);
        proxy.set(mischief);
        let found = bounded(|| hits(&*tier, &ours));
        assert!(found.contains(&false), "{mischief:?}");
        assert!(
            errors(&*tier, "timeout") >= 1,
            "{mischief:?}: {:?}",
            tier.stats()
        );
        proxy.set(Mischief::None);
        eventually("it comes back", || hits(&*tier, &ours) == [true, true]);
    }
}

#[test]
fn case_f08_a_paused_server_is_left_alone_and_found_again() {
    let server = Server::start("redis-server", &[]);
    let ours = stored(&server, 2, 1_000);
    let tier = impatient(server.port);
    assert_all(&*tier, &ours);
    server.signal(libc::SIGSTOP);
    for _ in 0..3 {
        assert_eq!(bounded(|| hits(&*tier, &ours)), [false, false]);
    }
    assert_eq!(errors(&*tier, "off"), 1, "{:?}", tier.stats());
    // Left alone: thousands of calls cost less than a few time-outs would.
    bounded(|| {
        for _ in 0..2_000 {
            tier.contains(&keys(&ours));
            put(&*tier, &ours);
        }
    });
    assert!(tier.stats().dropped >= 3_000);
    server.signal(libc::SIGCONT);
    eventually("it comes back", || hits(&*tier, &ours) == [true, true]);
}

#[test]
fn case_f08_a_restarted_server_needs_no_help() {
    let mut server = Server::start("redis-server", &[]);
    let ours = stored(&server, 3, 1_000);
    let tier = impatient(server.port);
    assert_all(&*tier, &ours);
    server.kill();
    assert_eq!(bounded(|| hits(&*tier, &ours)), [false; 3]);
    assert_eq!(bounded(|| put(&*tier, &ours)), 0);
    assert!(errors(&*tier, "connect") > 0, "{:?}", tier.stats());
    server.restart();
    eventually("it comes back", || put(&*tier, &ours) == 3);
    assert_all(&*tier, &ours);
    // Restarted between two calls: the pooled connections are dead, and nobody notices.
    for _ in 0..3 {
        server.kill();
        server.restart();
        let misses = tier.stats().errors;
        assert_eq!(
            hits(&*tier, &ours),
            [false; 3],
            "an empty server has nothing"
        );
        assert_eq!(put(&*tier, &ours), 3);
        assert_eq!(
            tier.stats().errors,
            misses,
            "a closed connection in the pool is no error"
        );
    }
}

#[test]
fn case_f08_refused_connections_open_the_switch() {
    let server = Server::start("redis-server", &[]);
    let ours = stored(&server, 1, 100);
    let proxy = Proxy::before(server.port);
    proxy.set(Mischief::Refuse);
    let tier = impatient(proxy.port);
    for _ in 0..50 {
        bounded(|| hits(&*tier, &ours));
    }
    assert_eq!(errors(&*tier, "off"), 1, "{:?}", tier.stats());
    let tried = proxy.connections.load(std::sync::atomic::Ordering::SeqCst);
    assert!(
        tried < 50,
        "{tried} connections for 50 calls: the server is left alone"
    );
    proxy.set(Mischief::None);
    eventually("it comes back", || hits(&*tier, &ours) == [true]);
}

#[test]
fn case_f08_a_host_that_is_not_there_costs_the_time_out_and_no_more() {
    let one = records(&tenant("ours"), 1, 10);
    // A name that can't exist, and a port where nobody listens.
    for url in [
        "redis://nobody.invalid",
        "redis://127.0.0.1:1",
        "unix:///nowhere/redis.sock",
        "redis-cluster://127.0.0.1:1",
    ] {
        let tier = remote::open(url, IMPATIENT).unwrap();
        assert_eq!(bounded(|| hits(&*tier, &one)), [false], "{url}");
        let errors = tier.stats().errors;
        assert!(
            errors.contains_key("connect") || errors.contains_key("timeout"),
            "{url}: {errors:?}"
        );
    }
}

#[test]
fn case_f01_a_flipped_bit_is_a_miss() {
    let server = Server::start("redis-server", &[]);
    let ours = stored(&server, 1, 2_000);
    let proxy = Proxy::before(server.port);
    let length = ours[0].bytes.len();
    let line = format!("${length}\r\n").len();
    // In the magic, the lengths, a checksum, the tokens, the payload.
    for at in [0, 12, 16, 24, 32, 50, 180, 220, 500, 1_500, length - 1] {
        let tier = open(&format!("redis://127.0.0.1:{}", proxy.port));
        proxy.set(Mischief::Flip(line + at));
        assert_eq!(hits(&*tier, &ours), [false], "byte {at}");
        assert_eq!(
            tier.stats().errors.values().sum::<u64>(),
            1,
            "byte {at}: {:?}",
            tier.stats()
        );
        proxy.set(Mischief::None);
    }
}

#[test]
fn case_f09_keys_that_go_between_exists_and_get_are_misses() {
    let server = Server::start("redis-server", &[]);
    let ours = stored(&server, 10, 1_000);
    let tier = open(&format!("redis://127.0.0.1:{}", server.port));
    assert_eq!(tier.contains(&keys(&ours)), [1; 10]);
    for record in &ours[..5] {
        let name: String = record
            .key
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(server.say(&["DEL", &format!("blendstore:1:{name}")]), "1");
    }
    assert_eq!(hits(&*tier, &ours), [[false; 5], [true; 5]].concat());
    assert!(tier.stats().errors.is_empty());
}

#[test]
fn case_f09_a_server_that_evicts_at_random_gives_right_records_or_none() {
    let server = Server::start(
        "redis-server",
        &[
            "--maxmemory",
            "20mb",
            "--maxmemory-policy",
            "allkeys-random",
        ],
    );
    let tier = open(&format!("redis://127.0.0.1:{}", server.port));
    let ours = records(&tenant("ours"), 120, 500_000);
    assert_eq!(put(&*tier, &ours), 120);
    let there = hits(&*tier, &ours).iter().filter(|hit| **hit).count();
    assert!((1..120).contains(&there), "{there} of 120");
    assert!(tier.stats().errors.is_empty());
}

#[test]
fn a_full_server_stores_nothing_and_serves_on() {
    let server = Server::start(
        "valkey-server",
        &["--maxmemory", "8mb", "--maxmemory-policy", "noeviction"],
    );
    let tier = open(&format!("redis://127.0.0.1:{}", server.port));
    let ours = records(&tenant("ours"), 40, 500_000);
    let stored = put(&*tier, &ours);
    assert!((1..40).contains(&stored), "{stored} of 40");
    assert!(
        errors(&*tier, "full") > 0 && errors(&*tier, "off") == 0,
        "{:?}",
        tier.stats()
    );
    assert_eq!(
        hits(&*tier, &ours).iter().filter(|hit| **hit).count(),
        stored
    );
    assert_eq!(tier.stats().dropped, 40 - stored as u64);
}

#[test]
fn several_threads_share_a_tier() {
    let server = Server::start("redis-server", &[]);
    let tier = open(&format!("redis://127.0.0.1:{}", server.port));
    std::thread::scope(|scope| {
        for thread in 0..6_u32 {
            let tier = &*tier;
            scope.spawn(move || {
                for round in 0..20 {
                    let own = [record(&tenant("ours"), thread * 100 + round, 20_000)];
                    assert_eq!(put(tier, &own), 1);
                    assert_all(tier, &own);
                }
            });
        }
    });
    assert_eq!(server.say(&["DBSIZE"]), "120");
}
