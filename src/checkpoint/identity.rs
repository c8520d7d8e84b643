//! The facts that a checkpoint keeps beside the settings so that its model is found again, and is
//! the same: files may have moved, or been changed, and data may say what its tokens are.

use std::collections::BTreeMap;

use zeropp_core::data::Dataset;
use zeropp_core::model::decoder::Decoder;
use zeropp_core::model::hf_written::config_json;

use crate::config::{Config, is_path};

/// The settings of a run as a checkpoint keeps them, and what stands beside them.
type Kept = BTreeMap<String, String>;

/// The key of the digest that distinguishes the model of a file from others.
pub(crate) const MODEL_DIGEST: &str = "model-digest";
/// The key of the kind of tokens, where an index said it and not the settings.
pub(crate) const TOKENS: &str = "tokens";
/// Settings that may be paths; what was typed stands under their own names.
const PATHS: [&str; 2] = ["model", "init-from"];

/// Where the setting `key` is from the root on.
fn whole(key: &str) -> String {
    format!("{key}-at")
}

/// Adds whole paths and the digest of the model to `kept`.
pub(crate) fn add(config: &Config, kept: &mut Kept) {
    for key in PATHS {
        let text = kept.get(key).filter(|text| key != "model" || is_path(text));
        let path = text.and_then(|text| std::path::absolute(text).ok());
        kept.extend(path.map(|path| (whole(key), path.display().to_string())));
    }
    kept.extend(digest(config).map(|digest| (MODEL_DIGEST.into(), digest)));
}

/// Adds what the tokens of `data` are.
pub(crate) fn add_tokens(data: &Dataset, kept: &mut Kept) {
    kept.insert(TOKENS.into(), data.tokenizer().to_string());
}

/// The setting `key` as it was typed. Earlier builds kept text with its quotes.
pub(crate) fn typed<'a>(kept: &'a Kept, key: &str) -> Option<&'a str> {
    kept.get(key).map(|text| text.trim_matches('"'))
}

/// Where the setting `key` may be found: as it was typed, and where that was, which earlier builds
/// did not keep.
pub(crate) fn places(kept: &Kept, key: &str) -> Vec<String> {
    let typed = typed(kept, key).map(str::to_owned);
    typed.into_iter().chain(kept.get(&whole(key)).cloned()).collect()
}

/// Whether two runs have the same model under different paths.
pub(crate) fn is_same_model(now: &Kept, then: &Kept) -> bool {
    now.get(MODEL_DIGEST).zip(then.get(MODEL_DIGEST)).is_some_and(|(now, then)| now == then)
}

/// The digest of the model that a file describes; none where no file does.
pub(crate) fn digest(config: &Config) -> Option<String> {
    let decoder = is_path(&config.model).then(|| config.decoder(1).ok()).flatten()?;
    digest_of(&decoder)
}

/// All that a `config.json` would say, in short; but not what no weight or sum depends on, the
/// number of ids and for how long texts the model was made.
pub(crate) fn digest_of(decoder: &Decoder) -> Option<String> {
    let mut fields = config_json(decoder)?;
    fields.retain(|key, _| !["vocab_size", "max_position_embeddings"].contains(&key.as_str()));
    let text = serde_json::to_vec(&fields).expect("plain data");
    Some(blake3::hash(&text).to_hex()[..16].to_owned())
}
