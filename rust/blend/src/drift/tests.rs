use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::product::LANES;
use crate::rotation::Pairing;

/// A prompt with its correction, one layer of it, and the angle by which pairs turn from one position to the next.
#[derive(Clone, Debug)]
struct Made {
    heads: usize,
    dim: usize,
    tokens: usize,
    pairs: usize,
    pairing: Pairing,
    settings: Settings,
    selected: Vec<usize>,
    documents: Vec<Vec<Column>>,
    spans: Vec<Span>,
    seed: u64,
}

fn made() -> impl Strategy<Value = Made> {
    let shape = (1..4_usize, 1..=40_usize, 0..=20_usize, any::<bool>());
    let settings = (0.1..1.0_f32, 0.05..3.0_f32, 0.0..1.0_f32);
    let spans = proptest::collection::vec((0..3_usize, 1..130_usize, 0..4_usize), 1..5);
    let chosen = proptest::collection::vec(any::<prop::sample::Index>(), 1..30);
    let columns = proptest::collection::vec(
        proptest::collection::vec((any::<prop::sample::Index>(), -2.0..2.0_f32), 0..40),
        4,
    );
    (shape, settings, spans, chosen, columns, any::<u64>()).prop_map(
        |((heads, dim, pairs, half), settings, runs, chosen, columns, seed)| {
            let mut at = 0;
            let spans: Vec<Span> = runs
                .into_iter()
                .map(|(gap, length, document)| {
                    let start = at + gap;
                    at = start + length;
                    Span {
                        tokens: start..at,
                        document,
                    }
                })
                .collect();
            let tokens = at + 2;
            let selected: BTreeSet<usize> = chosen.iter().map(|i| i.index(tokens)).collect();
            let selected: Vec<usize> = selected.into_iter().collect();
            let temperature = settings.1;
            let documents = columns
                .into_iter()
                .map(|columns| {
                    let column = |(place, bias): (prop::sample::Index, f32)| Column {
                        place: place.index(selected.len()),
                        bias: bias - 1.0 / temperature,
                    };
                    columns.into_iter().map(column).collect()
                })
                .collect();
            Made {
                heads,
                dim,
                tokens,
                pairs: pairs.min(dim / 2),
                pairing: if half {
                    Pairing::Half
                } else {
                    Pairing::Interleaved
                },
                settings: Settings {
                    strength: settings.0,
                    temperature,
                    still: settings.2,
                },
                selected,
                documents,
                spans,
                seed,
            }
        },
    )
}

/// Numbers from -1 to 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

impl Made {
    fn drift(&self) -> Drift {
        Drift::new(
            self.settings,
            self.selected.clone(),
            self.documents.clone(),
            self.spans.clone(),
        )
        .unwrap()
    }

    /// K, V, fresh K, fresh V, cosines and sines.
    fn layer(&self) -> [Vec<f32>; 6] {
        let row = self.heads * self.dim;
        let (all, few) = (self.tokens * row, self.selected.len() * row);
        let angle = |i: usize| (i / self.pairs * (i % self.pairs + 1)) as f32 * 0.1;
        let turns = self.tokens * self.pairs;
        [
            numbers(all, self.seed),
            numbers(all, self.seed ^ 2),
            numbers(few, self.seed ^ 4),
            numbers(few, self.seed ^ 8),
            (0..turns).map(|i| angle(i).cos()).collect(),
            (0..turns).map(|i| angle(i).sin()).collect(),
        ]
    }

    fn rotation<'a>(&self, cos: &'a [f32], sin: &'a [f32]) -> Option<Rotation<'a>> {
        (self.pairs > 0).then_some(Rotation {
            cos,
            sin,
            pairs: self.pairs,
            pairing: self.pairing,
        })
    }

    fn corrected(&self, threads: usize) -> (Vec<f32>, Vec<f32>) {
        let [mut k, mut v, fresh_k, fresh_v, cos, sin] = self.layer();
        let layer = Layer {
            heads: self.heads,
            dim: self.dim,
            k: &mut k,
            v: &mut v,
            fresh_k: &fresh_k,
            fresh_v: &fresh_v,
            rotation: self.rotation(&cos, &sin),
        };
        self.drift().carry(layer, threads).unwrap();
        (k, v)
    }

    /// The formula, token by token in double precision.
    fn by_hand(&self) -> (Vec<f64>, Vec<f64>) {
        let [k, v, fresh_k, fresh_v, cos, sin] = self.layer();
        let (heads, dim) = (self.heads, self.dim);
        let wide = |x: &[f32], row: usize, head: usize| -> Vec<f64> {
            let at = (row * heads + head) * dim;
            x[at..at + dim].iter().map(|&x| f64::from(x)).collect()
        };
        let turned = |mut x: Vec<f64>, position: usize, sign: f64| {
            for pair in 0..self.pairs {
                let (first, second) = match self.pairing {
                    Pairing::Half => (pair, pair + self.pairs),
                    Pairing::Interleaved => (2 * pair, 2 * pair + 1),
                };
                let at = position * self.pairs + pair;
                let (cos, sin) = (f64::from(cos[at]), sign * f64::from(sin[at]));
                let (a, b) = (x[first], x[second]);
                (x[first], x[second]) = (a * cos - b * sin, b * cos + a * sin);
            }
            x
        };
        let dot = |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
        let minus = |a: Vec<f64>, b: Vec<f64>| -> Vec<f64> {
            a.iter().zip(b).map(|(a, b)| a - b).collect()
        };
        let mut out_k: Vec<f64> = k.iter().map(|&x| f64::from(x)).collect();
        let mut out_v: Vec<f64> = v.iter().map(|&x| f64::from(x)).collect();
        for span in &self.spans {
            if self.documents[span.document].is_empty() {
                continue;
            }
            for position in span.tokens.clone() {
                for head in 0..heads {
                    let mine = wide(&v, position, head);
                    let mut total = f64::from(self.settings.still);
                    let (mut sum_k, mut sum_v) = (vec![0.0; dim], vec![0.0; dim]);
                    for column in &self.documents[span.document] {
                        let there = self.selected[column.place];
                        let other = wide(&v, there, head);
                        let norms = dot(&mine, &mine).sqrt() * dot(&other, &other).sqrt();
                        let cosine = dot(&mine, &other) / norms.max(1e-24);
                        let exponent =
                            f64::from(column.bias) + cosine / f64::from(self.settings.temperature);
                        let weight = exponent.exp();
                        total += weight;
                        let moved_v = minus(wide(&fresh_v, column.place, head), other);
                        let moved_k =
                            minus(wide(&fresh_k, column.place, head), wide(&k, there, head));
                        let moved_k = turned(moved_k, there, -1.0);
                        for i in 0..dim {
                            sum_v[i] += weight * moved_v[i];
                            sum_k[i] += weight * moved_k[i];
                        }
                    }
                    let share = f64::from(self.settings.strength) / total;
                    let sum_k = turned(sum_k, position, 1.0);
                    for i in 0..dim {
                        let at = (position * heads + head) * dim + i;
                        out_v[at] += share * sum_v[i];
                        out_k[at] += share * sum_k[i];
                    }
                }
            }
        }
        (out_k, out_v)
    }
}

fn close(found: &[f32], wanted: &[f64]) -> Result<(), TestCaseError> {
    for (index, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        prop_assert!(
            (f64::from(*found) - wanted).abs() < 2e-5,
            "{index}: {found} for {wanted}"
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn equals_the_formula_whatever_the_threads(made in made()) {
        let (k, v) = made.corrected(1);
        let (wanted_k, wanted_v) = made.by_hand();
        close(&k, &wanted_k)?;
        close(&v, &wanted_v)?;
        prop_assert_eq!(made.corrected(3), (k, v), "the same bits on more threads");
    }

    #[test]
    fn every_processor_gives_the_same_to_rounding(made in made()) {
        let [k, v, fresh_k, fresh_v, cos, sin] = made.layer();
        let columns = made.documents.iter().find(|columns| !columns.is_empty());
        let Some(columns) = columns else { return Ok(()) };
        let (mut one, mut other) = ((k.clone(), v.clone()), (k.clone(), v.clone()));
        let (mut k, mut v) = (k, v);
        let row = made.heads * made.dim;
        let rotation = made.rotation(&cos, &sin);
        let layer = Layer {
            heads: made.heads, dim: made.dim, k: &mut k, v: &mut v, fresh_k: &fresh_k, fresh_v: &fresh_v, rotation,
        };
        let gathered = Gathered::new(&made.settings, &made.selected, &layer);
        let head = made.heads - 1;
        let panels = Panels::new(&gathered, head, columns);
        let at = head * made.dim..made.heads * made.dim;
        let rows = made.tokens.min(BLOCK) * row;
        let block = |kv: &mut (Vec<f32>, Vec<f32>), portable: bool| {
            let mut block = Block { document: 0, start: 0, k: &mut kv.0[..rows], v: &mut kv.1[..rows] };
            let (mut scratch, settings) = (Scratch::default(), &made.settings);
            if portable {
                scratch.correct_any::<false>(settings, &panels, &mut block, row, at.clone(), rotation);
            } else {
                scratch.correct(settings, &panels, &mut block, row, at.clone(), rotation);
            }
        };
        block(&mut one, false);
        block(&mut other, true);
        let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        close(&one.0, &wide(&other.0))?;
        close(&one.1, &wide(&other.1))?;
        prop_assert_ne!(&one.1[..rows], &v[..rows], "something was added");
    }
}

/// Two documents of five and four tokens, two recomputed ones in the first, one head of four elements.
fn small() -> Made {
    let column = |place| Column { place, bias: 0.0 };
    Made {
        heads: 1,
        dim: 4,
        tokens: 10,
        pairs: 2,
        pairing: Pairing::Half,
        settings: Settings {
            strength: 0.5,
            temperature: 0.1,
            still: 0.1,
        },
        selected: vec![1, 3],
        documents: vec![vec![column(0), column(1)], vec![]],
        spans: vec![
            Span {
                tokens: 0..5,
                document: 0,
            },
            Span {
                tokens: 5..9,
                document: 1,
            },
        ],
        seed: 5,
    }
}

#[test]
fn documents_without_columns_and_gaps_stay_as_they_are() {
    let made = small();
    let ([k, v, ..], corrected) = (made.layer(), made.corrected(2));
    assert_eq!(
        (&corrected.0[20..], &corrected.1[20..]),
        (&k[20..], &v[20..])
    );
    assert!(corrected.0[..20].iter().zip(&k).all(|(a, b)| a != b));
}

#[test]
fn values_without_length_and_weights_of_zero_add_nothing_that_is_no_number() {
    let made = small();
    let [mut k, _, fresh_k, fresh_v, ..] = made.layer();
    let mut v = vec![0.0; 40];
    let before = (k.clone(), v.clone());
    let mut cold = made.clone();
    cold.settings.still = 0.0;
    for column in &mut cold.documents[0] {
        column.bias = -1e9;
    }
    let layer = Layer {
        heads: 1,
        dim: 4,
        k: &mut k,
        v: &mut v,
        fresh_k: &fresh_k,
        fresh_v: &fresh_v,
        rotation: None,
    };
    cold.drift().carry(layer, 1).unwrap();
    assert_eq!((k, v), before);
}

#[test]
fn what_is_no_number_spreads_and_is_not_hidden() {
    let made = small();
    let [mut k, mut v, fresh_k, mut fresh_v, ..] = made.layer();
    fresh_v[0] = f32::NAN;
    let layer = Layer {
        heads: 1,
        dim: 4,
        k: &mut k,
        v: &mut v,
        fresh_k: &fresh_k,
        fresh_v: &fresh_v,
        rotation: None,
    };
    made.drift().carry(layer, 1).unwrap();
    assert!((0..5).all(|row| v[row * 4].is_nan()) && v[20..].iter().all(|x| x.is_finite()));
}

#[test]
fn what_does_not_fit_is_refused() {
    let new = |change: fn(&mut Made)| {
        let mut made = small();
        change(&mut made);
        let refused =
            Drift::new(made.settings, made.selected, made.documents, made.spans).unwrap_err();
        refused.name
    };
    assert_eq!(new(|made| made.settings.temperature = 0.0), "temperature");
    assert_eq!(
        new(|made| made.settings.temperature = f32::NAN),
        "temperature"
    );
    assert_eq!(new(|made| made.documents[0][1].place = 2), "columns");
    assert_eq!(new(|made| made.spans[1].document = 2), "spans");
    assert_eq!(new(|made| made.spans[1].tokens = 4..9), "spans");
    assert_eq!(new(|made| made.spans.swap(0, 1)), "spans");
    assert_eq!(
        new(|made| made.spans[1].tokens = Range { start: 9, end: 5 }),
        "spans"
    );

    let drift = small().drift();
    let carry = |change: fn(&mut Layer<'_>)| {
        let [mut k, mut v, fresh_k, fresh_v, cos, sin] = small().layer();
        let before = (k.clone(), v.clone());
        let mut layer = Layer {
            heads: 1,
            dim: 4,
            k: &mut k,
            v: &mut v,
            fresh_k: &fresh_k,
            fresh_v: &fresh_v,
            rotation: small().rotation(&cos, &sin),
        };
        change(&mut layer);
        let refused = drift.carry(layer, 2).unwrap_err();
        assert_eq!((k, v), before, "nothing has changed");
        refused.name
    };
    fn turn(layer: &mut Layer<'_>, change: fn(&mut Rotation<'_>)) {
        layer.rotation.as_mut().map(change);
    }
    assert_eq!(carry(|layer| layer.heads = 0), "heads, dim");
    assert_eq!(carry(|layer| layer.heads = usize::MAX), "heads, dim");
    assert_eq!(carry(|layer| layer.dim = 3), "k, v");
    assert_eq!(carry(|layer| layer.v = &mut []), "k, v");
    assert_eq!(carry(|layer| layer.heads = 2), "k, v");
    assert_eq!(
        carry(|layer| layer.fresh_k = &layer.fresh_k[1..]),
        "fresh_k"
    );
    assert_eq!(carry(|layer| layer.fresh_v = &[]), "fresh_v");
    assert_eq!(
        carry(|layer| turn(layer, |turns| turns.pairs = 3)),
        "cos, sin"
    );
    assert_eq!(
        carry(|layer| turn(layer, |turns| turns.pairs = 0)),
        "cos, sin"
    );
    assert_eq!(
        carry(|layer| turn(layer, |turns| turns.sin = &turns.sin[1..])),
        "cos, sin"
    );
    assert_eq!(
        carry(|layer| turn(layer, |turns| {
            (turns.cos, turns.sin) = (&turns.cos[4..], &turns.sin[4..]);
        })),
        "cos, sin"
    );

    let mut far = small();
    far.selected[1] = usize::MAX;
    let [mut k, mut v, fresh_k, fresh_v, ..] = small().layer();
    let layer = Layer {
        heads: 1,
        dim: 4,
        k: &mut k,
        v: &mut v,
        fresh_k: &fresh_k,
        fresh_v: &fresh_v,
        rotation: None,
    };
    assert_eq!(far.drift().carry(layer, 1).unwrap_err().name, "k, v");
}

#[test]
fn rows_beyond_a_panel_of_columns_count() {
    let mut made = small();
    made.documents[0] = (0..LANES + 3)
        .map(|i| Column {
            place: i % 2,
            bias: i as f32 * 0.1,
        })
        .collect();
    let (k, v) = made.corrected(1);
    let (wanted_k, wanted_v) = made.by_hand();
    close(&k, &wanted_k).unwrap();
    close(&v, &wanted_v).unwrap();
}
