//! Where ranks compute: from the setting `device` to a Burn device for each rank.
//!
//! CUDA and wgpu are one backend of Burn's (`Cube`, with fusion), so everything that is not in a
//! kernel of its own runs the same code on both.

#[cfg(feature = "cuda")]
pub mod cuda;
mod gpus;
mod hand_over;
mod library_search;
mod pinned;
#[cfg(any(feature = "cuda", all(test, target_os = "linux")))]
mod preflight;
mod room;
mod wait;

pub use gpus::Gpu;
pub use hand_over::{copy, hand_over, on, take_over, take_to_read};
pub use library_search::LibrarySearch;
pub use pinned::pinned_bytes;
pub use room::{Room, RoomSource};
pub use wait::wait_for;

use std::ops::Range;

use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::{DeviceKind as Adapter, DeviceType};

use crate::choice::{DeviceKind, Precision};
use crate::field_error::FieldError;

/// The devices of this machine that ranks of this process may use.
#[derive(Clone, Debug, PartialEq)]
pub struct Devices(Vec<Device>);

impl Devices {
    /// Looks for what the setting `device` names. For a GPU that takes a driver and an adapter; for
    /// CUDA also its run-time compiler and headers, without which the first kernel would fail.
    ///
    /// # Errors
    /// The part that is missing and where it was looked for, or a precision that the device does
    /// not have.
    pub fn find(kind: DeviceKind, precision: Precision) -> Result<Devices, FieldError> {
        let found = match kind {
            DeviceKind::Cpu => vec![Device::flex()],
            #[cfg(feature = "cuda")]
            DeviceKind::Cuda => {
                use_one_stream()?;
                let count = preflight::check(&preflight::SearchPaths::default())
                    .map_err(|missing| unusable(kind, missing.problem, missing.help))?;
                (0..count).map(Device::cuda).collect()
            }
            #[cfg(feature = "wgpu")]
            DeviceKind::Wgpu => {
                if Device::enumerate(DeviceType::Wgpu).into_vec().is_empty() {
                    let problem = "no adapter was found";
                    let help = "install a Vulkan, Metal or DirectX 12 driver, or use cpu";
                    return Err(unusable(kind, problem, help));
                }
                vec![Device::wgpu(Adapter::DefaultDevice)]
            }
            #[cfg(not(all(feature = "cuda", feature = "wgpu")))]
            kind => return Err(absent(kind)),
        };
        let devices = Devices(found);
        devices.check_precision(kind, precision)?;
        Ok(devices)
    }

    /// The device of the rank that is number `local` of those on this machine. Ranks beyond the
    /// number of devices share them.
    pub fn of(&self, local: usize) -> Device {
        self.0[local % self.0.len()].clone()
    }

    /// The devices of the ranks that are left of so many when `lost` are gone, one for each. A
    /// device that others shared with them stays.
    pub fn without(&self, lost: Range<usize>, ranks: usize) -> Devices {
        let left = (0..ranks).filter(|rank| !lost.contains(rank));
        Devices(left.map(|rank| self.of(rank)).collect())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// A bf16 that can only be stored gives garbage, not an error.
    fn check_precision(&self, kind: DeviceKind, precision: Precision) -> Result<(), FieldError> {
        let gpu = kind != DeviceKind::Cpu;
        if gpu && precision == Precision::Bf16 {
            let lacks = |d: &Device| !d.supports_dtype(burn::tensor::DType::BF16);
            if let Some(at) = self.0.iter().position(lacks) {
                let problem = format!("device {kind} {at} does not compute in it");
                return Err(FieldError::new("precision", Precision::Bf16, problem, "use fp32"));
            }
        }
        Ok(())
    }
}

/// Makes CubeCL give all threads of the process one stream on each GPU: only then does a thread see
/// what another has last written in place (docs/adr/0010-tensors-between-threads.md).
#[cfg(feature = "cuda")]
fn use_one_stream() -> Result<(), FieldError> {
    use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};

    // CubeCL takes its settings once. They may be set by now, by the program around.
    static FIRST: std::sync::Once = std::sync::Once::new();
    FIRST.call_once(|| {
        let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
        config.streaming.max_streams = 1;
        CubeClRuntimeConfig::try_set(config);
    });
    let streams = CubeClRuntimeConfig::get().streaming.max_streams;
    if streams == 1 {
        return Ok(());
    }
    let problem = format!(
        "CubeCL was used before zeropp, with up to {streams} streams a GPU, and training takes one"
    );
    let help = "put `[streaming]` and `max_streams = 1` into cubecl.toml, or open zeropp's devices \
                first";
    Err(unusable(DeviceKind::Cuda, problem, help))
}

/// The GPUs of `kind` on this machine, as they were when this process asked first, before it had
/// anything on them; none where that is not known, as with wgpu and where there is no driver.
pub fn gpus(kind: DeviceKind) -> &'static [Gpu] {
    match kind {
        #[cfg(feature = "cuda")]
        DeviceKind::Cuda => {
            static FOUND: std::sync::OnceLock<Vec<Gpu>> = std::sync::OnceLock::new();
            let find = || preflight::gpus(&preflight::SearchPaths::default()).unwrap_or_default();
            FOUND.get_or_init(find)
        }
        _ => &[],
    }
}

/// Whether this build has devices of `kind`.
pub fn is_built(kind: DeviceKind) -> bool {
    match kind {
        DeviceKind::Cpu => true,
        DeviceKind::Cuda => cfg!(feature = "cuda"),
        DeviceKind::Wgpu => cfg!(feature = "wgpu"),
    }
}

/// The error of a build that lacks devices of `kind`.
pub fn absent(kind: DeviceKind) -> FieldError {
    let help = format!("use cpu, or build zeropp with --features {kind}");
    FieldError::new("device", kind, "is not in this build", help)
}

#[cfg(feature = "cube")]
fn unusable(kind: DeviceKind, problem: impl Into<String>, help: impl Into<String>) -> FieldError {
    FieldError::new("device", kind, problem, help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_share_devices_in_turn() {
        let devices =
            Devices::find(DeviceKind::Cpu, Precision::Fp32).expect("there is always a CPU");
        assert_eq!((devices.of(0), devices.of(5)), (Device::flex(), Device::flex()));
        assert_eq!(devices.count(), 1);
    }

    #[test]
    fn a_build_says_what_it_lacks() {
        for kind in DeviceKind::ALL.iter().copied().filter(|kind| !is_built(*kind)) {
            let error = Devices::find(kind, Precision::Fp32).unwrap_err();
            let text = error.to_string();
            let help = format!("use cpu, or build zeropp with --features {kind}");
            assert!(text.contains("is not in this build") && text.contains(&help), "{text}");
        }
    }
}
