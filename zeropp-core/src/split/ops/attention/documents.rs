//! Attention inside of documents by the CPU's kernels: a document is rows that follow each other,
//! so each is a sample of its own to them, and what is hidden is never computed.
//!
//! All of them keep one number a query, however long they are: what is kept from F to B depends on
//! sizes alone, not on where documents begin.

use burn::tensor::Tensor;

use super::super::{fast, halves};
use crate::cpu_tensor;
use crate::kernels::attention::{Dims, recomputed};
use crate::kernels::bf16::attention as half_kernels;
use crate::split::Documents;

/// The output `[b, s, heads·d]` and one fp32 number a query, `[b, heads, s]`, document after
/// document; none where the kernels cannot work on `qkv`.
pub(super) fn forward(
    qkv: &Tensor<3>,
    d: Dims,
    documents: &Documents,
) -> Option<(Tensor<3>, Tensor<3>)> {
    assert_eq!(documents.rows(), d.b * d.s, "documents of another micro-batch");
    let (dims, width) = ([d.b, d.s, d.out_width()], d.width());
    let mut sums = Vec::with_capacity(d.b * d.heads * d.s);
    let out = if let Some(qkv) = halves(qkv) {
        let mut out = Vec::with_capacity(dims.iter().product());
        for rows in documents.ranges() {
            let of = &qkv.as_slice()[rows.start * width..rows.end * width];
            let (y, logs) = half_kernels::attention(of, one(d, rows.len()));
            out.extend(y);
            sums.extend(logs);
        }
        cpu_tensor::from_halves(out, dims)
    } else {
        let qkv = fast(qkv)?;
        let mut out = Vec::with_capacity(dims.iter().product());
        for rows in documents.ranges() {
            let of = &qkv.as_slice()[rows.start * width..rows.end * width];
            let (y, logs) = recomputed::attention(of, one(d, rows.len()));
            out.extend(y);
            sums.extend(logs);
        }
        cpu_tensor::from_vec(out, dims)
    };
    Some((out, cpu_tensor::from_vec(sums, [d.b, d.heads, d.s])))
}

/// The gradient of qkv for `dy: [b, s, heads·d]`; `sums` as from [`forward`].
pub(super) fn backward(
    dy: &Tensor<3>,
    qkv: &Tensor<3>,
    sums: &Tensor<3>,
    d: Dims,
    documents: &Documents,
) -> Tensor<3> {
    let (dims, width, out_width) = ([d.b, d.s, d.width()], d.width(), d.out_width());
    let sums = cpu_tensor::on_cpu(sums).expect("made by the forward");
    let sums_of = |from: usize, rows: usize| &sums.as_slice()[from * d.heads..][..rows * d.heads];
    if let Some(qkv) = halves(qkv) {
        let dy = halves(dy).expect("as qkv");
        let mut dqkv = Vec::with_capacity(dims.iter().product());
        for rows in documents.ranges() {
            let qkv = &qkv.as_slice()[rows.start * width..rows.end * width];
            let dy = &dy.as_slice()[rows.start * out_width..rows.end * out_width];
            let (sums, d) = (sums_of(rows.start, rows.len()), one(d, rows.len()));
            dqkv.extend(half_kernels::attention_backward(dy, qkv, sums, d));
        }
        return cpu_tensor::from_halves(dqkv, dims);
    }
    let (qkv, dy) = (fast(qkv).expect("as in the forward"), cpu_tensor::on_cpu(dy).expect("fp32"));
    let mut dqkv = Vec::with_capacity(dims.iter().product());
    for rows in documents.ranges() {
        let qkv = &qkv.as_slice()[rows.start * width..rows.end * width];
        let dy = &dy.as_slice()[rows.start * out_width..rows.end * out_width];
        let (sums, d) = (sums_of(rows.start, rows.len()), one(d, rows.len()));
        dqkv.extend(recomputed::attention_backward(dy, qkv, sums, d));
    }
    cpu_tensor::from_vec(dqkv, dims)
}

/// The sizes of one document.
fn one(d: Dims, s: usize) -> Dims {
    Dims { b: 1, s, ..d }
}
