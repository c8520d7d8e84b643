//! The kernels against plain loops over rows of random shapes.

#[path = "../../tests/common/cases.rs"]
mod cases;
#[path = "../../tests/common/close.rs"]
mod close;
#[path = "../../tests/common/random.rs"]
mod generator;

use std::sync::atomic::Ordering;

use burn::tensor::{DType, Device, DeviceKind, Int, Tensor, TensorData};
use cases::cases;
use close::assert_within;
use generator::Random;
use proptest::prelude::*;

use super::loss::COPIES;
use super::*;

fn gpu() -> Device {
    Device::wgpu(DeviceKind::DefaultDevice)
}

fn on_gpu<const D: usize>(v: &[f32], shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(v.to_vec(), shape), (&gpu(), DType::F32))
}

fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.into_data().iter::<f32>().collect()
}

/// `n` numbers between −1 and 1.
fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Random(seed);
    (0..n).map(|_| 2.0 * rng.unit() - 1.0).collect()
}

/// p, ds and the sums' logarithms in double precision.
fn softmax_rows(
    (scores, dp): (&[f32], &[f32]),
    (keys, first, queries): (usize, usize, usize),
    scale: f64,
) -> [Vec<f64>; 3] {
    let (mut p, mut ds, mut sums) = (Vec::new(), Vec::new(), Vec::new());
    for (row, (scores, dp)) in scores.chunks(keys).zip(dp.chunks(keys)).enumerate() {
        let seen = first + row % queries + 1;
        let e: Vec<f64> = scores[..seen].iter().map(|x| (f64::from(*x) * scale).exp()).collect();
        let sum: f64 = e.iter().sum();
        let mean: f64 = e.iter().zip(dp).map(|(e, d)| e / sum * f64::from(*d)).sum();
        for (key, slope) in dp.iter().enumerate() {
            let value = e.get(key).map_or(0.0, |e| e / sum);
            p.push(value);
            ds.push(value * (f64::from(*slope) - mean) * scale);
        }
        sums.push(sum.ln());
    }
    [p, ds, sums]
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn causal_softmax_of_any_block(
        n in 1..4_usize, share in 1..4_usize, first in 0..300_usize, queries in 1..40_usize,
        spare in 0..3_usize, scale in 0.1..20_f32, long: bool, seed: u64,
    ) {
        let first = if long { first * 20 } else { first };
        let (rows, keys) = (share * queries, first + queries + spare);
        let shape = [n, rows, keys];
        let (scores, dp) = (random(n * rows * keys, seed), random(n * rows * keys, seed ^ 7));
        let at = (keys, first, queries);
        let [p, ds, sums] = softmax_rows((&scores, &dp), at, f64::from(scale));
        let block = on_gpu(&scores, shape);
        let (got, lse) = causal_softmax(block.clone(), first, queries, scale, DType::F32);
        assert_within("p", &values(got), &p, 2e-6, 1.0);
        assert_within("sums", &values(lse.clone()), &sums, 2e-6, 1.0);
        let dp = on_gpu(&dp, shape);
        let (again, slopes) =
            causal_softmax_backward(block, dp, lse, first, queries, scale, DType::F32);
        assert_within("p again", &values(again), &p, 5e-6, 1.0);
        assert_within("ds", &values(slopes), &ds, 5e-6, 1.0);
    }

    #[test]
    fn sums_of_first_rows(
        n in 1..4_usize, s in 1..50_usize, d in 1..40_usize, part in 0.0..1_f64, shared: bool,
        seed: u64,
    ) {
        let r = ((s as f64 * part) as usize).max(1);
        let (sum, part) = (random(n * s * d, seed), random(n * r * d, seed ^ 7));
        let mut want: Vec<f64> = sum.iter().map(|x| f64::from(*x)).collect();
        for i in 0..n {
            for j in 0..r * d {
                want[i * s * d + j] += f64::from(part[i * r * d + j]);
            }
        }
        let before = on_gpu(&sum, [n, s, d]);
        let kept = shared.then(|| before.clone());
        let after = add_first_rows(before, on_gpu(&part, [n, r, d]));
        assert_within("sum", &values(after), &want, 1e-6, 1.0);
        // What somebody else holds is not written to.
        if let Some(kept) = kept {
            prop_assert_eq!(values(kept), sum);
        }
    }

    #[test]
    fn rows_of_tokens_are_added_in_their_order(
        n in 1..60_usize, h in 1..300_usize, v in 1..30_usize, shared: bool, seed: u64,
    ) {
        // In the middle of a buffer.
        let part = 128..128 + v * h;
        let (rows, before) = (random(n * h, seed), random(part.end + 128, seed ^ 7));
        // The smallest and the largest are no rows.
        let id = |x: &f32| (x * (v as f32 / 2.0 + 1.0) + v as f32 / 2.0).floor() as i64;
        let ids: Vec<i64> = random(n, seed ^ 9).iter().map(id).collect();
        let mut want = before.clone();
        for (id, row) in ids.iter().zip(rows.chunks(h)) {
            if (0..v as i64).contains(id) {
                let want = &mut want[part.start + *id as usize * h..][..h];
                want.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
        }
        let sum = on_gpu(&before, [before.len()]);
        let kept = shared.then(|| sum.clone());
        let ids = Tensor::<1, Int>::from_data(TensorData::new(ids, [n]), &gpu());
        let after = add_token_rows(sum, part, ids, on_gpu(&rows, [n, h]));
        assert_eq!(values(after), want);
        // What somebody else holds is not written to.
        if let Some(kept) = kept {
            prop_assert_eq!(values(kept), before);
        }
    }

    #[test]
    fn a_part_of_a_buffer_is_written_or_added_to(
        n in 1..3000_usize, blocks in 0..3_usize, begun: bool, shared: bool, seed: u64,
    ) {
        let start = 128 * blocks;
        let (before, part) = (random(start + n + 70, seed), random(n, seed ^ 7));
        let mut want = before.clone();
        for (sum, x) in want[start..].iter_mut().zip(&part) {
            *sum = if begun { *sum + x } else { *x };
        }
        let sum = on_gpu(&before, [before.len()]);
        let kept = shared.then(|| sum.clone());
        let after = add_to_part(sum, on_gpu(&part, [n]), start, begun);
        let seen = view_part(after.clone(), start..start + n);
        assert_eq!(values(seen), want[start..start + n]);
        assert_eq!(values(after.clone()), want);
        if let Some(kept) = kept {
            prop_assert_eq!(values(kept), before);
        }
        want[start..start + n].fill(0.0);
        assert_eq!(values(zero_part(after, start..start + n)), want);
    }

    #[test]
    fn cross_entropy_of_any_rows(
        n in 1..9_usize, v in 1..5000_usize, scale in 0.1..30_f32, shared: bool, seed: u64,
    ) {
        let logits: Vec<f32> = random(n * v, seed).iter().map(|x| x * scale).collect();
        let id = |x: &f32| (x.abs() * v as f32) as i64 % v as i64;
        let ids: Vec<i64> = random(n, seed ^ 7).iter().map(id).collect();
        let (mut losses, mut slopes) = (Vec::new(), Vec::new());
        for (row, id) in logits.chunks(v).zip(&ids) {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            losses.push(sum.ln() - f64::from(row[*id as usize]));
            let wanted = |i: usize| f64::from(u8::from(i == *id as usize));
            let slope = |i: usize| f64::from(row[i]).exp() / sum - wanted(i);
            slopes.extend((0..v).map(|i| slope(i) / n as f64));
        }
        let targets = || Tensor::<1, Int>::from_data(TensorData::new(ids.clone(), [n]), &gpu());
        let before = on_gpu(&logits, [n, v]);
        let (got, unchanged) = cross_entropy(before.clone(), targets(), None);
        assert_within("losses", &values(got), &losses, 2e-6, 1.0);
        assert_eq!(values(unchanged), logits);
        let kept = shared.then(|| before.clone());
        let copies = COPIES.load(Ordering::SeqCst);
        // Reshaped on the way, as the operation does it.
        let logits_of_samples = before.reshape([1, n, v]);
        let mean = Some(1.0 / n as f32);
        let (got, gradient) = cross_entropy(logits_of_samples.reshape([n, v]), targets(), mean);
        assert_within("losses", &values(got), &losses, 2e-6, 1.0);
        prop_assert_eq!(COPIES.load(Ordering::SeqCst) - copies, usize::from(shared));
        assert_within("gradient", &values(gradient), &slopes, 2e-6, 1.0);
        if let Some(kept) = kept {
            assert_eq!(values(kept), logits);
        }
    }
}

/// Transposed rows are copied first; rows of a slice are read where they lie.
#[test]
fn rows_may_lie_apart() {
    let (n, keys) = (6, 70);
    let wide = random(n * 200, 3);
    let part = on_gpu(&wide, [1, n, 200]).narrow(2, 64, keys);
    let picked: Vec<f32> = wide.chunks(200).flat_map(|r| r[64..64 + keys].to_vec()).collect();
    let turned = on_gpu(&picked, [1, n, keys]).swap_dims(1, 2);
    let across: Vec<f32> = (0..keys * n).map(|i| picked[i % n * keys + i / n]).collect();
    let [p, ..] = softmax_rows((&picked, &picked), (keys, 10, n), 1.0);
    assert_within("slice", &values(causal_softmax(part, 10, n, 1.0, DType::F32).0), &p, 2e-6, 1.0);
    let [p, ..] = softmax_rows((&across, &across), (n, n - 2, 2), 1.0);
    assert_within(
        "turned",
        &values(causal_softmax(turned, n - 2, 2, 1.0, DType::F32).0),
        &p,
        2e-6,
        1.0,
    );
}
