use super::*;
use crate::draw::chrome;
use crate::exchange::json::Document;
use crate::schedules::{Shape, generate, generate_sliced};
use crate::timeline::Timeline;

const SHARERS: Sharers = Sharers { zero3: 4, replicas: 2 };
const TIMES: &str = "t_f = 1\nt_b = 2\nt_w = 3\n";

/// The table of some lines `key = value`, with the values of JSON.
pub(super) fn table(lines: &str) -> Result<Table, CostsError> {
    let entry =
        |line: &str| line.split_once(" = ").map(|(key, value)| format!("\"{key}\": {value}"));
    let entries: Vec<String> = lines.lines().map(|line| entry(line).expect(line)).collect();
    Table::from_json(&format!("{{{}}}", entries.join(", ")))
}

fn from_keys(lines: &str) -> Result<simulate::Costs, CostsError> {
    table(lines)?.of(2, SHARERS, None)
}

#[test]
fn one_number_stands_for_all_stages() {
    let costs = from_keys(
        "t_f = 1.5\nt_b = [2, 3]\nt_w = 1\nt_comm = 377\nbytes_per_s = 12.5e9\n\
         mem_message = 8e3\nmem_weights = [1e3, 2e3]\nt_step = 4",
    )
    .unwrap();
    let times: Vec<_> = costs.stages.iter().map(|s| (s.f_ns, s.b_ns, s.r_ns)).collect();
    assert_eq!(times, [(1500, 2000, 1500), (1500, 3000, 1500)]);
    assert_eq!((costs.link.latency_ns, costs.link.bytes_per_s), (377_000, Some(12_500_000_000)));
    assert_eq!((costs.memory[1].message, costs.step_ns), (8000, 4000));
    assert_eq!(costs.memory[1].weights, 2000);
}

#[test]
fn bandwidth_stands_for_times() {
    let bytes = format!("{TIMES}mem_weights = 8000\nmem_gradient = 16000\n");
    let costs = from_keys(&format!("{bytes}zero3_bytes_per_s = 1e6\nreplica_bytes_per_s = 1000"));
    let stage = costs.unwrap().stages[0];
    // 3/4 of the bytes, and for the replicas twice half of a quarter of them.
    assert_eq!((stage.all_gather_ns, stage.reduce_scatter_ns), (6_000_000, 12_000_000));
    assert_eq!(stage.replica_reduce_ns, 4_000_000_000);
    let both = from_keys(&format!("{bytes}zero3_bytes_per_s = 1e6\nt_gather = 5")).unwrap();
    assert_eq!(both.stages[1].all_gather_ns, 5000, "a time that is given counts");
}

#[test]
fn bytes_that_are_not_given_are_those_that_are_known() {
    let known =
        StageBytes { activation: 7, stash: 3, weights: 4, message: 5, ..Default::default() };
    let table = table(&format!("{TIMES}mem_message = 9")).unwrap();
    let costs = table.of(2, ALONE, Some(&[known, known])).unwrap();
    assert_eq!(costs.memory[1], StageBytes { message: 9, ..known });
    assert_eq!(table.of(2, ALONE, None).unwrap().memory[1].activation, 0);
}

#[test]
fn invalid_costs_are_named() {
    let cases = [
        ("t_x = 1", "unknown field `t_x`"),
        ("t_r = [1, 2, 3]", "t_r: found [1,2,3]; one number for each of stages = 2, or none"),
        ("t_r = -1", "t_r: found [-1,-1]; a time is 0 to 1000000000 µs"),
        ("t_r = 1e10", "t_r: found [10000000000,10000000000]; a time is 0 to"),
        ("t_r = \"long\"", "long"),
        ("t_comm = -0.5", "t_comm: found -0.5; a time is 0 to"),
        ("links = 0", "links: found 0; 1 or more"),
        ("bytes_per_s = 0", "bytes_per_s: found 0; 1 or more"),
        ("mem_f = -1", "mem_f: found [-1,-1]; memory is 0 or more"),
        ("mem_f = 2", "mem_w is 0 or less, and mem_f + mem_b + mem_w is 0"),
        ("zero3_bytes_per_s = 0", "zero3_bytes_per_s: found 0; bytes in a second, 1 or more"),
        ("measured = 5", "measured: found 5; what was measured, as text"),
    ];
    for (text, fragment) in cases {
        let error = from_keys(&format!("{TIMES}{text}")).expect_err(text).to_string();
        assert!(error.contains(fragment), "{text}: {error}");
        assert!(!error.contains("costs."), "fields are called as the file has them: {error}");
    }
    for key in NEEDED {
        let rest: String = TIMES.split_inclusive('\n').filter(|l| !l.starts_with(key)).collect();
        let error = from_keys(&rest).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{key} is missing: ")), "{error}");
    }
    assert!(Table::from_json("[1]").is_err());
}

#[test]
fn sums_that_leave_64_bits_are_refused() {
    let costs = from_keys("t_f = 1e9\nt_b = 1\nt_w = 1").unwrap();
    assert_eq!(check_sums(&costs, 1000), Ok(()));
    let error = check_sums(&costs, 1 << 20).unwrap_err().to_string();
    assert!(error.starts_with("a time of 1000000000 us is too long for 2 stages and"), "{error}");
    let slow = from_keys(&format!("{TIMES}mem_message = 1e15\nbytes_per_s = 1")).unwrap();
    assert!(check_sums(&slow, 8).is_err(), "a transfer counts");
}

#[test]
fn written_costs_read_back() {
    let stage =
        simulate::StageCosts { f_ns: 1001, b_ns: 2, w_ns: 0, r_ns: 9, ..Default::default() };
    let bytes = StageBytes { activation: 12, stash: 5, input: 2, message: 3, ..Default::default() };
    let costs = simulate::Costs {
        stages: vec![stage, simulate::StageCosts { all_gather_ns: 77, ..stage }],
        memory: vec![bytes; 2],
        link: simulate::LinkCosts { latency_ns: 12_345, ..Default::default() },
        file_bytes_per_s: Some(2_000_000),
        layers: Vec::new(),
        copies_apart: false,
        states: Vec::new(),
        overlap_ns: None,
        step_ns: 8,
    };
    let mut text = Vec::new();
    write(&costs, "steps 2 to 8 of \"a run\"", None, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let table = Table::from_json(&text).unwrap();
    assert_eq!(table.measured(), Some("steps 2 to 8 of \"a run\""));
    assert_eq!(table.of(2, ALONE, None).unwrap(), costs);
    assert!(text.contains("\n  \"t_f\": [1.001,1.001],\n"), "a key a line: {text}");
    assert!(!text.contains("t_reduce") && text.contains("\"t_w\": [0.0,0.0]"), "{text}");
}

/// A trace and a schedule's JSON are costs, too.
#[test]
fn traces_and_schedules_have_costs() {
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 4, unit: 4 };
    let schedule = generate("zb-h1", &shape).unwrap();
    let costs = simulate::Costs::uniform(2, 5000, 6000, 4000, 300);
    let timeline = simulate::simulate(&schedule, &costs).unwrap();
    let mut trace = Vec::new();
    chrome::write(&timeline, &mut trace).unwrap();
    let table = Table::from_json(&String::from_utf8(trace).unwrap()).unwrap();
    assert_eq!(table.measured(), Some("a trace of zb-h1, simulated"));
    assert_eq!(table.of(2, ALONE, None).unwrap().stages, costs.stages);
    let mut sliced = Vec::new();
    let title = format!("1f1b · {IN_SLICES}");
    chrome::write(&Timeline { title, ..timeline }, &mut sliced).unwrap();
    let refused = Table::from_json(&String::from_utf8(sliced).unwrap()).unwrap_err().to_string();
    assert!(refused.contains("use one of a run with whole samples"), "{refused}");
    let document = Document { schedule, costs: Some((&costs).into()), measures: None };
    let mut text = Vec::new();
    json::write(&document, &mut text).unwrap();
    let table = Table::from_json(&String::from_utf8(text).unwrap()).unwrap();
    assert_eq!((table.measured(), table.of(2, ALONE, None)), (None, Ok(costs.clone())));
    let cut = [512, 256];
    let sliced = Document {
        schedule: generate_sliced("zeropp", &shape, &cut).unwrap(),
        costs: Some(
            (&of_slices(&costs, costs.stages.len(), &SampleGrowth::default(), &cut)).into(),
        ),
        measures: None,
    };
    let mut text = Vec::new();
    json::write(&sliced, &mut text).unwrap();
    let error = Table::from_json(&String::from_utf8(text).unwrap()).unwrap_err().to_string();
    assert!(error.starts_with("sample_slices = 2 slices: costs of slices are none of"), "{error}");
    let bare = Document { costs: None, ..document };
    let mut text = Vec::new();
    json::write(&bare, &mut text).unwrap();
    let error = Table::from_json(&String::from_utf8(text).unwrap()).unwrap_err();
    assert_eq!(error.to_string(), "this schedule has no costs");
}
