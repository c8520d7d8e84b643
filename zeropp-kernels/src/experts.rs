//! The MLPs of experts on the rows of their tokens: forward, gradients of the inputs (B) and of the
//! weights (W).
//!
//! Threads take whole experts, whose products are those of one thread; a token's sum over its
//! experts is in their order, in fp32, and rounded once. So no bit depends on the threads.

use std::mem::MaybeUninit;
use std::ops::Range;

use half::bf16;

use crate::activation::{sigmoid_slope, swiglu};
use crate::bf16::{self as halves, Isa, Mat, Packed};
use crate::gemm::{MatMut, MatRef, StoreMode, gemm};
use crate::routing::ChosenExperts;
use crate::threads;
use crate::threads::{Fresh, FreshPart, filled};
use crate::{GRAIN, Number, collect, simd};

/// Elements whose products the experts are made of.
pub trait Element: Number + 'static {
    /// A weight as the right factor of products.
    type Factor<'a>: Copy + Send + Sync;

    /// `c = Σ a·b` in fp32, for each a of `m` rows.
    fn set<const N: usize>(c: &mut [f32], m: usize, a: [&[Self]; N], b: [Self::Factor<'_>; N]);
    /// `c = a·b` for each c and b, rounded once.
    fn products<'c, const N: usize>(
        c: [&'c mut [MaybeUninit<Self>]; N],
        m: usize,
        a: &[Self],
        b: [Self::Factor<'_>; N],
    ) -> [&'c mut [Self]; N];
    /// `c += aᵀ·b` in fp32 for each c and b, for `a: [m, rows]`, `b: [m, columns]`, by the given
    /// path of bf16.
    fn add_turned<const N: usize>(
        c: [&mut [f32]; N],
        a: &[Self],
        b: [&[Self]; N],
        sizes: [usize; 3],
        isa: Isa,
    );
}

impl Element for f32 {
    type Factor<'a> = MatRef<'a>;

    fn set<const N: usize>(c: &mut [f32], m: usize, a: [&[f32]; N], b: [MatRef<'_>; N]) {
        let mut store = StoreMode::Set;
        for (a, b) in a.into_iter().zip(b) {
            let (k, n) = b.sizes();
            gemm(MatMut::new(c, m, n), store, 1.0, MatRef::new(a, m, k), b);
            store = StoreMode::Add;
        }
    }

    fn products<'c, const N: usize>(
        c: [&'c mut [MaybeUninit<f32>]; N],
        m: usize,
        a: &[f32],
        b: [MatRef<'_>; N],
    ) -> [&'c mut [f32]; N] {
        let mut b = b.into_iter();
        c.map(|c| {
            let c = filled(c, 0.0);
            Self::set(c, m, [a], [b.next().expect("as many")]);
            c
        })
    }

    fn add_turned<const N: usize>(
        c: [&mut [f32]; N],
        a: &[f32],
        b: [&[f32]; N],
        [m, rows, columns]: [usize; 3],
        _: Isa,
    ) {
        let a = MatRef::new(a, m, rows).t();
        for (c, b) in c.into_iter().zip(b) {
            let c = MatMut::new(c, rows, columns);
            gemm(c, StoreMode::Add, 1.0, a, MatRef::new(b, m, columns));
        }
    }
}

impl Element for bf16 {
    type Factor<'a> = &'a Packed;

    fn set<const N: usize>(c: &mut [f32], m: usize, a: [&[bf16]; N], b: [&Packed; N]) {
        let mut factors = b.into_iter();
        let of = |a| Mat::new(a, m, factors.next().expect("as many").sizes().0);
        halves::set_sum(c, a.map(of), b);
    }

    fn products<'c, const N: usize>(
        c: [&'c mut [MaybeUninit<bf16>]; N],
        m: usize,
        a: &[bf16],
        b: [&Packed; N],
    ) -> [&'c mut [bf16]; N] {
        halves::write_products(c, Mat::new(a, m, b[0].sizes().0), b)
    }

    fn add_turned<const N: usize>(
        c: [&mut [f32]; N],
        a: &[bf16],
        b: [&[bf16]; N],
        [m, rows, columns]: [usize; 3],
        isa: Isa,
    ) {
        let packed = b.map(|b| Packed::on(isa, Mat::new(b, m, columns)));
        halves::add_products(c, Mat::new(a, m, rows).t(), packed.each_ref());
    }
}

/// The results of a [`forward`].
pub struct Forward<E> {
    /// The output `[n, h]`; empty where it is not wanted.
    pub y: Vec<E>,
    /// x·gate of each row, `[n·k, f]`.
    pub gate: Vec<E>,
    /// x·up of each row.
    pub up: Vec<E>,
}

/// The experts that each token goes to, and by what weights their outputs are summed.
#[derive(Clone, Copy)]
pub struct WeightedChoice<'a> {
    /// The experts.
    pub choice: &'a ChosenExperts,
    /// Their weights, `[n, k]`.
    pub weights: &'a [f32],
}

/// y = Σ w·(silu(x·gate)·(x·up))·down over the experts of each token, for `x: [n, h]`, weights
/// w, and `gate` and `up` `[h, f]` and `down` `[f, h]` of each expert. Without `down`
/// there is no output.
///
/// # Panics
/// Panics if sizes do not match.
pub fn forward<'f, E: Element>(
    x: &[E],
    routed: WeightedChoice<'_>,
    gate: &[E::Factor<'f>],
    up: &[E::Factor<'f>],
    down: Option<&[E::Factor<'_>]>,
    [h, f]: [usize; 2],
) -> Forward<E> {
    let WeightedChoice { choice, weights: w } = routed;
    let rows = choice.tokens() * choice.chosen();
    assert_eq!((x.len(), w.len()), (choice.tokens() * h, rows), "sizes of the experts' inputs");
    let (mut gates, mut ups) = (Fresh::new(rows * f), Fresh::new(rows * f));
    let lengths = || choice.lengths(0..choice.experts(), f);
    let mut made = gates.split(lengths()).zip(ups.split(lengths()));
    let width = if down.is_some() { h } else { 0 };
    let y = summed(choice, Some(w), width, |experts, outs| {
        let made: Vec<_> = made.by_ref().take(experts.len()).collect();
        threads::each_with(
            experts.zip(made.into_iter().zip(outs)),
            Vec::new,
            |rows, (expert, ((mut g, mut u), out))| {
                let m = choice.rows_of(expert).len();
                if m == 0 {
                    return;
                }
                let x = rows_of(x, choice, expert, h, rows);
                let factors = [gate[expert], up[expert]];
                FreshPart::made([&mut g, &mut u], m * f, |made| E::products(made, m, x, factors));
                if let Some(down) = down {
                    E::set(out, m, [&swiglu(g.written(), u.written())], [down[expert]]);
                }
            },
        );
    });
    drop(made);
    Forward { y, gate: gates.done(), up: ups.done() }
}

/// The results of a [`backward`]: gradients, and what W multiplies.
pub struct Backward<E> {
    /// The gradient of x, `[n, h]`.
    pub dx: Vec<E>,
    /// That of the weights, `[n, k]`.
    pub dw: Vec<f32>,
    /// That of x·gate of each row, `[n·k, f]`.
    pub dgate: Vec<E>,
    /// That of x·up of each row.
    pub dup: Vec<E>,
    /// w·silu(x·gate)·(x·up) of each row.
    pub inner: Vec<E>,
}

/// The gradients of [`forward`] by `dy: [n, h]`, from what it has made of gate and up, and each
/// expert's transposed weights: `gate` and `up` `[f, h]`, `down` `[h, f]`.
///
/// # Panics
/// Panics if sizes do not match.
pub fn backward<'f, E: Element>(
    dy: &[E],
    routed: WeightedChoice<'_>,
    [gates, ups]: [&[E]; 2],
    gate: &[E::Factor<'f>],
    up: &[E::Factor<'f>],
    down: &[E::Factor<'_>],
    [h, f]: [usize; 2],
) -> Backward<E> {
    let WeightedChoice { choice, weights: w } = routed;
    let rows = choice.tokens() * choice.chosen();
    assert_eq!((dy.len(), gates.len()), (choice.tokens() * h, rows * f), "sizes of gradients");
    let [mut dgate, mut dup, mut inner] = [(); 3].map(|()| Fresh::new(rows * f));
    let mut dw = vec![0.0; rows];
    let lengths = |width| choice.lengths(0..choice.experts(), width);
    let made = dgate.split(lengths(f)).zip(dup.split(lengths(f))).zip(inner.split(lengths(f)));
    let mut made = made.zip(split(&mut dw, lengths(1)));
    let dx = summed(choice, None, h, |experts, outs| {
        let made: Vec<_> = made.by_ref().take(experts.len()).collect();
        let items = experts.zip(made.into_iter().zip(outs));
        let scratch = || (Vec::new(), Vec::new());
        threads::each_with(items, scratch, |(rows, dinner), (expert, (made, dx))| {
            let (((mut dgate, mut dup), mut inner), dw) = made;
            let range = choice.rows_of(expert);
            let m = range.len();
            if m == 0 {
                return;
            }
            let dy = rows_of(dy, choice, expert, h, rows);
            // The gradient of the inner values of a row with a weight of 1.
            let dinner = at_least(dinner, m * f);
            E::set(dinner, m, [dy], [down[expert]]);
            for (i, origin) in choice.origins(range.clone()).iter().enumerate() {
                let row = (range.start + i) * f;
                let given = [&gates[row..row + f], &ups[row..row + f]];
                let outs = [&mut dgate, &mut dup, &mut inner];
                dw[i] = row_backward(&dinner[i * f..][..f], w[*origin as usize], given, outs);
            }
            let both = [dgate.written(), dup.written()];
            E::set(dx, m, both, [gate[expert], up[expert]]);
        });
    });
    drop(made);
    let dw = choice.by_token(&dw);
    Backward { dx, dw, dgate: dgate.done(), dup: dup.done(), inner: inner.done() }
}

/// Lanes of a sum over a row.
const LANES: usize = 16;

/// The gradient of a row's weight w; writes those of its gate and up, and w times its inner values.
fn row_backward<E: Number>(
    dinner: &[f32],
    w: f32,
    given: [&[E]; 2],
    mut outs: [&mut FreshPart<'_, E>; 3],
) -> f32 {
    let mut sums = [0.0; LANES];
    simd(
        #[inline(always)]
        || {
            // Pieces of one length, so that they are vectors.
            let ((dinner, rest), given) = (dinner.as_chunks(), given.map(|x| x.as_chunks()));
            let [gates, ups] = given.map(|(pieces, _)| pieces);
            let mut own = sums;
            for (d, (gate, up)) in dinner.iter().zip(gates.iter().zip(ups)) {
                let [dgate, dup, inner] = piece_backward(&mut own, d, w, [gate, up]);
                // Not in a loop, which would take them through memory.
                outs[0].extend_from_slice(&dgate);
                outs[1].extend_from_slice(&dup);
                outs[2].extend_from_slice(&inner);
            }
            sums = own;
            if !rest.is_empty() {
                let [gate, up] = given.map(|(_, rest)| padded(rest, E::ZERO));
                let made = piece_backward(&mut sums, &padded(rest, 0.0), w, [&gate, &up]);
                for (out, made) in outs.iter_mut().zip(&made) {
                    out.extend_from_slice(&made[..rest.len()]);
                }
            }
        },
    );
    sums.iter().sum()
}

#[inline(always)]
fn padded<T: Copy>(x: &[T], zero: T) -> [T; LANES] {
    let mut piece = [zero; LANES];
    piece[..x.len()].copy_from_slice(x);
    piece
}

/// The same of [`LANES`] elements; adds what is of the weight to `sums`.
#[inline(always)]
fn piece_backward<E: Number>(
    sums: &mut [f32; LANES],
    dinner: &[f32; LANES],
    w: f32,
    [gate, up]: [&[E; LANES]; 2],
) -> [[E; LANES]; 3] {
    let [mut dgate, mut dup, mut inner] = [[E::ZERO; LANES]; 3];
    for i in 0..LANES {
        let (d, g, u) = (dinner[i], gate[i].up(), up[i].up());
        let (s, ds) = sigmoid_slope(g);
        let value = E::down(g * s * u).up();
        sums[i] += d * value;
        let weighted = w * d;
        dup[i] = E::down(weighted * (g * s));
        dgate[i] = E::down(weighted * u * (s + g * ds));
        inner[i] = E::down(w * value);
    }
    [dgate, dup, inner]
}

/// What W multiplies: of each row, or of its token.
#[derive(Clone, Copy)]
pub enum Rows<'a, E> {
    /// `[n·k, width]`, in the order of rows.
    OfRows(&'a [E]),
    /// `[n, width]`.
    OfTokens(&'a [E]),
}

/// Adds leftᵀ·right over the rows of each expert to its gradient, for each `dw: [E, a, b]` in fp32
/// and its right factor, `left` of width a and right ones of width b. An expert without rows adds
/// nothing.
///
/// # Panics
/// Panics if sizes do not match.
pub fn add_weight_gradients<E: Element, const N: usize>(
    dw: [&mut [f32]; N],
    left: Rows<'_, E>,
    right: [Rows<'_, E>; N],
    choice: &ChosenExperts,
    [a, b]: [usize; 2],
) {
    let sizes = dw.each_ref().map(|dw| dw.len());
    assert_eq!(sizes, [choice.experts() * a * b; N], "sizes of the experts' gradients");
    let isa = halves::in_use();
    let mut parts = dw.map(|dw| dw.chunks_mut(a * b));
    let parts = (0..choice.experts())
        .map(|expert| (expert, parts.each_mut().map(|dw| dw.next().expect("as was checked"))));
    let scratch = || (Vec::new(), [(); N].map(|()| Vec::new()));
    threads::each_with(parts, scratch, |(rows, more), (expert, dw)| {
        let m = choice.rows_of(expert).len();
        if m == 0 {
            return;
        }
        let mut more = more.iter_mut();
        let right =
            right.map(|all| of_expert(all, choice, expert, b, more.next().expect("as many")));
        E::add_turned(dw, of_expert(left, choice, expert, a, rows), right, [m, a, b], isa);
    });
}

/// An expert's rows of one factor of W.
fn of_expert<'a, E: Element>(
    rows: Rows<'a, E>,
    choice: &ChosenExperts,
    expert: usize,
    width: usize,
    scratch: &'a mut Vec<E>,
) -> &'a [E] {
    match rows {
        Rows::OfRows(all) => {
            let range = choice.rows_of(expert);
            &all[range.start * width..range.end * width]
        }
        Rows::OfTokens(all) => rows_of(all, choice, expert, width, scratch),
    }
}

/// The rows of `x: [n, width]` that an expert gets, in `rows`.
fn rows_of<'a, E: Copy>(
    x: &[E],
    choice: &ChosenExperts,
    expert: usize,
    width: usize,
    rows: &'a mut Vec<E>,
) -> &'a [E] {
    rows.clear();
    for origin in choice.origins(choice.rows_of(expert)) {
        let token = *origin as usize / choice.chosen();
        rows.extend_from_slice(&x[token * width..][..width]);
    }
    rows
}

/// The first `len` numbers of `scratch`, which hold anything.
fn at_least(scratch: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if scratch.len() < len {
        scratch.resize(len, 0.0);
    }
    &mut scratch[..len]
}

/// Bytes of rows that one thread makes before they are added: they stay in its cache. Several
/// threads make more, so that none waits for long.
const ROWS_BYTES: usize = 1 << 20;

/// The parts of `data` of these lengths.
fn split<T>(
    mut data: &mut [T],
    lengths: impl Iterator<Item = usize>,
) -> impl Iterator<Item = &mut [T]> {
    lengths.map(move |length| {
        let (part, rest) = std::mem::take(&mut data).split_at_mut(length);
        data = rest;
        part
    })
}

/// The sum of each token's rows, times their weights where there are any, `[n, width]`. `make`
/// writes the rows of some experts, for which it gets a part each, group after group.
fn summed<E: Number>(
    choice: &ChosenExperts,
    weights: Option<&[f32]>,
    width: usize,
    mut make: impl FnMut(Range<usize>, Vec<&mut [f32]>),
) -> Vec<E> {
    let n = choice.tokens();
    let bytes = ROWS_BYTES * if threads::count() == 1 { 1 } else { 4 * threads::count() };
    let rows = if width == 0 { n * choice.chosen() } else { bytes / (size_of::<f32>() * width) };
    let (mut made, mut sums) = (Vec::new(), crate::zeros(n * width));
    for group in choice.groups(rows) {
        let first = choice.rows_of(group.start).start;
        let len = (choice.rows_of(group.end - 1).end - first) * width;
        let made = at_least(&mut made, len);
        make(group.clone(), split(made, choice.lengths(group.clone(), width)).collect());
        add_rows(&mut sums, made, group, choice, weights);
    }
    collect(sums.len(), |range, out| {
        simd(
            #[inline(always)]
            || out.extend(sums[range.clone()].iter().map(|x| E::down(*x))),
        );
    })
}

/// Adds the rows of some experts, times their weights where there are any, to the sums of their
/// tokens: in the order of experts.
fn add_rows(
    sums: &mut [f32],
    made: &[f32],
    experts: Range<usize>,
    choice: &ChosenExperts,
    weights: Option<&[f32]>,
) {
    let (n, k) = (choice.tokens(), choice.chosen());
    let width = sums.len() / n.max(1);
    if width == 0 {
        return;
    }
    let tokens = threads::piece(n, 1, GRAIN.div_ceil(k * width));
    let first = choice.rows_of(experts.start).start;
    threads::each(sums.chunks_mut(tokens * width).enumerate(), |(i, sums)| {
        let token = i * tokens;
        let ends = [token * k, token * k + sums.len() / width * k];
        for expert in experts.clone() {
            let rows = choice.rows_of(expert);
            // Rows are in the order of their tokens.
            let origins = choice.origins(rows.clone());
            let [from, to] = ends.map(|end| origins.partition_point(|at| (*at as usize) < end));
            for (row, origin) in (rows.start + from..).zip(&origins[from..to]) {
                let w = weights.map_or(1.0, |weights| weights[*origin as usize]);
                let sum = &mut sums[(*origin as usize / k - token) * width..][..width];
                let row = &made[(row - first) * width..][..width];
                simd(
                    #[inline(always)]
                    || sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += w * x),
                );
            }
        }
    });
}

#[cfg(test)]
mod tests;
