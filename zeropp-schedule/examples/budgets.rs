//! What the scheduler finds under three budgets: the tables of docs/scheduler.md.
//!
//! `cargo run --release -p zeropp-schedule --example budgets -- vee|pairs|profile|pareto|large`

use std::time::Instant;

use zeropp_schedule::budgeted::{Budgets, Objective, Placement, Request, schedule};
use zeropp_schedule::schedules::{Costs, Shape};

/// Times of one stage: F, B, W and a message.
type Times = (u64, u64, u64, u64);

/// A rank of the Zero Bubble paper's smallest model as two stages, and as four; in 10 µs.
const HALVES: Times = (1850, 1800, 930, 60);
const QUARTERS: Times = (925, 900, 465, 60);
/// Its 14.6B and 28.3B models, a rank as four stages.
const PROFILE_14B: Times = (283_675, 281_200, 203_300, 37_700);
const PROFILE_28B: Times = (743_000, 736_000, 498_000, 52_700);

struct Row {
    shape: (usize, usize, usize),
    times: Times,
    memory: i64,
    gathered: usize,
    gathers: usize,
    placement: Placement,
}

impl Row {
    /// Searches and prints one row.
    fn print(&self) {
        let (pp, v, b) = self.shape;
        let shape = Shape { pp, virtual_stages: v, micro_batches: b, unit: b };
        let (f, back, w, c) = self.times;
        let costs = Costs::uniform(pp * v, f, back, w, c).with_limit(self.memory);
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
            seed: 1,
            evaluations: None,
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
fn vees() {
    for memory in [32, 34, 36, 40, 44, 48, 64] {
        let shape = (8, 2, 24);
        let (gathered, gathers, times) = (2, ANY, HALVES);
        Row { shape, times, memory, gathered, gathers, placement: Placement::Vee }.print();
    }
    for memory in [32, 48, 64] {
        let (gathered, gathers, times) = (2, ANY, HALVES);
        let placement = Placement::Looping;
        Row { shape: (8, 2, 24), times, memory, gathered, gathers, placement }.print();
    }
}

/// (b): four stages, of which two, three or all fit.
fn pairs() {
    let rows = [(2, 12), (4, ANY)].into_iter().flat_map(|(gathered, gathers)| {
        [64, 72, 80, 96, 128].map(|memory| (memory, gathered, gathers, 24))
    });
    let more = [(64, 3, 12, 24), (64, 2, ANY, 24), (64, 2, 14, 24), (64, 2, 22, 48)];
    for (memory, gathered, gathers, b) in rows.chain(more) {
        let shape = (8, 4, b);
        let placement = Placement::Either;
        Row { shape, times: QUARTERS, memory, gathered, gathers, placement }.print();
    }
}

/// (c): the 14.6B model's times.
fn profile() {
    for (b, gathers) in [(12, 12), (24, 24)] {
        for memory in [32, 48, 64] {
            for (gathered, gathers) in [(4, ANY), (2, gathers)] {
                for placement in BOTH {
                    let shape = (4, 4, b);
                    Row { shape, times: PROFILE_14B, memory, gathered, gathers, placement }.print();
                }
            }
        }
    }
}

/// Bubble over memory for 2, 3 and all stages gathered, for 4 and 8 stages a rank.
fn pareto() {
    for (name, (f, back, w, c)) in [("14.6B", PROFILE_14B), ("28.3B", PROFILE_28B)] {
        println!("{name}");
        for v in [4, 8] {
            let share = v as u64 / 4;
            let times = (f / share, back / share, w / share, c);
            for gathered in [2, 3, v] {
                for fold in [4, 5, 6, 8, 12] {
                    let memory = (fold * 4 * v / 2) as i64;
                    let (shape, placement) = ((4, v, 12), Placement::Either);
                    Row { shape, times, memory, gathered, gathers: ANY, placement }.print();
                }
            }
        }
    }
}

/// A step of 256 micro-batches on 32 ranks.
fn large() {
    let (shape, placement) = ((32, 4, 256), Placement::Looping);
    Row { shape, times: PROFILE_14B, memory: 512, gathered: 2, gathers: ANY, placement }.print();
}

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("vee") => vees(),
        Some("pairs") => pairs(),
        Some("profile") => profile(),
        Some("pareto") => pareto(),
        Some("large") => large(),
        _ => eprintln!("usage: budgets vee|pairs|profile|pareto|large"),
    }
}
