//! Sizes of a schedule, and what is wrong with them.

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
pub const ACTIONS_MAX: usize = 1 << 25;

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
    /// A head that is to be split in a kind that has no order for that.
    #[error("schedule {kind}: its head is always whole; split heads are for {split}")]
    WholeHead {
        /// The schedule.
        kind: &'static str,
        /// The kinds that have one.
        split: String,
    },
    /// Samples that are to be cut into slices in a kind that has no order for that.
    #[error(
        "slices = {slices}: schedule {kind} has whole samples only; use {sliced}, or leave slices \
         out"
    )]
    WholeSamples {
        /// The schedule.
        kind: &'static str,
        /// Slices of a sample.
        slices: usize,
        /// The kinds that have one.
        sliced: String,
    },
    /// Its orders are searched for by another crate.
    #[error("schedule {kind}: it is searched for; use zeropp_search::generate_with_costs")]
    Searched {
        /// The schedule.
        kind: &'static str,
    },
    /// The shape has more actions than [`ACTIONS_MAX`].
    #[error(
        "micro-batches = {micro_batches}: with pp = {pp} and virtual = {virtual_stages} schedule \
         {kind} has more than {ACTIONS_MAX} actions; make one of them smaller"
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

impl Shape {
    /// Stages, S = P·V.
    pub fn stages(&self) -> usize {
        self.pp * self.virtual_stages
    }

    /// The sizes of the step's units: U, U, .., and what is left.
    ///
    /// # Panics
    /// Panics for units of no micro-batches, which every schedule refuses.
    pub fn units(&self) -> Vec<usize> {
        let full = self.micro_batches / self.unit;
        let rest = self.micro_batches % self.unit;
        let mut units = vec![self.unit; full];
        units.extend((rest > 0).then_some(rest));
        units
    }

    /// Refuses zeros and absurd sizes.
    pub fn check(&self, kind: &'static str) -> Result<(), ScheduleError> {
        let fields = [
            ("pp", self.pp),
            ("virtual", self.virtual_stages),
            ("micro-batches", self.micro_batches),
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
    pub(super) fn one_stage_a_rank(
        &self,
        kind: &'static str,
        instead: &str,
    ) -> Result<(), ScheduleError> {
        if self.virtual_stages == 1 {
            return Ok(());
        }
        Err(ScheduleError::Field {
            kind,
            field: "virtual",
            value: self.virtual_stages,
            works: format!("it must be 1, or take {instead}"),
        })
    }
}
