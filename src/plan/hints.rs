//! Stages on a rank and kinds of schedule with which ranks would idle less, found by predicting for
//! them.

use std::time::{Duration, Instant};

use zeropp_plan::change::RunOutcome;

use crate::plan::blueprint::Blueprint;
use crate::plan::{changes, memory};

/// How long is looked for: a schedule of many actions takes a while to predict for.
const TIME: Duration = Duration::from_secs(3);

/// What another V, or another V and kind, would have instead, where that is clearly less time.
pub(crate) fn note(bp: &Blueprint) -> Option<String> {
    let given = changes::given(bp);
    if !given.may_idle_less(bp.plan.bubble) {
        return None;
    }
    let until = Instant::now() + TIME;
    // What needs too much here as it is, is to run elsewhere.
    let is_elsewhere = memory::is_short(&bp.needs());
    given.note(&outcome(bp), |layout| {
        if Instant::now() > until {
            return None;
        }
        let other = changes::with(bp, layout)?;
        (is_elsewhere || !memory::is_short(&other.needs())).then(|| outcome(&other))
    })
}

fn outcome(bp: &Blueprint) -> RunOutcome {
    RunOutcome {
        layout: changes::layout(&bp.config),
        step_ns: bp.step_ns(),
        bubble: bp.plan.bubble,
        most: bp.needs().most(),
    }
}
