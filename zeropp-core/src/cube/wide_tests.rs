//! The kernels on tensors of more elements than 32 bits count, of which few are touched: rows that
//! begin behind the 2^32nd, held against the same rows side by side. Takes 19 GiB of a GPU of at
//! least 76, or the emulator; where `ZEROPP_TEST_DEVICE` is not `cuda`, there is nothing to try.

use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use super::*;
use crate::choice::{DeviceKind, Precision};
use crate::device::Devices;
use crate::kernels::head_norm::HeadRow;
use crate::kernels::rope::Turned;

/// Rows, and from one to the next; the last begins at the 2^32nd element.
const ROWS: usize = 9;
const PITCH: usize = 1 << 29;
const WIDTH: usize = 64;

fn cuda() -> Option<Device> {
    let wanted = std::env::var("ZEROPP_TEST_DEVICE").is_ok_and(|kind| kind == "cuda");
    wanted.then(|| Devices::find(DeviceKind::Cuda, Precision::Bf16).expect("a GPU").of(0))
}

fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 32.0 - 1.5).collect()
}

fn on<const D: usize>(device: &Device, v: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(v, shape), (device, DType::F32))
}

fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.cast(DType::F32).into_data().iter::<f32>().collect()
}

/// fp32 of which nothing was written.
fn large(device: &Device) -> Tensor<1> {
    Tensor::empty([ROWS * PITCH], (device, DType::F32))
}

/// The rows of `x: [ROWS, WIDTH]` far apart.
fn apart(x: &Tensor<2>) -> Tensor<2> {
    let row = |i: usize| x.clone().narrow(0, i, 1).reshape([WIDTH]);
    let all =
        (0..ROWS).fold(large(&x.device()), |all, i| add_to_part(all, row(i), i * PITCH, false));
    view_columns(all.reshape([ROWS, PITCH]), 0..WIDTH)
}

#[test]
fn parts_behind_32_bits_are_written_and_added_to() {
    let Some(device) = cuda() else { return };
    // Odd, so that units count elements and not vectors of them.
    let far = (ROWS - 1) * PITCH + 129;
    let (x, y) = (numbers(WIDTH, 1), numbers(ROWS * WIDTH, 2));
    let mut wanted: Vec<f32> =
        (0..WIDTH).map(|c| (0..ROWS).map(|r| y[r * WIDTH + c]).sum()).collect();
    let part = |all: &Tensor<1>| values(view_part(all.clone(), far..far + WIDTH));
    let all = add_to_part(large(&device), on(&device, x.clone(), [WIDTH]), far, false);
    let all = add_column_sums(all, on(&device, y, [ROWS, WIDTH]), far, true);
    wanted.iter_mut().zip(&x).for_each(|(sum, x)| *sum += x);
    assert_eq!(part(&all), wanted);
    let all = zero_part(all, far..far + WIDTH);
    assert_eq!(part(&all), [0.0; WIDTH]);
    // The last row of an embedding, and one of its first.
    let h = WIDTH - 1;
    let rows = ROWS * PITCH / h;
    let ids = [rows - 1, 3, rows - 1].map(|id| id as i32);
    let ids = Tensor::<1, Int>::from_data(TensorData::new(ids.to_vec(), [3]), &device);
    let some = numbers(3 * h, 4);
    let ends = [3 * h, (rows - 1) * h];
    let all = ends.iter().fold(all, |all, at| zero_part(all, *at..at + h));
    let all = add_token_rows(all, 0..rows * h, ids, on(&device, some.clone(), [3, h]));
    let got = ends.map(|at| values(view_part(all.clone(), at..at + h)));
    let last = some[..h].iter().zip(&some[2 * h..]).map(|(a, b)| a + b).collect();
    assert_eq!(got, [some[h..2 * h].to_vec(), last]);
}

#[test]
fn rows_behind_32_bits_are_read_where_they_lie() {
    let Some(device) = cuda() else { return };
    let rows = |seed| on(&device, numbers(ROWS * WIDTH, seed), [ROWS, WIDTH]);
    let (x, dy) = (rows(1), rows(2));
    let far = apart(&x);
    let vector = |n: usize, seed| on(&device, numbers(n, seed), [n]);
    let (gamma, beta) = (vector(WIDTH, 3), vector(WIDTH, 4));
    let layer = |x: &Tensor<2>| {
        let (y, means, scales) = layer_norm(x.clone(), gamma.clone(), beta.clone(), 1e-5);
        let (dx, sums) = layer_norm_backward(dy.clone(), x.clone(), gamma.clone(), means, scales);
        [values(y), values(dx), values(sums)]
    };
    assert_eq!(layer(&far), layer(&x));
    let rms = |x: &Tensor<2>| {
        let (y, scales) = rms_norm(x.clone(), gamma.clone(), 1e-5);
        let (dx, sums) = rms_norm_backward(dy.clone(), x.clone(), gamma.clone(), scales);
        [values(y), values(dx), values(sums)]
    };
    assert_eq!(rms(&far), rms(&x));
    let (q, k) = (vector(16, 5), vector(16, 6));
    let heads = |x: &Tensor<2>| {
        let (at, weights) = (HeadRow { heads: 2, groups: 1 }, || [q.clone(), k.clone()]);
        let (y, scales) = head_norm(x.clone(), weights(), at, 1e-5);
        let (dx, sums) = head_norm_backward(dy.clone(), x.clone(), weights(), scales, at);
        [values(y), values(dx), values(sums)]
    };
    assert_eq!(heads(&far), heads(&x));
    let targets = || {
        let ids: Vec<i32> = (0..ROWS as i32).map(|row| row * 7).collect();
        Tensor::<1, Int>::from_data(TensorData::new(ids, [ROWS]), &device)
    };
    let losses = |x: &Tensor<2>| values(cross_entropy(x.clone(), targets(), None).0);
    assert_eq!(losses(&far), losses(&x));
    assert_eq!(values(column_sums(far.clone())), values(column_sums(x.clone())));
    let turned = |x: Tensor<2>| {
        let positions = Tensor::<1, Int>::arange(0..ROWS as i64, &device);
        let tables = [7, 8].map(|seed| on(&device, numbers(ROWS * 8, seed), [ROWS, 8]));
        let heads = Turned { width: WIDTH, heads: 3, d: 16 };
        values(turn_rows(
            x,
            tables,
            positions,
            TurnedRows { heads, first: 0, period: ROWS, back: false },
        ))
    };
    let wanted = turned(x.clone());
    assert_eq!(turned(far), wanted);
}
