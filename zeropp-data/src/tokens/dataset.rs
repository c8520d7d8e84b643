//! Where tokens come from: one source, or several that take turns.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use super::DataError;
use super::fingerprint::Fingerprint;
use super::megatron;
use super::sample::Hidden;
use super::source::TokenStore;
use super::turns::SourceTurns;
use crate::choices::Tokenizer;

/// Tokens of one source or several. Those of files are read as they are asked for.
#[derive(Clone, Debug)]
pub struct Dataset {
    sources: Vec<TokenStore>,
    turns: Arc<SourceTurns>,
    /// Of several sources; worked out when it is first asked for.
    fingerprint: OnceLock<Fingerprint>,
    weights: Vec<f64>,
}

/// Which part of the data a run looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitPart {
    /// The beginning, to train on.
    Training,
    /// The part behind it, to measure the loss on.
    Validation,
}

impl Dataset {
    /// The built-in text, 47 KB of English prose, as bytes.
    pub fn builtin() -> Dataset {
        Dataset::of(TokenStore::builtin())
    }

    /// These bytes as tokens.
    pub fn from_bytes(bytes: Vec<u8>) -> Dataset {
        Dataset::of(TokenStore::from_bytes(bytes))
    }

    /// Opens a file, or all files of a folder in the order of the paths inside it. A `.bin` with
    /// Megatron's `.idx` beside it is read as that says. Large files are mapped into memory and not
    /// read; they must not be cut while they are used, or the system ends the process.
    ///
    /// # Errors
    /// Data that cannot be read, is neither file nor folder, or is not what the tokenizer reads.
    pub fn open(path: &Path, tokenizer: Tokenizer) -> Result<Dataset, DataError> {
        TokenStore::open(path, tokenizer).map(Dataset::of)
    }

    /// Whether there is a Megatron index for what [`open`](Self::open) would read at `path`, which
    /// says what its tokens are.
    pub fn is_indexed(path: &Path) -> bool {
        megatron::pair(path).is_some()
    }

    fn of(source: TokenStore) -> Dataset {
        let (weights, fingerprint) = (vec![1.0], OnceLock::new());
        Dataset {
            sources: vec![source],
            turns: Arc::new(SourceTurns::new(&[1.0])),
            fingerprint,
            weights,
        }
    }

    /// Samples of all of these, as many of each as its weight says, in turns that depend on the
    /// sample's number alone.
    ///
    /// # Panics
    /// Panics where there is none, or a weight is not positive and finite.
    pub fn mixed(weighted: Vec<(Dataset, f64)>) -> Dataset {
        let (mut sources, mut weights) = (Vec::new(), Vec::new());
        for (data, weight) in weighted {
            assert!(weight.is_finite() && weight > 0.0, "weights are checked before");
            let total: f64 = data.weights.iter().sum();
            weights.extend(data.weights.iter().map(|w| w / total * weight));
            sources.extend(data.sources);
        }
        let turns = Arc::new(SourceTurns::new(&weights));
        Dataset { sources, turns, fingerprint: OnceLock::new(), weights }
    }

    /// One part of each source, cut after `training` of `training + validation` shares of its
    /// tokens, where a document begins if documents are known and the first is no longer than that.
    ///
    /// # Panics
    /// Panics where both shares are 0.
    pub fn split(self, training: u64, validation: u64, part: SplitPart) -> Dataset {
        let cut = |source: TokenStore| {
            let len = source.len();
            let whole = u128::from(training) + u128::from(validation);
            let share = (len as u128 * u128::from(training) / whole) as usize;
            let cut = source.cut(share);
            match part {
                SplitPart::Training => source.part(0, cut),
                SplitPart::Validation => source.part(cut, len - cut),
            }
        };
        let sources = self.sources.into_iter().map(cut).collect();
        Dataset { sources, fingerprint: OnceLock::new(), ..self }
    }

    /// The same data, whose ids have to be below `vocabulary`: looked at as they are read, so that
    /// a file of ids need not be searched for its largest.
    pub fn with_vocabulary(self, vocabulary: usize) -> Dataset {
        let sources = self.sources.into_iter().map(|s| s.with_vocabulary(vocabulary)).collect();
        Dataset { sources, ..self }
    }

    /// The meaning of its tokens: as an index says, else as it was opened.
    pub fn tokenizer(&self) -> Tokenizer {
        self.sources[0].tokenizer()
    }

    /// Whether all its tokens are bytes of text.
    pub fn is_bytes(&self) -> bool {
        self.sources.iter().all(TokenStore::is_bytes)
    }

    /// A source of bytes and one of token ids, where there are both: no model knows what both are.
    pub fn unlike(&self) -> Option<[&str; 2]> {
        let first = |bytes: bool| self.sources.iter().find(|s| s.is_bytes() == bytes);
        Some([first(true)?.origin(), first(false)?.origin()])
    }

    /// Whether all of it says where documents begin.
    pub fn has_documents(&self) -> bool {
        self.sources.iter().all(TokenStore::has_documents)
    }

    /// Whether some of it says which tokens are scored: the others' are all.
    pub fn has_loss_mask(&self) -> bool {
        self.sources.iter().any(TokenStore::has_loss_mask)
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.sources.iter().map(TokenStore::len).sum()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of token ids: what was given, else 256 for bytes and one more than the largest in a
    /// file of ids, all of which is read the first time.
    pub fn vocabulary(&self) -> usize {
        self.sources.iter().map(TokenStore::vocabulary).max().unwrap_or(0)
    }

    /// Where the data does not look like the tokenizer's: its look, and the setting that would
    /// read it: bytes that may be ids, ids that may be wider.
    pub fn doubt(&self) -> Option<String> {
        self.sources.iter().find_map(TokenStore::doubt)
    }

    /// Files beside its files of ids that a run uses, in words.
    pub fn beside(&self, by_loss_mask: bool) -> impl Iterator<Item = String> + '_ {
        self.sources.iter().filter_map(move |source| source.beside(by_loss_mask))
    }

    /// Checks that a token of each source is scored where something is `hidden` of them.
    ///
    /// # Errors
    /// [`DataError::NothingScored`]; a token id beyond the vocabulary.
    pub fn require_scored(&self, hidden: Hidden) -> Result<(), DataError> {
        for source in &self.sources {
            if !source.scores_any(hidden)? {
                let origin = source.origin().to_owned();
                let why = hidden.why(source.has_loss_mask());
                return Err(DataError::NothingScored { origin, why });
            }
        }
        Ok(())
    }

    /// Where the tokens come from, as messages call it.
    pub fn origin(&self) -> &str {
        self.sources[0].origin()
    }

    /// A value that other data does not have, found quickly whatever the data's size.
    pub fn fingerprint(&self) -> &Fingerprint {
        match self.sources.as_slice() {
            [one] => one.fingerprint(),
            sources => self.fingerprint.get_or_init(|| {
                Fingerprint::joined(sources.iter().map(TokenStore::fingerprint).zip(&self.weights))
            }),
        }
    }

    /// Checks that there is a sample of `seq` tokens and the token after it, of each source.
    ///
    /// # Errors
    /// The data is shorter.
    pub fn require(&self, seq: usize) -> Result<(), DataError> {
        self.sources.iter().try_for_each(|source| source.require(seq))
    }

    /// Whole samples of `seq` tokens, read one after another from the start of each source in its
    /// turns, before a token comes again.
    pub fn samples(&self, seq: usize) -> usize {
        let whole = |source: &TokenStore| source.len().saturating_sub(1) / seq.max(1);
        if let [one] = self.sources.as_slice() {
            return whole(one);
        }
        let again = |n: &usize| {
            let (source, i) = self.turn(*n as u128);
            i >= whole(&self.sources[source]) as u128
        };
        (0..).find(again).expect("sources end")
    }

    /// The source of sample `n` of the run, and which of its own samples that is.
    pub(super) fn turn(&self, n: u128) -> (usize, u128) {
        match self.sources.len() {
            1 => (0, n),
            _ => self.turns.of(n),
        }
    }

    /// How many of the first `n` samples of a run are those of a source.
    pub(super) fn before(&self, n: u128, source: usize) -> u128 {
        match self.sources.len() {
            1 => n,
            _ => self.turns.before(n, source),
        }
    }

    /// The sources, in their order.
    pub(super) fn sources(&self) -> &[TokenStore] {
        &self.sources
    }
}
