//! AdamW of tensors on devices.

#[cfg(feature = "cube")]
use std::collections::BTreeMap;
use std::ops::Range;

use burn::tensor::{Device, Tensor};
#[cfg(feature = "cube")]
use burn::tensor::{Int, TensorData};
#[cfg(feature = "cube")]
use parking_lot::Mutex;

use crate::kernels::adamw::AdamWScalars;
#[cfg(feature = "cube")]
use crate::params::BLOCK;
#[cfg(feature = "cube")]
use crate::split::on_devices::OnDevices;

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
            let start = pair[1].0.start;
            assert!(start.is_multiple_of(BLOCK), "a parameter begins at element {start}");
            changes.push(u32::try_from(start / BLOCK).expect("blocks of a layer") as i32);
        }
        if changes.is_empty() {
            changes.push(-1);
        }
        let changes = on_device(changes, &device);
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

/// `numbers` on `device`, copied there once.
#[cfg(feature = "cube")]
fn on_device(numbers: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    static COPIED: Mutex<BTreeMap<Vec<i32>, OnDevices<Tensor<1, Int>>>> =
        Mutex::new(BTreeMap::new());
    let data = TensorData::new(numbers.clone(), [numbers.len()]);
    let mut copied = COPIED.lock();
    copied.entry(numbers).or_default().get(device, || Tensor::from_data(data, device))
}

/// The factor of each element: `decayed`, or 1 where nothing decays.
fn keep(parts: &[(Range<usize>, bool)], decayed: f32, device: &Device) -> Tensor<1> {
    let part = |(range, decays): &(Range<usize>, bool)| {
        Tensor::full([range.len()], if *decays { decayed } else { 1.0 }, device)
    };
    Tensor::cat(parts.iter().map(part).collect(), 0)
}
