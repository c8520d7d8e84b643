//! A model's parameters as the tensors of Hugging Face's files.

use crate::family::{ExpertNaming, Family};
use crate::import::ParameterShape;
use crate::write::{StoreAs, Tensor};

/// A tensor of a file, and the parameter that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The parameter's name in the model.
    pub parameter: String,
    /// The tensor: its name and shape in files.
    pub tensor: Tensor,
    /// The first element of the parameter that it has.
    pub first: usize,
    transposed: bool,
}

/// The tensors of a model of `vocabulary` token ids with these parameters. Rows of embedding and
/// head that are no id are cut off.
pub fn tensors(
    family: Family,
    parameters: &[ParameterShape],
    vocabulary: usize,
    store_as: StoreAs,
) -> Vec<Exported> {
    let naming = ExpertNaming::of(parameters.iter().map(|p| p.name.as_str()));
    let exported = |parameter: &ParameterShape| {
        let transposed = family.is_transposed(&parameter.name);
        let names = family.all_exported(&parameter.name, &parameter.shape, naming);
        // Those of experts are one of as many matrices.
        let matrix = parameter.shape.len().saturating_sub(2);
        let mut shape = parameter.shape[matrix..].to_vec();
        let elements: usize = shape.iter().product();
        if family.is_vocabulary(&parameter.name) {
            shape[0] = vocabulary;
        }
        if transposed {
            shape.reverse();
        }
        let of = |(i, name)| Exported {
            parameter: parameter.name.clone(),
            tensor: Tensor { name, shape: shape.clone(), store_as },
            first: i * elements,
            transposed,
        };
        names.into_iter().enumerate().map(of).collect::<Vec<_>>()
    };
    parameters.iter().flat_map(exported).collect()
}

/// The tensors of adapters as peft names them and lays them out: both matrices `[out, in]`.
pub fn adapters(family: Family, parameters: &[ParameterShape], store_as: StoreAs) -> Vec<Exported> {
    let exported = |parameter: &ParameterShape| {
        let name = format!("base_model.model.{}", family.exported(&parameter.name));
        let shape = parameter.shape.iter().rev().copied().collect();
        let tensor = Tensor { name, shape, store_as };
        Exported { parameter: parameter.name.clone(), tensor, first: 0, transposed: true }
    };
    parameters.iter().map(exported).collect()
}

impl Exported {
    /// Elements of the parameter that the file has, from [`first`](Self::first) on.
    pub fn elements(&self) -> usize {
        self.tensor.shape.iter().product()
    }

    /// Those [`elements`](Self::elements) of the parameter, in the file's order.
    pub fn arranged(&self, values: Vec<f32>) -> Vec<f32> {
        if !self.transposed {
            return values;
        }
        let [rows, columns] = [self.tensor.shape[0], self.tensor.shape[1]];
        let mut out = vec![0.0; values.len()];
        // A block of both fits the cache.
        const BLOCK: usize = 64;
        for row in (0..rows).step_by(BLOCK) {
            for column in (0..columns).step_by(BLOCK) {
                for r in row..(row + BLOCK).min(rows) {
                    for c in column..(column + BLOCK).min(columns) {
                        out[r * columns + c] = values[c * rows + r];
                    }
                }
            }
        }
        out
    }
}
