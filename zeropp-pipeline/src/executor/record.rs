//! What a rank says of a step.

use zeropp_zero3::StepOutcome;

use crate::timeline::Span;

/// The results of one rank in one step.
#[derive(Clone, Debug)]
pub struct StepRecord {
    /// One span an action, in program order; times from the executor's epoch.
    pub spans: Vec<Span>,
    /// The optimizer's outcome, where the program has it; without a norm where the update was
    /// early.
    pub outcome: Option<StepOutcome>,
    /// The optimizer's outcome in the step before, where that was early and this one has validated
    /// it.
    pub validated: Option<StepOutcome>,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// The work that was dropped because the update before was wrong, where it was.
    pub redone: Option<Redone>,
}

/// The work that a rank had begun of a step and did again. It is no part of the step's spans and
/// bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Redone {
    /// Actions of the program.
    pub actions: u64,
    /// From the first of them until the rank was ready to begin again, ns.
    pub ns: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
}
