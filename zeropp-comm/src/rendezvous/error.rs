//! Errors of a rendezvous.

/// An error of a rendezvous.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RendezvousError {
    /// No process set a value in time.
    #[error("nothing under {key} after {after_s} s")]
    Timeout {
        /// The name that was asked for.
        key: String,
        /// Seconds waited, rounded.
        after_s: u64,
    },
    /// Two processes set different values.
    #[error("{key} is set already, to another value; is another job using this rendezvous?")]
    Taken {
        /// The name.
        key: String,
    },
    /// A name or value that is too long, or one too many.
    #[error("{key} cannot be set: {problem}")]
    TooMuch {
        /// The name, cut where it is too long itself.
        key: String,
        /// The limit and what was given.
        problem: String,
    },
    /// The others cannot be reached.
    #[error("rendezvous at {place}: {reason}")]
    Unavailable {
        /// Address.
        place: String,
        /// The problem, and what would work.
        reason: String,
    },
    /// Rank 0 does not want this process.
    #[error("rendezvous at {place}: refused: {reason}")]
    Refused {
        /// Address.
        place: String,
        /// Why, and what would work.
        reason: String,
    },
    /// Not all ranks came in time.
    #[error("rendezvous at {place}: {missing} did not come within {after_s} s{more}")]
    Missing {
        /// Address.
        place: String,
        /// Which ranks, in words: `rank 3`, `ranks 2-3, 5`.
        missing: String,
        /// Seconds waited, rounded.
        after_s: u64,
        /// Who is there and who was refused, beginning with `; `; or empty.
        more: String,
    },
    /// A process that was there is gone, or silent.
    #[error("lost {ranks} on {host}: {how}")]
    Lost {
        /// Which ranks it ran, in words: `rank 3`, `ranks 2-3`.
        ranks: String,
        /// Its machine, or its address where that is all one knows.
        host: String,
        /// How the loss was noticed.
        how: String,
    },
}

/// Ranks in words: `rank 3`, `ranks 0-2, 5`. `ranks` is in ascending order.
pub(crate) fn ranks_in_words(ranks: impl IntoIterator<Item = usize>) -> String {
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for rank in ranks {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => spans.push((rank, rank)),
        }
    }
    let one = matches!(spans[..], [(first, last)] if first == last);
    let spans = spans.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    let noun = if one { "rank" } else { "ranks" };
    format!("{noun} {}", spans.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_listed_shortly() {
        assert_eq!(ranks_in_words([3]), "rank 3");
        assert_eq!(ranks_in_words([0, 1]), "ranks 0-1");
        assert_eq!(ranks_in_words([0, 1, 2, 5, 7, 8]), "ranks 0-2, 5, 7-8");
    }
}
