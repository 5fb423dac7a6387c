//! Messages that came together: what they bring about is done together, with one lock and one wake-up for all.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tensorcall_proto::wire::message::{FailureKind, Outcome, Phase, Reply};

use super::Inner;
use super::peers::{Peer, Ticket};
use super::pool::Job;
use crate::body::Received;
use crate::error::{Error, Result};
use crate::future::{Response, Wakes};

/// What is left to do of a burst. What is no call and no answer comes in its turn: first [`Inner::finish_burst`] this.
#[derive(Default)]
pub(super) struct Burst {
    /// Requests that can start, each with whether it is nested.
    pub(super) jobs: Vec<(bool, Job)>,
    pub(super) replies: Vec<(Reply, Received)>,
}

impl Inner {
    /// Does what is left to do; `peer` is who answered.
    pub(super) fn finish_burst(&self, burst: &mut Burst, peer: Option<&Arc<Peer>>) {
        if !burst.jobs.is_empty()
            && let Some(check) = self.pool.submit(burst.jobs.drain(..))
        {
            self.schedule(check);
        }
        if let Some(peer) = peer
            && !burst.replies.is_empty()
        {
            self.received_replies(peer, &mut burst.replies);
        }
    }

    fn received_replies(&self, peer: &Arc<Peer>, replies: &mut Vec<(Reply, Received)>) {
        // In sight of the waves (see `shutdown`).
        self.completing.fetch_add(1, Ordering::SeqCst);
        let mut finished = Vec::with_capacity(replies.len());
        {
            let mut state = peer.state.lock();
            for (reply, body) in replies.drain(..) {
                let (ticket, given_up) = (state.calls.finish(reply.id), state.given_up.remove(&reply.id));
                finished.push((ticket, given_up, reply, body));
            }
        }
        let mut settled = Vec::with_capacity(finished.len());
        for (ticket, given_up, reply, body) in finished {
            if let Some(fork) = given_up {
                self.late_creation(fork, peer.life());
            }
            match ticket {
                Some(ticket) => {
                    let outcome = outcome_of(peer, reply, body, &ticket);
                    settled.push(self.settle_quietly(ticket, outcome));
                }
                None => {
                    tracing::debug!(peer = %peer.info.identity, message_id = %reply.id, kind = "reply", "late reply dropped");
                }
            }
        }
        // When all outcomes are there: whoever is woken by the first finds the others too.
        let tasks: Vec<_> = settled.into_iter().flatten().flat_map(Wakes::wake_threads).collect();
        self.errands.tasks.wake_all(tasks);
        self.completing.fetch_sub(1, Ordering::SeqCst);
        peer.room.notify_all();
        self.became_idle();
    }
}

fn outcome_of(peer: &Peer, reply: Reply, body: Received, ticket: &Ticket) -> Result<Response> {
    match reply.outcome {
        Outcome::Returned { encoding, autograd } => {
            let body = Received { autograd, ..body };
            Ok(Response { raised: false, encoding, body })
        }
        Outcome::Raised { encoding } => Ok(Response { raised: true, encoding, body }),
        // Whoever of the two notices first that the time is over, it is the same error.
        Outcome::Failed { kind: FailureKind::Expired, .. } => {
            Err(Error::timeout(peer.name(), &ticket.function, ticket.timeout, Phase::Waiting))
        }
        Outcome::Failed { kind, text } => Err(Error::failure(peer.name(), kind, &text)),
    }
}
