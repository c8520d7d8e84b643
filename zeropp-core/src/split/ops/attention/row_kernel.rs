//! The CPU's kernels of attention on rows of qkv: samples, documents, or what a slice has of them.
//!
//! Queries of some rows see no keys but those of the rows themselves and, of a sample in slices, of
//! rows before them. Each such part is a sample of its own to the kernels, so what it hides is
//! never computed. They keep one number a query, however long parts are: what is kept from F to B
//! depends on sizes alone.

use std::ops::Range;

use burn::tensor::{Tensor, bf16};

use super::super::{fast, halves};
use crate::cpu_tensor::{self, CpuTensor};
use crate::kernels::attention::{
    Dims, Dropped, EarlierRows, EarlierSums, SliceForward, recomputed, windowed,
};
use crate::kernels::bf16::attention as half_kernels;
use crate::split::Documents;

/// The kernel of a micro-batch.
pub(super) struct RowKernel {
    d: Dims,
    parts: Vec<Part>,
    /// Keys that a query sees, itself included.
    window: Option<usize>,
    /// Of the micro-batch's first sample.
    dropped: Option<Dropped>,
}

/// Rows whose queries see no others but `before` tokens of earlier slices.
#[derive(Clone)]
struct Part {
    rows: Range<usize>,
    before: usize,
    /// Which sample of the micro-batch the rows are of, and which token of it the first one is.
    sample: usize,
    token: usize,
}

impl RowKernel {
    /// Of samples that begin with token `first`: 0, or that of a slice.
    pub(super) fn new(
        d: Dims,
        first: usize,
        documents: Option<&Documents>,
        window: Option<usize>,
        dropped: Option<Dropped>,
    ) -> Self {
        let part = |rows: Range<usize>, before| {
            let (sample, token) = (rows.start / d.s, first + rows.start % d.s);
            Part { rows, before, sample, token }
        };
        let parts = match documents {
            Some(documents) => {
                assert_eq!(documents.rows(), d.b * d.s, "documents of another micro-batch");
                let of = |rows: Range<usize>| {
                    let before = documents.positions()[rows.start];
                    part(rows, before)
                };
                documents.ranges().map(of).collect()
            }
            None => (0..d.b).map(|b| part(b * d.s..(b + 1) * d.s, first)).collect(),
        };
        Self { d, parts, window, dropped }
    }

    /// Elements of a token's keys and values.
    pub(super) fn columns(&self) -> usize {
        2 * self.d.groups * self.d.d
    }

    /// The output `[b, s, heads·d]` and one fp32 number a query, `[b, heads, s]`, part after part;
    /// none where the kernels cannot work on `qkv`.
    pub(super) fn forward(
        &self,
        earlier: &[Tensor<3>],
        qkv: &Tensor<3>,
    ) -> Option<(Tensor<3>, Tensor<3>)> {
        match halves(qkv) {
            Some(qkv) => Some(self.forward_of(earlier, &qkv)),
            None => fast(qkv).map(|qkv| self.forward_of(earlier, &qkv)),
        }
    }

    fn forward_of<E: KernelElement>(
        &self,
        earlier: &[Tensor<3>],
        qkv: &CpuTensor<E>,
    ) -> (Tensor<3>, Tensor<3>) {
        let (d, mut out, mut sums) = (self.d, Vec::new(), Vec::new());
        for part in &self.parts {
            let of = self.of(part);
            let qkv = of_rows(qkv.as_slice(), &part.rows, d.width());
            let (y, logs) = with_rows(earlier, part.before, |rows| E::forward(&of, rows, qkv));
            append(&mut out, y);
            append(&mut sums, logs);
        }
        (E::tensor(out, [d.b, d.s, d.out_width()]), cpu_tensor::from_vec(sums, [d.b, d.heads, d.s]))
    }

    /// The gradient of qkv, for qkv, the forward's sums and dY.
    pub(super) fn backward(
        &self,
        earlier: &[Tensor<3>],
        tensors: [&Tensor<3>; 3],
        handed: EarlierSums<'_>,
    ) -> Tensor<3> {
        match halves(tensors[0]) {
            Some(_) => self.backward_of::<bf16>(earlier, tensors, handed),
            None => self.backward_of::<f32>(earlier, tensors, handed),
        }
    }

    fn backward_of<E: KernelElement>(
        &self,
        earlier: &[Tensor<3>],
        [qkv, sums, dy]: [&Tensor<3>; 3],
        mut handed: EarlierSums<'_>,
    ) -> Tensor<3> {
        let (d, mut dqkv) = (self.d, Vec::new());
        let sums = cpu_tensor::on_cpu(sums).expect("made by the forward");
        let [qkv, dy] = [qkv, dy].map(|t| E::on_cpu(t).expect("as in the forward"));
        for part in &self.parts {
            let (of, rows) = (self.of(part), &part.rows);
            let qkv = of_rows(qkv.as_slice(), rows, d.width());
            let dy = of_rows(dy.as_slice(), rows, d.out_width());
            let sums = of_rows(sums.as_slice(), rows, d.heads);
            let own = handed.own.map(|own| of_rows(own, rows, self.columns()));
            // The first part alone has rows before it.
            let others = std::mem::take(&mut handed.earlier);
            let handed =
                EarlierSums { own, earlier: last_rows(others, part.before, self.columns()) };
            append(
                &mut dqkv,
                with_rows(earlier, part.before, |earlier| {
                    E::backward(&of, SliceForward { earlier, qkv, sums }, handed, dy)
                }),
            );
        }
        E::tensor(dqkv, [d.b, d.s, d.width()])
    }

    /// The sizes of a part, and what is hidden and dropped of it.
    fn of(&self, part: &Part) -> PartKernel {
        let dropped = self.dropped.map(|all| Dropped {
            sample: all.sample + part.sample,
            token: part.token - part.before,
            ..all
        });
        let d = Dims { b: 1, s: part.rows.len(), place: part.token, ..self.d };
        PartKernel { d, window: self.window, dropped }
    }

    /// A copy of the keys and values in `qkv`, `[1, s, 2·groups·d]`.
    pub(super) fn keys_of(&self, qkv: &Tensor<3>) -> Tensor<3> {
        match halves(qkv) {
            Some(qkv) => self.last_columns(&qkv),
            None => self.last_columns(&fast(qkv).expect("as in the forward")),
        }
    }

    fn last_columns<E: KernelElement>(&self, qkv: &CpuTensor<E>) -> Tensor<3> {
        let (width, columns) = (self.d.width(), self.columns());
        let rows = qkv.as_slice().chunks_exact(width).flat_map(|row| &row[width - columns..]);
        E::tensor(rows.copied().collect(), [self.d.b, self.d.s, columns])
    }
}

fn of_rows<'a, T>(all: &'a [T], rows: &Range<usize>, width: usize) -> &'a [T] {
    &all[rows.start * width..rows.end * width]
}

fn append<T: Clone>(all: &mut Vec<T>, part: Vec<T>) {
    match all.is_empty() {
        true => *all = part,
        false => all.extend(part),
    }
}

/// What `f` makes of the last `tokens` rows of earlier slices.
fn with_rows<E: KernelElement, T>(
    earlier: &[Tensor<3>],
    tokens: usize,
    f: impl FnOnce(&[EarlierRows<'_, E>]) -> T,
) -> T {
    let mut skipped = earlier.iter().map(|t| t.dims()[1]).sum::<usize>() - tokens;
    let held: Vec<_> = earlier.iter().map(|t| E::on_cpu(t).expect("as qkv")).collect();
    let mut rows = Vec::new();
    for (t, held) in earlier.iter().zip(&held) {
        let [_, n, width] = t.dims();
        let from = skipped.min(n);
        skipped -= from;
        if from < n {
            rows.push(EarlierRows::new(&held.as_slice()[from * width..], width));
        }
    }
    f(&rows)
}

/// The last `tokens` rows, of `width` elements each.
fn last_rows(all: Vec<&mut [f32]>, tokens: usize, width: usize) -> Vec<&mut [f32]> {
    let mut skipped = all.iter().map(|rows| rows.len() / width).sum::<usize>() - tokens;
    let mut last = Vec::new();
    for rows in all {
        let from = skipped.min(rows.len() / width);
        skipped -= from;
        let rows = &mut rows[from * width..];
        if !rows.is_empty() {
            last.push(rows);
        }
    }
    last
}

/// The kernel of a part.
struct PartKernel {
    d: Dims,
    window: Option<usize>,
    dropped: Option<Dropped>,
}

/// An element of the CPU's kernels.
trait KernelElement: burn::tensor::Element + bytemuck::Pod {
    fn on_cpu(t: &Tensor<3>) -> Option<CpuTensor<Self>>;
    fn tensor(elements: Vec<Self>, dims: [usize; 3]) -> Tensor<3>;
    fn forward(
        kernel: &PartKernel,
        earlier: &[EarlierRows<'_, Self>],
        qkv: &[Self],
    ) -> (Vec<Self>, Vec<f32>);
    fn backward(
        kernel: &PartKernel,
        forward: SliceForward<'_, Self>,
        handed: EarlierSums<'_>,
        dy: &[Self],
    ) -> Vec<Self>;
}

impl KernelElement for f32 {
    fn on_cpu(t: &Tensor<3>) -> Option<CpuTensor> {
        cpu_tensor::on_cpu(t)
    }

    fn tensor(elements: Vec<f32>, dims: [usize; 3]) -> Tensor<3> {
        cpu_tensor::from_vec(elements, dims)
    }

    fn forward(
        &PartKernel { d, window, dropped }: &PartKernel,
        earlier: &[EarlierRows<'_>],
        qkv: &[f32],
    ) -> (Vec<f32>, Vec<f32>) {
        match window {
            Some(window) => windowed::attention_after(earlier, qkv, d, window, dropped),
            None => recomputed::attention_after(earlier, qkv, d, dropped),
        }
    }

    fn backward(
        &PartKernel { d, window, dropped }: &PartKernel,
        forward: SliceForward<'_>,
        handed: EarlierSums<'_>,
        dy: &[f32],
    ) -> Vec<f32> {
        match window {
            Some(window) => {
                windowed::attention_backward_after(forward, handed, dy, d, window, dropped)
            }
            None => recomputed::attention_backward_after(forward, handed, dy, d, dropped),
        }
    }
}

impl KernelElement for bf16 {
    fn on_cpu(t: &Tensor<3>) -> Option<CpuTensor<bf16>> {
        cpu_tensor::halves_on_cpu(t)
    }

    fn tensor(elements: Vec<bf16>, dims: [usize; 3]) -> Tensor<3> {
        cpu_tensor::from_halves(elements, dims)
    }

    fn forward(
        &PartKernel { d, window, dropped }: &PartKernel,
        earlier: &[EarlierRows<'_, bf16>],
        qkv: &[bf16],
    ) -> (Vec<bf16>, Vec<f32>) {
        let window = window.unwrap_or(usize::MAX);
        half_kernels::attention_after(earlier, qkv, d, window, dropped)
    }

    fn backward(
        &PartKernel { d, window, dropped }: &PartKernel,
        forward: SliceForward<'_, bf16>,
        handed: EarlierSums<'_>,
        dy: &[bf16],
    ) -> Vec<bf16> {
        let window = window.unwrap_or(usize::MAX);
        half_kernels::attention_backward_after(forward, handed, dy, d, window, dropped)
    }
}
