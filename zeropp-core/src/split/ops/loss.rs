//! Cross-entropy with its gradient computed in the forward.

use std::sync::Arc;

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor, activation};
use parking_lot::Mutex;

use super::{is_fast, is_tracked};
use crate::cpu_tensor;
use crate::kernels::loss;
use crate::split::{NOT_SCORED, OpCx, Saved, custom_vjp};

/// Mean over all tokens of −log `softmax(logits)[target]` for `logits: [b, s, V]` and
/// `targets: [b, s]`; fp32, shape `[1]`. Where [`Masks::scored`](crate::split::Masks) is given, the
/// sum over the tokens whose target is not [`NOT_SCORED`], divided by that.
///
/// The gradient (softmax − one-hot)/(b·s) is computed here too and takes the place of the logits,
/// without a copy where the caller holds no other handle to them. Keeps F→B: that gradient, of the
/// size and type of the logits. Keeps nothing B→W. For a head that is a linear map,
/// [`linear_cross_entropy`](super::linear_cross_entropy) never has all logits at once.
///
/// # Panics
/// Panics on the CPU if a target that is scored is not below V; on a GPU the loss is NaN then.
pub fn cross_entropy(logits: Tensor<3>, targets: Tensor<2, Int>, cx: &OpCx) -> Tensor<1> {
    let targets = targets.inner();
    let plain = logits.clone().inner();
    if !is_tracked(&logits) {
        drop(logits);
        return forward(plain, targets, false, cx.masks.scored).0;
    }
    // The first node takes the graph's handle to the logits away, so that theirs is the only one
    // left and the gradient can be computed in their place; the second one brings the loss.
    let kept = Arc::new(Mutex::new(None::<Saved<3>>));
    let gradient = kept.clone();
    let token = Tensor::<1>::zeros([1], (&plain.device(), DType::F32));
    let token = custom_vjp(logits, token, move |dy: Tensor<1>| {
        let gradient = gradient.lock().take().expect("set by the forward").take();
        backward(gradient, dy)
    });
    let (loss, gradient) = forward(plain, targets, true, cx.masks.scored);
    *kept.lock() = gradient.map(|g| cx.save(g));
    custom_vjp(token, loss, |dy| dy)
}

/// The loss and, if `wanted`, the gradient of the logits.
fn forward(
    logits: Tensor<3>,
    targets: Tensor<2, Int>,
    wanted: bool,
    scored: Option<f64>,
) -> (Tensor<1>, Option<Tensor<3>>) {
    let [b, s, vocabulary] = logits.dims();
    let n = b * s;
    let divisor = scored.unwrap_or(n as f64);
    let weight = wanted.then_some(1.0 / divisor as f32);
    if !is_fast(&logits) {
        let (logits, targets) = (logits.reshape([n, vocabulary]), targets.reshape([n]));
        let (sum, gradient) = of_rows(logits, targets, scored.is_some(), weight);
        return (sum / divisor, gradient.map(|g| g.reshape([b, s, vocabulary])));
    }
    let targets = known_targets(targets, vocabulary, scored.is_some());
    let Some(weight) = weight else {
        let logits = cpu_tensor::on_cpu(&logits).expect("checked by is_fast");
        let sum = loss::cross_entropy(logits.as_slice(), vocabulary, &targets);
        return (mean(sum, divisor), None);
    };
    let mut sum = 0.0;
    let gradient = cpu_tensor::map_in_place(logits, |logits| {
        sum = loss::cross_entropy_gradient(logits, vocabulary, &targets, weight);
    });
    (mean(sum, divisor), Some(gradient.expect("checked by is_fast")))
}

/// The loss of `n` tokens, or as many as count as such, from its sum.
pub(super) fn mean(sum: f64, n: f64) -> Tensor<1> {
    cpu_tensor::from_vec(vec![(sum / n) as f32], [1])
}

/// The targets of rows of logits for `vocabulary` ids; [`NOT_SCORED`] may be one where `masked`.
///
/// # Panics
/// Panics if another is not below `vocabulary`.
pub(super) fn known_targets(
    targets: Tensor<2, Int>,
    vocabulary: usize,
    masked: bool,
) -> Vec<usize> {
    let known = |target: i64| match usize::try_from(target) {
        Ok(target) if target < vocabulary => target,
        _ if masked && target == i64::from(NOT_SCORED) => loss::NOT_SCORED,
        _ => panic!("target {target}, but there are logits for {vocabulary} tokens"),
    };
    targets.into_data().iter::<i64>().map(known).collect()
}

/// By tensor operations: the sum of the cross-entropies of rows of logits, fp32, and the gradient
/// of `weight` times that sum, in the type of the logits. Where they are `masked`, targets may be
/// [`NOT_SCORED`].
pub(super) fn of_rows(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    masked: bool,
    weight: Option<f32>,
) -> (Tensor<1>, Option<Tensor<2>>) {
    if masked {
        return of_scored_rows(logits, targets, weight);
    }
    #[cfg(feature = "cube")]
    if super::on_gpu(&logits) {
        let (losses, gradient) = crate::cube::cross_entropy(logits, targets, weight);
        return (losses.sum(), weight.map(|_| gradient));
    }
    let ([n, _], dtype) = (logits.dims(), logits.dtype());
    let targets = targets.reshape([n, 1]);
    let log_p = activation::log_softmax(logits.cast(DType::F32), 1);
    let sum = log_p.clone().gather(1, targets.clone()).sum().neg();
    let Some(weight) = weight else { return (sum, None) };
    let ones = Tensor::<2>::full([n, 1], -1.0, (&sum.device(), DType::F32));
    let gradient = log_p.exp().scatter(1, targets, ones, IndexingUpdateOp::Add) * weight;
    (sum, Some(gradient.cast(dtype)))
}

/// The same where targets may be [`NOT_SCORED`].
fn of_scored_rows(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    weight: Option<f32>,
) -> (Tensor<1>, Option<Tensor<2>>) {
    let ([n, _], dtype) = (logits.dims(), logits.dtype());
    let hidden = targets.clone().equal_elem(NOT_SCORED);
    let scored = hidden.clone().bool_not().float().cast(DType::F32).reshape([n, 1]);
    let targets = targets.mask_fill(hidden, 0).reshape([n, 1]);
    let log_p = activation::log_softmax(logits.cast(DType::F32), 1);
    let sum = (log_p.clone().gather(1, targets.clone()) * scored.clone()).sum().neg();
    let Some(weight) = weight else { return (sum, None) };
    let ones = Tensor::<2>::full([n, 1], -1.0, (&sum.device(), DType::F32));
    let slope = log_p.exp().scatter(1, targets, ones, IndexingUpdateOp::Add);
    (sum, Some((slope * scored * weight).cast(dtype)))
}

/// The kept gradient times the upstream gradient, usually 1 or one over the micro-batches.
fn backward(gradient: Tensor<3>, dy: Tensor<1>) -> Tensor<3> {
    if is_fast(&gradient) {
        let scale = cpu_tensor::on_cpu(&dy).expect("as the logits").as_slice()[0];
        if scale == 1.0 {
            return gradient;
        }
        return cpu_tensor::map_in_place(gradient, |g| g.iter_mut().for_each(|g| *g *= scale))
            .expect("checked by is_fast");
    }
    let dtype = gradient.dtype();
    (gradient.cast(DType::F32) * dy.unsqueeze()).cast(dtype)
}
