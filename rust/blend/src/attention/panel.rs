//! An item's panels on their way over the keys.

use super::{Attention, Item};
use crate::power::{exp2_down, multiply_add};

/// Lanes of a panel: [`STEP`] times as many sums fit the registers of AVX2, with what they are made of.
pub(super) const LANES: usize = 16;
/// Keys, or elements of V, whose sums are made together.
pub(super) const STEP: usize = 6;
/// Keys of a block: their V and weights stay in the first-level cache.
const KEYS: usize = 66;
/// Below every product, and finite: what is masked is infinitely far below it.
const LOWEST: f32 = f32::MIN;

type Lanes = [f32; LANES];

struct Panel {
    /// `[dim]`: queries, multiplied by the scale and log2(e).
    q: Vec<Lanes>,
    /// `[dim]`: the sum of weights and V, in units of 2^`top`.
    sums: Vec<Lanes>,
    top: Lanes,
    total: Lanes,
    positions: [i32; LANES],
}

/// What an item goes through.
#[derive(Default)]
pub(super) struct Panels(Vec<Panel>);

impl Panels {
    /// Attends and writes the item's output.
    pub(super) fn attend(&mut self, of: &Attention<'_>, item: &mut Item<'_>) {
        #[cfg(target_arch = "x86_64")]
        if crate::power::vectors() {
            #[allow(unsafe_code)]
            // SAFETY: the processor has AVX2 and fused multiplication and addition.
            unsafe {
                self.attend_avx2(of, item);
            }
            return;
        }
        const FUSED: bool = cfg!(target_arch = "aarch64");
        self.attend_any::<FUSED>(of, item);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    fn attend_avx2(&mut self, of: &Attention<'_>, item: &mut Item<'_>) {
        self.attend_any::<true>(of, item);
    }

    #[inline(always)]
    pub(super) fn attend_any<const FUSED: bool>(
        &mut self,
        of: &Attention<'_>,
        item: &mut Item<'_>,
    ) {
        let (dim, row) = (of.dim, of.kv_heads * of.dim);
        self.fill(of, item);
        let window = of.window.unwrap_or(usize::MAX);
        let first = of.positions[item.first] as usize;
        let stop = of.positions[item.first + item.out.len() - 1] as usize + 1;
        let low = (first + 1).saturating_sub(window) / KEYS * KEYS;
        let mut weights = [[0.0; LANES]; KEYS];
        for start in (low..stop).step_by(KEYS) {
            let at = item.head * dim;
            let (k, v) = (&of.k[start * row..], &of.v[start * row..]);
            for panel in &mut self.0 {
                let (first, last) = (
                    panel.positions[0] as usize,
                    panel.positions[LANES - 1] as usize,
                );
                // Of none of these keys its rows see any.
                if last < start || (first + 1).saturating_sub(window) >= start + KEYS {
                    continue;
                }
                let count = KEYS.min(last + 1 - start);
                panel.products::<FUSED>(
                    k,
                    row,
                    at,
                    &mut weights[..count.next_multiple_of(STEP)],
                    count,
                );
                let weights = &mut weights[..count];
                if first < start + count - 1 || last - start >= window || of.hidden.is_some() {
                    panel.mask(weights, start, window, of.hidden);
                }
                let shrink = panel.soften::<FUSED>(weights);
                panel.add::<FUSED>(v, row, at, weights, &shrink);
            }
        }
        self.write(of, item);
    }

    /// Lanes of the item's rows, those behind the last one like it.
    #[inline(always)]
    fn fill(&mut self, of: &Attention<'_>, item: &Item<'_>) {
        let (dim, group) = (of.dim, of.group());
        let lanes = item.out.len() * group;
        let factor = of.scale * std::f32::consts::LOG2_E;
        self.0.resize_with(lanes.div_ceil(LANES), || Panel {
            q: vec![[0.0; LANES]; dim],
            sums: vec![[0.0; LANES]; dim],
            top: [LOWEST; LANES],
            total: [0.0; LANES],
            positions: [0; LANES],
        });
        for (index, panel) in self.0.iter_mut().enumerate() {
            panel.sums.fill([0.0; LANES]);
            (panel.top, panel.total) = ([LOWEST; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                let spot = (index * LANES + lane).min(lanes - 1);
                let row = item.first + spot / group;
                panel.positions[lane] = of.positions[row] as i32;
                let head = row * of.heads + item.head * group + spot % group;
                let q = &of.q[head * dim..][..dim];
                for (to, from) in panel.q.iter_mut().zip(q) {
                    to[lane] = from * factor;
                }
            }
        }
    }

    #[inline(always)]
    fn write(&self, of: &Attention<'_>, item: &mut Item<'_>) {
        let outs = item
            .out
            .iter_mut()
            .flat_map(|out| out.chunks_exact_mut(of.dim));
        for (spot, out) in outs.enumerate() {
            let (panel, lane) = (&self.0[spot / LANES], spot % LANES);
            let share = 1.0 / panel.total[lane];
            for (out, sums) in out.iter_mut().zip(&panel.sums) {
                *out = sums[lane] * share;
            }
        }
    }
}

impl Panel {
    /// Of all lanes and the elements `at` of keys, of which there are `count`; what stands behind them means nothing.
    #[inline(always)]
    fn products<const FUSED: bool>(
        &self,
        k: &[f32],
        row: usize,
        at: usize,
        out: &mut [Lanes],
        count: usize,
    ) {
        let dim = self.q.len();
        for (step, out) in out.as_chunks_mut::<STEP>().0.iter_mut().enumerate() {
            let keys: [&[f32]; STEP] =
                std::array::from_fn(|r| &k[(step * STEP + r).min(count - 1) * row + at..][..dim]);
            let mut tile = [[0.0; LANES]; STEP];
            for (index, q) in self.q.iter().enumerate() {
                accumulate::<FUSED, STEP>(&mut tile, &keys.map(|key| key[index]), q);
            }
            *out = tile;
        }
    }

    /// What a lane doesn't see of the keys from `start` on has no weight.
    #[inline(always)]
    fn mask(&self, products: &mut [Lanes], start: usize, window: usize, hidden: Option<&[u8]>) {
        let window = i32::try_from(window).unwrap_or(i32::MAX);
        for (key, products) in (start..).zip(products) {
            if hidden.is_some_and(|hidden| hidden[key] != 0) {
                *products = [f32::NEG_INFINITY; LANES];
                continue;
            }
            for (product, position) in products.iter_mut().zip(&self.positions) {
                let distance = position - key as i32;
                let seen = (distance >= 0) & (distance < window);
                *product = if seen { *product } else { f32::NEG_INFINITY };
            }
        }
    }

    /// Makes weights of products; what earlier ones shrink by.
    #[inline(always)]
    fn soften<const FUSED: bool>(&mut self, weights: &mut [Lanes]) -> Lanes {
        let mut top = self.top;
        for products in weights.iter() {
            for (top, &product) in top.iter_mut().zip(products) {
                *top = if product > *top { product } else { *top };
            }
        }
        let mut shrink = self.top;
        for (shrink, top) in shrink.iter_mut().zip(&top) {
            *shrink = exp2_down::<FUSED>(*shrink - top);
        }
        let mut total = self.total;
        for (total, shrink) in total.iter_mut().zip(&shrink) {
            *total *= shrink;
        }
        for weights in weights {
            for ((weight, top), total) in weights.iter_mut().zip(&top).zip(&mut total) {
                *weight = exp2_down::<FUSED>(*weight - top);
                *total += *weight;
            }
        }
        (self.top, self.total) = (top, total);
        shrink
    }

    /// Adds the elements `at` of V of the keys.
    #[inline(always)]
    fn add<const FUSED: bool>(
        &mut self,
        v: &[f32],
        row: usize,
        at: usize,
        weights: &[Lanes],
        shrink: &Lanes,
    ) {
        let (steps, rest) = self.sums.as_chunks_mut::<STEP>();
        let done = steps.len() * STEP;
        for (step, sums) in steps.iter_mut().enumerate() {
            add_step::<FUSED, STEP>(sums, v, row, at + step * STEP, weights, shrink);
        }
        for (step, sums) in rest.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            add_step::<FUSED, 2>(sums, v, row, at + done + step * 2, weights, shrink);
        }
    }
}

#[inline(always)]
fn add_step<const FUSED: bool, const R: usize>(
    sums: &mut [Lanes; R],
    v: &[f32],
    row: usize,
    at: usize,
    weights: &[Lanes],
    shrink: &Lanes,
) {
    let mut tile = *sums;
    for sums in &mut tile {
        for (sum, shrink) in sums.iter_mut().zip(shrink) {
            *sum *= shrink;
        }
    }
    for (v, weights) in v.chunks_exact(row).zip(weights) {
        if let Some(v) = v[at..].first_chunk() {
            accumulate::<FUSED, R>(&mut tile, v, weights);
        }
    }
    *sums = tile;
}

/// `tile[r][l] += left[r] · right[l]`.
#[inline(always)]
fn accumulate<const FUSED: bool, const R: usize>(
    tile: &mut [Lanes; R],
    left: &[f32; R],
    right: &Lanes,
) {
    for (sums, &factor) in tile.iter_mut().zip(left) {
        for (sum, &value) in sums.iter_mut().zip(right) {
            *sum = multiply_add::<FUSED>(factor, value, *sum);
        }
    }
}
