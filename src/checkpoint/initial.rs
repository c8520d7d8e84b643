//! The weights that a run begins with: found and checked before a rank starts, read by each rank.

use std::collections::BTreeMap;
use std::path::Path;

use zeropp_core::layer::{Model, Part};
use zeropp_weights::{Family, Import, ParameterShape, Weights};
use zeropp_zero3::ShardedStage;
use zeropp_zero3::checkpoint::{Checkpoint, CheckpointError, Store};

use crate::Error;
use crate::config::ConfigError;
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;

/// Weights by parameter name, each in row-major order.
type Given = BTreeMap<String, Vec<f32>>;

/// Weights that a run may begin with.
pub(crate) enum Initial {
    /// Those of other tools.
    Files(Box<Import>),
    /// Those of the program.
    Given(Given),
    /// Those of a run, or their moving average if `mean`; its optimizer state is not taken.
    Checkpoint { checkpoint: Checkpoint, mean: bool },
}

/// The checkpoint that `path` is, or the newest in it; none where it is neither.
///
/// # Errors
/// A checkpoint that is damaged.
pub(crate) fn checkpoint_at(path: &Path) -> Result<Option<Checkpoint>, CheckpointError> {
    if path.join("manifest.json").is_file() {
        return Checkpoint::open(path).map(Some);
    }
    if !path.is_dir() {
        return Ok(None);
    }
    let store = Store::new(path);
    let newest = store.steps()?.last().copied();
    newest.map(|step| Checkpoint::open(&store.path(step))).transpose()
}

/// Opens what `init-from` names, or takes what is `given`, and holds it against the model; none
/// where neither is.
pub(crate) fn open(bp: &Blueprint, given: Option<Given>) -> Result<Option<Initial>, Error> {
    if let Some(weights) = given {
        check_given(bp, &weights)?;
        return Ok(Some(Initial::Given(weights)));
    }
    let Some(path) = &bp.config.init_from else { return Ok(None) };
    open_for(path, &bp.model, bp.config.init_ema).map(Some)
}

/// Weights of the program are all of the model's, and no others.
fn check_given(bp: &Blueprint, weights: &Given) -> Result<(), Error> {
    if let Some(path) = &bp.config.init_from {
        let problem = "the program gives weights to begin with";
        let help = "leave one of the two out";
        return Err(ConfigError::value("init-from", path.display(), problem, help).into());
    }
    let parameters: Vec<_> = bp.model.parts.iter().flat_map(Part::parameters).collect();
    for p in &parameters {
        let found = weights.get(&p.name).map(Vec::len);
        if found != Some(p.len()) {
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
///
/// # Errors
/// Weights that cannot be read, or are another model's; no mean of them.
pub(crate) fn open_for(path: &Path, model: &Model, mean: bool) -> Result<Initial, Error> {
    let parameters: Vec<_> = model.parts.iter().flat_map(Part::parameters).collect();
    if let Some(checkpoint) = checkpoint_at(path)? {
        checkpoint.check_model(parameters.iter().map(|p| (p.name.as_str(), p.shape.as_slice())))?;
        checkpoint.check_sizes()?;
        if mean && checkpoint.means().is_none() {
            return Err(no_mean(path));
        }
        return Ok(Initial::Checkpoint { checkpoint, mean });
    }
    if mean {
        return Err(no_mean(path));
    }
    let Some(family) = Family::of(parameters.iter().map(|p| p.name.as_str())) else {
        let problem = "the model has no names that files of weights have";
        let help = "use a built-in model, or leave it out";
        return Err(ConfigError::value("init-from", path.display(), problem, help).into());
    };
    let shape = |p: &zeropp_core::params::ParamSpec| ParameterShape {
        name: p.name.clone(),
        shape: p.shape.clone(),
    };
    let shapes: Vec<_> = parameters.iter().map(shape).collect();
    let import = Import::new(Weights::open(path)?, family, &shapes, model.vocabulary)?;
    Ok(Initial::Files(Box::new(import)))
}

/// What lies at `path` has no moving average of the weights.
pub(crate) fn no_mean(path: &Path) -> Error {
    let problem = format!("{} has no moving average of the weights", path.display());
    let help = "leave it out, or name a checkpoint of a run with ema";
    ConfigError::value("init-ema", true, problem, help).into()
}

impl Initial {
    /// Reads whatever `fill` asks for: elements of a parameter from a place on, in row-major order
    /// of its shape.
    ///
    /// # Errors
    /// A file that cannot be read or is damaged.
    pub(crate) fn read(
        &self,
        mut fill: impl FnMut(
            &mut dyn FnMut(&str, usize, &mut [f32]) -> Result<(), RankError>,
        ) -> Result<(), RankError>,
    ) -> Result<(), RankError> {
        match self {
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
    initial.read(|read| {
        stages.iter_mut().try_for_each(|stage| {
            stage.fill_parameters(|name, offset, out| read(name, offset, out))
        })
    })
}
