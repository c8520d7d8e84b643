//! Trains transformers that are too big for one node, without tensor parallelism: pipeline
//! parallelism between nodes with the blockwise ZeroPP schedule, ZeRO-3 inside a node, data
//! parallelism or ZeRO-1 between replicas. Burn computes.
//!
//! A run is a [`Config`], a model and a [`Trainer`]. The built-in GPT on the built-in text, on 4
//! ranks (threads of this process):
//!
//! ```
//! use zeropp::{Config, Trainer};
//!
//! let config = Config {
//!     pp: 2,          // pipeline ranks
//!     zero3: 2,       // ranks that share each stage's weights
//!     unit: Some(3),  // micro-batches between two gathers of a stage
//!     layers: 4,
//!     hidden: 32,
//!     seq: 16,
//!     steps: 3,
//!     ..Config::default()
//! };
//! let trainer = Trainer::new(config)?; // checks everything, starts nothing
//! println!("predicted bubble {:.1} %", 100.0 * trainer.plan().bubble);
//! let summary = trainer.train(|step| println!("{}: loss {:.3}", step.step, step.loss))?;
//! assert_eq!(summary.all_gathers_per_unit, 3.0); // 2V - 1 with V = 2
//! # Ok::<(), zeropp::Error>(())
//! ```
//!
//! # A layer of your own
//!
//! Implement [`layer::Layer`] with the split operations of [`split::ops`] (then B and W are
//! separate), or wrap a stock `burn::nn` module in [`stock::Stock`] (then B does everything). List
//! the layers in a [`layer::Model`] and give it to [`Trainer::builder`]; see
//! `examples/own_layer.rs`. Data, a loss, an optimizer and a learning rate of your own go the same
//! way: `examples/own_data.rs`, `own_loss.rs`, `own_optimizer.rs`, `own_learning_rate.rs`; so does
//! a schedule (`own_schedule.rs`). [`check::layer`] holds a layer's B, W and cost against Burn's
//! autodiff and the meter.
//!
//! # A loop of your own
//!
//! [`Trainer::steps`] gives one step after another. Between two of them [`Steps::weights`],
//! [`Steps::evaluate`] and [`Steps::save`] are asked for where they are wanted, and change no bit.
//!
//! # What is promised
//!
//! For fixed data order, seed, D, K and unit boundaries no bit of the loss, the gradient norm or
//! the weights depends on P, V, the schedule, recomputation, prefetch, ZeRO-1 or timing. With
//! ZeroPP's schedule (kind `zeropp`) every rank and unit does 2V − 1 all-gathers and V
//! reduce-scatters, whatever the batch.
//!
//! # What a run tells
//!
//! Nothing is written to standard output or standard error. A run speaks through [`tracing`]:
//! events for its progress ([`RUN_EVENTS`]) and for all that a user should know and that ends
//! nothing, within spans for the run, its ranks, steps and checkpoints. The subscriber of the
//! thread that starts a run hears its ranks too; the threads of an engine and of signals know the
//! global one only. See `examples/embed.rs`.

mod checkpoint;
pub mod config;
mod emulate;
mod error;
mod events;
mod generate;
pub mod http;
mod launched;
pub mod measure;
mod own;
mod plan;
mod recorder;
mod refusal;
mod run;
mod telemetry;
mod trainer;
mod world;

pub use burn;
pub use checkpoint::adapter::export_adapter;
pub use checkpoint::begun::{with_model_of_checkpoint, with_model_of_weights};
pub use checkpoint::described::{belongings_of, config_of, is_model, split_of};
pub use checkpoint::export::{ExportOptions, ExportReport, export_checkpoint};
pub use checkpoint::resume::Resumed;
pub use checkpoint::saved::{SavedRun, SavedStep, saved};
pub use config::Config;
pub use emulate::{EmulatedStep, EmulationReport, emulate};
pub use error::{Error, RankError};
pub use events::RUN_EVENTS;
pub use generate::Generator;
pub use launched::{Launched, launched};
pub use own::loss::Loss;
pub use own::samples::{SampleError, Samples};
pub use plan::costs_file::read_costs;
pub use plan::head::may_split_head;
pub use plan::memory::MemoryCheck;
pub use plan::schedule_file::{ScheduleFileError, read_schedule, schedule_text};
pub use recorder::out_of_memory::{end_on_lost_file, end_out_of_memory, prepare_for_out_of_memory};
pub use refusal::TooLittleMemory;
pub use run::stop::Stopper;
pub use trainer::builder::TrainerBuilder;
#[cfg(unix)]
pub use trainer::signals::not_ignored;
pub use trainer::signals::stop_on_signals;
pub use trainer::steps::Steps;
pub use trainer::train::StepFlow;
pub use trainer::{NamedWeights, Trainer};
pub use zeropp_comm::{launch, rendezvous};
pub use zeropp_core::metrics::{
    Evaluation, EvaluationPlan, ExpertMetrics, LayerMetrics, Plan, RankPlan, RunHeader,
    StepMetrics, Stopped, Summary,
};
pub use zeropp_core::sampling::Sampling;
pub use zeropp_core::{check, data, layer, meter, model, params, rng, split, stock};
pub use zeropp_failures as failures;
pub use zeropp_pipeline as pipeline;
pub use zeropp_search as search;
pub use zeropp_weights as weights;
pub use zeropp_zero3::rule as optimizer;

/// README's program, as a test of the documentation.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
