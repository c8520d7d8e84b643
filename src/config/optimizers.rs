//! The optimizers that settings name, a row for each.

use std::sync::Arc;

use zeropp_core::choice;
use zeropp_zero3::adafactor::Adafactor;
use zeropp_zero3::adamw::AdamW;
use zeropp_zero3::adamw8bit::AdamW8bit;
use zeropp_zero3::lion::Lion;
use zeropp_zero3::muon::Muon;
use zeropp_zero3::rule::UpdateRule;
use zeropp_zero3::sgd::Sgd;

/// The values that an optimizer has, with what they are where they are left out; `None` where it
/// has no such value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Usual {
    pub(super) beta1: Option<f64>,
    pub(super) beta2: Option<f64>,
    pub(super) eps: Option<f64>,
    pub(super) momentum: Option<f64>,
    pub(super) nesterov: Option<bool>,
}

impl Usual {
    /// The names of those that it has.
    pub(super) fn each(&self) -> Vec<&'static str> {
        let all = [
            ("beta1", self.beta1.is_some()),
            ("beta2", self.beta2.is_some()),
            ("eps", self.eps.is_some()),
            ("momentum", self.momentum.is_some()),
            ("nesterov", self.nesterov.is_some()),
        ];
        all.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
    }
}

const NONE: Usual = Usual { beta1: None, beta2: None, eps: None, momentum: None, nesterov: None };

/// The values of those settings in a run; those that its optimizer has not are 0.
pub(super) struct Values {
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) eps: f64,
    pub(super) momentum: f64,
    pub(super) nesterov: bool,
    pub(super) weight_decay: f64,
}

impl Values {
    fn adamw(&self) -> AdamW {
        let Values { beta1, beta2, eps, weight_decay, .. } = *self;
        AdamW { beta1, beta2, eps, weight_decay }
    }
}

/// The optimizers: a row says what one does, how it is called, which settings it has and which
/// rule it is.
macro_rules! optimizers {
    ($(
        $(#[doc = $doc:literal])+
        $kind:ident = $name:literal { $($setting:ident: $usual:expr),* }
        $values:ident => $rule:expr;
    )+) => {
        choice! {
            /// How weights follow from gradients.
            OptimizerKind { $($(#[doc = $doc])+ $kind = $name,)+ }
        }

        impl OptimizerKind {
            /// The optimizer in a few words, with the learning rate and weight decay that suit it.
            pub fn about(self) -> &'static str {
                match self {
                    $(Self::$kind => concat!($($doc),+).trim_ascii_start(),)+
                }
            }

            // A row may have all settings.
            #[allow(clippy::needless_update)]
            pub(super) fn usual(self) -> Usual {
                match self {
                    $(Self::$kind => Usual { $($setting: Some($usual),)* ..NONE },)+
                }
            }

            pub(super) fn rule(self, values: &Values) -> Arc<dyn UpdateRule> {
                match self {
                    $(Self::$kind => {
                        let $values = values;
                        Arc::new($rule)
                    })+
                }
            }
        }
    };
}

optimizers! {
    /// Adam with decoupled weight decay: lr 1e-4 to 1e-3, weight-decay 0.01 to 0.1.
    Adamw = "adamw" { beta1: 0.9, beta2: 0.999, eps: 1e-8 }
    v => v.adamw();
    /// AdamW with moments in 8 bits, a quarter of their memory: lr and weight-decay as for adamw.
    Adamw8bit = "adamw8bit" { beta1: 0.9, beta2: 0.999, eps: 1e-8 }
    v => AdamW8bit { adamw: v.adamw() };
    /// Stochastic gradient descent with momentum: lr 0.01 to 0.1, far above that of adamw.
    Sgd = "sgd" { momentum: 0.9, nesterov: false }
    v => Sgd { momentum: v.momentum, nesterov: v.nesterov, weight_decay: v.weight_decay };
    /// Steps of one size along the sign of a mean gradient: a third to a tenth of the lr of
    /// adamw, three to ten times its weight-decay.
    Lion = "lion" { beta1: 0.9, beta2: 0.99 }
    v => Lion { beta1: v.beta1, beta2: v.beta2, weight_decay: v.weight_decay };
    /// Mean gradients made orthogonal for the matrices of blocks, AdamW for all else: lr and
    /// weight-decay as for adamw.
    Muon = "muon" { momentum: 0.95, nesterov: true, beta1: 0.9, beta2: 0.999, eps: 1e-8 }
    v => Muon { momentum: v.momentum, nesterov: v.nesterov, adamw: v.adamw() };
    /// Second moments of rows and columns alone, and steps relative to the size of a parameter: lr
    /// 1e-2.
    Adafactor = "adafactor" {}
    v => Adafactor { weight_decay: v.weight_decay };
}
