//! Attention of rows with positions of their own: each row sees exactly the keys at positions up to its own.
//!
//! A lane is one query head of one row, and a panel the lanes that are computed together, the query heads of a KV head
//! next to each other. So K and V are read as they lie, one number for all lanes at a time, and maxima, sums and masks
//! of the softmax go from lane to lane like everything else. A panel goes over the keys once, `KEYS` at a time, with a
//! running maximum and sum, and ends at its last row's position.
//!
//! Threads take items, the rows of a few panels in one KV head, those with the most keys first. Keys are cut at fixed
//! places, so the bits of a row depend on nothing but the row and the keys that it sees.

mod panel;

use crate::Refused;
use crate::share::share;
use panel::{LANES, Panels};

/// Lanes of an item: a block of keys is read once for all of them, from a cache that is near.
const ITEM: usize = 6 * LANES;

/// What one layer's rows attend to, and how.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Query heads, as many for each KV head.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head, an even number.
    pub dim: usize,
    /// What a product of a row and a key is multiplied by.
    pub scale: f32,
    /// Positions that a row sees at most, its own included.
    pub window: Option<usize>,
    /// `[rows][heads][dim]`.
    pub q: &'a [f32],
    /// `[keys][kv_heads][dim]`, key p at position p.
    pub k: &'a [f32],
    /// As `k`, finite.
    pub v: &'a [f32],
    /// Position of each row, rising.
    pub positions: &'a [i64],
    /// Not 0 for each key that no row sees; a row that sees nothing is no number.
    pub hidden: Option<&'a [u8]>,
}

/// Rows of one KV head.
struct Item<'a> {
    head: usize,
    first: usize,
    /// Of each row: where the output of its query heads goes.
    out: Vec<&'a mut [f32]>,
}

impl Attention<'_> {
    /// Writes `[rows][heads][dim]` to `out`, on up to `threads` threads, this one included. The bits do not depend on
    /// how many.
    ///
    /// # Errors
    ///
    /// Lengths that don't fit together, positions that don't rise or are none of a key; nothing is written then.
    pub fn attend(&self, out: &mut [f32], threads: usize) -> Result<(), Refused> {
        self.check(out)?;
        let items = self.items(out);
        let count = items.len();
        // Rows rise, so those with the most keys are last.
        let last_first = items.into_iter().rev();
        share(
            last_first,
            count,
            threads,
            |panels: &mut Panels, mut item| {
                panels.attend(self, &mut item);
            },
        );
        Ok(())
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn items<'a>(&self, out: &'a mut [f32]) -> Vec<Item<'a>> {
        let rows = (ITEM / self.group()).max(1);
        let mut items: Vec<Item<'_>> = Vec::new();
        for (index, out) in out.chunks_exact_mut(self.group() * self.dim).enumerate() {
            let (row, head) = (index / self.kv_heads, index % self.kv_heads);
            if row % rows == 0 {
                let out = Vec::with_capacity(rows);
                items.push(Item {
                    head,
                    first: row,
                    out,
                });
            }
            items[row / rows * self.kv_heads + head].out.push(out);
        }
        items
    }

    fn check(&self, out: &[f32]) -> Result<(), Refused> {
        let (heads, kv_heads, dim) = (self.heads, self.kv_heads, self.dim);
        if kv_heads == 0 || heads == 0 || !heads.is_multiple_of(kv_heads) {
            let value = format!("{heads}, {kv_heads}");
            let accepted = "at least 1, as many query heads for each KV head";
            return Err(Refused::new("heads, kv_heads", value, accepted));
        }
        if dim == 0 || !dim.is_multiple_of(2) {
            return Err(Refused::new("dim", dim, "an even number"));
        }
        let rows = self.positions.len();
        let length = |rows: usize, heads: usize| rows.checked_mul(heads)?.checked_mul(dim);
        for (name, found) in [("q", self.q.len()), ("out", out.len())] {
            if Some(found) != length(rows, heads) {
                let accepted = format!("{rows} rows of {heads} heads of {dim}");
                return Err(Refused::new(name, format!("{found} numbers"), accepted));
            }
        }
        let whole = length(1, kv_heads).filter(|row| self.k.len().is_multiple_of(*row));
        let Some(row) = whole.filter(|_| self.k.len() == self.v.len()) else {
            let value = format!("{} and {} numbers", self.k.len(), self.v.len());
            let accepted = format!("equally many, in rows of {kv_heads} heads of {dim}");
            return Err(Refused::new("k, v", value, accepted));
        };
        let keys = self.k.len() / row;
        if let Some(hidden) = self.hidden.filter(|hidden| hidden.len() != keys) {
            let value = format!("{} flags", hidden.len());
            let accepted = format!("one for each of {keys} keys");
            return Err(Refused::new("hidden", value, accepted));
        }
        if self.window == Some(0) {
            return Err(Refused::new("window", 0, "at least 1"));
        }
        let mut least = 0;
        for &position in self.positions {
            let there = usize::try_from(position).is_ok_and(|position| position < keys);
            if position < least || !there || i32::try_from(position).is_err() {
                let accepted = format!("rising positions below {keys}");
                return Err(Refused::new("positions", position, accepted));
            }
            least = position + 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
