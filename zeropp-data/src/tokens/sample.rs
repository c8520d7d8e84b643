//! A sample: its tokens, the documents in it, and which of its targets are scored.

/// The hidden parts of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hidden {
    /// Whether documents are kept apart: the first token of one is not scored, as what comes before
    /// says nothing of it.
    pub documents: bool,
    /// The id that ends a document; without, documents begin where the data's index says.
    pub end: Option<u32>,
    /// Whether only the tokens are scored that the data's loss mask marks, where it has one.
    pub by_loss_mask: bool,
}

impl Hidden {
    /// Why nothing may be left of data with a `mask` or without, and what would help.
    pub(super) fn why(&self, mask: bool) -> &'static str {
        match self.by_loss_mask && mask {
            true => {
                "its .mask marks none that may be; give data with answers (the roles of a \
                 conversation have to be those that its template knows), or set loss-mask = false"
            }
            false => {
                "each is the first of a document (document-mask); use documents of two tokens or \
                 more, or another document-mask:end"
            }
        }
    }
}

/// Tokens of a sample, s of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// The model's inputs.
    pub inputs: Vec<u32>,
    /// The token after each input.
    pub targets: Vec<u32>,
    /// The inputs that are the first of a document, but for the sample's own first; empty where
    /// documents are not kept apart.
    pub documents: Vec<usize>,
    /// Which targets are scored; none where all are.
    pub scored: Option<Vec<bool>>,
}

impl Sample {
    /// A sample of `ids`, of which the last is only a target. `starts` are the ids that begin a
    /// document by an index; `marked` says of each id whether it is scored.
    pub fn new(
        mut ids: Vec<u32>,
        hidden: Hidden,
        starts: Vec<usize>,
        marked: Option<Vec<bool>>,
    ) -> Sample {
        let starts = match hidden.end {
            _ if !hidden.documents => Vec::new(),
            Some(end) => (1..ids.len()).filter(|at| ids[at - 1] == end).collect(),
            None => starts,
        };
        let seq = ids.len() - 1;
        let mut scored = marked.map(|marked| marked[1..].to_vec());
        for start in starts.iter().filter(|start| **start > 0) {
            scored.get_or_insert_with(|| vec![true; seq])[start - 1] = false;
        }
        let documents = starts.into_iter().filter(|at| (1..seq).contains(at)).collect();
        let targets = ids[1..].to_vec();
        ids.pop();
        Sample { inputs: ids, targets, documents, scored }
    }

    /// Adds a part from another place, which begins a document where those are kept apart.
    pub(super) fn append(&mut self, part: Sample, hidden: Hidden) {
        let before = self.inputs.len();
        if hidden.documents && before > 0 {
            self.documents.push(before);
        }
        self.documents.extend(part.documents.iter().map(|at| before + at));
        if self.scored.is_some() || part.scored.is_some() {
            let scored = self.scored.get_or_insert_with(|| vec![true; before]);
            scored.extend(part.scored.unwrap_or_else(|| vec![true; part.targets.len()]));
        }
        self.inputs.extend(part.inputs);
        self.targets.extend(part.targets);
    }

    /// The same, of which no more than the first `n` targets are scored.
    #[must_use]
    pub(super) fn scoring_first(mut self, n: usize) -> Sample {
        if n < self.targets.len() {
            let scored = self.scored.get_or_insert_with(|| vec![true; self.targets.len()]);
            scored[n..].fill(false);
        }
        self
    }

    /// How many targets are scored.
    pub fn scored(&self) -> usize {
        match &self.scored {
            None => self.targets.len(),
            Some(scored) => scored.iter().filter(|scored| **scored).count(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_token_of_a_document_is_not_scored() {
        let apart = Hidden { documents: true, ..Hidden::default() };
        let by_end = Hidden { end: Some(0), ..apart };
        let ids = vec![5, 0, 7, 8, 0, 0, 9];
        let sample = Sample::new(ids.clone(), by_end, vec![3], None);
        assert_eq!(sample.documents, [2, 5], "the last is a target alone");
        let not_scored = |sample: &Sample| {
            let scored = sample.scored.clone().unwrap();
            (0..scored.len()).filter(|i| !scored[*i]).collect::<Vec<_>>()
        };
        assert_eq!(not_scored(&sample), [1, 4, 5]);
        assert_eq!(sample.scored(), 3);
        let by_index = Sample::new(ids.clone(), apart, vec![0, 3], None);
        assert_eq!((by_index.documents.as_slice(), not_scored(&by_index)), (&[3][..], vec![2]));
        let all = Sample::new(ids.clone(), Hidden::default(), vec![3], None);
        assert_eq!((all.documents.len(), &all.scored, all.scored()), (0, &None, 6));
        let marked = vec![true, false, true, true, true, false, false];
        let both = Sample::new(ids, by_end, Vec::new(), Some(marked));
        assert_eq!(not_scored(&both), [0, 1, 4, 5]);
        assert_eq!((both.inputs, both.targets), (vec![5, 0, 7, 8, 0, 0], vec![0, 7, 8, 0, 0, 9]));
    }
}
