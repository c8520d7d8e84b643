//! A rank's optimizer state of one layer, and the update of its parameters.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::Tensor;
use zeropp_comm::CommResult;
use zeropp_core::cpu_tensor;
use zeropp_core::kernels::{lerp, zeros};
use zeropp_core::optimizer::{self, Cut};
use zeropp_core::params::{FlatLayout, ParamPlace};

use crate::exact::ExactSum;
use crate::norm::{add_host_squares, add_squares};
use crate::rule::{
    DeviceElements, EMA, Elements, Parameter, ParameterGroups, Role, StateTensor, StepScale,
    WholeParameter, WholeUpdate,
};
use crate::sharers::UpdateGroup;
use crate::state_file::StateFile;
use crate::words::{Words, pieces};

/// The part of a parameter, and of the padding after it, in what a rank owns of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Segment {
    /// Which of the layer's parameters.
    param: usize,
    /// Its elements, within what the rank owns.
    pub(crate) range: Range<usize>,
    /// The tensors that are kept of them.
    state: Vec<StateTensor>,
    /// Their words in each of the layer's.
    words: Vec<Range<usize>>,
}

/// A rank's part of a layer's flat buffer: elements `start..start + len`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OwnedRange<'a> {
    pub(crate) layout: &'a FlatLayout,
    pub(crate) role: Role,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl OwnedRange<'_> {
    fn elements(&self) -> optimizer::Owned<'_> {
        optimizer::Owned { layout: self.layout, start: self.start, len: self.len }
    }

    fn segments(&self, groups: &ParameterGroups) -> Vec<Segment> {
        let mut ends: Vec<usize> = Vec::new();
        let segment = |(param, range): (usize, Range<usize>)| {
            let spec = &self.layout.params[param].spec;
            let state = groups.rule.state(&groups.parameter(spec, self.role));
            ends.resize(ends.len().max(state.len()), 0);
            let place = |(end, tensor): (&mut usize, &StateTensor)| {
                let start = *end;
                *end += tensor.words(range.len());
                start..*end
            };
            let words = ends.iter_mut().zip(&state).map(place).collect();
            Segment { param, range, state, words }
        };
        self.elements().segments().map(segment).collect()
    }

    /// Where in each of the layer's tensors the words of some owned elements are, which begin and
    /// end at blocks.
    pub(crate) fn words(
        &self,
        range: &Range<usize>,
        groups: &ParameterGroups,
    ) -> Vec<Range<usize>> {
        let to = |len| OwnedRange { len, ..*self }.segments(groups);
        let (before, all) = (to(range.start), to(range.end));
        let count = all.iter().map(|s| s.state.len()).max().unwrap_or(0);
        (0..count).map(|tensor| words_of(&before, tensor)..words_of(&all, tensor)).collect()
    }

    /// The pieces that an update from a file has in memory one after the other, and bytes of those
    /// that are there at once.
    pub(crate) fn pieces(&self, groups: &ParameterGroups, cut: Cut) -> (Vec<Range<usize>>, u64) {
        let (elements, kept) = (self.elements(), self.kept(groups));
        (pieces(self.len, elements.piece(&kept, cut)), elements.piece_bytes(&kept, cut))
    }

    fn kept(&self, groups: &ParameterGroups) -> Vec<optimizer::Kept> {
        self.layout.params.iter().map(|p| groups.kept(&p.spec, self.role)).collect()
    }

    /// Whether any of the layer's parameters, on whatever rank, is updated as a whole, and whether
    /// by its root mean square.
    fn looks_at_whole(&self, groups: &ParameterGroups) -> (bool, bool) {
        let all = self.layout.params.iter().map(|p| groups.parameter(&p.spec, self.role));
        let wholes: Vec<WholeUpdate> = all.filter_map(|of| groups.rule.whole(&of)).collect();
        (!wholes.is_empty(), wholes.iter().any(|whole| whole.rms))
    }

    /// The owned elements whose sums over the batch are gradients; none where all are.
    pub(crate) fn gradients(&self, groups: &ParameterGroups) -> Option<Vec<Range<usize>>> {
        let has = |param: usize| {
            let spec = &self.layout.params[param].spec;
            groups.rule.has_gradient(&groups.parameter(spec, self.role))
        };
        let all = (0..self.layout.params.len()).all(has);
        let those = self.elements();
        let those = those.segments().filter(|(param, _)| has(*param)).map(|(_, range)| range);
        (!all).then(|| those.collect())
    }

    /// Bytes that computing the update takes, and those that it takes afterwards, in a group of
    /// `zero3` ranks, with ZeRO-1 or not.
    pub(crate) fn update_bytes(
        &self,
        groups: &ParameterGroups,
        zero3: usize,
        zero1: bool,
    ) -> [u64; 2] {
        let (kept, elements) = (self.kept(groups), self.elements());
        [elements.computing(&kept, zero3, zero1), elements.returning(zero3, zero1)]
    }
}

/// The state that is kept of a layer's owned elements.
pub(crate) struct LayerState {
    pub(crate) segments: Vec<Segment>,
    /// The words of the first tensor of each of them, those of the second, and so on.
    pub(crate) words: Vec<Words>,
    /// The moving average of the parameters, if there is one, f32.
    pub(crate) ema: Option<Words>,
}

/// A tensor that is kept of a piece of a parameter, and where its words begin in which.
pub(crate) struct KeptTensor<'a> {
    pub(crate) state: StateTensor,
    pub(crate) tensor: &'a Words,
    pub(crate) start: usize,
}

impl LayerState {
    /// State of zeros, and a mean that is `start..` of the parameters, in `file` if there is one.
    pub(crate) fn new(
        owned: OwnedRange<'_>,
        groups: &ParameterGroups,
        param: &Words,
        start: usize,
        file: Option<&Arc<StateFile>>,
    ) -> LayerState {
        let segments = owned.segments(groups);
        let device = param.device();
        let count = segments.iter().map(|s| s.state.len()).max().unwrap_or(0);
        let zeros = |tensor| Words::zeros(words_of(&segments, tensor), &device, file);
        let words = (0..count).map(zeros).collect();
        let ema = groups.ema.map(|_| match param.copied(start..start + owned.len) {
            Words::Here(ema) => Words::new(ema, file),
            out => out,
        });
        LayerState { words, segments, ema }
    }

    /// What is kept of a piece of what another state is of, in memory.
    pub(crate) fn here(
        owned: OwnedRange<'_>,
        groups: &ParameterGroups,
        words: Vec<Tensor<1>>,
        ema: Option<Tensor<1>>,
    ) -> LayerState {
        let words = words.into_iter().map(Words::Here).collect();
        LayerState { segments: owned.segments(groups), words, ema: ema.map(Words::Here) }
    }

    /// Nothing, of a layer whose parameters another one updates.
    pub(crate) fn none() -> LayerState {
        LayerState { segments: Vec::new(), words: Vec::new(), ema: None }
    }

    /// All that is kept.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Words> {
        self.words.iter().chain(&self.ema)
    }

    /// Replaces what is kept, number `of` of [`all`](Self::all), where that is.
    pub(crate) fn replace(&mut self, of: usize, by: Tensor<1>) {
        let words = self.words.iter_mut().chain(&mut self.ema).nth(of).expect("so many");
        let file = words.file().cloned();
        // Its place is used again.
        *words = Words::Here(Tensor::zeros([1], &by.device()));
        *words = Words::new(by, file.as_ref());
    }

    /// What of it is in memory.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor<1>> {
        self.all().filter_map(Words::here)
    }

    /// The state of the piece of a parameter that begins at element `at` of the owned ones.
    pub(crate) fn kept(&self, at: usize) -> Vec<KeptTensor<'_>> {
        let segment = self.segments.iter().find(|s| s.range.start == at).expect("a parameter's");
        let words = segment.state.iter().zip(&segment.words).zip(&self.words);
        let words = words.map(|((state, words), tensor)| KeptTensor {
            state: state.clone(),
            tensor,
            start: words.start,
        });
        let mean = |tensor| KeptTensor { state: StateTensor::per_element(EMA), tensor, start: at };
        words.chain(self.ema.iter().map(mean)).collect()
    }

    /// Updates the parameters `param` by `grad`, both of the owned elements. `sharers` have the
    /// other elements of parameters that are updated as a whole.
    pub(crate) fn update(
        &mut self,
        owned: OwnedRange<'_>,
        param: Tensor<1>,
        grad: &Tensor<1>,
        groups: &ParameterGroups,
        scale: &StepScale,
        sharers: &mut UpdateGroup<'_>,
    ) -> CommResult<Tensor<1>> {
        let (has_wholes, has_rms) = owned.looks_at_whole(groups);
        let update = Update { owned, groups, scale, has_wholes, has_rms };
        let param = match cpu_tensor::on_cpu(grad) {
            Some(g) => self.on_host(&update, param, g.as_slice(), sharers)?,
            None => self.on_device(&update, param, grad, sharers)?,
        };
        let Some((ema, keep)) = self.ema.take().zip(groups.ema) else { return Ok(param) };
        let towards = (1.0 - keep) as f32;
        let ema = ema.into_tensor();
        self.ema = Some(Words::Here(match cpu_tensor::on_cpu(&param) {
            Some(p) => {
                let mut ema = cpu_tensor::into_vec(ema);
                lerp(&mut ema, p.as_slice(), towards);
                flat(ema)
            }
            None => ema.clone() + (param.clone() - ema) * towards,
        }));
        Ok(param)
    }

    fn on_host(
        &mut self,
        update: &Update<'_>,
        param: Tensor<1>,
        g: &[f32],
        sharers: &mut UpdateGroup<'_>,
    ) -> CommResult<Tensor<1>> {
        let (rule, scale) = (&update.groups.rule, update.scale);
        let words = std::mem::take(&mut self.words).into_iter().map(Words::into_tensor);
        let mut words: Vec<Vec<f32>> = words.map(cpu_tensor::into_vec).collect();
        let mut p = cpu_tensor::into_vec(param);
        let squares = |sum: &mut ExactSum, here| add_host_squares(sum, &p[here]);
        let rms = update.rms(&self.segments, squares, sharers)?;
        let mut directions = zeros(if update.has_wholes { p.len() } else { 0 });
        for segment in &self.segments {
            let (of, range) = (update.parameter(segment), segment.range.clone());
            let mut state = segment.state_in(&mut words);
            let elements = Elements {
                parameter: &mut p[range.clone()],
                state: &mut state,
                gradient: &g[range.clone()],
            };
            match rule.whole(&of) {
                Some(_) => rule.direction(&of, elements, &mut directions[range], scale),
                None => rule.update(&of, elements, scale),
            }
        }
        if update.has_wholes {
            let n = directions.len();
            let whole = sharers.gather(cpu_tensor::from_vec(directions, [n]))?;
            let whole = cpu_tensor::on_cpu(&whole).expect("gathered on the CPU");
            for segment in &self.segments {
                let of = update.parameter(segment);
                let (all, part, here) = update.places(segment);
                if rule.whole(&of).is_none() || part.is_empty() {
                    continue;
                }
                let mut state = segment.state_in(&mut words);
                let direction = &whole.as_slice()[all];
                let (part_here, rms) = (part.clone(), rms[segment.param]);
                let whole = WholeParameter { direction, part: part_here, state: &mut state, rms };
                let direction = rule.transform(&of, whole, scale);
                rule.apply(&of, &mut p[here], &direction[part], scale);
            }
        }
        self.words = words.into_iter().map(flat).map(Words::Here).collect();
        Ok(flat(p))
    }

    fn on_device(
        &mut self,
        update: &Update<'_>,
        param: Tensor<1>,
        grad: &Tensor<1>,
        sharers: &mut UpdateGroup<'_>,
    ) -> CommResult<Tensor<1>> {
        let (rule, scale) = (&update.groups.rule, update.scale);
        let squares = |sum: &mut ExactSum, here| add_squares(sum, [&elements(&param, here)]);
        let rms = update.rms(&self.segments, squares, sharers)?;
        let words = std::mem::take(&mut self.words).into_iter().map(Words::into_tensor);
        let words: Vec<Tensor<1>> = words.collect();
        let tensors = words.len();
        let (mut parameters, mut directions) = (Vec::new(), Vec::new());
        let mut states: Vec<Vec<Tensor<1>>> = Vec::new();
        let runs: Vec<&[Segment]> = runs(&self.segments, |s| update.is_whole(s)).collect();
        let mut before = Some((param, words));
        for run in &runs {
            let (param, words) = before.as_ref().expect("there until a run alone");
            let elements = update.on_device(run, param, grad, words);
            if runs.len() == 1 {
                // Nothing else holds its elements then, so that they may change in place.
                before = None;
            }
            let (parameter, state) = if update.is_whole(&run[0]) {
                let parameter = elements.parameter.clone();
                let (direction, state) = rule.direction_on_device(elements, scale);
                directions.push(direction);
                (parameter, state)
            } else {
                let updated = rule.update_on_device(elements, scale);
                directions.extend(update.has_wholes.then(|| updated.0.zeros_like()));
                updated
            };
            parameters.push(parameter);
            states.push(state);
        }
        drop(before);
        if update.has_wholes {
            let whole = sharers.gather(joined(directions))?;
            for ((parameter, state), run) in parameters.iter_mut().zip(&mut states).zip(&runs) {
                let (of, (all, part, here)) = (update.parameter(&run[0]), update.places(&run[0]));
                if !update.is_whole(&run[0]) || part.is_empty() {
                    continue;
                }
                let padding = run[0].range.len() - here.len();
                let whole_direction = whole.clone().slice([all]);
                let (before, rms) = (std::mem::take(state), rms[run[0].param]);
                let direction;
                (direction, *state) =
                    rule.transform_on_device(&of, whole_direction, before, rms, scale);
                let mut direction = direction.slice([part]);
                if padding > 0 {
                    let zeros = Tensor::zeros([padding], &direction.device());
                    direction = Tensor::cat(vec![direction, zeros], 0);
                }
                *parameter = rule.apply_on_device(&of, parameter.clone(), direction, scale);
            }
        }
        let of_all = |tensor: usize| {
            joined(states.iter().filter_map(|state| state.get(tensor).cloned()).collect())
        };
        self.words = (0..tensors).map(of_all).map(Words::Here).collect();
        Ok(joined(parameters))
    }
}

impl Segment {
    /// Its words in the layer's.
    fn state_in<'a>(&self, words: &'a mut [Vec<f32>]) -> Vec<&'a mut [f32]> {
        words.iter_mut().zip(&self.words).map(|(all, here)| &mut all[here.clone()]).collect()
    }
}

/// Words of the layer's tensor of this number.
fn words_of(segments: &[Segment], tensor: usize) -> usize {
    let ends = segments.iter().filter_map(|s| s.words.get(tensor)).map(|words| words.end);
    ends.max().unwrap_or(0)
}

/// One update of a layer.
struct Update<'a> {
    owned: OwnedRange<'a>,
    groups: &'a ParameterGroups,
    scale: &'a StepScale,
    has_wholes: bool,
    has_rms: bool,
}

impl Update<'_> {
    fn parameter(&self, segment: &Segment) -> Parameter<'_> {
        self.groups.parameter(&self.owned.layout.params[segment.param].spec, self.owned.role)
    }

    fn is_whole(&self, segment: &Segment) -> bool {
        self.groups.rule.whole(&self.parameter(segment)).is_some()
    }

    /// The elements of a run of segments, of parameters, gradient and words that are owned.
    fn on_device(
        &self,
        run: &[Segment],
        param: &Tensor<1>,
        grad: &Tensor<1>,
        words: &[Tensor<1>],
    ) -> DeviceElements<'_> {
        let (first, last) = (&run[0], &run[run.len() - 1]);
        let range = first.range.start..last.range.end;
        let state = words.iter().zip(first.words.iter().zip(&last.words));
        let state = state.map(|(t, (first, last))| elements(t, first.start..last.end)).collect();
        let part = |s: &Segment| {
            let inside = s.range.start - range.start..s.range.end - range.start;
            (self.parameter(s), inside)
        };
        DeviceElements {
            parameter: elements(param, range.clone()),
            state,
            gradient: elements(grad, range.clone()),
            parts: run.iter().map(part).collect(),
        }
    }

    /// The root mean square of each of the layer's parameters, where a rule asks for it. `squares`
    /// adds those of some owned elements.
    fn rms(
        &self,
        segments: &[Segment],
        mut squares: impl FnMut(&mut ExactSum, Range<usize>),
        sharers: &UpdateGroup<'_>,
    ) -> CommResult<Vec<f64>> {
        let params = &self.owned.layout.params;
        if !self.has_rms {
            return Ok(vec![0.0; params.len()]);
        }
        let mut sums = vec![ExactSum::default(); params.len()];
        // Padding is zero, and blocks end where shards do.
        segments.iter().for_each(|s| squares(&mut sums[s.param], s.range.clone()));
        let sums = sharers.sum(sums)?;
        let mean = |(sum, place): (&ExactSum, &ParamPlace)| sum.value() / place.spec.len() as f64;
        Ok(sums.iter().zip(params).map(|both| mean(both).sqrt()).collect())
    }

    /// Where a parameter lies in the layer's buffer, which part of it the segment is, and where
    /// that lies in what the rank owns, without padding.
    fn places(&self, segment: &Segment) -> (Range<usize>, Range<usize>, Range<usize>) {
        let place = &self.owned.layout.params[segment.param];
        let elements = place.spec.len();
        let first = (self.owned.start + segment.range.start - place.offset).min(elements);
        let n = segment.range.len().min(elements - first);
        let here = segment.range.start..segment.range.start + n;
        (place.offset..place.offset + elements, first..first + n, here)
    }
}

/// Segments in runs of which the same is kept; one that is updated as a whole is a run of its own.
fn runs(
    segments: &[Segment],
    is_whole: impl Fn(&Segment) -> bool,
) -> impl Iterator<Item = &[Segment]> {
    segments.chunk_by(move |a, b| a.state == b.state && !is_whole(a) && !is_whole(b))
}

/// Some elements of `t`; all of them are it.
pub(crate) fn elements(t: &Tensor<1>, range: Range<usize>) -> Tensor<1> {
    match range.len() == t.dims()[0] {
        true => t.clone(),
        false => t.clone().slice([range]),
    }
}

/// Parts one after another; one alone is it.
fn joined(mut parts: Vec<Tensor<1>>) -> Tensor<1> {
    match parts.len() {
        1 => parts.remove(0),
        _ => Tensor::cat(parts, 0),
    }
}

fn flat(values: Vec<f32>) -> Tensor<1> {
    let n = values.len();
    cpu_tensor::from_vec(values, [n])
}
