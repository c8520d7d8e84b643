//! The losses of routers, which stand beside the run's loss: their gradients join the router's B,
//! and their values are figures of the step.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::kernels::balance::{RouterFigures, RouterLosses};

/// The figures of a stage's routers in a step, by the layer's place in the stage and the
/// micro-batch.
pub type StageRouters = Arc<Mutex<BTreeMap<(usize, usize), RouterFigures>>>;

/// What routers of one stage and micro-batch add to the loss, and where their figures go.
#[derive(Clone)]
pub struct RouterCx {
    /// The weights of the losses.
    pub losses: RouterLosses,
    /// The gradient of the micro-batch's loss: one over the micro-batches of the step.
    pub loss_scale: f32,
    /// Index of the micro-batch.
    pub micro_batch: usize,
    /// The figures of the stage in this step. A forward that is done again writes the same ones.
    pub figures: StageRouters,
}

/// Units of a sum's figure.
const UNIT: f64 = (1_u64 << 32) as f64;

/// The figures of a layer's router over some micro-batches. Figures are added as whole numbers, so
/// that the sum is the same in any order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouterSums {
    micro_batches: u64,
    balance: i64,
    z: i64,
    entropy: i64,
    choices: Vec<u64>,
}

impl RouterSums {
    /// Adds those of a micro-batch; what is no number counts as the largest one.
    pub fn add(&mut self, of: &RouterFigures) {
        let whole = |x: f64| if x.is_nan() { i64::MAX } else { (x * UNIT) as i64 };
        self.merge(&RouterSums {
            micro_batches: 1,
            balance: whole(of.balance),
            z: whole(of.z),
            entropy: whole(of.entropy),
            choices: of.choices.iter().map(|n| u64::from(*n)).collect(),
        });
    }

    /// Adds those of other micro-batches.
    pub fn merge(&mut self, other: &RouterSums) {
        self.micro_batches += other.micro_batches;
        self.balance = self.balance.saturating_add(other.balance);
        self.z = self.z.saturating_add(other.z);
        self.entropy = self.entropy.saturating_add(other.entropy);
        self.choices.resize(self.choices.len().max(other.choices.len()), 0);
        self.choices.iter_mut().zip(&other.choices).for_each(|(sum, n)| *sum += n);
    }

    /// The mean balance loss, z-loss and entropy of scores of a micro-batch.
    pub fn means(&self) -> [f64; 3] {
        [self.balance, self.z, self.entropy]
            .map(|sum| sum as f64 / UNIT / self.micro_batches.max(1) as f64)
    }

    /// Choices of the most loaded expert over the mean of all.
    pub fn fullest(&self) -> f64 {
        let all: u64 = self.choices.iter().sum();
        let most = self.choices.iter().max().copied().unwrap_or(0);
        most as f64 * self.choices.len() as f64 / all.max(1) as f64
    }

    /// Experts that no token went to.
    pub fn idle(&self) -> usize {
        self.choices.iter().filter(|n| **n == 0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_of_figures_are_the_same_in_any_order() {
        let figures = |i: usize| RouterFigures {
            balance: 1.0 + (i as f64).sin() / 3.0,
            z: (i as f64).exp() / 7.0,
            entropy: 1.0 / (i + 1) as f64,
            choices: vec![i as u32, 0, 2 * i as u32],
        };
        let sum = |order: &mut dyn Iterator<Item = usize>| {
            let mut sums = RouterSums::default();
            order.for_each(|i| sums.add(&figures(i)));
            sums
        };
        let (forth, mut back) = (sum(&mut (0..9)), sum(&mut (4..9).rev()));
        back.merge(&sum(&mut (0..4).rev()));
        assert_eq!(forth, back);
        let mean = (0..9).map(|i| figures(i).balance).sum::<f64>() / 9.0;
        assert!((forth.means()[0] - mean).abs() < 1e-9);
        assert_eq!((forth.fullest(), forth.idle()), (2.0, 1));
    }

    #[test]
    fn a_loss_that_is_no_number_breaks_no_sum() {
        let mut sums = RouterSums::default();
        for z in [f64::INFINITY, f64::NAN, f64::INFINITY] {
            sums.add(&RouterFigures { z, ..RouterFigures::default() });
        }
        assert!(sums.means()[1] > 1e8 && sums.fullest() == 0.0);
        let mut sums = RouterSums::default();
        sums.add(&RouterFigures { balance: f64::NAN, ..RouterFigures::default() });
        assert!(sums.means()[0] > 1e9, "nobody takes it for a small loss");
    }
}
