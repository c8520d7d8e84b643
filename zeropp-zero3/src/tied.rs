//! A tied weight whose embedding and head are on one rank: it has the parameters once, and keeps
//! what the optimizer keeps of them once. Each stage still makes a gradient of its own, of which
//! [`Optimizer`](crate::Optimizer) adds both up in one order on every mesh (ADR 48).

use crate::stage::ShardedStage;

/// A weight that two stages hold: the embedding's and the head's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tie {
    /// Stage and layer of the embedding.
    pub first: (usize, usize),
    /// Stage and layer of the head.
    pub last: (usize, usize),
    /// Pipeline ranks of the two.
    pub ranks: (usize, usize),
}

impl Tie {
    /// Whether one rank has both.
    pub(crate) fn is_on_one_rank(&self) -> bool {
        self.ranks.0 == self.ranks.1
    }
}

/// Gives up the head's parameters and gradient among `stages` where this rank has both layers, so
/// that the embedding's are its alone; until [`share`] there are no parameters of the head.
pub(crate) fn release(stages: &mut [ShardedStage], tie: Option<Tie>) {
    if let Some((_, (stage, layer))) = places(stages, tie) {
        stages[stage].layers[layer].release();
    }
}

/// Makes the head's parameters those of the embedding where this rank has both layers.
pub(crate) fn share(stages: &mut [ShardedStage], tie: Option<Tie>) {
    let Some(((s, l), (stage, layer))) = places(stages, tie) else { return };
    let param = stages[s].layers[l].param.clone();
    let meter = stages[stage].meter.clone();
    stages[stage].layers[layer].share_param(param, &meter);
}

/// Where in `stages` embedding and head are: the stage's place in them, and the layer's in it.
fn places(stages: &[ShardedStage], tie: Option<Tie>) -> Option<((usize, usize), (usize, usize))> {
    let tie = tie.filter(Tie::is_on_one_rank)?;
    let stage = |at: (usize, usize)| stages.iter().position(|s| s.index() == at.0);
    Some(((stage(tie.first)?, tie.first.1), (stage(tie.last)?, tie.last.1)))
}
