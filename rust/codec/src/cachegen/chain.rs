//! One chain of layers: into symbols and back. All matrices are channel-major with padded rows.

use super::classes::{self, Order};
use super::{Bound, row_bytes};
use crate::coder::CodecError;
use crate::elements::Element;
use crate::linear::{LANES, padded};
use crate::rans;
use crate::rotary::Turns;
use crate::tables::{Class, ESCAPE, Layer, Tables, ZERO};

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
    /// `[component][row]`, without raw rows.
    pub(super) symbols: Vec<u8>,
    /// Class of each component.
    pub(super) own: Vec<usize>,
    escapes: Vec<i32>,
    bound: Bound,
}

impl Quantised {
    /// The symbols of each component, of none if all rows are raw.
    pub(super) fn components(&self) -> impl Iterator<Item = &[u8]> {
        let kept = self.symbols.len() / self.own.len().max(1);
        self.symbols.chunks_exact(kept.max(1))
    }
}

pub(super) fn encode_chain(
    tables: &Tables,
    chain: usize,
    payload: &[u8],
    rows: usize,
    raw: &[usize],
    turns: &[Turns],
) -> Result<Encoded, CodecError> {
    let quantised = quantise_chain(tables, chain, payload, rows, raw, turns)?;
    let Quantised {
        symbols,
        own,
        escapes,
        bound,
    } = &quantised;
    let kept = rows - raw.len();
    let differences: Vec<u8> = if kept == 0 {
        own.iter().map(|_| classes::SAME).collect()
    } else {
        own.iter()
            .zip(quantised.components())
            .map(|(own, symbols)| classes::cheapest(tables, *own, symbols))
            .collect()
    };
    let order = Order::new(tables, own, &differences, kept)?;
    let mut sorted = vec![0; symbols.len()];
    for (start, component) in order.starts.iter().zip(quantised.components()) {
        sorted[*start..start + kept].copy_from_slice(component);
    }
    let mut bytes = Vec::with_capacity(symbols.len() / 2);
    bytes.extend_from_slice(&(escapes.len() as u32).to_le_bytes());
    escapes
        .iter()
        .for_each(|value| bytes.extend_from_slice(&value.to_le_bytes()));
    let mut runs = vec![(classes::table(), differences.as_slice())];
    for (class, range) in order.runs {
        runs.push((&tables.classes[class].table, &sorted[range]));
    }
    rans::encode(&runs, &mut bytes);
    Ok(Encoded {
        bytes,
        bound: *bound,
    })
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
                for values in work.components[component * wide..(component + count) * wide]
                    .chunks_exact_mut(wide)
                {
                    quantise(tables, class, values, rows, raw, &mut symbols, &mut escapes)?;
                }
                component += count;
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
        own: classes::own(tables, chain),
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
    let own = classes::own(tables, chain);
    let damaged = |error: rans::Error| CodecError(error.to_string());
    let mut decoder = rans::Decoder::new(stream).map_err(damaged)?;
    let mut differences = vec![0; own.len()];
    decoder
        .run(classes::table(), &mut differences)
        .map_err(damaged)?;
    let order = Order::new(tables, &own, &differences, kept)?;
    let mut symbols = vec![0; own.len() * kept];
    for (class, range) in order.runs {
        let table = &tables.classes[class].table;
        decoder.run(table, &mut symbols[range]).map_err(damaged)?;
    }
    decoder.finish().map_err(damaged)?;
    let mut work = Work::new(tables, turns, rows);
    let (wide, width) = (work.wide, tables.width());
    let layer_bytes = rows * width * tables.element.size();
    let mut starts = order.starts.iter();
    let mut keys = vec![0.0; width / 2 * wide];
    for (at, (index, layer)) in layers().enumerate() {
        work.predict(layer);
        for (number, block) in layer.blocks.iter().enumerate() {
            let mut values = work.components.chunks_exact_mut(wide);
            for &(class, count) in &block.runs {
                // There is a start for each component, and room for the components of each block.
                for (values, start) in values.by_ref().take(count).zip(starts.by_ref()) {
                    let run = &symbols[*start..start + kept];
                    dequantise(tables, class, run, raw, &mut escapes, &mut values[..rows])?;
                }
            }
            work.correct(layer, number);
        }
        let (rotated, values) = work.now.split_at(width / 2 * wide);
        keys.copy_from_slice(rotated);
        work.turn(index, &mut keys, false);
        let (into, others) =
            target[at * layer_bytes..][..layer_bytes].split_at_mut(layer_bytes / 2);
        store(tables.element, &keys, rows, into);
        store(tables.element, values, rows, others);
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
            *value = class.levels[symbol as usize];
        } else {
            symbols.push(ESCAPE);
            escapes.push(level);
            *value = level as f32 * tables.step;
        }
    }
    Ok(())
}

/// Sets the `values` of one component, zeros in raw rows.
fn dequantise(
    tables: &Tables,
    class: usize,
    symbols: &[u8],
    raw: &[usize],
    escapes: &mut impl Iterator<Item = i32>,
    values: &mut [f32],
) -> Result<(), CodecError> {
    let Class { levels, .. } = &tables.classes[class];
    let mut symbols = symbols;
    let mut first = 0;
    for &row in raw.iter().chain([&values.len()]) {
        let (run, others) = symbols.split_at(row - first);
        for (value, symbol) in values[first..row].iter_mut().zip(run) {
            *value = levels[usize::from(*symbol)];
        }
        if run.contains(&ESCAPE) {
            for (value, _) in values[first..row]
                .iter_mut()
                .zip(run)
                .filter(|(_, symbol)| **symbol == ESCAPE)
            {
                let missing =
                    || CodecError("a chain has fewer escapes than its symbols ask for".into());
                *value = escapes.next().ok_or_else(missing)? as f32 * tables.step;
            }
        }
        if let Some(value) = values.get_mut(row) {
            *value = 0.0;
        }
        symbols = others;
        first = row + 1;
    }
    Ok(())
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

/// The other way round, of keys or values: `[token][channel]` from channels with padded rows.
fn store(element: Element, from: &[f32], rows: usize, into: &mut [u8]) {
    let wide = padded(rows);
    let channels = from.len() / wide;
    let row_bytes = channels * element.size();
    // A line of the source and sixteen of the target are at hand at a time.
    for (strip, into) in into.chunks_mut(LANES * row_bytes).enumerate() {
        for (channel, values) in from.chunks_exact(wide).enumerate() {
            let values = &values[strip * LANES..];
            for (row, value) in into.chunks_exact_mut(row_bytes).zip(values) {
                element.set(row, channel, *value);
            }
        }
    }
}
