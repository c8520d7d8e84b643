//! The update of what is in a rank's file: a piece of what is there of a layer's parameters, state
//! and gradient is read, updated and written, the next one is read meanwhile, and the one before is
//! written.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::CommResult;
use zeropp_core::cpu_tensor::{into_vec, on_cpu};
use zeropp_core::optimizer::Out;

use crate::layer_state::{LayerState, elements};
use crate::optimizer::{Optimizer, ShardRange, StepOutcome};
use crate::returning::Updated;
use crate::rollback::UpdateInput;
use crate::rule::StepScale;
use crate::stage::ShardedStage;
use crate::state_file::{StateFile, StatePlace};
use crate::words::{Reading, Words, own_copy};

/// A piece of a layer on its way into memory.
struct PieceRead {
    /// The stage's place among the rank's.
    stage: usize,
    place: ShardRange,
    /// Where parameters, state and mean lie in the file, as far as they are there.
    param: Option<Arc<StatePlace>>,
    words: Vec<(Arc<StatePlace>, Range<usize>)>,
    ema: Option<(Arc<StatePlace>, Range<usize>)>,
    reading: [Vec<Reading>; 4],
}

/// Some of the elements of a layer that the rank updates.
struct PieceOf {
    /// The stage's place among the rank's.
    stage: usize,
    layer: usize,
    range: Range<usize>,
}

impl Optimizer {
    /// Bytes of the pieces that a step has in memory at once; 0 without a file.
    pub(crate) fn piece_bytes(&self, stages: &[ShardedStage]) -> u64 {
        let Some(file) = &self.file else { return 0 };
        let all = stages.iter().flat_map(|s| (0..s.layers.len()).map(move |layer| (s, layer)));
        let at = |(s, layer): &(&ShardedStage, usize)| (s.index(), *layer);
        let own = all.filter(|of| !self.is_shared(at(of)) && !self.is_returned(at(of)));
        own.map(|(stage, layer)| self.pieces_of(stage, layer, file.out).1).max().unwrap_or(0)
    }

    pub(crate) fn pieces_of(
        &self,
        stage: &ShardedStage,
        layer: usize,
        out: Out,
    ) -> (Vec<Range<usize>>, u64) {
        let zero3 = self.groups.zero3.size();
        self.owned(stage, layer).pieces(&self.options.parameters, zero3, self.zero1, out)
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
                let of_layer = self.pieces_of(stage, layer, file.out).0;
                pieces.extend(of_layer.into_iter().map(|range| PieceOf { stage: s, layer, range }));
            }
        }
        let mut next = pieces.first().map(|piece| self.start_piece(stages, piece));
        for i in 0..pieces.len() {
            let piece = next.take().expect("started");
            next = pieces.get(i + 1).map(|piece| self.start_piece(stages, piece));
            let stage = &mut stages[piece.stage];
            file.write(self.updated_piece(stage, piece, scale, outcome)?);
        }
        file.settle();
        file.check()?;
        self.return_parameters(stages, outcome)?;
        file.check()
    }

    fn start_piece(&self, stages: &[ShardedStage], piece: &PieceOf) -> PieceRead {
        let PieceOf { stage: s, layer, range } = piece;
        let stage = &stages[*s];
        let place = self.place(stage, *layer);
        let words = self.owned(stage, *layer).words(range, &self.options.parameters);
        let (shard, state) = (&stage.layers[*layer], &self.state[*s][*layer]);
        let place = place.part(range);
        let grad = shard.grad.as_ref().expect("a piece of a layer with a gradient");
        let read = |all: &Words, range: &Range<usize>| all.start_read(range.clone());
        let states = || state.words.iter().zip(&words);
        // What is in memory would be copied as a whole, were a part of it held meanwhile.
        let of_param = shard.param.out().map(|_| read(&shard.param, &place.range));
        let reading = [
            of_param.into_iter().collect(),
            vec![read(grad, range)],
            states().map(|(all, here)| read(all, here)).collect(),
            state.ema.iter().map(|ema| read(ema, range)).collect(),
        ];
        let out = |words: &Words| words.out().expect("what is kept is in the file").clone();
        PieceRead {
            stage: *s,
            place,
            param: shard.param.out().cloned(),
            words: states()
                .filter(|(_, here)| !here.is_empty())
                .map(|(all, here)| (out(all), here.clone()))
                .collect(),
            ema: state.ema.as_ref().map(|ema| (out(ema), range.clone())),
            reading,
        }
    }

    /// Updates a piece, and says what is to be written where.
    fn updated_piece(
        &mut self,
        stage: &mut ShardedStage,
        piece: PieceRead,
        scale: &StepScale,
        outcome: &mut StepOutcome,
    ) -> CommResult<Vec<(zeropp_core::files::ScratchPlace, Vec<f32>)>> {
        let PieceRead { place, param: all, words: of_words, ema: of_ema, reading, .. } = piece;
        let [param, grad, words, ema] =
            reading.map(|all| all.into_iter().map(Reading::wait).collect::<Vec<Tensor<1>>>());
        let first = |mut all: Vec<Tensor<1>>| all.pop();
        let grad = first(grad).expect("read");
        let here = |param: &Tensor<1>| own_copy(&elements(param, place.range.clone()));
        let param = first(param).or_else(|| stage.layers[place.layer].param.here().map(here));
        let param = param.expect("in the file or in memory");
        let layout = stage.layers[place.layer].weights.layout().clone();
        let owned = place.owned(&layout);
        let mut state = LayerState::here(owned, &self.options.parameters, words, first(ema));
        let input = UpdateInput { param, grad };
        let updated = self.update_layer(stage, &place, input, &mut state, Some(scale), outcome)?;
        let (range, param) = match updated {
            Updated::Here(param) => (place.range.clone(), param),
            // Gathered memory is the engine's.
            Updated::Gathered(param, elements) => (0..elements, param.wait()?),
        };
        let mut written = Vec::new();
        match all {
            Some(all) => written.push((all.part(range), into_vec(param))),
            None => {
                let values = on_cpu(&param).expect("files are for ranks on CPUs");
                stage.layers[place.layer].write_param(range, values.as_slice(), &self.meter);
            }
        }
        let words = state.words.into_iter().filter(|words| words.len() > 0);
        let places = of_words.into_iter().zip(words).chain(of_ema.into_iter().zip(state.ema));
        written.extend(
            places.map(|((all, range), words)| (all.part(range), into_vec(words.into_tensor()))),
        );
        Ok(written)
    }
}
