//! A checkpoint of adapters, or of a part of the parameters, as the whole model that it makes of
//! the weights it began with: adapters are merged into them.

use std::path::Path;

use zeropp_core::layer::{Model, Part};
use zeropp_core::model;
use zeropp_core::model::tensors::alike;
use zeropp_core::model::tuning::{LORA, Lora, is_adapter};
use zeropp_core::params::ParamSpec;
use zeropp_weights::ParameterShape;

use crate::Error;
use crate::checkpoint::described::config_of;
use crate::checkpoint::export_error::{ExportError, ReadWhole, of_rank};
use crate::checkpoint::initial::{Initial, Read, open_for};
use crate::error::RankError;

/// A model whose parameters come from several places.
pub(crate) struct Merged {
    model: Model,
    initial: Initial,
    pub(crate) lora: Option<Lora>,
    /// Linear maps of a block with an adapter.
    pub(crate) maps: Vec<&'static str>,
}

impl Merged {
    /// Opens the checkpoint at `path`, with the moving average of what it trained if `mean`.
    ///
    /// # Errors
    /// A checkpoint or a base of it that cannot be read.
    pub(crate) fn open(path: &Path, mean: bool) -> Result<Merged, Error> {
        let config = config_of(path)?;
        let decoder = config.decoder(config.vocab.unwrap_or(1))?;
        let tuning = config.tuning(&decoder)?;
        let model = model::build_tuned(decoder, &tuning);
        let initial = open_for(path, &model, mean, config.seed)?;
        let adapted = |map: &&'static str| {
            let a = format!(".{map}.{}", LORA[0]);
            model.parts.iter().flat_map(Part::parameters).any(|p| p.name.ends_with(&a))
        };
        let maps = tuning.lora.iter().flat_map(|lora| lora.maps(decoder.names()));
        let maps = maps.flat_map(alike).filter(adapted).collect();
        Ok(Merged { model, initial, lora: tuning.lora, maps })
    }

    /// The parameters of the whole model, each once; of the adapters alone if `adapters`, else
    /// without them.
    pub(crate) fn shapes(&self, adapters: bool) -> Vec<ParameterShape> {
        let mut shapes: Vec<ParameterShape> = Vec::new();
        for ParamSpec { name, shape, .. } in self.parameters() {
            if is_adapter(&name) == adapters && shapes.iter().all(|other| other.name != name) {
                shapes.push(ParameterShape { name, shape });
            }
        }
        shapes
    }

    /// Token ids of the model.
    pub(crate) fn vocabulary(&self) -> usize {
        self.model.vocabulary
    }

    fn parameters(&self) -> impl Iterator<Item = ParamSpec> {
        self.model.parts.iter().flat_map(Part::parameters)
    }

    /// Calls `write` with what reads elements of a parameter, an adapter merged into it:
    /// its error, and whether what it read, of the checkpoint at `from`, was whole.
    ///
    /// # Errors
    /// That of `write`.
    pub(crate) fn write(
        &self,
        from: &Path,
        mut write: impl FnMut(&mut ReadWhole<'_>) -> Result<(), ExportError>,
    ) -> Result<Result<(), ExportError>, ExportError> {
        let mut written = Ok(());
        let read = self.initial.read(&mut |read| {
            written = write(&mut |name, first, out| {
                self.read_merged(name, first, out, read).map_err(|e| of_rank(from, &e))
            });
            Ok(())
        });
        written.map(|()| read.map_err(|e| of_rank(from, &e)))
    }

    fn read_merged(
        &self,
        name: &str,
        first: usize,
        out: &mut [f32],
        read: &mut Read<'_>,
    ) -> Result<(), RankError> {
        read(name, first, out)?;
        let Some(lora) = &self.lora else { return Ok(()) };
        let Some(map) = name.strip_suffix("weight") else { return Ok(()) };
        let of = LORA.map(|of| self.parameters().find(|p| p.name == format!("{map}{of}")));
        let [Some(a), Some(b)] = &of else { return Ok(()) };
        add_adapter(out, [a, b], lora.scale(), read)
    }
}

/// Adds scale·A·B to W.
fn add_adapter(
    w: &mut [f32],
    [a, b]: [&ParamSpec; 2],
    scale: f64,
    read: &mut Read<'_>,
) -> Result<(), RankError> {
    let ([rank, columns], mut values) =
        ([b.shape[0], b.shape[1]], [a, b].map(|p| vec![0.0; p.len()]));
    for (parameter, values) in [a, b].into_iter().zip(&mut values) {
        read(&parameter.name, 0, values)?;
    }
    let [a, b] = values;
    for (w, a) in w.chunks_exact_mut(columns).zip(a.chunks_exact(rank)) {
        let mut sums = vec![0f64; columns];
        for (a, b) in a.iter().zip(b.chunks_exact(columns)) {
            let terms = sums.iter_mut().zip(b);
            terms.for_each(|(sum, b)| *sum += f64::from(*a) * f64::from(*b));
        }
        let terms = w.iter_mut().zip(&sums);
        terms.for_each(|(w, sum)| *w = (f64::from(*w) + scale * sum) as f32);
    }
    Ok(())
}
