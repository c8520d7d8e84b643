//! Predictions against what the schedule's text says.

use proptest::prelude::*;

use super::*;
use crate::action::{ACTIONS, HeldKind, Names};
use crate::lower::{LowerOptions, OptimizerSync, lower};
use crate::schedules::{KINDS, Shape, generate, generate_sliced, generate_split};

/// One kind of byte a power of 1000 apart from the next, so that sums can be read.
const BYTES: StageBytes = StageBytes {
    input: 1,
    activation: 10,
    stash: 7,
    context: 0,
    context_gradient: 0,
    weights: 100,
    in_layers: false,
    packed_forward: 0,
    packed_backward: 0,
    packed_in_forward: 0,
    packed_output: 0,
    packed_redone: 0,
    workspace: 0,
    inside: BackwardMoment { kept: 0, stash: 0 },
    inside_by_layer: BackwardMoment { kept: 0, stash: 0 },
    stash_of_layer: 0,
    layerwise: None,
    gradient: 1000,
    gradient_in_forward: 0,
    message: 3,
    keeps_first_gradient: false,
    gradient_shard: 500,
    gradient_due: 0,
    update: 0,
    gather_input: 0,
    gather_read: 0,
    reduced: 0,
    replica_reduced: 0,
    head: HeadBytes { input: 0, sums: 0, lse: 0, gradient: 0 },
};

fn peaks(kind: &str, shape: Shape, options: &LowerOptions) -> Vec<MemoryBytes> {
    let lowered = lower(&generate(kind, &shape).unwrap(), options);
    predict(&lowered, &vec![BYTES; shape.stages()])
}

#[test]
fn worked_by_hand() {
    let shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 3, unit: 3 };
    let rank_0 = peaks("zeropp", shape, &LowerOptions::default())[0];
    // 0F0..2 and 2F0..2; two stages at once; the gradients of stages 2 and 0, one after the other,
    // and then their shards; 2B0 and 2B1 stash before 2W0; a message is posted while the one before
    // it still waits.
    let want = MemoryBytes {
        activation: 60,
        gathered: 200,
        packed_weights: 0,
        gradient: 1000,
        gradient_shard: 1000,
        weight_stash: 14,
        communication: 6,
        ..MemoryBytes::default()
    };
    assert_eq!(rank_0, want);
}

/// What a device has on its host comes in one stage ahead of the update, the first stage's at the
/// end of the step before.
#[test]
fn two_stages_of_what_the_optimizer_keeps_are_here_for_an_update() {
    let shape = Shape { pp: 1, virtual_stages: 4, micro_batches: 4, unit: 2 };
    let lowered = lower(&generate("zeropp", &shape).unwrap(), &LowerOptions::default());
    // The third stage is frozen.
    let stages = [5, 7, 0, 11].map(|update| StageBytes { update, ..BYTES });
    let mut ledger = Ledger::new(&lowered.ranks[0], &stages);
    let mut held = vec![ledger.now().optimizer];
    for action in &lowered.ranks[0] {
        ledger.run(action);
        held.push(ledger.now().optimizer);
    }
    held.dedup();
    assert_eq!(held, [5, 5 + 7, 7 + 11, 11, 0, 5]);
    assert_eq!(ledger.peak().optimizer, 18);
    let forward = lowered.ranks[0].iter().filter(|a| a.computes().all(|t| t.kind == Compute::F));
    let forward: Vec<Action> = forward.copied().collect();
    assert_eq!(Ledger::new(&forward, &stages).now().optimizer, 0, "forwards alone update nothing");
}

/// Copies of gathered weights come with the first product that reads them and go with the weights.
#[test]
fn packed_weights_live_from_the_first_product_to_the_free() {
    let shape = Shape { pp: 1, virtual_stages: 2, micro_batches: 4, unit: 2 };
    let lowered = lower(&generate("zeropp", &shape).unwrap(), &LowerOptions::default());
    let block = StageBytes { packed_forward: 20, packed_backward: 30, ..BYTES };
    let head = StageBytes { packed_forward: 25, packed_in_forward: 5, ..block };
    let program = &lowered.ranks[0];
    let stages = [block, head];
    let mut ledger = Ledger::new(program, &stages);
    let mut packed = [None; 2];
    for action in program {
        ledger.run(action);
        match *action {
            Action::AllGather { stage } => packed[stage] = Some([0; 3]),
            Action::Free { stage } => packed[stage] = None,
            Action::Compute { kind, stage, .. } => {
                let here = packed[stage].as_mut();
                match kind {
                    Compute::F if stage == 0 => here.unwrap()[0] = 20,
                    Compute::F => (here.unwrap()[0], packed[1].as_mut().unwrap()[2]) = (25, 5),
                    Compute::B | Compute::BW => here.unwrap()[1] = 30,
                    Compute::W | Compute::R => {}
                }
            }
            _ => {}
        }
        let want: u64 = packed.iter().flatten().flatten().sum();
        assert_eq!(ledger.now().packed_weights, want, "after {action:?}");
    }
    assert_eq!(ledger.now().packed_weights, 0);
    assert!(ledger.peak().packed_weights >= 60, "the last stage has all three");
    // Forwards alone make nothing for backwards.
    let forward = Schedule { ranks: vec![forwards(program)], ..lowered.clone() };
    assert_eq!(predict(&forward, &stages)[0].packed_weights, 25);
}

/// R makes no copies for products that give nothing but an output, nor for layers that B makes
/// again.
#[test]
fn a_stage_that_is_gathered_to_be_done_again_has_fewer_packed_weights() {
    let options = LowerOptions { recompute: true, ..LowerOptions::default() };
    let shape = Shape { pp: 1, virtual_stages: 2, micro_batches: 2, unit: 2 };
    let lowered = lower(&generate("bf-pp", &shape).unwrap(), &options);
    let block = StageBytes { packed_forward: 20, packed_backward: 30, ..BYTES };
    let block = StageBytes { packed_output: 7, packed_redone: 11, ..block };
    let stages = [block; 2];
    let mut ledger = Ledger::new(&lowered.ranks[0], &stages);
    let mut after = Vec::new();
    for action in &lowered.ranks[0] {
        ledger.run(action);
        if let Action::Compute { kind, stage: 0, micro_batch: 0 } = action {
            after.push((*kind, ledger.now().packed_weights));
        }
    }
    let [forward, again, backward] = after[..] else { panic!("{after:?}") };
    assert_eq!(forward, (Compute::F, 38));
    assert_eq!([again.1, backward.1], [20, 61], "{after:?}");
}

/// The gathers, forwards and frees of a program up to its first backward, with frees at the end.
fn forwards(program: &[Action]) -> Vec<Action> {
    let is = |a: &Action| matches!(a, Action::AllGather { .. } | Action::Free { .. });
    let f = |a: &Action| a.computes().any(|c| c.kind == Compute::F);
    let backward = |a: &Action| a.computes().any(|c| c.kind == Compute::B || c.kind == Compute::BW);
    let before = program.iter().take_while(|a| !backward(a));
    before.filter(|a| is(a) || f(a)).copied().collect()
}

/// A head makes its part of the gradient in F, and needs room for its logits meanwhile.
#[test]
fn gradients_made_in_forward_exist_from_the_first_forward() {
    let head = StageBytes { gradient_in_forward: 600, workspace: 5, ..BYTES };
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 4, unit: 4 };
    let lowered = lower(&generate("gpipe", &shape).unwrap(), &LowerOptions::default());
    let stages = [BYTES, head];
    let over = |actions: usize| {
        let mut ledger = Ledger::new(&lowered.ranks[1], &stages);
        lowered.ranks[1].iter().take(actions).for_each(|a| ledger.run(a));
        (ledger.now(), ledger.peak())
    };
    let program = &lowered.ranks[1];
    let is = |kind: Compute| {
        move |a: &Action| a.computes().next().is_some_and(|t| t.kind == kind && t.micro_batch == 0)
    };
    let first = program.iter().position(is(Compute::F)).unwrap() + 1;
    let (now, peak) = over(first);
    assert_eq!((now.gradient, now.activation, peak.activation), (600, 10, 15));
    let back = program.iter().position(is(Compute::BW)).unwrap();
    let (now, peak) = over(back);
    assert_eq!((now.gradient, now.activation, peak.activation), (600, 40, 45));
    assert_eq!(over(back + 1).0.gradient, 1000);
    assert_eq!(over(program.len()).0, MemoryBytes::default());
    // Kept as the sum of units, it counts as that from the start.
    let kept = StageBytes { keeps_first_gradient: true, ..head };
    assert_eq!(predict(&lowered, &[kept; 2])[1].gradient, 0);
    // Units whose forwards come before the reduction of the one before have a part of their own.
    let stages = [head; 2];
    let ahead = Schedule {
        kind: "by hand".into(),
        placement: vec![0],
        units: vec![1, 1],
        ranks: vec![vec![
            Action::AllGather { stage: 0 },
            Action::compute(Compute::F, 0, 0),
            Action::compute(Compute::F, 0, 1),
            Action::compute(Compute::BW, 0, 0),
            Action::ReduceScatter { stage: 0 },
            Action::compute(Compute::BW, 0, 1),
            Action::Free { stage: 0 },
            Action::ReduceScatter { stage: 0 },
            Action::OptimizerStep,
        ]],
        ..Schedule::default()
    };
    assert_eq!(predict(&ahead, &stages[..1])[0].gradient, 2000);
    let mut ledger = Ledger::new(&ahead.ranks[0], &stages);
    let mut seen = Vec::new();
    for action in &ahead.ranks[0] {
        ledger.run(action);
        seen.push(ledger.now().gradient);
    }
    assert_eq!(seen, [0, 600, 1200, 1600, 1600, 2000, 2000, 1000, 0]);
}

/// What goes into a gather or comes out of a reduction, where it is memory of its own.
#[test]
fn collectives_need_room_until_they_are_waited_for() {
    let shape = Shape { pp: 1, virtual_stages: 1, micro_batches: 4, unit: 2 };
    let quiet = StageBytes { message: 0, ..BYTES };
    let peak = |stage: StageBytes, replicas: bool| {
        let options = LowerOptions { replicas, ..LowerOptions::default() };
        let lowered = lower(&generate("zeropp", &shape).unwrap(), &options);
        predict(&lowered, &[stage])[0].communication
    };
    assert_eq!(peak(quiet, true), 0);
    assert_eq!(peak(StageBytes { gather_input: 5, ..quiet }, false), 5);
    // The reduction before has retired.
    assert_eq!(peak(StageBytes { reduced: 20, ..quiet }, false), 20);
    let replica = StageBytes { reduced: 20, replica_reduced: 300, ..quiet };
    assert_eq!(peak(replica, false), 20, "nothing is summed over replicas");
    assert_eq!(peak(replica, true), 320, "the last reduction is under way until the optimizer");
}

/// The kinds have their peaks at different times.
#[test]
fn the_peak_is_at_most_the_sum_of_peaks_by_kind() {
    for (kind, virtual_stages) in [("zeropp", 2), ("1f1b", 1), ("zb-v", 2)] {
        let shape = Shape { pp: 3, virtual_stages, micro_batches: 9, unit: 5 };
        let shape = Shape { unit: if kind == "zeropp" { 5 } else { 9 }, ..shape };
        let lowered = lower(&generate(kind, &shape).unwrap(), &LowerOptions::default());
        let stages = vec![BYTES; shape.stages()];
        let (peaks, at_once) = (predict(&lowered, &stages), predict_at_once(&lowered, &stages));
        for (peak, at_once) in peaks.iter().zip(&at_once) {
            assert!(at_once.total() <= peak.total(), "{kind}");
            assert_eq!(peak.max(at_once), *peak, "{kind}: no kind is beyond its peak");
            let largest = [peak.gradient, peak.gathered, peak.activation];
            assert!(largest.iter().all(|kind| at_once.total() >= *kind), "{kind}");
        }
    }
}

#[test]
fn whole_backwards_stash_one_micro_batch() {
    let shape = Shape { pp: 3, virtual_stages: 1, micro_batches: 8, unit: 8 };
    for (rank, peak) in peaks("1f1b", shape, &LowerOptions::default()).iter().enumerate() {
        assert_eq!(peak.weight_stash, 7);
        assert_eq!(peak.activation, 10 * (3 - rank as u64));
        assert_eq!((peak.gathered, peak.gradient), (100, 1000));
    }
}

#[test]
fn gradients_that_come_in_order_take_one_buffer_and_others_live_until_the_next_reduction() {
    // ZeroPP's W are in the order of their B, so that each reduction ends before the next gradient
    // is begun. Breadth-first whole backwards add to one while that of the stage above is reduced;
    // ZB-V adds to both of a rank's stages at a time.
    let kinds = [
        ("zeropp", 3, [1000; 2]),
        ("zeropp", 4, [1000; 2]),
        ("bf-pp", 3, [2000; 2]),
        ("zb-v", 2, [2000; 2]),
    ];
    for (kind, virtual_stages, gradients) in kinds {
        let shape = Shape { pp: 2, virtual_stages, micro_batches: 12, unit: 6 };
        let peaks = peaks(kind, shape, &LowerOptions::default());
        assert_eq!([peaks[0].gradient, peaks[1].gradient], gradients, "{kind}");
    }
}

/// A stage of several layers keeps their inputs, and makes one whole at a time.
#[test]
fn a_stage_of_several_layers_is_done_again_layer_by_layer() {
    let shape = Shape { pp: 1, virtual_stages: 2, micro_batches: 3, unit: 3 };
    let options = LowerOptions { recompute: true, ..LowerOptions::default() };
    let lowered = lower(&generate("zeropp", &shape).unwrap(), &options);
    let inside = BackwardMoment { kept: 6, stash: 5 };
    let layers =
        LayerwiseBytes { inputs: 4, redone: 9, most: 11, inside, ..LayerwiseBytes::default() };
    let stages = [StageBytes { layerwise: Some(layers), message: 0, ..BYTES }, BYTES];
    let mut ledger = Ledger::new(&lowered.ranks[0], &stages);
    let mut seen = Vec::new();
    for action in &lowered.ranks[0] {
        ledger.run(action);
        if action.computes().any(|task| task.stage == 0 && task.kind != Compute::W) {
            seen.push((ledger.now().activation, ledger.peak().activation));
        }
    }
    // Three forwards; then R and B of each micro-batch, with the last stage's three in between.
    assert_eq!(seen[..3], [(4, 4), (8, 8), (12, 12)]);
    let after = |peak| [(17, peak), (8, peak), (13, peak), (4, peak), (9, peak), (0, peak)];
    let most = ledger.peak().activation;
    assert_eq!(seen[3..], after(most));
    assert_eq!(most, 12 + 10, "the last stage's only one");
}

#[test]
fn a_first_gradient_that_stays_is_counted_where_it_stays() {
    let peak = |micro_batches, keeps_first_gradient| {
        let shape = Shape { pp: 2, virtual_stages: 2, micro_batches, unit: 3 };
        let lowered = lower(&generate("zeropp", &shape).unwrap(), &LowerOptions::default());
        let held = predict(&lowered, &[StageBytes { keeps_first_gradient, ..BYTES }; 4])[0];
        (held.gradient, held.gradient_shard)
    };
    assert_eq!(peak(3, false), (1000, 1000));
    assert_eq!(peak(3, true), (0, 2000), "the one unit's is the sum");
    assert_eq!(peak(6, false), (1000, 1000));
    assert_eq!(peak(6, true), (1000, 2000), "the second unit's is added to it");
}

/// The sum over the units is there from when a stage's first reduction retires to the optimizer.
#[test]
fn a_gradient_shard_comes_with_the_first_reduction() {
    let shape = Shape { pp: 1, virtual_stages: 2, micro_batches: 4, unit: 2 };
    let lowered = lower(&generate("zeropp", &shape).unwrap(), &LowerOptions::default());
    let stages = [BYTES, StageBytes { gradient_shard: 700, ..BYTES }];
    let mut ledger = Ledger::new(&lowered.ranks[0], &stages);
    let mut seen = vec![(String::new(), 0)];
    for action in &lowered.ranks[0] {
        ledger.run(action);
        let shard = ledger.now().gradient_shard;
        if shard != seen.last().unwrap().1 {
            seen.push((action.to_string(), shard));
        }
    }
    let want = [("", 0), ("END1", 700), ("END0", 1200), ("STEP", 0)];
    assert_eq!(seen, want.map(|(action, bytes)| (action.to_string(), bytes)));
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: 300,
        ..Default::default()
    })]

    /// Activations are those of one unit whatever B is: (V−1)·U whole stages and the warm-up of the
    /// last one; with recomputation (V−1)·U inputs, and one recomputed stage or the warm-up.
    #[test]
    fn zeropp_activations_are_those_of_one_unit(
        pp in 1usize..6, v in 1usize..5, unit in 1usize..12, units in 1usize..9,
        recompute: bool, prefetch in 0usize..3,
    ) {
        let shape = Shape { pp, virtual_stages: v, micro_batches: units * unit, unit };
        let options = LowerOptions { recompute, prefetch, ..Default::default() };
        for (rank, peak) in peaks("zeropp", shape, &options).iter().enumerate() {
            let blocks = (v - 1) * unit;
            let warm_up = unit.min(2 * (pp - rank) - 1);
            let want = match recompute {
                false => 10 * (blocks + warm_up),
                true if v == 1 => warm_up - 1 + 10,
                true => (blocks + 10 * warm_up).max(blocks - 1 + 10),
            };
            prop_assert_eq!(peak.activation, want as u64);
            prop_assert!(peak.gathered <= 100 * (1 + prefetch as u64));
            prop_assert_eq!(peak.gradient, 1000);
        }
    }

    /// Everything taken is given back by the end of the program.
    #[test]
    fn nothing_is_left(
        pp in 1usize..5, v in 1usize..4, micro_batches in 1usize..10, unit in 1usize..6,
        kind in 0usize..3, recompute: bool, out in 0usize..4,
    ) {
        let kind = ["zeropp", "gpipe", "1f1b"][kind];
        let v = if kind == "1f1b" { 1 } else { v };
        let shape = Shape { pp, virtual_stages: v, micro_batches, unit };
        let options = LowerOptions { recompute, out, ..Default::default() };
        let lowered = lower(&generate(kind, &shape).unwrap(), &options);
        let stages = vec![BYTES; shape.stages()];
        for program in &lowered.ranks {
            let mut ledger = Ledger::new(program, &stages);
            program.iter().for_each(|a| ledger.run(a));
            prop_assert_eq!(ledger.now(), MemoryBytes::default());
        }
    }
}

/// What is held of each kind that comes and goes.
fn of(held: &MemoryBytes) -> [(HeldKind, u64); 8] {
    [
        (HeldKind::Gathered, held.gathered),
        (HeldKind::Packed, held.packed_weights),
        (HeldKind::Gradient, held.gradient),
        (HeldKind::GradientShard, held.gradient_shard),
        (HeldKind::Activation, held.activation),
        (HeldKind::Stash, held.weight_stash),
        (HeldKind::Communication, held.communication),
        (HeldKind::Host, held.host_activation),
    ]
}

/// Programs of samples in slices: the first backward of each makes room for the gradients of the
/// keys and values of all its slices.
fn in_slices(bytes: StageBytes) -> [(Schedule, Vec<StageBytes>); 2] {
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 2, unit: 2 };
    // One with B and W in one, as a file may have it.
    [false, true].map(|joined| {
        let mut sliced = generate_sliced("zeropp", &shape, &[512, 256, 256]).unwrap();
        if joined {
            let at = |a: &Action, kind| matches!(a, Action::Compute { kind: k, .. } if *k == kind);
            let join = |action: &Action| match *action {
                Action::Compute { kind: Compute::B, stage, micro_batch } => {
                    Action::compute(Compute::BW, stage, micro_batch)
                }
                other => other,
            };
            for rank in &mut sliced.ranks {
                *rank = rank.iter().filter(|a| !at(a, Compute::W)).map(join).collect();
            }
        }
        let sliced = lower(&sliced, &LowerOptions::default());
        let stages = vec![StageBytes { context_gradient: 997, ..bytes }; sliced.cost_entries()];
        (sliced, stages)
    })
}

/// Programs with split heads, one of them with a rank that has no blocks.
fn split_heads(bytes: StageBytes) -> [(Schedule, Vec<StageBytes>); 2] {
    let shape = Shape { pp: 4, virtual_stages: 2, micro_batches: 4, unit: 2 };
    [[3, 1, 5, 2], [3, 1, 5, 0]].map(|blocks| {
        let split = generate_split("zeropp", &shape, &blocks, None).unwrap();
        let split = lower(&split, &LowerOptions::default());
        let head = HeadBytes { input: 7, sums: 3, lse: 5, gradient: 19 };
        let stages = vec![StageBytes { gradient_in_forward: 0, head, ..bytes }; split.cells()];
        (split, stages)
    })
}

/// What every action does to memory in all programs is what its row says: no more, and all of it.
#[test]
fn every_action_takes_and_gives_the_memory_that_its_row_says() {
    let bytes = StageBytes {
        packed_forward: 20,
        packed_backward: 30,
        packed_in_forward: 5,
        workspace: 5,
        gradient_in_forward: 600,
        gather_input: 11,
        reduced: 13,
        replica_reduced: 17,
        ..BYTES
    };
    let mut seen = vec![(Vec::new(), Vec::new()); ACTIONS.len()];
    let mut walk = |program: &[Action], mut ledger: Ledger| {
        for action in program {
            let before = of(&ledger.now());
            ledger.run(action);
            let (takes, gives) = &mut seen[action.kind() as usize];
            for ((held, before), (_, after)) in before.into_iter().zip(of(&ledger.now())) {
                let changes = if after > before { &mut *takes } else { &mut *gives };
                if before != after && !changes.contains(&held) {
                    changes.push(held);
                }
            }
        }
    };
    for (kind, pp) in KINDS.iter().flat_map(|kind| [(kind, 1), (kind, 2)]) {
        let virtual_stages = kind.stages.default_number();
        let shape = Shape { pp, virtual_stages, micro_batches: 8, unit: 4 };
        let Ok(compact) = generate(kind.name, &shape) else { continue };
        for (recompute, keeps_first_gradient, out) in
            [(false, false, 0), (true, true, 0), (false, true, 1), (true, false, usize::MAX)]
        {
            let sync = if recompute { OptimizerSync::Late } else { OptimizerSync::Barrier };
            let replicas = true;
            let options = LowerOptions { recompute, replicas, sync, out, ..Default::default() };
            // Of unequal sizes, so that none takes as much as another gives.
            let in_layers = out == 0;
            let stage =
                |s| StageBytes { keeps_first_gradient, in_layers, reduced: 13 + s, ..bytes };
            let stages: Vec<_> = (0..shape.stages() as u64).map(stage).collect();
            // And as programs of before had it.
            let mut before = lower(&compact, &options).ranks;
            before.iter().for_each(|program| walk(program, Ledger::new(program, &stages)));
            before.iter_mut().for_each(|p| p.retain(|a| !matches!(a, Action::Retire { .. })));
            before.iter().for_each(|program| walk(program, Ledger::new(program, &stages)));
        }
    }
    let gather = [Action::AllGather { stage: 0 }, Action::Free { stage: 0 }];
    walk(&gather, Ledger::new(&gather, &[bytes]));
    for (schedule, stages) in split_heads(bytes).into_iter().chain(in_slices(bytes)) {
        for (rank, program) in schedule.ranks.iter().enumerate() {
            walk(program, Ledger::of(&schedule, rank, &stages));
        }
    }
    let mut wrong = Vec::new();
    for (row, (takes, gives)) in ACTIONS.iter().zip(seen) {
        for (verb, said, seen) in [("takes", row.takes, takes), ("gives", row.gives, gives)] {
            // What one half of a pair takes the other may give at once.
            let is_pair = row.names == Names::Pair;
            let all = said.iter().all(|held| is_pair || seen.contains(held));
            if !all || !seen.iter().all(|held| said.contains(held)) {
                wrong.push(format!("{:?} {verb} {seen:?}, and its row says {said:?}", row.kind));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The room for what comes out of a reduction is taken with the first W that runs layer by layer,
/// and, where a sum over the replicas follows, that for the share and for the sum.
#[test]
fn w_that_run_layer_by_layer_take_the_room_of_their_reduction() {
    let stage = StageBytes { reduced: 20, replica_reduced: 300, ..BYTES };
    for (replicas, room, shard) in [(false, 20, 0), (true, 320, 500)] {
        let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 4, unit: 4 };
        let options = LowerOptions { replicas, ..LowerOptions::default() };
        let program = lower(&generate("zb-h1", &shape).unwrap(), &options);
        let actions = &program.ranks[1];
        let runs = |at: &usize| crate::ir::LayerRun::at(actions, *at).is_some();
        let first = (0..actions.len()).find(runs).unwrap();
        assert!(actions[first..].iter().filter(|a| a.computes().next().is_some()).count() > 1);
        let stages = [stage; 2];
        let mut ledger = Ledger::of(&program, 1, &stages);
        actions[..first].iter().for_each(|a| ledger.run(a));
        assert_eq!((ledger.now().communication, ledger.now().gradient_shard), (0, 0));
        ledger.run(&actions[first]);
        assert_eq!((ledger.now().communication, ledger.now().gradient_shard), (room, shard));
        actions[first + 1..].iter().for_each(|a| ledger.run(a));
        assert_eq!(ledger.now(), MemoryBytes::default());
        assert_eq!(ledger.peak().communication, room);
    }
}

/// Of a last backward that runs layer by layer with its W, one layer's stash is there at a time;
/// the room of its reduction is taken as it begins.
#[test]
fn a_backward_by_layer_keeps_one_layer_for_w() {
    let inside_by_layer = BackwardMoment { kept: 4, stash: 5000 };
    let by_layer = StageBytes { reduced: 20, stash_of_layer: 6000, inside_by_layer, ..BYTES };
    let shape = Shape { pp: 2, virtual_stages: 1, micro_batches: 2, unit: 2 };
    for kind in ["zb-h1", "1f1b"] {
        let program = lower(&generate(kind, &shape).unwrap(), &LowerOptions::default());
        let actions = &program.ranks[0];
        let is_backward = |action: &Action| {
            let mut tasks = action.computes();
            tasks.any(|t| t.micro_batch == 1 && matches!(t.kind, Compute::B | Compute::BW))
        };
        let backward = actions.iter().position(is_backward).unwrap();
        for (in_layers, room) in [(true, 20), (false, 0)] {
            let stages = [StageBytes { in_layers, ..by_layer }; 2];
            let mut ledger = Ledger::of(&program, 0, &stages);
            actions[..backward].iter().for_each(|a| ledger.run(a));
            assert_eq!((ledger.now().gradient, ledger.now().weight_stash), (1000, 0), "{kind}");
            ledger.run(&actions[backward]);
            let stash = if kind == "zb-h1" && !in_layers { 7 } else { 0 };
            assert_eq!(ledger.now().weight_stash, stash, "{kind}");
            assert_eq!((ledger.now().activation, ledger.now().communication), (0, room), "{kind}");
            actions[backward + 1..].iter().for_each(|a| ledger.run(a));
            assert_eq!(ledger.now(), MemoryBytes::default());
            let (peak, at_once) = (ledger.peak(), ledger.at_once());
            if in_layers {
                assert_eq!(peak.weight_stash, 6000, "{kind}");
                let inside = (at_once.activation, at_once.weight_stash, at_once.communication);
                assert_eq!(inside, (4, 5000, room), "{kind}");
            } else {
                assert_eq!(peak.weight_stash, 7, "{kind}");
            }
        }
    }
}
