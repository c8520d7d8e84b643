//! Other programs' names of settings: Hugging Face, axolotl, torchtitan, Megatron, nanoGPT.

use zeropp_pipeline::schedules::DEFAULT;

use super::{OPTIONS, OptionKind};

/// A thing that others have a name for.
pub(super) struct ForeignOption {
    /// Their names of it.
    pub(super) names: &'static [&'static str],
    /// Our settings for it, each with a value as one would type it. None where nothing is needed.
    pub(super) ours: &'static [(&'static str, &'static str)],
    /// A remark that belongs to it.
    note: &'static str,
}

/// The advice to use our flags for `name`, with a remark where they need one. The name
/// is one of other programs' flags or keys, in any spelling; none where it is none of them.
pub fn flags_for(name: &str) -> Option<String> {
    let flag = |(key, value): &(&str, &str)| match (kind(key), *value) {
        (Some(OptionKind::Switch | OptionKind::Resume), "true") => format!("`--{key}`"),
        _ => format!("`--{key} {value}`"),
    };
    find(name).map(|foreign| foreign.advice(flag))
}

/// The same as lines of a file.
pub(super) fn lines_for(name: &str) -> Option<String> {
    let line = |(key, value): &(&str, &str)| match kind(key) {
        Some(OptionKind::Count | OptionKind::Number | OptionKind::Switch | OptionKind::Resume) => {
            format!("`{key} = {value}`")
        }
        _ => format!("`{key} = \"{value}\"`"),
    };
    find(name).map(|foreign| foreign.advice(line))
}

fn kind(key: &str) -> Option<OptionKind> {
    OPTIONS.iter().find(|option| option.key == key).map(|option| option.kind)
}

fn find(name: &str) -> Option<&'static ForeignOption> {
    let name = name.trim_start_matches('-').replace(['_', '.'], "-").to_lowercase();
    FOREIGN.iter().find(|foreign| foreign.names.contains(&name.as_str()))
}

impl ForeignOption {
    fn advice(&self, shown: impl Fn(&(&str, &str)) -> String) -> String {
        let ours: Vec<String> = self.ours.iter().map(shown).collect();
        match (ours.is_empty(), self.note) {
            (true, note) => format!("leave it out: {note}"),
            (false, "") => format!("use {}", ours.join(" and ")),
            (false, note) => format!("use {} ({note})", ours.join(" and ")),
        }
    }
}

macro_rules! foreign {
    ($($($name:literal)+ => [$($key:literal = $value:expr),*] $note:literal;)+) => {
        &[$(ForeignOption { names: &[$($name),+], ours: &[$(($key, $value)),*], note: $note },)+]
    };
}

/// All of them. Names have hyphens and small letters.
pub(super) const FOREIGN: &[ForeignOption] = foreign! {
    "gradient-accumulation-steps" "gradient-accumulation" "grad-accum-steps" "grad-accum"
        "accumulate-grad-batches" "accum-iter" "num-microbatches"
        => ["micro-batches" = "8"] "micro-batches of each rank in a step";
    "per-device-train-batch-size" "batch-size" "train-batch-size" "local-batch-size"
        "device-batch-size" "bsz" => ["micro-batch-size" = "4"] "samples; or `global-batch` of all";
    "global-batch-size" "total-batch-size" "train-global-batch-size"
        => ["global-batch" = "256"] "samples of a step over all ranks, or tokens";
    "bf16" "fp16" "half" "amp" "mixed-precision" "dtype" "torch-dtype"
        => ["precision" = "bf16"] "with fp32 master weights; there is no fp16";
    "fp32" "float32" => ["precision" = "fp32"] "";
    "tf32" "allow-tf32" => ["precision" = "tf32"] "on NVIDIA GPUs";
    "epochs" "num-train-epochs" "num-epochs" "max-epochs" "n-epochs" "train-epochs"
        => ["steps" = "1000", "order" = "epochs"] "a run is as long as its steps";
    "max-steps" "training-steps" "train-iters" "max-iters" "num-steps" "num-train-steps" "iters"
        "iterations" "num-iterations" "train-steps" => ["steps" = "1000"] "";
    "learning-rate" "max-lr" "base-lr" => ["lr" = "3e-4"] "";
    "lr-min" "min-learning-rate" "learning-rate-min" "eta-min" => ["min-lr" = "3e-5"] "";
    "warmup-steps" "warmup-iters" "lr-warmup-steps" "lr-warmup-iters" "num-warmup-steps"
        "warmup-ratio" "lr-warmup-fraction" => ["warmup" = "100"] "steps";
    "lr-scheduler-type" "lr-scheduler" "lr-decay-style" "decay-type" "scheduler" "lr-schedule"
        => ["decay" = "cosine"] "";
    "max-grad-norm" "grad-clip" "gradient-clipping" "clip-grad" "max-norm" "gradient-clip-val"
        "clip-grad-norm" => ["clip" = "1.0"] "";
    "wd" "l2" => ["weight-decay" = "0.1"] "";
    "adam-beta1" "adam-b1" => ["beta1" = "0.9"] "";
    "adam-beta2" "adam-b2" => ["beta2" = "0.95"] "";
    "adam-epsilon" "adam-eps" "epsilon" => ["eps" = "1e-8"] "";
    "optim" "optimizer-name" "optimizer-type" => ["optimizer" = "adamw"] "";
    "ema-decay" => ["ema" = "0.999"] "";
    "hidden-dropout" "attention-dropout" "resid-pdrop" "attn-pdrop" "embd-pdrop" "dropout-rate"
        => ["dropout" = "0.1"] "";
    "early-stopping-patience" => ["patience" = "3"] "validation losses";
    "random-seed" "manual-seed" "data-seed" => ["seed" = "1"] "";
    "wandb" "use-wandb" "enable-wandb" "wandb-log" "wandb-project" "wandb-run-name" "report-to"
        "logging-dir" "log-dir" "tensorboard-dir" "enable-tensorboard"
        => ["tensorboard" = "runs", "metrics" = "out.jsonl"]
        "Weights & Biases reads TensorBoard's files: `wandb sync runs`";
    "logging-steps" "log-freq" "log-interval" "log-every-n-steps" => ["log-every" = "10"] "";
    "save-steps" "checkpoint-interval" "save-interval" "save-freq" "ckpt-interval"
        "checkpointing-steps" => ["save-every" = "100"] "";
    "save-total-limit" "keep-latest-k" "max-checkpoints" => ["keep" = "3"] "";
    "output-dir" "save-dir" "out-dir" "dump-folder" "checkpoint-dir" "checkpoint-folder" "ckpt-dir"
        => ["save" = "checkpoints"] "";
    "resume-from-checkpoint" "auto-resume-from-checkpoints" "load" "load-checkpoint"
        => ["save" = "checkpoints", "resume" = "true"] "from the newest one in it";
    "eval-interval" "evaluation-strategy" "eval-strategy" "eval-iters" "val-check-interval"
        "validation-interval" => ["eval-every" = "100", "split" = "98,2"] "";
    "val-set-size" "validation-split" "val-split" => ["split" = "98,2"] "";
    "validation-file" "val-data" "eval-dataset" "val-file" => ["eval-data" = "held-out.txt"] "";
    "model-name-or-path" "base-model" "model-name" "pretrained-model-name-or-path" "hf-model"
        "model-path" => ["init-from" = "folder/", "model" = "folder/"]
        "a folder that is on this machine";
    "train-file" "dataset" "datasets" "dataset-name" "dataset-path" "data-path" "train-data"
        "data-dir" "input-bin" "train-data-path" => ["data" = "text.txt"]
        "`zeropp tokenize` makes token ids of texts and chats";
    "tokenizer-name" "tokenizer-path" "tokenizer-type" "tokenizer-model" "vocab-file"
        => ["tokenizer" = "u16"] "ids that `zeropp tokenize --tokenizer tokenizer.json` has made";
    "max-seq-length" "seq-length" "sequence-len" "sequence-length" "seq-len" "block-size"
        "context-length" "max-seq-len" "max-length" "n-ctx" "max-position-embeddings"
        => ["seq" = "1024"] "";
    "n-layer" "n-layers" "num-layers" "num-hidden-layers" "depth" => ["layers" = "12"] "";
    "n-embd" "n-embed" "hidden-size" "d-model" "hidden-dim" => ["hidden" = "768"] "";
    "n-head" "n-heads" "num-heads" "num-attention-heads" => ["heads" = "12"] "";
    "num-key-value-heads" "num-query-groups" "n-kv-heads" "n-kv-head" => ["kv-heads" = "4"] "";
    "intermediate-size" "ffn-hidden-size" "d-ff" "ffn-dim" => ["intermediate" = "3072"] "";
    "vocab-size" "padded-vocab-size" => ["vocab" = "50257"] "";
    "make-vocab-size-divisible-by" => ["vocab-multiple" = "128"] "";
    "tie-word-embeddings" "weight-tying" => ["tied" = "true"] "";
    "untie-embeddings-and-output-weights" => ["tied" = "false"] "";
    "tensor-model-parallel-size" "tensor-parallel-degree" "tensor-parallel-size" "tp" "tp-size"
        => ["zero3" = "8"] "there is no tensor parallelism: the ranks of a node share weights";
    "pipeline-model-parallel-size" "pipeline-parallel-degree" "pipeline-parallel-size" "pp-size"
        => ["pp" = "4"] "";
    "num-layers-per-virtual-pipeline-stage" "virtual-pipeline-model-parallel-size"
        => ["virtual" = "2"] "stages on each rank";
    "pipeline-parallel-schedule" => ["schedule" = DEFAULT] "";
    "data-parallel-shard-degree" "fsdp" "fsdp-size" "deepspeed" "zero-stage" "sharding-strategy"
        => ["zero3" = "8"] "ranks that share the weights";
    "data-parallel-replicate-degree" "data-parallel-size" "dp-size" "ddp" => ["dp" = "2"] "";
    "use-distributed-optimizer" => ["zero1" = "true"] "";
    "gradient-checkpointing" "activation-checkpoint" "activation-checkpointing"
        "recompute-activations" "recompute-granularity" => ["recompute" = "full"] "";
    "lora-r" "lora-dim" => ["lora-rank" = "8"] "";
    "lora-target-modules" "lora-target" "target-modules" => ["lora-targets" = "q,v"] "";
    "sample-packing" "packing" "reset-attention-mask" => ["document-mask" = "true"]
        "samples are always full; this keeps documents apart";
    "train-on-inputs" => ["loss-mask" = "false"] "";
    "use-cpu" "no-cuda" => ["device" = "cpu"] "";
    "gpus" "num-gpus" "use-cuda" => ["device" = "cuda", "zero3" = "8"] "a rank for each GPU";
    "nnodes" "num-nodes" "num-machines" => ["nodes" = "2"] "";
    "machine-rank" => ["node-rank" = "0"] "";
    "master-addr" "main-process-ip" => ["rendezvous" = "node0:29500"] "";
    "profile" "profiling" "enable-profiling" "profiler" => ["trace" = "trace.json"] "";
    "compile" "torch-compile" => [] "there is nothing to compile";
    "flash-attention" "use-flash-attn" "flash-attn" "attn-implementation" "use-flash-attn-2"
        => [] "attention takes the fastest way that it has";
};

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::Config;
    use super::*;

    #[test]
    fn advice_for_a_foreign_name_is_of_settings_that_there_are_and_of_values_that_they_take() {
        let mut seen = HashSet::new();
        for foreign in FOREIGN {
            for (key, value) in foreign.ours {
                let parsed = kind(key).unwrap_or_else(|| panic!("{key}")).parse(value);
                assert!(parsed.is_ok(), "{key} {value}: {parsed:?}");
            }
            for name in foreign.names {
                assert!(seen.insert(*name), "{name} is there twice");
                assert!(OPTIONS.iter().all(|option| option.key != *name), "{name} is ours");
                assert_eq!(*name, name.to_lowercase().replace('_', "-"));
                let error = Config::from_toml(&format!("{name} = 1")).unwrap_err().to_string();
                let said = format!("line 1: unknown key `{name}`; ");
                assert!(error.starts_with(&said), "{error}");
                for line in error.split('`').filter(|part| part.contains(" = ")) {
                    // Files that it names need not be there.
                    let named = ["init-from", "model"].iter().any(|key| line.starts_with(key));
                    assert!(named || Config::from_toml(line).is_ok(), "{line} of: {error}");
                }
            }
        }
    }

    #[test]
    fn a_foreign_flag_leads_to_ours_in_any_spelling() {
        let said = |name: &str| flags_for(name).unwrap();
        assert!(said("--gradient_accumulation_steps").starts_with("use `--micro-batches 8` ("));
        assert!(said("--bf16").starts_with("use `--precision bf16` ("));
        assert_eq!(said("--Max-Steps"), "use `--steps 1000`");
        assert!(
            said("--wandb").starts_with("use `--tensorboard runs` and `--metrics out.jsonl` (")
        );
        assert_eq!(said("use_distributed_optimizer"), "use `--zero1`");
        assert!(said("compile").starts_with("leave it out: "));
        assert_eq!(flags_for("--colour"), None);
    }
}
