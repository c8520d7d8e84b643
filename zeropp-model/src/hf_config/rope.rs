//! Rotary positions as a `config.json` has them. Transformers 5 has all of it in
//! `rope_parameters`, flat or one object for each kind of layer; 4 has `rope_theta` beside
//! `rope_scaling`. Where a file has both, transformers 5 takes `rope_scaling` and 4 knows nothing
//! else: the two have to say the same, or the one that 4 does not know says nothing of scaling.

use serde_json::Value;
use zeropp_data::files::excerpt;

use super::fields::{Fault, Fields};
use super::keys::ROPE;
use crate::decoder::{Rotary, RotaryScaling, Yarn};

/// θ where no file says any: the default of every family's class.
const THETA: f64 = 10_000.0;
/// The kinds of layers whose objects `rope_parameters` may have.
const LAYER_TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

/// The content of one object.
#[derive(Clone, Copy, PartialEq)]
struct Said {
    theta: Option<f64>,
    scaling: RotaryScaling,
}

/// How the model turns; `positions` is `max_position_embeddings`.
pub(super) fn rotary(fields: Fields<'_>, positions: usize) -> Result<Rotary, Fault> {
    whole_heads_turn(fields)?;
    let why = "the two elements of a pair are half a head apart here";
    fields.must_be("rope_interleaved", false, why)?;
    fields.must_be("use_mrope", false, "positions are those of text here, without pictures")?;
    let newer = match fields.object("rope_parameters")? {
        Some(object) => Some(parameters(object, positions)?),
        None => None,
    };
    let older = match fields.object("rope_scaling")?.filter(|object| !object.0.is_empty()) {
        Some(object) => Some(said(object, positions).map_err(within("rope_scaling"))?),
        None => None,
    };
    let beside = fields.optional_number("rope_theta")?;
    let theta = theta(newer, older, beside)?;
    let scaling = match (newer, older) {
        (Some(newer), Some(older)) if newer.scaling == older.scaling => newer.scaling,
        (Some(newer), Some(older)) if newer.scaling == RotaryScaling::None => older.scaling,
        (Some(_), Some(_)) => {
            let problem = "contradicts rope_parameters; keep the one that the weights were made \
                           with, or make them the same";
            return fields.fault("rope_scaling", problem);
        }
        (one, other) => one.or(other).map_or(RotaryScaling::None, |said| said.scaling),
    };
    if matches!(scaling, RotaryScaling::Yarn(_)) && theta <= 1.0 {
        return Err(("rope_theta".into(), format!("{theta} is not above 1, as yarn needs it")));
    }
    Ok(Rotary { theta, scaling })
}

/// All that say θ have to say the same.
fn theta(newer: Option<Said>, older: Option<Said>, beside: Option<f64>) -> Result<f64, Fault> {
    let [newer, older_says] = [newer, older].map(|said| said.and_then(|said| said.theta));
    let all = [
        ("rope_parameters.rope_theta", newer),
        ("rope_scaling.rope_theta", older_says),
        ("rope_theta", beside),
    ];
    let mut saying = all.iter().filter_map(|(field, theta)| Some((field, (*theta)?)));
    let Some((first, theta)) = saying.next() else { return Ok(THETA) };
    if let Some((field, other)) = saying.find(|(_, other)| *other != theta) {
        let problem = format!("{other} contradicts {first} = {theta}; make them the same");
        return Err(((*field).into(), problem));
    }
    if older.is_some() && older_says.or(beside).is_none() && theta != THETA {
        let problem = format!(
            "is missing: rope_parameters has {theta}, which transformers does not look at where \
             there is a rope_scaling, and takes {THETA}; write \"rope_theta\": {theta} into \
             rope_scaling"
        );
        return Err(("rope_scaling.rope_theta".into(), problem));
    }
    Ok(theta)
}

fn within(field: &str) -> impl Fn(Fault) -> Fault {
    move |(name, problem)| (format!("{field}.{name}"), problem)
}

fn whole_heads_turn(fields: Fields<'_>) -> Result<(), Fault> {
    match fields.optional_number("partial_rotary_factor")? {
        None | Some(1.0) => Ok(()),
        Some(_) => {
            fields.fault("partial_rotary_factor", "heads turn as a whole here; only 1 works")
        }
    }
}

/// `rope_parameters`: one object for all layers, or one for each kind of layer, which are the same.
fn parameters(object: Fields<'_>, positions: usize) -> Result<Said, Fault> {
    const FIELD: &str = "rope_parameters";
    if !object.0.iter().any(|(key, value)| value.is_object() || LAYER_TYPES.contains(&&**key)) {
        return said(object, positions).map_err(within(FIELD));
    }
    let mut all: Option<Said> = None;
    for (key, value) in object.0.iter().filter(|(_, value)| !value.is_null()) {
        let field = format!("{FIELD}.{}", excerpt(key));
        if !LAYER_TYPES.contains(&&**key) {
            let problem = format!("is no kind of layer; {} are", LAYER_TYPES.join(" and "));
            return Err((field, problem));
        }
        let Value::Object(inner) = value else { return object.fault(key, "is no object") };
        let this = said(Fields(inner), positions).map_err(within(&field))?;
        if *all.get_or_insert(this) != this {
            let problem = "turns in another way than other layers do; all turn alike here";
            return Err((field, problem.into()));
        }
    }
    Ok(all.unwrap_or(Said { theta: None, scaling: RotaryScaling::None }))
}

/// The content of an object, each of its fields known and used by its type of scaling.
fn said(object: Fields<'_>, positions: usize) -> Result<Said, Fault> {
    object.check(&[ROPE])?;
    whole_heads_turn(object)?;
    let theta = object.optional_number("rope_theta")?;
    let (new, old) = (object.word("rope_type")?, object.word("type")?);
    if new.is_some() && old.is_some() && new != old {
        return object.fault("type", "contradicts rope_type; delete one of the two");
    }
    let field = if new.is_some() { "rope_type" } else { "type" };
    let kind = new.or(old);
    let (scaling, uses): (_, &[&str]) = match kind {
        None | Some("default") => (RotaryScaling::None, &[]),
        // The length of the first texts is said with it, and changes nothing.
        Some("linear") => (
            RotaryScaling::Linear(object.number("factor")?),
            &["factor", "original_max_position_embeddings"],
        ),
        Some("llama3") => (llama3(object)?, &LLAMA3),
        Some("yarn") => (yarn(object, positions)?, &YARN),
        Some(_) => {
            let problem = "is not known; default, linear, llama3 and yarn are";
            return object.fault(field, problem);
        }
    };
    let every = ["rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"];
    let unused = |key: &&String| !every.contains(&key.as_str()) && !uses.contains(&key.as_str());
    let mut set = object.0.iter().filter(|(_, value)| !value.is_null()).map(|(key, _)| key);
    match (set.find(unused), kind) {
        (None, _) => Ok(Said { theta, scaling }),
        (Some(other), Some(kind)) => object
            .fault(other, format!("changes nothing with rope_type {kind}; delete one of both")),
        (Some(other), None) => {
            object.fault("rope_type", format!("{other} has a type: linear, llama3 or yarn"))
        }
    }
}

const LLAMA3: [&str; 4] =
    ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"];

fn llama3(object: Fields<'_>) -> Result<RotaryScaling, Fault> {
    let (low, high) = (object.number("low_freq_factor")?, object.number("high_freq_factor")?);
    if high <= low {
        let problem = format!("is not above low_freq_factor = {low}");
        return object.fault("high_freq_factor", problem);
    }
    Ok(RotaryScaling::Llama3 {
        factor: object.number("factor")?,
        low,
        high,
        context: object.number("original_max_position_embeddings")?,
    })
}

const YARN: [&str; 8] = [
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
];

fn yarn(object: Fields<'_>, positions: usize) -> Result<RotaryScaling, Fault> {
    let factor = object.number("factor")?;
    let context = object.optional_number("original_max_position_embeddings")?;
    let grown = |scale: f64| Yarn::attention_of(factor, scale);
    let said = object.optional_number("attention_factor")?;
    let scales = (object.optional_number("mscale")?, object.optional_number("mscale_all_dim")?);
    let attention = match (said, scales) {
        (Some(said), _) => said,
        (None, (Some(one), Some(all))) => grown(one) / grown(all),
        (None, _) => grown(1.0),
    };
    Ok(RotaryScaling::Yarn(Yarn {
        factor,
        context: context.unwrap_or(positions as f64),
        fast: object.optional_number("beta_fast")?.unwrap_or(32.0),
        slow: object.optional_number("beta_slow")?.unwrap_or(1.0),
        attention,
        truncated: object.switch("truncate", true)?,
    }))
}
