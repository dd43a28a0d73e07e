//! Rotation of keys by their positions, with sines that are the same bits on every machine.

use std::f64::consts::{FRAC_PI_2, PI};

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// No rotation.
    None,
    /// Element i with i + half.
    Halves,
    /// Element 2 i with 2 i + 1.
    Interleaved,
}

/// Cosine and sine of every frequency at rows `position..`, `[frequency][row]`.
#[derive(Debug)]
pub(crate) struct Turns {
    cos: Vec<f32>,
    sin: Vec<f32>,
    rows: usize,
}

impl Turns {
    pub(crate) fn new(frequencies: &[f32], position: u32, rows: usize) -> Self {
        let (mut cos, mut sin) = (
            Vec::with_capacity(frequencies.len() * rows),
            Vec::with_capacity(frequencies.len() * rows),
        );
        for &frequency in frequencies {
            for row in 0..rows {
                let (s, c) = sine_cosine(f64::from(frequency) * (f64::from(position) + row as f64));
                cos.push(c as f32);
                sin.push(s as f32);
            }
        }
        Turns { cos, sin, rows }
    }

    /// Turns the channels `[dim][row]` of one head, forward to their positions or back to position 0.
    pub(crate) fn turn(&self, style: Style, head: &mut [f32], back: bool) {
        let rows = self.rows;
        let pairs = self.cos.len() / rows;
        let sign = if back { -1.0 } else { 1.0 };
        for pair in 0..pairs {
            let (first, second) = match style {
                Style::None => return,
                Style::Halves => (pair, pair + pairs),
                Style::Interleaved => (2 * pair, 2 * pair + 1),
            };
            let (a, b) = head.split_at_mut(second * rows);
            let (a, b) = (&mut a[first * rows..first * rows + rows], &mut b[..rows]);
            let (cos, sin) = (
                &self.cos[pair * rows..][..rows],
                &self.sin[pair * rows..][..rows],
            );
            for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                let sin = sign * sin;
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

/// Sine and cosine to about 1e-12 for angles up to 1e9, by basic operations only.
fn sine_cosine(angle: f64) -> (f64, f64) {
    let quarter = (angle / FRAC_PI_2).round();
    // π/2 in two parts, the first with few enough bits for exact products.
    const HIGH: f64 = 1.570_796_326_734_125_6;
    const LOW: f64 = 6.077_100_506_506_192e-11;
    let x = (angle - quarter * HIGH) - quarter * LOW;
    debug_assert!(x.abs() <= PI);
    let x2 = x * x;
    let (mut sine, mut cosine, mut term) = (x, 1.0, 1.0);
    let mut power = x;
    for k in 1..9_u32 {
        term = -term * x2 / f64::from((2 * k - 1) * (2 * k));
        cosine += term;
        power = -power * x2 / f64::from(2 * k * (2 * k + 1));
        sine += power;
    }
    match quarter.rem_euclid(4.0) as u32 {
        0 => (sine, cosine),
        1 => (cosine, -sine),
        2 => (-sine, -cosine),
        _ => (-cosine, sine),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sines_are_right() {
        for k in 0..200_000 {
            let angle = f64::from(k) * 5.123;
            let (sine, cosine) = sine_cosine(angle);
            assert!(
                (sine - angle.sin()).abs() < 1e-9 && (cosine - angle.cos()).abs() < 1e-9,
                "{angle}"
            );
        }
    }

    #[test]
    fn turning_back_undoes_turning() {
        let turns = Turns::new(&[1.0, 0.1, 0.003], 1234, 5);
        for style in [Style::Halves, Style::Interleaved] {
            let original: Vec<f32> = (0..40).map(|i| (i as f32).sin()).collect();
            let mut head = original.clone();
            turns.turn(style, &mut head, false);
            assert!(
                head[..30]
                    .iter()
                    .zip(&original)
                    .any(|(a, b)| (a - b).abs() > 0.1)
            );
            assert_eq!(
                head[30..],
                original[30..],
                "what is beyond the rotary elements stays"
            );
            turns.turn(style, &mut head, true);
            assert!(
                head.iter()
                    .zip(&original)
                    .all(|(a, b)| (a - b).abs() < 1e-6)
            );
        }
    }
}
