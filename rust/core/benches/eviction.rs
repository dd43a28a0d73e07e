//! What it takes to evict one chunk and let another in, by policy and number of chunks: constant, up to cache misses.
//!
//! `cargo bench -p blendstore-core --bench eviction`. Between two evictions one chunk in four is used, so that every policy has something to learn and to move.

use blendstore_core::eviction::{Arrival, PolicyKind, Uses};
use criterion::{Criterion, criterion_group, criterion_main};

/// xorshift64.
struct Draws(u64);

impl Draws {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

fn evict_and_insert(c: &mut Criterion) {
    let mut group = c.benchmark_group("evict and insert");
    for kind in PolicyKind::ALL {
        for bits in [12, 16, 20] {
            let slots = 1_u32 << bits;
            let mut policy = kind.build(slots as usize);
            let uses = Uses::new(slots as usize, kind.hit_cap());
            let (mut now, mut draws) = (0, Draws(0x9e37_79b9));
            let enter = |slot: u32, now: u64, draws: &mut Draws| {
                uses.enter(slot, now);
                Arrival {
                    // Some come back.
                    fingerprint: draws
                        .next(4 * u64::from(slots))
                        .wrapping_mul(0x9e37_79b9_7f4a_7c15),
                    tokens: 256,
                    position: draws.next(60_000) as u32,
                    compute: 1.0,
                    ..Arrival::default()
                }
            };
            for slot in 0..slots {
                now += 1_000_000;
                policy.insert(slot, &enter(slot, now, &mut draws), &uses);
            }
            group.bench_function(format!("{kind}, {slots} chunks"), |b| {
                b.iter(|| {
                    now += 1_000_000;
                    if draws.next(4) == 0 {
                        let slot = draws.next(u64::from(slots)) as u32;
                        uses.hit(slot, now);
                    }
                    let slot = policy.pop(&uses).expect("never empty");
                    policy.insert(slot, &enter(slot, now, &mut draws), &uses);
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, evict_and_insert);
criterion_main!(benches);
