//! Which words of a run's state go from which rank to which where its stages are cut anew while it
//! runs (ADR 106): a pure function of what every rank has and what it is to have, which all ranks
//! work out alike. As in a checkpoint, a word has one owner.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::Checked;
use crate::file::tensor_name;
use crate::kept::StateTensor;
use crate::open::StateSource;

/// Words `start..start + words` of a tensor, by the name that it has in files.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct StateSpan {
    /// Its name, as [`tensor_name`] gives it.
    pub tensor: String,
    /// First word.
    pub start: usize,
    /// How many.
    pub words: usize,
}

impl StateSpan {
    /// The word after its last one.
    pub fn end(&self) -> usize {
        self.start + self.words
    }
}

/// Words that one rank gives to another, or keeps.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Move {
    /// Who has them.
    pub from: usize,
    /// Who is to have them.
    pub to: usize,
    /// They.
    pub span: StateSpan,
}

/// The moves that bring every rank what it `wants` of what ranks `have`: each word that a rank
/// wants comes to it once, from the one that has it. In order of the ranks that give, of those that
/// get, and of names and words.
///
/// # Errors
/// In words: two ranks that have a word, or one that is wanted and no rank has.
pub fn moves(have: &[Vec<StateSpan>], want: &[Vec<StateSpan>]) -> Result<Vec<Move>, String> {
    let mut owners: BTreeMap<&str, Vec<(usize, usize, usize)>> = BTreeMap::new();
    for (rank, spans) in have.iter().enumerate() {
        for span in spans.iter().filter(|span| span.words > 0) {
            owners.entry(&span.tensor).or_default().push((span.start, span.end(), rank));
        }
    }
    for (tensor, owned) in &mut owners {
        owned.sort_unstable();
        if let Some(two) = owned.windows(2).find(|two| two[1].0 < two[0].1) {
            let (word, one, other) = (two[1].0, two[0].2, two[1].2);
            return Err(format!("ranks {one} and {other} both have word {word} of {tensor}"));
        }
    }
    let mut all = Vec::new();
    for (to, wanted) in want.iter().enumerate() {
        for StateSpan { tensor, start, words } in merged(wanted) {
            let owned = owners.get(&*tensor).map_or(&[][..], Vec::as_slice);
            let (mut at, end) = (start, start + words);
            let first = owned.partition_point(|(_, end, _)| *end <= at);
            for (owned_from, owned_to, from) in &owned[first..] {
                if *owned_from > at || at == end {
                    break;
                }
                let words = end.min(*owned_to) - at;
                let span = StateSpan { tensor: tensor.clone(), start: at, words };
                all.push(Move { from: *from, to, span });
                at += words;
            }
            if at < end {
                return Err(format!("rank {to} wants word {at} of {tensor}, which no rank has"));
            }
        }
    }
    all.sort_unstable();
    Ok(all)
}

/// The same words, each once: the spans of a tensor in order, with a gap between any two.
fn merged(spans: &[StateSpan]) -> Vec<StateSpan> {
    let mut sorted: Vec<&StateSpan> = spans.iter().filter(|span| span.words > 0).collect();
    sorted.sort_unstable();
    let mut all: Vec<StateSpan> = Vec::new();
    for span in sorted {
        match all.last_mut() {
            Some(last) if last.tensor == span.tensor && span.start <= last.end() => {
                last.words = last.words.max(span.end() - last.start);
            }
            _ => all.push(span.clone()),
        }
    }
    all
}

/// Words of tensors in memory: what a rank gives, and what it got.
#[derive(Debug, Default)]
pub struct HeldWords {
    /// By name, each from its first word on, in their order once they are [sorted](Self::sort).
    tensors: BTreeMap<String, Vec<(usize, Vec<f32>)>>,
}

impl HeldWords {
    /// Adds words of `tensor` from `start` on.
    pub fn add(&mut self, tensor: String, start: usize, words: Vec<f32>) {
        if !words.is_empty() {
            self.tensors.entry(tensor).or_default().push((start, words));
        }
    }

    /// Puts them in order, once all are there.
    pub fn sort(&mut self) {
        self.tensors.values_mut().for_each(|held| held.sort_unstable_by_key(|(start, _)| *start));
    }

    /// What there is.
    pub fn spans(&self) -> Vec<StateSpan> {
        let of = |(tensor, held): (&String, &Vec<(usize, Vec<f32>)>)| {
            let span = |(start, words): &(usize, Vec<f32>)| StateSpan {
                tensor: tensor.clone(),
                start: *start,
                words: words.len(),
            };
            held.iter().map(span).collect::<Vec<_>>()
        };
        self.tensors.iter().flat_map(of).collect()
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        4 * self.tensors.values().flatten().map(|(_, words)| words.len() as u64).sum::<u64>()
    }

    /// Copies the words of `tensor` from `start` on, of which all are there.
    ///
    /// # Panics
    /// Panics where one is not.
    pub fn copy(&self, tensor: &str, start: usize, out: &mut [f32]) {
        let held = self.tensors.get(tensor).map_or(&[][..], Vec::as_slice);
        let (mut at, end) = (start, start + out.len());
        let first = held.partition_point(|(from, words)| from + words.len() <= at);
        for (from, words) in held[first..].iter().take_while(|(from, _)| *from < end) {
            let (skipped, upto) = (at - from, end.min(from + words.len()));
            out[at - start..upto - start].copy_from_slice(&words[skipped..upto - from]);
            at = upto;
        }
        assert_eq!(at, end, "{tensor} has a gap");
    }
}

impl StateSource for HeldWords {
    fn read_state(
        &mut self,
        kept: &StateTensor,
        name: &str,
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Checked<()> {
        let (start, _) = kept.span(elements.start, elements.len());
        self.copy(&tensor_name(&kept.name, name), start, out);
        Ok(())
    }

    fn has(&self, _: &StateTensor, _: &str) -> bool {
        // A run keeps the same of a parameter before and after.
        true
    }
}

/// Notes what is read, and gives zeros.
#[derive(Debug, Default)]
pub struct Wanted(pub Vec<StateSpan>);

impl StateSource for Wanted {
    fn read_state(
        &mut self,
        kept: &StateTensor,
        name: &str,
        elements: Range<usize>,
        out: &mut [f32],
    ) -> Checked<()> {
        let (start, _) = kept.span(elements.start, elements.len());
        self.0.push(StateSpan { tensor: tensor_name(&kept.name, name), start, words: out.len() });
        Ok(())
    }

    fn has(&self, _: &StateTensor, _: &str) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(tensor: &str, start: usize, words: usize) -> StateSpan {
        StateSpan { tensor: tensor.into(), start, words }
    }

    fn below(n: usize, state: &mut u64) -> usize {
        *state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((*state >> 33) % n as u64) as usize
    }

    /// Tensors of random lengths, cut at random among so many ranks.
    fn cut(tensors: &[usize], ranks: usize, state: &mut u64) -> Vec<Vec<StateSpan>> {
        let mut all = vec![Vec::new(); ranks];
        for (i, len) in tensors.iter().enumerate() {
            let mut at = 0;
            while at < *len {
                let words = 1 + below(*len - at, state);
                all[below(ranks, state)].push(span(&format!("t{i}"), at, words));
                at += words;
            }
        }
        all
    }

    /// Whatever the cuts before and after, and whatever else a rank wants, each word comes to it
    /// once, from its owner, and as many are moved as are wanted.
    #[test]
    fn every_word_has_one_source_and_one_place() {
        for seed in 0..500 {
            let state = &mut (seed * 7919 + 1);
            let ranks = 1 + below(6, state);
            let tensors: Vec<usize> =
                (0..1 + below(5, state)).map(|_| 1 + below(40, state)).collect();
            let have = cut(&tensors, ranks, state);
            let mut want = cut(&tensors, ranks, state);
            // Replicas and tied weights want words that others want, too, in overlapping spans.
            for spans in &mut want {
                let more = cut(&tensors, ranks, state).swap_remove(0);
                spans.extend(more);
            }
            let moves = moves(&have, &want).expect("all is there");
            let has = |spans: &[StateSpan], tensor: &str, word: usize| {
                let with =
                    |s: &&StateSpan| s.tensor == tensor && (s.start..s.end()).contains(&word);
                spans.iter().filter(with).count()
            };
            for (rank, wanted) in want.iter().enumerate() {
                let mine: Vec<&Move> = moves.iter().filter(|m| m.to == rank).collect();
                let spans: Vec<StateSpan> = mine.iter().map(|m| m.span.clone()).collect();
                for (i, len) in tensors.iter().enumerate() {
                    let tensor = format!("t{i}");
                    for word in 0..*len {
                        let is_wanted = has(wanted, &tensor, word) > 0;
                        assert_eq!(has(&spans, &tensor, word), usize::from(is_wanted), "{seed}");
                    }
                }
                for m in mine {
                    let words = m.span.start..m.span.end();
                    assert!(words.into_iter().all(|w| has(&have[m.from], &m.span.tensor, w) == 1));
                }
            }
        }
    }

    #[test]
    fn a_word_with_two_owners_or_none_is_an_error() {
        let two = moves(&[vec![span("w", 0, 5)], vec![span("w", 4, 2)]], &[]).unwrap_err();
        assert_eq!(two, "ranks 0 and 1 both have word 4 of w");
        let have = [vec![span("w", 0, 5), span("w", 6, 2)]];
        let none = moves(&have, &[vec![span("w", 3, 4)]]).unwrap_err();
        assert_eq!(none, "rank 0 wants word 5 of w, which no rank has");
        assert!(moves(&have, &[vec![span("v", 0, 1)]]).is_err());
    }

    #[test]
    fn words_read_back_over_the_ends_of_what_was_added() {
        let mut held = HeldWords::default();
        held.add("w".into(), 4, vec![4.0, 5.0, 6.0]);
        held.add("w".into(), 0, (0..4).map(|i| i as f32).collect());
        held.add("v".into(), 0, Vec::new());
        held.sort();
        assert_eq!(held.spans(), [span("w", 0, 4), span("w", 4, 3)]);
        assert_eq!(held.bytes(), 28);
        for start in 0..7 {
            for end in start..=7 {
                let mut out = vec![f32::NAN; end - start];
                held.copy("w", start, &mut out);
                assert_eq!(out, (start..end).map(|i| i as f32).collect::<Vec<_>>());
            }
        }
    }
}
