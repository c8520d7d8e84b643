//! Muon on shards: the matrices of blocks, of experts each, move along their mean gradient made
//! orthogonal, all else goes by AdamW (<https://kellerjordan.github.io/posts/muon/>,
//! `torch.optim.Muon`).
//!
//! A step of a matrix is scaled by 0.2·√(its larger side), which gives it the size of AdamW's
//! (Liu et al. 2025, `match_rms_adamw`), so that one learning rate and one weight decay serve both.

use burn::tensor::Tensor;
use zeropp_core::kernels::muon::{self, COEFFICIENTS, EPS, STEPS};
use zeropp_core::split::ops::products::matmul;

use crate::adamw::AdamW;
use crate::rule::{
    DeviceElements, Elements, Parameter, Role, StateTensor, StepScale, UpdateRule, WholeParameter,
    WholeUpdate,
};

/// The root mean square of AdamW's steps, about.
const ADAMW_RMS: f64 = 0.2;

/// Hyper-parameters of one run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Muon {
    /// The share of the mean gradient that stays with each update.
    pub momentum: f64,
    /// Whether the direction is what the mean would be if the gradient came again.
    pub nesterov: bool,
    /// The rule of all parameters but the matrices of blocks; its weight decay is theirs, too.
    pub adamw: AdamW,
}

impl Muon {
    /// The factor on a parameter and the size of the step along a direction.
    fn scalars(&self, of: &Parameter<'_>, step: &StepScale) -> (f32, f32) {
        let decay = if of.decay { step.lr * self.adamw.weight_decay } else { 0.0 };
        let larger = self.matrices(of).map_or(1, |(_, [rows, columns])| rows.max(columns));
        ((1.0 - decay) as f32, (step.lr * ADAMW_RMS * (larger as f64).sqrt()) as f32)
    }

    /// How many matrices a parameter is, and their rows and columns: one, or those of experts.
    fn matrices(&self, of: &Parameter<'_>) -> Option<(usize, [usize; 2])> {
        let (count, shape) = match *of.shape {
            [rows, columns] => (1, [rows, columns]),
            [count, rows, columns] => (count, [rows, columns]),
            _ => return None,
        };
        (of.role == Role::Hidden).then_some((count, shape))
    }
}

impl UpdateRule for Muon {
    fn name(&self) -> &str {
        "muon"
    }

    fn state(&self, of: &Parameter<'_>) -> Vec<StateTensor> {
        match self.whole(of) {
            Some(_) => vec![StateTensor::per_element("momentum_buffer")],
            None => self.adamw.state(of),
        }
    }

    fn whole(&self, of: &Parameter<'_>) -> Option<WholeUpdate> {
        self.matrices(of).map(|(count, shape)| {
            let one = muon::orthogonal_elements(shape);
            // One after the other, and all results.
            let all = if count == 1 { 0 } else { count * shape[0] * shape[1] };
            let flops = count as u64 * muon::orthogonal_flops(shape);
            WholeUpdate { elements: one + all, flops, rms: false }
        })
    }

    fn update(&self, of: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        self.adamw.update(of, elements, step);
    }

    fn direction(
        &self,
        _: &Parameter<'_>,
        elements: Elements<'_, '_>,
        out: &mut [f32],
        step: &StepScale,
    ) {
        let [m] = elements.state else { unreachable!("one moment is kept of a matrix") };
        let gradient = elements.gradient;
        muon::direction(out, m, gradient, step.gradient, self.momentum, self.nesterov);
    }

    fn transform(
        &self,
        of: &Parameter<'_>,
        whole: WholeParameter<'_, '_>,
        _: &StepScale,
    ) -> Vec<f32> {
        let Some((count, shape)) = self.matrices(of) else { unreachable!("of matrices alone") };
        if count == 1 {
            return muon::orthogonal(whole.direction, shape);
        }
        let size = shape[0] * shape[1];
        let mut all = vec![0.0; whole.direction.len()];
        let matrices = all.chunks_mut(size).zip(whole.direction.chunks(size)).enumerate();
        // Those of which this rank has nothing are made orthogonal elsewhere.
        for (i, (out, direction)) in matrices {
            let here = i * size..(i + 1) * size;
            if here.start < whole.part.end && whole.part.start < here.end {
                out.copy_from_slice(&muon::orthogonal(direction, shape));
            }
        }
        all
    }

    fn apply(
        &self,
        of: &Parameter<'_>,
        parameter: &mut [f32],
        direction: &[f32],
        step: &StepScale,
    ) {
        let (keep, size) = self.scalars(of, step);
        muon::apply(parameter, direction, keep, size);
    }

    fn update_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        self.adamw.update_on_device(elements, step)
    }

    fn direction_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let towards = (1.0 - self.momentum) as f32;
        let m = elements.state.into_iter().next().expect("one moment is kept of a matrix");
        let g = elements.gradient * step.gradient;
        let m = m.clone() + (g.clone() - m) * towards;
        let direction = match self.nesterov {
            true => g.clone() + (m.clone() - g) * self.momentum as f32,
            false => m.clone(),
        };
        (direction, vec![m])
    }

    fn transform_on_device(
        &self,
        of: &Parameter<'_>,
        direction: Tensor<1>,
        state: Vec<Tensor<1>>,
        _: f64,
        _: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let Some((count, shape)) = self.matrices(of) else { unreachable!("of matrices alone") };
        let size = shape[0] * shape[1];
        let of = |i: usize| {
            let matrix = direction.clone().slice([i * size..(i + 1) * size]).reshape(shape);
            orthogonal_on_device(matrix).reshape([size])
        };
        (Tensor::cat((0..count).map(of).collect(), 0), state)
    }

    fn apply_on_device(
        &self,
        of: &Parameter<'_>,
        parameter: Tensor<1>,
        direction: Tensor<1>,
        step: &StepScale,
    ) -> Tensor<1> {
        let (keep, size) = self.scalars(of, step);
        parameter * keep - direction * size
    }
}

fn orthogonal_on_device(direction: Tensor<2>) -> Tensor<2> {
    let [rows, cols] = direction.dims();
    let x = if rows > cols { direction.transpose() } else { direction };
    let norm = x.clone().square().sum().sqrt().clamp_min(EPS);
    let mut x = x / norm.reshape([1, 1]);
    let [a, b, c] = COEFFICIENTS;
    for _ in 0..STEPS {
        let gram = matmul(x.clone(), x.clone().transpose());
        let polynomial = gram.clone() * b + matmul(gram.clone(), gram) * c;
        x = x.clone() * a + matmul(polynomial, x);
    }
    if rows > cols { x.transpose() } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The matrices of experts are as many of their own, those alone that a rank has some of.
    #[test]
    fn a_block_of_matrices_moves_like_each_of_them() {
        let adamw = AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let muon = Muon { momentum: 0.95, nesterov: true, adamw };
        let [rows, columns] = [6, 4];
        fn parameter(shape: &[usize]) -> Parameter<'_> {
            Parameter { name: "w", shape, role: Role::Hidden, decay: true }
        }
        let step = StepScale { lr: 0.1, update: 1, gradient: 1.0 };
        let direction: Vec<f32> = (0..3 * 24).map(|i| (i as f32 * 0.7).sin()).collect();
        let transform = |shape: &[usize], direction: &[f32], part| {
            let mut moment = vec![0.0; direction.len()];
            let state = &mut [moment.as_mut_slice()];
            let whole = WholeParameter { direction, part, state, rms: 0.0 };
            muon.transform(&parameter(shape), whole, &step)
        };
        let all = transform(&[3, rows, columns], &direction, 0..72);
        let each = direction.chunks(24).flat_map(|one| transform(&[rows, columns], one, 0..24));
        assert_eq!(all, each.collect::<Vec<_>>());
        let some = transform(&[3, rows, columns], &direction, 30..40);
        assert_eq!(some[24..48], all[24..48]);
        assert!(some[..24].iter().chain(&some[48..]).all(|x| *x == 0.0));
        let (of_block, of_one) = (&[3, rows, columns][..], &[rows, columns][..]);
        let scalars = |shape: &[usize]| muon.scalars(&parameter(shape), &step);
        assert_eq!(scalars(of_block), scalars(of_one));
        let vector = Parameter { role: Role::Small, ..parameter(of_block) };
        assert!(muon.whole(&vector).is_none() && muon.whole(&parameter(&[5])).is_none());
    }
}
