//! Files that schedules, plans and models are read from, damaged: each is read or refused, whatever
//! stands in it, and what was read can be used. All readers that need no Burn and that
//! `zeropp-weights` has not are tried here; those of the settings are in `zeropp`.

#[path = "../../tests/common/mutate.rs"]
mod mutate;

use std::fs;
use std::path::Path;

use mutate::read_or_refused;
use zeropp_data::choices::{Order, Tokenizer};
use zeropp_data::files::toml_keys;
use zeropp_data::tokens::{Dataset, Hidden, Sampler};
use zeropp_model::hf_config;
use zeropp_plan::bytes::RunState;
use zeropp_plan::layout::{ComputeSettings, Fixed, Job};
use zeropp_plan::model::ModelSizes;
use zeropp_plan::plan::LayoutPlan;
use zeropp_plan::{against, machines};
use zeropp_schedule::costs::{Sharers, Table, check_sums, measured};
use zeropp_schedule::draw::{chrome, chrome_read};
use zeropp_schedule::exchange::json::{self, Document};
use zeropp_schedule::exchange::{self, Format, csv};
use zeropp_schedule::lower::{LowerOptions, lower};
use zeropp_schedule::schedules::{OrderCosts, Shape, generate, generate_with_costs};
use zeropp_schedule::simulate::{self, simulate};
use zeropp_schedule::verify::{VerifyLimits, verify};

const SHAPE: Shape = Shape { pp: 2, virtual_stages: 2, micro_batches: 3, unit: 3 };

fn said(error: impl ToString) -> String {
    error.to_string()
}

fn text(bytes: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(bytes).map_err(said)
}

fn small() -> zeropp_schedule::ir::Schedule {
    generate("zeropp", &SHAPE).unwrap()
}

#[test]
fn schedules_in_both_forms_are_read_or_refused() {
    let (mut table, mut object) = (Vec::new(), Vec::new());
    csv::write(&small(), csv::Dialect::Zeropp, &mut table).unwrap();
    let schedule = lower(&small(), &LowerOptions::default());
    let document = Document { schedule, costs: None, measures: None };
    json::write(&document, &mut object).unwrap();
    for (format, input) in [(Format::Csv, table), (Format::Json, object)] {
        read_or_refused("schedule", &[&input], 3000, |bytes| {
            let read = exchange::read(text(bytes)?, format)?;
            let limits = VerifyLimits { optimizer_step: false, ..VerifyLimits::default() };
            verify(&read.schedule, &limits).map_err(said)?;
            let stages = read.schedule.stages();
            simulate(&read.schedule, &simulate::Costs::uniform(stages, 3, 2, 1, 1))
                .map_err(said)?;
            Ok(())
        });
    }
}

#[test]
fn costs_are_read_or_refused_and_what_is_read_makes_a_schedule() {
    let toml = "measured = \"by hand\"\nt_f = 11347\nt_b = 11248.5\n\
                t_w = [8132, 8132, 8132, 9120]\nt_comm = 377\nmem_message = 33554432\n\
                bytes_per_s = 12.5e9\nlinks = 1\nt_gather = 900\nt_reduce = 1800\n\
                t_step = 3000\nmem_f = 4\nmem_b = -2\nmem_w = -2\n";
    let keys = toml_keys(toml).unwrap();
    let object = serde_json::to_string(&keys).unwrap();
    let use_of = |table: Table| {
        let sharers = Sharers { zero3: 2, replicas: 2 };
        let costs = table.of(SHAPE.stages(), sharers, None).map_err(said)?;
        check_sums(&costs, SHAPE.micro_batches).map_err(said)?;
        for kind in ["zeropp-auto", "zb-v", "v-half"] {
            let made =
                generate_with_costs(kind, &SHAPE, &OrderCosts::from(&costs)).map_err(said)?;
            simulate(&lower(&made, &LowerOptions::default()), &costs).map_err(said)?;
        }
        Ok(())
    };
    read_or_refused("costs in TOML", &[toml.as_bytes()], 1500, |bytes| {
        use_of(Table::of_keys(toml_keys(text(bytes)?)?).map_err(said)?)
    });
    read_or_refused("costs in JSON", &[object.as_bytes()], 1500, |bytes| {
        use_of(Table::from_json(text(bytes)?).map_err(said)?)
    });
}

/// A plan of a small model.
fn job(machine: zeropp_schedule::costs::Machine) -> Job {
    Job {
        model: ModelSizes::gpt("small", [4, 256, 4, 1000, 128]),
        memory: machine.memory_bytes as u64,
        machine,
        gpus: 4,
        global_batch: 8,
        compute: ComputeSettings::GPU,
        state: RunState::uniform(2),
        fixed: Fixed::default(),
    }
}

const MEASURED: &str = "block_flops_per_s = [3e10, 3e10, 4e10, 3e10]\nt_block = [50, 80, 20, 40]\n\
                        head_flops_per_s = 4e10\nranks_at_once = 2\nupdate_bytes_per_s = 5e9\n\
                        t_step_end = 500\nreduce_bytes_per_s = 2e9\nflops_per_s = 312e12\n\
                        memory_bytes = 80e9\nmemory_bytes_per_s = 1.6e12\nper_node = 8\n\
                        zero3_bytes_per_s = 240e9\nt_comm = 10\nt_collective = 20\n";

#[test]
fn machines_are_read_or_refused_and_what_is_read_makes_a_plan() {
    let public = machines::file("a100").unwrap();
    read_or_refused("machine", &[public.as_bytes(), MEASURED.as_bytes()], 300, |bytes| {
        let machine = machines::read("m.toml", text(bytes)?).map_err(said)?;
        LayoutPlan::new(&job(machine), "").map(drop).map_err(said)
    });
}

#[test]
fn a_rate_in_another_unit_is_named_with_its_unit() {
    let good = machines::file("a100").unwrap();
    let line = good.lines().find(|line| line.starts_with("flops_per_s")).unwrap();
    let read = |to: &str| machines::read("m.toml", &good.replace(line, to));
    let said = read("flops_per_s = 312").unwrap_err().to_string();
    let wanted = "machine = m.toml: flops_per_s: found 312; a rate in FLOP/s, from 1e6 to 1e21: \
                  312 TFLOP/s is 312e12";
    assert_eq!(said, wanted);
    // Within the range, and too slow for what is to be planned.
    let mut large = job(read("flops_per_s = 1e6").unwrap());
    large.model = ModelSizes::of_a_paper("1t").unwrap();
    (large.gpus, large.global_batch, large.memory) = (64, 1 << 20, 1 << 60);
    let said = LayoutPlan::new(&large, "").map(drop).unwrap_err().to_string();
    assert!(said.contains("flops_per_s = 312e12"), "{said}");
}

#[test]
fn traces_are_read_or_refused() {
    let schedule = lower(&small(), &LowerOptions::default());
    let timeline =
        simulate(&schedule, &simulate::Costs::uniform(4, 3000, 2000, 1000, 100)).unwrap();
    let mut trace = Vec::new();
    chrome::write(&timeline, &mut trace).unwrap();
    read_or_refused("trace", &[&trace], 1500, |bytes| {
        let timeline = chrome_read::read(text(bytes)?).map_err(said)?;
        measured(&timeline).map(drop).map_err(said)
    });
}

#[test]
fn metrics_are_read_or_refused() {
    let plan = LayoutPlan::new(&job(machines::named("a100").unwrap()), "").unwrap();
    let line = "{\"step\":1,\"step_s\":0.5,\"tokens_per_s\":100.0,\"bubble\":0.1,\
                \"peak_bytes\":{\"gathered\":12,\"activation\":7}}\n";
    read_or_refused("metrics", &[line.repeat(3).as_bytes()], 1500, |bytes| {
        against::text(&plan, 0, text(bytes)?).map(drop).map_err(said)
    });
}

#[test]
fn descriptions_of_models_are_read_or_refused_and_what_is_read_has_parts() {
    let llama = r#"{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 300,
"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "head_dim": 16,
"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
"high_freq_factor": 4.0, "original_max_position_embeddings": 64}, "tie_word_embeddings": false,
"hidden_act": "silu", "attention_bias": false}"#;
    let gpt2 = r#"{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300,
"n_positions": 128, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}"#;
    let inputs = [llama.as_bytes(), gpt2.as_bytes()];
    read_or_refused("config.json", &inputs, 3000, |bytes| {
        let read = hf_config::parse(text(bytes)?, Path::new("config.json")).map_err(said)?;
        // Parts of what is large are many.
        if read.decoder.layers < 1000 {
            read.decoder.parts().iter().for_each(|part| drop(part.parameters()));
        }
        Ok(())
    });
}

#[test]
fn masks_and_indexes_beside_data_are_read_or_refused() {
    let tokens: Vec<u8> = (0..64u16).flat_map(u16::to_le_bytes).collect();
    let mask = [b"ZPPMASK1".as_slice(), &64u64.to_le_bytes(), &[0x5a; 8]].concat();
    // Three documents of 20, 30 and 14 ids of 16 bits.
    let lengths: Vec<u8> = [20i32, 30, 14].into_iter().flat_map(i32::to_le_bytes).collect();
    let places: Vec<u8> = [0i64, 40, 100].into_iter().flat_map(i64::to_le_bytes).collect();
    let documents: Vec<u8> = [0i64, 1, 2, 3].into_iter().flat_map(i64::to_le_bytes).collect();
    let head = [b"MMIDIDX\0\0".as_slice(), &1u64.to_le_bytes(), &[8]].concat();
    let counts = [3u64.to_le_bytes(), 4u64.to_le_bytes()].concat();
    let index = [head, counts, lengths, places, documents].concat();
    let dir = tempfile::tempdir().unwrap();
    let bin = dir.path().join("t.bin");
    for (name, input) in [("t.mask", mask), ("t.idx", index)] {
        fs::write(&bin, &tokens).unwrap();
        let beside = dir.path().join(name);
        read_or_refused(name, &[&input], 1500, |bytes| {
            // A file that is mapped is not written again, but replaced.
            let _ = fs::remove_file(&beside);
            fs::write(&beside, bytes).map_err(said)?;
            let data = Dataset::open(&bin, Tokenizer::U16).map_err(said)?;
            data.require(8).map_err(said)?;
            let sampler = Sampler::new(7, Order::Random, 8, 2).hiding(Hidden::default());
            for index in 0..2 {
                sampler.masked(&data, 3, index).map_err(said)?;
                sampler.document_starts(&data, 3, index);
            }
            Ok(())
        });
        fs::remove_file(&beside).unwrap();
    }
}
