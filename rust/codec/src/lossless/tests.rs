use proptest::prelude::*;

use super::*;
use crate::cachegen::tests::header;

fn round_trip(coder: &Lossless, payload: &[u8]) -> Option<usize> {
    let header = header(1, payload.len() as u32, 0);
    let mut coded = vec![7; 3];
    coder.encode(&header, &[], payload, &mut coded).ok()?;
    let mut back = vec![0xaa; payload.len()];
    coder.decode(&header, &[], &coded[3..], &mut back).unwrap();
    assert!(
        back == payload,
        "{coder:?} changed a payload of {} bytes",
        payload.len()
    );
    Some(coded.len() - 3)
}

/// Normal numbers of a width that differs by plane, as bf16.
fn payload(planes: usize, each: usize) -> Vec<u8> {
    let mut x = 1_u64;
    let mut uniform = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (x >> 40) as f32 / (1 << 24) as f32
    };
    (0..planes * each)
        .flat_map(|i| {
            let normal = (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
            let value = normal * 2_f32.powi((i / each) as i32 % 7 - 3);
            ((value.to_bits() >> 16) as u16).to_le_bytes()
        })
        .collect()
}

#[test]
fn bf16_shrinks_by_the_exponents() {
    let payload = payload(60, 4096);
    let coded = round_trip(&Lossless::new(Some(Element::Bf16), 60), &payload).unwrap();
    // Eight bits of sign and mantissa, and the exponent of a normal number: about 2.6 bits.
    assert!(
        (payload.len() as f64 / coded as f64) > 1.45,
        "{} to {coded}",
        payload.len()
    );
}

#[test]
fn case_c01_every_bit_pattern_comes_back() {
    let payload: Vec<u8> = (0..=u16::MAX)
        .cycle()
        .take(1 << 17)
        .map(|x| x & 0x7fff)
        .flat_map(u16::to_le_bytes)
        .collect();
    for element in [
        None,
        Some(Element::Bf16),
        Some(Element::F16),
        Some(Element::F32),
    ] {
        let mut skewed = payload.clone();
        skewed[..200_000].fill(0x7f);
        assert!(round_trip(&Lossless::new(element, 4), &skewed).is_some());
    }
}

#[test]
fn what_does_not_shrink_is_refused() {
    let random: Vec<u8> = (0..4096_u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    assert_eq!(round_trip(&Lossless::new(None, 1), &random), None);
    assert_eq!(round_trip(&Lossless::new(None, 1), &[1]), None);
    assert_eq!(
        round_trip(&Lossless::new(Some(Element::Bf16), 1), &[1; 7]),
        None
    );
    assert_eq!(round_trip(&Lossless::new(None, 1), &[]), None);
}

proptest! {
    #[test]
    fn any_payload_comes_back(
        mut payload in prop::collection::vec(any::<u8>(), 1..3000), planes in 1_usize..5, kind in 0_usize..4, mask in any::<u8>(),
    ) {
        payload.iter_mut().for_each(|byte| *byte &= mask);
        let element = [None, Some(Element::Bf16), Some(Element::F16), Some(Element::F32)][kind];
        round_trip(&Lossless::new(element, planes), &payload);
    }

    #[test]
    fn case_c03_any_bytes_are_an_error_or_a_payload(coded in prop::collection::vec(any::<u8>(), 0..400), len in 0_usize..300) {
        let mut payload = vec![0; len];
        let _ = Lossless::new(Some(Element::Bf16), 2).decode(&header(1, len as u32, 0), &[], &coded, &mut payload);
    }

    #[test]
    fn case_c03_changed_bytes_are_an_error_or_a_payload(at in any::<prop::sample::Index>(), bit in 0_u8..8, cut in any::<prop::sample::Index>()) {
        let original = payload(4, 200);
        let coder = Lossless::new(Some(Element::Bf16), 4);
        let header = header(1, original.len() as u32, 0);
        let mut coded = vec![];
        coder.encode(&header, &[], &original, &mut coded).unwrap();
        let mut back = vec![0; original.len()];
        let cut = cut.index(coded.len());
        prop_assert!(coder.decode(&header, &[], &coded[..cut], &mut back).is_err());
        let at = at.index(coded.len());
        coded[at] ^= 1 << bit;
        let _ = coder.decode(&header, &[], &coded, &mut back);
    }
}
