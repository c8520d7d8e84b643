//! The questions about a layer's micro-batch, and their answers.

use std::ops::Range;

/// Sizes of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Samples in the micro-batch (b).
    pub samples: usize,
    /// Tokens in a sample (s).
    pub seq: usize,
    /// Bytes of one element of an activation.
    pub element_bytes: usize,
    /// Whether attention keeps its probabilities, or one fp32 number a query and head: the CPU's
    /// kernels in fp32 keep them for short samples.
    pub keeps_probabilities: bool,
    /// Whether operations run on the CPU's kernels, not as tensor operations.
    pub kernels: bool,
    /// What the micro-batch has of its samples.
    pub part: SamplePart,
}

/// What a micro-batch has of its samples: `seq` counts its own tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SamplePart {
    /// All of them.
    #[default]
    Whole,
    /// The first slice of one.
    FirstSlice,
    /// A slice of one, neither the first nor the last.
    MiddleSlice,
    /// The last slice of one.
    LastSlice,
}

impl SamplePart {
    /// Whether slices behind it need its keys and values.
    pub(crate) fn is_followed(self) -> bool {
        matches!(self, SamplePart::FirstSlice | SamplePart::MiddleSlice)
    }

    /// Whether the B of a slice before it goes on with its sums over tokens, so that it leaves none
    /// for W that are no products.
    pub(crate) fn hands_on(self) -> bool {
        matches!(self, SamplePart::MiddleSlice | SamplePart::LastSlice)
    }
}

impl BatchShape {
    /// Tokens in the micro-batch.
    pub fn tokens(&self) -> usize {
        self.samples * self.seq
    }

    /// Whether operations run on the CPU's kernels.
    pub fn on_kernels(&self) -> bool {
        self.kernels
    }
}

/// The bytes that a B has given back of what F kept, and those that it keeps for W, at the moment
/// when it holds the most: both 0 where that is its beginning. What moves from one to the other
/// counts as neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackwardPeak {
    /// Bytes given back.
    pub freed: u64,
    /// Bytes kept for W.
    pub stashed: u64,
}

impl BackwardPeak {
    /// That of a B that goes through these operations: what each keeps for W, and what it then
    /// gives back.
    pub fn of(operations: impl IntoIterator<Item = (u64, u64)>) -> BackwardPeak {
        let (mut now, mut most) = (BackwardPeak::default(), BackwardPeak::default());
        for (stashed, freed) in operations {
            now.stashed += stashed;
            most = most.or(now);
            now.freed += freed;
        }
        most
    }

    /// That of a B through these layers, which are in the order of their forwards; `selective` says
    /// whether it makes again what it can, `by_layer` whether each layer's W follows it.
    pub fn of_layers<'a>(
        layers: impl DoubleEndedIterator<Item = &'a LayerCost>,
        selective: bool,
        by_layer: bool,
    ) -> BackwardPeak {
        let (mut now, mut most) = (BackwardPeak::default(), BackwardPeak::default());
        for layer in layers.rev() {
            let (kept, inside) = match selective {
                true => (layer.activation_bytes_selective, layer.backward_selective),
                false => (layer.activation_bytes, layer.backward),
            };
            let (freed, stashed) = (now.freed + inside.freed, now.stashed + inside.stashed);
            most = most.or(BackwardPeak { freed, stashed });
            now.freed += kept;
            now.stashed += if by_layer { 0 } else { layer.stash_bytes };
        }
        most
    }

    /// The one that holds more; this one where they are equal.
    fn or(self, other: BackwardPeak) -> BackwardPeak {
        if other.stashed + self.freed > self.stashed + other.freed { other } else { self }
    }
}

/// The cost of one micro-batch in one layer; for balancing stages, prediction and utilisation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Floating-point operations of one forward.
    pub forward_flops: f64,
    /// Those of them that only its output needs, and no gradient: left out where the forward is
    /// done again for its backward alone.
    pub output_flops: f64,
    /// Bytes kept from F to B with nothing recomputed. The layer's own input counts as kept here
    /// if the layer keeps it.
    pub activation_bytes: u64,
    /// The same with selective recomputation: without attention's probabilities, and without the
    /// outputs of norms and of activation functions.
    pub activation_bytes_selective: u64,
    /// Bytes that B reads and writes to make these outputs again.
    pub again_bytes: u64,
    /// Bytes kept from B to W.
    pub stash_bytes: u64,
    /// When a B of the layer holds the most; the default is its beginning, which is right where no
    /// operation keeps more for W than those before it have given back.
    pub backward: BackwardPeak,
    /// The same with selective recomputation.
    pub backward_selective: BackwardPeak,
    /// Bytes of its keys and values, where slices behind the micro-batch need them; they are a part
    /// of what is kept from F to B.
    pub context_bytes: u64,
    /// Bytes that a forward takes beside what it keeps, and gives back at its end, where they are
    /// worth counting: the logits of a chunk of tokens.
    pub workspace_bytes: u64,
    /// Elements of the weights that the CPU's bf16 products keep packed, with both sizes of each
    /// padded to multiples of 32: those of a forward and those of a backward take as many each.
    pub packed_elements: u64,
    /// Those of them whose product only its output needs ([`output_flops`](Self::output_flops)).
    pub packed_output_elements: u64,
    /// Those of the floating-point operations of a forward that multiply by weights which do not
    /// train, so that there is nothing to do for them in W.
    pub frozen_flops: f64,
    /// Elements of its matrices that a token is not multiplied with: the experts that it does not
    /// go to.
    pub idle_elements: u64,
    /// Whether F makes the gradients, as a head does that never has all logits at once: B hands on
    /// dX, W has nothing to do, and the fp32 gradient of the weights is there from the first F of a
    /// unit.
    pub gradients_in_forward: bool,
}

impl LayerCost {
    /// Floating-point operations of F and R: gradients that are made in the forward are made in R
    /// where the stage is `recomputed`, else in F.
    pub fn flops(&self, recomputed: bool) -> [f64; 2] {
        let f = self.forward_flops;
        match self.gradients_in_forward {
            true if recomputed => [f, self.training_flops()],
            true => [self.training_flops(); 2],
            false => [f, f - self.output_flops],
        }
    }

    /// Floating-point operations of a forward and its backward: three times the forward's, less
    /// the gradients of weights that do not train.
    pub fn training_flops(&self) -> f64 {
        3.0 * self.forward_flops - self.frozen_flops
    }

    /// Floating-point operations of F, B, W and R, of which a forward does `weight_flops` with
    /// weights. A backward does twice the forward's; W is the half that multiplies by what F kept
    /// for the weights, so that attention, which has none, is B's alone; so is all of a layer that
    /// keeps nothing for W and has nothing frozen. Weights that do not train have no W. R redoes F.
    /// A head that makes its gradients in F has no B and no W, and makes them in R where its stage
    /// is `recomputed`.
    pub fn passes(&self, weight_flops: f64, recomputed: bool) -> [f64; 4] {
        let [f, r] = self.flops(recomputed);
        if self.gradients_in_forward {
            return [f, 0.0, 0.0, r];
        }
        let is_split = self.stash_bytes > 0 || self.frozen_flops > 0.0;
        let w = if is_split { weight_flops.min(self.forward_flops) } else { 0.0 };
        [f, 2.0 * f - w, (w - self.frozen_flops).max(0.0), r]
    }
}

/// The pieces of a stage that is done again from its layers' inputs, one after the other from the
/// last on, so that one is whole at a time: each block with the layers after it that are no blocks,
/// and the first one with those before it. `is_block` has an entry for each layer of the stage.
pub fn pieces(is_block: impl IntoIterator<Item = bool>) -> Vec<Range<usize>> {
    let mut pieces: Vec<Range<usize>> = Vec::new();
    let mut has_block = true;
    for (i, is_block) in is_block.into_iter().enumerate() {
        match pieces.last_mut() {
            Some(piece) if !(is_block && has_block) => piece.end = i + 1,
            _ => {
                pieces.push(i..i + 1);
                has_block = false;
            }
        }
        has_block |= is_block;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_has_one_block_and_the_small_layers_beside_it() {
        let of = |layers: &str| pieces(layers.chars().map(|c| c == 'b'));
        assert_eq!(of("--bb-b--"), [0..3, 3..5, 5..8]);
        assert_eq!(of("bb"), [0..1, 1..2]);
        assert_eq!(of("-"), [0..1]);
        assert!(of("").is_empty());
    }

    #[test]
    fn a_backward_holds_the_most_before_what_it_gives_back() {
        let peak = |operations: &[(u64, u64)]| {
            let BackwardPeak { freed, stashed } = BackwardPeak::of(operations.iter().copied());
            (freed, stashed)
        };
        assert_eq!(peak(&[]), (0, 0));
        assert_eq!(peak(&[(0, 9), (9, 0)]), (0, 0), "its beginning");
        assert_eq!(peak(&[(5, 9), (3, 0), (3, 8)]), (0, 5));
        assert_eq!(peak(&[(5, 4), (6, 8), (2, 0)]), (4, 11));
        let layer = |freed, stashed| LayerCost {
            activation_bytes: 10,
            activation_bytes_selective: 8,
            stash_bytes: 9,
            backward: BackwardPeak { freed, stashed },
            backward_selective: BackwardPeak { freed: 0, stashed: 1 },
            ..LayerCost::default()
        };
        let layers = [layer(2, 6), layer(3, 6), layer(0, 0)];
        let whole = |selective, by_layer| {
            let BackwardPeak { freed, stashed } =
                BackwardPeak::of_layers(layers.iter(), selective, by_layer);
            (freed, stashed)
        };
        assert_eq!(whole(false, false), (13, 15), "of the one before the last");
        assert_eq!(whole(true, false), (16, 19), "of the first");
        assert_eq!(whole(false, true), (0, 0), "of the last, at its beginning");
        assert_eq!(whole(true, true), (0, 1), "of the last");
    }
}
