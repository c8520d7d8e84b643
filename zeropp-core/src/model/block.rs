//! A transformer block of any family.

use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_model::decoder::{Moe, Norm, SharedExpert, SigmoidScores};
use zeropp_model::parts::{DecoderPart, PartKind};
use zeropp_model::tensors::{
    CHOICE_BIAS, EXPERTS, QK_NORMS, ROUTER, SHARED_GATE, TensorNames, shared_maps,
};
use zeropp_model::tuning::LORA;

use crate::choice::Activation;
use crate::cpu_tensor::{from_vec, on_cpu};
use crate::layer::{BatchShape, Layer, LayerCost, LayerCx};
use crate::params::ParamSpec;
use crate::past::Past;
use crate::split::OpCx;
use crate::split::ops::{self, HeadNorms, Projection, Rotation, Router, Routing, Score, Turns};

/// One block: x + attention(norm(x)), and of that x + mlp(norm(x)).
pub(super) struct Block {
    pub(super) name: String,
    pub(super) part: DecoderPart,
    /// Tokens that a query sees, itself included, where not all before it.
    pub(super) window: Option<usize>,
    /// The rotation of queries and keys, where positions are rotary.
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

/// What the experts of each token of x give, weighted by the router.
fn experts(x: Tensor<3>, moe: Moe, cx: &LayerCx) -> Tensor<3> {
    let Moe { experts, chosen, divided, sigmoid, .. } = moe;
    let weight = cx.weight(&format!("{ROUTER}.weight"));
    let router = Router { weight, bias: sigmoid.map(|_| cx.weight(CHOICE_BIAS)) };
    let score = sigmoid.map_or(Score::Softmax, |SigmoidScores { groups, groups_chosen, scale }| {
        Score::Sigmoid { groups, groups_chosen, scale: scale as f32 }
    });
    let routing = Routing { experts, chosen, divided, score };
    let (w, routed) = ops::route(x.clone(), &router, routing, &cx.op);
    let maps = EXPERTS.map(|name| cx.weight(&format!("{name}.weight")));
    ops::experts(x, w, &routed, maps.each_ref(), &cx.last_op())
}

impl Block {
    fn names(&self) -> &'static TensorNames {
        self.part.decoder.names()
    }

    /// The linear map called `name`, and what its adapter adds, if it has one.
    fn linear(&self, x: Tensor<3>, name: &str, bias: bool, cx: &LayerCx) -> Tensor<3> {
        self.linear_of(x, name, bias, cx, &cx.op)
    }

    /// The same, whose output is made as `op` says.
    fn linear_of(
        &self,
        x: Tensor<3>,
        name: &str,
        bias: bool,
        cx: &LayerCx,
        op: &OpCx,
    ) -> Tensor<3> {
        let Projection { weight, bias } = map(name, bias, cx);
        let y = ops::linear(x.clone(), &weight, bias.as_ref(), op);
        self.adapted(y, x, name, 0, cx, op)
    }

    /// y and what the adapter of the linear map `name` makes of its input x, if it has one: added
    /// to the columns from `start` on, which are the map's output.
    fn adapted(
        &self,
        y: Tensor<3>,
        x: Tensor<3>,
        name: &str,
        start: usize,
        cx: &LayerCx,
        op: &OpCx,
    ) -> Tensor<3> {
        let lora = self.part.tuning.lora.filter(|_| self.part.is_adapted(name));
        let Some(lora) = lora else { return y };
        let [a, b] = LORA.map(|of| cx.weight(&format!("{name}.{of}")));
        let whole = OpCx { output_wanted: true, ..op.clone() };
        let inner = ops::linear(x, &a, None, &whole);
        ops::add_scaled(y, ops::linear(inner, &b, None, op), lora.scale(), start, op)
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
        let attended = self.linear(attended, names.out, d.biases.out, cx);
        let x = ops::add(x, ops::dropout(attended, [&self.name, "attention"], &cx.op));
        let normed = norm(d.norm, x.clone(), names.norm_2, cx);
        let last = cx.last_op();
        let inner = match self.moe() {
            Some(moe) => self.experts(normed, moe, cx),
            None => self.mlp(normed, cx),
        };
        ops::add_last(x, ops::dropout(inner, [&self.name, "mlp"], &last), &last)
    }

    /// The experts that it has in place of an MLP.
    fn moe(&self) -> Option<Moe> {
        let PartKind::Block(index) = self.part.kind else { return None };
        self.part.decoder.moe_of(index)
    }

    /// q, k and v of the normalised x, ready for attention.
    fn qkv(&self, x: Tensor<3>, cx: &LayerCx, first: usize) -> Tensor<3> {
        let (d, names) = (&self.part.decoder, self.names());
        let (heads, groups) = (d.heads, d.kv_heads);
        let turns = self.rotation.as_deref();
        let turns = turns.map(|rotation| Turns { rotation, heads: heads + groups, first });
        let before_norms = if d.qk_norm { None } else { turns };
        let is_adapted = names.qkv.iter().any(|name| self.part.is_adapted(name));
        let qkv = match (names.qkv, before_norms) {
            ([one], None) => self.linear(x, one, d.biases.qkv, cx),
            (names, turns) => {
                let maps: Vec<_> = names.iter().map(|name| map(name, d.biases.qkv, cx)).collect();
                // What turns is what adapters have been added to.
                let turns_now = turns.filter(|_| !is_adapted);
                let mut qkv = ops::projections(x.clone(), &maps, turns_now, &cx.op);
                let mut start = 0;
                for (name, map) in names.iter().zip(&maps) {
                    qkv = self.adapted(qkv, x.clone(), name, start, cx, &cx.op);
                    start += map.weight.shape()[1];
                }
                match turns.filter(|_| is_adapted) {
                    Some(turns) => ops::turned(qkv, turns, &cx.op),
                    None => qkv,
                }
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

    /// Experts, and what stands beside them.
    fn experts(&self, x: Tensor<3>, moe: Moe, cx: &LayerCx) -> Tensor<3> {
        let given = experts(x.clone(), moe, cx);
        let Some(SharedExpert { gated, .. }) = moe.shared else { return given };
        let last = cx.last_op();
        let [gate, up, down] = shared_maps(gated);
        // The router and the experts keep x as it is, whatever else is made again.
        let kept = OpCx { makers: None, ..cx.op.clone() };
        let maps = [*gate, *up, *down];
        if !gated {
            let shared = self.mlp_of(x, maps, cx, &kept, &last);
            return ops::add_last(given, shared, &last);
        }
        let gates = cx.weight(&format!("{SHARED_GATE}.weight"));
        let z = ops::linear(x.clone(), &gates, None, &kept);
        let shared = self.mlp_of(x, maps, cx, &kept, &cx.op);
        ops::add_last(given, ops::gated(shared, z, &last), &last)
    }

    fn mlp(&self, x: Tensor<3>, cx: &LayerCx) -> Tensor<3> {
        let names = self.names();
        let (first, second) = (names.up[0], names.up[names.up.len() - 1]);
        self.mlp_of(x, [first, second, names.down], cx, &cx.op, &cx.last_op())
    }

    /// The MLP of these maps: gate, up and down, or one map twice for up. The first ones are made
    /// as `first` says and the output as `last` does.
    fn mlp_of(
        &self,
        x: Tensor<3>,
        [gate, up, down]: [&str; 3],
        cx: &LayerCx,
        first: &OpCx,
        last: &OpCx,
    ) -> Tensor<3> {
        let d = &self.part.decoder;
        let map = |x, name| self.linear_of(x, name, d.biases.mlp, cx, first);
        let inner = match d.activation {
            Activation::Gelu => ops::gelu(map(x, up), &cx.op),
            Activation::GeluTanh => ops::gelu_tanh(map(x, up), &cx.op),
            Activation::Swiglu => ops::swiglu(map(x.clone(), gate), map(x, up), &cx.op),
        };
        self.linear_of(inner, down, d.biases.mlp, cx, last)
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
        let heads = [d.heads, d.kv_heads];
        let place = [&self.name, "probabilities"];
        let attend = |qkv| ops::dropout_attention(qkv, heads, self.window, place, &cx.op);
        self.run(x, cx, cx.op.first_token(), attend)
    }

    fn is_split(&self) -> bool {
        true
    }

    fn takes_slices(&self) -> bool {
        self.moe().is_none()
    }

    fn extend(&self, x: Tensor<3>, cx: &LayerCx, past: &mut Past) -> Option<Tensor<3>> {
        on_cpu(&x)?;
        let (d, first) = (&self.part.decoder, past.tokens());
        let attend = |qkv: Tensor<3>| {
            let host = on_cpu(&qkv).expect("as x");
            past.take_up(host.as_slice(), [d.heads, d.kv_heads, d.head_dim]);
            if first == 0 {
                let heads = [d.heads, d.kv_heads];
                return ops::windowed_attention(qkv, heads, self.window, &cx.op);
            }
            let out =
                past.attention(host.as_slice(), [d.heads, d.kv_heads, d.head_dim], self.window);
            let [b, n, _] = qkv.dims();
            from_vec(out, [b, n, d.heads * d.head_dim])
        };
        Some(self.run(x, cx, first, attend))
    }

    fn cost(&self, batch: BatchShape) -> LayerCost {
        self.part.cost(batch)
    }
}
