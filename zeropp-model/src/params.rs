//! A layer's description of its parameters, and where they lie in the layer's flat buffer.

use std::ops::Range;

/// How a parameter starts. Values come from a counter-based generator keyed by (seed, name), so
/// they do not depend on the layout of the run.
#[derive(Clone, Debug, PartialEq)]
pub enum Init {
    /// All zeros.
    Zeros,
    /// All ones.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// Uniform in ±bound.
    Uniform(f32),
    /// These values, in row-major order (a module that was built elsewhere).
    Values(std::sync::Arc<[f32]>),
}

/// One parameter of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Full name, unique in the model: `h.3.attn.c_attn.weight`.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Starting values.
    pub init: Init,
    /// Whether weight decay applies (matrices only, as is usual).
    pub decay: bool,
    /// Whether it trains; a frozen one has no gradient, no optimizer state and no reduction.
    pub trains: bool,
    /// Where it is some rows of a larger parameter of that name, which: then checkpoints have its
    /// elements at their places in the larger one, and initial values are those of these places.
    pub rows_of: Option<RowsOf>,
}

/// Some rows of a parameter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowsOf {
    /// The first of them.
    pub first: usize,
    /// Dimensions of the whole parameter.
    pub whole: Vec<usize>,
}

impl ParamSpec {
    /// A parameter; weight decay applies if it has two or more dimensions.
    pub fn new(name: impl Into<String>, shape: &[usize], init: Init) -> Self {
        let (shape, decay) = (shape.to_vec(), shape.len() >= 2);
        Self { name: name.into(), shape, init, decay, trains: true, rows_of: None }
    }

    /// The same, which does not train.
    pub fn frozen(self) -> Self {
        Self { trains: false, ..self }
    }

    /// Rows of it (of its first dimension), as a parameter of their own.
    pub fn rows(&self, rows: Range<usize>) -> Self {
        let (whole, shape) = (self.shape.clone(), [&[rows.len()], &self.shape[1..]].concat());
        Self { shape, rows_of: Some(RowsOf { first: rows.start, whole }), ..self.clone() }
    }

    /// Dimensions of the parameter that goes by its name: its own, or those of the whole where it
    /// is some rows of one.
    pub fn whole_shape(&self) -> &[usize] {
        self.rows_of.as_ref().map_or(&self.shape, |rows| &rows.whole)
    }

    /// The place of its first element in that parameter.
    pub fn first_element(&self) -> usize {
        let row: usize = self.shape.iter().skip(1).product();
        self.rows_of.as_ref().map_or(0, |rows| rows.first * row)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Elements in a block of a flat buffer. Parameters start at multiples of it and shards end at
/// them: 128 f32 are 512 bytes, which lets a GPU view a slice without a copy, and sums of squares
/// over whole blocks do not depend on how a buffer is cut into shards.
pub const BLOCK: usize = 128;

/// Where one parameter lies in its layer's flat buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamPlace {
    /// The parameter.
    pub spec: ParamSpec,
    /// First element in the flat buffer, a multiple of [`BLOCK`].
    pub offset: usize,
}

/// The static table of a layer's flat buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct FlatLayout {
    /// The parameters in order of their offsets.
    pub params: Vec<ParamPlace>,
    /// Elements of the whole buffer, padding included; divides into equal whole-block shards.
    pub len: usize,
    /// Number of equal parts the buffer can be cut into at block boundaries.
    pub parts: usize,
}

impl FlatLayout {
    /// Lays `specs` out in order, each padded to [`BLOCK`], the whole to `parts` equal parts.
    pub fn new(specs: Vec<ParamSpec>, parts: usize) -> Self {
        let mut offset = 0;
        let params = specs
            .into_iter()
            .map(|spec| {
                let place = ParamPlace { offset, spec };
                offset += place.spec.len().next_multiple_of(BLOCK);
                place
            })
            .collect();
        Self { params, len: offset.next_multiple_of(BLOCK * parts), parts }
    }

    /// The layout of those of `specs` that train: gradients and optimizer state have it.
    pub fn trained(specs: Vec<ParamSpec>, parts: usize) -> Self {
        Self::new(specs.into_iter().filter(|spec| spec.trains).collect(), parts)
    }

    /// The layout of those of `specs` that do not train, a buffer of their own.
    pub fn frozen(specs: Vec<ParamSpec>, parts: usize) -> Self {
        Self::new(specs.into_iter().filter(|spec| !spec.trains).collect(), parts)
    }

    /// Index of the parameter with this name (the part after the layer's own name is enough).
    pub fn find(&self, name: &str) -> Option<usize> {
        self.params.iter().position(|p| p.spec.name == name).or_else(|| {
            self.params.iter().position(|p| {
                p.spec.name.strip_suffix(name).is_some_and(|head| head.ends_with('.'))
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_a_parameter_know_their_places_in_it() {
        let whole = ParamSpec::new("head", &[10, 4], Init::Normal(0.1));
        let rows = whole.rows(6..10);
        assert_eq!((rows.len(), rows.first_element()), (16, 24));
        assert_eq!((&rows.shape[..], rows.whole_shape()), (&[4, 4][..], &[10, 4][..]));
        assert!(rows.decay && rows.trains && rows.name == "head");
        assert_eq!((whole.first_element(), whole.whole_shape()), (0, &[10, 4][..]));
    }
}
