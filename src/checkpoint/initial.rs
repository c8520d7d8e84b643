//! The weights that a run begins with: found and checked before a rank starts, read by each rank.

use zeropp_core::layer::Part;
use zeropp_weights::{Family, Import, ParameterShape, Weights};
use zeropp_zero3::ShardedStage;

use crate::Error;
use crate::config::ConfigError;
use crate::error::RankError;
use crate::plan::blueprint::Blueprint;

/// Opens what `init-from` names and holds it against the model; none where nothing is named.
pub(crate) fn open(bp: &Blueprint) -> Result<Option<Import>, Error> {
    let Some(path) = &bp.config.init_from else { return Ok(None) };
    let parameters: Vec<_> = bp.model.parts.iter().flat_map(Part::parameters).collect();
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
    let import = Import::new(Weights::open(path)?, family, &shapes, bp.model.vocabulary)?;
    Ok(Some(import))
}

/// Fills the shards of this rank, for a run that begins.
pub(crate) fn read(
    bp: &Blueprint,
    import: Option<&Import>,
    stages: &mut [ShardedStage],
) -> Result<(), RankError> {
    let Some(import) = import else {
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
    for stage in stages {
        stage.fill_parameters(|name, offset, out| import.read(name, offset, out))?;
    }
    Ok(())
}
