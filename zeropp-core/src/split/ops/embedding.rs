//! Token and position embeddings.

use std::sync::Arc;

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, module};

use super::{Later, fast, halves, link, wants_gradient};
use crate::cpu_tensor;
use crate::kernels::bf16::rows as half_rows;
use crate::kernels::reduce;
use crate::kernels::tokens::blocks;
use crate::split::{Documents, Grads, OpCx, Weight, custom_source};

/// Rows `ids: [b, s]` of `w: [V, h]` as `[b, s, h]`.
///
/// Keeps F→B: the ids (8 bytes a token on the CPU, not metered). Keeps B→W: dY.
///
/// # Panics
/// Panics on the CPU if an id is not below V.
pub fn embedding(ids: Tensor<2, Int>, w: &Weight<2>, cx: &OpCx) -> Tensor<3> {
    let ids = ids.inner();
    let out = lookup(&ids, w);
    if !cx.tracked() {
        return out;
    }
    if !w.trains() {
        return custom_source(&cx.token, out, drop);
    }
    let (w, later) = (w.clone(), Later::new(cx));
    custom_source(&cx.token, out, move |dy: Tensor<3>| {
        let dy = later.stash(dy);
        later.queue.push(move |grads| add_token_rows(&w, ids, dy.take(), grads));
    })
}

fn lookup(ids: &Tensor<2, Int>, w: &Weight<2>) -> Tensor<3> {
    let [b, s] = ids.dims();
    let [vocabulary, h] = w.shape();
    let table = w.get();
    if let Some(table) = fast(&table) {
        let rows = token_rows(table.as_slice(), ids, [vocabulary, h]);
        return cpu_tensor::from_vec(rows, [b, s, h]);
    }
    if let Some(table) = halves(&table) {
        let rows = token_rows(table.as_slice(), ids, [vocabulary, h]);
        return cpu_tensor::from_halves(rows, [b, s, h]);
    }
    module::embedding(table, ids.clone())
}

/// The rows of `table: [V, h]` that the ids name, one after another.
fn token_rows<E: Copy>(table: &[E], ids: &Tensor<2, Int>, [vocabulary, h]: [usize; 2]) -> Vec<E> {
    let mut out = Vec::with_capacity(ids.shape().num_elements() * h);
    for id in cpu_tensor::indices(ids.clone()) {
        assert!(id < vocabulary, "token id {id}, but the embedding has {vocabulary} rows");
        out.extend_from_slice(&table[id * h..][..h]);
    }
    out
}

/// Adds row i of dY to row `ids[i]` of dW: on the CPU in blocks of tokens, the last first
/// ([`tokens`](crate::kernels::tokens)), in each in their order.
fn add_token_rows(w: &Weight<2>, ids: Tensor<2, Int>, dy: Tensor<3>, grads: &mut Grads) {
    let [vocabulary, h] = w.shape();
    if let (Some(dy), Some(dw)) = (fast(&dy), grads.host_mut(w.slot())) {
        for (id, dy) in by_block(&cpu_tensor::indices(ids), dy.as_slice(), h) {
            dw[id * h..][..h].iter_mut().zip(dy).for_each(|(dw, dy)| *dw += *dy);
        }
        return;
    }
    if let (Some(dy), Some(dw)) = (halves(&dy), grads.host_mut(w.slot())) {
        for (id, dy) in by_block(&cpu_tensor::indices(ids), dy.as_slice(), h) {
            half_rows::add_rows(&mut dw[id * h..][..h], dy);
        }
        return;
    }
    let n = ids.shape().num_elements();
    let (ids, dy) = (ids.reshape([n]), dy.reshape([n, h]));
    #[cfg(feature = "cube")]
    if super::on_gpu(&dy) {
        return grads.change(w.slot(), |place| {
            let part = place.part.clone();
            crate::cube::add_token_rows(place.or_zeros(), part, ids, dy)
        });
    }
    let zeros = Tensor::<2>::zeros([vocabulary, h], (&dy.device(), DType::F32));
    let dw = zeros.select_assign(0, ids, dy.cast(DType::F32), IndexingUpdateOp::Add);
    grads.add(w.slot(), dw);
}

/// Every id and its row of `dy`, in the order in which rows are added.
fn by_block<'a, E>(
    ids: &'a [usize],
    dy: &'a [E],
    h: usize,
) -> impl Iterator<Item = (usize, &'a [E])> {
    blocks(ids.len()).rev().flatten().map(move |row| (ids[row], &dy[row * h..(row + 1) * h]))
}

/// `x: [b, s, h]` plus the first s rows of `w: [T, h]`, the same for every sample; in documents
/// ([`Masks::documents`](crate::split::Masks)) the first rows again for each. Of a slice of a
/// sample ([`OpCx::slice`]) the rows of its tokens.
///
/// Keeps nothing F→B. Keeps B→W: s·h fp32 numbers, dY summed over the samples.
///
/// # Panics
/// Panics if a token's position is not below T.
pub fn position_embedding(x: Tensor<3>, w: &Weight<2>, cx: &OpCx) -> Tensor<3> {
    let [b, s, h] = x.dims();
    let [places, _] = w.shape();
    let first = cx.first_token();
    let end = first + s;
    assert!(end <= places, "sequence of {end} tokens, but only {places} position embeddings");
    let documents = cx.masks.documents.clone();
    let rows = match &documents {
        None => w.get().slice([first..end]).unsqueeze(),
        Some(documents) => w.get().select(0, documents.positions_on(&x.device())).reshape(x.dims()),
    };
    let out = x.clone().inner() + rows;
    if !wants_gradient(&x, cx) {
        return out;
    }
    if !w.trains() {
        return link(x, out, cx, |dy: Tensor<3>| dy);
    }
    let (w, later) = (w.clone(), Later::new(cx));
    link(x, out, cx, move |dy: Tensor<3>| {
        let on_kernels = fast(&dy).is_some() || halves(&dy).is_some();
        // Of one sample rows are added token by token, so that slices of it have the same sums.
        let by_token = documents.clone().filter(|_| b == 1 && on_kernels);
        let sums = match (&documents, fast(&dy)) {
            (Some(documents), _) if by_token.is_none() => sums_by_position(&dy, documents),
            (_, Some(dy)) => {
                let mut sums = vec![0.0; s * h];
                reduce::add_rows(&mut sums, dy.as_slice());
                cpu_tensor::from_vec(sums, [s * h])
            }
            (_, None) => dy.clone().cast(DType::F32).sum_dim(0).reshape([s * h]),
        };
        let (sums, first) = (later.stash(sums), if documents.is_some() { 0 } else { first });
        later.queue.push(move |grads| {
            let sums = sums.take();
            if let (Some(sums), Some(dw)) = (fast(&sums), grads.host_mut(w.slot())) {
                return add_position_rows(&mut dw[first * h..], sums.as_slice(), h, by_token);
            }
            let sums = match by_token {
                Some(documents) => sums_by_position(&sums.reshape([1, s, h]), &documents),
                None => sums,
            };
            grads.add(w.slot(), padded(sums.reshape([s, h]), first, places));
        });
        dy
    })
}

/// Adds rows of `h` elements to those behind each other, or to those of their tokens' positions.
fn add_position_rows(dw: &mut [f32], rows: &[f32], h: usize, by_token: Option<Arc<Documents>>) {
    let add = |dw: &mut [f32], row: &[f32]| dw.iter_mut().zip(row).for_each(|(dw, d)| *dw += *d);
    match by_token {
        None => add(dw, rows),
        Some(documents) => {
            for (position, row) in by_block(documents.positions(), rows, h) {
                add(&mut dw[position * h..][..h], row);
            }
        }
    }
}

/// The rows of `dy: [b, s, h]` summed by position in their document, `[s·h]`, in the order of
/// [`by_block`].
fn sums_by_position(dy: &Tensor<3>, documents: &Documents) -> Tensor<1> {
    let [b, s, h] = dy.dims();
    if let Some(dy) = fast(dy) {
        let mut sums = vec![0.0; s * h];
        for (position, dy) in by_block(documents.positions(), dy.as_slice(), h) {
            sums[position * h..][..h].iter_mut().zip(dy).for_each(|(sum, dy)| *sum += *dy);
        }
        return cpu_tensor::from_vec(sums, [s * h]);
    }
    let (rows, device) = (dy.clone().reshape([b * s, h]), dy.device());
    let positions = documents.positions_on(&device);
    #[cfg(feature = "cube")]
    if super::on_gpu(&rows) {
        let zeros = Tensor::<1>::zeros([s * h], (&device, DType::F32));
        return crate::cube::add_token_rows(zeros, 0..s * h, positions, rows);
    }
    let zeros = Tensor::<2>::zeros([s, h], (&device, DType::F32));
    let sums = zeros.select_assign(0, positions, rows.cast(DType::F32), IndexingUpdateOp::Add);
    sums.reshape([s * h])
}

/// `t: [s, h]` with `before` zero rows before it and others behind it, `[rows, h]`.
fn padded(t: Tensor<2>, before: usize, rows: usize) -> Tensor<2> {
    let [s, h] = t.dims();
    if s == rows {
        return t;
    }
    let zeros = |n: usize| Tensor::zeros([n, h], (&t.device(), t.dtype()));
    let parts = [zeros(before), t.clone(), zeros(rows - s - before)];
    Tensor::cat(parts.into_iter().filter(|part| part.dims()[0] > 0).collect(), 0)
}
