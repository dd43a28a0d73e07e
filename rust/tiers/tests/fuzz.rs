//! Fuzzing of everything that reads bytes of anybody's: frames, segment files and URLs. It mutates valid inputs, half of the time
//! with checksums that hold again afterwards, and watches for panics, wrong records and allocations beyond the input's scale.
//!
//! `BLENDSTORE_FUZZ_SECONDS` is the time of each target (1 by default), `BLENDSTORE_FUZZ_SEED` repeats a run.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use blendstore_codec::{Codec, Frame, Header, Parts};
use blendstore_core::key::SEGMENT_ROOT;
use xxhash_rust::xxh3::xxh3_64;

/// Counts the largest allocation, to see whether an input can ask for more than it is worth.
struct Largest;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The same for this thread alone: others are the harness, and other targets.
    static LARGEST_HERE: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, with a look at the sizes.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Relaxed);
        let _ = LARGEST_HERE.try_with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: passed on as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: passed on as it came.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

struct Random(u64);

impl Random {
    fn new(target: &str) -> Self {
        let seed = std::env::var("BLENDSTORE_FUZZ_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let now = || {
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(1, |now| now.as_nanos() as u64)
        };
        let seed = seed.unwrap_or_else(now) | 1;
        println!("{target}: BLENDSTORE_FUZZ_SEED={seed}");
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// A few changes of the kinds that find faults: bits, bytes, extreme numbers, cuts, copies, insertions.
    fn mutate(&mut self, bytes: &mut Vec<u8>, until: usize) {
        for _ in 0..1 + self.below(4) {
            let at = self.below(until.min(bytes.len()));
            match self.below(8) {
                _ if bytes.is_empty() => bytes.push(self.next() as u8),
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.next() as u8,
                2 => bytes.truncate(at),
                3 => bytes.insert(at, self.next() as u8),
                4 => {
                    let (from, len) = (self.below(bytes.len()), self.below(64));
                    let part: Vec<u8> = bytes[from..].iter().take(len).copied().collect();
                    let end = (at + part.len()).min(bytes.len());
                    bytes[at..end].copy_from_slice(&part[..end - at]);
                }
                _ => {
                    let extreme = [
                        0,
                        1,
                        u64::MAX,
                        1 << 63,
                        1 << 32,
                        u64::from(u32::MAX),
                        1 << 31,
                        self.next(),
                    ];
                    let value = extreme[self.below(8)].to_le_bytes();
                    let end = (at + [2, 4, 8][self.below(3)]).min(bytes.len());
                    bytes[at..end].copy_from_slice(&value[..end - at]);
                }
            }
        }
    }
}

fn deadline() -> Instant {
    let seconds = std::env::var("BLENDSTORE_FUZZ_SECONDS")
        .ok()
        .and_then(|seconds| seconds.parse().ok());
    Instant::now() + Duration::from_secs(seconds.unwrap_or(1))
}

fn frame(random: &mut Random) -> Vec<u8> {
    let namespace = common::namespace();
    let ntokens = 1 + random.below(30);
    let tokens: Vec<u32> = (0..ntokens).map(|_| random.next() as u32).collect();
    let per_token = 1 + random.below(40);
    let payload: Vec<u8> = (0..ntokens * per_token)
        .map(|_| random.next() as u8)
        .collect();
    let scores: Vec<f32> = tokens.iter().map(|&token| token as f32).collect();
    let header = Header {
        key: namespace.chain_key(&SEGMENT_ROOT, &namespace.content_id(&tokens)),
        parent: SEGMENT_ROOT,
        namespace: namespace.name(),
        context: [1; 32],
        ntokens: ntokens as u32,
        bytes_per_token: per_token as u32,
        source_position: 3,
        segment_offset: 0,
        behind_tokens: 3,
        format: 0,
        codec: Codec(random.below(3) as u16),
        provenance: random.below(4) as u8,
        rank: 1,
    };
    let behind = vec![[7; 32]; random.below(4)];
    let params: Vec<u8> = (0..random.below(9)).map(|byte| byte as u8).collect();
    let scores = (random.below(2) == 0).then_some(&scores[..]);
    Parts {
        header,
        params: &params,
        tokens: &tokens,
        scores,
        behind: &behind,
        payload: &payload,
    }
    .encode()
}

/// Makes the head's checksum hold again.
fn seal(bytes: &mut [u8]) {
    let Some(head) = bytes
        .get(12..16)
        .map(|len| u32::from_le_bytes(len.try_into().expect("four")) as usize)
    else {
        return;
    };
    let head = head.min(bytes.len());
    if head >= 32 {
        bytes[24..32].fill(0);
        let sum = xxh3_64(&bytes[..head]);
        bytes[24..32].copy_from_slice(&sum.to_le_bytes());
    }
}

#[test]
fn frames() {
    let (mut random, deadline, mut rounds) = (Random::new("frames"), deadline(), 0u64);
    while Instant::now() < deadline {
        let valid = frame(&mut random);
        for _ in 0..200 {
            let mut bytes = valid.clone();
            let until = if random.below(3) > 0 { 216 } else { usize::MAX };
            random.mutate(&mut bytes, until);
            if random.below(2) == 0 {
                seal(&mut bytes);
            }
            LARGEST_HERE.set(0);
            if let Ok(frame) = Frame::parse(&bytes) {
                let head = frame.head;
                let tokens = head.tokens();
                assert_eq!(tokens.len(), head.header.ntokens as usize);
                assert_eq!(head.frame_len(), bytes.len() as u64);
                let _ = (head.scores(), head.behind().len());
                let genuine = head
                    .header
                    .verify(&common::namespace(), &head.header.key, &tokens)
                    .is_ok();
                assert!(
                    !genuine
                        || head.header.key
                            == common::namespace().chain_key(
                                &head.header.parent,
                                &common::namespace().content_id(&tokens)
                            )
                );
            }
            assert!(
                LARGEST_HERE.get() <= bytes.len() + 64,
                "allocated beyond the input"
            );
            rounds += 1;
        }
    }
    println!("frames: {rounds} inputs");
}

#[test]
fn segments() {
    let (mut random, mut rounds) = (Random::new("segments"), 0u64);
    let scratch = common::Scratch::in_memory("fuzz");
    let store = common::open(&scratch.0, 8 << 20, 64 << 20).expect("a store");
    let numbers: Vec<u32> = (0..12).collect();
    numbers
        .iter()
        .for_each(|&number| common::store(&store, number));
    assert!(store.flush(Duration::from_secs(30)));
    let directory = scratch.0.join("blendstore-v1");
    let file = directory.join("0000000000000001.seg");
    let open = std::fs::read(&file).expect("there");
    drop(store);
    let sealed = std::fs::read(&file).expect("there");
    let deadline = deadline();
    while Instant::now() < deadline {
        let mut bytes = if random.below(2) == 0 {
            sealed.clone()
        } else {
            open[..sealed.len()].to_vec()
        };
        // Mostly where numbers are: the first bytes of blocks, and the footer.
        for _ in 0..1 + random.below(3) {
            let at = match random.below(3) {
                0 => random.below(bytes.len()),
                1 => bytes.len().saturating_sub(1 + random.below(2000)),
                _ => (random.below(bytes.len()) / 4096 * 4096 + random.below(400))
                    .min(bytes.len() - 1),
            };
            let mut tail = bytes.split_off(at);
            random.mutate(&mut tail, 200);
            bytes.extend(tail);
            if bytes.is_empty() {
                break;
            }
        }
        for entry in std::fs::read_dir(&directory).expect("there") {
            let path = entry.expect("readable").path();
            if path.extension().is_some_and(|end| end == "seg") {
                std::fs::remove_file(path).expect("ours");
            }
        }
        std::fs::write(&file, &bytes).expect("writable");
        LARGEST.store(0, Relaxed);
        let store = common::open(&scratch.0, 8 << 20, 64 << 20).expect("any content is accepted");
        // Panics if a record comes with other bytes than its own.
        common::load(&store, &numbers);
        assert!(
            LARGEST.load(Relaxed) <= bytes.len() + (4 << 20),
            "allocated beyond the input: {}",
            LARGEST.load(Relaxed)
        );
        rounds += 1;
    }
    println!("segments: {rounds} inputs");
}

/// Whatever a URL says, it is answered, and what stands where a password does is never repeated.
#[test]
fn urls() {
    let mut random = Random::new("urls");
    let seeds = [
        "redis://user:p%40ss@host:6379/1?ttl=60&prefix=a",
        "rediss://:pw@[::1]:6380?ca=/a.pem&cert=/b.pem&key=/c.pem",
        "redis-cluster://a:1,b:2,c",
        "redis-sentinel://u:p@a:26379,b/master/2?sentinel_user=s&sentinel_password=t",
        "unix://:pw@/run/redis.sock?db=3",
        "s3://id:se%2Fcret@bucket/a/b?endpoint=http://127.0.0.1:9000&region=eu-1",
        "file:///mnt/share%20d",
    ];
    let end = deadline();
    while Instant::now() < end {
        let mut bytes = seeds[random.below(seeds.len())].as_bytes().to_vec();
        let until = bytes.len();
        random.mutate(&mut bytes, until);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let answer = blendstore_tiers::remote::RemoteUrl::parse(&text);
        let _ = (
            format!("{answer:?}"),
            blendstore_tiers::remote::redacted(&text),
        );
        // Capitals stand nowhere else.
        let (before, after) = text.split_at(
            text.char_indices()
                .nth(random.below(40))
                .map_or(text.len(), |(at, _)| at),
        );
        let secret = format!(
            "redis://{}:SECRET{after}@{}",
            before.replace([':', '/'], ""),
            seeds[0].split_at(22).1
        );
        assert!(
            !blendstore_tiers::remote::redacted(&secret).contains("SECRET"),
            "{secret}"
        );
        match blendstore_tiers::remote::RemoteUrl::parse(&secret) {
            Ok(url) => assert!(!format!("{url:?}").contains("SECRET"), "{secret}"),
            Err(error) => assert!(!error.0.contains("SECRET"), "{secret}: {error}"),
        }
    }
}
