//! Parameters of a model out of files of weights, by name and range.

use std::collections::{BTreeMap, BTreeSet};

use crate::WeightsError;
use crate::error::{Checked, wrong};
use crate::family::{Family, HEAD};
use crate::stored::StoredTensor;
use crate::weights::Weights;

/// Columns that are transposed at a time: a cache line of f32.
const COLUMNS: usize = 16;

/// A parameter of the model that is to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterShape {
    /// Its name.
    pub name: String,
    /// Its dimensions in the model.
    pub shape: Vec<usize>,
}

/// Files of weights that have exactly the parameters of a model.
#[derive(Debug)]
pub struct Import {
    weights: Weights,
    found: BTreeMap<String, TensorSource>,
}

/// Where a parameter is.
#[derive(Debug)]
struct TensorSource {
    /// The tensors that it is, one after the other: more than one for experts.
    stored: Vec<String>,
    transposed: bool,
    /// Columns of the parameter in the model.
    columns: usize,
    /// Elements of each tensor in the model.
    each: usize,
}

impl Import {
    /// Finds all `parameters` in `weights`, for a model of `vocabulary` token ids, whose embedding
    /// and head may have more rows than that.
    ///
    /// # Errors
    /// A tensor that is missing, is not known, has another shape or an encoding that is not read,
    /// with its file's name.
    pub fn new(
        weights: Weights,
        family: Family,
        parameters: &[ParameterShape],
        vocabulary: usize,
    ) -> Result<Import, WeightsError> {
        let mut found = BTreeMap::new();
        let mut used = BTreeSet::new();
        for parameter in parameters {
            let stored = family.all_stored(&parameter.name, &parameter.shape, &weights);
            let transposed = family.is_transposed(&parameter.name);
            // Of experts each is a tensor.
            let matrix = parameter.shape.len().saturating_sub(2);
            let shape = parameter.shape[matrix..].to_vec();
            let of = ParameterShape { name: parameter.name.clone(), shape };
            for name in &stored {
                let Some(tensor) = weights.find(name) else {
                    return Err(missing(&weights, name, &parameter.name));
                };
                check_shape(tensor, &of, transposed, family, vocabulary)?;
                weights.read(tensor, 0, &mut [])?;
            }
            let columns = parameter.shape.last().copied().unwrap_or(1);
            used.extend(stored.iter().cloned());
            let each = of.shape.iter().product();
            found.insert(of.name, TensorSource { stored, transposed, columns, each });
        }
        check_all_used(&weights, family, &used)?;
        Ok(Import { weights, found })
    }

    /// The files.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Elements `offset..offset + out.len()` of a parameter, in row-major order of its shape in the
    /// model. Rows that are no token id are zero.
    ///
    /// # Errors
    /// Numbers that are not finite, with the tensor's name.
    ///
    /// # Panics
    /// Panics for a name that was not given to [`new`](Self::new), and beyond the end.
    pub fn read(&self, name: &str, offset: usize, out: &mut [f32]) -> Checked<()> {
        let TensorSource { stored, each, .. } = &self.found[name];
        let (mut offset, mut out) = (offset, out);
        while !out.is_empty() {
            // The last one also has what is beyond its end.
            let i = (offset / (*each).max(1)).min(stored.len() - 1);
            let within = offset - i * each;
            let n = if i + 1 < stored.len() { out.len().min(each - within) } else { out.len() };
            let (part, rest) = out.split_at_mut(n);
            self.read_tensor(name, i, within, part)?;
            (offset, out) = (offset + n, rest);
        }
        Ok(())
    }

    /// The same of tensor number `i` of a parameter.
    fn read_tensor(&self, name: &str, i: usize, offset: usize, out: &mut [f32]) -> Checked<()> {
        let found = &self.found[name];
        let tensor = self.weights.find(&found.stored[i]).expect("found before");
        match found.transposed {
            true => transposed(tensor, found.columns, offset, out),
            false => {
                let there = tensor.elements().saturating_sub(offset).min(out.len());
                let (values, padding) = out.split_at_mut(there);
                if !values.is_empty() {
                    tensor.decode(offset, values);
                }
                padding.fill(0.0);
            }
        }
        if out.iter().all(|x| x.is_finite()) {
            return Ok(());
        }
        let problem = format!("its tensor {} has numbers that are not finite", tensor.name);
        Err(wrong(tensor.path(), problem, "training would not recover from them; use others"))
    }
}

fn missing(weights: &Weights, stored: &str, parameter: &str) -> WeightsError {
    let problem = format!("it has no tensor {stored}, and the model has");
    let help = match parameter == HEAD {
        true => {
            "if its head is the embedding use tied = true, or where a config.json describes the \
             model set tie_word_embeddings = true there"
        }
        false => "use the model's own settings (its config.json), or other weights",
    };
    wrong(weights.path(), problem, help)
}

fn check_shape(
    tensor: &StoredTensor,
    parameter: &ParameterShape,
    transposed: bool,
    family: Family,
    vocabulary: usize,
) -> Checked<()> {
    let mut expected = parameter.shape.clone();
    if family.is_vocabulary(&parameter.name) {
        expected[0] = vocabulary;
    }
    if transposed {
        expected.reverse();
    }
    if tensor.shape == expected {
        return Ok(());
    }
    let problem = format!(
        "its tensor {} is {:?}, and the model needs {expected:?}",
        tensor.name, tensor.shape
    );
    Err(wrong(tensor.path(), problem, "use the model's own settings (its config.json)"))
}

/// No weight is left over.
fn check_all_used(weights: &Weights, family: Family, used: &BTreeSet<String>) -> Checked<()> {
    for tensor in weights.tensors() {
        if used.contains(&tensor.name) || family.is_constant(&tensor.name) {
            continue;
        }
        let embedding = family.stored(family.embedding(), weights);
        let embedding = weights.find(&embedding).filter(|_| tensor.name == HEAD);
        let problem = match embedding {
            // A tied head may be saved beside the embedding, if it is the same.
            Some(e)
                if (e.encoding, &e.shape, e.raw())
                    == (tensor.encoding, &tensor.shape, tensor.raw()) =>
            {
                continue;
            }
            Some(_) => format!("its {HEAD} is not the embedding, and the model's head is"),
            None => format!("its tensor {} {:?} is not in the model", tensor.name, tensor.shape),
        };
        let help = match embedding {
            Some(_) => {
                "use tied = false, or where a config.json describes the model set \
                 tie_word_embeddings = false there"
            }
            None => "use the model's own settings (its config.json), or other weights",
        };
        return Err(wrong(tensor.path(), problem, help));
    }
    Ok(())
}

/// Elements from `offset` on of the transpose of `tensor`, whose rows have `columns` elements.
fn transposed(tensor: &StoredTensor, columns: usize, offset: usize, out: &mut [f32]) {
    if out.is_empty() {
        return;
    }
    let end = offset + out.len();
    let (first, last) = (offset / columns, end.div_ceil(columns));
    let (rows, length) = (last - first, tensor.shape[1]);
    let mut tile = vec![0.0; COLUMNS * rows];
    for column in (0..columns).step_by(COLUMNS) {
        let n = COLUMNS.min(columns - column);
        for i in 0..n {
            tensor.decode((column + i) * length + first, &mut tile[i * rows..][..rows]);
        }
        for row in 0..rows {
            let at = (first + row) * columns + column;
            let (from, to) = (at.max(offset), (at + n).min(end));
            for place in from..to {
                out[place - offset] = tile[(place - at) * rows + row];
            }
        }
    }
}
