//! Speed of the entropy coder on one core, and how near its size comes to the entropy, by the width of the symbols.

mod timing;

use std::hint::black_box;

use blendstore_codec::rans::{self, Table};

const SYMBOLS: usize = 1 << 17;
const ROUNDS: usize = 201;

fn main() {
    for spread in [0.3_f64, 1.0, 2.0, 6.0] {
        let run = laplacian(spread);
        let mut counts = [0_u64; 256];
        run.iter()
            .for_each(|&symbol| counts[usize::from(symbol)] += 1);
        let entropy: f64 = counts
            .iter()
            .filter(|count| **count > 0)
            .map(|&count| count as f64 * (SYMBOLS as f64 / count as f64).log2())
            .sum();
        let table = Table::of_counts(&counts);
        for vectors in [true, false] {
            let mut bytes = vec![];
            let encode = timing::timed(ROUNDS, || {
                bytes.clear();
                rans::encode_with(&[(&table, black_box(&run))], &mut bytes, vectors);
            });
            let mut into = vec![0; run.len()];
            let decode = timing::timed(ROUNDS, || {
                rans::decode_with(&mut [(&table, &mut into)], black_box(&bytes), vectors)
                    .expect("what was encoded decodes");
            });
            assert_eq!(into, run);
            println!(
                "{:.2} bits a symbol, coded {:.4} of the entropy, {}: encode {}, decode {}",
                entropy / SYMBOLS as f64,
                bytes.len() as f64 * 8.0 / entropy,
                if vectors { "vectors" } else { "scalar" },
                timing::speed(SYMBOLS, encode),
                timing::speed(SYMBOLS, decode)
            );
        }
    }
}

fn laplacian(spread: f64) -> Vec<u8> {
    let mut x = 1_u64;
    let mut uniform = || {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (x >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..SYMBOLS)
        .map(|_| (128.0 + spread * ((1.0 - uniform()).ln() - (1.0 - uniform()).ln())).round() as u8)
        .collect()
}
