//! The search: known kinds, then hill climbing over patterns, then annealing of the best of them.

use super::Found;
use super::anneal::{Annealer, Best};
use super::bound::bound;
use super::others::{Other, fitting, simulated};
use super::pattern::{Pattern, list};
use super::problem::Problem;
use super::word::Plan;
use super::write::write;
use crate::schedules::Shape;

/// A seed for annealing.
struct Seed {
    plan: Plan,
    score: i64,
    name: String,
}

/// The best order within the budgets that `letters` letters of effort find, or a known kind.
pub(super) fn found(p: &Problem, shape: &Shape, seed: u64, letters: u64) -> Option<Found> {
    let others = fitting(p, shape);
    let best = run(p, &others, seed, letters).and_then(|best| {
        let schedule = write(p, &best.plan)?;
        let value = simulated(p, &schedule)?;
        Some((schedule, value, best.from))
    });
    let other = others.into_iter().next().map(|o| (o.schedule, o.value, o.name));
    let better = match (best, other) {
        (Some(best), Some(other)) => Some(if best.1 < other.1 { best } else { other }),
        (best, other) => best.or(other),
    };
    let (schedule, value, from) = better?;
    let work = p.work.iter().max().copied().unwrap_or(0) as u64;
    Some(Found { schedule, span: value as u64, bound: bound(p) as u64, work, from })
}

/// Searches until `letters` letters have been timed.
pub(super) fn run(p: &Problem, others: &[Other], seed: u64, letters: u64) -> Option<Best> {
    let mut annealer = Annealer::new(p, seed);
    let mut pool = Vec::new();
    for other in others.iter().take(2) {
        if let Some(score) = annealer.offer(&other.plan, &other.name) {
            let mut plan = other.plan.clone();
            // From here on W may fill.
            let longest = p.w.iter().max().copied().unwrap_or(1).max(1);
            plan.words.iter_mut().for_each(|word| word.threshold = longest);
            pool.push(Seed { plan, score, name: other.name.clone() });
        }
    }
    pool.extend(climb(&mut annealer, letters / 4, 12));
    pool.sort_by_key(|seed| seed.score);
    pool.truncate(4);
    let left = letters.saturating_sub(annealer.decoder.effort);
    let count = pool.len().max(1) as u64;
    for seed in &pool {
        annealer.anneal(&seed.plan, left / 3 / count, 0.1, 0.01, &seed.name);
    }
    if let Some(best) = annealer.best.clone() {
        let left = letters.saturating_sub(annealer.decoder.effort);
        annealer.anneal(&best.plan, left, 0.08, 0.002, &best.from);
    }
    annealer.best
}

/// Hill climbing over patterns, `restarts` times.
fn climb(annealer: &mut Annealer, letters: u64, restarts: u64) -> Vec<Seed> {
    let p = annealer.p;
    let window = p.window();
    let start = annealer.decoder.effort;
    let mut pool = Vec::new();
    for n in 1..=restarts {
        let mut here: Option<(Pattern, Seed)> = None;
        let mut fails = 0;
        while annealer.decoder.effort - start < letters * n / restarts && fails < 400 {
            let pattern = match &here {
                None => Pattern::random(p, window, &mut annealer.random),
                Some((pattern, _)) => pattern.mutated(p, window, &mut annealer.random),
            };
            fails += usize::from(here.is_some());
            // A list looks at all classes for each letter.
            annealer.decoder.effort += (p.letters() * (1 + p.classes / 4)) as u64;
            let Some((words, threshold)) = list(p, &pattern, window) else { continue };
            let Some(plan) = Plan::new(p, words, threshold) else { continue };
            let Some(score) = annealer.offer(&plan, "pattern") else { continue };
            if here.as_ref().is_none_or(|(_, seed)| score < seed.score) {
                fails = 0;
                let name = match &pattern.walk {
                    Some(walk) => format!("walk {:?}", walk.units),
                    None => format!("list of {}", pattern.size),
                };
                here = Some((pattern, Seed { plan, score, name }));
            }
        }
        pool.extend(here.map(|(_, seed)| seed));
    }
    pool
}
