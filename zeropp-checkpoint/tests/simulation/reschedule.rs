//! Many random runs whose ranks exchange their program, by the machines of real runs: searches
//! that end late, never, or with a worse program; ranks that refuse one, or die between an offer
//! and the next step, or while blocks move; steps that become slower; noise. Programs have stages
//! of their own, so that each exchange moves what ranks have.

use zeropp_checkpoint::moves::{HeldWords, StateSpan, moves};
use zeropp_checkpoint::reschedule::{
    Copies, ExchangeOrder, ExchangeRules, Follows, OtherStages, Predicted, Reply, Rescheduler,
    StepSeen,
};

use crate::number;
use crate::rng::Rng;

/// Programs that there are.
const PROGRAMS: u64 = 6;

struct World {
    rng: Rng,
    rules: ExchangeRules,
    /// Seconds of a step with each program.
    seconds: Vec<f64>,
    /// By how much each rank is slower than it could be.
    slowness: Vec<f64>,
    /// From this step on programs take other seconds, and a rank is slower.
    changes_at: u64,
    /// Largest share by which a step is slower than it should be.
    noise: f64,
    /// By how much a prediction may be wrong.
    error: f64,
    ranks: Vec<Copies<u64>>,
    state: State,
    machine: Rescheduler,
    /// When the search under way ends, if it ever does.
    ends_at: Option<u64>,
    /// What it found last.
    found: Option<u64>,
    offered: Option<u64>,
    /// Steps after which another program was taken, or the one before again.
    changes: Vec<u64>,
    /// Whether every search was one for the best program, and came to its end in time.
    sees_the_best: bool,
    /// Whether rank 0 knows that blocks move for each program, and when saves are under way.
    knows_moves: bool,
    /// The program that ran before the one under trial, and its trial.
    before: Option<u64>,
    /// The program that was better than the one before, and the seconds of its steps.
    kept: Option<(u64, f64)>,
}

/// Words of the run's state.
const WORDS: usize = 64;

/// What every rank has of the state: words that say how many updates there were.
struct State {
    held: Vec<HeldWords>,
    /// Where each program has the state cut, between its ranks.
    cuts: Vec<Vec<usize>>,
    updates: u64,
    /// Updates that the newest checkpoint has behind it.
    saved: u64,
    /// Its own chances: the others of a seed stay as they are.
    rng: Rng,
}

impl State {
    fn new(ranks: usize, mut rng: Rng) -> State {
        let mut cut = |_| {
            let mut cut: Vec<usize> =
                (1..ranks).map(|_| rng.below(WORDS as u64 + 1) as usize).collect();
            cut.extend([0, WORDS]);
            cut.sort_unstable();
            cut
        };
        let cuts = (0..PROGRAMS).map(&mut cut).collect();
        let mut state = State { held: Vec::new(), cuts, updates: 0, saved: 0, rng };
        state.load(0);
        state
    }

    /// What each rank has where `program` runs.
    fn spans(&self, program: u64) -> Vec<Vec<StateSpan>> {
        let span = |two: &[usize]| {
            let (start, words) = (two[0], two[1] - two[0]);
            vec![StateSpan { tensor: "w".into(), start, words }]
        };
        self.cuts[program as usize].windows(2).map(span).collect()
    }

    /// All ranks have the newest checkpoint's state, cut as `program` has it.
    fn load(&mut self, program: u64) {
        self.updates = self.saved;
        self.write(program);
    }

    /// All ranks have made an update of what `program` gives them.
    fn update(&mut self, program: u64) {
        self.updates += 1;
        self.write(program);
    }

    fn write(&mut self, program: u64) {
        let of = |spans: Vec<StateSpan>| {
            let mut held = HeldWords::default();
            for StateSpan { tensor, start, words } in spans {
                held.add(tensor, start, vec![self.updates as f32; words]);
            }
            held
        };
        self.held = self.spans(program).into_iter().map(of).collect();
    }

    /// Moves what ranks have to where `program` has it, of which a rank may die after so many
    /// moves; whether none did.
    fn moved(&mut self, program: u64, dies_after: Option<usize>) -> bool {
        let have: Vec<_> = self.held.iter().map(HeldWords::spans).collect();
        let all = moves(&have, &self.spans(program)).expect("all of it is there");
        let mut got: Vec<_> = self.held.iter().map(|_| HeldWords::default()).collect();
        for (i, m) in all.iter().enumerate() {
            if dies_after == Some(i) {
                self.held = got;
                return false;
            }
            let mut words = vec![0.0; m.span.words];
            self.held[m.from].copy("w", m.span.start, &mut words);
            got[m.to].add("w".into(), m.span.start, words);
        }
        got.iter_mut().for_each(HeldWords::sort);
        self.held = got;
        true
    }

    /// Every word is where `program` has it, once, and is of the last update.
    fn check(&self, program: u64) {
        let bytes: u64 = self.held.iter().map(HeldWords::bytes).sum();
        assert_eq!(bytes, 4 * WORDS as u64, "words were lost or doubled");
        for (held, spans) in self.held.iter().zip(self.spans(program)) {
            for StateSpan { start, words, .. } in spans.into_iter().filter(|s| s.words > 0) {
                let mut read = vec![0.0; words];
                held.copy("w", start, &mut read);
                assert!(read.iter().all(|word| *word == self.updates as f32), "an old word");
            }
        }
    }
}

/// What came of a run.
#[derive(Debug, Default)]
struct End {
    taken: u64,
    back: u64,
    refused: u64,
    died: u64,
    died_moving: u64,
    best: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut rng = Rng(seed);
        let last = 20 + rng.below(300);
        let rules = ExchangeRules { last, rest: 5 + rng.below(20), ..ExchangeRules::default() };
        let mut share = |most: u64| rng.below(most + 1) as f64 / 100.0;
        let seconds = (0..PROGRAMS).map(|_| 1.0 + share(60)).collect();
        let noise = if share(1) == 0.0 { 0.0 } else { share(6) };
        let error = if share(1) == 0.0 { 0.0 } else { share(30) };
        let ranks = vec![Copies::new(0); 1 + rng.below(6) as usize];
        let state = State::new(ranks.len(), Rng(seed ^ 0x9E37_79B9));
        World {
            state,
            rules,
            seconds,
            slowness: vec![1.0; ranks.len()],
            changes_at: rng.below(2 * last),
            noise,
            error,
            ranks,
            machine: Rescheduler::new(rules),
            ends_at: None,
            found: None,
            offered: None,
            changes: Vec::new(),
            sees_the_best: true,
            knows_moves: seed % 2 == 1,
            before: None,
            kept: None,
            rng,
        }
    }

    fn share(&mut self, most: f64) -> f64 {
        most * self.rng.below(1001) as f64 / 1000.0
    }

    /// Seconds that each rank computes in a step.
    fn busy(&mut self) -> Vec<f64> {
        let State { rng, .. } = &mut self.state;
        let mut noise = || 1.0 + self.noise * rng.below(1001) as f64 / 1000.0;
        self.slowness.iter().map(|slowness| slowness * noise()).collect()
    }

    /// The program that all ranks run, which is one.
    fn running(&self) -> u64 {
        let running = *self.ranks[0].running();
        assert!(self.ranks.iter().all(|rank| *rank.running() == running), "ranks differ");
        running
    }

    fn run(mut self) -> End {
        let mut end = End::default();
        for step in 1..=self.rules.last {
            if step == self.changes_at {
                self.seconds = (0..PROGRAMS).map(|_| 1.0 + self.share(0.6)).collect();
                self.slowness[0] = 1.5;
            }
            let beside = if self.ends_at.is_some() { 1.3 } else { 1.0 };
            let noise = 1.0 + self.share(self.noise);
            let seconds = beside * noise * self.seconds[self.running() as usize];
            if self.rng.once_in(400) {
                self.die(step, &mut end);
                continue;
            }
            let running = self.running();
            self.state.check(running);
            self.state.update(running);
            if self.state.rng.once_in(5) {
                self.state.saved = self.state.updates;
            }
            if self.ends_at == Some(step) {
                self.ends_at = None;
                let found = self.search();
                // A program is tried where enough steps are left to win it back.
                self.sees_the_best &= self.rules.last - step >= self.rules.trial + 3;
                self.found = found.map(|found| found.program);
                self.machine.found(found);
            }
            let reply = match self.offered {
                Some(_) => self.ranks.iter().map(Copies::reply).max().expect("a rank"),
                None => Reply::Ready,
            };
            let busy = self.busy();
            let saving = self.knows_moves && self.state.rng.once_in(3);
            let seen = StepSeen { step, seconds, busy: &busy, reply, saving };
            let follows = self.machine.step(seen);
            let (order, moves) = (follows.order, ExchangeOrder::Take);
            assert!(!saving || order != moves && order != ExchangeOrder::GoBack, "{step}: a save");
            self.follow(step, follows, reply, &mut end);
        }
        // Where nothing disturbs them, runs whose searches end in time end with the best program.
        let least = self.seconds.iter().copied().fold(f64::MAX, f64::min);
        let is_best = self.seconds[self.running() as usize] <= 1.02 * least;
        assert!(is_best || !self.is_calm(&end), "a worse program than there is");
        end.best = u64::from(is_best);
        end
    }

    /// A rank dies in a step, or before it: all go on with the program that was kept last, from the
    /// newest checkpoint.
    fn die(&mut self, step: u64, end: &mut End) {
        let goes_on = self.kept.map_or(0, |(program, _)| program);
        self.ranks.iter_mut().for_each(|rank| *rank = Copies::new(goes_on));
        self.state.load(goes_on);
        self.machine = match self.kept {
            Some((_, seconds)) => Rescheduler::going_on(self.rules, step, seconds),
            None => Rescheduler::new(self.rules),
        };
        (self.ends_at, self.offered, self.before) = (None, None, None);
        self.changes.clear();
        end.died += 1;
    }

    /// Whether nothing was to keep it from the best program.
    fn is_calm(&self, end: &End) -> bool {
        let undisturbed = end.died + end.refused + end.back == 0 && self.ends_at.is_none();
        let same = self.changes_at == 0 || self.changes_at > self.rules.last;
        // What moves has to win that back first.
        undisturbed
            && same
            && !self.knows_moves
            && self.noise + self.error == 0.0
            && self.sees_the_best
    }

    /// What a search gives: the best program as it is predicted, or some program.
    fn search(&mut self) -> Option<Predicted> {
        let guessed: Vec<f64> = (0..PROGRAMS as usize)
            .map(|i| self.seconds[i] * (1.0 + self.share(self.error)))
            .collect();
        let best =
            (0..PROGRAMS).min_by(|a, b| guessed[*a as usize].total_cmp(&guessed[*b as usize]));
        let strays = self.rng.once_in(8);
        self.sees_the_best &= !strays;
        let program = if strays { self.rng.below(PROGRAMS) } else { best? };
        let (now_s, then_s) = (guessed[self.running() as usize], guessed[program as usize]);
        let from = self.running();
        let stages = self.knows_moves.then_some(OtherStages { from, to: program });
        (program != from).then_some(Predicted { now_s, then_s, program, stages })
    }

    fn follow(&mut self, step: u64, follows: Follows, reply: Reply, end: &mut End) {
        if follows.searches {
            assert!(self.ends_at.is_none(), "{step}: one search at a time");
            let late = self.rng.below(12);
            self.ends_at = (!self.rng.once_in(10)).then_some(step + 1 + late);
            self.sees_the_best &= self.ends_at.is_some();
        }
        let before = self.running();
        match follows.order {
            ExchangeOrder::Stay => {}
            ExchangeOrder::Offer => {
                assert!(self.offered.is_none(), "{step}: two offers");
                let program = self.found.expect("a search has found it");
                assert_ne!(program, before, "{step}: it runs already");
                let refuses = self.rng.once_in(10).then(|| self.rng.below(self.ranks.len() as u64));
                for (i, rank) in self.ranks.iter_mut().enumerate() {
                    rank.offer((refuses != Some(i as u64)).then_some(program));
                }
                self.offered = Some(program);
            }
            ExchangeOrder::Drop => {
                assert_eq!(reply, Reply::Refused, "{step}: all have it");
                (self.offered, end.refused) = (None, end.refused + 1);
            }
            ExchangeOrder::Take => {
                assert_eq!(reply, Reply::Ready, "{step}: a rank does not have it");
                (self.offered, self.before, end.taken) = (None, Some(before), end.taken + 1);
                self.changes.push(step);
            }
            ExchangeOrder::GoBack => {
                end.back += 1;
                self.changes.push(step);
            }
        }
        for rank in &mut self.ranks {
            rank.follow(follows.order);
        }
        if follows.order == ExchangeOrder::GoBack {
            assert_eq!(Some(self.running()), self.before.take(), "{step}: the last good one");
        }
        let now = self.running();
        if now != before {
            let rng = &mut self.state.rng;
            let dies = rng.once_in(20).then(|| rng.below(4) as usize);
            if !self.state.moved(now, dies) {
                end.died_moving += 1;
                return self.die(step, end);
            }
        }
        if let Some(tried) = follows.tried {
            assert_eq!(tried.stays, tried.measured_s < tried.before_s, "{step}");
            assert_eq!(tried.stays, follows.order == ExchangeOrder::Stay, "{step}");
            assert!(tried.stays || self.changes.len() >= 2);
            if tried.stays {
                self.kept = Some((self.running(), tried.measured_s));
            }
        }
        // From one change to the next search, and so to the next program, a rest lies.
        let taken: Vec<u64> = self.changes.iter().rev().take(3).copied().collect();
        if let [last, _, first] = taken[..] {
            assert!(last - first >= self.rules.rest, "{step}: it swings: {:?}", self.changes);
        }
    }
}

#[test]
fn seeds_of_changed_programs_keep_all_ranks_on_one_and_do_not_swing() {
    let seeds = match number("ZEROPP_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..4 * number("ZEROPP_SEEDS").unwrap_or(500),
    };
    let mut all = End::default();
    for seed in seeds.clone() {
        let end = std::panic::catch_unwind(|| World::new(seed).run());
        let end = end.unwrap_or_else(|_| panic!("ZEROPP_SEED={seed} replays it"));
        all.taken += end.taken;
        all.back += end.back;
        all.refused += end.refused;
        all.died += end.died;
        all.died_moving += end.died_moving;
        all.best += end.best;
    }
    println!("{all:?}");
    let n = seeds.end - seeds.start;
    let counts = [all.taken, all.back, all.refused, all.died, all.died_moving];
    assert!(n < 1000 || counts.iter().all(|count| *count > n / 100), "{all:?}");
}

/// Four ranks in steps of this noise, by a machine whose searches take two steps and find a program
/// that is predicted to gain `gain` of a step and a fifth of the noise more or less; rank 0 takes
/// half as long again from step 50 on where it `slows`. After which steps it was taken, and how
/// often it was searched for.
fn four_ranks(seed: u64, noise: f64, slows: bool, gain: fn(u64) -> f64) -> (Vec<u64>, u64) {
    let mut rng = Rng(seed);
    let mut noisy = |by: f64| 1.0 + by * (2.0 * rng.below(1001) as f64 / 1000.0 - 1.0);
    let mut machine = Rescheduler::new(ExchangeRules { last: 500, ..ExchangeRules::default() });
    let (mut taken, mut searches, mut ends_at) = (Vec::new(), 0, None);
    let mut won = 0.0;
    for step in 1..=500 {
        let slow = slows && step >= 50;
        let seconds = if slow { 1.3 - won } else { 1.0 } * noisy(noise);
        let of_rank = |rank| if slow && rank == 0 { 1.5 } else { 1.0 };
        let busy: Vec<f64> = (0..4).map(|rank| of_rank(rank) * noisy(noise)).collect();
        if ends_at == Some(step) {
            let then_s = noisy(noise / 5.0) - (gain(step) - won);
            machine.found(Some(Predicted { now_s: 1.0, then_s, program: step, stages: None }));
        }
        let seen = StepSeen { step, seconds, busy: &busy, reply: Reply::Ready, saving: false };
        let follows = machine.step(seen);
        if follows.searches {
            (searches, ends_at) = (searches + 1, Some(step + 2));
        }
        if follows.order == ExchangeOrder::Take {
            won = gain(step);
            taken.push(step);
        }
    }
    (taken, searches)
}

/// Searches that always find the other one of two cuts much better, which it is not: steps of both
/// take as long, and the machine is noisy enough that some trials seem to say it is.
#[test]
fn blocks_do_not_move_back_and_forth_on_a_noisy_machine() {
    let mut most = 0;
    for seed in 0..300 {
        let mut rng = Rng(seed);
        let mut machine =
            Rescheduler::new(ExchangeRules { last: 1000, ..ExchangeRules::default() });
        let (mut at, mut moves, mut ends_at) = (0, 0, None);
        for step in 1..=1000 {
            if ends_at == Some(step) {
                let gain = 0.05 + 0.05 * rng.below(1001) as f64 / 1000.0;
                let stages = Some(OtherStages { from: at, to: 1 - at });
                let (then_s, program) = (1.0 - gain, step);
                machine.found(Some(Predicted { now_s: 1.0, then_s, program, stages }));
            }
            let seconds = 1.0 + 0.1 * rng.below(1001) as f64 / 1000.0;
            let (busy, reply) = ([seconds, 1.0], Reply::Ready);
            let seen = StepSeen { step, seconds, busy: &busy, reply, saving: false };
            let follows = machine.step(seen);
            if follows.searches {
                ends_at = Some(step + 2);
            }
            if matches!(follows.order, ExchangeOrder::Take | ExchangeOrder::GoBack) {
                (at, moves) = (1 - at, moves + 1);
            }
        }
        most = most.max(moves);
    }
    println!("at most {most} moves in 1000 steps");
    assert!((1..=6).contains(&most), "{most}");
}

#[test]
fn noise_alone_exchanges_nothing_in_five_hundred_steps() {
    for seed in 0..300 {
        let noise = [0.0, 0.01, 0.02, 0.04, 0.06][seed as usize % 5];
        let (taken, searches) = four_ranks(seed, noise, false, |_| 0.0);
        assert!(taken.is_empty() && searches <= 8, "seed {seed}: {taken:?}, {searches} searches");
    }
}

#[test]
fn a_rank_that_becomes_slower_has_another_program_within_twenty_steps_despite_noise() {
    for seed in 0..300 {
        let noise = [0.0, 0.01, 0.02, 0.03][seed as usize % 4];
        let gain = |step| if step < 50 { 0.0 } else { 0.054 };
        let (taken, _) = four_ranks(seed, noise, true, gain);
        let first = taken.first().copied().unwrap_or(u64::MAX);
        assert!((50..=70).contains(&first), "seed {seed}, noise {noise}: {taken:?}");
        assert!(taken.len() <= 3, "seed {seed}: it swings: {taken:?}");
    }
}
