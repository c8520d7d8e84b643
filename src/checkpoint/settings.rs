//! The settings that a checkpoint keeps.

use crate::checkpoint::identity;
use crate::checkpoint::kept::{self, Kept};
use crate::config::{Config, OnResume};

/// The settings that make a run what it is, each as a person would write it, and the digest of its
/// model.
pub(crate) fn settings(config: &Config) -> Kept {
    let resolved = config.resolved();
    let kept = resolved.texts().filter(|(option, _)| option.on_resume != OnResume::Left);
    let kept = kept.filter_map(|(option, text)| Some((option.key.to_owned(), text?)));
    let mut kept = kept.collect();
    identity::add(config, &mut kept);
    kept::add_deal(config, &mut kept);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_kept_as_plain_text() {
        let config = Config { pp: 2, zero3: 3, dp: 2, lr: 0.1, ..Config::default() };
        let kept = settings(&config);
        assert_eq!((kept["lr"].as_str(), kept["seed"].as_str()), ("0.1", "0"));
        assert_eq!(kept["schedule"], "zeropp", "quoted once, by the manifest");
        assert!(!kept.contains_key("save-every") && !kept.contains_key("resume"));
    }
}
