//! What a run's stages take: as a file has it, or else an estimate.

use std::ops::Range;

use zeropp_core::files::escaped_line;
use zeropp_core::layer::{BatchShape, Part};
use zeropp_pipeline::costs::{BlockTimes, Sharers, Table, check_sums};
use zeropp_pipeline::memory::StageBytes;
use zeropp_pipeline::simulate::{Costs, LinkCosts, StageCosts};

use crate::config::{Config, ConfigError};
use crate::plan::costs_file::wrong;

/// The longest stage's estimated F, in ns: estimates are proportions, not times.
const LONGEST_NS: f64 = 1e6;

/// What everything takes, and where that is from.
#[derive(Clone, Default)]
pub(crate) struct Times {
    /// Of every stage; messages take a latency, which is their transfer too.
    pub(crate) costs: Costs,
    /// One line for people.
    pub(crate) source: String,
}

impl Times {
    /// The times of `table`, the file that `config` names, as it is for this cut, else `estimates`;
    /// for stages that keep `bytes`.
    ///
    /// # Errors
    /// A table that cannot be used, or is for other stages.
    pub(crate) fn new(
        (config, table): (&Config, Option<&Table>),
        estimates: Vec<StageCosts>,
        bytes: &[StageBytes],
    ) -> Result<Times, ConfigError> {
        let (Some(path), Some(table)) = (&config.costs, table) else {
            let costs = Costs { stages: estimates, memory: bytes.to_vec(), ..Costs::default() };
            let source = "estimated from FLOP: proportions, with messages, gathers and reductions \
                          that take no time (--costs FILE has times)";
            return Ok(Times { costs, source: source.into() });
        };
        let fail = |problem: String| wrong("costs", &path.display(), &problem);
        let sharers = Sharers { zero3: config.zero3, replicas: config.dp };
        let mut costs =
            table.of(bytes.len(), sharers, Some(bytes)).map_err(|e| fail(e.to_string()))?;
        check_sums(&costs, config.micro_batches()).map_err(|e| fail(e.to_string()))?;
        // The file's bytes may be in any unit; those of the model are known.
        costs.link = LinkCosts { latency_ns: message_ns(&costs), ..LinkCosts::default() };
        costs.memory = bytes.to_vec();
        // The executor runs the two halves of an overlapped pair one after the other.
        costs.overlap_ns = None;
        let source = match table.measured() {
            Some(what) => format!("measured: {} ({})", path.display(), escaped_line(what)),
            None => format!("given: {}", path.display()),
        };
        Ok(Times { costs, source })
    }
}

/// What a message takes, the largest one where they differ.
pub(crate) fn message_ns(costs: &Costs) -> u64 {
    let largest = costs.memory.iter().map(|m| costs.link.transfer_ns(m.message)).max();
    let transfer = u64::try_from(largest.unwrap_or(0)).unwrap_or(u64::MAX / 8);
    costs.link.latency_ns.saturating_add(transfer)
}

/// Times in proportion to floating-point operations, as [`LayerCost::passes`] has them.
///
/// [`LayerCost::passes`]: zeropp_core::layer::LayerCost::passes
pub(crate) fn estimates(
    parts: &[Part],
    stages: &[Range<usize>],
    batch: BatchShape,
    recomputed: impl Fn(&usize) -> bool,
) -> Vec<StageCosts> {
    let stage = |(stage, range): (usize, &Range<usize>)| {
        let parts = parts[range.clone()].iter().map(|part| flops(part, batch, recomputed(&stage)));
        let add = |sum: [f64; 4], part: [f64; 4]| std::array::from_fn(|i| sum[i] + part[i]);
        parts.fold([0.0; 4], add)
    };
    let all: Vec<[f64; 4]> = stages.iter().enumerate().map(stage).collect();
    let largest = all.iter().map(|[f, ..]| *f).fold(1.0, f64::max);
    let ns = |flops: f64| (flops / largest * LONGEST_NS) as u64;
    let costs = all.into_iter().map(|[f, b, w, r]| StageCosts {
        f_ns: ns(f).max(1),
        b_ns: ns(b).max(1),
        w_ns: ns(w),
        r_ns: ns(r).max(1),
        ..StageCosts::default()
    });
    costs.collect()
}

/// Floating-point operations of a part's F, B, W and R, as [`estimates`] has them.
pub(crate) fn flops(part: &Part, batch: BatchShape, recomputed: bool) -> BlockTimes {
    let matrices = part.parameters().into_iter().filter(|p| p.shape.len() > 1);
    let elements: usize = matrices.map(|p| p.len()).sum();
    part.cost(batch).passes(2.0 * (batch.tokens() * elements) as f64, recomputed)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use burn::tensor::Tensor;
    use zeropp_core::layer::{Layer, LayerCost, LayerCx};
    use zeropp_core::params::{Init, ParamSpec};

    use super::*;

    /// A layer with a matrix of 2 x 3 and one bias, and `attention` FLOP beside them.
    struct Plain {
        attention: f64,
        stash_bytes: u64,
    }

    impl Layer for Plain {
        fn name(&self) -> &str {
            "plain"
        }
        fn parameters(&self) -> Vec<ParamSpec> {
            vec![ParamSpec::new("w", &[2, 3], Init::Zeros), ParamSpec::new("b", &[3], Init::Zeros)]
        }
        fn forward(&self, x: Tensor<3>, _: &LayerCx) -> Tensor<3> {
            x
        }
        fn cost(&self, batch: BatchShape) -> LayerCost {
            LayerCost {
                forward_flops: 12.0 * batch.tokens() as f64 + self.attention,
                stash_bytes: self.stash_bytes,
                ..LayerCost::default()
            }
        }
    }

    #[test]
    fn w_does_what_multiplies_by_weights_and_b_the_rest_of_twice_a_forward() {
        let batch = BatchShape {
            samples: 1,
            seq: 10,
            element_bytes: 4,
            keeps_probabilities: true,
            kernels: true,
        };
        let part = |attention, stash_bytes| -> Part {
            Part::Layer(Arc::new(Plain { attention, stash_bytes }))
        };
        let parts = [part(0.0, 8), part(120.0, 8), part(0.0, 0)];
        let times = estimates(&parts, &[0..1, 1..2, 2..3, 0..2], batch, |_| false);
        let of = |i: usize| [times[i].f_ns, times[i].b_ns, times[i].w_ns, times[i].r_ns];
        // 120 FLOP of weights, and as many of attention; the longest stage has 360.
        let third = 333_333;
        assert_eq!(of(0), [third, third, third, third]);
        assert_eq!(of(1), [666_666, 1_000_000, third, 666_666], "attention has no W");
        assert_eq!(of(2), [third, 666_666, 0, third], "all of its backward is B");
        assert_eq!(of(3), [1_000_000, 1_333_333, 666_666, 1_000_000]);
    }
}
