//! The rule of an optimizer: which tensors it keeps of a parameter, and how it updates elements. It
//! does not see which of them lie on which rank, so that a shard, a checkpoint and a prediction of
//! memory ask it, and no bit depends on the mesh.

use std::sync::Arc;

use burn::tensor::{Tensor, TensorData};
pub use zeropp_checkpoint::EMA;
pub use zeropp_core::optimizer::Role;
use zeropp_core::optimizer::{Kept, StateRule};
use zeropp_core::params::ParamSpec;

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
        Parameter { name: &spec.name, shape: &spec.shape, role, decay }
    }

    /// How much is kept of a parameter beside it.
    pub fn kept(&self, spec: &ParamSpec, role: Role) -> Kept {
        let parameter = self.parameter(spec, role);
        let matrix = self.rule.matrix(&parameter);
        let shape = || [parameter.shape[0], parameter.shape[1]];
        let transform = matrix.map(|matrix| matrix.transform_elements(shape()));
        let mean = usize::from(self.ema.is_some());
        Kept { tensors: self.rule.moments(&parameter).len() + mean, transform }
    }

    /// The same of every parameter, without the rule's arithmetic.
    pub fn state_rule(&self) -> StateRule {
        let groups = self.clone();
        StateRule::new(move |spec, role| groups.kept(spec, role))
    }

    /// Names of the tensors that are kept of a parameter beside it, each of its size.
    pub fn state(&self, parameter: &Parameter<'_>) -> Vec<String> {
        let moments = self.rule.moments(parameter).iter().map(|name| (*name).to_owned());
        moments.chain(self.ema.map(|_| EMA.to_owned())).collect()
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
    /// The state that is kept of them from update to update, in the order of the names; zero at
    /// first.
    pub moments: &'a mut [&'b mut [f32]],
    /// The gradient of the whole batch, before [`StepScale::gradient`].
    pub gradient: &'a [f32],
}

/// Elements on a device, of parameters for which the rule keeps the same.
pub struct DeviceElements<'a> {
    /// The parameters, `[n]`.
    pub parameter: Tensor<1>,
    /// The state that is kept of them, `[n]` each.
    pub moments: Vec<Tensor<1>>,
    /// The gradient of the whole batch, before [`StepScale::gradient`], `[n]`.
    pub gradient: Tensor<1>,
    /// The parameters that they are of, with the first element and one past the last of each.
    pub parts: Vec<(Parameter<'a>, std::ops::Range<usize>)>,
}

impl DeviceElements<'_> {
    /// `yes` for each element that decays, `no` for the others: `[n]`.
    pub fn by_decay(&self, yes: f32, no: f32) -> Tensor<1> {
        let device = self.parameter.device();
        let part = |(parameter, range): &(Parameter<'_>, std::ops::Range<usize>)| {
            Tensor::full([range.len()], if parameter.decay { yes } else { no }, &device)
        };
        Tensor::cat(self.parts.iter().map(part).collect(), 0)
    }
}

/// An optimizer: how parameters follow from gradients.
///
/// It is asked for a run of elements at a time, of whatever a rank owns. So that no bit depends on
/// the mesh, what becomes of an element may depend on that element's numbers alone; a rule that
/// looks at whole matrices says so with [`matrix`](Self::matrix).
pub trait UpdateRule: Send + Sync + 'static {
    /// Its name, which a checkpoint keeps.
    fn name(&self) -> &str;

    /// Names of what it keeps of each element of a parameter from update to update.
    fn moments(&self, parameter: &Parameter<'_>) -> &[&'static str];

    /// Updates some elements of a parameter, on the CPU.
    fn update(&self, parameter: &Parameter<'_>, elements: Elements<'_, '_>, step: &StepScale);

    /// Updates elements on a GPU, and gives back parameters and moments. By itself it takes them
    /// to the CPU and back.
    fn update_on_device(
        &self,
        elements: DeviceElements<'_>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>) {
        let device = elements.parameter.device();
        let mut parameter = to_vec(&elements.parameter);
        let mut moments: Vec<Vec<f32>> = elements.moments.iter().map(to_vec).collect();
        let gradient = to_vec(&elements.gradient);
        for (of, range) in &elements.parts {
            let mut moments: Vec<&mut [f32]> =
                moments.iter_mut().map(|m| &mut m[range.clone()]).collect();
            let elements = Elements {
                parameter: &mut parameter[range.clone()],
                moments: &mut moments,
                gradient: &gradient[range.clone()],
            };
            self.update(of, elements, step);
        }
        let tensor = |values: Vec<f32>| {
            let n = values.len();
            Tensor::from_data(TensorData::new(values, [n]), &device)
        };
        (tensor(parameter), moments.into_iter().map(tensor).collect())
    }

    /// How it updates this parameter as a whole matrix, if it does.
    fn matrix(&self, _parameter: &Parameter<'_>) -> Option<&dyn MatrixRule> {
        None
    }
}

/// A rule for whole matrices, in three steps: elements give a direction, all of which is gathered
/// and changed, and elements go along theirs.
pub trait MatrixRule: Send + Sync {
    /// Writes the direction of some elements into `out`, of their number.
    fn direction(&self, elements: Elements<'_, '_>, out: &mut [f32], step: &StepScale);

    /// The direction of a whole matrix, row-major, from that of its elements.
    fn transform(&self, direction: &[f32], shape: [usize; 2]) -> Vec<f32>;

    /// Elements of memory that [`transform`](Self::transform) takes, its result included.
    fn transform_elements(&self, shape: [usize; 2]) -> usize;

    /// Moves some elements of a matrix along `direction`, of their number.
    fn apply(&self, of: &Parameter<'_>, parameter: &mut [f32], direction: &[f32], step: &StepScale);

    /// [`direction`](Self::direction) on a GPU: the direction of elements, `[n]`, and what is kept
    /// of them.
    fn direction_on_device(
        &self,
        moments: Vec<Tensor<1>>,
        gradient: Tensor<1>,
        step: &StepScale,
    ) -> (Tensor<1>, Vec<Tensor<1>>);

    /// [`transform`](Self::transform) on a GPU.
    fn transform_on_device(&self, direction: Tensor<2>) -> Tensor<2>;

    /// [`apply`](Self::apply) on a GPU: the parameters moved along a direction, `[n]` each.
    fn apply_on_device(
        &self,
        of: &Parameter<'_>,
        parameter: Tensor<1>,
        direction: Tensor<1>,
        step: &StepScale,
    ) -> Tensor<1>;
}

fn to_vec(t: &Tensor<1>) -> Vec<f32> {
    t.to_data().try_to_vec::<f32>().expect("optimizer state is f32")
}
