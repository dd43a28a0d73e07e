//! Products of channel-major matrices: the same bits with any vector width, as nothing is fused or reordered.

/// Rows are padded to a multiple of this.
pub(crate) const LANES: usize = 16;
/// Outputs of one tile.
const TILE: usize = 4;

/// Rows of a channel-major matrix that holds `rows`.
pub(crate) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(LANES)
}

/// A matrix `[inputs][outputs]`, stored in panels of four outputs.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    inputs: usize,
    outputs: usize,
    /// `[outputs / 4 rounded up][inputs][4]`, zeros behind the last output.
    panels: Vec<[f32; TILE]>,
}

impl Matrix {
    /// From a function of (input, output).
    pub(crate) fn new(inputs: usize, outputs: usize, value: impl Fn(usize, usize) -> f32) -> Self {
        let mut panels = vec![[0.0; TILE]; outputs.div_ceil(TILE) * inputs];
        for output in 0..outputs {
            for input in 0..inputs {
                panels[output / TILE * inputs + input][output % TILE] = value(input, output);
            }
        }
        Matrix {
            inputs,
            outputs,
            panels,
        }
    }

    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }

    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// `out[output][row] = Σ matrix[input][output] · from[input][row]`, summed in rising order of inputs. Both are
    /// channel-major with `rows` rows, a multiple of [`LANES`].
    pub(crate) fn apply(&self, from: &[f32], rows: usize, out: &mut [f32]) {
        debug_assert!(
            rows.is_multiple_of(LANES)
                && from.len() == self.inputs * rows
                && out.len() == self.outputs * rows
        );
        #[cfg(target_arch = "x86_64")]
        if crate::rans::vectors() {
            #[allow(unsafe_code)]
            // SAFETY: the processor has AVX2.
            unsafe {
                apply_avx2(self, from, rows, out);
            }
            return;
        }
        apply(self, from, rows, out);
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
#[target_feature(enable = "avx2")]
fn apply_avx2(matrix: &Matrix, from: &[f32], rows: usize, out: &mut [f32]) {
    apply(matrix, from, rows, out);
}

#[inline(always)]
fn apply(matrix: &Matrix, from: &[f32], rows: usize, out: &mut [f32]) {
    if matrix.inputs == 0 {
        out.fill(0.0);
        return;
    }
    // A strip of 16 rows stays in the first-level cache while the matrix streams by.
    let mut strip = vec![[0.0_f32; LANES]; matrix.inputs];
    for row in (0..rows).step_by(LANES) {
        for (input, strip) in strip.iter_mut().enumerate() {
            strip.copy_from_slice(&from[input * rows + row..input * rows + row + LANES]);
        }
        for (index, panel) in matrix.panels.chunks_exact(matrix.inputs).enumerate() {
            let mut sums = [[0.0_f32; LANES]; TILE];
            for (factors, values) in panel.iter().zip(&strip) {
                for (sum, factor) in sums.iter_mut().zip(factors) {
                    for (sum, value) in sum.iter_mut().zip(values) {
                        *sum += factor * value;
                    }
                }
            }
            for (output, sum) in (index * TILE..matrix.outputs).zip(&sums) {
                out[output * rows + row..output * rows + row + LANES].copy_from_slice(sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_plain_sum_bit_for_bit() {
        let (inputs, outputs, rows) = (37, 23, 48);
        let value = |i: usize, o: usize| ((i * 31 + o * 17) % 101) as f32 / 50.0 - 1.0;
        let matrix = Matrix::new(inputs, outputs, value);
        let from: Vec<f32> = (0..inputs * rows)
            .map(|i| ((i * 7919) % 997) as f32 / 300.0 - 1.5)
            .collect();
        let (mut out, mut scalar) = (vec![9.0; outputs * rows], vec![9.0; outputs * rows]);
        matrix.apply(&from, rows, &mut out);
        apply(&matrix, &from, rows, &mut scalar);
        for output in 0..outputs {
            for row in 0..rows {
                let wanted = (0..inputs).fold(0.0, |sum, input| {
                    sum + value(input, output) * from[input * rows + row]
                });
                assert_eq!(out[output * rows + row], wanted);
                assert_eq!(scalar[output * rows + row], wanted);
            }
        }
    }
}
