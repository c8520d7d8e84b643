//! The adapters of a checkpoint as a folder that peft reads.

use std::path::Path;

use serde_json::json;
use zeropp_checkpoint::checkpoint_at;
use zeropp_weights::{Family, StoreAs, Tensor, export, write_adapter};

use crate::Error;
use crate::checkpoint::export::{ExportReport, whole_or_gone};
use crate::checkpoint::export_error::ExportError;
use crate::checkpoint::merged::Merged;

/// Writes the adapters of a checkpoint (its folder, or that of checkpoints for the newest) into the
/// new folder `to`, as peft's `save_pretrained` does: `adapter_config.json` and
/// `adapter_model.safetensors`.
///
/// # Errors
/// A checkpoint without adapters, or one that is damaged or not there, a folder that is not empty.
pub fn export_adapter(from: &Path, to: &Path, store_as: StoreAs) -> Result<ExportReport, Error> {
    let wrong = |problem: &str, help: &str| Error::Export {
        path: from.to_path_buf(),
        problem: problem.into(),
        help: help.into(),
    };
    let none = || wrong("it has no adapters", "train some with lora-rank, or leave --adapter out");
    let checkpoint = checkpoint_at(from)?.ok_or_else(none)?;
    let merged = Merged::open(from, false)?;
    let lora = merged.lora.ok_or_else(none)?;
    let base = merged.shapes(false);
    let family = Family::of(base.iter().map(|p| p.name.as_str())).ok_or_else(none)?;
    let shapes = merged.shapes(true);
    let plan = export::adapters(family, &shapes, store_as);
    let tensors: Vec<Tensor> = plan.iter().map(|e| e.tensor.clone()).collect();
    let base_path = checkpoint.manifest().base.as_ref().and_then(|base| base.path.clone());
    let config = json!({
        "base_model_name_or_path": &base_path,
        "bias": "none",
        "fan_in_fan_out": family == Family::Gpt2,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": merged.maps,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    });
    let others = [("adapter_config.json", format!("{config:#}\n").into_bytes())];
    let read = merged.write(from, |read| {
        let values = |i: usize| -> Result<Vec<f32>, ExportError> {
            let mut values = vec![0.0; plan[i].elements()];
            read(&plan[i].parameter, plan[i].first, &mut values)?;
            Ok(plan[i].arranged(values))
        };
        write_adapter(to, &tensors, &others, values)
    })?;
    whole_or_gone(read, to)?;
    Ok(ExportReport {
        step: Some(checkpoint.manifest().step),
        tensors: tensors.len(),
        parameters: plan.iter().map(|e| e.elements()).sum(),
        copied: Vec::new(),
        notes: base_path.as_deref().and_then(unreadable_base).into_iter().collect(),
    })
}

/// Advice for peft in place of a base that it cannot read, in words.
fn unreadable_base(path: &str) -> Option<String> {
    (!Path::new(path).join("config.json").is_file()).then(|| {
        format!(
            "adapter_config.json names {path} as the base, which is no Hugging Face folder, so \
             that peft cannot open it: make one with zeropp export {path} -o FOLDER, and write its \
             path there as base_model_name_or_path"
        )
    })
}
