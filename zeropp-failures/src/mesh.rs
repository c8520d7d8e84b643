//! Who is who: pipeline × ZeRO-3 × replicas.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Sizes of the three parallel dimensions. World = pp · zero3 · dp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Pipeline ranks (P), between nodes.
    pub pp: usize,
    /// ZeRO-3 group size (D), inside a node.
    pub zero3: usize,
    /// Data-parallel replicas (K), between nodes.
    pub dp: usize,
}

/// Coordinates of one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Coords {
    /// Place in the pipeline.
    pub pp: usize,
    /// Place in the ZeRO-3 group.
    pub zero3: usize,
    /// Which replica.
    pub dp: usize,
}

impl Mesh {
    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.pp * self.zero3 * self.dp
    }

    /// Coordinates of `rank`. ZeRO-3 is innermost, so that its groups are neighbours on a node,
    /// then the pipeline, then replicas.
    pub fn coords(&self, rank: usize) -> Coords {
        Coords {
            zero3: rank % self.zero3,
            pp: rank / self.zero3 % self.pp,
            dp: rank / (self.zero3 * self.pp),
        }
    }

    /// The rank at `c`.
    pub fn rank(&self, c: Coords) -> usize {
        (c.dp * self.pp + c.pp) * self.zero3 + c.zero3
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pp {} x zero3 {} x dp {}", self.pp, self.zero3, self.dp)
    }
}
