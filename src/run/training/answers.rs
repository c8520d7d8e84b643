//! The work of all ranks after a step, as rank 0's program answers: to go on, to save, to end, or
//! something that it asks for first.

use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use zeropp_checkpoint::pace::SaveDecision;
use zeropp_checkpoint::step_end::{Decision, MetStep};
use zeropp_comm::CommResult;
use zeropp_core::metrics::Evaluation;
use zeropp_zero3::{ParamExport, ShardedStage};

use super::Training;
use crate::checkpoint::patience::Patience;
use crate::error::RankError;
use crate::run::collect;
use crate::run::evaluation::EvaluationRequests;
use crate::run::request::{NO_REQUEST, StepAnswer, StepRequest};
use crate::run::results::{RankEvent, RankResult};
use crate::run::saving::Saving;
use crate::run::stop::StopRequest;

impl<R: FnMut(RankEvent)> Training<'_, R> {
    /// Does the work after a step that ended like this: what all `wished`, and the trainer of
    /// rank 0's process; all get the same. What that asks for first, they do here. The other
    /// processes receive what rank 0's got; every rank has measured `eval`.
    pub(super) fn agree(
        &mut self,
        met: &MetStep,
        mut wished: StopRequest,
        eval: Option<Evaluation>,
    ) -> Result<Decision, RankError> {
        let measured = Some((met.step, eval));
        let follows = loop {
            let mut answer = self.answer(met, &mut wished)?;
            match StepRequest::from_byte(answer.remove(0)) {
                None => break answer,
                Some(request) => {
                    self.receive(&answer, measured);
                    self.serve(request, met.step)?;
                }
            }
        };
        let (head, mut reported) = follows.split_at(4);
        if let Some(rescheduling) = &mut self.rescheduling {
            let (exchanged, rest) = rescheduling.follow(reported);
            self.exchange(exchanged, met.step + 1);
            reported = rest;
        }
        self.receive(reported, measured);
        let request = StopRequest::from_bytes([head[0], head[1]]);
        let [saves, copies] = [head[2], head[3]].map(SaveDecision::from_byte);
        Ok(Decision { request, saves, copies })
    }

    /// Rank 0's answer to all after a step, of which ranks know what is `wished`: a request, or
    /// what follows; and then what its process was sent since.
    fn answer(&mut self, met: &MetStep, wished: &mut StopRequest) -> Result<Vec<u8>, RankError> {
        let reported = self.reported.take();
        let (shared, world) = (self.shared.clone(), &*self.groups.world);
        let patience = Patience::new(&shared.blueprint.config);
        let updates = self.executor.worker.optimizer().updates();
        let (saving, copying, ends) = (&mut self.saving, &mut self.copying, &mut self.ends);
        let orders = &self.orders;
        let mut follows = |request: StopRequest| {
            let wanted = ends.wanted(met, request);
            let [save, copy] = if orders.moves { ends.put_off(wanted) } else { wanted };
            let mut begin = |saving: &mut Option<Saving>, wanted| {
                saving.as_mut().map_or(SaveDecision::No, |s| s.decide(wanted, met, updates, ends))
            };
            let begins = [begin(saving, save), begin(copying, copy)];
            let head = [&[NO_REQUEST], &request.to_bytes()[..], &begins.map(|b| b as u8)].concat();
            [&head[..], &orders.words, &reported].concat()
        };
        let (awaiting_reply, mut began) = (&mut self.awaiting_reply, Instant::now());
        let answer = |wait: Duration| {
            let answers = shared.answers.as_ref().expect("rank 0's process has them").lock();
            while *awaiting_reply > 0 {
                match answers.recv_timeout(wait) {
                    Ok(StepAnswer::Follows(answer)) => *wished = (*wished).max(answer),
                    Ok(StepAnswer::First(request)) => {
                        return Some([&[request.to_byte()], &reported[..]].concat());
                    }
                    Err(RecvTimeoutError::Timeout) => return None,
                    // The trainer is gone: no more is wanted.
                    Err(RecvTimeoutError::Disconnected) => {
                        *wished = (*wished).max(StopRequest::Stop(0))
                    }
                }
                *awaiting_reply -= 1;
            }
            // What the program did since the step's end is no part of any. The next step begins
            // here, before others hear of it: where ranks share cores, some may be through with
            // much of it when it is this one's turn.
            began = Instant::now();
            // Since the exchange more may have been wished here.
            Some(follows((*wished).max(shared.stopper.receive())))
        };
        let answer = patience.follow_rank_0(world, answer)?;
        self.began = began;
        Ok(answer)
    }

    /// Does what the program asks for at the end of `step`, with all other ranks.
    fn serve(&mut self, request: StepRequest, step: u64) -> Result<(), RankError> {
        let news = match request {
            StepRequest::Weights => {
                let exported = self.weights()?;
                let result = RankResult { exported, ..RankResult::default() };
                RankEvent::Weights(collect::to_rank_0(&*self.groups.world, result)?)
            }
            StepRequest::Evaluation => {
                let evaluator = self.evaluator.as_mut().expect("asked for where there is one");
                let mut asked = EvaluationRequests::of(None, StopRequest::GoOn);
                let evaluation =
                    evaluator.measure(self.groups, &mut self.executor, step, &mut asked)?;
                RankEvent::Evaluated(evaluation.expect("nothing is asked of it"))
            }
        };
        self.tell(news);
        Ok(())
    }

    /// This rank's part of the weights, where it is to give it.
    pub(super) fn weights(&self) -> CommResult<Vec<ParamExport>> {
        // Replicas and copies hold the same pieces.
        if self.groups.replica.rank() > 0 {
            return Ok(Vec::new());
        }
        let stages = self.executor.worker.sharded().iter().map(ShardedStage::export);
        Ok(stages.collect::<CommResult<Vec<_>>>()?.into_iter().flatten().collect())
    }
}
