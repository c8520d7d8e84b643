//! What the operations of a layer keep, as one list: all that is predicted of a layer's memory
//! follows from it.

use crate::layer::{BackwardPeak, LayerCost};

/// A tensor that an operation keeps from F to its B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    bytes: u64,
    /// Whether W needs it, so that it stays from B to W.
    stays: bool,
    /// With selective recomputation it is not kept: B makes it, and reads and writes so many bytes
    /// for that, or none that are worth counting.
    again: Option<u64>,
}

impl Slot {
    /// One that B alone needs.
    pub fn new(bytes: u64) -> Slot {
        Slot { bytes, stays: false, again: None }
    }

    /// The same, which stays for W.
    pub fn for_w(self) -> Slot {
        Slot { stays: true, ..self }
    }

    /// The same, which B can make from `inputs` bytes that are kept anyway.
    pub fn made_from(self, inputs: u64) -> Slot {
        Slot { again: Some(inputs + self.bytes), ..self }
    }

    /// The same, which B never needs as a whole.
    pub(crate) fn not_needed(self) -> Slot {
        Slot { again: Some(0), ..self }
    }

    /// What F keeps of it.
    fn kept(&self, selective: bool) -> u64 {
        if selective && self.again.is_some() { 0 } else { self.bytes }
    }
}

/// What an operation keeps. Its B first gives back what W does not need.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keeps {
    /// From F to B; what two operations keep is in one of them.
    pub slots: Vec<Slot>,
    /// Bytes that B makes for W.
    pub made: u64,
}

impl Keeps {
    /// What B gives back, and then makes or keeps for W beside what F kept.
    fn in_backward(&self, selective: bool) -> [(u64, u64); 2] {
        let sum = |stays: bool| {
            let those = self.slots.iter().filter(move |slot| slot.stays == stays);
            those.map(|slot| [slot.kept(false), slot.kept(selective)])
        };
        let freed = sum(false).map(|[_, kept]| kept).sum();
        let again: u64 = sum(true).map(|[all, kept]| all - kept).sum();
        [(0, freed), (self.made + again, 0)]
    }
}

impl LayerCost {
    /// The memory of a layer with these operations, in the order of their forwards.
    pub fn keeping(operations: &[Keeps]) -> LayerCost {
        let slots = || operations.iter().flat_map(|of| &of.slots);
        let kept = |selective| slots().map(|slot| slot.kept(selective)).sum();
        let backward = |selective| {
            let each = operations.iter().rev().flat_map(|of| of.in_backward(selective));
            BackwardPeak::of(each)
        };
        let stays = slots().filter(|slot| slot.stays).map(|slot| slot.bytes);
        LayerCost {
            activation_bytes: kept(false),
            activation_bytes_selective: kept(true),
            backward: backward(false),
            backward_selective: backward(true),
            stash_bytes: stays.sum::<u64>() + operations.iter().map(|of| of.made).sum::<u64>(),
            again_bytes: slots().filter_map(|slot| slot.again).sum(),
            ..LayerCost::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_b_makes_again_for_w_count_from_b_on() {
        // x, its norm for W with a dY of 8, an activation's input, and its output for W.
        let norm = Keeps { slots: vec![Slot::new(10)], made: 0 };
        let up = Keeps { slots: vec![Slot::new(10).made_from(10).for_w()], made: 8 };
        let gelu = Keeps { slots: vec![Slot::new(40)], made: 0 };
        let down = Keeps { slots: vec![Slot::new(40).made_from(40).for_w()], made: 10 };
        let scores = Keeps { slots: vec![Slot::new(5).not_needed()], made: 0 };
        let cost = LayerCost::keeping(&[norm, up, scores, gelu, down]);
        assert_eq!((cost.activation_bytes, cost.activation_bytes_selective), (105, 50));
        assert_eq!((cost.stash_bytes, cost.again_bytes), (68, 100));
        assert_eq!(cost.backward, BackwardPeak { freed: 0, stashed: 10 });
        assert_eq!(cost.backward_selective, BackwardPeak { freed: 0, stashed: 50 });
    }
}
