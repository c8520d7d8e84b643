//! How weights are updated, as the settings say it.

use std::sync::Arc;

use zeropp_zero3::adamw::AdamW;
use zeropp_zero3::lion::Lion;
use zeropp_zero3::muon::Muon;
use zeropp_zero3::rule::{NoDecay, UpdateRule};
use zeropp_zero3::sgd::Sgd;

use super::validate::{check, number};
use super::{Config, ConfigError, OptimizerKind};

impl Config {
    /// Decay of the second moment, or with Lion of the mean gradient: 0.99 there, else 0.999.
    pub fn beta2(&self) -> f64 {
        let usual = if self.optimizer == OptimizerKind::Lion { 0.99 } else { 0.999 };
        self.beta2.unwrap_or(usual)
    }

    /// The share that stays of SGD's velocity, 0.9, or of Muon's mean gradient, 0.95; none where
    /// the optimizer has neither.
    pub fn momentum(&self) -> Option<f64> {
        match self.optimizer {
            OptimizerKind::Sgd => Some(self.momentum.unwrap_or(0.9)),
            OptimizerKind::Muon => Some(self.momentum.unwrap_or(0.95)),
            OptimizerKind::Adamw | OptimizerKind::Lion => None,
        }
    }

    /// Whether the momentum is Nesterov's: Muon's is; none where the optimizer has no momentum.
    pub fn nesterov(&self) -> Option<bool> {
        self.momentum().map(|_| self.nesterov.unwrap_or(self.optimizer == OptimizerKind::Muon))
    }

    /// The optimizer.
    pub(crate) fn update_rule(&self) -> Arc<dyn UpdateRule> {
        let (beta1, beta2, weight_decay) = (self.beta1, self.beta2(), self.weight_decay);
        let momentum = self.momentum().unwrap_or(0.0);
        let nesterov = self.nesterov().unwrap_or(false);
        let adamw = AdamW { beta1, beta2, eps: self.eps, weight_decay };
        match self.optimizer {
            OptimizerKind::Adamw => Arc::new(adamw),
            OptimizerKind::Sgd => Arc::new(Sgd { momentum, nesterov, weight_decay }),
            OptimizerKind::Lion => Arc::new(Lion { beta1, beta2, weight_decay }),
            OptimizerKind::Muon => Arc::new(Muon { momentum, nesterov, adamw }),
        }
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
        for (field, beta) in [("beta1", self.beta1), ("beta2", self.beta2())] {
            number(field, beta, (0.0..1.0).contains(&beta), "0 or more and less than 1")?;
            check((beta as f32) < 1.0, || {
                let problem =
                    "the moments are kept in fp32, where that is 1: they would never decay";
                ConfigError::value(field, beta, problem, "use at most 0.9999999")
            })?;
        }
        number("eps", self.eps, self.eps > 0.0, "more than 0, such as 1e-8")?;
        let has_momentum = self.momentum().is_some();
        let help = "leave it out, or use optimizer sgd or muon";
        if let Some(momentum) = self.momentum {
            let problem = format!("optimizer {kind} has no such setting");
            check(has_momentum, || ConfigError::value("momentum", momentum, problem, help))?;
            let range = "0 or more and less than 1";
            number("momentum", momentum, (0.0..1.0).contains(&momentum), range)?;
            check((momentum as f32) < 1.0, || {
                let problem = "it is kept in fp32, where that is 1: it would never decay";
                ConfigError::value("momentum", momentum, problem, "use at most 0.9999999")
            })?;
        }
        if let Some(nesterov) = self.nesterov {
            let problem = format!("optimizer {kind} has no momentum");
            check(has_momentum, || ConfigError::value("nesterov", nesterov, problem, help))?;
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
        let (kind, usual) = (self.optimizer, Self::default());
        let is_sgd = kind == OptimizerKind::Sgd;
        let given = |value: f64, usual: f64| (value != usual).then_some(value);
        for (field, value, is_absent) in [
            ("beta1", given(self.beta1, usual.beta1), is_sgd),
            ("beta2", self.beta2, is_sgd),
            ("eps", given(self.eps, usual.eps), is_sgd || kind == OptimizerKind::Lion),
        ] {
            check(value.is_none() || !is_absent, || {
                let problem = format!("optimizer {kind} has no such setting");
                ConfigError::value(field, value.unwrap_or_default(), problem, "leave it out")
            })?;
        }
        Ok(())
    }
}
