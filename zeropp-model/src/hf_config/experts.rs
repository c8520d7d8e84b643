//! The experts that a `config.json` describes.

use super::LlamaFamily;
use super::fields::{Fault, Fields};
use crate::decoder::{Decoder, Moe};

impl Fields<'_> {
    /// The experts of a family that has some. What is not said is as in transformers.
    pub(super) fn moe(self, family: LlamaFamily) -> Result<Option<Moe>, Fault> {
        let (experts, chosen) = ("num_local_experts", "num_experts_per_tok");
        let moe = match family {
            LlamaFamily::Mixtral => Moe {
                experts: self.optional_size(experts)?.unwrap_or(8),
                chosen: self.optional_size(chosen)?.unwrap_or(2),
                inner: self.size("intermediate_size")?,
                divided: true,
                first: 0,
                every: 1,
            },
            LlamaFamily::Qwen3Moe => Moe {
                experts: self.qwen_experts()?,
                chosen: self.optional_size(chosen)?.unwrap_or(8),
                inner: self.size("moe_intermediate_size")?,
                divided: self.switch("norm_topk_prob", false)?,
                first: self.layers_without_experts()?,
                every: self.optional_size("decoder_sparse_step")?.unwrap_or(1),
            },
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

    /// Transformers 5.24 writes `num_local_experts`, earlier ones `num_experts`.
    fn qwen_experts(self) -> Result<usize, Fault> {
        let names = ["num_local_experts", "num_experts"];
        let [now, before] = names.map(|name| self.optional_size(name));
        match (now?, before?) {
            (Some(now), Some(before)) if now != before => {
                let problem = format!("where num_local_experts = {now} says another number");
                self.fault("num_experts", problem)
            }
            (now, before) => Ok(now.or(before).unwrap_or(128)),
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
