use proptest::prelude::*;

use super::*;

/// Symbols of a two-sided geometric distribution around 128, `spread` about its width; 0 gives one symbol only.
fn laplacian(len: usize, spread: f64, seed: u64) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 11) as f64 / (1_u64 << 53) as f64
    };
    (0..len)
        .map(|_| (128.0 + spread * ((1.0 - uniform()).ln() - (1.0 - uniform()).ln())).round() as u8)
        .collect()
}

fn counts(run: &[u8]) -> [u64; 256] {
    let mut counts = [0; 256];
    run.iter().for_each(|&s| counts[usize::from(s)] += 1);
    counts
}

fn entropy_bits(run: &[u8]) -> f64 {
    counts(run)
        .iter()
        .filter(|c| **c > 0)
        .map(|&c| c as f64 * (run.len() as f64 / c as f64).log2())
        .sum()
}

fn round_trip(runs: &[(Table, Vec<u8>)]) -> Vec<u8> {
    let borrowed: Vec<_> = runs.iter().map(|(t, r)| (t, r.as_slice())).collect();
    let mut bytes = vec![];
    encode_with(&borrowed, &mut bytes, true);
    let mut scalar = vec![];
    encode_with(&borrowed, &mut scalar, false);
    assert_eq!(
        bytes, scalar,
        "vectors and scalar code give different bytes"
    );
    for vectors in [true, false] {
        let mut decoded: Vec<_> = runs.iter().map(|(_, r)| vec![0xaa; r.len()]).collect();
        let mut into: Vec<_> = runs
            .iter()
            .zip(&mut decoded)
            .map(|((t, _), d)| (t, d.as_mut_slice()))
            .collect();
        decode_with(&mut into, &bytes, vectors).unwrap();
        assert!(runs.iter().zip(&decoded).all(|((_, r), d)| r == d));
    }
    bytes
}

#[test]
fn coded_size_is_the_entropy() {
    for spread in [0.2, 0.5, 1.0, 2.0, 5.0, 20.0] {
        let run = laplacian(200_000, spread, 7);
        let (table, bits) = (Table::of_counts(&counts(&run)), entropy_bits(&run));
        let coded = 8.0 * round_trip(&[(table, run)]).len() as f64;
        assert!(
            coded <= 1.005 * bits + 8.0 * OVERHEAD as f64,
            "spread {spread}: {coded} bits for {bits}"
        );
        assert!(coded >= bits);
    }
}

#[test]
fn a_single_symbol_costs_nothing() {
    let run = vec![9; 1000];
    assert_eq!(
        round_trip(&[(Table::of_counts(&counts(&run)), run)]).len(),
        OVERHEAD
    );
    assert_eq!(round_trip(&[]).len(), OVERHEAD);
    assert_eq!(Table::of_counts(&[0; 256]).frequencies()[0], 4096);
}

#[test]
fn frequencies_must_add_up() {
    let mut frequencies = [16; 256];
    assert!(Table::new(&frequencies).is_ok());
    frequencies[3] = 17;
    assert_eq!(
        Table::new(&frequencies).unwrap_err(),
        Error::Frequencies(4097)
    );
}

#[test]
fn every_frequency_divides_exactly() {
    for frequency in 1..TOTAL {
        let step = Step::new(0, frequency);
        let top = frequency << (31 - BITS);
        for x in [
            frequency << 3,
            frequency * 1000 + frequency - 1,
            top - 1,
            top - frequency,
            top / 3,
        ] {
            let wanted = x / frequency * TOTAL + x % frequency;
            assert_eq!(step.advance(x), wanted, "{x} by {frequency}");
        }
    }
}

#[test]
fn costs_are_logarithms() {
    for frequency in 1..=TOTAL as u16 {
        let bits = f64::from(TOTAL) / f64::from(frequency);
        let excess = f64::from(cost(frequency)) - 256.0 * bits.log2();
        assert!((-1e-6..1.0).contains(&excess), "{frequency}: {excess}");
    }
    assert!(cost(0) > 2 * cost(1));
}

#[test]
fn rare_symbols_keep_a_frequency() {
    let mut counts = [1; 256];
    counts[5] = u64::MAX / 2;
    let table = Table::of_counts(&counts);
    assert!(table.frequencies().iter().all(|&f| f >= 1));
    assert_eq!(table.frequencies()[5], 4096 - 255);
}

#[test]
fn case_c03_damage_is_an_error() {
    let run = laplacian(10_000, 3.0, 3);
    let table = Table::of_counts(&counts(&run));
    let mut bytes = round_trip(&[(table.clone(), run.clone())]);
    let mut into = vec![0; run.len()];
    for cut in [
        0,
        1,
        OVERHEAD - 1,
        OVERHEAD,
        bytes.len() / 2,
        bytes.len() - 1,
    ] {
        assert!(decode(&mut [(&table, &mut into)], &bytes[..cut]).is_err());
    }
    bytes.extend([0, 0]);
    assert_eq!(
        decode(&mut [(&table, &mut into)], &bytes),
        Err(Error::Damaged)
    );
    bytes.truncate(bytes.len() - 2);
    bytes[3] = 0xff;
    assert_eq!(
        decode(&mut [(&table, &mut into)], &bytes),
        Err(Error::Damaged)
    );
}

proptest! {
    #[test]
    fn any_runs_round_trip_to_equal_bytes(
        shapes in prop::collection::vec((0_usize..400, 0.0_f64..30.0, any::<u64>()), 0..6),
        uniform in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut runs: Vec<_> = shapes.iter().map(|&(len, spread, seed)| laplacian(len, spread, seed)).collect();
        runs.push(uniform);
        let runs: Vec<_> = runs.into_iter().map(|run| (Table::of_counts(&counts(&run)), run)).collect();
        round_trip(&runs);
    }

    #[test]
    fn case_c03_any_bytes_decode_or_fail_alike(
        bytes in prop::collection::vec(any::<u8>(), 0..600), len in 0_usize..500, spread in 0.0_f64..20.0,
    ) {
        let table = Table::of_counts(&counts(&laplacian(1000, spread, 1)));
        let mut bytes = bytes;
        // States within their range, so that more than the first check is reached.
        for state in bytes.chunks_mut(4).take(LANES).filter(|c| c.len() == 4) {
            state[3] &= 0x7f;
            state[1] |= 0x80;
        }
        let (mut one, mut other) = (vec![0; len], vec![0; len]);
        let first = decode_with(&mut [(&table, &mut one)], &bytes, true);
        prop_assert_eq!(first, decode_with(&mut [(&table, &mut other)], &bytes, false));
        if first.is_ok() { prop_assert_eq!(one, other); }
    }
}
