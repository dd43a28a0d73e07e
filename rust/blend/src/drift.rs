//! The drift correction of one layer: cached K and V move as the recomputed tokens most like them have moved.
//!
//! For token t of a document, `weight(s) = exp(bias(s) + cos(V_t, V_s) / temperature)` over the document's columns
//! s, recomputed tokens all; `V_t += strength · Σ weight · moved V_s / (Σ weight + still)`, and K_t alike, with the
//! rotation taken out of what moved and that of t put in. Cosines are of the cached values, in every head by itself.
//!
//! Columns are gathered first, as their cached rows are corrected too. Then threads take blocks of `BLOCK` rows: weights
//! are one matrix product of a block and the columns, what is added is another of the weights and what moved.

mod block;
mod panels;

use std::ops::Range;
use std::sync::OnceLock;

use crate::Refused;
use crate::product::ROWS;
use crate::rotation::Rotation;
use crate::share::share;
use block::Scratch;
use panels::{Gathered, Panels};

/// Rows that a thread takes at a time: with what they are multiplied by they stay in the first-level caches.
const BLOCK: usize = 8 * ROWS;

/// How much is applied, and to what it is compared.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Share of the average that is added.
    pub strength: f32,
    /// In units of cosine, above 0; infinite for weights that don't depend on it.
    pub temperature: f32,
    /// Weight of what did not move.
    pub still: f32,
}

/// A recomputed token that a document is averaged over.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Its place among the recomputed tokens.
    pub place: usize,
    /// Logarithm of its weight at a cosine of 0.
    pub bias: f32,
}

/// Tokens that are corrected: a run of one document's.
#[derive(Clone, Debug)]
pub struct Span {
    /// Their positions.
    pub tokens: Range<usize>,
    /// Their document.
    pub document: usize,
}

/// The correction of one prompt, for all of its layers.
#[derive(Debug)]
pub struct Drift {
    settings: Settings,
    /// Positions of the recomputed tokens.
    selected: Vec<usize>,
    /// Columns of each document.
    documents: Vec<Vec<Column>>,
    /// Rising, those of documents without columns left out.
    spans: Vec<Span>,
    /// Positions that a layer must have.
    reach: usize,
}

/// One layer: working K and V `[tokens][heads][dim]`, and the fresh ones `[recomputed][heads][dim]`.
#[derive(Debug)]
pub struct Layer<'a> {
    /// KV heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// Working K, cached in the rows of the spans.
    pub k: &'a mut [f32],
    /// Working V.
    pub v: &'a mut [f32],
    /// What K is at the recomputed tokens.
    pub fresh_k: &'a [f32],
    /// What V is at the recomputed tokens.
    pub fresh_v: &'a [f32],
    /// None where K has no rotation.
    pub rotation: Option<Rotation<'a>>,
}

impl Drift {
    /// `selected` are the positions of the recomputed tokens, `documents` the columns of each document.
    ///
    /// # Errors
    ///
    /// Spans that are not apart and rising, a document or column that is not there, a temperature that is not above 0.
    pub fn new(
        settings: Settings,
        selected: Vec<usize>,
        documents: Vec<Vec<Column>>,
        mut spans: Vec<Span>,
    ) -> Result<Self, Refused> {
        if settings.temperature.is_nan() || settings.temperature <= 0.0 {
            let accepted = "a number above 0, or infinity";
            return Err(Refused::new("temperature", settings.temperature, accepted));
        }
        let mut stop = 0;
        for span in &spans {
            let Range { start, end } = span.tokens;
            if start < stop || end < start {
                let value = format!("{start}..{end} behind {stop}");
                return Err(Refused::new("spans", value, "rising spans that are apart"));
            }
            stop = end;
            if span.document >= documents.len() {
                let accepted = format!("documents below {}", documents.len());
                return Err(Refused::new("spans", span.document, accepted));
            }
        }
        let missing = |column: &&Column| column.place >= selected.len();
        if let Some(column) = documents.iter().flatten().find(missing) {
            let accepted = format!("places below {}", selected.len());
            return Err(Refused::new("columns", column.place, accepted));
        }
        let last = selected
            .iter()
            .max()
            .map_or(0, |last| last.saturating_add(1));
        spans.retain(|span| !documents[span.document].is_empty());
        Ok(Self {
            settings,
            selected,
            documents,
            spans,
            reach: stop.max(last),
        })
    }

    /// Corrects a layer in place, on up to `threads` threads, this one included. The result does not depend on how many.
    ///
    /// # Errors
    ///
    /// Lengths that don't fit together; nothing has changed then.
    pub fn carry(&self, layer: Layer<'_>, threads: usize) -> Result<(), Refused> {
        self.check(&layer)?;
        if self.spans.is_empty() {
            return Ok(());
        }
        let (heads, row) = (layer.heads, layer.heads * layer.dim);
        let gathered = Gathered::new(&self.settings, &self.selected, &layer);
        // Made by the thread that needs it first, for all.
        let panels: Vec<OnceLock<Panels>> = (0..self.documents.len() * heads)
            .map(|_| OnceLock::new())
            .collect();
        let blocks = self.blocks(layer.k, layer.v, row);
        let rows: usize = self.spans.iter().map(|span| span.tokens.len()).sum();
        let count = rows.div_ceil(BLOCK);
        share(
            blocks,
            count,
            threads,
            |scratch: &mut Scratch, mut block| {
                for head in 0..heads {
                    let panels = panels[block.document * heads + head].get_or_init(|| {
                        Panels::new(&gathered, head, &self.documents[block.document])
                    });
                    let at = head * layer.dim..(head + 1) * layer.dim;
                    scratch.correct(&self.settings, panels, &mut block, row, at, layer.rotation);
                }
            },
        );
        Ok(())
    }

    /// The rows of the spans, cut into blocks of one document's.
    fn blocks<'a>(
        &self,
        mut k: &'a mut [f32],
        mut v: &'a mut [f32],
        row: usize,
    ) -> impl Iterator<Item = Block<'a>> {
        let mut at = 0;
        self.spans
            .iter()
            .flat_map(|span| {
                let Range { start, end } = span.tokens;
                (start..end)
                    .step_by(BLOCK)
                    .map(move |start| (start..end.min(start + BLOCK), span.document))
            })
            .map(move |(tokens, document)| {
                let take = |rows: &mut &'a mut [f32]| {
                    let (_, rest) = std::mem::take(rows).split_at_mut((tokens.start - at) * row);
                    let (block, rest) = rest.split_at_mut(tokens.len() * row);
                    *rows = rest;
                    block
                };
                let (k, v) = (take(&mut k), take(&mut v));
                at = tokens.end;
                Block {
                    document,
                    start: tokens.start,
                    k,
                    v,
                }
            })
    }

    fn check(&self, layer: &Layer<'_>) -> Result<(), Refused> {
        let (heads, dim) = (layer.heads, layer.dim);
        let row = heads.checked_mul(dim).filter(|row| *row > 0);
        let row = row.ok_or_else(|| {
            Refused::new(
                "heads, dim",
                format!("{heads}, {dim}"),
                "at least 1 of each",
            )
        })?;
        if layer.k.len() != layer.v.len() || !layer.k.len().is_multiple_of(row) {
            let value = format!("{} and {} numbers", layer.k.len(), layer.v.len());
            let accepted = format!("equally many, in rows of {row}");
            return Err(Refused::new("k, v", value, accepted));
        }
        if layer.k.len() / row < self.reach {
            let value = format!("{} tokens", layer.k.len() / row);
            let accepted = format!("at least the {} that are spoken of", self.reach);
            return Err(Refused::new("k, v", value, accepted));
        }
        for (name, fresh) in [("fresh_k", layer.fresh_k), ("fresh_v", layer.fresh_v)] {
            if Some(fresh.len()) != row.checked_mul(self.selected.len()) {
                let value = format!("{} numbers", fresh.len());
                let accepted = format!("{} rows of {row}", self.selected.len());
                return Err(Refused::new(name, value, accepted));
            }
        }
        let Some(Rotation {
            cos, sin, pairs, ..
        }) = layer.rotation
        else {
            return Ok(());
        };
        if pairs == 0 || pairs > dim / 2 {
            let accepted = format!("1 to {} pairs", dim / 2);
            return Err(Refused::new("cos, sin", format!("{pairs} pairs"), accepted));
        }
        if cos.len() != sin.len() || cos.len() / pairs < self.reach {
            let value = format!("{} and {} numbers", cos.len(), sin.len());
            let accepted = format!("equally many, {pairs} for each of {} positions", self.reach);
            return Err(Refused::new("cos, sin", value, accepted));
        }
        Ok(())
    }
}

/// Up to `BLOCK` rows of one document, from position `start` on, all heads.
struct Block<'a> {
    document: usize,
    start: usize,
    k: &'a mut [f32],
    v: &'a mut [f32],
}

#[cfg(test)]
mod tests;
