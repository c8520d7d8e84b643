//! Other settings for a run that is given: those with which it would hold less, and those with
//! which its ranks would idle less. Whoever has the run predicts for each; here is which are tried,
//! in which order, and which is best.

use zeropp_data::files::in_words;
use zeropp_schedule::schedules::{Kind, default_unit};

use crate::deal::Deal;
use crate::layout::{Layout, Recompute};
use crate::worth::{WORTH, is_worth};

/// How many ways to hold less are looked for.
const WANTED: usize = 3;
/// Stages on a rank that are tried.
const STAGES: std::ops::RangeInclusive<usize> = 1..=8;
/// Parts of a unit that are tried for what is recomputed in full.
const EIGHTHS: usize = 8;

/// A run whose settings may be changed. All that is changed trains the same batch.
#[derive(Clone, Debug)]
pub struct ChangeableRun {
    /// Its settings; without a name of a schedule where that is from a file.
    pub layout: Layout,
    /// U, where that is given; else it follows from P, V and B.
    pub unit: Option<usize>,
    /// Blocks of the model.
    pub blocks: usize,
    /// Whether the model is cut by hand, which leaves no other number of stages.
    pub is_cut: bool,
    /// How its micro-batches are dealt out.
    pub deal: Deal,
    /// Whether B follows from the samples of a step, which are given.
    pub has_samples: bool,
    /// Whether there may be more ranks, each with a machine or a device of its own.
    pub may_grow: bool,
}

/// Settings with which a run fits, and what it needs then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// The settings.
    pub layout: Layout,
    /// Bytes.
    pub needed: u64,
}

/// What a run comes to.
#[derive(Clone, Debug)]
pub struct RunOutcome {
    /// Its settings.
    pub layout: Layout,
    /// Simulated time of a step, ns.
    pub step_ns: u64,
    /// Idle share of it.
    pub bubble: f64,
    /// Bytes of the rank that holds most.
    pub most: u64,
}

/// A setting's value, as a flag has it.
type Value = fn(&Layout) -> String;

/// Of one setting the values that need less and less.
type Ladder = fn(&ChangeableRun, &Layout) -> Vec<Layout>;

const LADDERS: [Ladder; 6] = [recompute, micro_batch_size, unit, virtual_stages, zero1, zero3];

impl ChangeableRun {
    /// Up to three settings with which `fits` says how much is needed, because it fits: the fewest
    /// changes first, of each set of them all but the last as far as they go, and the last no
    /// further than it takes.
    pub fn with_less_memory(&self, mut fits: impl FnMut(&Layout) -> Option<Fit>) -> Vec<Fit> {
        let mut sets: Vec<usize> = (1..1 << LADDERS.len()).collect();
        sets.sort_by_key(|set| set.count_ones());
        let mut found: Vec<(usize, Fit)> = Vec::new();
        for set in sets {
            // With more settings than fit already there is nothing new to say.
            if found.len() == WANTED || found.iter().any(|(other, _)| set & other == *other) {
                continue;
            }
            let chosen: Vec<_> = (0..LADDERS.len()).filter(|i| set >> i & 1 == 1).collect();
            let (last, others) = chosen.split_last().expect("a set has one");
            let far = |from: Layout, i: &usize| LADDERS[*i](self, &from).pop();
            let far = others.iter().try_fold(self.layout.clone(), far);
            let fit = far.and_then(|from| LADDERS[*last](self, &from).iter().find_map(&mut fits));
            found.extend(fit.map(|fit| (set, fit)));
        }
        found.into_iter().map(|(_, fit)| fit).collect()
    }

    /// Whether another V or kind may be looked for, where a step idles for a share of `bubble`.
    pub fn may_idle_less(&self, bubble: f64) -> bool {
        let is_of_a_kind = Kind::find(self.layout.schedule).is_some();
        self.layout.pp > 1 && !self.is_cut && is_of_a_kind && bubble >= WORTH
    }

    /// What another V, or another V and kind, would have in place of `now`, in a sentence, where
    /// that is clearly less time. `tried` predicts, and has nothing to say of what does not fit.
    pub fn note(
        &self,
        now: &RunOutcome,
        tried: impl FnMut(&Layout) -> Option<RunOutcome>,
    ) -> Option<String> {
        let all = self.others();
        let best = all.iter().filter_map(tried).min_by_key(|other| other.step_ns);
        let other = best.filter(|other| is_worth(now.step_ns as f64, other.step_ns as f64))?;
        Some(format!(
            "{} would take {:.1} % off the time of a step's computes: a bubble of {:.1} % in place \
             of {:.1} %, and at most {} on a rank in place of {} (simulated)",
            self.flags_of_kind(&other.layout),
            100.0 * (1.0 - other.step_ns as f64 / now.step_ns as f64),
            100.0 * other.bubble,
            100.0 * now.bubble,
            in_words(other.most),
            in_words(now.most),
        ))
    }

    /// The same micro-batches with other stages on each rank, and other kinds that are made at
    /// once; first those that differ in one setting.
    fn others(&self) -> Vec<Layout> {
        let (now, blocks) = (&self.layout, self.blocks);
        let all = Kind::planned().flat_map(|kind| {
            let fits = move |v: &usize| kind.stages.allows(*v) && now.pp * v <= blocks;
            STAGES.filter(fits).map(move |v| (kind.name, v))
        });
        let mut all: Vec<(&'static str, usize)> = all.collect();
        all.retain(|other| *other != (now.schedule, now.virtual_stages));
        let changes = |(kind, v): &(&str, usize)| {
            usize::from(*kind != now.schedule) + usize::from(*v != now.virtual_stages)
        };
        all.sort_by_key(changes);
        let of = |(schedule, virtual_stages)| {
            let unit = self.unit.filter(|_| schedule == now.schedule);
            follow(Layout { schedule, virtual_stages, ..now.clone() }, unit)
        };
        all.into_iter().map(of).collect()
    }

    /// V and the kind of `to`, as flags, with what followed from it.
    fn flags_of_kind(&self, to: &Layout) -> String {
        // V follows from the kind where it is not given.
        let mut flags = vec![format!("--virtual {}", to.virtual_stages)];
        if self.layout.schedule != to.schedule {
            flags.push(format!("--schedule {}", to.schedule));
        }
        if !self.has_samples {
            flags.push(format!("--micro-batches {}", to.micro_batches));
        }
        flags.join(" ")
    }

    /// What differs in `to`, as flags. A unit that was left open would follow from others of them.
    pub fn flags(&self, to: &Layout) -> String {
        let from = &self.layout;
        let values: [(&str, Value); 6] = [
            ("recompute", Layout::recomputation),
            ("micro-batch-size", |l| l.micro_batch_size.to_string()),
            ("virtual", |l| l.virtual_stages.to_string()),
            ("zero1", |l| l.zero1.to_string()),
            ("zero3", |l| l.zero3.to_string()),
            ("micro-batches", |l| l.micro_batches.to_string()),
        ];
        let differs = values.iter().filter(|(_, of)| of(from) != of(to));
        let mut flags: Vec<String> =
            differs.map(|(key, of)| format!("--{key} {}", of(to))).collect();
        let follows = ["--virtual", "--micro-batches"];
        let moves = flags.iter().any(|flag| follows.iter().any(|key| flag.starts_with(key)));
        if to.in_units() && (moves || from.unit != to.unit) {
            flags.push(format!("--unit {}", to.unit));
        }
        flags.join(" ").replace("--zero1 true", "--zero1")
    }
}

/// `layout` with the unit that is given, or that follows.
fn follow(layout: Layout, unit: Option<usize>) -> Layout {
    let Layout { pp, virtual_stages, micro_batches, .. } = layout;
    let unit = match layout.in_units() {
        true => unit.unwrap_or_else(|| default_unit(pp, virtual_stages, micro_batches)),
        false => micro_batches,
    };
    Layout { unit, ..layout }
}

fn recompute(_: &ChangeableRun, from: &Layout) -> Vec<Layout> {
    let none = matches!(from.recompute, Recompute::Auto | Recompute::None);
    let selective = none.then_some((Recompute::Selective, None));
    let now = match from.recompute {
        Recompute::Full => from.redone.unwrap_or(from.unit),
        _ => 0,
    };
    let mut first: Vec<usize> = (1..EIGHTHS).map(|n| n * from.unit / EIGHTHS).collect();
    first.dedup();
    first.retain(|first| *first > now);
    let first = first.into_iter().map(|first| (Recompute::Full, Some(first)));
    let all = (now < from.unit).then_some((Recompute::Full, None));
    let less = selective.into_iter().chain(first).chain(all);
    less.map(|(recompute, redone)| Layout { recompute, redone, ..from.clone() }).collect()
}

/// 2, 4, 8 and so on, up to `most`.
fn powers(most: usize) -> impl Iterator<Item = usize> {
    (1..usize::BITS).map(|i| 1 << i).take_while(move |by| *by <= most)
}

/// The same samples of a step in more micro-batches.
fn micro_batch_size(given: &ChangeableRun, from: &Layout) -> Vec<Layout> {
    let size = from.micro_batch_size;
    let divided = |by: usize| {
        let micro_batches = from.micro_batches.saturating_mul(by);
        follow(Layout { micro_batch_size: size / by, micro_batches, ..from.clone() }, given.unit)
    };
    powers(size).filter(|by| size.is_multiple_of(*by)).map(divided).collect()
}

fn unit(_: &ChangeableRun, from: &Layout) -> Vec<Layout> {
    let smaller = |by: usize| Layout { unit: from.unit / by, ..from.clone() };
    powers(from.unit).filter(|_| from.in_units()).map(smaller).collect()
}

fn virtual_stages(given: &ChangeableRun, from: &Layout) -> Vec<Layout> {
    let v = from.virtual_stages;
    let fits = |by: &usize| !given.is_cut && from.pp * v * by <= given.blocks;
    // A unit that is smaller by now stays so.
    let unit = given.unit.or((from.unit != given.layout.unit).then_some(from.unit));
    let more = |by: usize| follow(Layout { virtual_stages: v * by, ..from.clone() }, unit);
    powers(4).filter(fits).map(more).collect()
}

fn zero1(_: &ChangeableRun, from: &Layout) -> Vec<Layout> {
    let helps = from.dp > 1 && !from.zero1;
    helps.then(|| Layout { zero1: true, ..from.clone() }).into_iter().collect()
}

/// More ranks, where there may be some.
fn zero3(given: &ChangeableRun, from: &Layout) -> Vec<Layout> {
    let (batches, all) = (from.micro_batches, given.deal.all());
    let more = |by: usize| {
        let micro_batches = batches / by;
        let unit = from.unit.min(micro_batches);
        follow(Layout { zero3: from.zero3 * by, micro_batches, ..from.clone() }, Some(unit))
    };
    let divides = |by: usize| match given.deal.fewer() {
        Some(_) => all.is_multiple_of(by) && all / by >= from.dp,
        None => batches.is_multiple_of(by),
    };
    powers(8).filter(|by| given.may_grow && divides(*by)).map(more).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given() -> ChangeableRun {
        let layout = Layout {
            pp: 4,
            zero3: 1,
            dp: 1,
            virtual_stages: 2,
            unit: 7,
            micro_batches: 14,
            micro_batch_size: 2,
            recompute: Recompute::None,
            redone: None,
            zero1: false,
            schedule: "zeropp",
            prefetch: 1,
            slices: 1,
            out: 0,
            out_later: false,
            moments: false,
        };
        let deal = Deal::even(14, 1);
        let unit = None;
        ChangeableRun {
            layout,
            unit,
            blocks: 16,
            is_cut: false,
            deal,
            has_samples: false,
            may_grow: false,
        }
    }

    #[test]
    fn the_fewest_changes_that_fit_are_told_with_what_follows_from_them() {
        let given = given();
        // Half the samples, or half the stages' activations, fit.
        let fits = |l: &Layout| {
            let needed = l.micro_batch_size * l.unit * 10 / l.virtual_stages;
            (needed <= 40).then(|| Fit { layout: l.clone(), needed: needed as u64 })
        };
        let found = given.with_less_memory(fits);
        let flags: Vec<String> = found.iter().map(|fit| given.flags(&fit.layout)).collect();
        assert_eq!(flags[0], "--micro-batch-size 1 --micro-batches 28 --unit 7");
        assert_eq!(flags[1], "--unit 3");
        assert_eq!(flags[2], "--virtual 4 --unit 7");
        assert!(found.iter().all(|fit| fit.needed <= 40));
        let cut = ChangeableRun { is_cut: true, ..given };
        assert!(cut.with_less_memory(fits).iter().all(|f| f.layout.virtual_stages == 2));
    }

    #[test]
    fn a_kind_that_idles_clearly_less_is_told_and_none_else() {
        let given = given();
        let outcome = |layout: &Layout, step_ns| RunOutcome {
            layout: layout.clone(),
            step_ns,
            bubble: 0.1,
            most: 1 << 30,
        };
        let now = outcome(&given.layout, 1000);
        assert!(given.may_idle_less(0.1) && !given.may_idle_less(0.01));
        assert_eq!(given.note(&now, |l| Some(outcome(l, 980))), None, "that is no reason");
        let said = given.note(&now, |l| (l.schedule == "zb-v").then(|| outcome(l, 800)));
        let said = said.unwrap();
        assert!(said.starts_with("--virtual 2 --schedule zb-v --micro-batches 14 would"), "{said}");
        assert!(said.contains("take 20.0 % off"), "{said}");
    }
}
