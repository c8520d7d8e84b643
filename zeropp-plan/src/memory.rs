//! What a rank holds: exactly, by the code that predicts for runs, and from below in closed form,
//! so that what does not fit need not be made.

use serde::Serialize;
use zeropp_schedule::ir::Schedule;
use zeropp_schedule::memory::{HeldBytes, StageBytes, predict_both, predict_warm_up};

use crate::layout::{Job, Layout, Packing, Recompute};
use crate::stages::Stage;

/// Bytes of one rank by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RankBytes {
    /// fp32 parameters of its shards.
    pub parameters: u64,
    /// Their summed gradients.
    pub gradient_shard: u64,
    /// Moments, and what an optimizer step takes besides.
    pub optimizer: u64,
    /// What it takes to go back, where updates are validated late.
    pub rollback: u64,
    /// Gathered weights.
    pub gathered: u64,
    /// Copies of them as products read them.
    pub packed_weights: u64,
    /// Whole gradients of stages.
    pub gradient: u64,
    /// What F keeps for B.
    pub activation: u64,
    /// What B keeps for W.
    pub weight_stash: u64,
    /// Messages, and buffers of collectives.
    pub communication: u64,
}

impl RankBytes {
    /// By their names.
    pub fn kinds(&self) -> [(&'static str, u64); 10] {
        [
            ("parameters", self.parameters),
            ("gradient shard", self.gradient_shard),
            ("optimizer", self.optimizer),
            ("rollback", self.rollback),
            ("gathered weights", self.gathered),
            ("packed weights", self.packed_weights),
            ("unreduced gradients", self.gradient),
            ("activations", self.activation),
            ("weight stash", self.weight_stash),
            ("communication", self.communication),
        ]
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.kinds().iter().map(|(_, bytes)| bytes).sum()
    }
}

/// What a rank holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// At the moment when it holds most.
    pub at_once: RankBytes,
    /// The most of each kind; they are not all there at the same time.
    pub peaks: RankBytes,
}

/// What every pipeline rank holds, as a run of `program` predicts it.
pub fn exact(job: &Job, layout: &Layout, program: &Schedule, stages: &[Stage]) -> Vec<Held> {
    let held = |stages: &[Stage]| held(job, layout, program, stages);
    let packed = held(stages);
    let is_short = packed.iter().any(|rank| rank.at_once.total() > job.memory);
    if !is_short || !matches!(job.compute.packing, Packing::Auto(_)) {
        return packed;
    }
    // A run leaves the copies out where memory is short.
    let without = |s: &Stage| {
        let none =
            StageBytes { packed_forward: 0, packed_backward: 0, packed_in_forward: 0, ..s.bytes };
        Stage { bytes: none, ..*s }
    };
    held(&stages.iter().map(without).collect::<Vec<_>>())
}

fn held(job: &Job, layout: &Layout, program: &Schedule, stages: &[Stage]) -> Vec<Held> {
    let bytes: Vec<_> = stages.iter().map(|s| s.bytes).collect();
    let held = predict_both(program, &bytes);
    let late = program.validates_late().then(|| predict_warm_up(program, &bytes));
    let of_rank = |(rank, [peaks, at_once]): (usize, [HeldBytes; 2])| {
        let mine = program.stages_of(rank);
        let always = Always::new(job, layout, stages, &mine, &program.placement);
        let warm_up = late.as_ref().map(|warm_ups| warm_ups[rank]);
        Held { at_once: always.with(at_once, warm_up), peaks: always.peaks(peaks, late.is_some()) }
    };
    held.into_iter().enumerate().map(of_rank).collect()
}

/// What a rank holds all the time.
struct Always {
    /// All of its stages' gradients, and parameters but for those that are there `twice`.
    shard: u64,
    twice: u64,
    moments: u64,
    /// While the optimizer works, and nothing else is held.
    meanwhile: u64,
    /// What is kept of an update to go back: parameters, what the optimizer keeps, the gradient.
    rollback: u64,
    /// Of that, the gradient.
    own: u64,
}

impl Always {
    fn new(
        job: &Job,
        layout: &Layout,
        stages: &[Stage],
        mine: &[usize],
        placement: &[usize],
    ) -> Always {
        let d = layout.zero3 as u64;
        let owners = if layout.zero1 { layout.dp as u64 } else { 1 };
        let shard = mine.iter().map(|s| stages[*s].elements * 4).sum::<u64>() / d;
        let update = mine.iter().map(|s| stages[*s].update).max().unwrap_or(0);
        let last = placement.len() - 1;
        let parted = placement[0] != placement[last];
        let embedding = tied_shard(job, layout);
        let has = mine.contains(&0) || mine.contains(&last);
        let tied = if parted && has { 2 * embedding / owners } else { 0 };
        let state = mine.iter().map(|s| stages[*s].state_most).sum::<u64>();
        // Both layers of a tied weight share it and what is kept of it.
        let twice = if !parted && has { embedding } else { 0 };
        let moments = state - job.moments.bytes(twice / 4, 0) / owners;
        let own = (shard - twice) / owners;
        let rollback = 2 * own + moments;
        Always { shard, twice, moments, meanwhile: update.max(tied), rollback, own }
    }

    /// What is held where most is: while it computes, while it updates, or in the `warm_up` of a
    /// step whose predecessor's update may have to be taken back.
    fn with(&self, held: HeldBytes, warm_up: Option<HeldBytes>) -> RankBytes {
        let gradient_shard = self.shard - self.twice;
        let updating = HeldBytes { gradient_shard, ..HeldBytes::default() };
        // The gradient that is kept to go back is counted as such already.
        let kept = if warm_up.is_some() { self.rollback.saturating_sub(self.own) } else { 0 };
        let at_work = self.moments + self.meanwhile;
        let moments = [(held, self.moments, 0), (updating, at_work, kept)].into_iter();
        let moments = moments.chain(warm_up.map(|held| (held, self.moments, self.rollback)));
        let (held, optimizer, rollback) = moments
            .rev()
            .max_by_key(|(held, optimizer, rollback)| held.total() + optimizer + rollback)
            .expect("two or three");
        self.bytes(held, optimizer, rollback)
    }

    /// The most of each kind, where `late` says whether updates are validated late.
    fn peaks(&self, peaks: HeldBytes, late: bool) -> RankBytes {
        let rollback = if late { self.rollback } else { 0 };
        self.bytes(peaks, self.moments + self.meanwhile, rollback)
    }

    fn bytes(&self, held: HeldBytes, optimizer: u64, rollback: u64) -> RankBytes {
        RankBytes {
            parameters: self.shard - self.twice,
            gradient_shard: held.gradient_shard,
            optimizer,
            rollback,
            gathered: held.gathered,
            packed_weights: held.packed_weights,
            gradient: held.gradient,
            activation: held.activation,
            weight_stash: held.weight_stash,
            communication: held.communication,
        }
    }
}

/// Bytes of a rank's shard of the weight that embedding and head of a tied model have both.
fn tied_shard(job: &Job, layout: &Layout) -> u64 {
    let decoder = &job.model.decoder;
    let owners = if layout.zero1 { layout.dp } else { 1 };
    let pieces = (128 * layout.zero3 * owners) as u64;
    let whole = ((decoder.rows() * decoder.hidden) as u64).next_multiple_of(pieces);
    if decoder.tied { whole / layout.zero3 as u64 * 4 } else { 0 }
}

/// Bytes that some rank holds at least, in closed form: parameters and moments, gradients, as the
/// optimizer finds them, and the activations that its schedule keeps of its smallest stage and the
/// weights of that stage, with the gradients where there are some by then. No layout that fits is
/// above its memory by this.
pub(crate) fn at_least(job: &Job, layout: &Layout, stages: &[Stage]) -> u64 {
    // Rank 0 keeps the most in flight, but no inputs of its first stage, which are tokens: rank 1
    // does.
    let folded = matches!(layout.schedule, "zeropp" | "zb-v" | "v-half" | "v-min");
    let ranks = if folded { 1 } else { layout.pp.min(2) };
    (0..ranks).map(|rank| rank_at_least(job, layout, stages, rank)).max().unwrap_or(0)
}

fn rank_at_least(job: &Job, layout: &Layout, stages: &[Stage], rank: usize) -> u64 {
    let indices = stages_of(rank, layout);
    let has_both = [0, stages.len() - 1].iter().all(|s| indices.contains(s));
    let mine: Vec<&Stage> = indices.into_iter().map(|s| &stages[s]).collect();
    let d = layout.zero3 as u64;
    let owners = if layout.zero1 { layout.dp as u64 } else { 1 };
    let shard = mine.iter().map(|s| s.elements * 4).sum::<u64>() / d;
    let state = mine.iter().map(|s| s.state).sum::<u64>() / d;
    let twice = if has_both { tied_shard(job, layout) } else { 0 };
    let kept_twice = job.moments.bytes(twice / 4, 0) / owners;
    let fixed = shard - twice + state / owners - kept_twice;
    let least = |of: &dyn Fn(&Stage) -> u64| mine.iter().map(|s| of(s)).min().unwrap_or(0);
    // Stage 0 keeps no input: tokens are not counted.
    let inputs = mine.iter().map(|s| s.bytes.input).filter(|n| *n > 0).min().unwrap_or(0);
    let (whole, inputs_kept) = kept(rank, layout);
    let each = least(&|s| s.bytes.activation);
    let computing = whole * each + inputs_kept * inputs + least(&|s| s.bytes.weights);
    // Other kinds than zeropp reduce a stage once a step.
    let gradients = if layout.schedule == "zeropp" { shard } else { shard * d };
    let computing = match is_full_again(layout) {
        true => gradients + computing,
        // The first W makes a whole gradient, when the first of the activations has gone.
        false => computing.max(computing - whole.min(1) * each + least(&|s| s.elements * 4 / d)),
    };
    fixed + shard.max(computing)
}

/// Whether a rank holds as many activations again after its first W of every stage: whole
/// gradients or their shards are there then.
fn is_full_again(layout: &Layout) -> bool {
    match layout.schedule {
        // A last unit may be a smaller one.
        "zeropp" => layout.micro_batches >= 2 * layout.unit,
        "bf-pp" => false,
        _ => layout.micro_batches >= 2 * layout.pp,
    }
}

fn stages_of(rank: usize, layout: &Layout) -> Vec<usize> {
    let p = layout.pp;
    let folded = matches!(layout.schedule, "zb-v" | "v-half" | "v-min");
    let stage = |v: usize| if folded && v % 2 == 1 { (v + 1) * p - 1 - rank } else { v * p + rank };
    (0..layout.virtual_stages).map(stage).collect()
}

/// Micro-batches of a stage that rank 0 or 1 holds at once: those of which it keeps everything, and
/// those of which it keeps the input.
fn kept(rank: usize, layout: &Layout) -> (u64, u64) {
    let (p, v) = (layout.pp, layout.virtual_stages);
    let (b, u) = (layout.micro_batches, layout.unit.min(layout.micro_batches));
    let full = layout.recompute == Recompute::Full;
    let most = b * v;
    // In all, and those among them that may be of stage 0.
    let (at_once, first) = match layout.schedule {
        "zeropp" => {
            let last = u.min(2 * p - 1);
            return match full {
                // Stage 0's inputs are tokens.
                true => (last as u64, (v.saturating_sub(2) * u) as u64),
                false => (((v - 1) * u + last) as u64, 0),
            };
        }
        "bf-pp" => (most, b),
        "1f1b" | "zb-h1" => (p - rank, p),
        "interleaved" | "interleaved-zb" => (v * p - rank, v * p),
        "zb-v" => (p, p),
        "v-half" => (p.div_ceil(2), p),
        "v-min" => (p.div_ceil(3), p),
        _ => (1, 1),
    };
    let at_once = at_once.min(most).min(if v == 1 { b } else { most });
    if !full {
        return (at_once as u64, 0);
    }
    // Where stages are recomputed one of them is whole at a time.
    let without = if rank == 0 { first } else { 1 };
    (1, at_once.saturating_sub(without) as u64)
}
