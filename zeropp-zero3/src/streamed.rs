//! The update of what a rank has out: a piece of what is there of a layer's parameters, state and
//! gradient is read, updated and written, the next one is read meanwhile, and the one before is
//! written.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::CommResult;
use zeropp_core::cpu_tensor::on_cpu;
use zeropp_core::optimizer::{Cut, Out};

use crate::ahead::{Ahead, KeptRead, PartRead, Parts};
use crate::layer_state::elements;
use crate::optimizer::{Optimizer, ShardRange, StepOutcome};
use crate::returning::Updated;
use crate::rollback::UpdateInput;
use crate::rule::StepScale;
use crate::stage::ShardedStage;
use crate::state_file::StateFile;
use crate::words::{PartOut, Reading, Words, Written, own_copy};

/// Some of the elements of a layer that the rank updates.
struct PieceOf {
    /// The stage's place among the rank's.
    stage: usize,
    layer: usize,
    range: Range<usize>,
}

/// A piece of a layer on its way into memory.
struct PieceRead {
    place: ShardRange,
    /// Parameters that are in the file.
    param: Option<PartRead>,
    grad: Reading,
    kept: KeptRead,
}

/// An update of all that a step has gradients of.
struct AtOnce<'a> {
    optimizer: &'a mut Optimizer,
    stages: &'a mut [ShardedStage],
    pieces: Vec<PieceOf>,
    scale: &'a StepScale,
    outcome: &'a mut StepOutcome,
}

impl Optimizer {
    /// Bytes of the pieces that a step has in memory at once; 0 where nothing is out.
    pub(crate) fn piece_bytes(&self, stages: &[ShardedStage]) -> u64 {
        if self.file.as_ref().is_none_or(|file| file.is_host && file.out == Out::Behind) {
            return 0;
        }
        let all = stages.iter().flat_map(|s| (0..s.layers.len()).map(move |layer| (s, layer)));
        let at = |(s, layer): &(&ShardedStage, usize)| (s.index(), *layer);
        let own = all.filter(|of| !self.is_shared(at(of)) && !self.is_returned(at(of)));
        own.map(|(stage, layer)| self.pieces_of(stage, layer).1).max().unwrap_or(0)
    }

    /// The pieces of a layer, and bytes of those that are there at once.
    pub(crate) fn pieces_of(&self, stage: &ShardedStage, layer: usize) -> (Vec<Range<usize>>, u64) {
        let owners = if self.zero1 { self.groups.replica.size() } else { 1 };
        let file = self.file.as_ref();
        let cut = Cut {
            zero3: self.groups.zero3.size(),
            owners,
            zero1: self.zero1,
            out: file.map_or(Out::Nothing, |file| file.out),
            host: file.is_some_and(|file| file.is_host),
        };
        self.owned(stage, layer).pieces(&self.options.parameters, cut)
    }

    /// Updates `stages` where what the optimizer keeps lies.
    pub(crate) fn update_in_file(
        &mut self,
        stages: &mut [ShardedStage],
        scale: &StepScale,
        outcome: &mut StepOutcome,
        file: &Arc<StateFile>,
    ) -> CommResult<()> {
        crate::tied::release(stages, self.options.tie);
        let mut pieces: Vec<PieceOf> = Vec::new();
        for (s, stage) in stages.iter().enumerate() {
            for (layer, _) in stage.layers.iter().enumerate().filter(|(_, l)| l.grad.is_some()) {
                let of_layer = self.pieces_of(stage, layer).0;
                pieces.extend(of_layer.into_iter().map(|range| PieceOf { stage: s, layer, range }));
            }
        }
        let mut ahead = Ahead::of(pieces.len(), None);
        let mut update =
            AtOnce { optimizer: self, stages: &mut *stages, pieces, scale, outcome: &mut *outcome };
        for _ in 0..update.pieces.len() {
            ahead.step(&mut update, file, true)?;
        }
        file.settle();
        file.check()?;
        self.return_parameters(stages, outcome)?;
        file.check()
    }
}

impl Parts for AtOnce<'_> {
    type Read = PieceRead;

    fn start(&self, part: usize) -> PieceRead {
        let PieceOf { stage: s, layer, range } = &self.pieces[part];
        let (stage, optimizer) = (&self.stages[*s], &*self.optimizer);
        let place = optimizer.place(stage, *layer);
        let words = optimizer.owned(stage, *layer).words(range, &optimizer.options.parameters);
        let (shard, state) = (&stage.layers[*layer], &optimizer.state[*s][*layer]);
        let place = place.part(range);
        let grad = shard.grad.as_ref().expect("a piece of a layer with a gradient");
        // What is in memory would be copied as a whole, were a part of it held meanwhile.
        let param = shard.param.out().map(|_| PartRead::start(&shard.param, &place.range));
        PieceRead {
            place,
            param,
            grad: grad.start_read(range.clone()),
            kept: KeptRead::start(&state.words, state.ema.as_ref(), &words, range),
        }
    }

    fn update(&mut self, part: usize, read: PieceRead) -> CommResult<Vec<Written>> {
        let PieceRead { place, param, grad, kept } = read;
        let (stage, optimizer) = (&mut self.stages[self.pieces[part].stage], &mut *self.optimizer);
        let (param, in_file) = param.map(|read| (read.reading.wait(), read.part)).unzip();
        let grad = grad.wait();
        let shard = &mut stage.layers[place.layer];
        let layout = shard.weights.layout().clone();
        let param = param.unwrap_or_else(|| match place.range.len() == place.shard {
            true => shard.take_param().into_tensor(),
            false => own_part(&shard.param, &place.range),
        });
        let owned = place.owned(&layout);
        let mut kept = kept.here(owned, &optimizer.options.parameters);
        let (input, state) = (UpdateInput { param, grad }, &mut kept.state);
        let scale = Some(self.scale);
        let updated = optimizer.update_layer(stage, &place, input, state, scale, self.outcome)?;
        let (range, param) = match updated {
            Updated::Here(param) => (place.range.clone(), param),
            // Gathered memory is the engine's.
            Updated::Gathered(param, elements) => {
                let gathered = param.wait()?;
                if in_file.is_none() {
                    drop(stage.layers[place.layer].take_param());
                }
                (0..elements, own_copy(&gathered))
            }
        };
        let (mut written, shard) = (Vec::new(), &mut stage.layers[place.layer]);
        match in_file {
            Some(PartOut { words, .. }) => {
                written.push(Written { part: PartOut { words, range }, values: param });
            }
            None if range.len() == place.shard => shard.set_param(param, &optimizer.meter),
            None => {
                let values = on_cpu(&param).expect("pieces are for ranks on CPUs");
                shard.write_param(range, values.as_slice(), &optimizer.meter);
            }
        }
        written.extend(kept.written());
        Ok(written)
    }
}

fn own_part(words: &Words, range: &Range<usize>) -> Tensor<1> {
    own_copy(&elements(words.here().expect("in the file or in memory"), range.clone()))
}
