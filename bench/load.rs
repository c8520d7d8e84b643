//! What loading weights takes beside them: the most memory that one rank allocates while it makes
//! its shards and reads its own slices of a LLaMA folder, beside 1.1 × its shard + one tensor.
//!
//!     cargo bench --bench load
//!
//! Writes a folder of random weights (390 MB in bf16, 780 MB in fp32) into the system's temporary
//! folder. A rank's optimizer state and gradients come later and are not here, as they are not of
//! the load. Counted at every allocation; what a mapped file shows of itself is no allocation, and
//! the system may take it back. Ends with code 1 where the bound does not hold.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, Device};
use zeropp::Config;
use zeropp::layer::Part;
use zeropp::meter::Meter;
use zeropp::weights::{Family, Import, ParameterShape, StoreAs, Tensor, Weights, write_folder};
use zeropp_comm::Communicator;
use zeropp_comm::groups::Groups;
use zeropp_comm::threads::{ThreadsOptions, ThreadsWorld};
use zeropp_zero3::ShardedStage;
use zeropp_zero3::stage::ShardOptions;

/// Counts what is allocated now, and the most so far.
struct Counted;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn add(bytes: usize) {
    let now = NOW.fetch_add(bytes, Ordering::Relaxed) + bytes;
    MOST.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: all is handed on to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promises.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both are there where it moves.
        add(size);
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

const VOCABULARY: usize = 8192;

/// A model of 194 million parameters.
fn config(pp: usize, zero3: usize) -> Config {
    let llama = Config::for_model("llama").expect("known");
    Config {
        layers: 16,
        hidden: 1024,
        heads: 16,
        kv_heads: Some(4),
        intermediate: Some(2752),
        seq: 64,
        pp,
        zero3,
        ..llama
    }
}

fn parts() -> Vec<Part> {
    let decoder = config(1, 1).decoder(VOCABULARY).expect("a good model");
    zeropp::model::build(decoder).parts
}

fn shapes() -> Vec<ParameterShape> {
    let all = parts().into_iter().flat_map(|part| part.parameters());
    all.map(|p| ParameterShape { name: p.name, shape: p.shape }).collect()
}

/// The model's tensors with random numbers, as the class's own files have them.
fn write(folder: &Path, store_as: StoreAs) {
    let tensor = |p: ParameterShape| {
        let mut shape = p.shape;
        if p.name.ends_with("_proj.weight") {
            shape.reverse();
        }
        Tensor { name: p.name, shape, store_as }
    };
    let tensors: Vec<Tensor> = shapes().into_iter().map(tensor).collect();
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let values = |i: usize| {
        let n = tensors[i].shape.iter().product();
        Ok::<Vec<f32>, zeropp::weights::WeightsError>((0..n).map(|_| random()).collect())
    };
    write_folder(folder, &tensors, 200 << 20, &[], values).expect("room for the folder");
}

/// All ranks' groups, made together.
fn groups(config: &Config) -> Vec<Groups> {
    let mesh = config.mesh();
    let ranks = ThreadsWorld::new(mesh.world(), ThreadsOptions::default()).communicators();
    std::thread::scope(|scope| {
        let join = |world: Arc<dyn Communicator>| {
            scope.spawn(move || Groups::new(world, mesh).expect("threads of one process"))
        };
        let threads: Vec<_> = ranks.into_iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Bytes that the rank of these groups allocates at most while it loads, and those of its shard.
fn load(groups: &Groups, folder: &Path) -> (usize, usize) {
    let (all, shapes) = (parts(), shapes());
    let each = all.len().div_ceil(groups.mesh.pp);
    let mine = all.chunks(each).nth(groups.coords.pp).expect("a stage for each rank");
    let options = ShardOptions {
        device: Device::flex(),
        compute: DType::F32,
        pack_weights: false,
        zero1: false,
        file: None,
        seed: 0,
        in_order: false,
    };
    let meter = Meter::new();
    let before = NOW.load(Ordering::Relaxed);
    MOST.store(before, Ordering::Relaxed);
    let weights = Weights::open(folder).expect("just written");
    let import = Import::new(weights, Family::Llama, &shapes, VOCABULARY).expect("its own model");
    let mut stage = ShardedStage::new(groups.coords.pp, mine, groups, &options, &meter);
    stage
        .fill_parameters(|name, offset, out| import.read(name, offset, out))
        .expect("finite numbers");
    let most = MOST.load(Ordering::Relaxed) - before;
    (most, meter.now().parameter_shard as usize)
}

fn main() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let tensors = shapes().into_iter().map(|p| 4 * p.shape.iter().product::<usize>());
    let tensor = tensors.max().expect("a tensor");
    let mib = |bytes: usize| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    println!("the largest tensor: {} MiB in fp32\n", mib(tensor));
    println!("| files | mesh | shard, MiB | most while loading, MiB | of the shard | bound, MiB |");
    println!("|---|---|---|---|---|---|");
    let mut holds = true;
    for (name, store_as) in [("bf16", StoreAs::Bf16), ("fp32", StoreAs::F32)] {
        let folder = dir.path().join(name);
        write(&folder, store_as);
        for (pp, zero3) in [(1, 1), (2, 1), (1, 2), (2, 2), (4, 4)] {
            let ranks = groups(&config(pp, zero3));
            let loads = ranks.iter().map(|groups| load(groups, &folder));
            let over = |(most, shard): &(usize, usize)| most - shard;
            let (most, shard) = loads.max_by_key(over).expect("a rank");
            let bound = shard + shard / 10 + tensor;
            holds &= most <= bound;
            println!(
                "| {name} | pp {pp}, zero3 {zero3} | {} | {} | {:.4} | {} |",
                mib(shard),
                mib(most),
                most as f64 / shard as f64,
                mib(bound)
            );
        }
    }
    if !holds {
        println!("\nthe bound does not hold");
        std::process::exit(1);
    }
}
