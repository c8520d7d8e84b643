//! Runs the lowered program of one rank, action by action, exactly as it stands.
//!
//! One compute thread a rank. Gathers, reductions, sends and receives are started where the
//! program says so and waited for by the action that needs their result, so they overlap with
//! the computation between. No schedule has a special case here.

mod copies;
pub mod emulated;
mod error;
mod flight;
mod graph;
mod head;
mod layers;
mod model;
mod not_finite;
mod record;
mod status;
mod tokens;
mod waits;
mod worker;

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Tensor;
use zeropp_comm::{CommResult, Communicator, Pending};
use zeropp_core::meter::{MemoryKind, Meter};
use zeropp_failures::tag::{Key, tag};
use zeropp_zero3::StepOutcome;

pub use error::StepError;
pub use model::{ModelWorker, WorkerOptions};
pub use not_finite::{NotFinite, Value};
pub use record::{Redone, StepRecord};
pub use status::StatusBoard;
pub use tokens::{TokenSource, Tokens};
pub use waits::LayerWaits;
pub use worker::Worker;

use self::flight::{Flight, IncomingTensor, RunningOperation};
use crate::head::HeadTree;
use crate::ir::{self, Action, Compute, Message, Schedule, Task};
use crate::timeline::Span;

/// A step that failed on this rank.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank}, step {step}, action {action}: {source}")]
pub struct ExecutorError {
    /// World rank.
    pub rank: usize,
    /// Step, from 1.
    pub step: u64,
    /// The action it was at.
    pub action: Action,
    /// The error itself.
    pub source: StepError,
}

/// Where a rank goes on in its program.
enum Next {
    Action,
    FirstAction,
}

/// The instruments that an executor is measured and watched with.
pub struct Instruments {
    /// Counts the bytes of messages.
    pub meter: Arc<Meter>,
    /// Shows what each rank is doing.
    pub status: Arc<StatusBoard>,
    /// From when times count.
    pub epoch: Instant,
}

/// One rank's executor.
pub struct Executor<W> {
    program: Vec<Action>,
    /// Whether updates do not wait for the norm, as the program validates them.
    late: bool,
    /// Where the stages are; without the programs.
    stages: Schedule,
    /// The messages of a split head, if there is one.
    head: Option<Arc<HeadTree>>,
    /// Whether the program has more than forwards.
    trains: bool,
    pipeline: Arc<dyn Communicator>,
    world_rank: usize,
    meter: Arc<Meter>,
    status: Arc<StatusBoard>,
    epoch: Instant,
    /// The stages and their compute.
    pub worker: W,
}

/// What a compute gives.
enum ComputeOutput {
    Nothing,
    /// What a neighbouring stage takes; of F of a slice of a head, the sums of its blocks.
    Message(Tensor<1>),
    /// Sums of gradients, of B of a slice of a head.
    Sums(Vec<Tensor<1>>),
}

impl<W: Worker> Executor<W> {
    /// An executor of the part of `schedule`, which is lowered and verified, that is this rank's of
    /// `pipeline`.
    pub fn new(
        schedule: &Schedule,
        pipeline: Arc<dyn Communicator>,
        world_rank: usize,
        instruments: Instruments,
        worker: W,
    ) -> Self {
        let Instruments { meter, status, epoch } = instruments;
        let program = schedule.ranks[pipeline.rank()].clone();
        let late = program.contains(&Action::Validate);
        let Schedule { kind, placement, units, .. } = schedule.clone();
        let head = HeadTree::of(schedule).map(Arc::new);
        let stages = Schedule { kind, placement, units, ..Schedule::default() };
        Self {
            program,
            late,
            stages,
            head,
            trains: true,
            pipeline,
            world_rank,
            meter,
            status,
            epoch,
            worker,
        }
    }

    /// Runs the program once. `step` counts from 1.
    ///
    /// # Errors
    /// The first operation that failed, with this rank and the action it was at.
    pub fn run_step(&mut self, step: u64) -> Result<StepRecord, ExecutorError> {
        self.worker.begin_step(step);
        self.walk(step)
    }

    /// Runs another verified program of this rank and these stages once, in place of its own: one
    /// that does not train. `step` is the number that it runs under.
    ///
    /// # Errors
    /// As [`run_step`](Self::run_step).
    pub fn run_program(
        &mut self,
        program: Vec<Action>,
        step: u64,
    ) -> Result<StepRecord, ExecutorError> {
        let own = std::mem::replace(&mut self.program, program);
        self.trains = false;
        let record = self.walk(step);
        (self.program, self.trains) = (own, true);
        record
    }

    /// Runs another verified program from the next step on. It has the same stages in the same
    /// places, the same units and the same recomputation.
    ///
    /// # Panics
    /// Panics where stages are elsewhere in it, or units are others.
    pub fn exchange(&mut self, schedule: &Schedule) {
        assert_eq!(schedule.placement, self.stages.placement, "stages stay where they are");
        assert_eq!(schedule.units, self.stages.units, "the cut of sums stays");
        self.program = schedule.ranks[self.pipeline.rank()].clone();
        self.stages.kind = schedule.kind.clone();
    }

    /// Makes the update of `step`, the last one that was run, right, if the program would validate
    /// it in the next one: ranks come to rest. What that step did, where it was.
    ///
    /// # Errors
    /// As [`run_step`](Self::run_step).
    pub fn settle(&mut self, step: u64) -> Result<Option<StepOutcome>, ExecutorError> {
        let settled = self.worker.settle();
        settled.map_err(|source| self.failed(step, Action::Validate, source.into()))
    }

    fn failed(&self, step: u64, action: Action, source: StepError) -> ExecutorError {
        ExecutorError { rank: self.world_rank, step, action, source }
    }

    fn walk(&mut self, step: u64) -> Result<StepRecord, ExecutorError> {
        let mut flight = Flight::default();
        let backwards_end = ir::backwards_end(&self.program);
        let mut at = 0;
        while at < self.program.len() {
            let action = self.program[at];
            self.status.set(self.world_rank, step, action);
            self.look_at_running(&mut flight);
            self.pass_on(&mut flight).map_err(|source| self.failed(step, action, source))?;
            if at == backwards_end && self.trains {
                self.worker.read_ahead();
            }
            let done = self.run_action(&mut flight, action, step);
            match done.map_err(|source| self.failed(step, action, source))? {
                Next::Action => at += 1,
                Next::FirstAction => at = 0,
            }
        }
        let last = self.program.last().copied().unwrap_or(Action::OptimizerStep);
        self.pass_on_all(&mut flight).map_err(|source| self.failed(step, last, source))?;
        for send in std::mem::take(&mut flight.sends) {
            send.wait().map_err(|source| self.failed(step, last, source.into()))?;
        }
        self.status.end_step(self.world_rank);
        Ok(StepRecord {
            spans: flight.spans,
            outcome: flight.outcome,
            validated: flight.validated,
            sent_bytes: flight.sent_bytes,
            redone: flight.redone,
        })
    }

    /// Looks whether the update before this step was right. Where it was not, drops what was begun
    /// of this step, makes the update right and begins again. All ranks come to the same verdict,
    /// and what was sent before it was sent to one who drops it too (ADR 58).
    fn validate(&mut self, f: &mut Flight) -> CommResult<Next> {
        if self.worker.was_right()? {
            f.validated = self.worker.settle()?.or(f.validated);
            return Ok(Next::Action);
        }
        for (_, arriving) in std::mem::take(&mut f.arriving) {
            arriving.tensor.wait()?;
        }
        f.local.clear();
        self.worker.drop_forwards()?;
        std::mem::take(&mut f.sends).into_iter().try_for_each(Pending::wait)?;
        let validated = self.worker.settle()?;
        let begin = f.spans.first().map_or(0, |first| first.start_ns);
        let redone = Redone {
            actions: f.spans.len() as u64 - 1,
            ns: self.now() - begin,
            sent_bytes: f.sent_bytes,
        };
        *f = Flight { validated, redone: Some(redone), ..Flight::default() };
        Ok(Next::FirstAction)
    }

    fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    fn run_action(&mut self, f: &mut Flight, action: Action, step: u64) -> Result<Next, StepError> {
        let start = self.now();
        f.spans.push(Span { lane: action.lane(), action, start_ns: start, end_ns: start });
        let span = f.spans.len() - 1;
        let ends_here = match action {
            Action::Compute { .. } | Action::Overlap { .. } => match self.run_by_layer(f, span) {
                Some((start, end)) => {
                    (f.spans[span].start_ns, f.spans[span].end_ns) = (start, end);
                    false
                }
                None => {
                    self.compute(f, action, span)?;
                    f.spans[span].end_ns = self.has_computed(f);
                    false
                }
            },
            Action::Send { message, stage, micro_batch } => {
                self.send(f, (message, stage, micro_batch), span);
                false
            }
            Action::Recv { message, stage, micro_batch } => {
                self.receive(f, (message, stage, micro_batch), span);
                false
            }
            Action::SendHead { .. } | Action::RecvHead { .. } => {
                self.head_message(f, action, span)?;
                false
            }
            Action::AllGather { stage } => {
                self.gather(f, stage, span);
                false
            }
            Action::Free { stage } => {
                self.pass_on_until(f, |this, _| this.worker.is_gathered(stage))?;
                self.worker.free(stage).map(|()| true)?
            }
            Action::ReduceScatter { .. } | Action::ReplicaReduce { .. } => {
                self.reduce(f, action, span)?;
                false
            }
            Action::Retire { .. } => self.retire_reduces(f).map(|()| true)?,
            Action::Out { .. } | Action::Gone { .. } | Action::In { .. } => {
                self.copy(f, action, span)?
            }
            Action::Validate => {
                if let Next::FirstAction = self.validate(f)? {
                    return Ok(Next::FirstAction);
                }
                false
            }
            Action::OptimizerStep => {
                self.pass_on_all(f)?;
                self.retire_reduces(f)?;
                let begin = self.now();
                let outcome = self.worker.optimizer_step(step, self.late)?;
                f.sent_bytes += outcome.sent_bytes;
                f.outcome = Some(outcome);
                for (_, span) in std::mem::take(&mut f.running) {
                    f.spans[span].end_ns = begin;
                }
                f.spans[span].start_ns = begin;
                true
            }
        };
        if ends_here {
            f.spans[span].end_ns = self.now();
        }
        Ok(Next::Action)
    }

    /// Starts a reduction: of a stage's gradients, or of its shard over the replicas.
    fn reduce(&mut self, f: &mut Flight, action: Action, span: usize) -> Result<(), StepError> {
        match action {
            Action::ReduceScatter { stage } => {
                self.retire_reduces(f)?;
                match &f.run {
                    Some(run) => f.spans[span].start_ns = run.reduced_from,
                    None => self.worker.start_reduce(stage),
                }
                f.run.take_if(|run| !run.sums);
                f.sent_bytes += self.worker.reduce_bytes(stage);
                f.reduces.push((stage, span));
                f.running.push((RunningOperation::Reduce(stage), span));
            }
            Action::ReplicaReduce { stage } => {
                // All replicas start these sums in the order of their programs, which one that
                // still waits for its reduction would change.
                if f.reduces.iter().any(|(reducing, _)| *reducing != stage) {
                    self.retire_reduces(f)?;
                }
                if f.run.take().is_none() {
                    self.worker.request_replica_reduce(stage);
                }
                f.sent_bytes += self.worker.replica_bytes(stage);
                f.running.push((RunningOperation::ReplicaReduce(stage), span));
            }
            _ => unreachable!("no reduction"),
        }
        Ok(())
    }

    /// Ends the spans of collectives and copies that are done by now, so that they do not last
    /// until someone needs their result.
    fn look_at_running(&mut self, f: &mut Flight) {
        let Flight { running, spans, .. } = f;
        if running.is_empty() {
            return;
        }
        let now = self.now();
        let worker = &mut self.worker;
        running.retain(|(operation, span)| {
            let is_done = match *operation {
                RunningOperation::Gather(stage) => worker.is_gathered(stage),
                RunningOperation::Reduce(stage) => worker.is_reduced(stage),
                RunningOperation::ReplicaReduce(stage) => worker.is_replica_reduced(stage),
                RunningOperation::Copy(stage, micro_batch) => worker.is_copied(stage, micro_batch),
            };
            if is_done {
                spans[*span].end_ns = now;
            }
            !is_done
        });
    }

    /// At most one reduction is under way: it ends where the program says so, or before a new one
    /// and the optimizer. That fixes when gradient buffers go, whatever the timing.
    fn retire_reduces(&mut self, f: &mut Flight) -> Result<(), StepError> {
        for (stage, span) in std::mem::take(&mut f.reduces) {
            self.pass_on_until(f, |this, _| this.worker.is_reduced(stage))?;
            self.worker.finish_reduce(stage)?;
            f.end_running(span, self.now());
        }
        Ok(())
    }

    fn compute(&mut self, f: &mut Flight, action: Action, span: usize) -> Result<(), StepError> {
        let mut begun = false;
        for task in action.computes() {
            let Task { kind, stage, micro_batch } = task;
            if kind != Compute::F && kind != Compute::W {
                self.copied_in(f, stage, micro_batch)?;
            }
            let by_layer = kind == Compute::F && f.by_layer.remove(&(stage, micro_batch));
            if by_layer {
                self.wait_by_layer();
            } else if kind != Compute::W {
                self.pass_on_until(f, |this, _| this.worker.is_gathered(stage))?;
                self.worker.finish_gather(stage)?;
                if let Some(gather) = f.gathers.remove(&stage) {
                    f.end_running(gather, self.now());
                }
            }
            let input = self.taken(f, task)?;
            // The span begins once weights and input are here: waiting is idle time.
            if !begun {
                f.spans[span].start_ns = self.now();
                begun = true;
            }
            if !by_layer {
                self.status.set_computing(self.world_rank, true);
            }
            let output = match self.backward_by_layer(span) {
                Some(run) => self.run_backward(f, run, span, input),
                None => self.computed(task, input),
            };
            self.status.set_computing(self.world_rank, false);
            self.has_waited(f, stage, span);
            self.hand_on(f, task, output?)?;
        }
        Ok(())
    }

    /// What a compute takes.
    fn taken(
        &mut self,
        f: &mut Flight,
        Task { kind, stage, micro_batch }: Task,
    ) -> Result<Option<Tensor<1>>, StepError> {
        let (stages, splits) = (self.stages.stages(), self.head.is_some());
        match kind {
            Compute::F if stage == stages => self.slice_input(f, micro_batch).map(Some),
            Compute::F => self.input(f, (Message::Activation, stage, micro_batch)),
            Compute::B if stage == stages => self.slice_totals(f, micro_batch).map(Some),
            Compute::B | Compute::BW if splits && stage + 1 == stages => {
                self.head_gradient(f, micro_batch).map(Some)
            }
            Compute::B | Compute::BW => self.input(f, (Message::Gradient, stage, micro_batch)),
            Compute::W | Compute::R => Ok(None),
        }
    }

    fn computed(
        &mut self,
        Task { kind, stage, micro_batch }: Task,
        input: Option<Tensor<1>>,
    ) -> Result<ComputeOutput, StepError> {
        let worker = &mut self.worker;
        let given = |output: Result<Option<Tensor<1>>, StepError>| match output? {
            Some(output) => Ok(ComputeOutput::Message(output)),
            None => Ok(ComputeOutput::Nothing),
        };
        if stage == self.stages.stages() && matches!(kind, Compute::F | Compute::B) {
            let input = input.expect("a slice has one");
            return match kind {
                Compute::F => worker.slice_forward(micro_batch, input).map(ComputeOutput::Message),
                _ => worker.slice_backward(micro_batch, input).map(ComputeOutput::Sums),
            };
        }
        match kind {
            Compute::F => given(worker.forward(stage, micro_batch, input)),
            Compute::B => given(worker.backward(stage, micro_batch, input)),
            Compute::R => given(worker.recompute(stage, micro_batch).map(|()| None)),
            Compute::W => {
                worker.weight(stage, micro_batch);
                Ok(ComputeOutput::Nothing)
            }
            Compute::BW => {
                let dx = worker.backward(stage, micro_batch, input);
                if dx.is_ok() {
                    worker.weight(stage, micro_batch);
                }
                given(dx)
            }
        }
    }

    /// Puts what a compute gave where others take it.
    fn hand_on(
        &mut self,
        f: &mut Flight,
        Task { kind, stage, micro_batch }: Task,
        output: ComputeOutput,
    ) -> Result<(), StepError> {
        let stages = self.stages.stages();
        let output = match output {
            ComputeOutput::Nothing => return Ok(()),
            ComputeOutput::Sums(sums) => return self.slice_gradients(f, micro_batch, sums),
            ComputeOutput::Message(sums) if stage == stages => {
                return self.slice_output(f, micro_batch, sums);
            }
            ComputeOutput::Message(output) => output,
        };
        if self.head.is_some() && kind == Compute::F && stage + 1 == stages {
            self.head_input(f, micro_batch, output);
            return Ok(());
        }
        let message = kind.gives(stage, stages).expect("it made what a neighbour takes");
        let to = message.consumer(stage, stages).expect("a neighbour");
        let here = self.stages.placement[to] == self.pipeline.rank();
        let hold = here.then(|| self.meter.hold_tensor(MemoryKind::Communication, &output));
        f.local.insert((message, to, micro_batch), (output, hold));
        Ok(())
    }

    /// The input of a compute action: nothing at the ends of the pipeline, else what was received
    /// or produced on this rank.
    fn input(&mut self, f: &mut Flight, key: Key) -> Result<Option<Tensor<1>>, StepError> {
        let (message, stage, _) = key;
        let end = match message {
            Message::Activation => stage == 0,
            Message::Gradient => stage + 1 == self.stages.stages(),
        };
        if end {
            return Ok(None);
        }
        if let Some((tensor, _)) = f.local.remove(&key) {
            return Ok(Some(tensor));
        }
        let arrived = |f: &mut Flight| f.arriving.get_mut(&key).is_some_and(|a| a.tensor.is_done());
        self.pass_on_until(f, |_, f| arrived(f))?;
        let arriving = f.arriving.remove(&key).expect("a verified program posts every receive");
        let tensor = arriving.tensor.wait()?;
        f.spans[arriving.span].end_ns = self.now();
        Ok(Some(tensor))
    }

    fn send(&mut self, f: &mut Flight, (message, stage, micro_batch): Key, span: usize) {
        let to = match message {
            Message::Activation => stage + 1,
            Message::Gradient => stage - 1,
        };
        let key = (message, to, micro_batch);
        let (tensor, _) =
            f.local.remove(&key).expect("a verified program sends what it has produced");
        f.sent_bytes += (tensor.dims()[0] * tensor.dtype().size()) as u64;
        let sent = self.pipeline.send(self.stages.placement[to], tag(key), tensor);
        f.sends.push(sent);
        f.spans[span].end_ns = self.now();
    }

    fn receive(&mut self, f: &mut Flight, key: Key, span: usize) {
        let (message, stage, micro_batch) = key;
        let from = match message {
            Message::Activation => stage - 1,
            Message::Gradient => stage + 1,
        };
        let (len, dtype) = self.worker.message_shape(micro_batch);
        let hold = self.meter.hold(MemoryKind::Communication, (len * dtype.size()) as u64);
        let from = self.stages.placement[from];
        let tensor = self.pipeline.recv(from, tag(key), len, dtype);
        f.arriving.insert(key, IncomingTensor { tensor, span, _hold: Some(hold) });
    }
}
