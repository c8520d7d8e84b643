//! The table of schedules: a row says all that anyone needs to know of a kind by its name.

use super::kind::{Kind, Rate, StagesPerRank, StepForm};
use super::{FORWARD, Forms, OrderCosts, Planning, ScheduleError, Shape, unit_note};
use super::{breadth_first, dualpipe_v, interleaved, one_f_one_b, v_blocks, zb_auto, zb_h, zb_v};
use super::{sliced, zeropp, zeropp_auto};
use crate::ir::{Schedule, looping, vee};

use Rate::{Makespan, MakespanLessMessages, OwnSpan};
use StagesPerRank::{Any, Exactly, MultipleOf};
use StepForm::{Rounds, Units, Whole};

/// Why kinds are not planned with.
const SEARCHED: &str = "its order is searched for, which takes too long for every layout";

/// The kind of a run that names none.
pub const DEFAULT: &str = KINDS[0].name;

/// Every kind, in the order of help texts.
pub const KINDS: &[Kind] = &[
    Kind {
        name: "zeropp",
        about: "blockwise units, B and W split; gathers 2V-1 times per rank and unit",
        stages: Any(2),
        step: Units,
        rate: OwnSpan,
        obeys_limit: false,
        plans_gathers: false,
        placement: looping,
        splits: true,
        planning: Planning::With(Forms::ZEROPP),
        note: unit_note,
        with_unit: None,
        ahead: Some(zeropp::ahead),
        in_slices: Some(zeropp::in_slices),
        generate: |shape, _| zeropp::generate(shape),
    },
    Kind {
        name: "gpipe",
        about: "all forwards, then all backwards (breadth-first where V > 1)",
        stages: Any(1),
        step: Whole,
        rate: Makespan,
        obeys_limit: false,
        plans_gathers: false,
        placement: looping,
        splits: false,
        planning: Planning::Not("bf-pp has the same order"),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, _| breadth_first::generate("gpipe", shape),
    },
    Kind {
        name: "1f1b",
        about: "one forward, one backward; one stage a rank",
        stages: Exactly(1),
        step: Whole,
        rate: Makespan,
        obeys_limit: false,
        plans_gathers: false,
        placement: looping,
        splits: false,
        planning: Planning::With(Forms::ONE_F_ONE_B),
        note: |_| None,
        with_unit: None,
        ahead: Some(one_f_one_b::ahead),
        in_slices: Some(one_f_one_b::in_slices),
        generate: |shape, _| one_f_one_b::generate(shape),
    },
    Kind {
        name: "interleaved",
        about: "1F1B on several looping stages a rank, whole backwards",
        stages: Any(2),
        step: Rounds,
        rate: MakespanLessMessages,
        obeys_limit: false,
        plans_gathers: false,
        placement: looping,
        splits: false,
        planning: Planning::With(Forms::INTERLEAVED),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, _| interleaved::generate(shape),
    },
    Kind {
        name: "bf-pp",
        about: "breadth-first on looping stages, whole backwards",
        stages: Any(2),
        step: Whole,
        rate: Makespan,
        obeys_limit: false,
        plans_gathers: false,
        placement: looping,
        splits: false,
        planning: Planning::With(Forms::BREADTH_FIRST),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, _| breadth_first::generate("bf-pp", shape),
    },
    Kind {
        name: "interleaved-zb",
        about: "interleaved 1F1B with W apart from B",
        stages: Any(2),
        step: Rounds,
        rate: Makespan,
        obeys_limit: false,
        plans_gathers: false,
        placement: looping,
        splits: true,
        planning: Planning::With(Forms::INTERLEAVED_ZB),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: Some(interleaved::in_slices),
        generate: |shape, _| interleaved::generate_zb(shape),
    },
    Kind {
        name: "zb-h1",
        about: "zero bubble by hand with the memory of 1F1B; one stage a rank",
        stages: Exactly(1),
        step: Whole,
        rate: Makespan,
        obeys_limit: false,
        plans_gathers: false,
        placement: looping,
        splits: true,
        planning: Planning::With(Forms::ZB_H1),
        note: |_| None,
        with_unit: None,
        ahead: Some(zb_h::ahead),
        in_slices: None,
        generate: |shape, _| zb_h::h1(shape),
    },
    Kind {
        name: "zb-h2",
        about: "zero bubble by hand with twice the memory of 1F1B; one stage a rank",
        stages: Exactly(1),
        step: Whole,
        rate: OwnSpan,
        obeys_limit: false,
        plans_gathers: false,
        placement: looping,
        splits: true,
        planning: Planning::With(Forms::ZB_H2),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, _| zb_h::h2(shape),
    },
    Kind {
        name: "zb-1p",
        about: "zero bubble within the memory of 1F1B, by search; one stage a rank",
        stages: Exactly(1),
        step: Whole,
        rate: OwnSpan,
        obeys_limit: true,
        plans_gathers: false,
        placement: looping,
        splits: true,
        planning: Planning::Not(SEARCHED),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, costs| zb_auto::within("zb-1p", shape, costs, 1),
    },
    Kind {
        name: "zb-2p",
        about: "zero bubble within twice the memory of 1F1B, by search; one stage a rank",
        stages: Exactly(1),
        step: Whole,
        rate: OwnSpan,
        obeys_limit: true,
        plans_gathers: false,
        placement: looping,
        splits: true,
        planning: Planning::Not(SEARCHED),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, costs| zb_auto::within("zb-2p", shape, costs, 2),
    },
    Kind {
        name: "zb-v",
        about: "zero bubble on two chunks a rank in the shape of a V, by hand or by search",
        stages: Exactly(2),
        step: Whole,
        rate: OwnSpan,
        obeys_limit: true,
        plans_gathers: false,
        placement: vee,
        splits: true,
        planning: Planning::With(Forms::ZB_V),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, costs| match costs {
            Some(costs) => zb_v::zb_v(shape, costs),
            None => zb_v::generate(shape),
        },
    },
    Kind {
        name: "v-half",
        about: "half the memory of 1F1B on two chunks a rank in the shape of a V",
        stages: Exactly(2),
        step: Whole,
        rate: OwnSpan,
        obeys_limit: true,
        plans_gathers: false,
        placement: vee,
        splits: true,
        planning: Planning::With(Forms::V_HALF),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, costs| v_blocks::v_half(shape, &or_equal(costs, shape)),
    },
    Kind {
        name: "v-min",
        about: "a third of the memory of 1F1B on two chunks a rank in the shape of a V",
        stages: Exactly(2),
        step: Whole,
        rate: OwnSpan,
        obeys_limit: true,
        plans_gathers: false,
        placement: vee,
        splits: true,
        planning: Planning::With(Forms::V_MIN),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, costs| v_blocks::v_min(shape, &or_equal(costs, shape)),
    },
    Kind {
        name: "auto",
        about: "searched for within limits on activations, gathered weights and gathers",
        stages: Any(2),
        step: Whole,
        rate: OwnSpan,
        obeys_limit: true,
        plans_gathers: true,
        placement: looping,
        splits: true,
        planning: Planning::Not(SEARCHED),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |_, _| Err(ScheduleError::Searched { kind: "auto" }),
    },
    Kind {
        name: "zeropp-auto",
        about: "ZeroPP with warm-up and places of W chosen for given times",
        stages: Any(2),
        step: Units,
        rate: OwnSpan,
        obeys_limit: true,
        plans_gathers: false,
        placement: looping,
        splits: true,
        planning: Planning::Not(SEARCHED),
        note: |_| None,
        with_unit: Some(zeropp_auto::zeropp_auto_unit),
        ahead: None,
        in_slices: None,
        generate: |shape, costs| zeropp_auto::zeropp_auto(shape, &or_equal(costs, shape)),
    },
    Kind {
        name: "dualpipe-v",
        about: "overlapped F and BW pairs on two chunks a rank in the shape of a V",
        stages: Exactly(2),
        step: Whole,
        rate: Makespan,
        obeys_limit: false,
        plans_gathers: false,
        placement: vee,
        splits: true,
        planning: Planning::With(Forms::DUALPIPE_V),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, _| dualpipe_v::generate(shape),
    },
    Kind {
        name: "hanayo",
        about: "waves over the ranks, to and fro, whole backwards; V is even",
        stages: MultipleOf(2),
        step: Whole,
        rate: Makespan,
        obeys_limit: false,
        plans_gathers: false,
        placement: vee,
        splits: false,
        planning: Planning::With(Forms::HANAYO),
        note: |_| None,
        with_unit: None,
        ahead: None,
        in_slices: None,
        generate: |shape, _| super::hanayo::generate(shape),
    },
];

/// These costs, or those of equal stages without communication.
fn or_equal(costs: Option<&OrderCosts>, shape: &Shape) -> OrderCosts {
    costs.cloned().unwrap_or_else(|| OrderCosts::uniform(shape.stages(), 1, 1, 1, 0))
}

impl Kind {
    /// The kinds among whose layouts planners choose.
    pub fn planned() -> impl Iterator<Item = &'static Kind> {
        KINDS.iter().filter(|kind| kind.forms().is_some())
    }

    /// The row with this name: one of [`KINDS`], or [`FORWARD`].
    pub fn find(name: &str) -> Option<&'static Kind> {
        KINDS.iter().chain([&FORWARD]).find(|kind| kind.name == name)
    }

    /// The names of all kinds that `choose` takes, in words: `a, b and c`.
    pub fn names(choose: impl Fn(&Kind) -> bool) -> String {
        let names: Vec<&str> = KINDS.iter().filter(|k| choose(k)).map(|k| k.name).collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_string(),
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
            None => String::new(),
        }
    }
}

/// The compute-only schedule `kind` for `shape`, made for equal stages.
///
/// # Errors
/// An unknown kind, a zero in the shape, a shape that the kind cannot run or that is absurdly
/// large.
pub fn generate(kind: &str, shape: &Shape) -> Result<Schedule, ScheduleError> {
    made(kind, shape, None)
}

/// Like [`generate`]; kinds that weigh one order against another do it with `costs`, the others
/// have one order whatever it costs. Without a memory limit in `costs`, `zb-1p` and `zb-2p` take
/// the ones they are named after: P and 2P micro-batches of the stage that holds most.
///
/// # Errors
/// As [`generate`]; also costs that do not fit the shape, and a memory limit that is too small.
pub fn generate_with_costs(
    kind: &str,
    shape: &Shape,
    costs: &OrderCosts,
) -> Result<Schedule, ScheduleError> {
    made(kind, shape, Some(costs))
}

fn made(kind: &str, shape: &Shape, costs: Option<&OrderCosts>) -> Result<Schedule, ScheduleError> {
    let found = Kind::find(kind).ok_or_else(|| {
        let known = KINDS.iter().map(|k| k.name).collect::<Vec<_>>().join(", ");
        ScheduleError::UnknownKind { kind: kind.into(), known }
    })?;
    shape.check(found.name)?;
    (found.generate)(shape, costs)
}

/// Like [`generate`] with a head that is split into `slices`, blocks of each rank
/// ([`Schedule::head_blocks`]): `costs` has entries for stages and slices; without, stages are
/// equal and the head is one of them. Without slices the head is whole.
///
/// # Errors
/// As [`generate`]; also a kind whose head is always whole, and slices that are none for this many
/// ranks.
pub fn generate_split(
    kind: &str,
    shape: &Shape,
    slices: &[usize],
    costs: Option<&OrderCosts>,
) -> Result<Schedule, ScheduleError> {
    if slices.is_empty() {
        return made(kind, shape, costs);
    }
    // What the kind itself refuses comes first.
    let name = Kind::find(kind).map_or("", |kind| kind.name);
    let ahead = Kind::find(kind).and_then(|kind| kind.ahead);
    let Some(ahead) = ahead else {
        made(kind, shape, None)?;
        return Err(ScheduleError::WholeHead {
            kind: name,
            split: Kind::names(|kind| kind.ahead.is_some()),
        });
    };
    shape.check(name)?;
    with_head(name, shape, &[1], slices, costs, |more| ahead(shape, more))
}

/// The fastest of the orders that `base` makes with a head in these blocks of each rank, of samples
/// in slices of so many tokens.
fn with_head(
    kind: &'static str,
    shape: &Shape,
    sample_slices: &[u64],
    head_blocks: &[usize],
    costs: Option<&OrderCosts>,
    base: impl Fn(usize) -> Result<Schedule, ScheduleError>,
) -> Result<Schedule, ScheduleError> {
    sliced::check(kind, shape.pp, head_blocks)?;
    let equal = || sliced::equal(shape, sample_slices, head_blocks);
    let costs = costs.cloned().unwrap_or_else(equal);
    sliced::fastest(kind, shape, head_blocks, &costs, base)
}

/// Like [`generate`] with every sample cut into slices of so many tokens: the numbers of `shape`
/// are of samples, one a micro-batch, those of the schedule of slices
/// ([`Schedule::sample_slices`]). Without slices samples are whole.
///
/// # Errors
/// As [`generate`]; also a kind that has whole samples only, and slices of no tokens.
pub fn generate_sliced(
    kind: &str,
    shape: &Shape,
    sample_slices: &[u64],
) -> Result<Schedule, ScheduleError> {
    generate_cut(kind, shape, sample_slices, &[], None)
}

/// Like [`generate_split`] and [`generate_sliced`] at once, with what is cut of the two: `costs`
/// has entries for stages and `head_blocks`, and of each for all slices of a sample.
///
/// # Errors
/// As they.
pub fn generate_cut(
    kind: &str,
    shape: &Shape,
    sample_slices: &[u64],
    head_blocks: &[usize],
    costs: Option<&OrderCosts>,
) -> Result<Schedule, ScheduleError> {
    let Some(row) = Kind::find(kind).filter(|_| !sample_slices.is_empty()) else {
        return generate_split(kind, shape, head_blocks, costs);
    };
    let (name, n) = (row.name, sample_slices.len());
    let Some(in_slices) = row.in_slices else {
        let sliced = Kind::names(|kind| kind.in_slices.is_some()).replace(" and ", " or ");
        return Err(ScheduleError::WholeSamples { kind: name, slices: n, sliced });
    };
    shape.check(name)?;
    let of_samples = |samples: usize| samples.saturating_mul(n);
    let unit = of_samples(shape.unit.min(shape.micro_batches));
    let in_all = Shape { micro_batches: of_samples(shape.micro_batches), unit, ..*shape };
    in_all.check(name)?;
    let base = |more| {
        let schedule = in_slices(&in_all, n, more)?;
        let schedule = Schedule { sample_slices: sample_slices.to_vec(), ..schedule };
        match schedule.slices_fault() {
            None => Ok(schedule),
            Some(works) => {
                Err(ScheduleError::Field { kind: name, field: "slices", value: n, works })
            }
        }
    };
    match head_blocks.is_empty() {
        true => base(0),
        false => with_head(name, shape, sample_slices, head_blocks, costs, base),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_costs_give_the_registry_s_own_orders() {
        for kind in KINDS.iter().filter(|kind| !kind.is_searched()) {
            for v in [1, 2] {
                let shape = Shape { pp: 4, virtual_stages: v, micro_batches: 8, unit: 8 };
                let costs = OrderCosts::uniform(shape.stages(), 1, 1, 1, 0);
                match generate(kind.name, &shape) {
                    // ZB-V's own entry is the order by hand.
                    Ok(own) if kind.name != "zb-v" => {
                        assert_eq!(generate_with_costs(kind.name, &shape, &costs), Ok(own));
                    }
                    Ok(own) => {
                        let made = generate_with_costs(kind.name, &shape, &costs).unwrap();
                        assert_eq!(made.placement, own.placement);
                    }
                    Err(e) => assert_eq!(generate_with_costs(kind.name, &shape, &costs), Err(e)),
                }
            }
        }
    }

    #[test]
    fn costs_change_what_weighs_them() {
        let shape = Shape { pp: 4, virtual_stages: 1, micro_batches: 12, unit: 12 };
        let even = generate("zb-2p", &shape).unwrap();
        let uneven =
            generate_with_costs("zb-2p", &shape, &OrderCosts::uniform(4, 5, 9, 2, 1)).unwrap();
        assert_ne!(even.ranks, uneven.ranks);
        let error =
            generate_with_costs("zb-1p", &shape, &OrderCosts::uniform(3, 1, 1, 1, 0)).unwrap_err();
        assert!(error.to_string().contains("costs"), "{error}");
    }
}
