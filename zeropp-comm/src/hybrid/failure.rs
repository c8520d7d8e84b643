//! Failures across processes: the outer engine names processes, its users want world ranks.

use serde::{Deserialize, Serialize};

use super::engine::HybridProcess;
use crate::CommError;

/// Longest report that surely fits what an outer engine carries, in bytes.
const REPORT_MAX: usize = 1200;

/// A failure as one process reports it to the others.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Report {
    /// World rank that saw it first.
    pub(super) rank: usize,
    pub(super) error: CommError,
}

impl Report {
    pub(super) fn new(rank: usize, error: &CommError) -> Report {
        Report { rank, error: error.clone() }
    }

    /// The reason that the outer engine is aborted with. A long error is cut.
    pub(super) fn text(&self) -> String {
        let text = serde_json::to_string(self).expect("plain data");
        if text.len() <= REPORT_MAX {
            return text;
        }
        let mut reason = match &self.error {
            CommError::Aborted { reason, .. } => reason.clone(),
            error => error.to_string(),
        };
        let cut = (0..=REPORT_MAX / 2).rev().find(|i| reason.is_char_boundary(*i)).unwrap_or(0);
        reason.truncate(cut);
        let error = CommError::Aborted { rank: self.rank, reason };
        serde_json::to_string(&Report { rank: self.rank, error }).expect("plain data")
    }
}

impl HybridProcess {
    /// An error of the outer engine in terms of world ranks.
    pub(super) fn translate(&self, error: CommError) -> Report {
        match error {
            CommError::Aborted { rank: process, reason } => serde_json::from_str(&reason)
                .unwrap_or_else(|_| {
                    let rank = self.rank_in("", process);
                    Report { rank, error: CommError::Aborted { rank, reason } }
                }),
            CommError::Mismatch { group, sequence, rank, mine, peer, theirs } => {
                let (rank, peer) = (self.rank_in(&group, rank), self.rank_in(&group, peer));
                let error = CommError::Mismatch { group, sequence, rank, mine, peer, theirs };
                Report { rank, error }
            }
            CommError::PeerLost { group, rank, operation } => {
                let rank = self.rank_in(&group, rank);
                Report { rank, error: CommError::PeerLost { group, rank, operation } }
            }
            CommError::Invalid { group, rank, operation, problem } => {
                let rank = self.rank_in(&group, rank);
                Report { rank, error: CommError::Invalid { group, rank, operation, problem } }
            }
            CommError::Timeout { group, operation, sequence, after_s, missing } => {
                let missing = missing.into_iter().flat_map(|process| self.ranks_of(process));
                let missing = missing.collect();
                let error = CommError::Timeout { group, operation, sequence, after_s, missing };
                Report { rank: self.first_here(), error }
            }
            CommError::Unavailable { .. } | CommError::Backend { .. } => {
                Report { rank: self.first_here(), error }
            }
        }
    }

    /// First rank of this process.
    fn first_here(&self) -> usize {
        self.outer.rank() * self.ranks_each
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_read_back_or_cut() {
        let missing = vec![3, 5];
        let error = CommError::Timeout {
            group: "zero3[1]".into(),
            operation: "all_gather of 8 f32".into(),
            sequence: 7,
            after_s: 2.5,
            missing,
        };
        let report = Report::new(2, &error);
        assert_eq!(serde_json::from_str::<Report>(&report.text()).unwrap(), report);

        let reason = "ü".repeat(5000);
        let long = Report::new(4, &CommError::Aborted { rank: 4, reason: reason.clone() });
        assert!(long.text().len() <= REPORT_MAX);
        let read: Report = serde_json::from_str(&long.text()).unwrap();
        let CommError::Aborted { rank: 4, reason: cut } = read.error else { panic!("{read:?}") };
        assert!(cut.len() > 500 && reason.starts_with(&cut));
    }
}
