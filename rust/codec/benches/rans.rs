//! Speed of the entropy coder on one core, by how wide the symbols are spread; median of several rounds.
use blendstore_codec::rans::{self, Table};
use std::hint::black_box;
use std::time::Instant;

fn main() {
    for spread in [0.3_f64, 1.0, 2.0, 6.0] {
        let mut x = 1_u64;
        let mut uniform = || {
            x = x
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (x >> 11) as f64 / (1_u64 << 53) as f64
        };
        let run: Vec<u8> = (0..1 << 20)
            .map(|_| {
                (128.0 + spread * ((1.0 - uniform()).ln() - (1.0 - uniform()).ln())).round() as u8
            })
            .collect();
        let mut counts = [0; 256];
        run.iter().for_each(|&s| counts[usize::from(s)] += 1);
        let entropy: f64 = counts
            .iter()
            .filter(|c| **c > 0)
            .map(|&c| c as f64 * (run.len() as f64 / c as f64).log2())
            .sum();
        let table = Table::of_counts(&counts);
        for vectors in [true, false] {
            let mut bytes = vec![];
            let encode = median(|| {
                bytes.clear();
                rans::encode_with(&[(&table, black_box(&run))], &mut bytes, vectors);
            });
            let mut into = vec![0; run.len()];
            let decode = median(|| {
                rans::decode_with(&mut [(&table, &mut into)], black_box(&bytes), vectors).unwrap()
            });
            assert_eq!(into, run);
            println!(
                "spread {spread}: {:.2} bits, coded/entropy {:.4}, vectors {vectors}: encode {:.2} GB/s, decode {:.2} GB/s",
                entropy / run.len() as f64,
                bytes.len() as f64 * 8.0 / entropy,
                run.len() as f64 / encode / 1e9,
                run.len() as f64 / decode / 1e9
            );
        }
    }
}

fn median(mut work: impl FnMut()) -> f64 {
    let mut times: Vec<f64> = (0..25)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    times.sort_by(f64::total_cmp);
    println!("   best {:.3} ms", times[0] * 1e3);
    times[times.len() / 2]
}
