//! The part of the model that trains, by the settings.

use zeropp_core::model::decoder::Decoder;
use zeropp_core::model::tuning::{Lora, Tuning, matches};

use super::validate::{check, number};
use super::{Balance, Config, ConfigError};

impl Config {
    /// The part of `decoder` that trains: all of it, all but what is frozen, or adapters alone.
    ///
    /// # Errors
    /// A pattern that no parameter has or that leaves nothing to train, adapters that cannot be.
    pub fn tuning(&self, decoder: &Decoder) -> Result<Tuning, ConfigError> {
        let lora = self.lora(decoder)?;
        let freeze = self.freeze_patterns();
        check(lora.is_none() || freeze.is_empty(), || {
            let problem = "with lora-rank the adapters alone train, and all else is frozen";
            let help = "leave freeze out, or lora-rank";
            ConfigError::value("freeze", freeze.join(","), problem, help)
        })?;
        let names: Vec<String> = decoder.tensors().into_iter().map(|t| t.name).collect();
        for pattern in &freeze {
            check(names.iter().any(|name| matches(pattern, name)), || {
                let of_blocks = names.iter().skip(1).take(3).map(String::as_str);
                let such: Vec<&str> =
                    names.first().map(String::as_str).into_iter().chain(of_blocks).collect();
                let help = format!(
                    "use names or modules of model {}, such as {}; * is any text",
                    self.model,
                    such.join(", ")
                );
                ConfigError::value("freeze", pattern, "no parameter is called so", help)
            })?;
        }
        let all = names.iter().all(|name| freeze.iter().any(|pattern| matches(pattern, name)));
        check(!all, || {
            let problem = "nothing is left to train";
            ConfigError::value("freeze", freeze.join(","), problem, "freeze less")
        })?;
        Ok(Tuning { freeze, lora, balances: self.balance == Balance::Bias })
    }

    fn freeze_patterns(&self) -> Vec<String> {
        let patterns = self.freeze.iter().flat_map(|text| text.split(','));
        patterns.map(|pattern| pattern.trim().to_owned()).collect()
    }

    fn lora(&self, decoder: &Decoder) -> Result<Option<Lora>, ConfigError> {
        let rank = self.lora_rank;
        if rank == 0 {
            let alpha = self.lora_alpha.map(|alpha| ("lora-alpha", alpha.to_string()));
            let targets = self.lora_targets.clone().map(|targets| ("lora-targets", targets));
            return match alpha.or(targets) {
                Some((field, value)) => {
                    let help = format!("set lora-rank, such as 8, or leave {field} out");
                    Err(ConfigError::value(field, value, "there are no adapters", help))
                }
                None => Ok(None),
            };
        }
        let most = decoder.hidden;
        check(rank <= most, || {
            let problem = format!("adapters are to be smaller than hidden = {most}");
            ConfigError::value("lora-rank", rank, problem, "use 8 to 64")
        })?;
        let alpha = self.lora_alpha.unwrap_or(2.0 * rank as f64);
        number("lora-alpha", alpha, alpha > 0.0, "more than 0, such as twice lora-rank")?;
        let targets = self.lora_targets.as_deref();
        if let Some(targets) = targets {
            self.check_targets(targets, decoder)?;
        }
        let lora = Lora::new(rank, alpha, targets, decoder.names());
        lora.map(Some).map_err(|(target, known)| {
            // A name that two maps end in is one target.
            let known: Vec<&str> = known
                .iter()
                .enumerate()
                .filter_map(|(i, name)| (!known[..i].contains(name)).then_some(*name))
                .collect();
            let problem = format!("model {} has no linear map {target}", self.model);
            let help = format!("use some of {}, or all", known.join(", "));
            ConfigError::value("lora-targets", targets.unwrap_or_default(), problem, help)
        })
    }
}

impl Config {
    /// Refuses adapters of experts, and of an MLP that no layer has beside experts.
    fn check_targets(&self, targets: &str, decoder: &Decoder) -> Result<(), ConfigError> {
        let Some(moe) = decoder.moe else { return Ok(()) };
        let has_mlp = (0..decoder.layers).any(|layer| decoder.moe_of(layer).is_none());
        let names = decoder.names();
        for target in targets.split(',').map(str::trim) {
            let is_it = |name: &&str| {
                let end = name.rsplit('.').next().unwrap_or(name);
                [*name, end].contains(&target) || end.strip_suffix("_proj") == Some(target)
            };
            let of_mlp = names.up.iter().chain([&names.down]).any(is_it);
            let of_experts = of_mlp && !has_mlp && moe.shared.is_none();
            check(!of_experts && !target.starts_with("mlp.experts"), || {
                let problem = format!("{target} is of experts, which have no adapters");
                let help = "use maps of attention, such as q,k,v,o";
                ConfigError::value("lora-targets", targets, problem, help)
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(toml: &str) -> String {
        Config::from_toml(toml).unwrap().validate().unwrap_err().to_string()
    }

    #[test]
    fn unknown_patterns_are_refused_with_valid_ones() {
        for (toml, message) in [
            ("freeze = 'wte,h.99'", "freeze = h.99: no parameter is called so; use names"),
            ("freeze = '*'", "freeze = *: nothing is left to train; freeze less"),
            ("lora-alpha = 16.0", "lora-rank:alpha = 16: there are no adapters; set lora-rank"),
            ("lora-targets = 'q'", "lora-rank:targets = q: there are no adapters"),
            ("lora-rank = 4\nfreeze = 'wte'", "freeze = wte: with lora-rank the adapters alone"),
            ("lora-rank = 4\nlora-alpha = -1.0", "lora-rank:alpha = -1: is out of range"),
            ("lora-rank = 65", "adapters are to be smaller than hidden = 64; use 8 to 64"),
            (
                "lora-rank = 4\nlora-targets = 'q'",
                "model gpt has no linear map q; use some of c_attn, c_proj, c_fc, or all",
            ),
        ] {
            let text = refusal(toml);
            assert!(text.contains(message), "{toml}: {text}");
        }
        let llama = "model = 'llama'\nlora-rank = 4\nlora-targets = 'q,v,down'";
        Config::from_toml(llama).unwrap().validate().unwrap();
        Config::from_toml("freeze = 'wte,h.0,*.bias'").unwrap().validate().unwrap();
    }
}
