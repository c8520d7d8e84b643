//! From words to a schedule: every W, gather, free, reduction and recomputation as an action.

use super::decode::Decoder;
use super::problem::Problem;
use super::residency::{Residency, ends_unit};
use super::word::{Plan, Word};
use zeropp_schedule::ir::{Action, Compute, Schedule, Task};

/// The name of the scheduler's kind.
pub(super) const KIND: &str = "auto";

/// Writes down `plan`, which the decoder runs once more. None where it cannot run.
pub(super) fn write(p: &Problem, plan: &Plan) -> Option<Schedule> {
    let mut residency = Residency::default();
    let mut decoder = Decoder::new(p);
    decoder.load(p, plan, &mut residency)?;
    let mut schedule = p.empty_schedule(KIND);
    for (r, word) in plan.words.iter().enumerate() {
        let order = actions(p, r, word, &decoder.w_before(p, r, word));
        schedule.ranks[r] = with_weights(p, r, word, &order, &mut residency);
    }
    Some(schedule)
}

/// The compute actions of a word with `w_before[n]` W before letter n and the rest at the end, each
/// with the letter that it is, if it is one.
fn actions(p: &Problem, r: usize, word: &Word, w_before: &[usize]) -> Vec<(Option<usize>, Action)> {
    let stage = |class: usize| p.stage[r * p.v + class % p.v];
    let is_b = |class: usize| class >= p.v && class < p.classes;
    let letters = word.letters.iter().zip(&word.batch).map(|(l, i)| (usize::from(*l), *i));
    let mut waiting = letters.clone().filter(|(class, _)| is_b(*class));
    let mut order = Vec::with_capacity(3 * p.v * p.b);
    let next_w = |waiting: &mut dyn Iterator<Item = (usize, u16)>| {
        let (class, i) = waiting.next().expect("a B for each W");
        (None, Action::compute(Compute::W, stage(class), usize::from(i)))
    };
    for (at, (class, i)) in letters.clone().enumerate() {
        (0..w_before[at]).for_each(|_| order.push(next_w(&mut waiting)));
        if class < p.classes {
            let kind = if is_b(class) { Compute::B } else { Compute::F };
            order.push((Some(at), Action::compute(kind, stage(class), usize::from(i))));
        }
    }
    while order.len() < 3 * p.v * p.b {
        order.push(next_w(&mut waiting));
    }
    order
}

/// Adds gathers and frees as [`Residency`] finds them, reductions after the last W of each stage
/// and unit, and recomputation.
pub(super) fn with_weights(
    p: &Problem,
    r: usize,
    word: &Word,
    order: &[(Option<usize>, Action)],
    residency: &mut Residency,
) -> Vec<Action> {
    residency.count(p, r, word, true);
    let stage = |v: u32| p.stage[r * p.v + v as usize];
    let mut frees = residency.frees.clone();
    frees.sort_by_key(|free| free.after);
    let (mut frees, mut gathers) = (frees.iter().peekable(), residency.gathers.iter().peekable());
    let mut all = Vec::with_capacity(order.len() * 5 / 4);
    let mut letters = 0;
    for (letter, action) in order {
        while let Some(gather) = gathers.next_if(|g| g.gate as usize <= letters) {
            // What it replaces goes first.
            while let Some(free) = frees.next_if(|free| free.after < gather.gate) {
                all.push(Action::Free { stage: stage(free.v) });
            }
            all.push(Action::AllGather { stage: stage(gather.v) });
        }
        let Task { kind, stage: s, micro_batch: i } =
            action.computes().next().expect("a compute action");
        if kind == Compute::B && p.recomputes[s] {
            all.push(Action::compute(Compute::R, s, i));
        }
        all.push(*action);
        if let Some(letter) = letter {
            letters = letter + 1;
            // A W that the word asks for is a letter, too, but never the last use of a stage.
            while word.letters.get(letters).is_some_and(|l| usize::from(*l) == p.classes) {
                letters += 1;
            }
        } else if kind == Compute::W && ends_unit(p, i) {
            all.push(Action::ReduceScatter { stage: s });
        }
    }
    all.extend(frees.map(|free| Action::Free { stage: stage(free.v) }));
    all
}
