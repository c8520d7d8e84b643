//! When the ranks of a run exchange their program for a better one, as state machines without I/O.
//! Rank 0 has a [`Rescheduler`], which gets the times of steps and the results of searches, and
//! gives one [`ExchangeOrder`] at each step's end; every rank has its [`Copies`], which follow the
//! orders. A program is offered at the end of one step and taken at the end of a later one, once
//! every rank has said that it has it: so no rank ever runs another program than the others
//! (`zeropp-checkpoint/tests/simulation/reschedule.rs`).

mod drift;
mod moving;
mod times;

use drift::Drift;
use moving::Moving;
pub use moving::OtherStages;
use times::StepTimes;

/// What rank 0 orders at the end of a step, for all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExchangeOrder {
    /// To go on as before.
    #[default]
    Stay,
    /// To look at a program that comes with the order, and to say whether it can be run.
    Offer,
    /// To forget what was offered.
    Drop,
    /// To run what was offered from the next step on.
    Take,
    /// To run what was run before it again.
    GoBack,
}

impl ExchangeOrder {
    const ALL: [ExchangeOrder; 5] = [
        ExchangeOrder::Stay,
        ExchangeOrder::Offer,
        ExchangeOrder::Drop,
        ExchangeOrder::Take,
        ExchangeOrder::GoBack,
    ];

    /// As a byte of a message.
    pub fn to_byte(self) -> u8 {
        self as u8
    }

    /// Reads what [`to_byte`](Self::to_byte) gave.
    pub fn from_byte(byte: u8) -> ExchangeOrder {
        ExchangeOrder::ALL.get(usize::from(byte)).copied().unwrap_or_default()
    }
}

/// What a rank says, or all of them together, of the program that was offered after the step
/// before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reply {
    /// It has it, and can run it; or nothing was offered.
    #[default]
    Ready,
    /// It cannot run it, or has another.
    Refused,
}

/// A rank's programs: the one that it runs, the one before, and what is offered.
#[derive(Clone, Debug)]
pub struct Copies<P> {
    running: P,
    before: Option<P>,
    offered: Option<P>,
}

impl<P> Copies<P> {
    /// Of a rank that runs this one.
    pub fn new(running: P) -> Copies<P> {
        Copies { running, before: None, offered: None }
    }

    /// The one that it runs.
    pub fn running(&self) -> &P {
        &self.running
    }

    /// What comes with [`ExchangeOrder::Offer`], where the rank can run it.
    pub fn offer(&mut self, program: Option<P>) {
        self.offered = program;
    }

    /// What the rank says of what was offered last.
    pub fn reply(&self) -> Reply {
        if self.offered.is_some() { Reply::Ready } else { Reply::Refused }
    }

    /// Follows an order; whether another program runs from now on.
    ///
    /// # Panics
    /// Panics where ranks take what this one has refused, or go back without having taken any.
    pub fn follow(&mut self, order: ExchangeOrder) -> bool {
        match order {
            ExchangeOrder::Stay | ExchangeOrder::Offer => false,
            ExchangeOrder::Drop => {
                self.offered = None;
                false
            }
            ExchangeOrder::Take => {
                let taken = self.offered.take().expect("taken once every rank has it");
                self.before = Some(std::mem::replace(&mut self.running, taken));
                true
            }
            ExchangeOrder::GoBack => {
                self.running = self.before.take().expect("there is one before it");
                true
            }
        }
    }
}

/// How a run searches for better programs.
#[derive(Clone, Copy, Debug)]
pub struct ExchangeRules {
    /// Steps that are measured for a search. The first of them does not count.
    pub samples: u64,
    /// The fewest steps by which a program that was taken is judged, after a first one that does
    /// not count; noise that hides whether they are shorter asks for more.
    pub trial: u64,
    /// The fewest steps between the end of a search, or of a trial, and the next search.
    pub rest: u64,
    /// The least share of a step that a program has to be predicted to gain, beyond the noise of
    /// the measurements.
    pub gain: f64,
    /// By which share steps, or a rank's part of all computing, have to become longer or shorter
    /// for another search, beyond their noise.
    pub drift: f64,
    /// The last step of the run.
    pub last: u64,
}

impl Default for ExchangeRules {
    fn default() -> ExchangeRules {
        ExchangeRules { samples: 4, trial: 3, rest: 10, gain: 0.01, drift: 0.05, last: u64::MAX }
    }
}

/// What a search has found: a program with these predicted seconds of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    /// Of the program that runs.
    pub now_s: f64,
    /// Of the one that was found.
    pub then_s: f64,
    /// Which one it is.
    pub program: u64,
    /// The stages that it has in place of the run's, if blocks move for it.
    pub stages: Option<OtherStages>,
}

/// What rank 0 knows of a step at its end.
#[derive(Clone, Copy, Debug)]
pub struct StepSeen<'a> {
    /// Its number.
    pub step: u64,
    /// Seconds that it took, without what is no part of it.
    pub seconds: f64,
    /// Seconds that each rank computed in it; empty where they are not known.
    pub busy: &'a [f64],
    /// What all ranks say of what was offered.
    pub reply: Reply,
    /// Whether a save is under way, for which blocks that move would have to wait.
    pub saving: bool,
}

/// What follows a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Follows {
    /// What all ranks do.
    pub order: ExchangeOrder,
    /// Whether the next step is measured for a search.
    pub samples: bool,
    /// Whether a search begins, with what was measured.
    pub searches: bool,
    /// A trial that has ended.
    pub tried: Option<Trial>,
    /// Whether blocks move before the next step.
    pub moves: bool,
}

/// The end of a program's trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// The last step before it.
    pub after: u64,
    /// The prediction that it was taken for.
    pub predicted: Predicted,
    /// Seconds of a step before it.
    pub before_s: f64,
    /// Seconds of a step with it.
    pub measured_s: f64,
    /// Whether it stays.
    pub stays: bool,
}

/// Where rank 0 is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// This many steps are still to be measured.
    Measuring(u64),
    /// A search is under way.
    Searching,
    /// A search has ended with this.
    Found(Predicted),
    /// Ranks were offered this.
    Offered(Predicted),
    /// Ranks have taken this after that step; before it steps took so long, with this noise.
    OnTrial { predicted: Predicted, after: u64, before_s: f64, noise: f64 },
    /// Nothing is looked for before that step.
    Resting(u64),
}

/// Rank 0's view of the programs of a run.
#[derive(Clone, Debug)]
pub struct Rescheduler {
    rules: ExchangeRules,
    state: State,
    /// Of the program that runs.
    times: StepTimes,
    /// Of it, too.
    seconds: Drift,
    /// Of each rank, with any program.
    shares: Drift,
    /// Programs that were tried and were not better, or refused, since times changed last.
    worse: Vec<u64>,
    /// How many trials in a row ended so, and finds that the times were too noisy to try.
    setbacks: u32,
    /// It is searched for again without a drift: a find was not tried for that noise, or a program
    /// was taken, which shows times that the one before did not.
    unsettled: bool,
    /// A search was under way in a part of the step that ends next.
    searched: bool,
    /// The step before which no search begins, whatever times are.
    rested: u64,
    moving: Moving,
}

impl Rescheduler {
    /// Of a run by `rules`, whose next step is its first and is measured.
    pub fn new(rules: ExchangeRules) -> Rescheduler {
        Rescheduler {
            rules,
            state: State::Measuring(rules.samples),
            times: StepTimes::default(),
            seconds: Drift::new(rules.drift),
            shares: Drift::new(rules.drift),
            worse: Vec::new(),
            setbacks: 0,
            unsettled: false,
            searched: false,
            rested: 0,
            moving: Moving::default(),
        }
    }

    /// Of a run by `rules` that goes on after `step` with a program whose steps took so many
    /// seconds: a better one is looked for once they take others.
    pub fn going_on(rules: ExchangeRules, step: u64, seconds: f64) -> Rescheduler {
        Rescheduler {
            state: State::Resting(step.saturating_add(rules.rest)),
            seconds: Drift::from(rules.drift, seconds),
            rested: step.saturating_add(rules.rest),
            ..Rescheduler::new(rules)
        }
    }

    /// A search has ended with a better program, or with none. It may come at any time, or never.
    pub fn found(&mut self, found: Option<Predicted>) {
        if self.state != State::Searching {
            return;
        }
        self.searched = true;
        self.state = match found.filter(|found| !self.worse.contains(&found.program)) {
            Some(found) => State::Found(found),
            None => State::Resting(0),
        };
    }

    /// Programs that a search need not find: they were tried and were not better, or refused.
    pub fn worse(&self) -> &[u64] {
        &self.worse
    }

    /// What follows a step.
    pub fn step(&mut self, seen: StepSeen) -> Follows {
        // A search takes cores from the ranks, so that what runs beside it is slower.
        let searched = std::mem::take(&mut self.searched);
        if !searched && self.state != State::Searching {
            self.times.add(seen.seconds);
            self.seconds.add([seen.seconds].into_iter());
            self.shares.add_shares(seen.busy);
        }
        let stay = Follows::default();
        match self.state {
            State::Measuring(left) if left > 1 => {
                self.state = State::Measuring(left - 1);
                Follows { samples: true, ..stay }
            }
            State::Measuring(_) => {
                // What is found holds for these times.
                self.shares.refer_to(self.rules.samples as usize - 1);
                self.state = State::Searching;
                Follows { searches: true, ..stay }
            }
            State::Searching => stay,
            State::Found(found) => self.offer(found, seen.step),
            State::Offered(found) => match seen.reply {
                Reply::Ready if seen.saving && found.stages.is_some() => stay,
                Reply::Ready => self.take(found, seen.step),
                Reply::Refused => {
                    self.worse.push(found.program);
                    self.rest(seen.step);
                    Follows { order: ExchangeOrder::Drop, ..stay }
                }
            },
            State::OnTrial { predicted, after, before_s, noise } => {
                if seen.step == after + 1 && predicted.stages.is_some() {
                    self.moving.took(seen.seconds, before_s);
                }
                if seen.step < after + 1 + self.rules.trial {
                    return stay;
                }
                let measured_s = self.times.middle(StepTimes::KEPT).unwrap_or(f64::MAX);
                let difference = (measured_s / before_s - 1.0).abs();
                // Where noise hides the difference, more steps say more.
                let is_hidden = difference < noise.max(self.times.noise());
                if is_hidden && self.times.count() < StepTimes::KEPT {
                    return stay;
                }
                if seen.saving && predicted.stages.is_some() && measured_s >= before_s {
                    return stay;
                }
                self.judge(
                    Trial { after, predicted, before_s, measured_s, stays: false },
                    seen.step,
                )
            }
            State::Resting(until) => self.watch(until, seen.step),
        }
    }

    /// Offers what was found, where it is worth it. More steps say more exactly what one takes: a
    /// gain within their noise waits for them.
    fn offer(&mut self, found: Predicted, step: u64) -> Follows {
        let gain = 1.0 - found.then_s / found.now_s;
        let left = self.rules.last.saturating_sub(step);
        let (least, noises) = self.moving.least(&self.rules, &found, left);
        let is_gain = gain >= least && left >= self.rules.trial + 3;
        if is_gain && self.shares.is_there() {
            return self.measure_anew();
        }
        let is_worth_it = is_gain && gain >= least + noises * self.times.noise();
        if is_gain && !is_worth_it && self.times.count() < StepTimes::KEPT {
            return Follows::default();
        }
        if !is_worth_it {
            self.unsettled = gain >= least;
            self.setbacks += u32::from(self.unsettled);
            self.rest(step);
            return Follows::default();
        }
        self.state = State::Offered(found);
        Follows { order: ExchangeOrder::Offer, ..Follows::default() }
    }

    fn take(&mut self, found: Predicted, step: u64) -> Follows {
        let before_s = self.times.middle(StepTimes::KEPT).unwrap_or(found.now_s);
        let noise = self.times.noise();
        found.stages.into_iter().for_each(|stages| self.moving.leave(stages.from));
        self.state = State::OnTrial { predicted: found, after: step, before_s, noise };
        self.forget();
        let moves = found.stages.is_some();
        Follows { order: ExchangeOrder::Take, moves, ..Follows::default() }
    }

    fn judge(&mut self, tried: Trial, step: u64) -> Follows {
        let stays = tried.measured_s < tried.before_s;
        if stays {
            self.setbacks = 0;
            self.unsettled = true;
        } else {
            self.setbacks += 1;
            self.worse.push(tried.predicted.program);
            tried.predicted.stages.into_iter().for_each(|stages| self.moving.leave(stages.to));
            self.forget();
        }
        self.rest(step);
        Follows {
            order: if stays { ExchangeOrder::Stay } else { ExchangeOrder::GoBack },
            tried: Some(Trial { stays, ..tried }),
            moves: !stays && tried.predicted.stages.is_some(),
            ..Follows::default()
        }
    }

    /// No search for a while, and for a longer one the more finds in a row came to nothing, unless
    /// times change.
    fn rest(&mut self, step: u64) {
        let steps = self.rules.rest.saturating_mul(1 << self.setbacks.min(5));
        self.state = State::Resting(step.saturating_add(steps));
        self.rested = step.saturating_add(self.rules.rest);
    }

    /// Steps take other times from now on.
    fn forget(&mut self) {
        self.times = StepTimes::default();
        self.seconds = Drift::new(self.rules.drift);
    }

    /// Measures again once steps take other times than when a search ended last.
    fn watch(&mut self, until: u64, step: u64) -> Follows {
        if until == 0 {
            self.rest(step);
            return Follows::default();
        }
        let drifted = self.seconds.is_there() || self.shares.is_there();
        if drifted && step >= self.rested {
            return self.measure_anew();
        }
        if drifted || !self.unsettled || step < until {
            return Follows::default();
        }
        self.measure()
    }

    /// Measures, since times are others: what came to nothing did so by those before.
    fn measure_anew(&mut self) -> Follows {
        self.worse.clear();
        self.setbacks = 0;
        self.measure()
    }

    fn measure(&mut self) -> Follows {
        self.unsettled = false;
        self.forget();
        self.state = State::Measuring(self.rules.samples);
        Follows { samples: true, ..Follows::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RULES: ExchangeRules =
        ExchangeRules { samples: 4, trial: 3, rest: 10, gain: 0.01, drift: 0.05, last: 500 };

    fn seen(step: u64, seconds: f64) -> StepSeen<'static> {
        StepSeen { step, seconds, busy: &[], reply: Reply::Ready, saving: false }
    }

    /// Runs steps from `first` until one gives another order than to stay; that step and order.
    fn until_an_order(
        machine: &mut Rescheduler,
        steps: std::ops::Range<u64>,
        seconds: f64,
    ) -> Option<(u64, Follows)> {
        let mut all = steps.map(|step| (step, machine.step(seen(step, seconds))));
        all.find(|(_, follows)| follows.order != ExchangeOrder::Stay || follows.tried.is_some())
    }

    /// A machine whose search after step 4 has found a program that is predicted to take 0.9.
    fn found() -> Rescheduler {
        let mut machine = Rescheduler::new(RULES);
        for step in 1..=4 {
            assert_eq!(machine.step(seen(step, 1.0)).searches, step == 4);
        }
        machine.found(Some(Predicted { now_s: 1.0, then_s: 0.9, program: 7, stages: None }));
        machine
    }

    #[test]
    fn a_better_program_is_taken_within_ten_steps_of_the_start_and_stays() {
        let mut machine = found();
        assert_eq!(machine.step(seen(5, 1.0)).order, ExchangeOrder::Offer);
        assert_eq!(machine.step(seen(6, 1.0)).order, ExchangeOrder::Take);
        let (step, follows) = until_an_order(&mut machine, 7..30, 0.91).expect("it is judged");
        let tried = follows.tried.expect("of its trial");
        assert_eq!(
            (step, follows.order, tried.stays, tried.after),
            (10, ExchangeOrder::Stay, true, 6)
        );
        assert_eq!((tried.before_s, tried.measured_s), (1.0, 0.91));
        assert!((11..=20).any(|step| machine.step(seen(step, 0.91)).samples), "it is looked again");
        (21..=24)
            .for_each(|step| assert!(machine.step(seen(step, 0.91)).order == ExchangeOrder::Stay));
        machine.found(None);
        assert_eq!(until_an_order(&mut machine, 25..400, 0.91), None, "nothing changes any more");
    }

    #[test]
    fn steps_beside_a_search_do_not_count_as_those_before_a_trial() {
        let mut machine = Rescheduler::new(RULES);
        (1..=24).for_each(|step| {
            machine.step(seen(step, if step <= 4 { 1.0 } else { 1.4 }));
        });
        machine.found(Some(Predicted { now_s: 1.0, then_s: 0.9, program: 7, stages: None }));
        assert_eq!(machine.step(seen(25, 1.4)).order, ExchangeOrder::Offer);
        assert_eq!(machine.step(seen(26, 1.0)).order, ExchangeOrder::Take);
        let (_, follows) = until_an_order(&mut machine, 27..40, 1.05).expect("it is judged");
        assert_eq!(follows.order, ExchangeOrder::GoBack, "slower than 1.0, if not than 1.4");
        assert_eq!(follows.tried.expect("of its trial").before_s, 1.0);
    }

    #[test]
    fn a_search_that_found_nothing_is_not_begun_again_by_its_own_end() {
        let mut machine = Rescheduler::new(RULES);
        (1..=24).for_each(|step| {
            machine.step(seen(step, if step <= 4 { 1.0 } else { 1.4 }));
        });
        machine.found(None);
        assert!(!machine.step(seen(25, 1.4)).samples);
        assert!((26..400).all(|step| !machine.step(seen(step, 1.0)).samples));
    }

    #[test]
    fn a_program_that_is_not_better_is_left_again_and_not_tried_twice() {
        let mut machine = found();
        assert_eq!(machine.step(seen(5, 1.0)).order, ExchangeOrder::Offer);
        assert_eq!(machine.step(seen(6, 1.0)).order, ExchangeOrder::Take);
        let (step, follows) = until_an_order(&mut machine, 7..30, 1.0).expect("it is judged");
        assert_eq!((step, follows.order), (10, ExchangeOrder::GoBack));
        assert!(!follows.tried.expect("of its trial").stays);
        machine.state = State::Searching;
        machine.found(Some(Predicted { now_s: 1.0, then_s: 0.9, program: 7, stages: None }));
        assert_eq!(until_an_order(&mut machine, 11..400, 1.0), None);
    }

    /// A machine that has found a program which is to gain 3 %, among steps of this noise.
    fn found_in_noise(seconds: impl Fn(u64) -> f64) -> Rescheduler {
        let mut machine = Rescheduler::new(RULES);
        for step in 1..=4 {
            machine.step(seen(step, seconds(step)));
        }
        machine.found(Some(Predicted { now_s: 1.0, then_s: 0.97, program: 7, stages: None }));
        machine
    }

    #[test]
    fn a_gain_within_the_noise_is_not_taken() {
        let noisy = |step: u64| if step.is_multiple_of(2) { 1.0 } else { 1.3 };
        let mut machine = found_in_noise(noisy);
        let mut ends = (5..60).map(|step| (step, machine.step(seen(step, noisy(step)))));
        let again = ends.find(|(_, f)| f.samples || f.order != ExchangeOrder::Stay);
        let (step, follows) = again.expect("it is searched for again");
        assert_eq!((step, follows.samples), (38, true), "after 16 steps and twice the rest");
    }

    #[test]
    fn a_gain_within_the_noise_of_few_steps_is_taken_once_more_steps_have_less() {
        let settling = |step: u64| if step == 3 { 1.2 } else { 1.0 + 0.005 * (step % 3) as f64 };
        let mut machine = found_in_noise(settling);
        let mut orders = (5..60).map(|step| (step, machine.step(seen(step, settling(step))).order));
        let (step, order) = orders.find(|(_, order)| *order != ExchangeOrder::Stay).expect("one");
        assert!(order == ExchangeOrder::Offer && (6..12).contains(&step), "{step}");
    }

    #[test]
    fn a_trial_goes_on_while_noise_hides_whether_steps_are_shorter() {
        let noisy = |step: u64| [1.0, 1.06, 0.94][step as usize % 3];
        let mut machine = found_in_noise(|_| 1.0);
        assert_eq!(machine.step(seen(5, 1.0)).order, ExchangeOrder::Offer);
        assert_eq!(machine.step(seen(6, 1.0)).order, ExchangeOrder::Take);
        // The first three are longer than before, the next ones shorter.
        let seconds = |step: u64| if step < 11 { 1.01 } else { 0.97 } * noisy(step);
        let mut ends = (7..40).map(|step| (step, machine.step(seen(step, seconds(step))).tried));
        let (step, tried) = ends.find(|(_, tried)| tried.is_some()).expect("it is judged");
        assert!(step > 10 && tried.is_some_and(|tried| tried.stays), "{step}: {tried:?}");
    }

    #[test]
    fn a_refused_program_is_dropped() {
        let mut machine = found();
        assert_eq!(machine.step(seen(5, 1.0)).order, ExchangeOrder::Offer);
        let refused = StepSeen { reply: Reply::Refused, ..seen(6, 1.0) };
        assert_eq!(machine.step(refused).order, ExchangeOrder::Drop);
        assert_eq!(until_an_order(&mut machine, 7..60, 1.0), None);
    }

    #[test]
    fn steps_that_become_slower_are_measured_again_and_not_before_the_rest_is_over() {
        let mut machine = found();
        for step in 5..=10 {
            machine.step(seen(step, if step < 7 { 1.0 } else { 0.9 }));
        }
        let measured = |machine: &mut Rescheduler, steps: std::ops::Range<u64>, seconds: f64| {
            steps.into_iter().find(|step| machine.step(seen(*step, seconds)).samples)
        };
        assert_eq!(measured(&mut machine, 11..20, 1.35), None, "it rests until step 20");
        assert_eq!(measured(&mut machine, 20..21, 0.9), Some(20), "after a change it looks again");
        (21..=24)
            .for_each(|step| assert!(machine.step(seen(step, 0.9)).order == ExchangeOrder::Stay));
        machine.found(None);
        assert_eq!(measured(&mut machine, 25..50, 0.9), None, "as fast as before");
        assert!(measured(&mut machine, 50..60, 1.35).is_some_and(|step| step <= 54));
    }

    /// Finds that came to nothing put off the next search, until the times are others.
    #[test]
    fn steps_that_become_slower_are_measured_again_however_many_finds_came_to_nothing() {
        let mut machine = found();
        machine.setbacks = 4;
        machine.rest(6);
        let measured = |machine: &mut Rescheduler, steps: std::ops::Range<u64>, seconds: f64| {
            steps.into_iter().find(|step| machine.step(seen(*step, seconds)).samples)
        };
        assert_eq!(measured(&mut machine, 7..50, 1.0), None, "it rests until step 166");
        let step = measured(&mut machine, 50..160, 1.4);
        assert!(step.is_some_and(|step| step <= 54), "{step:?}");
    }

    #[test]
    fn a_resumed_run_looks_for_better_programs_only_once_its_steps_take_other_times() {
        let samples = |seconds: f64| {
            let mut machine = Rescheduler::going_on(RULES, 40, 1.0);
            (41..100).find(|step| machine.step(seen(*step, seconds)).samples)
        };
        assert_eq!(samples(1.0), None);
        assert_eq!(samples(1.2), Some(50), "after a rest");
    }

    #[test]
    fn a_run_that_is_about_to_end_changes_nothing() {
        let mut machine = found();
        machine.rules.last = 8;
        assert_eq!(until_an_order(&mut machine, 5..9, 1.0), None);
    }

    #[test]
    fn orders_are_read_back() {
        for order in ExchangeOrder::ALL {
            assert_eq!(ExchangeOrder::from_byte(order.to_byte()), order);
        }
    }

    #[test]
    fn a_rank_goes_back_to_what_it_ran_before() {
        let mut copies = Copies::new('a');
        copies.offer(Some('b'));
        assert_eq!(copies.reply(), Reply::Ready);
        assert!(copies.follow(ExchangeOrder::Take));
        assert_eq!(*copies.running(), 'b');
        assert!(copies.follow(ExchangeOrder::GoBack));
        assert_eq!(*copies.running(), 'a');
        copies.offer(None);
        assert_eq!(copies.reply(), Reply::Refused);
        assert!(!copies.follow(ExchangeOrder::Drop));
        assert_eq!(*copies.running(), 'a');
    }
}
