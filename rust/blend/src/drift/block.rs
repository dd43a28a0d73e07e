//! The correction of a block of rows in one head.

use std::ops::Range;

use super::panels::{Panels, inverse_norm};
use super::{BLOCK, Block, Settings};
use crate::product::{LANES, ROWS, exp2, product};
use crate::rotation::{Pairing, Rotation};

/// What a block's products go through: rows stand in groups of [`ROWS`].
#[derive(Default)]
pub(super) struct Scratch {
    /// `[groups][dim]`: cached V.
    cached: Vec<[f32; ROWS]>,
    /// `[groups][columns, padded]`.
    weights: Vec<[f32; ROWS]>,
    /// `[groups][ROWS][2 dim, padded]`: what is added to V and to K, before it is scaled and turned.
    carried: Vec<f32>,
}

impl Scratch {
    /// Corrects the elements `at` of a block's rows, which are `row` elements each.
    pub(super) fn correct(
        &mut self,
        settings: &Settings,
        panels: &Panels,
        block: &mut Block<'_>,
        row: usize,
        at: Range<usize>,
        rotation: Option<Rotation<'_>>,
    ) {
        #[cfg(target_arch = "x86_64")]
        if crate::product::vectors() {
            #[allow(unsafe_code)]
            // SAFETY: the processor has AVX2 and fused multiplication and addition.
            unsafe {
                self.correct_avx2(settings, panels, block, row, at, rotation);
            }
            return;
        }
        const FUSED: bool = cfg!(target_arch = "aarch64");
        self.correct_any::<FUSED>(settings, panels, block, row, at, rotation);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn correct_avx2(
        &mut self,
        settings: &Settings,
        panels: &Panels,
        block: &mut Block<'_>,
        row: usize,
        at: Range<usize>,
        rotation: Option<Rotation<'_>>,
    ) {
        self.correct_any::<true>(settings, panels, block, row, at, rotation);
    }

    #[inline(always)]
    pub(super) fn correct_any<const FUSED: bool>(
        &mut self,
        settings: &Settings,
        panels: &Panels,
        block: &mut Block<'_>,
        row: usize,
        at: Range<usize>,
        rotation: Option<Rotation<'_>>,
    ) {
        let dim = at.len();
        let rows = block.v.len() / row;
        let groups = rows.div_ceil(ROWS);
        let padded = panels.bias.len() * LANES;
        let width = (2 * dim).next_multiple_of(LANES);
        // Rows behind the last one hold what they held: nothing is read from their results.
        self.cached.resize(groups * dim, [0.0; ROWS]);
        self.weights.resize(groups * padded, [0.0; ROWS]);
        self.carried.resize(groups * ROWS * width, 0.0);

        let mut inverse = [0.0_f32; BLOCK];
        for (index, v) in block.v.chunks_exact(row).enumerate() {
            let v = &v[at.clone()];
            inverse[index] = inverse_norm(v);
            let to = &mut self.cached[index / ROWS * dim..][..dim];
            for (to, from) in to.iter_mut().zip(v) {
                to[index % ROWS] = *from;
            }
        }

        // Lane by lane, summed up at the end.
        let mut totals = [[0.0_f32; LANES]; BLOCK];
        for (panel, (alike, bias)) in panels.alike.chunks_exact(dim).zip(&panels.bias).enumerate() {
            let rows = totals.as_chunks_mut::<ROWS>().0.iter_mut();
            let rows = rows.zip(inverse.as_chunks::<ROWS>().0).take(groups);
            for (group, (totals, inverse)) in rows.enumerate() {
                let mut tile = product::<FUSED>(&self.cached[group * dim..][..dim], alike);
                for ((sums, totals), inverse) in tile.iter_mut().zip(totals).zip(inverse) {
                    for ((x, bias), total) in sums.iter_mut().zip(bias).zip(totals) {
                        *x = exp2::<FUSED>(*x * inverse + bias);
                        *total += *x;
                    }
                }
                let to = &mut self.weights[group * padded + panel * LANES..][..LANES];
                for (lane, to) in to.iter_mut().enumerate() {
                    for (to, sums) in to.iter_mut().zip(&tile) {
                        *to = sums[lane];
                    }
                }
            }
        }

        for (panel, moved) in panels.moved.chunks_exact(panels.columns).enumerate() {
            for group in 0..groups {
                let weights = &self.weights[group * padded..][..panels.columns];
                let tile = product::<FUSED>(weights, moved);
                for (r, sums) in tile.iter().enumerate() {
                    self.carried[(group * ROWS + r) * width + panel * LANES..][..LANES]
                        .copy_from_slice(sums);
                }
            }
        }

        let rows = block
            .k
            .chunks_exact_mut(row)
            .zip(block.v.chunks_exact_mut(row));
        for (index, (k, v)) in rows.enumerate() {
            let (k, v) = (&mut k[at.clone()], &mut v[at.clone()]);
            // Where all weights are 0 nothing is added.
            let total = totals[index].iter().sum::<f32>() + settings.still;
            let least = f32::MIN_POSITIVE;
            let scale = settings.strength / if total < least { least } else { total };
            let (carried_v, carried_k) = self.carried[index * width..][..2 * dim].split_at(dim);
            for (v, carried) in v.iter_mut().zip(carried_v) {
                *v += scale * carried;
            }
            let turned = rotation.map_or(0, |rotation| 2 * rotation.pairs);
            if let Some(rotation) = rotation {
                add_turned(
                    k,
                    &carried_k[..turned],
                    rotation,
                    block.start + index,
                    scale,
                );
            }
            for (k, carried) in k[turned..].iter_mut().zip(&carried_k[turned..]) {
                *k += scale * carried;
            }
        }
    }
}

/// Adds what was carried to the turned elements of a head, first elements of pairs before second ones.
#[inline(always)]
fn add_turned(k: &mut [f32], carried: &[f32], rotation: Rotation<'_>, position: usize, scale: f32) {
    let pairs = rotation.pairs;
    let (a, b) = carried.split_at(pairs);
    let (cos, sin) = rotation.at(position);
    let turned = a
        .iter()
        .zip(b)
        .zip(cos.iter().zip(sin))
        .map(|((a, b), (cos, sin))| (scale * (a * cos - b * sin), scale * (b * cos + a * sin)));
    match rotation.pairing {
        Pairing::Half => {
            let (first, second) = k.split_at_mut(pairs);
            for ((first, second), (a, b)) in first.iter_mut().zip(second).zip(turned) {
                *first += a;
                *second += b;
            }
        }
        Pairing::Interleaved => {
            for (pair, (a, b)) in k.as_chunks_mut::<2>().0.iter_mut().zip(turned) {
                pair[0] += a;
                pair[1] += b;
            }
        }
    }
}
