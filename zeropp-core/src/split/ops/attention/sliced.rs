//! Attention of a slice of a sample, by the CPU's kernels: its queries see the keys and values of
//! the slices before it, too, and its backward adds to their gradients.

use burn::tensor::{Tensor, bf16};

use super::super::{fast, halves, is_tracked};
use crate::cpu_tensor::{self, CpuTensor};
use crate::kernels::attention::{
    Dims, Dropped, EarlierRows, EarlierSums, SliceForward, recomputed, windowed,
};
use crate::kernels::bf16::attention as half_kernels;
use crate::meter::MemoryKind;
use crate::split::{DropoutPlace, OpCx, Saved, SliceCx, custom_vjp};

/// The output for `qkv`, whose plain value is `plain`. Keeps F→B: qkv, and an fp32 number of each
/// query and head. Where the forward keeps nothing now, as it is done again, keys and values until
/// then.
///
/// # Panics
/// Panics off the CPU.
pub(super) fn attend(
    qkv: Tensor<3>,
    plain: Tensor<3>,
    kernel: SliceKernel,
    slice: &SliceCx,
    cx: &OpCx,
) -> Tensor<3> {
    let keys = slice.keys(kernel.columns());
    let (out, sums) = kernel.forward(&keys.earlier(), &plain);
    if !is_tracked(&qkv) {
        let meter = &cx.meter;
        keys.keep(|| Saved::new(kernel.keys_of(&plain), MemoryKind::Activation, meter));
        return out;
    }
    // Where it is done again all of the row is there from now on.
    keys.forget();
    let (plain, sums) = (cx.save(plain), cx.save(sums));
    keys.keep(|| plain.clone());
    custom_vjp(qkv, out, move |dy| {
        let (qkv, sums, earlier) = (plain.get(), sums.take(), keys.earlier());
        let dqkv = keys.with_sums(|own, others| {
            let handed = EarlierSums { own, earlier: others };
            kernel.backward(&earlier, [&qkv, &sums, &dy], handed)
        });
        keys.forget();
        drop(plain);
        dqkv
    })
}

/// The kernel of a slice.
#[derive(Clone, Copy)]
pub(super) struct SliceKernel {
    d: Dims,
    /// Where it is shorter than the sample.
    window: Option<usize>,
    dropped: Option<Dropped>,
}

impl SliceKernel {
    pub(super) fn new(
        d: Dims,
        window: Option<usize>,
        place: Option<DropoutPlace<'_>>,
        slice: &SliceCx,
        cx: &OpCx,
    ) -> Self {
        assert!(cx.masks.documents.is_none(), "documents are of whole samples");
        let dropped = place.zip(cx.masks.dropout.as_ref()).map(|(place, dropout)| Dropped {
            dropout: dropout.at(place),
            sample: dropout.sample,
            token: 0,
        });
        Self { d, window: window.filter(|window| *window < slice.sample_tokens()), dropped }
    }

    /// Elements of a token's keys and values.
    fn columns(&self) -> usize {
        2 * self.d.groups * self.d.d
    }

    fn forward(&self, earlier: &[Tensor<3>], qkv: &Tensor<3>) -> (Tensor<3>, Tensor<3>) {
        match halves(qkv) {
            Some(qkv) => self.forward_of(earlier, &qkv),
            None => self.forward_of(earlier, &fast(qkv).expect("slices are for the CPU's kernels")),
        }
    }

    fn forward_of<E: SliceElement>(
        &self,
        earlier: &[Tensor<3>],
        qkv: &CpuTensor<E>,
    ) -> (Tensor<3>, Tensor<3>) {
        let d = self.d;
        let (out, sums) = with_rows(earlier, |rows| E::forward(self, rows, qkv.as_slice()));
        (E::tensor(out, [d.b, d.s, d.out_width()]), cpu_tensor::from_vec(sums, [d.b, d.heads, d.s]))
    }

    /// The gradient of qkv, for qkv, the forward's sums and dY.
    fn backward(
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

    fn backward_of<E: SliceElement>(
        &self,
        earlier: &[Tensor<3>],
        [qkv, sums, dy]: [&Tensor<3>; 3],
        handed: EarlierSums<'_>,
    ) -> Tensor<3> {
        let sums = cpu_tensor::on_cpu(sums).expect("made by the forward");
        let [qkv, dy] = [qkv, dy].map(|t| E::on_cpu(t).expect("as in the forward"));
        let dqkv = with_rows(earlier, |earlier| {
            let forward = SliceForward { earlier, qkv: qkv.as_slice(), sums: sums.as_slice() };
            E::backward(self, forward, handed, dy.as_slice())
        });
        E::tensor(dqkv, [self.d.b, self.d.s, self.d.width()])
    }

    /// A copy of the keys and values in `qkv`, `[1, s, 2·groups·d]`.
    fn keys_of(&self, qkv: &Tensor<3>) -> Tensor<3> {
        match halves(qkv) {
            Some(qkv) => self.last_columns(&qkv),
            None => self.last_columns(&fast(qkv).expect("as in the forward")),
        }
    }

    fn last_columns<E: SliceElement>(&self, qkv: &CpuTensor<E>) -> Tensor<3> {
        let (width, columns) = (self.d.width(), self.columns());
        let rows = qkv.as_slice().chunks_exact(width).flat_map(|row| &row[width - columns..]);
        E::tensor(rows.copied().collect(), [self.d.b, self.d.s, columns])
    }
}

/// What `f` makes of the rows of earlier slices.
fn with_rows<E: SliceElement, T>(
    earlier: &[Tensor<3>],
    f: impl FnOnce(&[EarlierRows<'_, E>]) -> T,
) -> T {
    let held: Vec<_> = earlier.iter().map(|t| E::on_cpu(t).expect("as qkv")).collect();
    let rows = earlier.iter().zip(&held);
    let rows = rows.map(|(t, held)| EarlierRows::new(held.as_slice(), t.dims()[2]));
    f(&rows.collect::<Vec<_>>())
}

/// An element of the CPU's kernels.
trait SliceElement: burn::tensor::Element + bytemuck::Pod {
    fn on_cpu(t: &Tensor<3>) -> Option<CpuTensor<Self>>;
    fn tensor(elements: Vec<Self>, dims: [usize; 3]) -> Tensor<3>;
    fn forward(
        kernel: &SliceKernel,
        earlier: &[EarlierRows<'_, Self>],
        qkv: &[Self],
    ) -> (Vec<Self>, Vec<f32>);
    fn backward(
        kernel: &SliceKernel,
        forward: SliceForward<'_, Self>,
        handed: EarlierSums<'_>,
        dy: &[Self],
    ) -> Vec<Self>;
}

impl SliceElement for f32 {
    fn on_cpu(t: &Tensor<3>) -> Option<CpuTensor> {
        cpu_tensor::on_cpu(t)
    }

    fn tensor(elements: Vec<f32>, dims: [usize; 3]) -> Tensor<3> {
        cpu_tensor::from_vec(elements, dims)
    }

    fn forward(
        &SliceKernel { d, window, dropped }: &SliceKernel,
        earlier: &[EarlierRows<'_>],
        qkv: &[f32],
    ) -> (Vec<f32>, Vec<f32>) {
        match window {
            Some(window) => windowed::attention_after(earlier, qkv, d, window, dropped),
            None => recomputed::attention_after(earlier, qkv, d, dropped),
        }
    }

    fn backward(
        &SliceKernel { d, window, dropped }: &SliceKernel,
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

impl SliceElement for bf16 {
    fn on_cpu(t: &Tensor<3>) -> Option<CpuTensor<bf16>> {
        cpu_tensor::halves_on_cpu(t)
    }

    fn tensor(elements: Vec<bf16>, dims: [usize; 3]) -> Tensor<3> {
        cpu_tensor::from_halves(elements, dims)
    }

    fn forward(
        &SliceKernel { d, window, dropped }: &SliceKernel,
        earlier: &[EarlierRows<'_, bf16>],
        qkv: &[bf16],
    ) -> (Vec<bf16>, Vec<f32>) {
        let window = window.unwrap_or(usize::MAX);
        half_kernels::attention_after(earlier, qkv, d, window, dropped)
    }

    fn backward(
        &SliceKernel { d, window, dropped }: &SliceKernel,
        forward: SliceForward<'_, bf16>,
        handed: EarlierSums<'_>,
        dy: &[bf16],
    ) -> Vec<bf16> {
        let window = window.unwrap_or(usize::MAX);
        half_kernels::attention_backward_after(forward, handed, dy, d, window, dropped)
    }
}
