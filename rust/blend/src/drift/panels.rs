//! What recomputed tokens say, laid out for matrix products.

use super::{Column, Layer, Settings};
use crate::product::LANES;
use crate::rotation::{Pairing, Rotation};

/// Of every head and recomputed token: what others are compared to, and how it moved.
pub(super) struct Gathered {
    /// Recomputed tokens.
    count: usize,
    dim: usize,
    /// `[heads][count][dim]`: cached V of length log2(e) / temperature, so that products are exponents of two.
    alike: Vec<f32>,
    /// `[heads][count][2 dim]`: fresh minus cached V, and the same of K with its rotation taken out, first elements of
    /// pairs before second ones.
    moved: Vec<f32>,
}

impl Gathered {
    pub(super) fn new(settings: &Settings, selected: &[usize], layer: &Layer<'_>) -> Self {
        let (heads, dim, count) = (layer.heads, layer.dim, selected.len());
        let mut alike = vec![0.0; heads * count * dim];
        let mut moved = vec![0.0; heads * count * 2 * dim];
        let length = std::f32::consts::LOG2_E / settings.temperature;
        for (place, &position) in selected.iter().enumerate() {
            for head in 0..heads {
                let old = (position * heads + head) * dim..(position * heads + head + 1) * dim;
                let new = (place * heads + head) * dim..(place * heads + head + 1) * dim;
                let spot = head * count + place;
                let cached = &layer.v[old.clone()];
                let factor = length * inverse_norm(cached);
                for (alike, cached) in alike[spot * dim..][..dim].iter_mut().zip(cached) {
                    *alike = cached * factor;
                }
                let (moved_v, moved_k) = moved[spot * 2 * dim..][..2 * dim].split_at_mut(dim);
                subtract(moved_v, &layer.fresh_v[new.clone()], cached);
                subtract(moved_k, &layer.fresh_k[new], &layer.k[old]);
                if let Some(rotation) = layer.rotation {
                    turn_back(moved_k, rotation, position);
                }
            }
        }
        Self {
            count,
            dim,
            alike,
            moved,
        }
    }
}

fn subtract(out: &mut [f32], fresh: &[f32], cached: &[f32]) {
    for ((out, fresh), cached) in out.iter_mut().zip(fresh).zip(cached) {
        *out = fresh - cached;
    }
}

/// Takes the rotation of `position` out of a head, and puts first elements of pairs before second ones.
fn turn_back(head: &mut [f32], rotation: Rotation<'_>, position: usize) {
    let pairs = rotation.pairs;
    if rotation.pairing == Pairing::Interleaved {
        let turned: Vec<f32> = head[..2 * pairs].to_vec();
        for (pair, values) in turned.as_chunks::<2>().0.iter().enumerate() {
            [head[pair], head[pair + pairs]] = *values;
        }
    }
    let (first, rest) = head.split_at_mut(pairs);
    let (cos, sin) = rotation.at(position);
    for (((a, b), cos), sin) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
        (*a, *b) = (*a * cos + *b * sin, *b * cos - *a * sin);
    }
}

/// 1 over the length of a vector, of at least 1e-12.
#[inline(always)]
pub(super) fn inverse_norm(vector: &[f32]) -> f32 {
    let (eights, rest) = vector.as_chunks::<8>();
    let mut sums = [0.0_f32; 8];
    for eight in eights {
        for (sum, x) in sums.iter_mut().zip(eight) {
            *sum += x * x;
        }
    }
    let rest: f32 = rest.iter().map(|x| x * x).sum();
    let norm = (sums.iter().sum::<f32>() + rest).sqrt();
    // What is no number stays none.
    1.0 / if norm < 1e-12 { 1e-12 } else { norm }
}

/// The columns of one document and head, as the right sides of both products.
#[derive(Debug)]
pub(super) struct Panels {
    pub(super) columns: usize,
    /// `[columns / LANES rounded up][dim]`: a lane is a column.
    pub(super) alike: Vec<[f32; LANES]>,
    /// The exponents of two that products are added to, -∞ where there is no column.
    pub(super) bias: Vec<[f32; LANES]>,
    /// `[2 dim / LANES rounded up][columns]`: a lane is an element of V or K.
    pub(super) moved: Vec<[f32; LANES]>,
}

impl Panels {
    pub(super) fn new(gathered: &Gathered, head: usize, columns: &[Column]) -> Self {
        let (dim, count) = (gathered.dim, gathered.count);
        let width = 2 * dim;
        let mut alike = vec![[0.0; LANES]; columns.len().div_ceil(LANES) * dim];
        let mut bias = vec![[f32::NEG_INFINITY; LANES]; columns.len().div_ceil(LANES)];
        let mut moved = vec![[0.0; LANES]; width.div_ceil(LANES) * columns.len()];
        for (index, column) in columns.iter().enumerate() {
            let (panel, lane) = (index / LANES, index % LANES);
            let spot = head * count + column.place;
            bias[panel][lane] = column.bias * std::f32::consts::LOG2_E;
            let to = &mut alike[panel * dim..][..dim];
            for (to, from) in to.iter_mut().zip(&gathered.alike[spot * dim..][..dim]) {
                to[lane] = *from;
            }
            let from = &gathered.moved[spot * width..][..width];
            for (to, from) in moved[index..]
                .iter_mut()
                .step_by(columns.len())
                .zip(from.chunks(LANES))
            {
                to[..from.len()].copy_from_slice(from);
            }
        }
        Self {
            columns: columns.len(),
            alike,
            bias,
            moved,
        }
    }
}
