//! Rows of a record on their way to the working KV: V as it is, K turned from where it was captured to where it stands.

use crate::Refused;
use crate::rotation::{Pairing, Rotation};
use crate::share::share;

/// Rows that a thread takes at a time.
const BLOCK: usize = 32;

/// Rows of one layer of a record.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// KV heads.
    pub heads: usize,
    /// Elements of a head.
    pub dim: usize,
    /// K, `[rows][heads][dim]`.
    pub k: &'a [f32],
    /// V, `[rows][heads][dim]`.
    pub v: &'a [f32],
    /// How far each row is turned, or nothing for rows that stay as they are.
    pub rotation: Option<Rotation<'a>>,
}

impl Rows<'_> {
    /// Writes K and V of all rows to `k` and `v`, on up to `threads` threads, this one included.
    ///
    /// # Errors
    ///
    /// Lengths that don't fit together; nothing is written then.
    pub fn place(&self, k: &mut [f32], v: &mut [f32], threads: usize) -> Result<(), Refused> {
        let row = self.check(k, v)?;
        let block = BLOCK * row;
        let from = self.k.chunks(block).zip(self.v.chunks(block));
        let to = k.chunks_mut(block).zip(v.chunks_mut(block));
        let blocks = from.zip(to).enumerate();
        let count = self.k.len().div_ceil(block);
        share(
            blocks,
            count,
            threads,
            |(): &mut (), (index, ((from_k, from_v), (to_k, to_v)))| {
                to_v.copy_from_slice(from_v);
                let Some(rotation) = self.rotation else {
                    return to_k.copy_from_slice(from_k);
                };
                let rows = from_k.chunks_exact(row).zip(to_k.chunks_exact_mut(row));
                for (position, (from, to)) in (index * BLOCK..).zip(rows) {
                    turn(from, to, self.dim, rotation, position);
                }
            },
        );
        Ok(())
    }

    /// Numbers of a row.
    fn check(&self, k: &[f32], v: &[f32]) -> Result<usize, Refused> {
        let (heads, dim) = (self.heads, self.dim);
        let row = heads.checked_mul(dim).filter(|row| *row > 0);
        let row = row.ok_or_else(|| {
            let value = format!("{heads}, {dim}");
            Refused::new("heads, dim", value, "at least 1 of each")
        })?;
        let length = self.k.len();
        if !length.is_multiple_of(row) {
            let value = format!("{length} numbers");
            return Err(Refused::new("k", value, format!("rows of {row}")));
        }
        for (name, found) in [("v", self.v.len()), ("to_k", k.len()), ("to_v", v.len())] {
            if found != length {
                let accepted = format!("{length}, as many as k has");
                return Err(Refused::new(name, format!("{found} numbers"), accepted));
            }
        }
        let Some(Rotation {
            cos, sin, pairs, ..
        }) = self.rotation
        else {
            return Ok(row);
        };
        let rows = length / row;
        if pairs == 0 || pairs > dim / 2 || [cos.len(), sin.len()] != [rows * pairs; 2] {
            let value = format!("{} and {} numbers, {pairs} pairs", cos.len(), sin.len());
            let accepted = format!("1 to {} pairs for each of {rows} rows", dim / 2);
            return Err(Refused::new("cos, sin", value, accepted));
        }
        Ok(row)
    }
}

/// The heads of a row, turned.
fn turn(from: &[f32], to: &mut [f32], dim: usize, rotation: Rotation<'_>, position: usize) {
    let (cos, sin) = rotation.at(position);
    let (pairs, turned) = (rotation.pairs, 2 * rotation.pairs);
    for (from, to) in from.chunks_exact(dim).zip(to.chunks_exact_mut(dim)) {
        to[turned..].copy_from_slice(&from[turned..]);
        let angles = cos.iter().zip(sin);
        match rotation.pairing {
            Pairing::Half => {
                let (a, b) = from[..turned].split_at(pairs);
                let (to_a, to_b) = to[..turned].split_at_mut(pairs);
                let (from, to) = (a.iter().zip(b), to_a.iter_mut().zip(to_b));
                for (((a, b), (to_a, to_b)), (cos, sin)) in from.zip(to).zip(angles) {
                    *to_a = a * cos - b * sin;
                    *to_b = b * cos + a * sin;
                }
            }
            Pairing::Interleaved => {
                let from = from.as_chunks::<2>().0.iter();
                let to = to.as_chunks_mut::<2>().0.iter_mut();
                for (([a, b], to), (cos, sin)) in from.zip(to).zip(angles) {
                    *to = [a * cos - b * sin, b * cos + a * sin];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: usize = 2;
    const DIM: usize = 10;
    const PAIRS: usize = 4;

    fn numbers(count: usize, step: usize) -> Vec<f32> {
        (0..count)
            .map(|i| ((i * step) % 101) as f32 / 50.0 - 1.0)
            .collect()
    }

    #[test]
    fn keys_turn_pair_by_pair_and_all_else_is_copied() {
        for rows in [0, 1, BLOCK, 3 * BLOCK + 7] {
            let (k, v) = (
                numbers(rows * HEADS * DIM, 37),
                numbers(rows * HEADS * DIM, 53),
            );
            let angles: Vec<f32> = numbers(rows * PAIRS, 29);
            let cos: Vec<f32> = angles.iter().map(|angle| angle.cos()).collect();
            let sin: Vec<f32> = angles.iter().map(|angle| angle.sin()).collect();
            for pairing in [None, Some(Pairing::Half), Some(Pairing::Interleaved)] {
                let mut wanted = k.clone();
                for (at, head) in wanted.chunks_exact_mut(DIM).enumerate() {
                    for pair in 0..PAIRS {
                        let angle = f64::from(angles[at / HEADS * PAIRS + pair]);
                        let (one, other) = match pairing {
                            None => continue,
                            Some(Pairing::Half) => (pair, pair + PAIRS),
                            Some(Pairing::Interleaved) => (2 * pair, 2 * pair + 1),
                        };
                        let (a, b) = (f64::from(head[one]), f64::from(head[other]));
                        head[one] = (a * angle.cos() - b * angle.sin()) as f32;
                        head[other] = (b * angle.cos() + a * angle.sin()) as f32;
                    }
                }
                let rotation = pairing.map(|pairing| Rotation {
                    cos: &cos,
                    sin: &sin,
                    pairs: PAIRS,
                    pairing,
                });
                let rows = Rows {
                    heads: HEADS,
                    dim: DIM,
                    k: &k,
                    v: &v,
                    rotation,
                };
                let (mut to_k, mut to_v) = (vec![f32::NAN; k.len()], vec![f32::NAN; v.len()]);
                rows.place(&mut to_k, &mut to_v, 3).unwrap();
                assert_eq!(to_v, v);
                for (found, wanted) in to_k.iter().zip(&wanted) {
                    assert!((found - wanted).abs() < 1e-6, "{found} for {wanted}");
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_and_nothing_is_written() {
        let (k, angles) = (numbers(3 * HEADS * DIM, 37), numbers(3 * PAIRS, 29));
        let rotation = |count: usize, pairs| {
            Some(Rotation {
                cos: &angles[..count],
                sin: &angles[..count],
                pairs,
                pairing: Pairing::Half,
            })
        };
        let fits = Rows {
            heads: HEADS,
            dim: DIM,
            k: &k,
            v: &k,
            rotation: rotation(3 * PAIRS, PAIRS),
        };
        for (name, rows, room) in [
            ("heads, dim", Rows { heads: 0, ..fits }, k.len()),
            (
                "k",
                Rows {
                    dim: DIM + 1,
                    ..fits
                },
                k.len(),
            ),
            (
                "v",
                Rows {
                    v: &k[DIM..],
                    ..fits
                },
                k.len(),
            ),
            ("to_k", fits, k.len() - DIM),
            (
                "cos, sin",
                Rows {
                    rotation: rotation(2 * PAIRS, PAIRS),
                    ..fits
                },
                k.len(),
            ),
            (
                "cos, sin",
                Rows {
                    rotation: rotation(0, 0),
                    ..fits
                },
                k.len(),
            ),
            (
                "cos, sin",
                Rows {
                    rotation: rotation(12, DIM),
                    ..fits
                },
                k.len(),
            ),
        ] {
            let (mut to_k, mut to_v) = (vec![0.0; room], vec![0.0; k.len()]);
            let refused = rows.place(&mut to_k, &mut to_v, 1).unwrap_err();
            assert_eq!(refused.name, name);
            assert!(to_k.iter().chain(&to_v).all(|x| *x == 0.0));
        }
    }
}
