//! Where in a step that went wrong a value was not finite first.
//!
//! A skipped step changes nothing: weights, moments and tokens are what they were at the first such
//! step of a row. So it is run once more, to the same bits, with every output and gradient looked
//! at. A run that goes well pays nothing for it.

use std::path::PathBuf;

use zeropp_comm::groups::Groups;
use zeropp_pipeline::executor::{Executor, ModelWorker, NotFinite, Value};

use crate::Error;
use crate::error::RankError;

/// Why a run ended whose steps were not finite; the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Diverged {
    /// The first step of the row.
    pub(crate) step: u64,
    /// How many were skipped.
    pub(crate) in_a_row: u64,
    /// Rank and place of the first gradient that was not finite, and of the first output.
    pub(crate) gradient: Option<(usize, NotFinite)>,
    pub(crate) output: Option<(usize, NotFinite)>,
}

/// Runs the first of the skipped steps again and finds where it went wrong. All ranks call it.
pub(crate) fn diagnose(
    executor: &mut Executor<ModelWorker>,
    groups: &Groups,
    step: u64,
    in_a_row: u64,
) -> Result<Diverged, RankError> {
    executor.worker.search_not_finite();
    executor.run_step(step).map_err(RankError::Step)?;
    executor.settle(step).map_err(RankError::Step)?;
    executor.worker.take_losses();
    let mine = serde_json::to_vec(&executor.worker.take_not_finite()).expect("plain data");
    let all = groups.world.exchange(mine).wait()?;
    let read = |bytes: &Vec<u8>| -> Vec<NotFinite> {
        serde_json::from_slice(bytes).expect("written by every rank")
    };
    let found: Vec<(usize, NotFinite)> = all
        .iter()
        .enumerate()
        .flat_map(|(rank, bytes)| read(bytes).into_iter().map(move |found| (rank, found)))
        .collect();
    let first = |value| {
        let of_kind = found.iter().filter(|(_, found)| found.value == value);
        of_kind.min_by_key(|(rank, found)| (found.order(), *rank)).cloned()
    };
    let (gradient, output) = (first(Value::Gradient), first(Value::Output));
    Ok(Diverged { step, in_a_row, gradient, output })
}

impl Diverged {
    /// The error that the run ends with; `newest` is the last checkpoint, from before the row.
    pub(crate) fn into_error(self, limit: u64, newest: Option<PathBuf>) -> Error {
        let mut message = self.explain(limit);
        if let Some(path) = newest {
            message.push_str(&format!("; {} is from before it", path.display()));
        }
        let (rank, layer) =
            self.gradient.map_or((None, None), |(rank, g)| (Some(rank), Some(g.name)));
        Error::NotFinite { step: self.step, rank, layer, message }
    }

    /// The problem and its place, in words; `limit` is the setting `max-skipped`.
    pub(crate) fn explain(&self, limit: u64) -> String {
        let Diverged { step, in_a_row, .. } = self;
        let what = format!(
            "step {step}: a gradient was not finite, and none of the {in_a_row} steps since then \
             changed a weight (clip:max-skipped = {limit})"
        );
        let place = match (&self.gradient, &self.output) {
            (None, None) => {
                return format!(
                    "{what}; run once more, step {step} was finite: the hardware may be faulty"
                );
            }
            (Some((rank, found)), _) => {
                let NotFinite { name, stage, micro_batch, .. } = found;
                format!(
                    "first on rank {rank}, in the gradient of layer {name} (stage {stage}, \
                     micro-batch {micro_batch})"
                )
            }
            (None, Some(_)) => "in no layer's gradient, but in a sum of them".into(),
        };
        let before = match &self.output {
            Some((rank, NotFinite { stage, micro_batch, .. })) => format!(
                "; before it, the forward of stage {stage} on rank {rank} gave values that are not \
                 finite (micro-batch {micro_batch})"
            ),
            None => "; the forward was finite".into(),
        };
        format!("{what}; {place}{before}; a smaller lr or clip, or a longer warmup may help")
    }
}
