//! Is it right: against the CPU, one layout against another, bf16 against fp32.

use zeropp::config::{DeviceKind, Precision};
use zeropp::{Config, StepMetrics, Trainer};

use crate::{Bench, Outcome, row};

/// A GPT of a size that the CPU can follow.
fn model(bench: &Bench) -> Config {
    let wide = if bench.small { 32 } else { 128 };
    Config {
        layers: 4,
        hidden: wide,
        heads: 4,
        seq: wide,
        micro_batch_size: 2,
        micro_batches: Some(4),
        unit: Some(4),
        virtual_stages: Some(1),
        seed: 1,
        ..bench.config()
    }
}

fn length(x: impl Iterator<Item = f32>) -> f64 {
    x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Every parameter's fp32 gradient against the CPU's.
pub(crate) fn gradients(bench: &Bench) -> Outcome {
    let gradients =
        |device| Trainer::new(Config { device, ..model(bench) })?.first_gradients().map(|(_, g)| g);
    let (here, cpu) = (gradients(bench.device)?, gradients(DeviceKind::Cpu)?);
    let mut worst = 0.0f64;
    for (name, cpu) in &cpu {
        let apart = length(here[name].iter().zip(cpu).map(|(a, b)| a - b));
        worst = worst.max(apart / length(cpu.iter().copied()));
    }
    row(
        "gradients in fp32 against the CPU's, worst parameter",
        format_args!("{worst:.1e}"),
        "≤ 1e-5",
    );
    Ok(worst <= 1e-5)
}

fn steps(config: Config) -> Result<Vec<StepMetrics>, zeropp::Error> {
    let mut steps = Vec::new();
    Trainer::new(config)?.train(|step| steps.push(step.clone()))?;
    Ok(steps)
}

/// Four ranks on the one device against one rank.
pub(crate) fn layouts(bench: &Bench) -> Outcome {
    let base = Config { steps: if bench.small { 4 } else { 20 }, ..model(bench) };
    let one = steps(base.clone())?;
    let half = Config { micro_batches: Some(2), unit: Some(2), pp: 2, ..base };
    let two = Some(2);
    let layouts = [
        ("P 2 × D 2", Config { zero3: 2, ..half.clone() }),
        ("P 2 × V 2 × D 2", Config { zero3: 2, virtual_stages: two, ..half.clone() }),
        ("P 2 × K 2, ZeRO-1", Config { dp: 2, zero1: true, ..half }),
    ];
    let mut good = true;
    for (what, config) in layouts {
        let other = steps(config)?;
        let apart = one.iter().zip(&other).map(|(a, b)| (a.loss - b.loss).abs() / a.loss);
        let worst = apart.fold(0.0, f64::max);
        let title = format!("loss of {what} against one rank, {} steps, fp32", one.len());
        row(&title, format_args!("{worst:.1e}"), "≤ 1e-5");
        good &= worst <= 1e-5;
    }
    Ok(good)
}

/// The curve of bf16 against fp32's: means of ten steps.
pub(crate) fn bf16_curve(bench: &Bench) -> Outcome {
    if bench.device == DeviceKind::Wgpu {
        row("bf16's loss curve against fp32's", "wgpu has no bf16", "");
        return Ok(true);
    }
    let run = |precision| {
        let (micro_batch_size, steps_wanted) = if bench.small { (2, 20) } else { (8, 200) };
        let config =
            Config { precision, micro_batch_size, steps: steps_wanted, lr: 1e-3, ..model(bench) };
        steps(config)
    };
    let (bf16, fp32) = (run(Precision::Bf16)?, run(Precision::Fp32)?);
    let means = |steps: &[StepMetrics]| -> Vec<f64> {
        steps.chunks(10).map(|c| c.iter().map(|s| s.loss).sum::<f64>() / c.len() as f64).collect()
    };
    let pairs = means(&bf16).into_iter().zip(means(&fp32));
    let worst = pairs.map(|(b, f)| (b - f).abs() / f).fold(0.0, f64::max);
    let what = format!("bf16's loss curve against fp32's, {} steps", fp32.len());
    row(&what, format_args!("{:.2} %", 100.0 * worst), "≤ 1 %");
    let last = |s: &[StepMetrics]| s.last().map_or(f64::NAN, |s| s.loss);
    let losses = format!("{:.4} and {:.4}", last(&bf16), last(&fp32));
    row("last loss in bf16 and fp32", losses, "");
    Ok(worst <= 0.01)
}
