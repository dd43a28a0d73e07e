use proptest::prelude::*;

use super::*;

/// Rows and keys, as they may come.
#[derive(Clone, Debug)]
struct Made {
    heads: usize,
    kv_heads: usize,
    dim: usize,
    keys: usize,
    window: Option<usize>,
    positions: Vec<i64>,
    hidden: Option<Vec<u8>>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed | 1;
    let next = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn made() -> impl Strategy<Value = Made> {
    let shape = (1..=4_usize, 1..=7_usize, 1..=20_usize, 1..200_usize);
    let window = prop_oneof![Just(None), (1..250_usize).prop_map(Some)];
    let rows = proptest::collection::vec(any::<bool>(), 200);
    let hidden = proptest::option::of(proptest::collection::vec(0..4_u8, 200));
    (shape, window, rows, hidden, any::<u64>()).prop_map(
        |((kv_heads, group, half, keys), window, rows, hidden, seed)| {
            let (heads, dim) = (kv_heads * group, 2 * half);
            let positions: Vec<i64> = (0..keys as i64).filter(|p| rows[*p as usize]).collect();
            let hidden = hidden.map(|mut hidden| {
                hidden.truncate(keys);
                hidden
                    .iter_mut()
                    .for_each(|flag| *flag = u8::from(*flag == 1));
                // Every row sees itself, as in prompts.
                positions.iter().for_each(|p| hidden[*p as usize] = 0);
                hidden
            });
            let q = numbers(positions.len() * heads * dim, seed);
            let q = q.into_iter().map(|x| x * 3.0).collect();
            Made {
                heads,
                kv_heads,
                dim,
                keys,
                window,
                hidden,
                q,
                k: numbers(keys * kv_heads * dim, seed ^ 0xabcd),
                v: numbers(keys * kv_heads * dim, seed ^ 0x1234_5678),
                positions,
            }
        },
    )
}

impl Made {
    fn attention(&self) -> Attention<'_> {
        Attention {
            heads: self.heads,
            kv_heads: self.kv_heads,
            dim: self.dim,
            scale: 0.7,
            window: self.window,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            positions: &self.positions,
            hidden: self.hidden.as_deref(),
        }
    }

    fn attend(&self, threads: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.q.len()];
        self.attention()
            .attend(&mut out, threads)
            .expect("they fit");
        out
    }

    fn row(&self) -> usize {
        self.heads * self.dim
    }

    fn sees(&self, position: usize, key: usize) -> bool {
        let near = self.window.is_none_or(|window| key + window > position);
        key <= position && near && self.hidden.as_ref().is_none_or(|hidden| hidden[key] == 0)
    }

    /// The same in float64, straight from the definition.
    fn plain(&self) -> Vec<f64> {
        let (dim, mut out) = (self.dim, Vec::new());
        for (row, &position) in self.positions.iter().enumerate() {
            let seen: Vec<usize> = (0..self.keys)
                .filter(|key| self.sees(position as usize, *key))
                .collect();
            for head in 0..self.heads {
                let at =
                    |key: usize| (key * self.kv_heads + head / (self.heads / self.kv_heads)) * dim;
                let q = &self.q[(row * self.heads + head) * dim..][..dim];
                let product = |key: &usize| -> f64 {
                    let k = &self.k[at(*key)..][..dim];
                    let sum: f64 = q
                        .iter()
                        .zip(k)
                        .map(|(a, b)| f64::from(*a) * f64::from(*b))
                        .sum();
                    sum * f64::from(0.7_f32)
                };
                let weights: Vec<f64> = seen.iter().map(|key| product(key).exp()).collect();
                let total: f64 = weights.iter().sum();
                out.extend((0..dim).map(|i| {
                    let of_key =
                        |(key, weight): (&usize, &f64)| weight * f64::from(self.v[at(*key) + i]);
                    seen.iter().zip(&weights).map(of_key).sum::<f64>() / total
                }));
            }
        }
        out
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// The definition, whatever the shapes, with and without fused multiplication and addition.
    #[test]
    fn rows_see_what_the_definition_says(made in made()) {
        let wanted = made.plain();
        let mut unfused = vec![f32::NAN; made.q.len()];
        let attention = made.attention();
        for mut item in attention.items(&mut unfused) {
            Panels::default().attend_any::<false>(&attention, &mut item);
        }
        for found in [made.attend(1), unfused] {
            prop_assert_eq!(found.len(), wanted.len());
            for (found, wanted) in found.iter().zip(&wanted) {
                prop_assert!((f64::from(*found) - wanted).abs() < 2e-5, "{} for {}", found, wanted);
            }
        }
    }

    /// Neither the number of threads nor the rows beside it change a bit of a row.
    #[test]
    fn bits_depend_on_the_row_alone(made in made(), one in any::<prop::sample::Index>()) {
        let all = made.attend(1);
        prop_assert_eq!(&all, &made.attend(3));
        if !made.positions.is_empty() {
            let row = one.index(made.positions.len());
            let at = row * made.row()..(row + 1) * made.row();
            let positions = vec![made.positions[row]];
            let alone = Made { positions, q: made.q[at.clone()].to_vec(), ..made };
            prop_assert_eq!(&all[at], &alone.attend(1));
        }
    }

    /// Invariant: other keys behind a row's position leave its bits as they are, and so do those that it doesn't see.
    #[test]
    fn unseen_keys_never_change_a_row(made in made(), one in any::<prop::sample::Index>()) {
        if !made.positions.is_empty() {
            let row = one.index(made.positions.len());
            let before = made.attend(2);
            let mut other = made.clone();
            let width = made.kv_heads * made.dim;
            for key in (0..made.keys).filter(|key| !made.sees(made.positions[row] as usize, *key)) {
                other.k[key * width..(key + 1) * width].fill(50.0);
                other.v[key * width..(key + 1) * width].fill(-70.0);
            }
            let at = row * made.row()..(row + 1) * made.row();
            prop_assert_eq!(&before[at.clone()], &other.attend(2)[at]);
        }
    }
}

/// A row that computes what is no number must say so: it can't look like an answer.
#[test]
fn what_is_no_number_stays_none() {
    let mut made = small();
    made.q[5] = f32::NAN;
    let out = made.attend(1);
    assert!(out[4..8].iter().all(|x| x.is_nan()));
    assert!(out[8..].iter().chain(&out[..4]).all(|x| x.is_finite()));
}

/// Two heads of 4 for one KV head, rows 1 and 3 of four keys.
fn small() -> Made {
    Made {
        heads: 2,
        kv_heads: 1,
        dim: 4,
        keys: 4,
        window: None,
        positions: vec![1, 3],
        hidden: None,
        q: numbers(16, 1),
        k: numbers(16, 2),
        v: numbers(16, 3),
    }
}

#[test]
fn large_products_do_not_overflow() {
    let mut made = small();
    made.q.iter_mut().for_each(|x| *x *= 1e6);
    let wanted = made.plain();
    assert!(
        wanted.iter().any(|x| x.is_nan()),
        "the plain exponential overflows here"
    );
    assert!(made.attend(1).iter().all(|x| x.abs() <= 1.0));
}

type Spoil = fn(&mut Made);

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let cases: [(&str, Spoil); 13] = [
        ("heads, kv_heads", |made| made.kv_heads = 0),
        ("heads, kv_heads", |made| made.heads = 0),
        ("heads, kv_heads", |made| made.kv_heads = 3),
        ("dim", |made| made.dim = 0),
        ("dim", |made| made.dim = 3),
        ("q", |made| made.q.truncate(15)),
        ("k, v", |made| made.k.truncate(12)),
        ("k, v", |made| {
            made.k.truncate(15);
            made.v.truncate(15);
        }),
        ("hidden", |made| made.hidden = Some(vec![0; 3])),
        ("window", |made| made.window = Some(0)),
        ("positions", |made| made.positions = vec![1, 4]),
        ("positions", |made| made.positions = vec![-1, 3]),
        ("positions", |made| made.positions = vec![3, 3]),
    ];
    for (name, spoil) in cases {
        let mut made = small();
        spoil(&mut made);
        let mut out = [7.0; 16];
        let refused = made.attention().attend(&mut out, 1).expect_err(name);
        assert_eq!(refused.name, name, "{refused}");
        assert_eq!(out, [7.0; 16]);
    }
    let refused = small().attention().attend(&mut [0.0; 15], 1);
    assert_eq!(refused.expect_err("too short").name, "out");
}

#[test]
fn no_rows_is_fine() {
    let made = Made {
        positions: vec![],
        q: vec![],
        ..small()
    };
    assert!(made.attend(4).is_empty());
    let none = Made {
        keys: 0,
        k: vec![],
        v: vec![],
        ..made
    };
    assert!(none.attend(1).is_empty());
}
