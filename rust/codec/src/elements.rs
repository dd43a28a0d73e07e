//! Element types of a payload and what they are as `f32`.

use crate::coder::CodecError;

/// Element type of a payload, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Element {
    /// bfloat16
    Bf16 = 1,
    /// IEEE half precision
    F16 = 2,
    /// IEEE single precision
    F32 = 3,
}

impl Element {
    /// By its number in files.
    ///
    /// # Errors
    /// For a number that is none.
    pub fn new(number: u8) -> Result<Self, CodecError> {
        match number {
            1 => Ok(Self::Bf16),
            2 => Ok(Self::F16),
            3 => Ok(Self::F32),
            _ => Err(CodecError(format!(
                "element type {number} is none of 1 (bf16), 2 (f16) and 3 (f32)"
            ))),
        }
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// Most that rounding to this type changes a value, relative to the value.
    pub(crate) fn rounding(self) -> f32 {
        match self {
            Self::Bf16 => 1.0 / 256.0,
            Self::F16 => 1.0 / 2048.0,
            Self::F32 => 1.0 / 16_777_216.0,
        }
    }

    /// Element `at` of `bytes`.
    #[inline(always)]
    pub(crate) fn get(self, bytes: &[u8], at: usize) -> f32 {
        match self {
            Self::Bf16 => f32::from_bits(
                u32::from(u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])) << 16,
            ),
            Self::F16 => half_to_single(u16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]])),
            Self::F32 => {
                let b = &bytes[4 * at..4 * at + 4];
                f32::from_le_bytes([b[0], b[1], b[2], b[3]])
            }
        }
    }

    /// Sets element `at` of `bytes` to the nearest value, ties to even.
    #[inline(always)]
    pub(crate) fn set(self, bytes: &mut [u8], at: usize, value: f32) {
        match self {
            Self::Bf16 => {
                // Values here are finite; the largest may round up to infinity, as in hardware.
                let bits = value.to_bits();
                let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
                bytes[2 * at..2 * at + 2].copy_from_slice(&(rounded as u16).to_le_bytes());
            }
            Self::F16 => {
                bytes[2 * at..2 * at + 2].copy_from_slice(&single_to_half(value).to_le_bytes())
            }
            Self::F32 => bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes()),
        }
    }
}

/// Half to single precision, exact.
#[inline(always)]
pub(crate) fn half_to_single(half: u16) -> f32 {
    // 2^112 moves a half's exponent, read with a single's bias, to where it belongs; subnormals come out right too.
    let magnitude = f32::from_bits(u32::from(half & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    let special = if half & 0x7c00 == 0x7c00 {
        0x7f80_0000
    } else {
        0
    };
    f32::from_bits(magnitude.to_bits() | special | u32::from(half & 0x8000) << 16)
}

/// Single to half precision, to nearest even; too large becomes infinity.
#[inline(always)]
pub(crate) fn single_to_half(value: f32) -> u16 {
    let sign = (value.to_bits() >> 16 & 0x8000) as u16;
    let magnitude = value.abs();
    if magnitude.is_nan() {
        return sign | 0x7e00;
    }
    if magnitude >= 65_520.0 {
        return sign | 0x7c00;
    }
    if magnitude < 6.103_515_6e-5 {
        // Adding 0.5 leaves the subnormal's bits, rounded, at the lower end.
        return sign | ((magnitude + 0.5).to_bits() - 0.5_f32.to_bits()) as u16;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0xfff + (bits >> 13 & 1);
    sign | ((rounded - (112 << 23)) >> 13) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_goes_there_and_back() {
        for half in 0..=u16::MAX {
            let single = half_to_single(half);
            if single.is_nan() {
                assert!(half & 0x7c00 == 0x7c00 && half & 0x3ff != 0);
                continue;
            }
            assert_eq!(single_to_half(single), half);
        }
        assert_eq!(half_to_single(0x3c00), 1.0);
        assert_eq!(half_to_single(0x0001), 5.960_464_5e-8);
        assert_eq!(half_to_single(0xfc00), f32::NEG_INFINITY);
    }

    #[test]
    fn rounding_is_to_nearest_even() {
        assert_eq!(single_to_half(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(single_to_half(1.0 + 3.0 / 2048.0), 0x3c02);
        assert_eq!(single_to_half(1e6), 0x7c00);
        let mut bytes = [0; 2];
        Element::Bf16.set(&mut bytes, 0, 1.0 + 1.0 / 256.0);
        assert_eq!(Element::Bf16.get(&bytes, 0), 1.0);
        Element::Bf16.set(&mut bytes, 0, -1.0 - 3.0 / 256.0);
        assert_eq!(Element::Bf16.get(&bytes, 0), -1.015_625);
    }
}
