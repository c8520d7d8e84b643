//! The partition and the program that all ranks run: rank 0's.
//!
//! Each process makes them from its own settings and files. Before anything is built, all ranks
//! compare a digest. Where one differs, rank 0 gives its partition and its program to all, and who
//! had others takes them; where that does not help, as with another model, nobody starts.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tracing::warn;
use zeropp_comm::Communicator;
use zeropp_pipeline::exchange::json::{self, Document};

use crate::checkpoint::settings;
use crate::config::OPTIONS;
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;
use crate::run::rank::Shared;

/// Largest program that is sent, in bytes of JSON: some 30 million actions.
const PROGRAM_BYTES_MAX: usize = 256 << 20;

/// What rank 0 gives to all.
#[derive(Serialize, Deserialize)]
struct Given {
    /// First part of each stage.
    cuts: Vec<usize>,
    /// The lowered schedule, as a file has it; empty where it is too large to be sent.
    program: String,
    /// The settings that make the run what it is.
    settings: BTreeMap<String, String>,
}

/// What a rank says once it has what rank 0 gave.
#[derive(Serialize, Deserialize)]
struct Answer {
    host: String,
    /// Why it cannot take what rank 0 gave.
    refused: Option<String>,
}

/// The blueprint that this rank builds from. All ranks call it.
///
/// # Errors
/// [`RankError::Program`], on all ranks in the same words: one cannot run rank 0's program.
pub(crate) fn agree(
    shared: &Shared,
    world: &dyn Communicator,
) -> Result<Arc<Blueprint>, RankError> {
    let own = &shared.blueprint;
    if shared.here.len() == world.size() {
        return Ok(own.clone());
    }
    // Once for all ranks of the process.
    let digest = *shared.digest.get_or_init(|| digest(own));
    let digests = world.exchange(digest.as_bytes().to_vec()).wait()?;
    if digests.iter().all(|other| *other == digests[0]) {
        return Ok(own.clone());
    }
    let mine = if world.rank() == 0 { given(own) } else { Vec::new() };
    let all = world.exchange(mine).wait()?;
    let is_same = digests[0] == digest.as_bytes();
    let taken = match is_same {
        true => Ok(own.clone()),
        false => shared.agreed.get_or_init(|| take(own, &all[0], &digests[0])).clone(),
    };
    let answer = Answer { host: shared.host.clone(), refused: taken.as_ref().err().cloned() };
    let bytes = serde_json::to_vec(&answer).expect("plain data");
    let answers = world.exchange(bytes).wait()?;
    for (rank, bytes) in answers.iter().enumerate() {
        let Answer { host, refused } = serde_json::from_slice(bytes).expect("written by a rank");
        let Some(why) = refused else { continue };
        let place = if host.is_empty() { String::new() } else { format!(" on {host}") };
        return Err(RankError::Program(format!(
            "rank {rank}{place} cannot run rank 0's program: {why}; give all processes the same \
             settings"
        )));
    }
    if world.rank() == shared.here[0] && !is_same {
        warn!(
            "the costs or the schedule of this process make another program than rank 0's, which \
             it runs in place of its own"
        );
    }
    Ok(taken.expect("nobody refused"))
}

/// What rank 0 gives, as it is sent.
fn given(own: &Blueprint) -> Vec<u8> {
    let program = Some(program(own)).filter(|text| text.len() <= PROGRAM_BYTES_MAX);
    let given = Given {
        cuts: own.stages.iter().map(|stage| stage.start).collect(),
        program: program.unwrap_or_default(),
        settings: settings(&own.config),
    };
    serde_json::to_vec(&given).expect("plain data")
}

/// The blueprint of this process with what rank 0 gave, which has rank 0's `digest`; or why there
/// is none.
fn take(own: &Blueprint, bytes: &[u8], digest: &[u8]) -> Result<Arc<Blueprint>, String> {
    let given: Given = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    if given.program.is_empty() {
        return Err("it has another, and rank 0's is too large to be given to it".into());
    }
    let document = json::read(&given.program).map_err(|e| e.to_string());
    let taken = document.and_then(|document| own.with_program(&given.cuts, document.schedule));
    match taken {
        Ok(taken) if self::digest(&taken).as_bytes() == digest => Ok(Arc::new(taken)),
        other => Err(differences(own, &given.settings).unwrap_or_else(|| match other {
            Ok(_) => "its model is another".into(),
            Err(problem) => problem,
        })),
    }
}

/// The settings of this process that are not rank 0's, in words.
fn differences(own: &Blueprint, theirs: &BTreeMap<String, String>) -> Option<String> {
    let mine = settings(&own.config);
    let none = "nothing".to_owned();
    let keys = OPTIONS.iter().filter(|option| option.heading != "Launch").map(|option| option.key);
    let differing = keys.filter(|key| mine.get(*key) != theirs.get(*key)).map(|key| {
        let [mine, theirs] = [&mine, theirs].map(|all| all.get(key).unwrap_or(&none));
        format!("{key} = {mine} here and {theirs} there")
    });
    let differing: Vec<String> = differing.collect();
    (!differing.is_empty()).then(|| differing.join(", "))
}

/// Of all that the ranks of a run must share: the programs of all of them, the parts of each stage,
/// and what these compute with.
fn digest(bp: &Blueprint) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    hasher.update(program(bp).as_bytes());
    let config = &bp.config;
    let parts = bp.model.parts.iter().map(|part| {
        let shapes = part.parameters().into_iter().map(|p| (p.name, p.shape));
        (part.name().to_owned(), shapes.collect::<Vec<_>>())
    });
    let shared = (&bp.stages, parts.collect::<Vec<_>>(), &bp.recomputed, bp.compute);
    let sizes = (config.micro_batch_size, config.seq, bp.model.hidden, config.zero1, bp.mesh);
    hasher.update(format!("{shared:?} {sizes:?}").as_bytes());
    hasher.finalize()
}

/// The lowered schedule as text that reads back to it.
fn program(bp: &Blueprint) -> String {
    let document = Document { schedule: bp.schedule.clone(), costs: None, measures: None };
    let mut text = Vec::new();
    json::write(&document, &mut text).expect("a buffer takes everything");
    String::from_utf8(text).expect("JSON is UTF-8")
}
