//! How weights are updated, as the settings say it.

use std::sync::Arc;

use zeropp_core::model::tuning::is_choice_bias;
use zeropp_zero3::balanced::Balanced;
use zeropp_zero3::rule::{NoDecay, UpdateRule};

use super::optimizers::Values;
use super::validate::{check, number};
use super::{Balance, Config, ConfigError};

/// DeepSeek-V3's.
const BIAS_RATE: f64 = 1e-3;

impl Config {
    /// The decay of the mean gradient, or with Lion its share of the direction; none where the
    /// optimizer has neither.
    pub fn beta1(&self) -> Option<f64> {
        self.optimizer.usual().beta1.map(|usual| self.beta1.unwrap_or(usual))
    }

    /// What is added to the root of the second moment; none where the optimizer has none.
    pub fn eps(&self) -> Option<f64> {
        self.optimizer.usual().eps.map(|usual| self.eps.unwrap_or(usual))
    }

    /// The decay of the second moment, or with Lion of the mean gradient; none where the optimizer
    /// has neither.
    pub fn beta2(&self) -> Option<f64> {
        self.optimizer.usual().beta2.map(|usual| self.beta2.unwrap_or(usual))
    }

    /// The share that stays of SGD's velocity or of Muon's mean gradient; none where the optimizer
    /// has neither.
    pub fn momentum(&self) -> Option<f64> {
        self.optimizer.usual().momentum.map(|usual| self.momentum.unwrap_or(usual))
    }

    /// Whether the momentum is Nesterov's; none where the optimizer has no momentum.
    pub fn nesterov(&self) -> Option<bool> {
        self.optimizer.usual().nesterov.map(|usual| self.nesterov.unwrap_or(usual))
    }

    /// The optimizer.
    pub(crate) fn update_rule(&self) -> Arc<dyn UpdateRule> {
        let rule = self.optimizer.rule(&Values {
            beta1: self.beta1().unwrap_or(0.0),
            beta2: self.beta2().unwrap_or(0.0),
            eps: self.eps().unwrap_or(0.0),
            momentum: self.momentum().unwrap_or(0.0),
            nesterov: self.nesterov().unwrap_or(false),
            weight_decay: self.weight_decay,
        });
        self.balanced(rule)
    }

    /// The same rule, beside which biases of the choice of experts move where they do.
    pub(crate) fn balanced(&self, rule: Arc<dyn UpdateRule>) -> Arc<dyn UpdateRule> {
        if self.balance != Balance::Bias {
            return rule;
        }
        let rate = self.balance_weight.unwrap_or(BIAS_RATE) as f32;
        Arc::new(Balanced { rule, rate, is_bias: is_choice_bias })
    }

    /// The groups that do not decay, where they are given.
    ///
    /// # Errors
    /// A word that is none of the groups.
    pub(crate) fn no_decay_groups(&self) -> Result<Option<NoDecay>, ConfigError> {
        let Some(text) = &self.no_decay else { return Ok(None) };
        let mut groups = NoDecay::default();
        let words: Vec<&str> = text.split(',').map(str::trim).collect();
        for word in &words {
            match *word {
                "norms" => groups.norms = true,
                "biases" => groups.biases = true,
                "embeddings" => groups.embeddings = true,
                "none" if words.len() == 1 => {}
                _ => {
                    let problem = "expected groups of parameters";
                    let help = "use some of norms,biases,embeddings, or none";
                    return Err(ConfigError::value("no-decay", text, problem, help));
                }
            }
        }
        Ok(Some(groups))
    }

    pub(super) fn check_optimizer(&self) -> Result<(), ConfigError> {
        number("weight-decay", self.weight_decay, self.weight_decay >= 0.0, "0 or more")?;
        self.check_owned()?;
        let range = "0 or more and less than 1";
        let shares = [("beta1", self.beta1), ("beta2", self.beta2), ("momentum", self.momentum)];
        for (field, share) in shares.into_iter().filter_map(|(field, x)| Some((field, x?))) {
            number(field, share, (0.0..1.0).contains(&share), range)?;
            check((share as f32) < 1.0, || {
                let problem = "it is kept in fp32, where that is 1: it would never decay";
                ConfigError::value(field, share, problem, "use at most 0.9999999")
            })?;
        }
        let eps = self.eps.unwrap_or(1.0);
        number("eps", eps, eps > 0.0, "more than 0, such as 1e-8")?;
        if let Some(nesterov) = self.nesterov {
            check(!nesterov || self.momentum() != Some(0.0), || {
                let problem = "looks ahead along a momentum, and that is 0";
                ConfigError::value("nesterov", nesterov, problem, "use a momentum, such as 0.9")
            })?;
        }
        self.no_decay_groups()?;
        let Some(ema) = self.ema else { return Ok(()) };
        number("ema", ema, ema > 0.0 && ema < 1.0, "more than 0 and less than 1, such as 0.999")
    }

    /// Each value is for the optimizers that have it.
    fn check_owned(&self) -> Result<(), ConfigError> {
        let values = self.optimizer.usual().each();
        let shown = |value: Option<f64>| value.map(|value| value.to_string());
        // Files that earlier versions have printed name these for all optimizers.
        let other = |value: Option<f64>, printed: f64| value.filter(|value| *value != printed);
        let given = [
            ("beta1", shown(other(self.beta1, 0.9))),
            ("beta2", shown(self.beta2)),
            ("eps", shown(other(self.eps, 1e-8))),
            ("momentum", shown(self.momentum)),
            ("nesterov", self.nesterov.map(|value| value.to_string())),
        ];
        for (field, value) in given.into_iter().filter_map(|(field, value)| Some((field, value?))) {
            check(values.contains(&field), || {
                let problem = format!("optimizer {} has no such value", self.optimizer);
                let own = format!("use {}, or leave it out", values.join(", "));
                let help = if values.is_empty() { "leave it out".into() } else { own };
                ConfigError::value(field, value, problem, help)
            })?;
        }
        Ok(())
    }
}
