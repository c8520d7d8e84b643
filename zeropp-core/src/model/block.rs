//! A transformer block of any family.

use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_model::decoder::Norm;
use zeropp_model::parts::DecoderPart;
use zeropp_model::tensors::{Names, QK_NORMS};

use crate::choice::Activation;
use crate::cpu_tensor::{from_vec, on_cpu};
use crate::layer::{BatchShape, Layer, LayerCost, LayerCx};
use crate::params::ParamSpec;
use crate::past::Past;
use crate::split::ops::{self, HeadNorms, Projection, Rotation, Turns};

/// One block: x + attention(norm(x)), and of that x + mlp(norm(x)).
pub(super) struct Block {
    pub(super) name: String,
    pub(super) part: DecoderPart,
    /// What turns queries and keys, where positions are rotary.
    pub(super) rotation: Option<Arc<Rotation>>,
}

/// The norm called `name`.
pub(super) fn norm(norm: Norm, x: Tensor<3>, name: &str, cx: &LayerCx) -> Tensor<3> {
    let weight = cx.weight(&format!("{name}.weight"));
    match norm {
        Norm::Layer { eps } => {
            ops::layer_norm(x, &weight, &cx.weight(&format!("{name}.bias")), eps, &cx.op)
        }
        Norm::Rms { eps } => ops::rms_norm(x, &weight, eps, &cx.op),
    }
}

/// The weight and, if it has one, the bias of the linear map called `name`.
fn map(name: &str, bias: bool, cx: &LayerCx) -> Projection {
    Projection {
        weight: cx.weight(&format!("{name}.weight")),
        bias: bias.then(|| cx.weight(&format!("{name}.bias"))),
    }
}

fn linear(x: Tensor<3>, name: &str, bias: bool, cx: &LayerCx) -> Tensor<3> {
    let Projection { weight, bias } = map(name, bias, cx);
    ops::linear(x, &weight, bias.as_ref(), &cx.op)
}

impl Block {
    fn names(&self) -> &'static Names {
        self.part.decoder.names()
    }

    /// The output, for tokens from position `first` on, with `attend` from q, k and v.
    fn run(
        &self,
        x: Tensor<3>,
        cx: &LayerCx,
        first: usize,
        attend: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Tensor<3> {
        let (d, names) = (&self.part.decoder, self.names());
        let qkv = self.qkv(norm(d.norm, x.clone(), names.norm_1, cx), cx, first);
        let attended = attend(qkv);
        let x = ops::add(x, linear(attended, names.out, d.biases.out, cx));
        let normed = norm(d.norm, x.clone(), names.norm_2, cx);
        ops::add(x, self.mlp(normed, cx))
    }

    /// q, k and v of the normalised x, ready for attention.
    fn qkv(&self, x: Tensor<3>, cx: &LayerCx, first: usize) -> Tensor<3> {
        let (d, names) = (&self.part.decoder, self.names());
        let (heads, groups) = (d.heads, d.kv_heads);
        let turns = self.rotation.as_deref();
        let turns = turns.map(|rotation| Turns { rotation, heads: heads + groups, first });
        let before_norms = if d.qk_norm { None } else { turns };
        let qkv = match (names.qkv, before_norms) {
            ([one], None) => linear(x, one, d.biases.qkv, cx),
            (maps, turns) => {
                let maps: Vec<_> = maps.iter().map(|name| map(name, d.biases.qkv, cx)).collect();
                ops::projections(x, &maps, turns, &cx.op)
            }
        };
        if !d.qk_norm {
            return qkv;
        }
        let [q, k] = QK_NORMS.map(|name| cx.weight(&format!("{name}.weight")));
        let eps = match d.norm {
            Norm::Layer { eps } | Norm::Rms { eps } => eps,
        };
        ops::head_norm(qkv, &HeadNorms { heads, groups, q, k, eps }, turns, &cx.op)
    }

    fn mlp(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let (d, names) = (&self.part.decoder, self.names());
        let up = |x, i: usize| linear(x, names.up[i], d.biases.mlp, cx);
        let inner = match d.activation {
            Activation::Gelu => ops::gelu(up(x, 0), &cx.op),
            Activation::GeluTanh => ops::gelu_tanh(up(x, 0), &cx.op),
            Activation::Swiglu => ops::swiglu(up(x.clone(), 0), up(x, 1), &cx.op),
        };
        linear(inner, names.down, d.biases.mlp, cx)
    }
}

impl Layer for Block {
    fn name(&self) -> &str {
        &self.name
    }

    fn parameters(&self) -> Vec<ParamSpec> {
        self.part.parameters()
    }

    fn forward(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let d = &self.part.decoder;
        self.run(x, cx, 0, |qkv| ops::grouped_attention(qkv, d.heads, d.kv_heads, &cx.op))
    }

    fn is_split(&self) -> bool {
        true
    }

    fn extend(&self, x: Tensor<3>, cx: &LayerCx, past: &mut Past) -> Option<Tensor<3>> {
        on_cpu(&x)?;
        let (d, first) = (&self.part.decoder, past.tokens());
        let attend = |qkv: Tensor<3>| {
            let host = on_cpu(&qkv).expect("as x");
            past.take_up(host.as_slice(), [d.heads, d.kv_heads, d.head_dim]);
            if first == 0 {
                return ops::grouped_attention(qkv, d.heads, d.kv_heads, &cx.op);
            }
            let out = past.attention(host.as_slice(), [d.heads, d.kv_heads, d.head_dim]);
            let [b, n, _] = qkv.dims();
            from_vec(out, [b, n, d.heads * d.head_dim])
        };
        Some(self.run(x, cx, first, attend))
    }

    fn cost(&self, batch: BatchShape) -> LayerCost {
        self.part.cost(batch)
    }
}
