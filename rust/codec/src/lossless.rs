//! `lossless`: the exponents entropy-coded, the rest as it is; bit-exact.
//!
//! A payload is cut into planes of equal length (keys or values of one layer). Of every element the byte with the most
//! exponent bits is a symbol; each plane has a table of its own, and eight planes share a stream.
//!
//! ```text
//! planes p u32 | per plane: which symbols occur, 256 bits; frequency u16 of each that does
//!              | bytes of each stream u32 | other bytes of all elements | streams
//! ```

use crate::coder::{Codec, CodecError, Coder, MAX_EXPANSION};
use crate::elements::Element;
use crate::frame::Header;
use crate::rans;

/// Planes that share a stream.
const TOGETHER: usize = 8;
/// Elements of a plane below which its table would cost more than it saves.
const SMALLEST: usize = 64;

/// Codes payloads of one element type.
#[derive(Clone, Copy, Debug)]
pub struct Lossless {
    element: Option<Element>,
    planes: usize,
}

impl Lossless {
    /// For payloads of `planes` equal parts with elements of a type, or of bytes.
    #[must_use]
    pub fn new(element: Option<Element>, planes: usize) -> Self {
        Lossless {
            element,
            planes: planes.max(1),
        }
    }

    fn size(&self) -> usize {
        self.element.map_or(1, Element::size)
    }

    /// Planes of a payload of `len` bytes: as given, or one when it has another shape.
    fn planes_of(&self, len: usize) -> usize {
        let fits = len.is_multiple_of(self.planes * self.size())
            && len / (self.planes * self.size()) >= SMALLEST;
        if fits { self.planes } else { 1 }
    }
}

impl Coder for Lossless {
    fn codec(&self) -> Codec {
        Codec::LOSSLESS
    }

    fn encode(
        &self,
        _header: &Header,
        _params: &[u8],
        payload: &[u8],
        coded: &mut Vec<u8>,
    ) -> Result<(), CodecError> {
        let (start, size, planes) = (coded.len(), self.size(), self.planes_of(payload.len()));
        if payload.is_empty() || !payload.len().is_multiple_of(size) {
            return Err(CodecError(format!(
                "a payload of {} bytes is none of {size}-byte elements",
                payload.len()
            )));
        }
        let count = payload.len() / size;
        let (mut symbols, mut others) = (vec![0; count], vec![0; count * (size - 1)]);
        split(self.element, payload, &mut symbols, &mut others);
        let tables: Vec<_> = symbols
            .chunks_exact(count / planes)
            .map(rans::Table::of_symbols)
            .collect();
        coded.extend_from_slice(&(planes as u32).to_le_bytes());
        for table in &tables {
            write_table(table, coded);
        }
        let mut streams = vec![];
        let runs: Vec<_> = tables
            .iter()
            .zip(symbols.chunks_exact(count / planes))
            .collect();
        for runs in runs.chunks(TOGETHER) {
            let before = streams.len();
            rans::encode(runs, &mut streams);
            coded.extend_from_slice(&((streams.len() - before) as u32).to_le_bytes());
        }
        coded.extend_from_slice(&others);
        coded.extend_from_slice(&streams);
        let len = (coded.len() - start) as u64;
        if len >= payload.len() as u64 || len * MAX_EXPANSION < payload.len() as u64 {
            return Err(CodecError("the payload is better left raw".into()));
        }
        Ok(())
    }

    fn decode(
        &self,
        _header: &Header,
        _params: &[u8],
        coded: &[u8],
        payload: &mut [u8],
    ) -> Result<(), CodecError> {
        let (size, planes) = (self.size(), self.planes_of(payload.len()));
        let end = || CodecError("lossless payload ends too early".into());
        let mut rest = coded;
        let found = u32::from_le_bytes(*take(&mut rest).ok_or_else(end)?);
        if found as usize != planes || payload.is_empty() || !payload.len().is_multiple_of(size) {
            return Err(CodecError(format!(
                "lossless payload has {found} planes, this record {planes}"
            )));
        }
        let tables = (0..planes)
            .map(|_| read_table(&mut rest))
            .collect::<Result<Vec<_>, _>>()?;
        let lengths = (0..planes.div_ceil(TOGETHER))
            .map(|_| {
                take(&mut rest)
                    .map(|len| u32::from_le_bytes(*len) as usize)
                    .ok_or_else(end)
            })
            .collect::<Result<Vec<_>, _>>()?;
        let count = payload.len() / size;
        let (others, mut streams) = rest.split_at_checked(count * (size - 1)).ok_or_else(end)?;
        // A stream's symbols stay in a near cache until they have joined the rest of their elements.
        let together = TOGETHER * (count / planes);
        let mut symbols = vec![0; together.min(count)];
        for (index, ((tables, len), payload)) in tables
            .chunks(TOGETHER)
            .zip(lengths)
            .zip(payload.chunks_mut(together * size))
            .enumerate()
        {
            let (stream, after) = streams.split_at_checked(len).ok_or_else(end)?;
            let symbols = &mut symbols[..payload.len() / size];
            let others = &others[index * together * (size - 1)..][..symbols.len() * (size - 1)];
            let mut runs: Vec<_> = tables
                .iter()
                .zip(symbols.chunks_exact_mut(count / planes))
                .collect();
            rans::decode(&mut runs, stream).map_err(|error| CodecError(error.to_string()))?;
            join(self.element, symbols, others, payload);
            streams = after;
        }
        if !streams.is_empty() {
            return Err(CodecError(
                "lossless payload goes on behind its last stream".into(),
            ));
        }
        Ok(())
    }
}

/// Whether `count` elements are all finite numbers.
pub(crate) fn finite(element: Element, bytes: &[u8], count: usize) -> bool {
    debug_assert_eq!(bytes.len(), count * element.size());
    match element {
        Element::Bf16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .all(|b| u16::from_le_bytes(*b) & 0x7f80 != 0x7f80),
        Element::F16 => bytes
            .as_chunks::<2>()
            .0
            .iter()
            .all(|b| u16::from_le_bytes(*b) & 0x7c00 != 0x7c00),
        Element::F32 => bytes
            .as_chunks::<4>()
            .0
            .iter()
            .all(|b| u32::from_le_bytes(*b) & 0x7f80_0000 != 0x7f80_0000),
    }
}

fn split(element: Option<Element>, payload: &[u8], symbols: &mut [u8], others: &mut [u8]) {
    match element {
        None => symbols.copy_from_slice(payload),
        Some(Element::Bf16 | Element::F16) => {
            // Rotated by one, the exponent of a bf16 fills the upper byte, and the sign is among the rest.
            let turn = u32::from(element == Some(Element::Bf16));
            let elements = payload.as_chunks::<2>().0;
            for ((bytes, symbol), other) in elements.iter().zip(symbols).zip(others) {
                let [low, high] = u16::from_le_bytes(*bytes).rotate_left(turn).to_le_bytes();
                (*symbol, *other) = (high, low);
            }
        }
        Some(Element::F32) => {
            let elements = payload.as_chunks::<4>().0;
            for ((bytes, symbol), other) in elements
                .iter()
                .zip(symbols)
                .zip(others.as_chunks_mut::<3>().0)
            {
                let [a, b, c, high] = u32::from_le_bytes(*bytes).rotate_left(1).to_le_bytes();
                (*symbol, *other) = (high, [a, b, c]);
            }
        }
    }
}

fn join(element: Option<Element>, symbols: &[u8], others: &[u8], payload: &mut [u8]) {
    match element {
        None => payload.copy_from_slice(symbols),
        Some(Element::Bf16) => {
            for ((bytes, symbol), other) in payload
                .as_chunks_mut::<2>()
                .0
                .iter_mut()
                .zip(symbols)
                .zip(others)
            {
                *bytes = u16::from_le_bytes([*other, *symbol])
                    .rotate_right(1)
                    .to_le_bytes();
            }
        }
        Some(Element::F16) => {
            for ((bytes, symbol), other) in payload
                .as_chunks_mut::<2>()
                .0
                .iter_mut()
                .zip(symbols)
                .zip(others)
            {
                *bytes = [*other, *symbol];
            }
        }
        Some(Element::F32) => {
            let elements = payload.as_chunks_mut::<4>().0;
            for ((bytes, symbol), other) in elements
                .iter_mut()
                .zip(symbols)
                .zip(others.as_chunks::<3>().0)
            {
                *bytes = u32::from_le_bytes([other[0], other[1], other[2], *symbol])
                    .rotate_right(1)
                    .to_le_bytes();
            }
        }
    }
}

fn write_table(table: &rans::Table, out: &mut Vec<u8>) {
    let mut occurs = [0_u8; 32];
    for (symbol, frequency) in table.frequencies().iter().enumerate() {
        occurs[symbol / 8] |= u8::from(*frequency > 0) << (symbol % 8);
    }
    out.extend_from_slice(&occurs);
    for frequency in table
        .frequencies()
        .iter()
        .filter(|frequency| **frequency > 0)
    {
        out.extend_from_slice(&frequency.to_le_bytes());
    }
}

fn read_table(rest: &mut &[u8]) -> Result<rans::Table, CodecError> {
    let end = || CodecError("a table of the lossless payload ends too early".into());
    let occurs: [u8; 32] = *take(rest).ok_or_else(end)?;
    let mut frequencies = [0; 256];
    for (symbol, frequency) in frequencies.iter_mut().enumerate() {
        if occurs[symbol / 8] >> (symbol % 8) & 1 == 1 {
            *frequency = u16::from_le_bytes(*take(rest).ok_or_else(end)?);
        }
    }
    rans::Table::new(&frequencies).map_err(|error| CodecError(error.to_string()))
}

fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (first, others) = rest.split_first_chunk::<N>()?;
    *rest = others;
    Some(first)
}

#[cfg(test)]
mod tests;
