//! Kept tensors that go to pinned memory of a GPU's host and come back, while the GPU uses the
//! memory that they leave and the memory that they come to. On queues that are late by chance a
//! wait that is missing gives other numbers. Where `ZEROPP_TEST_DEVICE` is not `cuda`, there is
//! nothing to try.
#![cfg(feature = "cuda")]

use std::collections::VecDeque;

use burn::tensor::{DType, Device, Tensor, TensorData};
use zeropp_core::choice::{DeviceKind, Precision};
use zeropp_core::device::Devices;
use zeropp_core::meter::{MemoryKind, Meter};
use zeropp_core::split::{AwayPlace, AwayTensors, Saved, Vault};

const ROWS: usize = 64;
const COLUMNS: usize = 64;
const PARCELS: usize = 10;
/// That are out at once.
const OUT: usize = 3;

fn cuda() -> Option<Device> {
    let wanted = std::env::var("ZEROPP_TEST_DEVICE").is_ok_and(|kind| kind == "cuda");
    wanted.then(|| Devices::find(DeviceKind::Cuda, Precision::Bf16).expect("a GPU").of(0))
}

/// A tensor, a view of it, and one in bf16: what a forward keeps.
type Kept = [Saved<2>; 3];

/// Numbers that bf16 has, and matrices that make more of them.
struct Numbers {
    x: Tensor<2>,
    mix: Tensor<2>,
}

impl Numbers {
    fn on(device: &Device) -> Numbers {
        let of = |n: usize, columns: usize, value: fn(usize) -> f32| {
            let data = (0..n).map(value).collect::<Vec<_>>();
            Tensor::<2>::from_data(
                TensorData::new(data, [n / columns, columns]),
                (device, DType::F32),
            )
        };
        let x = of(ROWS * COLUMNS, COLUMNS, |i| (i % 100) as f32);
        Numbers { x, mix: of(COLUMNS * COLUMNS, COLUMNS, |i| -((i % 7) as f32)) }
    }

    /// What parcel `i` keeps.
    fn of(&self, i: usize) -> Tensor<2> {
        self.x.clone() + i as f32
    }

    /// Writes to memory that is free, as later forwards do.
    fn use_memory(&self, device: &Device) {
        let mut noise = self.x.clone();
        for _ in 0..4 {
            noise = noise.matmul(self.mix.clone());
        }
        let halves = noise.clone().cast(DType::BF16).matmul(self.mix.clone().cast(DType::BF16));
        drop((noise, halves));
        device.flush().unwrap();
    }
}

/// What is wrong with what has come back: 0.
fn wrong(numbers: &Numbers, i: usize, kept: &Kept) -> Tensor<1> {
    let wanted = numbers.of(i);
    let apart = |t: Tensor<2>| (t.cast(DType::F32) - wanted.clone()).abs().sum();
    let [tensor, turned, halves] = kept.each_ref().map(Saved::get);
    apart(tensor) + apart(turned.swap_dims(0, 1)) + apart(halves)
}

#[test]
fn kept_tensors_go_to_the_host_and_come_back_as_they_were() {
    let Some(device) = cuda() else { return };
    let (numbers, meter) = (Numbers::on(&device), Meter::new());
    let each = (ROWS * COLUMNS * 6) as u64;
    let mut place = AwayPlace::host(&device, OUT as u64 * each, OUT, "recompute:out").unwrap();
    let mut sum = Tensor::<1>::zeros([1], (&device, DType::F32));
    let mut out: VecDeque<(usize, Kept, AwayTensors)> = VecDeque::new();
    for i in 0..PARCELS {
        let vault = Vault::default();
        let keep = |t: Tensor<2>| {
            let saved = Saved::new(t, MemoryKind::Activation, &meter);
            vault.note(&saved);
            saved
        };
        let tensor = numbers.of(i);
        let (turned, halves) = (tensor.clone().swap_dims(0, 1), tensor.clone().cast(DType::BF16));
        let kept = [tensor, turned, halves].map(keep);
        let mut away = AwayTensors::start_out(vault.clone(), &mut place, &meter).unwrap();
        // At once and later: what is given up before its copy is there is written over.
        if i % 2 == 1 {
            numbers.use_memory(&device);
        }
        away.finish_out().unwrap();
        assert_eq!(meter.now().activation, 0, "all of it is gone");
        numbers.use_memory(&device);
        out.push_back((i, kept, away));
        assert_eq!(meter.now().host_activation, each * out.len() as u64, "a view is no more");
        if out.len() == OUT {
            sum = sum + back(&numbers, &device, out.pop_front().expect("some are out"));
        }
    }
    while let Some(parcel) = out.pop_front() {
        sum = sum + back(&numbers, &device, parcel);
    }
    assert_eq!(meter.now().total() + meter.now().host_activation, 0);
    assert_eq!(sum.into_data().try_to_vec::<f32>().unwrap(), [0.0]);
}

/// Brings a parcel back beside other work; what is wrong with it then.
fn back(
    numbers: &Numbers,
    device: &Device,
    (i, kept, mut away): (usize, Kept, AwayTensors),
) -> Tensor<1> {
    numbers.use_memory(device);
    away.start_in();
    // At once and later: what is used before its copy is there is not there yet.
    if i % 2 == 1 {
        numbers.use_memory(device);
    }
    away.finish_in().unwrap();
    wrong(numbers, i, &kept)
}
