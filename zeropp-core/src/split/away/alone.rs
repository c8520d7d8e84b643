//! A tensor that is out of memory from use to use.

use std::io;
use std::ops::Range;

use burn::tensor::Tensor;

use super::place::{AwayPlace, Parcel};
use crate::device;
use crate::split::storage::{Storage, View};

/// The tensor, of fp32, on its way out, there, or on its way back.
pub struct AwayTensor {
    parcel: Box<dyn Parcel>,
    view: View,
    /// Whether its copy out may still hold its memory.
    leaves: bool,
}

impl AwayTensor {
    /// Starts copying `t` to `place`. Its memory is held until [`finish_out`](Self::finish_out).
    ///
    /// # Errors
    /// A place that has no room, or that is not for tensors of this device.
    pub fn start_out(t: Tensor<1>, place: &mut AwayPlace) -> io::Result<AwayTensor> {
        let bytes = 4 * t.dims()[0] as u64;
        let is_all = |(storage, _): &(Storage, View)| storage.bytes() == bytes;
        // What is a part of a storage goes alone.
        let of = Storage::of(&t).filter(is_all).or_else(|| Storage::of(&device::copy(&t)));
        let (storage, view) = of
            .filter(|of| is_all(of) && place.0.takes(&of.0))
            .ok_or_else(|| io::Error::other("its storage is not known"))?;
        drop(t);
        Ok(AwayTensor { parcel: place.0.start_out(vec![storage])?, view, leaves: true })
    }

    /// After the copy out gives the memory up. A GPU's later work waits for it, not the caller.
    ///
    /// # Errors
    /// What the system says.
    pub fn finish_out(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.leaves) { self.parcel.finish_out() } else { Ok(()) }
    }

    /// Takes memory and starts copying back.
    ///
    /// # Errors
    /// What the system says of the copy out.
    pub fn start_in(&mut self) -> io::Result<()> {
        self.finish_out()?;
        self.parcel.start_in();
        Ok(())
    }

    /// After that the tensor, which is out no more.
    ///
    /// # Errors
    /// What the system says.
    pub fn finish_in(mut self) -> io::Result<Tensor<1>> {
        let storages = self.parcel.finish_in()?;
        let storage = storages.first().ok_or_else(|| io::Error::other("it was not asked for"))?;
        Ok(storage.tensor(self.view))
    }

    /// Some of its elements, once they are out; it stays there.
    ///
    /// # Errors
    /// What the system says.
    pub fn read(&mut self, range: Range<usize>) -> io::Result<Vec<f32>> {
        let mut values = vec![0f32; range.len()];
        self.parcel.read(4 * range.start as u64, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_tensor::{from_vec, into_vec};

    #[test]
    fn a_tensor_alone_goes_out_is_read_there_and_comes_back() {
        let mut place = AwayPlace::file(&std::env::temp_dir()).unwrap();
        let values: Vec<f32> = (0..300).map(|i| i as f32).collect();
        let mut away = AwayTensor::start_out(from_vec(values.clone(), [300]), &mut place).unwrap();
        assert_eq!(away.read(7..9).unwrap(), [7.0, 8.0]);
        away.finish_out().unwrap();
        away.start_in().unwrap();
        assert_eq!(into_vec(away.finish_in().unwrap()), values);
        let part = from_vec(values, [300]).slice([10..20]);
        assert!(AwayTensor::start_out(part, &mut place).is_err());
    }
}
