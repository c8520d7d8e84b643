//! ZeroPP's tables 2 and 4.

use std::fmt::Write;

use zeropp_schedule::schedules::Shape;
use zeropp_schedule::simulate::{Costs, simulate};
use zeropp_search::generate;

use super::TableCell;
use crate::baselines::{ActivationSaving, Baseline, KernelSet, TensorLayout, step};
use zeropp_plan::bytes::RunState;
use zeropp_plan::exact::{Planned, Simulation};
use zeropp_plan::layout::{ComputeSettings, Fixed, HeadSplit, Job, Layout, Recompute};
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::LayoutPlan;
use zeropp_plan::search::Models;
use zeropp_plan::{PlanError, machines};

/// Table 4's rows: model, GPUs, replicas, batch, and memory in GB and seconds of 3D, 3D with
/// sequence parallelism, ZB-V and ZeroPP.
pub(super) type Row = (&'static str, usize, usize, usize, [[f64; 2]; 4]);
pub(super) const TABLE_4: [Row; 2] = [
    ("14.6b", 32, 1, 192, [[10.5, 7.5], [9.6, 9.1], [20.8, 8.4], [12.1, 4.1]]),
    ("28.3b", 64, 2, 256, [[21.6, 12.1], [18.9, 11.9], [40.6, 13.3], [23.8, 9.2]]),
];
/// Bytes within which zeropp's own runs of both models are to stay, with stages of one layer: 1.2
/// and 0.97 of the paper's.
const OWN_LIMITS: [u64; 2] = [(135 << 30) / 10, (215 << 30) / 10];
/// P, and the ranks that tensor parallelism or ZeRO-3 has, in both models.
pub(super) const PP: usize = 4;
pub(super) const INSIDE: usize = 8;

/// What Table 4 comes to.
pub(super) struct Table4 {
    /// Seconds of a step, method by method, of both models.
    pub(super) times: Vec<TableCell>,
    /// Memory in GB, likewise; ZeroPP's by the paper's own formula.
    pub(super) memory: Vec<TableCell>,
    /// ZeroPP's layouts that the formula finds for both models, simulated, with GB as a run of
    /// zeropp predicts them; and the fastest with stages of one layer within [`OWN_LIMITS`].
    found: Vec<[(Planned, f64); 2]>,
    /// Stages a rank and samples that the memory of 3D is nearest to.
    found_3d: (usize, usize),
    /// Messages of each micro-batch that ZB-V's memory is nearest with if they are never freed.
    messages: usize,
}

/// Bytes that mixed precision keeps of a parameter: bf16 and its gradient, an fp32 copy and two
/// moments.
const PARAMETER_BYTES: f64 = 16.0;

/// GB of a baseline.
pub(super) fn gb(ours: &Baseline) -> f64 {
    (PARAMETER_BYTES * ours.parameters + ours.activations) / 1e9
}

/// ZeroPP's Table 4. V, U, b and the baselines' settings are not stated: those are taken whose
/// memory comes nearest the paper's, never those whose time does. Nothing is recomputed in the
/// baselines, since their published rates leave no room for it ([`recomputed`]).
///
/// # Errors
/// No layout at all.
pub(super) fn table_4() -> Result<Table4, PlanError> {
    let machine = machines::named("a800")?;
    let (interleave, micro_batch) = nearest_3d()?;
    let found_3d = (interleave, micro_batch);
    let b = nearest_b()?;
    let messages = unfreed_messages(micro_batch)?;
    let (times, memory, found) = (Vec::new(), Vec::new(), Vec::new());
    let mut table = Table4 { times, memory, found, found_3d, messages };
    for (row, limit) in TABLE_4.into_iter().zip(OWN_LIMITS) {
        let (name, gpus, dp, batch, [plain, sequence, zb_v, zeropp]) = row;
        let model = ModelSizes::of_a_paper(name).expect("known");
        let method = |saving, interleave, micro_batch, zero_bubble| {
            let layout = tensor_layout(dp, interleave, micro_batch, saving);
            step(&machine, &model, batch, &TensorLayout { zero_bubble, ..layout })
        };
        for (words, ours, [held, seconds]) in [
            ("3D", method(ActivationSaving::None, interleave, micro_batch, false), plain),
            (
                "3D + SP",
                method(ActivationSaving::Sequence, interleave, micro_batch, false),
                sequence,
            ),
            ("ZB-V + TP", method(ActivationSaving::None, 2, micro_batch, true), zb_v),
        ] {
            let name = format!("{name} {words} (baseline)");
            table.times.push(TableCell { name: name.clone(), paper: seconds, ours: ours.step_s });
            let unfreed = if words == "ZB-V + TP" { messages } else { 0 };
            let unfreed = unfreed_gb(&model, dp, batch, micro_batch, unfreed);
            table.memory.push(TableCell { name, paper: held, ours: gb(&ours) + unfreed });
        }
        let (gb, layout) = nearest(&model, gpus, dp, batch, b, zeropp[0])?;
        let job = job(model.clone(), gpus, batch)?;
        let planned = simulated(&job, &mut Models::new(&job), &layout)?;
        let held = planned.worst().1.total() as f64 / 1e9;
        let found = [(planned, held), within(&job, &layout, limit)?];
        let name = format!("{name} ZeroPP");
        let ours = found[0].0.step_s;
        table.times.push(TableCell { name: name.clone(), paper: zeropp[1], ours });
        table.memory.push(TableCell { name, paper: zeropp[0], ours: gb });
        table.found.push(found);
    }
    Ok(table)
}

/// The fastest run of `layout` with stages of one layer within `memory` bytes, with the GB that it
/// holds.
fn within(job: &Job, layout: &Layout, memory: u64) -> Result<(Planned, f64), PlanError> {
    let fixed = Fixed {
        pp: Some(PP),
        zero3: Some(INSIDE),
        dp: Some(layout.dp),
        virtual_stages: Some(job.model.decoder.layers / PP),
        unit: Some(layout.unit),
        micro_batch_size: Some(layout.micro_batch_size),
        recompute: Some(layout.recompute),
        schedule: Some(layout.schedule.into()),
        head: HeadSplit::Auto,
        ..Fixed::default()
    };
    let plan = LayoutPlan::new(&Job { memory, fixed, ..job.clone() }, "")?;
    let best = &plan.layouts[0];
    Ok((best.planned.clone(), best.worst_bytes as f64 / 1e9))
}

/// Megatron's 3D parallelism as table 4 has it.
pub(super) fn tensor_layout(
    dp: usize,
    interleave: usize,
    micro_batch: usize,
    saving: ActivationSaving,
) -> TensorLayout {
    TensorLayout {
        tp: INSIDE,
        pp: PP,
        dp,
        interleave,
        micro_batch,
        saving,
        kernels: KernelSet::Fused,
        zero_bubble: false,
    }
}

/// Shares of the peak, in per cent: what Megatron published for 22B with full recomputation, the
/// larger model's layer on as many tensor ranks and without a pipeline; what the paper's 3D has on
/// the larger model; and what it would do in all, if it recomputed everything.
fn recomputed() -> [f64; 3] {
    let peak = machines::named("a100").map_or(f64::NAN, |machine| machine.flops_per_s);
    let share = |model: &str, samples: usize, gpus: usize, seconds: f64| {
        let model = ModelSizes::of_a_paper(model).expect("known");
        let tokens = (samples * model.seq) as f64;
        let d = model.decoder;
        // The paper counts both halves of attention's mask (section 5).
        let (h, s) = (d.hidden as f64, model.seq as f64);
        let each = 72.0 * d.layers as f64 * h * h * (1.0 + s / (6.0 * h));
        let head = 6.0 * h * d.vocabulary as f64;
        100.0 * (each + head) * tokens / gpus as f64 / seconds / peak
    };
    let (name, gpus, _, batch, [[_, seconds], ..]) = TABLE_4[1];
    let plain = share(name, batch, gpus, seconds);
    [share("22b", 4, 8, 1.42), plain, 4.0 / 3.0 * plain]
}

pub(super) fn job(model: ModelSizes, gpus: usize, global_batch: usize) -> Result<Job, PlanError> {
    let machine = machines::named("a800")?;
    let memory = machine.memory_bytes as u64;
    let (compute, fixed) = (ComputeSettings::GPU, Fixed::default());
    let state = RunState::uniform(2);
    Ok(Job { model, machine, gpus, memory, global_batch, compute, state, fixed })
}

pub(super) fn simulated(
    job: &Job,
    models: &mut Models,
    layout: &Layout,
) -> Result<Planned, PlanError> {
    let stages = models.stages(job, layout);
    let (stages, blocks) = stages.ok_or_else(|| PlanError::new("a layout without stages"))?;
    Ok(Simulation::new(job, layout, &stages)?.planned(&blocks))
}

/// The stages a rank and the micro-batch of 3D whose memory is nearest the paper's in both models,
/// without sequence parallelism and with it.
fn nearest_3d() -> Result<(usize, usize), PlanError> {
    let machine = machines::named("a800")?;
    let worst = |interleave: usize, micro_batch: usize| {
        let off = TABLE_4.map(|(name, _, dp, batch, [[plain, _], [sequence, _], ..])| {
            let model = ModelSizes::of_a_paper(name).expect("known");
            let both = [(ActivationSaving::None, plain), (ActivationSaving::Sequence, sequence)];
            let off = both.map(|(saving, held)| {
                let layout = tensor_layout(dp, interleave, micro_batch, saving);
                (gb(&step(&machine, &model, batch, &layout)) / held - 1.0).abs()
            });
            off[0].max(off[1])
        });
        off[0].max(off[1])
    };
    let all = [1, 2, 4, 12].into_iter().flat_map(|v| [1, 2, 4, 8].map(|b| (v, b)));
    let best = all.min_by(|a, b| worst(a.0, a.1).total_cmp(&worst(b.0, b.1)));
    best.ok_or_else(|| PlanError::new("no layout"))
}

/// GB that a rank of ZeroPP holds by the paper's own formulas (section 4.2, table 2) and 16 bytes a
/// parameter of mixed precision: shares of weights, gradients, fp32 weights and moments; one
/// stage's weights and gradients in bf16; and 32sbh bytes of activations a layer, without
/// attention's scores and dropout's masks, of min(U, 2P − 1) micro-batches: of one stage with
/// recomputation, else of all of a rank's.
pub(super) fn by_the_formula(
    model: &ModelSizes,
    [v, u, b]: [usize; 3],
    recompute: Recompute,
) -> f64 {
    let (layers, h) = (model.decoder.layers as f64, model.decoder.hidden as f64);
    let parameters = 12.0 * layers * h * h;
    let (p, d, v) = (PP as f64, INSIDE as f64, v as f64);
    let kept = if recompute == Recompute::None { layers / p } else { layers / (p * v) };
    let activations = 32.0 * model.seq as f64 * b as f64 * h * kept;
    let whole = u.min(2 * PP - 1) as f64;
    (PARAMETER_BYTES * parameters / (p * d) + 4.0 * parameters / (p * v) + whole * activations)
        / 1e9
}

/// GB of so many messages of each micro-batch, in bf16, that a rank never frees.
fn unfreed_gb(
    model: &ModelSizes,
    dp: usize,
    batch: usize,
    micro_batch: usize,
    messages: usize,
) -> f64 {
    let message = 2 * model.seq * micro_batch * model.decoder.hidden;
    (messages * message * (batch / (dp * micro_batch))) as f64 / 1e9
}

/// How many messages of each micro-batch the paper's ZB-V has to have kept, the same number in both
/// models, for memory to be nearest the paper's: it grew with the batch, by a fault of the code
/// that was tried.
fn unfreed_messages(micro_batch: usize) -> Result<usize, PlanError> {
    let machine = machines::named("a800")?;
    let worst = |messages: usize| {
        let off = TABLE_4.map(|(name, _, dp, batch, [_, _, [held, _], _])| {
            let model = ModelSizes::of_a_paper(name).expect("known");
            let layout = tensor_layout(dp, 2, micro_batch, ActivationSaving::None);
            let ours = step(&machine, &model, batch, &TensorLayout { zero_bubble: true, ..layout });
            let unfreed = unfreed_gb(&model, dp, batch, micro_batch, messages);
            ((gb(&ours) + unfreed) / held - 1.0).abs()
        });
        off[0].max(off[1])
    };
    // A rank of two stages sends and receives an activation and a gradient of each.
    let best = (0..=8).min_by(|a, b| worst(*a).total_cmp(&worst(*b)));
    best.ok_or_else(|| PlanError::new("no number of messages"))
}

/// The samples of a micro-batch, the same in both models, with which the V and U that are found
/// come nearest the paper's memory.
fn nearest_b() -> Result<usize, PlanError> {
    let worst = |b: usize| {
        let off = TABLE_4.map(|(name, gpus, dp, batch, [.., [gb, _]])| {
            let model = ModelSizes::of_a_paper(name).expect("known");
            let found = nearest(&model, gpus, dp, batch, b, gb);
            found.map_or(f64::INFINITY, |(ours, _)| (ours / gb - 1.0).abs())
        });
        off.into_iter().fold(0.0, f64::max)
    };
    let best = (1..=8).min_by(|a, b| worst(*a).total_cmp(&worst(*b)));
    best.ok_or_else(|| PlanError::new("no layout"))
}

/// The V and U, with recomputation and micro-batches of `b`, whose memory by the formula is nearest
/// `gb`: stages of equal layers, the smallest units that have no bubble and cut a step evenly.
fn nearest(
    model: &ModelSizes,
    gpus: usize,
    dp: usize,
    batch: usize,
    b: usize,
    gb: f64,
) -> Result<(f64, Layout), PlanError> {
    let micro_batches = batch / (INSIDE * dp * b);
    let blocks = model.decoder.layers / PP;
    let unit = (2 * PP - 1..=micro_batches).find(|u| micro_batches.is_multiple_of(*u));
    let found = unit.filter(|_| batch.is_multiple_of(INSIDE * dp * b)).and_then(|unit| {
        let all = (1..=blocks).filter(|v| blocks.is_multiple_of(*v));
        let all = all.map(|v| (by_the_formula(model, [v, unit, b], Recompute::Full), v, unit));
        all.min_by(|x, y| (x.0 - gb).abs().total_cmp(&(y.0 - gb).abs()))
    });
    let (ours, virtual_stages, unit) = found.ok_or_else(|| PlanError::new("no layout"))?;
    let layout = Layout {
        pp: PP,
        zero3: INSIDE,
        dp: gpus / INSIDE / PP,
        virtual_stages,
        unit,
        micro_batches,
        micro_batch_size: b,
        recompute: Recompute::Full,
        zero1: false,
        schedule: "zeropp",
        redone: None,
        prefetch: 1,
        slices: 1,
        out: 0,
        out_later: false,
        moments: false,
    };
    Ok((ours, layout))
}

/// Table 2, simulated with F, B and W of one time: kind, its bubble in the paper's form, ours; P 4,
/// V 2, 16 micro-batches. The paper's forms are idle over work.
pub(super) fn table_2() -> Vec<TableCell> {
    let shape = |v| Shape { pp: 4, virtual_stages: v, micro_batches: 16, unit: 8 };
    let forms = [("gpipe", 1, 3.0 / 16.0), ("1f1b", 1, 3.0 / 16.0), ("interleaved", 2, 3.0 / 32.0)];
    let cell = |(kind, v, paper): (&str, usize, f64)| {
        let shape = shape(v);
        let schedule = generate(kind, &shape).expect("a shape of its own");
        let costs = Costs::uniform(shape.stages(), 1000, 1000, 1000, 0);
        let timeline = simulate(&schedule, &costs).expect("generated");
        let bubble = timeline.bubble();
        TableCell { name: format!("{kind}: idle over work"), paper, ours: bubble / (1.0 - bubble) }
    };
    forms.into_iter().map(cell).collect()
}

/// Tables 2 and 4 as text.
///
/// # Errors
/// A table that cannot be made.
pub(super) fn text(out: &mut String) -> Result<(), PlanError> {
    super::head(out, "ZeroPP, table 2: P 4, V 2, B 16, F = B = W");
    table_2().iter().for_each(|cell| super::row(out, cell, ""));
    let table = table_4()?;
    super::head(out, "\nZeroPP, table 4: memory, GB");
    table.memory.iter().for_each(|cell| super::row(out, cell, "GB"));
    for [(planned, held), (single, less)] in &table.found {
        let Layout { virtual_stages, unit, micro_batch_size, .. } = planned.layout;
        let zero1 = if single.layout.zero1 { ", ZeRO-1" } else { "" };
        let head = if single.head_blocks.is_empty() { "" } else { " and a split head" };
        let _ = writeln!(
            out,
            "ZeroPP's memory is nearest with V {virtual_stages}, U {unit}, b {micro_batch_size}; \
             zeropp's own run of it holds {held:.1} GB, with V {}{zero1}{head} {less:.1} GB in \
             {:.2} s",
            single.layout.virtual_stages, single.step_s
        );
    }
    let (interleave, micro_batch) = table.found_3d;
    let [megatron, plain, whole] = recomputed();
    let messages = table.messages;
    let _ = writeln!(
        out,
        "Found by memory alone, as the paper states none of it: 3D and 3D + SP with V {interleave} \
         and b {micro_batch}; ZB-V with b {micro_batch}. All cells have\n{PARAMETER_BYTES} bytes a \
         parameter, attention's scores not kept and no dropout. ZeroPP's are the paper's formula \
         with one stage in bf16.\nThe baselines recompute nothing: 3D has {plain:.0} % of the peak \
         on the larger model; with recomputation that were {whole:.0} %, and Megatron's\nown layer \
         of this size, on A100 and without a pipeline, has {megatron:.0} % with it. zeropp holds \
         more: gradients that are not reduced\nare fp32, a second stage is gathered ahead, and \
         embedding and head (51200 words) are counted. ZB-V's memory grew with the\nbatch in the \
         paper's runs, by a fault of the code it tried, as it says: {messages} messages of each \
         micro-batch that are never freed, of the eight\nthat a rank of two stages sends and \
         receives, give both models' memory. This, too, was found by memory alone.\n"
    );
    times(out, &table);
    Ok(())
}

/// Table 4's times and speed-ups, and where its cells disagree with each other.
fn times(out: &mut String, table: &Table4) {
    super::head(out, "ZeroPP, table 4: seconds of a step, P 4, TP or ZeRO-3 8");
    table.times.iter().for_each(|cell| super::row(out, cell, "s"));
    for (i, (name, ..)) in TABLE_4.iter().enumerate() {
        let of = |k: usize| &table.times[4 * i + k];
        let paper = of(0).paper / of(3).paper;
        let ours = of(0).ours / of(3).ours;
        super::row(out, &TableCell { name: format!("{name}: 3D over ZeroPP"), paper, ours }, "");
    }
    let work = TABLE_4.map(|(name, gpus, _, batch, _)| {
        let model = ModelSizes::of_a_paper(name).expect("known");
        let tokens = (batch * model.seq) as f64;
        model.decoder.flops_per_token(model.seq) * tokens / gpus as f64
    });
    let grow = |of: fn(&TableCell) -> f64| {
        let of = |i: usize| of(&table.times[i]);
        let ratios = (0..4).map(|k| format!("{:.2}", of(4 + k) / of(k)));
        ratios.collect::<Vec<_>>().join(", ")
    };
    let _ = writeln!(
        out,
        "A GPU's work is {:.2} times as much for 28.3b as for 14.6b. Times grow by {} in the \
         paper, by {}\nhere (3D, 3D + SP, ZB-V, ZeroPP): a tensor rank's layers are so small for \
         14.6b that gaps between kernels weigh most.",
        work[1] / work[0],
        grow(|cell| cell.paper),
        grow(|cell| cell.ours),
    );
    sequence_parallelism(out);
}

/// Milliseconds that F, B and W of a layer take in the paper's runs, of both models: of 3D, and of
/// 3D with sequence parallelism.
fn layer_ms() -> [[f64; 2]; 2] {
    TABLE_4.map(|(name, _, dp, batch, [[_, plain], [_, sequence], ..])| {
        let layers = ModelSizes::of_a_paper(name).expect("known").decoder.layers / PP;
        let passes = (batch / dp + PP - 1) * layers;
        [plain, sequence].map(|seconds| 1e3 * seconds / passes as f64)
    })
}

/// What 3D with sequence parallelism would take to be as in table 4, and why no rate of this model
/// gives it.
fn sequence_parallelism(out: &mut String) {
    let [[small, small_sp], [large, large_sp]] = layer_ms();
    let more = small_sp - small;
    // Elements of a micro-batch's hidden state: what is added to a layer is a constant, what is
    // saved goes by these.
    let [x, y] = TABLE_4.map(|(name, ..)| {
        let model = ModelSizes::of_a_paper(name).expect("known");
        (model.seq * model.decoder.hidden) as f64
    });
    let saved = (more - (large_sp - large)) / (y - x);
    let a800 = machines::named("a800").map_or(f64::NAN, |machine| machine.memory_bytes_per_s);
    // Of the eight bytes that norms keep of an element all but a rank's part, in F and twice in B,
    // written and read.
    let ours = 1e3 * 6.0 * 8.0 * (1.0 - 1.0 / INSIDE as f64) / a800;
    let _ = writeln!(
        out,
        "What is left is 3D + SP. A layer's F, B and W take {small:.1} ms in the paper's 3D of \
         14.6b and {small_sp:.1} with sequence parallelism; {large:.1} and\n\
         {large_sp:.1} of 28.3b. Sums of costs give both only if it adds {:.1} ms to every \
         layer and saves {:.1} times the passes that it saves here. What gives\nall four \
         without that is a layer that takes the longer of its work and of its launches from the \
         host: {small:.1} ms of launches, {small_sp:.1} with\nsequence parallelism, which the \
         {large_sp:.1} ms of 28.3b's work hide. This model adds gaps to work.",
        more + saved * x,
        saved / ours,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bubbles_are_those_of_table_2() {
        for cell in table_2() {
            assert!(cell.difference().abs() < 0.01, "{cell:?}");
        }
    }

    #[test]
    fn v_u_and_b_are_found_that_have_the_memory_of_table_4() {
        let table = table_4().unwrap();
        for i in [3, 7] {
            assert!(table.memory[i].difference().abs() < 0.05, "{:?}", table.memory[i]);
            assert!(table.memory[i - 3].difference().abs() < 0.10, "3D {:?}", table.memory[i - 3]);
        }
        let found: Vec<_> = table.found.iter().map(|[(p, _), _]| p.blocks[0]).collect();
        assert_eq!(found, [2, 2], "both have stages of two layers");
        for ([_, (_, own)], limit) in table.found.iter().zip(OWN_LIMITS) {
            assert!(own * 1e9 <= limit as f64, "{own} GB of {limit} bytes");
        }
    }

    #[test]
    fn zeropp_is_first_in_both_columns_of_table_4_by_as_much() {
        let table = table_4().unwrap();
        for i in [0, 4] {
            let zeropp = table.times[i + 3].ours;
            assert!(table.times[i..i + 3].iter().all(|c| c.ours > zeropp), "{:?}", table.times);
            let speedup = |of: fn(&TableCell) -> f64| of(&table.times[i]) / of(&table.times[i + 3]);
            let off = speedup(|c| c.ours) / speedup(|c| c.paper) - 1.0;
            assert!(off.abs() < 0.15, "{off} {:?}", table.times);
        }
    }

    /// One number of messages gives what ZB-V holds of both models.
    #[test]
    fn messages_that_are_never_freed_are_what_zb_v_holds_more() {
        let table = table_4().unwrap();
        for i in [2, 6] {
            assert!(table.memory[i].difference().abs() < 0.05, "{:?}", table.memory[i]);
        }
        assert!((1..=8).contains(&table.messages), "{}", table.messages);
    }

    /// Why nothing is recomputed in the baselines: with it, Megatron's own layer does less.
    #[test]
    fn the_papers_3d_does_more_than_recomputation_would_let_it() {
        let [megatron, plain, whole] = recomputed();
        assert!(plain > 1.2 * megatron && whole > 50.0, "{megatron} {plain} {whole}");
    }
}
