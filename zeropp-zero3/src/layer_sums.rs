//! Figures of each layer in a step, as sums that no layout can change on the CPU.

use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};
use zeropp_core::cpu_tensor;

use crate::exact::ExactSum;
use crate::norm::{add_row_squares, add_squares};

/// Sums of squares of one layer: of what one rank has of it, or, added up, of all of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerSums {
    /// Of the reduced gradient, before clipping. Of a tied weight the embedding has all of it.
    pub gradient: ExactSum,
    /// Of the parameters that train, before the update.
    pub weight: ExactSum,
    /// Of what the update added to them.
    pub change: ExactSum,
    /// Of the layer's outputs in all forwards of the step.
    pub output: ExactSum,
    /// Elements of those.
    pub outputs: u64,
}

impl LayerSums {
    /// Adds what another rank has of the layer.
    pub fn merge(&mut self, other: &LayerSums) {
        self.gradient.merge(&other.gradient);
        self.weight.merge(&other.weight);
        self.change.merge(&other.change);
        self.output.merge(&other.output);
        self.outputs += other.outputs;
    }

    /// Adds the output `[b, s, h]` of a micro-batch.
    pub fn add_output(&mut self, y: &Tensor<3>) {
        add_row_squares(&mut self.output, y);
        self.outputs += y.shape().num_elements() as u64;
    }

    /// Adds a part of the gradient.
    pub(crate) fn add_gradient(&mut self, part: &Tensor<1>) {
        add_squares(&mut self.gradient, [part]);
    }

    /// Gives up what was added of an update, which is done again.
    pub(crate) fn forget_update(&mut self) {
        (self.weight, self.change) = (ExactSum::default(), ExactSum::default());
    }

    /// Adds the same part of the parameters as it was `before` an update, whose memory is used up,
    /// and after it.
    pub(crate) fn add_update(&mut self, before: Tensor<1>, after: &Tensor<1>) {
        add_squares(&mut self.weight, [&before]);
        let change = match cpu_tensor::on_cpu(after) {
            Some(after) => {
                let subtract = |before: &mut [f32]| {
                    before.iter_mut().zip(after.as_slice()).for_each(|(b, a)| *b = a - *b);
                };
                cpu_tensor::map_in_place(before, subtract).expect("on the CPU, as the other")
            }
            None => after.clone() - before,
        };
        add_squares(&mut self.change, [&change]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(x: &[f32]) -> Tensor<1> {
        cpu_tensor::from_vec(x.to_vec(), [x.len()])
    }

    #[test]
    fn parts_of_ranks_add_up_to_the_layer() {
        let n = 1024;
        let values = |phase: f32| -> Vec<f32> {
            (0..n).map(|i| (i as f32 * 0.37 + phase).sin() * 1e-2).collect()
        };
        let (gradient, before, after) = (values(0.0), values(1.0), values(1.001));
        let of = |part: std::ops::Range<usize>| {
            let mut sums = LayerSums::default();
            sums.add_gradient(&flat(&gradient[part.clone()]));
            sums.add_update(flat(&before[part.clone()]), &flat(&after[part.clone()]));
            sums.add_output(&flat(&after[part.clone()]).reshape([1, part.len() / 64, 64]));
            sums
        };
        let whole = of(0..n);
        let mut parts = LayerSums::default();
        for part in [512..1024, 0..128, 128..512] {
            // As it comes from another process.
            let text = serde_json::to_string(&of(part)).unwrap();
            parts.merge(&serde_json::from_str(&text).unwrap());
        }
        assert_eq!(parts, whole);
        let squares =
            |x: &mut dyn Iterator<Item = f32>| -> f64 { x.map(|x| f64::from(x).powi(2)).sum() };
        let change = squares(&mut after.iter().zip(&before).map(|(a, b)| a - b));
        for (sum, plain) in [
            (&whole.gradient, squares(&mut gradient.iter().copied())),
            (&whole.weight, squares(&mut before.iter().copied())),
            (&whole.change, change),
            (&whole.output, squares(&mut after.iter().copied())),
        ] {
            assert!((sum.value() - plain).abs() <= 1e-12 * plain, "{} {plain}", sum.value());
        }
        assert_eq!(whole.outputs, n as u64);
    }

    #[test]
    fn an_output_s_sum_does_not_show_its_micro_batch() {
        for hidden in [24, 200] {
            let x: Vec<f32> = (0..6 * hidden).map(|i| (i as f32 * 0.7).cos()).collect();
            let (mut together, mut apart) = (LayerSums::default(), LayerSums::default());
            together.add_output(&flat(&x).reshape([3, 2, hidden]));
            for sample in x.chunks(2 * hidden) {
                apart.add_output(&flat(sample).reshape([1, 2, hidden]));
            }
            assert_eq!(together, apart);
        }
    }
}
