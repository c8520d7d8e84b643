//! Generators: pure functions from a shape to the compute actions of every rank.
//!
//! One file per schedule, each an ordered list of phases named as in its paper. A generator writes
//! compute actions only; [`lower`](crate::lower::lower) adds what the weights and the links need.
//! The W of one stage always run in micro-batch order, because the bits of a gradient depend on
//! the order of its sum.

use crate::ir::Schedule;

mod bf_pp;
mod costs;
mod dualpipe_v;
mod gpipe;
mod interleaved;
mod one_f_one_b;
mod timing;
mod v_blocks;
mod v_reorder;
mod vee;
mod with_costs;
mod zb_auto;
mod zb_h;
mod zb_v;
mod zb_v_auto;
mod zeropp;
mod zeropp_auto;
mod zeropp_place;
mod zeropp_spine;

pub use costs::Costs;
pub use interleaved::interleaved_as_printed;
pub(crate) use timing::{own_span, time};
pub use v_blocks::{v_half, v_min};
pub use with_costs::generate_with_costs;
pub use zb_auto::zb;
pub use zb_v::zb_v;
pub use zeropp_auto::{zeropp_auto, zeropp_auto_unit};

/// What a schedule is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Pipeline ranks, P.
    pub pp: usize,
    /// Stages per rank, V.
    pub virtual_stages: usize,
    /// Micro-batches per rank and step, B.
    pub micro_batches: usize,
    /// Micro-batches in one scheduling unit, U; schedules that reduce gradients once a step have
    /// one unit of B and ignore it.
    pub unit: usize,
}

/// The most compute actions of one schedule; a larger shape is a slip of the keyboard.
pub const ACTIONS_MAX: usize = 1 << 27;

/// Why no schedule can be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// No generator has this name.
    #[error("schedule: unknown kind `{kind}`; known kinds: {known}")]
    UnknownKind {
        /// The name given.
        kind: String,
        /// The names there are, comma-separated.
        known: String,
    },
    /// A field of the shape does not suit the schedule.
    #[error("schedule {kind}: {field} = {value} does not work; {works}")]
    Field {
        /// The schedule.
        kind: &'static str,
        /// The field of [`Shape`].
        field: &'static str,
        /// Its value.
        value: usize,
        /// What would work.
        works: String,
    },
    /// The shape has more actions than [`ACTIONS_MAX`].
    #[error(
        "schedule {kind}: pp = {pp}, virtual_stages = {virtual_stages}, micro_batches = \
         {micro_batches} make more than {ACTIONS_MAX} actions; make one of them smaller"
    )]
    TooLarge {
        /// The schedule.
        kind: &'static str,
        /// P.
        pp: usize,
        /// V.
        virtual_stages: usize,
        /// B.
        micro_batches: usize,
    },
}

/// A generator in the registry.
pub struct Kind {
    /// Name on the command line and in [`Schedule::kind`].
    pub name: &'static str,
    /// One line for help texts.
    pub about: &'static str,
    /// Makes the compute actions, for a shape that [`generate`] has found to be nowhere zero.
    pub generate: fn(&Shape) -> Result<Schedule, ScheduleError>,
}

/// Every kind, in the order of help texts.
pub const KINDS: &[Kind] = &[
    Kind {
        name: "zeropp",
        about: "blockwise units, B and W split; gathers 2V-1 times per rank and unit",
        generate: zeropp::generate,
    },
    Kind {
        name: "gpipe",
        about: "all forwards, then all backwards (breadth-first where V > 1)",
        generate: gpipe::generate,
    },
    Kind {
        name: "1f1b",
        about: "one forward, one backward; one stage a rank",
        generate: one_f_one_b::generate,
    },
    Kind {
        name: "interleaved",
        about: "1F1B on several looping stages a rank, whole backwards",
        generate: interleaved::generate,
    },
    Kind {
        name: "bf-pp",
        about: "breadth-first on looping stages, whole backwards",
        generate: bf_pp::generate,
    },
    Kind {
        name: "interleaved-zb",
        about: "interleaved 1F1B with W apart from B",
        generate: interleaved::generate_zb,
    },
    Kind {
        name: "zb-h1",
        about: "zero bubble by hand with the memory of 1F1B; one stage a rank",
        generate: zb_h::h1,
    },
    Kind {
        name: "zb-h2",
        about: "zero bubble by hand with twice the memory of 1F1B; one stage a rank",
        generate: zb_h::h2,
    },
    Kind {
        name: "zb-1p",
        about: "zero bubble within the memory of 1F1B, by search; one stage a rank",
        generate: zb_auto::zb_1p,
    },
    Kind {
        name: "zb-2p",
        about: "zero bubble within twice the memory of 1F1B, by search; one stage a rank",
        generate: zb_auto::zb_2p,
    },
    Kind {
        name: "zb-v",
        about: "zero bubble by hand on two chunks a rank in the shape of a V",
        generate: zb_v::generate,
    },
    Kind {
        name: "v-half",
        about: "half the memory of 1F1B on two chunks a rank in the shape of a V",
        generate: v_blocks::half,
    },
    Kind {
        name: "v-min",
        about: "a third of the memory of 1F1B on two chunks a rank in the shape of a V",
        generate: v_blocks::min,
    },
    Kind {
        name: "zeropp-auto",
        about: "ZeroPP with warm-up and places of W chosen for given times",
        generate: zeropp_auto::generate,
    },
    Kind {
        name: "dualpipe-v",
        about: "overlapped F and BW pairs on two chunks a rank in the shape of a V",
        generate: dualpipe_v::generate,
    },
];

/// The compute-only schedule `kind` for `shape`.
///
/// # Errors
/// An unknown kind, a zero in the shape, a shape that the kind cannot run or that is absurdly
/// large.
pub fn generate(kind: &str, shape: &Shape) -> Result<Schedule, ScheduleError> {
    let Some(found) = KINDS.iter().find(|k| k.name == kind) else {
        let known = KINDS.iter().map(|k| k.name).collect::<Vec<_>>().join(", ");
        return Err(ScheduleError::UnknownKind { kind: kind.into(), known });
    };
    shape.check(found.name)?;
    (found.generate)(shape)
}

impl Shape {
    /// Stages, S = P·V.
    pub fn stages(&self) -> usize {
        self.pp * self.virtual_stages
    }

    /// The sizes of the step's units: U, U, .., and what is left.
    pub fn units(&self) -> Vec<usize> {
        let full = self.micro_batches / self.unit;
        let rest = self.micro_batches % self.unit;
        let mut units = vec![self.unit; full];
        units.extend((rest > 0).then_some(rest));
        units
    }

    /// Refuses zeros and absurd sizes.
    pub(crate) fn check(&self, kind: &'static str) -> Result<(), ScheduleError> {
        let fields = [
            ("pp", self.pp),
            ("virtual_stages", self.virtual_stages),
            ("micro_batches", self.micro_batches),
            ("unit", self.unit),
        ];
        if let Some((field, value)) = fields.into_iter().find(|(_, v)| *v == 0) {
            return Err(ScheduleError::Field {
                kind,
                field,
                value,
                works: "it must be at least 1".into(),
            });
        }
        let actions = [self.pp, self.virtual_stages, self.micro_batches]
            .into_iter()
            .try_fold(3usize, |n, f| n.checked_mul(f));
        match actions {
            Some(n) if n <= ACTIONS_MAX => Ok(()),
            _ => Err(ScheduleError::TooLarge {
                kind,
                pp: self.pp,
                virtual_stages: self.virtual_stages,
                micro_batches: self.micro_batches,
            }),
        }
    }

    /// Refuses V > 1 for schedules with one stage a rank; `instead` names what would run it.
    fn one_stage_a_rank(&self, kind: &'static str, instead: &str) -> Result<(), ScheduleError> {
        if self.virtual_stages == 1 {
            return Ok(());
        }
        Err(ScheduleError::Field {
            kind,
            field: "virtual_stages",
            value: self.virtual_stages,
            works: format!("it must be 1, or take {instead}"),
        })
    }
}

#[cfg(test)]
mod auto_tests;
#[cfg(test)]
mod closed_forms;
#[cfg(test)]
mod tests;
