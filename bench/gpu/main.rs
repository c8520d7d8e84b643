//! What is to be known of a GPU, in one visit: is it right, how fast is it. Prints rows of a table.
//!
//! `gpu [--device cuda|wgpu] [--small] [--data FILE] [PART…]`, with the parts of [`PARTS`]; none
//! means all. Trains on the text in FILE, or on built-in text.
//! `--small` shrinks everything to what a software device can do. `bench/gpu.sh` runs it part by
//! part beside PyTorch; docs/gpu.md says how to build and carry it.

mod attention;
mod checks;
mod products;
mod speed;

use std::path::PathBuf;
use std::process::ExitCode;

use zeropp::Config;
use zeropp::config::{DeviceKind, Precision};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Something measured or checked: its name, and what prints its rows.
type Part = (&'static str, fn(&Bench) -> Outcome);

/// They run in this order.
const PARTS: [Part; 9] = [
    ("gradients", checks::gradients),
    ("layouts", checks::layouts),
    ("peak", speed::peak),
    ("products", products::rates),
    ("attention", attention::attention),
    ("gpt2", speed::gpt2),
    ("llama", speed::llama),
    ("bf16", checks::bf16_curve),
    ("pipeline", speed::pipeline),
];

/// Whether a part found what it should; an error where it could not run.
type Outcome = Result<bool, zeropp::Error>;

/// What all parts need.
struct Bench {
    device: DeviceKind,
    small: bool,
    data: Option<PathBuf>,
}

impl Bench {
    /// Settings on the device and the text under test.
    fn config(&self) -> Config {
        let data = self.data.clone();
        Config { device: self.device, data, timeout_s: 1800.0, ..Config::default() }
    }

    /// What the device computes in at its best: wgpu has no bf16.
    fn fast(&self) -> Precision {
        if self.device == DeviceKind::Wgpu { Precision::Fp32 } else { Precision::Bf16 }
    }
}

/// A row of the table.
fn row(what: &str, value: impl std::fmt::Display, wanted: &str) {
    println!("| {what} | {value} | {wanted} |");
}

fn main() -> ExitCode {
    let mut bench = Bench { device: DeviceKind::Cuda, small: false, data: None };
    let mut wanted = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--small" => bench.small = true,
            "--device" => match arguments.next().as_deref() {
                Some("cuda") => bench.device = DeviceKind::Cuda,
                Some("wgpu") => bench.device = DeviceKind::Wgpu,
                other => return usage(&format!("--device {}", other.unwrap_or("(nothing)"))),
            },
            "--data" => match arguments.next() {
                Some(file) => bench.data = Some(file.into()),
                None => return usage("--data (nothing)"),
            },
            // What cargo passes to benchmarks.
            "--bench" => {}
            name => match PARTS.iter().find(|part| part.0 == name) {
                Some(part) => wanted.push(*part),
                None => return usage(name),
            },
        }
    }
    if wanted.is_empty() {
        wanted = PARTS.to_vec();
    }
    if let Err(error) = bench.config().devices() {
        eprintln!("error: {error}");
        return ExitCode::from(2);
    }
    let mut good = true;
    for (name, part) in wanted {
        let start = std::time::Instant::now();
        match part(&bench) {
            Ok(passed) => good &= passed,
            Err(error) => {
                row(name, format_args!("failed: {error}"), "");
                good = false;
            }
        }
        eprintln!("{name}: {:.0} s", start.elapsed().as_secs_f64());
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn usage(what: &str) -> ExitCode {
    let parts = PARTS.map(|part| part.0).join(", ");
    eprintln!("error: {what}: use --device cuda|wgpu, --small, --data FILE, or one of {parts}");
    ExitCode::from(2)
}
