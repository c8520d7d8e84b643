//! Several linear maps of one input into one tensor: q, k and v, turned by their positions.
//!
//! Where the CPU or a library computes, each product writes its own columns, so that nothing is
//! copied together or apart; elsewhere the weights are put side by side for one product.

use burn::tensor::{Tensor, bf16 as Half};

use super::columns::add_column_sums;
use super::linear::{bias_gradient, packed, row_block};
use super::position::{RotaryTurn, Rotation, turn};
use super::{Later, VectorSums, fast, halves, is_tracked, link, products, rows, wants_gradient};
use crate::cpu_tensor;
use crate::kernels::bf16::{self, Mat};
use crate::kernels::gemm::{MatMut, MatRef, StoreMode, add_by_blocks, gemm};
use crate::kernels::reduce;
use crate::kernels::rope::Turned;
use crate::kernels::tokens::blocks;
use crate::split::weight::Side;
use crate::split::{Grads, OpCx, Saved, Weight, custom_vjp};

/// A linear map: x·W + b for `w: [in, out]` and, where there is one, `b: [out]`.
#[derive(Clone)]
pub struct Projection {
    /// W.
    pub weight: Weight<2>,
    /// b.
    pub bias: Option<Weight<1>>,
}

/// Which heads turn: the first `heads` of the output, by `rotation`.
#[derive(Clone, Copy)]
pub struct Turns<'a> {
    /// The angles, and with them the elements of a head.
    pub rotation: &'a Rotation,
    /// Heads that turn.
    pub heads: usize,
    /// Position of the first token.
    pub first: usize,
}

impl Turns<'_> {
    /// The turn of tensors `[b, s, width]`.
    ///
    /// # Panics
    /// Panics if the heads do not fit into the width.
    pub(super) fn of(&self, [_, s, width]: [usize; 3], cx: &OpCx) -> RotaryTurn {
        let d = self.rotation.head_dim();
        assert!(self.heads * d <= width, "{} heads of {d} do not fit into {width}", self.heads);
        RotaryTurn::new(
            Turned { width, heads: self.heads, d },
            self.rotation,
            self.first,
            s,
            &cx.masks,
        )
    }
}

/// The outputs of `maps` side by side, `[b, s, Σ out]` for `x: [b, s, in]`, the first heads of
/// which are turned by their positions where `turns` says so, as by [`rope`](super::rope).
///
/// Keeps F→B: x. Keeps B→W: x and dY. Where none of the weights trains: nothing, and of biases that
/// do their gradients (fp32).
pub fn projections(
    x: Tensor<3>,
    maps: &[Projection],
    turns: Option<Turns<'_>>,
    cx: &OpCx,
) -> Tensor<3> {
    let maps = ProjectionMaps::new(maps);
    let xi = x.clone().inner();
    let [b, s, _] = xi.dims();
    let turned = turns.map(|turns| turns.of([b, s, maps.width], cx));
    let mut out = maps.forward(&xi);
    if let Some(by) = &turned {
        out = turn(out, by, false);
    }
    let trains = maps.maps.iter().any(|(_, map)| map.weight.trains());
    let biases = if trains { Vec::new() } else { maps.biases(cx) };
    if !wants_gradient(&x, cx) {
        return out;
    }
    drop(xi);
    let (saved, later) = (trains.then(|| cx.keep(&x)), Later::new(cx));
    link(x, out, cx, move |mut dy| {
        if let Some(by) = &turned {
            dy = turn(dy, by, true);
        }
        let dx = maps.input_gradient(&dy);
        match saved {
            Some(saved) => {
                let (x, dy) = (later.stash(saved.take()), later.stash(dy));
                later.queue.push(move |grads| maps.weight_gradient(x, dy, grads));
            }
            None => {
                for (start, sums) in biases {
                    let gradient = bias_gradient(&dy, start, sums.begun());
                    sums.queue([gradient]);
                }
            }
        }
        dx
    })
}

/// Turns the heads of `x: [b, s, width]` that `turns` names by their positions, as
/// [`projections`] does with what it makes. Keeps nothing.
///
/// # Panics
/// Panics if the heads do not fit into the width.
pub(crate) fn turned(x: Tensor<3>, turns: Turns<'_>, cx: &OpCx) -> Tensor<3> {
    let by = turns.of(x.dims(), cx);
    if !is_tracked(&x) {
        return turn(x.inner(), &by, false);
    }
    let out = turn(x.clone().inner(), &by, false);
    custom_vjp(x, out, move |dy| turn(dy, &by, true))
}

/// The maps and where the columns of each begin.
struct ProjectionMaps {
    maps: Vec<(usize, Projection)>,
    input: usize,
    width: usize,
}

impl ProjectionMaps {
    fn new(maps: &[Projection]) -> Self {
        let input = maps[0].weight.shape()[0];
        let mut width = 0;
        let place = |map: &Projection| {
            let [rows, columns] = map.weight.shape();
            assert_eq!(rows, input, "maps of one input");
            width += columns;
            (width - columns, map.clone())
        };
        let maps = maps.iter().map(place).collect();
        Self { maps, input, width }
    }

    /// Rows of x that a product takes at a time, as for one linear map.
    fn row_block(&self) -> usize {
        row_block(self.input * self.width)
    }

    fn forward(&self, x: &Tensor<3>) -> Tensor<3> {
        let [b, s, input] = x.dims();
        if let Some(x) = halves(x) {
            let y = self.forward_of_halves(x.as_slice());
            return cpu_tensor::from_halves(y, [b, s, self.width]);
        }
        let Some(xs) = fast(x) else { return self.forward_by_tensors(x) };
        let (x, width) = (xs.as_slice(), self.width);
        let mut y = vec![0.0; b * s * width];
        for (start, map) in &self.maps {
            let out = map.weight.shape()[1];
            let (w, bias) = (map.weight.get(), map.bias.as_ref().map(Weight::get));
            let w = fast(&w).expect("as x");
            let bias = bias.as_ref().map(|b| fast(b).expect("as x"));
            let store = if bias.is_some() { StoreMode::Add } else { StoreMode::Set };
            let block = self.row_block();
            for (x, y) in x.chunks(block * input).zip(y.chunks_mut(block * width)) {
                let n = x.len() / input;
                if let Some(bias) = &bias {
                    let rows = y.chunks_exact_mut(width);
                    rows.for_each(|y| y[*start..start + out].copy_from_slice(bias.as_slice()));
                }
                let y = MatMut::strided(&mut y[*start..], n, out, width);
                let w = MatRef::new(w.as_slice(), input, out);
                gemm(y, store, 1.0, MatRef::new(x, n, input), w);
            }
        }
        cpu_tensor::from_vec(y, [b, s, width])
    }

    fn forward_of_halves(&self, x: &[Half]) -> Vec<Half> {
        let x = Mat::new(x, x.len() / self.input, self.input);
        let mut y = vec![Half::ZERO; x.rows() * self.width];
        for (start, map) in &self.maps {
            let bias = map.bias.as_ref().map(Weight::get);
            let bias = bias.as_ref().map(|b| halves(b).expect("as x"));
            let w = packed(&map.weight, false, Side::Forward);
            let y = &mut y[*start..];
            bf16::product_into(y, self.width, x, &w[0], bias.as_ref().map(|b| b.as_slice()));
        }
        y
    }

    fn forward_by_tensors(&self, x: &Tensor<3>) -> Tensor<3> {
        let [b, s, _] = x.dims();
        let (x, dims) = (rows(x.clone()), [b, s, self.width]);
        if self.maps.iter().all(|(_, map)| map.bias.is_none()) {
            return products::products_side_by_side(x, self.weights()).reshape(dims);
        }
        let bias = |(_, map): &(usize, Projection)| match &map.bias {
            Some(bias) => bias.get(),
            None => Tensor::zeros([map.weight.shape()[1]], (&x.device(), x.dtype())),
        };
        let bias = Tensor::cat(self.maps.iter().map(bias).collect(), 0);
        products::affine(x, Tensor::cat(self.weights(), 1), bias).reshape(dims)
    }

    fn weights(&self) -> Vec<Tensor<2>> {
        self.maps.iter().map(|(_, map)| map.weight.get()).collect()
    }

    fn input_gradient(&self, dy: &Tensor<3>) -> Tensor<3> {
        let [b, s, width] = dy.dims();
        let dims = [b, s, self.input];
        if let Some(dy) = halves(dy) {
            let (dy, n) = (dy.as_slice(), b * s);
            let mut dx = vec![0.0; n * self.input];
            for (start, map) in &self.maps {
                let dy = Mat::strided(&dy[*start..], n, map.weight.shape()[1], width);
                let w = packed(&map.weight, false, Side::Backward);
                bf16::add_product(&mut dx, self.input, dy, &w[0]);
            }
            return cpu_tensor::from_halves(bf16::convert::narrow(&dx), dims);
        }
        let Some(dys) = fast(dy) else {
            return products::sum_of_products(rows(dy.clone()), self.weights()).reshape(dims);
        };
        let (dy, n) = (dys.as_slice(), b * s);
        let mut dx = vec![0.0; n * self.input];
        for (start, map) in &self.maps {
            let [input, out] = map.weight.shape();
            let w = map.weight.get();
            let w = fast(&w).expect("as dy");
            let store = if *start == 0 { StoreMode::Set } else { StoreMode::Add };
            let dy = MatRef::strided(&dy[*start..], n, out, width);
            let w = MatRef::new(w.as_slice(), input, out);
            gemm(MatMut::new(&mut dx, n, input), store, 1.0, dy, w.t());
        }
        cpu_tensor::from_vec(dx, dims)
    }

    /// What becomes the gradients of the biases that train, where no weight does, and the first
    /// column of each.
    fn biases(&self, cx: &OpCx) -> Vec<(usize, VectorSums<1>)> {
        let trained = |(start, map): &(usize, Projection)| {
            let bias = map.bias.as_ref().filter(|bias| bias.trains())?;
            Some((*start, VectorSums::new([bias], cx)))
        };
        self.maps.iter().filter_map(trained).collect()
    }

    /// W: dW += xᵀ·dY, db += column sums of dY, map by map; in fp32 as for one linear map.
    fn weight_gradient(&self, x: Saved<3>, dy: Saved<3>, grads: &mut Grads) {
        let (x, dy) = (x.take(), dy.take());
        if let (Some(xs), Some(dys)) = (fast(&x), fast(&dy)) {
            let (x, dy) = (xs.as_slice(), dys.as_slice());
            return self
                .maps
                .iter()
                .for_each(|(start, map)| self.add_on_host(*start, map, x, dy, grads));
        }
        if let (Some(xs), Some(dys)) = (halves(&x), halves(&dy)) {
            let (x, dy) = (xs.as_slice(), dys.as_slice());
            return self
                .maps
                .iter()
                .for_each(|(start, map)| self.add_halves(*start, map, x, dy, grads));
        }
        let (x, dy) = (rows(x), rows(dy));
        let own = |start: &usize, map: &Projection| {
            products::columns_of(&dy, *start, map.weight.shape()[1])
        };
        for (start, map) in &self.maps {
            let bias = map.bias.as_ref().filter(|bias| bias.trains()).map(Weight::slot);
            if map.weight.trains() {
                let (x, dy) = (x.clone().transpose(), own(start, map));
                products::add_gradient(grads, map.weight.slot(), bias, x, dy);
            } else if let Some(bias) = bias {
                add_column_sums(grads, bias, own(start, map));
            }
        }
    }

    fn add_on_host(
        &self,
        start: usize,
        map: &Projection,
        x: &[f32],
        dy: &[f32],
        grads: &mut Grads,
    ) {
        let ([input, out], width) = (map.weight.shape(), self.width);
        if let Some(slot) = map.weight.trains().then(|| map.weight.slot()) {
            let dw = grads.host_mut(slot).expect("gradients of CPU tensors are on the CPU");
            let n = x.len() / input;
            let x = MatRef::new(x, n, input);
            let dy = MatRef::strided(&dy[start..], n, out, width);
            add_by_blocks(dw, x, dy, blocks(n).rev());
        }
        let bias = map.bias.as_ref().filter(|bias| bias.trains());
        if let Some(db) = bias.and_then(|bias| grads.host_mut(bias.slot())) {
            reduce::add_columns(db, dy, width, start);
        }
    }

    /// The same of bf16 factors: their products are added to fp32.
    fn add_halves(
        &self,
        start: usize,
        map: &Projection,
        x: &[Half],
        dy: &[Half],
        grads: &mut Grads,
    ) {
        let [input, out] = map.weight.shape();
        let n = x.len() / input;
        if let Some(slot) = map.weight.trains().then(|| map.weight.slot()) {
            let x = Mat::new(x, n, input);
            let dy = Mat::strided(&dy[start..], n, out, self.width);
            let dw = grads.host_mut(slot).expect("gradients of CPU tensors are on the CPU");
            bf16::add_by_blocks(dw, x, dy, blocks(n).rev());
        }
        let bias = map.bias.as_ref().filter(|bias| bias.trains());
        if let Some(db) = bias.and_then(|bias| grads.host_mut(bias.slot())) {
            bf16::rows::add_columns(db, dy, self.width, start);
        }
    }
}
