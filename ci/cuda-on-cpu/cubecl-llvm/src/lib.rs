//! In the place of `cubecl-llvm` 0.11.3, without a compiler: cubecl-cuda names both of its kernel
//! compilers, and with its feature `cpp` never calls this one.

use core::fmt;
use cubecl_core::ir::nvidia::SmArch;
use cubecl_environment::backtrace::BackTrace;
use cubecl_runtime::{
    compiler::{CompilationError, Compiler},
    kernel::{BufferIOAttr, KernelDefinition},
};

const STUBBED: &str = "this build has no LLVM: enable cubecl's feature cuda-cpp, or build without \
     the patch of cubecl-llvm";

/// Which code the compiler would have written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LlvmTarget {
    #[default]
    Cpu,
    Nvptx,
}

/// The compiler that is not there.
#[derive(Clone, Debug, Default)]
pub struct PlironCompiler {
    pub target: LlvmTarget,
}

/// `arch` is the AMD architecture in the real crate; here it is only ever `None`.
#[derive(Clone, Debug, Default)]
pub struct PlironOptions {
    pub arch: Option<core::convert::Infallible>,
    pub sm_arch: Option<SmArch>,
    pub ptx_version: Option<nvptx::ptx_version::PtxVersion>,
    pub grid_constants: bool,
    /// Keeps the caller's `..Default::default()` from being redundant.
    pub reserved: (),
}

/// A compiled PTX module, which this crate never makes.
#[derive(Clone, Debug)]
pub struct NvptxModule {
    pub ptx: Vec<core::ffi::c_char>,
    pub entrypoint: String,
    pub ir: String,
    pub shared_memory_size: usize,
    pub io: Vec<BufferIOAttr>,
}

/// The result of [`PlironCompiler::compile`], which never comes.
#[derive(Clone, Debug)]
pub enum PlironArtifact {
    NvptxCode(NvptxModule),
    /// Keeps the caller's catch-all arm reachable.
    Other,
}

impl fmt::Display for PlironArtifact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlironArtifact::NvptxCode(module) => f.write_str(&module.ir),
            PlironArtifact::Other => f.write_str("(nothing)"),
        }
    }
}

impl Compiler for PlironCompiler {
    type Representation = PlironArtifact;
    type CompilationOptions = PlironOptions;

    fn compile(
        &mut self,
        _kernel: KernelDefinition,
        _options: &Self::CompilationOptions,
    ) -> Result<Self::Representation, CompilationError> {
        Err(CompilationError::Generic {
            reason: STUBBED.to_string(),
            backtrace: BackTrace::capture(),
        })
    }

    fn extension(&self) -> &'static str {
        "ll"
    }

    fn lang_tag(&self) -> &'static str {
        "llvm"
    }
}

pub mod nvptx {
    pub mod ptx_version {
        use core::fmt;

        /// A PTX version, which only the LLVM backend asks for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct PtxVersion(());

        impl PtxVersion {
            /// Always `None`: no PTX is written here.
            pub fn for_driver(_driver: i32) -> Option<Self> {
                None
            }
        }

        impl fmt::Display for PtxVersion {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("ptx-stub")
            }
        }
    }
}

pub mod shared {
    pub mod lowered_features {
        use cubecl_core::ir::DeviceProperties;

        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum GpuTarget {
            Nvptx,
        }

        /// Called only where LLVM is the default: fails at the first device, not at a kernel.
        pub fn restrict_features(_props: &mut DeviceProperties, _target: GpuTarget) {
            panic!("{}", crate::STUBBED);
        }
    }
}
