//! `zeropp schedule`: a schedule as numbers, as a file, or as a picture.

mod all;
mod args;
mod cost_args;
mod costs;
mod costs_file;
mod facts;
mod make;
mod micros;
mod output;
mod slice_args;

use std::path::PathBuf;

use clap::ArgMatches;
use zeropp_core::files::escaped;

pub(crate) use args::{command, kinds};
pub(crate) use cost_args::{CostFlags, cost_args};
pub(crate) use costs::ScheduleCosts;
pub(crate) use facts::{facts, made_by, shape};

use crate::failure::Failure;
use crate::output::{keep_inputs, write};
use crate::{stderr, stdout};

/// Makes what is asked for and shows or writes it.
pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let request = args::ScheduleRequest::new(matches);
    let out = matches.get_one::<PathBuf>("out");
    if let Some(out) = out {
        keep_inputs(out, matches.get_one::<PathBuf>("costs"))?;
    }
    let format = match (matches.get_one::<String>("format"), out) {
        (Some(format), _) => format,
        (None, Some(path)) => output::format_of(path)?,
        (None, None) => "ascii",
    };
    if matches.get_flag("all") {
        let sort = matches.get_one::<String>("sort");
        return deliver(out, &all::render(&request, format, sort.map(String::as_str))?);
    }
    let kind = matches.get_one::<String>("kind").expect("has a default");
    let width = *matches.get_one::<usize>("width").expect("has a default");
    let made = make::make(&request, kind, make::shape(&request, kind, false))?;
    for note in &made.notes {
        stderr::tell(&format!("note: {note}"));
    }
    deliver(out, &output::render(&made, format, width).map_err(Failure::failed_run)?)
}

/// To the file, or to standard output.
fn deliver(out: Option<&PathBuf>, text: &[u8]) -> Result<(), Failure> {
    match out {
        Some(path) => write(path, text),
        None => {
            stdout::print(escaped(&String::from_utf8_lossy(text)).as_bytes());
            Ok(())
        }
    }
}
