//! The facts under a picture of a schedule: shape, costs, version and command.

use zeropp::pipeline::ir::Schedule;

use super::cost_args::{CostFlags, PerStage};
use super::costs::ScheduleCosts;
use crate::figures::count;
use crate::{shell, version};

/// Columns of a line below a title.
const WIDTH: usize = 150;

/// The facts of a schedule that was simulated with `schedule_costs`.
pub(crate) fn facts(
    schedule: &Schedule,
    flags: &CostFlags,
    schedule_costs: &ScheduleCosts,
) -> Vec<String> {
    let mut lines = vec![shape(schedule)];
    lines.extend(folded(&costs(flags, schedule_costs)));
    lines
}

/// Version and command of a picture: the last of its facts.
pub(crate) fn made_by() -> Vec<String> {
    folded(&format!("zeropp {}: {}", version::short(), shell::command_line()))
}

/// `1f1b, P 4, V 1, 8 micro-batches`.
pub(crate) fn shape(schedule: &Schedule) -> String {
    let pp = schedule.pp();
    let slices = match schedule.sample_slices.len() {
        0 | 1 => String::new(),
        n => format!(
            ", {n} slices of {} tokens a sample",
            schedule.sample_slices.iter().sum::<u64>()
        ),
    };
    format!(
        "{}, P {pp}, V {}, {}{slices}",
        schedule.kind,
        schedule.stages().div_ceil(pp.max(1)),
        micro_batches(&schedule.units)
    )
}

/// The micro-batches of a step, and its units where there are several.
pub(super) fn micro_batches(units: &[usize]) -> String {
    let all = count(units.iter().sum(), "micro-batch").replace("batchs", "batches");
    match units {
        [_] => all,
        [first, ..] => format!("{all} in {} units of at most {first}", units.len()),
        [] => all,
    }
}

/// The costs as they were given.
pub(super) fn costs(flags: &CostFlags, schedule_costs: &ScheduleCosts) -> String {
    if let (Some(_), Some(note)) = (&flags.file, &schedule_costs.note) {
        return note.clone();
    }
    let times = &flags.times;
    let (whose, computes) = match &flags.layer {
        Some(layer) => {
            let [f, b, w] = layer.times;
            let whose = format!("a layer of {}", layer.layers);
            (whose, format!("F {f}, B {b}, W {w}"))
        }
        None => {
            let [f, b, w] = [&times.f, &times.b, &times.w].map(list);
            ("a stage".into(), format!("F {f}, B {b}, W {w}"))
        }
    };
    let (gather, reduce) = (list(&times.gather), list(&times.reduce));
    let overlap = times.overlap.map_or(String::new(), |t| format!(", overlapped pair {t}"));
    format!(
        "us of {whose}: {computes}, gather {gather}, reduction {reduce}, message {}{overlap}; F \
         keeps {} {}",
        times.comm,
        list(&flags.memory.f),
        if flags.memory.in_bytes { "bytes" } else { "units of memory" },
    )
}

/// One number, or those of all stages where they are few.
fn list<T: std::fmt::Display>(list: &PerStage<T>) -> String {
    const FEW: usize = 12;
    let reported: Vec<String> = list.0.iter().take(FEW).map(ToString::to_string).collect();
    let more = if list.0.len() > FEW { ",.." } else { "" };
    format!("{}{more}", reported.join(","))
}

/// Text in lines of so many columns, cut between words.
fn folded(text: &str) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().expect("there is one");
        if last.is_empty() {
            last.push_str(word);
        } else if last.chars().count() + 1 + word.chars().count() <= WIDTH {
            last.push(' ');
            last.push_str(word);
        } else {
            lines.push(word.into());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_facts_are_folded_between_words() {
        let words = vec!["0123456789"; 40].join(" ");
        let lines = folded(&words);
        assert_eq!(lines.join(" "), words);
        assert!(lines.len() == 4 && lines.iter().all(|line| line.len() <= WIDTH), "{lines:?}");
        assert_eq!(list(&PerStage(vec![1; 14])), "1,1,1,1,1,1,1,1,1,1,1,1,..");
    }
}
