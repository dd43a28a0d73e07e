use proptest::prelude::*;

use super::*;
use crate::elements::{Element, single_to_half};
use crate::rans;
use crate::tables::ZERO;

mod fuzz;

pub(crate) fn header(ntokens: u32, bytes_per_token: u32, position: u32) -> Header {
    Header {
        key: [0; 32],
        parent: [0; 32],
        namespace: [0; 32],
        context: [0; 32],
        ntokens,
        bytes_per_token,
        source_position: position,
        segment_offset: 0,
        behind_tokens: 0,
        format: 0,
        codec: Codec::CACHEGEN,
        provenance: 1,
        rank: 0,
    }
}

/// What a table file is made of here.
#[derive(Clone, Copy, Debug)]
struct Like {
    layers: usize,
    heads: usize,
    dim: usize,
    element: Element,
    /// 1: a head at a time; 2: all of a layer.
    joint: bool,
    chain: usize,
    style: u8,
}

const SMOL: Like = Like {
    layers: 3,
    heads: 2,
    dim: 16,
    element: Element::Bf16,
    joint: true,
    chain: 2,
    style: 1,
};

impl Like {
    fn width(&self) -> usize {
        2 * self.heads * self.dim
    }

    fn bytes_per_token(&self) -> usize {
        self.layers * self.width() * self.element.size()
    }

    /// Reflections as bases, halves of the layer before as prediction, and a wide and a narrow class.
    fn file(&self) -> Vec<u8> {
        let (width, block) = (
            self.width(),
            if self.joint { self.width() } else { self.dim },
        );
        let chain = if self.joint { self.chain } else { 1 };
        let mut out = b"blendtbl".to_vec();
        out.extend(1_u16.to_le_bytes());
        out.extend([self.element as u8, self.style, 0, 0, 0, 0]);
        let rotary = if self.style == 0 {
            0
        } else {
            self.dim / 2 / 2 * 2
        };
        let sets = usize::from(self.style > 0);
        for number in [
            self.layers,
            self.heads,
            self.dim,
            rotary,
            sets,
            block,
            chain,
            0,
            1,
            3,
        ] {
            out.extend((number as u32).to_le_bytes());
        }
        out.extend(0.1_f32.to_le_bytes());
        out.extend(0.1_f32.to_le_bytes());
        for layer in 0..self.layers {
            out.extend(
                if self.style == 0 || layer == 1 {
                    u32::MAX
                } else {
                    0
                }
                .to_le_bytes(),
            );
        }
        for pair in 0..sets * rotary / 2 {
            out.extend(0.3_f32.powi(pair as i32).to_le_bytes());
        }
        for reach in [0_i32, 40, 5] {
            let mut frequencies = [0_u16; 256];
            let seen = (2 * reach + 1) as u16;
            for level in -reach..=reach {
                frequencies[(level + 128) as usize] = 4000 / seen;
            }
            let rest = 4096 - frequencies.iter().sum::<u16>() - u16::from(reach > 0);
            frequencies[128] += rest;
            frequencies[0] = u16::from(reach > 0);
            frequencies.iter().for_each(|f| out.extend(f.to_le_bytes()));
            [0.1_f32, 0.05, 0.0]
                .iter()
                .for_each(|f| out.extend(f.to_le_bytes()));
        }
        for layer in 0..self.layers {
            (0..width).for_each(|channel| out.extend((channel as f32 / 500.0).to_le_bytes()));
            (0..width).for_each(|channel| out.extend((1.0 + channel as f32 / 100.0).to_le_bytes()));
            (0..width).for_each(|component| out.push(1 + u8::from(component % 3 == 2)));
            for _ in 0..width / block {
                for (row, column) in (0..block * block).map(|i| (i / block, i % block)) {
                    let value = f32::from(row == column) - 2.0 / block as f32;
                    out.extend(single_to_half(value).to_le_bytes());
                }
            }
            if layer % chain != 0 {
                for (row, column) in (0..width * width).map(|i| (i / width, i % width)) {
                    out.extend(single_to_half(if row == column { 0.5 } else { 0.0 }).to_le_bytes());
                }
            }
        }
        out
    }

    fn coder(&self, threads: usize) -> Cachegen {
        Cachegen::new(Arc::new(Tables::parse(&self.file()).unwrap()), threads)
    }

    fn payload(&self, rows: usize, seed: u64) -> Vec<u8> {
        let mut bytes = vec![0; rows * self.bytes_per_token()];
        let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for at in 0..bytes.len() / self.element.size() {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            self.element.set(
                &mut bytes,
                at,
                ((x >> 40) as f32 / (1 << 23) as f32 - 1.0) * 0.4,
            );
        }
        bytes
    }

    /// Codes and decodes; checks every element against the bound. Returns the coded bytes.
    fn round_trip(&self, payload: &[u8], position: u32) -> Vec<u8> {
        let rows = payload.len() / self.bytes_per_token();
        let header = header(rows as u32, self.bytes_per_token() as u32, position);
        let mut coded = vec![];
        let (one, many) = (self.coder(1), self.coder(3));
        if one.encode(&header, &[], payload, &mut coded).is_err() {
            return vec![];
        }
        let mut other = vec![];
        many.encode(&header, &[], payload, &mut other).unwrap();
        assert_eq!(coded, other, "threads change the bytes");
        let bound = Cachegen::bound(&coded).unwrap();
        let mut back = vec![0xaa; payload.len()];
        many.decode(&header, &[], &coded, &mut back).unwrap();
        let part = rows * self.heads * self.dim;
        for at in 0..payload.len() / self.element.size() {
            let (was, is) = (self.element.get(payload, at), self.element.get(&back, at));
            let limit = if (at / part).is_multiple_of(2) {
                bound.keys
            } else {
                bound.values
            };
            let same = was == is || was.is_nan() && is.is_nan();
            assert!(
                same || (was - is).abs() <= limit,
                "element {at}: {was} became {is}, bound {limit}"
            );
        }
        coded
    }
}

#[test]
fn every_shape_stays_within_its_bound() {
    for element in [Element::Bf16, Element::F16, Element::F32] {
        for (joint, chain, style) in [(true, 2, 1), (true, 1, 2), (true, 3, 0), (false, 1, 1)] {
            let like = Like {
                element,
                joint,
                chain,
                style,
                ..SMOL
            };
            let coded = like.round_trip(&like.payload(70, 5), 900);
            assert_eq!(coded[0], QUANTISED, "{like:?}");
            assert!(
                Cachegen::bound(&coded).unwrap().keys < 0.5,
                "{like:?}: {:?}",
                Cachegen::bound(&coded)
            );
        }
    }
}

#[test]
fn case_c01_layers_tokens_heads_and_dims() {
    for (layers, heads, dim, rows) in [(28, 1, 96, 1), (1, 1, 2, 3), (5, 3, 40, 17), (2, 1, 96, 33)]
    {
        let like = Like {
            layers,
            heads,
            dim,
            chain: 1.max(layers / 3),
            ..SMOL
        };
        let coded = like.round_trip(&like.payload(rows, 3), 7);
        // Three tokens of two elements are smaller than any stream: such a record stays raw.
        assert_eq!(coded.is_empty(), layers == 1, "{like:?}");
    }
}

#[test]
fn case_c01_constants_nan_and_infinity() {
    let rows = 40;
    let constant: Vec<u8> = [0x80, 0x3f].repeat(rows * SMOL.bytes_per_token() / 2);
    SMOL.round_trip(&constant, 5);
    SMOL.round_trip(&vec![0; rows * SMOL.bytes_per_token()], 5);
    // A few rows that aren't finite are kept as they are, bit for bit; the others are quantised.
    let mut payload = SMOL.payload(rows, 1);
    let row_bytes = SMOL.heads * SMOL.dim * 2;
    let special: &[(usize, u16)] = &[(3, 0x7fc1), (9, 0xff80), (39, 0x7f80)];
    for &(row, bits) in special {
        payload[row * row_bytes..row * row_bytes + 2].copy_from_slice(&bits.to_le_bytes());
    }
    let coded = SMOL.round_trip(&payload, 5);
    assert_eq!((coded[0], integer(&coded, 28)), (QUANTISED, 3));
    let mut back = vec![0; payload.len()];
    let header = header(rows as u32, SMOL.bytes_per_token() as u32, 5);
    SMOL.coder(1)
        .decode(&header, &[], &coded, &mut back)
        .unwrap();
    for part in 0..2 * SMOL.layers {
        for &(row, _) in special {
            let at = (part * rows + row) * row_bytes..(part * rows + row + 1) * row_bytes;
            assert_eq!(back[at.clone()], payload[at]);
        }
    }
    // Where most are like that, and where values are out of all proportion, nothing is quantised.
    let nan: Vec<u8> = [0xc0, 0x7f].repeat(rows * SMOL.bytes_per_token() / 2);
    assert_eq!(SMOL.round_trip(&nan, 5)[0], LOSSLESS);
    let huge: Vec<u8> = [0x00, 0x7e].repeat(rows * SMOL.bytes_per_token() / 2);
    assert_eq!(SMOL.round_trip(&huge, 5)[0], LOSSLESS);
}

#[test]
fn outliers_escape() {
    let mut payload = SMOL.payload(50, 2);
    let last = payload.len() / 2 - 1;
    SMOL.element.set(&mut payload, last, 1000.0);
    let coded = SMOL.round_trip(&payload, 5);
    assert_eq!(coded[0], QUANTISED);
}

#[test]
fn first_positions_are_kept_as_they_are() {
    let payload = SMOL.payload(20, 2);
    assert_eq!(integer(&SMOL.round_trip(&payload, 0), 28), 1);
    assert_eq!(integer(&SMOL.round_trip(&payload, 1), 28), 0);
}

#[test]
fn other_tables_and_other_shapes_are_refused() {
    let payload = SMOL.payload(20, 2);
    let coded = SMOL.round_trip(&payload, 3);
    let header = header(20, SMOL.bytes_per_token() as u32, 3);
    let mut back = vec![0; payload.len()];
    let other = Like { chain: 1, ..SMOL }.coder(1);
    let error = other.decode(&header, &[], &coded, &mut back).unwrap_err();
    assert!(error.0.contains("other tables"), "{error}");
    let quantised = Header {
        format: 1,
        ..header
    };
    assert!(
        SMOL.coder(1)
            .decode(&quantised, &[], &coded, &mut back)
            .is_err()
    );
}

/// What was quantised for memory is coded without loss: bytes come back as they are.
#[test]
fn case_c02_other_memory_formats_are_never_quantised_again() {
    let payload: Vec<u8> = (0..6000_u32).map(|i| (i * i % 11) as u8).collect();
    let header = Header {
        format: 2,
        ..header(20, 300, 3)
    };
    let mut coded = vec![];
    SMOL.coder(1)
        .encode(&header, &[], &payload, &mut coded)
        .unwrap();
    assert!(coded.len() < payload.len());
    let mut back = vec![0; payload.len()];
    SMOL.coder(1)
        .decode(&header, &[], &coded, &mut back)
        .unwrap();
    assert!(back == payload);
}

#[test]
fn counts_are_those_of_the_stream() {
    let payload = SMOL.payload(200, 2);
    let coded = SMOL.round_trip(&payload, 3);
    let counts = SMOL.coder(1).symbol_counts(3, &payload).unwrap();
    assert_eq!(
        counts.iter().sum::<u64>() as usize,
        200 * SMOL.layers * SMOL.width()
    );
    let frequencies = |class: usize| {
        SMOL.coder(1).tables.classes[class]
            .table
            .frequencies()
            .map(f64::from)
    };
    let bits: f64 = (0..3)
        .flat_map(|class| {
            counts[256 * class..256 * (class + 1)]
                .iter()
                .copied()
                .zip(frequencies(class))
        })
        .filter(|(count, _)| *count > 0)
        .map(|(count, frequency)| count as f64 * (4096.0 / frequency).log2())
        .sum();
    let escapes: u64 = counts.iter().step_by(256).sum();
    let streams = (coded.len() - FIXED) as f64 * 8.0 - escapes as f64 * 32.0;
    // A component may be coded with another class's table where that is less.
    let overhead = 2.0 * 8.0 * (rans::OVERHEAD as f64 + 40.0);
    assert!(
        streams > 0.8 * bits && streams < 1.02 * bits + overhead,
        "{streams} bits for {bits}"
    );
}

/// Components that are much narrower here than where the tables were trained are coded with a narrower class's table.
#[test]
fn components_find_the_class_that_suits_them() {
    let tables = SMOL.coder(1).tables;
    let (wide, narrow) = (1, 2);
    let small = [ZERO, ZERO + 1, ZERO, ZERO - 2].repeat(50);
    let large: Vec<u8> = (0..200).map(|i| ZERO - 30 + i % 60).collect();
    for (own, symbols, class) in [
        (wide, &small, narrow),
        (narrow, &small, narrow),
        (wide, &large, wide),
    ] {
        let difference = classes::cheapest(&tables, own, symbols);
        assert_eq!(
            classes::chosen(&tables, own, usize::from(difference)),
            Some(class)
        );
    }
    // Neither the class of zeros nor one beyond the last can be reached.
    assert_eq!(
        classes::chosen(&tables, wide, usize::from(classes::SAME) - 1),
        None
    );
    assert_eq!(
        classes::chosen(&tables, narrow, usize::from(classes::SAME) + 1),
        None
    );
    let order = classes::Order::new(&tables, &[wide, narrow, wide], &[4, 3, 5], 10).unwrap();
    assert_eq!(order.runs, [(wide, 0..20), (narrow, 20..30)]);
    assert_eq!(order.starts, [0, 10, 20]);
    assert!(classes::Order::new(&tables, &[wide], &[0], 10).is_err());
}

#[test]
fn case_c03_hostile_tables() {
    let file = SMOL.file();
    assert!(Tables::parse(&file).is_ok());
    for cut in (0..file.len()).step_by(97) {
        assert!(Tables::parse(&file[..cut]).is_err());
    }
    assert!(Tables::parse(&[file.clone(), vec![0]].concat()).is_err());
    for at in 0..64 {
        for value in [0, 1, 0x7f, 0xff] {
            let mut changed = file.clone();
            changed[at] = value;
            let _ = Tables::parse(&changed);
        }
    }
    let mut version = file;
    version[8] = 9;
    assert!(Tables::parse(&version).unwrap_err().0.contains("version 9"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_values_stay_within_the_bound(
        rows in 1_usize..70, position in 0_u32..100_000, seed in any::<u64>(), factor in -20_i32..20, style in 0_u8..3,
    ) {
        let like = Like { style, ..SMOL };
        let mut payload = like.payload(rows, seed);
        for at in 0..payload.len() / 2 {
            let value = like.element.get(&payload, at) * 2_f32.powi(factor);
            like.element.set(&mut payload, at, value);
        }
        like.round_trip(&payload, position);
    }

    #[test]
    fn any_bits_come_back_or_stay_within_the_bound(payload in prop::collection::vec(any::<u8>(), 192 * 2 * 9)) {
        SMOL.round_trip(&payload, 3);
    }

    #[test]
    fn case_c03_changed_bytes_are_an_error_or_a_payload(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<prop::sample::Index>(),
    ) {
        let payload = SMOL.payload(20, 2);
        let mut coded = SMOL.round_trip(&payload, 0);
        let header = header(20, SMOL.bytes_per_token() as u32, 0);
        let coder = SMOL.coder(1);
        let mut back = vec![0; payload.len()];
        let cut = cut.index(coded.len());
        prop_assert!(coder.decode(&header, &[], &coded[..cut], &mut back).is_err());
        for (at, value) in changes {
            let at = at.index(coded.len());
            coded[at] = value;
        }
        let _ = coder.decode(&header, &[], &coded, &mut back);
    }

    #[test]
    fn case_c03_any_bytes_are_an_error(coded in prop::collection::vec(any::<u8>(), 0..300), kind in 0_u8..4) {
        let header = header(20, SMOL.bytes_per_token() as u32, 0);
        let mut back = vec![0; 20 * SMOL.bytes_per_token()];
        let coded = [vec![kind, VERSION], coded].concat();
        prop_assert!(SMOL.coder(1).decode(&header, &[], &coded, &mut back).is_err());
    }
}
