//! Powers of two, written so that the compiler keeps them in vector registers.
//!
//! `FUSED` is whether the processor multiplies and adds in one instruction: without, `mul_add` is a call.

/// `a · b + c`.
#[inline(always)]
pub(crate) fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// ln(2)^k / k!, highest power first: the exponential series, whose next term is below 1e-8 within half a unit.
const SERIES: [f32; 8] = [
    1.525_273_4e-5,
    1.540_353e-4,
    1.333_355_8e-3,
    9.618_129e-3,
    5.550_411e-2,
    0.240_226_5,
    std::f32::consts::LN_2,
    1.0,
];
/// Adding it leaves the nearest whole number in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// 2^x of what is at most 0, to rounding; below the normal numbers 0, and what is no number none.
#[inline(always)]
pub(crate) fn exp2_down<const FUSED: bool>(x: f32) -> f32 {
    let x = if x < -127.0 { -127.0 } else { x };
    let shifted = x + ROUND;
    let rest = x - (shifted - ROUND);
    let mut power = SERIES[0];
    for &term in &SERIES[1..] {
        power = multiply_add::<FUSED>(power, rest, term);
    }
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    power * f32::from_bits(exponent << 23)
}

/// Whether this processor has AVX2 and fused multiplication and addition.
#[cfg(target_arch = "x86_64")]
pub(crate) fn vectors() -> bool {
    std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_two_are_right_to_rounding() {
        for step in -12_600..=0 {
            let x = step as f32 * 0.01;
            let wanted = f64::from(x).exp2();
            for found in [exp2_down::<true>(x), exp2_down::<false>(x)] {
                assert!(
                    (f64::from(found) - wanted).abs() <= wanted * 3e-7,
                    "{x}: {found}"
                );
            }
        }
        for below in [f32::NEG_INFINITY, -1e30, -127.0] {
            assert_eq!(exp2_down::<true>(below), 0.0);
        }
        assert_eq!(exp2_down::<true>(0.0), 1.0);
        assert!(exp2_down::<true>(f32::NAN).is_nan());
    }
}
