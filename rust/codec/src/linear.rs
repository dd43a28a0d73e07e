//! Products of channel-major matrices: the same bits with any vector width, as every step is one fused multiplication and
//! addition, in a fixed order. Processors without such an instruction get the same bits, slowly.

/// Rows are padded to a multiple of this.
pub(crate) const LANES: usize = 16;
/// Outputs of one tile: with two vectors of rows each, twelve sums that don't wait for each other.
const TILE: usize = 6;

/// Rows of a channel-major matrix that holds `rows`.
pub(crate) fn padded(rows: usize) -> usize {
    rows.next_multiple_of(LANES)
}

/// A matrix `[inputs][outputs]`, stored in panels of [`TILE`] outputs.
#[derive(Clone, Debug)]
pub(crate) struct Matrix {
    inputs: usize,
    outputs: usize,
    /// `[outputs / TILE rounded up][inputs][TILE]`, zeros behind the last output.
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
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma")
        {
            #[allow(unsafe_code)]
            // SAFETY: the processor has AVX2 and FMA.
            unsafe {
                apply_vectors(self, from, rows, out);
            }
            return;
        }
        apply(self, from, rows, out, tile);
    }
}

#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
#[target_feature(enable = "avx2,fma")]
fn apply_vectors(matrix: &Matrix, from: &[f32], rows: usize, out: &mut [f32]) {
    apply(matrix, from, rows, out, |panel, strip| {
        tile_vectors(panel, strip)
    });
}

#[inline(always)]
fn apply(
    matrix: &Matrix,
    from: &[f32],
    rows: usize,
    out: &mut [f32],
    tile: impl Fn(&[[f32; TILE]], &[[f32; LANES]]) -> [[f32; LANES]; TILE],
) {
    if matrix.inputs == 0 {
        out.fill(0.0);
        return;
    }
    // A strip of 16 rows stays in a near cache while the matrix streams by.
    let mut strip = vec![[0.0_f32; LANES]; matrix.inputs];
    for row in (0..rows).step_by(LANES) {
        for (input, strip) in strip.iter_mut().enumerate() {
            strip.copy_from_slice(&from[input * rows + row..input * rows + row + LANES]);
        }
        for (index, panel) in matrix.panels.chunks_exact(matrix.inputs).enumerate() {
            let sums = tile(panel, &strip);
            for (output, sum) in (index * TILE..matrix.outputs).zip(&sums) {
                out[output * rows + row..output * rows + row + LANES].copy_from_slice(sum);
            }
        }
    }
}

/// `[output][row]` of one panel and one strip.
#[inline]
fn tile(panel: &[[f32; TILE]], strip: &[[f32; LANES]]) -> [[f32; LANES]; TILE] {
    let mut sums = [[0.0_f32; LANES]; TILE];
    for (factors, values) in panel.iter().zip(strip) {
        for (sum, factor) in sums.iter_mut().zip(factors) {
            for (sum, value) in sum.iter_mut().zip(values) {
                *sum = factor.mul_add(*value, *sum);
            }
        }
    }
    sums
}

/// [`tile`] in twelve registers.
#[cfg(target_arch = "x86_64")]
#[allow(unsafe_code)]
#[target_feature(enable = "avx2,fma")]
#[inline]
fn tile_vectors(panel: &[[f32; TILE]], strip: &[[f32; LANES]]) -> [[f32; LANES]; TILE] {
    use std::arch::x86_64::*;
    let mut sums = [[_mm256_setzero_ps(); 2]; TILE];
    for (factors, values) in panel.iter().zip(strip) {
        // SAFETY: both loads stay within the 16 values.
        let values = unsafe {
            [
                _mm256_loadu_ps(values.as_ptr()),
                _mm256_loadu_ps(values.as_ptr().add(8)),
            ]
        };
        for (sum, factor) in sums.iter_mut().zip(factors) {
            let factor = _mm256_set1_ps(*factor);
            sum[0] = _mm256_fmadd_ps(factor, values[0], sum[0]);
            sum[1] = _mm256_fmadd_ps(factor, values[1], sum[1]);
        }
    }
    let mut out = [[0.0; LANES]; TILE];
    for (out, sum) in out.iter_mut().zip(sums) {
        // SAFETY: both stores stay within the 16 values.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), sum[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), sum[1]);
        }
    }
    out
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
        apply(&matrix, &from, rows, &mut scalar, tile);
        for output in 0..outputs {
            for row in 0..rows {
                let wanted = (0..inputs).fold(0.0, |sum, input| {
                    value(input, output).mul_add(from[input * rows + row], sum)
                });
                assert_eq!(out[output * rows + row], wanted);
                assert_eq!(scalar[output * rows + row], wanted);
            }
        }
    }
}
