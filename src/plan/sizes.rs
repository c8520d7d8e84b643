//! Sizes whose products no machine holds, refused before anything multiplies them.

use zeropp_core::layer::{BatchShape, Model, Part};

use crate::Error;
use crate::config::{Config, ConfigError};

/// Most bytes of all ranks together, an exbibyte: sums of what is below it stay far from 2⁶⁴.
const BYTES_MAX: f64 = (1u64 << 60) as f64;
/// More than a layer keeps of a token for each element of its widest product, in bytes: sixteen
/// elements of four bytes from F to B, as many from B to W.
const KEPT_BYTES: f64 = 128.0;
/// What a parameter takes: weights, gradient, moments, a mean of the weights, what is gathered of
/// weights and gradient, and a direction of its matrix.
const PARAMETER_BYTES: f64 = 32.0;

/// Refuses a model or a batch that is beyond any machine. Estimated from above in floating point,
/// which does not overflow: whatever is predicted later fits its whole numbers.
///
/// # Errors
/// What is too large, with the settings it is the product of.
pub(crate) fn check(config: &Config, model: &Model, batch: BatchShape) -> Result<(), Error> {
    let parameters = parameters(model);
    if parameters * PARAMETER_BYTES > BYTES_MAX {
        let problem = format!(
            "with {} layers and a vocabulary of {} it makes a model of {parameters:.1e} \
             parameters, more than any machine holds",
            config.layers, model.vocabulary
        );
        let help = "use a smaller hidden size or fewer layers";
        return Err(ConfigError::value("hidden", config.hidden, problem, help).into());
    }
    let [samples, seq] = [config.micro_batch_size, config.seq].map(real);
    let widest = widest(model).max(real(config.hidden));
    let of_token = KEPT_BYTES * widest + 4.0 * real(config.heads) * seq;
    let layers = real(model.parts.len()) * of_token + 12.0 * real(model.vocabulary);
    let ranks = real(config.zero3) * real(config.dp);
    let kept = samples * seq * layers * real(config.micro_batches()) * ranks;
    if kept > BYTES_MAX {
        let (field, value) = largest(config);
        let problem = format!(
            "a step's activations of {} x {} micro-batches of {} x {} tokens take {kept:.1e} \
             bytes, more than all machines hold",
            config.zero3 * config.dp,
            config.micro_batches(),
            config.micro_batch_size,
            config.seq,
        );
        let help = format!("use a smaller {field}");
        return Err(ConfigError::value(field, value, problem, help).into());
    }
    check_told(config, model, batch)
}

/// What the layers themselves say they keep, which may be anybody's layers.
fn check_told(config: &Config, model: &Model, batch: BatchShape) -> Result<(), Error> {
    let kept = |part: &Part| {
        let cost = part.cost(batch);
        let bytes = [cost.activation_bytes, cost.activation_bytes_selective, cost.stash_bytes];
        bytes.iter().map(|bytes| *bytes as f64).sum::<f64>()
    };
    for part in &model.parts {
        let bytes = kept(part) * model.parts.len() as f64 * real(config.micro_batches());
        if bytes > BYTES_MAX {
            let cost = part.cost(batch);
            let says =
                format!("layer {} says that it keeps {cost:?} of a micro-batch", part.name());
            return Err(Error::Model(format!("{says}, more than all machines hold")));
        }
    }
    Ok(())
}

fn real(n: usize) -> f64 {
    n as f64
}

fn parameters(model: &Model) -> f64 {
    let all = model.parts.iter().flat_map(|part| part.parameters());
    all.map(|p| p.shape.iter().map(|n| real(*n)).product::<f64>()).sum()
}

/// The most elements of a token in any of a block's products: no parameter's last dimension is
/// larger.
fn widest(model: &Model) -> f64 {
    let blocks = model.parts.iter().filter(|part| part.is_block());
    let sizes = blocks.flat_map(|part| part.parameters()).filter_map(|p| p.shape.last().copied());
    sizes.map(real).fold(0.0, f64::max)
}

/// The setting of a batch that is furthest from what is common.
fn largest(config: &Config) -> (&'static str, usize) {
    let common = [
        ("micro-batch-size", config.micro_batch_size, 1.0),
        ("seq", config.seq, 1024.0),
        ("hidden", config.hidden, 1024.0),
        ("micro-batches", config.micro_batches(), 16.0),
    ];
    let beyond = |(_, value, usual): &(_, usize, f64)| real(*value) / usual;
    let by_far = common.iter().max_by(|a, b| beyond(a).total_cmp(&beyond(b)));
    by_far.map(|(field, value, _)| (*field, *value)).expect("four settings")
}
