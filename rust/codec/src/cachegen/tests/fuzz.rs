//! Fuzzing of what the coders read: coded payloads and table files of anybody's. Valid ones are mutated; nothing may panic,
//! and what decodes must decode to the same bytes again, with one thread or several.
//!
//! `BLENDSTORE_FUZZ_SECONDS` is the time of each target (1 by default), `BLENDSTORE_FUZZ_SEED` repeats a run.

use std::time::{Duration, Instant};

use super::*;

struct Random(u64);

impl Random {
    fn new(target: &str) -> Self {
        let seed = std::env::var("BLENDSTORE_FUZZ_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| u64::from(std::process::id()) << 32 | 0x9e37_79b9);
        println!("{target}: BLENDSTORE_FUZZ_SEED={seed}");
        Random(seed | 1)
    }

    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit.max(1)
    }

    /// Changes bytes, a few numbers, the end.
    fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            // Most of a file is numbers of little consequence; what counts stands in front.
            let within = if self.below(2) == 0 {
                bytes.len().min(200)
            } else {
                bytes.len()
            };
            let at = self.below(within);
            match self.below(6) {
                0 => bytes.truncate(at),
                1 => bytes.extend((0..at % 40).map(|byte| byte as u8)),
                2 => {
                    let value = [0, 1, 0x7fff_ffff, u32::MAX, 0x7f80_0000][self.below(5)];
                    if let Some(number) = bytes.get_mut(at..).and_then(|b| b.first_chunk_mut::<4>())
                    {
                        *number = value.to_le_bytes();
                    }
                }
                _ => {
                    let flip = 1 << self.below(8);
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte ^= flip;
                    }
                }
            }
        }
    }
}

fn until(mut work: impl FnMut()) {
    let seconds = std::env::var("BLENDSTORE_FUZZ_SECONDS").ok();
    let seconds = seconds.and_then(|s| s.parse().ok()).unwrap_or(1);
    let deadline = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < deadline {
        work();
    }
}

#[test]
fn fuzz_coded_payloads() {
    let mut random = Random::new("coded payloads");
    let shapes = [
        (SMOL, 40),
        (
            Like {
                joint: false,
                chain: 1,
                ..SMOL
            },
            70,
        ),
    ];
    let valid: Vec<_> = shapes
        .iter()
        .map(|(like, rows)| {
            let payload = like.payload(*rows, 5);
            let header = header(*rows as u32, like.bytes_per_token() as u32, 0);
            let (mut quantised, mut lossless) = (vec![], vec![]);
            like.coder(1)
                .encode(&header, &[], &payload, &mut quantised)
                .unwrap();
            let exact = Lossless::new(Some(like.element), 2 * like.layers);
            exact.encode(&header, &[], &payload, &mut lossless).unwrap();
            (
                like.coder(1),
                like.coder(2),
                exact,
                header,
                quantised,
                lossless,
            )
        })
        .collect();
    until(|| {
        let (one, two, exact, header, quantised, lossless) = &valid[random.below(valid.len())];
        let mut back = vec![0xaa; header.raw_len() as usize];
        let mut again = vec![0x55; back.len()];
        let mut coded = quantised.clone();
        random.mutate(&mut coded);
        let _ = Cachegen::bound(&coded);
        let result = one.decode(header, &[], &coded, &mut back);
        let other = two.decode(header, &[], &coded, &mut again);
        assert_eq!(result.is_ok(), other.is_ok());
        assert!(
            result.is_err() || back == again,
            "threads change what is decoded"
        );
        let mut coded = lossless.clone();
        random.mutate(&mut coded);
        back.fill(0xaa);
        again.fill(0x55);
        let result = exact.decode(header, &[], &coded, &mut back);
        let other = exact.decode(header, &[], &coded, &mut again);
        assert_eq!(result.is_ok(), other.is_ok());
        assert!(
            result.is_err() || back == again,
            "some bytes were not decoded"
        );
    });
}

#[test]
fn fuzz_table_files() {
    let mut random = Random::new("table files");
    let file = SMOL.file();
    let payload = SMOL.payload(20, 3);
    let header = header(20, SMOL.bytes_per_token() as u32, 0);
    until(|| {
        let mut bytes = file.clone();
        random.mutate(&mut bytes);
        let Ok(tables) = Tables::parse(&bytes) else {
            return;
        };
        // Whatever such tables say, what was coded with them is decoded.
        let coder = Cachegen::new(Arc::new(tables), 1);
        let mut coded = vec![];
        if coder.encode(&header, &[], &payload, &mut coded).is_ok() {
            let mut back = vec![0; payload.len()];
            coder.decode(&header, &[], &coded, &mut back).unwrap();
        }
    });
}
