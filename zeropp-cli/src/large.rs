//! Time and memory of making and simulating a large schedule, said before it is done.

use zeropp::pipeline::schedules::ACTIONS_MAX;

use crate::figures::{bytes, duration};

/// Measured on one core of a server: of an action, and of a pair of ranks.
const ACTION_S: f64 = 2e-6;
const PAIR_OF_RANKS_S: f64 = 2.5e-6;
const ACTION_BYTES: u64 = 500;
/// Shorter ones are not worth a word.
const WORTH_SAYING_S: f64 = 5.0;

/// Says about how long the schedule of so many ranks, stages on each and micro-batches takes, and
/// in how much memory, where that is much.
pub(crate) fn announce(pp: usize, virtual_stages: usize, micro_batches: usize) {
    if let Some(line) = words(pp, virtual_stages, micro_batches) {
        tracing::warn!("{line}");
    }
}

fn words(pp: usize, virtual_stages: usize, micro_batches: usize) -> Option<String> {
    let stages = pp.saturating_mul(virtual_stages);
    let actions = stages.saturating_mul(micro_batches).saturating_mul(3);
    // More are refused.
    let actions = Some(actions).filter(|actions| *actions <= ACTIONS_MAX)?;
    let seconds = actions as f64 * ACTION_S + (pp as f64).powi(2) * PAIR_OF_RANKS_S;
    let memory = bytes((actions as u64).saturating_mul(ACTION_BYTES));
    (seconds >= WORTH_SAYING_S).then(|| {
        format!(
            "pp {pp} x virtual {virtual_stages} x micro-batches {micro_batches}: the \
             schedule takes about {} and {memory} to make and to simulate",
            duration(seconds)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schedule_that_takes_long_is_announced_and_a_usual_one_is_not() {
        assert_eq!(words(64, 2, 512), None);
        for (pp, v, b) in [(1, 2, 1 << 20), (4096, 1, 8), (1024, 2, 4096)] {
            let said = words(pp, v, b).unwrap();
            assert!(
                said.contains(&format!("micro-batches {b}: the schedule takes about")),
                "{said}"
            );
        }
    }
}
