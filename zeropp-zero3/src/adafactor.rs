//! Adafactor (Shazeer and Stern 2018, <https://arxiv.org/abs/1804.04235>) as
//! `torch.optim.Adafactor` has it: of a matrix's mean squared gradient only the means of its rows
//! and of its columns are kept, a step has at most the size of a unit, and is relative to that of
//! the parameter.
//!
//! Row and column means and both root mean squares are of whole parameters. Every sum is in f64 and
//! in one order, whatever the threads.

use zeropp_core::kernels::threads;

use crate::rule::{
    Elements, Parameter, StateTensor, StepScale, UpdateRule, WholeParameter, WholeUpdate,
};

/// The exponent of the step by which the second moment's memory grows.
const BETA2_DECAY: f64 = -0.8;
/// Least root of a second moment that is divided by.
const EPS: f32 = f32::EPSILON;
/// Least size of a parameter that a step is relative to.
const LEAST_RMS: f64 = 1e-3;
/// Largest root mean square of an update.
const LARGEST_RMS: f64 = 1.0;
/// Elements whose squares are summed in a row; a constant, so that no thread shows in a sum.
const CHUNK: usize = 1024;
/// Elements that are worth a thread.
const GRAIN: usize = 1 << 14;

/// Hyper-parameters of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// Decoupled weight decay, times the learning rate.
    pub weight_decay: f64,
}

impl UpdateRule for Adafactor {
    fn name(&self) -> &str {
        "adafactor"
    }

    fn state(&self, of: &Parameter<'_>) -> Vec<StateTensor> {
        match factors(of) {
            Some([rows, columns, batch]) => vec![
                StateTensor::whole("row_var", batch * rows),
                StateTensor::whole("col_var", batch * columns),
            ],
            None => vec![StateTensor::per_element("variance")],
        }
    }

    fn whole(&self, of: &Parameter<'_>) -> Option<WholeUpdate> {
        let n: usize = of.shape.iter().product();
        // The update, and sums in f64.
        let columns = factors(of).map_or(0, |[_, columns, _]| columns);
        let elements = n + 2 * (columns + n.div_ceil(CHUNK));
        Some(WholeUpdate { elements, flops: 12 * n as u64, rms: true })
    }

    fn direction(
        &self,
        of: &Parameter<'_>,
        elements: Elements<'_, '_>,
        out: &mut [f32],
        step: &StepScale,
    ) {
        let gradients = elements.gradient.iter().map(|g| g * step.gradient);
        match elements.state {
            [variance] if factors(of).is_none() => {
                let towards = towards(step);
                for ((out, v), g) in out.iter_mut().zip(variance.iter_mut()).zip(gradients) {
                    *v = lerp(*v, g * g, towards);
                    *out = g * inverse_root(*v);
                }
            }
            _ => out.iter_mut().zip(gradients).for_each(|(out, g)| *out = g),
        }
    }

    fn transform(
        &self,
        of: &Parameter<'_>,
        whole: WholeParameter<'_, '_>,
        step: &StepScale,
    ) -> Vec<f32> {
        let mut update = whole.direction.to_vec();
        if let Some([rows, columns, _]) = factors(of) {
            let [row_var, col_var] = whole.state else { unreachable!("rows and columns are kept") };
            let batches = update.chunks_mut((rows * columns).max(1));
            let factors = row_var.chunks_mut(rows.max(1)).zip(col_var.chunks_mut(columns.max(1)));
            for (matrix, (row_var, col_var)) in batches.zip(factors) {
                divide_by_factors(matrix, row_var, col_var, towards(step));
            }
        }
        let rms = (sum_of_squares(&update) / update.len().max(1) as f64).sqrt();
        let relative = step.lr.min(1.0 / (step.update as f64).sqrt());
        let size = whole.rms.max(LEAST_RMS) * relative / (rms / LARGEST_RMS).max(1.0);
        each_chunk(&mut update, |update| update.iter_mut().for_each(|x| *x *= size as f32));
        update
    }

    fn apply(&self, of: &Parameter<'_>, p: &mut [f32], direction: &[f32], step: &StepScale) {
        let decay = if of.decay { step.lr * self.weight_decay } else { 0.0 };
        let keep = (1.0 - decay) as f32;
        p.iter_mut().zip(direction).for_each(|(p, d)| *p = *p * keep - d);
    }
}

/// Rows and columns of each matrix of a parameter and how many there are, where it is one or
/// several.
fn factors(of: &Parameter<'_>) -> Option<[usize; 3]> {
    let [batches @ .., rows, columns] = of.shape else { return None };
    Some([*rows, *columns, batches.iter().product()])
}

/// The share by which second moments move: all at first, less with each update.
fn towards(step: &StepScale) -> f32 {
    (step.update as f64).powf(BETA2_DECAY) as f32
}

/// As PyTorch's, from the nearer end.
fn lerp(from: f32, to: f32, share: f32) -> f32 {
    if share < 0.5 { from + share * (to - from) } else { to - (to - from) * (1.0 - share) }
}

fn inverse_root(variance: f32) -> f32 {
    1.0 / variance.max(EPS * EPS).sqrt()
}

/// Moves both factors towards the gradient `matrix`, and divides that by the root of the second
/// moment that they give.
fn divide_by_factors(matrix: &mut [f32], row_var: &mut [f32], col_var: &mut [f32], towards: f32) {
    let (rows, columns) = (row_var.len(), col_var.len());
    let mean = |sum: f64, n: usize| (sum / n as f64) as f32;
    let of_rows = threads::piece(rows, 1, GRAIN.div_ceil(columns.max(1)));
    let parts = row_var.chunks_mut(of_rows).zip(matrix.chunks(of_rows * columns));
    threads::each(parts, |(row_var, matrix)| {
        for (var, row) in row_var.iter_mut().zip(matrix.chunks(columns)) {
            *var = lerp(*var, mean(squares(row), columns), towards);
        }
    });
    let mut sums = vec![0f64; columns];
    let of_columns = threads::piece(columns, 64, GRAIN.div_ceil(rows.max(1)));
    threads::each(sums.chunks_mut(of_columns).enumerate(), |(i, sums)| {
        for row in matrix.chunks(columns) {
            let here = &row[i * of_columns..][..sums.len()];
            sums.iter_mut().zip(here).for_each(|(sum, x)| *sum += f64::from(*x).powi(2));
        }
    });
    for (var, sum) in col_var.iter_mut().zip(&sums) {
        *var = lerp(*var, mean(*sum, rows), towards);
    }
    let of_row_vars = mean(row_var.iter().map(|x| f64::from(*x)).sum(), rows).max(EPS);
    let parts = row_var.chunks(of_rows).zip(matrix.chunks_mut(of_rows * columns));
    threads::each(parts, |(row_var, matrix)| {
        for (row, var) in matrix.chunks_mut(columns).zip(row_var) {
            let each = row.iter_mut().zip(&*col_var);
            each.for_each(|(x, col)| *x *= inverse_root(var * col / of_row_vars));
        }
    });
}

/// The sum of the squares, by chunks that are added in order.
fn sum_of_squares(x: &[f32]) -> f64 {
    let mut sums = vec![0f64; x.len().div_ceil(CHUNK)];
    let each = threads::piece(sums.len(), 1, GRAIN / CHUNK);
    threads::each(sums.chunks_mut(each).zip(x.chunks(each * CHUNK)), |(sums, x)| {
        sums.iter_mut().zip(x.chunks(CHUNK)).for_each(|(sum, x)| *sum = squares(x));
    });
    sums.iter().sum()
}

/// The sum of the squares, in eight running sums that are added in order at the end.
fn squares(x: &[f32]) -> f64 {
    let mut lanes = [0f64; 8];
    for chunk in x.chunks(8) {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += f64::from(*x).powi(2));
    }
    lanes.iter().sum()
}

fn each_chunk(x: &mut [f32], f: impl Fn(&mut [f32]) + Sync) {
    let piece = threads::piece(x.len(), 64, GRAIN);
    threads::each(x.chunks_mut(piece), f);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second moment that is the product of a row's and a column's is found exactly, so that all
    /// elements of the first update are of one size: that of a unit, relative to the parameter.
    #[test]
    fn a_first_update_is_the_sign_of_a_gradient_whose_squares_factor() {
        let rule = Adafactor { weight_decay: 0.0 };
        let shape = [2, 3, 4];
        let of =
            Parameter { name: "w", shape: &shape, role: crate::rule::Role::Hidden, decay: true };
        let sign = |i: usize| if i.is_multiple_of(3) { -1.0 } else { 1.0 };
        let value = |i: usize| sign(i) * (1 + i / 4 % 3) as f32 * (1 + i % 4) as f32;
        let direction: Vec<f32> = (0..24).map(value).collect();
        let (mut rows, mut columns) = (vec![0.0; 6], vec![0.0; 8]);
        let whole = WholeParameter {
            direction: &direction,
            part: 0..24,
            state: &mut [&mut rows, &mut columns],
            rms: 0.5,
        };
        let step = StepScale { lr: 0.01, update: 1, gradient: 1.0 };
        for (i, x) in rule.transform(&of, whole, &step).into_iter().enumerate() {
            assert!((x - 0.005 * sign(i)).abs() < 1e-8, "{i}: {x}");
        }
        assert_eq!(rows, [7.5, 30.0, 67.5, 7.5, 30.0, 67.5]);
    }
}
