use std::collections::HashSet;
use std::path::PathBuf;

use proptest::prelude::*;
use zeropp_core::data::Dataset;

use super::followed::followed;
use super::*;

fn config(toml: &str) -> Config {
    Config::from_toml(toml).unwrap_or_else(|e| panic!("{toml}: {e}"))
}

#[test]
fn the_readme_command_means_two_stages_and_two_units() {
    let c = config("pp = 4\nzero3 = 8\nunit = 8");
    assert_eq!((c.virtual_stages(), c.unit(), c.micro_batches()), (2, 8, 16));
    assert_eq!((c.mesh().world(), c.samples_per_step()), (32, 128));
    assert_eq!(c.tokens_per_step(), 128 * c.seq);
    c.validate().unwrap();
}

#[test]
fn missing_settings_follow_from_the_others() {
    // (settings, V, U, B)
    let cases = [
        ("", 2, 1, 2),
        ("pp = 4", 2, 7, 14),
        ("pp = 4\nlayers = 7", 1, 7, 14),
        ("pp = 4\nmicro-batches = 5", 2, 5, 5),
        ("pp = 2\nvirtual = 4\nunit = 3", 4, 3, 6),
        ("pp = 4\nschedule = '1f1b'", 1, 14, 14),
        ("pp = 4\nschedule = 'gpipe'\nunit = 8", 1, 16, 16),
        // Even units near 2P - 1, and no last one of a single micro-batch.
        ("pp = 4\nmicro-batches = 8", 2, 8, 8),
        ("pp = 4\nmicro-batches = 11\nunit = 7", 2, 7, 11),
        ("pp = 4\nschedule = 'gpipe'\nmicro-batches = 12", 1, 12, 12),
        ("pp = 2\nschedule = 'bf-pp'", 2, 6, 6),
        ("pp = 4\nschedule = 'zb-h1'", 1, 14, 14),
        ("pp = 8\nschedule = 'zb-v'", 2, 30, 30),
        ("pp = 4\nschedule = 'interleaved'", 2, 16, 16),
        ("pp = 4\nschedule = 'interleaved-zb'\nmicro-batches = 12", 2, 12, 12),
        ("pp = 4\nschedule = 'zeropp-auto'\nunit = 5", 2, 5, 10),
        ("pp = 8\nemulate = 'costs.toml'", 2, 15, 30),
    ];
    for (toml, v, unit, micro_batches) in cases {
        let c = config(toml);
        assert_eq!(
            (c.virtual_stages(), c.unit(), c.micro_batches()),
            (v, unit, micro_batches),
            "{toml}"
        );
    }
    config("pp = 8\nvirtual = 4\nemulate = 'costs.toml'").validate().expect("no layers needed");
    let c = config("steps = 50\nlr = 0.5");
    assert_eq!((c.warmup(), c.min_lr()), (5, 0.05));
    assert_eq!(config("steps = 5000").warmup(), 100);
}

#[test]
fn defaults_are_those_of_the_field() {
    let c = Config::default();
    let (beta1, beta2, eps) = (c.beta1().unwrap(), c.beta2().unwrap(), c.eps().unwrap());
    assert_eq!((beta1, beta2, eps, c.weight_decay), (0.9, 0.999, 1e-8, 0.01));
    assert_eq!((c.clip, c.decay, c.prefetch), (1.0, Decay::Cosine, 1));
    c.validate().unwrap();
}

/// Settings that are refused, each with how its message begins.
fn refused(cases: &[(&str, &str)]) {
    for (toml, message) in cases {
        let config = config(toml);
        let error = config.validate().expect_err(toml).to_string();
        assert!(error.starts_with(message), "{toml}: {error}");
        followed(&config, &error);
    }
}

#[test]
fn a_mesh_of_more_ranks_than_a_process_has_threads_can_be_predicted() {
    let config = config("pp = 4\nzero3 = 8\ndp = 256");
    config.validate_for_prediction().unwrap();
    let error = config.validate().unwrap_err().to_string();
    assert!(error.contains("8192 ranks; the threads engine runs at most 4096"), "{error}");
}

#[test]
fn bad_meshes_and_models_are_named_with_what_would_work() {
    refused(&[
        ("pp = 0", "pp = 0: at least 1 is needed; use 1 to 131072"),
        ("zero3 = 0", "zero3 = 0: at least 1"),
        ("dp = 0", "dp = 0: at least 1"),
        ("threads = 0", "threads = 0: at least 1 is needed; use 1 to 1024"),
        (
            "pin = true\ndevice = 'cuda'",
            "threads:pin = true: binds threads that compute, and device is cuda; use device cpu",
        ),
        ("pp = 9223372036854775807", "pp = 9223372036854775807: is too large; use 1 to 131072"),
        (
            "pp = 4\nzero3 = 2000\ndp = 2",
            "zero3 = 2000: pp 4 x zero3 2000 x dp 2 is 16000 ranks; the threads engine runs at \
             most 4096",
        ),
        (
            "pp = 4\nzero3 = 20000\ndp = 2",
            "zero3 = 20000: pp 4 x zero3 20000 x dp 2 is 160000 ranks; use at most 131072",
        ),
        ("layers = 0", "layers = 0: at least 1"),
        ("layers = 99999", "layers = 99999: is too large"),
        ("hidden = 0", "hidden = 0: at least 1"),
        ("heads = 0", "heads = 0: at least 1"),
        ("seq = 0", "seq = 0: at least 1"),
        ("heads = 5", "heads = 5: does not divide hidden = 64; use 4 or 8"),
        ("heads = 100", "heads = 100: does not divide hidden = 64; use 32"),
    ]);
}

#[test]
fn runs_whose_program_or_stages_stay_say_why() {
    refused(&[
        (
            "reschedule = 'auto'\nschedule = 's.csv'",
            "schedule:reschedule = auto: a schedule from a file runs as it stands; name a kind",
        ),
        (
            "reschedule = 'auto'\noptimizer-sync = 'late'",
            "schedule:reschedule = auto: programs are exchanged where all ranks meet",
        ),
        (
            "reschedule = 'auto'\ndp = 2\nglobal-batch = '5'",
            "schedule:reschedule = auto: the batch is dealt out unevenly",
        ),
        (
            "reschedule = 'recut'\nschedule = 's.csv'",
            "schedule:reschedule = recut: a schedule from a file runs as it stands; name a kind",
        ),
        (
            "reschedule = 'recut'\noptimizer-sync = 'late'",
            "schedule:reschedule = recut: programs are exchanged where all ranks meet",
        ),
        (
            "reschedule = 'recut'\ndp = 2\nglobal-batch = '5'",
            "schedule:reschedule = recut: the batch is dealt out unevenly",
        ),
        (
            "reschedule = 'recut'\npp = 2\nhead-split = '1,1'",
            "schedule:reschedule = recut: stages with a split head are not cut anew yet; use auto",
        ),
        (
            "reschedule = 'recut'\nemulate = 'given.toml'",
            "schedule:reschedule = recut: emulated stages have no blocks that could move; use auto",
        ),
    ]);
}

#[test]
fn bad_schedules_are_named_with_what_would_work() {
    refused(&[
        ("virtual = 0", "virtual = 0: at least 1"),
        (
            "pp = 4\nvirtual = 2\nlayers = 6",
            "layers = 6: pp 4 x virtual 2 makes 8 stages, and each needs a layer; use 8 layers",
        ),
        ("pp = 9", "layers = 8: pp 9 x virtual 1 makes 9 stages"),
        ("schedule = '1f1b'\nvirtual = 2", "virtual = 2: schedule 1f1b cannot have that many"),
        (
            "max-gathers = 5",
            "schedule:max-gathers = 5: schedule zeropp does not plan its gathers; use",
        ),
        (
            "max-gathered = 3\nschedule = 'gpipe'",
            "schedule:max-gathered = 3: schedule gpipe does not",
        ),
        (
            "schedule = 'zb-v'\nvirtual = 1",
            "virtual = 1: schedule zb-v cannot have that many stages on each rank; use 2, \
             leave virtual out",
        ),
        ("pp = 8\nschedule = 'v-min'", "layers = 8: pp 8 x virtual 2 makes 16 stages"),
        ("slices = 0", "schedule:slices = 0: at least 1 is needed; use 1"),
        ("slices = 4\nseq = 500", "schedule:slices = 4: cuts samples of seq = 500 tokens"),
        (
            "slices = 4\nseq = 1024\nmicro-batch-size = 2",
            "schedule:slices = 4: runs cannot do it with micro-batch-size = 2 yet; use 1, or",
        ),
        (
            "slices = 4\nseq = 1024\nsave-costs = 'x.json'",
            "schedule:slices = 4: runs cannot do it with save-costs = x.json yet; use 1, or",
        ),
        (
            "slices = 1\nslice-cut = 'tokens'",
            "schedule:slice-cut = tokens: samples are whole, as slices is 1",
        ),
        ("unit = 0", "unit = 0: at least 1"),
        ("micro-batches = 0", "micro-batches = 0: at least 1"),
        ("micro-batches = 99999999", "micro-batches = 99999999: is too large"),
        ("unit = 9223372036854775807", "unit = 9223372036854775807: is too large"),
        ("micro-batch-size = 0", "micro-batch-size = 0: at least 1"),
    ]);
}

#[test]
fn micro_batches_follow_from_the_batch_of_all_ranks() {
    let read = |text: &str| Config::from_toml(&format!("zero3 = 4\nseq = 64\n{text}")).unwrap();
    let of = |batch: &str| {
        let config = read(&format!("dp = 2\nmicro-batch-size = 2\nglobal-batch = '{batch}'"));
        config.validate().unwrap();
        (config.micro_batches(), config.tokens_per_step())
    };
    assert_eq!(of("512"), (32, 512 * 64));
    assert_eq!(of("512 samples"), (32, 512 * 64));
    assert_eq!(of("32768 tokens"), (32, 32768));
    assert_eq!(of("0.5M tokens"), (488, 499_712), "the nearest");
    assert_eq!(of("1 token"), (1, 1024), "one at least");
    let both = read("global-batch = '64'\nmicro-batches = 16");
    both.validate().unwrap();
    let uneven = read("dp = 3\nglobal-batch = '32'");
    uneven.validate().unwrap();
    assert_eq!((uneven.micro_batches(), uneven.samples_per_step()), (3, 32), "3, 3 and 2");
    uneven.resolved().validate().unwrap();
    assert_eq!(uneven.resolved().samples_per_step(), 32);
    assert_eq!(of("1 token"), (1, 1024), "tokens go to all alike");
    // For a plan: 3906.25 samples, of which 3904 are 61 times 64.
    assert_eq!(samples_of("4M tokens", 1024, 4).unwrap(), 3904);
    assert_eq!(samples_of("4M tokens", 4096, 2048).unwrap(), 977, "fewer than ranks");
    assert_eq!(samples_of("1 token", 4096, 3).unwrap(), 1);
    assert_eq!(samples_of("96", 4096, 5).unwrap(), 96);
    refused(&[
        ("global-batch = 'many'", "global-batch = many: expected samples or tokens of a step"),
        ("global-batch = '1.5'", "global-batch = 1.5: expected samples or tokens"),
        ("global-batch = '0'", "global-batch = 0: expected samples or tokens"),
        (
            "zero3 = 3\nglobal-batch = '64'",
            "global-batch = 64: is not a multiple of 3 samples, a micro-batch of 1 on zero3 3; \
             use 63 or 66",
        ),
        (
            "dp = 3\nglobal-batch = '2'",
            "global-batch = 2: is less than 3 samples, a micro-batch of 1 on zero3 1 for each of \
             dp 3; use 3 or more, or a smaller dp",
        ),
        (
            "global-batch = '64'\nmicro-batches = 8",
            "global-batch = 64: takes 64 micro-batches, and micro-batches is 8; leave one",
        ),
    ]);
}

#[test]
fn slices_are_a_number_or_auto() {
    let error = Config::from_toml("slices = 'some'").unwrap_err().to_string();
    assert!(error.contains("expected auto, or a whole number, such as 4"), "{error}");
}

#[test]
fn copies_out_of_memory_are_refused_beside_what_there_is_not_yet() {
    let out = "recompute-out = '/nowhere'";
    let beside = |more: &str| format!("{out}\n{more}");
    let (device, slices) = (beside("device = 'wgpu'"), beside("slices = 2\nseq = 512"));
    let reschedule = beside("pp = 2\nreschedule = 'auto'\nschedule = 'zeropp'");
    let (none, experts) = (beside("recompute-out-batches = 0"), beside("model = 'mixtral'"));
    let one_unit = beside("recompute-out-units = 'later'\nschedule = '1f1b'");
    let (cuda, host) = (beside("device = 'cuda'"), "recompute-out = 'host'");
    let host_of_wgpu = format!("{host}\ndevice = 'wgpu'");
    refused(&[
        ("recompute-out-batches = 2", "recompute:out-batches = 2: says how much goes out, and not"),
        (
            "recompute-out-units = 'later'",
            "recompute:out-units = later: says how much goes out, and",
        ),
        (&one_unit, "recompute:out-units = later: a step is one unit; use several units"),
        (&none, "recompute:out-batches = 0: copies nothing out; use 1 or more"),
        (&device, "recompute:out = /nowhere: activations are not copied out with device = wgpu"),
        (&host_of_wgpu, "recompute:out = host: activations are not copied out with device = wgpu"),
        (&cuda, "recompute:out = /nowhere: GPUs copy to pinned memory of their host; use host"),
        (host, "recompute:out = host: ranks on CPUs have no other memory; name a folder"),
        (
            &slices,
            "schedule:slices = 2: runs cannot do it with recompute:out = /nowhere yet; use 1",
        ),
        (&reschedule, "recompute:out = /nowhere: activations are not copied out with reschedule"),
        (&experts, "recompute:out = /nowhere: model"),
    ]);
}

#[test]
fn states_out_of_memory_are_refused_beside_what_there_is_not_yet() {
    let out = "optimizer-out = '/nowhere'";
    let beside = |more: &str| format!("{out}\n{more}");
    let device = beside("device = 'wgpu'");
    let cuda = beside("device = 'cuda'");
    let host = "optimizer-out = 'host'";
    let all = format!("{host}\ndevice = 'cuda'\noptimizer-out-states = 'all'");
    let late = beside("pp = 2\noptimizer-sync = 'late'\nschedule = 'zeropp'");
    let reschedule = beside("pp = 2\nreschedule = 'auto'\nschedule = 'zeropp'");
    refused(&[
        ("optimizer-out-states = 'all'", "optimizer:out-states = all: says what goes out, and not"),
        (&device, "optimizer:out = /nowhere: states do not go out with device = wgpu"),
        (&late, "optimizer:out = /nowhere: states do not go out with optimizer-sync = late"),
        (&reschedule, "optimizer:out = /nowhere: states do not go out with reschedule = auto"),
        (&cuda, "optimizer:out = /nowhere: GPUs copy to pinned memory of their host; use host"),
        (host, "optimizer:out = host: ranks on CPUs have no other memory; name a folder"),
        (&all, "optimizer:out-states = all: GPUs keep weights and gradients in their memory"),
    ]);
}

#[test]
fn bad_steps_and_rates_are_named_with_what_would_work() {
    refused(&[
        ("steps = 0", "steps = 0: at least 1"),
        ("steps = 10\nwarmup = 11", "warmup = 11: is longer than the run of 10 steps; use 0 to 10"),
        ("lr = nan", "lr = NaN: is out of range; use 0 or more"),
        ("lr = -0.1", "lr = -0.1: is out of range"),
        ("lr = inf", "lr = inf: is out of range"),
        ("lr = 0.1\nmin-lr = 0.2", "min-lr = 0.2: is out of range; use 0 to lr = 0.1"),
        ("weight-decay = -1", "weight-decay = -1: is out of range"),
        ("beta1 = 1", "optimizer:beta1 = 1: is out of range; use 0 or more and less than 1"),
        ("beta2 = -0.5", "optimizer:beta2 = -0.5: is out of range"),
        ("beta2 = 0.99999999", "optimizer:beta2 = 0.99999999: it is kept in fp32"),
        (
            "optimizer = 'sgd'\nmomentum = 0.99999999",
            "optimizer:momentum = 0.99999999: it is kept in fp32, where that is 1",
        ),
        ("beta1 = 0.99999998", "optimizer:beta1 = 0.99999998: it is kept in fp32, where that is 1"),
        ("eps = 0", "optimizer:eps = 0: is out of range; use more than 0"),
        (
            "momentum = 0.9",
            "optimizer:momentum = 0.9: optimizer adamw has no such value; use beta1, beta2, eps",
        ),
        (
            "optimizer = 'sgd'\nmomentum = 1",
            "optimizer:momentum = 1: is out of range; use 0 or more and",
        ),
        ("nesterov = true", "optimizer:nesterov = true: optimizer adamw has no such value"),
        (
            "optimizer = 'sgd'\nmomentum = 0\nnesterov = true",
            "optimizer:nesterov = true: looks ahead along a momentum, and that is 0; use a",
        ),
        (
            "optimizer = 'sgd'\nbeta1 = 0.8",
            "optimizer:beta1 = 0.8: optimizer sgd has no such value; use momentum",
        ),
        (
            "optimizer = 'sgd'\nbeta2 = 0.9",
            "optimizer:beta2 = 0.9: optimizer sgd has no such value; use momentum",
        ),
        (
            "optimizer = 'lion'\neps = 1e-6",
            "optimizer:eps = 0.000001: optimizer lion has no such value; use beta1",
        ),
        (
            "no-decay = 'heads'",
            "weight-decay:except = heads: expected groups of parameters; use some of norms",
        ),
        ("no-decay = 'none,norms'", "weight-decay:except = none,norms: expected groups"),
        ("balance-weight = -1", "balance:weight = -1: is out of range; use 0 to 1e6"),
        ("router-z = 1e39", "balance:z = "),
        (
            "balance = 'none'\nbalance-weight = 0.3",
            "balance:weight = 0.3: there is no balance loss with balance = none",
        ),
        ("dropout = 1", "dropout = 1: is out of range; use 0 to below 1, such as 0.1"),
        ("dropout = -0.1", "dropout = -0.1: is out of range"),
        ("dropout = nan", "dropout = NaN: is out of range"),
        ("ema = 1", "ema = 1: is out of range; use more than 0 and less than 1, such as 0.999"),
        ("clip = -1", "clip = -1: is out of range; use a largest norm, or 0"),
    ]);
}

#[test]
fn bad_devices_engines_and_processes_are_named_with_what_would_work() {
    refused(&[
        #[cfg(not(feature = "cuda"))]
        (
            "device = 'cuda'",
            "device = cuda: is not in this build; use cpu, or build zeropp with --features cuda",
        ),
        #[cfg(not(feature = "wgpu"))]
        (
            "device = 'wgpu'",
            "device = wgpu: is not in this build; use cpu, or build zeropp with --features wgpu",
        ),
        (
            "precision = 'tf32'",
            "precision = tf32: is NVIDIA's, and device is cpu; use fp32, or device cuda",
        ),
        #[cfg(feature = "wgpu")]
        (
            "device = 'wgpu'\nprecision = 'bf16'",
            "precision = bf16: device wgpu can store it but not compute in it; use fp32",
        ),
        #[cfg(not(feature = "mpi"))]
        ("engine = 'mpi'", "engine = mpi: is not in this build; use threads"),
        (
            "engine = 'nccl'",
            "engine = nccl: carries data between NVIDIA GPUs, and device is cpu; use device cuda",
        ),
        ("nodes = 0", "nodes = 0: at least 1 is needed"),
        (
            "nodes = 2",
            "nodes = 2: engine threads has all ranks in one process; use engine nccl, or leave \
             it out and use engine mpi with a launcher such as mpirun or srun",
        ),
        (
            "engine = 'mpi'\nrendezvous = 'a:1'",
            "rendezvous = a:1: processes of engine mpi find each other without it; leave it out",
        ),
        (
            "engine = 'mpi'\nnodes = 2",
            "nodes = 2: MPI's launcher starts the processes; leave it out and use mpirun or srun",
        ),
        ("engine = 'nccl'\nnodes = 2", "rendezvous = (none): 2 nodes have to meet"),
        (
            "engine = 'nccl'\nnode-rank = 1",
            "node-rank = 1: there is 1 node; use 0, or say how many with nodes",
        ),
        (
            "rendezvous = 'node0:1'",
            "rendezvous = node0:1: engine threads has all ranks in one process, which meets no",
        ),
        ("rendezvous = 'node0'", "rendezvous = node0: has no port; use HOST:PORT"),
        ("timeout-s = 0", "timeout-s = 0: is out of range"),
        ("timeout-s = 1e300", "timeout-s = 1"),
        ("start-timeout-s = 0", "timeout-s:start = 0: is out of range"),
        (
            "engine = 'nccl'\npp = 3\nnodes = 2\nrendezvous = 'a:1'",
            "nodes = 2: pp 3 x zero3 1 x dp 1 is 3 ranks, which 2 nodes cannot share evenly",
        ),
    ]);
}

#[test]
fn bad_checkpoints_are_named_with_what_would_work() {
    refused(&[
        ("save-every = 3", "save-every = 3: save has no folder; name a folder with save"),
        ("resume = true", "resume = true: save has no folder; name a folder with save"),
        ("resume-fallback = true", "resume:fallback = true: save has no folder; name"),
        ("init-ema = true", "init-from:ema = true: init-from names no weights; name a checkpoint"),
        ("save = 'here'\nkeep = 0", "keep = 0: at least 1 is needed"),
        ("save = 'Cargo.toml'", "save = Cargo.toml: is a file; name a folder"),
        ("save = 'Cargo.toml/x'", "save = Cargo.toml/x: Cargo.toml is a file; name a folder"),
        (
            "optimizer = 'sgd:out=Cargo.toml'",
            "optimizer:out = Cargo.toml: is a file; name a folder",
        ),
    ]);
}

#[test]
fn bad_ways_to_watch_are_named_with_what_would_work() {
    refused(&[
        ("log-every = 0", "log-every = 0: at least 1 is needed; use 1 or more, or leave it out"),
        ("run-name = ' '", "run-name = \"\": the name is empty; leave it out"),
        (
            "prometheus = 'here'",
            "prometheus = here: is not a port or an address with a port; use a port, as in 9400",
        ),
        ("prometheus = '70000'", "prometheus = 70000: is not a port or an address with a port"),
        ("tensorboard = 'Cargo.toml'", "tensorboard = Cargo.toml: is a file; name a folder"),
        (
            "sample-every = 4",
            "sample-every = 4: there is no text to go on from; give it with prompt",
        ),
        ("prompt = 'a'", "prompt = a: sample-every is 0; set sample-every, or leave it out"),
        ("prompt = ''", "prompt = \"\": the text is empty"),
        (
            "sample-every = 4\nprompt = 'a'\nsample-temperature = -1.0",
            "sample-every:temperature = -1: is out of range; use 0 or more, such as 0.8",
        ),
        ("log-file = 'src'", "log-file = src: cannot be written"),
        ("log-file = 'x'\nmetrics = 'x'", "metrics = x: is the file or folder of `log-file` too"),
    ]);
}

#[test]
fn a_run_is_called_after_its_files() {
    let name = |file: Option<&str>, toml| {
        Config { file: file.map(PathBuf::from), ..config(toml) }.run_name()
    };
    assert_eq!(name(None, ""), "zeropp");
    assert_eq!(name(None, "metrics = 'out/first.jsonl'"), "first");
    assert_eq!(name(Some("a/small.toml"), "metrics = 'm.jsonl'"), "small");
    assert_eq!(name(Some("a/small.toml"), "run-name = ' one '"), "one");
}

#[test]
fn a_seed_that_a_file_cannot_hold_is_named() {
    let seed = Config { seed: u64::MAX, ..Config::default() };
    let error = seed.validate().unwrap_err().to_string();
    assert!(error.starts_with("seed = 18446744073709551615: does not fit"), "{error}");
}

#[test]
fn bad_files_are_named_with_line_and_key() {
    let cases: &[(&str, &[&str])] = &[
        ("pp = 2\n\nstepz = 4", &["line 3: unknown key `stepz`; did you mean `steps`?"]),
        (
            "micro_batches = 4",
            &["line 1: unknown key `micro_batches`; did you mean `micro-batches`?"],
        ),
        ("[mesh]\npp = 4", &["line 1: unknown key `mesh`"]),
        ("colour = 'blue'", &["unknown key `colour`; the keys are the flags"]),
        ("pp = 'four'", &["line 1, column 6", "pp = 'four'", "\"four\", expected a whole number"]),
        ("lr = 1\npp = -4", &["line 2, column 6", "pp = -4", "expected a whole number from 0"]),
        ("hidden = 1.5", &["hidden = 1.5", "expected a whole number"]),
        ("seed = 9223372036854775808", &["seed = 9223372036854775808: is too large; use at most"]),
        ("steps = 0xFFFF_FFFF_FFFF_FFFF", &["steps = 0x", "is too large"]),
        ("lr = 'fast'", &["lr = 'fast'", "expected a number"]),
        ("tied = 1", &["tied = 1", "expected a boolean"]),
        ("recompute = 'some'", &["`some`, expected one of `auto`, `none`, `selective`, `full`"]),
        ("pp = 1\npp = 2", &["line 2", "duplicate key"]),
        ("pp = ", &["line 1"]),
    ];
    for (toml, fragments) in cases {
        let error = Config::from_toml(toml).expect_err(toml).to_string();
        for fragment in *fragments {
            assert!(error.contains(fragment), "{toml:?} lacks {fragment:?}: {error}");
        }
    }
}

#[test]
fn of_several_processes_only_the_first_touches_the_outputs() {
    let writes = |engine, rank: &str| {
        let config = Config { engine, pp: 2, ..Config::default() };
        config.writes_outputs(|name| match name {
            "ZEROPP_RANK" => Some(rank.to_string()),
            "ZEROPP_WORLD_SIZE" => Some("2".to_string()),
            _ => None,
        })
    };
    assert!(writes(EngineKind::Mpi, "0") && !writes(EngineKind::Mpi, "1"));
    // Threads have all ranks in one process, however it was started; wrong values are reported
    // elsewhere.
    assert!(writes(EngineKind::Threads, "1") && writes(EngineKind::Mpi, "7"));
}

#[test]
fn every_key_of_a_file_is_a_setting_and_every_setting_a_key() {
    let path = || Some(PathBuf::from("x"));
    let full = Config {
        run_name: Some("x".into()),
        metrics: path(),
        tensorboard: path(),
        prometheus: Some("127.0.0.1:9400".into()),
        log_every: Some(5),
        log_file: path(),
        trace: path(),
        trace_steps: Some(StepRange { first: 3, last: 9 }),
        save: path(),
        copies: path(),
        emulate: path(),
        costs: path(),
        mem_limit: Some(Bytes(24 << 30)),
        save_costs: path(),
        node_rank: Some(0),
        stages: Some("2,2".into()),
        rank_memory: Some(1.0),
        rendezvous: Some("node0:29400".into()),
        token_file: path(),
        flight_dir: path(),
        vocab: Some(50_257),
        kv_heads: Some(2),
        head_dim: Some(16),
        intermediate: Some(256),
        experts: Some(8),
        experts_per_token: Some(2),
        recompute_first: Some(2),
        recompute_out: path(),
        recompute_out_batches: Some(3),
        recompute_out_units: OutUnits::Later,
        optimizer_out: path(),
        max_gathered: Some(2),
        max_gathers: Some(12),
        head_split: Some("4,4".into()),
        init_from: path(),
        data_mix: Some("a=1,b=2".into()),
        split: Some("98,2".into()),
        threads: Some(2),
        eval_data: path(),
        prompt: Some("x".into()),
        global_batch: Some("512".into()),
        no_decay: Some("norms".into()),
        momentum: Some(0.9),
        nesterov: Some(true),
        balance_weight: Some(0.1),
        router_z: Some(0.001),
        ema: Some(0.999),
        freeze: Some("wte".into()),
        lora_alpha: Some(16.0),
        lora_targets: Some("attn.c_attn".into()),
        document_end: Some(0),
        ..Config::default().resolved()
    };
    let written = full.to_toml().unwrap();
    let keys: Vec<_> = written
        .lines()
        .filter_map(|line| line.split_once(" = "))
        .map(|(key, _)| key.to_string())
        .collect();
    let settings = OPTIONS.iter().filter(|option| option.is_setting());
    assert_eq!(keys, settings.map(|o| o.key.to_string()).collect::<Vec<_>>());
    let back = config(&written);
    for option in OPTIONS.iter().filter(|option| option.key != "data") {
        assert!(back.get(option.key).is_some(), "{}", option.key);
    }
}

#[test]
fn flags_are_read_as_their_kind_and_override() {
    let parse = |key: &str, text: &str| {
        OPTIONS.iter().find(|o| o.key == key).expect("a setting").kind.parse(text)
    };
    let cases = [
        ("pp", "3"),
        ("lr", "1"),
        ("zero1", "true"),
        ("recompute", "full"),
        ("data", "x y"),
        ("mem-limit", "24GiB"),
    ];
    let flags: Table =
        cases.iter().map(|(k, text)| (k.to_string(), parse(k, text).unwrap())).collect();
    let c = config("pp = 2\nseq = 9").with(flags).unwrap();
    assert_eq!((c.pp, c.lr, c.zero1, c.recompute, c.seq), (3, 1.0, true, Recompute::Full, 9));
    assert_eq!(c.data.as_deref(), Some(std::path::Path::new("x y")));
    assert_eq!(c.mem_limit, Some(Bytes(24 << 30)));
    assert_eq!(config("mem-limit = '1.5 MiB'").mem_limit, Some(Bytes(3 << 19)));
    for (key, text) in [
        ("pp", "-1"),
        ("pp", "x"),
        ("lr", "quick"),
        ("zero1", "2"),
        ("recompute", "half"),
        ("mem-limit", "24 apples"),
    ] {
        assert!(parse(key, text).unwrap_err().contains("expected"), "{key} {text}");
    }
}

#[test]
fn resolving_changes_nothing_but_says_all() {
    for toml in ["pp = 4\nunit = 8", "schedule = 'gpipe'\nunit = 8", "steps = 30\nlayers = 1"] {
        let c = config(toml);
        let r = c.resolved();
        assert_eq!(r, r.resolved(), "{toml}");
        assert_eq!(
            (c.unit(), c.virtual_stages(), c.micro_batches(), c.warmup(), c.min_lr()),
            (r.unit(), r.virtual_stages(), r.micro_batches(), r.warmup(), r.min_lr()),
            "{toml}"
        );
    }
}

#[test]
fn settings_of_a_schedule_file_stay_unset() {
    let c = config("pp = 4\nschedule = 'a/b.CSV'\nlayers = 4");
    assert_eq!(c.schedule_file(), Some(std::path::Path::new("a/b.CSV")));
    c.validate().unwrap();
    let r = c.resolved();
    assert_eq!((r.unit, r.virtual_stages, r.micro_batches), (None, None, None));
    let given = config("schedule = 'x.json'\nunit = 3\nvirtual = 2\nmicro-batches = 9").resolved();
    assert_eq!((given.virtual_stages, given.micro_batches), (Some(2), Some(9)));
    for kind in ["zeropp", "csv", "x.csv.txt"] {
        let c = Config { schedule: kind.into(), ..Config::default() };
        assert_eq!(c.schedule_file(), None, "{kind}");
    }
}

fn any_config() -> impl Strategy<Value = Config> {
    let sizes = (any::<u32>(), any::<u32>(), any::<Option<u32>>(), any::<Option<u32>>());
    let numbers = (any::<f64>(), any::<Option<f64>>(), 0..i64::MAX as u64, any::<bool>());
    // What stands behind a colon may be a setting of its own: other tests hold those.
    let word = "[^:]*";
    let words = (0..3usize, 0..3usize, proptest::option::of(word), word);
    (sizes, numbers, words).prop_map(|((pp, heads, unit, warmup), (lr, min_lr, seed, zero1), w)| {
        Config {
            pp: pp as usize,
            heads: heads as usize,
            unit: unit.map(|u| u as usize),
            warmup: warmup.map(u64::from),
            lr,
            min_lr,
            seed,
            zero1,
            recompute: Recompute::ALL[w.0],
            decay: Decay::ALL[w.1],
            metrics: w.2.map(PathBuf::from),
            schedule: w.3,
            ..Config::default()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn printed_settings_read_back_the_same(c in any_config()) {
        prop_assert_eq!(Config::from_toml(&c.to_toml().unwrap()).unwrap(), c.clone());
        prop_assert_eq!(c.with(Table::new()).unwrap(), c);
    }

    /// No size, however absurd, overflows on its way to a message.
    #[test]
    fn validation_never_panics(c in any_config(), zero3: usize, layers: usize, v: Option<usize>) {
        let c = Config { zero3, layers, virtual_stages: v, metrics: None, ..c };
        let _ = (c.validate().is_ok(), c.samples_per_step(), c.resolved().tokens_per_step());
    }
}

#[test]
fn the_mesh_does_not_move_a_sample() {
    let data = Dataset::builtin();
    for order in Order::ALL {
        let of = |toml: &str| {
            let mut config = Config::from_toml(toml).unwrap();
            config.order = *order;
            assert_eq!(config.samples_per_step(), 16, "{toml}");
            let sampler = config.sampler();
            (0..16).map(|i| sampler.sample(&data, 3, i).unwrap()).collect::<Vec<_>>()
        };
        let one = of("micro-batches = 16");
        assert_eq!(one, of("pp = 4\nzero3 = 2\nmicro-batches = 8"));
        assert_eq!(one, of("dp = 2\nzero3 = 2\nmicro-batches = 2\nmicro-batch-size = 2"));
        let distinct: HashSet<_> = one.into_iter().collect();
        assert_eq!(distinct.len(), 16);
    }
}

/// Kernels are compiled in it, for minutes.
#[test]
fn the_first_step_on_a_gpu_has_a_time_of_its_own() {
    let of = |device| Config { device, timeout_s: 120.0, ..Config::default() }.first_timeout();
    assert_eq!(of(DeviceKind::Cpu), None);
    assert_eq!(of(DeviceKind::Cuda).map(|time| time.as_secs()), Some(1200));
}
