//! The parts of a micro-batch that attention and the loss may not see, and those that are dropped.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{Device, Int, Tensor, TensorData};

use super::Dropout;
use super::on_devices::OnDevices;

/// The target of a token that is not scored, as in PyTorch's `cross_entropy`.
pub const NOT_SCORED: i32 = -100;

/// The hidden parts of a micro-batch. With nothing hidden, operations do as if this did not exist.
#[derive(Clone, Default)]
pub struct Masks {
    /// The documents that attention stays inside of, where it does.
    pub documents: Option<Arc<Documents>>,
    /// The divisor of a micro-batch's loss, where not all tokens are scored: the scored tokens of
    /// the whole step over its micro-batches. So the mean of their losses is the mean over the
    /// scored tokens, wherever those are. Targets that are not scored are [`NOT_SCORED`].
    pub scored: Option<f64>,
    /// Dropout, where the model trains with any.
    pub dropout: Option<Dropout>,
}

/// The documents of a micro-batch's samples: b samples of s tokens are b·s rows, of which each
/// document has some that follow each other. Of a slice of a sample, those of the slice.
pub struct Documents {
    /// First row of each document, and the number of rows.
    bounds: Vec<usize>,
    positions: Vec<usize>,
    positions_there: OnDevices<Tensor<1, Int>>,
}

impl Documents {
    /// Documents that begin at these tokens of each of the samples, which have `seq` tokens each.
    /// A sample's first token begins one whether it is named or not.
    ///
    /// # Panics
    /// Panics where the tokens of a sample do not go up, or are not below `seq`.
    pub fn new<'a>(seq: usize, starts: impl IntoIterator<Item = &'a [usize]>) -> Documents {
        let mut bounds = Vec::new();
        let mut rows = 0;
        for starts in starts {
            bounds.push(rows);
            for start in starts.iter().filter(|start| **start > 0) {
                let row = rows + start;
                let last = *bounds.last().expect("the sample's first");
                assert!(*start < seq && row > last, "documents of a sample begin at {starts:?}");
                bounds.push(row);
            }
            rows += seq;
        }
        bounds.push(rows);
        let positions = bounds.windows(2).flat_map(|pair| 0..pair[1] - pair[0]).collect();
        Documents { bounds, positions, positions_there: OnDevices::default() }
    }

    /// Those of these tokens of the sample, of which the first may be in the middle of a document.
    ///
    /// # Panics
    /// Panics if there are no such tokens.
    pub fn of_slice(&self, tokens: Range<usize>) -> Documents {
        let Range { start, end } = tokens;
        let inner = self.bounds.iter().copied().filter(|at| start < *at && *at < end);
        let bounds = [start].into_iter().chain(inner).chain([end]);
        Documents {
            bounds: bounds.map(|at| at - start).collect(),
            positions: self.positions[tokens].to_vec(),
            positions_there: OnDevices::default(),
        }
    }

    /// The rows of each document.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> {
        self.bounds.windows(2).map(|pair| pair[0]..pair[1])
    }

    /// The position of each row's token in its document, from 0.
    pub fn positions(&self) -> &[usize] {
        &self.positions
    }

    /// [`positions`](Self::positions) on `device`, `[b·s]`.
    pub(crate) fn positions_on(&self, device: &Device) -> Tensor<1, Int> {
        self.positions_there.get(device, || {
            let positions: Vec<i32> = self.positions.iter().map(|p| *p as i32).collect();
            let n = positions.len();
            Tensor::from_data(TensorData::new(positions, [n]), device)
        })
    }

    /// Rows of all samples.
    pub fn rows(&self) -> usize {
        self.positions.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_rows_in_a_row() {
        let starts: [&[usize]; 3] = [&[0, 3], &[], &[1]];
        let documents = Documents::new(4, starts);
        assert_eq!(documents.ranges().collect::<Vec<_>>(), [0..3, 3..4, 4..8, 8..9, 9..12]);
        assert_eq!(documents.positions(), [0, 1, 2, 0, 0, 1, 2, 3, 0, 0, 1, 2]);
        assert_eq!(documents.rows(), 12);
        let slice = Documents::new(12, [&[0, 3, 4, 8][..]]).of_slice(2..8);
        assert_eq!(slice.ranges().collect::<Vec<_>>(), [0..1, 1..2, 2..6]);
        assert_eq!(slice.positions(), [2, 0, 0, 1, 2, 3]);
    }
}
