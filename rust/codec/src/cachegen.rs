//! `cachegen`: predict a layer from the one before it, turn it into components, quantise, entropy-code.
//!
//! Keys are turned back to position 0 first, where they are alike from token to token. Layers form chains: the first is
//! coded on its own, each later one as the difference to what the decoder has of the one before. A chain is one stream,
//! so that chains are coded side by side. Rows at the first positions of a prompt, and rows with values that aren't
//! finite, are kept as they are.
//!
//! ```text
//!   0  kind: 1 quantised, 2 lossless     1      20  error bound of keys    f32  4
//!   1  version = 2                       1      24  error bound of values  f32  4
//!   2  zeros                             2      28  raw rows r                  4
//!   4  table id                         16
//!  32  raw row u32 × r | bytes of each chain u32 × chains | raw rows, each [layer][K|V][channel] | chains
//!
//! chain = escapes e u32 | value i32 × e | rANS stream: difference of each [layer][block][component] to its class,
//!         then [class so found][layer][block][component][row], without raw rows
//! ```
//!
//! Behind kind 2 and version stands a payload as [`crate::lossless`] codes it: what the tables can't do well.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::coder::{Codec, CodecError, Coder, MAX_EXPANSION};
use crate::frame::Header;
use crate::linear::padded;
use crate::lossless::{self, Lossless};
use crate::rotary::Turns;
use crate::tables::Tables;
use chain::{decode_chain, encode_chain, quantise_chain};

mod chain;
mod classes;

const VERSION: u8 = 2;
const QUANTISED: u8 = 1;
const LOSSLESS: u8 = 2;
const FIXED: usize = 32;

/// The coder of one namespace.
#[derive(Clone, Debug)]
pub struct Cachegen {
    tables: Arc<Tables>,
    threads: usize,
}

/// What an encoded payload says about itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// No key element differs by more from what was encoded.
    pub keys: f32,
    /// No value element differs by more.
    pub values: f32,
}

impl Cachegen {
    /// Codes with `tables`, the chains of a record on up to `threads` threads (1: on the caller's alone).
    #[must_use]
    pub fn new(tables: Arc<Tables>, threads: usize) -> Self {
        Cachegen {
            tables,
            threads: threads.max(1),
        }
    }

    /// The tables in use.
    #[must_use]
    pub fn tables(&self) -> &Tables {
        &self.tables
    }

    /// The error bound that `coded` states; zero for a payload that was coded without loss.
    ///
    /// # Errors
    /// For bytes that are no coded payload.
    pub fn bound(coded: &[u8]) -> Result<Bound, CodecError> {
        match coded {
            [LOSSLESS, VERSION, ..] => Ok(Bound {
                keys: 0.0,
                values: 0.0,
            }),
            [QUANTISED, VERSION, ..] if coded.len() >= FIXED => Ok(Bound {
                keys: float(coded, 20),
                values: float(coded, 24),
            }),
            _ => Err(CodecError(
                "no cachegen payload, or of another version".into(),
            )),
        }
    }

    /// How often each symbol of each class occurs in a payload `[class][256]`: what its entropy is reckoned from.
    ///
    /// # Errors
    /// For a payload of another shape, or too far from what the tables know.
    pub fn symbol_counts(&self, position: u32, payload: &[u8]) -> Result<Vec<u64>, CodecError> {
        let tables = &*self.tables;
        if payload.is_empty() || !payload.len().is_multiple_of(tables.bytes_per_token()) {
            return Err(CodecError(format!(
                "{} bytes are no whole tokens",
                payload.len()
            )));
        }
        let rows = payload.len() / tables.bytes_per_token();
        let raw = raw_rows(tables, position, payload, rows);
        let turns = all_turns(tables, position, rows);
        let mut counts = vec![0; 256 * tables.classes.len()];
        for chain in 0..tables.chains() {
            let quantised = quantise_chain(tables, chain, payload, rows, &raw, &turns)?;
            for (class, symbols) in quantised.own.iter().zip(quantised.components()) {
                symbols
                    .iter()
                    .for_each(|symbol| counts[256 * class + usize::from(*symbol)] += 1);
            }
        }
        Ok(counts)
    }

    fn lossless(&self, format: u16) -> Lossless {
        let element = (format == 0).then_some(self.tables.element);
        Lossless::new(element, 2 * self.tables.layers)
    }

    fn quantised(
        &self,
        position: u32,
        payload: &[u8],
        coded: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let tables = &*self.tables;
        let rows = payload.len() / tables.bytes_per_token();
        let raw = raw_rows(tables, position, payload, rows);
        if raw.len() * 2 > rows && rows > 8 {
            return Err(CodecError(format!(
                "{} of {rows} tokens have values that aren't finite",
                raw.len()
            )));
        }
        let turns = all_turns(tables, position, rows);
        let chains =
            self.each_chain(|chain| encode_chain(tables, chain, payload, rows, &raw, &turns))?;
        let bound = chains.iter().fold((0.0_f32, 0.0_f32), |b, c| {
            (b.0.max(c.bound.keys), b.1.max(c.bound.values))
        });
        coded.extend_from_slice(&[QUANTISED, VERSION, 0, 0]);
        coded.extend_from_slice(&tables.id);
        coded.extend_from_slice(&bound.0.to_le_bytes());
        coded.extend_from_slice(&bound.1.to_le_bytes());
        coded.extend_from_slice(&(raw.len() as u32).to_le_bytes());
        raw.iter()
            .for_each(|row| coded.extend_from_slice(&(*row as u32).to_le_bytes()));
        chains
            .iter()
            .for_each(|chain| coded.extend_from_slice(&(chain.bytes.len() as u32).to_le_bytes()));
        for &row in &raw {
            for part in parts(tables, rows) {
                coded.extend_from_slice(
                    &payload[part + row * row_bytes(tables)..][..row_bytes(tables)],
                );
            }
        }
        chains
            .iter()
            .for_each(|chain| coded.extend_from_slice(&chain.bytes));
        Ok(())
    }

    fn reconstructed(
        &self,
        position: u32,
        coded: &[u8],
        payload: &mut [u8],
    ) -> Result<(), CodecError> {
        let tables = &*self.tables;
        let rows = payload.len() / tables.bytes_per_token();
        let end = || CodecError("cachegen payload ends too early".into());
        if coded.len() < FIXED {
            return Err(end());
        }
        if coded[4..20] != tables.id {
            return Err(CodecError(
                "coded with other tables than those at hand".into(),
            ));
        }
        let count = integer(coded, 28) as usize;
        if count > rows {
            return Err(CodecError(format!("{count} raw rows of {rows}")));
        }
        let lengths_at = FIXED + 4 * count;
        let raw_at = lengths_at + 4 * tables.chains();
        let raw_bytes = count * tables.bytes_per_token();
        let mut at = raw_at + raw_bytes;
        if coded.len() < at {
            return Err(end());
        }
        let mut raw = Vec::with_capacity(count);
        for index in 0..count {
            let row = integer(coded, FIXED + 4 * index) as usize;
            if row >= rows || raw.last().is_some_and(|last| *last >= row) {
                return Err(CodecError(format!(
                    "raw row {row} of {rows}, or out of order"
                )));
            }
            raw.push(row);
        }
        let mut streams = Vec::with_capacity(tables.chains());
        for chain in 0..tables.chains() {
            let len = integer(coded, lengths_at + 4 * chain) as usize;
            streams.push(coded.get(at..at.saturating_add(len)).ok_or_else(end)?);
            at += len;
        }
        if at != coded.len() {
            return Err(CodecError(
                "cachegen payload goes on behind its last chain".into(),
            ));
        }
        let turns = all_turns(tables, position, rows);
        let chain_bytes = tables.chain * rows * tables.width() * tables.element.size();
        let targets: Vec<_> = payload.chunks_mut(chain_bytes).map(Mutex::new).collect();
        self.each_chain(|chain| {
            // Every chain has its own slice, so that the lock is always free.
            let mut target = targets[chain]
                .lock()
                .map_err(|_| CodecError("a thread has panicked".into()))?;
            decode_chain(
                tables,
                chain,
                streams[chain],
                rows,
                &raw,
                &turns,
                &mut target,
            )
        })?;
        drop(targets);
        let mut source = &coded[raw_at..raw_at + raw_bytes];
        for &row in &raw {
            for part in parts(tables, rows) {
                let (bytes, rest) = source.split_at(row_bytes(tables));
                payload[part + row * row_bytes(tables)..][..row_bytes(tables)]
                    .copy_from_slice(bytes);
                source = rest;
            }
        }
        Ok(())
    }

    /// Does `work` for every chain, in any order; the results in order, or the first error.
    fn each_chain<T: Send>(
        &self,
        work: impl Fn(usize) -> Result<T, CodecError> + Sync,
    ) -> Result<Vec<T>, CodecError> {
        let count = self.tables.chains();
        let threads = self.threads.min(count);
        if threads == 1 {
            return (0..count).map(work).collect();
        }
        let next = AtomicUsize::new(0);
        let results: Vec<_> = (0..count).map(|_| Mutex::new(None)).collect();
        let worker = || {
            loop {
                let chain = next.fetch_add(1, Ordering::Relaxed);
                let Some(slot) = results.get(chain) else {
                    break;
                };
                let result = work(chain);
                if let Ok(mut slot) = slot.lock() {
                    *slot = Some(result);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(worker);
            }
            worker();
        });
        let failed = || CodecError("a thread has panicked".into());
        results
            .into_iter()
            .map(|slot| {
                slot.into_inner()
                    .ok()
                    .flatten()
                    .unwrap_or_else(|| Err(failed()))
            })
            .collect()
    }
}

impl Coder for Cachegen {
    fn codec(&self) -> Codec {
        Codec::CACHEGEN
    }

    /// A payload in another format than the engine's elements is coded without loss: what was quantised once is never
    /// quantised again.
    fn encode(
        &self,
        header: &Header,
        params: &[u8],
        payload: &[u8],
        coded: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let start = coded.len();
        if header.format == 0 && header.bytes_per_token as usize == self.tables.bytes_per_token() {
            if payload.len() as u64 != header.raw_len() {
                return Err(CodecError(format!(
                    "{} payload bytes for {} tokens",
                    payload.len(),
                    header.ntokens
                )));
            }
            match self.quantised(header.source_position, payload, coded) {
                Ok(()) if ((coded.len() - start) as u64) < header.raw_len() => {
                    return if (coded.len() - start) as u64 * MAX_EXPANSION < header.raw_len() {
                        Err(CodecError("too small".into()))
                    } else {
                        Ok(())
                    };
                }
                _ => coded.truncate(start),
            }
        }
        coded.extend_from_slice(&[LOSSLESS, VERSION]);
        self.lossless(header.format)
            .encode(header, params, payload, coded)
    }

    fn decode(
        &self,
        header: &Header,
        params: &[u8],
        coded: &[u8],
        payload: &mut [u8],
    ) -> Result<(), CodecError> {
        match coded {
            [LOSSLESS, VERSION, rest @ ..] => self
                .lossless(header.format)
                .decode(header, params, rest, payload),
            [QUANTISED, VERSION, ..] => {
                if header.format != 0
                    || header.bytes_per_token as usize != self.tables.bytes_per_token()
                {
                    return Err(CodecError(
                        "a record of another shape than these tables are for".into(),
                    ));
                }
                if payload.len() as u64 != header.raw_len() {
                    return Err(CodecError(format!(
                        "room for {} bytes, not {}",
                        payload.len(),
                        header.raw_len()
                    )));
                }
                self.reconstructed(header.source_position, coded, payload)
            }
            _ => Err(CodecError(
                "no cachegen payload, or of another version".into(),
            )),
        }
    }
}

fn row_bytes(tables: &Tables) -> usize {
    tables.width() / 2 * tables.element.size()
}

/// Where keys and values of each layer begin in a payload of `rows` tokens.
fn parts(tables: &Tables, rows: usize) -> impl Iterator<Item = usize> {
    let part = rows * row_bytes(tables);
    (0..2 * tables.layers).map(move |index| index * part)
}

/// Rows that are kept as they are, in rising order.
fn raw_rows(tables: &Tables, position: u32, payload: &[u8], rows: usize) -> Vec<usize> {
    let first = (tables.raw_positions.saturating_sub(position) as usize).min(rows);
    let mut raw = vec![false; rows];
    raw[..first].fill(true);
    let each = tables.width() / 2;
    for (index, values) in payload.chunks_exact(row_bytes(tables)).enumerate() {
        if !lossless::finite(tables.element, values, each) {
            raw[index % rows] = true;
        }
    }
    (0..rows).filter(|row| raw[*row]).collect()
}

fn all_turns(tables: &Tables, position: u32, rows: usize) -> Vec<Turns> {
    tables
        .frequencies
        .iter()
        .map(|set| Turns::new(set, position, padded(rows)))
        .collect()
}

fn integer(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn float(bytes: &[u8], at: usize) -> f32 {
    f32::from_bits(integer(bytes, at))
}

#[cfg(test)]
pub(crate) mod tests;
