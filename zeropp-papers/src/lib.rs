//! The papers' tables and figures beside what the planner's one cost model gives for them.
//!
//! The model has two numbers, `flops_share` and `t_layer` of the A100's file, that were fitted on
//! Megatron's eight runs, by least squares of relative errors, and two rounded ones, what passes
//! over tensors and collectives reach. `contention` was fitted on one of torchtitan's runs on A100,
//! `flops_share` of the H100 on one on H100s. Nothing is fitted for any other cell.

mod baselines;
mod figures;
mod megatron;
mod torchtitan;
mod zero_bubble;
mod zeropp;

use std::fmt::Write;

use zeropp_schedule::draw::chart::{self, Curve, CurveStyle, Mark, Panel};

use megatron::megatron;
use torchtitan::torchtitan;
use zeropp_plan::PlanError;

/// One cell: what it is, the paper's number, ours.
#[derive(Clone, Debug, PartialEq)]
struct TableCell {
    /// What it is.
    name: String,
    /// The paper's.
    paper: f64,
    /// Ours.
    ours: f64,
}

impl TableCell {
    /// Ours over the paper's, less one.
    fn difference(&self) -> f64 {
        self.ours / self.paper - 1.0
    }
}

fn row(out: &mut String, cell: &TableCell, unit: &str) {
    let off = match cell.paper == 0.0 {
        true => format!("{:>+8.2}  ", cell.ours),
        false => format!("{:>+8.1} %", 100.0 * cell.difference()),
    };
    let line = format!("{:46} {:>9.2} {:>9.2} {unit:2} {off}", cell.name, cell.paper, cell.ours);
    let _ = writeln!(out, "{}", line.trim_end());
}

/// How far cells are off, in the mean and at worst.
fn off(cells: &[TableCell]) -> (f64, f64) {
    let off = || cells.iter().map(|cell| cell.difference().abs());
    (off().sum::<f64>() / cells.len() as f64, off().fold(0.0, f64::max))
}

fn summary(cells: &[TableCell]) -> String {
    let (mean, worst) = off(cells);
    format!("mean {:.1} %, worst {:.1} %", 100.0 * mean, 100.0 * worst)
}

fn head(out: &mut String, title: &str) {
    let _ = writeln!(out, "{title}\n{:46} {:>9} {:>9} {:>13}", "", "paper", "ours", "difference");
}

/// All tables as text.
///
/// # Errors
/// A table that cannot be made.
pub fn text() -> Result<String, PlanError> {
    let mut out = String::new();
    head(&mut out, "Megatron's published runs, seconds of a step: what the model is fitted on");
    let cells = megatron();
    cells.iter().for_each(|cell| row(&mut out, cell, "s"));
    let _ = writeln!(out, "{}\n", summary(&cells));
    let titles = ["what contention and the H100 are fitted on", "held out"];
    for (cells, title) in torchtitan().iter().zip(titles) {
        head(&mut out, &format!("torchtitan's published runs, tokens/s of a GPU: {title}"));
        cells.iter().for_each(|cell| row(&mut out, cell, ""));
        let _ = writeln!(out, "{}\n", summary(cells));
    }
    zeropp::text(&mut out)?;
    figures::text(&mut out)?;
    let one = zeropp::table_2()[1].ours;
    zero_bubble::text(&mut out, one / (1.0 + one));
    Ok(out)
}

/// The figures that are curves, as SVG: names of files and what is in them.
///
/// # Errors
/// A figure that cannot be made.
pub fn pictures() -> Result<[(&'static str, String); 2], PlanError> {
    let (lines, points) = figures::figure_4_series()?;
    let title = "ZeroPP, figure 4: 14.6B on 32 A800, P 4, batch 192";
    let axes = ["memory of the worst rank, at most, GB", "Seconds of a step"];
    let four = picture(title, axes, &lines, &points);
    let title = "Zero Bubble, figure 7: bubble rate within a limit on activations";
    let axes = ["limit, in p micro-batches", "Bubble rate, %"];
    let seven = picture(title, axes, &zero_bubble::figure_7().curves, &[]);
    Ok([("zeropp-figure-4.svg", four), ("zero-bubble-figure-7.svg", seven)])
}

/// Points of a line, and what they are.
#[derive(Clone, Debug, PartialEq)]
struct Series {
    name: String,
    points: Vec<[f64; 2]>,
}

/// Lines, and points that nothing joins.
fn picture(title: &str, [across, up]: [&str; 2], lines: &[Series], points: &[Series]) -> String {
    let all = lines.iter().chain(points).enumerate().map(|(i, series)| Curve {
        name: series.name.clone(),
        points: series.points.iter().map(|[x, y]| (*x, *y)).collect(),
        mark: if i < lines.len() { Mark::Line } else { Mark::Dots },
        look: CurveStyle::one_of(i, lines.len() + points.len()),
    });
    let panel = Panel {
        facts: vec![title.into()],
        covers: vec![(0.0, 0.0)],
        curves: all.collect(),
        ..Panel::new(up, across)
    };
    chart::svg(&[panel], chart::WIDTHS[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn megatrons_runs_are_within_five_per_cent_in_the_mean_and_nine_at_worst() {
        let (mean, worst) = off(&megatron());
        assert!(mean <= 0.05 && worst <= 0.09, "{mean} {worst}");
    }

    /// Profiles of GPUs tell published runs within a tenth, also those that nothing was fitted on.
    #[test]
    fn published_runs_of_fsdp_are_within_ten_per_cent() {
        let [fitted, held_out] = torchtitan();
        assert_eq!((fitted.len(), held_out.len()), (2, 8));
        for cells in [fitted, held_out] {
            let (mean, worst) = off(&cells);
            assert!(mean <= 0.05 && worst <= 0.1, "{mean} {worst} {cells:?}");
        }
    }

    /// None of these cells was fitted on.
    #[test]
    fn zero_bubbles_throughputs_and_memory_are_within_five_per_cent_in_the_mean() {
        let (throughputs, memory) = zero_bubble::throughputs();
        for cells in [throughputs, memory] {
            let (mean, worst) = off(&cells);
            assert!(mean <= 0.05 && worst <= 0.12, "{mean} {worst} {cells:?}");
        }
    }

    #[test]
    fn bubbles_are_those_that_zero_bubble_prints() {
        for cell in zero_bubble::bubble_rates() {
            assert!((cell.ours - cell.paper).abs() < 0.02, "{cell:?}");
        }
    }

    /// F = B = W: no bubble for ZB-2p and ZB-V, a third of 1F1B's for ZB-1p, twice the activations
    /// for ZB-2p and twice the messages for ZB-V.
    #[test]
    fn zero_bubbles_kinds_trade_as_it_says() {
        for (kind, cells) in zero_bubble::trade() {
            for cell in cells {
                assert!(
                    (cell.ours - cell.paper).abs() < 0.06 * cell.paper.max(1.0),
                    "{kind} {cell:?}"
                );
            }
        }
    }

    #[test]
    fn more_memory_never_means_more_bubble_and_the_curves_become_flat() {
        let figure = zero_bubble::figure_7();
        for curve in &figure.curves {
            let rates: Vec<f64> = curve.points.iter().map(|p| p[1]).collect();
            assert!(rates.windows(2).all(|w| w[1] <= w[0] + 0.5), "{}: {rates:?}", curve.name);
        }
        for (p, m, reported, ours) in figure.knees {
            assert!((ours / reported - 1.0).abs() < 0.2, "p {p}, m {m}: {ours} and {reported}");
        }
    }

    /// What docs/papers.md shows is what the command prints.
    #[test]
    fn the_page_in_docs_has_todays_tables() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/papers.md");
        // A package has no docs.
        let Ok(page) = std::fs::read_to_string(path) else { return };
        let text = text().unwrap();
        assert!(page.contains(text.trim_end()), "put the text of `zeropp paper` into {path}");
    }

    #[test]
    fn pictures_are_whole() {
        for (name, svg) in pictures().unwrap() {
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"), "{name}");
            assert!(!svg.contains("NaN") && svg.matches("<polyline").count() >= 2, "{name}");
        }
    }
}
