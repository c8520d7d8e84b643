//! The validation loss: which samples it is of, and how the ranks measure it together.
//!
//! Samples are read one after another from the start of the data, the same at each evaluation; the
//! last one may be shorter, and what fills up the last micro-batch is not scored. The loss is the
//! mean over micro-batches, in fp32 each, added in fp64 in the order of their samples. So for the
//! same weights it has the same bits on any mesh, whatever P, V, D, K and the schedule, as long as
//! micro-batches have as many samples and there are as many of them, and is the same but for
//! rounding whatever a micro-batch has.

use std::sync::Arc;
use std::time::Instant;

use zeropp_comm::groups::Groups;
use zeropp_comm::{AllBytes, Communicator, Pending};
use zeropp_core::data::{DataError, Dataset, OnePass, Sample};
use zeropp_core::metrics::Evaluation;
use zeropp_pipeline::executor::{Executor, ModelWorker, TokenSource};
use zeropp_pipeline::ir::Action;
use zeropp_pipeline::timeline::Span;
use zeropp_zero3::checkpoint::Plateau;

use crate::Error;
use crate::config::{Config, ConfigError};
use crate::error::RankError;
use crate::own::samples::{self, FirstSamples, Samples};
use crate::plan::blueprint::Blueprint;
use crate::plan::mask_check;
use crate::run::evaluated::EvaluationSamples;
use crate::run::stop::{StopRequest, Stopper};

/// Bytes of a micro-batch's number and loss on their way to the other ranks.
const LOSS_BYTES: usize = 12;

/// The samples of a validation loss.
pub(crate) struct EvaluationSet {
    measured: EvaluationSamples,
    /// Micro-batches that count, the first ones; what is left of the last batch is passed over.
    micro_batches: usize,
    /// Samples that these have, those that fill the last one up included.
    counted: usize,
    /// Scored tokens of a micro-batch in the mean, where not all are.
    pub(crate) scored: Option<f64>,
    /// Batches that have them.
    pub(crate) batches: u64,
    /// Tokens that are predicted.
    pub(crate) tokens: u64,
    /// Those of them that are scored, where not all are.
    scored_tokens: Option<u64>,
    /// Whether a token is a byte.
    bytes: bool,
}

impl EvaluationSet {
    /// The samples that a program brings, or that the settings ask for; none where neither does.
    ///
    /// # Errors
    /// No data for it, too little, token ids that the model does not have, or tokens of another
    /// kind than those it is `trained_on`, where these are not a program's own.
    pub(crate) fn new(
        bp: &Blueprint,
        trained_on: Option<&Dataset>,
    ) -> Result<Option<EvaluationSet>, Error> {
        let config = &bp.config;
        let measured = match &bp.own.eval_data {
            Some(samples) => EvaluationSamples::Own(first_samples(bp, samples)?),
            None if config.eval_every == 0 => return Ok(None),
            None => EvaluationSamples::Files(pass(bp, trained_on)?),
        };
        let size = config.micro_batch_size;
        let per_batch = config.samples_per_step() / size;
        let micro_batches = measured.samples().div_ceil(size);
        let scored = scored(&measured)?;
        let per_micro_batch = measured.masks(size).then(|| scored as f64 / micro_batches as f64);
        let tokens = measured.targets() as u64;
        let is_text = bp.own.eval_data.is_none() && measured.data().is_bytes();
        Ok(Some(EvaluationSet {
            micro_batches,
            counted: micro_batches * size,
            scored: per_micro_batch,
            batches: micro_batches.div_ceil(per_batch) as u64,
            tokens,
            scored_tokens: (scored < tokens).then_some(scored),
            bytes: is_text && bp.model.vocabulary == 256,
            measured,
        }))
    }

    /// The data that is measured on, or that stands for it.
    pub(crate) fn data(&self) -> &Dataset {
        self.measured.data()
    }

    /// Sample `n`. What is behind the last micro-batch, and passed over, is like the first.
    pub(crate) fn sample(&self, n: usize) -> Result<Sample, DataError> {
        self.measured.sample(if n < self.counted { n } else { 0 })
    }

    /// The evaluation whose micro-batches had these losses, by their numbers.
    fn mean(&self, mut losses: Vec<(u64, f32)>) -> Evaluation {
        losses.retain(|(number, _)| (*number as usize) < self.micro_batches);
        losses.sort_unstable_by_key(|(number, _)| *number);
        assert_eq!(losses.len(), self.micro_batches, "each micro-batch ends on one rank");
        let sum: f64 = losses.iter().map(|(_, loss)| f64::from(*loss)).sum();
        let loss = sum / losses.len() as f64;
        Evaluation {
            loss,
            perplexity: loss.exp(),
            bits_per_byte: self.bytes.then_some(loss / std::f64::consts::LN_2),
            tokens: self.tokens,
            scored_tokens: self.scored_tokens,
            ..Evaluation::default()
        }
    }
}

/// The first samples of a program's own, as many batches as the settings say.
fn first_samples(bp: &Blueprint, samples: &Arc<dyn Samples>) -> Result<FirstSamples, Error> {
    let config = &bp.config;
    let as_eval = |e: DataError| Error::EvaluationData(of_eval_data(&e));
    let stand_in = samples::stand_in(&**samples).map_err(as_eval)?;
    let (ids, known) = (samples.vocabulary(), bp.model.vocabulary);
    if ids > known {
        return Err(Error::EvaluationData(format!(
            "eval-data = {}: it has {ids} token ids, and the model knows {known}; use samples of \
             the same tokens, or a vocab of at least {ids}",
            samples.name()
        )));
    }
    if config.document_mask {
        mask_check::check_documents(config, &stand_in, false)?;
    }
    let batches = usize::try_from(config.eval_steps).unwrap_or(usize::MAX);
    let Some(number) = batches.checked_mul(config.samples_per_step()).filter(|n| *n > 0) else {
        let problem = "a program's own samples have no end";
        let help = "say how many batches are measured, such as 20";
        return Err(ConfigError::value("eval-steps", config.eval_steps, problem, help).into());
    };
    let (seq, hidden) = (config.seq, config.hidden_of_samples());
    Ok(FirstSamples { samples: samples.clone(), stand_in, number, seq, hidden })
}

/// The samples of the files that the settings name.
fn pass(bp: &Blueprint, trained_on: Option<&Dataset>) -> Result<OnePass, Error> {
    let config = &bp.config;
    let read = config.validation_dataset().map_err(|e| match config.eval_data {
        Some(_) => Error::EvaluationData(of_eval_data(&e)),
        None => Error::EvaluationData(format!("the part kept for validation (split): {e}")),
    })?;
    let Some(data) = read else {
        let problem = "there is no data to measure a validation loss on";
        let help = "name it with eval-data, or keep a part of the data with split, as in 98,2";
        return Err(ConfigError::value("eval-every", config.eval_every, problem, help).into());
    };
    trained_on.map_or(Ok(()), |trained_on| check_kind(&data, trained_on))?;
    let known = bp.model.vocabulary;
    check_ids(config, &data, known)?;
    let data = data.with_vocabulary(known);
    let asked = match config.eval_steps {
        0 => usize::MAX,
        steps => {
            let per_batch = config.samples_per_step();
            usize::try_from(steps).unwrap_or(usize::MAX).saturating_mul(per_batch)
        }
    };
    if config.document_mask {
        mask_check::check_documents(config, &data, true)?;
    }
    let size = config.micro_batch_size;
    let pass = OnePass::new(data, config.seq, asked, config.hidden_of_samples());
    // A loss that knows of no mask takes whole micro-batches.
    let pass = if bp.own.masks_nothing { pass.in_whole(size) } else { pass };
    if pass.samples() == 0 {
        let (origin, there) = (pass.data().origin(), pass.data().samples(config.seq));
        return Err(Error::EvaluationData(format!(
            "eval-data = {origin}: {there} samples of seq = {} are less than a micro-batch of \
             {size}; use more data, or a smaller micro-batch-size or seq",
            config.seq
        )));
    }
    Ok(pass)
}

/// An error of data, which is validation data here.
fn of_eval_data(error: &DataError) -> String {
    error.to_string().replacen("data =", "eval-data =", 1)
}

/// Checks that the data to measure on has tokens of the kind that is trained on.
fn check_kind(data: &Dataset, trained_on: &Dataset) -> Result<(), Error> {
    if data.is_bytes() == trained_on.is_bytes() {
        return Ok(());
    }
    let kind = |data: &Dataset| if data.is_bytes() { "bytes" } else { "token ids" };
    Err(Error::EvaluationData(format!(
        "eval-data = {}: its tokens are {}, and those of {} are {}; use data of the same tokenizer",
        data.origin(),
        kind(data),
        trained_on.origin(),
        kind(trained_on)
    )))
}

/// The model knows all ids. Where their number is given, they are looked at as they are read.
fn check_ids(config: &Config, data: &Dataset, known: usize) -> Result<(), Error> {
    if config.vocab.is_some() || data.vocabulary() <= known {
        return Ok(());
    }
    Err(Error::EvaluationData(format!(
        "eval-data = {}: its largest token id is {}, and the model has {known} of them; use data \
         of the same tokenizer, or a vocab of at least {}",
        data.origin(),
        data.vocabulary() - 1,
        data.vocabulary()
    )))
}

/// How many tokens are scored, of which there is one.
fn scored(measured: &EvaluationSamples) -> Result<u64, Error> {
    match measured.scored().map_err(|e| Error::EvaluationData(of_eval_data(&e)))? {
        0 => {
            let problem = "none of its tokens are scored: its .mask marks none of them";
            let help = "give data with answers, or set loss-mask = false";
            let origin = measured.data().origin();
            Err(Error::EvaluationData(format!("eval-data = {origin}: {problem}; {help}")))
        }
        scored => Ok(scored as u64),
    }
}

/// Requests to a run while it measures: to save, or to end. A rank sends its request before each
/// batch and reads those of the others before the next, so that all leave after the same one and
/// none waits.
pub(crate) struct EvaluationRequests<'a> {
    /// None where nothing can be asked.
    stopper: Option<&'a Stopper>,
    /// The request that this rank knows of and has not sent.
    unsent: StopRequest,
    reported: Option<Pending<AllBytes>>,
    /// The largest of all ranks.
    pub(crate) stop_request: StopRequest,
}

impl<'a> EvaluationRequests<'a> {
    /// Of a run that `stopper` may end; this rank knows of a `stop_request` already.
    pub(crate) fn of(
        stopper: Option<&'a Stopper>,
        stop_request: StopRequest,
    ) -> EvaluationRequests<'a> {
        EvaluationRequests {
            stopper,
            unsent: stop_request,
            reported: None,
            stop_request: StopRequest::GoOn,
        }
    }

    /// Whether anything was asked before the batch before; the same on all ranks.
    fn any(&mut self, world: &dyn Communicator) -> Result<bool, RankError> {
        let Some(stopper) = self.stopper else { return Ok(false) };
        let mine = std::mem::take(&mut self.unsent).max(stopper.receive());
        let before = self.reported.replace(world.exchange(mine.to_bytes().to_vec()));
        self.receive(before)?;
        Ok(self.stop_request > StopRequest::GoOn)
    }

    /// Receives the requests that were sent last.
    fn settle(&mut self) -> Result<(), RankError> {
        let last = self.reported.take();
        self.receive(last)
    }

    fn receive(&mut self, reported: Option<Pending<AllBytes>>) -> Result<(), RankError> {
        let Some(reported) = reported else { return Ok(()) };
        for bytes in reported.wait()?.iter() {
            let stop_request =
                bytes.as_slice().try_into().map_or(StopRequest::GoOn, StopRequest::from_bytes);
            self.stop_request = self.stop_request.max(stop_request);
        }
        Ok(())
    }
}

/// A rank's part of every evaluation of a run.
pub(crate) struct Evaluator {
    set: Arc<EvaluationSet>,
    tokens: TokenSource,
    program: Vec<Action>,
    /// The number of this rank's first micro-batch among those of a batch, and how many these are.
    place: (usize, usize),
    /// How the losses have gone so far.
    plateau: Option<Plateau>,
}

impl Evaluator {
    /// For a run of `bp` whose losses have gone like `plateau` before.
    pub(crate) fn new(
        bp: &Blueprint,
        set: Arc<EvaluationSet>,
        tokens: TokenSource,
        groups: &Groups,
        plateau: Option<Plateau>,
    ) -> Evaluator {
        let c = groups.coords;
        let programs = bp.evaluation.as_ref().expect("made where a validation loss is asked for");
        let (deal, zero3) = (bp.config.deal(), bp.mesh.zero3);
        Evaluator {
            set,
            tokens,
            program: programs.of(c.dp).ranks[c.pp].clone(),
            place: (deal.first(c.dp, c.zero3, zero3), deal.all() * zero3),
            plateau,
        }
    }

    /// Measures the loss after `step`, as [`measure`](Self::measure) does, as one of those that
    /// `patience` counts.
    pub(crate) fn run(
        &mut self,
        groups: &Groups,
        executor: &mut Executor<ModelWorker>,
        step: u64,
        asked: &mut EvaluationRequests,
    ) -> Result<Option<Evaluation>, RankError> {
        let evaluation = self.measure(groups, executor, step, asked)?;
        match (evaluation, &mut self.plateau) {
            (Some(Evaluation { best: true, loss, .. }), plateau) => {
                *plateau = Some(Plateau { lowest: loss, since: 0 });
            }
            (Some(_), Some(plateau)) => plateau.since += 1,
            _ => {}
        }
        Ok(evaluation)
    }

    /// Measures the loss of the weights as they are after `step`; the same on all ranks, which all
    /// call it. None where it was left since something was `asked` of the run meanwhile.
    pub(crate) fn measure(
        &mut self,
        groups: &Groups,
        executor: &mut Executor<ModelWorker>,
        step: u64,
        asked: &mut EvaluationRequests,
    ) -> Result<Option<Evaluation>, RankError> {
        let start = Instant::now();
        let (first, in_all) = self.place;
        let (mut mine, mut gathers, mut sent) = (Vec::new(), 0u64, 0u64);
        for batch in 0..self.set.batches {
            if asked.any(&*groups.world)? {
                asked.settle()?;
                return Ok(None);
            }
            executor.worker.evaluate(Some((self.tokens.clone(), batch)));
            let record = executor.run_program(self.program.clone(), step);
            let losses = executor.worker.take_losses();
            executor.worker.evaluate(None);
            let record = record.map_err(RankError::Step)?;
            let is_gather = |s: &&Span| matches!(s.action, Action::AllGather { .. });
            gathers += record.spans.iter().filter(is_gather).count() as u64;
            sent += record.sent_bytes;
            for (m, loss) in losses {
                let number = batch * in_all as u64 + (first + m) as u64;
                mine.extend(number.to_le_bytes());
                mine.extend(loss.to_le_bytes());
            }
        }
        asked.settle()?;
        let counts = [gathers.to_le_bytes(), sent.to_le_bytes()].concat();
        let all = groups.world.exchange([counts, mine].concat()).wait()?;
        let (mut all_gathers, mut comm_bytes, mut losses) = (0, 0, Vec::new());
        for bytes in all.iter() {
            let (counts, rest) = bytes.split_at(16);
            let count = |at: usize| word(&counts[at..at + 8]);
            all_gathers += count(0);
            comm_bytes += count(8);
            losses.extend(rest.chunks_exact(LOSS_BYTES).map(|one| {
                (word(&one[..8]), f32::from_le_bytes(one[8..].try_into().expect("four bytes")))
            }));
        }
        let seconds = start.elapsed().as_secs_f64();
        let mut evaluation =
            Evaluation { all_gathers, comm_bytes, seconds, ..self.set.mean(losses) };
        let loss = evaluation.loss;
        evaluation.best = loss.is_finite() && self.plateau.is_none_or(|p| loss < p.lowest);
        Ok(Some(evaluation))
    }

    /// How the losses have gone so far; nothing before the first that is finite.
    pub(crate) fn plateau(&self) -> Option<Plateau> {
        self.plateau
    }
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}
