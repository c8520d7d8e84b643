//! Random good schedules pass; random mutations are judged as a second, slow and literal checker
//! judges them.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::action::{ActionKind, Operand};
use crate::ir::{Compute, Message, Task};
use crate::lower::{LowerOptions, Residency, lower};
use crate::schedules::{KINDS, Shape, generate, generate_sliced};

type MessageKey = (Message, usize, usize);

/// Executes the ranks' lists action by action on plain sets.
struct Literal<'a> {
    s: &'a Schedule,
    program: bool,
    weighs: bool,
    done: HashSet<Task>,
    last_w: HashMap<usize, usize>,
    /// Of the forwards of the last stage that make gradients.
    last_head: Option<usize>,
    gathered: HashSet<usize>,
    /// Per stage: units reduced, W added since.
    reduced: HashMap<usize, (usize, usize)>,
    replicas: HashSet<usize>,
    /// Whether reductions end at actions of their own.
    retires: bool,
    /// By rank, the stages whose reductions have not ended.
    reducing: HashMap<usize, Vec<usize>>,
    /// Stages and micro-batches that were copied out, with what came last: OUT, GONE, IN.
    copies: HashMap<(usize, usize), usize>,
    stepped: HashSet<usize>,
    sent: HashMap<(usize, usize), Vec<MessageKey>>,
    posted: HashMap<(usize, usize), Vec<MessageKey>>,
}

/// What trying an action came to.
enum Try {
    Ran,
    Waits,
    Wrong,
}

impl Literal<'_> {
    fn accepts(s: &Schedule) -> bool {
        let program = is_program(s);
        let weighs = program || s.has_gathers();
        let mut l = Literal {
            s,
            program,
            weighs,
            done: Default::default(),
            last_w: Default::default(),
            last_head: None,
            gathered: Default::default(),
            reduced: Default::default(),
            replicas: Default::default(),
            retires: s.ranks.iter().flatten().any(|a| matches!(a, Action::Retire { .. })),
            reducing: Default::default(),
            copies: Default::default(),
            stepped: Default::default(),
            sent: Default::default(),
            posted: Default::default(),
        };
        let mut next = vec![0; s.pp()];
        loop {
            let mut moved = false;
            for (rank, next) in next.iter_mut().enumerate() {
                let Some(action) = s.ranks[rank].get(*next) else { continue };
                match l.attempt(rank, action) {
                    Try::Ran => {
                        *next += 1;
                        moved = true;
                    }
                    Try::Waits => {}
                    Try::Wrong => return false,
                }
            }
            if !moved {
                break;
            }
        }
        let ended = next.iter().zip(&s.ranks).all(|(n, r)| *n == r.len());
        ended && l.complete()
    }

    fn complete(&self) -> bool {
        let s = self.s;
        let computed = (0..s.stages()).all(|stage| {
            (0..s.micro_batches()).all(|i| {
                let has = |kind| self.done.contains(&Task { kind, stage, micro_batch: i });
                has(Compute::F) && (has(Compute::BW) || (has(Compute::B) && has(Compute::W)))
            })
        });
        let reduced = || {
            (0..s.stages())
                .all(|stage| self.reduced.get(&stage).is_some_and(|(n, _)| *n == s.units.len()))
        };
        let replicas = self.replicas.is_empty() || self.replicas.len() == s.stages();
        let stepped = self.stepped.len() == s.pp();
        let links = self.sent == self.posted;
        let all_in = self.copies.values().all(|last| *last == 2);
        let retired = !self.retires || self.reducing.values().all(Vec::is_empty);
        computed
            && self.gathered.is_empty()
            && all_in
            && (!self.program || (reduced() && replicas && stepped && links && retired))
    }

    fn attempt(&mut self, rank: usize, action: &Action) -> Try {
        let s = self.s;
        if self.stepped.contains(&rank) {
            return Try::Wrong;
        }
        let here = |stage: usize| stage < s.stages() && s.placement[stage] == rank;
        let right = match *action {
            Action::Compute { kind, stage, micro_batch } => {
                if !here(stage) || micro_batch >= s.micro_batches() {
                    return Try::Wrong;
                }
                return self.compute(rank, kind, stage, micro_batch);
            }
            Action::Send { message, stage, micro_batch } => {
                here(stage) && self.send(rank, message, stage, micro_batch)
            }
            Action::Recv { message, stage, micro_batch } => {
                here(stage)
                    && micro_batch < s.micro_batches()
                    && self.post(rank, message, stage, micro_batch)
            }
            Action::AllGather { stage } => here(stage) && self.gathered.insert(stage),
            Action::Free { stage } => here(stage) && self.gathered.remove(&stage),
            Action::ReduceScatter { stage } => {
                here(stage) && {
                    let state = self.reduced.entry(stage).or_default();
                    let whole = s.units.get(state.0) == Some(&state.1);
                    *state = (state.0 + 1, 0);
                    let reducing = self.reducing.entry(rank).or_default();
                    reducing.push(stage);
                    whole && (!self.retires || reducing.len() == 1)
                }
            }
            Action::ReplicaReduce { stage } => {
                here(stage)
                    && self.reduced.get(&stage).is_some_and(|r| r.0 == s.units.len())
                    && self.replicas.insert(stage)
            }
            Action::Retire { stage } => {
                let first = self.reducing.get_mut(&rank).and_then(Vec::pop);
                here(stage) && first == Some(stage)
            }
            Action::Out { stage, micro_batch } => {
                let at = (stage, micro_batch);
                let done = |kind| self.done.contains(&Task { kind, stage, micro_batch });
                here(stage)
                    && s.sample_slices.len() < 2
                    && done(Compute::F)
                    && ![Compute::R, Compute::B, Compute::BW].into_iter().any(done)
                    && self.copies.insert(at, 0).is_none()
            }
            Action::Gone { stage, micro_batch } => {
                here(stage) && self.copies.insert((stage, micro_batch), 1) == Some(0)
            }
            Action::In { stage, micro_batch } => {
                here(stage) && self.copies.insert((stage, micro_batch), 2) == Some(1)
            }
            Action::OptimizerStep => {
                let reducing = self.reducing.get(&rank).is_some_and(|all| !all.is_empty());
                self.stepped.insert(rank) && !(self.retires && reducing)
            }
            Action::SendHead { .. } | Action::RecvHead { .. } => {
                unreachable!("heads are whole here")
            }
            Action::Overlap { .. } | Action::Validate => unreachable!("not in these schedules"),
        };
        if right { Try::Ran } else { Try::Wrong }
    }

    fn send(&mut self, rank: usize, message: Message, stage: usize, i: usize) -> bool {
        let made = |kind| self.done.contains(&Task { kind, stage, micro_batch: i });
        let ready = match message {
            Message::Activation => made(Compute::F),
            Message::Gradient => made(Compute::B) || made(Compute::BW),
        };
        let Some(to) = self.s.destination(message, stage) else { return false };
        let list = self.sent.entry((rank, to)).or_default();
        let new = !list.contains(&(message, stage, i));
        list.push((message, stage, i));
        ready && new
    }

    fn post(&mut self, rank: usize, message: Message, stage: usize, i: usize) -> bool {
        let Some(from) = self.s.source(message, stage) else { return false };
        let producer = message.producer(stage, self.s.stages()).unwrap();
        let list = self.posted.entry((from, rank)).or_default();
        let new = !list.contains(&(message, producer, i));
        list.push((message, producer, i));
        new
    }

    /// Slices of a sample run forward one after the other, and backward the other way.
    fn has_slices_before(&self, kind: Compute, stage: usize, i: usize) -> bool {
        let n = self.s.sample_slices.len().max(1);
        let done = |kind, micro_batch| self.done.contains(&Task { kind, stage, micro_batch });
        let sample = i / n * n..i / n * n + n;
        match kind {
            Compute::F => (sample.start..i).all(|before| done(Compute::F, before)),
            Compute::B | Compute::BW => (i + 1..sample.end)
                .all(|behind| done(Compute::B, behind) || done(Compute::BW, behind)),
            Compute::R => (sample.start..i).all(|before| done(Compute::F, before)),
            Compute::W => true,
        }
    }

    fn compute(&mut self, rank: usize, kind: Compute, stage: usize, i: usize) -> Try {
        let s = self.s;
        let has = |kind, stage| self.done.contains(&Task { kind, stage, micro_batch: i });
        let back = |stage| has(Compute::B, stage) || has(Compute::BW, stage);
        let right = !has(kind, stage)
            && match kind {
                Compute::F => true,
                Compute::B | Compute::BW => has(Compute::F, stage) && !back(stage),
                Compute::W => has(Compute::B, stage),
                Compute::R => has(Compute::F, stage) && !back(stage),
            };
        let needs = matches!(kind, Compute::R | Compute::B | Compute::BW);
        let is_here = self.copies.get(&(stage, i)).is_none_or(|last| *last == 2);
        let right = right && self.has_slices_before(kind, stage, i) && (!needs || is_here);
        if !right || (self.weighs && kind != Compute::W && !self.gathered.contains(&stage)) {
            return Try::Wrong;
        }
        if let Some(message) = kind.needs(stage, s.stages()) {
            let from = message.producer(stage, s.stages()).unwrap();
            let made = if kind == Compute::F { has(kind, from) } else { back(from) };
            match s.source(message, stage) {
                None if !made => return Try::Wrong,
                None => {}
                Some(_) if !self.program && !made => return Try::Waits,
                Some(_) if !self.program => {}
                Some(peer) => {
                    let item = (message, from, i);
                    let posted = self.posted.get(&(peer, rank));
                    let Some(k) = posted.and_then(|p| p.iter().position(|m| *m == item)) else {
                        return Try::Wrong;
                    };
                    match self.sent.get(&(peer, rank)).and_then(|sent| sent.get(k)) {
                        Some(got) if *got == item => {}
                        Some(_) => return Try::Wrong,
                        None => return Try::Waits,
                    }
                }
            }
        }
        self.done.insert(Task { kind, stage, micro_batch: i });
        let again = Task { kind: Compute::R, stage, micro_batch: i };
        let redone = || s.ranks.iter().flatten().any(|a| a.computes().any(|task| task == again));
        let head = kind == Compute::R || kind == Compute::F && !redone();
        if stage + 1 == s.stages() && head && self.last_head.replace(i).is_some_and(|last| last > i)
        {
            return Try::Wrong;
        }
        if matches!(kind, Compute::W | Compute::BW) {
            let state = self.reduced.entry(stage).or_default();
            state.1 += 1;
            let n = s.sample_slices.len().max(1);
            let is_before = |a: usize, b: usize| a / n < b / n || a / n == b / n && a > b;
            let last = self.last_w.insert(stage, i);
            let in_order =
                last.is_none_or(|last| if n > 1 { is_before(last, i) } else { last < i });
            if !in_order || (self.program && s.unit_of(i) != state.0) {
                return Try::Wrong;
            }
        }
        Try::Ran
    }
}

/// One random change of one rank's list.
#[derive(Clone, Copy, Debug)]
enum Change {
    Drop,
    Duplicate,
    Swap,
    SwapNeighbours,
    Move,
    OtherRank,
    Stage,
    MicroBatch,
    Kind,
}

const CHANGES: [Change; 9] = [
    Change::Drop,
    Change::Duplicate,
    Change::Swap,
    Change::SwapNeighbours,
    Change::Move,
    Change::OtherRank,
    Change::Stage,
    Change::MicroBatch,
    Change::Kind,
];

/// Applies `change`; true where the result cannot be right whatever else holds.
fn apply(s: &mut Schedule, change: Change, rank: usize, a: usize, b: usize) -> bool {
    let rank = rank % s.pp();
    let len = s.ranks[rank].len();
    let (i, j) = (a % len, b % len);
    let action = s.ranks[rank][i];
    match change {
        Change::Drop => {
            s.ranks[rank].remove(i);
            // Recomputation is optional, and so is a replica reduction with a single stage, and the
            // end of the only reduction.
            let optional = matches!(
                action,
                Action::Compute { kind: Compute::R, .. }
                    | Action::ReplicaReduce { .. }
                    | Action::Retire { .. }
            );
            !optional
        }
        Change::Duplicate => {
            s.ranks[rank].insert(j, action);
            true
        }
        Change::Swap => {
            s.ranks[rank].swap(i, j);
            false
        }
        Change::SwapNeighbours => {
            s.ranks[rank].swap(i, (i + 1) % len);
            false
        }
        Change::Move => {
            s.ranks[rank].remove(i);
            s.ranks[rank].insert(j, action);
            false
        }
        Change::OtherRank => {
            let other = (rank + 1 + b % s.pp()) % s.pp();
            s.ranks[rank].remove(i);
            let j = b % (s.ranks[other].len() + 1);
            s.ranks[other].insert(j, action);
            other != rank
        }
        Change::Stage | Change::MicroBatch | Change::Kind => {
            let changed = retarget(action, change, b, s.stages() + 1, s.micro_batches() + 1);
            s.ranks[rank][i] = changed;
            let optional = matches!(action, Action::Compute { kind: Compute::R, .. });
            changed != action && !optional && !matches!(change, Change::Kind)
        }
    }
}

/// The action with another stage, micro-batch or kind; itself where it has none.
fn retarget(
    action: Action,
    change: Change,
    b: usize,
    stages: usize,
    micro_batches: usize,
) -> Action {
    const KINDS: [Compute; 5] = [Compute::F, Compute::B, Compute::W, Compute::BW, Compute::R];
    let new_stage = |s| if matches!(change, Change::Stage) { b % stages } else { s };
    let new_i = |i| if matches!(change, Change::MicroBatch) { b % micro_batches } else { i };
    let flip = |m| match (change, m) {
        (Change::Kind, Message::Activation) => Message::Gradient,
        (Change::Kind, Message::Gradient) => Message::Activation,
        _ => m,
    };
    match action {
        Action::Compute { kind, stage, micro_batch } => {
            let kind = if matches!(change, Change::Kind) { KINDS[b % 5] } else { kind };
            Action::compute(kind, new_stage(stage), new_i(micro_batch))
        }
        Action::Send { message, stage, micro_batch } => Action::Send {
            message: flip(message),
            stage: new_stage(stage),
            micro_batch: new_i(micro_batch),
        },
        Action::Recv { message, stage, micro_batch } => Action::Recv {
            message: flip(message),
            stage: new_stage(stage),
            micro_batch: new_i(micro_batch),
        },
        Action::Out { stage, micro_batch }
        | Action::Gone { stage, micro_batch }
        | Action::In { stage, micro_batch } => {
            let kinds = [ActionKind::Out, ActionKind::Gone, ActionKind::In];
            let kind = if matches!(change, Change::Kind) { kinds[b % 3] } else { action.kind() };
            let place = Operand::MicroBatch(new_stage(stage), new_i(micro_batch));
            Action::new(kind, place).unwrap()
        }
        Action::AllGather { stage } => Action::AllGather { stage: new_stage(stage) },
        Action::Free { stage } => Action::Free { stage: new_stage(stage) },
        Action::ReduceScatter { stage } => Action::ReduceScatter { stage: new_stage(stage) },
        Action::ReplicaReduce { stage } => Action::ReplicaReduce { stage: new_stage(stage) },
        Action::Retire { stage } => Action::Retire { stage: new_stage(stage) },
        other => other,
    }
}

prop_compose! {
    /// A good schedule of any kind, compute-only or lowered.
    fn good()(
        kind in 0..KINDS.len(), pp in 1usize..5, virtual_stages in 1usize..4,
        micro_batches in 1usize..9, unit in 1usize..6,
        slices in 1usize..5, lowered: bool, prefetch in 0usize..3,
        recompute: bool, replicas: bool, look_ahead: bool, out in 0usize..4,
    ) -> (Schedule, bool, usize) {
        let mut shape = Shape { pp, virtual_stages, micro_batches, unit };
        // Kinds that do not take the shape take V = 1, or give way to ZeroPP.
        let name = KINDS[kind].name;
        let cut = vec![256; if slices > 1 { slices } else { 0 }];
        let schedule = generate_sliced(name, &shape, &cut)
            .or_else(|_| generate(name, &shape))
            .or_else(|_| { shape.virtual_stages = 1; generate(name, &shape) })
            .or_else(|_| generate("zeropp", &shape))
            .unwrap();
        let residency = if look_ahead { Residency::LookAhead } else { Residency::Auto };
        let options =
            LowerOptions { prefetch, recompute, replicas, residency, out, ..Default::default() };
        let schedule = if lowered { lower(&schedule, &options) } else { schedule };
        (schedule, lowered, prefetch)
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 3000,
        ..Default::default()
    })]

    #[test]
    fn good_schedules_pass_and_changes_are_judged_as_the_literal_checker_does(
        (schedule, lowered, prefetch) in good(),
        change in 0..CHANGES.len(), rank: u16, a: u16, b: u16,
    ) {
        let overlaps = |a: &Action| matches!(a, Action::Overlap { .. });
        let overlapped = schedule.ranks.iter().flatten().any(overlaps);
        // An order with gathers keeps to a limit of its own.
        let written = schedule.kind == "auto";
        // A pair of two stages needs the weights of both.
        let resident = (1 + prefetch).max(1 + usize::from(overlapped));
        let gathered_max = (lowered && !written).then_some(resident);
        let limits = VerifyLimits { gathered_max, ..Default::default() };
        prop_assert_eq!(verify(&schedule, &limits), Ok(()));
        prop_assert!(overlapped || Literal::accepts(&schedule));

        let mut changed = schedule.clone();
        let wrong = apply(
            &mut changed, CHANGES[change], rank.into(), a.into(), b.into());
        let verdict = verify(&changed, &VerifyLimits::default());
        if wrong {
            prop_assert!(verdict.is_err());
        }
        if !overlapped {
            prop_assert_eq!(verdict.is_ok(), Literal::accepts(&changed), "{:?}", verdict);
        }
    }
}
