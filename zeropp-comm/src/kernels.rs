//! The arithmetic of the collectives, on slices for CPU `f32` and on tensors for all else.
//!
//! Sums run over the ranks in rank order, starting from rank 0's value (not from zero, which
//! would turn -0 into +0), in `f32`, and are rounded to the buffers' type once. Each element is
//! summed on its own, so neither the cutting into blocks nor who sums changes a bit.

use std::ops::Range;

use burn::tensor::{DType, Device, Tensor};

use super::buffers::Buffers;
use zeropp_core::cpu_tensor::{CpuTensor, on_cpu};
use zeropp_core::device::hand_over;

/// Elements summed over all ranks before the next ones: 16 KiB, which stay in the first cache.
const BLOCK: usize = 4096;

/// Every rank's result of concatenating `shards`: one tensor shared by all ranks of a device.
pub(super) fn all_gather(buffers: &Buffers, shards: &[Tensor<1>]) -> Vec<Tensor<1>> {
    if let Some(shards) = host_views(shards) {
        let len = shards.iter().map(|shard| shard.as_slice().len()).sum();
        let whole = buffers.make(len, |out| {
            let mut rest = out;
            for shard in shards.iter().map(CpuTensor::as_slice) {
                let (part, tail) = rest.split_at_mut(shard.len());
                part.copy_from_slice(shard);
                rest = tail;
            }
        });
        return vec![whole; shards.len()];
    }
    once_a_device(shards, |device| {
        Tensor::cat(shards.iter().map(|shard| on(device, shard)).collect(), 0)
    })
}

/// The sum of all ranks' `inputs`, for every rank: one tensor shared by all ranks of a device.
pub(super) fn all_reduce(buffers: &Buffers, inputs: &[Tensor<1>]) -> Vec<Tensor<1>> {
    let all = 0..inputs[0].dims()[0];
    if let Some(views) = host_views(inputs) {
        let inputs: Vec<&[f32]> = views.iter().map(CpuTensor::as_slice).collect();
        let sum = buffers.make(all.len(), |out| sum_in_order(out, &inputs));
        return vec![sum; inputs.len()];
    }
    once_a_device(inputs, |device| sum_tensors(inputs, device, all.clone()))
}

/// The parts at `places` of the sum of all ranks' `inputs`. All inputs are looked into once, not
/// once for each part: of many ranks that would take longer than the sums.
pub(super) fn reduce_parts(
    buffers: &Buffers,
    inputs: &[Tensor<1>],
    places: impl IntoIterator<Item = usize>,
) -> Vec<Tensor<1>> {
    let len = inputs[0].dims()[0] / inputs.len();
    let views = host_views(inputs);
    let whole: Option<Vec<&[f32]>> =
        views.as_ref().map(|views| views.iter().map(CpuTensor::as_slice).collect());
    let sum = |place: usize| {
        let part = place * len..(place + 1) * len;
        let Some(whole) = &whole else {
            return hand_over(sum_tensors(inputs, &inputs[place].device(), part));
        };
        let parts: Vec<&[f32]> = whole.iter().map(|input| &input[part.clone()]).collect();
        buffers.make(len, |out| sum_in_order(out, &parts))
    };
    places.into_iter().map(sum).collect()
}

fn host_views(tensors: &[Tensor<1>]) -> Option<Vec<CpuTensor>> {
    tensors.iter().map(on_cpu).collect()
}

/// `out[i] = inputs[0][i] + inputs[1][i] + …`, added from left to right.
pub(super) fn sum_in_order(out: &mut [f32], inputs: &[&[f32]]) {
    let (first, peers) = inputs.split_first().expect("a group has at least one rank");
    for start in (0..out.len()).step_by(BLOCK) {
        let block = start..(start + BLOCK).min(out.len());
        let sum = &mut out[block.clone()];
        sum.copy_from_slice(&first[block.clone()]);
        let mut threes = peers.chunks_exact(3);
        for three in &mut threes {
            let [a, b, c] = [0, 1, 2].map(|i| &three[i][block.clone()]);
            for (((sum, a), b), c) in sum.iter_mut().zip(a).zip(b).zip(c) {
                *sum = *sum + a + b + c;
            }
        }
        for peer in threes.remainder() {
            for (sum, x) in sum.iter_mut().zip(&peer[block.clone()]) {
                *sum += x;
            }
        }
    }
}

pub(super) fn sum_tensors(inputs: &[Tensor<1>], device: &Device, range: Range<usize>) -> Tensor<1> {
    let dtype = inputs[0].dtype();
    let part = |input: &Tensor<1>| on(device, &input.clone().slice(range.clone())).cast(DType::F32);
    let sum = inputs[1..].iter().fold(part(&inputs[0]), |sum, input| sum + part(input));
    sum.cast(dtype)
}

/// `make`'s result for every rank's device, made once where ranks share one.
fn once_a_device(inputs: &[Tensor<1>], make: impl Fn(&Device) -> Tensor<1>) -> Vec<Tensor<1>> {
    let mut made: Vec<(Device, Tensor<1>)> = Vec::new();
    let result = |input: &Tensor<1>| {
        let device = input.device();
        if let Some((_, tensor)) = made.iter().find(|(known, _)| *known == device) {
            return hand_over(tensor.clone());
        }
        let tensor = make(&device);
        made.push((device, tensor.clone()));
        hand_over(tensor)
    };
    inputs.iter().map(result).collect()
}

/// `tensor` on `device`: itself where it is there already.
pub(super) fn on(device: &Device, tensor: &Tensor<1>) -> Tensor<1> {
    zeropp_core::device::on(device, tensor.clone())
}
