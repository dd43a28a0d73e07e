//! Rotations of keys, as tables of cosines and sines.

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Element i with i + pairs.
    Half,
    /// Element 2 i with 2 i + 1.
    Interleaved,
}

/// The rotation of each position: cosines and sines `[positions][pairs]`. Elements from 2 `pairs` on are not turned.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
    /// Pairs of a head.
    pub pairs: usize,
    /// How they are formed.
    pub pairing: Pairing,
}

impl<'a> Rotation<'a> {
    /// Cosines and sines of one position.
    #[inline(always)]
    pub(crate) fn at(&self, position: usize) -> (&'a [f32], &'a [f32]) {
        let row = position * self.pairs..(position + 1) * self.pairs;
        (&self.cos[row.clone()], &self.sin[row])
    }
}
