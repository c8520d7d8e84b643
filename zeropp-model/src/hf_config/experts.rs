//! The experts that a `config.json` describes.

use super::LlamaFamily;
use super::fields::{Fault, Fields};
use crate::decoder::{Decoder, Moe, SharedExpert, SigmoidScores};

impl Fields<'_> {
    /// The experts of a family that has some. What is not said is as in transformers.
    pub(super) fn moe(self, family: LlamaFamily) -> Result<Option<Moe>, Fault> {
        let (experts, chosen) = ("num_local_experts", "num_experts_per_tok");
        let inner = "moe_intermediate_size";
        let moe = match family {
            LlamaFamily::Mixtral => {
                let (experts, chosen) = (self.optional_size(experts)?, self.optional_size(chosen)?);
                let inner = self.size("intermediate_size")?;
                Moe::new(experts.unwrap_or(8), chosen.unwrap_or(2), inner)
            }
            LlamaFamily::Qwen2Moe => Moe {
                divided: self.switch("norm_topk_prob", false)?,
                first: self.layers_without_experts()?,
                every: self.optional_size("decoder_sparse_step")?.unwrap_or(1),
                shared: Some(SharedExpert {
                    inner: self.optional_size("shared_expert_intermediate_size")?.unwrap_or(5632),
                    gated: true,
                }),
                ..Moe::new(
                    self.qwen_experts(60)?,
                    self.optional_size(chosen)?.unwrap_or(4),
                    self.optional_size(inner)?.unwrap_or(1408),
                )
            },
            LlamaFamily::Qwen3Moe => Moe {
                divided: self.switch("norm_topk_prob", false)?,
                first: self.layers_without_experts()?,
                every: self.optional_size("decoder_sparse_step")?.unwrap_or(1),
                ..Moe::new(
                    self.qwen_experts(128)?,
                    self.optional_size(chosen)?.unwrap_or(8),
                    self.size(inner)?,
                )
            },
            LlamaFamily::Dots1 => self.dots1()?,
            _ => return Ok(None),
        };
        if moe.chosen > moe.experts {
            let problem = format!("is more than there are experts, {}", moe.experts);
            return self.fault(chosen, problem);
        }
        if self.share("router_jitter_noise")? > 0.0 {
            return self.fault("router_jitter_noise", "noise before the router is not supported");
        }
        Ok(Some(moe))
    }

    /// Sigmoids as scores, in groups, and shared experts, which are one MLP.
    fn dots1(self) -> Result<Moe, Fault> {
        let inner = self.optional_size("moe_intermediate_size")?.unwrap_or(1408);
        if self.optional_size("moe_layer_freq")?.is_some_and(|every| every > 1) {
            return self.fault("moe_layer_freq", "all layers after the first ones have experts");
        }
        let scale = self.optional_number("routed_scaling_factor")?.unwrap_or(1.0);
        // Kernels have it in single precision.
        let as_used = scale as f32;
        if !(as_used.is_finite() && as_used > 0.0) {
            return self.fault("routed_scaling_factor", "a factor above 0 is needed");
        }
        Ok(Moe {
            divided: self.switch("norm_topk_prob", false)?,
            first: self.optional_count("first_k_dense_replace", 0)?.unwrap_or(0),
            sigmoid: Some(SigmoidScores {
                groups: self.optional_size("n_group")?.unwrap_or(1),
                groups_chosen: self.optional_size("topk_group")?.unwrap_or(1),
                scale,
            }),
            shared: Some(SharedExpert {
                inner: inner * self.size("n_shared_experts")?,
                gated: false,
            }),
            ..Moe::new(self.size("n_routed_experts")?, self.size("num_experts_per_tok")?, inner)
        })
    }

    /// Transformers 5.24 writes `num_local_experts`, earlier ones `num_experts`.
    fn qwen_experts(self, usual: usize) -> Result<usize, Fault> {
        let names = ["num_local_experts", "num_experts"];
        let [now, before] = names.map(|name| self.optional_size(name));
        match (now?, before?) {
            (Some(now), Some(before)) if now != before => {
                let problem = format!("where num_local_experts = {now} says another number");
                self.fault("num_experts", problem)
            }
            (now, before) => Ok(now.or(before).unwrap_or(usual)),
        }
    }

    /// Layers at the beginning that have an MLP.
    fn layers_without_experts(self) -> Result<usize, Fault> {
        let field = "mlp_only_layers";
        let layers = self.list(field)?.unwrap_or_default();
        let are_first =
            layers.iter().enumerate().all(|(i, layer)| layer.as_u64() == Some(i as u64));
        match are_first {
            true => Ok(layers.len()),
            false => self.fault(field, "are not the first layers in their order, 0, 1, .."),
        }
    }

    /// The balance loss that a file asks for, which is of all layers together and k where experts
    /// are alike, as one of each layer that is 1 there.
    pub(super) fn balance_note(self, decoder: &Decoder) -> Result<Option<String>, Fault> {
        let weight = self.share("router_aux_loss_coef")?;
        let wanted = self.switch("output_router_logits", false)? && weight > 0.0;
        let moe = decoder.moe.filter(|_| wanted);
        Ok(moe.map(|moe| {
            let layers = (0..decoder.layers).filter(|l| decoder.moe_of(*l).is_some()).count();
            let same = weight * moe.chosen as f64 / layers.max(1) as f64;
            format!(
                "config.json says router_aux_loss_coef = {weight}, for all layers together, which \
                 is not used; balance = micro-batch:weight={same:.2e} is as strong"
            )
        }))
    }
}
