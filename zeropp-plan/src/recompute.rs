//! What the setting `recompute` comes to on a program, and what it cannot do there.

use std::collections::HashSet;

use zeropp_schedule::ir::{Action, Compute, Schedule};

use crate::layout::Recompute;

/// The stages of a program by what their backward computes again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recomputed {
    /// All of the forward: the program has an R for them, and F keeps the inputs of its layers
    /// alone. Those of which it has none for some micro-batches are in both lists.
    pub whole: Vec<usize>,
    /// What is cheap, as [`Recompute::Selective`] says; all else is kept from F to B.
    pub selective: Vec<usize>,
}

impl Recomputed {
    /// `selective` is for every stage. `full` does as much on the stages that the program has no R
    /// for: where B and W are apart, the last of a rank's several (ZeroPP §3.3).
    pub fn new(recompute: Recompute, program: &Schedule) -> Recomputed {
        let (whole, redone) = (stages_with_r(program), redone(program));
        let all = |stage: usize| (0..program.micro_batches()).all(|m| redone.contains(&(stage, m)));
        let selective = match recompute {
            Recompute::Auto | Recompute::None => Vec::new(),
            Recompute::Selective | Recompute::Full => {
                (0..program.stages()).filter(|s| !all(*s)).collect()
            }
        };
        Recomputed { whole, selective }
    }

    /// What is known before there is a program: what a stage keeps that is not recomputed whole.
    pub fn before(recompute: Recompute, stages: usize) -> Recomputed {
        let keeps_all = matches!(recompute, Recompute::Auto | Recompute::None);
        let selective = if keeps_all { 0..0 } else { 0..stages };
        Recomputed { whole: Vec::new(), selective: selective.collect() }
    }

    /// What the setting does not do on this program, and what would; `saves` is whether this model
    /// on this device keeps less with selective recomputation.
    pub fn note(&self, recompute: Recompute, saves: bool, program: &Schedule) -> Option<String> {
        let nothing = "no layer keeps what is cheap to make again";
        let schedule = &program.kind;
        match recompute {
            Recompute::Selective if !saves => Some(format!(
                "recompute = selective: changes nothing, as {nothing}; use full, which keeps the \
                 inputs of layers alone"
            )),
            Recompute::Full if self.whole.is_empty() => {
                let does = match saves {
                    true => "it does as selective does".to_owned(),
                    false => format!("nothing else changes, as {nothing}"),
                };
                Some(format!(
                    "recompute = full: no whole stage is computed again, as schedule {schedule} \
                     has no R, and {does}; use a file without OPTIMIZER_STEP, which is lowered here"
                ))
            }
            _ => None,
        }
    }
}

/// Recomputation of a run: its word, and the N of `full:first=N`.
pub type Recomputation = (Recompute, Option<usize>);

/// What is `made` with the least recomputation that `fits`: none, selective, full of the first
/// micro-batches of each unit of `unit`, as few as can be, full of all. Where none fits, the last.
///
/// # Errors
/// The last error of `made`, where it fails with each of them.
pub fn least<T, E>(
    unit: impl Fn(&T) -> usize,
    mut made: impl FnMut(Recomputation) -> Result<T, E>,
    fits: impl Fn(&T) -> bool,
) -> Result<T, E> {
    let mut error = None;
    let mut most = None;
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Full] {
        match made((recompute, None)) {
            Ok(made) if recompute != Recompute::Full && fits(&made) => return Ok(made),
            Ok(made) => most = Some((recompute, made)),
            Err(e) => error = Some(e),
        }
    }
    let (recompute, mut least) = match (most, error) {
        (Some(most), _) => most,
        (None, Some(error)) => return Err(error),
        (None, None) => unreachable!("something was made"),
    };
    if recompute != Recompute::Full || !fits(&least) {
        return Ok(least);
    }
    // Fewer do not fit, or are not known to; so many do.
    let (mut fewer, mut enough) = (0, unit(&least));
    while enough - fewer > 1 {
        let first = fewer.midpoint(enough);
        match made((Recompute::Full, Some(first))) {
            Ok(made) if fits(&made) => (enough, least) = (first, made),
            _ => fewer = first,
        }
    }
    Ok(least)
}

/// The stages and micro-batches that a program has an R for.
pub fn redone(program: &Schedule) -> HashSet<(usize, usize)> {
    let computes = program.ranks.iter().flatten().flat_map(Action::computes);
    computes.filter(|t| t.kind == Compute::R).map(|t| (t.stage, t.micro_batch)).collect()
}

/// Stages and micro-batches that a rank's program has out at once, at most.
pub fn most_out(program: &[Action]) -> usize {
    let (mut out, mut most) = (HashSet::new(), 0);
    for action in program {
        if let Action::Out { stage, micro_batch } = *action {
            out.insert((stage, micro_batch));
            most = most.max(out.len());
        }
        for task in action.computes().filter(|task| task.kind != Compute::F) {
            out.remove(&(task.stage, task.micro_batch));
        }
    }
    most
}

/// The stages and micro-batches of which a program copies what F keeps out of memory.
pub fn copied_out(program: &Schedule) -> HashSet<(usize, usize)> {
    let actions = program.ranks.iter().flatten();
    let of = |action: &Action| match *action {
        Action::Out { stage, micro_batch } => Some((stage, micro_batch)),
        _ => None,
    };
    actions.filter_map(of).collect()
}

/// The stages that a program has an R for.
pub fn stages_with_r(program: &Schedule) -> Vec<usize> {
    let computes = program.ranks.iter().flatten().flat_map(Action::computes);
    let mut stages: Vec<usize> =
        computes.filter(|t| t.kind == Compute::R).map(|t| t.stage).collect();
    stages.sort_unstable();
    stages.dedup();
    stages
}

#[cfg(test)]
mod tests {
    use super::*;
    use zeropp_schedule::lower::{LowerOptions, lower};
    use zeropp_schedule::schedules::{Shape, generate};

    fn program(kind: &str, virtual_stages: usize, recompute: bool) -> Schedule {
        let shape = Shape { pp: 2, virtual_stages, micro_batches: 4, unit: 4 };
        let options = LowerOptions { recompute, ..LowerOptions::default() };
        lower(&generate(kind, &shape).unwrap(), &options)
    }

    #[test]
    fn every_stage_is_recomputed_one_way_or_the_other() {
        for (kind, v, whole) in [
            ("zeropp", 1, vec![0, 1]),
            ("zeropp", 3, vec![0, 1, 2, 3]),
            ("zb-v", 2, vec![0, 1]),
            ("1f1b", 1, vec![0, 1]),
        ] {
            let all: Vec<usize> = (0..2 * v).collect();
            let none = Recomputed::new(Recompute::None, &program(kind, v, false));
            assert_eq!(none, Recomputed::default(), "{kind}");
            let selective = Recomputed::new(Recompute::Selective, &program(kind, v, false));
            assert_eq!((selective.whole, &selective.selective), (vec![], &all), "{kind}");
            let full = Recomputed::new(Recompute::Full, &program(kind, v, true));
            assert_eq!(full.whole, whole, "{kind}");
            let mut both = [full.whole, full.selective].concat();
            both.sort_unstable();
            assert_eq!(both, all, "{kind}");
        }
    }

    /// A run with U = 8 keeps 100 bytes of a micro-batch, 70 with selective and 10 with full
    /// recomputation.
    #[test]
    fn no_more_is_recomputed_than_it_takes_to_fit() {
        let bytes = |(recompute, first): Recomputation| match (recompute, first) {
            (Recompute::Full, first) => first.unwrap_or(8) * 10 + (8 - first.unwrap_or(8)) * 70,
            (Recompute::Selective, _) => 560,
            _ => 800,
        };
        let chosen = |limit: usize| {
            least(|_| 8, Ok::<Recomputation, ()>, |redone| bytes(*redone) <= limit).unwrap()
        };
        assert_eq!(chosen(800), (Recompute::None, None));
        assert_eq!(chosen(799), (Recompute::Selective, None));
        assert_eq!(chosen(559), (Recompute::Full, Some(1)));
        assert_eq!(chosen(300), (Recompute::Full, Some(5)));
        assert_eq!(chosen(139), (Recompute::Full, None));
        assert_eq!(chosen(79), (Recompute::Full, None), "the last that was tried");
        // A file with R is made with full alone; what is never made is the last error.
        let made =
            |redone: Recomputation| (redone.0 == Recompute::Full).then_some(redone).ok_or(redone);
        assert_eq!(least(|_| 8, made, |redone| redone.1.is_none()), Ok((Recompute::Full, None)));
        let none = least(|(): &()| 8, |redone: Recomputation| Err(redone), |()| true);
        assert_eq!(none, Err((Recompute::Full, None)));
    }

    #[test]
    fn unsupported_recomputation_names_an_alternative() {
        let note = |recompute, v, saves| {
            let program = program("zeropp", v, false);
            Recomputed::new(recompute, &program).note(recompute, saves, &program)
        };
        assert_eq!(note(Recompute::None, 1, false), None);
        assert_eq!(note(Recompute::Selective, 1, true), None);
        let again = program("zeropp", 2, true);
        let full = Recomputed::new(Recompute::Full, &again);
        assert_eq!(full.note(Recompute::Full, false, &again), None, "stages are computed again");
        let said = note(Recompute::Selective, 2, false).unwrap();
        assert!(said.contains("changes nothing") && said.contains("use full, which"), "{said}");
        let said = note(Recompute::Full, 1, true).unwrap();
        assert!(said.contains("as selective does") && said.ends_with("lowered here"), "{said}");
        let said = note(Recompute::Full, 1, false).unwrap();
        assert!(said.contains("nothing else changes"), "{said}");
    }
}
