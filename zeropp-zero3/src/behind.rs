//! Updates whose optimizer state is in a file and that look at no whole parameter: a thread of
//! their own does them while the rank begins the next step. A stage's parameters are waited for
//! where they are read next, which is where it is gathered.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::CommResult;
use zeropp_core::cpu_tensor::{from_vec, into_vec, on_cpu};
use zeropp_core::optimizer::Out;
use zeropp_core::params::FlatLayout;

use crate::layer_state::{LayerState, elements};
use crate::optimizer::{Optimizer, ShardRange};
use crate::rule::{ParameterGroups, StepScale};
use crate::sharers::UpdateGroup;
use crate::stage::ShardedStage;
use crate::state_file::StateFile;
use crate::words::{Due, Reading, Words};

/// What all pieces of an update have in common.
struct UpdateOf<'a> {
    parameters: &'a ParameterGroups,
    scale: &'a StepScale,
    sharers: UpdateGroup<'a>,
}

/// A layer of such an update.
struct LayerBehind {
    place: ShardRange,
    layout: Arc<FlatLayout>,
    pieces: Vec<Range<usize>>,
    /// The words that are kept of each of them.
    words: Vec<Vec<Range<usize>>>,
    state: Vec<Words>,
    ema: Option<Words>,
    grad: Option<Tensor<1>>,
    param: Vec<f32>,
    due: Due,
    file: Arc<StateFile>,
}

impl Optimizer {
    /// Whether an update of what `file` has is done behind the next step.
    pub(crate) fn is_behind(&self, file: &StateFile) -> bool {
        let is_tied = self.options.tie.is_some() || self.options.tied_rows.is_some();
        let at_once = self.zero1 || is_tied || self.watched.is_some();
        file.out == Out::Behind && !at_once && self.options.parameters.state_rule().is_elementwise()
    }

    /// Starts the update of `stages`, in the order in which they are gathered.
    pub(crate) fn start_behind(
        &mut self,
        stages: &mut [ShardedStage],
        scale: &StepScale,
        file: &Arc<StateFile>,
    ) -> CommResult<()> {
        let mut all = Vec::new();
        for (stage, states) in stages.iter_mut().zip(&self.state) {
            for (layer, state) in states.iter().enumerate() {
                if stage.layers[layer].grad.is_some() {
                    all.push(self.layer_behind(stage, layer, state, file));
                }
            }
        }
        let (groups, parameters) = (self.groups.clone(), self.options.parameters.clone());
        let (scale, of) = (*scale, file.clone());
        file.start_update(move || {
            let sharers = UpdateGroup { groups: &groups, zero1: false, gathers: 0, sent_bytes: 0 };
            update_all(all, &of, UpdateOf { parameters: &parameters, scale: &scale, sharers });
        })
    }

    /// Returns once no update is under way.
    pub(crate) fn wait_for_update(&self) {
        self.file.iter().for_each(|file| file.wait_for_update());
    }

    fn layer_behind(
        &self,
        stage: &mut ShardedStage,
        layer: usize,
        state: &LayerState,
        file: &Arc<StateFile>,
    ) -> LayerBehind {
        let (place, parameters) = (self.place(stage, layer), &self.options.parameters);
        let owned = self.owned(stage, layer);
        let pieces = self.pieces_of(stage, layer, file.out).0;
        let words = pieces.iter().map(|range| owned.words(range, parameters)).collect();
        let meter = stage.meter.clone();
        let shard = &mut stage.layers[layer];
        let layout = shard.weights.layout().clone();
        let (param, grad, due) = shard.update_behind(&meter);
        LayerBehind {
            place,
            layout,
            pieces,
            words,
            state: state.words.clone(),
            ema: state.ema.clone(),
            grad: Some(grad),
            param: into_vec(param),
            due,
            file: file.clone(),
        }
    }
}

impl LayerBehind {
    fn start_read(&self, piece: usize) -> [Vec<Reading>; 2] {
        let words = self.state.iter().zip(&self.words[piece]);
        let ema = self.ema.iter().map(|ema| ema.start_read(self.pieces[piece].clone()));
        [words.map(|(all, here)| all.start_read(here.clone())).collect(), ema.collect()]
    }

    /// Updates a piece of which this is kept, and says what is to be written where.
    fn update(
        &mut self,
        piece: usize,
        kept: [Vec<Reading>; 2],
        of: &mut UpdateOf<'_>,
    ) -> Vec<(zeropp_core::files::ScratchPlace, Vec<f32>)> {
        let range = self.pieces[piece].clone();
        let [words, ema] = kept.map(|all| all.into_iter().map(Reading::wait).collect::<Vec<_>>());
        let place = self.place.part(&range);
        let owned = place.owned(&self.layout);
        let mut state = LayerState::here(owned, of.parameters, words, ema.into_iter().next());
        let param = from_vec(self.param[range.clone()].to_vec(), [range.len()]);
        let grad = elements(self.grad.as_ref().expect("until all is updated"), range.clone());
        let UpdateOf { parameters, scale, sharers } = of;
        let updated = state.update(owned, param, &grad, parameters, scale, sharers);
        let updated = updated.expect("elements by themselves are no collective");
        let updated = on_cpu(&updated).expect("files are for ranks on CPUs");
        self.param[range.clone()].copy_from_slice(updated.as_slice());
        let places = self.state.iter().zip(self.words[piece].iter().cloned());
        let places = places.chain(self.ema.iter().map(|ema| (ema, range.clone())));
        places
            .zip(state.words.into_iter().chain(state.ema))
            .filter_map(|((all, range), words)| {
                let out = all.out().filter(|_| !range.is_empty())?;
                Some((out.part(range), into_vec(words.into_tensor())))
            })
            .collect()
    }

    /// All of it is updated.
    fn end(&mut self) {
        self.grad = None;
        let n = self.param.len();
        // Nobody else sets it.
        let _ = self.due.set(from_vec(std::mem::take(&mut self.param), [n]));
    }
}

/// Who waits for parameters whose update has panicked would wait forever.
impl Drop for LayerBehind {
    fn drop(&mut self) {
        if self.due.get().is_none() {
            self.file.note(&io::Error::other("the update of a layer has panicked"));
            self.end();
        }
    }
}

fn update_all(mut all: Vec<LayerBehind>, file: &StateFile, mut update: UpdateOf<'_>) {
    let of = |(layer, all): (usize, &LayerBehind)| (0..all.pieces.len()).map(move |p| (layer, p));
    let pieces: Vec<(usize, usize)> = all.iter().enumerate().flat_map(of).collect();
    let mut next = pieces.first().map(|(layer, piece)| all[*layer].start_read(*piece));
    for (i, (layer, piece)) in pieces.iter().enumerate() {
        let kept = next.take().expect("started");
        next = pieces.get(i + 1).map(|(layer, piece)| all[*layer].start_read(*piece));
        let layer = &mut all[*layer];
        file.write(layer.update(*piece, kept, &mut update));
        if piece + 1 == layer.pieces.len() {
            layer.end();
        }
    }
    file.settle();
}
