//! The memory that an optimizer keeps of a layer and takes to update it: counted from its
//! parameters alone, for the ranks that hold it and for predictions.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::params::{BLOCK, FlatLayout, Init, ParamSpec};

/// The role of a parameter in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Of the embedding, or of a head that shares its weight.
    Embedding,
    /// Of a block.
    Hidden,
    /// Of a small layer beside blocks: learned positions, the last norm.
    Small,
    /// Of the head.
    Head,
}

/// The state that an optimizer keeps of one parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Words of four bytes for each [`BLOCK`] of elements, from update to update: moments, and a
    /// mean of the weights where there is one.
    pub block_words: usize,
    /// Words of the parameter as a whole, which each rank with a part of it keeps.
    pub whole_words: usize,
    /// What an update takes, where it looks at the whole parameter.
    pub whole: Option<WholeUpdate>,
}

/// What an update takes that looks at a whole parameter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WholeUpdate {
    /// fp32 elements of memory that changing the parameter's direction takes, the result included.
    pub elements: usize,
    /// Floating-point operations of that.
    pub flops: u64,
    /// Whether it depends on the root mean square of the parameter, too.
    pub rms: bool,
}

impl Kept {
    /// So many fp32 tensors of the parameter's size.
    pub fn tensors(tensors: usize) -> Kept {
        Kept { block_words: tensors * BLOCK, ..Kept::default() }
    }

    /// Words of four bytes for `elements` elements, which are blocks.
    pub fn words(self, elements: usize) -> usize {
        elements * self.block_words / BLOCK + self.whole_words
    }
}

type KeptOf = dyn Fn(&ParamSpec, Role) -> Kept + Send + Sync;

/// The state that an optimizer keeps of each parameter of a model, as its update rule says.
#[derive(Clone)]
pub struct StateRule {
    of: Arc<KeptOf>,
    is_elementwise: bool,
}

impl StateRule {
    /// A rule that asks `of` for each parameter.
    pub fn new(of: impl Fn(&ParamSpec, Role) -> Kept + Send + Sync + 'static) -> StateRule {
        let shapes: [&[usize]; 3] = [&[BLOCK], &[BLOCK, BLOCK], &[2, BLOCK, BLOCK]];
        let roles = [Role::Embedding, Role::Hidden, Role::Small, Role::Head];
        let is_elementwise = roles.into_iter().all(|role| {
            shapes.iter().all(|shape| {
                let kept = of(&ParamSpec::new("", shape, Init::Ones), role);
                kept.whole.is_none() && kept.whole_words == 0
            })
        });
        StateRule { of: Arc::new(of), is_elementwise }
    }

    /// So many tensors of every parameter, none of which is updated as a whole.
    pub fn uniform(tensors: usize) -> StateRule {
        StateRule::new(move |_, _| Kept::tensors(tensors))
    }

    /// Whether no update looks at a whole parameter, as far as roles and shapes say it.
    pub fn is_elementwise(&self) -> bool {
        self.is_elementwise
    }

    /// The state that is kept of a parameter.
    pub fn of(&self, parameter: &ParamSpec, role: Role) -> Kept {
        (self.of)(parameter, role)
    }
}

impl fmt::Debug for StateRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StateRule")
    }
}

/// What of its shards a rank has in a file, and in memory a piece at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Out {
    /// Nothing.
    #[default]
    Nothing,
    /// What the optimizer keeps, AdamW's moments before all.
    Moments,
    /// The same, and a stage is updated while the next step computes with those before it.
    Behind,
    /// Parameters and what the optimizer keeps. Gradients are summed over replicas in memory.
    States,
    /// Reduced gradients, too.
    All,
}

impl Out {
    /// Elements of a layer that an update has in memory at a time, where it does not look at whole
    /// parameters: large enough that a disk reads them at its rate.
    pub const PIECE: usize = 1 << 17;
    /// Pieces that are there at once: the one that is computed with, the next one, which is read,
    /// and the one before, which is written.
    const PIECES: usize = 3;

    /// The same in a run of so many replicas.
    pub fn beside(self, replicas: usize) -> Out {
        if self == Out::All && replicas > 1 { Out::States } else { self }
    }

    /// The same where updates may be `behind` the next step.
    pub fn updated(self, behind: bool) -> Out {
        if self == Out::Moments && behind { Out::Behind } else { self }
    }

    /// Whether anything is.
    pub fn is_any(self) -> bool {
        self != Out::Nothing
    }

    /// Whether parameters are.
    pub fn has_parameters(self) -> bool {
        [Out::States, Out::All].contains(&self)
    }

    /// Bytes that adding to a reduced gradient of `elements` takes where that is in the file: its
    /// pieces.
    pub fn adding(self, elements: usize) -> u64 {
        match self {
            Out::All => 4 * (Out::PIECES * elements.min(Out::PIECE)) as u64,
            Out::Nothing | Out::Moments | Out::Behind | Out::States => 0,
        }
    }

    /// Bytes that a save takes to read what is in the file: a piece, and the next one.
    pub fn saving(self) -> u64 {
        if self.is_any() { 2 * 4 * Out::PIECE as u64 } else { 0 }
    }
}

/// Into how many parts ranks cut what an optimizer keeps of a layer, and where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cut {
    /// Ranks of a ZeRO-3 group.
    pub zero3: usize,
    /// Replicas that share the optimizer's work, with ZeRO-1, else 1.
    pub owners: usize,
    /// Whether the work is shared so, by one replica even.
    pub zero1: bool,
    /// What is in a file.
    pub out: Out,
    /// Whether that is memory of a GPU's host, from which whole layers come in.
    pub host: bool,
}

impl Cut {
    /// Equal pieces of a layer's buffer, one for each of the ranks that share it.
    pub fn pieces(self) -> usize {
        self.zero3 * self.owners
    }
}

/// Bytes of an optimizer for one layer or several, on one of the ranks that share them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpdateBytes {
    /// Bytes that are kept from update to update, in memory or in a file.
    pub state: u64,
    /// Bytes of the pieces of parameters, state and gradient that an update has in memory at once,
    /// where these are in a file; of several layers the most.
    pub pieces: u64,
    /// Bytes that an update takes beside that, the parameters and the gradient; of several layers,
    /// which are updated one after the other, the most.
    pub update: u64,
    /// Parameters and state as they were before the update, which a late update keeps.
    pub before: u64,
    /// Memory of a late update: `before` of the layers that are updated so far with the `update`
    /// of the last of them, where that is most.
    pub late: u64,
    /// Bytes of the state that a checkpoint has of it: those of a whole parameter are saved by the
    /// rank that has its first element.
    pub saved: u64,
    /// All-gathers of an update that make parameters whole.
    pub gathers: u64,
    /// Bytes that the rank sends for them.
    pub sent: u64,
}

/// The part that one of the ranks which share a layer owns of its flat buffer of what trains:
/// elements `start..start + len`.
#[derive(Clone, Copy, Debug)]
pub struct Owned<'a> {
    /// The layer's parameters that train.
    pub layout: &'a FlatLayout,
    /// First element.
    pub start: usize,
    /// How many there are.
    pub len: usize,
}

impl Owned<'_> {
    /// Each parameter of which some is owned, by its index, with the elements of it and of the
    /// padding after it, within what is owned.
    pub fn segments(&self) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        let Owned { layout, start, len } = *self;
        let ends = layout.params.iter().skip(1).map(|p| p.offset).chain([layout.len]);
        let places = layout.params.iter().zip(ends).enumerate();
        places.filter_map(move |(param, (place, next))| {
            let (from, to) = (place.offset.max(start), next.min(start + len));
            (from < to).then(|| (param, from - start..to - start))
        })
    }

    /// Bytes that computing the update takes, in a group of `zero3` ranks, where `kept` has an
    /// entry for each parameter. Of whole parameters the directions of this rank's part, of the
    /// shard and of the layer are gathered one after the other, each from the one before, and the
    /// last is there while one parameter of this rank's is changed. With `zero1` the rank's own
    /// part of the layer before is still gathered, while this layer's parameters have shrunk to
    /// such a part.
    pub fn computing(&self, kept: &[Kept], zero3: usize, zero1: bool) -> u64 {
        let (shard, whole) = (self.layout.len / zero3, self.layout.len);
        let parts = if zero1 { (2 * self.len).saturating_sub(shard) } else { 0 };
        let mut most = 0;
        if kept.iter().any(|kept| kept.whole.is_some()) {
            let largest = self.segments().filter_map(|(param, _)| kept[param].whole);
            most = whole + largest.map(|whole| whole.elements).max().unwrap_or(0);
            most = most.max(if self.len < shard { self.len + shard } else { 0 });
            most = most.max(if zero3 > 1 { shard + whole } else { 0 });
        }
        4 * (parts + most) as u64
    }

    /// Elements of each piece that an update from a file has in memory at a time: all, where it
    /// looks at whole parameters or gathers what is updated.
    pub fn piece(&self, kept: &[Kept], cut: Cut) -> usize {
        let looks_at_whole = |kept: &Kept| kept.whole.is_some() || kept.whole_words > 0;
        let at_once = cut.host || cut.zero1 || kept.iter().any(looks_at_whole);
        if at_once { self.len } else { self.len.min(Out::PIECE) }
    }

    /// Bytes of the pieces that an update of what is `out` has in memory at once, where all layers
    /// are like this one and `kept` has an entry for each parameter.
    pub fn piece_bytes(&self, kept: &[Kept], cut: Cut) -> u64 {
        let piece = self.piece(kept, cut);
        let whole: usize = self.segments().map(|(param, _)| kept[param].whole_words).sum();
        let block = self.segments().map(|(param, _)| kept[param].block_words).max().unwrap_or(0);
        let state = piece / BLOCK * block + whole;
        if cut.host {
            // What comes in takes the place of what goes out, and parameters change in theirs.
            return 4 * (2 * state + if cut.zero1 { piece } else { 0 }) as u64;
        }
        if !cut.out.has_parameters() {
            // Of parameters only what is computed with is copied.
            return 4 * (Out::PIECES * state + piece) as u64;
        }
        let gathered = if cut.zero1 { self.layout.len / cut.zero3 } else { 0 };
        4 * (Out::PIECES * (2 * piece + state + gathered)) as u64
    }

    /// Bytes that an update takes once it is computed, in a group of `zero3` ranks: with `zero1`
    /// the rank's own part, and the shard that is gathered of all parts.
    pub fn returning(&self, zero3: usize, zero1: bool) -> u64 {
        if zero1 { 4 * (self.len + self.layout.len / zero3) as u64 } else { 0 }
    }

    /// All bytes, where the layer is `cut` so and `kept` has an entry for each parameter; what is
    /// `watched` is copied before its update.
    fn bytes(&self, kept: &[Kept], cut: Cut, watched: bool) -> UpdateBytes {
        let state: usize = self.segments().map(|(i, range)| kept[i].words(range.len())).sum();
        let others = |(i, range): (usize, Range<usize>)| {
            let begins_here = self.start + range.start == self.layout.params[i].offset;
            if begins_here { 0 } else { kept[i].whole_words }
        };
        let of_others: usize = self.segments().map(others).sum();
        let (state, own) = (4 * state as u64, 4 * self.len as u64);
        let saved = state - 4 * of_others as u64;
        let computing = self.computing(kept, cut.zero3, cut.zero1) + if watched { own } else { 0 };
        let update = computing.max(self.returning(cut.zero3, cut.zero1));
        let before = own + state;
        let pieces = match cut.out.is_any() {
            true => self.piece_bytes(kept, cut),
            false => 0,
        };
        let mut bytes = UpdateBytes {
            state,
            pieces,
            update,
            before,
            late: before + update,
            saved,
            gathers: 0,
            sent: 0,
        };
        if kept.iter().any(|kept| kept.whole.is_some()) {
            let mut elements = self.len;
            for ranks in [cut.owners, cut.zero3].into_iter().filter(|ranks| *ranks > 1) {
                bytes.gathers += 1;
                bytes.sent += 4 * ((ranks - 1) * elements) as u64;
                elements *= ranks;
            }
        }
        bytes
    }
}

/// The bytes that each of the ranks which share layers takes for them: one entry where all take the
/// same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shares(Vec<UpdateBytes>);

impl Shares {
    /// Of a layer with these parameters, of which those that train are cut so; with `watched` an
    /// update takes a copy of what the rank updates besides.
    pub fn of_layer(
        parameters: &[ParamSpec],
        role: Role,
        watched: bool,
        cut: Cut,
        rule: &StateRule,
    ) -> Shares {
        let trained: Vec<ParamSpec> = parameters.iter().filter(|p| p.trains).cloned().collect();
        let kept: Vec<Kept> = trained.iter().map(|p| rule.of(p, role)).collect();
        let layout = FlatLayout::new(trained, cut.pieces());
        let len = layout.len / cut.pieces();
        let is_even =
            kept.iter().all(|k| *k == Kept { block_words: kept[0].block_words, ..Kept::default() });
        let pieces = if is_even { 1 } else { cut.pieces() };
        let piece = |piece: usize| {
            Owned { layout: &layout, start: piece * len, len }.bytes(&kept, cut, watched)
        };
        Shares((0..pieces).map(piece).collect())
    }

    /// Of layers of which nothing is kept, while each rank exchanges so many bytes of them.
    pub fn of_exchange(bytes: impl Iterator<Item = u64>) -> Shares {
        Shares(
            bytes.map(|n| UpdateBytes { update: n, late: n, ..UpdateBytes::default() }).collect(),
        )
    }

    /// Adds those of the layer that is updated next, or of `times` layers like it.
    pub fn add(&mut self, other: &Shares, times: usize) {
        let pieces = self.0.len().max(other.0.len());
        let of = |shares: &Shares, i: usize| match shares.0.as_slice() {
            [] => UpdateBytes::default(),
            [alike] => *alike,
            pieces => pieces[i],
        };
        let sum = |i: usize| {
            let (a, b, n) = (of(self, i), of(other, i), times as u64);
            if n == 0 {
                return a;
            }
            UpdateBytes {
                state: a.state + n * b.state,
                pieces: a.pieces.max(b.pieces),
                update: a.update.max(b.update),
                before: a.before + n * b.before,
                late: a.late.max(a.before + (n - 1) * b.before + b.late),
                saved: a.saved + n * b.saved,
                gathers: a.gathers + n * b.gathers,
                sent: a.sent + n * b.sent,
            }
        };
        self.0 = (0..pieces).map(sum).collect();
    }

    /// Of each rank, or one that stands for all.
    pub fn each(&self) -> &[UpdateBytes] {
        &self.0
    }

    /// Bytes that are kept by all of `pieces` ranks together.
    pub fn state_of_all(&self, pieces: usize) -> u64 {
        match self.0.as_slice() {
            [alike] => alike.state * pieces as u64,
            pieces => pieces.iter().map(|bytes| bytes.state).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Init;

    fn spec(name: &str, shape: &[usize]) -> ParamSpec {
        ParamSpec::new(name, shape, Init::Zeros)
    }

    /// Two tensors of each parameter, of a matrix one, which is changed as a whole.
    fn rule() -> StateRule {
        StateRule::new(|p, _| match p.shape[..] {
            [rows, cols] => {
                let elements = 2 * cols * (rows + cols);
                Kept {
                    whole: Some(WholeUpdate { elements, ..WholeUpdate::default() }),
                    ..Kept::tensors(1)
                }
            }
            _ => Kept::tensors(2),
        })
    }

    fn most(shares: &Shares) -> (u64, u64) {
        let of = |f: fn(&UpdateBytes) -> u64| shares.each().iter().map(f).max().unwrap();
        (of(|b| b.state), of(|b| b.update))
    }

    /// A matrix of 256 × 128 and a vector as long, over two ranks: one has half of the matrix, the
    /// other the rest and the vector.
    #[test]
    fn matrices_and_what_is_beside_them_lie_on_other_ranks() {
        let parameters = [spec("w", &[256, 128]), spec("b", &[256 * 128])];
        let of = |zero3, owners, zero1| {
            let cut = Cut { zero3, owners, zero1, out: Out::Nothing, host: false };
            most(&Shares::of_layer(&parameters, Role::Hidden, false, cut, &rule()))
        };
        let (n, transform) = (256 * 128, 2 * 128 * (256 + 128));
        assert_eq!(of(1, 1, false), (4 * 3 * n, 4 * (2 * n + transform)));
        // The second rank keeps most, the first one's update takes most: not its own directions
        // with those of the layer and the change of a matrix, which follow each other.
        assert_eq!(of(2, 1, false), (4 * 2 * n, 4 * (2 * n + transform)));
        assert_eq!(of(2, 2, true), (4 * n, 4 * (2 * n + transform)));
        // A single replica's own part is its shard.
        assert_eq!(of(2, 1, true), (4 * 2 * n, 4 * (n + 2 * n + transform)));
    }

    /// Rows and columns of a matrix over two ranks: both keep them, the first one saves them.
    #[test]
    fn state_of_a_whole_parameter_is_kept_by_each_rank_and_saved_once() {
        let factors =
            StateRule::new(|p, _| Kept { whole_words: p.shape.iter().sum(), ..Kept::tensors(0) });
        let cut = Cut { zero3: 2, owners: 1, zero1: false, out: Out::Nothing, host: false };
        let shares =
            Shares::of_layer(&[spec("w", &[256, 128])], Role::Hidden, false, cut, &factors);
        let of = |f: fn(&UpdateBytes) -> u64| shares.each().iter().map(f).collect::<Vec<_>>();
        assert_eq!((of(|b| b.state), of(|b| b.saved)), (vec![4 * 384; 2], vec![4 * 384, 0]));
    }

    /// What an update from a file has in memory: pieces, or all where it must see all.
    #[test]
    fn pieces_of_large_layers_are_alike_and_wholes_are_one() {
        let n = 3 * Out::PIECE;
        let of = |rule: &StateRule, shape: &[usize], zero1, out| {
            let cut = Cut { zero3: 1, owners: 1, zero1, out, host: false };
            Shares::of_layer(&[spec("w", shape)], Role::Hidden, false, cut, rule).each()[0]
        };
        let two = StateRule::uniform(2);
        assert_eq!(of(&two, &[n], false, Out::Nothing).pieces, 0);
        let piece = Out::PIECE as u64;
        let bytes = of(&two, &[n], false, Out::States);
        assert_eq!((bytes.state, bytes.pieces), (8 * n as u64, 3 * 4 * 4 * piece));
        assert_eq!(of(&two, &[BLOCK], false, Out::All).pieces, 3 * 4 * 4 * BLOCK as u64);
        // Gathered as a whole, and one tensor of a matrix.
        assert_eq!(of(&two, &[n], true, Out::All).pieces, 3 * 4 * 5 * n as u64);
        let moments = 4 * (3 * 2 + 1);
        assert_eq!(of(&two, &[n], false, Out::Moments).pieces, moments * piece);
        assert_eq!(of(&two, &[n], true, Out::Moments).pieces, moments * n as u64);
        assert_eq!(of(&rule(), &[3 * 256, 512], false, Out::All).pieces, 3 * 4 * 3 * n as u64);
        assert_eq!(Out::All.adding(n), 3 * 4 * piece);
        assert_eq!(Out::States.adding(n), 0);
    }

    #[test]
    fn layers_are_kept_together_and_updated_one_after_the_other() {
        let cut = Cut { zero3: 2, owners: 1, zero1: false, out: Out::Nothing, host: false };
        let layer = |parameters: &[ParamSpec], rule: &StateRule| {
            Shares::of_layer(parameters, Role::Hidden, true, cut, rule)
        };
        let vector = layer(&[spec("b", &[256])], &rule());
        let of_vector = vector.each()[0];
        assert_eq!((of_vector.state, of_vector.update), (1024, 512));
        let matrix = layer(&[spec("w", &[2, 128])], &rule());
        assert_eq!(matrix.each().len(), 2);
        let mut both = Shares::default();
        both.add(&vector, 3);
        both.add(&matrix, 1);
        let (of_matrix, of_both) = (matrix.each()[1], both.each()[1]);
        assert_eq!(of_both.state, 3 * 1024 + of_matrix.state);
        assert_eq!((of_both.update, of_both.gathers), (of_matrix.update, 1));
        // The largest comes last here, with copies of all before it.
        let before = 3 * (512 + 1024) + 512 + of_matrix.state;
        assert_eq!((of_both.before, of_both.late), (before, before + of_matrix.update));
        let mut largest_first = matrix.clone();
        largest_first.add(&vector, 1);
        assert!(largest_first.each()[1].late < of_both.late);
        assert_eq!(both.state_of_all(2), 2 * 3 * 1024 + matrix.state_of_all(2));
        assert_eq!(layer(&[], &rule()).each(), [UpdateBytes::default()]);
        let frozen = layer(&[spec("w", &[9]).frozen()], &StateRule::uniform(2));
        assert_eq!(frozen.state_of_all(2), 0);
    }
}
