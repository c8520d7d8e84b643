//! From the failures of this process's ranks to the error that the run ends with. Who broke the run
//! is the judge's to say ([`judge`]), from the records that `zeropp why` reads, too.

use std::collections::BTreeMap;

use zeropp_failures::{End, EndKind, Record, Run, Verdict, judge};
use zeropp_pipeline::executor::{ExecutorError, StepError};

use crate::Error;
use crate::error::{RankError, explained};
use crate::run::context::ProcessContext;

/// How ranks end that have not, once the run has failed.
pub(crate) const MEANWHILE: &str = "the run failed meanwhile";

/// How a rank failed, and when it learnt of it: [`now_ns`](zeropp_comm::flight::now_ns).
#[derive(Debug)]
pub(crate) struct RankFailure {
    pub(crate) error: RankError,
    pub(crate) at_ns: u64,
}

impl RankFailure {
    /// As a record has it.
    pub(crate) fn end(&self, rank: usize) -> End {
        let (at_ns, text) = (self.at_ns, self.error.to_string());
        match &self.error {
            RankError::Panic { .. } => End { kind: EndKind::Panic, at_ns, text, error: None },
            error => End::of_error(rank, at_ns, text, error.between_ranks()),
        }
    }

    fn is_echo(&self) -> bool {
        self.error.between_ranks().is_some_and(|error| error.is_echo())
    }
}

/// Who broke the run, by the records of the ranks here, or by their ends where no more is kept;
/// `is_over` says that no rank goes on.
fn judged<'a>(
    context: &ProcessContext,
    failures: impl Iterator<Item = (usize, &'a RankFailure)>,
    is_over: bool,
) -> Verdict {
    if let Some(recorder) = &context.recorder {
        return judge(&recorder.run(EndKind::AtWork, MEANWHILE, is_over));
    }
    let record = |(rank, failure): (usize, &RankFailure)| {
        Record::of_end(rank, context.mesh, 0.0, failure.end(rank))
    };
    let records: Vec<Record> = failures.map(record).collect();
    let has = |rank: &usize| records.iter().any(|record| record.header.rank == *rank);
    let unknown = (0..context.mesh.world()).filter(|rank| !has(rank)).collect();
    judge(&Run { records, unknown, ..Run::default() })
}

/// The words with which `rank` ends the world.
pub(crate) fn reason(rank: usize, failure: &RankFailure, context: &ProcessContext) -> String {
    let verdict = judged(context, std::iter::once((rank, failure)), false);
    explained(rank, &failure.error, &verdict)
}

/// The error of a run of which these ranks have failed, by rank; there is one.
pub(crate) fn error_of(
    mut failures: BTreeMap<usize, RankFailure>,
    context: &ProcessContext,
) -> Error {
    let is_bad_input = |failure: &RankFailure| failure.error.is_bad_input();
    let given = failures.iter().find(|(_, failure)| is_bad_input(failure)).map(|(rank, _)| *rank);
    let verdict = match given {
        // All ranks end with the same words, and none has begun: there is nothing to judge.
        Some(_) => Verdict::unknown(String::new()),
        None => judged(context, failures.iter().map(|(rank, failure)| (*rank, failure)), true),
    };
    // Where the rank to blame has no failure of its own, one that has seen it fail.
    let speaks = |rank: &&usize| failures.get(*rank).is_some_and(|failure| !failure.is_echo());
    let seen_by = given
        .or_else(|| verdict.ranks.iter().find(speaks).copied())
        .or_else(|| failures.keys().find(speaks).copied())
        .or_else(|| failures.keys().next().copied());
    let seen_by = seen_by.expect("a rank has failed");
    let rank = verdict.ranks.first().copied().unwrap_or(seen_by);
    match failures.remove(&seen_by).expect("it has failed").error {
        RankError::Resume(e) => e.into(),
        RankError::Program(text) => Error::Program(text),
        RankError::Step(ExecutorError { source: StepError::Data(e), .. }) => e.into(),
        RankError::Step(ExecutorError { source: e @ StepError::Shape { .. }, .. }) => {
            Error::Model(e.to_string())
        }
        failure => {
            let (failure, verdict) = (Box::new(failure), Box::new(verdict));
            Error::Rank { rank, seen_by, failure, verdict, advice: Vec::new() }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tracing::Span;
    use zeropp_comm::CommError;
    use zeropp_comm::mesh::Mesh;
    use zeropp_pipeline::executor::StatusBoard;
    use zeropp_zero3::checkpoint::CheckpointError;

    use super::*;
    use crate::config::Config;
    use crate::trainer::Trainer;
    use crate::trainer::recovery::{Recoveries, RecoveryAnswer};

    const MESH: Mesh = Mesh { pp: 2, zero3: 2, dp: 2 };

    fn context() -> ProcessContext {
        ProcessContext {
            here: (0..MESH.world()).collect(),
            mesh: MESH,
            status: Arc::new(StatusBoard::new(MESH.world())),
            recorder: None,
            span: Span::none(),
            stack_bytes: 1 << 20,
        }
    }

    fn timeout(missing: usize) -> CommError {
        CommError::Timeout {
            group: "world".into(),
            operation: "exchange".into(),
            sequence: 1,
            after_s: 1.0,
            missing: vec![missing],
        }
    }

    fn echo(rank: usize) -> CommError {
        CommError::Aborted { rank, reason: "it failed".into() }
    }

    fn panic() -> RankError {
        RankError::Panic { text: "sabotage".into(), place: "rank 1".into() }
    }

    /// These failures, by rank, one second after the other.
    fn failures(all: Vec<(usize, RankError)>) -> BTreeMap<usize, RankFailure> {
        let at = |(i, (rank, error)): (usize, _)| {
            (rank, RankFailure { error, at_ns: (i as u64 + 1) * 1_000_000_000 })
        };
        all.into_iter().enumerate().map(at).collect()
    }

    fn blamed(all: Vec<(usize, RankError)>) -> (usize, usize) {
        match error_of(failures(all), &context()) {
            Error::Rank { rank, seen_by, .. } => (rank, seen_by),
            other => panic!("{other}"),
        }
    }

    /// The rank that was waited for in vain, and not the one that reported it first.
    #[test]
    fn the_rank_that_is_missed_is_to_blame_and_an_echo_is_not() {
        let all = vec![(5, timeout(2).into()), (0, echo(5).into()), (3, echo(5).into())];
        assert_eq!(blamed(all), (2, 5));
        assert_eq!(blamed(vec![(4, panic()), (0, timeout(4).into())]), (4, 4));
        assert_eq!(blamed(vec![(1, echo(1).into())]), (1, 1));
    }

    struct Rng(u64);

    impl Rng {
        fn below(&mut self, n: usize) -> usize {
            let odd = self.0.wrapping_mul(6_364_136_223_846_793_005);
            self.0 = odd.wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % n
        }
    }

    fn any_error(rng: &mut Rng, world: usize) -> RankError {
        let other = rng.below(world);
        match rng.below(6) {
            0 => panic(),
            1 => timeout(other).into(),
            2 => CommError::PeerLost {
                group: "world".into(),
                rank: other,
                operation: "barrier".into(),
            }
            .into(),
            3 => CheckpointError::NotWritten { step: 3, problem: "full".into() }.into(),
            _ => echo(other).into(),
        }
    }

    /// Whatever ranks end with and when: the error names the rank that `zeropp why` reads from the
    /// files of their records, and that rank's failure alone decides whether the run goes on.
    #[test]
    fn terminal_why_and_recovery_blame_the_same_rank() {
        let config = Config { max_recoveries: 9, ..Config::default() };
        let bp = Trainer::new(config).unwrap().blueprint;
        for seed in 0..300 {
            let mut rng = Rng(seed);
            let mut ranks: Vec<usize> = (0..MESH.world()).collect();
            let left = 1 + rng.below(ranks.len());
            let mut all = Vec::new();
            while all.len() < left {
                let rank = ranks.remove(rng.below(ranks.len()));
                all.push((rank, any_error(&mut rng, MESH.world())));
            }
            let failed = failures(all);
            let folder = tempfile::tempdir().unwrap();
            // Ranks without a failure of their own were at work: they are known to live.
            for rank in 0..MESH.world() {
                let at_work = End {
                    kind: EndKind::AtWork,
                    at_ns: 60_000_000_000,
                    text: MEANWHILE.into(),
                    error: None,
                };
                let end = failed.get(&rank).map_or(at_work, |failure| failure.end(rank));
                let mut record = Record::of_end(rank, MESH, 0.0, end);
                record.header.run = "1-a".into();
                let path = folder.path().join(Record::file_name("1-a", rank));
                record.write(&mut std::fs::File::create(path).unwrap()).unwrap();
            }
            let why = judge(&Run::read(&[folder.path().into()], None).unwrap());
            let error = error_of(failed, &context());
            let Error::Rank { rank, seen_by, failure, verdict, .. } = &error else {
                panic!("seed {seed}: {error}")
            };
            assert_eq!((&verdict.ranks, verdict.cause), (&why.ranks, why.cause), "seed {seed}");
            assert_eq!(*rank, why.ranks.first().copied().unwrap_or(*seen_by), "seed {seed}");
            let comes_again = failure.comes_again();
            let mut recoveries = Recoveries::new(&bp, crate::run::shared::Export::Nothing, false);
            let remedy = recoveries.remedy(&error, std::time::Instant::now());
            assert_eq!(
                matches!(remedy, RecoveryAnswer::End(None)),
                comes_again,
                "seed {seed}: {error}"
            );
        }
    }
}
