//! Rotary position embedding.

use std::sync::Arc;

use burn::tensor::{DType, Tensor};
use parking_lot::Mutex;

use super::{halves, is_fast, is_tracked};
use crate::cpu_tensor;
use crate::kernels::bf16;
use crate::kernels::rope::{self as kernels, ByPosition, Turned};
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
}

/// How the rows of a tensor turn: which heads, by which angles, and of which position each row is
/// where positions do not just count the tokens of a sample.
#[derive(Clone)]
pub(super) struct Turn {
    heads: Turned,
    angles: Arc<Angles>,
    documents: Option<Arc<Documents>>,
}

impl Turn {
    /// `heads` by `angles`, in documents if there are some.
    pub(super) fn new(heads: Turned, angles: Arc<Angles>, masks: &Masks) -> Self {
        Self { heads, angles, documents: masks.documents.clone() }
    }

    fn positions(&self) -> Option<&[usize]> {
        self.documents.as_deref().map(Documents::positions)
    }

    fn by_position(&self) -> ByPosition<'_> {
        let Angles { cos, sin, .. } = &*self.angles;
        ByPosition { cos, sin, positions: self.positions() }
    }

    /// A table of the angles, with a row for each of `b·s` tokens, or for each of a sample's.
    fn rows(&self, table: &[f32]) -> Vec<f32> {
        let half = self.heads.d / 2;
        let Some(positions) = self.positions() else { return table.to_vec() };
        positions.iter().flat_map(|p| &table[p * half..(p + 1) * half]).copied().collect()
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

    /// The angles of the `s` positions from `first` on.
    pub(super) fn angles_from(&self, first: usize, s: usize) -> Arc<Angles> {
        let all = self.angles(first + s);
        if first == 0 {
            return all;
        }
        let own = |table: &[f32]| table[first * self.inverse.len()..].to_vec();
        Arc::new(Angles { s, cos: own(&all.cos), sin: own(&all.sin) })
    }

    /// The angles of the first `s` positions.
    pub(super) fn angles(&self, s: usize) -> Arc<Angles> {
        let mut table = self.table.lock();
        if let Some(angles) = table.as_ref().filter(|angles| angles.s == s) {
            return angles.clone();
        }
        let (mut cos, mut sin) = kernels::angles(s, &self.inverse);
        if self.scale != 1.0 {
            cos.iter_mut().chain(&mut sin).for_each(|x| *x *= self.scale);
        }
        table.insert(Arc::new(Angles { s, cos, sin })).clone()
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
    let angles = Rotation::new(kernels::inverse_frequencies(d, base)).angles(s);
    let by = Turn::new(Turned { width, heads, d }, angles, &Masks::default());
    if !is_tracked(&x) {
        return turn(x.inner(), &by, false);
    }
    let out = turn(x.clone().inner(), &by, false);
    custom_vjp(x, out, move |dy| turn(dy, &by, true))
}

/// Turns `x: [b, s, width]`, or (`back`) pulls a gradient back through that, which undoes it where
/// nothing is scaled.
pub(super) fn turn(x: Tensor<3>, by: &Turn, back: bool) -> Tensor<3> {
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
    let ([b, s, width], half, turned) = (x.dims(), t.d / 2, t.heads * t.d);
    let device = x.device();
    let angles = |table: &[f32]| {
        let v = by.rows(table);
        let samples = v.len() / (s * half);
        let v = cpu_tensor::from_vec(v, [samples, s, 1, half]);
        Tensor::<4>::from_data(v.into_data(), (&device, DType::F32))
    };
    let (cos, sin) = (angles(&by.angles.cos), angles(&by.angles.sin));
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
