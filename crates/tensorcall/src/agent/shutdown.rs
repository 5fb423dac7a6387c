//! Driving [`Termination`]: the group agrees that it is quiet; then closing.
//!
//! TERM-1 asks for all counts of one moment. They live under several locks, so they are read in an
//! order in which nothing can hide: outstanding calls and references, outcomes being handed over, callbacks, requests,
//! and the activity counter last. What moves from one count to another is added to the new one before
//! it is taken off the old one, or, where it moves against the order of reading, it counts as activity,
//! so that the next wave disagrees.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};
use tensorcall_proto::ids::{Identity, Rank};
use tensorcall_proto::termination::{
    Config, Counts, Effect, Termination, TerminationMessage, WaitReason, WaitingFor,
};
use tensorcall_proto::wire::message::{GoodbyeReason, Message};

use super::faults::FaultLine;
use super::members::{GroupKind, Members};
use super::peers::Peer;
use super::{Inner, LinkEntry};
use crate::clock::now;
use crate::error::{Error, ErrorKind, Result};
use crate::transport::{Link, Outbound, Transport};

/// How long an agent that closes lets functions end before its peers see it leave.
const LAST_WORDS: Duration = Duration::from_millis(50);

/// This worker's part in the group's agreement.
#[derive(Default)]
pub(super) struct Group {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    machine: Option<Termination>,
    /// Messages that came before the group was known.
    early: Vec<(Identity, TerminationMessage)>,
    /// Some thread is carrying out effects; it will see those added meanwhile.
    driving: bool,
    /// The last round that was found quiet.
    quiet: u64,
}

impl Group {
    pub(super) fn is_waiting(&self) -> bool {
        self.state.lock().machine.as_ref().is_some_and(Termination::is_waiting)
    }
}

impl Inner {
    /// The group is known. Members that were faster may have said something already.
    pub(super) fn start_group(&self) {
        let ranks = match self.members.get() {
            // Others come and go: each is quiet for itself.
            Some(members) if members.kind() == GroupKind::Dynamic => vec![self.me.rank],
            members => members.map(Members::ranks).unwrap_or_default(),
        };
        let machine = Termination::new(self.me.rank, ranks, Config::default());
        let early = {
            let mut state = self.group.state.lock();
            state.machine = Some(machine);
            std::mem::take(&mut state.early)
        };
        for (from, message) in early {
            self.group_message(&from, message);
        }
    }

    pub(super) fn quiesce(&self, leaving: bool, limit: Option<Instant>) -> Result<()> {
        let mut round = 0;
        self.with_group(|machine, now| round = machine.arrive(now, leaving));
        self.watch_links();
        let mut state = self.group.state.lock();
        while state.quiet < round {
            if self.is_closed() {
                return Err(Error::shutting_down());
            }
            match limit {
                None => self.group.changed.wait(&mut state),
                Some(limit) => {
                    if self.group.changed.wait_until(&mut state, limit).timed_out() && state.quiet < round {
                        let waiting =
                            state.machine.as_ref().map(Termination::waiting_for).unwrap_or_default();
                        drop(state);
                        return Err(self.not_quiet(&waiting));
                    }
                }
            }
        }
        Ok(())
    }

    fn not_quiet(&self, waiting: &[WaitingFor]) -> Error {
        let name = |rank: Rank| {
            self.peer(rank).map_or_else(|_| format!("rank {rank}"), |peer| format!("'{}'", peer.name()))
        };
        let describe = |waiting: &WaitingFor| match waiting.reason {
            WaitReason::NotArrived => format!("worker {} has not called shutdown", name(waiting.rank)),
            WaitReason::Busy(Some(counts)) => format!(
                "worker {} has {} unanswered calls and {} requests or callbacks",
                name(waiting.rank),
                counts.outstanding,
                counts.processing
            ),
            WaitReason::Busy(None) => format!("worker {} does not answer", name(waiting.rank)),
            WaitReason::Coordinator => {
                format!("worker {} has not said that the group is quiet", name(waiting.rank))
            }
        };
        let shown: Vec<_> = waiting.iter().take(8).map(describe).collect();
        let more = if waiting.len() > 8 { format!(" and {} more", waiting.len() - 8) } else { String::new() };
        Error::new(
            ErrorKind::Timeout,
            format!("the group did not become quiet in time: {}{more}", shown.join("; ")),
        )
    }

    /// From now on silence of any connected peer is noticed, not only of those that owe an answer.
    fn watch_links(&self) {
        let at = now() + self.config.keepalive;
        for peer in self.peers() {
            peer.state.lock().keep_alive_at.get_or_insert(at);
        }
        self.schedule(at);
    }

    pub(super) fn group_message(&self, from: &Identity, message: TerminationMessage) {
        {
            let mut state = self.group.state.lock();
            if state.machine.is_none() {
                state.early.push((from.clone(), message));
                return;
            }
        }
        if self.peer_in_life(from).is_some() {
            self.with_group(|machine, now| machine.handle_message(now, from.rank, message));
        }
    }

    pub(super) fn group_gone(&self, rank: Rank, left: bool) {
        self.with_group(|machine, now| {
            if left { machine.handle_goodbye(now, rank) } else { machine.handle_lost(now, rank) }
        });
    }

    /// The link to a peer broke, and the peer may live: finds out, and says again what may be lost.
    pub(super) fn reach_again(&self, peer: &Arc<Peer>) {
        let said = peer.state.lock().said.clone();
        if said.is_empty() {
            self.reach(peer);
        }
        for message in said {
            self.post(peer, Outbound::plain(Message::Termination(message)));
        }
    }

    pub(super) fn tick_group(&self, now: Instant) {
        self.with_group(|machine, _| machine.handle_timeout(now));
    }

    /// Something ended: if a wave waits for this worker, it counts again.
    pub(super) fn became_idle(&self) {
        if self.group.is_waiting() {
            self.with_group(|machine, _| machine.handle_idle());
        }
    }

    /// Tells the machine something, then does what it asks for. Effects are carried out by one thread
    /// at a time and in order; a thread that finds another one at it leaves its effects to that one.
    fn with_group(&self, tell: impl FnOnce(&mut Termination, Instant)) {
        let mut state = self.group.state.lock();
        let Some(machine) = &mut state.machine else { return };
        tell(machine, now());
        if std::mem::replace(&mut state.driving, true) {
            return;
        }
        while let Some(effect) = state.machine.as_mut().and_then(Termination::poll_effect) {
            if let Effect::Quiet { round, .. } = effect {
                state.quiet = round;
                self.group.changed.notify_all();
                continue;
            }
            drop(state);
            let counts = self.carry_out(effect);
            state = self.group.state.lock();
            if let (Some(counts), Some(machine)) = (counts, &mut state.machine) {
                machine.handle_counts(now(), counts);
            }
        }
        state.driving = false;
        let deadline = state.machine.as_ref().and_then(Termination::next_deadline);
        drop(state);
        if let Some(deadline) = deadline {
            self.schedule(deadline);
        }
    }

    fn carry_out(&self, effect: Effect) -> Option<Counts> {
        match effect {
            Effect::Send(rank, message) => {
                if let Ok(peer) = self.peer(rank) {
                    peer.state.lock().says(&message);
                    self.post(&peer, Outbound::plain(Message::Termination(message)));
                }
            }
            Effect::Watch(rank) => {
                if let Ok(peer) = self.peer(rank) {
                    self.reach(&peer);
                }
            }
            Effect::PeerGone(rank) => self.declare_lost(rank),
            Effect::TakeCounts => return Some(self.counts()),
            Effect::Quiet { .. } => {}
        }
        None
    }

    /// See the module for why this order.
    fn counts(&self) -> Counts {
        let peers = self.peers();
        let outstanding: usize = peers.iter().map(|peer| peer.state.lock().calls.unanswered()).sum();
        let outstanding = outstanding + self.rrefs_outstanding();
        let held = self.fault_line.as_ref().map_or(0, FaultLine::held);
        let completing = self.completing.load(Ordering::SeqCst);
        let tasks = self.pool.counts().tasks + self.passes();
        let (serving, received) = {
            let serving = self.serving.lock();
            (serving.len(), serving.total())
        };
        let started: u64 = peers.iter().map(|peer| peer.state.lock().calls.started()).sum();
        Counts {
            outstanding: (outstanding + held) as u64,
            processing: completing + (tasks + serving) as u64,
            activity: started + received + self.rref_activity(),
        }
    }

    pub(super) fn close(&self, graceful: bool, limit: Instant) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.pool.stop();
        // The answer of a function that is about to end is sent yet: it may be what made this worker leave.
        self.pool.wait_ended(limit.min(now() + LAST_WORDS));
        self.close_passes();
        self.fail_own_calls();
        self.close_rrefs();
        drop(self.group.state.lock());
        self.group.changed.notify_all();
        let reason = if graceful { GoodbyeReason::Graceful } else { GoodbyeReason::Forced };
        for link in self.open_links(|_| true) {
            link.send(Outbound::plain(Message::Goodbye { reason }));
        }
        self.transports().for_each(|transport| transport.stop(limit));
        self.links.lock().clear();
    }

    pub(super) fn leave_group(&self, limit: Instant) {
        let Some(group) = self.transports.get().and_then(|transports| transports.group.as_ref()) else {
            return;
        };
        for link in self.open_links(|identity| *identity != self.me) {
            link.send(Outbound::plain(Message::Goodbye { reason: GoodbyeReason::Forced }));
        }
        group.stop(limit);
    }

    fn fail_own_calls(&self) {
        for peer in self.peers() {
            let failed = peer.state.lock().calls.fail_all();
            for (_, ticket, _) in failed {
                self.settle(ticket, Err(Error::shutting_down()));
            }
            peer.room.notify_all();
        }
    }

    /// The links with workers that `with` says yes to.
    fn open_links(&self, with: impl Fn(&Identity) -> bool) -> Vec<Arc<dyn Link>> {
        let accepted = |entry: &LinkEntry| match entry {
            LinkEntry::Accepted(peer, link) if with(peer) => Some(Arc::clone(link)),
            _ => None,
        };
        let mut links: Vec<_> = self.links.lock().values().filter_map(accepted).collect();
        let peers = self.peers().into_iter().filter(|peer| with(&peer.info.identity));
        links.extend(peers.flat_map(|peer| peer.state.lock().links()));
        links
    }
}
