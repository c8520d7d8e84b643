//! What a stage's layers have of its time.

use super::Costs;

/// What a layer and those before it have of their stage, in any units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerShare {
    /// Of F.
    pub f: u64,
    /// Of W, and of a backward that goes layer by layer.
    pub w: u64,
    /// Of gathers: bytes of their weights.
    pub weights: u64,
    /// Of reductions and of sums over the replicas: bytes of their gradients.
    pub gradient: u64,
}

impl LayerShare {
    /// Those of a stage's layers, in their order, which have these by themselves.
    pub fn of_stage(layers: impl IntoIterator<Item = LayerShare>) -> Vec<LayerShare> {
        let add = |sums: &mut [u64; 4], layer: LayerShare| {
            for (sum, own) in sums.iter_mut().zip(layer.numbers()) {
                *sum = sum.saturating_add(own);
            }
            Some(LayerShare::of(*sums))
        };
        layers.into_iter().scan([0; 4], add).collect()
    }

    /// What the layers of a stage have by themselves, of which these are the sums.
    pub(crate) fn own(stage: &[LayerShare]) -> Vec<[u64; 4]> {
        let mut before = [0; 4];
        let own = |layer: &LayerShare| {
            let sums = layer.numbers();
            let before = std::mem::replace(&mut before, sums);
            std::array::from_fn(|i| sums[i].saturating_sub(before[i]))
        };
        stage.iter().map(own).collect()
    }

    /// In the order in which files have them.
    pub(crate) fn of([f, w, weights, gradient]: [u64; 4]) -> LayerShare {
        LayerShare { f, w, weights, gradient }
    }

    fn numbers(&self) -> [u64; 4] {
        [self.f, self.w, self.weights, self.gradient]
    }
}

impl Costs {
    /// Layers of the stage that has the costs at `cell`, 1 or more.
    pub fn layers_of(&self, cell: usize) -> usize {
        self.layers.get(cell).map_or(1, |layers| layers.len().max(1))
    }

    /// What a layer has of an F of its stage that takes `ns`.
    pub fn f_of_layer(&self, cell: usize, layer: usize, ns: u64) -> u64 {
        self.share(cell, layer, ns, |share| share.f)
    }

    /// What a layer has of a gather of its stage that takes `ns`.
    pub fn gather_of_layer(&self, cell: usize, layer: usize, ns: u64) -> u64 {
        self.share(cell, layer, ns, |share| share.weights)
    }

    /// When an F of `f_ns` can begin so as to wait for no layer, of a gather that begins at 0 and
    /// takes `gather_ns`, the first layer first.
    pub(super) fn layers_ahead(&self, cell: usize, f_ns: u64, gather_ns: u64) -> u64 {
        let (mut gathered, mut computed, mut begin) = (0, 0, 0u64);
        for layer in 0..self.layers_of(cell) {
            gathered += self.gather_of_layer(cell, layer, gather_ns);
            begin = begin.max(gathered.saturating_sub(computed));
            computed += self.f_of_layer(cell, layer, f_ns);
        }
        begin
    }

    /// What a layer has of a W of its stage that takes `ns`.
    pub fn w_of_layer(&self, cell: usize, layer: usize, ns: u64) -> u64 {
        self.share(cell, layer, ns, |share| share.w)
    }

    /// What a layer has of a reduction of its stage, or of a sum over the replicas, that takes
    /// `ns`.
    pub fn reduction_of_layer(&self, cell: usize, layer: usize, ns: u64) -> u64 {
        self.share(cell, layer, ns, |share| share.gradient)
    }

    /// Those of all layers sum to the whole.
    fn share(&self, cell: usize, layer: usize, ns: u64, of: fn(&LayerShare) -> u64) -> u64 {
        let shares = self.layers.get(cell).map_or(&[][..], Vec::as_slice);
        let whole = shares.last().map_or(0, of);
        if whole == 0 {
            return if layer == 0 { ns } else { 0 };
        }
        let until = |share: &LayerShare| {
            (u128::from(ns) * u128::from(of(share)) / u128::from(whole)) as u64
        };
        let before = layer.checked_sub(1).map_or(0, |before| until(&shares[before]));
        until(&shares[layer]) - before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Action, Compute, LayerRun, Message, Schedule, first_forward};
    use crate::lower::{LowerOptions, lower};
    use crate::simulate::{StageCosts, simulate};

    /// One rank that leaves both W to its end.
    fn two_left() -> Schedule {
        use Compute::{B, F, W};
        let order = [(F, 0), (F, 1), (B, 0), (B, 1), (W, 0), (W, 1)];
        let actions = order.map(|(kind, i)| Action::compute(kind, 0, i));
        Schedule {
            placement: vec![0],
            units: vec![2],
            ranks: vec![actions.to_vec()],
            ..Schedule::default()
        }
    }

    fn at(program: &[Action], action: Action) -> usize {
        program.iter().position(|a| *a == action).unwrap()
    }

    #[test]
    fn a_layer_is_reduced_behind_its_w_and_summed_when_it_is_reduced() {
        let program = lower(&two_left(), &LowerOptions { replicas: true, ..Default::default() });
        let stage = StageCosts {
            f_ns: 1,
            b_ns: 1,
            w_ns: 10,
            reduce_scatter_ns: 8,
            replica_reduce_ns: 6,
            ..StageCosts::default()
        };
        let layer = LayerShare { w: 1, gradient: 1, ..LayerShare::default() };
        let whole = Costs { stages: vec![stage], ..Costs::uniform(1, 0, 0, 0, 0) };
        let layers = vec![LayerShare::of_stage([layer; 2])];
        // The last layer's W until 14, its reduction until 18, its sum until 21; the other's until
        // 24, 28 and 31.
        let cases =
            [(Costs { layers, ..whole.clone() }, (20, 28), (25, 31)), (whole, (24, 32), (32, 38))];
        for (costs, reduced, summed) in cases {
            let timeline = simulate(&program, &costs).unwrap();
            let span = |action: Action| {
                let spans = &timeline.ranks[0].spans;
                let span = spans.iter().find(|span| span.action == action).unwrap();
                (span.start_ns, span.end_ns)
            };
            let w = |i| span(Action::compute(Compute::W, 0, i));
            assert_eq!((w(0), w(1)), ((4, 14), (14, 24)));
            assert_eq!(span(Action::ReduceScatter { stage: 0 }), reduced);
            assert_eq!(span(Action::ReplicaReduce { stage: 0 }), summed);
            assert_eq!(timeline.end_ns(), summed.1);
        }
    }

    /// Nothing may stand between them and their reduction but the end of another.
    #[test]
    fn w_that_stand_before_their_reduction_run_layer_by_layer() {
        let program = lower(&two_left(), &LowerOptions::default()).ranks.remove(0);
        let first = at(&program, Action::compute(Compute::W, 0, 0));
        let run = LayerRun { stage: 0, len: 2, backward: false, sums: false };
        assert_eq!(LayerRun::at(&program, first), Some(run));
        assert_eq!(LayerRun::at(&program, first + 1), Some(LayerRun { len: 1, ..run }));
        assert_eq!(LayerRun::at(&program, first - 1), None, "a B, or a free");
        let reduction = at(&program, Action::ReduceScatter { stage: 0 });
        let with = |between: Action| {
            let mut program = program.clone();
            program.insert(reduction, between);
            LayerRun::at(&program, first)
        };
        assert_eq!(with(Action::Retire { stage: 1 }), Some(run));
        assert_eq!(with(Action::AllGather { stage: 1 }), None);
        let reduced = Action::ReduceScatter { stage: 0 };
        let after = |before: &[Action]| {
            let program = [before, &program[..]].concat();
            LayerRun::at(&program, before.len() + first)
        };
        assert_eq!(after(&[reduced]), None, "its gradient of an earlier unit is on its way");
        assert_eq!(after(&[reduced, Action::Retire { stage: 0 }]), Some(run));
        assert_eq!(after(&[reduced, Action::ReduceScatter { stage: 1 }]), Some(run));
    }

    /// One rank with a W behind each B, or with whole backwards.
    fn one_left(whole: bool) -> Vec<Action> {
        use Compute::{B, BW, F, W};
        let order: &[_] = match whole {
            true => &[(F, 0), (F, 1), (BW, 0), (BW, 1)],
            false => &[(F, 0), (F, 1), (B, 0), (W, 0), (B, 1), (W, 1)],
        };
        let actions = order.iter().map(|(kind, i)| Action::compute(*kind, 0, *i));
        let schedule = Schedule { ranks: vec![actions.collect()], ..two_left() };
        lower(&schedule, &LowerOptions::default()).ranks.remove(0)
    }

    #[test]
    fn a_last_backward_runs_layer_by_layer_with_its_w() {
        let stage =
            StageCosts { f_ns: 1, b_ns: 6, w_ns: 4, reduce_scatter_ns: 8, ..StageCosts::default() };
        let layer = LayerShare { w: 1, gradient: 1, ..LayerShare::default() };
        let layers = vec![LayerShare::of_stage([layer; 2])];
        let costs = Costs { layers, stages: vec![stage], ..Costs::uniform(1, 0, 0, 0, 0) };
        // The second backward from 12 on, its last layer until 17, and reduced until 21; the other
        // until 22 and 26. With whole stages the reduction would end at 30, by W alone at 28.
        for whole in [false, true] {
            let program = one_left(whole);
            let schedule = Schedule { ranks: vec![program.clone()], ..two_left() };
            let timeline = simulate(&schedule, &costs).unwrap();
            let span = |action: Action| {
                let spans = &timeline.ranks[0].spans;
                let span = spans.iter().find(|span| span.action == action).unwrap();
                (span.start_ns, span.end_ns)
            };
            assert_eq!(span(Action::ReduceScatter { stage: 0 }), (18, 26), "whole {whole}");
            let of = |kind| span(Action::compute(kind, 0, 1));
            match whole {
                true => assert_eq!(of(Compute::BW), (12, 22)),
                false => assert_eq!((of(Compute::B), of(Compute::W)), ((12, 18), (18, 22))),
            }
        }
    }

    /// Nothing may stand between a last B and its W that others wait for, or that another
    /// collective is.
    #[test]
    fn a_backward_by_layer_is_one_that_no_rank_waits_for() {
        let sent = Action::Send { message: Message::Gradient, stage: 0, micro_batch: 1 };
        let free = Action::Free { stage: 0 };
        for (kind, with_send) in [(Compute::B, false), (Compute::BW, true)] {
            let program = one_left(kind == Compute::BW);
            let backward = at(&program, Action::compute(kind, 0, 1));
            let run = LayerRun::at(&program, backward);
            let len = at(&program, Action::ReduceScatter { stage: 0 }) - backward;
            let len = if kind == Compute::BW { 1 } else { len };
            let expected = LayerRun { stage: 0, len, backward: true, sums: false };
            assert_eq!(run, Some(expected), "{kind:?}");
            assert_eq!(program[backward + 1], free);
            assert_eq!(expected.computes(&program, backward).count(), 2 - usize::from(with_send));
            let with = |between: Action| {
                let mut program = program.clone();
                program.insert(backward + 1, between);
                LayerRun::at(&program, backward).is_some()
            };
            assert!(with(Action::Free { stage: 1 }), "{kind:?}");
            assert_eq!(with(sent), with_send, "{kind:?}");
            let of_other = Action::Send { message: Message::Gradient, stage: 1, micro_batch: 1 };
            for other in [of_other, Action::AllGather { stage: 1 }] {
                assert!(!with(other), "{kind:?}, {other}");
            }
            let first = at(&program, Action::compute(kind, 0, 0));
            assert_eq!(LayerRun::at(&program, first), None, "a reduction follows the last one");
            let alone = [&program[..first], &program[backward..]].concat();
            assert_eq!(LayerRun::at(&alone, first), None, "it begins the gradient");
        }
    }

    /// The embedding is gathered by 2 and the block by 8, which the F comes to after 1 of its 10.
    #[test]
    fn an_f_waits_for_each_layer_as_it_comes_to_it() {
        let program = lower(&two_left(), &LowerOptions::default());
        let stage = StageCosts { f_ns: 10, b_ns: 1, all_gather_ns: 8, ..StageCosts::default() };
        let layer = |f, weights| LayerShare { f, weights, ..LayerShare::default() };
        let begin = |layers: &[LayerShare]| {
            let layers = vec![LayerShare::of_stage(layers.iter().copied())];
            let costs = Costs { layers, stages: vec![stage], ..Costs::uniform(1, 0, 0, 0, 0) };
            let timeline = simulate(&program, &costs).unwrap();
            let span = |action: Action| {
                let spans = &timeline.ranks[0].spans;
                let span = spans.iter().find(|span| span.action == action).unwrap();
                (span.start_ns, span.end_ns)
            };
            assert_eq!(span(Action::AllGather { stage: 0 }), (0, 8));
            let first = span(Action::compute(Compute::F, 0, 0));
            assert_eq!(span(Action::compute(Compute::F, 0, 1)).0, first.1);
            assert_eq!(first.1, first.0 + 10, "it waits before it begins");
            first.0
        };
        assert_eq!(begin(&[]), 8);
        assert_eq!(begin(&[layer(1, 1), layer(9, 3)]), 7);
        assert_eq!(begin(&[layer(9, 1), layer(1, 3)]), 2);
        assert_eq!(begin(&[layer(1, 1), layer(1, 1), layer(1, 1), layer(1, 1)]), 2);
        let mut first = program.ranks[0].clone();
        assert_eq!(first_forward(&first, 0), Some(0));
        assert_eq!(first_forward(&first, 1), None, "no gather");
        first.retain(|action| *action != Action::compute(Compute::F, 0, 0));
        assert_eq!(first_forward(&first, 0), Some(1));
        first.retain(|action| *action != Action::compute(Compute::F, 0, 1));
        assert_eq!(first_forward(&first, 0), None, "a B needs it first");
        first.truncate(1);
        assert_eq!(first_forward(&first, 0), None, "nothing needs it");
    }

    #[test]
    fn shares_of_layers_sum_to_the_whole() {
        let share = |(w, gradient): (u64, u64)| LayerShare { w, gradient, ..LayerShare::default() };
        let layers = LayerShare::of_stage([(3, 9), (3, 9), (1, 0)].map(share));
        let costs = Costs { layers: vec![layers, Vec::new()], ..Costs::default() };
        assert_eq!([0, 1, 7].map(|cell| costs.layers_of(cell)), [3, 1, 1]);
        assert_eq!([0, 1, 2].map(|layer| costs.w_of_layer(0, layer, 100)), [42, 43, 15]);
        assert_eq!([0, 1, 2].map(|layer| costs.reduction_of_layer(0, layer, 9)), [4, 5, 0]);
        assert_eq!(costs.w_of_layer(1, 0, 5), 5);
    }
}
