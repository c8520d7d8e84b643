//! The table of all settings. It is the one place where a setting is named, documented and given
//! its default: the struct, the file's keys, the command's flags and its manual all come from it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use zeropp_core::data::SplitPart;
use zeropp_pipeline::schedules::DEFAULT;

use super::bytes::Bytes;
use super::choice::{
    Activation, Balance, Decay, DeviceKind, EngineKind, OnLoss, OptimizerKind, OptimizerSync,
    Order, OutStates, OutUnits, PackWeights, Place, Precision, Recompute, Reschedule, SliceCut,
    Tokenizer,
};
use super::kind::OptionType;
use super::resume::Resume;
use super::roles::{Across, OnResume};
use super::slice_count::SliceCount;
use super::step_range::StepRange;
use super::table::{OptionInfo, options};

options! {
    "Mesh" {
        /// Pipeline ranks (P), meant to be on different nodes.
        "pp" "P" pp: usize = 1, Same Kept;
        /// Ranks that share the weights of a stage (D), normally those of one node.
        ///
        /// Each owns 1/D of the weights, gradients and optimizer state, and trains on its own
        /// samples.
        "zero3" "D" zero3: usize = 1, Same Kept;
        /// Data-parallel replicas (K) of these P x D ranks; gradients are summed between them.
        "dp" "K" dp: usize = 1, Same Kept;
        /// Spread the optimizer state over the replicas too (ZeRO-1).
        ///
        /// Training gives the same bits with less memory. With one replica it makes no difference.
        "zero1" "BOOL" zero1: bool = false, Same Kept;
    }
    "Schedule" {
        /// The order of forward, backward and weight-gradient work.
        ///
        /// One of the schedules below, or a file whose name ends in `.csv` or `.json`, which sets
        /// U, V and B itself. A file that ends with an optimizer step runs exactly as written; from
        /// any other file only the compute actions are taken, and gathers, reductions and messages
        /// are added.
        "schedule" "KIND|FILE" schedule: String = DEFAULT.into(), Program Kept;
        /// Micro-batches in a scheduling unit (U). Default: near 2P−1, so that units divide the
        /// step evenly.
        ///
        /// A rank holds the activations of one unit, and gathers weights and reduces gradients once
        /// per unit. From U = 2P−1 on, the pipeline has no idle slot inside a unit; of the values
        /// from P to one and a half times 2P−1, the default is the one with the fewest idle slots
        /// in a step, and --dry-run says where another value would have fewer. Schedules other than
        /// zeropp reduce once a step; for them the unit is the step. A resumed run keeps its
        /// checkpoint's.
        "unit" "U" unit: Option<usize> = None, Program Reported;
        /// Stages on each pipeline rank (V). Default: what the schedule needs, else 2 where the
        /// layers allow it.
        ///
        /// Stage s lives on rank s mod P; V-shaped schedules place the second P stages in reverse
        /// rank order. A rank holds the whole weights of one stage at a time, and of those being
        /// prefetched, so more stages need less memory.
        "virtual" "V" virtual_stages: Option<usize> = None, Program Kept;
        /// Blocks of each stage, such as 3,4,4,3. Default: balanced by the time that stages take.
        ///
        /// Equal ones in a row may be given together: 1,8x2,1 are ten stages.
        /// The embedding belongs to the first stage and the head to the last, beside their blocks,
        /// and both are counted in the balance: where the head is large, the last stage gets fewer
        /// blocks, or none: the last number may be 0. Where virtual is not set, it follows from how
        /// many numbers there are (V·P). No bit depends on the cut.
        "stages" "N,N,.." stages: Option<String> = None, Program Kept;
        /// The most memory of a rank, in GiB. Default: what the machine has.
        ///
        /// The default cut into stages keeps within this limit where it can, even at the cost of
        /// time. A run that is predicted to need more on a rank is refused.
        "rank-memory" "GIB" rank_memory: Option<f64> = None, Program Kept;
        /// Micro-batches of each rank in a step (B). Default: two units; for a resumed run the
        /// checkpoint's.
        "micro-batches" "B" micro_batches: Option<usize> = None, Program Kept;
        /// Samples of a step over all ranks, or tokens: `512`, `0.5M tokens`. Default: as many as
        /// micro-batches gives.
        ///
        /// Sets micro-batches. A number of samples has to be a multiple of micro-batch-size x
        /// zero3; where it does not divide by dp as well, the first replicas get a micro-batch more
        /// than the others, which wait for them. A number of tokens is rounded to as many whole
        /// micro-batches for each, and the run says to what. A resumed run keeps its checkpoint's.
        "global-batch" "SAMPLES|TOKENS" global_batch: Option<String> = None, Program Kept;
        /// Samples in a micro-batch.
        "micro-batch-size" "N" micro_batch_size: usize = 1, Same Kept;
        /// How many stages ahead of their use weights are gathered.
        "prefetch" "N" prefetch: usize = 1, Program Kept;
        /// The most stages that a rank may hold gathered at once, for `auto`. Default: 2.
        ///
        /// `auto` plans its gathers itself and uses this limit where other schedules use prefetch.
        "max-gathered" "N" max_gathered: Option<usize> = None, Program Kept
            => "schedule:max-gathered";
        /// The most gathers of a rank in a step, for `auto`. Default: no limit.
        "max-gathers" "N" max_gathers: Option<usize> = None, Program Kept => "schedule:max-gathers";
        /// What to compute again in the backward to save memory.
        ///
        /// `auto`: the least with which each rank is within rank-memory, mem-limit and the memory
        /// of the machine: `none` where nothing is short, else `selective`, `full:first=N` with the
        /// smallest N, or `full`. The run says which. No bit depends on it.
        /// `selective`: the outputs of norms and activation functions, a third of what a layer
        /// keeps for 1 to 2 % of the time, and attention's scores, which GPUs and bf16 never keep.
        /// `full`: whole stages, of which only the layers' inputs are kept. Schedules
        /// with a split backward do not recompute the last of a rank's several stages as a whole,
        /// because its backward follows at once: there `full` means `selective`.
        "recompute" "WHAT" recompute: Recompute = Recompute::Auto, Program Kept;
        /// Of each unit, the micro-batches that `recompute = full` is for. Default: all.
        ///
        /// The others do as with `selective`, and so does the stage with the head. So the memory
        /// that there is can be used up: `zeropp plan` finds the number.
        "recompute-first" "N" recompute_first: Option<usize> = None, Program Kept
            => "recompute:first";
        /// Where activations are copied out to, and in again before the backward: on CPUs a folder
        /// for a file of each rank, on CUDA `host`. Default: nowhere.
        ///
        /// What the forward keeps, less what `recompute` makes again, leaves memory while other
        /// stages compute, wherever there is time for both copies; no bit depends on it. `host` is
        /// memory of the machine that a rank pins at its start. A folder wants a fast local disk:
        /// it is written and read once a step for all that goes out. The file has no name and goes
        /// with the process. With `auto` only as many micro-batches go out as memory wants, before
        /// whole stages are computed again.
        "recompute-out" "DIR" recompute_out: Option<PathBuf> = None, Given Left
            => "recompute:out";
        /// How many micro-batches of each unit are copied out, spread evenly over the unit, so that
        /// the disk is never flooded. Default: all.
        "recompute-out-batches" "N" recompute_out_batches: Option<usize> = None, Program Kept
            => "recompute:out-batches";
        /// Units of which micro-batches are copied out.
        ///
        /// `all`: each. `later`: all but a step's first, so that the optimizer state that
        /// `optimizer:out` copies then has the link to itself; what would be copied stays, or, with
        /// `recompute:first`, is computed again. `zeropp plan` says where that is faster.
        "recompute-out-units" "UNITS" recompute_out_units: OutUnits = OutUnits::All, Program Kept
            => "recompute:out-units";
        /// When ranks learn the norm that clipping and the check for finite gradients need.
        ///
        /// `barrier`: before each update, for which all ranks meet. `late`: each rank updates as
        /// soon as it can and begins the next step; if the norm then says that the update was
        /// wrong, all go back and begin that step again, to the same bits. It saves schedules whose
        /// ranks begin one after the other the wait for the last one, takes memory for the state
        /// before an update, and pays where few steps are clipped. A wish to stop or to save takes
        /// effect up to three steps later. Before a validation loss, a save and the last step's
        /// end ranks meet anyway.
        "optimizer-sync" "WHEN" optimizer_sync: OptimizerSync = OptimizerSync::Barrier, Same Left;
        /// Keep gathered bf16 weights in the layout that the CPU's products read, packed once a
        /// unit: `auto`, `on` or `off`.
        ///
        /// For bf16 on CPUs. It takes the memory of two more copies of the gathered weights, and
        /// changes no bit. `auto` packs where several micro-batches share a gather and there is
        /// memory for the copies.
        "pack-weights" "WHEN" pack_weights: PackWeights = PackWeights::Auto, Own Left
            => "precision:pack";
        /// Times of all actions, for schedules that use them and for the predicted bubble.
        ///
        /// A file: written by hand, by an earlier run's save-costs, or an earlier run's trace;
        /// docs/costs.md describes it. Without one, times are estimated from FLOP counts, messages,
        /// gathers and reductions are taken to cost nothing, and --dry-run says so. No bit of the
        /// training depends on the times. All processes run the program made from rank 0's file.
        "costs" "FILE" costs: Option<PathBuf> = None, Program Left;
        /// Whether the run improves its order of work by the times of its steps: `off`, `auto` or
        /// `recut`. Default: auto on CPUs where pp is 2 or more and there are 100 steps or more.
        ///
        /// `auto` measures the first steps, searches for a better order of the same stages within
        /// the planned memory beside the training, and takes it between two steps where it is
        /// predicted to gain 1 % or more. It goes back where steps do not become shorter, and
        /// searches again where they become longer. Searches take at most 1 % of a core's time.
        /// `recut` also moves blocks between the ranks' memories where stages take uneven times;
        /// a rank holds the old and the new state for a moment. No bit of the training changes.
        "reschedule" "WHEN" reschedule: Option<Reschedule> = None, Same Left
            => "schedule:reschedule";
        /// How many of the head's row blocks each pipeline rank has: `auto`, `off` or a list such
        /// as 16,16,16,16. Default: auto.
        ///
        /// A head of a large vocabulary takes as long as several layers. Split, all ranks compute
        /// some of its rows, and none waits for the last one. `auto` splits it where a step is
        /// predicted to be shorter so, and not where stages are given. The rows are cut into at
        /// most 64 blocks, by their number alone; where the numbers do not add up to that,
        /// --dry-run says how many there are. For zeropp, 1f1b and zb-h1, on the CPU with engine
        /// threads or mpi. No bit of the training depends on it.
        "head-split" "BLOCKS" head_split: Option<String> = None, Same Left
            => "schedule:head-split";
        /// Slices that every sample is cut into along its sequence, each a micro-batch: `auto` or a
        /// number. Default: auto.
        ///
        /// For samples so long that a step has few of them: pipelines idle less, and hold less.
        /// micro-batches and unit count samples as before, and no bit depends on the number.
        /// Samples have 512 tokens or more, and are cut at multiples of 256. For zeropp, 1f1b and
        /// interleaved-zb (whose unit is a sample then), on the CPU. `auto` tries 2, 4 and so on
        /// while slices have 2,048 tokens, and keeps samples whole where that brings little.
        "slices" "N|auto" slices: SliceCount = SliceCount::Auto, Same Left
            => "schedule:slices";
        /// What the slices of a sample have the same of.
        ///
        /// `work`: by operations; the first has the most tokens, since later ones look at more.
        /// `tokens`: holds less, and idles more.
        "slice-cut" "WHAT" slice_cut: SliceCut = SliceCut::Work, Same Left => "schedule:slice-cut";
        /// The most memory for activations and weight stashes on a rank, such as 24GiB.
        ///
        /// Schedules that search for an order within a limit, such as auto, keep to it. Any other
        /// schedule is refused where it needs more, and the message names those that would keep to
        /// it.
        "mem-limit" "BYTES" mem_limit: Option<Bytes> = None, Program Kept => "schedule:mem-limit";
    }
    "Training" {
        /// Steps, each an update of the weights.
        "steps" "N" steps: u64 = 40, Same Reported;
        /// Seed of the initial weights and of the order of the data.
        "seed" "N" seed: u64 = 0, Same Fixed OfModel;
        /// Learning rate after the warm-up.
        "lr" "X" lr: f64 = 3e-3, Same Reported;
        /// Learning rate at the last step. Default: a tenth of lr.
        "min-lr" "X" min_lr: Option<f64> = None, Same Reported;
        /// How the learning rate falls after the warm-up.
        ///
        /// cosine and linear reach min-lr at the last step. wsd keeps lr for four fifths of the run
        /// and then falls linearly to min-lr; inverse-sqrt is lr·√(warmup/step), but never below
        /// min-lr.
        "decay" "SHAPE" decay: Decay = Decay::Cosine, Same Reported;
        /// Steps in which the learning rate rises to lr. Default: a tenth of steps, at most 100.
        "warmup" "N" warmup: Option<u64> = None, Same Reported;
        /// Find a learning rate instead of training: run N steps at rates that grow by equal
        /// factors from 1e-7 to 10, and say where the loss falls fastest. 0 trains.
        ///
        /// 100 is a good number. The run starts from the initial weights, ends once the loss has
        /// risen far, and writes only the curve: find-lr.html and find-lr.csv in the current
        /// folder. Only `zeropp run` does this.
        "find-lr" "N" find_lr: u64 = 0, Same Left;
        /// The rule that updates weights from gradients.
        ///
        /// docs/optimizers.md says what each keeps and does.
        "optimizer" "KIND" optimizer: OptimizerKind = OptimizerKind::Adamw, Same Fixed;
        /// Weight decay: decoupled from the gradient; with sgd added to the gradient, as in
        /// PyTorch.
        "weight-decay" "X" weight_decay: f64 = 0.01, Same Reported;
        /// Parameters without weight decay: a list of norms, biases and embeddings, or none.
        /// Default: as the layers say, which is norms and biases.
        ///
        /// biases are parameters whose names end in bias, norms all other vectors, embeddings the
        /// tables of tokens and positions, and a head that shares the token table.
        "no-decay" "GROUPS" no_decay: Option<String> = None, Same Reported => "weight-decay:except";
        /// AdamW's decay of the mean gradient; with lion, its share of the direction. Default: 0.9.
        "beta1" "X" beta1: Option<f64> = None, Same Reported => "optimizer:beta1";
        /// AdamW's decay of the mean squared gradient, or lion's of the mean gradient. Default:
        /// 0.999, with lion 0.99.
        "beta2" "X" beta2: Option<f64> = None, Same Reported => "optimizer:beta2";
        /// Share of sgd's velocity, or of muon's mean gradient, that is kept from step to step.
        /// Default: 0.9, with muon 0.95.
        "momentum" "X" momentum: Option<f64> = None, Same Reported => "optimizer:momentum";
        /// Use Nesterov momentum. Default: yes with muon, no with sgd.
        "nesterov" "BOOL" nesterov: Option<bool> = None, Same Reported => "optimizer:nesterov";
        /// What AdamW adds to the root of the mean squared gradient. Default: 1e-8.
        "eps" "X" eps: Option<f64> = None, Same Reported => "optimizer:eps";
        /// Where optimizer state is between updates, and, where memory is short, parameters and
        /// gradients between their uses: on CPUs a folder for a file of each rank, on CUDA `host`.
        /// Default: memory has them.
        ///
        /// With all of them out a run takes the memory of a few stages and of the activations: with
        /// many `virtual` stages and one rank, a model larger than memory trains. A gather reads a
        /// stage's weights, an update reads and writes pieces; no bit depends on it. Every step
        /// reads and writes some 44 bytes per parameter with adamw, of the moments alone 16: a fast
        /// local disk is wanted, of some 16 bytes per parameter, or 8. With `dp`, sums over
        /// replicas stay in memory. `host` is memory of the machine that a rank pins at its start;
        /// it has what the optimizer keeps, and no more.
        "optimizer-out" "DIR|host" optimizer_out: Option<PathBuf> = None, Given Left
            => "optimizer:out";
        /// What of `optimizer:out` is out.
        ///
        /// `auto`: `moments`, which is what the optimizer keeps, where all else fits into memory as
        /// predicted, else `all`. The run says which.
        "optimizer-out-states" "WHAT" optimizer_out_states: OutStates = OutStates::Auto, Own Left
            => "optimizer:out-states";
        /// Also keep an exponential moving average (EMA) of the weights, with this decay, such as
        /// 0.999. Default: none.
        ///
        /// It is sharded like the weights, takes 4 bytes a parameter, and is saved with them; eval,
        /// generate and export use it with --ema. No bit of the training depends on it.
        "ema" "SHARE" ema: Option<f64> = None, Same Reported;
        /// Share of elements that training drops, such as 0.1. 0 drops none.
        ///
        /// They are dropped behind the embedding, of attention's probabilities, and of what
        /// attention and MLP add to the residual; the others are scaled up. Which ones depends on
        /// seed, step, sample and place alone, never on the mesh. Validation and text drop none.
        "dropout" "SHARE" dropout: f64 = 0.0, Same Reported;
        /// How experts are kept in balance: a loss that is smallest where tokens are spread evenly,
        /// counted over each micro-batch or each sample; a bias, in model dots1; or none.
        ///
        /// Each layer with experts adds weight times E·Σ f·P to the loss that is trained: f is an
        /// expert's share of choices, P its mean score. The losses that are shown are without it.
        /// With bias each step moves the bias of an expert's choice by the weight, down where it
        /// had more tokens than the mean, else up, as DeepSeek-V3 does.
        "balance" "OVER" balance: Balance = Balance::MicroBatch, Same Reported;
        /// Weight of the balance loss, or a bias's step. Default: 0.01, of biases 0.001. Models
        /// without experts have none.
        "balance-weight" "X" balance_weight: Option<f64> = None, Same Reported => "balance:weight";
        /// Weight of the routers' z-loss, the mean squared log-sum-exp of logits. Default: 0.
        "router-z" "X" router_z: Option<f64> = None, Same Reported => "balance:z";
        /// Largest global gradient norm; a larger gradient is scaled down to it. 0 turns clipping
        /// off.
        "clip" "X" clip: f64 = 1.0, Same Reported;
        /// Steps in a row that may be skipped because their gradient is not finite (NaN or
        /// infinite) before the run ends. 0 never ends it.
        ///
        /// A skipped step changes no weight, and no checkpoint from before it is removed.
        "max-skipped" "N" max_skipped: u64 = 10, Same Left => "clip:max-skipped";
    }
    "Validation" {
        /// Steps from one validation loss to the next; 0 measures none. The last step has one, too.
        ///
        /// Measured on data that is not trained on: eval-data, or the part that split keeps; on the
        /// same samples each time. No bit of the training depends on it.
        "eval-every" "N" eval_every: u64 = 0, Same Left;
        /// Batches of a validation loss, each with as many samples as a step; 0 takes all there is.
        ///
        /// If there is less data than that, every whole micro-batch of it is used once; of several
        /// sources, until the first of them is used up, so that each has its weight.
        "eval-steps" "M" eval_steps: u64 = 20, Same Reported;
        /// End the run after this many validation losses in a row without a new lowest one; 0 never
        /// does.
        ///
        /// The run ends in good order, with a last checkpoint if it saves any. A resumed run goes
        /// on counting.
        "patience" "N" patience: u64 = 0, Same Left => "eval-every:patience";
        /// Data for the validation loss: a file or folder, read as that of data is.
        "eval-data" "PATH" eval_data: Option<PathBuf> = None, Given Reported;
        /// Save each step that has the lowest validation loss so far, and always keep the newest of
        /// these checkpoints, whatever keep says.
        "keep-best" "BOOL" keep_best: bool = false, Same Left => "keep:best";
        /// Every N steps, show how the model continues prompt; 0 shows nothing.
        ///
        /// The text, 64 tokens, is written with the weights of that step: by rank 0's process
        /// between two steps, which takes time and the memory of the whole model in fp32. No bit of
        /// the training depends on it. Only `zeropp run` does this.
        "sample-every" "N" sample_every: u64 = 0, Own Left;
        /// What the text of sample-every begins with.
        "prompt" "TEXT" prompt: Option<String> = None, Own Left;
        /// What the logits of a text of sample-every are divided by; 0 takes the likeliest tokens.
        ///
        /// Tokens are drawn by the seed, so the same run writes the same text on any mesh.
        "sample-temperature" "X" sample_temperature: f64 = 0.8, Own Left
            => "sample-every:temperature";
    }
    "Model" {
        /// Which model to train: a family, a preset, a Hugging Face folder, or a GGUF file.
        ///
        /// A family takes its sizes from the settings below: gpt, which is GPT-2's, llama, mistral,
        /// mixtral, qwen2, qwen3, qwen2-moe, qwen3-moe, dots1. A preset has its own, as a file has:
        /// gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama2-7b, llama2-13b, llama2-70b, llama3-8b,
        /// llama3-70b, llama3.1-8b, llama-1b, llama-3b, smollm2-135m, smollm2-360m, smollm2-1.7b,
        /// mistral-7b, mixtral-8x7b, qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-7b, qwen3-0.6b,
        /// qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-30b-a3b, qwen3-235b-a22b. Beside these, layers,
        /// seq and vocab may be set; seq is at most 1024 by default. What has a slash or ends in
        /// .json or .gguf is a path: of a folder, its config.json, or a GGUF file. Weights start
        /// from the seed, unless init-from names some.
        "model" "MODEL" model: String = "gpt".into(), Same Fixed OfModel;
        /// Transformer blocks. Every stage needs at least one: P·V or more.
        "layers" "N" layers: usize = 8, Same Kept OfModel;
        /// Hidden size; a multiple of heads, unless head-dim is set.
        "hidden" "N" hidden: usize = 64, Same Kept OfModel;
        /// Attention heads.
        "heads" "N" heads: usize = 4, Same Fixed OfModel;
        /// Key and value heads, of which each serves heads/kv-heads query heads. Default: heads.
        "kv-heads" "N" kv_heads: Option<usize> = None, Same Fixed OfModel;
        /// Elements of an attention head. Default: hidden/heads.
        "head-dim" "N" head_dim: Option<usize> = None, Same Fixed OfModel;
        /// Inner size of the MLP. Default: four times hidden; with swiglu, which has three
        /// matrices, two thirds of that, rounded up to a multiple of 64. With experts it is the
        /// inner size of one, by default a part of that, one for each that a token goes to.
        "intermediate" "N" intermediate: Option<usize> = None, Same Kept OfModel;
        /// Experts of a layer, in mixtral, qwen2-moe, qwen3-moe and dots1. Default: 8.
        ///
        /// They stand in place of the MLP, and a router sends each token to a few of them. In
        /// qwen2-moe and dots1 all tokens go to one beside them. For CPUs. They have no adapters.
        "experts" "E" experts: Option<usize> = None, Same Fixed OfModel;
        /// Experts that each token goes to. Default: 2.
        "experts-per-token" "N" experts_per_token: Option<usize> = None, Same Fixed OfModel
            => "experts:per-token";
        /// Tokens in a sample.
        "seq" "N" seq: usize = 64, Same Reported OfModel;
        /// Whether the head shares the embedding's weights, as in GPT-2.
        "tied" "BOOL" tied: bool = false, Same Kept OfModel;
        /// Token ids that the model knows (the vocabulary). Default: 256 for bytes, else one more
        /// than the data's largest id, for which all of the file is read.
        ///
        /// With it a file of ids is not searched: ids are looked at as they are read, and one that
        /// is not below ends the run with its place in the file.
        "vocab" "N" vocab: Option<usize> = None, Same Fixed;
        /// Round the rows of embedding and head up to a multiple of this; 128 suits GPUs.
        ///
        /// Rows that are no token id are never looked up and take no part in the loss.
        "vocab-multiple" "N" vocab_multiple: usize = 1, Same Fixed OfModel => "vocab:multiple";
        /// Begin with these weights: a Hugging Face folder, a safetensors file, a GGUF file, or a
        /// checkpoint of another run.
        ///
        /// Without model, the model is the one that lies there. Each rank reads its own part. A
        /// tensor that is missing, unknown or of another shape is refused by name. A resumed run
        /// takes its checkpoint instead.
        "init-from" "PATH" init_from: Option<PathBuf> = None, Given Kept;
        /// Where init-from names a checkpoint, take its moving average of the weights (ema).
        "init-ema" "BOOL" init_ema: bool = false, Same Left => "init-from:ema";
        /// Parameters that do not train, by name or module, such as wte,h.0,*.bias; `*` is any
        /// text.
        ///
        /// They have no gradient, no optimizer state and no reduction, and W skips them. A
        /// checkpoint leaves them out and names init-from (or the seed) as where they are.
        "freeze" "PATTERN,.." freeze: Option<String> = None, Same Fixed OfModel;
        /// Train adapters of this rank beside frozen weights (LoRA): x·W becomes x·W +
        /// (alpha/lora-rank)·(x·A)·B. 0 trains the weights.
        ///
        /// A begins with random numbers, B with zeros. Checkpoints have the adapters alone; export
        /// merges them into the weights, or writes them for peft with --adapter.
        "lora-rank" "R" lora_rank: usize = 0, Same Fixed OfModel;
        /// Numerator of the factor on what adapters add. Default: twice lora-rank.
        "lora-alpha" "X" lora_alpha: Option<f64> = None, Same Fixed OfModel => "lora-rank:alpha";
        /// Linear maps with an adapter: q,k,v,o,gate,up,down, GPT-2's c_attn,c_proj,c_fc, or all.
        /// Default: q,v, for GPT-2 c_attn.
        "lora-targets" "NAMES" lora_targets: Option<String> = None, Same Fixed OfModel
            => "lora-rank:targets";
        /// The MLP's nonlinearity: exact GELU, GPT-2's tanh form, or swiglu. All families but gpt
        /// use swiglu by default.
        "activation" "KIND" activation: Activation = Activation::GeluTanh, Same Fixed OfModel;
    }
    "Data" {
        /// A text file, or a folder of text files. Default: a built-in text of 47 KB.
        ///
        /// A folder is read recursively, in the order of the paths inside it, with a line feed
        /// between files; names that begin with a dot are left out.
        /// A .bin with Megatron's .idx beside it is read as that says. Given several times, each
        /// with a weight (`--data a.bin=0.7 --data b.bin=0.3`, in a file
        /// `data = ["a.bin=0.7", "b.bin=0.3"]`), samples come from all in turns: of ten seven are
        /// from a.bin.
        "data" "PATH" data: Option<PathBuf> = None, Contents Reported;
        /// Several sources with their weights, in a settings file; the flag is `data`, given
        /// several times.
        ///
        /// `a.bin=0.7,b.bin=0.3`: of ten samples seven are from a.bin. Which ones depends on a
        /// sample's number alone. Paths in it may have no comma, and all processes name the same
        /// paths.
        "data-mix" "PATH=WEIGHT,.." data_mix: Option<String> = None, Same Reported => "data";
        /// Shares of each source to train on and to keep for validation, such as 98,2. Default: all
        /// to train on.
        ///
        /// The beginning is trained on. The cut is between two documents where data has documents,
        /// and in the first where that is longer than the share.
        "split" "N,N" split: Option<String> = None, Same Reported;
        /// How data becomes token ids: its bytes, or the 16-bit or 32-bit ids of a nanoGPT or llm.c
        /// .bin file.
        "tokenizer" "KIND" tokenizer: Tokenizer = Tokenizer::Bytes, Same Fixed OfModel;
        /// Take samples from random places, from the start of the data on, or in a new order of all
        /// of it in each epoch.
        ///
        /// A sample depends on seed, step and its index alone, never on the mesh.
        "order" "ORDER" order: Order = Order::Random, Same Reported;
        /// Keep documents apart: attention stays inside of one, its positions begin at 0, and its
        /// first token is not scored.
        ///
        /// Documents begin where the data's .idx says, or behind each token `end`.
        "document-mask" "BOOL" document_mask: bool = false, Same Reported OfModel;
        /// The token id that ends a document, for document-mask. Default: the data's .idx says it.
        "document-end" "ID" document_end: Option<usize> = None, Same Reported OfModel
            => "document-mask:end";
        /// Score only the tokens that the .mask beside the data marks, where there is one.
        ///
        /// `zeropp tokenize` writes it for chats: the answers. The loss is the mean over the scored
        /// tokens of the whole step.
        "loss-mask" "BOOL" loss_mask: bool = true, Same Reported OfModel;
    }
    "Machine" {
        /// The number type of weights and activations.
        ///
        /// bf16: compute and gathered weights in bfloat16; master weights, gradients, reductions
        /// and optimizer in fp32. CPUs with AMX, and AMD's from Zen 4 on, are fast at it. All CPUs
        /// give the same bits; ZEROPP_ISA=amx|avx512_bf16|avx512|avx2|scalar forces a path. wgpu
        /// does not support it. tf32: fp32, but products on NVIDIA GPUs round their factors to 11
        /// bits, and are several times as fast.
        "precision" "KIND" precision: Precision = Precision::Fp32, Same Reported OfModel;
        /// Where tensors live. Ranks of one machine take its GPUs in turn, and share them.
        ///
        /// cuda needs a build with --features cuda, NVIDIA's driver, NVRTC 13 and the toolkit's
        /// headers; wgpu a build with --features wgpu.
        "device" "KIND" device: DeviceKind = DeviceKind::Cpu, Same Kept;
        /// Threads that each rank computes with on a CPU. Default: the machine's cores divided by
        /// the ranks on it, at least 1.
        ///
        /// The bits are the same for any number. Where the ranks of a machine have more threads
        /// than it has cores, waiting threads sleep instead of spinning.
        "threads" "N" threads: Option<usize> = None, Own Left;
        /// Bind the threads of each rank to cores of its own, one a thread. For Linux and CPUs.
        ///
        /// The ranks of a machine take, one after the other, the cores that their process may use:
        /// what taskset, cgroups and mpirun have bound it to holds. Second threads of a core are
        /// taken last. Too few cores are an error. Changes no bit. Two runs on one machine take the
        /// same cores, unless taskset gives each its own.
        "pin" "BOOL" pin: bool = false, Own Left => "threads:pin";
        /// Start a run that is predicted to need more memory than there is.
        ///
        /// Before a rank starts, what the ranks here are predicted to need is compared with the
        /// memory that is free, the limits of the cgroup and of ulimit -v, and rank-memory.
        "no-memory-check" "BOOL" no_memory_check: bool = false, Own Left => "rank-memory:unchecked";
        /// How ranks talk to each other. threads: all ranks in one process. mpi: processes started
        /// by mpirun; needs a build with --features mpi. nccl: GPUs, a rank and a process each;
        /// needs a build with --features cuda.
        ///
        /// Over MPI with fewer processes than ranks, each process runs several ranks as threads:
        /// one process a node gathers weights once a node. Over NCCL it starts a process for each
        /// of the others.
        "engine" "KIND" engine: EngineKind = EngineKind::Threads, Same Kept;
        /// Which process gets which ranks: hosts keeps ZeRO-3 groups inside a host, ranks follows
        /// the launcher's numbers.
        "place" "BY" place: Place = Place::Hosts, Same Left => "engine:place";
        /// Seconds that a rank waits for another one; then the run ends and names the late rank.
        ///
        /// A pause of the whole process (Ctrl-Z, scontrol suspend) does not count. On a GPU the
        /// first step, in which kernels are compiled, has ten times as long.
        "timeout-s" "S" timeout_s: f64 = 120.0, Own Left;
        /// How often failed ranks are restarted from the newest checkpoint. 0 ends the run with the
        /// first failure.
        ///
        /// For engine threads; `zeropp supervise` restarts processes. Without a checkpoint the
        /// ranks start over. Repeated steps give the same bits. A step that fails three times ends
        /// the run.
        "max-recoveries" "N" max_recoveries: u64 = 0, Own Left;
        /// What happens to the replica (of dp) of a rank that has failed: `restart` or `shrink`.
        ///
        /// `restart`: all ranks start again. `shrink`: the run goes on with one replica fewer at
        /// the same global batch, whose samples the others share, and with the bits of a run
        /// started so from the same checkpoint. The last replica is started again. For
        /// max-recoveries; `zeropp supervise --replicas` does it for processes.
        "on-loss" "WHAT" on_loss: OnLoss = OnLoss::Restart, Own Left => "max-recoveries:on-loss";
    }
    "Launch" {
        /// Machines on which you start zeropp by hand, each with one process of this job.
        ///
        /// Give all of them the same settings, and each its own node-rank. Not for engine mpi,
        /// whose launcher starts all processes; not needed under torchrun or Slurm.
        "nodes" "N" nodes: usize = 1, Same Left;
        /// The number of this node, from 0. Rank 0 is on node 0.
        "node-rank" "I" node_rank: Option<usize> = None, Own Left;
        /// Where the processes meet: node 0's name or address, and a free port there.
        ///
        /// Beyond one machine this needs a token, a secret that the processes share: in the
        /// environment variable ZEROPP_TOKEN, or in a token-file. Default under torchrun:
        /// MASTER_ADDR and MASTER_PORT + 1.
        "rendezvous" "HOST:PORT" rendezvous: Option<String> = None, Own Left;
        /// A file with the job's token; nobody else may be able to read it.
        "token-file" "FILE" token_file: Option<PathBuf> = None, Own Left => "rendezvous:token-file";
        /// Seconds within which all processes of the job must have started.
        ///
        /// With resume also how long a run waits for one before it that still saves to the same
        /// folder; a job of several processes waits half of it.
        "start-timeout-s" "S" start_timeout_s: f64 = 60.0, Own Left => "timeout-s:start";
    }
    "Emulation" {
        /// Run the schedule with the times of this file in place of a model, to measure the runtime
        /// itself.
        ///
        /// Ranks, program and engine are real; F, B, W and R only take their time, and messages and
        /// collectives arrive when the given links would deliver them. The file has the form of
        /// `costs`: `t_f`, `t_b` and `t_w` in µs, one number or one a stage, and the other keys of
        /// docs/costs.md.
        "emulate" "COSTS" emulate: Option<PathBuf> = None, Given Left;
    }
    "Output" {
        /// A name for the run in what it writes. Default: the name of its settings file, or of its
        /// metrics file.
        "run-name" "NAME" run_name: Option<String> = None, Own Left;
        /// Write the metrics of every step to this file: a JSON object a line or, where its name
        /// ends in .csv, a row.
        ///
        /// The first line of JSON describes the run. A resumed run appends to the file.
        "metrics" "FILE" metrics: Option<PathBuf> = None, Own Left;
        /// Write losses, rates and memory as TensorBoard's event files into this folder.
        "tensorboard" "DIR" tensorboard: Option<PathBuf> = None, Own Left;
        /// Serve the metrics of the last step to Prometheus, as http://ADDR:PORT/metrics.
        ///
        /// A port alone means 127.0.0.1. There is no password: whoever reaches the address can read
        /// the metrics, and nothing else.
        "prometheus" "ADDR:PORT" prometheus: Option<String> = None, Own Left;
        /// Steps from one line of `zeropp run` to the next. Default: about a line a second.
        ///
        /// The first and the last step always have one. The loss shown is the mean of the steps
        /// since the line before.
        "log-every" "N" log_every: Option<u64> = None, Own Left;
        /// Every N steps, add each layer's gradient norm, update ratio and activation scale to the
        /// metrics; 0 never does.
        ///
        /// Of the embedding, each block, the final norm and the head: the norm of the gradient
        /// before clipping, the norm of the update over that of the weights, and the root mean
        /// square of the outputs. In JSON lines, TensorBoard and Prometheus, and drawn by `zeropp
        /// plot`. No bit of the training depends on it. Such a step takes a copy of one layer's
        /// parameters on each rank, and a little time.
        "log-layers" "N" log_layers: u64 = 0, Same Left;
        /// Also write what `zeropp run` prints to this file, with a line for every step.
        ///
        /// A resumed run appends to it.
        "log-file" "FILE" log_file: Option<PathBuf> = None, Own Left;
        /// Write a Chrome trace of every rank's actions to this file; Perfetto opens it.
        ///
        /// It holds the first 8 steps, or those of `steps`, so that the trace of a long run
        /// stays small.
        "trace" "FILE" trace: Option<PathBuf> = None, Given Left;
        /// The steps in a trace, from A to B inclusive: `100..107`. Default: the first 8 of this
        /// start.
        "trace-steps" "A..B" trace_steps: Option<StepRange> = None, Same Left => "trace:steps";
        /// Write the measured times of this run to this file (.json), for `costs` and for `zeropp
        /// schedule --costs`.
        ///
        /// F, B, W, R, gathers, reductions, messages and the optimizer step, of the steps in the
        /// trace without the first, and the predicted bytes of every stage.
        "save-costs" "FILE" save_costs: Option<PathBuf> = None, Given Left;
        /// Folder in which every rank of a failed run writes what it did last; `zeropp why` reads
        /// it. Default: zeropp-failed; for a Rust program none.
        ///
        /// The folder is made when it is needed. Where ranks run on several machines it should be
        /// one that all of them see. An empty name writes nothing. A program that sets it gets a
        /// panic hook.
        "flight-dir" "DIR" flight_dir: Option<PathBuf> = None, Given Left;
        /// Write checkpoints into this folder, each a folder `step-000123` in it.
        ///
        /// The last step is always saved. A checkpoint gets its name once all of it is on disk, so
        /// one that is there is complete.
        "save" "DIR" save: Option<PathBuf> = None, Given Left;
        /// Steps from one checkpoint to the next. 0 saves only at the end.
        "save-every" "N" save_every: u64 = 0, Same Left;
        /// How many of the newest checkpoints to keep; older ones are removed.
        "keep" "N" keep: usize = 2, Same Left;
        /// Go on from the newest checkpoint in the folder of save; if there is none, begin.
        ///
        /// So one command serves a job that is started again and again. `must` refuses to begin
        /// anew; a number goes on from the checkpoint of that step, and sets newer ones aside.
        /// Mesh, schedule, recomputation and ZeRO-1 may differ from the run that wrote it. On the
        /// command line the model, tokenizer and split that are not given are the checkpoint's.
        /// `steps` counts from the very start.
        "resume" "BOOL|must|STEP" resume: Resume = Resume::No, Same Left;
        /// If the checkpoint to resume from is damaged, take the one before it.
        "resume-fallback" "BOOL" resume_fallback: bool = false, Same Left => "resume:fallback";
        /// Folder in memory for copies of the newest state, from which the run goes on if its
        /// processes end and the machine does not; `zeropp supervise` gives one.
        ///
        /// A copy is written as a checkpoint is, behind the steps. Two are there at most, of which
        /// one is complete. A run that ends well removes them. All ranks must be on one machine.
        "copies" "DIR" copies: Option<PathBuf> = None, Own Left;
        /// Steps from one copy in memory to the next. 0 makes none.
        "copy-every" "N" copy_every: u64 = 1, Same Left => "copies:every";
        /// Seconds that writing or reading a checkpoint may take. While one rank does, the others
        /// wait for it, however short timeout-s is.
        "save-timeout-s" "S" save_timeout_s: f64 = 1800.0, Own Left => "timeout-s:save";
    }
}
