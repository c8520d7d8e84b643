//! Output of `--dry-run`.

use zeropp::pipeline::draw::page;
use zeropp::{Config, EvaluationPlan, MemoryCheck, Plan};
use zeropp_core::meter::MemoryKind;
use zeropp_core::metrics::RankPlan;

use crate::figures::{bytes, count, grouped, percent, scaled, table};
use crate::pace::is_alone;

/// The plan in one line, for the head of a run.
pub(crate) fn headline(config: &Config, plan: &Plan, check: &MemoryCheck) -> String {
    let unchecked = check.room.is_none() && !config.no_memory_check;
    let memory = if unchecked { format!("\nnote: memory: {check}") } else { String::new() };
    let units = match is_alone(config) {
        true => String::new(),
        false => format!(", units of {}", units(&plan.units)),
    };
    format!(
        "{}; {} parameters; {} with {} a rank{units}\ncosts {}{}{memory}",
        mesh(config, plan),
        scaled(plan.parameters as f64),
        plan.schedule,
        count(plan.virtual_stages, "stage"),
        plan.costs,
        notes(plan),
    )
}

/// Settings without an effect, or others that would do better: a line each, after a line feed.
pub(crate) fn notes(plan: &Plan) -> String {
    plan.notes.iter().map(|note| format!("\nnote: {note}")).collect()
}

/// Everything known before a rank starts.
pub(crate) fn text(config: &Config, plan: &Plan, check: &MemoryCheck) -> String {
    let facts = facts(config, plan, check);
    let facts: Vec<_> = facts.iter().map(|(name, fact)| format!("{name:8}  {fact}")).collect();
    let stages = stages(&plan.ranks);
    let stages: Vec<_> = stages.iter().map(|(rank, held)| format!("{rank}  {held}")).collect();
    format!(
        "{}{}\n\n{}\n\n{MEMORY}\n{}",
        facts.join("\n"),
        notes(plan),
        stages.join("\n"),
        table(&memory(plan)),
    )
}

const MEMORY: &str = "Predicted peak memory of one rank, by pipeline rank";

/// The same for a page, with the command that would run it.
pub(crate) fn html(config: &Config, plan: &Plan, check: &MemoryCheck, command: &str) -> String {
    let facts = facts(config, plan, check);
    let (stages, rows) = (stages(&plan.ranks), memory(plan));
    [
        page::command(command),
        page::facts(facts.iter().map(|(name, fact)| (*name, fact.as_str()))),
        page::lines(notes(plan).trim_start()),
        "<h2>Layers of each stage</h2>".into(),
        page::facts(stages.iter().map(|(rank, held)| (rank.as_str(), held.as_str()))),
        format!("<h2>{MEMORY}</h2>"),
        page::table(&rows[0], &rows[1..], &[]),
    ]
    .concat()
}

fn facts(config: &Config, plan: &Plan, check: &MemoryCheck) -> Vec<(&'static str, String)> {
    let mut facts = vec![
        ("mesh", mesh(config, plan)),
        ("model", model(config, plan)),
        ("schedule", schedule(plan)),
        ("step", step(plan)),
        ("cut", cut(plan)),
        ("weights", weights(plan)),
        ("bubble", format!("{} simulated", percent(plan.bubble))),
        ("costs", plan.costs.clone()),
        ("memory", memory_here(check)),
    ];
    if is_alone(config) {
        facts.retain(|(name, _)| !["schedule", "weights", "bubble"].contains(name));
    }
    facts.extend(plan.evaluation.as_ref().map(|eval| ("eval", evaluation(plan, eval))));
    facts
}

fn model(config: &Config, plan: &Plan) -> String {
    let flops = scaled(plan.flops_per_token);
    format!(
        "{}, {}, hidden {}, {}: {} parameters, {flops}{}FLOP a token",
        config.model,
        count(config.layers, "layer"),
        config.hidden,
        count(config.heads, "head"),
        grouped(plan.parameters),
        if flops.contains(' ') { "" } else { " " },
    )
}

fn schedule(plan: &Plan) -> String {
    format!(
        "{}, {} a rank, a step's micro-batches in units of {}",
        plan.schedule,
        count(plan.virtual_stages, "stage"),
        units(&plan.units),
    )
}

fn step(plan: &Plan) -> String {
    let all: usize = plan.micro_batches.iter().sum();
    let tokens = all * plan.zero3 * plan.micro_batch_size * plan.seq;
    let most = plan.units.iter().sum::<usize>();
    let dealt = match plan.micro_batches.iter().all(|n| *n == most) {
        true => format!("{} data ranks x {most} micro-batches", data_ranks(plan)),
        false => format!(
            "{} for the replicas = {all} x zero3 {} micro-batches",
            units(&plan.micro_batches),
            plan.zero3
        ),
    };
    format!(
        "{}: {dealt} x {} samples x {} tokens",
        count(tokens, "token"),
        plan.micro_batch_size,
        plan.seq,
    )
}

/// The cut into stages, and what it costs that they are not equal.
fn cut(plan: &Plan) -> String {
    let blocks: Vec<String> = plan.blocks.iter().map(ToString::to_string).collect();
    // Few enough to be given to --stages, or in short.
    let blocks = if blocks.len() <= 32 { blocks.join(",") } else { units(&plan.blocks) };
    let over = percent(plan.longest_stage - 1.0);
    format!(
        "{blocks} blocks a stage ({}); the longest stage takes {over} more than the mean",
        plan.cut
    )
}

fn memory_here(check: &MemoryCheck) -> String {
    match check.is_too_much() {
        true => format!("{check}: a run would be refused"),
        false => check.to_string(),
    }
}

fn weights(plan: &Plan) -> String {
    let per_unit = |count: u64| scaled(count as f64 / plan.units.len().max(1) as f64);
    let optimizer = match plan.optimizer_gathers_per_rank {
        0 => String::new(),
        n => format!(
            "; the optimizer gathers matrices {n} times a step, {} a rank",
            bytes(plan.optimizer_bytes_per_rank)
        ),
    };
    format!(
        "{} all-gathers and {} reduce-scatters of a stage per rank and unit{optimizer}",
        per_unit(plan.all_gathers_per_rank),
        per_unit(plan.reduce_scatters_per_rank),
    )
}

/// The validation loss.
fn evaluation(plan: &Plan, eval: &EvaluationPlan) -> String {
    let per_unit = eval.all_gathers_per_rank as f64 / plan.units.len().max(1) as f64;
    format!(
        "every {} and at the end, {}: {}, {} all-gathers of a stage per rank and unit, bubble {} \
         simulated",
        count(eval.every as usize, "step"),
        count(eval.tokens as usize, "token"),
        count(eval.batches as usize, "batch").replace("batchs", "batches"),
        scaled(per_unit),
        percent(eval.bubble),
    )
}

fn data_ranks(plan: &Plan) -> usize {
    plan.zero3 * plan.dp
}

fn mesh(config: &Config, plan: &Plan) -> String {
    let ranks = count(plan.pp * data_ranks(plan), "rank");
    format!("pp {} x zero3 {} x dp {} = {ranks} ({})", plan.pp, plan.zero3, plan.dp, config.engine)
}

/// Sizes of the units, equal ones together: `8 + 8`, `100 x 8 + 3`.
fn units(sizes: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for size in sizes {
        match runs.last_mut() {
            Some((count, last)) if last == size => *count += 1,
            _ => runs.push((1, *size)),
        }
    }
    let text = runs.iter().map(|(count, size)| match count {
        1 => size.to_string(),
        2 => format!("{size} + {size}"),
        _ => format!("{count} x {size}"),
    });
    text.collect::<Vec<_>>().join(" + ")
}

/// The layers of every stage, by pipeline rank.
fn stages(ranks: &[RankPlan]) -> Vec<(String, String)> {
    let layers = |names: &[String]| match names {
        [] => String::new(),
        [one] => one.clone(),
        [first, .., last] => format!("{first} to {last}"),
    };
    let of_rank = |rank: &RankPlan| {
        let stages = rank.stages.iter().map(|(s, names)| format!("stage {s}: {}", layers(names)));
        (format!("rank {}", rank.pp), stages.collect::<Vec<_>>().join("; "))
    };
    ranks.iter().map(of_rank).collect()
}

fn of_peaks(rank: &RankPlan) -> u64 {
    rank.held.peaks.total()
}

fn at_once(rank: &RankPlan) -> u64 {
    rank.held.at_once.total()
}

/// What is out of memory, and what tables call it.
pub(crate) const OUT_OF_MEMORY: [(&str, MemoryKind); 2] =
    [("copied out at once", MemoryKind::HostActivation), ("states out", MemoryKind::HostState)];

/// A head and rows.
fn memory(plan: &Plan) -> Vec<Vec<String>> {
    let ranks = &plan.ranks;
    let mut rows = vec![vec![String::new()]];
    rows[0].extend(ranks.iter().map(|rank| format!("rank {}", rank.pp)));
    for kind in MemoryKind::ALL.into_iter().filter(|kind| kind.is_in_memory()) {
        let mut row = vec![kind.name().to_string()];
        row.extend(ranks.iter().map(|rank| bytes(rank.held.peaks.get(kind))));
        rows.push(row);
    }
    for (name, of) in [("sum", of_peaks as fn(&RankPlan) -> u64), ("most at once", at_once)] {
        let mut row = vec![name.to_string()];
        row.extend(ranks.iter().map(|rank| bytes(of(rank))));
        rows.push(row);
    }
    for (name, kind) in OUT_OF_MEMORY {
        let out = |rank: &RankPlan| rank.held.peaks.get(kind);
        if ranks.iter().any(|rank| out(rank) > 0) {
            let row = std::iter::once(name.to_string());
            rows.push(row.chain(ranks.iter().map(|rank| bytes(out(rank)))).collect());
        }
    }
    if let Some(eval) = &plan.evaluation {
        let held = eval.held.iter().map(|held| bytes(*held));
        rows.push(std::iter::once("in an evaluation".to_string()).chain(held).collect());
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{args, command};

    fn dry_run(line: &str) -> Plan {
        let words = ["zeropp", "run"].into_iter().chain(line.split(' '));
        let matches = command::command().try_get_matches_from(words).unwrap();
        let run = args::run(matches.subcommand_matches("run").unwrap());
        let config = run.unwrap_or_else(|failure| panic!("{}", failure.message)).config;
        let trainer = zeropp::Trainer::builder(config).for_prediction().build();
        trainer.unwrap_or_else(|e| panic!("{line}: {e}")).plan().clone()
    }

    /// Settings of V and the kind that a dry run advises have the bubble that it says of them, for
    /// the same micro-batches; where nothing is clearly better nothing is said.
    #[test]
    fn advice_of_stages_and_kind_was_simulated() {
        let hint = |plan: &Plan| plan.notes.iter().find(|n| n.contains("(simulated)")).cloned();
        for line in [
            "--model llama3-8b --pp 4 --zero3 2 --seq 2048 --rank-memory unchecked",
            "--pp 4 --layers 8 --hidden 64 --heads 4 --seq 32 --schedule gpipe --micro-batches 8",
        ] {
            let plan = dry_run(line);
            let hint = hint(&plan).unwrap_or_else(|| panic!("{line}: {:?}", plan.notes));
            let (flags, said) = hint.split_once(" would take ").unwrap();
            let line = line.replace("--schedule gpipe ", "").replace(" --micro-batches 8", "");
            let other = dry_run(&format!("{line} {flags}"));
            assert!(said.contains(&format!("a bubble of {:.1} %", 100.0 * other.bubble)), "{hint}");
            assert!(other.bubble < plan.bubble, "{hint}");
            assert_eq!(other.micro_batches, plan.micro_batches, "{hint}");
        }
        assert_eq!(hint(&dry_run("--pp 1 --zero3 2")), None);
    }

    /// Equal stages in a row may be given together, as plans print them.
    #[test]
    fn a_cut_may_count_equal_stages() {
        let line = "--pp 2 --layers 8 --hidden 64 --heads 4 --seq 32";
        let plan = dry_run(&format!("{line} --stages 1,2x3,1"));
        assert_eq!(plan.blocks, [1, 3, 3, 1]);
        let words = format!("zeropp run {line} --stages 1,99999999999x3,1");
        let matches = command::command().try_get_matches_from(words.split(' ')).unwrap();
        let run = args::run(matches.subcommand_matches("run").unwrap());
        let config = run.unwrap_or_else(|failure| panic!("{}", failure.message)).config;
        let refused = config.validate().unwrap_err().to_string();
        assert!(refused.ends_with("use a list such as 3,4,4,3 or 3,2x4,3"), "{refused}");
    }

    #[test]
    fn units_are_counted() {
        for (sizes, text) in [
            (vec![8], "8"),
            (vec![8, 8], "8 + 8"),
            (vec![7, 7, 7], "3 x 7"),
            (vec![7, 7, 7, 2], "3 x 7 + 2"),
            (vec![], ""),
        ] {
            assert_eq!(units(&sizes), text);
        }
    }
}
