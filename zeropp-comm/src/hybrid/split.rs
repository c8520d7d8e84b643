//! Making sub-groups of a group that spans processes.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::group::HybridGroup;
use super::header::ProcessHeader;
use crate::patience::Deadline;
use crate::threads::barrier::{RankBarrier, RankInput, RankOutput};
use crate::threads::group::ThreadsGroup as LocalGroup;
use crate::{CommError, CommResult, Communicator};

/// The part that a rank wants to belong to.
struct LocalSplit {
    color: u64,
    key: u64,
    /// The rank's place in the group that is split.
    place: usize,
    name: String,
}

impl LocalSplit {
    fn encode(name: &str, color: usize, key: usize) -> Vec<u8> {
        let numbers = [color as u64, key as u64].into_iter().flat_map(u64::to_le_bytes);
        numbers.chain(name.bytes()).collect()
    }

    fn decode(place: usize, bytes: &[u8]) -> Option<LocalSplit> {
        let (color, rest) = bytes.split_first_chunk()?;
        let (key, name) = rest.split_first_chunk()?;
        let name = String::from_utf8(name.to_vec()).ok()?;
        let (color, key) = (u64::from_le_bytes(*color), u64::from_le_bytes(*key));
        Some(LocalSplit { color, key, place, name })
    }
}

/// A sub-group to be made.
struct SubGroup {
    name: String,
    /// Places in the group that is split, in the order of the new one.
    places: Vec<usize>,
    /// Places in the outer group of the processes that have members, by their first.
    homes: Vec<usize>,
}

/// A rank's place in a sub-group that spans processes.
pub(super) struct Joined {
    pub(super) group: Arc<HybridGroup>,
    pub(super) index: usize,
}

/// Makes the sub-groups of a collective whose ranks in this process are all here, and gives each
/// its own. Blocks until the other processes have done the same: no rank has anything else to do.
pub(super) fn split(group: &Arc<HybridGroup>, barrier: &RankBarrier, inputs: Vec<RankInput>) {
    // Where it fails, the world reports it to the ranks.
    if let Ok(outputs) = make(group, barrier, inputs) {
        barrier.slots.put(outputs);
        group.local.finish(barrier);
    }
}

fn make(
    group: &Arc<HybridGroup>,
    barrier: &RankBarrier,
    inputs: Vec<RankInput>,
) -> CommResult<Vec<RankOutput>> {
    let split_request = |input: &RankInput| match input {
        RankInput::Split(name, color, key) => LocalSplit::encode(name, *color, *key),
        _ => unreachable!("signatures are equal, so every rank passed a color"),
    };
    let header = ProcessHeader {
        signature: barrier.signature,
        data: inputs.iter().map(split_request).collect(),
    };
    let headers = exchange(group, barrier, header)?;
    let by_place = |(place, (home, index)): (usize, &(usize, usize))| {
        LocalSplit::decode(place, &headers[*home].data[*index]).expect("written by encode")
    };
    let split_requests = group.homes.iter().enumerate().map(by_place).collect();
    let parts = parts(group, barrier, split_requests)?;
    let mut outputs: Vec<Option<RankOutput>> = group.local.members.iter().map(|_| None).collect();
    let outers = join_processes(group, &parts)?;
    for (part, outer) in parts.into_iter().zip(outers) {
        let members: Vec<usize> = part.places.iter().map(|place| group.members[*place]).collect();
        group.engine.note_members(&part.name, members.clone());
        let here: Vec<(usize, usize)> =
            part.places.iter().map(|place| group.homes[*place]).collect();
        let here = here.iter().filter(|home| home.0 == group.here()).map(|home| home.1);
        let indices: Vec<usize> = here.collect();
        if indices.is_empty() {
            continue;
        }
        let ranks = group.local.world_ranks(&indices);
        let local = LocalGroup::new(group.engine.world.clone(), part.name, ranks);
        let joined = outer.map(|outer| {
            HybridGroup::new(group.engine.clone(), outer, local.clone(), members.clone())
        });
        for (index, place) in indices.into_iter().enumerate() {
            outputs[place] = Some(match &joined {
                Some(group) => own(Joined { group: group.clone(), index }),
                None => RankOutput::Group(local.clone(), index),
            });
        }
    }
    Ok(outputs.into_iter().flatten().collect())
}

fn own(joined: Joined) -> RankOutput {
    RankOutput::Own(Box::new(joined) as Box<dyn Any + Send>)
}

/// All processes' headers.
fn exchange(
    group: &Arc<HybridGroup>,
    barrier: &RankBarrier,
    header: ProcessHeader,
) -> CommResult<Vec<ProcessHeader>> {
    let engine = &group.engine;
    let timeout = engine.world.timeout.get();
    let mut pending = group.outer.exchange(header.encode());
    let in_time = pending.wait_until(Deadline::after(timeout));
    if !in_time {
        let missing = pending.missing().into_iter().flat_map(|process| engine.ranks_of(process));
        let missing = missing.collect();
        if !pending.is_done() {
            return Err(group.fail(
                0,
                CommError::Timeout {
                    group: group.local.name.clone(),
                    operation: barrier.signature.to_string(),
                    sequence: barrier.sequence,
                    after_s: timeout.as_secs_f64(),
                    missing,
                },
            ));
        }
    }
    let all = pending.wait().map_err(|e| engine.fail_with_outer(group.local.members[0], e))?;
    group.check(barrier, &all)
}

/// One part for each color, ordered by key, then by the order in this group.
fn parts(
    group: &HybridGroup,
    barrier: &RankBarrier,
    split_requests: Vec<LocalSplit>,
) -> CommResult<Vec<SubGroup>> {
    let mut colors: BTreeMap<u64, Vec<LocalSplit>> = BTreeMap::new();
    for split_request in split_requests {
        colors.entry(split_request.color).or_default().push(split_request);
    }
    let mut parts = Vec::new();
    for mut split_requests in colors.into_values() {
        split_requests.sort_by_key(|split_request| (split_request.key, split_request.place));
        let first = &split_requests[0];
        if let Some(other) =
            split_requests.iter().find(|split_request| split_request.name != first.name)
        {
            let error = CommError::Mismatch {
                group: group.local.name.clone(),
                sequence: barrier.sequence,
                rank: group.members[other.place],
                mine: format!("{} into {}", barrier.signature, other.name),
                peer: group.members[first.place],
                theirs: format!("{} into {}", barrier.signature, first.name),
            };
            return Err(group.fail(0, error));
        }
        let places: Vec<usize> =
            split_requests.iter().map(|split_request| split_request.place).collect();
        let mut homes: Vec<usize> = Vec::new();
        for (home, _) in places.iter().map(|place| group.homes[*place]) {
            if !homes.contains(&home) {
                homes.push(home);
            }
        }
        parts.push(SubGroup { name: split_requests.swap_remove(0).name, places, homes });
    }
    Ok(parts)
}

/// The communicators that join the processes of each part that spans several. Parts without a
/// process in common are made in one go, so that many groups of few processes take few rounds.
fn join_processes(
    group: &HybridGroup,
    parts: &[SubGroup],
) -> CommResult<Vec<Option<Arc<dyn Communicator>>>> {
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for (number, part) in parts.iter().enumerate().filter(|(_, part)| part.homes.len() > 1) {
        let apart = |round: &&mut Vec<usize>| {
            round.iter().all(|other| parts[*other].homes.iter().all(|h| !part.homes.contains(h)))
        };
        match rounds.iter_mut().find(apart) {
            Some(round) => round.push(number),
            None => rounds.push(vec![number]),
        }
    }
    let mut outers: Vec<Option<Arc<dyn Communicator>>> = parts.iter().map(|_| None).collect();
    for round in rounds {
        let key = |number: &usize| parts[*number].homes.iter().position(|h| *h == group.here());
        let mine = round.iter().find_map(|number| Some((*number, key(number)?)));
        let made = match mine {
            Some((number, key)) => group.outer.split(&parts[number].name, number, key),
            // Splitting takes all processes; this one has no part in the round.
            None => group.outer.split("apart", parts.len(), group.here()),
        };
        let rank = group.local.members[0];
        let made = made.map_err(|error| group.engine.fail_with_outer(rank, error))?;
        if let Some((number, _)) = mine {
            outers[number] = Some(made);
        }
    }
    Ok(outers)
}
