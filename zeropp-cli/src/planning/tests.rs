use zeropp_plan::layout::{Job, OutPlace, Recompute};

use super::*;

fn plan(line: &str) -> Result<(Job, String), String> {
    let words = std::iter::once("plan").chain(line.split(' '));
    let command = crate::values::read_negative_numbers(command());
    let matches = command.try_get_matches_from(words);
    let matches = matches.map_err(|e| crate::command::helpful(e).to_string())?;
    let asked = job(&matches).map_err(|failure| failure.message)?;
    Ok((asked.job, asked.flags))
}

fn asked(line: &str) -> PlanRequest {
    let words = std::iter::once("plan").chain(line.split_whitespace());
    let matches = command().try_get_matches_from(words).unwrap();
    job(&matches).unwrap_or_else(|failure| panic!("{line}: {}", failure.message))
}

/// The first layout of a line's plan.
fn first(line: &str) -> zeropp_plan::plan::Ranked {
    let plan = planned(&asked(line), None);
    plan.unwrap_or_else(|failure| panic!("{line}: {}", failure.message)).layouts.remove(0)
}

/// Plans a line, and checks the run that the plan prints: its settings, its memory of every rank
/// and kind, and its FLOP must be what the run itself predicts.
fn holds(line: &str) {
    let asked = asked(line);
    let plan =
        planned(&asked, None).unwrap_or_else(|failure| panic!("{line}: {}", failure.message));
    let first = &plan.layouts[0];
    let config = run_of(&first.command);
    config.validate().unwrap();
    let trainer = zeropp::Trainer::new(config).unwrap_or_else(|e| panic!("{}: {e}", first.command));
    let run = trainer.plan();
    assert_eq!(plan.parameters, run.parameters as f64, "{line}");
    let flops = (plan.flops_per_token / run.flops_per_token - 1.0).abs();
    assert!(flops < 1e-12, "{line}: {} and {}", plan.flops_per_token, run.flops_per_token);
    assert_eq!(first.planned.memory.len(), run.ranks.len());
    assert_eq!(first.planned.blocks, run.blocks, "{}", first.command);
    for (rank, run) in run.ranks.iter().enumerate() {
        assert_eq!(first.planned.memory[rank], run.held.at_once, "{}", first.command);
        assert_eq!(first.planned.peaks[rank], run.held.peaks, "peaks: {}", first.command);
    }
}

/// The settings of a command.
fn run_of(command: &str) -> Config {
    let matches = crate::command::command().try_get_matches_from(command.split(' ')).unwrap();
    let config = args::run(matches.subcommand_matches("run").unwrap());
    config.unwrap_or_else(|f| panic!("{command}: {}", f.message)).config
}

/// Whatever is asked for: the commands of a plan pass the checks of their runs, or the plan says
/// that runs refuse them; what it does not plan for, it says at once.
#[test]
fn every_command_of_a_plan_is_taken_or_said_to_be_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (machine, out) = (dir.path().join("m.toml"), dir.path().join("out"));
    let known = zeropp_plan::machines::file("h100").unwrap();
    let rates = "host_bytes_per_s = 50e9\nfile_bytes_per_s = 2e9\n";
    std::fs::write(&machine, format!("{known}\n{rates}")).unwrap();
    let (on_cpu, on_gpu) = ("--cpu --seq 512 --layers 8", "--seq 1024 --layers 8");
    let experts = "--model qwen3-moe --hidden 64 --heads 4 --experts 8";
    let out = out.display();
    for (device, more) in [
        (on_gpu, "--model gpt2".into()),
        (on_gpu, "--model gpt2 --recompute auto:out=host".into()),
        (on_gpu, "--model gpt2 --optimizer adamw:out=host".into()),
        (on_gpu, "--hidden 512 --heads 8 --vocab 99999 --optimizer adafactor --tied --pp 2".into()),
        (on_gpu, "--model llama3-8b --schedule zeropp:slices=2 --pp 2".into()),
        (on_gpu, "--model llama3-8b --schedule zeropp:slices=auto".into()),
        (on_gpu, experts.into()),
        (on_gpu, format!("{experts} --schedule zeropp:slices=auto")),
        (on_gpu, format!("{experts} --precision fp32 --optimizer muon")),
        (on_cpu, experts.into()),
        (on_cpu, format!("{experts} --schedule zeropp:slices=auto --precision bf16")),
        (on_cpu, format!("{experts} --optimizer adamw:out={out}")),
        (on_cpu, format!("--optimizer adafactor --tied --recompute auto:out={out}")),
        (on_cpu, format!("--optimizer-sync late --recompute auto:out={out}")),
        (on_cpu, "--optimizer-sync late --optimizer adafactor --head-split auto --tied".into()),
        (on_cpu, format!("--schedule zeropp:slices=2 --pp 2 --recompute auto:out={out}")),
        (on_cpu, "--optimizer muon --schedule 1f1b:slices=auto --pp 2".into()),
    ] {
        let line =
            format!("{device} {more} --gpus 2 --global-batch 4 --machine {}", machine.display());
        takes(&line);
    }
}

/// The commands of a line's plan are taken, or said to be refused.
fn takes(line: &str) {
    let plan =
        planned(&asked(line), None).unwrap_or_else(|failure| panic!("{line}: {}", failure.message));
    for ranked in &plan.layouts {
        let config = run_of(&ranked.command);
        let checked = config.validate_for_prediction().map_err(|e| e.to_string());
        let built = checked.and_then(|()| {
            let trainer = zeropp::Trainer::builder(config).for_prediction().build();
            trainer.map(drop).map_err(|e| e.to_string())
        });
        match (ranked.only_on_cpus, built) {
            (None, built) => built.unwrap_or_else(|e| panic!("{line}: {}: {e}", ranked.command)),
            (Some(_), built) => assert!(built.unwrap_err().contains("device = cuda"), "{line}"),
        }
    }
}

#[test]
fn a_plan_holds_what_the_run_that_it_prints_predicts() {
    for (ranks, fixed) in [
        ("1", "--pp 1 --zero3 1 --recompute none"),
        ("4", "--pp 2 --zero3 2 --virtual 2 --recompute none --schedule zeropp"),
        ("4", "--pp 4 --zero3 1 --virtual 1 --recompute none --schedule 1f1b"),
        ("8", "--pp 2 --zero3 2 --virtual 3 --recompute full --schedule zeropp"),
        ("8", "--pp 2 --zero3 2 --virtual 2 --recompute selective --schedule bf-pp"),
    ] {
        holds(&format!(
            "--cpu --layers 6 --hidden 64 --heads 4 --seq 32 --vocab 300 --global-batch 16 \
             --gpus {ranks} --memory 1G {fixed}"
        ));
    }
}

/// A large head is split in the plan where its run splits it, and holds as much on every rank.
#[test]
fn a_plan_with_a_split_head_holds_what_its_run_predicts() {
    let line = "--cpu --model llama3-8b --layers 8 --seq 1024 --global-batch 32 --memory 200G \
                --schedule zeropp --micro-batch-size 1";
    for fixed in ["--gpus 4 --pp 4 --virtual 1", "--gpus 8 --pp 4 --virtual 1 --zero3 2"] {
        let line = format!("{line} {fixed}");
        let first = first(&line);
        assert!(!first.planned.head_blocks.is_empty(), "{}", first.command);
        assert!(first.command.contains("zeropp:head-split="), "{}", first.command);
        holds(&line);
        let off = self::first(&format!("{line} --head-split off"));
        assert!(off.planned.head_blocks.is_empty() && off.planned.step_s > first.planned.step_s);
    }
}

/// Runs that cannot split a head: a plan says what it would save, and its commands run.
#[test]
fn a_plan_says_what_a_split_head_would_do_where_runs_have_none() {
    let line = "--model llama3-8b --machine h100 --gpus 32 --pp 4 --zero3 8 --global-batch 128 \
                --schedule zeropp --virtual 4";
    let plan = |more: &str| {
        let asked = asked(&format!("{line}{more}"));
        planned(&asked, None).unwrap_or_else(|failure| panic!("{}", failure.message))
    };
    let words =
        |plan: &LayoutPlan| text::text(plan, 200).split_whitespace().collect::<Vec<_>>().join(" ");
    let usual = plan(" --optimizer adafactor");
    assert!(usual.layouts.iter().all(|ranked| ranked.planned.head_blocks.is_empty()));
    let split = usual.split_head.expect("it would pay");
    assert!(split.step_s < 0.97 * usual.layouts[0].planned.step_s);
    assert!(words(&usual).contains("With its head split over all pipeline ranks 1 would take"));
    let ahead = plan(" --optimizer adafactor --head-split auto");
    let first = &ahead.layouts[0];
    assert!(!first.planned.head_blocks.is_empty() && !first.command.contains("head-split"));
    let whole = first.whole_head.expect("what the command comes to");
    assert!(whole.step_s > first.planned.step_s);
    assert!(words(&ahead).contains("Commands keep the head whole; of 1, "), "{}", words(&ahead));
    let plan = plan("");
    let first = &plan.layouts[0];
    assert!(!first.planned.head_blocks.is_empty() && first.command.contains(":head-split="));
    assert!(first.whole_head.is_none() && plan.split_head.is_none());
    let share = (first.terms.imbalance + first.terms.head_messages) / first.planned.step_s;
    assert!(share <= 0.02, "{share}");
}

/// Both at once.
#[test]
fn a_plan_of_slices_and_a_split_head_holds_what_its_run_predicts() {
    let line = "--cpu --model llama3-8b --layers 8 --seq 8192 --global-batch 4 --memory 400G \
                --micro-batch-size 1 --gpus 4 --pp 4 --recompute none";
    for schedule in ["zeropp:slices=2 --virtual 1", "interleaved-zb:slices=4 --virtual 2"] {
        let line = format!("{line} --schedule {schedule}");
        let first = first(&line);
        assert!(!first.planned.head_blocks.is_empty(), "{}", first.command);
        assert!(first.planned.layout.slices > 1 && first.command.contains("head-split="));
        holds(&line);
    }
}

/// Samples in slices, also where the plan chooses their number, or that there are none.
#[test]
fn a_plan_of_slices_holds_what_the_run_that_it_prints_predicts() {
    for fixed in [
        "--schedule interleaved-zb:slices=4 --virtual 2 --recompute none",
        "--schedule zeropp:slices=2 --virtual 1 --recompute full",
        "--schedule 1f1b:slices=auto --virtual 1 --recompute selective",
        "--virtual 2 --recompute full",
    ] {
        holds(&format!(
            "--cpu --layers 6 --hidden 64 --heads 4 --seq 8192 --vocab 300 --global-batch 4 --gpus \
             4 --pp 2 --zero3 2 --memory 4G {fixed}"
        ));
    }
    let line = "--cpu --layers 6 --hidden 64 --heads 4 --seq 8192 --global-batch 1 --gpus 2 --pp 2";
    let words = std::iter::once("plan").chain(line.split(' '));
    let asked = job(&command().try_get_matches_from(words).unwrap()).unwrap_or_else(|_| panic!());
    let first = planned(&asked, None).unwrap_or_else(|_| panic!()).layouts.remove(0);
    assert!(first.planned.layout.slices > 1, "one sample alone: {}", first.command);
    assert!(first.command.contains(":slices="), "{}", first.command);
    let said = plan("--gpus 2 --global-batch 4 --schedule zb-9").err().unwrap();
    assert!(said.contains("zeropp:slices=4"), "{said}");
}

/// A plan cuts by a machine's times and a run by FLOP: what the plan prints is cut as it says, with
/// large heads and small ones.
#[test]
fn a_job_has_one_cut_in_its_plan_and_in_the_run_that_it_prints() {
    let mut seed = 7u64;
    let mut draw = |n: u64| {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (seed >> 33) % n
    };
    for _ in 0..10 {
        let (layers, pp) = (4 + draw(9), 2 << draw(2));
        let vocabulary = [300, 5_000, 50_000][draw(3) as usize];
        let virtual_stages = 1 + draw(layers / pp);
        holds(&format!(
            "--cpu --layers {layers} --hidden 64 --heads 4 --seq 32 --vocab {vocabulary} --gpus 4 \
             --global-batch 32 --memory 4G --pp {pp} --virtual {virtual_stages} --schedule zeropp"
        ));
    }
}

/// Optimizers that keep other state than AdamW, a mean of the weights, and weights packed for bf16
/// products on the CPU.
#[test]
fn kept_values_are_those_of_the_settings() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("run.toml");
    for settings in [
        "optimizer = 'lion'",
        "optimizer = 'sgd'",
        "optimizer = 'sgd'\nmomentum = 0\nzero1 = true\nprefetch = 3\nrecompute = 'none'",
        "ema = 0.99\nprecision = 'bf16'",
        "precision = 'bf16'\npack-weights = 'on'\nunit = 1",
        "precision = 'bf16'\npack-weights = 'off'\noptimizer = 'lion'",
        "optimizer = 'muon'",
        "optimizer = 'muon'\nzero3 = 2\nema = 0.99",
        "optimizer = 'adafactor'\nzero3 = 2\nema = 0.99",
        "dropout = 0.1",
        "dropout = 0.1\nprecision = 'bf16'\nrecompute = 'full'",
        "optimizer-sync = 'late'",
        "optimizer-sync = 'late'\noptimizer = 'muon'\nzero3 = 2",
        "optimizer-sync = 'late'\ntied = true\nvirtual = 2",
        "optimizer-sync = 'late'\nzero1 = true\ndp = 2\nema = 0.9",
    ] {
        let text = format!(
            "{settings}\nlayers = 4\nhidden = 64\nheads = 4\nseq = 32\nvocab = 320\n\
             global-batch = '16'\nrank-memory = 1.0\nschedule = 'zeropp'\npp = 2\n"
        );
        std::fs::write(&file, text).unwrap();
        holds(&format!("{} --gpus 4", file.display()));
    }
    let refused = "stages = '2,2'\nlayers = 4\nglobal-batch = '16'";
    std::fs::write(&file, refused).unwrap();
    let said = plan(&format!("{} --gpus 4", file.display())).unwrap_err();
    assert!(said.contains("stages = ") && said.contains("take it out of"), "{said}");
    std::fs::write(&file, "layers = 4").unwrap();
    let said = plan(&format!("{} --gpus 4", file.display())).unwrap_err();
    assert!(said.starts_with("global-batch is missing"), "{said}");
}

/// Groups, heads of another size than hidden / heads, norms of q and k, gates, tied heads, padded
/// vocabularies, long samples: the planner and the run ask one description.
#[test]
fn every_family_is_planned_as_it_is_run() {
    // Kinds that weigh costs run another order where a run estimates them.
    let cluster = "--cpu --memory 900GiB --global-batch 8 --gpus 4 --pp 2 --zero3 2 --virtual 2 \
                   --schedule zeropp";
    for model in [
        "--model gpt2 --seq 1024",
        "--model gpt2-xl --seq 128",
        "--model llama2-7b --seq 256",
        "--model llama3.1-8b --seq 640",
        "--model llama-1b",
        "--model smollm2-135m",
        "--model mistral-7b --vocab-multiple 128",
        "--model qwen2.5-0.5b",
        "--model qwen3-0.6b",
        "--model qwen3-8b --layers 7",
        "--model 14.6b",
        "--model qwen3 --layers 5 --hidden 48 --heads 6 --kv-heads 2 --head-dim 10 --tied",
    ] {
        holds(&format!("{model} {cluster}"));
    }
}

/// Experts of which a step's weights are a small part.
#[test]
fn models_with_experts_are_planned_as_they_are_run() {
    for (model, fixed) in [
        ("qwen3-30b-a3b", "--gpus 2 --pp 2"),
        ("qwen3-30b-a3b", "--gpus 32 --pp 4 --zero3 8 --virtual 12 --recompute full"),
        ("mixtral-8x7b", "--gpus 2 --pp 2 --recompute none"),
        ("mixtral-8x7b", "--gpus 32 --pp 4 --zero3 8 --virtual 8"),
        ("qwen3-235b-a22b --seq 512", "--gpus 16 --pp 2 --zero3 8"),
    ] {
        holds(&format!(
            "--cpu --model {model} {fixed} --memory 4000GiB --global-batch 64 --schedule zeropp"
        ));
    }
}

/// What plans for GPUs that have no kernels for experts say, beside the command.
#[test]
fn a_plan_of_experts_on_gpus_says_that_runs_refuse_it() {
    let line = "--model qwen3-30b-a3b --gpus 8 --machine h100 --global-batch 64";
    let request = asked(line);
    let plan = planned(&request, None).unwrap_or_else(|failure| panic!("{}", failure.message));
    let words = |text: String| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let text = words(text::text(&plan, 120));
    let said = "models with experts run on CPUs only today.";
    assert!(text.contains("Runs on GPUs refuse all of these: ") && text.contains(said), "{text}");
    assert!(text.contains("Once GPUs take experts, run 1 with: zeropp run --model"), "{text}");
    let explained = words(text::explain(&plan, 0, 120).unwrap());
    assert!(explained.contains(&format!("Runs on GPUs refuse it: {said} zeropp run")));
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!(json["layouts"][0]["only_on_cpus"], "experts");
    let page = page::html(&plan, &request.job).unwrap();
    assert!(
        page.contains("Once GPUs take experts, run the first layout with") && page.contains(said)
    );
    let refused = launch_file("slurm", &request, &plan, 1).unwrap_err().message;
    assert!(
        refused.starts_with("launch = slurm: runs on GPUs refuse layout 1: models with experts")
    );
    let out = planned(&asked(&format!("{line} --recompute auto:out=host")), None);
    let out = out.map(drop).unwrap_err().message;
    assert!(out.starts_with("recompute:out = host: model qwen3-30b-a3b has experts"), "{out}");
}

#[test]
fn a_config_json_and_its_folder_are_planned_for() {
    let dir = tempfile::tempdir().unwrap();
    let text = r#"{"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4, "hidden_act": "silu",
        "intermediate_size": 96, "vocab_size": 512, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "tie_word_embeddings": true}"#;
    let file = dir.path().join("config.json");
    std::fs::write(&file, text).unwrap();
    for path in [&*file, dir.path()] {
        holds(&format!(
            "--model {} --cpu --gpus 2 --global-batch 8 --schedule zeropp",
            path.display()
        ));
    }
}

/// A run for a device that this build and this machine lack is predicted, by the command that a
/// plan prints, as the plan says; one that is to start is refused.
#[test]
fn a_plan_for_gpus_can_be_dry_run_without_them() {
    let line = "--model gpt2 --gpus 8 --machine h100 --global-batch 64 --pp 2 --zero3 4 \
                --virtual 2 --schedule zeropp";
    let words = std::iter::once("plan").chain(line.split(' '));
    let matches = command().try_get_matches_from(words).unwrap();
    let asked = job(&matches).unwrap_or_else(|failure| panic!("{}", failure.message));
    let plan = planned(&asked, None).unwrap_or_else(|failure| panic!("{}", failure.message));
    let first = &plan.layouts[0];
    assert!(first.command.contains("--device cuda"), "{}", first.command);
    let config = run_of(&first.command);
    if !cfg!(feature = "cuda") {
        let refused = config.validate().unwrap_err().to_string();
        assert!(refused.contains("is not in this build"), "{refused}");
    }
    config.validate_for_prediction().unwrap();
    let trainer = zeropp::Trainer::builder(config).for_prediction().build();
    let trainer = trainer.unwrap_or_else(|e| panic!("{}: {e}", first.command));
    for (rank, run) in trainer.plan().ranks.iter().enumerate() {
        assert_eq!(first.planned.memory[rank], run.held.at_once, "{}", first.command);
    }
    let memory = trainer.memory().to_string();
    assert!(memory.contains("1 rank on ") || cfg!(feature = "cuda"), "{memory}");
}

/// A file starts the layout that the plan has found, and says why not where it cannot.
#[test]
fn a_launch_file_runs_the_layout_that_is_asked_for() {
    let file = |line: &str, name: &str, number: usize| {
        let words = std::iter::once("plan").chain(line.split(' '));
        let matches = command().try_get_matches_from(words).unwrap();
        let asked = job(&matches).unwrap_or_else(|failure| panic!("{}", failure.message));
        let plan = planned(&asked, None).unwrap_or_else(|failure| panic!("{}", failure.message));
        let file = launch_file(name, &asked, &plan, number).map_err(|failure| failure.message);
        (file, plan.layouts.get(number - 1).map(|r| r.command.clone()).unwrap_or_default())
    };
    let line = "--model gpt2 --gpus 16 --machine h100 --global-batch 64";
    for (number, (name, _)) in zeropp_plan::launch::Launcher::ALL.into_iter().enumerate() {
        let (text, command) = file(line, name, 1 + number % 2);
        let text = text.unwrap();
        for word in command.split(' ').skip(2).filter(|word| *word != "nccl") {
            assert!(text.contains(word), "{word} of {command} in {text}");
        }
    }
    let (refused, _) = file(&format!("{line} --cpu"), "slurm", 1);
    let refused = refused.unwrap_err();
    assert!(refused.starts_with("launch = slurm: starts runs with engine nccl"), "{refused}");
    let (refused, _) = file(line, "k8s", 99);
    assert!(refused.unwrap_err().starts_with("explain = 99: the plan has "));
}

#[test]
fn the_command_is_well_formed() {
    command().debug_assert();
}

#[test]
fn flags_become_a_job() {
    let line = "--model 14.6b --gpus 32 --global-batch 192 --machine a800 --seq 2048 \
                --memory 40GiB --pp 4 --recompute full";
    let (job, flags) = plan(line).unwrap();
    assert_eq!((job.gpus, job.global_batch, job.memory), (32, 192, 40 << 30));
    assert_eq!((job.model.seq, job.fixed.pp), (2048, Some(4)));
    assert_eq!(job.fixed.recompute, Some(Recompute::Full));
    let given = "--heads 40 --hidden 5120 --layers 48 --model gpt --seq 2048 --vocab 51200 \
                 --precision bf16 --device cuda --engine nccl";
    assert_eq!(flags, given);
    let (job, flags) = plan("--model gpt2 --gpus 8 --global-batch 64 --precision fp32").unwrap();
    assert_eq!((job.compute.element_bytes, flags.matches("--precision").count()), (4, 1));
    let (job, _) = plan("--cpu --model gpt2 --gpus 8 --global-batch 64 --precision bf16").unwrap();
    assert_eq!(job.compute.element_bytes, 2);
}

#[test]
fn bad_input_is_one_clear_message() {
    for (line, said) in [
        (
            "--gpus -1 --global-batch 8 --model gpt2",
            "gpus = -1: does not work; use a whole number of at least 1",
        ),
        ("--gpus NaN --global-batch 8 --model gpt2", "gpus = NaN: does not work"),
        (
            "--gpus 8 --global-batch 8 --model gpt2 --memory 0",
            "memory = 0: does not work; use bytes",
        ),
        (
            "--gpus 8 --global-batch 8 --model gpt2 --memory NaN",
            "memory = NaN: does not work; use bytes",
        ),
        ("--gpus 8 --global-batch 8 --model gpt9", "model = gpt9: is not known"),
        ("--gpus 8 --global-batch 8 --model gpt9", "plans also know the papers' 14.6b"),
        ("--gpus 8 --global-batch 8 --model none.json", "model = none.json: No such file"),
        ("--gpus 8 --global-batch 8 --model gpt2 --hidden 3", "hidden = 3: model gpt2 has 768"),
        ("--gpus 8 --global-batch 8 --model gpt2 --machine b7", "machine = b7: neither"),
        ("--gpus 8 --global-batch 8 --model gpt2 --machine b7.toml", "b7.toml: No such file"),
        (
            "--gpus 8 --global-batch 8 --model gpt2 --per-node 0",
            "per-node = 0: does not work; use a whole number of at least 1",
        ),
    ] {
        let error = plan(line).unwrap_err();
        assert!(error.contains(said), "{line}: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let run = dir.path().join("run.toml");
    std::fs::write(&run, "device = 'cuda'\nlayers = 4\nglobal-batch = '16'").unwrap();
    let said = plan(&format!("{} --gpus 4 --cpu", run.display())).unwrap_err();
    assert!(said.contains("has device = cuda, and its run has that; set device"), "{said}");
    std::fs::write(&run, "layers = 4\nglobal-batch = '16'").unwrap();
    let (job, _) = plan(&format!("{} --gpus 4 --cpu", run.display())).unwrap();
    assert!(!job.compute.on_gpu, "the file's own device");
    let file = dir.path().join("m.toml");
    std::fs::write(&file, "flops_per_s = 1e12").unwrap();
    let line = format!("--gpus 8 --global-batch 8 --model gpt2 --machine {}", file.display());
    let said = plan(&line).unwrap_err();
    assert!(said.contains("zero3_bytes_per_s is missing"), "{said}");
}

/// States go to the host of GPUs, and to the folder of a run on CPUs.
#[test]
fn states_that_are_out_are_planned_for_where_they_can_be() {
    let dir = tempfile::tempdir().unwrap();
    let known = zeropp_plan::machines::file("h100").unwrap();
    let file = dir.path().join("m.toml");
    let rates = "host_bytes_per_s = 50e9\nfile_bytes_per_s = 2e9\n";
    std::fs::write(&file, format!("{known}\n{rates}")).unwrap();
    let line = |optimizer: &str, more: &str| {
        format!(
            "--model gpt2 --seq 256 --gpus 2 --global-batch 16 --machine {} --optimizer \
             {optimizer}{more}",
            file.display()
        )
    };
    let (job, flags) = plan(&line("adamw:beta2=0.95,out=host", "")).unwrap();
    assert_eq!(job.fixed.states, Some(OutPlace::Host));
    assert_eq!(job.fixed.moments, Some(true));
    assert!(flags.contains("--optimizer adamw:beta2=0.95,out=host"), "{flags}");
    let folder = "adamw:out=/scratch";
    let (job, flags) = plan(&line(folder, " --cpu")).unwrap();
    assert_eq!(job.fixed.states, Some(OutPlace::File("/scratch".into())));
    assert!(flags.contains("--optimizer adamw:out=/scratch"), "{flags}");
    for (line, said) in [
        (line(folder, ""), "optimizer:out = /scratch: GPUs put out to their host"),
        (line("adamw:out=host", " --cpu"), "optimizer:out = host: ranks on CPUs have no other"),
        (line("adamw:out=host,out-states=all", ""), "optimizer:out-states = all: GPUs keep"),
    ] {
        let found = plan(&line).unwrap_err();
        assert!(found.starts_with(said), "{found}");
    }
    // What a run of it predicts.
    let out = dir.path().join("out");
    let folder = format!("adamw:out={}", out.display());
    for fixed in [
        "--pp 1 --zero3 1 --dp 2 --recompute none",
        "--pp 2 --zero3 1 --dp 1 --recompute full --schedule zeropp",
        "--pp 1 --zero3 2 --dp 1 --recompute none --precision bf16",
    ] {
        holds(&line(&folder, &format!(" --cpu {fixed}")));
    }
}
