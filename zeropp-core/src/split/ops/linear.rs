//! Linear maps of the last dimension.

use std::sync::Arc;

use burn::tensor::{Tensor, bf16 as Half};

use super::columns::column_sums;
use super::{Later, VectorSums, fast, halves, is_fast, link, products, rows, wants_gradient};
use crate::cpu_tensor;
use crate::kernels::bf16::{self, Mat, Packed};
use crate::kernels::gemm::{MatRef, add_by_blocks, affine, product};
use crate::kernels::reduce;
use crate::kernels::tokens::blocks;
use crate::split::weight::{PackedWeight, Side};
use crate::split::{Grads, OpCx, Saved, Weight};

/// Elements of a weight that fits into the second-level cache beside a block of rows.
const SMALL: usize = 1 << 19;

/// Rows of x that a product with a weight of so many elements takes at a time: few enough that they
/// stay in the second-level cache, unless packing W once a block would cost more than that saves.
pub(super) fn row_block(elements: usize) -> usize {
    if elements <= SMALL { 256 } else { 4096 }
}

/// A bf16 weight on the CPU, or its transpose if `transposed`, as products on one side read it.
pub(super) fn packed(w: &Weight<2>, transposed: bool, side: Side) -> Arc<PackedWeight> {
    w.packed(side, || {
        let ([r, c], values) = (w.shape(), w.get());
        let values = halves(&values).expect("as what it is multiplied with");
        let m = Mat::new(values.as_slice(), r, c);
        vec![Packed::new(if transposed != (side == Side::Backward) { m.t() } else { m })]
    })
}

/// x·W + b for `x: [.., in]`, `w: [in, out]`, `b: [out]`.
///
/// Keeps F→B: x. Keeps B→W: x and dY. Where W does not train: nothing, and of a bias that does
/// its gradient (4·out bytes).
pub fn linear<const D: usize>(
    x: Tensor<D>,
    w: &Weight<2>,
    b: Option<&Weight<1>>,
    cx: &OpCx,
) -> Tensor<D> {
    apply(x, Matrix { w: w.clone(), transposed: false }, b, cx)
}

/// x·Wᵀ for `x: [.., in]`, `w: [out, in]`: the head that shares its matrix with the embedding.
///
/// Keeps F→B: x. Keeps B→W: x and dY.
pub fn linear_transposed<const D: usize>(x: Tensor<D>, w: &Weight<2>, cx: &OpCx) -> Tensor<D> {
    apply(x, Matrix { w: w.clone(), transposed: true }, None, cx)
}

/// The factor on the right: W, or Wᵀ if `transposed`.
#[derive(Clone)]
pub(super) struct Matrix {
    pub(super) w: Weight<2>,
    pub(super) transposed: bool,
}

fn apply<const D: usize>(x: Tensor<D>, m: Matrix, b: Option<&Weight<1>>, cx: &OpCx) -> Tensor<D> {
    let xi = x.clone().inner();
    let out = if cx.output_wanted { m.forward(&xi, b) } else { m.stand_in(&xi) };
    let bias = b.filter(|b| b.trains()).cloned();
    let alone = bias.as_ref().filter(|_| !m.w.trains()).map(|bias| VectorSums::new([bias], cx));
    if !wants_gradient(&x, cx) {
        return out;
    }
    drop(xi);
    let saved = m.w.trains().then(|| cx.keep(&x));
    let later = Later::new(cx);
    link(x, out, cx, move |dy| {
        let dx = m.input_gradient(&dy);
        if let Some(saved) = saved {
            let (x, dy) = (later.stash(saved.take()), later.stash(dy));
            later.queue.push(move |grads| m.weight_gradient(bias.as_ref(), x, dy, grads));
        } else if let Some(alone) = alone {
            let gradient = bias_gradient(&dy, 0, alone.begun());
            alone.queue([gradient]);
        }
        dx
    })
}

/// The gradient of a bias that is added to the columns from `start` on: the sums of those of dY,
/// `[out]` in fp32, to which the kernels add from `sums` on.
pub(super) fn bias_gradient<const D: usize>(
    dy: &Tensor<D>,
    start: usize,
    mut sums: Vec<f32>,
) -> Tensor<1> {
    let (width, out) = (dy.dims()[D - 1], sums.len());
    if let Some(dy) = fast(dy) {
        reduce::add_columns(&mut sums, dy.as_slice(), width, start);
    } else if let Some(dy) = halves(dy) {
        bf16::rows::add_columns(&mut sums, dy.as_slice(), width, start);
    } else {
        let columns = rows(dy.clone()).narrow(1, start, out);
        return column_sums(columns);
    }
    cpu_tensor::from_vec(sums, [out])
}

impl Matrix {
    /// (in, out)
    fn sizes(&self) -> [usize; 2] {
        let [r, c] = self.w.shape();
        if self.transposed { [c, r] } else { [r, c] }
    }

    fn forward<const D: usize>(&self, x: &Tensor<D>, b: Option<&Weight<1>>) -> Tensor<D> {
        let [input, output] = self.sizes();
        let mut dims = x.dims();
        dims[D - 1] = output;
        let w = self.w.get();
        let bias = b.map(Weight::get);
        if let (Some(x), Some(w)) = (fast(x), fast(&w)) {
            let (x, w) = (x.as_slice(), w.as_slice());
            let x = MatRef::new(x, x.len() / input, input);
            let y = match bias.as_ref().map(|b| fast(b).expect("as the weight")) {
                Some(b) => affine(x, self.view(w), b.as_slice(), self.row_block()),
                None => product(1.0, x, self.view(w)),
            };
            return cpu_tensor::from_vec(y, dims);
        }
        if let Some(x) = halves(x) {
            let x = Mat::new(x.as_slice(), x.as_slice().len() / input, input);
            let w = packed(&self.w, self.transposed, Side::Forward);
            let bias = bias.map(|b| halves(&b).expect("as the weight"));
            let y = bf16::product(x, &w[0], bias.as_ref().map(|b| b.as_slice()));
            return cpu_tensor::from_halves(y, dims);
        }
        let w = if self.transposed { w.transpose() } else { w };
        let x = rows(x.clone());
        let y = match bias {
            Some(b) => products::affine(x, w, b),
            None => products::matmul(x, w),
        };
        y.reshape(dims)
    }

    /// In place of an output that is not wanted.
    fn stand_in<const D: usize>(&self, x: &Tensor<D>) -> Tensor<D> {
        let mut dims = x.dims();
        dims[D - 1] = self.sizes()[1];
        OpCx::stand_in(x, dims)
    }

    fn row_block(&self) -> usize {
        row_block(self.w.shape().iter().product())
    }

    /// The slice of W as an [in, out] matrix.
    fn view<'a>(&self, w: &'a [f32]) -> MatRef<'a> {
        let [r, c] = self.w.shape();
        let m = MatRef::new(w, r, c);
        if self.transposed { m.t() } else { m }
    }

    pub(super) fn input_gradient<const D: usize>(&self, dy: &Tensor<D>) -> Tensor<D> {
        let [input, output] = self.sizes();
        let mut dims = dy.dims();
        dims[D - 1] = input;
        let w = self.w.get();
        if let (Some(dy), Some(w)) = (fast(dy), fast(&w)) {
            let (dy, w) = (dy.as_slice(), w.as_slice());
            let dy = MatRef::new(dy, dy.len() / output, output);
            return cpu_tensor::from_vec(product(1.0, dy, self.view(w).t()), dims);
        }
        if let Some(dy) = halves(dy) {
            let (dy, w) = (dy.as_slice(), packed(&self.w, self.transposed, Side::Backward));
            let dx = bf16::product(Mat::new(dy, dy.len() / output, output), &w[0], None);
            return cpu_tensor::from_halves(dx, dims);
        }
        let w = if self.transposed { w } else { w.transpose() };
        products::matmul(rows(dy.clone()), w).reshape(dims)
    }

    /// W: dW += xᵀ·dY (or dYᵀ·x), db += column sums of dY; both in fp32, inside of the product and
    /// over micro-batches, whatever the type of its factors. On the CPU in blocks of tokens, the
    /// last first ([`tokens`](crate::kernels::tokens)).
    pub(super) fn weight_gradient<const D: usize>(
        &self,
        bias: Option<&Weight<1>>,
        x: Saved<D>,
        dy: Saved<D>,
        grads: &mut Grads,
    ) {
        let [input, output] = self.sizes();
        let (x, dy) = (x.take(), dy.take());
        let direct = is_fast(&x) && grads.host_mut(self.w.slot()).is_some();
        if let (true, Some(xs), Some(dys)) = (direct, fast(&x), fast(&dy)) {
            let (xs, dys) = (xs.as_slice(), dys.as_slice());
            let dw = grads.host_mut(self.w.slot()).expect("checked above");
            let n = xs.len() / input;
            let (x, dy) = (MatRef::new(xs, n, input), MatRef::new(dys, n, output));
            let (left, right) = if self.transposed { (dy, x) } else { (x, dy) };
            add_by_blocks(dw, left, right, blocks(n).rev());
            if let Some(db) = bias.and_then(|b| grads.host_mut(b.slot())) {
                reduce::add_rows(db, dys);
            }
            return;
        }
        if let (Some(xs), Some(dys)) = (halves(&x), halves(&dy)) {
            return self.half_weight_gradient(bias, xs.as_slice(), dys.as_slice(), grads);
        }
        let (x, dy) = (rows(x), rows(dy));
        let (left, right) = if self.transposed { (dy, x) } else { (x, dy) };
        // Of what is transposed, a head, there is no bias.
        let (w, bias) = (self.w.slot(), bias.map(Weight::slot));
        products::add_gradient(grads, w, bias, left.transpose(), right);
    }

    /// The same of bf16 factors: their products are added to fp32.
    fn half_weight_gradient(
        &self,
        bias: Option<&Weight<1>>,
        x: &[Half],
        dy: &[Half],
        grads: &mut Grads,
    ) {
        let [input, output] = self.sizes();
        if let Some(db) = bias.and_then(|b| grads.host_mut(b.slot())) {
            bf16::rows::add_rows(db, dy);
        }
        let n = x.len() / input;
        let (x, dy) = (Mat::new(x, n, input), Mat::new(dy, n, output));
        let (left, right) = if self.transposed { (dy, x) } else { (x, dy) };
        let dw = grads.host_mut(self.w.slot()).expect("gradients of CPU tensors are on the CPU");
        bf16::add_by_blocks(dw, left, right, blocks(n).rev());
    }
}
