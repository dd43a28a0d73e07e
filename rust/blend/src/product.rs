//! Small matrix products and powers of two, written so that the compiler keeps them in vector registers.
//!
//! Arrays of [`LANES`] are what one instruction or two work on, and [`ROWS`] by `LANES` sums fit the registers of AVX2.
//! `FUSED` is whether the processor multiplies and adds in one instruction: without, `mul_add` is a call.

/// Rows of a tile.
pub(crate) const ROWS: usize = 6;
/// Columns of a tile.
pub(crate) const LANES: usize = 16;

/// A tile of sums.
pub(crate) type Tile = [[f32; LANES]; ROWS];

/// `a · b + c`.
#[inline(always)]
pub(crate) fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `tile[r][l] = Σ_i left[i][r] · right[i][l]`, summed in rising order of i.
#[inline(always)]
pub(crate) fn product<const FUSED: bool>(left: &[[f32; ROWS]], right: &[[f32; LANES]]) -> Tile {
    let mut tile = [[0.0; LANES]; ROWS];
    for (left, right) in left.iter().zip(right) {
        for (sums, &factor) in tile.iter_mut().zip(left) {
            for (sum, &value) in sums.iter_mut().zip(right) {
                *sum = multiply_add::<FUSED>(factor, value, *sum);
            }
        }
    }
    tile
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

/// 2^x, to rounding; what is too large is infinite, what is too small 0, and what is no number none.
#[inline(always)]
pub(crate) fn exp2<const FUSED: bool>(x: f32) -> f32 {
    let x = x.clamp(-151.0, 128.0);
    let shifted = x + ROUND;
    let rest = x - (shifted - ROUND);
    let mut power = SERIES[0];
    for &term in &SERIES[1..] {
        power = multiply_add::<FUSED>(power, rest, term);
    }
    // In two factors, as the exponents of numbers below the normal ones and of infinity don't fit one.
    let whole = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = whole >> 1;
    let scale = |exponent: i32| f32::from_bits((exponent.wrapping_add(127) as u32) << 23);
    power * scale(half) * scale(whole.wrapping_sub(half))
}

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
        for step in -15_200..13_000 {
            let x = step as f32 * 0.01;
            let wanted = f64::from(x).exp2();
            for found in [exp2::<true>(x), exp2::<false>(x)] {
                let error = (f64::from(found) - wanted).abs();
                assert!(
                    error <= wanted * 3e-7 + 1e-45 || (found.is_infinite() && x >= 128.0),
                    "{x}: {found}"
                );
            }
        }
        for (x, wanted) in [
            (f32::NEG_INFINITY, 0.0),
            (f32::INFINITY, f32::INFINITY),
            (-1e30, 0.0),
            (0.0, 1.0),
        ] {
            assert_eq!(exp2::<true>(x), wanted);
        }
        assert!(exp2::<true>(f32::NAN).is_nan());
    }

    #[test]
    fn a_tile_is_the_plain_sum() {
        let left: Vec<[f32; ROWS]> = (0..37)
            .map(|i| std::array::from_fn(|r| ((i * 31 + r * 17) % 101) as f32 / 50.0 - 1.0))
            .collect();
        let right: Vec<[f32; LANES]> = (0..37)
            .map(|i| std::array::from_fn(|l| ((i * 7 + l * 13) % 97) as f32 / 40.0 - 1.0))
            .collect();
        let tile = product::<false>(&left, &right);
        for (row, sums) in tile.iter().enumerate() {
            for (lane, &sum) in sums.iter().enumerate() {
                let wanted = (0..37).fold(0.0, |sum, i| left[i][row] * right[i][lane] + sum);
                assert_eq!(sum, wanted);
            }
        }
    }
}
