//! Holds the scheduler against every other kind under equal budgets.
//!
//! `cargo run --release -p zeropp-schedule --example never_worse -- profiles`, `-- profiles 2` for
//! those of two stages a rank with the default effort, from the ninth on with `-- profiles 2 8`, or
//! `-- random 0 500` for a range of the random cases. Another kind counts where its order keeps the
//! memory and can do with as many gathers; it is timed by the simulator here, apart from what the
//! search itself looks at. Ends with an error where the search was slower than the best of them.

use zeropp_schedule::ir::{Action, Compute, Schedule, Task};
use zeropp_schedule::schedules::{KINDS, OrderCosts, Shape};
use zeropp_schedule::simulate::{self, simulate};
use zeropp_search::budgeted::{Budgets, FoundSchedule, Objective, Placement, Request, schedule};
use zeropp_search::generate_with_costs;

/// Whole schedules that a search may time where not the default effort is asked for.
const EVALUATIONS: u64 = 30;

struct Case {
    name: String,
    shape: Shape,
    costs: OrderCosts,
    budgets: Budgets,
    objective: Objective,
}

/// SplitMix64, so that a case is the same on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// Largest own span, or makespan, of compute actions alone; none where they cannot run.
fn span(case: &Case, made: &Schedule) -> Option<u64> {
    let costs = &case.costs;
    let stages = costs.f.len();
    let mut simulator = simulate::Costs::uniform(stages, 0, 0, 0, costs.send);
    for (s, stage) in simulator.stages.iter_mut().enumerate() {
        (stage.f_ns, stage.b_ns, stage.w_ns) = (costs.f[s], costs.b[s], costs.w[s]);
    }
    let timeline = simulate(made, &simulator).ok()?;
    let spans = timeline.ranks.iter().filter_map(|r| r.own_span());
    match case.objective {
        Objective::OwnSpan => spans.map(|(start, end)| end - start).max(),
        Objective::Makespan => spans.map(|(_, end)| end).max(),
    }
}

/// The most activation memory of a rank's order.
fn peak(rank: &[Action], costs: &OrderCosts) -> i64 {
    let (mut now, mut peak) = (0i64, 0i64);
    for Task { kind, stage: s, .. } in rank.iter().flat_map(|action| action.computes()) {
        now += match kind {
            Compute::F => costs.mem_f[s],
            Compute::B => costs.mem_b[s],
            Compute::W => costs.mem_w[s],
            Compute::BW => costs.mem_b[s] + costs.mem_w[s],
            Compute::R => 0,
        };
        peak = peak.max(now);
    }
    peak
}

/// The fewest gathers of a rank's order with `room` stages at once: the stage needed last goes.
fn gathers(rank: &[Action], room: usize) -> usize {
    let needs = |t: Task| (t.kind != Compute::W).then_some(t.stage);
    let uses: Vec<usize> = rank.iter().flat_map(|a| a.computes()).filter_map(needs).collect();
    let (mut held, mut count): (Vec<usize>, usize) = (Vec::new(), 0);
    for (at, stage) in uses.iter().enumerate() {
        if held.contains(stage) {
            continue;
        }
        if held.len() == room {
            let next = |s: &usize| uses[at..].iter().position(|u| u == s).unwrap_or(usize::MAX);
            let last = (0..held.len()).max_by_key(|h| next(&held[*h])).expect("room for one");
            held.swap_remove(last);
        }
        held.push(*stage);
        count += 1;
    }
    count
}

fn fits(case: &Case, made: &Schedule) -> bool {
    let room = case.budgets.gathered.map_or(case.shape.virtual_stages, |n| n as usize);
    let most = case.budgets.gathers.unwrap_or(usize::MAX);
    let limit = case.costs.mem_limit.unwrap_or(i64::MAX);
    made.ranks.iter().all(|rank| peak(rank, &case.costs) <= limit && gathers(rank, room) <= most)
}

/// The units worth trying: for each number of units the smallest that makes it, from the largest
/// that memory has room for; six of them for the kind that searches.
fn units(case: &Case, kind: &str) -> Vec<usize> {
    let (b, v) = (case.shape.micro_batches, case.shape.virtual_stages);
    if !kind.starts_with("zeropp") {
        return vec![b];
    }
    let limit = case.costs.mem_limit.map_or(usize::MAX, |limit| limit as usize);
    let mut units: Vec<usize> = (1..=b).map(|n| b.div_ceil(n)).collect();
    units.dedup();
    units.retain(|unit| 2 * (unit * (v - 1) + 1) <= limit);
    units.truncate(if kind == "zeropp" { b } else { 6 });
    units
}

/// The best other kind that fits, with its span.
fn best_other(case: &Case) -> Option<(u64, String)> {
    let mut best: Option<(u64, String)> = None;
    for kind in KINDS.iter().filter(|kind| kind.name != "auto") {
        for unit in units(case, kind.name) {
            let shape = Shape { unit, ..case.shape };
            let Ok(made) = generate_with_costs(kind.name, &shape, &case.costs) else { continue };
            if !fits(case, &made) {
                continue;
            }
            let Some(span) = span(case, &made) else { continue };
            if best.as_ref().is_none_or(|(least, _)| span < *least) {
                best = Some((span, format!("{} in units of {unit}", kind.name)));
            }
        }
    }
    best
}

/// One random case: P 2 to 16, V 1 to 8, B of P to 6P, uneven stages in a third.
fn random(number: u64) -> Case {
    let mut random = Random(number.wrapping_mul(0x1_0000_0001));
    let (pp, v) = (2 + random.below(15), 1 + random.below(8));
    let micro_batches = pp + random.below(5 * pp + 1);
    let shape = Shape { pp, virtual_stages: v, micro_batches, unit: micro_batches };
    let mut time = || 10 + random.below(20) as u64;
    let (f, b, w) = (100 * time(), 100 * time(), 100 * time());
    let mut costs = OrderCosts::uniform(pp * v, f, b, w, 100 * random.below(4) as u64);
    if random.below(3) == 0 {
        for times in [&mut costs.f, &mut costs.b, &mut costs.w] {
            times.iter_mut().for_each(|t| *t = *t * (80 + random.below(41) as u64) / 100);
        }
    }
    // From three quarters of 1F1B's memory to three times that.
    let limit = pp * v * (3 + random.below(10)) / 2;
    let mut budgets = Budgets::default();
    if v > 2 && random.below(2) == 0 {
        let gathered = 2 + random.below(v - 2);
        budgets.gathered = Some(gathered as u64);
        if random.below(2) == 0 {
            let units = 1 + random.below(6);
            budgets.gathers = Some(gathered + 2 * (v - gathered) * units);
        }
    }
    let objective = [Objective::OwnSpan, Objective::Makespan][random.below(2)];
    let name = format!(
        "{number}: P {pp} V {v} B {micro_batches} limit {limit} gathered {:?} gathers {:?} {:?}",
        budgets.gathered, budgets.gathers, objective
    );
    Case { name, shape, costs: costs.with_limit(limit as i64), budgets, objective }
}

/// The papers' profiles of times at 3P, 4P and 8P micro-batches, as one, two and four stages a
/// rank, with the memory of 1F1B.
fn profiles() -> Vec<Case> {
    let rows = [
        ("1.5B", 8, [18_522, 18_086, 9_337, 601]),
        ("1.5B, B 32", 8, [18_513, 18_086, 9_331, 626]),
        ("6.2B", 8, [29_718, 29_444, 19_927, 527]),
        ("14.6B", 16, [11_347, 11_248, 8_132, 377]),
    ];
    let mut cases = Vec::new();
    for (model, pp, [f, b, w, send]) in rows {
        for fold in [3, 4, 8] {
            for v in [1, 2, 4] {
                let n = v as u64;
                let micro_batches = fold * pp;
                let shape = Shape { pp, virtual_stages: v, micro_batches, unit: micro_batches };
                let costs = OrderCosts::uniform(pp * v, f / n, b / n, w / n, send);
                cases.push(Case {
                    name: format!("{model}: P {pp} V {v} B {micro_batches}"),
                    shape,
                    costs: costs.with_limit((2 * v * pp) as i64),
                    budgets: Budgets::default(),
                    objective: Objective::OwnSpan,
                });
            }
        }
    }
    cases
}

fn search(case: &Case, evaluations: Option<u64>) -> Option<FoundSchedule> {
    let request = Request {
        shape: &case.shape,
        costs: &case.costs,
        budgets: &case.budgets,
        objective: case.objective,
        placement: Placement::Either,
        seed: 1,
        evaluations,
    };
    schedule(&request).ok()
}

/// The order of F, B and W alone.
fn computing(found: FoundSchedule) -> Schedule {
    let mut made = found.schedule;
    let computes = |action: &Action| matches!(action, Action::Compute { .. });
    made.ranks.iter_mut().for_each(|rank| rank.retain(computes));
    made
}

/// Runs the cases and prints how much each was faster than the best other kind; how often slower.
fn compare(cases: impl Iterator<Item = Case>, evaluations: Option<u64>) -> usize {
    let (mut gains, mut worse, mut alone): (Vec<(f64, String)>, usize, usize) = Default::default();
    for case in cases {
        let found = search(&case, evaluations);
        let Some((best, kind)) = best_other(&case) else {
            alone += usize::from(found.is_some());
            continue;
        };
        let name = format!("{} against {kind}", case.name);
        // The simulator has the last word on what was found, too.
        let own = found.map(computing).filter(|f| fits(&case, f)).and_then(|f| span(&case, &f));
        let gain = own.map_or(f64::NEG_INFINITY, |own| 100.0 * (1.0 - own as f64 / best as f64));
        if own.is_none_or(|own| own > best) {
            worse += 1;
            println!("WORSE by {:.2} %: {name}", -gain);
        }
        println!("{gain:6.2} % {name}");
        gains.push((gain, name));
    }
    gains.sort_by(|a, b| b.0.total_cmp(&a.0));
    let (all, median) = (gains.len(), gains.get(gains.len() / 2).map_or(0.0, |g| g.0));
    println!("{all} cases, {worse} slower, median gain {median:.2} %; no other kind in {alone}");
    println!("the ten largest:");
    gains.iter().take(10).for_each(|(gain, name)| println!("{gain:6.2} % {name}"));
    worse
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let few = Some(EVALUATIONS);
    let worse = match words[..] {
        ["profiles"] => compare(profiles().into_iter(), few),
        ["profiles", stages, ref from @ ..] => {
            let v: usize = stages.parse().expect("stages a rank: 1, 2 or 4");
            let from = from.first().map_or(0, |from| from.parse().expect("a row's number"));
            let rows = profiles().into_iter().filter(|case| case.shape.virtual_stages == v);
            compare(rows.skip(from), None)
        }
        ["random", from, to] => match (from.parse(), to.parse()) {
            (Ok(from), Ok(to)) => compare((from..to).map(random), few),
            _ => panic!("random FROM TO: two whole numbers"),
        },
        _ => panic!("usage: never_worse profiles [STAGES [FROM]] | random FROM TO"),
    };
    assert!(worse == 0, "{worse} cases slower than another kind");
}
