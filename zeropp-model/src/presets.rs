//! Open models by name: their sizes, as their makers published them. No weights.

use crate::Activation;
use crate::decoder::{Biases, Decoder, Moe, Naming, Norm, Positions, Rotary, RotaryScaling};

/// A model that has a name.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Its name in the setting `model`.
    pub name: &'static str,
    /// Its description.
    pub decoder: Decoder,
}

impl Preset {
    /// The preset called `name`.
    pub fn find(name: &str) -> Option<&'static Preset> {
        PRESETS.iter().find(|preset| preset.name == name)
    }
}

/// A GPT-2: blocks, hidden size and heads.
const fn gpt2(name: &'static str, layers: usize, hidden: usize, heads: usize) -> Preset {
    let decoder = Decoder {
        naming: Naming::Gpt2,
        layers,
        hidden,
        heads,
        kv_heads: heads,
        head_dim: hidden / heads,
        intermediate: 4 * hidden,
        vocabulary: 50_257,
        vocabulary_multiple: 1,
        norm: Norm::Layer { eps: 1e-5 },
        positions: Positions::Learned(1024),
        biases: Biases::ALL,
        qk_norm: false,
        activation: Activation::GeluTanh,
        tied: true,
        window: None,
        moe: None,
        context: 1024,
    };
    Preset { name, decoder }
}

/// Blocks, h, H, G and f of a model with LLaMA's blocks.
type Sizes = [usize; 5];

/// A model with LLaMA's blocks, untied, heads of h/H elements, θ as given.
const fn llama(sizes: Sizes, vocabulary: usize, context: usize, theta: f64) -> Decoder {
    let [layers, hidden, heads, kv_heads, intermediate] = sizes;
    Decoder {
        naming: Naming::Llama,
        layers,
        hidden,
        heads,
        kv_heads,
        head_dim: hidden / heads,
        intermediate,
        vocabulary,
        vocabulary_multiple: 1,
        norm: Norm::Rms { eps: 1e-5 },
        positions: Positions::Rotary(Rotary { theta, scaling: RotaryScaling::None }),
        biases: Biases::NONE,
        qk_norm: false,
        activation: Activation::Swiglu,
        tied: false,
        window: None,
        moe: None,
        context,
    }
}

const fn llama2(name: &'static str, sizes: Sizes) -> Preset {
    Preset { name, decoder: llama(sizes, 32_000, 4096, 1e4) }
}

/// LLaMA 3, first edition: no scaled frequencies.
const fn llama3(name: &'static str, sizes: Sizes) -> Preset {
    Preset { name, decoder: llama(sizes, 128_256, 8192, 5e5) }
}

/// LLaMA 3.1 and 3.2: frequencies scaled by `factor`.
const fn llama3_long(name: &'static str, sizes: Sizes, factor: f64, tied: bool) -> Preset {
    let scaling = RotaryScaling::Llama3 { factor, low: 1.0, high: 4.0, context: 8192.0 };
    let positions = Positions::Rotary(Rotary { theta: 5e5, scaling });
    let decoder = llama(sizes, 128_256, 131_072, 5e5);
    Preset { name, decoder: Decoder { positions, tied, ..decoder } }
}

const fn smollm2(name: &'static str, sizes: Sizes, theta: f64) -> Preset {
    let decoder = llama(sizes, 49_152, 8192, theta);
    Preset { name, decoder: Decoder { tied: true, ..decoder } }
}

const fn qwen2(
    name: &'static str,
    sizes: Sizes,
    vocabulary: usize,
    context: usize,
    tied: bool,
) -> Preset {
    let biases = Biases { qkv: true, ..Biases::NONE };
    let norm = Norm::Rms { eps: 1e-6 };
    let decoder = llama(sizes, vocabulary, context, 1e6);
    Preset { name, decoder: Decoder { biases, norm, tied, ..decoder } }
}

const fn qwen3(name: &'static str, sizes: Sizes, tied: bool) -> Preset {
    let norm = Norm::Rms { eps: 1e-6 };
    let decoder = llama(sizes, 151_936, 40_960, 1e6);
    Preset { name, decoder: Decoder { qk_norm: true, head_dim: 128, norm, tied, ..decoder } }
}

/// A model whose blocks all have `experts` experts of `inner`, of which a token goes to `chosen`.
const fn with_experts(preset: Preset, experts: usize, chosen: usize, inner: usize) -> Preset {
    let moe = Moe::new(experts, chosen, inner);
    Preset { decoder: Decoder { moe: Some(moe), ..preset.decoder }, ..preset }
}

const fn mistral(name: &'static str, vocabulary: usize) -> Preset {
    Preset { name, decoder: llama([32, 4096, 32, 8, 14_336], vocabulary, 32_768, 1e6) }
}

/// All presets, family by family.
pub const PRESETS: &[Preset] = &[
    gpt2("gpt2", 12, 768, 12),
    gpt2("gpt2-medium", 24, 1024, 16),
    gpt2("gpt2-large", 36, 1280, 20),
    gpt2("gpt2-xl", 48, 1600, 25),
    llama2("llama2-7b", [32, 4096, 32, 32, 11_008]),
    llama2("llama2-13b", [40, 5120, 40, 40, 13_824]),
    llama2("llama2-70b", [80, 8192, 64, 8, 28_672]),
    llama3("llama3-8b", [32, 4096, 32, 8, 14_336]),
    llama3("llama3-70b", [80, 8192, 64, 8, 28_672]),
    llama3_long("llama3.1-8b", [32, 4096, 32, 8, 14_336], 8.0, false),
    // LLaMA 3.2.
    llama3_long("llama-1b", [16, 2048, 32, 8, 8192], 32.0, true),
    llama3_long("llama-3b", [28, 3072, 24, 8, 8192], 32.0, true),
    smollm2("smollm2-135m", [30, 576, 9, 3, 1536], 1e5),
    smollm2("smollm2-360m", [32, 960, 15, 5, 2560], 1e5),
    smollm2("smollm2-1.7b", [24, 2048, 32, 32, 8192], 1.3e5),
    // v0.3, whose attention has no window.
    mistral("mistral-7b", 32_768),
    with_experts(mistral("mixtral-8x7b", 32_000), 8, 2, 14_336),
    qwen2("qwen2.5-0.5b", [24, 896, 14, 2, 4864], 151_936, 32_768, true),
    qwen2("qwen2.5-1.5b", [28, 1536, 12, 2, 8960], 151_936, 131_072, true),
    qwen2("qwen2.5-7b", [28, 3584, 28, 4, 18_944], 152_064, 131_072, false),
    qwen3("qwen3-0.6b", [28, 1024, 16, 8, 3072], true),
    qwen3("qwen3-1.7b", [28, 2048, 16, 8, 6144], true),
    qwen3("qwen3-4b", [36, 2560, 32, 8, 9728], true),
    qwen3("qwen3-8b", [36, 4096, 32, 8, 12_288], false),
    with_experts(qwen3("qwen3-30b-a3b", [48, 2048, 32, 4, 6144], false), 128, 8, 768),
    with_experts(qwen3("qwen3-235b-a22b", [94, 4096, 64, 4, 12_288], false), 128, 8, 1536),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// As their makers and `model.num_parameters()` of transformers count them.
    #[test]
    fn presets_have_as_many_parameters_as_the_models() {
        let published = [
            ("gpt2", 124_439_808),
            ("gpt2-medium", 354_823_168),
            ("gpt2-large", 774_030_080),
            ("gpt2-xl", 1_557_611_200),
            ("llama2-7b", 6_738_415_616),
            ("llama2-13b", 13_015_864_320),
            ("llama2-70b", 68_976_648_192),
            ("llama3-8b", 8_030_261_248),
            ("llama3-70b", 70_553_706_496),
            ("llama3.1-8b", 8_030_261_248),
            ("llama-1b", 1_235_814_400),
            ("llama-3b", 3_212_749_824),
            ("smollm2-135m", 134_515_008),
            ("smollm2-360m", 361_821_120),
            ("smollm2-1.7b", 1_711_376_384),
            ("mistral-7b", 7_248_023_552),
            ("mixtral-8x7b", 46_702_792_704),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("qwen3-235b-a22b", 235_093_634_560),
        ];
        assert_eq!(published.len(), PRESETS.len());
        for (name, parameters) in published {
            let decoder = Preset::find(name).expect(name).decoder;
            decoder.check().expect(name);
            assert_eq!(decoder.parameter_count(), parameters, "{name}");
        }
    }
}
