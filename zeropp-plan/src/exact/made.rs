//! Programs that were made: layouts whose ranks do the same share one, whatever they hold.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use zeropp_schedule::ir::Schedule;
use zeropp_schedule::lower::LowerOptions;
use zeropp_schedule::schedules::{Kind, Shape};

use crate::layout::Layout;

/// Actions of all that are kept.
const KEPT_MAX: usize = 1_000_000;

/// All that a program follows from, where its order weighs no costs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Recipe {
    schedule: &'static str,
    shape: Shape,
    tokens: Vec<u64>,
    options: LowerOptions,
}

impl Recipe {
    /// That of so many micro-batches of a layout whose samples are cut so; none where the order
    /// weighs costs.
    pub(super) fn new(
        layout: &Layout,
        shape: Shape,
        tokens: &[u64],
        options: LowerOptions,
    ) -> Option<Recipe> {
        let looks_for_order = Kind::find(layout.schedule).is_none_or(|kind| kind.obeys_limit);
        let tokens = tokens.to_vec();
        (!looks_for_order).then_some(Recipe { schedule: layout.schedule, shape, tokens, options })
    }
}

/// Programs by what they follow from.
#[derive(Clone, Debug, Default)]
pub(crate) struct MadePrograms(Arc<Mutex<HashMap<Recipe, Arc<Schedule>>>>);

impl MadePrograms {
    /// The program of a recipe, which is `made` where it is not known.
    ///
    /// # Errors
    /// Those of `made`.
    pub(super) fn of<E>(
        &self,
        recipe: Option<Recipe>,
        made: impl FnOnce() -> Result<Schedule, E>,
    ) -> Result<Arc<Schedule>, E> {
        let Some(recipe) = recipe else { return made().map(Arc::new) };
        let all = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all().get(&recipe).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let program = Arc::new(made()?);
        let mut all = all();
        let actions = |program: &Schedule| program.ranks.iter().map(Vec::len).sum::<usize>();
        let kept: usize = all.values().map(|program| actions(program)).sum();
        if kept + actions(&program) > KEPT_MAX {
            all.clear();
        }
        all.insert(recipe, program.clone());
        Ok(program)
    }
}
