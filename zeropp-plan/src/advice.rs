//! What another job would come to: less of what does not fit, more memory, larger batches. All that
//! is advised was planned.

use serde::Serialize;
use zeropp_data::files::in_words;

use crate::PlanError;
use crate::exact::Planned;
use crate::layout::{Fixed, Job, Layout, Slices};
use crate::search::{Named, Search};

/// Times as many GPUs, and parts of a batch or of a sample, that are tried.
const MORE_GPUS: [usize; 4] = [2, 4, 8, 16];
const SMALLER_BATCHES: [usize; 6] = [2, 4, 8, 16, 32, 64];
const SHORTER: [usize; 4] = [2, 4, 8, 16];
/// Times the batch that is planned beside a plan's own.
const LARGER_BATCHES: [usize; 2] = [2, 4];

/// What 10 % more memory would buy.
#[derive(Clone, Debug, Serialize)]
pub struct MoreMemory {
    /// Seconds of a step of the best layout then.
    pub step_s: f64,
    /// That layout.
    pub layout: Layout,
}

/// The best layout with 10 % more memory, where it takes a thousandth less than `least_s`, or more.
pub(crate) fn more_memory(search: &mut Search, memory: u64, least_s: f64) -> Option<MoreMemory> {
    let best = fastest(search.within((memory as f64 * 1.1) as u64).best)?;
    let faster = best.step_s < least_s * 0.999;
    faster.then_some(MoreMemory { step_s: best.step_s, layout: best.layout })
}

fn fastest(layouts: Vec<Planned>) -> Option<Planned> {
    layouts.into_iter().min_by(|a, b| a.step_s.total_cmp(&b.step_s))
}

/// What a larger batch would come to.
#[derive(Clone, Debug, Serialize)]
pub struct LargerBatch {
    /// Times the samples of the plan's step.
    pub times: usize,
    /// Tokens in a second then, of all ranks; none where no layout fits.
    pub tokens_per_s: Option<f64>,
}

/// What twice and four times the batch come to, where `now` are the best layouts of the job itself:
/// at least as good as they with more micro-batches.
pub(crate) fn larger_batches(job: &Job, now: &[Planned]) -> Vec<LargerBatch> {
    let of = |times: usize| {
        let global_batch = job.global_batch * times;
        let tokens = (global_batch * job.model.seq) as f64;
        let longer = |planned: &Planned| {
            let layout = &planned.layout;
            let micro_batches = times * layout.micro_batches;
            let unit = if layout.in_units() { layout.unit } else { micro_batches };
            Named {
                layout: Layout { micro_batches, unit, ..layout.clone() },
                blocks: planned.blocks.clone(),
                is_split: !planned.head_blocks.is_empty(),
            }
        };
        let larger = Job { global_batch, ..job.clone() };
        let named: Vec<Named> = now.iter().map(longer).collect();
        let best = fastest(Search::near(&larger, &named).within(job.memory).best);
        LargerBatch { times, tokens_per_s: best.map(|best| tokens / best.step_s) }
    };
    LARGER_BATCHES.map(of).into()
}

/// A job that differs in one thing from one that no layout fits, in words, and that one fits.
pub(crate) struct FittingChange {
    pub(crate) words: String,
    pub(crate) job: Job,
}

/// For each thing that may be changed: the least change that lets a layout fit.
pub(crate) fn remedies(job: &Job) -> Vec<FittingChange> {
    let with = |words: String, change: &dyn Fn(&mut Job)| {
        let mut job = job.clone();
        change(&mut job);
        FittingChange { words, job }
    };
    let parts = |whole: usize, by: &[usize]| -> Vec<usize> {
        by.iter().filter(|by| whole.is_multiple_of(**by)).map(|by| whole / by).collect()
    };
    let gpus = MORE_GPUS.map(|times| {
        let gpus = job.gpus * times;
        with(format!("{gpus} GPUs"), &|job| job.gpus = gpus)
    });
    let batches = parts(job.global_batch, &SMALLER_BATCHES).into_iter().map(|samples| {
        let words = format!("a global batch of {samples}");
        with(words, &|job| job.global_batch = samples)
    });
    let shorter = parts(job.model.seq, &SHORTER).into_iter().map(|seq| {
        let words = format!("samples of {seq} tokens");
        with(words, &|job| job.model.seq = seq)
    });
    let mut levers: Vec<Vec<FittingChange>> =
        vec![gpus.into(), batches.collect(), shorter.collect()];
    levers.extend(given(&job.fixed).into_iter().map(|(key, without)| {
        vec![with(format!("no {key} given"), &|job| job.fixed = without.clone())]
    }));
    levers.into_iter().filter_map(least_that_fits).collect()
}

/// The least change of a lever that lets a layout fit: none where the two greatest ones do not of
/// those that leave a layout at all.
fn least_that_fits(mut lever: Vec<FittingChange>) -> Option<FittingChange> {
    let fits = |change: &FittingChange| Search::new(&change.job).ok().map(Search::any_fits);
    let mut failed = 0;
    let mut known = lever.len();
    while known > 0 && failed < 2 {
        match fits(&lever[known - 1]) {
            Some(true) => break,
            Some(false) => failed += 1,
            None => {}
        }
        known -= 1;
    }
    let known = known.checked_sub(1).filter(|_| failed < 2)?;
    let first = lever[..known].iter().position(|change| fits(change) == Some(true));
    Some(lever.swap_remove(first.unwrap_or(known)))
}

/// What is given, and all else that is.
fn given(fixed: &Fixed) -> Vec<(&'static str, Fixed)> {
    let f = || fixed.clone();
    let all = [
        (fixed.pp.is_some(), "pp", Fixed { pp: None, ..f() }),
        (fixed.zero3.is_some(), "zero3", Fixed { zero3: None, ..f() }),
        (fixed.dp.is_some(), "dp", Fixed { dp: None, ..f() }),
        (fixed.virtual_stages.is_some(), "virtual", Fixed { virtual_stages: None, ..f() }),
        (fixed.unit.is_some(), "unit", Fixed { unit: None, ..f() }),
        (
            fixed.micro_batch_size.is_some(),
            "micro-batch-size",
            Fixed { micro_batch_size: None, ..f() },
        ),
        (fixed.recompute.is_some(), "recompute", Fixed { recompute: None, ..f() }),
        (fixed.schedule.is_some(), "schedule", Fixed { schedule: None, ..f() }),
        (
            matches!(fixed.slices, Slices::Number(_)),
            "slices",
            Fixed { slices: Slices::Runnable, ..f() },
        ),
    ];
    all.into_iter().filter(|(is, ..)| *is).map(|(_, key, without)| (key, without)).collect()
}

/// That no layout fits: what the nearest needs, and what would fit.
pub(crate) fn impossible(job: &Job, leanest: Option<&Planned>, ranked: usize) -> PlanError {
    let mut fits: Vec<String> = remedies(job).into_iter().map(|remedy| remedy.words).collect();
    let memory = in_words(job.memory);
    let Some(planned) = leanest else {
        let works = match fits.is_empty() {
            true => "use rates in FLOP/s and bytes/s, such as flops_per_s = 312e12".into(),
            false => one_of(&fits),
        };
        return PlanError::new(format!(
            "memory = {memory}: none of {ranked} layouts fits, or their steps are too long to \
             simulate; {works}"
        ));
    };
    let (rank, worst) = planned.worst();
    let mut kinds: Vec<_> = worst.kinds().filter(|(kind, _)| kind.is_in_memory()).collect();
    kinds.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let largest: Vec<String> =
        kinds.iter().take(3).map(|(k, n)| format!("{} {}", k.name(), in_words(*n))).collect();
    let times = worst.total() as f64 / job.memory as f64;
    let over = match times < 3.0 {
        true => format!("{:.0} % more", 100.0 * (times - 1.0)),
        false => format!("{times:.0} times as much"),
    };
    fits.insert(0, format!("{} a rank", rounded_up(worst.total())));
    PlanError::new(format!(
        "memory = {memory}: none of {ranked} layouts fits; the nearest needs {}, {over}, on \
         pipeline rank {rank}: {} ({}); {}",
        in_words(worst.total()),
        largest.join(", "),
        planned.layout,
        one_of(&fits),
    ))
}

/// Bytes in words that are no less.
fn rounded_up(bytes: u64) -> String {
    if bytes < 1 << 30 {
        return in_words(bytes.next_multiple_of(1 << 20));
    }
    let hundredths = (bytes as u128 * 100).div_ceil(1 << 30);
    format!("{}.{:02} GiB", hundredths / 100, hundredths % 100)
}

fn one_of(fits: &[String]) -> String {
    format!("use one of these, each of which was planned and fits: {}", fits.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Recompute;
    use crate::plan::LayoutPlan;
    use crate::tests::job;

    /// The reports's words are those of jobs that plan; where less memory is needed, too.
    #[test]
    fn advice_where_nothing_fits_was_planned_and_fits() {
        let small = Job { memory: 15 << 30, ..job("14.6b", 8, 256) };
        let fixed = Fixed { recompute: Some(Recompute::None), pp: Some(8), ..Fixed::default() };
        let given = Job { memory: 30 << 30, fixed, ..job("14.6b", 8, 64) };
        for job in [small, given] {
            let said = LayoutPlan::new(&job, "").unwrap_err().to_string();
            let remedies = remedies(&job);
            assert!(!remedies.is_empty(), "{said}");
            for remedy in remedies {
                assert!(said.contains(&remedy.words), "{} in {said}", remedy.words);
                assert!(LayoutPlan::new(&remedy.job, "").is_ok(), "{}", remedy.words);
            }
            let needed = said.split("fits: ").nth(1).unwrap().split(" GiB a rank").next().unwrap();
            let gib: f64 = needed.parse().unwrap_or_else(|_| panic!("{needed} in {said}"));
            let memory = (gib * (1u64 << 30) as f64) as u64;
            assert!(LayoutPlan::new(&Job { memory, ..job.clone() }, "").is_ok(), "{said}");
        }
    }

    /// A size that is said to do is read back by those who take it.
    #[test]
    fn memory_that_would_do_is_rounded_up() {
        for (bytes, words) in
            [(35_649_000_000, "33.21 GiB"), (1 << 30, "1.00 GiB"), (5, "1.00 MiB")]
        {
            assert_eq!(rounded_up(bytes), words);
        }
    }

    /// A step of twice the micro-batches has their times at least, and fills a pipeline no worse.
    #[test]
    fn a_larger_batch_is_no_slower_for_each_token() {
        for (model, gpus, batch) in [("gpt2-xl", 8, 16), ("14.6b", 32, 64)] {
            let plan = LayoutPlan::new(&job(model, gpus, batch), "").unwrap();
            let now = plan.layouts.iter().map(|r| r.tokens_per_s).fold(0.0, f64::max);
            for larger in &plan.larger_batches {
                let per_s = larger.tokens_per_s.expect("what fits fits with more micro-batches");
                assert!(per_s > 0.999 * now, "{model} x{}: {per_s} {now}", larger.times);
            }
        }
    }

    /// A batch that does not fit is advised against where half of it does.
    #[test]
    fn a_smaller_batch_is_advised_where_it_fits() {
        // A kind whose memory grows with the batch.
        let fixed = Fixed {
            pp: Some(2),
            zero3: Some(4),
            virtual_stages: Some(4),
            micro_batch_size: Some(1),
            schedule: Some("bf-pp".into()),
            ..Fixed::default()
        };
        let half = Job { fixed, ..job("14.6b", 8, 64) };
        let needs = |job: &Job| {
            let said = LayoutPlan::new(&Job { memory: 1 << 20, ..job.clone() }, "").unwrap_err();
            let said = said.to_string();
            let gib = said.split("needs ").nth(1).unwrap().split(" GiB").next().unwrap();
            gib.parse::<f64>().unwrap()
        };
        let (less, more) = (needs(&half), needs(&Job { global_batch: 2048, ..half.clone() }));
        assert!(more > 1.05 * less, "{more} {less}");
        let memory = (0.5 * (less + more) * (1u64 << 30) as f64) as u64;
        let said = LayoutPlan::new(&Job { memory, global_batch: 2048, ..half }, "").unwrap_err();
        assert!(said.to_string().contains("a global batch of "), "{said}");
    }
}
