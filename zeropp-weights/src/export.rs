//! A model's parameters as the tensors of Hugging Face's files.

use crate::family::Family;
use crate::import::ParameterShape;
use crate::write::{StoreAs, Tensor};

/// A tensor of a file, and the parameter that it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The parameter's name in the model.
    pub parameter: String,
    /// The tensor: its name and shape in files.
    pub tensor: Tensor,
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
    let exported = |parameter: &ParameterShape| {
        let transposed = family.is_transposed(&parameter.name);
        let mut shape = parameter.shape.clone();
        if family.is_vocabulary(&parameter.name) {
            shape[0] = vocabulary;
        }
        if transposed {
            shape.reverse();
        }
        let name = family.exported(&parameter.name);
        let tensor = Tensor { name, shape, store_as };
        Exported { parameter: parameter.name.clone(), tensor, transposed }
    };
    parameters.iter().map(exported).collect()
}

/// The tensors of adapters as peft names them and lays them out: both matrices `[out, in]`.
pub fn adapters(family: Family, parameters: &[ParameterShape], store_as: StoreAs) -> Vec<Exported> {
    let exported = |parameter: &ParameterShape| {
        let name = format!("base_model.model.{}", family.exported(&parameter.name));
        let shape = parameter.shape.iter().rev().copied().collect();
        let tensor = Tensor { name, shape, store_as };
        Exported { parameter: parameter.name.clone(), tensor, transposed: true }
    };
    parameters.iter().map(exported).collect()
}

impl Exported {
    /// Elements of the parameter that the file has: its first ones.
    pub fn elements(&self) -> usize {
        self.tensor.shape.iter().product()
    }

    /// The first [`elements`](Self::elements) of the parameter, in the file's order.
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
