//! How weights are updated, as the settings say it.

use std::sync::Arc;

use zeropp_zero3::rule::{NoDecay, UpdateRule};

use super::optimizers::{OptimizerKind, Values};
use super::validate::{check, number};
use super::{Config, ConfigError};

impl Config {
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
        self.optimizer.rule(&Values {
            beta1: self.beta1,
            beta2: self.beta2().unwrap_or(0.0),
            eps: self.eps,
            momentum: self.momentum().unwrap_or(0.0),
            nesterov: self.nesterov().unwrap_or(false),
            weight_decay: self.weight_decay,
        })
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
        let kind = self.optimizer;
        number("weight-decay", self.weight_decay, self.weight_decay >= 0.0, "0 or more")?;
        let betas = [("beta1", Some(self.beta1)), ("beta2", self.beta2().or(self.beta2))];
        for (field, beta) in betas.into_iter().filter_map(|(field, beta)| Some((field, beta?))) {
            number(field, beta, (0.0..1.0).contains(&beta), "0 or more and less than 1")?;
            check((beta as f32) < 1.0, || {
                let problem =
                    "the moments are kept in fp32, where that is 1: they would never decay";
                ConfigError::value(field, beta, problem, "use at most 0.9999999")
            })?;
        }
        number("eps", self.eps, self.eps > 0.0, "more than 0, such as 1e-8")?;
        let has_momentum = self.momentum().is_some();
        let with = |kind: &&OptimizerKind| kind.usual().momentum.is_some();
        let with: Vec<&str> = OptimizerKind::ALL.iter().filter(with).map(|k| k.name()).collect();
        let help = format!("leave it out, or use optimizer {}", with.join(" or "));
        if let Some(momentum) = self.momentum {
            let problem = format!("optimizer {kind} has no such setting");
            check(has_momentum, || ConfigError::value("momentum", momentum, problem, &*help))?;
            let range = "0 or more and less than 1";
            number("momentum", momentum, (0.0..1.0).contains(&momentum), range)?;
            check((momentum as f32) < 1.0, || {
                let problem = "it is kept in fp32, where that is 1: it would never decay";
                ConfigError::value("momentum", momentum, problem, "use at most 0.9999999")
            })?;
        }
        if let Some(nesterov) = self.nesterov {
            let problem = format!("optimizer {kind} has no momentum");
            check(has_momentum, || ConfigError::value("nesterov", nesterov, problem, &*help))?;
            check(!nesterov || self.momentum() != Some(0.0), || {
                let problem = "looks ahead along a momentum, and that is 0";
                ConfigError::value("nesterov", nesterov, problem, "use a momentum, such as 0.9")
            })?;
        }
        self.check_moments()?;
        self.no_decay_groups()?;
        let Some(ema) = self.ema else { return Ok(()) };
        number("ema", ema, ema > 0.0 && ema < 1.0, "more than 0 and less than 1, such as 0.999")
    }

    /// Decays and an epsilon are for optimizers that have them.
    fn check_moments(&self) -> Result<(), ConfigError> {
        let (kind, usual, defaults) = (self.optimizer, self.optimizer.usual(), Self::default());
        let given = |value: f64, default: f64| (value != default).then_some(value);
        for (field, value, usual) in [
            ("beta1", given(self.beta1, defaults.beta1), usual.beta1),
            ("beta2", self.beta2, usual.beta2),
            ("eps", given(self.eps, defaults.eps), usual.eps),
        ] {
            check(value.is_none() || usual.is_some(), || {
                let problem = format!("optimizer {kind} has no such setting");
                ConfigError::value(field, value.unwrap_or_default(), problem, "leave it out")
            })?;
        }
        Ok(())
    }
}
