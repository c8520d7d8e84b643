//! The ends of many random runs' steps, by the machine of real runs: ranks come to the same, and
//! nothing that is due or asked for is forgotten.

use zeropp_checkpoint::pace::{NextSave, Pace, SaveDecision};
use zeropp_checkpoint::step_end::{Decision, Ending, MetStep, Rules, StepEnds, StopRequest};

use crate::number;
use crate::rng::Rng;

/// A run of random settings, and what it has seen so far.
struct World {
    rng: Rng,
    rules: Rules,
    every: u64,
    last: u64,
    ranks: Vec<StepEnds>,
    /// The step after which the save under way is complete.
    busy_until: u64,
    /// That a save is left out, which is reported once.
    reported: bool,
    /// Steps after which a checkpoint began.
    saves: Vec<u64>,
    /// First steps after which a save was asked for and none has begun since.
    asked_since: Option<u64>,
    stop_since: Option<u64>,
    /// Skipped steps in a row.
    row: u64,
    /// A save was due in a row of skipped steps.
    due_since_row: bool,
    since: Option<u64>,
    lowest: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng(seed);
        let last = 3 + rng.below(40);
        let mut maybe = |n: u64, most: u64| if rng.once_in(n) { 0 } else { 1 + rng.below(most) };
        let [every, copy_every, eval_every] = [maybe(4, 9), maybe(2, 4), maybe(3, 6)];
        let (read_every, look_every) = (maybe(2, 12), maybe(2, 12));
        let (max_skipped, patience) = (maybe(2, 4), maybe(2, 4));
        let (late, saves, copies) = (rng.once_in(2), !rng.once_in(5), copy_every > 0);
        let rules = Rules {
            late,
            saves: saves.then(|| Pace::new(every, last)),
            copies: copies.then(|| Pace::new(copy_every, 0)),
            eval_every,
            steps: last,
            read_every,
            look_every,
            max_skipped,
            patience,
        };
        let ranks = vec![StepEnds::new(rules); 1 + rng.below(4) as usize];
        World {
            rng,
            rules,
            every,
            last,
            ranks,
            busy_until: 0,
            reported: false,
            saves: Vec::new(),
            asked_since: None,
            stop_since: None,
            row: 0,
            due_since_row: false,
            since: None,
            lowest: u64::MAX,
        }
    }

    /// What the ranks' processes ask for after `step`, all together.
    fn ask(&mut self, step: u64) -> StopRequest {
        let mut all = StopRequest::GoOn;
        for _ in 0..self.ranks.len() {
            let request = match self.rng.below(60) {
                0 => StopRequest::Stop(if self.rng.once_in(2) { 15 } else { 0 }),
                1 | 2 => StopRequest::Save,
                _ => StopRequest::GoOn,
            };
            all = all.max(request);
        }
        match all {
            StopRequest::Stop(_) => drop(self.stop_since.get_or_insert(step)),
            StopRequest::Save => drop(self.asked_since.get_or_insert(step)),
            StopRequest::GoOn => {}
        }
        all
    }

    /// Asks all ranks the same; all must say the same.
    fn of_all<T: PartialEq + std::fmt::Debug>(&mut self, f: impl Fn(&mut StepEnds) -> T) -> T {
        let mut said: Vec<T> = self.ranks.iter_mut().map(f).collect();
        assert!(said.iter().all(|one| *one == said[0]), "ranks differ: {said:?}");
        said.remove(0)
    }

    fn run(mut self) -> Option<Ending> {
        let mut before: Option<(bool, StopRequest, bool)> = None;
        for step in 1..=self.last {
            let skipped = self.rng.once_in(5);
            if let Some((skipped, asked, meet)) = before.take() {
                self.of_all(|ends| ends.left(step - 1, skipped, asked, meet));
            }
            self.row = if skipped { self.row + 1 } else { 0 };
            if !self.of_all(|ends| ends.meets(step)) {
                self.check_unmet(step);
                let meet = self.rng.once_in(6);
                before = Some((skipped, self.ask(step), meet));
                continue;
            }
            let asked = self.ask(step).max(self.ranks[0].asked());
            let met = self.measured(step, skipped);
            let request = self.of_all(|ends| ends.met(&met, asked));
            let wanted = self.ranks[0].wanted(&met, request);
            let saves = self.begins(step, wanted[0]);
            let copies = match wanted[1] {
                NextSave::UnlessUnderWay => SaveDecision::Now,
                NextSave::Nothing => SaveDecision::No,
                NextSave::Surely => panic!("a copy is never waited for"),
            };
            assert!(
                copies == SaveDecision::No || !skipped && step < self.last,
                "a copy nobody needs"
            );
            let decision = Decision { request, saves, copies };
            let ending = self.of_all(|ends| ends.follow(&met, &decision));
            self.check(&met, &decision, ending);
            if ending.is_some() {
                return ending;
            }
        }
        None
    }

    /// Nothing that all do together was due after a step at whose end ranks did not meet.
    fn check_unmet(&self, step: u64) {
        let Rules { late, eval_every, max_skipped, read_every, .. } = self.rules;
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        assert!(late && step < self.last, "{step}: nobody met");
        assert!(!due(eval_every) && !due(read_every), "{step}: a loss, or a text, is due");
        assert!(!(self.rules.saves.is_some() && due(self.every)), "{step}: a save is due");
        assert!(max_skipped == 0 || self.row < max_skipped, "{step}: the run has diverged");
        assert!(self.stop_since.is_none_or(|at| step <= at), "{step}: a stop is asked for");
    }

    /// The step with its validation loss, where one is due.
    fn measured(&mut self, step: u64, skipped: bool) -> MetStep {
        let mut is_best = false;
        if self.rules.evaluates(step) {
            let loss = self.rng.below(100);
            is_best = loss < self.lowest;
            self.lowest = self.lowest.min(loss);
            self.since = Some(if is_best { 0 } else { self.since.unwrap_or(0) + 1 });
        }
        MetStep { step, skipped, is_best, since: self.since }
    }

    /// As a rank's saver does on rank 0, whose writers take some steps.
    fn begins(&mut self, step: u64, wanted: NextSave) -> SaveDecision {
        let (begin, reports) = self.ranks[0].begins(wanted, false, self.busy_until >= step);
        assert!(!(reports && std::mem::replace(&mut self.reported, true)), "{step}: once");
        if begin != SaveDecision::No {
            self.busy_until = step + self.rng.below(4);
            self.saves.push(step);
        }
        begin
    }

    fn check(&mut self, met: &MetStep, decision: &Decision, ending: Option<Ending>) {
        let Rules { max_skipped, patience, saves, .. } = self.rules;
        let (step, saved) = (met.step, decision.saves != SaveDecision::No);
        let diverged = max_skipped > 0 && self.row >= max_skipped;
        assert_eq!(matches!(ending, Some(Ending::Diverged { .. })), diverged, "{step}");
        if diverged {
            assert!(!saved, "{step}: a run that has diverged is saved");
            return;
        }
        assert!(saves.is_some() || !saved);
        let ends = ending.is_some() || step == self.last;
        if saves.is_some() && (ends || met.is_best) {
            assert_eq!(
                decision.saves,
                SaveDecision::AfterTheOneBefore,
                "{step}: the last, or the best"
            );
        }
        let tired = patience > 0 && met.since.is_some_and(|since| since >= patience);
        assert!(!tired || ends, "{step}: no lower {:?} times", met.since);
        assert!(self.stop_since.is_none() || ends, "{step}: asked to stop");
        let due = self.every > 0 && step.is_multiple_of(self.every) || self.due_since_row;
        self.due_since_row = due && met.skipped && !saved;
        if saves.is_some() && due && !met.skipped && !saved {
            assert!(self.busy_until >= step, "{step}: a save is due, and none is under way");
        }
        if saved {
            self.asked_since = None;
        } else if saves.is_some() && !met.skipped && self.busy_until < step {
            // At the latest when the step after the request is finite and nothing is under way.
            assert!(self.asked_since.is_none_or(|at| at == step), "{step}: a save was asked for");
        }
    }
}

#[test]
fn seeds_of_step_ends_forget_nothing_that_is_due_and_no_rank_differs() {
    let seeds = match number("ZEROPP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..20 * number("ZEROPP_SEEDS").unwrap_or(500),
    };
    let mut endings = [0; 4];
    for seed in seeds.clone() {
        let ending = std::panic::catch_unwind(|| World::new(seed).run());
        let ending = ending.unwrap_or_else(|_| panic!("ZEROPP_SEED={seed} replays it"));
        endings[match ending {
            None => 0,
            Some(Ending::Diverged { .. }) => 1,
            Some(Ending::Asked { .. }) => 2,
            Some(Ending::NoLower { .. }) => 3,
        }] += 1;
    }
    assert!(seeds.end - seeds.start < 1000 || endings.iter().all(|n| *n > 0), "{endings:?}");
}
