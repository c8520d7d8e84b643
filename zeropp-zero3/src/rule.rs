//! The rule of an optimizer: which tensors it keeps of a parameter, and how it updates it. It does
//! not see which elements lie on which rank, so that a shard, a checkpoint and a prediction of
//! memory ask it, and no bit depends on the mesh.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Tensor, TensorData};
pub use zeropp_checkpoint::{EMA, StateTensor};
use zeropp_core::optimizer::{Kept, StateRule};
pub use zeropp_core::optimizer::{Role, WholeUpdate};
use zeropp_core::params::{BLOCK, ParamSpec};

/// A parameter as an optimizer sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameter<'a> {
    /// Name, unique in the model.
    pub name: &'a str,
    /// Dimensions.
    pub shape: &'a [usize],
    /// Its role in the model.
    pub role: Role,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// Which parameters weight decay leaves alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoDecay {
    /// Vectors that are no biases: what norms multiply by.
    pub norms: bool,
    /// Parameters whose names end in `bias`, those of norms too.
    pub biases: bool,
    /// Embeddings of tokens and positions, and a head that shares the former's weight.
    pub embeddings: bool,
}

impl NoDecay {
    /// Whether weight decay applies to a parameter.
    pub fn decays(&self, spec: &ParamSpec, role: Role) -> bool {
        let is_bias = spec.name.ends_with("bias");
        // Learned positions are a layer of their own, and the only small one with a matrix.
        let is_positions = role == Role::Small && spec.shape.len() >= 2;
        let is_embedding = role == Role::Embedding || is_positions;
        let is_norm = !is_bias && !is_embedding && spec.shape.len() < 2;
        !(self.biases && is_bias || self.embeddings && is_embedding || self.norms && is_norm)
    }
}

/// How the parameters of a model are dealt with.
#[derive(Clone)]
pub struct ParameterGroups {
    /// How they are updated.
    pub rule: Arc<dyn UpdateRule>,
    /// Which of them do not decay; none where the layers say it of their own.
    pub no_decay: Option<NoDecay>,
    /// The share of it that a mean of the weights keeps with each update, where there is one.
    pub ema: Option<f64>,
}

impl ParameterGroups {
    /// A parameter as the rule sees it.
    pub fn parameter<'a>(&self, spec: &'a ParamSpec, role: Role) -> Parameter<'a> {
        let decay = self.no_decay.map_or(spec.decay, |groups| groups.decays(spec, role));
        // Of some rows that of the whole: an update knows no split.
        Parameter { name: &spec.name, shape: spec.whole_shape(), role, decay }
    }

    /// How much is kept of a parameter beside it.
    pub fn kept(&self, spec: &ParamSpec, role: Role) -> Kept {
        let parameter = self.parameter(spec, role);
        let state = self.state(&parameter);
        let words = |whole: bool| {
            let those = state.iter().filter(|tensor| tensor.is_whole() == whole);
            those.map(|tensor| tensor.words(BLOCK)).sum()
        };
        let whole = self.rule.whole(&parameter);
        Kept { block_words: words(false), whole_words: words(true), whole }
    }

    /// The same of every parameter, without the rule's arithmetic.
    pub fn state_rule(&self) -> StateRule {
        let groups = self.clone();
        StateRule::new(move |spec, role| groups.kept(spec, role))
    }

    /// The tensors that are kept of a parameter beside it.
    pub fn state(&self, parameter: &Parameter<'_>) -> Vec<StateTensor> {
        let mut state = self.rule.state(parameter);
        state.extend(self.ema.map(|_| StateTensor::per_element(EMA)));
        state
    }
}

/// The scales that change from step to step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepScale {
    /// Learning rate.
    pub lr: f64,
    /// Number of the update, from 1 (skipped steps do not count).
    pub update: u64,
    /// Factor on the gradient (clipping).
    pub gradient: f32,
}

/// Some elements of one parameter, and what is kept of them.
pub struct Elements<'a, 'b> {
    /// The parameters, to be updated.
    pub parameter: &'a mut [f32],
    /// The words that are kept of them from update to update, in the order of
    /// [`state`](UpdateRule::state); zero at first. Of a tensor of the whole parameter, all.
    pub state: &'a mut [&'b mut [f32]],
    /// The gradient of the whole batch, before [`StepScale::gradient`].
    pub gradient: &'a [f32],
}

/// A whole parameter between its two steps.
pub struct WholeParameter<'a, 'b> {
    /// The directions of all its elements, row-major.
    pub direction: &'a [f32],
    /// Those whose changed directions are wanted.
    pub part: Range<usize>,
    /// The words that are kept of it on this rank, as in [`Elements::state`].
    pub state: &'a mut [&'b mut [f32]],
    /// The root mean square of its elements, where [`WholeUpdate::rms`] asks for it, else 0.
    pub rms: f64,
}

/// Elements on a device, of parameters for which the rule keeps the same.
pub struct DeviceElements<'a> {
    /// The parameters, `[n]`.
    pub parameter: Tensor<1>,
    /// The words that are kept of them, one tensor for each of [`UpdateRule::state`].
    pub state: Vec<Tensor<1>>,
    /// The gradient of the whole batch, before [`StepScale::gradient`], `[n]`.
    pub gradient: Tensor<1>,
    /// The parameters that they are of, with the first element and one past the last of each.
    pub parts: Vec<(Parameter<'a>, Range<usize>)>,
}

impl DeviceElements<'_> {
    /// `yes` for each element that decays, `no` for the others: `[n]`.
    pub fn by_decay(&self, yes: f32, no: f32) -> Tensor<1> {
        let device = self.parameter.device();
        let part = |(parameter, range): &(Parameter<'_>, Range<usize>)| {
            Tensor::full([range.len()], if parameter.decay { yes } else { no }, &device)
        };
        Tensor::cat(self.parts.iter().map(part).collect(), 0)
    }
}

/// An optimizer: how parameters follow from gradients.
///
/// It is asked for a run of elements at a time, of whatever a rank owns. So that no bit depends on
/// the mesh, what becomes of an element may depend on that element's numbers alone, or on those of
/// its block in [`state`](Self::state).
///
/// A rule that looks at whole parameters says so with [`whole`](Self::whole). Then an update has
/// three steps: elements give a [`direction`](Self::direction), all of which is gathered and
/// [transformed](Self::transform), and elements [go along](Self::apply) theirs.
pub trait UpdateRule: Send + Sync + 'static {
    /// Its name, which a checkpoint keeps.
    fn name(&self) -> &str;

    /// The tensors that it keeps of a parameter from update to update.
    fn state(&self, of: &Parameter<'_>) -> Vec<StateTensor>;

    /// Whether it looks at all of this parameter at once, and what that takes.
    fn whole(&self, _of: &Parameter<'_>) -> Option<WholeUpdate> {
        None
    }

    /// Whether what W adds up for this parameter is a gradient. What is not takes no part in the
    /// norm.
    fn has_gradient(&self, _of: &Parameter<'_>) -> bool {
        true
    }

    /// Updates some elements of a parameter, on the CPU; of one that it does not look at as a
    /// whole. By itself, elements go along their direction, which takes a buffer of as many.
    fn update(&self, of: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale) {
        let Elements { parameter, state, gradient } = elements;
        let mut out = vec![0.0; parameter.len()];
        let elements = Elements { parameter: &mut *parameter, state, gradient };
        self.direction(of, elements, &mut out, step);
        self.apply(of, parameter, &out, step);
    }

    /// Writes the direction of some elements of a whole parameter into `out`, of their number: by
    /// itself the clipped gradient.
    fn direction(
        &self,
        _of: &Parameter<'_>,
        elements: Elements<'_, '_>,
        out: &mut [f32],
        step: &StepScale,
    ) {
        out.iter_mut().zip(elements.gradient).for_each(|(out, g)| *out = g * step.gradient);
    }

    /// The direction of a whole parameter from that of its elements; by itself the same. It takes
    /// [`WholeUpdate::elements`] of memory.
    fn transform(
        &self,
        _of: &Parameter<'_>,
        whole: WholeParameter<'_, '_>,
        _step: &StepScale,
    ) -> Vec<f32> {
        whole.direction.to_vec()
    }

    /// Moves some elements of a whole parameter along `direction`, of their number; by itself by
    /// the learning rate.
    fn apply(
        &self,
        _of: &Parameter<'_>,
        parameter: &mut [f32],
        direction: &[f32],
        step: &StepScale,
    ) {
        let by = step.lr as f32;
        parameter.iter_mut().zip(direction).for_each(|(p, d)| *p -= by * d);
    }

    /// Updates elements on a GPU, and gives back parameters and state. By itself it takes them to
    /// the CPU and back, as do the others that follow.
    fn update_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let each = |of: &Parameter<'_>, elements: Elements<'_, '_>, _: &mut [f32]| {
            self.update(of, elements, step);
        };
        let OnHost { parameter, state, .. } = on_host(self, elements, each);
        (parameter, state)
    }

    /// [`direction`](Self::direction) on a GPU: that of elements of one parameter, `[n]`, and what
    /// is kept of them.
    fn direction_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let each = |of: &Parameter<'_>, elements: Elements<'_, '_>, out: &mut [f32]| {
            self.direction(of, elements, out, step);
        };
        let OnHost { out, state, .. } = on_host(self, elements, each);
        (out, state)
    }

    /// [`transform`](Self::transform) on a GPU: the direction of the whole parameter, `[n]`, what
    /// is kept of it, and the root mean square of its elements.
    fn transform_on_device(
        &self,
        of: &Parameter<'_>,
        direction: Tensor<1>,
        state: Vec<Tensor<1>>,
        rms: f64,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let device = direction.device();
        let mut state: Vec<Vec<f32>> = state.iter().map(to_vec).collect();
        let mut words: Vec<&mut [f32]> = state.iter_mut().map(Vec::as_mut_slice).collect();
        let direction = to_vec(&direction);
        let part = 0..direction.len();
        let whole = WholeParameter { direction: &direction, part, state: &mut words, rms };
        let direction = self.transform(of, whole, step);
        let tensor = |values| to_tensor(values, &device);
        (tensor(direction), state.into_iter().map(tensor).collect())
    }

    /// [`apply`](Self::apply) on a GPU: the parameters moved along a direction, `[n]` each.
    fn apply_on_device(
        &self,
        of: &Parameter<'_>,
        parameter: Tensor<1>,
        direction: Tensor<1>,
        step: &StepScale,
    ) -> Tensor<1> {
        let mut moved = to_vec(&parameter);
        self.apply(of, &mut moved, &to_vec(&direction), step);
        to_tensor(moved, &parameter.device())
    }
}

/// Elements of a device after a step on the CPU, on the device again.
struct OnHost {
    parameter: Tensor<1>,
    state: Vec<Tensor<1>>,
    out: Tensor<1>,
}

/// Calls `each` with the elements of each part and as many numbers of a result.
fn on_host<R: UpdateRule + ?Sized>(
    rule: &R,
    elements: DeviceElements<'_>,
    each: impl Fn(&Parameter<'_>, Elements<'_, '_>, &mut [f32]),
) -> OnHost {
    let DeviceElements { parameter, state, gradient, parts } = elements;
    let device = parameter.device();
    let mut values = to_vec(&parameter);
    let mut state: Vec<Vec<f32>> = state.iter().map(to_vec).collect();
    let (gradient, mut out) = (to_vec(&gradient), vec![0.0; values.len()]);
    let mut rest: Vec<&mut [f32]> = state.iter_mut().map(Vec::as_mut_slice).collect();
    for (of, range) in parts {
        let mut state: Vec<&mut [f32]> = Vec::new();
        for (rest, kept) in rest.iter_mut().zip(rule.state(&of)) {
            let (part, after) = std::mem::take(rest).split_at_mut(kept.words(range.len()));
            *rest = after;
            state.push(part);
        }
        let elements = Elements {
            parameter: &mut values[range.clone()],
            state: &mut state,
            gradient: &gradient[range.clone()],
        };
        each(&of, elements, &mut out[range]);
    }
    let tensor = |values| to_tensor(values, &device);
    OnHost {
        parameter: tensor(values),
        state: state.into_iter().map(tensor).collect(),
        out: tensor(out),
    }
}

fn to_vec(t: &Tensor<1>) -> Vec<f32> {
    t.to_data().try_to_vec::<f32>().expect("optimizer state is f32")
}

fn to_tensor(values: Vec<f32>, device: &Device) -> Tensor<1> {
    let n = values.len();
    Tensor::from_data(TensorData::new(values, [n]), device)
}
