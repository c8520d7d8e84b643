//! libcublasLt, found and loaded when it is first asked for: nothing of it is needed to build.
//!
//! Types, names and numbers are those of NVIDIA's cublasLt.h and library_types.h.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;

use libloading::Library;

use crate::device::LibrarySearch;
use crate::library_functions;

/// The variable that names the library; `none` for no library.
const VARIABLE: &str = "ZEROPP_CUBLASLT_LIB";

/// The first version whose workspaces, types and orders are as here: that of CUDA 12.0.
const VERSION_MIN: usize = 120_000;

pub(crate) type Handle = *mut c_void;
pub(crate) type Descriptor = *mut c_void;

/// Numbers of the element types.
pub(crate) const FLOAT32: c_int = 0;
pub(crate) const BFLOAT16: c_int = 14;
/// The sums' type: fp32, and of fp32 factors without a rounding of those to TF32.
pub(crate) const COMPUTE_FLOAT32: c_int = 68;
/// The same of fp32 factors rounded to TF32.
pub(crate) const COMPUTE_FAST_TF32: c_int = 77;

/// Attributes of a product.
pub(crate) const TRANSPOSE_A: c_int = 3;
pub(crate) const TRANSPOSE_B: c_int = 4;
/// What is done with the sums beside, and where the vector is that this takes.
pub(crate) const EPILOGUE: c_int = 7;
pub(crate) const BIAS_POINTER: c_int = 8;
/// A number is added for each of the library's rows, in the result's type.
pub(crate) const ADD_BIAS: u32 = 4;
/// The sums of A's rows over the depth of the product go there, in the result's type.
pub(crate) const SUM_A: u32 = 256;
/// The number of a transposed factor.
pub(crate) const TRANSPOSED: i32 = 1;

/// Attributes of a matrix.
pub(crate) const BATCH_COUNT: c_int = 5;
pub(crate) const BATCH_STRIDE: c_int = 6;

/// Attributes of what an algorithm may take.
pub(crate) const WORKSPACE_MAX: c_int = 1;
pub(crate) const REDUCTIONS: c_int = 3;
pub(crate) const ALIGNMENT_A: c_int = 5;
pub(crate) const ALIGNMENT_B: c_int = 6;
pub(crate) const ALIGNMENT_C: c_int = 7;
pub(crate) const ALIGNMENT_D: c_int = 8;
/// Parts of a sum are added in the workspace, in fp32 and in one order: not in the result's type.
pub(crate) const REDUCTION_IN_COMPUTE_TYPE: u32 = 2;

/// An algorithm: numbers of the library's.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Algorithm([u64; 8]);

/// What the library's heuristics propose.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Proposal {
    pub(crate) algorithm: Algorithm,
    pub(crate) workspace: usize,
    pub(crate) status: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

impl Proposal {
    pub(crate) fn empty() -> Self {
        let algorithm = Algorithm([0; 8]);
        Self { algorithm, workspace: 0, status: -1, waves: 0.0, reserved: [0; 4] }
    }
}

library_functions! {
    create = "cublasLtCreate": fn(*mut Handle) -> c_int;
    status_text = "cublasLtGetStatusString": fn(c_int) -> *const c_char;
    product_create = "cublasLtMatmulDescCreate": fn(*mut Descriptor, c_int, c_int) -> c_int;
    product_set = "cublasLtMatmulDescSetAttribute":
        fn(Descriptor, c_int, *const c_void, usize) -> c_int;
    product_free = "cublasLtMatmulDescDestroy": fn(Descriptor) -> c_int;
    matrix_create = "cublasLtMatrixLayoutCreate":
        fn(*mut Descriptor, c_int, u64, u64, i64) -> c_int;
    matrix_set = "cublasLtMatrixLayoutSetAttribute":
        fn(Descriptor, c_int, *const c_void, usize) -> c_int;
    matrix_free = "cublasLtMatrixLayoutDestroy": fn(Descriptor) -> c_int;
    preference_create = "cublasLtMatmulPreferenceCreate": fn(*mut Descriptor) -> c_int;
    preference_set = "cublasLtMatmulPreferenceSetAttribute":
        fn(Descriptor, c_int, *const c_void, usize) -> c_int;
    preference_free = "cublasLtMatmulPreferenceDestroy": fn(Descriptor) -> c_int;
    propose = "cublasLtMatmulAlgoGetHeuristic":
        fn(Handle, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, Descriptor, c_int,
           *mut Proposal, *mut c_int) -> c_int;
    multiply = "cublasLtMatmul":
        fn(Handle, Descriptor, *const c_void, *const c_void, Descriptor, *const c_void, Descriptor,
           *const c_void, *const c_void, Descriptor, *mut c_void, Descriptor, *const Algorithm,
           *mut c_void, usize, *mut c_void) -> c_int;
}

/// A loaded libcublasLt.
pub(crate) struct CublasLt {
    pub(crate) functions: Functions,
    /// As the library counts: 13.1.0 is 130100.
    pub(crate) version: usize,
}

/// Where to look for libcublasLt: what [`VARIABLE`] names alone where it is set; else
/// `libcublasLt.so.13` and others by name, then beside the toolkit, then NVIDIA's Python packages.
fn search_from_env() -> LibrarySearch {
    let names = ["libcublasLt.so.13", "libcublasLt.so"];
    let toolkit = std::env::var_os("CUDA_PATH").filter(|path| !path.is_empty());
    let toolkits = toolkit.map(PathBuf::from).into_iter();
    let toolkits = toolkits.chain(["/usr/local/cuda", "/opt/cuda"].map(PathBuf::from));
    let folders = toolkits.flat_map(|toolkit| ["lib64", "lib"].map(|lib| toolkit.join(lib)));
    LibrarySearch::from_env(VARIABLE, &names, folders.collect(), "nvidia/cu13/lib")
}

impl CublasLt {
    /// Loads the first library that there is, unless the user wants none.
    ///
    /// # Errors
    /// Why there is none.
    pub(crate) fn load() -> Result<CublasLt, String> {
        if std::env::var_os(VARIABLE).is_some_and(|value| value == "none") {
            return Err(format!("{VARIABLE} = none"));
        }
        let (library, name) = search_from_env().open().map_err(|tried| {
            format!("libcublasLt was not found; tried {tried}; {VARIABLE} may name its file")
        })?;
        // SAFETY: the type is the header's, of a function that returns a number.
        let version = unsafe {
            library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion\0").map(|f| f())
        };
        let version = version.map_err(|_| format!("{name} is not cuBLASLt"))?;
        if version < VERSION_MIN {
            return Err(format!("{name} is cuBLASLt {version}, older than {VERSION_MIN}"));
        }
        let functions = Functions::find(&library).map_err(|why| format!("{name}: {why}"))?;
        // Descriptors and handles live as long as the process: so does the code.
        std::mem::forget(library);
        Ok(CublasLt { functions, version })
    }

    /// An error for every status but that of success.
    pub(crate) fn check(&self, call: &str, status: c_int) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it returns a constant of the library's, or nothing.
        let text = unsafe {
            let text = (self.functions.status_text)(status);
            if text.is_null() { "".into() } else { CStr::from_ptr(text).to_string_lossy() }
        };
        Err(format!("{call}: {status} {text}"))
    }
}
