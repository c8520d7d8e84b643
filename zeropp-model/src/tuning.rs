//! The part of a decoder that trains: all of it, all but what is frozen, or low-rank adapters alone
//! (LoRA, Hu et al. 2021).

use crate::params::Init;
use crate::tensors::{CHOICE_BIAS, DecoderTensor, TensorNames, alike};

/// The parameters of an adapter, after the name of the linear map that it belongs to.
pub const LORA: [&str; 2] = ["lora_A.weight", "lora_B.weight"];

/// Whether a parameter is an adapter's.
pub fn is_adapter(parameter: &str) -> bool {
    LORA.iter().any(|end| parameter.strip_suffix(end).is_some_and(|map| map.ends_with('.')))
}

/// Adapters beside linear maps: x·W becomes x·W + (alpha/rank)·(x·A)·B, for A `[in, rank]` and
/// B `[rank, out]`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lora {
    /// Columns of A and rows of B.
    pub rank: usize,
    /// Numerator of the factor.
    pub alpha: f64,
    /// Which of [`TensorNames::linears`] have one, a bit each.
    targets: u8,
}

impl Lora {
    /// Adapters of the linear maps of a block that `targets` names, separated by commas: as the
    /// family names them, whole (`self_attn.q_proj`) or their ends (`q_proj`, `q`), or `all`.
    /// Without targets those that are usual: q and v, or GPT-2's `c_attn`.
    ///
    /// # Errors
    /// A name that no map has; those that there are.
    pub fn new(
        rank: usize,
        alpha: f64,
        targets: Option<&str>,
        names: &TensorNames,
    ) -> Result<Lora, (String, Vec<&'static str>)> {
        let usual = if names.qkv.len() == 1 { "c_attn" } else { "q,v" };
        let ends: Vec<&str> =
            names.linears().map(|name| name.rsplit('.').next().unwrap_or(name)).collect();
        let mut bits = 0;
        for target in targets.unwrap_or(usual).split(',').map(str::trim) {
            let is_it = |(name, end): (&str, &&str)| {
                target == "all"
                    || [name, *end].contains(&target)
                    || end.strip_suffix("_proj") == Some(target)
            };
            let found: Vec<bool> = names.linears().zip(&ends).map(is_it).collect();
            if !found.contains(&true) {
                return Err((target.into(), ends));
            }
            let bit = |(i, found): (usize, &bool)| u8::from(*found) << i;
            bits |= found.iter().enumerate().map(bit).sum::<u8>();
        }
        Ok(Lora { rank, alpha, targets: bits })
    }

    /// The factor on what an adapter gives.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }

    /// The linear maps with an adapter.
    pub fn maps(&self, names: &TensorNames) -> impl Iterator<Item = &'static str> {
        let targets = self.targets;
        let of = move |(i, name): (usize, &'static str)| (targets & (1 << i) != 0).then_some(name);
        names.linears().enumerate().filter_map(of)
    }
}

/// The part of a decoder that trains.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tuning {
    /// Patterns of names of parameters that do not train: `*` stands for any text, and the name of
    /// a module for all of its parameters.
    pub freeze: Vec<String>,
    /// Adapters, which alone train where there are any.
    pub lora: Option<Lora>,
    /// Whether biases of the choice of experts move.
    pub balances: bool,
}

impl Tuning {
    fn is_frozen(&self, parameter: &str) -> bool {
        let stands = !self.balances && is_choice_bias(parameter);
        stands
            || self.lora.is_some()
            || self.freeze.iter().any(|pattern| matches(pattern, parameter))
    }
}

/// Whether a parameter is a bias of the choice of experts, whose sums over the batch are no
/// gradients.
pub fn is_choice_bias(parameter: &str) -> bool {
    parameter.ends_with(CHOICE_BIAS)
}

/// Whether a pattern of names is that of a parameter, or of a module that it belongs to.
pub fn matches(pattern: &str, parameter: &str) -> bool {
    let mut ends = parameter.match_indices('.').map(|(at, _)| at).chain([parameter.len()]);
    ends.any(|end| is_all(pattern.as_bytes(), &parameter.as_bytes()[..end]))
}

fn is_all(pattern: &[u8], text: &[u8]) -> bool {
    match pattern.split_first() {
        None => text.is_empty(),
        Some((b'*', rest)) => (0..=text.len()).any(|n| is_all(rest, &text[n..])),
        Some((c, rest)) => text.first() == Some(c) && is_all(rest, &text[1..]),
    }
}

/// The part of one decoder part that trains.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PartTuning {
    /// Which of its own tensors do not, a bit each.
    frozen: u32,
    /// Its adapters.
    pub lora: Option<Lora>,
}

impl PartTuning {
    /// The tuning of a part with these tensors by `tuning`.
    pub(crate) fn new(tuning: &Tuning, tensors: &[DecoderTensor], is_block: bool) -> PartTuning {
        let bit = |(i, t): (usize, &DecoderTensor)| u32::from(tuning.is_frozen(&t.name)) << i;
        let frozen = tensors.iter().enumerate().map(bit).sum();
        PartTuning { frozen, lora: tuning.lora.filter(|_| is_block) }
    }

    /// The tensors of a part: its own, then its adapters'.
    pub(crate) fn applied(
        &self,
        mut tensors: Vec<DecoderTensor>,
        names: &TensorNames,
    ) -> Vec<DecoderTensor> {
        for (i, tensor) in tensors.iter_mut().enumerate() {
            tensor.trains = self.frozen & (1 << i) == 0;
        }
        let Some(lora) = &self.lora else { return tensors };
        for map in lora.maps(names).flat_map(alike) {
            let end = format!(".{map}.weight");
            // In place of an MLP a block may have experts.
            let Some(weight) = tensors.iter().find(|t| t.name.ends_with(&end)) else { continue };
            let [input, output] = [weight.shape[0], weight.shape[1]];
            let map = weight.name.strip_suffix("weight").expect("as it was found");
            let [a, b] = LORA.map(|of| format!("{map}{of}"));
            // As torch's kaiming_uniform with a = √5, which peft takes.
            let bound = (1.0 / input as f64).sqrt() as f32;
            // Files have both as `[out, in]`, whatever the family.
            let tensor = |name, shape: [usize; 2], init| DecoderTensor {
                transposed_in_files: true,
                ..DecoderTensor::new(name, &shape, init)
            };
            let a = tensor(a, [input, lora.rank], Init::Uniform(bound));
            tensors.extend([a, tensor(b, [lora.rank, output], Init::Zeros)]);
        }
        tensors
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::Decoder;
    use crate::parts::DecoderPart;
    use crate::presets::Preset;

    fn decoder(name: &str) -> Decoder {
        Preset::find(name).expect("a preset").decoder
    }

    #[test]
    fn a_pattern_names_a_parameter_or_a_module() {
        for (pattern, parameter, is_its) in [
            ("wte", "wte.weight", true),
            ("wte.weight", "wte.weight", true),
            ("h.1", "h.1.ln_1.bias", true),
            ("h.1", "h.11.ln_1.bias", false),
            ("*.bias", "h.1.ln_1.bias", true),
            ("h.*.mlp", "h.3.mlp.c_fc.weight", true),
            ("h.*.mlp", "h.3.attn.c_attn.weight", false),
            ("*", "ln_f.weight", true),
            ("te.weight", "wte.weight", false),
        ] {
            assert_eq!(matches(pattern, parameter), is_its, "{pattern} {parameter}");
        }
    }

    #[test]
    fn adapters_train_alone_and_are_named_as_peft_names_them() {
        let smollm = decoder("smollm2-135m");
        let lora = Lora::new(8, 16.0, Some("q,v_proj,mlp.down_proj"), smollm.names()).unwrap();
        let tuning = Tuning { lora: Some(lora), ..Tuning::default() };
        let parts = smollm.tuned_parts(&tuning);
        let tensors: Vec<_> = parts.iter().flat_map(DecoderPart::tensors).collect();
        assert!(tensors.iter().all(|t| t.trains == is_adapter(&t.name)));
        let of_first = tensors.iter().filter(|t| t.trains && t.name.starts_with("model.layers.0."));
        let found: Vec<_> = of_first.map(|t| (t.name.as_str(), t.shape.as_slice())).collect();
        assert_eq!(
            found,
            [
                ("model.layers.0.self_attn.q_proj.lora_A.weight", &[576, 8][..]),
                ("model.layers.0.self_attn.q_proj.lora_B.weight", &[8, 576]),
                ("model.layers.0.self_attn.v_proj.lora_A.weight", &[576, 8]),
                ("model.layers.0.self_attn.v_proj.lora_B.weight", &[8, 192]),
                ("model.layers.0.mlp.down_proj.lora_A.weight", &[1536, 8]),
                ("model.layers.0.mlp.down_proj.lora_B.weight", &[8, 576]),
            ]
        );
        let (unknown, known) = Lora::new(8, 16.0, Some("q,query"), smollm.names()).unwrap_err();
        assert_eq!((unknown.as_str(), known.len()), ("query", 7));
        // GPT-2's two c_proj are one target, as in peft.
        let gpt2 = decoder("gpt2");
        let lora = Lora::new(4, 4.0, Some("c_proj"), gpt2.names()).unwrap();
        assert_eq!(lora.maps(gpt2.names()).collect::<Vec<_>>(), ["attn.c_proj", "mlp.c_proj"]);
    }
}
