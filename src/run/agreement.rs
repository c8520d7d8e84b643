//! Agreement of all ranks before anything is built, on settings, data, partition and program.
//!
//! Each process has its own settings and files. All ranks compare two digests. Where the one of
//! settings and data differs, no rank starts, and the message names what differs. Where only that
//! of partition and program does, rank 0 sends its own to all, and ranks that had others take them;
//! where that does not help, as with another model, no rank starts either. How a setting is
//! compared stands in the table of settings ([`Across`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tracing::warn;
use zeropp_comm::Communicator;
use zeropp_core::data::Fingerprint;
use zeropp_pipeline::exchange::json::{self, Document};

use crate::config::{Across, Config, OPTIONS, OptionInfo, Recompute};
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;
use crate::plan::fits;
use crate::run::shared::{AgreedBlueprint, Digests, RunShared};

/// Largest program that is sent, in bytes of JSON: some 30 million actions.
const PROGRAM_BYTES_MAX: usize = 256 << 20;

/// Settings by their keys, each as a person would write it.
type Settings = BTreeMap<String, String>;

/// The settings that a rank whose settings differ sends, and rank 0.
#[derive(Serialize, Deserialize)]
struct Stated {
    host: String,
    settings: Settings,
}

/// The partition and programs that rank 0 sends to all.
#[derive(Serialize, Deserialize)]
struct Rank0Program {
    host: String,
    /// First part of each stage.
    cuts: Vec<usize>,
    /// The lowered schedules of the replicas that differ, each as a file has it; none where they
    /// are too large to be sent.
    programs: Vec<String>,
    /// The settings that it was made from.
    settings: Settings,
}

/// A rank's answer to what rank 0 has sent.
#[derive(Serialize, Deserialize)]
struct AgreementReply {
    /// Why it cannot take what rank 0 gave.
    refused: Option<String>,
}

/// The blueprint that this rank builds from. All ranks call it first of all.
///
/// # Errors
/// [`RankError::Program`], on all ranks in the same words: settings or data differ that must not,
/// or one cannot run rank 0's program.
pub(crate) fn agree(
    shared: &RunShared,
    world: &dyn Communicator,
) -> Result<Arc<Blueprint>, RankError> {
    let own = &shared.blueprint;
    if shared.here.len() == world.size() {
        return Ok(own.clone());
    }
    // Once for all ranks of the process.
    let digests = *shared.digests.get_or_init(|| Digests {
        settings: digest_of(&common_here(shared)),
        program: program_digest(own),
    });
    let mine = [digests.settings.as_bytes().as_slice(), digests.program.as_bytes()].concat();
    let all = world.exchange(mine).wait()?;
    if all.iter().all(|other| *other == all[0]) {
        return Ok(own.clone());
    }
    let (settings, programs): (Vec<&[u8]>, Vec<&[u8]>) =
        all.iter().map(|both| both.split_at(both.len().min(blake3::OUT_LEN))).unzip();
    if settings.iter().any(|other| *other != settings[0]) {
        return Err(compare(shared, world, &settings)?);
    }
    take_rank_0_s(shared, world, &programs)
}

/// Finds out in which settings the processes differ, where they do.
fn compare(
    shared: &RunShared,
    world: &dyn Communicator,
    digests: &[&[u8]],
) -> Result<RankError, RankError> {
    let rank = world.rank();
    let stated = || Stated { host: shared.host.clone(), settings: common_here(shared) };
    let speaks = rank == 0 || digests[rank] != digests[0];
    let mine = speaks.then(|| serde_json::to_vec(&stated()).expect("plain data"));
    let all = world.exchange(mine.unwrap_or_default()).wait()?;
    let read = |rank: usize| serde_json::from_slice::<Stated>(&all[rank]).expect("it speaks");
    let other = digests.iter().position(|digest| *digest != digests[0]).expect("one differs");
    let (first, differs) = (read(0), read(other));
    let rank_0 = RankSettings { rank: 0, host: &first.host, settings: &first.settings };
    let other = RankSettings { rank: other, host: &differs.host, settings: &differs.settings };
    let words = differences(other, rank_0);
    let words = words.unwrap_or_else(|| "zeropp: the processes run different builds".into());
    Ok(RankError::Program(format!("{words}; give all processes of a run the same")))
}

/// The blueprint of rank 0 on all ranks, where programs differ.
fn take_rank_0_s(
    shared: &RunShared,
    world: &dyn Communicator,
    digests: &[&[u8]],
) -> Result<Arc<Blueprint>, RankError> {
    let (own, rank) = (&shared.blueprint, world.rank());
    let mine = if rank == 0 { given(own, &shared.host) } else { Vec::new() };
    let all = world.exchange(mine).wait()?;
    let is_same = digests[rank] == digests[0];
    // In the name of the first rank here that differs; all of a process do.
    let taken = match is_same {
        true => Ok(AgreedBlueprint { blueprint: own.clone(), differs: String::new() }),
        false => shared
            .agreed
            .get_or_init(|| take(own, &all[0], digests[0], shared.here[0], &shared.host))
            .clone(),
    };
    let answer = AgreementReply { refused: taken.as_ref().err().cloned() };
    let bytes = serde_json::to_vec(&answer).expect("plain data");
    for bytes in world.exchange(bytes).wait()?.iter() {
        let AgreementReply { refused } = serde_json::from_slice(bytes).expect("written by a rank");
        let Some(why) = refused else { continue };
        return Err(RankError::Program(format!("{why}; give all processes of a run the same")));
    }
    let AgreedBlueprint { blueprint, differs } = taken.expect("nobody refused");
    if rank == shared.here[0] && !is_same {
        warn!(
            "this process makes a different program from rank 0's ({differs}), and runs rank \
             0's in place of its own"
        );
    }
    Ok(blueprint)
}

/// The partition and programs of rank 0, as they are sent.
fn given(own: &Blueprint, host: &str) -> Vec<u8> {
    let programs: Vec<String> = programs(own).collect();
    let fits = programs.iter().map(String::len).sum::<usize>() <= PROGRAM_BYTES_MAX;
    let given = Rank0Program {
        host: host.to_owned(),
        cuts: own.starts(),
        programs: if fits { programs } else { Vec::new() },
        settings: of_program(&own.config),
    };
    serde_json::to_vec(&given).expect("plain data")
}

/// The blueprint of this process, whose first rank is on a host as given, with what rank 0 gave,
/// which has rank 0's `digest`, and how the settings differ; or why there is none.
fn take(
    own: &Blueprint,
    bytes: &[u8],
    digest: &[u8],
    rank: usize,
    host: &str,
) -> Result<AgreedBlueprint, String> {
    let given: Rank0Program = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let settings = of_program(&own.config);
    let rank_0 = RankSettings { rank: 0, host: &given.host, settings: &given.settings };
    let differs = differences(RankSettings { rank, host, settings: &settings }, rank_0);
    let cannot = |why: String| {
        differs
            .clone()
            .unwrap_or_else(|| format!("{} cannot run rank 0's program: {why}", named(rank, host)))
    };
    if given.programs.is_empty() {
        let why = "it makes a different one, and rank 0's is too large to be sent";
        return Err(cannot(why.into()));
    }
    let documents = given.programs.iter().map(|program| json::read(program));
    let schedules: Result<_, _> = documents.map(|document| Ok(document?.schedule)).collect();
    let schedules = schedules.map_err(|e: json::JsonError| e.to_string());
    // Recomputation is a part of the program; `auto` may choose by the memory of each machine.
    let mut own = own.clone();
    let theirs = given.settings.get("recompute");
    let is_theirs = |recompute: &&Recompute| theirs.is_some_and(|word| word == recompute.name());
    own.config.recompute =
        Recompute::ALL.iter().find(is_theirs).copied().unwrap_or(own.config.recompute);
    match schedules.and_then(|schedules| own.with_programs(&given.cuts, schedules)) {
        Ok(taken) if program_digest(&taken).as_bytes() == digest => {
            if let Err(why) = fits::check(&taken) {
                let who = named(rank, host);
                return Err(format!("{who} cannot run rank 0's program: {why}"));
            }
            let differs = differs.unwrap_or_else(|| "its files have different contents".into());
            Ok(AgreedBlueprint { blueprint: Arc::new(taken), differs })
        }
        Ok(_) => Err(cannot("its model is a different one".into())),
        Err(problem) => Err(cannot(problem)),
    }
}

/// A rank's host and settings.
#[derive(Clone, Copy)]
struct RankSettings<'a> {
    rank: usize,
    /// May be empty.
    host: &'a str,
    settings: &'a Settings,
}

/// The settings in which a rank differs from rank 0, in words; nothing where they are the same.
fn differences(other: RankSettings, rank_0: RankSettings) -> Option<String> {
    let keys = OPTIONS.iter().map(|option| option.key);
    let differ = |key: &&str| other.settings.get(*key) != rank_0.settings.get(*key);
    let keys: Vec<&str> = keys.filter(differ).collect();
    let list = |of: &Settings| {
        let value = |key: &&str| of.get(*key).map_or("nothing", String::as_str).to_owned();
        keys.iter().map(|key| format!("{key} = {}", value(key))).collect::<Vec<_>>().join(", ")
    };
    (!keys.is_empty()).then(|| {
        format!(
            "{}: {} has this, and {} has {}",
            list(other.settings),
            named(other.rank, other.host),
            named(0, rank_0.host),
            list(rank_0.settings)
        )
    })
}

fn named(rank: usize, host: &str) -> String {
    if host.is_empty() { format!("rank {rank}") } else { format!("rank {rank} on {host}") }
}

/// The settings that this process must share with the others.
fn common_here(shared: &RunShared) -> Settings {
    let mut settings = common(&shared.blueprint.config, shared.data.0.fingerprint());
    if let Some(set) = &shared.evaluation {
        settings.insert("eval-data".to_owned(), set.data().fingerprint().to_string());
    }
    settings
}

/// The settings that the processes of a run must share, by the table of settings.
fn common(config: &Config, data: &Fingerprint) -> Settings {
    let shared = |(option, text): (&OptionInfo, Option<String>)| {
        let text = match option.across {
            Across::Same => text?,
            // An empty path is none.
            Across::Given => text.filter(|text| !text.is_empty()).map(|_| "given".to_owned())?,
            Across::Contents => data.to_string(),
            Across::Program | Across::Own => return None,
        };
        Some((option.key.to_owned(), text))
    };
    config.resolved().texts().filter_map(shared).collect()
}

/// The settings that partition and program follow from.
fn of_program(config: &Config) -> Settings {
    let resolved = config.resolved();
    let kept = resolved.texts().filter(|(option, _)| option.across == Across::Program);
    kept.filter_map(|(option, text)| Some((option.key.to_owned(), text?))).collect()
}

fn digest_of(settings: &Settings) -> blake3::Hash {
    blake3::hash(&serde_json::to_vec(settings).expect("plain data"))
}

/// Of what the ranks of a run must share beside settings: the programs of all of them, the parts of
/// each stage with their parameters, and what these compute with.
fn program_digest(bp: &Blueprint) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    for program in programs(bp) {
        hasher.update(program.as_bytes());
    }
    let config = &bp.config;
    let parts = bp.model.parts.iter().map(|part| {
        let shapes = part.parameters().into_iter().map(|p| (p.name, p.shape));
        (part.name().to_owned(), shapes.collect::<Vec<_>>())
    });
    let shared = (&bp.stages, parts.collect::<Vec<_>>(), &bp.recomputed, bp.compute);
    let sizes = (config.micro_batch_size, config.seq, bp.model.hidden, config.zero1, bp.mesh);
    hasher.update(format!("{shared:?} {sizes:?} {:?}", config.deal()).as_bytes());
    hasher.finalize()
}

/// The different lowered schedules, each as text that reads back to it.
fn programs(bp: &Blueprint) -> impl Iterator<Item = String> {
    bp.programs.each().map(|schedule| {
        let document = Document { schedule: schedule.clone(), costs: None, measures: None };
        let mut text = Vec::new();
        json::write(&document, &mut text).expect("a buffer takes everything");
        String::from_utf8(text).expect("JSON is UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{OptionKind, Table, Value};

    /// Two values of a setting that a file may have; none for one that it may leave out.
    fn two_values(option: &OptionInfo) -> [Option<Value>; 2] {
        let now = Config::default().get(option.key);
        let other =
            |a: Value, b: Value| [now.clone(), Some(if now == Some(a.clone()) { b } else { a })];
        match option.kind {
            OptionKind::Count => other(3.into(), 4.into()),
            OptionKind::Number => other(0.25.into(), 0.5.into()),
            OptionKind::Switch => other(true.into(), false.into()),
            OptionKind::Choice(names) => {
                let of = |i: usize| names.get(i).map(|name| Value::from(*name));
                [of(0), of(1)]
            }
            OptionKind::Text if option.key == "model" => other("gpt".into(), "llama".into()),
            OptionKind::Path | OptionKind::Text => other("x".into(), "y".into()),
            OptionKind::Resume => other(true.into(), false.into()),
            OptionKind::Steps => other("3..4".into(), "5..6".into()),
            OptionKind::Bytes => other(1024.into(), 2048.into()),
            OptionKind::Slices => other(3.into(), 4.into()),
        }
    }

    fn of<'a>(rank: usize, host: &'a str, settings: &'a Settings) -> RankSettings<'a> {
        RankSettings { rank, host, settings }
    }

    /// A setting is compared as its row in the table says, and no setting is without one.
    #[test]
    fn each_setting_is_compared_as_the_table_says() {
        let with = |option: &OptionInfo, value: &Option<Value>| {
            let set = value.iter().map(|v| (option.key.to_owned(), v.clone()));
            // What only some optimizers have is compared where one of them is chosen.
            let of_sgd = matches!(option.key, "momentum" | "nesterov");
            let sgd = of_sgd.then(|| ("optimizer".to_owned(), "sgd".into()));
            let table: Table = set.chain(sgd).collect();
            Config::default().with(table).unwrap()
        };
        let data = Fingerprint { bytes: 7, samples_blake3: "0".repeat(64) };
        for option in OPTIONS {
            let values = two_values(option);
            if values[1].is_none() {
                continue; // a choice of one
            }
            let configs = values.map(|value| with(option, &value));
            let [a, b] = configs.each_ref().map(|config| common(config, &data));
            let has = [&a, &b].map(|settings| settings.contains_key(option.key));
            let key = option.key;
            match option.across {
                Across::Same => {
                    assert_ne!(a.get(key), b.get(key), "{key}");
                    assert_ne!(digest_of(&a), digest_of(&b), "{key}");
                    let words = differences(of(2, "b", &b), of(0, "a", &a)).unwrap();
                    let value = &b[key];
                    assert!(words.contains(&format!("{key} = {value}")), "{words}");
                    let who = ["rank 2 on b has this", "rank 0 on a has"];
                    assert!(who.iter().all(|who| words.contains(who)), "{words}");
                }
                Across::Given => assert_eq!(has, [false, true], "{key}"),
                Across::Contents => assert_eq!((a.get(key), has), (b.get(key), [true, true])),
                Across::Program => {
                    let [a, b] = configs.each_ref().map(of_program);
                    assert_ne!(a.get(key), b.get(key), "{key}");
                    assert_eq!(has, [false, false], "{key}");
                }
                Across::Own => assert_eq!((&a, has), (&b, [false, false]), "{key}"),
            }
        }
        let grown = Fingerprint { bytes: 8, ..data.clone() };
        let [a, b] = [&data, &grown].map(|data| common(&Config::default(), data));
        let words = differences(of(1, "", &b), of(0, "", &a)).unwrap();
        assert_eq!(
            words,
            "data = 8 bytes with digest 0000000000000000: rank 1 has this, and rank 0 has data = \
             7 bytes with digest 0000000000000000"
        );
    }
}
