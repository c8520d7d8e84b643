//! Waiting for what a device computes behind the calls.

use burn::tensor::Tensor;

/// Waits until the device has made `t`, which is not empty: reads its first element. To turn it
/// into data is not enough, as Burn copies from a GPU only when somebody looks at the data.
pub fn wait_for<const D: usize>(t: Tensor<D>) {
    let first = t.inner().slice([(); D].map(|()| 0..1)).into_data();
    std::hint::black_box(first.iter::<f32>().next());
}
