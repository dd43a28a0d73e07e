//! Case c03: values that are no records, records of others, and servers that speak nonsense. A miss with a counter, no panic, no
//! memory beyond what was sent.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use proptest::prelude::*;

use blendstore_tiers::remote;

use crate::open;
use crate::records::{hits, keys, put, record, tenant};
use crate::servers::Server;

/// Counts what is allocated at most at once, so that a length that is only announced shows.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: hands everything to the system's allocator unchanged.
unsafe impl std::alloc::GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), SeqCst);
        NOW.fetch_add(layout.size(), SeqCst);
        // SAFETY: the caller's.
        unsafe { std::alloc::System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: std::alloc::Layout) {
        NOW.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller's.
        unsafe { std::alloc::System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Larger than any record of these tests, smaller than any length that is only announced.
const MUCH: usize = 64 << 20;

fn hexed(key: &[u8]) -> String {
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn case_c03_hostile_values_are_misses() {
    let server = Server::start("redis-server", &[]);
    let ours = record(&tenant("ours"), 1, 3_000);
    let name = format!("blendstore:1:{}", hexed(&ours.key));
    let whole = &ours.bytes;
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    let pickle = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94.";
    let mut values: Vec<(String, Vec<u8>)> = vec![
        ("nothing".into(), vec![]),
        ("a pickle".into(), pickle.to_vec()),
        (
            "a long pickle".into(),
            [&pickle[..], &[b'.'; 5_000]].concat(),
        ),
        (
            "another key's record".into(),
            record(&tenant("ours"), 2, 3_000).bytes,
        ),
        (
            "another tenant's record".into(),
            record(&tenant("theirs"), 1, 3_000).bytes,
        ),
        ("version 2".into(), with(8, &2_u16.to_le_bytes())),
        ("unknown flags".into(), with(10, &0xfffe_u16.to_le_bytes())),
        (
            "a head of 2^32 - 1".into(),
            with(12, &u32::MAX.to_le_bytes()),
        ),
        ("a head of 0".into(), with(12, &0_u32.to_le_bytes())),
        (
            "a frame of 2^63".into(),
            with(16, &(1_u64 << 63).to_le_bytes()),
        ),
        (
            "a payload of 2^63".into(),
            with(40, &(1_u64 << 63).to_le_bytes()),
        ),
        (
            "a payload of 2^64 - 1".into(),
            with(40, &u64::MAX.to_le_bytes()),
        ),
        ("2^32 - 1 tokens".into(), with(176, &u32::MAX.to_le_bytes())),
        ("no tokens".into(), with(176, &0_u32.to_le_bytes())),
        (
            "2^32 - 1 bytes a token".into(),
            with(180, &u32::MAX.to_le_bytes()),
        ),
        (
            "2^32 - 1 documents".into(),
            with(196, &u32::MAX.to_le_bytes()),
        ),
        (
            "parameters of 2^32 - 1".into(),
            with(200, &u32::MAX.to_le_bytes()),
        ),
        (
            "an unknown coding".into(),
            with(206, &999_u16.to_le_bytes()),
        ),
        (
            "more than a record".into(),
            [whole.as_slice(), b"more"].concat(),
        ),
    ];
    values.extend(
        [
            1,
            7,
            100,
            215,
            216,
            217,
            300,
            whole.len() / 2,
            whole.len() - 1,
        ]
        .map(|length| (format!("{length} bytes"), whole[..length].to_vec())),
    );
    let tier = open(&format!("redis://127.0.0.1:{}", server.port));
    for (what, value) in values {
        assert_eq!(server.say_bytes(&[b"SET", name.as_bytes(), &value]), "OK");
        let before: u64 = tier.stats().errors.values().sum();
        assert_eq!(hits(&*tier, std::slice::from_ref(&ours)), [false], "{what}");
        assert_eq!(
            tier.stats().errors.values().sum::<u64>(),
            before + 1,
            "{what}: {:?}",
            tier.stats()
        );
    }
    server.say(&["DEL", &name]);
    server.say(&["LPUSH", &name, "a list"]);
    assert_eq!(hits(&*tier, std::slice::from_ref(&ours)), [false], "a list");
    server.say(&["DEL", &name]);
    // The connection was never lost over it, and the record can be stored again.
    assert_eq!(put(&*tier, std::slice::from_ref(&ours)), 1);
    assert_eq!(hits(&*tier, std::slice::from_ref(&ours)), [true]);
    assert!(
        !tier.stats().errors.contains_key("closed"),
        "{:?}",
        tier.stats()
    );
    assert!(
        LARGEST.load(SeqCst) < MUCH,
        "{} bytes at once",
        LARGEST.load(SeqCst)
    );
}

/// A server that answers every connection with those bytes.
fn answers(bytes: Vec<u8>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming().take(64) {
            let Ok(mut client) = client else { return };
            let bytes = bytes.clone();
            std::thread::spawn(move || {
                let mut buffer = [0; 4096];
                let _ = client.set_read_timeout(Some(Duration::from_secs(20)));
                while client.read(&mut buffer).is_ok_and(|read| read > 0) {
                    if client.write_all(&bytes).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

fn asked(bytes: &[u8]) {
    let one = record(&tenant("ours"), 1, 100);
    let port = answers(bytes.to_vec());
    for url in [
        format!("redis://127.0.0.1:{port}"),
        format!("redis-cluster://127.0.0.1:{port}"),
    ] {
        let tier = remote::open(&url, Duration::from_millis(100)).unwrap();
        tier.contains(&keys(std::slice::from_ref(&one)));
        assert_eq!(hits(&*tier, std::slice::from_ref(&one)), [false]);
        put(&*tier, std::slice::from_ref(&one));
        tier.clear(Some(&tenant("ours").name()));
    }
    assert!(
        LARGEST.load(SeqCst) < MUCH,
        "{} bytes at once",
        LARGEST.load(SeqCst)
    );
}

#[test]
fn case_c03_servers_that_speak_nonsense() {
    for bytes in [
        "$9223372036854775807\r\n",
        "$4294967296\r\nblendfrm",
        "$-2\r\n",
        "$18446744073709551616\r\n",
        "*1000000000\r\n",
        "*65536\r\n*65536\r\n*65536\r\n*65536\r\n",
        "*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n*1\r\n",
        "HTTP/1.1 400 Bad Request\r\n\r\n",
        "+OK\n",
        "\r\n",
        ":x\r\n",
        "-MOVED\r\n",
        "-MOVED 1 h\r\n",
        "-MOVED 1 127.0.0.1:99999\r\n",
        "-ASK 1 127.0.0.1:1\r\n",
        "*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$-1\r\n:70000\r\n",
        "*1\r\n*3\r\n:5\r\n:1\r\n*2\r\n$1\r\nh\r\n:1\r\n",
        "*2\r\n$1\r\n0\r\n*1\r\n:5\r\n",
    ] {
        asked(bytes.as_bytes());
    }
    asked(&[b'x'; 100_000]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn case_c03_any_answer_is_survived(bytes in prop::collection::vec(prop::sample::select(b"$*:+-019\r\nx".to_vec()), 1..60)) {
        asked(&bytes);
    }
}
