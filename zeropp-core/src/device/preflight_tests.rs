//! Every part missing once, with libraries made here.

use std::fs;
use std::process::Command;

use tempfile::TempDir;

use super::*;

/// A folder in which a machine is put together part by part.
struct Machine {
    folder: TempDir,
    places: SearchPaths,
}

impl Machine {
    fn bare() -> Machine {
        let folder = tempfile::tempdir().unwrap();
        let places = SearchPaths {
            libraries: Some(vec![folder.path().join("lib")]),
            cuda_path: None,
            toolkits: vec![folder.path().join("toolkit")],
        };
        fs::create_dir(folder.path().join("lib")).unwrap();
        Machine { folder, places }
    }

    /// Compiles `source` into a shared library.
    fn shared_object(self, name: &str, source: &str) -> Machine {
        let file = self.folder.path().join("source.c");
        fs::write(&file, source).unwrap();
        let out = self.folder.path().join("lib").join(name);
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-w", "-o"])
            .arg(&out)
            .arg(&file)
            .status()
            .expect("a C compiler, which linking takes anyway");
        assert!(status.success());
        self
    }

    fn driver(self, version: i32, init: i32, devices: i32) -> Machine {
        let source = format!(
            "int cuInit(unsigned f) {{ return {init}; }}
             int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }}
             int cuDeviceGetCount(int *n) {{ *n = {devices}; return 0; }}
             int cuDeviceGet(int *d, int i) {{ *d = i + 7; return i >= {devices}; }}
             int cuDeviceTotalMem_v2(unsigned long *b, int d)
                 {{ *b = (d - 6ul) << 30; return d < 7; }}
             static void put(char *to, int n, const char *a, int d)
                 {{ int i = 0; for (; a[i] && i < n - 2; i++) to[i] = a[i]; to[i] = '0' + d; }}
             int cuDeviceGetName(char *t, int n, int d)
                 {{ put(t, n, \"NVIDIA H10\", d - 7); return 0; }}
             int cuDeviceGetPCIBusId(char *t, int n, int d)
                 {{ put(t, n, \"0000:00:1\", d - 7); return 0; }}"
        );
        self.shared_object("libcuda.so.1", &source)
    }

    /// The management library, which knows the first `known` devices.
    fn manager(self, known: i32) -> Machine {
        let source = format!(
            "int nvmlInit_v2(void) {{ return 0; }}
             int nvmlDeviceGetHandleByPciBusId_v2(const char *t, void **d)
                 {{ *d = (void *)(long)(t[9] - '0' + 1); return t[9] - '0' >= {known}; }}
             int nvmlDeviceGetMemoryInfo(void *d, unsigned long long *m)
                 {{ m[0] = 9; m[1] = (long)d * 1000; m[2] = 8; return 0; }}"
        );
        self.shared_object("libnvidia-ml.so.1", &source)
    }

    fn nvrtc(self, name: &str, major: i32, minor: i32, compiles: i32) -> Machine {
        let source = format!(
            "int nvrtcVersion(int *a, int *b) {{ *a = {major}; *b = {minor}; return 0; }}
             int nvrtcCreateProgram(void **p, const char *s, const char *n, int c, void *h, void *i)
                 {{ *p = (void *)1; return 0; }}
             int nvrtcCompileProgram(void *p, int n, void *o) {{ return {compiles}; }}
             int nvrtcDestroyProgram(void **p) {{ *p = 0; return 0; }}
             const char *nvrtcGetErrorString(int e) {{ \
             return \"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE\"; }}"
        );
        self.shared_object(name, &source)
    }

    fn headers(self, toolkit: &str, headers: &[&str]) -> Machine {
        for header in headers {
            let file = self.folder.path().join(toolkit).join("include").join(header);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        self
    }

    /// The message, as a configuration error shows it; the folder reads `DIR`.
    fn missing(&self) -> String {
        let missing = check(&self.places).expect_err("something is missing");
        let folder = self.folder.path().display().to_string();
        format!("{}; {}", missing.problem, missing.help).replace(&folder, "DIR")
    }
}

#[track_caller]
fn says(machine: &Machine, parts: &[&str]) {
    let text = machine.missing();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

#[test]
fn no_driver() {
    says(&Machine::bare(), &["libcuda.so.1", "cannot be loaded", "looked in DIR/lib", "use cpu"]);
}

#[test]
fn not_a_driver() {
    let machine = Machine::bare().shared_object("libcuda.so.1", "int other;");
    says(&machine, &["libcuda.so.1 is not the NVIDIA driver's: it has no cuInit"]);
    let machine = Machine::bare();
    fs::write(machine.folder.path().join("lib/libcuda.so.1"), "not a library").unwrap();
    says(&machine, &["cannot be loaded"]);
}

#[test]
fn no_device() {
    says(&Machine::bare().driver(13000, 100, 0), &["CUDA 13.0", "cuInit gives error 100"]);
    says(&Machine::bare().driver(13000, 0, 0), &["reports no device", "nvidia-smi"]);
}

#[test]
fn name_and_memory_of_all_devices() {
    let gpu = |index: u64, free| Gpu {
        name: format!("NVIDIA H10{index}"),
        total: (index + 1) << 30,
        free,
    };
    let machine = Machine::bare().driver(13000, 0, 3);
    assert_eq!(gpus(&machine.places), Some((0..3).map(|i| gpu(i, None)).collect()));
    let machine = machine.manager(2);
    let known = vec![gpu(0, Some(1000)), gpu(1, Some(2000)), gpu(2, None)];
    assert_eq!(gpus(&machine.places), Some(known), "what is free of each that is known");
    assert_eq!(gpus(&Machine::bare().places), None);
    let old = "int cuInit(unsigned f) { return 0; }
               int cuDriverGetVersion(int *v) { *v = 9000; return 0; }
               int cuDeviceGetCount(int *n) { *n = 1; return 0; }";
    assert_eq!(gpus(&Machine::bare().shared_object("libcuda.so.1", old).places), None);
}

#[test]
fn no_run_time_compiler() {
    let machine = Machine::bare().driver(13000, 0, 1);
    says(&machine, &["libnvrtc.so.13", "cannot be loaded", "looked in DIR/lib", "LD_LIBRARY_PATH"]);
}

#[test]
fn a_run_time_compiler_that_does_not_fit() {
    let old = Machine::bare().driver(13000, 0, 1).nvrtc("libnvrtc.so.12", 12, 9, 0);
    says(&old, &["NVRTC 12.9 was found", "13.0 or newer"]);
    let new = Machine::bare().driver(13000, 0, 1).nvrtc("libnvrtc.so.13", 13, 1, 0);
    says(&new, &["NVRTC 13.1 is newer than the driver", "CUDA 13.0", "use an older NVRTC 13"]);
    let half = Machine::bare().driver(13000, 0, 1).nvrtc("libnvrtc.so.13", 13, 0, 7);
    says(&half, &["cannot compile: NVRTC_ERROR_BUILTIN", "libnvrtc-builtins.so.13.0"]);
}

#[test]
fn no_headers() {
    let machine = Machine::bare().driver(13010, 0, 2).nvrtc("libnvrtc.so", 13, 0, 0);
    says(&machine, &["headers were not found", "there is no DIR/toolkit", "set CUDA_PATH"]);
    let machine = machine.headers("toolkit", &["cuda_fp16.h", "cuda_bf16.h", "mma.h"]);
    says(&machine, &["DIR/toolkit/include/crt/mma.h is missing"]);
    let mut machine = machine.headers("toolkit", &["crt/mma.h"]);
    assert_eq!(check(&machine.places), Ok(2));
    // What CUDA_PATH says goes before a toolkit that is there.
    machine.places.cuda_path = Some(machine.folder.path().join("mine"));
    says(&machine, &["DIR/mine/include/cuda_fp16.h is missing"]);
    let machine = machine.headers("mine", &HEADERS);
    assert_eq!(check(&machine.places), Ok(2));
}
