//! Zero Bubble: its table of bubble rates, what its kinds trade, and bubbles over memory.

use std::fmt::Write;

use zeropp_schedule::ir::Action;
use zeropp_schedule::lower::{LowerOptions, lower};
use zeropp_schedule::metrics::Metrics;
use zeropp_schedule::schedules::{self, Shape};
use zeropp_schedule::simulate::{Costs, simulate};
use zeropp_search::generate_with_costs;

use super::Series;
use super::TableCell;
use crate::baselines::{self, ActivationSaving, KernelSet, TensorLayout, UPDATE_BYTES};
use zeropp_plan::machines;
use zeropp_plan::model::ModelSizes;

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
pub(super) fn bubble_rates() -> Vec<TableCell> {
    let mut cells = Vec::new();
    for (pp, micro_batches, [f, b, w, c], rates) in PROFILES {
        let shape = Shape { pp, virtual_stages: 1, micro_batches, unit: micro_batches };
        let weighed = schedules::OrderCosts::uniform(pp, f, b, w, c);
        let costs = Costs::uniform(pp, f, b, w, c);
        for (kind, rate) in ["1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"].into_iter().zip(rates) {
            let schedule = generate_with_costs(kind, &shape, &weighed).expect("its own shape");
            let timeline = simulate(&schedule, &costs).expect("generated");
            let ours = Metrics::new(&schedule, &timeline, &costs).bubble_rate;
            let name = format!("{kind}, p {pp}, m {micro_batches}, F {f} us");
            cells.push(TableCell { name, paper: 100.0 * rate, ours: 100.0 * ours });
        }
    }
    cells
}

/// What Zero Bubble says that its kinds cost, with F, B and W of one time (p 8, m 24): the share of
/// a step that is idle, activations and messages over those of 1F1B.
pub(super) fn trade() -> Vec<(&'static str, [TableCell; 3])> {
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
        let mut costs = schedules::OrderCosts::uniform(shape.stages(), time, time, time, 0);
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
        let cell = |i: usize| TableCell { name: names[i].into(), paper: paper[i], ours: ours[i] };
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
            let mut weighed = schedules::OrderCosts::uniform(pp, f, b, w, c);
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
        let reported = ((pp as f64 - 1.0) * (b + 2.0 * c) + pp as f64 * f) / f / pp as f64;
        figure.knees.push((pp, micro_batches, reported, knee));
        figure.curves.push(Series { name: format!("p {pp}, m {micro_batches}, F {f} us"), points });
    }
    figure
}

/// The models of Zero Bubble's table 4: name, layers, hidden size, heads, p, samples of a
/// micro-batch and numbers of micro-batches; then samples of a GPU and second of each number, and
/// GB, for each of [`METHODS`].
type Runs = (&'static str, [usize; 5], [usize; 3], [[f64; 3]; 4], [f64; 4]);
const RUNS: [Runs; 4] = [
    (
        "1.5b",
        [22, 2304, 24, 8, 6],
        [24, 32, 64],
        [[14.5, 14.8, 14.9], [12.9, 13.4, 14.2], [11.8, 12.5, 13.6], [13.1, 13.4, 13.9]],
        [59.0, 32.0, 30.0, 40.0],
    ),
    (
        "6.2b",
        [30, 4096, 32, 8, 3],
        [24, 32, 64],
        [[4.32, 4.35, 4.39], [3.88, 4.00, 4.20], [3.50, 3.70, 4.03], [4.01, 4.08, 4.19]],
        [70.0, 42.0, 39.0, 48.0],
    ),
    (
        "14.6b",
        [46, 5120, 40, 16, 1],
        [48, 64, 128],
        [[1.81, 1.83, 1.85], [1.61, 1.67, 1.76], [1.40, 1.49, 1.64], [1.54, 1.59, 1.66]],
        [51.0, 33.0, 32.0, 39.0],
    ),
    (
        "28.3b",
        [62, 6144, 48, 32, 1],
        [96, 128, 256],
        [[0.99, 1.00, 1.00], [0.87, 0.90, 0.96], [0.76, 0.80, 0.88], [0.82, 0.85, 0.90]],
        [74.0, 44.0, 43.0, 58.0],
    ),
];
/// Kinds, and what the paper calls them.
const METHODS: [(&str, &str); 4] =
    [("zb-2p", "ZB-2p"), ("zb-1p", "ZB-1p"), ("1f1b", "1F1B"), ("interleaved", "1F1B-I")];
/// Words of its runs: not stated; those of the SentencePiece model in its published script's data.
const WORDS: usize = 32_000;
/// Tokens of a sample.
const TOKENS: usize = 1024;
/// Bytes that Megatron keeps of a parameter: fp16 and its fp32 gradient, an fp32 copy, two moments.
const PARAMETER_BYTES: u64 = 18;

/// One of its models under one kind: seconds and bytes of each stage.
struct Pipeline {
    kind: &'static str,
    shape: Shape,
    costs: Costs,
    /// Parameters of each stage.
    parameters: Vec<u64>,
    samples: usize,
}

impl Pipeline {
    /// Its first and its last stage have a layer less than the others (section 5.1); 1F1B-I has
    /// stages of one layer.
    fn new(run: &Runs, kind: &'static str, micro_batches: usize) -> Pipeline {
        let [layers, hidden, heads, pp, samples] = run.1;
        let machine = machines::named("a100").expect("in the crate");
        let model = ModelSizes::gpt(run.0, [layers, hidden, heads, WORDS, TOKENS]);
        let layout = TensorLayout {
            tp: 1,
            pp,
            dp: 1,
            interleave: 1,
            micro_batch: samples,
            saving: ActivationSaving::None,
            kernels: KernelSet::Apart,
            zero_bubble: false,
        };
        let block = baselines::block(&machine, &model, &layout);
        let tokens = (samples * TOKENS) as f64;
        let head = baselines::head(&machine, &model, tokens);
        let each = (layers + 2) / pp;
        let interleaved = kind == "interleaved";
        let (virtual_stages, of_stage) = if interleaved { (each, 1) } else { (1, each) };
        let shape = Shape { pp, virtual_stages, micro_batches, unit: micro_batches };
        let message = 2.0 * tokens * hidden as f64;
        let inside = pp <= machine.per_node;
        let rate = if inside { machine.zero3_bytes_per_s } else { machine.bytes_per_s };
        let message = machine.message_s + message / rate;
        let ns = |s: f64| ((1e9 * s) as u64).max(1);
        // Megatron's own kinds wait for each message before they go on; the others do not.
        let waits = kind == "interleaved" || kind == "1f1b";
        let (sent, wait) = if waits { (0, message) } else { (ns(message), 0.0) };
        let n = shape.stages();
        let mut costs = Costs::uniform(n, 1, 1, 1, sent);
        let mut parameters = Vec::new();
        let x = tokens * hidden as f64;
        for stage in 0..n {
            let (first, last) = (stage == 0, stage + 1 == n);
            let count = (of_stage - usize::from(first || last)) as f64;
            let head = if last { head / 3.0 } else { 0.0 };
            let times = &mut costs.stages[stage];
            times.f_ns = ns(count * block.forward + head + wait);
            times.b_ns = ns(count * block.backward + head + wait);
            times.w_ns = ns(count * block.weights + head);
            let memory = &mut costs.memory[stage];
            memory.activation = (count * block.kept) as u64;
            // Inputs of the products, and gradients of what they gave.
            memory.stash = (count * 32.0 * x) as u64;
            let words = if first || last { WORDS * hidden } else { 0 };
            parameters.push((count * 12.0 * (hidden * hidden) as f64) as u64 + words as u64);
        }
        Pipeline { kind, shape, costs, parameters, samples }
    }

    /// Samples of a GPU in a second, and GB of the rank that holds most.
    fn simulated(&self) -> [f64; 2] {
        let micro = |of: fn(&zeropp_schedule::simulate::StageCosts) -> u64| {
            self.costs.stages.iter().map(of).collect::<Vec<_>>()
        };
        let n = self.shape.stages();
        // Its searches have limits in micro-batches, whatever stages they are of.
        let mut weighed = schedules::OrderCosts::uniform(n, 1, 1, 1, self.costs.link.latency_ns);
        (weighed.f, weighed.b, weighed.w) =
            (micro(|s| s.f_ns), micro(|s| s.b_ns), micro(|s| s.w_ns));
        let made = generate_with_costs(self.kind, &self.shape, &weighed).expect("its own shape");
        let timeline = simulate(&made, &self.costs).expect("generated");
        let metrics = Metrics::new(&made, &timeline, &self.costs);
        let machine = machines::named("a100").expect("in the crate");
        let pp = self.shape.pp;
        let of_rank = |r: usize| self.parameters.iter().skip(r).step_by(pp).sum::<u64>();
        let most = (0..pp).map(of_rank).max().unwrap_or(0) as f64;
        // What validates updates late begins a step as soon as its own rank can.
        let step_ns = match self.kind.starts_with("zb") {
            true => metrics.own_span_max_ns,
            false => metrics.makespan_ns,
        };
        let step = step_ns as f64 / 1e9 + UPDATE_BYTES * most / machine.memory_bytes_per_s;
        let held = (0..pp).map(|r| PARAMETER_BYTES * of_rank(r) + metrics.peak_activation[r]);
        let samples = (self.shape.micro_batches * self.samples) as f64;
        [samples / pp as f64 / step, held.max().unwrap_or(0) as f64 / 1e9]
    }
}

/// Zero Bubble's table 4: samples of a GPU in a second, and GB of the rank that holds most. Its
/// memory is the same for all numbers of micro-batches, so that it is shown for the first.
pub(super) fn throughputs() -> (Vec<TableCell>, Vec<TableCell>) {
    let (mut rates, mut memory) = (Vec::new(), Vec::new());
    for run in &RUNS {
        for (k, (kind, called)) in METHODS.into_iter().enumerate() {
            for (i, m) in run.2.into_iter().enumerate() {
                let [rate, gb] = Pipeline::new(run, kind, m).simulated();
                let name = format!("{} {called}, m {m}", run.0);
                rates.push(TableCell { name, paper: run.3[k][i], ours: rate });
                if i == 0 {
                    let name = format!("{} {called}", run.0);
                    memory.push(TableCell { name, paper: run.4[k], ours: gb });
                }
            }
        }
    }
    (rates, memory)
}

/// By how much ZB-2p's throughputs would be higher by the paper's own profile and its own bubble
/// rates, a step being nothing else: the least and the most of them.
fn beyond_profiles() -> [f64; 2] {
    let of = [(0, 0), (0, 1), (1, 0), (2, 0)].into_iter().zip(PROFILES);
    let beyond = of.map(|((run, i), (_, _, [f, b, w, _], rates))| {
        let (_, [.., pp, samples], _, measured, _) = RUNS[run];
        let second = 1e6 * (1.0 - rates[4]) / (f + b + w) as f64;
        samples as f64 * second / pp as f64 / measured[0][i] - 1.0
    });
    let beyond: Vec<f64> = beyond.collect();
    [beyond.iter().copied().fold(f64::MAX, f64::min), beyond.iter().copied().fold(0.0, f64::max)]
}

/// Table 4 as text.
fn table_4(out: &mut String) {
    let (rates, memory) = throughputs();
    super::head(out, "\nZero Bubble, table 4: samples of a GPU in a second, A100");
    rates.iter().for_each(|cell| super::row(out, cell, ""));
    let _ = writeln!(out, "{}", super::summary(&rates));
    super::head(out, "\nZero Bubble, table 4: memory, GB");
    memory.iter().for_each(|cell| super::row(out, cell, "GB"));
    let _ = writeln!(out, "{}", super::summary(&memory));
    let [least, most] = beyond_profiles().map(|share| 100.0 * share);
    let _ = writeln!(
        out,
        "None of these cells was fitted on. Assumed: {WORDS} words, as in the data of its \
         published script; {PARAMETER_BYTES} bytes a parameter; scores\nof attention kept; \
         Megatron's own kinds wait for every message, as that script has it; the optimizer moves \
         {UPDATE_BYTES} bytes\na parameter. The paper's own profile (table 6) and bubble rates \
         (table 5) would have ZB-2p {least:.0} to {most:.0} % above its throughputs:\nits steps \
         have more in them than the F, B and W that were profiled."
    );
}

/// Zero Bubble's tables and its figure, as text.
pub(super) fn text(out: &mut String, one: f64) {
    table_4(out);
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
            super::row(out, &TableCell { name: format!("{kind}: {}", cell.name), ..cell }, "");
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
        super::row(out, &TableCell { name: format!("p {pp}, m {m}"), paper, ours }, "");
    }
    let _ = writeln!(
        out,
        "The paper's is its formula ((p-1)(B + 2c) + pF)/F over p; ours the least limit at which \
         the rate is within one per cent\nof the lowest.",
    );
}
