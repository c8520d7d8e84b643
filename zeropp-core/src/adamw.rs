//! AdamW of tensors on devices.

use std::ops::Range;

#[cfg(feature = "cube")]
use burn::tensor::TensorData;
use burn::tensor::{Device, Tensor};

use crate::kernels::adamw::AdamWScalars;

/// The elements of an update, `[n]` each, in fp32.
pub struct AdamWElements {
    /// Parameters.
    pub parameter: Tensor<1>,
    /// Mean gradient.
    pub mean: Tensor<1>,
    /// Mean squared gradient.
    pub square: Tensor<1>,
    /// Gradient.
    pub gradient: Tensor<1>,
}

/// Parameters, mean gradient and mean squared gradient after an update, as
/// [`kernels::adamw`](crate::kernels::adamw::adamw) within rounding. `parts` are the elements of
/// each parameter in order, one after another from 0 to n, and whether weight decay applies.
///
/// On a GPU it is one kernel, and in place where nothing else holds a tensor.
pub fn adamw(
    elements: AdamWElements,
    parts: &[(Range<usize>, bool)],
    s: &AdamWScalars,
) -> [Tensor<1>; 3] {
    let AdamWElements { parameter, mean, square, gradient } = elements;
    let device = parameter.device();
    #[cfg(feature = "cube")]
    if crate::cube::is_on(&parameter) {
        let mut changes: Vec<i32> = Vec::new();
        for pair in parts.windows(2).filter(|pair| pair[0].1 != pair[1].1) {
            changes.push(pair[1].0.start.try_into().expect("elements of a layer"));
        }
        if changes.is_empty() {
            changes.push(i32::MAX);
        }
        let n = changes.len();
        let changes = Tensor::from_data(TensorData::new(changes, [n]), &device);
        let decays = parts.first().is_some_and(|part| part.1);
        return crate::cube::adamw([parameter, mean, square, gradient], changes, decays, *s);
    }
    let keep = keep(parts, s.keep, &device);
    let g = gradient * s.gradient;
    let m = mean.clone() + (g.clone() - mean) * s.towards1;
    let v = square * s.beta2 + g.clone() * g * s.towards2;
    let update = m.clone() / (v.clone().sqrt() / s.root_bias2 + s.eps) * s.step_size;
    [parameter * keep - update, m, v]
}

/// The factor of each element: `decayed`, or 1 where nothing decays.
fn keep(parts: &[(Range<usize>, bool)], decayed: f32, device: &Device) -> Tensor<1> {
    let part = |(range, decays): &(Range<usize>, bool)| {
        Tensor::full([range.len()], if *decays { decayed } else { 1.0 }, device)
    };
    Tensor::cat(parts.iter().map(part).collect(), 0)
}
