//! What everything takes: given by a file, measured by a run, or estimated; and what follows from
//! it. No bit of the training does.

use std::path::PathBuf;

use crate::common::captured::warnings;
use crate::common::{Run, assert_same_bits, run, tiny};
use zeropp::config::Bytes;
use zeropp::pipeline::costs::Sharers;
use zeropp::pipeline::ir::{Action, Compute};
use zeropp::{Config, Error, StepMetrics, Trainer, read_costs};
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};

fn file(dir: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path
}

/// A B of twice an F, a W of half of one, and messages that take long.
const UNEVEN: &str = "t_f = 1000\nt_b = 2000\nt_w = 500\nt_comm = 700\n";
/// A W of many F.
const LONG_W: &str = "t_f = 300\nt_b = 900\nt_w = 2000\nt_comm = 100\n";

fn of_kind(kind: &str) -> Config {
    let virtual_stages = if kind == "zb-1p" || kind == "zb-2p" { 1 } else { 2 };
    Config {
        schedule: kind.into(),
        pp: 4,
        virtual_stages: Some(virtual_stages),
        micro_batches: Some(12),
        unit: (kind == "zeropp-auto").then_some(6),
        steps: 3,
        ..tiny()
    }
}

/// The order follows from costs; the cut of sums, and so every bit, does not (ADR 18).
#[test]
fn costs_change_orders_and_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    for (kind, text) in [("zb-1p", UNEVEN), ("zb-v", LONG_W), ("zeropp-auto", UNEVEN)] {
        let costs = file(&dir, &format!("{kind}.toml"), text);
        let plain = of_kind(kind);
        let with_costs = Config { costs: Some(costs), ..plain.clone() };
        let [a, b] = [&plain, &with_costs].map(|c| Trainer::new(c.clone()).unwrap());
        assert!(a.schedule().ranks != b.schedule().ranks, "{kind}: the costs are weighed");
        assert_eq!(a.schedule().units, b.schedule().units, "{kind}: the cut is the same");
        assert_same_bits(&run(plain), &run(with_costs), kind);
    }
}

#[test]
fn the_plan_says_where_its_times_are_from() {
    let dir = tempfile::tempdir().unwrap();
    let source = |costs: Option<PathBuf>| {
        Trainer::new(Config { costs, ..of_kind("zb-1p") }).unwrap().plan().costs.clone()
    };
    assert!(source(None).starts_with("estimated from FLOP: "), "{}", source(None));
    let given = file(&dir, "given.toml", UNEVEN);
    assert_eq!(source(Some(given.clone())), format!("given: {}", given.display()));
    let text = r#"{"measured": "steps 2 to 8", "t_f": [1, 2, 3, 4], "t_b": 1, "t_w": 1}"#;
    let measured = file(&dir, "m.json", text);
    assert_eq!(
        source(Some(measured.clone())),
        format!("measured: {} (steps 2 to 8)", measured.display())
    );
}

#[test]
fn bad_costs_are_named_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text, problem) in [
        ("a.toml", "t_f = [1, 2]\nt_b = 1\nt_w = 1", "t_f: found [1,2]; one number for each of"),
        ("b.toml", "t_f = -1\nt_b = 1\nt_w = 1", "t_f: found [-1,-1,-1,-1]; a time is 0 to"),
        ("c.toml", "t_f = nan\nt_b = 1\nt_w = 1", "t_f: found nan"),
        ("d.toml", "t_f = 1\nt_b = 1", "t_w is missing"),
        ("e.json", "{", "EOF"),
        ("f.txt", "", "ends in .toml or .json"),
    ] {
        let path = file(&dir, name, text);
        let config = Config { costs: Some(path.clone()), ..of_kind("zb-1p") };
        let error = Trainer::new(config).err().expect(name);
        let text = error.to_string();
        assert!(error.is_bad_input());
        assert!(text.starts_with(&format!("costs = {}: ", path.display())), "{text}");
        assert!(text.contains(problem), "{text}");
    }
    // An input is no output.
    let path = file(&dir, "both.json", r#"{"t_f": 1, "t_b": 1, "t_w": 1}"#);
    let config = Config { costs: Some(path.clone()), save_costs: Some(path), ..of_kind("zb-1p") };
    let error = Trainer::new(config).err().unwrap().to_string();
    assert!(error.contains("save-costs = ") && error.contains("`costs`"), "{error}");
}

#[test]
fn a_run_writes_what_it_took_and_another_plans_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let saved = dir.path().join("run.json");
    let config = Config {
        pp: 2,
        zero3: 2,
        dp: 2,
        virtual_stages: Some(2),
        steps: 5,
        save_costs: Some(saved.clone()),
        ..tiny()
    };
    let trainer = Trainer::new(config.clone()).unwrap();
    let summary = trainer.train(|_| ()).unwrap();
    let table = read_costs(&saved).unwrap();
    let what = table.measured().expect("measured").to_owned();
    assert!(what.starts_with("steps 2 to 5 of a run: zeropp"), "{what}");
    let costs = table.of(4, Sharers { zero3: 2, replicas: 2 }, None).unwrap();
    for (s, stage) in costs.stages.iter().enumerate() {
        for ns in [stage.f_ns, stage.b_ns, stage.w_ns, stage.all_gather_ns, stage.reduce_scatter_ns]
        {
            assert!(ns > 0 && ns < 1_000_000_000, "stage {s}: {stage:?}");
        }
        assert!(stage.replica_reduce_ns > 0 && costs.memory[s].activation > 0, "{stage:?}");
    }
    assert!(costs.link.latency_ns > 0 && costs.step_ns > 0);
    // All that the ranks computed fits into the time that the steps took.
    let work: u64 = costs.stages.iter().map(|s| 6 * (s.f_ns + s.b_ns + s.w_ns)).sum();
    assert!((work as f64) < 4.0 * 1e9 * summary.total_s, "{work} ns of {} s", summary.total_s);
    let next = Config { costs: Some(saved.clone()), save_costs: None, ..config.clone() };
    let plan = Trainer::new(next).unwrap().plan().clone();
    assert!(plan.costs.starts_with("measured: ") && plan.costs.ends_with(&format!("({what})")));
    // For other stages it is what their blocks took; for another model it is refused.
    let other = Config { costs: Some(saved), save_costs: None, virtual_stages: Some(1), ..config };
    let plan = Trainer::new(other.clone()).unwrap().plan().clone();
    assert_eq!((plan.cut.as_str(), plan.blocks.len()), ("by the times of costs", 2));
    let error = Trainer::new(Config { layers: 18, ..other }).err().unwrap().to_string();
    assert!(error.contains("blocks: 16 in all, and the model has layers = 18"), "{error}");
}

/// Times in a file cut the stages: F, B and W count, R where it is done, the head as it is.
#[test]
fn given_times_cut_the_stages_and_change_no_bit() {
    let dir = tempfile::tempdir().unwrap();
    let with = |text: &str, config: &Config| {
        let costs = Some(file(&dir, "blocks.toml", text));
        Config { costs, ..config.clone() }
    };
    let blocks = |config: &Config| {
        let plan = Trainer::new(config.clone()).unwrap().plan().clone();
        (plan.blocks, plan.cut, plan.longest_stage)
    };
    let two = Config { pp: 2, layers: 8, schedule: "1f1b".into(), unit: None, ..tiny() };
    // Blocks of 3, and a last one of 16 with the head: 18 and 19 us.
    let slow_head = "blocks = [1, 1, 1, 1, 1, 1, 1, 1]\nt_f = [1, 1, 1, 1, 1, 1, 1, 14]\n\
                     t_b = 1\nt_w = 1\n";
    let given = with(slow_head, &two);
    let (cut, by, longest) = blocks(&given);
    assert_eq!((cut, by.as_str()), (vec![6, 2], "by the times of costs"));
    assert!((longest - 19.0 / 18.5).abs() < 1e-6, "{longest}");
    assert_eq!(blocks(&two).1, "by FLOP");
    assert_same_bits(&run(two.clone()), &run(given), "cut by times");
    // W alone counts, too; and as times of stages with several blocks.
    let late_w = "blocks = [2, 2, 2, 2]\nt_f = 2\nt_b = 2\nt_w = [10, 10, 2, 2]\n";
    assert_eq!(blocks(&with(late_w, &two)).0, [3, 5]);
    // Two stages of four redo their forward: 3 blocks of 4 take as long as 4 of 3.
    let even = "blocks = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\nt_f = 1\nt_b = 1\nt_w = 1\n";
    let full = Config {
        layers: 14,
        virtual_stages: Some(2),
        recompute: zeropp::config::Recompute::Full,
        schedule: "zeropp".into(),
        ..two.clone()
    };
    assert_eq!(blocks(&with(even, &full)).0, [3, 3, 4, 4]);
    // What is given by hand wins.
    let by_hand = Config { stages: Some("4,4".into()), ..with(slow_head, &two) };
    assert_eq!((blocks(&by_hand).0, blocks(&by_hand).1), (vec![4, 4], "as given".into()));
}

#[test]
fn the_memory_limit_reaches_the_schedules_that_obey_it() {
    let held = |config: &Config| {
        let trainer = Trainer::new(config.clone()).map_err(|e: Error| e.to_string())?;
        let ranks = trainer.plan().ranks.iter();
        Ok::<u64, String>(ranks.map(|r| r.held.peaks.activation).max().unwrap())
    };
    let free = of_kind("zb-2p");
    let most = held(&free).unwrap();
    let tight = Config { mem_limit: Some(Bytes(most * 3 / 4)), ..free.clone() };
    let less = held(&tight).unwrap();
    assert!(less < most && less <= most * 3 / 4, "{less} of {most}");
    assert_same_bits(&run(free.clone()), &run(tight), "within a limit");
    // What is too little for any order, and what looks for none.
    let error = held(&Config { mem_limit: Some(Bytes(10)), ..free.clone() }).unwrap_err();
    assert!(error.contains("mem_limit = 10 does not work"), "{error}");
    let other = Config { mem_limit: Some(Bytes(1 << 10)), ..of_kind("zb-1p") };
    let error = held(&Config { schedule: "1f1b".into(), ..other }).unwrap_err();
    assert!(error.starts_with("schedule:mem-limit = 1 KiB: schedule 1f1b needs "), "{error}");
    assert!(error.contains("zb-1p, zb-2p, zb-v, v-half, v-min, auto and zeropp-auto"), "{error}");
    let enough = Config { mem_limit: Some(Bytes(1 << 40)), ..of_kind("zb-1p") };
    assert!(held(&Config { schedule: "1f1b".into(), ..enough }).is_ok());
}

/// What came of a run of two halves: what the first saw, how the second ended, and what it was
/// warned of.
struct Halves {
    mine: Result<Vec<StepMetrics>, Error>,
    theirs: Result<(), Error>,
    warned: Vec<String>,
}

/// Trains one run in two halves that share a world, as two processes would.
fn in_two_processes(first: &Config, second: &Config) -> Halves {
    let mut ranks = ThreadsWorld::new(4, ThreadsOptions::default()).communicators();
    let others = ranks.split_off(2);
    let [first, second] = [first, second].map(|c| Trainer::new(c.clone()).unwrap());
    std::thread::scope(|scope| {
        let follow = || warnings(|| second.train_over(others, |_| ()).map(drop));
        let following = scope.spawn(follow);
        let mut steps = Vec::new();
        let mine = first.train_over(ranks, |s| steps.push(s.clone())).map(|_| steps);
        let (theirs, warned) = following.join().unwrap();
        Halves { mine, theirs, warned }
    })
}

/// A process with other costs would run another order, in which its ranks wait for messages that
/// nobody sends. It runs rank 0's.
#[test]
fn a_process_with_other_costs_runs_rank_0_s_program() {
    let dir = tempfile::tempdir().unwrap();
    let config = of_kind("zb-2p");
    let other = Config { costs: Some(file(&dir, "c.toml", UNEVEN)), ..config.clone() };
    let programs = [&config, &other].map(|c| Trainer::new(c.clone()).unwrap().schedule().clone());
    assert!(programs[0].ranks[2..] != programs[1].ranks[2..], "there is something to agree on");
    let Run { steps: alone, .. } = run(config.clone());
    for (first, second) in [(&config, &other), (&other, &config)] {
        let Halves { mine, theirs, warned } = in_two_processes(first, second);
        let (steps, ()) = (mine.unwrap(), theirs.unwrap());
        let bits = |steps: &[StepMetrics]| -> Vec<u64> {
            steps.iter().map(|s| s.loss.to_bits()).collect()
        };
        assert_eq!(bits(&steps), bits(&alone));
        assert_eq!(warned.len(), 1, "{warned:?}");
        assert!(warned[0].contains("a different program from rank 0's"), "{warned:?}");
    }
    // Memory, and with it what recompute = auto chooses, may differ between machines.
    let selective = Config { recompute: zeropp::config::Recompute::Selective, ..config.clone() };
    let Halves { mine, theirs, warned } = in_two_processes(&config, &selective);
    assert!(mine.is_ok() && theirs.is_ok(), "{theirs:?}");
    assert!(warned[0].contains("recompute = selective: rank 2 on "), "{warned:?}");
    // Alike: no warning.
    let Halves { mine, theirs, warned } = in_two_processes(&other, &other);
    assert!(mine.is_ok() && theirs.is_ok() && warned.is_empty(), "{warned:?}");
}

/// What changes numbers, or what ranks do together, is never taken from rank 0: no rank starts.
#[test]
fn processes_that_differ_in_a_setting_end_in_the_same_words() {
    let dir = tempfile::tempdir().unwrap();
    let config = of_kind("zb-2p");
    let with = |change: fn(&mut Config)| {
        let mut config = config.clone();
        change(&mut config);
        config
    };
    let [text, folder] =
        [file(&dir, "text", &"another text ".repeat(99)), dir.path().join("saved")];
    for (other, here, there) in [
        (with(|c| c.lr = 0.5), "lr = 0.5, min-lr = 0.05", "lr = 0.003, min-lr = 0.0003"),
        (with(|c| (c.seed, c.clip) = (7, 2.0)), "seed = 7, clip = 2.0", "seed = 11, clip = 1.0"),
        (with(|c| c.beta2 = Some(0.95)), "beta2 = 0.95", "beta2 = 0.999"),
        (with(|c| c.hidden = 32), "hidden = 32", "hidden = 16"),
        (with(|c| c.steps += 10), "steps = ", "steps = "),
        (with(|c| c.precision = zeropp::config::Precision::Bf16), "precision = bf16", "fp32"),
        (Config { data: Some(text), ..config.clone() }, "data = 1287 bytes", "data = "),
        (Config { save: Some(folder), ..config.clone() }, "save = given", "save = nothing"),
        // The program alone differs, and this process cannot run the other.
        (
            with(|c| c.micro_batches = Some(16)),
            "unit = 16, micro-batches = 16",
            "micro-batches = 12",
        ),
    ] {
        let Halves { mine, theirs, warned } = in_two_processes(&config, &other);
        let errors = [mine.map(drop), theirs].map(|end| end.unwrap_err());
        assert!(errors.iter().all(Error::is_bad_input));
        let [mine, theirs] = errors.map(|e| e.to_string());
        assert_eq!(mine, theirs);
        assert!(mine.starts_with(here) && warned.is_empty(), "{mine}: {warned:?}");
        let (rank_2, rank_0) = mine.split_once(" has this, and rank 0 on ").expect(&mine);
        assert!(rank_2.contains(": rank 2 on "), "{mine}");
        assert!(rank_0.contains(there), "{mine}");
        assert!(rank_0.ends_with("; give all processes of a run the same"), "{mine}");
    }
    // What each process has of its own.
    let own = with(|c| (c.timeout_s, c.metrics) = (77.0, None));
    let Halves { mine, theirs, warned } = in_two_processes(&config, &own);
    assert!(mine.is_ok() && theirs.is_ok() && warned.is_empty(), "{warned:?}");
}

/// The times of a gather end when it is done, not when a prefetched stage is used.
#[test]
fn collectives_end_when_they_are_done() {
    let config = Config { pp: 2, zero3: 2, virtual_stages: Some(2), steps: 3, ..tiny() };
    let (_, timeline) = Trainer::new(config).unwrap().train_to_timeline(|_| ()).unwrap();
    let mut early = 0;
    for rank in &timeline.ranks {
        for (at, span) in rank.spans.iter().enumerate() {
            let Action::AllGather { stage } = span.action else { continue };
            let uses = |a: &Action| a.computes().any(|t| t.stage == stage && t.kind != Compute::W);
            let used = rank.spans[at..].iter().find(|s| uses(&s.action)).expect("it is used");
            // An F waits for each layer as it comes to it.
            let is_f = used.action.computes().all(|t| t.kind == Compute::F);
            let last = if is_f { used.end_ns } else { used.start_ns };
            assert!(span.end_ns <= last, "{} after {}", span.action, used.action);
            early += usize::from(span.end_ns + 1000 < used.start_ns);
        }
    }
    assert!(early > 0, "every gather lasted until it was used");
}
