//! What blocks that move have to gain: what the move itself takes, and more for stages that the run
//! has left before, so that noise does not send blocks back and forth.

use super::{ExchangeRules, Predicted};

/// Stages that blocks move from and to: which ones, each by a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OtherStages {
    /// Those that the run has.
    pub from: u64,
    /// Those that it would have.
    pub to: u64,
}

/// Steps that a move is taken to last, before one has been seen.
const FIRST_STEPS: f64 = 1.0;
/// The most by which what has to be gained doubles.
const DOUBLED_MOST: usize = 6;

/// The moves of a run.
#[derive(Clone, Debug, Default)]
pub(super) struct Moving {
    /// Stages that it has left, as often as it did.
    left: Vec<u64>,
    /// Seconds that the last move took.
    took_s: Option<f64>,
}

impl Moving {
    /// The least share of a step that has to be gained, and how many times the noise beyond it,
    /// by what was `found`, with so many steps left. Blocks move there and, where that disappoints,
    /// back; with each time that the run has left these stages, they have to gain twice as much.
    pub(super) fn least(&self, rules: &ExchangeRules, found: &Predicted, left: u64) -> (f64, f64) {
        let Some(OtherStages { to, .. }) = found.stages else { return (rules.gain, 1.0) };
        let again = self.left.iter().filter(|stages| **stages == to).count();
        let times = f64::from(1_u32 << again.min(DOUBLED_MOST));
        let took_s = self.took_s.unwrap_or(FIRST_STEPS * found.now_s);
        let both_ways = 2.0 * took_s / (found.now_s * left.max(1) as f64);
        (times * rules.gain + both_ways, times)
    }

    /// The run leaves these stages.
    pub(super) fn leave(&mut self, stages: u64) {
        self.left.push(stages);
    }

    /// The first step with other stages took so long, of which those before took `before_s`.
    pub(super) fn took(&mut self, seconds: f64, before_s: f64) {
        self.took_s = Some((seconds - before_s).max(0.0));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ExchangeOrder, Follows, Reply, Rescheduler, StepSeen};
    use super::*;

    const HERE: u64 = 1;
    const THERE: u64 = 2;

    fn move_to(to: u64) -> Predicted {
        let stages = Some(OtherStages { from: HERE + THERE - to, to });
        Predicted { now_s: 1.0, then_s: 0.9, program: 7, stages }
    }

    #[test]
    fn a_move_has_to_win_back_what_it_takes_in_the_steps_that_are_left() {
        let (rules, mut moving) = (ExchangeRules::default(), Moving::default());
        let order = Predicted { stages: None, ..move_to(THERE) };
        assert_eq!(moving.least(&rules, &order, 3), (rules.gain, 1.0), "an order moves nothing");
        let least = |moving: &Moving, left| moving.least(&rules, &move_to(THERE), left).0;
        assert_eq!(least(&moving, 100), rules.gain + 0.02, "a step there and one back");
        moving.took(6.0, 1.0);
        assert_eq!(least(&moving, 1000), rules.gain + 0.01);
        assert!(least(&moving, 50) > 0.2);
    }

    #[test]
    fn stages_that_were_left_have_to_gain_twice_as_much_each_time() {
        let (rules, mut moving) = (ExchangeRules::default(), Moving::default());
        moving.took(1.0, 1.0);
        for times in [1.0, 2.0, 4.0] {
            assert_eq!(moving.least(&rules, &move_to(THERE), 90), (times * rules.gain, times));
            moving.leave(THERE);
        }
        assert_eq!(moving.least(&rules, &move_to(HERE), 90), (rules.gain, 1.0));
    }

    /// A machine to which blocks that move are offered after step 5.
    fn offered() -> Rescheduler {
        let mut machine = Rescheduler::new(ExchangeRules { last: 500, ..ExchangeRules::default() });
        for step in 1..=4 {
            at(&mut machine, step, 1.0, false);
        }
        machine.found(Some(move_to(THERE)));
        assert_eq!(at(&mut machine, 5, 1.0, true).order, ExchangeOrder::Offer);
        machine
    }

    fn at(machine: &mut Rescheduler, step: u64, seconds: f64, saving: bool) -> Follows {
        machine.step(StepSeen { step, seconds, busy: &[], reply: Reply::Ready, saving })
    }

    #[test]
    fn blocks_move_there_and_back_once_no_save_is_under_way() {
        let mut machine = offered();
        for step in 6..20 {
            assert_eq!(at(&mut machine, step, 1.0, true), Follows::default());
        }
        assert_eq!(at(&mut machine, 20, 1.0, false).order, ExchangeOrder::Take);
        for step in 21..40 {
            assert_eq!(at(&mut machine, step, 1.1, true), Follows::default());
        }
        assert_eq!(at(&mut machine, 40, 1.1, false).order, ExchangeOrder::GoBack);
    }

    #[test]
    fn blocks_that_moved_stay_while_a_save_is_under_way() {
        let mut machine = offered();
        assert_eq!(at(&mut machine, 6, 1.0, false).order, ExchangeOrder::Take);
        for step in 7..=9 {
            assert_eq!(at(&mut machine, step, 0.9, true), Follows::default());
        }
        let tried = at(&mut machine, 10, 0.9, true).tried.expect("it is judged");
        assert!(tried.stays);
    }
}
