//! A plan for a terminal.

use zeropp_data::files::in_words;
use zeropp_schedule::memory::MemoryBytes;

use crate::exact::Planned;
use crate::layout::Recompute;
use crate::plan::{CpuFeature, LayoutPlan, OtherHead, Ranked};

/// Narrowest and widest text.
const WIDTHS: (usize, usize) = (60, 200);

/// A column: its head, what it shows of a layout, how soon it is left out where there is no room (0
/// never), and what its head stands for where that is not plain.
type Column = (&'static str, fn(&Ranked) -> String, u8, &'static str);

const COLUMNS: [Column; 21] = [
    (TOOK, took, 0, ""),
    ("step s", |r| figure(r.planned.step_s), 0, ""),
    ("tokens/s", |r| grouped(r.tokens_per_s), 0, ""),
    ("MFU", |r| percent(r.mfu), 2, ""),
    ("bubble", |r| percent(r.planned.bubble), 3, ""),
    ("memory", |r| in_words(r.worst_bytes), 0, ""),
    ("P", |r| r.planned.layout.pp.to_string(), 0, "pipeline ranks"),
    ("D", |r| r.planned.layout.zero3.to_string(), 0, "ranks that share weights (ZeRO-3)"),
    ("K", |r| r.planned.layout.dp.to_string(), 0, "replicas"),
    ("V", |r| r.planned.layout.virtual_stages.to_string(), 4, "stages on a rank"),
    ("U", unit, 5, "micro-batches of a unit"),
    ("B", |r| r.planned.layout.micro_batches.to_string(), 6, "micro-batches of a rank"),
    ("b", |r| r.planned.layout.micro_batch_size.to_string(), 7, "samples in each"),
    (SLICES, |r| r.planned.layout.slices.to_string(), 3, "slices of a sample"),
    ("again", again, 8, "computed twice to save memory"),
    (OUT, |r| r.planned.layout.out.to_string(), 4, "of a unit put out of memory"),
    ("zero1", |r| if r.planned.layout.zero1 { "yes" } else { "-" }.into(), 10, SHARED),
    ("inside", |r| in_words(r.planned.traffic.inside as u64), 12, "sent by a rank in its node"),
    ("between", |r| in_words(r.planned.traffic.between as u64), 11, "to other nodes"),
    ("schedule", schedule, 1, ""),
    (HEAD, head_of, 9, "split: all ranks have some of its rows"),
];

/// The head of the column of heads, which a plan without split ones has not.
const HEAD: &str = "head";

fn head_of(ranked: &Ranked) -> String {
    if ranked.planned.head_blocks.is_empty() { "whole" } else { "split" }.into()
}

/// What ZeRO-1 does.
const SHARED: &str = "replicas share the optimizer's state";

fn schedule(ranked: &Ranked) -> String {
    match ranked.planned.layout.pp {
        1 => "no pipeline".into(),
        _ => ranked.planned.layout.schedule.into(),
    }
}

/// Whether there is anything in a column that is not always there.
fn has_column(column: &Column, layouts: &[Ranked]) -> bool {
    match column.0 {
        TOOK => layouts.iter().any(|ranked| ranked.tried.is_some()),
        HEAD => layouts.iter().any(|ranked| !ranked.planned.head_blocks.is_empty()),
        OUT => layouts.iter().any(|ranked| ranked.planned.layout.out > 0),
        SLICES => layouts.iter().any(|ranked| ranked.planned.layout.slices > 1),
        _ => true,
    }
}

/// The head of the column of what layouts took in trials, which a plan without trials has not.
const TOOK: &str = "took s";

/// The head of the column of slices, which a plan of whole samples has not.
const SLICES: &str = "n";

/// The head of the column of micro-batches that are put out, which most plans have not.
const OUT: &str = "out";

fn took(ranked: &Ranked) -> String {
    ranked.tried.map_or_else(|| "failed".into(), |tried| figure(tried.step_s))
}

fn unit(ranked: &Ranked) -> String {
    let layout = &ranked.planned.layout;
    if layout.in_units() { layout.unit.to_string() } else { "-".into() }
}

fn again(ranked: &Ranked) -> String {
    let layout = &ranked.planned.layout;
    match (layout.recompute, layout.redone) {
        (Recompute::Auto | Recompute::None, _) => "-".into(),
        (Recompute::Selective, _) => "cheap".into(),
        (Recompute::Full, None) => "full".into(),
        (Recompute::Full, Some(first)) => format!("full {first}/{}", layout.unit),
    }
}

/// The plan in so many columns of a terminal, 60 to 200.
pub fn text(plan: &LayoutPlan, width: usize) -> String {
    let width = width.clamp(WIDTHS.0, WIDTHS.1);
    let mut blocks = vec![head(plan), table(&plan.layouts, width), numbers(plan)];
    if let Some(why) = &plan.why_first {
        blocks.push(format!("{why}."));
    }
    blocks.push(match &plan.more_memory {
        Some(more) => format!(
            "10 % more memory would take {:.1} % off the step: {}.",
            100.0 * (1.0 - more.step_s / least_s(plan)),
            more.layout
        ),
        None => "10 % more memory would buy nothing.".into(),
    });
    blocks.push(larger_batches(plan));
    if let Some(late) = &plan.late {
        let first = &plan.layouts[0];
        let held = in_words(late.worst_bytes.saturating_sub(first.worst_bytes));
        blocks.push(format!(
            "Updates that are validated late would take {:.1} % off the step of 1, for {held} \
             more: add --optimizer-sync late.",
            100.0 * (1.0 - late.step_s / first.planned.step_s),
        ));
    }
    blocks.extend(heads(plan));
    let (rank, worst) = plan.layouts[0].planned.worst();
    blocks.push(format!("Of 1, pipeline rank {rank} holds most: {}.", kinds(&worst)));
    let first = &plan.layouts[0];
    blocks.push(format!("{}:\n  {}", run_with("1", first), first.command));
    let wrapped = blocks.iter().map(|block| {
        let lines = block.lines().map(|line| wrap(line, width));
        lines.collect::<Vec<_>>().join("\n")
    });
    wrapped.collect::<Vec<_>>().join("\n\n")
}

/// The words before the command of the layout that is called so.
pub(crate) fn run_with(called: &str, ranked: &Ranked) -> String {
    match ranked.only_on_cpus {
        Some(feature) => format!("Once GPUs take {}, run {called} with", feature.name()),
        None => format!("Run {called} with"),
    }
}

/// What split heads would do that runs cannot split, and what commands do in their place.
fn heads(plan: &LayoutPlan) -> Option<String> {
    let first = &plan.layouts[0];
    let held = |of: &OtherHead| {
        let fits = if of.worst_bytes > plan.memory { ", which is too much" } else { "" };
        format!("{} s a step and {} at most{fits}", figure(of.step_s), in_words(of.worst_bytes))
    };
    let not_run = "runs with these settings cannot split a head yet";
    if let Some(split) = &plan.split_head {
        return Some(format!(
            "With its head split over all pipeline ranks 1 would take {:.1} % less, {}: {not_run}. \
             Plan with split heads by --head-split auto.",
            100.0 * (1.0 - split.step_s / first.planned.step_s),
            held(split),
        ));
    }
    let ahead = plan.layouts.iter().any(|ranked| ranked.whole_head.is_some());
    let now = first.whole_head.as_ref().map(|whole| format!("; of 1, {}", held(whole)));
    ahead.then(|| {
        format!(
            "Split heads are predictions alone: {not_run}{}. Commands keep the head whole{}.",
            if plan.is_unproven { ", and no GPU has" } else { "" },
            now.unwrap_or_default()
        )
    })
}

/// Seconds of the fastest layout.
fn least_s(plan: &LayoutPlan) -> f64 {
    plan.layouts.iter().map(|r| r.planned.step_s).fold(f64::INFINITY, f64::min)
}

/// How the numbers of the table are to be read.
fn numbers(plan: &LayoutPlan) -> String {
    let first = &plan.layouts[0];
    let [least, most] = first.tokens_per_s_range.map(grouped);
    let margin = 100.0 * plan.margin;
    let mut lines = Vec::new();
    if plan.is_unproven {
        lines.push(
            "Of GPUs only one H200 has run this engine: all time and memory here are of a model."
                .to_string(),
        );
    }
    lines.extend(not_on_gpus(plan));
    lines.extend(put_out(plan));
    lines.extend([
        format!("1 has {least} to {most} tokens/s: the model was off by {margin:.0} % at worst."),
        format!(
            "MFU counts the causal half of attention; with all of it, as PaLM and torchtitan \
             count, 1 has {}.",
            percent(first.mfu_whole_attention)
        ),
        format!("In a step a rank of 1 sends {}.", sent(first)),
    ]);
    lines.join("\n")
}

/// Which layouts a run on GPUs refuses.
fn not_on_gpus(plan: &LayoutPlan) -> impl Iterator<Item = String> {
    CpuFeature::ALL.into_iter().filter_map(|feature| {
        let those = plan.layouts.iter().enumerate();
        let those = those.filter(|(_, ranked)| ranked.only_on_cpus == Some(feature));
        let those: Vec<String> = those.map(|(i, _)| (i + 1).to_string()).collect();
        let named = match those.len() == plan.layouts.len() {
            true => "all of these".into(),
            false => those.join(", "),
        };
        let refused = format!("Runs on GPUs refuse {named}: {}.", feature.why());
        (!those.is_empty()).then_some(refused)
    })
}

/// What there is to know of the rows that have something on a host.
fn put_out(plan: &LayoutPlan) -> Option<String> {
    let first = &plan.layouts[0];
    let is_ahead = |ranked: &&Ranked| ranked.planned.on_host;
    let those: Vec<String> = (plan.layouts.iter().enumerate())
        .filter(|(_, ranked)| is_ahead(ranked))
        .map(|(i, _)| (i + 1).to_string())
        .collect();
    let held = is_ahead(&first).then(|| {
        format!(" 1 puts {} of each rank on the host.", in_words(first.planned.outside()))
    });
    let (those, held) = (those.join(", "), held.unwrap_or_default());
    (!those.is_empty()).then(|| {
        format!(
            "{those} put out to pinned memory of the host: runs do that, but no GPU has run it \
             yet.{held}"
        )
    })
}

fn sent(ranked: &Ranked) -> String {
    let traffic = ranked.planned.traffic;
    let [inside, between] = [traffic.inside, traffic.between].map(|bytes| in_words(bytes as u64));
    format!("{inside} inside its node and {between} to other nodes")
}

/// `With a batch of 128: 12,000 tokens/s (+8.1 %); of 256: ..`.
fn larger_batches(plan: &LayoutPlan) -> String {
    let most = plan.layouts.iter().map(|r| r.tokens_per_s).fold(0.0, f64::max);
    let of = plan.larger_batches.iter().map(|larger| {
        let comes_to = larger.tokens_per_s.map_or("does not fit".into(), |per_s| {
            format!("{} tokens/s ({:+.1} %)", grouped(per_s), 100.0 * (per_s / most - 1.0))
        });
        format!("x{} ({} samples): {comes_to}", larger.times, larger.times * plan.global_batch)
    });
    format!("With the batch {}.", of.collect::<Vec<_>>().join("; "))
}

/// What is held of each kind that there is any of.
fn kinds(bytes: &MemoryBytes) -> String {
    let held = bytes.kinds().filter(|(_, bytes)| *bytes > 0);
    let reported: Vec<String> =
        held.map(|(kind, bytes)| format!("{} {}", kind.name(), in_words(bytes))).collect();
    reported.join(", ")
}

fn head(plan: &LayoutPlan) -> String {
    let kept = match plan.is_unproven && plan.reserve > 0 {
        true => format!(
            " ({} of each are left to the driver, to NCCL's buffers and to gaps between tensors)",
            in_words(plan.reserve)
        ),
        false => String::new(),
    };
    format!(
        "{} ({} parameters) on {} GPUs with {} each{kept}; {} samples of {} tokens a step\n\
         machine: {}\n{} layouts ranked, {} of them above the memory, {} simulated",
        plan.model,
        scaled(plan.parameters),
        plan.gpus,
        in_words(plan.memory),
        plan.global_batch,
        plan.seq,
        plan.machine,
        plan.ranked,
        plan.pruned,
        plan.simulated,
    )
}

/// `8.0 G`, `124.4 M`, `812`.
fn scaled(n: f64) -> String {
    let units = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    let unit = units.into_iter().find(|(size, _)| n >= 0.99 * size);
    unit.map_or_else(|| format!("{n:.0}"), |(size, name)| format!("{:.1} {name}", n / size))
}

/// As many columns as fit, and what limits each layout: beside them, or below where that is
/// shorter.
fn table(layouts: &[Ranked], width: usize) -> String {
    let mut columns: Vec<&Column> = COLUMNS.iter().collect();
    columns.retain(|column| has_column(column, layouts));
    let fits = loop {
        let rows = rows(layouts, &columns);
        let wide = rows.iter().map(|row| row.chars().count()).max().unwrap_or(0);
        if wide <= width {
            break with_limits(layouts, &rows, wide, width);
        }
        let last = columns.iter().map(|c| c.2).max().filter(|soon| *soon > 0);
        let Some(last) = last else { break rows.join("\n") };
        columns.retain(|c| c.2 != last);
    };
    let legend = columns.iter().filter(|c| !c.3.is_empty());
    let legend: Vec<String> = legend.map(|c| format!("{} {}", c.0, c.3)).collect();
    format!("{fits}\n{}", legend.join(", "))
}

fn with_limits(layouts: &[Ranked], rows: &[String], wide: usize, width: usize) -> String {
    let longest = layouts.iter().map(|r| r.limit.chars().count()).max().unwrap_or(0);
    let heads = std::iter::once("what limits it");
    let limits = heads.chain(layouts.iter().map(|r| r.limit.as_str()));
    if wide + 2 + longest <= width {
        let lines = rows.iter().zip(limits).map(|(row, limit)| format!("{row:wide$}  {limit}"));
        return lines.collect::<Vec<_>>().join("\n");
    }
    let mut lines = rows.to_vec();
    lines.push("What limits each:".into());
    lines.extend(layouts.iter().enumerate().map(|(i, r)| format!("{:>2}  {}", i + 1, r.limit)));
    lines.join("\n")
}

fn rows(layouts: &[Ranked], columns: &[&Column]) -> Vec<String> {
    let mut rows: Vec<Vec<String>> = vec![
        std::iter::once(String::new()).chain(columns.iter().map(|c| c.0.to_string())).collect(),
    ];
    for (i, ranked) in layouts.iter().enumerate() {
        let cells = columns.iter().map(|c| c.1(ranked));
        rows.push(std::iter::once((i + 1).to_string()).chain(cells).collect());
    }
    let width = |c: usize| rows.iter().map(|row| row[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..=columns.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:>width$}"));
        cells.collect::<Vec<_>>().join("  ")
    };
    rows.iter().map(line).collect()
}

/// The table with all its columns: their heads, a row for each layout, and the heads that a narrow
/// page leaves out.
pub(crate) fn cells(layouts: &[Ranked]) -> (Vec<String>, Vec<Vec<String>>, Vec<&'static str>) {
    let columns: Vec<&Column> = COLUMNS.iter().filter(|c| has_column(c, layouts)).collect();
    let heads = columns.iter().map(|c| c.0.to_string());
    let heads = std::iter::once("layout".to_string()).chain(heads);
    let row = |(i, ranked): (usize, &Ranked)| {
        let cells = columns.iter().map(|c| c.1(ranked));
        let all = std::iter::once((i + 1).to_string()).chain(cells);
        all.chain([ranked.limit.clone()]).collect()
    };
    let less = columns.iter().filter(|c| c.2 > 0).map(|c| c.0);
    (
        heads.chain(["what limits it".to_string()]).collect(),
        layouts.iter().enumerate().map(row).collect(),
        less.chain(["what limits it"]).collect(),
    )
}

/// Layout `index`, from 0, in full: what its step is made of, and every rank's memory.
pub fn explain(plan: &LayoutPlan, index: usize, width: usize) -> Option<String> {
    let ranked = plan.layouts.get(index)?;
    let planned = &ranked.planned;
    let mut lines = vec![format!("{}: {}", index + 1, planned.layout), String::new()];
    lines.push(format!("A step of {} s is made of", figure(planned.step_s)));
    for (name, seconds) in ranked.terms.all() {
        let share = percent(seconds / planned.step_s);
        lines.push(format!("  {:>9} s  {share:>7}  {name}", figure(seconds)));
    }
    if !planned.whole {
        lines.push("(from two shorter steps: each unit or round more takes as long)".into());
    }
    lines.push(String::new());
    lines.extend(cut(planned));
    lines.push(format!("A rank sends {} in a step", sent(ranked)));
    let outside = planned.outside();
    lines.extend((outside > 0).then(|| format!("Of a rank at most {} are out", in_words(outside))));
    lines.extend([String::new(), "Memory of each pipeline rank, when it holds most".into()]);
    for (rank, bytes) in planned.memory.iter().enumerate().take(16) {
        lines.push(format!("  {rank:>3}  {}: {}", in_words(bytes.total()), kinds(bytes)));
    }
    lines.push(String::new());
    lines.extend(ranked.only_on_cpus.map(|of| format!("Runs on GPUs refuse it: {}.", of.why())));
    lines.push(ranked.command.clone());
    let width = width.clamp(WIDTHS.0, WIDTHS.1);
    Some(lines.iter().map(|line| wrap(line, width)).collect::<Vec<_>>().join("\n"))
}

/// How stages, and a split head, are cut.
pub(crate) fn cut(planned: &Planned) -> Vec<String> {
    let list = |of: &[usize]| of.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let mut lines = vec![format!("Blocks of each stage: {}", list(&planned.blocks))];
    let head = &planned.head_blocks;
    lines.extend(
        (!head.is_empty())
            .then(|| format!("Blocks of the head's rows of each pipeline rank: {}", list(head))),
    );
    lines
}

/// A line in lines of at most `width` columns, cut between words; those behind the first are
/// indented as it is, and a little more.
fn wrap(line: &str, width: usize) -> String {
    if line.chars().count() <= width {
        return line.to_string();
    }
    let indent = line.len() - line.trim_start().len();
    let mut out = String::new();
    let mut used = indent;
    out.push_str(&line[..indent]);
    // A command that is cut goes on behind a backslash.
    let more = if line.trim_start().starts_with("zeropp run") { " \\" } else { "" };
    let width = width - more.len();
    for (i, word) in line.split_whitespace().enumerate() {
        let length = word.chars().count();
        if i > 0 && used + 1 + length > width {
            out.push_str(&format!("{more}\n{}", " ".repeat(indent + 4)));
            used = indent + 4;
        } else if i > 0 {
            out.push(' ');
            used += 1;
        }
        out.push_str(word);
        used += length;
    }
    out
}

/// With three significant digits.
pub(crate) fn figure(x: f64) -> String {
    let decimals = match x.abs() {
        x if x >= 99.95 => 0,
        x if x >= 9.995 => 1,
        x if x >= 0.9995 => 2,
        x if x >= 0.09995 => 3,
        x if x >= 0.009995 => 4,
        _ => 5,
    };
    format!("{x:.decimals$}")
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn grouped(x: f64) -> String {
    let digits = format!("{x:.0}");
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::plan_of;

    /// A pipeline of one rank is none; and a model of a million parameters has not 0.0 G.
    #[test]
    fn one_rank_is_no_pipeline_and_small_models_have_parameters() {
        let plan = plan_of("gpt2", 1, 8);
        let text = text(&plan, 200);
        assert!(text.contains("gpt2 (124.4 M parameters)"), "{text}");
        assert!(text.contains("no pipeline") && !text.contains("  bf-pp"), "{text}");
        assert_eq!(
            [1.2e10, 999.9e6, 25e3, 812.0].map(scaled),
            ["12.0 G", "1.0 G", "25.0 k", "812"]
        );
    }

    /// Measured ranks of CPUs are no GPUs, and have their own margin.
    #[test]
    fn plans_for_measured_machines_do_not_speak_of_gpus() {
        let mut job = crate::tests::job("gpt2", 2, 8);
        job.compute = crate::layout::ComputeSettings { on_gpu: false, ..job.compute };
        job.machine.margin = 0.2;
        let plan = crate::plan::LayoutPlan::new(&job, "").unwrap();
        let text = text(&plan, 120);
        assert!(!text.contains("Of GPUs") && text.contains("off by 20 %"), "{text}");
        let [least, most] = plan.layouts[0].tokens_per_s_range;
        let per_s = plan.layouts[0].tokens_per_s;
        assert!((per_s / least - 1.2).abs() < 1e-9 && (per_s / most - 0.8).abs() < 1e-9);
    }

    #[test]
    fn no_line_is_wider_than_the_terminal_and_the_command_can_be_pasted() {
        let mut job = crate::tests::job("14.6b", 32, 192);
        job.memory -= 6_000_000_000;
        let plan = crate::plan::LayoutPlan::new(&job, "").unwrap();
        for width in [60, 80, 100, 140, 200] {
            let text = text(&plan, width);
            for line in text.lines() {
                assert!(line.chars().count() <= width, "{width}: {line}");
            }
            assert!(text.contains("Run 1 with:") && text.contains("1 beats 2"), "{text}");
            let pasted = text.split("Run 1 with:").nth(1).unwrap().replace("\\\n", " ");
            let words: Vec<&str> = pasted.split_whitespace().collect();
            assert_eq!(words.join(" "), plan.layouts[0].command);
            for (said, what) in [
                ("Of GPUs only one H200", "what was never run"),
                ("tokens/s: the model was off by 10 % at worst", "a range"),
                ("as PaLM and torchtitan count", "both counts of MFU"),
                ("D ranks that share weights (ZeRO-3)", "a legend"),
                ("to other nodes.", "bytes"),
                ("With the batch x2 (384 samples): ", "larger batches"),
                ("left to the driver", "the reserve"),
            ] {
                let words: Vec<&str> = text.split_whitespace().collect();
                assert!(words.join(" ").contains(said), "{width}: no word of {what}: {text}");
            }
        }
        assert!(explain(&plan, 0, 80).unwrap().contains("forwards and backwards"));
        assert!(explain(&plan, 99, 80).is_none());
    }
}
