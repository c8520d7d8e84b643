//! `zeropp measure`: what this machine does, as a file that plans are made with.

use std::fmt::Write;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Command, value_parser};
use zeropp::Config;
use zeropp::config::{DeviceKind, EngineKind, OptionInfo};
use zeropp::measure::{LinkFit, LinkTimes, Measured, measure};

use crate::args;
use crate::failure::Failure;
use crate::figures::say;
use crate::output::write;

const ABOUT: &str = "Measure this machine for plans\n\n\
Times matrix products by shape, one layer's F, B, W and R at the model's sizes, the optimizer, and \
transfers between ranks by size, on all ranks at once, within a minute. Writes a file of costs \
that `zeropp plan --machine` and `zeropp run --plan` take. It is text with comments: correct what \
you know better.";

const EXAMPLES: &str = "\
Examples:
  This machine with as many ranks as cores, for a small GPT:
      zeropp measure -o machine.toml
  With four ranks at once, at the sizes of the model and the samples that are to be trained:
      zeropp measure --zero3 4 --model gpt2 --seq 256 --micro-batch-size 2 -o machine.toml
  Between processes: started as a run is, with its engine and its mesh:
      mpirun -np 2 zeropp measure --zero3 2 --engine mpi -o machine.toml

Exit codes: 0 done, 2 bad input, 1 a measurement failed.";

/// The flags: all of `run`, of which the help shows those that are measured with.
pub(crate) fn command() -> Command {
    let matters = |option: &OptionInfo| {
        ["Mesh", "Model", "Launch"].contains(&option.heading)
            || ["micro-batch-size", "precision", "device", "engine", "optimizer"]
                .contains(&option.key)
    };
    args::with_settings(Command::new("measure"), matters)
        .about("Measure this machine for plans")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(
            Arg::new("out")
                .short('o')
                .long("out")
                .value_name("FILE.toml")
                .value_parser(value_parser!(PathBuf))
                .help_heading("Output")
                .help("Write the file here; without it, show it"),
        )
}

/// Measures, and writes or shows the file.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let mut config = args::settings(matches)?;
    let given = ["pp", "zero3", "dp"].iter().any(|key| matches.contains_id(key));
    if config.engine == EngineKind::Threads && !given {
        config.zero3 = ranks_here(&config)?;
    }
    let text = machine_file(&config)?;
    let job = config.job().map_err(Failure::bad_input)?;
    if !job.has_rank_0() {
        return Ok(());
    }
    match matches.get_one::<PathBuf>("out") {
        Some(path) => {
            write(path, text.as_bytes())?;
            say(format_args!("{}: take it with zeropp plan --machine", path.display()));
        }
        None => say(text.trim_end()),
    }
    Ok(())
}

/// Ranks that this machine has cores or GPUs for.
pub(crate) fn ranks_here(config: &Config) -> Result<usize, Failure> {
    Ok(match config.device {
        DeviceKind::Cpu => std::thread::available_parallelism().map_or(1, usize::from),
        _ => config.devices().map_err(Failure::bad_input)?.count(),
    })
}

/// Measures with the ranks of `config`; the text of the file.
pub(crate) fn machine_file(config: &Config) -> Result<String, Failure> {
    let what = format!(
        "{} {} at once, {}, model {} (hidden {}), samples of {} tokens, {} in a micro-batch",
        config.mesh().world(),
        if config.device == DeviceKind::Cpu { "CPU ranks" } else { "GPU ranks" },
        config.precision,
        config.model,
        config.hidden,
        config.seq,
        config.micro_batch_size
    );
    Ok(text(&measure(config)?, &what))
}

/// Three figures, as TOML reads them.
fn figure(x: f64) -> String {
    format!("{x:.3e}")
}

fn text(m: &Measured, what: &str) -> String {
    let mut out = format!(
        "# What this machine does, as `zeropp measure` found it: rates of one rank while all\n\
         # ranks do the same. `zeropp plan --machine` takes it; docs/costs.md has the keys.\n\
         measured = {}\n\n# Products: rows x inner by inner x columns\n",
        serde_json::Value::from(what)
    );
    let mut peak = 1.0f64;
    for p in &m.products {
        let _ = writeln!(
            out,
            "#   {:>6} x {:>5} by {:>5}: {} FLOP/s",
            p.rows,
            p.inner,
            p.columns,
            figure(p.flops_per_s)
        );
        peak = peak.max(p.flops_per_s);
    }
    let l = &m.layer;
    let rates = l.block_flops_per_s;
    let [f, b, w, r] = l.block_s.map(|s| 1e6 * s);
    let _ = write!(
        out,
        "flops_per_s = {}           # the best of these\n\n\
         # One layer for a micro-batch: F, B and W take {f:.0}, {b:.0} and {w:.0} us, \
         recomputation adds {r:.0} us; the head {:.0} us\n\
         block_flops_per_s = [{}]  # F, B, W, R: what grows with a micro-batch\n\
         t_block = [{}]  # us of them beside, which does not\n\
         head_flops_per_s = {}\n\
         memory_bytes_per_s = {}    # passes over tensors\n\
         update_bytes_per_s = {}    # the optimizer, 28 bytes a parameter\n\
         t_step_end = {:.0}              # us of a step beside its actions\n",
        figure(peak),
        1e6 * l.head_s,
        rates.map(figure).join(", "),
        l.block_fixed_s.map(|s| format!("{:.1}", 1e6 * s)).join(", "),
        figure(l.head_flops_per_s),
        figure(l.memory_bytes_per_s),
        figure(l.update_bytes_per_s),
        1e6 * l.step_end_s,
    );
    match m.memory_bytes {
        Some(bytes) => {
            let _ = writeln!(
                out,
                "memory_bytes = {:.3e}          # of each rank, as free now",
                bytes as f64
            );
        }
        None => out.push_str(
            "# The system does not tell its memory: give it here.\n# memory_bytes = 80e9\n",
        ),
    }
    let _ = writeln!(out, "per_node = {}", m.inside.as_ref().map_or(1, |links| links.ranks));
    if let Some(at_once) = m.at_once {
        let _ = writeln!(
            out,
            "ranks_at_once = {at_once}           # at these rates; others share the cores"
        );
    }
    out.push_str(&links(m));
    out.push_str(&file(m));
    out
}

/// The disk that ranks put out to.
fn file(m: &Measured) -> String {
    let Some(rate) = &m.file else {
        return "\n# Files that ranks put out to: not measured; name a folder on their disk, as in \
                --optimizer adamw:out=/scratch\n"
            .into();
    };
    let folder = rate.folder.display().to_string();
    let kept = if rate.is_memory { ", which is in memory" } else { "" };
    format!(
        "\n# A file of each rank in {}{kept}: {} bytes/s written and flushed, {} read after the \
         system was asked to forget it\nfile_bytes_per_s = {}      # both ways together\n",
        zeropp_core::files::escaped_line(&folder),
        figure(rate.written),
        figure(rate.read),
        figure(rate.bytes_per_s()),
    )
}

/// Times between ranks: the file's keys, and the fitted times as comments.
fn links(m: &Measured) -> String {
    let mut out = String::new();
    match &m.inside {
        Some(inside) => {
            let _ = write!(
                out,
                "\n# Inside a process, {} ranks\n{}zero3_bytes_per_s = {}     # all-gathers\n\
                 reduce_bytes_per_s = {}    # reduce-scatters\n\
                 t_collective = {:.1}            # us\n",
                inside.ranks,
                points(inside),
                figure(inside.gather.bytes_per_s),
                figure(inside.reduce.bytes_per_s),
                1e6 * inside.gather.latency_s.max(inside.reduce.latency_s),
            );
        }
        None => out.push_str(
            "\n# Inside a process: not measured, a rank is alone here. Plans need a number:\n\
             zero3_bytes_per_s = 1e9\n",
        ),
    }
    let (far, words) = match (&m.between, &m.inside) {
        (Some(between), _) => (Some(between), "Between processes"),
        (None, inside) => (
            inside.as_ref(),
            "Between processes: not measured, there is one; these are those inside it",
        ),
    };
    let _ = writeln!(out, "\n# {words}");
    if let Some(far) = far {
        if m.between.is_some() {
            out.push_str(&points(far));
        }
        let _ = write!(
            out,
            "replica_bytes_per_s = {}   # all-reduces\nbytes_per_s = {}           # messages\n\
             t_comm = {:.1}                  # us, latency of a message\n",
            figure(far.all_reduce.bytes_per_s),
            figure(far.message.bytes_per_s),
            1e6 * far.message.latency_s
        );
    }
    out.push_str("# Between hosts: as between processes, where these were on several.\n");
    out
}

fn points(links: &LinkTimes) -> String {
    let one = |name: &str, line: &LinkFit| {
        let all = line.points.iter();
        let all = all.map(|(bytes, s)| format!("{} KiB {:.0} us", bytes >> 10, 1e6 * s));
        format!("#   {name}: {}\n", all.collect::<Vec<_>>().join(", "))
    };
    [
        one("all-gather", &links.gather),
        one("reduce-scatter", &links.reduce),
        one("all-reduce", &links.all_reduce),
        one("message", &links.message),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use zeropp::measure::{FileRate, LayerRates, Product};

    use super::*;

    fn line(latency_s: f64, bytes_per_s: f64) -> LinkFit {
        LinkFit { latency_s, bytes_per_s, points: vec![(16 << 10, latency_s)] }
    }

    fn measured(inside: bool) -> Measured {
        let links = || LinkTimes {
            ranks: 4,
            gather: line(1e-5, 4e9),
            reduce: line(2e-5, 2e9),
            all_reduce: line(3e-5, 1e9),
            message: line(5e-6, 3e9),
        };
        Measured {
            ranks: 4,
            at_once: Some(2),
            memory_bytes: Some(1 << 32),
            products: vec![Product { rows: 64, inner: 32, columns: 96, flops_per_s: 3e10 }],
            layer: LayerRates {
                block_s: [1e-3, 1e-3, 8e-4, 1e-3],
                block_fixed_s: [1e-4, 2e-4, 0.0, 5e-5],
                block_flops_per_s: [1e10, 2e10, 3e10, 4e10],
                head_s: 2e-3,
                head_flops_per_s: 5e10,
                update_bytes_per_s: 6e9,
                memory_bytes_per_s: 7e9,
                step_end_s: 3e-3,
            },
            inside: inside.then(links),
            between: None,
            file: inside.then(|| FileRate {
                folder: "/scratch".into(),
                written: 1e9,
                read: 3e9,
                is_memory: false,
            }),
        }
    }

    /// The file is one that plans are made with, and has the numbers that were measured.
    #[test]
    fn the_file_is_a_machine() {
        let text = text(&measured(true), "4 CPU ranks");
        let machine = zeropp_plan::machines::read("m.toml", &text).unwrap();
        assert_eq!(machine.block_flops_per_s, Some([1e10, 2e10, 3e10, 4e10]));
        assert_eq!(machine.head_flops_per_s, Some(5e10));
        assert_eq!((machine.update_bytes_per_s, machine.memory_bytes_per_s), (6e9, 7e9));
        assert_eq!((machine.zero3_bytes_per_s, machine.reduce_bytes_per_s), (4e9, 2e9));
        assert_eq!((machine.replica_bytes_per_s, machine.bytes_per_s), (1e9, 3e9));
        assert!((machine.step_end_s - 3e-3).abs() < 1e-12);
        assert_eq!((machine.per_node, machine.flops_per_s), (4, 3e10));
        assert_eq!(machine.block_s, [1e-4, 2e-4, 0.0, 5e-5]);
        assert_eq!(machine.ranks_at_once, Some(2));
        assert!((machine.message_s - 5e-6).abs() < 1e-12 && machine.collective_s == 2e-5);
        assert_eq!(machine.source, "4 CPU ranks");
        assert_eq!(machine.file_bytes_per_s, Some(1.5e9));
        assert!(text.contains("Between processes: not measured, there is one"), "{text}");
        let alone = super::text(&measured(false), "1 CPU rank");
        zeropp_plan::machines::read("m.toml", &alone).unwrap();
        assert!(alone.contains("not measured, a rank is alone here"), "{alone}");
        assert!(alone.contains("put out to: not measured"), "{alone}");
    }
}
