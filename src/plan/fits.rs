//! Runs that need too much memory, refused with settings that would need less, found by predicting
//! for them.

use std::time::{Duration, Instant};

use zeropp_core::device::Room;
use zeropp_plan::change::Fit;
use zeropp_plan::layout::HOST;

use crate::Error;
use crate::config::{Config, DeviceKind, OutStates};
use crate::plan::blueprint::Blueprint;
use crate::plan::memory::{needed, tightest};
use crate::plan::{changes, disk, host, largest, split};
use crate::refusal::TooLittleMemory;

/// How long is looked for more: a schedule of many actions takes a while to predict for.
const TIME: Duration = Duration::from_secs(5);

/// Refuses a run that is predicted to need more than a rank may have or the machine has, or more
/// out of memory than there is room for.
///
/// # Errors
/// [`Error::Memory`], with what would fit; the folder with too little room; the layer that no GPU
/// has in one piece.
pub(crate) fn check(bp: &Blueprint) -> Result<(), Error> {
    disk::check(&bp.needs())?;
    host::check(bp)?;
    largest::check(bp)?;
    if bp.config.no_memory_check {
        return Ok(());
    }
    let even_with = bp.recompute_chosen.then(|| format!("recompute = {}", bp.config.recompute));
    let largest = bp.needs().largest().clone();
    let (needs, limit) = (bp.needs().most(), bp.config.rank_memory_bytes());
    if let Some(limit) = limit.filter(|limit| needs > *limit) {
        let fits = search(bp, |other| Some(other.needs().most()).filter(|most| *most <= limit));
        let (who, source) = (format!("pipeline rank {}", largest.pp), "rank-memory".into());
        let (needed, room, limit) = (needs, limit, source);
        let lack = TooLittleMemory { who, even_with, needed, room, limit, largest, fits };
        return Err(Error::Memory(Box::new(lack)));
    }
    let (check, here) = tightest(&bp.needs());
    let Some(Room { bytes, source }) = check.room.clone().filter(|_| check.is_too_much()) else {
        return Ok(());
    };
    let place = if bp.config.device == DeviceKind::Cpu { "this machine" } else { "one GPU" };
    // With more ranks in all, this place still has as many.
    let fits =
        search(bp, |other| Some(needed(&other.needs(), &here)).filter(|needed| *needed <= bytes));
    let who = match check.ranks {
        1 => format!("the rank on {place}"),
        n => format!("the {n} ranks on {place}"),
    };
    let (needed, limit) = (check.needed, source.to_string());
    let lack = TooLittleMemory { who, even_with, needed, room: bytes, limit, largest, fits };
    Err(Error::Memory(Box::new(lack)))
}

/// Settings, as flags, with which `fits` says how much is needed.
fn search(bp: &Blueprint, fits: impl Fn(&Blueprint) -> Option<u64>) -> Vec<(String, u64)> {
    let until = Instant::now() + TIME;
    let given = changes::given(bp);
    let found = given.with_less_memory(|layout| {
        if Instant::now() > until {
            return None;
        }
        let other = changes::with(bp, layout)?;
        Some(Fit { layout: changes::layout(&other.config), needed: fits(&other)? })
    });
    let mut found: Vec<_> =
        found.into_iter().map(|fit| (given.flags(&fit.layout), fit.needed)).collect();
    if found.is_empty() {
        let all = [OutStates::Moments, OutStates::All].into_iter();
        let needed = all.filter_map(|states| fits(&with_states_out(bp, states)?)).next();
        let flag = format!("--optimizer {}:out={}", bp.config.optimizer, states_place(bp));
        found.extend(needed.map(|needed| (flag, needed)));
    }
    found
}

/// Where states may go: a folder's name, or what stands for a GPU's host.
fn states_place(bp: &Blueprint) -> &'static str {
    if bp.config.device == DeviceKind::Cuda { HOST } else { "DIR" }
}

/// The same run with these states out, if there is one and none are.
fn with_states_out(bp: &Blueprint, states: OutStates) -> Option<Blueprint> {
    let optimizer_out = Some(states_place(bp).into());
    let config = Config { optimizer_out, optimizer_out_states: states, ..split::reopened(bp) };
    if bp.config.optimizer_out.is_some() || config.validate_for_prediction().is_err() {
        return None;
    }
    split::planned(&config, bp.model.clone(), &bp.own).ok()
}
