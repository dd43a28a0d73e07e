//! One chain of layers: into symbols and back. All matrices are channel-major with padded rows.

use std::ops::Range;

use super::{Bound, row_bytes};
use crate::coder::CodecError;
use crate::linear::padded;
use crate::rans;
use crate::rotary::Turns;
use crate::tables::{ESCAPE, Layer, Tables, ZERO};

/// Largest value of an escape.
const LARGEST: f32 = 8_388_607.0;

/// Working memory of one chain, channel-major.
struct Work<'a> {
    tables: &'a Tables,
    turns: &'a [Turns],
    /// Rows with padding.
    wide: usize,
    /// What the decoder has of the layer before, and of this one.
    before: Vec<f32>,
    now: Vec<f32>,
    residual: Vec<f32>,
    components: Vec<f32>,
}

impl<'a> Work<'a> {
    fn new(tables: &'a Tables, turns: &'a [Turns], rows: usize) -> Self {
        let wide = padded(rows);
        let empty = vec![0.0; tables.width() * wide];
        Work {
            tables,
            turns,
            wide,
            before: empty.clone(),
            now: empty.clone(),
            residual: empty.clone(),
            components: empty,
        }
    }

    /// Sets `now` to what is expected of a layer.
    fn predict(&mut self, layer: &Layer) {
        match &layer.prediction {
            Some(matrix) => {
                std::mem::swap(&mut self.before, &mut self.now);
                matrix.apply(&self.before, self.wide, &mut self.now);
                for (channel, mean) in self.now.chunks_exact_mut(self.wide).zip(&layer.mean) {
                    channel.iter_mut().for_each(|value| *value += mean);
                }
            }
            None => {
                for (channel, mean) in self.now.chunks_exact_mut(self.wide).zip(&layer.mean) {
                    channel.fill(*mean);
                }
            }
        }
    }

    /// Adds to `now` what the quantised values in `components` of one block stand for.
    fn correct(&mut self, layer: &Layer, index: usize) {
        let (block, wide) = (&layer.blocks[index], self.wide);
        let width = block.back.outputs();
        let change = &mut self.residual[..width * wide];
        block
            .back
            .apply(&self.components[..block.back.inputs() * wide], wide, change);
        let now = self.now[block.first * wide..].chunks_exact_mut(wide);
        for ((now, change), scale) in now
            .zip(change.chunks_exact(wide))
            .zip(&layer.scale[block.first..])
        {
            let factor = 1.0 / scale;
            for (now, change) in now.iter_mut().zip(change) {
                *now += factor * change;
            }
        }
    }

    fn turn(&self, layer: usize, keys: &mut [f32], back: bool) {
        if let Some(set) = self.tables.sets[layer] {
            for head in keys.chunks_exact_mut(self.tables.head_dim * self.wide) {
                self.turns[set].turn(self.tables.rotary, head, back);
            }
        }
    }
}

/// A coded chain.
pub(super) struct Encoded {
    pub(super) bytes: Vec<u8>,
    pub(super) bound: Bound,
}

/// A chain before it is entropy-coded.
pub(super) struct Quantised {
    pub(super) symbols: Vec<u8>,
    /// (class, symbols of one run)
    pub(super) runs: Vec<(usize, Range<usize>)>,
    escapes: Vec<i32>,
    bound: Bound,
}

pub(super) fn encode_chain(
    tables: &Tables,
    chain: usize,
    payload: &[u8],
    rows: usize,
    raw: &[usize],
    turns: &[Turns],
) -> Result<Encoded, CodecError> {
    let Quantised {
        symbols,
        runs,
        escapes,
        bound,
    } = quantise_chain(tables, chain, payload, rows, raw, turns)?;
    let mut bytes = Vec::with_capacity(symbols.len() / 2);
    bytes.extend_from_slice(&(escapes.len() as u32).to_le_bytes());
    escapes
        .iter()
        .for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
    let runs: Vec<_> = runs
        .into_iter()
        .map(|(class, range)| (&tables.classes[class].table, &symbols[range]))
        .collect();
    rans::encode(&runs, &mut bytes);
    Ok(Encoded { bytes, bound })
}

pub(super) fn quantise_chain(
    tables: &Tables,
    chain: usize,
    payload: &[u8],
    rows: usize,
    raw: &[usize],
    turns: &[Turns],
) -> Result<Quantised, CodecError> {
    let mut work = Work::new(tables, turns, rows);
    let (wide, width) = (work.wide, tables.width());
    let mut original = vec![0.0; width * wide];
    let mut symbols = vec![];
    let mut runs = vec![];
    let mut escapes: Vec<i32> = vec![];
    let (mut error, mut largest) = ([0.0_f32; 2], [0.0_f32; 2]);
    let layer_bytes = rows * width * tables.element.size();
    let first = chain * tables.chain;
    for (index, layer) in tables
        .bases
        .iter()
        .enumerate()
        .skip(first)
        .take(tables.chain)
    {
        load(
            tables,
            &payload[index * layer_bytes..][..layer_bytes],
            rows,
            &mut original,
        );
        raw.iter().for_each(|row| {
            original
                .iter_mut()
                .skip(*row)
                .step_by(wide)
                .for_each(|value| *value = 0.0)
        });
        work.turn(index, &mut original[..width / 2 * wide], true);
        work.predict(layer);
        for (at, block) in layer.blocks.iter().enumerate() {
            let channels = block.first..block.first + block.forward.inputs();
            for channel in channels.clone() {
                let scale = layer.scale[channel];
                let (from, now) = (
                    &original[channel * wide..][..wide],
                    &work.now[channel * wide..][..wide],
                );
                let into = &mut work.residual[(channel - block.first) * wide..][..wide];
                for ((into, from), now) in into.iter_mut().zip(from).zip(now) {
                    *into = (from - now) * scale;
                }
            }
            block.forward.apply(
                &work.residual[..channels.len() * wide],
                wide,
                &mut work.components[..block.forward.outputs() * wide],
            );
            let mut component = 0;
            for &(class, count) in &block.runs {
                let start = symbols.len();
                for values in work.components[component * wide..(component + count) * wide]
                    .chunks_exact_mut(wide)
                {
                    quantise(tables, class, values, rows, raw, &mut symbols, &mut escapes)?;
                }
                component += count;
                runs.push((class, start..symbols.len()));
            }
            work.correct(layer, at);
        }
        for (part, (original, now)) in original
            .chunks_exact(width / 2 * wide)
            .zip(work.now.chunks_exact(width / 2 * wide))
            .enumerate()
        {
            for (original, now) in original.chunks_exact(wide).zip(now.chunks_exact(wide)) {
                for (row, (original, now)) in original[..rows].iter().zip(now).enumerate() {
                    if raw.binary_search(&row).is_err() {
                        error[part] = error[part].max((original - now).abs());
                        largest[part] = largest[part].max(now.abs());
                    }
                }
            }
        }
    }
    // Turning a pair moves error from one element to the other: at most the length of the pair's error.
    let bound = |part: usize, turned: f32| {
        let rounding = largest[part] * turned * tables.element.rounding();
        1.001 * (turned * error[part] + rounding) + f32::MIN_POSITIVE
    };
    let turned = if tables.sets.iter().any(Option::is_some) {
        1.415
    } else {
        1.0
    };
    let bound = Bound {
        keys: bound(0, turned),
        values: bound(1, 1.0),
    };
    Ok(Quantised {
        symbols,
        runs,
        escapes,
        bound,
    })
}

pub(super) fn decode_chain(
    tables: &Tables,
    chain: usize,
    bytes: &[u8],
    rows: usize,
    raw: &[usize],
    turns: &[Turns],
    target: &mut [u8],
) -> Result<(), CodecError> {
    let kept = rows - raw.len();
    let layers = || {
        tables
            .bases
            .iter()
            .enumerate()
            .skip(chain * tables.chain)
            .take(tables.chain)
    };
    let (count, rest) = bytes
        .split_first_chunk::<4>()
        .ok_or_else(|| CodecError("a chain ends too early".into()))?;
    let count = u32::from_le_bytes(*count) as usize;
    let (escapes, stream) = rest
        .split_at_checked(count.saturating_mul(4))
        .ok_or_else(|| CodecError("the escapes of a chain end too early".into()))?;
    let mut escapes = escapes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| i32::from_le_bytes(*bytes));
    let total: usize = layers()
        .flat_map(|(_, layer)| &layer.blocks)
        .map(|block| block.forward.outputs() * kept)
        .sum();
    let mut symbols = vec![0; total];
    let mut rest = symbols.as_mut_slice();
    let mut runs = vec![];
    for (class, count) in layers()
        .flat_map(|(_, layer)| &layer.blocks)
        .flat_map(|block| &block.runs)
    {
        let (run, others) = rest.split_at_mut(count * kept);
        runs.push((&tables.classes[*class].table, run));
        rest = others;
    }
    rans::decode(&mut runs, stream).map_err(|error| CodecError(error.to_string()))?;
    let mut work = Work::new(tables, turns, rows);
    let (wide, width) = (work.wide, tables.width());
    let layer_bytes = rows * width * tables.element.size();
    let mut symbols = symbols.as_slice();
    let mut now = vec![];
    for (at, (index, layer)) in layers().enumerate() {
        work.predict(layer);
        for (number, block) in layer.blocks.iter().enumerate() {
            let mut component = 0;
            for &(class, count) in &block.runs {
                for values in work.components[component * wide..(component + count) * wide]
                    .chunks_exact_mut(wide)
                {
                    let (run, others) = symbols.split_at(kept);
                    dequantise(tables, class, run, raw, rows, &mut escapes, values)?;
                    symbols = others;
                }
                component += count;
            }
            work.correct(layer, number);
        }
        now.clone_from(&work.now);
        work.turn(index, &mut now[..width / 2 * wide], false);
        store(
            tables,
            &now,
            rows,
            &mut target[at * layer_bytes..][..layer_bytes],
        );
    }
    if escapes.next().is_some() {
        return Err(CodecError(
            "a chain has more escapes than its symbols ask for".into(),
        ));
    }
    Ok(())
}

/// Turns components into symbols, and into what the decoder has of them.
fn quantise(
    tables: &Tables,
    class: usize,
    values: &mut [f32],
    rows: usize,
    raw: &[usize],
    symbols: &mut Vec<u8>,
    escapes: &mut Vec<i32>,
) -> Result<(), CodecError> {
    let class = &tables.classes[class];
    let frequencies = class.table.frequencies();
    let (inverse, round) = (1.0 / tables.step, 0.5 - tables.dead_zone);
    let mut raw = raw.iter().peekable();
    for (row, value) in values.iter_mut().enumerate() {
        if row >= rows || raw.next_if(|next| **next == row).is_some() {
            *value = 0.0;
            continue;
        }
        let size = (value.abs() * inverse + round).floor();
        if size.is_nan() || size > LARGEST {
            return Err(CodecError(
                "a value is too far from what the tables know".into(),
            ));
        }
        let level = if *value < 0.0 {
            -(size as i32)
        } else {
            size as i32
        };
        let symbol = level + i32::from(ZERO);
        if (1..=255).contains(&symbol) && frequencies[symbol as usize] > 0 {
            symbols.push(symbol as u8);
            *value = reconstructed(tables.step, &class.shifts, level);
        } else {
            symbols.push(ESCAPE);
            escapes.push(level);
            *value = level as f32 * tables.step;
        }
    }
    Ok(())
}

fn dequantise(
    tables: &Tables,
    class: usize,
    symbols: &[u8],
    raw: &[usize],
    rows: usize,
    escapes: &mut impl Iterator<Item = i32>,
    values: &mut [f32],
) -> Result<(), CodecError> {
    let shifts = &tables.classes[class].shifts;
    let mut levels = [0.0; 256];
    for (symbol, level) in levels.iter_mut().enumerate() {
        *level = reconstructed(tables.step, shifts, symbol as i32 - i32::from(ZERO));
    }
    let mut symbols = symbols.iter();
    let mut raw = raw.iter().peekable();
    for (row, value) in values.iter_mut().enumerate() {
        if row >= rows || raw.next_if(|next| **next == row).is_some() {
            *value = 0.0;
            continue;
        }
        // There is a symbol for every row that isn't raw.
        let symbol = *symbols.next().unwrap_or(&ZERO);
        *value = if symbol == ESCAPE {
            let missing =
                || CodecError("a chain has fewer escapes than its symbols ask for".into());
            escapes.next().ok_or_else(missing)? as f32 * tables.step
        } else {
            levels[usize::from(symbol)]
        };
    }
    Ok(())
}

#[inline]
fn reconstructed(step: f32, shifts: &[f32; 3], level: i32) -> f32 {
    let size = level.unsigned_abs();
    if size == 0 {
        return 0.0;
    }
    let value = (size as f32 - shifts[(size as usize - 1).min(2)]) * step;
    if level < 0 { -value } else { value }
}

/// One layer `[K|V][token][channel]` as `f32`, channel-major with padded rows of zeros.
fn load(tables: &Tables, layer: &[u8], rows: usize, into: &mut [f32]) {
    let (each, wide) = (tables.width() / 2, padded(rows));
    for (part, into) in into.chunks_exact_mut(each * wide).enumerate() {
        for row in 0..rows {
            let from = &layer[(part * rows + row) * row_bytes(tables)..][..row_bytes(tables)];
            for channel in 0..each {
                into[channel * wide + row] = tables.element.get(from, channel);
            }
        }
    }
}

/// The other way round.
fn store(tables: &Tables, from: &[f32], rows: usize, layer: &mut [u8]) {
    let (each, wide) = (tables.width() / 2, padded(rows));
    for (part, from) in from.chunks_exact(each * wide).enumerate() {
        for row in 0..rows {
            let into = &mut layer[(part * rows + row) * row_bytes(tables)..][..row_bytes(tables)];
            for channel in 0..each {
                tables
                    .element
                    .set(into, channel, from[channel * wide + row]);
            }
        }
    }
}
