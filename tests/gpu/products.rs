//! Products of matrices as the operations ask for them, at sizes and places that no tile fits.

use burn::tensor::{DType, Device, Tensor, TensorData};
use zeropp::config::DeviceKind;
use zeropp_core::split::ops::products::{
    add_product, affine, matmul, matmul_f32, round_to_tf32, rounds_to_tf32,
};

use crate::{device, kind};

/// Rows of x, columns of x, columns of y.
const SIZES: [[usize; 3]; 7] =
    [[1, 7, 5], [3, 13, 1], [5, 1, 3], [1, 1, 1], [33, 17, 65], [64, 40, 24], [70, 129, 30]];

/// Rounding of a number of this type, relative.
fn rounding(dtype: DType) -> f64 {
    if dtype == DType::BF16 { 2f64.powi(-8) } else { 2f64.powi(-24) }
}

/// Rounding of the factors: CubeCL's fp32 products are of TF32's.
fn factors_rounding() -> f64 {
    if rounds_to_tf32(kind()) { 2f64.powi(-11) } else { 0.0 }
}

/// Small fractions with nothing regular about them, exact in bf16.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 24) as f32 - 127.0) / 64.0
    };
    (0..n).map(next).collect()
}

/// Numbers that fp32 has and neither bf16 nor TF32.
fn long_numbers(n: usize, seed: u32) -> Vec<f32> {
    numbers(n, seed).into_iter().zip(numbers(n, seed + 1)).map(|(x, y)| x + y / 997.0).collect()
}

fn tensor<const D: usize>(v: &[f32], shape: [usize; D], at: (&Device, DType)) -> Tensor<D> {
    Tensor::<D>::from_data(TensorData::new(v.to_vec(), shape), (at.0, DType::F32)).cast(at.1)
}

/// How a factor lies in memory.
#[derive(Clone, Copy, Debug)]
enum Place {
    Rows,
    Columns,
    /// Between columns of others.
    Cut,
}

/// The matrix v, placed so.
fn placed(v: &[f32], [r, c]: [usize; 2], place: Place, at: (&Device, DType)) -> Tensor<2> {
    match place {
        Place::Rows => tensor(v, [r, c], at),
        Place::Columns => {
            let turned: Vec<f32> = (0..r * c).map(|i| v[i % r * c + i / r]).collect();
            tensor(&turned, [c, r], at).transpose()
        }
        Place::Cut => {
            let others = 3;
            let wide: Vec<f32> = v
                .chunks(c)
                .flat_map(|row| [7.0; 3].into_iter().chain(row.iter().copied()).chain([9.0; 2]))
                .collect();
            tensor(&wide, [r, c + 5], at).narrow(1, others, c)
        }
    }
}

fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.cast(DType::F32).into_data().iter::<f32>().collect()
}

/// Fails where `got` is not sum + x·y within what rounding allows.
#[track_caller]
fn check(
    got: Vec<f32>,
    sum: &[f32],
    [x, y]: [&[f32]; 2],
    [m, k, n]: [usize; 3],
    dtype: DType,
    what: &str,
) {
    assert_eq!(got.len(), m * n, "{what}");
    for (i, got) in got.into_iter().enumerate() {
        let terms = (0..k).map(|l| f64::from(x[i / n * k + l]) * f64::from(y[l * n + i % n]));
        let (exact, size) = terms
            .fold((f64::from(sum[i]), f64::from(sum[i].abs())), |(e, s), t| (e + t, s + t.abs()));
        let of_sums = (k + 2) as f64 * rounding(DType::F32) + 2.0 * factors_rounding();
        let bound = of_sums * size + rounding(dtype) * (exact.abs() + size) + 1e-30;
        let apart = (f64::from(got) - exact).abs();
        assert!(apart <= bound, "{what}, element {i} of {m}×{k}×{n}: {got}, not {exact}");
    }
}

#[test]
fn products_of_all_places_are_right_at_odd_sizes() {
    let device = device(0);
    let bf16 = device.supports_dtype(DType::BF16) && kind() == DeviceKind::Cuda;
    let types = [DType::F32, DType::BF16];
    for dtype in types.into_iter().filter(|t| bf16 || *t == DType::F32) {
        let at = (&device, dtype);
        for ([m, k, n], seed) in SIZES.into_iter().zip(1..) {
            let make = if dtype == DType::F32 { long_numbers } else { numbers };
            let (x, y, sum) = (make(m * k, seed), make(k * n, 100 + seed), make(m * n, 200 + seed));
            let zero = vec![0.0; m * n];
            for x_place in [Place::Rows, Place::Columns, Place::Cut] {
                for y_place in [Place::Rows, Place::Columns, Place::Cut] {
                    let what = format!("{dtype:?}, x by {x_place:?}, y by {y_place:?}");
                    let factors =
                        || (placed(&x, [m, k], x_place, at), placed(&y, [k, n], y_place, at));
                    let (a, b) = factors();
                    let got = values(matmul(a, b));
                    check(got, &zero, [&x, &y], [m, k, n], dtype, &what);
                    let (a, b) = factors();
                    let got = values(matmul_f32(a, b));
                    check(got, &zero, [&x, &y], [m, k, n], DType::F32, &what);
                    let (a, b) = factors();
                    let got = values(affine(a, b, tensor(&sum[..n], [n], at)));
                    let rows = sum[..n].repeat(m);
                    check(got, &rows, [&x, &y], [m, k, n], dtype, &what);
                    let (a, b) = factors();
                    let before = tensor(&sum, [m * n], (&device, DType::F32));
                    let got = values(add_product(before, a, b));
                    check(got, &sum, [&x, &y], [m, k, n], DType::F32, &what);
                }
            }
        }
    }
}

#[test]
fn a_sum_that_others_hold_stays_as_it_was() {
    let (device, [m, k, n]) = (device(0), [6, 5, 7]);
    let at = (&device, DType::F32);
    let (x, y, sum) = (numbers(m * k, 1), numbers(k * n, 2), numbers(m * n, 3));
    let before = tensor(&sum, [m * n], at);
    let after = add_product(before.clone(), tensor(&x, [m, k], at), tensor(&y, [k, n], at));
    assert_eq!(values(before), sum);
    check(values(after), &sum, [&x, &y], [m, k, n], DType::F32, "a held sum");
}

/// As attention has it: heads between each other, one of the factors transposed.
#[test]
fn batches_are_read_where_they_lie() {
    let (device, [b, s, heads, d]) = (device(0), [2, 9, 3, 8]);
    let at = (&device, DType::F32);
    let (x, y) = (long_numbers(b * s * heads * d, 1), long_numbers(b * s * heads * d, 2));
    let heads_of = |v: &[f32]| tensor(v, [b, s, heads, d], at).swap_dims(1, 2);
    let got = values(matmul(heads_of(&x), heads_of(&y).swap_dims(2, 3)));
    let head = |v: &[f32], i: usize| -> Vec<f32> {
        let (sample, head) = (i / heads, i % heads);
        let first = |token: usize| ((sample * s + token) * heads + head) * d;
        (0..s).flat_map(|token| v[first(token)..][..d].to_vec()).collect()
    };
    for (i, got) in got.chunks(s * s).enumerate() {
        let (x, y) = (head(&x, i), head(&y, i));
        let turned: Vec<f32> = (0..d * s).map(|j| y[j % s * d + j / s]).collect();
        let zero = vec![0.0; s * s];
        check(got.to_vec(), &zero, [&x, &turned], [s, d, s], DType::F32, &format!("head {i}"));
    }
}

#[test]
fn factors_are_rounded_to_tf32_where_that_is_asked_for() {
    // Elsewhere there is no choice.
    if kind() != DeviceKind::Cuda || rounds_to_tf32(kind()) {
        return;
    }
    let (device, [m, k, n]) = (device(0), [64, 40, 24]);
    let (x, y) = (long_numbers(m * k, 1), long_numbers(k * n, 2));
    let at = (&device, DType::F32);
    let product = || values(matmul(tensor(&x, [m, k], at), tensor(&y, [k, n], at)));
    let full = product();
    round_to_tf32(true);
    let rounded = product();
    check(rounded.clone(), &vec![0.0; m * n], [&x, &y], [m, k, n], DType::F32, "tf32");
    round_to_tf32(false);
    let apart = full.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart > 1e-5, "no factor was rounded: {apart}");
    assert_eq!(product(), full);
}
