//! A run's settings as a planner changes them, and back.

use zeropp_core::optimizer::Out;
use zeropp_plan::change::ChangeableRun;
use zeropp_plan::layout::Layout;

use crate::config::{Config, EngineKind};
use crate::plan::blueprint::Blueprint;
use crate::plan::split;

/// The settings of a run that a planner changes.
pub(crate) fn layout(config: &Config) -> Layout {
    Layout {
        pp: config.pp,
        zero3: config.zero3,
        dp: config.dp,
        virtual_stages: config.virtual_stages(),
        unit: config.unit(),
        micro_batches: config.micro_batches(),
        micro_batch_size: config.micro_batch_size,
        recompute: config.recompute,
        redone: config.recompute_first,
        zero1: config.zero1,
        schedule: config.kind().map_or("", |kind| kind.name),
        prefetch: config.prefetch,
        slices: config.slices(),
        out: 0,
        out_later: false,
        moments: config.states_out() == Out::Moments,
    }
}

/// The run whose settings are to be changed.
pub(crate) fn given(bp: &Blueprint) -> ChangeableRun {
    let config = &bp.config;
    ChangeableRun {
        layout: layout(config),
        unit: config.unit,
        blocks: bp.parts.groups().len(),
        is_cut: config.stages.is_some(),
        deal: config.deal(),
        has_samples: config.global_batch.is_some(),
        may_grow: config.engine != EngineKind::Threads,
    }
}

/// The same run with these settings, if there is one.
pub(crate) fn with(bp: &Blueprint, layout: &Layout) -> Option<Blueprint> {
    let old = &bp.config;
    let schedule = match layout.schedule {
        "" => old.schedule.clone(),
        kind => kind.into(),
    };
    // Where the samples of a step are given, B follows from them.
    let micro_batches = Some(layout.micro_batches).filter(|_| old.global_batch.is_none());
    let config = Config {
        zero3: layout.zero3,
        virtual_stages: Some(layout.virtual_stages),
        unit: Some(layout.unit).filter(|_| layout.in_units()),
        micro_batches,
        micro_batch_size: layout.micro_batch_size,
        recompute: layout.recompute,
        recompute_first: layout.redone,
        zero1: layout.zero1,
        schedule,
        ..split::reopened(bp)
    };
    split::planned(&config, bp.model.clone(), &bp.own).ok()
}
