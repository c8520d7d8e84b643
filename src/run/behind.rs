//! Notes of a step that ranks exchange without meeting at its end: they travel while the next step
//! runs, and are read at that one's end, when all have long been sent. So they hold no rank up (ADR
//! 58).

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use zeropp_comm::{AllBytes, CommResult, Communicator, Pending};
use zeropp_core::metrics::StepMetrics;

use crate::run::collect::{self, Gathering};
use crate::run::figures::StageTimes;
use crate::run::stop::StopRequest;

/// A rank's note to all others about a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Note {
    /// The request of its process.
    pub(crate) stop_request: StopRequest,
    /// Whether all are to meet after the next step: the program has not answered for long.
    pub(crate) meet: bool,
    /// The steps that were reported to rank 0's trainer since the step before, for the trainers of
    /// other processes.
    pub(crate) reported: Vec<u8>,
}

impl Note {
    /// The largest request of all ranks, and the steps that rank 0 reports.
    fn joined(all: Vec<Note>) -> Note {
        let stop_request = all.iter().map(|note| note.stop_request).max().unwrap_or_default();
        let meet = all.iter().any(|note| note.meet);
        let reported = all.into_iter().next().map(|note| note.reported).unwrap_or_default();
        Note { stop_request, meet, reported }
    }
}

/// Steps that were reported to rank 0's trainer, for the trainers of other processes.
#[derive(Default)]
pub(crate) struct ReportedSteps(Vec<ReportedStep>);

/// JSON is read back to a neighbouring number at times, so loss and norm go as bits, too.
type ReportedStep = (StepMetrics, StageTimes, [u64; 2]);

impl ReportedSteps {
    /// One more.
    pub(crate) fn add(&mut self, metrics: &StepMetrics, times: &StageTimes) {
        let exact = [metrics.loss.to_bits(), metrics.grad_norm.to_bits()];
        self.0.push((metrics.clone(), times.clone(), exact));
    }

    /// All of them, as [`read`](Self::read) reads them.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        match std::mem::take(&mut self.0) {
            none if none.is_empty() => Vec::new(),
            steps => serde_json::to_vec(&steps).expect("plain numbers"),
        }
    }

    /// The steps of a message.
    pub(crate) fn read(reported: &[u8]) -> Vec<(StepMetrics, StageTimes)> {
        if reported.is_empty() {
            return Vec::new();
        }
        let steps: Vec<ReportedStep> = serde_json::from_slice(reported).expect("written by rank 0");
        let exact = |(mut metrics, times, exact): ReportedStep| {
            [metrics.loss, metrics.grad_norm] = exact.map(f64::from_bits);
            (metrics, times)
        };
        steps.into_iter().map(exact).collect()
    }
}

/// A step's figures and notes on their way.
pub(crate) struct Behind<T> {
    figures: Gathering<T>,
    notes: Pending<AllBytes>,
}

impl<T: Serialize + DeserializeOwned> Behind<T> {
    /// Sends a rank's figures to rank 0 and its note to all. All ranks call it.
    pub(crate) fn send(world: &dyn Communicator, mine: &T, note: &Note) -> Behind<T> {
        let note = serde_json::to_vec(note).expect("plain data");
        Behind { figures: collect::start(world, mine), notes: world.exchange(note) }
    }

    /// On rank 0 all ranks' figures, nothing on the others; and the notes of all joined.
    ///
    /// # Errors
    /// The world's first error.
    pub(crate) fn wait(self) -> CommResult<(Vec<T>, Note)> {
        let figures = self.figures.wait()?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("written by every rank");
        Ok((figures, Note::joined(self.notes.wait()?.iter().map(read).collect())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

    /// No rank waits for the last one before it reads.
    #[test]
    fn all_wishes_and_rank_0_s_words_arrive_a_step_later() {
        let ranks = ThreadsWorld::new(3, ThreadsOptions::default()).communicators();
        let all: Vec<_> = std::thread::scope(|scope| {
            let run = |world: std::sync::Arc<dyn Communicator>| {
                scope.spawn(move || {
                    let rank = world.rank();
                    let note = |step: usize| Note {
                        stop_request: if rank == step {
                            StopRequest::Stop(15)
                        } else {
                            StopRequest::Save
                        },
                        meet: rank == 2 && step == 0,
                        reported: vec![rank as u8, step as u8],
                    };
                    let first = Behind::send(&*world, &(rank as u64), &note(0));
                    let second = Behind::send(&*world, &(10 + rank as u64), &note(7));
                    [first.wait().unwrap(), second.wait().unwrap()]
                })
            };
            let threads: Vec<_> = ranks.into_iter().map(run).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        for (rank, [first, second]) in all.into_iter().enumerate() {
            let of_all =
                |from: u64| if rank == 0 { vec![from, from + 1, from + 2] } else { vec![] };
            let note =
                Note { stop_request: StopRequest::Stop(15), meet: true, reported: vec![0, 0] };
            assert_eq!(first, (of_all(0), note));
            let note = Note { stop_request: StopRequest::Save, meet: false, reported: vec![0, 7] };
            assert_eq!(second, (of_all(10), note));
        }
    }
}
