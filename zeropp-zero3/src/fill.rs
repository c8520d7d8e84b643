//! Parameters of a stage from elsewhere: weights that a run begins with.

use burn::tensor::{Tensor, TensorData};

use crate::layer_shard::FlatPiece;
use crate::stage::ShardedStage;

impl ShardedStage {
    /// Replaces all parameters of this rank's shards, a layer at a time: `read` gives elements of a
    /// parameter, in row-major order of its shape, from a place on. Padding is zero.
    ///
    /// # Errors
    /// The first of `read`; then the state is not to be used.
    pub fn fill_parameters<E>(
        &mut self,
        mut read: impl FnMut(&str, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        for layer in 0..self.layers.len() {
            let n = self.layers[layer].param.dims()[0];
            let values = filled(&self.pieces(layer, 0, n), n, &mut read)?;
            let device = self.layers[layer].param.device();
            let meter = self.meter.clone();
            let param = Tensor::from_data(TensorData::new(values, [n]), &device);
            self.layers[layer].set_param(param, &meter);
        }
        self.fill_frozen(read)
    }

    /// Replaces those parameters alone that do not train.
    ///
    /// # Errors
    /// As [`fill_parameters`](Self::fill_parameters).
    pub fn fill_frozen<E>(
        &mut self,
        mut read: impl FnMut(&str, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        for layer in 0..self.layers.len() {
            let Some(frozen) = &self.layers[layer].frozen else { continue };
            let (n, device) = (frozen.param.dims()[0], frozen.param.device());
            let values = filled(&self.frozen_pieces(layer), n, &mut read)?;
            let meter = self.meter.clone();
            let param = Tensor::from_data(TensorData::new(values, [n]), &device);
            self.layers[layer].set_frozen(param, &meter);
        }
        Ok(())
    }
}

/// `n` elements of a flat buffer that has these pieces.
fn filled<E>(
    pieces: &[FlatPiece<'_>],
    n: usize,
    read: &mut impl FnMut(&str, usize, &mut [f32]) -> Result<(), E>,
) -> Result<Vec<f32>, E> {
    let mut values = vec![0f32; n];
    for piece in pieces {
        let out = &mut values[piece.at..piece.at + piece.len];
        read(&piece.spec.name, piece.offset, out)?;
    }
    Ok(values)
}
