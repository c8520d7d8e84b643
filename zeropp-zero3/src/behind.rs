//! Updates whose optimizer state is out and that look at no whole parameter: they are done while
//! the rank begins the next step. A stage's parameters are waited for where they are read next,
//! which is where it is gathered.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::CommResult;
use zeropp_comm::groups::Groups;
use zeropp_core::cpu_tensor::{from_vec, into_vec, on_cpu};
use zeropp_core::optimizer::Out;
use zeropp_core::params::FlatLayout;

use crate::ahead::{Ahead, KeptRead, Parts};
use crate::layer_state::{LayerState, elements};
use crate::optimizer::{Optimizer, ShardRange};
use crate::rule::{ParameterGroups, StepScale};
use crate::sharers::UpdateGroup;
use crate::stage::ShardedStage;
use crate::state_file::StateFile;
use crate::under_way::{Giver, UnderWay, Work};
use crate::words::{Words, Written, own_copy, put};

/// Such an update.
pub(crate) struct UpdateBehind {
    layers: LayersBehind,
    ahead: Ahead<Vec<KeptRead>>,
    file: Arc<StateFile>,
}

struct LayersBehind {
    layers: Vec<LayerBehind>,
    /// The pieces that come in together.
    parts: Vec<Vec<PieceBehind>>,
    parameters: ParameterGroups,
    scale: StepScale,
    groups: Groups,
}

/// A layer of such an update.
struct LayerBehind {
    /// Its stage among the rank's.
    stage: usize,
    place: ShardRange,
    layout: Arc<FlatLayout>,
    state: Vec<Words>,
    ema: Option<Words>,
    /// None once all is updated, as `giver`.
    grad: Option<Tensor<1>>,
    param: Tensor<1>,
    giver: Option<Giver>,
    file: Arc<StateFile>,
}

struct PieceBehind {
    layer: usize,
    range: Range<usize>,
    /// The words that are kept of it.
    words: Vec<Range<usize>>,
}

impl Optimizer {
    /// Starts reading what the first update beside the next step takes, where a device has that on
    /// its host: beside the step's last W and reduction.
    pub fn read_ahead(&mut self, stages: &[ShardedStage]) {
        let reads = |file: &Arc<StateFile>| file.is_host && file.out == Out::Behind;
        // A save may still read it, and where layers are looked at nothing is beside a step.
        let is_free = self.held_back.is_none() && self.watched.is_none() && self.first.is_none();
        if is_free && self.file.as_ref().is_some_and(reads) {
            self.wait_for_update();
            let mut all = stages.iter().enumerate().map(|(s, stage)| self.first_read(s, stage));
            self.first = all.find(|read| !read.is_empty());
        }
    }

    fn first_read(&self, s: usize, stage: &ShardedStage) -> Vec<KeptRead> {
        let read = |(l, state): (usize, &LayerState)| {
            let owned = self.owned(stage, l);
            let words = owned.words(&(0..owned.len), &self.options.parameters);
            KeptRead::start(&state.words, state.ema.as_ref(), &words, &(0..owned.len))
        };
        let kept = self.state[s].iter().enumerate();
        let updated = |l: usize| stage.layers[l].trains() && self.owned(stage, l).len > 0;
        kept.filter(|(l, _)| updated(*l)).map(read).collect()
    }

    /// Puts that out again: there is no update.
    pub(crate) fn put_back(&mut self) {
        if let (Some(file), Some(first)) = (&self.file, self.first.take()) {
            put(file, first.into_iter().flat_map(KeptRead::unchanged).collect());
            file.settle();
        }
    }

    /// Starts the update of `stages`, in the order in which they are gathered.
    pub(crate) fn start_behind(
        &mut self,
        stages: &mut [ShardedStage],
        scale: &StepScale,
        file: &Arc<StateFile>,
    ) -> CommResult<()> {
        let update = Arc::new(UnderWay::default());
        let (mut layers, mut parts) = (Vec::new(), Vec::new());
        for (s, stage) in stages.iter_mut().enumerate() {
            let mut of_stage = Vec::new();
            for (l, state) in self.state[s].iter().enumerate() {
                if stage.layers[l].grad.is_none() {
                    continue;
                }
                let owned = self.owned(stage, l);
                let piece = |range: Range<usize>| {
                    let words = owned.words(&range, &self.options.parameters);
                    PieceBehind { layer: layers.len(), range, words }
                };
                of_stage.extend(self.pieces_of(stage, l).0.into_iter().map(piece));
                let (place, meter) = (self.place(stage, l), &self.meter);
                let shard = &mut stage.layers[l];
                let layout = shard.weights.layout().clone();
                let (param, grad, giver) = shard.update_behind(s, &update, meter);
                layers.push(LayerBehind {
                    stage: s,
                    place,
                    layout,
                    state: state.words.clone(),
                    ema: state.ema.clone(),
                    grad: Some(grad),
                    param,
                    giver: Some(giver),
                    file: file.clone(),
                });
            }
            match file.is_host {
                true if of_stage.is_empty() => {}
                true => parts.push(of_stage),
                false => parts.extend(of_stage.into_iter().map(|piece| vec![piece])),
            }
        }
        let first = self.first.take();
        assert!(first.as_ref().is_none_or(|first| first.len() == parts[0].len()), "all train");
        let ahead = Ahead::of(parts.len(), first);
        let (parameters, groups) = (self.options.parameters.clone(), self.groups.clone());
        let layers = LayersBehind { layers, parts, parameters, scale: *scale, groups };
        let work = UpdateBehind { layers, ahead, file: file.clone() };
        self.under_way = Some(update.clone());
        update.start(Box::new(work), !file.is_host)
    }

    /// Returns once no update is under way.
    pub(crate) fn wait_for_update(&self) {
        self.under_way.iter().for_each(|update| update.finish());
    }

    /// Gives back the memory of what went out last, where an update is done: as the first W begins.
    pub fn let_go(&self) {
        self.under_way.iter().for_each(|update| update.settle());
    }
}

impl Work for UpdateBehind {
    fn stage(&self) -> Option<usize> {
        self.layers.stage(self.ahead.next())
    }

    fn read_ahead(&mut self) {
        self.ahead.read(&self.layers);
    }

    fn step(&mut self, may: &dyn Fn(usize) -> bool) {
        let reads_ahead = self.layers.stage(self.ahead.next() + 1).is_some_and(may);
        let done = self.ahead.step(&mut self.layers, &self.file, reads_ahead);
        done.expect("elements by themselves are no collective");
    }

    fn settle(&self) {
        self.file.settle();
    }
}

impl LayersBehind {
    fn stage(&self, part: usize) -> Option<usize> {
        self.parts.get(part).map(|pieces| self.layers[pieces[0].layer].stage)
    }
}

impl Parts for LayersBehind {
    type Read = Vec<KeptRead>;

    fn start(&self, part: usize) -> Vec<KeptRead> {
        let read = |piece: &PieceBehind| {
            let layer = &self.layers[piece.layer];
            KeptRead::start(&layer.state, layer.ema.as_ref(), &piece.words, &piece.range)
        };
        self.parts[part].iter().map(read).collect()
    }

    fn update(&mut self, part: usize, kept: Vec<KeptRead>) -> CommResult<Vec<Written>> {
        let mut written = Vec::new();
        for (piece, kept) in self.parts[part].iter().zip(kept) {
            let layer = &mut self.layers[piece.layer];
            let groups = &self.groups;
            let sharers = UpdateGroup { groups, zero1: false, gathers: 0, sent_bytes: 0 };
            let range = piece.range.clone();
            written.extend(layer.update(range, kept, &self.parameters, &self.scale, sharers)?);
        }
        Ok(written)
    }
}

impl LayerBehind {
    /// Updates a piece of which this is kept.
    fn update(
        &mut self,
        range: Range<usize>,
        kept: KeptRead,
        parameters: &ParameterGroups,
        scale: &StepScale,
        mut sharers: UpdateGroup<'_>,
    ) -> CommResult<Vec<Written>> {
        let (place, end) = (self.place.part(&range), range.end == self.place.range.len());
        let layout = self.layout.clone();
        let owned = place.owned(&layout);
        let mut kept = kept.here(owned, parameters);
        let is_all = range.len() == self.place.range.len();
        let param = match is_all {
            true => self.take_param(),
            false => own_copy(&elements(&self.param, range.clone())),
        };
        let grad = elements(self.grad.as_ref().expect("until all is updated"), range.clone());
        let updated = kept.state.update(owned, param, &grad, parameters, scale, &mut sharers)?;
        self.param = match on_cpu(&updated).filter(|_| !is_all) {
            Some(piece) => {
                let mut all = into_vec(self.take_param());
                all[range].copy_from_slice(piece.as_slice());
                let n = all.len();
                from_vec(all, [n])
            }
            None => updated,
        };
        if end {
            self.end();
        }
        Ok(kept.written())
    }

    fn take_param(&mut self) -> Tensor<1> {
        let nothing = Tensor::zeros([1], &self.param.device());
        std::mem::replace(&mut self.param, nothing)
    }

    /// All of it is updated.
    fn end(&mut self) {
        self.grad = None;
        let param = self.take_param();
        if let Some(giver) = self.giver.take() {
            // Nobody else sets it.
            let _ = giver.set(param);
        }
    }
}

/// Who waits for parameters whose update has panicked would wait forever.
impl Drop for LayerBehind {
    fn drop(&mut self) {
        if self.giver.is_some() {
            self.file.note(&io::Error::other("the update of a layer has panicked"));
            self.end();
        }
    }
}
