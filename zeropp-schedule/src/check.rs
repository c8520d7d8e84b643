//! What is wrong with a schedule in a text: all of it, in the text's own letters, with its rows and
//! columns. The command and the page say it with the same words.

use serde::Serialize;

use crate::exchange::{ActionPositions, Format, csv, json::Document, read, spell};
use crate::ir::Action;
use crate::simulate::simulate;
use crate::verify::{LocatedAction, VerifyError, VerifyLimits, Words, verify_all};

/// What is wrong at a place of a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TextFault {
    /// Row of the text, from 1, where the fault is at one place.
    pub row: Option<usize>,
    /// Column, from 1: of a CSV the cell, of JSON the character.
    pub column: Option<usize>,
    /// The rank.
    pub rank: Option<usize>,
    /// The action as the text spells it.
    pub action: Option<String>,
    /// What is wrong.
    pub problem: String,
    /// The same with its place.
    #[serde(skip)]
    pub message: String,
}

impl TextFault {
    fn of_text(message: impl ToString) -> TextFault {
        let problem = message.to_string();
        let message = problem.clone();
        TextFault { row: None, column: None, rank: None, action: None, problem, message }
    }

    fn new(error: &VerifyError, layout: &ActionPositions) -> TextFault {
        let words = TextWords(layout);
        let place = error.place();
        let at = place.and_then(|place| layout.place(place.rank, place.index)).unzip();
        TextFault {
            row: at.0,
            column: at.1,
            rank: place.map(|place| place.rank),
            action: place.map(|place| spell(&place.action)),
            problem: error.problem(&words),
            message: error.message(&words),
        }
    }
}

/// The text's own spelling, and its rows and columns.
struct TextWords<'a>(&'a ActionPositions);

impl Words for TextWords<'_> {
    fn action(&self, action: &Action) -> String {
        spell(action)
    }

    fn index(&self, rank: usize, index: usize) -> String {
        match self.0.place(rank, index) {
            Some((row, column)) => format!("row {row}, column {column}"),
            None => format!("action {index}"),
        }
    }

    fn place(&self, place: &LocatedAction) -> String {
        let at = self.index(place.rank, place.index);
        format!("{at} ({} of rank {})", spell(&place.action), place.rank)
    }
}

/// Reads a schedule and proves that it is sound. An optimizer step is asked for where the text has
/// one: programs of other tools have no such action.
///
/// # Errors
/// What is wrong, at most `most` of it.
pub fn check(
    text: &str,
    format: Format,
    limits: &VerifyLimits,
    most: usize,
) -> Result<Document, Vec<TextFault>> {
    let document = parsed(text, format, most)?;
    let schedule = &document.schedule;
    let of_zeropp = schedule.ranks.iter().flatten().any(|action| *action == Action::OptimizerStep);
    let forward_only = schedule.is_forward_only();
    let limits = VerifyLimits { optimizer_step: of_zeropp, forward_only, ..*limits };
    let faults = verify_all(schedule, &limits, most);
    if !faults.is_empty() {
        let layout = ActionPositions::new(text, format);
        return Err(faults.iter().map(|fault| TextFault::new(fault, &layout)).collect());
    }
    if let Some(costs) = &document.costs {
        let simulated = simulate(schedule, &costs.clone().for_simulator(schedule.cost_entries()));
        simulated.map_err(|error| vec![TextFault::of_text(error)])?;
    }
    Ok(document)
}

/// Reads a schedule that need not be sound.
///
/// # Errors
/// The cells that are no actions, at most `most` of them, or what else kept it from being read.
pub fn parsed(text: &str, format: Format, most: usize) -> Result<Document, Vec<TextFault>> {
    let problem = match read(text, format) {
        Ok(document) => return Ok(document),
        Err(problem) => problem,
    };
    let mut errors = if format == Format::Csv { csv::cell_errors(text) } else { Vec::new() };
    if errors.is_empty() && format == Format::Csv {
        // Cells that are actions, and do not go together.
        errors.extend(csv::read(text).err());
    }
    let fault = |found: &csv::CsvError| {
        let mut fault = TextFault::of_text(found);
        let (place, problem) = match found {
            csv::CsvError::Cell { row, column, problem } => ((Some(*row), Some(*column)), problem),
            csv::CsvError::Row { row, problem } => ((Some(*row), None), problem),
            csv::CsvError::Whole(problem) => ((None, None), problem),
        };
        (fault.row, fault.column) = place;
        fault.problem.clone_from(problem);
        fault
    };
    Err(match errors.is_empty() {
        true => vec![TextFault::of_text(problem)],
        false => errors.iter().take(most).map(fault).collect(),
    })
}
