//! What is to be planned, from flags: the same model that `zeropp run` makes of them.

use std::path::Path;

use clap::ArgMatches;
use zeropp::Config;
use zeropp::config::{Bytes, DeviceKind, Precision, Table, Value};
use zeropp::pipeline::costs::{Form, Machine};
use zeropp_core::kernels::attention::keeps_probabilities;
use zeropp_plan::layout::{Compute, Fixed, Job, Recompute};
use zeropp_plan::machines;
use zeropp_plan::model::ModelSizes;

use super::{bad, file, model_options};
use crate::Failure;

/// Share of a device's memory that a run can have.
const USABLE: f64 = 0.95;
/// Token ids of a run without data and a vocabulary: bytes.
const BYTE_IDS: usize = 256;

/// What is to be planned, and the flags of `zeropp run` that say which model it is.
pub(crate) fn job(matches: &ArgMatches) -> Result<(Job, String), Failure> {
    let size = |name: &str| matches.get_one::<usize>(name).copied();
    let machine = machine(matches)?;
    let (model, mut flags) = model(matches)?;
    if !matches.get_flag("cpu") {
        flags.push_str(" --precision bf16 --device cuda --engine nccl");
    }
    let device = if matches.get_flag("cpu") { DeviceKind::Cpu } else { DeviceKind::Cuda };
    let precision = if matches.get_flag("cpu") { Precision::Fp32 } else { Precision::Bf16 };
    let usable = (machine.memory_bytes * USABLE) as u64;
    let memory = matches.get_one::<Bytes>("memory").map_or(usable, |bytes| bytes.0);
    let recompute = matches.get_one::<String>("recompute").map(|what| match what.as_str() {
        "full" => Recompute::Full,
        "selective" => Recompute::Selective,
        _ => Recompute::None,
    });
    let fixed = Fixed {
        pp: size("pp"),
        zero3: size("zero3"),
        dp: size("dp"),
        virtual_stages: size("virtual"),
        unit: size("unit"),
        micro_batch_size: size("micro-batch-size"),
        recompute,
        schedule: matches.get_one::<String>("schedule").cloned(),
    };
    let job = Job {
        gpus: size("gpus").expect("required"),
        global_batch: size("global-batch").expect("required"),
        memory,
        compute: compute(device, precision, model.seq),
        model,
        machine,
        fixed,
    };
    Ok((job, flags))
}

/// What ranks compute on, and in, for samples of `seq` tokens.
pub(crate) fn compute(device: DeviceKind, precision: Precision, seq: usize) -> Compute {
    let on_gpu = device != DeviceKind::Cpu;
    let fp32 = precision == Precision::Fp32;
    Compute {
        on_gpu,
        element_bytes: if fp32 { 4 } else { 2 },
        keeps_probabilities: fp32 && !on_gpu && keeps_probabilities(seq),
    }
}

fn machine(matches: &ArgMatches) -> Result<Machine, Failure> {
    let mut machine = machine_called(matches.get_one::<String>("machine").expect("has a default"))?;
    if let Some(per_node) = matches.get_one::<usize>("per-node") {
        if *per_node == 0 {
            return Err(Failure::bad_input("per-node = 0: at least 1 is needed; use 1 or more"));
        }
        machine.per_node = *per_node;
    }
    Ok(machine)
}

/// The machine that is known by this name, or that the file of this name is about.
pub(crate) fn machine_called(name: &str) -> Result<Machine, Failure> {
    let path = Path::new(name);
    let form = path.extension().and_then(|e| e.to_str()).and_then(Form::from_extension);
    let read = match form {
        Some(form) => machines::read(name, &file("machine", path)?, form),
        None => machines::named(name),
    };
    read.map_err(bad)
}

/// The model, and the flags of `zeropp run` that say which it is.
fn model(matches: &ArgMatches) -> Result<(ModelSizes, String), Failure> {
    let mut given = Table::new();
    for option in model_options() {
        if let Some(text) = matches.get_one::<String>(option.key) {
            given.insert(option.key.into(), option.kind.parse(text).expect("clap has parsed it"));
        }
    }
    let called = given.get("model").and_then(Value::as_str).unwrap_or("a GPT").to_owned();
    if let Some(paper) = ModelSizes::of_a_paper(&called) {
        let d = paper.decoder;
        given.insert("model".into(), "gpt".into());
        for (key, size) in [
            ("layers", d.layers),
            ("hidden", d.hidden),
            ("heads", d.heads),
            ("vocab", d.vocabulary),
            ("seq", paper.seq),
        ] {
            given.entry(key).or_insert(Value::Integer(size as i64));
        }
    }
    let flags: Vec<String> = given.iter().map(|(key, value)| flag(key, value)).collect();
    let config = Config::default().with(given).map_err(unknown)?;
    config.validate().map_err(Failure::bad_input)?;
    let decoder = config.decoder(config.vocab.unwrap_or(BYTE_IDS)).map_err(Failure::bad_input)?;
    Ok((ModelSizes { name: called, decoder, seq: config.seq }, flags.join(" ")))
}

/// A setting as a flag of `zeropp run`, quoted for a shell.
pub(crate) fn flag(key: &str, value: &Value) -> String {
    match value {
        Value::Boolean(on) => format!("--{key}={on}"),
        Value::String(text) => format!("--{key} {}", crate::shell::quoted(text)),
        other => format!("--{key} {other}"),
    }
}

/// A model that is not known, with the names that only plans know.
fn unknown(error: zeropp::config::ConfigError) -> Failure {
    let papers: Vec<&str> = ModelSizes::paper_names().collect();
    Failure::bad_input(format!("{error}; plans also know the papers' {}", papers.join(", ")))
}
