//! The `generation_config.json` of a Hugging Face folder, of which only the end of a text is used:
//! how tokens are chosen is for the command that writes them.

use super::fields::{Fault, FieldType, Fields, Known};

/// Read.
const TOKENS: Known<'_> = &[
    ("bos_token_id", FieldType::Ids),
    ("eos_token_id", FieldType::Ids),
    ("pad_token_id", FieldType::Ids),
];

/// Change nothing of the model and of where its text ends.
const HARMLESS: [&str; 70] = [
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_config",
    "cache_implementation",
    "chat_format",
    "compile_config",
    "constraints",
    "decoder_start_token_id",
    "disable_compile",
    "diversity_penalty",
    "do_sample",
    "dola_layers",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_cache_len",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_time",
    "max_window_size",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "penalty_alpha",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict_in_generate",
    "return_legacy_cache",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "target_lookbehind",
    "temperature",
    "token_healing",
    "top_h",
    "top_k",
    "top_p",
    "transformers_version",
    "trust_remote_code",
    "typical_p",
    "use_cache",
    "watermarking_config",
];

/// Ids that end a text, by a `generation_config.json`.
pub(super) fn ends(fields: Fields<'_>) -> Result<Vec<u32>, Fault> {
    fields.check(&[TOKENS, &HARMLESS.map(|field| (field, FieldType::Any))])?;
    fields.ids("eos_token_id")
}
