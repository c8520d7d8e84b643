//! Zero Bubble: its table of bubble rates, what its kinds trade, and bubbles over memory.

use std::fmt::Write;

use zeropp_schedule::ir::Action;
use zeropp_schedule::lower::{LowerOptions, lower};
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::schedules::{self, Shape, generate_with_costs};
use zeropp_schedule::simulate::{Costs, simulate};

use super::Cell;
use super::picture::Series;

/// The bubbles of Zero Bubble's profiles: p, m, F, B, W, message in us, and the rates of 1F1B,
/// ZB-H1, ZB-H2, ZB-1p and ZB-2p.
type Profile = (usize, usize, [u64; 4], [f64; 5]);
const PROFILES: [Profile; 4] = [
    (8, 24, [18522, 18086, 9337, 601], [0.2431, 0.1585, 0.1083, 0.1585, 0.0433]),
    (8, 32, [18513, 18086, 9331, 626], [0.1985, 0.1242, 0.0837, 0.1242, 0.0039]),
    (8, 24, [29718, 29444, 19927, 527], [0.2347, 0.1323, 0.0698, 0.1323, 0.0029]),
    (16, 48, [11347, 11248, 8132, 377], [0.2552, 0.1397, 0.0672, 0.1397, 0.0066]),
];

/// Zero Bubble's table of bubble rates, in per cent.
pub(super) fn bubble_rates() -> Vec<Cell> {
    let mut cells = Vec::new();
    for (pp, micro_batches, [f, b, w, c], rates) in PROFILES {
        let shape = Shape { pp, virtual_stages: 1, micro_batches, unit: micro_batches };
        let weighed = schedules::Costs::uniform(pp, f, b, w, c);
        let costs = Costs::uniform(pp, f, b, w, c);
        for (kind, rate) in ["1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"].into_iter().zip(rates) {
            let schedule = generate_with_costs(kind, &shape, &weighed).expect("its own shape");
            let timeline = simulate(&schedule, &costs).expect("generated");
            let ours = Metrics::new(&schedule, &timeline, &costs).bubble_rate;
            let name = format!("{kind}, p {pp}, m {micro_batches}, F {f} us");
            cells.push(Cell { name, paper: 100.0 * rate, ours: 100.0 * ours });
        }
    }
    cells
}

/// What Zero Bubble says that its kinds cost, with F, B and W of one time (p 8, m 24): the share of
/// a step that is idle, activations and messages over those of 1F1B.
pub(super) fn trade() -> Vec<(&'static str, [Cell; 3])> {
    let (p, m) = (8.0, 24.0);
    let idle = (p - 1.0) / (m + p - 1.0);
    let rows = [
        ("1f1b", 1, [idle, 1.0, 1.0]),
        ("zb-1p", 1, [idle / 3.0, 1.0, 1.0]),
        ("zb-2p", 1, [0.0, 2.0, 1.0]),
        ("zb-v", 2, [0.0, 1.0, 2.0]),
    ];
    // Of a layer: two stages a rank have half of one stage's time and activations each.
    let of = |kind: &str, v: usize| {
        let shape = Shape { pp: 8, virtual_stages: v, micro_batches: 24, unit: 24 };
        let (time, bytes) = (2000 / v as u64, 8 / v as i64);
        let mut costs = schedules::Costs::uniform(shape.stages(), time, time, time, 0);
        costs.mem_f = vec![bytes; shape.stages()];
        costs.mem_b = vec![-bytes / 2; shape.stages()];
        costs.mem_w = vec![-bytes / 2; shape.stages()];
        let made = generate_with_costs(kind, &shape, &costs).expect("its own shape");
        let mut times = Costs::uniform(shape.stages(), time, time, time, 0);
        for memory in &mut times.memory {
            memory.activation = bytes as u64;
            memory.stash = bytes as u64 / 2;
        }
        let timeline = simulate(&made, &times).expect("generated");
        let metrics = Metrics::new(&made, &timeline, &times);
        let program = lower(&made, &LowerOptions::default());
        let is_send = |a: &&Action| matches!(a, Action::Send { .. });
        let sent = program.ranks.iter().flatten().filter(is_send).count();
        let most = metrics.peak_activation.iter().copied().max().unwrap_or(0);
        [metrics.bubble_rate, most as f64, sent as f64]
    };
    let base = of("1f1b", 1);
    let row = |(kind, v, paper): (&'static str, usize, [f64; 3])| {
        let [idle, most, sent] = of(kind, v);
        let ours = [idle, most / base[1], sent / base[2]];
        let names = ["bubble rate", "activations", "messages"];
        let cell = |i: usize| Cell { name: names[i].into(), paper: paper[i], ours: ours[i] };
        (kind, std::array::from_fn(cell))
    };
    rows.into_iter().map(row).collect()
}

/// Figure 7: the bubble rate that the search of Zero Bubble finds within each limit on activations,
/// in micro-batches; and where the paper says that the curve becomes flat.
pub(super) struct Figure7 {
    /// A curve of each profile.
    pub(super) curves: Vec<Series>,
    /// p, m, the paper's formula, the least limit from which ours is within a per cent of its
    /// lowest.
    pub(super) knees: Vec<(usize, usize, f64, f64)>,
}

/// Figure 7, from p to 3p micro-batches.
pub(super) fn figure_7() -> Figure7 {
    let mut figure = Figure7 { curves: Vec::new(), knees: Vec::new() };
    for (pp, micro_batches, [f, b, w, c], _) in PROFILES {
        let shape = Shape { pp, virtual_stages: 1, micro_batches, unit: micro_batches };
        let costs = Costs::uniform(pp, f, b, w, c);
        let rate = |limit: usize| {
            let mut weighed = schedules::Costs::uniform(pp, f, b, w, c);
            weighed.mem_limit = Some(limit as i64 * weighed.mem_f[0]);
            let schedule = generate_with_costs("zb-2p", &shape, &weighed).expect("its own shape");
            let timeline = simulate(&schedule, &costs).expect("generated");
            100.0 * Metrics::new(&schedule, &timeline, &costs).bubble_rate
        };
        let limits = (pp..=3 * pp).step_by(pp / 8);
        let points: Vec<[f64; 2]> =
            limits.map(|limit| [limit as f64 / pp as f64, rate(limit)]).collect();
        let least = points.iter().map(|p| p[1]).fold(f64::INFINITY, f64::min);
        let knee = points.iter().find(|p| p[1] <= least + 1.0).map_or(0.0, |p| p[0]);
        let (f, b, c) = (f as f64, b as f64, c as f64);
        let told = ((pp as f64 - 1.0) * (b + 2.0 * c) + pp as f64 * f) / f / pp as f64;
        figure.knees.push((pp, micro_batches, told, knee));
        figure.curves.push(Series { name: format!("p {pp}, m {micro_batches}, F {f} us"), points });
    }
    figure
}

/// Zero Bubble's tables and its figure, as text.
pub(super) fn text(out: &mut String, one: f64) {
    super::head(out, "\nZero Bubble: bubble rates of its profiles, %");
    bubble_rates().iter().for_each(|cell| super::row(out, cell, "%"));
    let _ = writeln!(
        out,
        "1F1B's bubble is printed as (p-1)/m and as (p-1)/(m+p-1); the second is exact: {:.4} and \
         {:.4}\nfor p 4, m 16, F = B = W, simulated {one:.4}.",
        3.0 / 16.0,
        3.0 / 19.0,
    );
    let title =
        "\nZero Bubble and ZB-V: F = B = W, p 8, m 24; activations and messages over 1F1B's";
    super::head(out, title);
    for (kind, cells) in trade() {
        for cell in cells {
            super::row(out, &Cell { name: format!("{kind}: {}", cell.name), ..cell }, "");
        }
    }
    let _ = writeln!(
        out,
        "(p-1)/3(m+p-1) is what is printed for ZB-1p; (p-1)/(3m+p-1) is exact: {:.4}, simulated \
         {:.4}.",
        7.0 / 79.0,
        trade()[1].1[0].ours
    );
    let title = "\nZero Bubble, figure 7: the limit, over p, from which more memory buys nothing";
    super::head(out, title);
    for (pp, m, paper, ours) in figure_7().knees {
        super::row(out, &Cell { name: format!("p {pp}, m {m}"), paper, ours }, "");
    }
    let _ = writeln!(
        out,
        "The paper's is its formula ((p-1)(B + 2c) + pF)/F over p; ours the least limit at which \
         the rate is within one per cent\nof the lowest.",
    );
}
