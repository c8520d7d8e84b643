//! `zeropp plot`: losses, gradient norms and learning rates of runs as a picture.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::Value;
use zeropp::pipeline::draw::chart::{self, Curve, CurveStyle, Mark, Panel, Scale};
use zeropp::pipeline::draw::page::{lines, page};
use zeropp_core::files::open_regular;

use crate::failure::Failure;
use crate::figures::{count, say};
use crate::output::{keep_inputs, write};

const ABOUT: &str = "Draw the losses and learning rates of runs\n\n\
Reads files that `zeropp run --metrics run.jsonl` wrote and draws the loss of each step with a \
smoothed curve, the validation loss, the gradient norm and the learning rate, each run in a \
colour, and below them what `--log-layers` has of each layer, in the layers' colours. Where there \
are more than eight, dashes tell them apart, too. \
A name that ends in .svg gets a picture, any other name a page; both follow the reader's light or \
dark theme.";

const EXAMPLES: &str = "\
Examples:
  zeropp plot run.jsonl                          run.html beside it
  zeropp plot a.jsonl b.jsonl -o both.svg --log  two runs, losses on a logarithmic scale

Exit codes: 0 done, 2 bad input (nothing was written).";

/// From how many steps on a loss is shown with a smoothed curve.
const SMOOTHED_FROM: usize = 60;
/// Longest line of a file of metrics: a step with figures of 100,000 layers has less.
const LINE_MAX: u64 = 16 << 20;
/// It is over about a fiftieth of the steps on both sides.
const SMOOTHED_PART: usize = 50;

/// The flags of `zeropp plot`.
pub(crate) fn command() -> Command {
    let files = Arg::new("runs")
        .value_name("RUN.jsonl")
        .required(true)
        .action(ArgAction::Append)
        .num_args(1..)
        .value_parser(value_parser!(PathBuf))
        .help("The metrics file of a run");
    Command::new("plot")
        .about("Draw the losses and learning rates of runs")
        .long_about(ABOUT)
        .after_help(EXAMPLES)
        .arg(files)
        .arg(
            Arg::new("out")
                .short('o')
                .long("out")
                .value_name("FILE.html|FILE.svg")
                .value_parser(value_parser!(PathBuf))
                .help("Where to draw [default: beside the first run, as .html]"),
        )
        .arg(
            Arg::new("log")
                .long("log")
                .action(ArgAction::SetTrue)
                .help("Draw losses and norms on a logarithmic scale"),
        )
}

/// Reads the runs and draws them.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let paths: Vec<&PathBuf> = matches.get_many("runs").into_iter().flatten().collect();
    let out = match matches.get_one::<PathBuf>("out") {
        Some(out) => out.clone(),
        None => paths[0].with_extension("html"),
    };
    keep_inputs(&out, paths.iter().copied())?;
    let runs = paths.iter().map(|path| RunCurves::read(path)).collect::<Result<Vec<_>, _>>()?;
    let scale = if matches.get_flag("log") { Scale::Log } else { Scale::Linear };
    let panels = panels(&runs, scale);
    let text = match out.extension().is_some_and(|end| end.eq_ignore_ascii_case("svg")) {
        true => chart::svg(&panels, chart::WIDTHS[0]),
        false => {
            let about: Vec<&str> = runs.iter().map(|run| run.about.as_str()).collect();
            page(&title(&runs), &(lines(&about.join("\n")) + &chart::both(&panels)))
        }
    };
    write(&out, text.as_bytes())?;
    say(format_args!("{}: {}", out.display(), count(runs.len(), "run")));
    Ok(())
}

/// A run's curves.
struct RunCurves {
    name: String,
    /// Its description, in a line.
    about: String,
    /// Step and value.
    loss: Vec<(f64, f64)>,
    eval: Vec<(f64, f64)>,
    norm: Vec<(f64, f64)>,
    rate: Vec<(f64, f64)>,
    layers: Layers,
}

/// Curves of layers: by what they are of, in the order of [`OF_LAYERS`], and the layer's place in
/// the model, with its name.
type Layers = BTreeMap<(usize, usize), (String, Vec<(f64, f64)>)>;

/// Figures of layers that are drawn: key, title.
const OF_LAYERS: [(&str, &str); 3] = [
    ("grad_norm", "Gradient norm by layer"),
    ("update_ratio", "Update over weights, by layer"),
    ("activation_rms", "Root mean square of outputs, by layer"),
];

impl RunCurves {
    fn read(path: &Path) -> Result<RunCurves, Failure> {
        let shown = path.display();
        let bad = |problem: String| Failure::bad_input(format!("{shown}: {problem}"));
        let file = open_regular(path).map_err(|e| bad(format!("cannot be read ({e})")))?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let mut run = RunCurves {
            about: format!("{shown}"),
            name: stem,
            loss: Vec::new(),
            eval: Vec::new(),
            norm: Vec::new(),
            rate: Vec::new(),
            layers: Layers::new(),
        };
        let mut file = BufReader::new(file);
        for i in 0u64.. {
            let mut line = Vec::new();
            let mut rest = (&mut file).take(LINE_MAX + 1);
            rest.read_until(b'\n', &mut line).map_err(|e| bad(format!("cannot be read ({e})")))?;
            if line.is_empty() {
                break;
            }
            if line.len() as u64 > LINE_MAX {
                let (n, most) = (i + 1, LINE_MAX >> 20);
                return Err(bad(format!(
                    "line {n} has more than {most} MiB, the most that are read; give a file that \
                     zeropp run --metrics wrote"
                )));
            }
            // Who is killed leaves half a line.
            let Ok(value) = serde_json::from_slice::<Value>(&line) else {
                if i == 0 {
                    let help = "zeropp run --metrics run.jsonl writes one";
                    return Err(bad(format!("is no file of metrics; {help}")));
                }
                continue;
            };
            run.add(&value);
        }
        if run.loss.is_empty() {
            return Err(bad("it has no step; give the metrics of a run".into()));
        }
        Ok(run)
    }

    fn add(&mut self, line: &Value) {
        if let Some(header) = line.get("run") {
            let text = |key: &str| header[key].as_str().unwrap_or_default();
            let words = header["command"].as_array().into_iter().flatten();
            let words: Vec<&str> = words.filter_map(Value::as_str).collect();
            self.about = format!("{}: {}", text("name"), words.join(" "));
        }
        let Some(step) = line["step"].as_f64() else { return };
        let mut add = |to: fn(&mut RunCurves) -> &mut Vec<(f64, f64)>, value: &Value| {
            if let Some(value) = value.as_f64() {
                to(self).push((step, value));
            }
        };
        add(|run| &mut run.loss, &line["loss"]);
        add(|run| &mut run.eval, &line["eval"]["loss"]);
        add(|run| &mut run.norm, &line["grad_norm"]);
        add(|run| &mut run.rate, &line["lr"]);
        for (place, layer) in line["layers"].as_array().into_iter().flatten().enumerate() {
            for (what, (key, _)) in OF_LAYERS.iter().enumerate() {
                let Some(value) = layer[*key].as_f64() else { continue };
                let name = || layer["name"].as_str().unwrap_or_default().to_string();
                let curve =
                    self.layers.entry((what, place)).or_insert_with(|| (name(), Vec::new()));
                curve.1.push((step, value));
            }
        }
    }
}

fn title(runs: &[RunCurves]) -> String {
    runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>().join(", ")
}

fn panels(runs: &[RunCurves], scale: Scale) -> Vec<Panel> {
    let look = |run| CurveStyle::one_of(run, runs.len());
    let of = |values: fn(&RunCurves) -> &Vec<(f64, f64)>, smooth: bool| {
        let curves = runs.iter().enumerate().flat_map(|(i, run)| {
            let curve = |points: Vec<(f64, f64)>, mark| Curve {
                name: run.name.clone(),
                points,
                mark,
                look: look(i),
            };
            let points = values(run).clone();
            match smooth && points.len() >= SMOOTHED_FROM {
                true => vec![
                    curve(points.clone(), Mark::Faint),
                    curve(smoothed(&points, points.len() / SMOOTHED_PART), Mark::Line),
                ],
                false => vec![curve(points, Mark::Line)],
            }
        });
        curves.collect::<Vec<_>>()
    };
    let mut loss = of(|run| &run.loss, true);
    for (i, run) in runs.iter().enumerate().filter(|(_, run)| !run.eval.is_empty()) {
        let name = format!("{}, validation", run.name);
        loss.push(Curve { name, points: run.eval.clone(), mark: Mark::Points, look: look(i) });
    }
    let loss = Panel { y: scale, ..Panel::over_steps("Loss, nats a token", loss) };
    let norm = Panel::over_steps("Gradient norm", of(|run| &run.norm, true));
    let rate = Panel::over_steps("Learning rate", of(|run| &run.rate, false));
    let mut panels = vec![loss, Panel { y: scale, ..norm }, rate];
    panels.extend(layer_panels(runs).map(|panel| Panel { y: scale, ..panel }));
    panels
}

/// Panels of layers; a layer looks the same in all of them.
fn layer_panels(runs: &[RunCurves]) -> impl Iterator<Item = Panel> {
    let places = runs.iter().flat_map(|run| run.layers.keys()).map(|(_, place)| place + 1);
    let layers = places.max().unwrap_or(0);
    let panel = move |(what, (_, title)): (usize, &(&str, &str))| {
        let curves = runs.iter().enumerate().flat_map(|(i, run)| {
            let of_this = run.layers.range((what, 0)..(what + 1, 0));
            of_this.map(move |((_, place), (layer, points))| Curve {
                name: if runs.len() > 1 { format!("{}, {layer}", run.name) } else { layer.clone() },
                points: points.clone(),
                mark: Mark::Line,
                look: CurveStyle::of_layer(*place, layers, i),
            })
        });
        Panel::over_steps(title, curves.collect())
    };
    let panels = OF_LAYERS.iter().enumerate().map(panel);
    panels.filter(|panel| !panel.curves.is_empty())
}

/// The curve without its noise: at each point the straight line through those `aside` of it on both
/// sides, of which near ones count more. So it has no lag: it falls, turns and rises where the data
/// does, also at its ends. Points that are not finite are left out.
pub(crate) fn smoothed(points: &[(f64, f64)], aside: usize) -> Vec<(f64, f64)> {
    let points: Vec<_> = points.iter().filter(|point| point.1.is_finite()).collect();
    let aside = aside.max(1);
    let at = |i: usize| {
        let near = i.saturating_sub(aside)..points.len().min(i + aside + 1);
        let (mut n, mut x, mut xx, mut y, mut xy) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for j in near {
            let from_here = j as f64 - i as f64;
            let weight = 1.0 - from_here.abs() / (aside + 1) as f64;
            n += weight;
            x += weight * from_here;
            xx += weight * from_here * from_here;
            y += weight * points[j].1;
            xy += weight * from_here * points[j].1;
        }
        let spread = n * xx - x * x;
        // A point that is alone.
        if spread <= 0.0 { y / n } else { (xx * y - x * xy) / spread }
    };
    (0..points.len()).map(|i| (points[i].0, at(i))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smoothed_curve_is_where_the_data_is_also_at_its_ends_and_turns() {
        let curve = |y: fn(f64) -> f64| -> Vec<(f64, f64)> {
            (0..200).map(|i| (f64::from(i), y(f64::from(i)))).collect()
        };
        let falls = curve(|x| 5.0 - 0.02 * x);
        assert!(smoothed(&falls, 10).iter().zip(&falls).all(|(a, b)| (a.1 - b.1).abs() < 1e-9));
        let noisy = curve(|x| (x - 120.0).powi(2) / 1000.0 + 0.2 * f64::from(x as u32 % 2));
        let smooth = smoothed(&noisy, 10);
        let lowest = smooth.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert!((lowest.0 - 120.0).abs() <= 2.0, "{lowest:?}");
        let rough = |c: &[(f64, f64)]| c.windows(2).map(|w| (w[1].1 - w[0].1).abs()).sum::<f64>();
        assert!(rough(&smooth) < 0.6 * rough(&noisy));
        assert_eq!(smoothed(&[(1.0, f64::NAN), (2.0, 3.0)], 4), [(2.0, 3.0)]);
    }

    #[test]
    fn a_file_of_metrics_is_read_with_half_a_line_and_other_files_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("small.jsonl");
        let text = "{\"run\":{\"name\":\"small\",\"command\":[\"zeropp\",\"run\"]}}\n\
                    {\"step\":1,\"loss\":5.5,\"grad_norm\":1.0,\"lr\":0.1}\n\
                    {\"step\":2,\"loss\":null,\"grad_norm\":2.0,\"eval\":{\"loss\":4.0},\
                    \"layers\":[{\"name\":\"wte\",\"activation_rms\":0.5},\
                    {\"name\":\"h.0\",\"grad_norm\":null,\"update_ratio\":0.0}]}\n\
                    {\"step\":3,\"lo";
        std::fs::write(&path, text).unwrap();
        let run = RunCurves::read(&path).unwrap_or_else(|f| panic!("{}", f.message));
        assert_eq!((&run.loss, &run.eval), (&vec![(1.0, 5.5)], &vec![(2.0, 4.0)]));
        assert_eq!((run.norm.len(), run.about.as_str()), (2, "small: zeropp run"));
        let reported = panels(&[run], Scale::Log);
        let reported: Vec<_> =
            reported[3..].iter().map(|panel| (&panel.curves[0], &panel.title)).collect();
        let points = |of: usize| (reported[of].0.name.as_str(), reported[of].0.points[0]);
        assert_eq!((points(0), points(1)), (("h.0", (2.0, 0.0)), ("wte", (2.0, 0.5))));
        assert_eq!((reported.len(), reported[0].1.as_str()), (2, OF_LAYERS[1].1));
        for (text, said) in [("hello\n", "is no file of metrics"), ("{}\n", "it has no step")] {
            std::fs::write(&path, text).unwrap();
            let failure = RunCurves::read(&path).err().unwrap();
            assert!(failure.code == 2 && failure.message.contains(said), "{}", failure.message);
        }
    }

    #[test]
    fn a_line_has_a_limit_that_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("long.jsonl");
        let mut text = b"{\"step\":1,\"loss\":5.5}\n".to_vec();
        text.resize(text.len() + LINE_MAX as usize + 1, b'x');
        std::fs::write(&path, text).unwrap();
        let refused = RunCurves::read(&path).err().expect("it is too long").message;
        assert!(
            refused.contains("line 2 has more than 16 MiB, the most that are read"),
            "{refused}"
        );
    }
}
