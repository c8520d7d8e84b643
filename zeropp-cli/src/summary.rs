//! The last lines of a run.

use zeropp::{Config, Summary};
use zeropp_core::meter::MemoryKind;

use crate::figures::{bytes, count, duration, grouped, percent, scaled, table};
use crate::pace::{is_alone, mean_loss};
use crate::plan::OUT_OF_MEMORY;

/// The summary of a run of `config`, whose ranks share `cores` of them where there are that few;
/// `mean` is the loss of the last line, and of how many steps.
pub(crate) fn text(
    s: &Summary,
    config: &Config,
    cores: Option<usize>,
    mean: Option<(f64, u64)>,
) -> String {
    let (loss, of) = mean.unwrap_or((s.last_loss, 1));
    let loss = mean_loss(loss, of, &format!("{:.4} to ", s.first_loss));
    let ranks = config.mesh().world();
    let (bubbles, gathers) = match is_alone(config) {
        true => Default::default(),
        false => (
            bubble(s, cores.map(|cores| (ranks, cores))),
            format!(
                "{} all-gathers and {} reduce-scatters per rank and unit\n",
                scaled(s.all_gathers_per_unit),
                scaled(s.reduce_scatters_per_unit),
            ),
        ),
    };
    let beside = [saving(s), copying(s), going_back(s), recovering(s)].concat();
    format!(
        "{} in {}: {loss}\n{}\
         {} tokens/s, {} of peak FLOP/s\n{bubbles}{beside}{gathers}\n{}",
        count(s.steps as usize, "step"),
        duration(s.total_s),
        validation(s),
        grouped(s.tokens_per_s.round() as u64),
        percent(s.flops_util),
        memory(s, ranks),
    )
}

/// The idle share. Where so many ranks share so many cores, that of the schedule with a core for
/// each comes first: what was measured has their waiting for a core in it.
fn bubble(s: &Summary, shared: Option<(usize, usize)>) -> String {
    let [measured, timed, before] = [s.bubble, s.timed_bubble, s.predicted_bubble].map(percent);
    let [own_span, step] = [s.bubble_own_span, s.bubble_step].map(percent);
    match shared {
        None => format!(
            "bubble {measured} measured, {timed} simulated with the measured times, {before} \
             before the run\nbubble_own_span {own_span}, bubble_step {step} measured\n"
        ),
        Some((ranks, cores)) => format!(
            "bubble {timed} with a core per rank, simulated with the measured times; {before} \
             before the run\ncores shared: {} on {}; measured, with the wait for a core as idle: \
             bubble {measured}, bubble_own_span {own_span}, bubble_step {step}\n",
            count(ranks, "rank"),
            count(cores, "core")
        ),
    }
}

/// Time of saving beside the steps.
fn saving(s: &Summary) -> String {
    if s.saves == 0 {
        return String::new();
    }
    format!(
        "{}: a rank was kept from its work for {}, and writing took {} of CPU\n",
        count(s.saves as usize, "checkpoint"),
        duration(s.save_blocked_s),
        duration(s.save_cpu_s)
    )
}

/// Time of updates that were taken back.
fn going_back(s: &Summary) -> String {
    if s.rollbacks == 0 {
        return String::new();
    }
    let updates = count(s.rollbacks as usize, "early update");
    format!("{updates} taken back: {} of a rank's work done again\n", duration(s.redone_s))
}

/// Time of copies in memory.
fn copying(s: &Summary) -> String {
    if s.copies == 0 {
        return String::new();
    }
    format!(
        "{} copied in memory: {} each, {} predicted; that took {} of CPU\n",
        count(s.copies as usize, "step"),
        bytes(s.copy_bytes),
        bytes(s.predicted_copy_bytes),
        duration(s.copy_cpu_s)
    )
}

/// Time of failures.
fn recovering(s: &Summary) -> String {
    let n = match s.recoveries {
        0 => return String::new(),
        1 => "1 recovery".into(),
        n => format!("{n} recoveries"),
    };
    let redone = count(s.steps_redone as usize, "step");
    let without = match s.lost_replicas {
        0 => String::new(),
        n => format!("; {} lost, whose samples the others took", count(n as usize, "replica")),
    };
    let took = duration(s.recovery_s);
    format!("{n}: {took} from failure to the next step, {redone} done again{without}\n")
}

/// The last validation loss, and the lowest, if any was measured.
fn validation(s: &Summary) -> String {
    let Some(((step, last), (best_step, best))) = s.last_eval.zip(s.best_eval) else {
        return String::new();
    };
    let lowest = match best_step == step {
        true => ", the lowest".to_owned(),
        false => format!("; the lowest {:.4} after step {best_step}", best.loss),
    };
    format!(
        "validation loss {:.4}, perplexity {:.3} after step {step}{lowest}\n",
        last.loss, last.perplexity
    )
}

fn memory(s: &Summary, ranks: usize) -> String {
    let mut rows =
        vec![vec!["Peak memory of a rank".into(), "predicted".into(), "measured".into()]];
    for kind in MemoryKind::ALL.into_iter().filter(|kind| kind.is_in_memory()) {
        rows.push(vec![
            kind.name().into(),
            bytes(s.predicted_bytes.get(kind)),
            bytes(s.peak_bytes.get(kind)),
        ]);
    }
    let at_once = [s.predicted_at_once_bytes, s.at_once_bytes].map(bytes);
    rows.push(["most at once".into()].into_iter().chain(at_once).collect());
    for (name, kind) in OUT_OF_MEMORY {
        let out = [s.predicted_bytes, s.peak_bytes].map(|of| of.get(kind));
        if out != [0; 2] {
            rows.push([name.into()].into_iter().chain(out.map(bytes)).collect());
        }
    }
    // What engines hold aside depends on who comes first, so it cannot be predicted.
    let unknown = || "".to_owned();
    if ranks > 1 {
        rows.push(vec!["messages that came early".into(), unknown(), bytes(s.early_bytes)]);
    }
    rows.push(vec!["buffers kept for reuse, all ranks".into(), unknown(), bytes(s.idle_bytes)]);
    table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn predicted_and_measured_stand_side_by_side() {
        let mut s = Summary {
            steps: 40,
            first_loss: 5.5452,
            last_loss: 2.75,
            tokens_per_s: 6310.4,
            flops_util: 0.5,
            bubble: 0.05,
            bubble_own_span: 0.03,
            bubble_step: 0.07,
            predicted_bubble: 0.01,
            timed_bubble: 0.02,
            all_gathers_per_unit: 3.0,
            reduce_scatters_per_unit: 2.0,
            total_s: 52.14,
            ..Summary::default()
        };
        s.predicted_bytes.activation = 2048;
        s.peak_bytes.activation = 1024;
        s.early_bytes = 3072;
        (s.saves, s.save_blocked_s, s.save_cpu_s) = (4, 0.25, 1.5);
        (s.recoveries, s.steps_redone, s.recovery_s) = (1, 3, 0.5);
        let of = |pp: usize, zero3: usize| Config { pp, zero3, ..Config::default() };
        let alone = text(&s, &of(2, 1), None, Some((2.875, 9)));
        let line = "40 steps in 52.1 s: loss 5.5452 to 2.8750 (mean of 9)";
        assert!(alone.lines().any(|l| l == line), "{alone}");
        assert!(!alone.contains("share"), "{alone}");
        let measured =
            "bubble 5.0 % measured, 2.0 % simulated with the measured times, 1.0 % before the run";
        assert!(alone.lines().any(|l| l == measured), "{alone}");
        let eval =
            |loss: f64| zeropp::Evaluation { loss, perplexity: loss.exp(), ..Default::default() };
        (s.last_eval, s.best_eval) = (Some((40, eval(2.5))), Some((30, eval(2.25))));
        let one = text(&s, &of(1, 1), None, None);
        // Of a rank by itself nothing is said that others would have a part in.
        for word in ["bubble", "gathers", "unit", "messages"] {
            assert!(!one.contains(word), "{word} is in:\n{one}");
        }
        let text = text(&s, &of(4, 8), Some(2), None);
        for line in [
            "40 steps in 52.1 s: loss 5.5452 to 2.7500",
            "validation loss 2.5000, perplexity 12.182 after step 40; the lowest 2.2500 after \
             step 30",
            "6,310 tokens/s, 50.0 % of peak FLOP/s",
            "bubble 2.0 % with a core per rank, simulated with the measured times; 1.0 % before \
             the run",
            "cores shared: 32 ranks on 2 cores; measured, with the wait for a core as idle: bubble \
             5.0 %, bubble_own_span 3.0 %, bubble_step 7.0 %",
            "3 all-gathers and 2 reduce-scatters per rank and unit",
            "4 checkpoints: a rank was kept from its work for 0.2 s, and writing took 1.5 s of CPU",
            "1 recovery: 0.5 s from failure to the next step, 3 steps done again",
            "activation                          2.00 KiB  1.00 KiB",
            "messages that came early                      3.00 KiB",
        ] {
            assert!(text.lines().any(|l| l == line), "{line:?} is not in:\n{text}");
        }
    }
}
