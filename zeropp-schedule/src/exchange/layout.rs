//! Where the text of a schedule has each action, for messages that send a reader there.

use super::{Format, csv};

/// Row and column of every action of a file, both from 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ActionPositions {
    ranks: Vec<Vec<(usize, usize)>>,
}

impl ActionPositions {
    /// Of a text that [`read`](super::read) takes. In a CSV a column is a cell, in JSON a
    /// character.
    pub fn new(text: &str, format: Format) -> ActionPositions {
        let ranks = match format {
            Format::Csv => of_csv(text),
            Format::Json => of_json(text),
        };
        ActionPositions { ranks }
    }

    /// Row and column of action `index`, from 0, of a rank.
    pub fn place(&self, rank: usize, index: usize) -> Option<(usize, usize)> {
        self.ranks.get(rank)?.get(index).copied()
    }
}

fn of_csv(text: &str) -> Vec<Vec<(usize, usize)>> {
    let Ok(table) = csv::read_table(text) else { return Vec::new() };
    let first_row = table.first_row();
    let of_rank = |(rank, cells): (usize, &Vec<Option<_>>)| {
        let actions = cells.iter().enumerate().filter(|(_, cell)| cell.is_some());
        actions.map(|(column, _)| (first_row + rank, column + 1)).collect()
    };
    table.ranks.iter().enumerate().map(of_rank).collect()
}

/// The strings in the lists of the list `actions`. The text is known to be JSON, so its brackets
/// and quotes fit.
fn of_json(text: &str) -> Vec<Vec<(usize, usize)>> {
    let mut ranks: Vec<Vec<(usize, usize)>> = Vec::new();
    let (mut row, mut column, mut depth) = (1, 0, 0usize);
    // The last string of the top level: what comes after a key is its value.
    let mut key = String::new();
    let (mut in_string, mut is_escaped, mut in_actions) = (false, false, false);
    for c in text.chars() {
        column += 1;
        if in_string {
            match c {
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                '"' => in_string = false,
                c if depth == 1 => key.push(c),
                _ => {}
            }
            continue;
        }
        match c {
            '\n' => (row, column) = (row + 1, 0),
            '"' => {
                in_string = true;
                if depth == 1 {
                    key.clear();
                }
                if let (true, 3, Some(rank)) = (in_actions, depth, ranks.last_mut()) {
                    rank.push((row, column));
                }
            }
            '[' | '{' => {
                depth += 1;
                in_actions |= depth == 2 && key == "actions";
                if in_actions && depth == 3 {
                    ranks.push(Vec::new());
                }
            }
            ']' | '}' => {
                depth = depth.saturating_sub(1);
                in_actions &= depth > 1;
            }
            _ => {}
        }
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_found_where_they_stand() {
        let layout = ActionPositions::new("#units,2\n0F0,,0B0\n,1F0\n", Format::Csv);
        assert_eq!(layout.place(0, 1), Some((2, 3)), "an idle cell is a column");
        assert_eq!(layout.place(1, 0), Some((3, 2)));
        assert_eq!((layout.place(0, 2), layout.place(2, 0)), (None, None));
        let text = "{\"kind\": \"actions\", \"a\\\"\": [[\"x\"]],\n \"actions\": [[\"0F0\",\n  \
                    \"0B0\"], [\"1F0\"]], \"b\": [\"y\"]}";
        let layout = ActionPositions::new(text, Format::Json);
        assert_eq!(layout.place(0, 0), Some((2, 15)));
        assert_eq!(layout.place(0, 1), Some((3, 3)));
        assert_eq!(layout.place(1, 0), Some((3, 12)));
        assert_eq!(layout.place(1, 1), None);
    }
}
