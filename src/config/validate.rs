//! The rules a configuration must keep, each with what would work instead.

use std::path::Path;

use super::{
    Balance, Config, ConfigError, DeviceKind, EngineKind, OnLoss, OptimizerSync, OutStates,
    OutUnits, Precision, Recompute, Resume, is_host,
};
use zeropp_core::device;
use zeropp_core::kernels::bf16;
use zeropp_core::model::decoder::Decoder;
use zeropp_pipeline::schedules::{FORWARD, Kind};

/// Most ranks: beyond this a typing error is likelier.
const RANKS_MAX: usize = 1 << 17;
/// Most ranks of the threads engine, of which each is a thread.
const RANK_THREADS_MAX: usize = 4096;
/// Most threads of a rank.
const THREADS_MAX: usize = 1024;
/// Most micro-batches in a step; a schedule is a list of all actions.
pub(super) const MICRO_BATCHES_MAX: usize = 1 << 20;
/// Most layers, and so most stages.
const LAYERS_MAX: usize = 1 << 14;
/// Largest hidden size, sequence and micro-batch: their products stay far from overflow.
const SIZE_MAX: usize = 1 << 24;
/// Longest timeout, about three years.
const TIMEOUT_S_MAX: f64 = 1e8;

/// Most token ids.
pub(super) const VOCAB_MAX: usize = SIZE_MAX;
/// Largest multiple that a vocabulary is rounded up to.
const VOCAB_MULTIPLE_MAX: usize = 1 << 16;

pub(super) type Checked = Result<(), ConfigError>;

pub(super) fn check(ok: bool, error: impl FnOnce() -> ConfigError) -> Checked {
    if ok { Ok(()) } else { Err(error()) }
}

fn within(field: &str, value: usize, max: usize) -> Checked {
    check((1..=max).contains(&value), || {
        let problem = if value == 0 { "at least 1 is needed" } else { "is too large" };
        ConfigError::value(field, value, problem, format!("use 1 to {max}"))
    })
}

pub(super) fn number(field: &str, value: f64, ok: bool, range: &str) -> Checked {
    check(value.is_finite() && ok, || {
        ConfigError::value(field, value, "is out of range", format!("use {range}"))
    })
}

pub(super) fn seconds(field: &str, value: f64) -> Checked {
    let in_range = value > 0.0 && value <= TIMEOUT_S_MAX;
    number(field, value, in_range, "more than 0 seconds, up to 1e8")
}

impl Config {
    /// Checks every rule that needs no data file and no knowledge of a schedule: sizes, ranges,
    /// what this build can do, and that the output files can be written, if this process is to.
    ///
    /// Whether the schedule is known and what else it asks of the mesh is for the caller to check,
    /// who knows the generators.
    ///
    /// # Errors
    /// The first rule that is broken, with the setting, its value and what would work.
    pub fn validate(&self) -> Checked {
        self.validate_parts(true)
    }

    /// The same for what is only predicted: a build without the device or the engine, on a machine
    /// that does not have them, predicts for them.
    ///
    /// # Errors
    /// As [`validate`](Self::validate).
    pub fn validate_for_prediction(&self) -> Checked {
        self.validate_parts(false)
    }

    fn validate_parts(&self, is_run_here: bool) -> Checked {
        self.check_mesh()?;
        self.check_model()?;
        self.check_schedule()?;
        self.check_training()?;
        self.check_launch()?;
        self.check_device()?;
        if is_run_here {
            self.check_rank_threads()?;
            self.check_build()?;
        }
        self.check_sources()?;
        self.check_paths()?;
        self.check_checkpoints()?;
        self.check_recovery()?;
        self.check_telemetry()?;
        let writes = self.writes_outputs(|name| std::env::var(name).ok());
        if writes { self.check_outputs() } else { Ok(()) }
    }

    pub(super) fn check_mesh(&self) -> Checked {
        let sizes = [("pp", self.pp), ("zero3", self.zero3), ("dp", self.dp)];
        for (field, value) in sizes {
            within(field, value, RANKS_MAX)?;
        }
        self.check_world(RANKS_MAX, format!("use at most {RANKS_MAX}"))
    }

    /// A prediction takes no threads, so that what is planned for a cluster can be predicted.
    fn check_rank_threads(&self) -> Checked {
        match self.engine {
            EngineKind::Threads => {
                let most = RANK_THREADS_MAX;
                let help = format!("the threads engine runs at most {most} in one process");
                self.check_world(most, help)
            }
            EngineKind::Mpi | EngineKind::Nccl => Ok(()),
        }
    }

    fn check_world(&self, most: usize, help: String) -> Checked {
        // No overflow: each is at most 2^17.
        let world = self.mesh().world();
        check(world <= most, || {
            let sizes = [("pp", self.pp), ("zero3", self.zero3), ("dp", self.dp)];
            let (field, largest) = sizes.into_iter().max_by_key(|s| s.1).expect("three sizes");
            let problem = format!("{} is {world} ranks", self.mesh());
            ConfigError::value(field, largest, problem, help)
        })
    }

    fn check_model(&self) -> Checked {
        within("layers", self.layers, LAYERS_MAX)?;
        within("hidden", self.hidden, SIZE_MAX)?;
        within("heads", self.heads, SIZE_MAX)?;
        within("seq", self.seq, SIZE_MAX)?;
        within("vocab", self.vocab.unwrap_or(1), VOCAB_MAX)?;
        within("vocab-multiple", self.vocab_multiple, VOCAB_MULTIPLE_MAX)?;
        for (field, value) in [
            ("kv-heads", self.kv_heads),
            ("head-dim", self.head_dim),
            ("intermediate", self.intermediate),
        ] {
            within(field, value.unwrap_or(1), SIZE_MAX)?;
        }
        check(self.head_dim.is_some() || self.hidden.is_multiple_of(self.heads), || {
            let problem = format!("does not divide hidden = {}", self.hidden);
            let help = format!("use {}", divisors_near(self.hidden, self.heads));
            ConfigError::value("heads", self.heads, problem, help)
        })?;
        let decoder = self.decoder(self.vocab.unwrap_or(1))?;
        if decoder.moe.is_some() {
            self.check_experts(&decoder)?;
        }
        self.tuning(&decoder).map(drop)
    }

    /// What is copied out of memory: where to, and beside what.
    fn check_out(&self) -> Checked {
        let field = "recompute:out";
        let (units, later) = (self.recompute_out_units, OutUnits::Later);
        let Some(folder) = &self.recompute_out else {
            let batches =
                self.recompute_out_batches.map(|n| ("recompute:out-batches", n.to_string()));
            let units = (units == later).then(|| ("recompute:out-units", later.to_string()));
            let Some((field, value)) = batches.or(units) else { return Ok(()) };
            let problem = "says how much goes out, and not where to";
            let help = "say that with recompute:out, or leave it out";
            return Err(ConfigError::value(field, value, problem, help));
        };
        let units_of_step = self.micro_batches().div_ceil(self.unit().max(1));
        let is_known = self.schedule_file().is_none();
        check(units != later || !is_known || units_of_step > 1, || {
            let help = "use several units a step, or leave it out";
            ConfigError::value("recompute:out-units", units, "a step is one unit", help)
        })?;
        check(self.recompute_out_batches != Some(0), || {
            let help = "use 1 or more, or leave recompute:out out";
            ConfigError::value("recompute:out-batches", 0, "copies nothing out", help)
        })?;
        self.check_place(field, folder, "activations are not copied out", None)
    }

    /// What is in a file of its own between its uses: what there is not beside it.
    fn check_optimizer_out(&self) -> Checked {
        let Some(folder) = &self.optimizer_out else {
            let states = self.optimizer_out_states;
            return check(states == OutStates::Auto, || {
                let problem = "says what goes out, and not where to";
                let help = "say that with optimizer:out, or leave it out";
                ConfigError::value("optimizer:out-states", states, problem, help)
            });
        };
        let late = (self.optimizer_sync == OptimizerSync::Late).then_some(self.optimizer_sync);
        self.check_place("optimizer:out", folder, "states do not go out", late)?;
        check(!self.states_on_host() || self.optimizer_out_states != OutStates::All, || {
            let problem = "GPUs keep weights and gradients in their memory";
            ConfigError::value("optimizer:out-states", OutStates::All, problem, "use moments")
        })
    }

    /// Where a rank's device puts out to, and what there is not beside that yet, of which `what` is
    /// said.
    fn check_place(
        &self,
        field: &'static str,
        folder: &Path,
        what: &str,
        late: Option<OptimizerSync>,
    ) -> Checked {
        let place = match (self.device, is_host(folder)) {
            (DeviceKind::Cuda, false) => {
                Some(("GPUs copy to pinned memory of their host", "use host"))
            }
            (DeviceKind::Cpu, true) => {
                Some(("ranks on CPUs have no other memory", "name a folder; ./host is one"))
            }
            _ => None,
        };
        if let Some((problem, help)) = place {
            return Err(ConfigError::value(field, folder.display(), problem, help));
        }
        let there_is = [DeviceKind::Cpu, DeviceKind::Cuda].contains(&self.device);
        let device = (!there_is).then(|| ("device", self.device.to_string(), "cpu"));
        let reschedule =
            self.asked_reschedule().map(|asked| ("reschedule", asked.to_string(), "off"));
        let late = late.map(|sync| ("optimizer-sync", sync.to_string(), "barrier"));
        let Some((other, value, help)) = device.or(reschedule).or(late) else { return Ok(()) };
        let problem = format!("{what} with {other} = {value} yet");
        let help = format!("use {other} = {help}, or leave it out");
        Err(ConfigError::value(field, folder.display(), problem, help))
    }

    fn check_recompute(&self) -> Checked {
        self.check_out()?;
        let Some(first) = self.recompute_first else { return Ok(()) };
        let field = "recompute:first";
        check(self.recompute == Recompute::Full, || {
            let problem =
                format!("says what recompute = full is for, and it is {}", self.recompute);
            ConfigError::value(field, first, problem, "use recompute = full, or leave it out")
        })?;
        check(first > 0, || {
            let help = "use recompute = selective without it";
            ConfigError::value(field, first, "recomputes nothing in full", help)
        })
    }

    /// Refuses what there is not beside experts like these.
    fn check_experts(&self, decoder: &Decoder) -> Checked {
        let problem = format!("model {} has experts, which there are only on CPUs", self.model);
        check(self.device == DeviceKind::Cpu, || {
            let help = "use device cpu, or a model without experts";
            ConfigError::value("device", self.device, problem, help)
        })?;
        let sigmoid = decoder.moe.is_some_and(|moe| moe.sigmoid.is_some());
        check(sigmoid || self.balance != Balance::Bias, || {
            let problem = format!("model {} has no bias in its choice of experts", self.model);
            ConfigError::value("balance", self.balance, problem, "use micro-batch, or model dots1")
        })?;
        let problem = format!("model {} has experts, whose choices stay in memory", self.model);
        check(self.recompute_out.is_none(), || {
            let folder = self.recompute_out.as_deref().unwrap_or(Path::new("")).display();
            let help = "leave it out, or use a model without experts";
            ConfigError::value("recompute:out", folder, problem, help)
        })?;
        check(self.lora_rank == 0 || self.balance != Balance::Bias, || {
            let problem = "with lora-rank the adapters alone train, and biases stand";
            ConfigError::value("balance", self.balance, problem, "use none")
        })?;
        check(!sigmoid || self.router_z.is_none_or(|z| z == 0.0), || {
            let problem = format!("model {} has sigmoids of logits as scores", self.model);
            let help = "leave it out: their log-sum-exp has no part in them";
            ConfigError::value("router-z", self.router_z.unwrap_or_default(), problem, help)
        })
    }

    fn check_schedule(&self) -> Checked {
        self.check_cut()?;
        let stages_each = self.virtual_stages();
        within("virtual", stages_each, LAYERS_MAX)?;
        if let Some(kind) = self.kind() {
            check(kind.name != FORWARD.name, || {
                let problem = "only runs forwards and does not train";
                let help =
                    "use another schedule; a validation loss (eval-every) runs this one by itself";
                ConfigError::value("schedule", kind.name, problem, help)
            })?;
            let limits = [("max-gathered", self.max_gathered), ("max-gathers", self.max_gathers)];
            for (field, limit) in limits {
                check(limit.is_none() || kind.plans_gathers, || {
                    let problem = format!("schedule {} does not plan its gathers", kind.name);
                    let planners = Kind::names(|kind| kind.plans_gathers);
                    let help = format!("use schedule {planners}, or leave it out");
                    ConfigError::value(field, limit.unwrap_or_default(), problem, help)
                })?;
            }
            if let Some((problem, help)) = kind.refused_stages(stages_each) {
                return Err(ConfigError::value("virtual", stages_each, problem, help));
            }
        }
        self.check_recompute()?;
        self.check_optimizer_out()?;
        self.check_reschedule()?;
        self.check_slices()?;
        let stages = self.pp * stages_each;
        // A file has its own number of stages.
        let unknown = self.is_emulated() || self.schedule_file().is_some();
        check(self.layers >= stages || unknown, || {
            let problem = format!(
                "pp {} x virtual {stages_each} makes {stages} stages, and each needs a layer",
                self.pp
            );
            let help = format!("use {stages} layers or more, or a smaller pp or virtual");
            ConfigError::value("layers", self.layers, problem, help)
        })?;
        check(!self.is_emulated() || self.save_costs.is_none(), || {
            let path = self.save_costs.as_ref().expect("it is there").display();
            let problem = "an emulated run takes its costs from the file that emulate names";
            ConfigError::value("save-costs", path, problem, "leave it out, or emulate")
        })?;
        check(self.save_costs.as_ref().is_none_or(|path| is_json(path)), || {
            let path = self.save_costs.as_ref().expect("just looked at").display();
            let problem = "costs are written as JSON, and a file of costs is read by its extension";
            ConfigError::value("save-costs", path, problem, "use a name that ends in .json")
        })?;
        self.check_global_batch()?;
        within("unit", self.unit(), MICRO_BATCHES_MAX)?;
        within("micro-batches", self.micro_batches(), MICRO_BATCHES_MAX)?;
        within("micro-batch-size", self.micro_batch_size, SIZE_MAX)
    }

    fn check_training(&self) -> Checked {
        check(self.steps >= 1, || {
            ConfigError::value("steps", self.steps, "at least 1 is needed", "use 1 or more")
        })?;
        let counts =
            [("steps", self.steps), ("seed", self.seed), ("max-skipped", self.max_skipped)];
        let evaluation = [
            ("eval-every", self.eval_every),
            ("eval-steps", self.eval_steps),
            ("patience", self.patience),
            ("find-lr", self.find_lr),
            ("log-layers", self.log_layers),
        ];
        for (field, value) in counts.into_iter().chain(evaluation) {
            check(i64::try_from(value).is_ok(), || {
                let help = format!("use at most {}", i64::MAX);
                ConfigError::value(field, value, "does not fit a file's integers", help)
            })?;
        }
        check(self.warmup() <= self.steps, || {
            let problem = format!("is longer than the run of {} steps", self.steps);
            let help = format!("use 0 to {}", self.steps);
            ConfigError::value("warmup", self.warmup(), problem, help)
        })?;
        if let Some(traced) = self.trace_steps.filter(|traced| traced.first > self.steps) {
            let problem = format!("the run has {} steps", self.steps);
            let help = format!("use a range that begins at 1 to {}", self.steps);
            return Err(ConfigError::value("trace-steps", traced, problem, help));
        }
        let (lr, min_lr) = (self.lr, self.min_lr());
        number("lr", lr, lr >= 0.0, "0 or more")?;
        number("min-lr", min_lr, (0.0..=lr).contains(&min_lr), &format!("0 to lr = {lr}"))?;
        self.check_optimizer()?;
        let dropped = (0.0..1.0).contains(&self.dropout);
        number("dropout", self.dropout, dropped, "0 to below 1, such as 0.1")?;
        for (key, weight) in [("balance:weight", self.balance_weight), ("balance:z", self.router_z)]
        {
            let weight = weight.unwrap_or(0.0);
            number(key, weight, (0.0..=1e6).contains(&weight), "0 to 1e6, such as 0.01")?;
        }
        if let (Balance::None, Some(weight)) = (self.balance, self.balance_weight) {
            let problem = "there is no balance loss with balance = none";
            let help = "leave it out, or use balance = micro-batch";
            return Err(ConfigError::value("balance-weight", weight, problem, help));
        }
        number("clip", self.clip, self.clip >= 0.0, "a largest norm, or 0 to never scale")?;
        within("threads", self.threads.unwrap_or(1), THREADS_MAX)?;
        check(!self.pin || self.device == DeviceKind::Cpu, || {
            let problem = format!("binds threads that compute, and device is {}", self.device);
            ConfigError::value("pin", true, problem, "use device cpu, or leave pin out")
        })?;
        check(!self.pin || cfg!(target_os = "linux"), || {
            let problem = "this system does not let a program choose the cores of its threads";
            ConfigError::value("pin", true, problem, "use Linux, or leave pin out")
        })?;
        seconds("timeout-s", self.timeout_s)
    }

    fn check_recovery(&self) -> Checked {
        let (engine, n) = (self.engine, self.max_recoveries);
        check(n == 0 || engine == EngineKind::Threads, || {
            let problem =
                format!("the ranks of engine {engine} cannot be restarted within the run");
            let help = "use 0, and start the run with zeropp supervise, which restarts it";
            ConfigError::value("max-recoveries", n, problem, help)
        })?;
        check(n > 0 || self.on_loss == OnLoss::Restart, || {
            let problem = "max-recoveries is 0, so the run ends with the first rank that fails";
            let help = "set max-recoveries to 1 or more";
            ConfigError::value("on-loss", self.on_loss, problem, help)
        })
    }

    fn check_telemetry(&self) -> Checked {
        check(self.log_every != Some(0), || {
            let help = "use 1 or more, or leave it out for about a line a second";
            ConfigError::value("log-every", 0, "at least 1 is needed", help)
        })?;
        check(self.run_name.as_ref().is_none_or(|name| !name.trim().is_empty()), || {
            ConfigError::value("run-name", "\"\"", "the name is empty", "leave it out, or name it")
        })?;
        self.prometheus_address().map(drop)
    }

    /// Engines and precisions that no build has with this device.
    fn check_device(&self) -> Checked {
        let (precision, device, engine) = (self.precision, self.device, self.engine);
        check(engine != EngineKind::Nccl || device == DeviceKind::Cuda, || {
            let problem = format!("carries data between NVIDIA GPUs, and device is {device}");
            let help = "use device cuda, or engine threads or mpi";
            ConfigError::value("engine", engine, problem, help)
        })?;
        check(precision != Precision::Tf32 || device == DeviceKind::Cuda, || {
            let problem = format!("is NVIDIA's, and device is {device}");
            ConfigError::value("precision", precision, problem, "use fp32, or device cuda")
        })?;
        let storable = precision != Precision::Bf16 || device != DeviceKind::Wgpu;
        check(storable, || {
            let problem = "device wgpu can store it but not compute in it";
            ConfigError::value("precision", precision, problem, "use fp32, or device cuda or cpu")
        })
    }

    /// Values that the settings can name but this build does not have.
    fn check_build(&self) -> Checked {
        let (device, engine) = (self.device, self.engine);
        check(device::is_built(device), || device::absent(device).into())?;
        if self.precision == Precision::Bf16 && device == DeviceKind::Cpu {
            let to_error = |refused: bf16::Unavailable| {
                let bf16::Unavailable { variable, value, problem, help } = refused;
                ConfigError::value(variable, value, problem, help)
            };
            bf16::requested().map_err(to_error)?;
        }
        let help = match engine {
            EngineKind::Mpi => "use threads, or build zeropp with --features mpi",
            _ => "use threads, or build zeropp with --features cuda",
        };
        let is_built = match engine {
            EngineKind::Threads => true,
            EngineKind::Mpi => cfg!(feature = "mpi"),
            EngineKind::Nccl => cfg!(feature = "cuda"),
        };
        check(is_built, || ConfigError::value("engine", engine, "is not in this build", help))
    }

    fn check_checkpoints(&self) -> Checked {
        let help = "name a folder with save, or leave it out";
        check(self.save.is_some() || self.save_every == 0, || {
            ConfigError::value("save-every", self.save_every, "save has no folder", help)
        })?;
        check(self.save.is_some() || self.copies.is_none(), || {
            let copies = self.copies.as_deref().unwrap_or(Path::new("")).display();
            ConfigError::value("copies", copies, "save has no folder", help)
        })?;
        check(self.save.is_some() || self.resume == Resume::No, || {
            ConfigError::value("resume", self.resume, "save has no folder", help)
        })?;
        check(self.save.is_some() || !self.resume_fallback, || {
            ConfigError::value("resume-fallback", true, "save has no folder", help)
        })?;
        check(self.init_from.is_some() || !self.init_ema, || {
            let help = "name a checkpoint with init-from, or leave it out";
            ConfigError::value("init-ema", true, "init-from names no weights", help)
        })?;
        seconds("save-timeout-s", self.save_timeout_s)?;
        check(self.keep >= 1, || {
            ConfigError::value("keep", self.keep, "at least 1 is needed", "use 1 or more")
        })?;
        for (field, folder) in [
            ("save", self.save.as_deref()),
            ("flight-dir", self.flight_dir.as_deref()),
            ("tensorboard", self.tensorboard.as_deref()),
            ("recompute:out", self.out_folder()),
            ("optimizer:out", self.states_folder()),
        ] {
            let Some(folder) = folder else { continue };
            if let Some(file) = file_instead(folder) {
                let problem = match file == folder {
                    true => "is a file".to_owned(),
                    false => format!("{} is a file", file.display()),
                };
                let help = "name a folder, which is made where it is not there";
                return Err(ConfigError::value(field, folder.display(), problem, help));
            }
        }
        Ok(())
    }
}

/// The file that stands where this folder is to be, or one that it is to be in.
fn file_instead(folder: &Path) -> Option<&Path> {
    // One look: between two another process of the run may have made the folder.
    let found = folder.ancestors().find_map(|path| Some((path, path.metadata().ok()?)));
    found.and_then(|(path, found)| (!found.is_dir()).then_some(path))
}

fn is_json(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("json"))
}

/// The divisors of `n` on both sides of `near`, in words.
fn divisors_near(n: usize, near: usize) -> String {
    let below = (1..near.min(n)).rev().find(|d| n.is_multiple_of(*d));
    let above = (near + 1..=n).find(|d| n.is_multiple_of(*d));
    let found: Vec<_> = below.into_iter().chain(above).map(|d| d.to_string()).collect();
    found.join(" or ")
}
