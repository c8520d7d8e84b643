//! The libraries and headers that CUDA needs at run time, looked for before any rank starts.
//!
//! Without this a missing library ends in a panic of a device thread and a lost channel in its
//! callers. Kernels are compiled at run time, so besides the driver it takes NVRTC and the
//! toolkit's headers. Libraries are opened by the names, and headers looked for in the folders,
//! that the kernels' compiler itself will use.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};

use libloading::{Library, Symbol};

use super::Gpu;

/// Names of the driver's library.
const DRIVER: [&str; 2] = ["libcuda.so", "libcuda.so.1"];
/// Names of the run-time compiler's library, newest first.
const NVRTC: [&str; 4] = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"];
/// Names of the library that reports what of a device is in use.
const MANAGEMENT: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];
/// Oldest run-time compiler whose headers fit the generated kernels.
const NVRTC_MAJOR_MIN: i32 = 13;
/// Headers that generated kernels include.
const HEADERS: [&str; 4] = ["cuda_fp16.h", "cuda_bf16.h", "mma.h", "crt/mma.h"];
/// Where a toolkit lies if `CUDA_PATH` does not say so.
const TOOLKITS: [&str; 2] = ["/usr/local/cuda", "/opt/cuda"];

/// A missing part, as a configuration error says it.
#[derive(Debug, PartialEq)]
pub(super) struct Missing {
    pub(super) problem: String,
    pub(super) help: String,
}

impl Missing {
    fn new(problem: impl Into<String>, help: impl Into<String>) -> Self {
        Self { problem: problem.into(), help: help.into() }
    }
}

/// Where parts are looked for.
#[derive(Clone, Debug)]
pub(super) struct SearchPaths {
    /// Folders of libraries in place of those the dynamic loader searches.
    pub(super) libraries: Option<Vec<PathBuf>>,
    /// `CUDA_PATH`.
    pub(super) cuda_path: Option<PathBuf>,
    /// Toolkits where that is not set.
    pub(super) toolkits: Vec<PathBuf>,
}

impl Default for SearchPaths {
    fn default() -> Self {
        Self {
            libraries: None,
            cuda_path: std::env::var_os("CUDA_PATH").map(PathBuf::from),
            toolkits: TOOLKITS.map(PathBuf::from).to_vec(),
        }
    }
}

impl SearchPaths {
    /// The first of `names` that can be opened.
    fn open(&self, names: &[&str]) -> Option<Library> {
        let folders = self.libraries.iter().flatten();
        let listed = folders.flat_map(|folder| names.iter().map(move |name| folder.join(name)));
        let searched = names.iter().map(PathBuf::from).filter(|_| self.libraries.is_none());
        // SAFETY: loading runs the library's initialisers. These are NVIDIA's libraries, which
        // the kernels' compiler would load all the same a moment later.
        listed.chain(searched).find_map(|file| unsafe { Library::new(file) }.ok())
    }

    /// Where libraries are looked for, in words.
    fn searched(&self) -> String {
        match (&self.libraries, std::env::var("LD_LIBRARY_PATH")) {
            (Some(folders), _) => list(folders),
            (None, Ok(path)) if !path.is_empty() => {
                format!("LD_LIBRARY_PATH = {path} and the system's library folders")
            }
            _ => "the system's library folders (LD_LIBRARY_PATH is not set)".into(),
        }
    }

    /// The toolkit's folder.
    fn toolkit(&self) -> Result<PathBuf, Missing> {
        if let Some(path) = &self.cuda_path {
            return Ok(path.clone());
        }
        let found = self.toolkits.iter().find(|folder| folder.exists());
        found.cloned().ok_or_else(|| {
            let folders: Vec<_> = self.toolkits.iter().map(|t| t.display().to_string()).collect();
            let problem = format!(
                "the CUDA toolkit's headers were not found; CUDA_PATH is not set and there is \
                 no {}",
                folders.join(", no ")
            );
            Missing::new(problem, "set CUDA_PATH to a folder that holds include/cuda_fp16.h")
        })
    }
}

fn list(folders: &[PathBuf]) -> String {
    folders.iter().map(|f| f.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// Looks for driver, device, run-time compiler and headers, in this order; returns the number of
/// devices.
///
/// # Errors
/// The first that is missing or does not fit, and where it was looked for.
pub(super) fn check(places: &SearchPaths) -> Result<usize, Missing> {
    let driver = driver(places)?;
    nvrtc(places, driver.version)?;
    headers(&places.toolkit()?.join("include"))?;
    Ok(driver.devices)
}

/// Name and memory of each device; none where the driver or a device does not report them.
pub(super) fn gpus(places: &SearchPaths) -> Option<Vec<Gpu>> {
    type OfDevice<T> = unsafe extern "C" fn(*mut T, c_int) -> c_int;
    type TextOf = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    let CudaDriver { devices, library, .. } = driver(places).ok()?;
    // SAFETY: the signatures are those of the driver's API.
    let (get, total, name, bus) = unsafe {
        let get = symbol::<OfDevice<c_int>>(&library, c"cuDeviceGet").ok()?;
        let total = symbol::<OfDevice<usize>>(&library, c"cuDeviceTotalMem_v2").ok()?;
        let name = symbol::<TextOf>(&library, c"cuDeviceGetName").ok()?;
        (get, total, name, symbol::<TextOf>(&library, c"cuDeviceGetPCIBusId").ok()?)
    };
    let text = |ask: &Symbol<TextOf>, device: c_int| {
        let mut text = [0 as c_char; 128];
        // SAFETY: the array has the length that is passed, of which the last byte stays zero.
        let fails = unsafe { ask(text.as_mut_ptr(), text.len() as c_int - 1, device) != 0 };
        // SAFETY: the array ends with a zero.
        (!fails).then(|| unsafe { CStr::from_ptr(text.as_ptr()) }.to_owned())
    };
    let manager = places.open(&MANAGEMENT);
    let of = |index: usize| {
        let (mut device, mut bytes) = (0, 0usize);
        // SAFETY: both pointers are to live values, and the driver has been started.
        let fails =
            unsafe { get(&mut device, index as c_int) != 0 || total(&mut bytes, device) != 0 };
        let name = text(&name, device).filter(|_| !fails)?.to_string_lossy().into_owned();
        let free = manager.as_ref().and_then(|library| free(library, &text(&bus, device)?));
        Some(Gpu { name, total: bytes as u64, free: free.map(|free| free.min(bytes as u64)) })
    };
    (0..devices).map(of).collect()
}

/// Bytes that are free on the device at this place on the bus. To ask the driver itself would take
/// a context on the device, which is half a gigabyte there.
fn free(library: &Library, bus: &CStr) -> Option<u64> {
    type Device = *mut c_void;
    type Init = unsafe extern "C" fn() -> c_int;
    type Find = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
    type Ask = unsafe extern "C" fn(Device, *mut [u64; 3]) -> c_int;
    // SAFETY: the signatures are those of the library's API, whose figures of memory are total,
    // free and used; the pointers are to live values.
    unsafe {
        let find = symbol::<Find>(library, c"nvmlDeviceGetHandleByPciBusId_v2").ok()?;
        let ask = symbol::<Ask>(library, c"nvmlDeviceGetMemoryInfo").ok()?;
        let (mut device, mut bytes) = (null_mut(), [0; 3]);
        let fails = symbol::<Init>(library, c"nvmlInit_v2").ok()?() != 0
            || find(bus.as_ptr(), &mut device) != 0
            || ask(device, &mut bytes) != 0;
        (!fails).then_some(bytes[1])
    }
}

/// NVIDIA's driver, started.
struct CudaDriver {
    /// The newest CUDA version that it knows: 13000 for 13.0.
    version: i32,
    devices: usize,
    library: Library,
}

/// Starts the driver.
fn driver(places: &SearchPaths) -> Result<CudaDriver, Missing> {
    let install = "install NVIDIA's driver, or use cpu";
    let Some(library) = places.open(&DRIVER) else {
        let problem = format!(
            "libcuda.so.1, the NVIDIA driver's library, cannot be loaded; looked in {}",
            places.searched()
        );
        return Err(Missing::new(problem, install));
    };
    let broken = |lacks: String| {
        Missing::new(format!("libcuda.so.1 is not the NVIDIA driver's: {lacks}"), install)
    };
    let (mut version, mut count) = (0, 0);
    // SAFETY: the signatures are those of the driver's API, and both pointers are to live values.
    let (started, counted) = unsafe {
        type Counter = unsafe extern "C" fn(*mut c_int) -> c_int;
        type Init = unsafe extern "C" fn(c_uint) -> c_int;
        let init = symbol::<Init>(&library, c"cuInit").map_err(broken)?;
        let get_version = symbol::<Counter>(&library, c"cuDriverGetVersion").map_err(broken)?;
        let get_count = symbol::<Counter>(&library, c"cuDeviceGetCount").map_err(broken)?;
        get_version(&mut version);
        (init(0), get_count(&mut count))
    };
    let visible = || match std::env::var("CUDA_VISIBLE_DEVICES") {
        Ok(value) => format!("; CUDA_VISIBLE_DEVICES = {value:?}"),
        Err(_) => String::new(),
    };
    if started != 0 {
        let problem = format!(
            "the NVIDIA driver (CUDA {}) finds no device: cuInit gives error {started}{}",
            dotted(version),
            visible()
        );
        return Err(Missing::new(problem, "check nvidia-smi, or use cpu"));
    }
    if counted != 0 || count <= 0 {
        let problem = format!("the NVIDIA driver reports no device{}", visible());
        return Err(Missing::new(problem, "check nvidia-smi, or use cpu"));
    }
    Ok(CudaDriver { version, devices: count as usize, library })
}

fn dotted(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// A run-time compiler that is new enough for the kernels, not too new for the driver, and whole.
fn nvrtc(places: &SearchPaths, driver: i32) -> Result<(), Missing> {
    let help = "put the folder of libnvrtc.so.13 (the toolkit's, or the Python package \
                nvidia-cuda-nvrtc's) on LD_LIBRARY_PATH";
    let Some(library) = places.open(&NVRTC) else {
        let problem = format!(
            "libnvrtc.so.13, CUDA's run-time compiler, cannot be loaded; looked in {}",
            places.searched()
        );
        return Err(Missing::new(problem, help));
    };
    let broken = |lacks: String| Missing::new(format!("libnvrtc is not NVIDIA's: {lacks}"), help);
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the signature is that of NVRTC's API, and both pointers are to live values.
    unsafe {
        type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
        symbol::<Version>(&library, c"nvrtcVersion").map_err(broken)?(&mut major, &mut minor);
    }
    if major < NVRTC_MAJOR_MIN {
        let problem = format!("NVRTC {major}.{minor} was found, and kernels need 13.0 or newer");
        return Err(Missing::new(problem, help));
    }
    if major * 1000 + minor * 10 > driver {
        let problem = format!(
            "NVRTC {major}.{minor} is newer than the driver, which goes up to CUDA {}",
            dotted(driver)
        );
        return Err(Missing::new(problem, "use an older NVRTC 13, or a newer driver"));
    }
    let code = compile_nothing(&library).map_err(broken)?;
    if code != 0 {
        let problem = format!(
            "NVRTC {major}.{minor} cannot compile: {}",
            error_text(&library, code).unwrap_or_else(|| format!("error {code}"))
        );
        let help = format!("libnvrtc-builtins.so.{major}.{minor} must lie beside libnvrtc.so.13");
        return Err(Missing::new(problem, help));
    }
    Ok(())
}

/// Compiles an empty kernel: that is when NVRTC loads the rest of itself. Returns its code.
fn compile_nothing(library: &Library) -> Result<c_int, String> {
    type Program = *mut c_void;
    type Strings = *const *const c_char;
    type Create = unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        Strings,
        Strings,
    ) -> c_int;
    type Compile = unsafe extern "C" fn(Program, c_int, Strings) -> c_int;
    type Destroy = unsafe extern "C" fn(*mut Program) -> c_int;
    let source = c"extern \"C\" __global__ void empty() {}";
    let mut program: Program = null_mut();
    // SAFETY: the signatures are those of NVRTC's API; it copies source and name; the program is
    // destroyed once, and only where it was made.
    unsafe {
        let create = symbol::<Create>(library, c"nvrtcCreateProgram")?;
        let compile = symbol::<Compile>(library, c"nvrtcCompileProgram")?;
        let destroy = symbol::<Destroy>(library, c"nvrtcDestroyProgram")?;
        let code = create(&mut program, source.as_ptr(), c"empty.cu".as_ptr(), 0, null(), null());
        if code != 0 {
            return Ok(code);
        }
        let code = compile(program, 0, null());
        destroy(&mut program);
        Ok(code)
    }
}

/// A function of the library.
///
/// # Errors
/// That there is none of this name, in words.
///
/// # Safety
/// `T` must be the function's type.
unsafe fn symbol<'a, T>(library: &'a Library, name: &CStr) -> Result<Symbol<'a, T>, String> {
    // SAFETY: as the caller says.
    unsafe { library.get::<T>(name) }.map_err(|_| format!("it has no {}", name.to_string_lossy()))
}

/// NVRTC's words for an error.
fn error_text(library: &Library, code: c_int) -> Option<String> {
    type Text = unsafe extern "C" fn(c_int) -> *const c_char;
    // SAFETY: the signature is that of NVRTC's API; the text is a constant of the library, which
    // is open while it is copied.
    unsafe {
        let text = symbol::<Text>(library, c"nvrtcGetErrorString").ok()?(code);
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}

fn headers(include: &Path) -> Result<(), Missing> {
    let Some(header) = HEADERS.iter().find(|header| !include.join(header).exists()) else {
        return Ok(());
    };
    let problem = format!(
        "{} is missing, one of the toolkit's headers that kernels include",
        include.join(header).display()
    );
    let help = "install the CUDA 13 toolkit's headers, or set CUDA_PATH to a folder whose include \
                has cuda_fp16.h, cuda_bf16.h, mma.h and crt/";
    Err(Missing::new(problem, help))
}

#[cfg(all(test, target_os = "linux"))]
#[path = "preflight_tests.rs"]
mod tests;
