//! The search: known kinds, hill climbing over patterns, middles repeated, and annealing of the
//! best of them in rounds that fewer and fewer survive.

use super::anneal::{Annealer, Temperatures};
use super::bound::bound;
use super::drift::{self, Drifting};
use super::others::{FinishedOrder, fitting, simulated};
use super::pattern::{Pattern, list};
use super::problem::Problem;
use super::sequence::RankOrders;
use super::starting_point::{StartingPoint, by_score};
use super::stretch;
use super::write::write;
use super::{FoundSchedule, Request};

/// The search on one placement.
struct Track<'a> {
    others: Vec<FinishedOrder>,
    annealer: Annealer<'a>,
}

/// Rounds of annealing: how many seeds take part, the share of the effort of each, and the
/// temperatures. The best of the last one gets what is left.
const ROUNDS: [(usize, f64, Temperatures); 2] = [(10, 0.02, FIRST), (4, 0.08, SECOND)];
/// A plan that drifted is near to good, and heat would undo it.
const MILD: Temperatures = Temperatures { hot: 0.03, cold: 0.002 };
/// The rounds where walks drift. Annealing soon ends near where each starts, so that many starts
/// matter more than a long last round.
const DRIFTING: [(usize, f64, Temperatures); 2] = [(5, 0.06, FIRST), (1, 0.03, SECOND)];
const FIRST: Temperatures = Temperatures { hot: 0.1, cold: 0.01 };
const SECOND: Temperatures = Temperatures { hot: 0.1, cold: 0.004 };
const LAST: Temperatures = Temperatures { hot: 0.05, cold: 0.002 };
/// Climbs over patterns, and how many of them go on.
const CLIMBS: (u64, u64) = (16, 4);
/// Walks to start from and the share of the effort of each.
const STARTS: (usize, f64) = (16, 0.01);
/// How many of them go on, and the share of the effort of each.
const LONGER: (usize, f64) = (5, 0.08);
/// The most by which a plan may break limits on gathers and still be near to keeping them.
const FAR: usize = 4;

/// The best order within the budgets that an effort of `entries` entries find on any of the
/// placements, or a known kind.
pub(super) fn found(
    problems: &[Problem],
    request: &Request,
    entries: u64,
) -> Option<FoundSchedule> {
    let tracks = run(problems, request, entries);
    // A bound holds for one placement, the smaller one for all of them.
    let bound = problems.iter().map(bound).min()? as u64;
    let mut candidates = Vec::new();
    for (p, track) in problems.iter().zip(tracks) {
        let known = track.others.into_iter().find(|other| other.excess == 0);
        candidates.extend(known.map(|o| (o.value, o.schedule, o.name, work_of(p))));
        if let Some(best) = track.annealer.best
            && let Some(schedule) = write(p, &best.plan)
            && let Some(value) = simulated(p, &schedule)
        {
            candidates.push((value, schedule, best.from, work_of(p)));
        }
    }
    let (value, schedule, from, found_work) = candidates.into_iter().min_by_key(|c| c.0)?;
    Some(FoundSchedule { schedule, span: value as u64, bound, work: found_work, from })
}

fn work_of(p: &Problem) -> u64 {
    p.work.iter().max().copied().unwrap_or(0) as u64
}

/// Searches until `entries` entries have been timed.
fn run<'a>(problems: &'a [Problem], request: &Request, entries: u64) -> Vec<Track<'a>> {
    // Long steps from short ones come through the first round, however they start.
    let (mut kept, mut pool): (Vec<StartingPoint>, Vec<StartingPoint>) = Default::default();
    let mut tracks: Vec<Track> = Vec::new();
    let (mut rest, mut narrow) = (entries, Vec::new());
    for (at, p) in problems.iter().enumerate() {
        let others = fitting(p, request.shape);
        let mut track = Track { others, annealer: Annealer::new(p, request.seed + 7 * at as u64) };
        let share = entries / problems.len() as u64;
        pool.extend(kinds(&mut track, at));
        let before = track.annealer.decoder.effort;
        kept.extend(from_short_step(&mut track.annealer, at, request, share / 2));
        // Rounds share what a long step's middle leaves of the effort.
        rest = rest.saturating_sub(track.annealer.decoder.effort - before);
        let left = share.saturating_sub(track.annealer.decoder.effort);
        match drifts(p, &track.annealer, rest) {
            true => narrow.push(at),
            false => pool.extend(climb(&mut track.annealer, at, left / 10)),
        }
        tracks.push(track);
    }
    let walks = walks(&mut tracks, &narrow, rest);
    let mixed = walks.is_empty();
    for &at in narrow.iter().filter(|_| mixed) {
        pool.extend(climb(&mut tracks[at].annealer, at, rest / 20));
    }
    let rounds = if mixed { ROUNDS } else { DRIFTING };
    // Where walks drift, no other skeleton comes near.
    pool = if mixed { pool } else { walks };
    // At first limits may be broken a little.
    by_score(&mut pool);
    by_score(&mut kept);
    pool.splice(0..0, kept);
    for (round, (survivors, share, heat)) in rounds.into_iter().enumerate() {
        pool = match mixed {
            true => diverse(pool, survivors),
            false => pool.into_iter().take(survivors).collect(),
        };
        for seed in &mut pool {
            let annealer = &mut tracks[seed.track].annealer;
            let effort = (rest as f64 * share) as u64;
            if round > 0 {
                drift_on(annealer, seed, effort / 3);
            }
            let heat = if seed.walk.is_some() { MILD } else { heat };
            if let Some(reached) = annealer.anneal(&seed.plan, effort, heat, &seed.name) {
                (seed.plan, seed.score) = (reached.plan, reached.score);
                seed.excess = reached.excess;
            }
        }
        let penalty =
            |seed: &StartingPoint| tracks[seed.track].annealer.penalty * seed.excess as i64;
        pool.sort_by_key(|seed| seed.score + 3 * penalty(seed));
        // What still breaks a limit pays more from round to round.
        tracks.iter_mut().for_each(|track| track.annealer.penalty *= 2);
    }
    if let Some(seed) = pool.first_mut() {
        drift_on(&mut tracks[seed.track].annealer, seed, rest / 32);
        let spent: u64 = tracks.iter().map(|track| track.annealer.decoder.effort).sum();
        let heat = if seed.walk.is_some() { MILD } else { LAST };
        let annealer = &mut tracks[seed.track].annealer;
        // Lists take longer than what they are charged with.
        let left = entries.saturating_sub(spent + entries / 16);
        annealer.anneal(&seed.plan, left, heat, &seed.name);
    }
    tracks
}

/// The first `survivors` of a sorted pool, but at most a third and one of a family of skeletons,
/// and a quarter of those that break limits by far: annealing seldom mends that.
fn diverse(pool: Vec<StartingPoint>, survivors: usize) -> Vec<StartingPoint> {
    let mut kept: Vec<StartingPoint> = Vec::new();
    for seed in pool {
        let alike = kept.iter().filter(|other| other.family() == seed.family()).count();
        let far = kept.iter().filter(|other| other.excess > FAR).count();
        let crowded = seed.excess > FAR && 4 * far >= survivors;
        if kept.len() < survivors && alike <= survivors / 3 && !crowded {
            kept.push(seed);
        }
    }
    kept
}

/// The other kinds as seeds, those too that gather too often.
fn kinds(track: &mut Track, at: usize) -> Vec<StartingPoint> {
    let annealer = &mut track.annealer;
    let longest = annealer.p.longest_w_of_all();
    let close = track.others.iter().filter(|other| other.excess > 0).take(2);
    let mut pool = Vec::new();
    for other in track.others.iter().filter(|other| other.excess == 0).take(4).chain(close) {
        if let Some(score) = annealer.offer(&other.plan, &other.name) {
            let mut plan = other.plan.clone();
            // From here on W may fill.
            plan.sequences.iter_mut().for_each(|sequence| sequence.threshold = longest);
            let excess = other.excess;
            pool.push(StartingPoint {
                track: at,
                plan,
                score,
                excess,
                name: other.name.clone(),
                walk: None,
                pattern: None,
            });
        }
    }
    pool
}

/// Hill climbing over patterns: the best of many short climbs go on with half of the effort.
fn climb(annealer: &mut Annealer, track: usize, entries: u64) -> Vec<StartingPoint> {
    let (starts, longer) = CLIMBS;
    let (from, half) = (annealer.decoder.effort, entries / 2);
    let mut pool = Vec::new();
    for n in 1..=starts {
        pool.extend(climbed(annealer, track, None, from + half * n / starts));
    }
    by_score(&mut pool);
    for n in 1..=longer.min(pool.len() as u64) {
        let best = pool.remove(0);
        pool.extend(climbed(annealer, track, Some(best), from + half + half * n / longer));
    }
    pool
}

/// One climb up to this effort, from a random pattern where there is none to go on from.
fn climbed(
    annealer: &mut Annealer,
    track: usize,
    mut here: Option<StartingPoint>,
    until: u64,
) -> Option<StartingPoint> {
    let p = annealer.p;
    let window = p.window();
    let mut fails = 0;
    while annealer.decoder.effort < until && fails < 400 {
        let (pattern, allowed) = match here.as_ref().and_then(|here| here.pattern.as_ref()) {
            None => (Pattern::random(p, window, &mut annealer.random), i64::MAX),
            Some((pattern, waits)) => {
                fails += 1;
                // Its W may come to lie better than in the list.
                (pattern.mutated(p, window, &mut annealer.random), waits + waits / 10)
            }
        };
        let order = pattern.order(p, window);
        let found = list(p, &order, allowed, &mut annealer.decoder.effort);
        let Some((sequences, waits)) = found else { continue };
        let Some(mut plan) = RankOrders::new(p, sequences, order.threshold) else { continue };
        let Some(score) = annealer.offer(&plan, "pattern") else { continue };
        if here.as_ref().is_none_or(|here| score < here.score) {
            fails = 0;
            let (name, stride) = match &pattern.walk {
                Some(walk) => {
                    let units = walk.units.len().max(1);
                    let how = if walk.slides { "sliding " } else { "" };
                    (format!("{how}walk {:?}", walk.units), p.b.div_ceil(units))
                }
                None => (format!("list of {}", pattern.size), pattern.size),
            };
            plan.stride = stride;
            let pattern = Some((pattern, waits));
            here = Some(StartingPoint { track, plan, score, excess: 0, name, walk: None, pattern });
        }
    }
    here
}

/// Seeds for a long step from a search over a short one, of `entries` entries in all.
fn from_short_step(
    annealer: &mut Annealer,
    track: usize,
    request: &Request,
    entries: u64,
) -> Vec<StartingPoint> {
    let p = annealer.p;
    let Some((shape, budgets)) = stretch::shortened(p, request) else { return Vec::new() };
    let short = Request { shape: &shape, budgets: &budgets, ..request.clone() };
    let small = [Problem::new(&shape, request.costs, &budgets, p.placement.clone(), p.objective)];
    let mut tracks = run(&small, &short, entries / 2);
    let Some(Track { annealer: inner, .. }) = tracks.first_mut() else { return Vec::new() };
    stretch::seeds(annealer, inner, track, entries)
}

/// Whether walks drift, where memory is tight; long steps come from short ones.
fn drifts(p: &Problem, annealer: &Annealer, entries: u64) -> bool {
    let size = p.entries();
    let few = size >= stretch::SHORT || entries < 20_000 * size as u64;
    !few && drift::narrow(p, &annealer.random)
}

/// Walks whose keys drift: some are annealed a little, the best ones longer.
fn walks(tracks: &mut [Track], narrow: &[usize], entries: u64) -> Vec<StartingPoint> {
    let effort = |share: f64| (entries as f64 * share) as u64;
    let mut all: Vec<Drifting> = Vec::new();
    // They take long, so that all start where the least is possible.
    let Some(&at) = narrow.iter().min_by_key(|at| bound(tracks[**at].annealer.p)) else {
        return Vec::new();
    };
    let annealer = &mut tracks[at].annealer;
    for _ in 0..STARTS.0 {
        let Some(mut drifting) = Drifting::walk(annealer) else { break };
        drifting.anneal(annealer, effort(STARTS.1), Temperatures { hot: 0.5, cold: 0.1 }, 1.0);
        all.push(drifting);
    }
    all.sort_by_key(|drifting| drifting.waits);
    all.truncate(LONGER.0);
    let seed = |mut drifting: Drifting| {
        drifting.anneal(annealer, effort(LONGER.1), Temperatures { hot: 0.3, cold: 0.02 }, 0.8);
        let plan = drifting.plan(annealer)?;
        let score = annealer.offer(&plan, "walk")?;
        let walk = drifting.drift.walk;
        let name = format!("drifting walk {:?}", walk.units);
        Some(StartingPoint {
            track: at,
            plan,
            score,
            excess: 0,
            name,
            walk: Some(walk),
            pattern: None,
        })
    };
    all.into_iter().filter_map(seed).collect()
}

/// Lets the times of an annealed seed drift, and goes on from what comes out of it.
fn drift_on(annealer: &mut Annealer, seed: &mut StartingPoint, entries: u64) {
    let Some(walk) = &seed.walk else { return };
    let Some(mut drifting) = Drifting::timed(annealer, walk, &seed.plan) else { return };
    drifting.anneal(annealer, entries, Temperatures { hot: 0.1, cold: 0.005 }, 0.3);
    if let Some(plan) = drifting.plan(annealer) {
        seed.plan = plan;
    }
}
