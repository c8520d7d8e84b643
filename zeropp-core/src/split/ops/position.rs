//! Rotary position embedding.

use std::ops::Range;
use std::sync::Arc;

#[cfg(feature = "cube")]
use burn::tensor::Int;
use burn::tensor::{DType, Device, Tensor, TensorData};
use parking_lot::Mutex;

use super::{halves, is_fast, is_tracked};
use crate::cpu_tensor;
#[cfg(feature = "cube")]
use crate::cube::{TurnedRows, turn_rows};
use crate::kernels::bf16;
use crate::kernels::rope::{self as kernels, ByPosition, Turned};
use crate::split::on_devices::OnDevices;
use crate::split::{Documents, Masks, custom_vjp};

/// The angles by which positions turn the pairs of a head, made once and shared by all blocks and
/// ranks of a model.
pub struct Rotation {
    inverse: Vec<f64>,
    /// A factor of the turned queries and keys.
    scale: f32,
    table: Mutex<Option<Arc<Angles>>>,
}

/// cos and sin of `[s, d/2]` angles.
pub(super) struct Angles {
    s: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Both on devices.
    there: OnDevices<[Tensor<2>; 2]>,
    /// The numbers of their rows, in order.
    #[cfg(feature = "cube")]
    counted: OnDevices<Tensor<1, Int>>,
}

impl Angles {
    /// cos and sin, `[s, d/2]` each, on `device`.
    fn on(&self, device: &Device) -> [Tensor<2>; 2] {
        let half = self.cos.len() / self.s;
        let there = |table: &[f32]| {
            let table = TensorData::new(table.to_vec(), [self.s, half]);
            Tensor::from_data(table, (device, DType::F32))
        };
        self.there.get(device, || [there(&self.cos), there(&self.sin)])
    }

    /// The numbers 0 to s − 1 on `device`.
    #[cfg(feature = "cube")]
    fn counted(&self, device: &Device) -> Tensor<1, Int> {
        self.counted.get(device, || {
            let numbers = (0..self.s as i32).collect();
            Tensor::from_data(TensorData::new::<i32, _>(numbers, [self.s]), device)
        })
    }
}

/// How the rows of a tensor turn: which heads, by which angles, and of which position each row is
/// where positions do not just count the tokens of a sample.
#[derive(Clone)]
pub(super) struct RotaryTurn {
    heads: Turned,
    angles: Arc<Angles>,
    /// The positions whose angles these are: those of a sample's tokens, or of a slice's.
    places: Range<usize>,
    documents: Option<Arc<Documents>>,
}

impl RotaryTurn {
    /// `heads` by the angles of the `s` positions from `first` on; in documents, if there are some,
    /// by those from 0 on.
    pub(super) fn new(
        heads: Turned,
        rotation: &Rotation,
        first: usize,
        s: usize,
        masks: &Masks,
    ) -> Self {
        let documents = masks.documents.clone();
        let places = if documents.is_some() { 0..first + s } else { first..first + s };
        Self { heads, angles: rotation.angles(first + s), places, documents }
    }

    fn positions(&self) -> Option<&[usize]> {
        self.documents.as_deref().map(Documents::positions)
    }

    fn by_position(&self) -> ByPosition<'_> {
        let half = self.heads.d / 2;
        let places = self.places.start * half..self.places.end * half;
        let Angles { cos, sin, .. } = &*self.angles;
        let (cos, sin) = (&cos[places.clone()], &sin[places]);
        ByPosition { cos, sin, positions: self.positions() }
    }

    /// cos and sin on `device`, with a row for each of `b·s` tokens, or for each of a sample's:
    /// `[b or 1, s, 1, d/2]`.
    fn on(&self, device: &Device) -> [Tensor<4>; 2] {
        let (s, half) = (self.places.len(), self.heads.d / 2);
        let places = self.documents.as_ref().map(|documents| documents.positions_on(device));
        self.angles.on(device).map(|table| {
            let table = table.slice([self.places.clone()]);
            let rows = match &places {
                None => table,
                Some(places) => table.select(0, places.clone()),
            };
            let samples = rows.dims()[0] / s;
            rows.reshape([samples, s, 1, half])
        })
    }

    /// [`turn`] on a GPU.
    #[cfg(feature = "cube")]
    fn turn_on_gpu(&self, x: Tensor<3>, back: bool) -> Tensor<3> {
        let device = x.device();
        let (positions, period) = match &self.documents {
            None => (self.angles.counted(&device), self.places.len()),
            Some(documents) => (documents.positions_on(&device), documents.rows()),
        };
        let first = self.places.start;
        let by = TurnedRows { heads: self.heads, first, period, back };
        turn_rows(x, self.angles.on(&device), positions, by)
    }
}

impl Rotation {
    /// Position p turns pair i, of d/2, by p · `inverse[i]`.
    pub fn new(inverse: Vec<f64>) -> Self {
        Self::scaled(inverse, 1.0)
    }

    /// As [`new`](Self::new), and what turns is multiplied by `scale`.
    pub fn scaled(inverse: Vec<f64>, scale: f64) -> Self {
        Self { inverse, scale: scale as f32, table: Mutex::default() }
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        2 * self.inverse.len()
    }

    /// The angles of the first `s` positions, or of more.
    fn angles(&self, s: usize) -> Arc<Angles> {
        let mut table = self.table.lock();
        if let Some(angles) = table.as_ref().filter(|angles| angles.s >= s) {
            return angles.clone();
        }
        let (mut cos, mut sin) = kernels::angles(s, &self.inverse);
        if self.scale != 1.0 {
            cos.iter_mut().chain(&mut sin).for_each(|x| *x *= self.scale);
        }
        let angles = Angles {
            s,
            cos,
            sin,
            there: OnDevices::default(),
            #[cfg(feature = "cube")]
            counted: OnDevices::default(),
        };
        table.insert(Arc::new(angles)).clone()
    }
}

/// Turns the first `heads` heads of `d` elements in the last axis of `x: [b, s, width]` by their
/// position's angles (rotate-half layout, as Hugging Face's LLaMA); the rest passes unchanged.
/// Position p turns pair i by p·base^(−2i/d).
///
/// Works in place where the caller holds no other handle to `x`. Keeps nothing. Knows no documents.
///
/// # Panics
/// Panics if `d` is odd or the heads do not fit into the width.
pub fn rope(x: Tensor<3>, heads: usize, d: usize, base: f64) -> Tensor<3> {
    let [_, s, width] = x.dims();
    assert!(d.is_multiple_of(2) && d > 0, "rotary embedding of heads of {d} elements");
    assert!(heads * d <= width, "{heads} heads of {d} elements do not fit into {width}");
    let rotation = Rotation::new(kernels::inverse_frequencies(d, base));
    let by = RotaryTurn::new(Turned { width, heads, d }, &rotation, 0, s, &Masks::default());
    if !is_tracked(&x) {
        return turn(x.inner(), &by, false);
    }
    let out = turn(x.clone().inner(), &by, false);
    custom_vjp(x, out, move |dy| turn(dy, &by, true))
}

/// Turns `x: [b, s, width]`, or (`back`) pulls a gradient back through that, which undoes it where
/// nothing is scaled.
pub(super) fn turn(x: Tensor<3>, by: &RotaryTurn, back: bool) -> Tensor<3> {
    let t = by.heads;
    if is_fast(&x) {
        return cpu_tensor::map_in_place(x, |x| kernels::rope(x, t, by.by_position(), back))
            .expect("checked by is_fast");
    }
    if halves(&x).is_some() {
        return cpu_tensor::map_halves_in_place(x, |x| {
            bf16::rows::rope(x, t, by.by_position(), back)
        })
        .expect("checked by halves");
    }
    #[cfg(feature = "cube")]
    if super::on_gpu(&x) {
        return by.turn_on_gpu(x, back);
    }
    let ([b, s, width], half, turned) = (x.dims(), t.d / 2, t.heads * t.d);
    let [cos, sin] = by.on(&x.device());
    let sin = if back { sin.neg() } else { sin };
    let heads = x.clone().narrow(2, 0, turned).cast(DType::F32).reshape([b, s, t.heads, t.d]);
    let (low, high) = (heads.clone().narrow(3, 0, half), heads.narrow(3, half, half));
    let new_low = low.clone() * cos.clone() - high.clone() * sin.clone();
    let new_high = high * cos + low * sin;
    let heads = Tensor::cat(vec![new_low, new_high], 3).reshape([b, s, turned]).cast(x.dtype());
    if turned == width {
        return heads;
    }
    Tensor::cat(vec![heads, x.narrow(2, turned, width - turned)], 2)
}
