use proptest::prelude::*;

use super::*;
use crate::{
    costs::{ALONE, Table},
    exchange::samples::any_schedule,
    lower::{LowerOptions, OptimizerSync, lower},
    memory::StageBytes,
    schedules::{Shape, generate},
    simulate::{self, StageCosts},
};

fn text(document: &Document) -> String {
    let mut out = Vec::new();
    write(document, &mut out).unwrap();
    String::from_utf8(out).unwrap()
}

fn good() -> Value {
    serde_json::json!({
        "kind": "1f1b", "pp": 2, "stages": 2, "micro_batches": 2, "units": [2],
        "placement": [0, 1],
        "costs": {"t_f": [1.5, 2.0], "t_comm": 0.25},
        "makespan": 9.5, "own_span_max": 8, "bubble_rate": 0.1, "idle": [0, 1], "ends": [8, 9.5],
        "peak_activation": [2, 1], "all_gathers": 2, "reduce_scatters": 2,
        "actions": [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    })
}

#[test]
fn a_document_keeps_all_it_has() {
    let document = read(&good().to_string()).unwrap();
    assert_eq!(document.schedule.kind, "1f1b");
    assert_eq!(document.costs.as_ref().unwrap().t_f, [1.5, 2.0]);
    assert_eq!(document.measures.as_ref().unwrap().ends, [8.0, 9.5]);
    let written = text(&document);
    assert_eq!(read(&written).unwrap(), document);
    assert_eq!(written.lines().count(), 21, "a line a key and a rank: {written}");
}

#[test]
fn units_costs_and_measures_may_be_missing() {
    let mut value = good();
    let map = value.as_object_mut().unwrap();
    map.retain(|k, _| {
        ["kind", "pp", "stages", "micro_batches", "placement", "actions"].contains(&k.as_str())
    });
    let document = read(&value.to_string()).unwrap();
    assert_eq!(document.schedule.units, [2]);
    assert_eq!((document.costs, document.measures), (None, None));
}

/// Else costs would have an entry for each of them.
#[test]
fn stages_and_slices_are_no_more_than_the_actions_compute() {
    let mut value = good();
    value["sample_slices"] = serde_json::json!([256, 256]);
    let said = read(&value.to_string()).unwrap_err().to_string();
    let start = "costs.t_f: found [1.5,2.0]; one number for each stage and slice, 4 in all, or";
    assert!(said.starts_with(start), "{said}");
    value["costs"] = serde_json::json!({"t_comm": 1});
    assert!(read(&value.to_string()).is_ok());
    for many in [10usize, 1 << 60] {
        let mut value = value.clone();
        (value["micro_batches"], value["units"]) = (many.into(), vec![many].into());
        let said = read(&value.to_string()).unwrap_err().to_string();
        let start = format!("micro_batches: found {many}; 8 compute actions are too few for 2");
        assert!(said.starts_with(&start), "{said}");
    }
}

/// A path, the value put there, and the start of the error.
#[test]
fn errors_name_field_and_value() {
    use serde_json::json;
    let cases = [
        ("/pp", json!("2"), "pp: found \"2\"; a whole number above 0"),
        ("/pp", json!(2.5), "pp: found 2.5; a whole number above 0"),
        ("/pp", json!(3), "actions: found 2 ranks; one list for each of pp = 3 ranks"),
        ("/stages", json!(-1), "stages: found -1;"),
        ("/stages", json!(3), "placement: found 2 entries; one rank for each of stages = 3"),
        ("/micro_batches", json!(0), "micro_batches: found 0;"),
        (
            "/micro_batches",
            json!(3),
            "units: found [2]; numbers above 0 that sum to micro_batches = 3",
        ),
        ("/units", json!([2, 0]), "units: found [2, 0];"),
        ("/units", json!([18446744073709551615u64, 3]), "units: found [18446744073709551615, 3];"),
        ("/placement", json!([0, 2]), "placement[1]: found 2; ranks go from 0 to 1"),
        (
            "/placement",
            json!([1, 0]),
            "actions[0][0]: found \"0F0\"; 0F0: stage 0 is on rank 1, not 0",
        ),
        (
            "/placement",
            json!([1, 1]),
            "placement: found [1, 1]; every rank holds a stage, but rank 0",
        ),
        ("/placement", json!(7), "placement: found 7; the rank of each stage"),
        ("/kind", json!(7), "kind: found 7; the schedule's name as text"),
        ("/actions/1/2", json!("1F9"), "actions[1][2]: found \"1F9\"; 1F9: micro-batch 9 of 2"),
        ("/actions/1/2", json!("1F1 "), "actions[1][2]: found \"1F1 \"; \" \" does not belong"),
        ("/actions/1/2", json!(""), "actions[1][2]: found \"\"; an action starts"),
        ("/actions/1", json!("1F1"), "actions: found"),
        (
            "/costs",
            json!({"t_x": 1}),
            "costs: found {\"t_x\":1}; an object of costs (unknown field `t_x`",
        ),
        ("/costs/t_f", json!([1]), "costs.t_f: found [1]; one number for each of stages = 2"),
        ("/costs/t_f", json!([1, -1]), "costs.t_f: found [1,-1]; a time is 0 to 1000000000 µs"),
        ("/costs/t_comm", json!(-0.5), "costs.t_comm: found -0.5; a time is 0 to"),
        ("/costs", json!({"t_overlap": 1e300}), "costs.t_overlap: found 1e+300; a time is 0 to"),
        ("/costs", json!({"mem_f": [1]}), "costs.mem_f: found [1]; one number for each of stages"),
        (
            "/costs",
            json!({"mem_f": [2, 2], "mem_b": [-1, -1], "mem_w": [-1, 0]}),
            "costs.mem_w: found [-1,0]; mem_w is 0 or less, and mem_f + mem_b + mem_w is 0; \
             stage 1 has 2, -1, 0",
        ),
        (
            "/costs",
            json!({"mem_weights": [2, -2]}),
            "costs.mem_weights: found [2,-2]; memory is 0 or more",
        ),
        ("/ends", json!([1]), "ends: found [1]; one number for each of pp = 2 ranks"),
        ("/all_gathers", json!(0.5), "all_gathers: found 0.5; a whole number"),
        ("/makespan", Value::Null, "makespan: found null; the measures come all or none"),
    ];
    for (path, value, start) in cases {
        let mut document = good();
        *document.pointer_mut(path).unwrap() = value;
        let error = read(&document.to_string()).expect_err(path).to_string();
        assert!(error.starts_with(start), "{path}: {error:?}, not {start:?}");
    }
}

#[test]
fn unknown_missing_and_double_keys_are_errors() {
    let mut value = good();
    value["colour"] = "red".into();
    assert!(read(&value.to_string()).unwrap_err().to_string().contains("unknown field `colour`"));
    value = good();
    value.as_object_mut().unwrap().remove("placement");
    assert!(
        read(&value.to_string()).unwrap_err().to_string().contains("missing field `placement`")
    );
    let twice = good().to_string().replacen('{', "{\"pp\":2,", 1);
    assert!(read(&twice).unwrap_err().to_string().contains("duplicate field `pp`"));
    let longer = format!("{} 1", good());
    assert!(read(&longer).unwrap_err().to_string().contains("trailing characters"));
}

/// A number of thousandths; serde_json reads up to 15 digits back to the same bits.
fn number(whole_max: u64) -> BoxedStrategy<f64> {
    (0..whole_max * 1000).prop_map(|thousandths| thousandths as f64 / 1000.0).boxed()
}

fn any_stage() -> impl Strategy<Value = (StageCosts, StageBytes)> {
    (prop::array::uniform7(0u64..1_000_000_000), prop::array::uniform6(0u64..1_000_000)).prop_map(
        |([f_ns, b_ns, w_ns, r_ns, all_gather_ns, reduce_scatter_ns, replica_reduce_ns], m)| {
            let [input, activation, stash, weights, gradient, message] = m;
            (
                StageCosts {
                    f_ns,
                    b_ns,
                    w_ns,
                    r_ns,
                    all_gather_ns,
                    reduce_scatter_ns,
                    replica_reduce_ns,
                },
                StageBytes {
                    input,
                    activation,
                    stash,
                    weights,
                    gradient,
                    message,
                    ..StageBytes::default()
                },
            )
        },
    )
}

fn any_simulator_costs(stages: usize) -> impl Strategy<Value = simulate::Costs> {
    let link = (0u64..1_000_000, prop::option::of(1u64..1 << 40), prop::option::of(1usize..9));
    let others = (prop::option::of(1u64..1 << 40), prop::option::of(0u64..1_000_000));
    let share = prop::array::uniform4(0u64..1 << 60)
        .prop_map(|[f, w, weights, gradient]| simulate::LayerShare { f, w, weights, gradient });
    let of_stage = prop::collection::vec(share, 0..5).prop_map(simulate::LayerShare::of_stage);
    let layers = prop_oneof![Just(0), Just(stages)]
        .prop_flat_map(move |n| prop::collection::vec(of_stage.clone(), n));
    let states = (any::<bool>(), any::<bool>(), prop::array::uniform3(0u64..1_000_000));
    let costs = (prop::collection::vec(any_stage(), stages), link, others, 0u64..1_000_000);
    (costs, layers, states, any::<bool>()).prop_map(
        move |((all, link, others, step_ns), layers, states, copies_apart)| {
            let (file_bytes_per_s, overlap_ns) = others;
            let (latency_ns, bytes_per_s, parallel_max) = link;
            let (out, waits, [read_ns, add_ns, update_ns]) = states;
            let state = simulate::StateCopies { read_ns, add_ns, update_ns, waits };
            let states = vec![state; if out { stages } else { 0 }];
            let (stages, memory) = all.into_iter().unzip();
            let link = simulate::LinkCosts { latency_ns, bytes_per_s, parallel_max };
            simulate::Costs {
                stages,
                memory,
                link,
                file_bytes_per_s,
                layers,
                copies_apart,
                states,
                overlap_ns,
                step_ns,
            }
        },
    )
}

fn any_measures(pp: usize) -> impl Strategy<Value = Measures> {
    let list = move || prop::collection::vec(number(1_000_000_000), pp);
    let peaks = prop::collection::vec(0u64..99, pp);
    (number(1_000_000_000), number(1), list(), list(), peaks, 0usize..99).prop_map(
        |(makespan, bubble_rate, idle, ends, peak_activation, all_gathers)| Measures {
            makespan,
            own_span_max: makespan,
            bubble_rate,
            bubble_step: Some(bubble_rate).filter(|rate| *rate > 0.5),
            peak_activation,
            idle,
            ends,
            all_gathers,
            reduce_scatters: all_gathers / 2,
        },
    )
}

fn any_document() -> impl Strategy<Value = Document> {
    any_schedule(false).prop_flat_map(|schedule| {
        let costs = prop::option::of(
            any_simulator_costs(schedule.stages()).prop_map(|c| JsonCosts::from(&c)),
        );
        let measures = prop::option::of(any_measures(schedule.pp()));
        (Just(schedule), "[a-z\"\\\\é-]{0,8}", costs, measures).prop_map(
            |(mut schedule, kind, costs, measures)| {
                schedule.kind = kind;
                Document { schedule, costs, measures }
            },
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn the_simulators_costs_survive(costs in (1usize..5).prop_flat_map(any_simulator_costs)) {
        let file = JsonCosts::from(&costs);
        prop_assert_eq!(file.fault(costs.stages.len(), ""), None);
        prop_assert_eq!(file.for_simulator(costs.stages.len()), costs);
    }

    /// A file of costs, as a run writes it, and a schedule's JSON.
    #[test]
    fn what_is_read_again_simulates_the_same(
        costs in any_simulator_costs(4), recompute: bool, late: bool,
    ) {
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 6, unit: 3 };
        let sync = if late { OptimizerSync::Late } else { OptimizerSync::Barrier };
        let options = LowerOptions { recompute, sync, replicas: true, ..LowerOptions::default() };
        let schedule = lower(&generate("zeropp", &shape).unwrap(), &options);
        let timeline = simulate::simulate(&schedule, &costs).unwrap();
        let mut file = Vec::new();
        crate::costs::write(&costs, "a run", None, &mut file).unwrap();
        let table = Table::from_json(&String::from_utf8(file).unwrap()).unwrap();
        let again = table.of(4, ALONE, None).unwrap();
        prop_assert_eq!(&simulate::simulate(&schedule, &again).unwrap(), &timeline);
        let document =
            Document { schedule, costs: Some(JsonCosts::from(&costs)), measures: None };
        let read = read(&text(&document)).unwrap();
        let again = read.costs.unwrap().for_simulator(4);
        prop_assert_eq!(&simulate::simulate(&read.schedule, &again).unwrap(), &timeline);
    }

    #[test]
    fn any_document_survives(document in any_document()) {
        prop_assert_eq!(read(&text(&document)).unwrap(), document);
    }

    #[test]
    fn a_good_file_with_one_byte_changed_is_read_or_refused(
        document in any_document(), at in any::<prop::sample::Index>(), byte in 0u8..128,
    ) {
        let mut file = text(&document).into_bytes();
        let at = at.index(file.len());
        file[at] = byte;
        if let Ok(document) = read(&String::from_utf8_lossy(&file)) {
            prop_assert_eq!(read(&text(&document)).unwrap(), document);
        }
    }
}
