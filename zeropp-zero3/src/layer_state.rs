//! A rank's optimizer state of one layer, and the update of its parameters.

use std::ops::Range;

use burn::tensor::Tensor;
use zeropp_comm::CommResult;
use zeropp_core::cpu_tensor;
use zeropp_core::kernels::{lerp, zeros};
use zeropp_core::optimizer;
use zeropp_core::params::FlatLayout;

use crate::layer_shard::own_copy;
use crate::rule::{DeviceElements, EMA, Elements, Parameter, ParameterGroups, Role, StepScale};

/// The part of a parameter, and of the padding after it, in what a rank owns of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Segment {
    /// Which of the layer's parameters.
    param: usize,
    /// Its elements, within what the rank owns.
    pub(crate) range: Range<usize>,
    /// Names of what is kept of them.
    names: Vec<&'static str>,
    /// Where they begin in each of the moments.
    starts: Vec<usize>,
}

/// A rank's part of a layer's flat buffer: elements `start..start + len`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Owned<'a> {
    pub(crate) layout: &'a FlatLayout,
    pub(crate) role: Role,
    pub(crate) start: usize,
    pub(crate) len: usize,
}

impl Owned<'_> {
    fn elements(&self) -> optimizer::Owned<'_> {
        optimizer::Owned { layout: self.layout, start: self.start, len: self.len }
    }

    fn segments(&self, groups: &ParameterGroups) -> Vec<Segment> {
        let mut kept: Vec<usize> = Vec::new();
        let segment = |(param, range): (usize, Range<usize>)| {
            let spec = &self.layout.params[param].spec;
            let names = groups.rule.moments(&groups.parameter(spec, self.role)).to_vec();
            kept.resize(kept.len().max(names.len()), 0);
            let starts = kept[..names.len()].to_vec();
            kept[..names.len()].iter_mut().for_each(|end| *end += range.len());
            Segment { param, range, names, starts }
        };
        self.elements().segments().map(segment).collect()
    }

    /// Whether any of the layer's parameters, on whatever rank, is updated as a matrix.
    pub(crate) fn has_matrices(&self, groups: &ParameterGroups) -> bool {
        let mut all = self.layout.params.iter().map(|p| groups.parameter(&p.spec, self.role));
        all.any(|of| groups.rule.matrix(&of).is_some())
    }

    /// Bytes that computing the update takes, and those that it takes afterwards, in a group of
    /// so many ZeRO-3 ranks, with ZeRO-1 or not.
    pub(crate) fn update_bytes(&self, groups: &ParameterGroups, over: (usize, bool)) -> [u64; 2] {
        let kept: Vec<_> =
            self.layout.params.iter().map(|p| groups.kept(&p.spec, self.role)).collect();
        let elements = self.elements();
        [elements.computing(&kept, over), elements.returning(over)]
    }
}

/// The state that is kept of a layer's owned elements.
pub(crate) struct LayerState {
    pub(crate) segments: Vec<Segment>,
    /// Each moment of the elements that have it, in their order, f32.
    pub(crate) moments: Vec<Tensor<1>>,
    /// The moving average of the parameters, if there is one, f32.
    pub(crate) ema: Option<Tensor<1>>,
}

/// A tensor that is kept of a piece of a parameter: its name, and where the piece begins in which.
pub(crate) struct Kept<'a> {
    pub(crate) name: &'static str,
    pub(crate) tensor: &'a Tensor<1>,
    pub(crate) start: usize,
}

impl LayerState {
    /// Moments of zero, and a mean that is the parameters' own `[len]`.
    pub(crate) fn new(owned: Owned<'_>, groups: &ParameterGroups, param: &Tensor<1>) -> LayerState {
        let segments = owned.segments(groups);
        let device = param.device();
        let count = segments.iter().map(|s| s.names.len()).max().unwrap_or(0);
        let elements = |moment: usize| -> usize {
            segments.iter().filter(|s| s.names.len() > moment).map(|s| s.range.len()).sum()
        };
        let moments = (0..count).map(|m| Tensor::zeros([elements(m)], &device)).collect();
        LayerState { moments, segments, ema: groups.ema.map(|_| own_copy(param)) }
    }

    /// Nothing, of a layer whose parameters another one updates.
    pub(crate) fn none() -> LayerState {
        LayerState { segments: Vec::new(), moments: Vec::new(), ema: None }
    }

    /// All tensors.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor<1>> {
        self.moments.iter().chain(&self.ema)
    }

    /// The state of the piece of a parameter that begins at element `at` of the owned ones.
    pub(crate) fn kept(&self, at: usize) -> Vec<Kept<'_>> {
        let segment = self.segments.iter().find(|s| s.range.start == at).expect("a parameter's");
        let moments = segment.names.iter().zip(&segment.starts).zip(&self.moments);
        let moments = moments.map(|((name, start), tensor)| Kept { name, tensor, start: *start });
        let ema = self.ema.iter().map(|tensor| Kept { name: EMA, tensor, start: at });
        moments.chain(ema).collect()
    }

    /// Updates the parameters `param` by `grad`, both of the owned elements. `gather` makes the
    /// layer's whole buffer of what each rank owns of it; it is called for layers with matrices.
    pub(crate) fn update(
        &mut self,
        owned: Owned<'_>,
        (param, grad): (Tensor<1>, &Tensor<1>),
        (groups, scale): (&ParameterGroups, &StepScale),
        gather: impl FnOnce(Tensor<1>) -> CommResult<Tensor<1>>,
    ) -> CommResult<Tensor<1>> {
        let has_matrices = owned.has_matrices(groups);
        let update = Update { owned, groups, scale, has_matrices };
        match cpu_tensor::on_cpu(grad) {
            Some(g) => self.on_host(&update, param, g.as_slice(), gather),
            None => self.on_device(&update, param, grad, gather),
        }
    }

    fn on_host(
        &mut self,
        update: &Update<'_>,
        param: Tensor<1>,
        g: &[f32],
        gather: impl FnOnce(Tensor<1>) -> CommResult<Tensor<1>>,
    ) -> CommResult<Tensor<1>> {
        let (rule, scale) = (&update.groups.rule, update.scale);
        let moments = std::mem::take(&mut self.moments);
        let mut moments: Vec<Vec<f32>> = moments.into_iter().map(cpu_tensor::into_vec).collect();
        let mut p = cpu_tensor::into_vec(param);
        let mut directions = zeros(if update.has_matrices { p.len() } else { 0 });
        for segment in &self.segments {
            let (of, range) = (update.parameter(segment), segment.range.clone());
            let mut kept: Vec<&mut [f32]> = moments
                .iter_mut()
                .zip(&segment.starts)
                .map(|(moment, start)| &mut moment[*start..start + range.len()])
                .collect();
            let elements = Elements {
                parameter: &mut p[range.clone()],
                moments: &mut kept,
                gradient: &g[range.clone()],
            };
            match rule.matrix(&of) {
                Some(matrix) => matrix.direction(elements, &mut directions[range], scale),
                None => rule.update(&of, elements, scale),
            }
        }
        if update.has_matrices {
            let n = directions.len();
            let whole = gather(cpu_tensor::from_vec(directions, [n]))?;
            let whole = cpu_tensor::on_cpu(&whole).expect("gathered on the CPU");
            for segment in &self.segments {
                let of = update.parameter(segment);
                let Some(matrix) = rule.matrix(&of) else { continue };
                let (all, part, here) = update.places(segment);
                let direction =
                    matrix.transform(&whole.as_slice()[all], [of.shape[0], of.shape[1]]);
                matrix.apply(&of, &mut p[here], &direction[part], scale);
            }
        }
        if let (Some(ema), Some(keep)) = (self.ema.take(), update.groups.ema) {
            let mut ema = cpu_tensor::into_vec(ema);
            lerp(&mut ema, &p, (1.0 - keep) as f32);
            self.ema = Some(flat(ema));
        }
        self.moments = moments.into_iter().map(flat).collect();
        Ok(flat(p))
    }

    fn on_device(
        &mut self,
        update: &Update<'_>,
        param: Tensor<1>,
        grad: &Tensor<1>,
        gather: impl FnOnce(Tensor<1>) -> CommResult<Tensor<1>>,
    ) -> CommResult<Tensor<1>> {
        let (rule, scale) = (&update.groups.rule, update.scale);
        let moments = std::mem::take(&mut self.moments);
        let mut kept: Vec<Vec<Tensor<1>>> = vec![Vec::new(); moments.len()];
        let (mut parameters, mut directions) = (Vec::new(), Vec::new());
        for run in runs(&self.segments, |segment| update.is_matrix(segment)) {
            let range = run[0].range.start..run[run.len() - 1].range.end;
            let moments = moments.iter().zip(&run[0].starts);
            let moments =
                moments.map(|(t, start)| elements(t, *start..start + range.len())).collect();
            let gradient = elements(grad, range.clone());
            let parameter = elements(&param, range.clone());
            let part = |s: &Segment| {
                let inside = s.range.start - range.start..s.range.end - range.start;
                (update.parameter(s), inside)
            };
            let moments = match rule.matrix(&update.parameter(&run[0])) {
                Some(matrix) => {
                    let (direction, moments) = matrix.direction_on_device(moments, gradient, scale);
                    directions.push(direction);
                    parameters.push(parameter);
                    moments
                }
                None => {
                    let parts = run.iter().map(part).collect();
                    let elements = DeviceElements { parameter, moments, gradient, parts };
                    let (parameter, moments) = rule.update_on_device(elements, scale);
                    if update.has_matrices {
                        directions.push(parameter.zeros_like());
                    }
                    parameters.push(parameter);
                    moments
                }
            };
            kept.iter_mut().zip(moments).for_each(|(kept, moment)| kept.push(moment));
        }
        drop((moments, param));
        if update.has_matrices {
            let whole = gather(joined(directions))?;
            let runs = runs(&self.segments, |segment| update.is_matrix(segment));
            for (parameter, run) in parameters.iter_mut().zip(runs) {
                let of = update.parameter(&run[0]);
                let Some(matrix) = rule.matrix(&of) else { continue };
                let (all, part, here) = update.places(&run[0]);
                let (whole_len, padding) = (all.len(), run[0].range.len() - here.len());
                let direction = whole.clone().slice([all]).reshape([of.shape[0], of.shape[1]]);
                let direction = matrix.transform_on_device(direction).reshape([whole_len]);
                let mut direction = direction.slice([part]);
                if padding > 0 {
                    let zeros = Tensor::zeros([padding], &direction.device());
                    direction = Tensor::cat(vec![direction, zeros], 0);
                }
                *parameter = matrix.apply_on_device(&of, parameter.clone(), direction, scale);
            }
        }
        let param = joined(parameters);
        if let (Some(ema), Some(keep)) = (self.ema.take(), update.groups.ema) {
            self.ema = Some(ema.clone() + (param.clone() - ema) * (1.0 - keep) as f32);
        }
        self.moments = kept.into_iter().map(joined).collect();
        Ok(param)
    }
}

/// One update of a layer.
struct Update<'a> {
    owned: Owned<'a>,
    groups: &'a ParameterGroups,
    scale: &'a StepScale,
    has_matrices: bool,
}

impl Update<'_> {
    fn parameter(&self, segment: &Segment) -> Parameter<'_> {
        self.groups.parameter(&self.owned.layout.params[segment.param].spec, self.owned.role)
    }

    fn is_matrix(&self, segment: &Segment) -> bool {
        self.groups.rule.matrix(&self.parameter(segment)).is_some()
    }

    /// Where a matrix lies in the layer's buffer, which part of it the segment is, and where that
    /// lies in what the rank owns, without padding.
    fn places(&self, segment: &Segment) -> (Range<usize>, Range<usize>, Range<usize>) {
        let place = &self.owned.layout.params[segment.param];
        let elements = place.spec.len();
        let first = (self.owned.start + segment.range.start - place.offset).min(elements);
        let n = segment.range.len().min(elements - first);
        let here = segment.range.start..segment.range.start + n;
        (place.offset..place.offset + elements, first..first + n, here)
    }
}

/// Segments in runs of which the same is kept; a matrix is a run of its own.
fn runs(
    segments: &[Segment],
    is_matrix: impl Fn(&Segment) -> bool,
) -> impl Iterator<Item = &[Segment]> {
    segments.chunk_by(move |a, b| a.names == b.names && !is_matrix(a) && !is_matrix(b))
}

/// Some elements of `t`; all of them are it.
fn elements(t: &Tensor<1>, range: Range<usize>) -> Tensor<1> {
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
