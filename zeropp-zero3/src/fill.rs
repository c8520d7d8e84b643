//! Parameters of a stage from elsewhere: weights that a run begins with, and those that do not
//! train, on their way to another rank.

use burn::tensor::{Tensor, TensorData};
use zeropp_checkpoint::moves::HeldWords;
use zeropp_checkpoint::{Checked, StateSource, StateTensor, tensor_name};
use zeropp_core::cpu_tensor;

use crate::checkpoint::values_of;
use crate::layer_shard::{FlatPiece, flat_pieces};
use crate::stage::ShardedStage;

impl ShardedStage {
    /// Replaces all parameters of this rank's shards, a layer at a time: `read` gives elements of a
    /// parameter, in row-major order of its shape, from a place on. Padding is zero. On a CPU they
    /// are written where those before were, so that it takes no memory; for a GPU, a layer's on the
    /// host.
    ///
    /// # Errors
    /// The first of `read`; then the state is not to be used.
    pub fn fill_parameters<E>(
        &mut self,
        mut read: impl FnMut(&str, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let rank = self.zero3_rank();
        for layer in self.layers.iter_mut().filter(|layer| layer.has_param()) {
            let param = layer.take_param().into_tensor();
            let n = param.dims()[0];
            let pieces = flat_pieces(layer.weights.layout(), rank * n, n);
            let param = filled(param, &pieces, &mut read)?;
            layer.set_param(param, &self.meter);
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
        self.refill_frozen(|_, name, offset, out| read(name, offset, out))
    }

    /// Adds this rank's part of them to what it gives to others. Replicas have the same ones, of
    /// which the first gives.
    pub fn copy_frozen(&self, held: &mut HeldWords) {
        if self.replica_rank() > 0 {
            return;
        }
        let rank = self.zero3_rank();
        for (layer, frozen) in self.layers.iter().filter_map(|l| Some((l, l.frozen.as_ref()?))) {
            let layout = layer.weights.frozen_layout().expect("of what is frozen");
            let n = frozen.param.len();
            let values = values_of(&frozen.param.tensor());
            for piece in flat_pieces(layout, rank * n, n) {
                let values = values[piece.at..piece.at + piece.len].to_vec();
                held.add(moved_name(&layer.name, &piece.spec.name), piece.offset, values);
            }
        }
    }

    /// Replaces them by what `source` has of those that [`copy_frozen`](Self::copy_frozen) gave.
    ///
    /// # Errors
    /// As [`fill_parameters`](Self::fill_parameters).
    pub fn take_frozen(&mut self, source: &mut impl StateSource) -> Checked<()> {
        let each = StateTensor::per_element(FROZEN);
        self.refill_frozen(|layer, name, offset, out| {
            let elements = offset..offset + out.len();
            source.read_state(&each, &of_layer(layer, name), elements, out)
        })
    }

    /// The same, with the layer's name for each parameter.
    fn refill_frozen<E>(
        &mut self,
        mut read: impl FnMut(&str, &str, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let rank = self.zero3_rank();
        for layer in &mut self.layers {
            let Some(frozen) = layer.frozen.take() else { continue };
            let n = frozen.param.len();
            let layout = layer.weights.frozen_layout().expect("of what is frozen").clone();
            let pieces = flat_pieces(&layout, rank * n, n);
            let name = layer.name.clone();
            let mut read = |param: &str, at: usize, out: &mut [f32]| read(&name, param, at, out);
            let param = filled(frozen.param.into_tensor(), &pieces, &mut read)?;
            layer.set_frozen(param, &self.meter);
        }
        Ok(())
    }
}

/// What a move calls parameters that do not train.
const FROZEN: &str = "frozen";

/// A layer's parameter, in a name that no other layer's has: a tied one is in two.
fn of_layer(layer: &str, name: &str) -> String {
    format!("{layer}/{name}")
}

fn moved_name(layer: &str, name: &str) -> String {
    tensor_name(FROZEN, &of_layer(layer, name))
}

/// `param`, a part of a flat buffer that has these pieces, with what `read` gives in place of its
/// values.
fn filled<E>(
    param: Tensor<1>,
    pieces: &[FlatPiece<'_>],
    read: &mut impl FnMut(&str, usize, &mut [f32]) -> Result<(), E>,
) -> Result<Tensor<1>, E> {
    let mut fill = |values: &mut [f32]| {
        values.fill(0.0);
        pieces.iter().try_for_each(|piece| {
            let out = &mut values[piece.at..piece.at + piece.len];
            read(&piece.spec.name, piece.offset, out)
        })
    };
    let mut done = Ok(());
    match cpu_tensor::map_in_place(param, |values| done = fill(values)) {
        Ok(param) => done.map(|()| param),
        Err(param) => {
            let (n, device) = (param.dims()[0], param.device());
            drop(param);
            let mut values = vec![0f32; n];
            fill(&mut values)?;
            Ok(Tensor::from_data(TensorData::new(values, [n]), &device))
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use zeropp_core::params::{FlatLayout, Init, ParamPlace, ParamSpec};

    use super::*;
    use crate::layer_shard::initial_shard;

    #[test]
    fn weights_are_read_into_the_memory_of_those_before() {
        let specs = vec![
            ParamSpec::new("a", &[10, 20], Init::Normal(0.02)),
            ParamSpec::new("b", &[20], Init::Ones),
        ];
        let layout = FlatLayout::new(specs, 3);
        let n = layout.len / 3;
        for rank in 0..3 {
            let param = initial_shard(&layout, 3, rank, &Device::flex(), 1);
            let at = cpu_tensor::storage_id(&param).unwrap();
            let mut asked = 0;
            let mut read = |name: &str, offset: usize, out: &mut [f32]| {
                asked += out.len();
                let first = if name == "a" { 1 } else { 1001 } + offset;
                out.iter_mut().enumerate().for_each(|(i, x)| *x = (first + i) as f32);
                Ok::<(), ()>(())
            };
            let pieces = flat_pieces(&layout, rank * n, n);
            let param = filled(param, &pieces, &mut read).unwrap();
            assert_eq!(cpu_tensor::storage_id(&param), Some(at), "in place");
            let values = param.into_data().try_to_vec::<f32>().unwrap();
            let whole = |i: usize| {
                let of = |place: &&ParamPlace| {
                    (place.offset..place.offset + place.spec.len()).contains(&i)
                };
                let place = layout.params.iter().find(of)?;
                let first = if place.spec.name == "a" { 1 } else { 1001 };
                Some((first + i - place.offset) as f32)
            };
            let expected: Vec<f32> =
                (rank * n..(rank + 1) * n).map(|i| whole(i).unwrap_or(0.0)).collect();
            assert_eq!(values, expected);
            assert_eq!(asked, expected.iter().filter(|x| **x != 0.0).count());
        }
        let refuse = &mut |_: &str, _: usize, _: &mut [f32]| Err("no");
        let param = initial_shard(&layout, 1, 0, &Device::flex(), 1);
        assert_eq!(filled(param, &flat_pieces(&layout, 0, 3 * n), refuse).err(), Some("no"));
    }
}
