//! The scheduler's results under three budgets: the tables of docs/scheduler.md.
//!
//! `cargo run --release -p zeropp-schedule --example budgets -- vee|pairs|profile|pareto|large`,
//! then a row's number for that row alone, another seed than 1, and a number of evaluations.

use std::time::Instant;

use zeropp_schedule::schedules::{OrderCosts, Shape};
use zeropp_search::budgeted::{Budgets, Objective, Placement, Request, schedule};

/// Times of one stage: F, B, W and a message.
type Times = (u64, u64, u64, u64);

/// A rank's 24 layers of the Zero Bubble paper's smallest model as two and as four stages, µs / 10.
const HALVES: Times = (1850, 1800, 930, 60);
const QUARTERS: Times = (925, 900, 465, 60);
/// Its 14.6B and 28.3B models, a rank as four stages.
const PROFILE_14B: Times = (283_675, 281_200, 203_300, 37_700);
const PROFILE_28B: Times = (743_000, 736_000, 498_000, 52_700);

/// Which row to search, with which seed and effort.
struct Ask {
    row: Option<usize>,
    seed: u64,
    evaluations: Option<u64>,
    /// Rows seen.
    at: usize,
}

struct Row {
    shape: (usize, usize, usize),
    times: Times,
    memory: i64,
    gathered: usize,
    gathers: usize,
    placement: Placement,
}

impl Row {
    /// Searches and prints one row, if it is asked for.
    fn print(&self, ask: &mut Ask) {
        ask.at += 1;
        if ask.row.is_some_and(|row| row + 1 != ask.at) {
            return;
        }
        let (pp, v, b) = self.shape;
        let shape = Shape { pp, virtual_stages: v, micro_batches: b, unit: b };
        let (f, back, w, c) = self.times;
        let costs = OrderCosts::uniform(pp * v, f, back, w, c).with_limit(self.memory);
        let budgets = Budgets {
            gathered: Some(self.gathered as u64),
            gathers: Some(self.gathers),
            ..Budgets::default()
        };
        let request = Request {
            shape: &shape,
            costs: &costs,
            budgets: &budgets,
            objective: Objective::OwnSpan,
            placement: self.placement,
            seed: ask.seed,
            evaluations: ask.evaluations,
        };
        let start = Instant::now();
        let found = schedule(&request);
        let took = start.elapsed().as_secs_f64();
        print!("P {pp} V {v} B {b} peak {} gathered {} ", self.memory, self.gathered);
        match found {
            Ok(found) => {
                let gathers = found.gathers();
                println!("{:?}: {found}, {gathers} gathers, {took:.1} s", self.placement);
            }
            Err(error) => println!("{:?}: {error}", self.placement),
        }
    }
}

const BOTH: [Placement; 2] = [Placement::Vee, Placement::Looping];
const ANY: usize = usize::MAX;

/// (a): both stages gathered throughout.
fn vees(ask: &mut Ask) {
    for memory in [32, 34, 36, 40, 44, 48, 64] {
        let shape = (8, 2, 24);
        let (gathered, gathers, times) = (2, ANY, HALVES);
        Row { shape, times, memory, gathered, gathers, placement: Placement::Vee }.print(ask);
    }
    for memory in [32, 48, 64] {
        let (gathered, gathers, times) = (2, ANY, HALVES);
        let placement = Placement::Looping;
        Row { shape: (8, 2, 24), times, memory, gathered, gathers, placement }.print(ask);
    }
}

/// (b): four stages, of which two, three or all fit.
fn pairs(ask: &mut Ask) {
    let rows = [(2, 12), (4, ANY)].into_iter().flat_map(|(gathered, gathers)| {
        [64, 72, 80, 96, 128].map(|memory| (memory, gathered, gathers, 24))
    });
    let more = [(64, 3, 12, 24), (64, 2, ANY, 24), (64, 2, 14, 24), (64, 2, 22, 48)];
    for (memory, gathered, gathers, b) in rows.chain(more) {
        let shape = (8, 4, b);
        let placement = Placement::Either;
        Row { shape, times: QUARTERS, memory, gathered, gathers, placement }.print(ask);
    }
}

/// (c): the 14.6B model's times.
fn profile(ask: &mut Ask) {
    for (b, gathers) in [(12, 12), (24, 24)] {
        for memory in [32, 48, 64] {
            for (gathered, gathers) in [(4, ANY), (2, gathers)] {
                for placement in BOTH {
                    let shape = (4, 4, b);
                    Row { shape, times: PROFILE_14B, memory, gathered, gathers, placement }
                        .print(ask);
                }
            }
        }
    }
}

/// Bubble over memory for 2, 3 and all stages gathered, for 4 and 8 stages a rank.
fn pareto(ask: &mut Ask) {
    for (name, (f, back, w, c)) in [("14.6B", PROFILE_14B), ("28.3B", PROFILE_28B)] {
        println!("{name}");
        for v in [4, 8] {
            let share = v as u64 / 4;
            let times = (f / share, back / share, w / share, c);
            for gathered in [2, 3, v] {
                for fold in [4, 5, 6, 8, 12] {
                    let memory = (fold * 4 * v / 2) as i64;
                    let (shape, placement) = ((4, v, 12), Placement::Either);
                    Row { shape, times, memory, gathered, gathers: ANY, placement }.print(ask);
                }
            }
        }
    }
}

/// A step of 256 micro-batches on 32 ranks.
fn large(ask: &mut Ask) {
    let (shape, placement) = ((32, 4, 256), Placement::Looping);
    Row { shape, times: PROFILE_14B, memory: 512, gathered: 2, gathers: ANY, placement }.print(ask);
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| args.get(at).and_then(|n| n.parse().ok());
    let (row, seed) = (number(1), number(2).unwrap_or(1) as u64);
    let ask = &mut Ask { row, seed, evaluations: number(3).map(|n| n as u64), at: 0 };
    match args.first().map(String::as_str) {
        Some("vee") => vees(ask),
        Some("pairs") => pairs(ask),
        Some("profile") => profile(ask),
        Some("pareto") => pareto(ask),
        Some("large") => large(ask),
        _ => eprintln!("usage: budgets vee|pairs|profile|pareto|large [ROW [SEED [EVALUATIONS]]]"),
    }
}
