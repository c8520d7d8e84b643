//! One GPU's handle, workspace and algorithms.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr::{from_ref, null_mut};
use std::sync::Arc;

use burn::tensor::DType;
use cubecl_environment::backtrace::BackTrace;
use cubecl_environment::stream::StreamId;
use cubecl_server::server::{BufferBinding, ServerError, ServerStorage};
use cubecl_server::stream::failed_writing;
use cudarc::driver::{DriverError, result};
use parking_lot::Mutex;

use super::library::{self, Algorithm, CublasLt, Descriptor, Handle, Proposal};
use super::problem::{Beside, Placement, Problem};
use crate::device::cuda::{CudaServer, queue_of};

/// Bytes that algorithms may use beside the tensors. All work of a GPU is in one queue (ADR 10), so
/// that one such room serves all products.
const WORKSPACE: usize = 64 << 20;

/// Proposals that are asked for; the first that is usable is taken.
const PROPOSALS: usize = 4;

/// How a problem is computed. Its descriptors stay as long as the process: there is one of each for
/// a shape.
pub(super) struct Plan {
    product: Descriptor,
    a: Descriptor,
    b: Descriptor,
    d: Descriptor,
    algorithm: Algorithm,
    workspace: usize,
}

// SAFETY: the library's descriptors belong to no thread; once made, they are used by CubeCL's
// thread for the GPU alone.
unsafe impl Send for Plan {}
// SAFETY: as above.
unsafe impl Sync for Plan {}

/// One GPU.
pub(super) struct GpuBlas {
    cublas: &'static CublasLt,
    handle: Handle,
    workspace: u64,
    plans: Mutex<HashMap<Problem, Option<Arc<Plan>>>>,
}

// SAFETY: a handle of cuBLASLt may be used by any thread; the workspace is an address.
unsafe impl Send for GpuBlas {}
// SAFETY: as above.
unsafe impl Sync for GpuBlas {}

/// The tensors of a product.
pub(super) struct Blocks {
    pub(super) x: BufferBinding,
    pub(super) y: BufferBinding,
    pub(super) d: BufferBinding,
    pub(super) vector: Option<BufferBinding>,
}

/// Frees a descriptor that is needed no longer.
struct Scrap {
    descriptor: Descriptor,
    free: unsafe extern "C" fn(Descriptor) -> c_int,
}

impl Drop for Scrap {
    fn drop(&mut self) {
        // SAFETY: the descriptor was made, and is not used again.
        unsafe { (self.free)(self.descriptor) };
    }
}

type SetAttribute = unsafe extern "C" fn(Descriptor, c_int, *const c_void, usize) -> c_int;

impl GpuBlas {
    /// Makes the handle and the workspace of a GPU, on CubeCL's thread for it.
    ///
    /// # Errors
    /// The words of the library or the driver.
    pub(super) fn open(library: &'static CublasLt, index: usize) -> Result<GpuBlas, String> {
        let words = |error: DriverError| format!("CUDA: {error:?}");
        let gpu = result::device::get(index as c_int).map_err(words)?;
        let mut handle = null_mut();
        // SAFETY: the GPU was found; its primary context is CubeCL's, and is kept as CubeCL keeps
        // it. The library writes one handle, which is bound to the current context.
        let status = unsafe {
            let context = result::primary_ctx::retain(gpu).map_err(words)?;
            result::ctx::set_current(context).map_err(words)?;
            (library.functions.create)(&mut handle)
        };
        library.check("cublasLtCreate", status)?;
        // SAFETY: the GPU's context is current; the memory is kept as long as the process.
        let workspace = unsafe { result::malloc_sync(WORKSPACE) }.map_err(words)?;
        Ok(GpuBlas { cublas: library, handle, workspace, plans: Mutex::default() })
    }

    /// What is known of a problem: none where it was never looked for.
    pub(super) fn known(&self, problem: &Problem) -> Option<Option<Arc<Plan>>> {
        self.plans.lock().get(problem).cloned()
    }

    /// Looks for an algorithm, on CubeCL's thread, whose context is the GPU's. None, also later,
    /// where the library has none.
    pub(super) fn find(&self, problem: &Problem) -> Option<Arc<Plan>> {
        let found = match self.plan(problem) {
            Ok(plan) => Some(Arc::new(plan)),
            Err(error) => {
                tracing::warn!(
                    "cuBLASLt has no product of {problem:?} ({error}): CubeCL makes it, in fp32 of \
                     factors in TF32 where the GPU has that"
                );
                None
            }
        };
        self.plans.lock().insert(*problem, found.clone());
        found
    }

    fn plan(&self, p: &Problem) -> Result<Plan, String> {
        let f = &self.cublas.functions;
        let (a_shape, b_shape) = (turned([p.k, p.n], &p.y), turned([p.m, p.k], &p.x));
        let product = self.product(p)?;
        let a = self.matrix(p, a_shape, p.factors, &p.y)?;
        let b = self.matrix(p, b_shape, p.factors, &p.x)?;
        let d = self.matrix(p, [p.n, p.m], p.result, &p.d)?;
        let preference = self.preference(p)?;
        let (mut proposals, mut count) = ([Proposal::empty(); PROPOSALS], 0);
        // SAFETY: all descriptors are alive; there is room for as many proposals as are asked for.
        let status = unsafe {
            let preference = preference.descriptor;
            let (product, a, b, d) = (product.descriptor, a.descriptor, b.descriptor, d.descriptor);
            let (asked, all) = (PROPOSALS as c_int, proposals.as_mut_ptr());
            (f.propose)(self.handle, product, a, b, d, d, preference, asked, all, &mut count)
        };
        self.cublas.check("cublasLtMatmulAlgoGetHeuristic", status)?;
        let usable = |p: &&Proposal| p.status == 0 && p.workspace <= WORKSPACE;
        let mut given = proposals.iter().take(count.max(0) as usize);
        let best = given.find(usable).ok_or("no algorithm")?;
        let [product, a, b, d] = [product, a, b, d].map(|kept| {
            let descriptor = kept.descriptor;
            std::mem::forget(kept);
            descriptor
        });
        let (algorithm, workspace) = (best.algorithm, best.workspace);
        Ok(Plan { product, a, b, d, algorithm, workspace })
    }

    /// The descriptor of a product whose factors are turned where a tensor lies by columns.
    fn product(&self, p: &Problem) -> Result<Scrap, String> {
        let f = &self.cublas.functions;
        let sums = if p.tf32 { library::COMPUTE_FAST_TF32 } else { library::COMPUTE_FLOAT32 };
        let scale = library::FLOAT32;
        // SAFETY: the library writes one descriptor.
        let made = self.made("cublasLtMatmulDescCreate", f.product_free, |descriptor| unsafe {
            (f.product_create)(descriptor, sums, scale)
        })?;
        for (attribute, factor) in [(library::TRANSPOSE_A, &p.y), (library::TRANSPOSE_B, &p.x)] {
            if factor.by_columns {
                self.set(f.product_set, made.descriptor, attribute, &library::TRANSPOSED)?;
            }
        }
        if let Some((beside, alignment)) = p.vector {
            let epilogue = match beside {
                Beside::Bias => library::ADD_BIAS,
                Beside::ColumnSums => library::SUM_A,
            };
            self.set(f.product_set, made.descriptor, library::EPILOGUE, &epilogue)?;
            // The heuristics look at the address's alignment only.
            let somewhere = u64::from(alignment);
            self.set(f.product_set, made.descriptor, library::BIAS_POINTER, &somewhere)?;
        }
        Ok(made)
    }

    /// The descriptor of matrices as the library sees them: columns of `rows` elements.
    fn matrix(
        &self,
        p: &Problem,
        [rows, columns]: [usize; 2],
        dtype: DType,
        placement: &Placement,
    ) -> Result<Scrap, String> {
        let f = &self.cublas.functions;
        let dtype = if dtype == DType::BF16 { library::BFLOAT16 } else { library::FLOAT32 };
        let (rows, columns, pitch) = (rows as u64, columns as u64, placement.pitch as i64);
        // SAFETY: the library writes one descriptor.
        let made = self.made("cublasLtMatrixLayoutCreate", f.matrix_free, |descriptor| unsafe {
            (f.matrix_create)(descriptor, dtype, rows, columns, pitch)
        })?;
        if p.batch > 1 {
            self.set(f.matrix_set, made.descriptor, library::BATCH_COUNT, &(p.batch as i32))?;
            let stride = placement.batch_stride as i64;
            self.set(f.matrix_set, made.descriptor, library::BATCH_STRIDE, &stride)?;
        }
        Ok(made)
    }

    /// What algorithms may take for granted.
    fn preference(&self, p: &Problem) -> Result<Scrap, String> {
        let f = &self.cublas.functions;
        let call = "cublasLtMatmulPreferenceCreate";
        // SAFETY: the library writes one descriptor.
        let made = self.made(call, f.preference_free, |descriptor| unsafe {
            (f.preference_create)(descriptor)
        })?;
        let (set, preference) = (f.preference_set, made.descriptor);
        self.set(set, preference, library::WORKSPACE_MAX, &(WORKSPACE as u64))?;
        let reductions = library::REDUCTION_IN_COMPUTE_TYPE;
        self.set(set, preference, library::REDUCTIONS, &reductions)?;
        for (attribute, placement) in [
            (library::ALIGNMENT_A, &p.y),
            (library::ALIGNMENT_B, &p.x),
            (library::ALIGNMENT_C, &p.d),
            (library::ALIGNMENT_D, &p.d),
        ] {
            self.set(set, preference, attribute, &placement.alignment)?;
        }
        Ok(made)
    }

    fn made(
        &self,
        call: &str,
        free: unsafe extern "C" fn(Descriptor) -> c_int,
        make: impl FnOnce(*mut Descriptor) -> c_int,
    ) -> Result<Scrap, String> {
        let mut descriptor = null_mut();
        self.cublas.check(call, make(&mut descriptor))?;
        Ok(Scrap { descriptor, free })
    }

    fn set<T>(
        &self,
        set: SetAttribute,
        descriptor: Descriptor,
        attribute: c_int,
        value: &T,
    ) -> Result<(), String> {
        // SAFETY: the descriptor is alive, and the library reads as many bytes as the value has, or
        // none where that is not the attribute's size.
        let status = unsafe { set(descriptor, attribute, from_ref(value).cast(), size_of::<T>()) };
        self.cublas.check(&format!("attribute {attribute}"), status)
    }

    /// Queues a product behind what was asked for so far, on CubeCL's thread; with `add` it is
    /// added to D. What goes wrong is what reading D will say, as with CubeCL's kernels.
    pub(super) fn queue(
        &self,
        server: &mut CudaServer,
        plan: &Plan,
        problem: &Problem,
        blocks: Blocks,
        add: bool,
        stream: StreamId,
    ) {
        let written = [Some(blocks.d.clone()), blocks.vector.clone()];
        if let Err(error) = self.multiply(server, plan, problem, blocks, add, stream) {
            failed_writing(server, stream, written.into_iter().flatten().collect(), error);
        }
    }

    fn multiply(
        &self,
        server: &mut CudaServer,
        plan: &Plan,
        problem: &Problem,
        blocks: Blocks,
        add: bool,
        stream: StreamId,
    ) -> Result<(), ServerError> {
        let generic = |reason| ServerError::Generic { reason, backtrace: BackTrace::capture() };
        // Held until the product is in the queue: what comes later is behind it there.
        let x = server.get_resource(blocks.x, stream)?;
        let y = server.get_resource(blocks.y, stream)?;
        let d = server.get_resource(blocks.d, stream)?;
        let [at_x, at_y, at_d] = [&x, &y, &d].map(|block| block.resource().ptr);
        // On this thread alone, so that a plan's descriptor may hold the address of one product.
        let vector = blocks.vector.map(|block| server.get_resource(block, stream)).transpose()?;
        if let Some(vector) = &vector {
            let (set, at) = (self.cublas.functions.product_set, vector.resource().ptr);
            let told = self.set(set, plan.product, library::BIAS_POINTER, &at);
            told.map_err(generic)?;
        }
        let queue = queue_of(server, stream).map_err(generic)?;
        for (at, placement) in [(at_x, &problem.x), (at_y, &problem.y), (at_d, &problem.d)] {
            if !at.is_multiple_of(placement.alignment.into()) {
                return Err(generic(format!("{at:#x} is not aligned as {placement:?}")));
            }
        }
        let (alpha, beta) = (1f32, if add { 1f32 } else { 0.0 });
        let call = self.cublas.functions.multiply;
        // SAFETY: descriptors, handle, workspace and queue are alive and of this GPU, whose context
        // is current on CubeCL's thread. The addresses are of tensors with the placements that the
        // descriptors have, and what is held above stays where it is until the queue has passed it.
        // The factors of D are read before the call returns.
        let status = unsafe {
            call(
                self.handle,
                plan.product,
                from_ref(&alpha).cast(),
                at_y as *const c_void,
                plan.a,
                at_x as *const c_void,
                plan.b,
                from_ref(&beta).cast(),
                at_d as *const c_void,
                plan.d,
                at_d as *mut c_void,
                plan.d,
                &plan.algorithm,
                self.workspace as *mut c_void,
                plan.workspace,
                queue.cast(),
            )
        };
        self.cublas
            .check("cublasLtMatmul", status)
            .map_err(|error| generic(format!("{error}, of {problem:?}")))
    }
}

/// Rows and columns of a tensor's matrix as the library sees its memory: the elements that follow
/// each other are a column.
fn turned([rows, columns]: [usize; 2], placement: &Placement) -> [usize; 2] {
    if placement.by_columns { [rows, columns] } else { [columns, rows] }
}
