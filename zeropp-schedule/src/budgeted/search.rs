//! The search.

use super::anneal::{Annealer, Best};
use super::pattern::{Pattern, list};
use super::problem::Problem;
use super::word::Plan;

/// A seed for annealing.
struct Seed {
    plan: Plan,
    score: i64,
    name: String,
}

/// Searches until `letters` letters have been timed.
pub(super) fn run(p: &Problem, seed: u64, letters: u64) -> Option<Best> {
    let mut annealer = Annealer::new(p, seed);
    let mut pool = climb(&mut annealer, letters / 4, 12);
    pool.sort_by_key(|seed| seed.score);
    pool.truncate(4);
    let left = letters.saturating_sub(annealer.decoder.effort);
    let count = pool.len().max(1) as u64;
    for seed in &pool {
        annealer.anneal(&seed.plan, left * 2 / 5 / count, 0.08, 0.01, &seed.name);
    }
    for hot in [0.15, 0.04] {
        let Some(best) = annealer.best.clone() else { break };
        annealer.anneal(&best.plan, left * 3 / 10, hot, 0.003, &best.from);
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
            annealer.decoder.effort += (p.letters() * (2 + p.classes / 2)) as u64;
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
