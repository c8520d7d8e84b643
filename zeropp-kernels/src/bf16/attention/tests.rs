use super::*;
use crate::bf16::convert::{narrow, up, widen};
use crate::bf16::{available, force};

fn numbers(n: usize, seed: usize) -> Vec<bf16> {
    let value = |i: usize| ((i * 7 + seed).wrapping_mul(2_654_435_761) >> 7) % 1000;
    narrow(&(0..n).map(|i| value(i) as f32 / 500.0 - 1.0).collect::<Vec<_>>())
}

/// The same bits on every path, and within bf16's rounding of the fp32 kernel.
#[test]
fn agrees_with_fp32_and_between_paths() {
    for (b, s, heads, groups, d) in [(2, 37, 4, 2, 16), (1, 300, 2, 2, 32), (1, 1, 1, 1, 5)] {
        let dims = Dims { b, s, heads, groups, d, place: 0 };
        let qkv = numbers(b * s * dims.width(), 1);
        let dy = numbers(b * s * dims.out_width(), 2);
        let on = |isa| {
            force(Some(isa));
            let (out, sums) = attention(&qkv, dims);
            let dqkv = attention_backward(&dy, &qkv, &sums, dims);
            force(None);
            (out, sums, dqkv)
        };
        let first = on(available()[0]);
        available().iter().for_each(|isa| assert!(on(*isa) == first, "{isa:?}, s = {s}"));
        let want = crate::attention::kept::attention(&widen(&qkv), dims, None);
        let near = |got: &[bf16], want: &[f32]| {
            let apart = got.iter().zip(want).map(|(g, w)| (up(*g) - w).abs());
            let size = want.iter().fold(0.0_f32, |top, w| top.max(w.abs()));
            apart.fold(0.0, f32::max) / size
        };
        assert!(near(&first.0, &want) < 0.01, "{}", near(&first.0, &want));
        let want =
            crate::attention::kept::attention_backward(&widen(&dy), &widen(&qkv), dims, None);
        assert!(near(&first.2, &want) < 0.02, "{}", near(&first.2, &want));
    }
}

/// With dropped probabilities: the same bits on every path, and near fp32's kernels, which are
/// held against the definition.
#[test]
fn dropped_probabilities_are_fp32s() {
    use crate::attention::{recomputed, windowed};
    let sizes = [(2, 37, 4, 2, 16, usize::MAX), (1, 300, 2, 2, 32, 300), (1, 300, 2, 1, 8, 70)];
    for (b, s, heads, groups, d, window) in sizes {
        let dims = Dims { b, s, heads, groups, d, place: 0 };
        let qkv = numbers(b * s * dims.width(), 1);
        let dy = numbers(b * s * dims.out_width(), 2);
        let dropout = crate::dropout::DropoutRule::new([7, 1], 3, 0.3);
        let dropped = Some(Dropped { dropout, sample: 9, token: 21 });
        let on = |isa| {
            force(Some(isa));
            let (out, sums) = attention_after(&[], &qkv, dims, window, dropped);
            let forward = SliceForward { earlier: &[], qkv: &qkv, sums: &sums };
            let none = EarlierSums::default();
            let dqkv = attention_backward_after(forward, none, &dy, dims, window, dropped);
            force(None);
            (out, sums, dqkv)
        };
        let first = on(available()[0]);
        available().iter().for_each(|isa| assert!(on(*isa) == first, "{isa:?}, s = {s}"));
        let (qkv, dy) = (widen(&qkv), widen(&dy));
        let (out, dqkv) = if window < s {
            let (out, sums) = windowed::attention(&qkv, dims, window, dropped);
            let of = windowed::attention_backward(&dy, &qkv, &sums, dims, window, dropped);
            (out, of)
        } else {
            let (out, sums) = recomputed::attention(&qkv, dims, dropped);
            (out, recomputed::attention_backward(&dy, &qkv, &sums, dims, dropped))
        };
        for (got, want, most) in [(&first.0, out, 0.01), (&first.2, dqkv, 0.02)] {
            let apart = got.iter().zip(&want).map(|(g, w)| (up(*g) - w).abs());
            let size = want.iter().fold(0.0_f32, |top, w| top.max(w.abs()));
            let apart = apart.fold(0.0, f32::max) / size;
            assert!(apart < most, "{apart}");
        }
    }
}
