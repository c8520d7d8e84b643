//! Reductions of a stage's gradients and their sums over the replicas, layer by layer. The last
//! layer is the first, as W come to it first: on all ranks, in whatever way they are started.

use burn::tensor::Tensor;
use zeropp_comm::{CommResult, Pending};
use zeropp_core::meter::{Hold, MemoryKind};
use zeropp_core::split::Grads;

use super::{ShardedStage, bytes};
use crate::layer_shard::LayerShard;

/// A reduction under way.
pub(super) struct Reducing {
    /// What comes of each layer's, until it is added to the shard.
    parts: Vec<Option<Pending<Tensor<1>>>>,
    /// What counts each layer's gradient: until all are reduced, or, where no other rank shares
    /// the stage and the buffer is what comes out, until that is added.
    gradients: Vec<Option<Hold>>,
    /// Room for layers that are added, and summed over the replicas, while others are reduced.
    shards: Vec<Option<Hold>>,
    /// Room for what comes out.
    _holds: Vec<Hold>,
}

impl ShardedStage {
    /// RS: starts reducing a unit's gradients into this rank's shard.
    pub fn start_reduce(&mut self, mut grads: Grads) {
        self.begin_reduce();
        self.groups.zero3.together(self.trained_layers());
        for layer in (0..self.layers.len()).rev() {
            let (gradient, hold) = grads.take_flat(layer);
            self.reduce_layer(layer, gradient, hold);
        }
    }

    fn trained_layers(&self) -> usize {
        self.layers.iter().filter(|layer| layer.trains()).count()
    }

    /// Makes room for what a reduction gives, of which every layer is then started by itself, the
    /// last one first.
    pub fn begin_reduce(&mut self) {
        let mut holds = Vec::new();
        if !self.is_alone() {
            // What comes out is another buffer, which the engine takes meanwhile.
            holds.push(self.meter.hold(MemoryKind::Communication, self.trained_bytes()));
        }
        holds.push(self.meter.hold(MemoryKind::Communication, self.adding_bytes()));
        self.reducing = Some(Reducing {
            parts: self.layers.iter().map(|_| None).collect(),
            gradients: self.layers.iter().map(|_| None).collect(),
            shards: self.layers.iter().map(|_| None).collect(),
            _holds: holds,
        });
    }

    /// Starts reducing a layer's gradient, with the guard that counts it.
    ///
    /// # Panics
    /// Panics if no reduction has begun.
    pub fn reduce_layer(&mut self, layer: usize, gradient: Tensor<1>, hold: Hold) {
        let trains = self.layers[layer].trains();
        let part = trains.then(|| self.groups.zero3.reduce_scatter(gradient));
        let reducing = self.reducing.as_mut().expect("it has begun");
        (reducing.parts[layer], reducing.gradients[layer]) = (part, Some(hold));
    }

    /// Whether [`finish_reduce`](Self::finish_reduce) would return at once. On the way, layers that
    /// are reduced are added to the shard where a sum over the replicas was asked for, which then
    /// begins.
    pub fn is_reduced(&mut self) -> bool {
        let Some(reducing) = &mut self.reducing else { return true };
        if !self.replica_wanted || self.options.in_order {
            return reducing.parts.iter_mut().flatten().all(Pending::is_done);
        }
        for layer in (0..self.layers.len()).rev() {
            let part = self.reducing.as_mut().and_then(|all| all.parts[layer].as_mut());
            if !part.is_none_or(Pending::is_done) {
                return false;
            }
            if let Err(fault) = self.finish_layer(layer, true) {
                self.fault.get_or_insert(fault);
                return true;
            }
        }
        true
    }

    /// Whether the sum over the replicas that was asked for is done.
    pub fn is_replica_reduced(&mut self) -> bool {
        let started = !self.replica_wanted;
        started && self.replica_reducing.iter_mut().flatten().all(Pending::is_done)
    }

    /// Waits for the reduction under way, adds it to the shard's gradient in unit order and starts
    /// the replica reduction of each layer where that was asked for.
    ///
    /// # Errors
    /// The collective's error.
    pub fn finish_reduce(&mut self) -> CommResult<()> {
        if let Some(fault) = self.fault.take() {
            return Err(fault);
        }
        if !self.replica_wanted && !self.is_alone() {
            // Whole gradients go before the shards come.
            let reducing = self.reducing.as_mut();
            for part in reducing.into_iter().flat_map(|all| all.parts.iter_mut().rev()) {
                let reduced = part.take().map(Pending::wait).transpose()?;
                *part = reduced.map(|reduced| Pending::ready(Ok(reduced)));
            }
            self.reducing.iter_mut().for_each(|all| all.gradients.clear());
        }
        for layer in (0..self.layers.len()).rev() {
            self.finish_layer(layer, false)?;
        }
        self.replica_wanted = false;
        match self.reducing.take() {
            Some(_) => self.check_file(),
            None => Ok(()),
        }
    }

    /// Waits for a layer's reduction and adds it, if there is one that is not added. Where that is
    /// `early`, its gradient stays counted until all are finished, as predicted.
    fn finish_layer(&mut self, layer: usize, early: bool) -> CommResult<()> {
        let (alone, here) = (self.is_alone(), self.sums_here());
        let Some(reducing) = &mut self.reducing else { return Ok(()) };
        let Some(part) = reducing.parts[layer].take() else { return Ok(()) };
        let part = part.wait()?;
        let shard = &mut self.layers[layer];
        // Alone, a step's first gradient is the shard's own.
        let is_first = shard.grad.is_none() && here;
        let kind = if is_first { MemoryKind::GradientShard } else { MemoryKind::Gradient };
        let moves = alone && (is_first || !early);
        if moves {
            reducing.gradients[layer] = None;
        }
        reducing.shards[layer] = None;
        let held = moves.then(|| self.meter.hold_tensor(kind, &part));
        shard.add_grad(part, alone, &self.meter);
        drop(held);
        if self.replica_wanted {
            self.sum_layer(layer);
        }
        Ok(())
    }

    /// AR: sums the shard's gradient over the replicas as soon as the last unit is reduced, layer
    /// by layer.
    pub fn request_replica_reduce(&mut self) {
        if self.groups.replica.size() == 1 {
            return;
        }
        let owners = if self.options.zero1 { self.groups.replica.size() as u64 } else { 1 };
        let sum = self.trained_bytes() / owners;
        self.replica_holds.push(self.meter.hold(MemoryKind::Communication, sum));
        let alone = self.is_alone();
        match &mut self.reducing {
            Some(reducing) => {
                self.replica_wanted = true;
                let first = |layer: &LayerShard| layer.trains() && layer.grad.is_none() && !alone;
                for (room, layer) in reducing.shards.iter_mut().zip(&self.layers) {
                    let hold = || self.meter.hold(MemoryKind::GradientShard, bytes(&layer.param));
                    *room = first(layer).then(hold);
                }
            }
            None => {
                self.groups.replica.together(self.trained_layers());
                (0..self.layers.len()).rev().for_each(|layer| self.sum_layer(layer));
            }
        }
    }

    /// Starts summing a layer over the replicas.
    fn sum_layer(&mut self, layer: usize) {
        let (group, zero1) = (&self.groups.replica, self.options.zero1);
        self.replica_reducing.resize_with(self.layers.len(), || None);
        let shard = &mut self.layers[layer];
        if !shard.trains() {
            return;
        }
        let grad = shard.take_grad().expect("reduced before the replicas are").into_tensor();
        let bytes = 4 * grad.dims()[0] as u64;
        self.replica_holds.push(self.meter.hold(MemoryKind::GradientShard, bytes));
        let sum = if zero1 { group.reduce_scatter(grad) } else { group.all_reduce(grad) };
        self.replica_reducing[layer] = Some(sum);
    }

    /// Waits for everything under way before the optimizer step.
    ///
    /// # Errors
    /// The collective's error.
    pub(crate) fn finish_replica_reduce(&mut self) -> CommResult<()> {
        self.finish_reduce()?;
        let parts = std::mem::take(&mut self.replica_reducing);
        let wait = |part: Option<Pending<Tensor<1>>>| part.map(Pending::wait).transpose();
        let parts = parts.into_iter().map(wait).collect::<CommResult<Vec<_>>>()?;
        self.replica_holds.clear();
        for (layer, part) in self.layers.iter_mut().zip(parts) {
            if let Some(part) = part {
                layer.set_grad(part, &self.meter);
            }
        }
        Ok(())
    }
}
