//! The reports of a run: a record per step, a plan before it, a summary after it.

mod jsonl;
mod report;

pub use jsonl::JsonLines;
pub use report::{
    Evaluation, EvaluationPlan, ExpertMetrics, LayerMetrics, Plan, RankPlan, RunHeader,
    StepMetrics, Stopped, Summary, wall_time,
};
