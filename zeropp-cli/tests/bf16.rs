//! bf16 on the CPU: a run has the same loss whatever instructions its products use.

mod common;

use std::path::Path;

use common::command;

const RUN: &str = "run --layers 2 --hidden 64 --heads 2 --seq 48 --micro-batch-size 2 \
                   --micro-batches 2 --pp 2 --virtual 1 --steps 3 --precision bf16 \
                   --metrics m.jsonl";

/// The loss and the gradient norm of each step, as they were printed.
fn figures(text: &str) -> Vec<[String; 2]> {
    let field = |line: &str, name: &str| {
        let start = line.find(&format!("\"{name}\":")).expect("every step has it");
        line[start..].split([',', '}']).next().expect("the field").to_string()
    };
    let steps = text.lines().filter(|line| line.starts_with("{\"step\""));
    steps.map(|line| ["loss", "grad_norm"].map(|name| field(line, name))).collect()
}

/// The figures by one path, where this machine has it.
fn by(dir: &Path, isa: &str) -> Option<Vec<[String; 2]>> {
    let metrics = dir.join(isa).with_extension("jsonl");
    let line = RUN.replace("m.jsonl", &metrics.to_string_lossy());
    let output = command(dir, &line).env("ZEROPP_ISA", isa).output().unwrap();
    if !output.status.success() {
        let err = String::from_utf8(output.stderr).unwrap();
        assert!(err.contains("this machine does not have this path"), "{err}");
        return None;
    }
    Some(figures(&std::fs::read_to_string(metrics).unwrap()))
}

#[test]
fn every_path_gives_the_same_loss() {
    let dir = tempfile::tempdir().unwrap();
    let first = by(dir.path(), "scalar").expect("every machine has it");
    assert_eq!(first.len(), 3);
    for isa in ["avx2", "avx512", "avx512_bf16", "amx"] {
        if let Some(figures) = by(dir.path(), isa) {
            assert_eq!(figures, first, "{isa}");
        }
    }
}

#[test]
fn a_path_that_is_not_there_is_refused_before_a_rank_starts() {
    let dir = tempfile::tempdir().unwrap();
    let output = command(dir.path(), RUN).env("ZEROPP_ISA", "sse9").output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{err}");
    let expected = "error: ZEROPP_ISA = sse9: no path of the bf16 kernels has this name; \
                    choose one of amx, avx512_bf16, avx512, avx2, scalar";
    assert!(err.starts_with(expected), "{err}");
    assert!(!dir.path().join("m.jsonl").exists());
    // Runs that do not use these kernels do not care.
    let fp32 = RUN.replace("bf16", "fp32");
    let output = command(dir.path(), &fp32).env("ZEROPP_ISA", "sse9").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
