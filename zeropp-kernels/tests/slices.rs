//! A sample that is cut into slices has the bits that it has whole: with any cut on the grid, any
//! number of threads and on every path of the bf16 products.

use std::ops::Range;

use half::bf16;
use zeropp_kernels::attention::{
    Dims, Dropped, EarlierRows, EarlierSums, SliceForward, recomputed, windowed,
};
use zeropp_kernels::bf16::attention as half_attention;
use zeropp_kernels::bf16::convert::{narrow, widen};
use zeropp_kernels::bf16::{self as halves, Isa, Mat, rows};
use zeropp_kernels::dropout::{self, DropoutRule, SampleRows};
use zeropp_kernels::gemm::{self, MatRef};
use zeropp_kernels::head::{self, BlockLogits};
use zeropp_kernels::head_norm::{HeadRow, head_norm, head_norm_backward};
use zeropp_kernels::threads::Threads;
use zeropp_kernels::tokens::{GRID, blocks};
use zeropp_kernels::{norm, reduce};

fn numbers(n: usize, seed: u32) -> Vec<f32> {
    let hash = |i: usize| (i as u32 ^ seed.wrapping_mul(77)).wrapping_mul(2_654_435_761);
    (0..n).map(|i| hash(i).rotate_left(13) as f32 / u32::MAX as f32 * 2.0 - 1.0).collect()
}

/// The slices of a sample of `tokens`, 7 or 8 blocks of the grid: 1, 2, 3, 5 and all of the blocks,
/// and uneven ones.
fn cuts(tokens: usize) -> Vec<Vec<Range<usize>>> {
    let cuts: [&[usize]; 7] =
        [&[8], &[4, 4], &[3, 3, 2], &[2, 2, 2, 1, 1], &[1; 8], &[1, 5, 2], &[6, 1, 1]];
    let slices = |cut: &[usize]| {
        let mut end = 0;
        let of = |blocks: &usize| {
            let start = end;
            end = tokens.min(start + blocks * GRID);
            start..end
        };
        cut.iter().map(of).filter(|slice| !slice.is_empty()).collect()
    };
    cuts.into_iter().map(slices).collect()
}

/// `f` gives the bits of the first cut for all others, with one thread and with two.
fn same_bits(what: &str, tokens: usize, f: impl Fn(&[Range<usize>]) -> Vec<Vec<f32>>) {
    let bits = |all: Vec<Vec<f32>>| -> Vec<Vec<u32>> {
        all.into_iter().map(|x| x.into_iter().map(f32::to_bits).collect()).collect()
    };
    let cuts = cuts(tokens);
    let whole = bits(f(&cuts[0]));
    for count in [1, 2] {
        let threads = Threads::new(count, false);
        let _in_use = threads.install();
        for cut in &cuts {
            for (i, (got, want)) in bits(f(cut)).iter().zip(&whole).enumerate() {
                assert_eq!(got.len(), want.len(), "{what}, {i}, {cut:?}");
                assert!(got == want, "{what}: other bits of {i} with {count} threads, {cut:?}");
            }
        }
    }
}

/// A kernel of attention, over elements of type T.
trait Kernel<T> {
    fn forward(&self, earlier: &[EarlierRows<'_, T>], qkv: &[T], d: Dims) -> (Vec<T>, Vec<f32>);
    fn backward(&self, f: SliceForward<'_, T>, sums: EarlierSums, dy: &[T], d: Dims) -> Vec<T>;
}

struct Recomputed(Option<Dropped>);

impl Kernel<f32> for Recomputed {
    fn forward(&self, earlier: &[EarlierRows<'_>], qkv: &[f32], d: Dims) -> (Vec<f32>, Vec<f32>) {
        recomputed::attention_after(earlier, qkv, d, self.0)
    }

    fn backward(&self, f: SliceForward<'_>, sums: EarlierSums, dy: &[f32], d: Dims) -> Vec<f32> {
        recomputed::attention_backward_after(f, sums, dy, d, self.0)
    }
}

struct Windowed(usize, Option<Dropped>);

impl Kernel<f32> for Windowed {
    fn forward(&self, earlier: &[EarlierRows<'_>], qkv: &[f32], d: Dims) -> (Vec<f32>, Vec<f32>) {
        windowed::attention_after(earlier, qkv, d, self.0, self.1)
    }

    fn backward(&self, f: SliceForward<'_>, sums: EarlierSums, dy: &[f32], d: Dims) -> Vec<f32> {
        windowed::attention_backward_after(f, sums, dy, d, self.0, self.1)
    }
}

impl Kernel<bf16> for Windowed {
    fn forward(
        &self,
        earlier: &[EarlierRows<'_, bf16>],
        qkv: &[bf16],
        d: Dims,
    ) -> (Vec<bf16>, Vec<f32>) {
        half_attention::attention_after(earlier, qkv, d, self.0, self.1)
    }

    fn backward(
        &self,
        f: SliceForward<'_, bf16>,
        sums: EarlierSums,
        dy: &[bf16],
        d: Dims,
    ) -> Vec<bf16> {
        half_attention::attention_backward_after(f, sums, dy, d, self.0, self.1)
    }
}

/// Output, sums and gradient of a sample that is cut: forwards from the first slice to the last,
/// backwards from the last to the first.
fn attention<T: Copy>(
    kernel: &impl Kernel<T>,
    qkv: &[T],
    dy: &[T],
    d: Dims,
    cut: &[Range<usize>],
) -> [Vec<Vec<T>>; 2]
where
    f32: From<T>,
{
    let (width, out_width, columns) = (d.width(), d.out_width(), 2 * d.groups * d.d);
    // Of some slices only keys and values are left.
    let kept: Vec<Vec<T>> = cut
        .iter()
        .map(|slice| {
            let rows = qkv[slice.start * width..slice.end * width].chunks_exact(width);
            rows.flat_map(|row| row[width - columns..].iter().copied()).collect()
        })
        .collect();
    let earlier = |i: usize| -> Vec<EarlierRows<'_, T>> {
        let of = |(j, slice): (usize, &Range<usize>)| match j % 2 {
            0 => EarlierRows::new(&qkv[slice.start * width..slice.end * width], width),
            _ => EarlierRows::new(&kept[j], columns),
        };
        cut.iter().enumerate().take(i).map(of).collect()
    };
    let mut forwards = Vec::new();
    for (i, slice) in cut.iter().enumerate() {
        let d = Dims { s: slice.len(), place: d.place + slice.start, ..d };
        forwards.push(kernel.forward(&earlier(i), &qkv[slice.start * width..slice.end * width], d));
    }
    let sizes = cut.iter().map(|slice| vec![0.0; slice.len() * columns]);
    let mut left: Vec<Vec<f32>> = sizes.collect();
    let mut gradients = Vec::new();
    for (i, slice) in cut.iter().enumerate().rev() {
        let d = Dims { s: slice.len(), place: d.place + slice.start, ..d };
        let qkv = &qkv[slice.start * width..slice.end * width];
        let dy = &dy[slice.start * out_width..slice.end * out_width];
        let own = left.pop().expect("one of each slice");
        let own = (i + 1 < cut.len()).then_some(&own[..]);
        let sums = EarlierSums { own, earlier: left.iter_mut().map(|x| &mut x[..]).collect() };
        let forward = SliceForward { earlier: &earlier(i), qkv, sums: &forwards[i].1 };
        gradients.push(kernel.backward(forward, sums, dy, d));
    }
    gradients.reverse();
    [forwards.into_iter().map(|(out, _)| out).collect(), gradients]
}

fn of_attention<T: Copy>(
    what: &str,
    kernel: &impl Kernel<T>,
    d: Dims,
    narrow: impl Fn(&[f32]) -> Vec<T>,
) where
    f32: From<T>,
{
    let qkv = narrow(&numbers(d.s * d.width(), 1));
    let dy = narrow(&numbers(d.s * d.out_width(), 2));
    same_bits(&format!("{what}, {d:?}"), d.s, |cut| {
        let wide = |parts: Vec<Vec<T>>| parts.concat().into_iter().map(f32::from).collect();
        attention(kernel, &qkv, &dy, d, cut).map(wide).to_vec()
    });
}

/// Sizes with one key head, with several, and a sample that ends within a block.
const SIZES: [Dims; 3] = [
    Dims { b: 1, s: 2048, heads: 2, groups: 1, d: 16, place: 0 },
    Dims { b: 1, s: 1900, heads: 4, groups: 2, d: 9, place: 0 },
    Dims { b: 1, s: 2048, heads: 1, groups: 1, d: 40, place: 0 },
];

fn dropped() -> [Option<Dropped>; 2] {
    let dropout = DropoutRule::new([7, 1], 3, 0.3);
    [None, Some(Dropped { dropout, sample: 9, token: 0 })]
}

#[test]
fn attention_has_the_bits_of_the_whole_sample() {
    for d in SIZES {
        for dropped in dropped() {
            of_attention("attention", &Recomputed(dropped), d, <[f32]>::to_vec);
        }
    }
}

#[test]
fn attention_of_a_window_has_the_bits_of_the_whole_sample() {
    for (d, window) in SIZES.into_iter().zip([300, 70, 1000]) {
        for dropped in dropped() {
            of_attention("a window", &Windowed(window, dropped), d, <[f32]>::to_vec);
        }
    }
}

#[test]
fn attention_in_bf16_has_the_bits_of_the_whole_sample() {
    for isa in halves::available() {
        halves::force(Some(*isa));
        let [none, some] = dropped();
        for (d, window, dropped) in [(SIZES[0], usize::MAX, none), (SIZES[1], 300, some)] {
            let d = match isa {
                // Slow without vectors.
                Isa::Scalar => Dims { heads: 1, groups: 1, d: 5, ..d },
                _ => Dims { heads: 2, groups: 1, ..d },
            };
            of_attention(&format!("bf16 by {isa:?}"), &Windowed(window, dropped), d, narrow);
        }
        halves::force(None);
    }
}

/// A cut's rows of `x: [tokens, width]`.
fn part<'a, T>(x: &'a [T], width: usize, slice: &Range<usize>) -> &'a [T] {
    &x[slice.start * width..slice.end * width]
}

#[test]
fn gradients_of_weights_have_the_bits_of_the_whole_sample() {
    let tokens = 2048;
    for (input, out) in [(96, 64), (40, 200), (33, 7)] {
        let (x, dy) = (numbers(tokens * input, 1), numbers(tokens * out, 2));
        same_bits(&format!("{input} x {out}"), tokens, |cut| {
            let (mut dw, mut db) = (vec![0.0; input * out], vec![0.0; out]);
            for slice in cut.iter().rev() {
                let (x, dy) = (part(&x, input, slice), part(&dy, out, slice));
                let n = slice.len();
                let (left, right) = (MatRef::new(x, n, input), MatRef::new(dy, n, out));
                gemm::add_by_blocks(&mut dw, left, right, blocks(n).rev());
                reduce::add_rows(&mut db, dy);
            }
            vec![dw, db]
        });
        let (x, dy) = (narrow(&x), narrow(&dy));
        for isa in halves::available() {
            halves::force(Some(*isa));
            same_bits(&format!("{input} x {out} by {isa:?}"), tokens, |cut| {
                let (mut dw, mut db) = (vec![0.0; input * out], vec![0.0; out]);
                for slice in cut.iter().rev() {
                    let (x, dy) = (part(&x, input, slice), part(&dy, out, slice));
                    let n = slice.len();
                    let (left, right) = (Mat::new(x, n, input), Mat::new(dy, n, out));
                    halves::add_by_blocks(&mut dw, left, right, blocks(n).rev());
                    rows::add_rows(&mut db, dy);
                }
                vec![dw, db]
            });
            halves::force(None);
        }
    }
}

/// Of weights that have a gradient from each token, whose sum the backwards of slices hand on.
#[test]
fn gradients_of_norms_have_the_bits_of_the_whole_sample() {
    let tokens = 1900;
    for h in [96, 1000, 7] {
        let (x, dy, gamma) = (numbers(tokens * h, 1), numbers(tokens * h, 2), numbers(h, 3));
        let (half_x, half_dy) = (narrow(&x), narrow(&dy));
        same_bits(&format!("norms of {h}"), tokens, |cut| {
            let mut sums: Vec<Vec<f32>> = [2 * h, h, 2 * h, h].map(|n| vec![0.0; n]).to_vec();
            let mut dxs = vec![vec![0.0; tokens * h]; 4];
            let place = |dxs: &mut Vec<f32>, slice: &Range<usize>, dx: &[f32]| {
                dxs[slice.start * h..slice.end * h].copy_from_slice(dx);
            };
            for slice in cut.iter().rev() {
                let x = part(&x, h, slice);
                let (_, means, rstds) = norm::layer_norm(x, &gamma, &gamma, 1e-5);
                let mut dx = part(&dy, h, slice).to_vec();
                norm::layer_norm_backward(&mut dx, x, &gamma, &means, &rstds, &mut sums[0]);
                place(&mut dxs[0], slice, &dx);
                let (_, rrms) = norm::rms_norm(x, &gamma, 1e-5);
                let mut dx = part(&dy, h, slice).to_vec();
                norm::rms_norm_backward(&mut dx, x, &gamma, &rrms, &mut sums[1]);
                place(&mut dxs[1], slice, &dx);
                let x = part(&half_x, h, slice);
                let normed = rows::layer_norm(x, &gamma, &gamma, 1e-5);
                let (means, rstds) = (&normed.means, &normed.inverses);
                let mut dx = part(&half_dy, h, slice).to_vec();
                rows::layer_norm_backward(&mut dx, x, &gamma, means, rstds, &mut sums[2]);
                place(&mut dxs[2], slice, &widen(&dx));
                let normed = rows::rms_norm(x, &gamma, 1e-5);
                let mut dx = part(&half_dy, h, slice).to_vec();
                rows::rms_norm_backward(&mut dx, x, &gamma, &normed.inverses, &mut sums[3]);
                place(&mut dxs[3], slice, &widen(&dx));
            }
            sums.extend(dxs);
            sums
        });
    }
    let (at, d) = (HeadRow { heads: 4, groups: 2 }, 10);
    let width = 8 * d;
    let (x, dy) = (numbers(tokens * width, 1), numbers(tokens * width, 2));
    let (q, k) = (numbers(d, 3), numbers(d, 4));
    same_bits("norms of heads", tokens, |cut| {
        let (mut sums, mut dxs) = (vec![0.0; 2 * d], vec![0.0; tokens * width]);
        for slice in cut.iter().rev() {
            let x = part(&x, width, slice);
            let (_, rrms) = head_norm(x, at, &q, &k, 1e-5);
            let mut dx = part(&dy, width, slice).to_vec();
            head_norm_backward(&mut dx, x, at, &q, &k, &rrms, &mut sums);
            dxs[slice.start * width..slice.end * width].copy_from_slice(&dx);
        }
        vec![sums, dxs]
    });
}

#[test]
fn dropped_elements_are_those_of_the_whole_sample() {
    let (tokens, h) = (1900, 70);
    let (x, dropout) = (numbers(tokens * h, 1), DropoutRule::new([3, 4], 5, 0.3));
    let half_x = narrow(&x);
    same_bits("dropout", tokens, |cut| {
        let (mut wide, mut half) = (Vec::new(), Vec::new());
        for slice in cut {
            let samples = SampleRows { first: 7, token: slice.start, rows: slice.len() };
            let mut x = part(&x, h, slice).to_vec();
            dropout::apply(&mut x, h, samples, dropout);
            wide.extend(x);
            let mut x = part(&half_x, h, slice).to_vec();
            rows::drop_some(&mut x, h, samples, dropout);
            half.extend(widen(&x));
        }
        vec![wide, half]
    });
}

#[test]
fn a_loss_is_the_sum_of_the_whole_sample() {
    let (tokens, ids) = (1900, 50);
    let logits = numbers(tokens * ids, 1);
    let targets: Vec<usize> = (0..tokens).map(|i| i * 7 % ids).collect();
    same_bits("loss", tokens, |cut| {
        let mut sum = 0.0;
        for slice in cut {
            let targets = &targets[slice.clone()];
            let mut of_slice = BlockLogits::new(targets, 0);
            of_slice.push(part(&logits, ids, slice).to_vec());
            let totals = head::totals(of_slice.sums());
            sum = head::cross_entropy(sum, &totals, of_slice.chosen(), targets);
        }
        let bits = sum.to_bits();
        vec![vec![f32::from_bits(bits as u32), f32::from_bits((bits >> 32) as u32)]]
    });
}

/// Narrower products, and those of fewer than 96 rows, have an order of their own.
#[test]
fn rows_of_products_have_the_bits_of_the_whole_sample() {
    let (tokens, slices) = (864, [0..256, 256..512, 512..768, 768..864]);
    for (input, out) in [(3, 3), (4, 3), (16, 3), (16, 4), (64, 8), (24, 16), (64, 64)] {
        let (x, w) = (numbers(tokens * input, 1), numbers(input * out, 2));
        for w in [MatRef::new(&w, input, out), MatRef::new(&w, out, input).t()] {
            let product = |slice: &Range<usize>| {
                let x = MatRef::new(part(&x, input, slice), slice.len(), input);
                gemm::product(1.0, x, w)
            };
            let cut: Vec<f32> = slices.iter().flat_map(product).collect();
            let same =
                cut.iter().zip(&product(&(0..tokens))).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same, "{input} x {out}");
        }
    }
}

/// Of a document that begins and ends anywhere in the sample.
fn of_document<T: Copy>(
    what: &str,
    kernel: &impl Kernel<T>,
    [token, end]: [usize; 2],
    d: Dims,
    narrow: impl Fn(&[f32]) -> Vec<T>,
) where
    f32: From<T>,
{
    let qkv = narrow(&numbers((end - token) * d.width(), 1));
    let dy = narrow(&numbers((end - token) * d.out_width(), 2));
    same_bits(&format!("{what}, {token} to {end}, {d:?}"), d.s, |cut| {
        let wide = |parts: Vec<Vec<T>>| parts.concat().into_iter().map(f32::from).collect();
        let clipped = |slice: &Range<usize>| slice.start.max(token)..slice.end.min(end);
        let own = cut.iter().map(clipped).filter(|part| !part.is_empty());
        let own: Vec<_> = own.map(|part| part.start - token..part.end - token).collect();
        attention(kernel, &qkv, &dy, Dims { place: token, ..d }, &own).map(wide).to_vec()
    });
}

#[test]
fn documents_have_the_bits_that_they_have_in_the_whole_sample() {
    let dropout = DropoutRule::new([7, 1], 3, 0.3);
    for (token, end) in [(1, 1900), (300, 311), (700, 1280), (1100, 1899)] {
        let some = Some(Dropped { dropout, sample: 9, token });
        for (d, dropped) in SIZES.into_iter().zip([None, some, some]) {
            let at = [token, end];
            of_document("a document", &Recomputed(dropped), at, d, <[f32]>::to_vec);
            of_document("in a window", &Windowed(300, dropped), at, d, <[f32]>::to_vec);
        }
        for isa in halves::available().iter().filter(|isa| **isa != Isa::Scalar) {
            halves::force(Some(*isa));
            let kernel = Windowed(usize::MAX, some);
            of_document(&format!("bf16 by {isa:?}"), &kernel, [token, end], SIZES[0], narrow);
            halves::force(None);
        }
    }
}
