//! The weights that a run begins with: found and checked before a rank starts, read by each rank.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use zeropp_checkpoint::checkpoint_at;
use zeropp_comm::Communicator;
use zeropp_core::layer::{Model, Part};
use zeropp_core::model::tuning::is_adapter;
use zeropp_core::params::ParamSpec;
use zeropp_core::rng::initialise;
use zeropp_weights::{Family, Import, ParameterShape, Weights};
use zeropp_zero3::ShardedStage;
use zeropp_zero3::checkpoint::{Base, Checkpoint};

use crate::Error;
use crate::checkpoint::begun;
use crate::checkpoint::located::fingerprint;
use crate::checkpoint::patience::Patience;
use crate::config::ConfigError;
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;

/// Weights by parameter name, each in row-major order.
type Given = BTreeMap<String, Vec<f32>>;

/// The text for weights that no path leads to.
const OF_SEED: &str = "the seed";
const OF_PROGRAM: &str = "the program";

/// Elements of a parameter from a place on.
pub(crate) type Read<'a> = dyn FnMut(&str, usize, &mut [f32]) -> Result<(), RankError> + 'a;

/// A function that reads weights by the `Read` that it is given.
pub(crate) type Fill<'a> = dyn FnMut(&mut Read<'_>) -> Result<(), RankError> + 'a;

/// Weights that a run may begin with.
pub(crate) enum Initial {
    /// Those of other tools.
    Files(Box<Import>),
    /// Those of the program.
    Given(Given),
    /// Those of a run, or their moving average if `mean`; its optimizer state is not taken.
    Checkpoint { checkpoint: Checkpoint, mean: bool },
    /// Those that the seed makes.
    Seed { seed: u64, parameters: BTreeMap<String, ParamSpec> },
    /// Some parameters from one of them, all others from another.
    Layered { names: BTreeSet<String>, over: Box<Initial>, under: Box<Initial> },
}

/// The base of a run in which something does not train; `given` says whether the program gives the
/// weights.
///
/// # Errors
/// Weights that cannot be read.
pub(crate) fn base(bp: &Blueprint, given: bool) -> Result<Option<Base>, Error> {
    if !bp.model.has_frozen() {
        return Ok(None);
    }
    let base = match &bp.config.init_from {
        _ if given => Base { path: None, fingerprint: OF_PROGRAM.into() },
        None => Base { path: None, fingerprint: OF_SEED.into() },
        Some(path) => {
            let absolute = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            Base { path: Some(absolute.display().to_string()), fingerprint: fingerprint(path)? }
        }
    };
    Ok(Some(base))
}

/// Opens what `init-from` names, or takes what is `given`, and holds it against the model; none
/// where neither is.
pub(crate) fn open(bp: &Blueprint, given: Option<Given>) -> Result<Option<Initial>, Error> {
    if let Some(weights) = given {
        check_given(bp, &weights)?;
        let all = bp.model.parts.iter().flat_map(Part::parameters);
        let adapters = all.filter(|p| !weights.contains_key(&p.name)).collect();
        let (names, adapters) = Initial::seed(bp.config.seed, adapters);
        return Ok(Some(Initial::Given(weights).beneath(names, adapters)));
    }
    let Some(path) = &bp.config.init_from else { return Ok(None) };
    let opened = open_for(path, &bp.model, bp.config.init_ema, bp.config.seed);
    let vocabulary = bp.model.vocabulary;
    let contradiction = || begun::contradiction(&bp.config, path, vocabulary);
    let opened = opened.map_err(|error| contradiction().unwrap_or(error))?;
    if Family::of(bp.model.parts.iter().flat_map(Part::parameters).map(|p| p.name)).is_some() {
        begun::warn_of_differences(&bp.config, path, vocabulary);
    }
    Ok(Some(opened))
}

/// Weights of the program are all of the model's, adapters aside, and no others.
fn check_given(bp: &Blueprint, weights: &Given) -> Result<(), Error> {
    if let Some(path) = &bp.config.init_from {
        let problem = "the program gives weights to begin with";
        let help = "leave one of the two out";
        return Err(ConfigError::value("init-from", path.display(), problem, help).into());
    }
    let parameters: Vec<_> = bp.model.parts.iter().flat_map(Part::parameters).collect();
    for p in &parameters {
        let found = weights.get(&p.name).map(Vec::len);
        // Adapters may begin as the seed makes them.
        if found != Some(p.len()) && !(found.is_none() && is_adapter(&p.name)) {
            let found = found.map_or("none".into(), |n| format!("{n}"));
            let shape = &p.shape;
            let problem = format!("{} {shape:?} has {} elements", p.name, p.len());
            return Err(Error::Model(format!("{problem}, and of the weights given {found}")));
        }
    }
    match weights.keys().find(|name| !parameters.iter().any(|p| p.name == **name)) {
        Some(name) => Err(Error::Model(format!("weights are given of {name}, which it has not"))),
        None => Ok(()),
    }
}

/// Opens the weights at `path`, or their moving average if `mean`, and compares them with `model`.
/// Weights that a checkpoint did not train are read from its base; adapters that are not there
/// begin as the seed makes them.
///
/// # Errors
/// Weights that cannot be read, or are another model's; no mean of them.
pub(crate) fn open_for(
    path: &Path,
    model: &Model,
    mean: bool,
    seed: u64,
) -> Result<Initial, Error> {
    let all: Vec<_> = model.parts.iter().flat_map(Part::parameters).collect();
    let Some(checkpoint) = checkpoint_at(path)? else {
        let (adapters, own): (Vec<_>, Vec<_>) = all.into_iter().partition(|p| is_adapter(&p.name));
        if mean {
            return Err(no_mean(path));
        }
        let (names, adapters) = Initial::seed(seed, adapters);
        return Ok(files(path, &own, model.vocabulary)?.beneath(names, adapters));
    };
    let manifest = checkpoint.manifest();
    let base = manifest.base.clone();
    let is_there = |p: &ParamSpec| manifest.parameters.contains_key(&p.name);
    let is_elsewhere = |p: &ParamSpec| is_adapter(&p.name) || base.is_some();
    let (elsewhere, here): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|p| !is_there(p) && is_elsewhere(p));
    checkpoint.check_model(here.iter().map(|p| (p.name.as_str(), p.shape.as_slice())))?;
    checkpoint.check_sizes()?;
    if mean && checkpoint.means().is_none() {
        return Err(no_mean(path));
    }
    let (adapters, frozen): (Vec<_>, Vec<_>) =
        elsewhere.into_iter().partition(|p| is_adapter(&p.name));
    let own = Initial::Checkpoint { checkpoint, mean };
    let own = match base.filter(|_| !frozen.is_empty()) {
        Some(base) => open_base(path, &base, model, frozen, seed)?.beneath(names(&here), own),
        None => own,
    };
    let (names, adapters) = Initial::seed(seed, adapters);
    Ok(own.beneath(names, adapters))
}

/// Opens the weights that the checkpoint at `path` names as where `frozen` parameters are.
///
/// # Errors
/// Weights that are gone, or are others now.
fn open_base(
    path: &Path,
    base: &Base,
    model: &Model,
    frozen: Vec<ParamSpec>,
    seed: u64,
) -> Result<Initial, Error> {
    let wrong = |problem: String, help: &str| Error::Export {
        path: path.to_path_buf(),
        problem,
        help: help.into(),
    };
    let Some(at) = base.path.as_ref().map(PathBuf::from) else {
        return match base.fingerprint.as_str() {
            OF_SEED => Ok(Initial::seed(seed, frozen).1),
            _ => Err(wrong(
                "its frozen weights are a program's own".into(),
                "begin with weights that init-from names",
            )),
        };
    };
    let there = at.display();
    if !at.exists() {
        let problem = format!("its frozen weights were in {there}, which is not there");
        return Err(wrong(problem, "put them there again"));
    }
    if fingerprint(&at)? != base.fingerprint {
        let problem = format!("its frozen weights were in {there}, where others are now");
        return Err(wrong(problem, "put those there again that it was trained with"));
    }
    open_for(&at, model, false, seed)
}

/// Opens files of other tools, which have exactly these parameters.
fn files(path: &Path, parameters: &[ParamSpec], vocabulary: usize) -> Result<Initial, Error> {
    let Some(family) = Family::of(parameters.iter().map(|p| p.name.as_str())) else {
        let problem = "the model has no names that files of weights have";
        let help = "use a built-in model, or leave it out";
        return Err(ConfigError::value("init-from", path.display(), problem, help).into());
    };
    let shape = |p: &ParamSpec| ParameterShape { name: p.name.clone(), shape: p.shape.clone() };
    let shapes: Vec<_> = parameters.iter().map(shape).collect();
    let import = Import::new(Weights::open(path)?, family, &shapes, vocabulary)?;
    Ok(Initial::Files(Box::new(import)))
}

/// The error that the weights at `path` have no moving average.
pub(crate) fn no_mean(path: &Path) -> Error {
    let problem = format!("{} has no moving average of the weights", path.display());
    let help = "leave it out, or name a checkpoint of a run with ema";
    ConfigError::value("init-ema", true, problem, help).into()
}

impl Initial {
    /// These parameters as the seed makes them, and their names.
    pub(crate) fn seed(seed: u64, parameters: Vec<ParamSpec>) -> (BTreeSet<String>, Initial) {
        let names = names(&parameters);
        let parameters = parameters.into_iter().map(|p| (p.name.clone(), p)).collect();
        (names, Initial::Seed { seed, parameters })
    }

    /// These weights, but those of the given names from `over`.
    fn beneath(self, names: BTreeSet<String>, over: Initial) -> Initial {
        match names.is_empty() {
            true => self,
            false => Initial::Layered { names, over: Box::new(over), under: Box::new(self) },
        }
    }

    /// Reads whatever `fill` asks for: elements of a parameter from a place on, in row-major order
    /// of its shape.
    ///
    /// # Errors
    /// A file that cannot be read or is damaged.
    pub(crate) fn read(&self, fill: &mut Fill<'_>) -> Result<(), RankError> {
        match self {
            Initial::Seed { seed, parameters } => fill(&mut |name, offset, out| {
                initialise(*seed, &parameters[name], offset, out);
                Ok(())
            }),
            Initial::Layered { names, over, under } => over.read(&mut |over| {
                under.read(&mut |under| {
                    fill(&mut |name, offset, out| match names.contains(name) {
                        true => over(name, offset, out),
                        false => under(name, offset, out),
                    })
                })
            }),
            Initial::Given(weights) => fill(&mut |name, offset, out| {
                out.copy_from_slice(&weights[name][offset..offset + out.len()]);
                Ok(())
            }),
            Initial::Files(import) => {
                fill(&mut |name, offset, out| Ok(import.read(name, offset, out)?))
            }
            Initial::Checkpoint { checkpoint, mean } => {
                let means = checkpoint.means().filter(|_| *mean);
                let mut reader = means.unwrap_or_else(|| checkpoint.parameters());
                fill(&mut |name, offset, out| Ok(reader.read(name, offset, out)?))?;
                Ok(reader.finish()?)
            }
        }
    }
}

/// Reads the weights that `init-from` names by `read`, each rank what it needs, and all ranks
/// exchange the outcomes. All ranks call it.
///
/// # Errors
/// [`RankError::Program`], on all ranks in the same words, where one of them cannot read them: bad
/// input, which no rank has begun to train from; the world's first error.
pub(crate) fn read_together(
    patience: Patience,
    world: &dyn Communicator,
    read: impl FnOnce() -> Result<(), RankError>,
) -> Result<(), RankError> {
    let said = patience.exchange(world, "reading the weights", || {
        let words = read().err().map(|error| error.to_string());
        Ok(serde_json::to_vec(&words).expect("text"))
    })?;
    let words = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("written above");
    match said.iter().find_map(|bytes| -> Option<String> { words(bytes) }) {
        Some(words) => Err(RankError::Program(words)),
        None => Ok(()),
    }
}

/// Fills the shards of this rank, for a run that begins.
pub(crate) fn read(
    bp: &Blueprint,
    initial: Option<&Initial>,
    stages: &mut [ShardedStage],
) -> Result<(), RankError> {
    let Some(initial) = initial else {
        // Rank 0's process begins, and this one took it to go on.
        return match &bp.config.init_from {
            Some(path) => Err(RankError::Program(format!(
                "init-from = {}: this process found a checkpoint to go on from, and rank 0's did \
                 not; use a folder of checkpoints that all processes see",
                path.display()
            ))),
            None => Ok(()),
        };
    };
    initial.read(&mut |read| {
        stages.iter_mut().try_for_each(|stage| {
            stage.fill_parameters(|name, offset, out| read(name, offset, out))
        })
    })
}

/// Fills what does not train in the shards of this rank, for a run that goes on. Where nothing was
/// named it is what the seed has made already.
pub(crate) fn read_frozen(
    initial: Option<&Initial>,
    stages: &mut [ShardedStage],
) -> Result<(), RankError> {
    let Some(initial) = initial else { return Ok(()) };
    initial.read(&mut |read| {
        stages
            .iter_mut()
            .try_for_each(|stage| stage.fill_frozen(|name, offset, out| read(name, offset, out)))
    })
}

fn names(parameters: &[ParamSpec]) -> BTreeSet<String> {
    parameters.iter().map(|p| p.name.clone()).collect()
}
