//! Emulated runs: what is executed, how it compares with the simulator, and how they end.

use zeropp::config::OptimizerSync;
use zeropp::pipeline::costs::Table;
use zeropp::pipeline::ir::Action;
use zeropp::pipeline::memory::StageBytes;
use zeropp::pipeline::simulate::{Costs, LinkCosts, StageCosts};
use zeropp::pipeline::timeline::{Lane, Timeline};
use zeropp::{Config, EmulationReport, emulate, read_costs};

fn config(schedule: &str) -> Config {
    Config {
        pp: 2,
        zero3: 2,
        dp: 2,
        schedule: schedule.into(),
        unit: Some(4),
        micro_batches: Some(8),
        steps: 2,
        warmup: Some(0),
        timeout_s: 30.0,
        ..Config::default()
    }
}

/// Times of tenths of a millisecond, different in every stage, with links that carry one message at
/// a time.
fn costs(stages: usize) -> Costs {
    let us = |n: usize| n as u64 * 1000;
    let stage = |s: usize| StageCosts {
        f_ns: us(200 + 10 * s),
        b_ns: us(210),
        w_ns: us(150),
        r_ns: us(200),
        all_gather_ns: us(300),
        reduce_scatter_ns: us(350),
        replica_reduce_ns: us(250),
    };
    Costs {
        stages: (0..stages).map(stage).collect(),
        memory: vec![StageBytes { message: 50_000, ..StageBytes::default() }; stages],
        link: LinkCosts {
            latency_ns: us(40),
            bytes_per_s: Some(1_000_000_000),
            parallel_max: Some(1),
        },
        file_bytes_per_s: None,
        layers: Vec::new(),
        copies_apart: false,
        states: Vec::new(),
        overlap_ns: None,
        step_ns: us(500),
    }
}

fn run(config: &Config, costs: Costs) -> EmulationReport {
    let mut seen = Vec::new();
    let report = emulate(config, &Table::from(&costs), |step| seen.push(step.clone())).unwrap();
    assert_eq!(seen, report.steps);
    assert_eq!(seen.len() as u64, config.steps);
    report
}

fn actions(timeline: &Timeline, rank: usize) -> Vec<Action> {
    timeline.ranks[rank].spans.iter().map(|s| s.action).collect()
}

/// The real executor went through the whole program, and no action ended before the simulator's
/// rules allow.
#[test]
fn every_kind_is_executed_and_never_faster_than_simulated() {
    for (kind, v) in
        [("zeropp", 2), ("1f1b", 1), ("zb-v", 2), ("dualpipe-v", 2), ("zeropp-auto", 2)]
    {
        let config = Config { virtual_stages: Some(v), ..config(kind) };
        let costs = costs(2 * v);
        let report = run(&config, costs);
        assert_eq!(report.measured.ranks.len(), 8);
        for (rank, measured) in report.measured.ranks.iter().enumerate() {
            let simulated = &report.simulated.ranks[measured.pp];
            assert_eq!(
                actions(&report.measured, rank),
                actions(&report.simulated, measured.pp),
                "{kind} rank {rank}"
            );
            // In an overlapped pair the executor's F does not wait for what the BW needs.
            if kind == "dualpipe-v" {
                continue;
            }
            for (m, s) in measured.spans.iter().zip(&simulated.spans) {
                if s.lane == Lane::Compute {
                    let (measured, simulated) = (m.end_ns, s.end_ns);
                    assert!(measured >= simulated, "{kind} {}: {measured} < {simulated}", m.action);
                }
            }
            let steps = report.steps.iter();
            let quickest = steps.map(|s| s.makespan_ns).min().unwrap();
            assert!(quickest >= report.simulated_makespan_ns, "{kind}: {quickest}");
        }
    }
}

/// Each slice of a sample takes its own time, and its messages have their own size.
#[test]
fn slices_are_executed_never_faster_than_simulated_and_idle_less_than_whole_samples() {
    let keys = "{\"t_f\": 20000, \"t_b\": 22000, \"t_w\": 14000, \"t_comm\": 200, \
                \"slice_pairs\": [0.5, 0.6]}";
    let table = Table::from_json(keys).unwrap();
    let base =
        Config { zero3: 1, dp: 1, unit: None, micro_batches: Some(2), seq: 8192, ..config("") };
    for (kind, v) in [("interleaved-zb", 2), ("zeropp", 2), ("1f1b", 1)] {
        let emulated = |slices: usize| {
            let config = Config {
                schedule: kind.into(),
                virtual_stages: Some(v),
                slices: slices.into(),
                ..base.clone()
            };
            emulate(&config, &table, |_| ()).unwrap()
        };
        let (whole, report) = (emulated(1), emulated(4));
        for (rank, measured) in report.measured.ranks.iter().enumerate() {
            assert_eq!(actions(&report.measured, rank), actions(&report.simulated, rank), "{kind}");
            for (m, s) in measured.spans.iter().zip(&report.simulated.ranks[rank].spans) {
                if s.lane == Lane::Compute {
                    assert!(m.end_ns >= s.end_ns, "{kind}: {}", m.action);
                }
            }
        }
        let quickest = report.steps.iter().map(|step| step.makespan_ns).min().unwrap();
        let simulated = report.simulated_makespan_ns;
        let longer = 100.0 * (quickest as f64 / simulated as f64 - 1.0);
        println!("{kind}: {quickest} ns, {longer:.2} % above the simulated {simulated}");
        assert!(quickest >= simulated && quickest < whole.simulated_makespan_ns, "{kind}");
        assert!(report.simulated_bubble < whole.simulated_bubble, "{kind}");
    }
}

/// A run with each of these splits does what is simulated of it, its steps never faster, and in
/// less time than with a whole head. A single compute may end earlier: where a message is late,
/// a rank that passes messages on sends another one first.
fn check_splits(base: &Config, costs: &str, splits: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("costs.json");
    std::fs::write(&file, costs).unwrap();
    let table = read_costs(&file).unwrap();
    let emulated = |split: &str| {
        let config = Config { head_split: Some(split.into()), ..base.clone() };
        emulate(&config, &table, |_| ()).unwrap()
    };
    let whole = emulated("off").simulated_makespan_ns;
    for split in splits {
        let report = emulated(split);
        for rank in 0..report.measured.ranks.len() {
            let [measured, simulated] =
                [&report.measured, &report.simulated].map(|of| actions(of, rank));
            assert_eq!(measured, simulated, "{split}, rank {rank}");
        }
        let quickest = report.steps.iter().map(|step| step.makespan_ns).min().unwrap();
        let simulated = report.simulated_makespan_ns;
        let longer = 100.0 * (quickest as f64 / simulated as f64 - 1.0);
        println!("{split}: {quickest} ns, {longer:.2} % above {simulated}; whole head: {whole}");
        assert!(quickest >= simulated && quickest < whole, "{quickest} {simulated} {whole}");
    }
}

/// The ranks of a split head pass its messages on in a real executor, and all wait for what the
/// simulator says that they wait for.
#[test]
fn a_split_head_is_executed_never_faster_than_simulated_and_faster_than_a_whole_one() {
    let text = "{\"t_f\": [5000, 5000, 5000, 17500], \"t_b\": [5500, 5500, 5500, 18000], \
                \"t_w\": [4500, 4500, 4500, 17000], \"t_comm\": 200, \
                \"t_head\": [12500, 12500, 12500]}";
    let base = Config { pp: 4, zero3: 1, dp: 1, virtual_stages: Some(1), ..config("zeropp") };
    let base = Config { unit: Some(8), steps: 3, ..base };
    check_splits(&base, text, &["16,16,16,16", "20,0,24,20"]);
    let slices = Config { slices: 2.into(), micro_batches: Some(4), seq: 8192, ..base.clone() };
    check_splits(&Config { unit: Some(4), ..slices }, text, &["16,16,16,16"]);
    let without = Table::from(&costs(4));
    let config = Config { head_split: Some("8,8,8,8".into()), ..base };
    let error = emulate(&config, &without, |_| ()).unwrap_err().to_string();
    assert!(error.contains("t_head is missing"), "{error}");
}

/// 16 ranks, two blocks each, and a head of 3.2 blocks: that of llama3-8b with 256k ids.
#[test]
fn sixteen_ranks_execute_a_split_head_as_simulated() {
    let times = |last: usize| format!("[{}{}]", "10000, ".repeat(15), last);
    let text = format!(
        "{{\"t_f\": {0}, \"t_b\": {0}, \"t_w\": {0}, \"t_comm\": 200, \
          \"t_head\": [16000, 16000, 16000]}}",
        times(26_000)
    );
    let base = Config { pp: 16, zero3: 1, dp: 1, virtual_stages: Some(1), ..config("zeropp") };
    let base = Config { unit: Some(32), micro_batches: Some(32), steps: 2, ..base };
    check_splits(&base, &text, &[&["4"; 16].join(",")]);
}

/// Messages that take no time leave the order of a split head's only to who waits for what: ranks
/// pass them on while they wait for a gather or a reduction, too.
#[test]
fn a_split_head_whose_messages_take_no_time_is_executed() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("costs.json");
    let text = "{\"t_f\": [500, 500, 500, 900], \"t_b\": [500, 500, 500, 900], \
                \"t_w\": [500, 500, 500, 900], \"t_head\": [400, 400, 400]}";
    std::fs::write(&file, text).unwrap();
    let table = read_costs(&file).unwrap();
    for (zero3, blocks) in [(1, "16,16,16,15"), (2, "8,8,8,8")] {
        let base = Config { pp: 4, zero3, dp: 1, virtual_stages: Some(1), ..config("zeropp") };
        let base = Config { unit: Some(4), micro_batches: Some(8), steps: 3, ..base };
        let config = Config { head_split: Some(blocks.into()), timeout_s: 20.0, ..base };
        let report = emulate(&config, &table, |_| ()).unwrap();
        assert_eq!(report.steps.len(), 3);
    }
}

/// Steps that follow each other without a meeting are whole programs, too, and what the simulator
/// says that a kind wins by that is there to be won.
#[test]
fn steps_without_a_barrier_are_executed_as_simulated() {
    for (kind, v, wins) in [("zb-2p", 1, true), ("zb-v", 2, false), ("1f1b", 1, false)] {
        let base = Config { virtual_stages: Some(v), steps: 5, ..config(kind) };
        let late = Config { optimizer_sync: OptimizerSync::Late, ..base.clone() };
        let [before, after] = [base, late].map(|config| run(&config, costs(2 * v)));
        let simulated = (after.simulated_step_ns, before.simulated_step_ns);
        assert!(simulated.0 <= simulated.1, "{kind}: {simulated:?}");
        assert!(!wins || simulated.0 < simulated.1, "{kind}: {simulated:?}");
        for (rank, measured) in after.measured.ranks.iter().enumerate() {
            let program = actions(&after.simulated, measured.pp);
            assert!(program.contains(&Action::Validate), "{kind}");
            assert_eq!(actions(&after.measured, rank), program, "{kind} rank {rank}");
        }
        // All of them together: the first begin a little earlier each time, or later.
        let all: u64 = after.steps.iter().map(|step| step.step_ns).sum();
        let busiest = after.simulated.ranks.iter().map(|rank| {
            let computes = rank.spans.iter().filter(|s| s.action.computes().next().is_some());
            computes.map(|s| s.end_ns - s.start_ns).sum::<u64>()
        });
        assert!(all >= 5 * busiest.max().unwrap(), "{kind}: no rank computes faster than it may");
    }
}

/// Messages, gathers and reductions that take long are waited for: each alone makes the run as
/// slow as the simulator says.
#[test]
fn links_and_collectives_take_their_time() {
    let ms = 1_000_000;
    let quick = StageCosts { f_ns: 1000, b_ns: 1000, w_ns: 1000, ..StageCosts::default() };
    let free = Costs {
        stages: vec![quick; 4],
        memory: vec![StageBytes { message: 1000, ..StageBytes::default() }; 4],
        ..Costs::default()
    };
    let with = |change: fn(&mut Costs)| {
        let mut costs = free.clone();
        change(&mut costs);
        costs
    };
    let cases = [
        ("latency", with(|c| c.link.latency_ns = 3_000_000)),
        ("bandwidth", with(|c| c.link.bytes_per_s = Some(1_000_000))),
        ("gather", with(|c| c.stages.iter_mut().for_each(|s| s.all_gather_ns = 5_000_000))),
        ("reduce", with(|c| c.stages.iter_mut().for_each(|s| s.reduce_scatter_ns = 20_000_000))),
        ("replicas", with(|c| c.stages.iter_mut().for_each(|s| s.replica_reduce_ns = 20_000_000))),
        ("step", with(|c| c.step_ns = 20_000_000)),
    ];
    for (what, costs) in cases {
        let report = run(&Config { steps: 1, ..config("zeropp") }, costs);
        let ends = report.simulated.ranks.iter().flat_map(|r| &r.spans).map(|s| s.end_ns);
        let simulated = ends.max().unwrap();
        assert!(simulated > 10 * ms, "{what}: {simulated} ns is too little to tell");
        let measured = report.steps[0].step_ns;
        assert!(measured >= simulated, "{what}: {measured} < {simulated}");
    }
}

#[test]
fn the_measured_timeline_is_written_as_a_trace() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.json");
    let config = Config { trace: Some(trace.clone()), ..config("zeropp") };
    run(&config, costs(4));
    let text = std::fs::read_to_string(&trace).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert!(json["traceEvents"].as_array().unwrap().len() > 8 * 4 * 8);
}

#[test]
fn costs_come_from_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let load = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        read_costs(&path)
    };
    let config = Config {
        pp: 2,
        layers: 1, // of a model that there is none of
        virtual_stages: Some(2),
        steps: 1,
        unit: Some(2),
        emulate: Some("a.toml".into()),
        warmup: Some(0),
        ..Config::default()
    };
    let toml = load("a.toml", "t_f = 300\nt_b = [300, 300, 300, 600]\nt_w = 100.5").unwrap();
    let json =
        load("a.json", r#"{"t_f": 300, "t_b": [300, 300, 300, 600], "t_w": 100.5}"#).unwrap();
    let simulated = |costs: &Table| emulate(&config, costs, |_| {}).unwrap().simulated_makespan_ns;
    assert_eq!(simulated(&toml), simulated(&json));
    assert!(simulated(&toml) > 4 * 1_800_000);

    for (name, text, fragment) in [
        ("x.yaml", "", "ends in .toml or .json"),
        ("x.toml", "t_f = ", "TOML"),
        ("x.json", "[1]", "expected a map"),
    ] {
        let error = load(name, text).unwrap_err().to_string();
        assert!(error.contains(name) && error.contains(fragment), "{error}");
    }
    let three = load("three.toml", "t_f = [1, 2, 3]\nt_b = 1\nt_w = 1").unwrap();
    let error = emulate(&config, &three, |_| {}).unwrap_err();
    assert!(error.is_bad_input());
    assert!(error.to_string().starts_with("emulate = a.toml: t_f: found [1,2,3]; "), "{error}");
    assert!(error.to_string().contains("one number for each of stages = 4"), "{error}");
    let both = load("both.toml", "t_f = 1\nt_b = 1\nt_w = 1\nt_overlap = 5").unwrap();
    let error = emulate(&config, &both, |_| {}).unwrap_err().to_string();
    assert!(error.contains("t_overlap: this executor overlaps no computation"), "{error}");
    let slow = load("slow.toml", "t_f = 1e9\nt_b = 1\nt_w = 1").unwrap();
    let long = Config { micro_batches: Some(1 << 20), ..config.clone() };
    let error = emulate(&long, &slow, |_| {}).unwrap_err().to_string();
    assert!(error.contains("a time of 1000000000 us is too long"), "{error}");
}

/// Ranks that wait longer than they may end the run with a message; here for a slow stage.
#[test]
fn ranks_that_wait_in_vain_end_the_run() {
    let config = Config { timeout_s: 0.2, ..config("zeropp") };
    let mut costs = costs(4);
    costs.stages[0].f_ns = 1_500_000_000;
    let error = emulate(&config, &Table::from(&costs), |_| {}).unwrap_err();
    assert!(!error.is_bad_input());
    let text = error.to_string();
    assert!(text.contains("timed out") && text.contains("step 1"), "{text}");
}

/// What the caller's function panics with is the caller's, and no rank goes on without it.
#[test]
fn a_panic_of_the_caller_ends_the_ranks() {
    let config = Config { steps: 1_000_000, ..config("zeropp") };
    let run = || emulate(&config, &Table::from(&costs(4)), |_| panic!("no more"));
    let panic = std::panic::catch_unwind(run).unwrap_err();
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"no more"));
}
