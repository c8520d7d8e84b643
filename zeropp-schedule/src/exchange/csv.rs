//! PyTorch's schedule CSV: no header, a row per rank, a cell per action, an empty cell where the
//! rank idles. The actions are spelled as in [the module above](super).
//!
//! PyTorch's format has neither placement nor units. The placement is deduced from the rank that
//! computes a stage, the units from the reductions: a stage reduces once a unit, after the unit's
//! last W. Where that would not give the schedule's units back (a compute-only schedule of several
//! units), zeropp puts a line `#units,3,3,2` in front, which PyTorch does not read: leave it out
//! with [`Dialect::Torch`]. Slices of samples are a line `#sample_slices,4096,4096` behind it, with
//! the tokens of each. The schedule's name is not kept; a schedule from a file is `file`.

use std::io::{self, Write};
use std::str::FromStr;

use super::{check_places, clip, parse, spell};
use crate::action::{Cost, Torch};
use crate::ir::{Action, BLOCKS_MAX, Compute, Schedule, Task};

/// Who will read the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// zeropp: everything is kept.
    Zeropp,
    /// `torch.distributed.pipelining`, which has no recomputation, replica reduction or optimizer
    /// step (they are left out), no units, and one reduction per stage and step (the last one is
    /// kept: the gradient is then summed over the whole step). Its loader takes a compute-only
    /// file as `compute_only` and a lowered one as `compute_comms`. Its runtime with FSDP wants
    /// a stage's weights gathered for W too, which zeropp's lowering does not promise.
    Torch,
}

/// A file as it stands, idle cells and all.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct CsvTable {
    /// The line `#units,…`, if there is one.
    pub units: Option<Vec<usize>>,
    /// The line `#slices,…`, of a split head.
    pub slices: Option<Vec<usize>>,
    /// The line `#sample_slices,…`, of samples that are cut into slices.
    pub sample_slices: Option<Vec<u64>>,
    /// The cells of each rank; `None` is idle.
    pub ranks: Vec<Vec<Option<Action>>>,
}

/// A text that is no schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CsvError {
    /// A cell is wrong.
    #[error("row {row}, column {column}: {problem}")]
    Cell {
        /// Line of the file, from 1.
        row: usize,
        /// Cell of the line, from 1.
        column: usize,
        /// What was found and what would work.
        problem: String,
    },
    /// A row is wrong.
    #[error("row {row}: {problem}")]
    Row {
        /// Line of the file, from 1.
        row: usize,
        /// What was found and what would work.
        problem: String,
    },
    /// The rows do not make a schedule.
    #[error("{0}")]
    Whole(String),
}

/// Writes a schedule, compute-only or lowered as it is.
///
/// # Errors
/// What writing to `out` returns.
pub fn write(schedule: &Schedule, dialect: Dialect, out: impl Write) -> io::Result<()> {
    let whole = schedule.ranks.iter().map(|rank| rank.iter().copied().map(Some).collect());
    let slices = Some(&schedule.head_blocks).filter(|blocks| !blocks.is_empty()).cloned();
    let sample_slices = Some(&schedule.sample_slices).filter(|cut| !cut.is_empty()).cloned();
    let mut table = CsvTable { units: None, slices, sample_slices, ranks: whole.collect() };
    if dialect == Dialect::Torch {
        table.ranks.iter_mut().for_each(keep_what_torch_knows);
        table.sample_slices = None;
    } else if units(&schedule.ranks, schedule.micro_batches()).as_ref() != Ok(&schedule.units) {
        table.units = Some(schedule.units.clone());
    }
    write_table(&table, out)
}

/// Writes a table cell by cell.
///
/// # Errors
/// What writing to `out` returns.
pub fn write_table(table: &CsvTable, out: impl Write) -> io::Result<()> {
    let mut out = io::BufWriter::new(out);
    write_header(&mut out, "units", table.units.as_deref())?;
    write_header(&mut out, "slices", table.slices.as_deref())?;
    write_header(&mut out, "sample_slices", table.sample_slices.as_deref())?;
    for rank in &table.ranks {
        for (column, cell) in rank.iter().enumerate() {
            let comma = if column == 0 { "" } else { "," };
            // A lone empty cell is quoted, or its row would read as one of no cells.
            let text = match cell {
                Some(action) => spell(action),
                None if rank.len() == 1 => "\"\"".into(),
                None => String::new(),
            };
            write!(out, "{comma}{text}")?;
        }
        writeln!(out)?;
    }
    out.flush()
}

/// A line before the ranks, where there is such a list.
fn write_header(
    out: &mut impl Write,
    name: &str,
    numbers: Option<&[impl std::fmt::Display]>,
) -> io::Result<()> {
    let Some(numbers) = numbers else { return Ok(()) };
    write!(out, "#{name}")?;
    numbers.iter().try_for_each(|n| write!(out, ",{n}"))?;
    writeln!(out)
}

/// Reads a schedule.
///
/// # Errors
/// Every cell must be an action or empty, every rank must act, every stage be computed on one rank
/// only, and stages and micro-batches be numbered without a gap. The error names row and column.
pub fn read(text: &str) -> Result<Schedule, CsvError> {
    let table = read_table(text)?;
    let first_row = table.first_row();
    let ranks: Vec<Vec<Action>> =
        table.ranks.iter().map(|cells| cells.iter().flatten().copied().collect()).collect();
    if let Some(rank) = ranks.iter().position(Vec::is_empty) {
        let problem = "a rank without an action; every row is a rank".into();
        return Err(CsvError::Row { row: first_row + rank, problem });
    }
    let slices = table.slices.clone().unwrap_or_default();
    let placement = placement(&table, first_row)?;
    let micro_batches = micro_batches(&ranks)?;
    let units = match table.units {
        Some(units) => units,
        None => units_or_one(&ranks, micro_batches)?,
    };
    let sum = units.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    if sum != Some(micro_batches) {
        let problem = format!("units {units:?} do not sum to the {micro_batches} micro-batches");
        return Err(CsvError::Row { row: 1, problem });
    }
    let blocks = slices.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
    let fit = |n: usize| (1..=BLOCKS_MAX).contains(&n) && slices.len() == ranks.len();
    if !slices.is_empty() && !blocks.is_some_and(fit) {
        let (row, pp) = (first_row - 1, ranks.len());
        let problem = format!(
            "slices {slices:?}: blocks of each of {pp} ranks are wanted, 1 to {BLOCKS_MAX} in all"
        );
        return Err(CsvError::Row { row, problem });
    }
    let head_blocks = slices;
    let sample_slices = table.sample_slices.clone().unwrap_or_default();
    let kind = "file".into();
    let schedule = Schedule { kind, placement, units, ranks, head_blocks, sample_slices };
    if let Some(problem) = schedule.slices_fault() {
        return Err(CsvError::Row { row: first_row - 1, problem });
    }
    check_places(&schedule).map_err(|misfit| CsvError::Cell {
        row: first_row + misfit.rank,
        column: column(&table.ranks[misfit.rank], misfit.index),
        problem: misfit.problem,
    })?;
    Ok(schedule)
}

/// Reads the cells only.
///
/// # Errors
/// A cell that is neither empty nor one action, a row of no cells, a bad `#units` line.
pub fn read_table(text: &str) -> Result<CsvTable, CsvError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let text = text.strip_suffix('\n').unwrap_or(text);
    let mut table = CsvTable::default();
    for (index, line) in text.split('\n').enumerate() {
        let row = index + 1;
        let line = line.strip_suffix('\r').unwrap_or(line);
        if let Some(header) = line.strip_prefix('#') {
            let line = |name| header.strip_prefix(name).filter(|_| table.is_begun(row));
            if let Some(cut) = line("sample_slices,") {
                table.sample_slices = Some(numbers("sample_slices", cut, row, 1)?);
            } else if let Some(slices) = line("slices,").filter(|_| table.slices.is_none()) {
                table.slices = Some(numbers("slices", slices, row, 0)?);
            } else {
                table.units = Some(read_header(header, row)?);
            }
            continue;
        }
        if line.trim().is_empty() {
            let problem = "an empty row; every row is a rank and has an action".into();
            return Err(CsvError::Row { row, problem });
        }
        let cells = line.split(',').enumerate().map(|(column, cell)| {
            read_cell(cell).map_err(|problem| CsvError::Cell { row, column: column + 1, problem })
        });
        table.ranks.push(cells.collect::<Result<_, _>>()?);
    }
    if table.ranks.is_empty() {
        return Err(CsvError::Whole("no rows; every row is a rank and has an action".into()));
    }
    Ok(table)
}

/// Every cell of a text that is neither empty nor one action. [`read`] names the first alone.
pub(crate) fn cell_errors(text: &str) -> Vec<CsvError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let rows = text.lines().enumerate().filter(|(_, line)| !line.starts_with('#'));
    let cells = rows.flat_map(|(row, line)| {
        line.split(',').enumerate().map(move |(column, cell)| (row + 1, column + 1, cell))
    });
    let error = |(row, column, cell)| {
        let problem = read_cell(cell).err()?;
        Some(CsvError::Cell { row, column, problem })
    };
    cells.filter_map(error).collect()
}

/// A cell, bare or quoted whole.
fn read_cell(cell: &str) -> Result<Option<Action>, String> {
    let cell = cell.trim();
    let bare = cell.strip_prefix('"').and_then(|c| c.strip_suffix('"')).unwrap_or(cell).trim();
    if bare.is_empty() {
        return Ok(None);
    }
    parse(bare).map(Some).map_err(|e| e.to_string())
}

fn read_header(header: &str, row: usize) -> Result<Vec<usize>, CsvError> {
    let fail = |problem: String| CsvError::Row { row, problem };
    if row != 1 {
        return Err(fail("a line that starts with # can only be the first".into()));
    }
    let (name, units) = header.split_once(',').unwrap_or((header, ""));
    if name.trim() != "units" {
        let found = clip(header);
        return Err(fail(format!("found {found:?} after #; #units,3,3,2 is known")));
    }
    if units.is_empty() {
        return Err(fail("units: none given, as in #units,3,3,2".into()));
    }
    numbers("units", units, row, 1)
}

/// Numbers of a first line, none below `least`.
fn numbers<T: FromStr + PartialOrd + Default>(
    name: &str,
    list: &str,
    row: usize,
    least: T,
) -> Result<Vec<T>, CsvError> {
    let number = |cell: &str| match cell.parse::<T>() {
        Ok(n) if n >= least => Ok(n),
        _ => {
            let above = if least > T::default() { " above 0" } else { "" };
            let found = clip(cell);
            let problem = format!("{name}: found {found:?}, not a number{above}");
            Err(CsvError::Row { row, problem })
        }
    };
    list.split(',').map(str::trim).map(number).collect()
}

impl CsvTable {
    /// The row of the first rank, from 1.
    pub(crate) fn first_row(&self) -> usize {
        let lines = [self.units.is_some(), self.slices.is_some(), self.sample_slices.is_some()];
        1 + lines.into_iter().filter(|is_there| *is_there).count()
    }

    /// Whether a line before the ranks may be `row`: the first, or one after the units.
    fn is_begun(&self, row: usize) -> bool {
        self.sample_slices.is_none() && self.ranks.is_empty() && row == self.first_row()
    }
}

/// The column, from 1, of the action that is the `index`-th of its row.
fn column(cells: &[Option<Action>], index: usize) -> usize {
    let actions = cells.iter().enumerate().filter(|(_, cell)| cell.is_some());
    actions.map(|(column, _)| column + 1).nth(index).unwrap_or(cells.len())
}

/// The rank of each stage: the one that computes it. The last one is a split head, where there are
/// slices.
fn placement(table: &CsvTable, first_row: usize) -> Result<Vec<usize>, CsvError> {
    let tasks = table.ranks.iter().flatten().flatten().flat_map(Action::computes);
    let mut stages = distinct(tasks.map(|task| task.stage));
    let wide = if table.slices.is_some() { stages.pop() } else { None };
    let mut home = vec![None; stages.len()];
    for (rank, cells) in table.ranks.iter().enumerate() {
        for (column, cell) in cells.iter().enumerate() {
            let tasks = cell.iter().flat_map(Action::computes);
            for Task { stage, .. } in tasks.filter(|task| Some(task.stage) != wide) {
                let first = *home[place(&stages, stage)].get_or_insert(rank);
                if first != rank {
                    return Err(CsvError::Cell {
                        row: first_row + rank,
                        column: column + 1,
                        problem: format!(
                            "stage {stage} is computed here and in row {}; a stage is on one rank",
                            first_row + first
                        ),
                    });
                }
            }
        }
    }
    dense("stage", &stages)?;
    Ok(home.into_iter().flatten().collect())
}

/// The number of micro-batches: all those computed, from 0 without a gap.
fn micro_batches(ranks: &[Vec<Action>]) -> Result<usize, CsvError> {
    let all = ranks.iter().flatten().flat_map(Action::computes).map(|t| t.micro_batch);
    dense("micro-batch", &distinct(all))
}

/// Each number once, in their order.
fn distinct(numbers: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut all = Vec::new();
    for number in numbers {
        if let Err(at) = all.binary_search(&number) {
            all.insert(at, number);
        }
    }
    all
}

/// Where a number is among distinct ones.
fn place(numbers: &[usize], number: usize) -> usize {
    numbers.binary_search(&number).expect("it is one of them")
}

fn dense(what: &str, numbers: &[usize]) -> Result<usize, CsvError> {
    if let Some((count, number)) = numbers.iter().enumerate().find(|(i, number)| i != *number) {
        let problem = format!("no rank computes {what} {count}, but one computes {number}");
        return Err(CsvError::Whole(problem));
    }
    if numbers.is_empty() {
        return Err(CsvError::Whole("no rank computes anything".into()));
    }
    Ok(numbers.len())
}

/// The units that the reductions tell, or one of everything where no stage reduces twice: an
/// early reduction is then a fault for the verifier to name.
fn units_or_one(ranks: &[Vec<Action>], micro_batches: usize) -> Result<Vec<usize>, CsvError> {
    let reductions = || ranks.iter().flatten().filter_map(reduced);
    if distinct(reductions()).len() == reductions().count() {
        return Ok(vec![micro_batches]);
    }
    units(ranks, micro_batches).map_err(CsvError::Whole)
}

/// The stage that an action reduces.
fn reduced(action: &Action) -> Option<usize> {
    action.stage().filter(|_| action.row().cost == Cost::Reduce)
}

/// The units that the reductions tell: between two of a stage lie the W of one unit.
fn units(ranks: &[Vec<Action>], micro_batches: usize) -> Result<Vec<usize>, String> {
    let mut found: Option<(usize, Vec<usize>)> = None;
    let actions = || ranks.iter().flatten();
    let computed = actions().flat_map(Action::computes).map(|task| task.stage);
    let stages = distinct(computed.chain(actions().filter_map(reduced)));
    let mut open = vec![(Vec::new(), Vec::new()); stages.len()];
    for action in actions() {
        for Task { kind, stage, micro_batch } in action.computes() {
            if matches!(kind, Compute::W | Compute::BW) {
                open[place(&stages, stage)].1.push(micro_batch);
            }
        }
        if let Some(stage) = reduced(action) {
            let (units, unit) = &mut open[place(&stages, stage)];
            let start = units.iter().sum::<usize>();
            unit.sort_unstable();
            if unit.is_empty() || !unit.iter().copied().eq(start..start + unit.len()) {
                return Err(format!(
                    "stage {stage} reduces after the micro-batches {unit:?}, which are no unit \
                     from {start} on; say what the units are in a first line like #units,3,3,2"
                ));
            }
            units.push(unit.len());
            unit.clear();
        }
    }
    for (stage, (units, rest)) in stages.into_iter().zip(open) {
        if units.is_empty() {
            continue;
        }
        if !rest.is_empty() {
            return Err(format!("stage {stage} does not reduce after its last W"));
        }
        match &found {
            Some((other, theirs)) if *theirs != units => {
                return Err(format!(
                    "stage {stage} reduces in units of {units:?}, stage {other} of {theirs:?}"
                ));
            }
            _ => found = Some((stage, units)),
        }
    }
    Ok(found.map_or(vec![micro_batches], |(_, units)| units))
}

/// Drops what PyTorch has no word for, and all but the last reduction of each stage.
fn keep_what_torch_knows(cells: &mut Vec<Option<Action>>) {
    let mut kept = Vec::new();
    cells.reverse();
    cells.retain(|cell| {
        let Some(action) = cell else { return true };
        match action.row().torch {
            Torch::Same => true,
            Torch::Unknown => false,
            Torch::LastOfStage => {
                let last = !kept.contains(action);
                kept.push(*action);
                last
            }
        }
    });
    cells.reverse();
}

#[cfg(test)]
mod tests;
