//! Trials in turn: candidates that run for a while, round by round, until the fastest are known.

use serde::Serialize;

/// Rounds of a race.
const ROUNDS: usize = 7;
/// After each round but the last, candidates slower than so many times the fastest are left out:
/// the more was seen of them, the less it takes.
const BEHIND: [f64; ROUNDS - 1] = [1.10, 1.06, 1.04, 1.03, 1.02, 1.02];
/// So many stay in any case.
const KEPT_MIN: usize = 3;

/// What trials of one candidate took.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// Seconds of a step: the middle one of its rounds.
    pub step_s: f64,
    /// The fastest round.
    pub least_s: f64,
    /// The slowest round.
    pub most_s: f64,
    /// Rounds that it ran in: those far behind the fastest do not run in all.
    pub rounds: usize,
}

impl Tried {
    fn of(mut times: Vec<f64>) -> Option<Tried> {
        times.sort_by(f64::total_cmp);
        let (first, last) = (*times.first()?, *times.last()?);
        let n = times.len();
        let step_s = (times[(n - 1) / 2] + times[n / 2]) / 2.0;
        Some(Tried { step_s, least_s: first, most_s: last, rounds: n })
    }

    /// Ahead of another one: those that ran in more rounds first, then the faster.
    pub(crate) fn order(&self, other: &Tried) -> std::cmp::Ordering {
        other.rounds.cmp(&self.rounds).then(self.step_s.total_cmp(&other.step_s))
    }
}

/// Runs candidates 0 to `count` - 1 in rounds; `run` takes the round, from 0, and the candidate,
/// and gives seconds of a step, or none where it fails: such a candidate does not run again. One
/// round goes through them forwards and the next backwards, so that a machine that gets slower
/// favours none. Returns what each took, in their order.
pub fn race(count: usize, mut run: impl FnMut(usize, usize) -> Option<f64>) -> Vec<Option<Tried>> {
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); count];
    let mut failed = vec![false; count];
    let mut kept: Vec<usize> = (0..count).collect();
    for round in 0..ROUNDS {
        if round % 2 == 1 {
            kept.reverse();
        }
        kept.retain(|candidate| {
            let took = run(round, *candidate);
            times[*candidate].extend(took);
            failed[*candidate] = took.is_none();
            took.is_some()
        });
        kept.sort_unstable();
        if let Some(behind) = BEHIND.get(round) {
            leave_out(&mut kept, *behind, |candidate| {
                Tried::of(times[candidate].clone()).map_or(f64::INFINITY, |tried| tried.step_s)
            });
        }
    }
    // One that failed after a round or two is no candidate.
    times.into_iter().zip(failed).map(|(t, failed)| Tried::of(t).filter(|_| !failed)).collect()
}

/// Leaves out of `kept` what takes more than `behind` times the least.
fn leave_out(kept: &mut Vec<usize>, behind: f64, step_s: impl Fn(usize) -> f64) {
    let mut all: Vec<f64> = kept.iter().map(|candidate| step_s(*candidate)).collect();
    all.sort_by(f64::total_cmp);
    let Some(least) = all.first() else { return };
    let most = (behind * least).max(all[all.len().min(KEPT_MIN) - 1]);
    kept.retain(|candidate| step_s(*candidate) <= most);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times with noise that follows from candidate and round alone.
    fn noisy(step_s: f64, candidate: usize, round: usize) -> f64 {
        let drawn = (candidate * 7919 + round * 104_729 + 31) % 100;
        step_s * (0.99 + 0.02 * drawn as f64 / 100.0)
    }

    #[test]
    fn the_fastest_wins_and_the_slow_do_not_run_to_the_end() {
        let mut runs = 0;
        let found = race(20, |round, candidate| {
            runs += 1;
            Some(noisy(1.0 + 0.05 * ((candidate + 13) % 20) as f64, candidate, round))
        });
        let tried: Vec<Tried> = found.into_iter().map(|tried| tried.expect("all ran")).collect();
        let first = (0..20).min_by(|a, b| tried[*a].order(&tried[*b])).unwrap();
        assert_eq!(first, 7);
        assert_eq!(tried[first].rounds, ROUNDS);
        let (least, most) = (tried[first].least_s, tried[first].most_s);
        assert!(least <= tried[first].step_s && tried[first].step_s <= most && least < most);
        assert!(runs < 50, "{runs} of 140");
        assert_eq!(tried.iter().filter(|t| t.rounds == ROUNDS).count(), KEPT_MIN);
    }

    #[test]
    fn failed_layouts_are_not_run_again() {
        let mut runs = [0; 3];
        let found = race(3, |_, candidate| {
            runs[candidate] += 1;
            (candidate != 1 || runs[1] < 2).then_some(1.0)
        });
        assert_eq!(runs, [ROUNDS, 2, ROUNDS]);
        assert!(found[0].is_some() && found[1].is_none() && found[2].is_some());
        assert!(race(2, |_, _| None).iter().all(Option::is_none));
        assert!(race(0, |_, _| Some(1.0)).is_empty());
    }
}
