//! One simulated worker: both machines and the smallest driver for them.

use std::collections::{BTreeMap, BTreeSet};

use tensorcall_proto::ids::{ForkId, Life, RRefId, Rank};
use tensorcall_proto::rref::{
    Found, Owner, OwnerCounts, OwnerEffect, RRefDesc, RRefError, RRefMessage, Received, User, UserCounts,
    UserEffect,
};

use crate::fault::Fault;
use crate::ledger::Ledger;
use crate::network::{Body, LinkKey, Network, Packet};
use crate::program::{Call, Run};
use crate::rng::Rng;
use crate::scenario::Scenario;

/// What all workers of a run share.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) scenario: Scenario,
    pub(crate) fault: Option<Fault>,
    pub(crate) rng: Rng,
    pub(crate) net: Network,
    pub(crate) ledger: Ledger,
}

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) life: Life,
    pub(crate) is_alive: bool,
    pub(crate) is_quitting: bool,
    pub(crate) owner: Owner<Value, u64>,
    pub(crate) user: User<u64>,
    ids: u64,
    /// The present life of each rank, as far as this worker knows.
    pub(crate) peers: BTreeMap<Rank, Life>,
    pub(crate) lost: BTreeSet<Life>,
    pub(crate) handles: Vec<Handle>,
    /// Handles inside values.
    pub(crate) values: BTreeMap<RRefId, Vec<Handle>>,
    pub(crate) calls: BTreeMap<u64, Call>,
    pub(crate) runs: BTreeMap<u64, Run>,
    pub(crate) last_called: Option<Rank>,
    /// For the faults: forks that are kept from the user machine, and those that were said once.
    muted: BTreeSet<ForkId>,
    said: BTreeSet<ForkId>,
}

/// A value is known by its reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Value(pub(crate) RRefId);

/// What a program has in its hands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handle {
    User { rref: RRefId, fork: ForkId, owner: Life },
    Owned { rref: RRefId },
}

impl Env {
    pub(crate) fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// A message is nowhere any more.
    pub(crate) fn vanish(&mut self, packet: &Packet) {
        let (Body::Call { rrefs, .. } | Body::Reply { rrefs, .. }) = &packet.body else { return };
        for desc in rrefs {
            self.ledger.landed(desc.fork);
        }
    }
}

impl Worker {
    pub(crate) fn new(life: Life) -> Self {
        Self {
            life,
            is_alive: true,
            is_quitting: false,
            owner: Owner::new(life),
            user: User::new(life),
            ids: 0,
            peers: BTreeMap::new(),
            lost: BTreeSet::new(),
            handles: Vec::new(),
            values: BTreeMap::new(),
            calls: BTreeMap::new(),
            runs: BTreeMap::new(),
            last_called: None,
            muted: BTreeSet::new(),
            said: BTreeSet::new(),
        }
    }

    pub(crate) fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }

    /// Shares a handle with `to`, in a message to be sent.
    pub(crate) fn pack(&mut self, env: &mut Env, handle: Handle, to: Life) -> Option<RRefDesc> {
        let fork = ForkId::new(self.life, self.next_id());
        let (packed, of) = match handle {
            Handle::User { fork: of, .. } => (self.user.fork_out(of, fork, to), Some(of)),
            Handle::Owned { rref } => (self.owner.fork_out(rref, fork, to), None),
        };
        let desc = packed.ok()?;
        env.ledger.shared(desc.rref, fork, of, to);
        if env.has(Fault::SharedButNotCounted) && of.is_none() {
            self.owner.unsent(fork);
        }
        Some(desc)
    }

    /// A message that was packed is sent, perhaps on a link that is known to be broken.
    pub(crate) fn send(&mut self, env: &mut Env, to: Life, link: LinkKey, generation: u64, body: Body) {
        if let Body::Call { rrefs, .. } | Body::Reply { rrefs, .. } = &body {
            let number = env.net.number(link, generation);
            for desc in rrefs {
                env.ledger.sent(desc.fork, link, generation);
                self.user.sent(desc.fork, number);
                self.owner.sent(desc.fork, number);
            }
        }
        let packet = Packet { from: self.life, to, link, generation, body };
        if let Some(lost) = env.net.send(&mut env.rng, &env.scenario, packet) {
            env.vanish(&lost);
        }
    }

    /// A message that was packed is not sent.
    pub(crate) fn unsend(&mut self, env: &mut Env, rrefs: &[RRefDesc]) {
        for desc in rrefs {
            env.ledger.landed(desc.fork);
            if !env.has(Fault::UnsentNotTold) {
                self.user.unsent(desc.fork);
                self.owner.unsent(desc.fork);
            }
        }
    }

    /// References arrive. What is gone already gives no handle.
    pub(crate) fn unpack(&mut self, env: &mut Env, rrefs: &[RRefDesc], from: Life) -> Vec<Handle> {
        rrefs.iter().filter_map(|&desc| self.unpack_one(env, desc, from)).collect()
    }

    fn unpack_one(&mut self, env: &mut Env, desc: RRefDesc, from: Life) -> Option<Handle> {
        let RRefDesc { rref, owner, fork } = desc;
        env.ledger.landed(fork);
        if owner == self.life {
            let found = self.owner.received_back(desc, from);
            if let Found::Gone(_) = found {
                env.ledger.check_gone(fork);
                return None;
            }
            env.ledger.owner_holds(rref);
            if env.has(Fault::HoldForgotten) {
                self.owner.release(rref);
            }
            return Some(Handle::Owned { rref });
        }
        if self.user.receive(desc, from) == Received::Ended {
            env.ledger.breaks("arrives once", || format!("{fork} was at {} before", self.life));
            return None;
        }
        env.ledger.hold(fork);
        if env.has(Fault::AcceptBeforeConfirmation) {
            self.user.handle_message(owner, RRefMessage::Known { fork, alive: true });
        }
        Some(Handle::User { rref, fork, owner })
    }

    /// A handle goes, at any time and in any state: as from a finalizer.
    pub(crate) fn release(&mut self, env: &mut Env, handle: Handle) {
        match handle {
            Handle::Owned { rref } => {
                env.ledger.owner_releases(rref);
                self.owner.release(rref);
            }
            Handle::User { fork, owner, .. } => {
                env.ledger.release(fork);
                let is_pending = self.user.standing(fork).is_some_and(|fork| !fork.confirmed);
                let too_early = match env.fault {
                    Some(Fault::DeleteBeforeConfirmation) => is_pending,
                    Some(Fault::DeleteWithPendingChild) => !is_pending,
                    _ => false,
                };
                if too_early {
                    self.say(env, owner, RRefMessage::Delete { fork });
                }
                if too_early && is_pending {
                    self.muted.insert(fork);
                }
                self.user.release(fork);
            }
        }
    }

    pub(crate) fn release_all(&mut self, env: &mut Env, handles: Vec<Handle>) {
        for handle in handles {
            self.release(env, handle);
        }
    }

    /// Takes handles in, unless the program wants none any more.
    pub(crate) fn keep(&mut self, env: &mut Env, handles: Vec<Handle>) {
        self.handles.extend(handles);
        if self.is_quitting {
            let handles = std::mem::take(&mut self.handles);
            self.release_all(env, handles);
        }
    }

    pub(crate) fn receive_rref(&mut self, env: &mut Env, from: Life, message: RRefMessage) {
        match message {
            RRefMessage::Fork { rref, fork } => {
                if env.has(Fault::ForkNotCounted) && env.rng.chance(30) {
                    env.ledger.counted(fork);
                    return self.say(env, from, RRefMessage::Known { fork, alive: true });
                }
                if env.has(Fault::ForkCountedTwice) && !self.said.insert(fork) {
                    self.owner.hold(rref);
                }
                env.ledger.counted(fork);
            }
            RRefMessage::Unknown { fork } => return self.receive_unknown(env, from, fork),
            RRefMessage::Known { fork, .. } => {
                if env.has(Fault::StrayCountIgnored) && self.user.standing(fork).is_none() {
                    return;
                }
                if self.muted.contains(&fork) {
                    return self.say(env, from, RRefMessage::Delete { fork });
                }
            }
            RRefMessage::Delete { fork } => {
                let is_known = self.owner.forks().any(|(_, known, _)| known == fork);
                if env.has(Fault::TombstoneForgotten) && !is_known {
                    return self.say(env, from, RRefMessage::Deleted { fork });
                }
            }
            RRefMessage::Rescind { .. } if env.has(Fault::NotRescinded) => return,
            RRefMessage::Accept { .. }
            | RRefMessage::Accepted { .. }
            | RRefMessage::Deleted { .. }
            | RRefMessage::Rescind { .. }
            | RRefMessage::AskAgain => {}
        }
        if !self.user.handle_message(from, message) {
            self.owner.handle_message(from, message);
        }
    }

    fn receive_unknown(&mut self, env: &mut Env, from: Life, fork: ForkId) {
        let stood_by = |worker: &Self| (worker.user.counts().pending_children, worker.owner.counts().forks);
        let before = stood_by(self);
        let message = RRefMessage::Unknown { fork };
        if !self.user.handle_message(from, message) {
            self.owner.handle_message(from, message);
        }
        if stood_by(self) != before
            && let Some((link, generation)) = env.ledger.way_of(fork)
            && env.net.is_broken(link, generation)
        {
            env.ledger.given_up(fork);
        }
    }

    pub(crate) fn link_broken(&mut self, env: &Env, peer: Life, number: u64) {
        if !env.has(Fault::NotSaidAgain) {
            self.user.handle_link_broken(peer, number);
            self.owner.handle_link_broken(peer, number);
        }
    }

    pub(crate) fn peer_lost(&mut self, env: &mut Env, mut about: Life) {
        if !self.lost.insert(about) {
            return;
        }
        if env.has(Fault::LivesConfused)
            && let Some(&present) = self.peers.get(&about.rank)
        {
            about = present;
        }
        if !env.has(Fault::LostChildrenKept) {
            self.user.handle_lost(about);
        }
        if !env.has(Fault::LostForksKept) {
            self.owner.handle_lost(about);
        }
        self.fail_calls(env, |call| call.to == about);
        self.drop_runs(env, about);
    }

    /// Another life of a worker is there.
    pub(crate) fn meet(&mut self, env: &mut Env, about: Life) {
        if self.lost.contains(&about) {
            return;
        }
        match self.peers.insert(about.rank, about) {
            Some(known) if known.incarnation > about.incarnation => {
                self.peers.insert(about.rank, known);
            }
            Some(known) if known != about => self.peer_lost(env, known),
            _ => {}
        }
    }

    /// Does what the machines ask for, and what follows from it.
    pub(crate) fn settle(&mut self, env: &mut Env) {
        loop {
            if let Some(effect) = self.user.poll_effect() {
                match effect {
                    UserEffect::Send(to, message) => self.say(env, to, message),
                    UserEffect::Confirmed(run) => self.start(env, run),
                    UserEffect::Unconfirmed(run, fork, error) => self.refuse(env, run, fork, error),
                }
            } else if let Some(effect) = self.owner.poll_effect() {
                match effect {
                    OwnerEffect::Send(to, message) => self.say(env, to, message),
                    OwnerEffect::Ready(run, value) => self.fetched(env, run, Some(value)),
                    OwnerEffect::Failed(run, _) => self.fetched(env, run, None),
                    OwnerEffect::Drop(Value(rref)) => {
                        env.ledger.dropped(rref);
                        let inside = self.values.remove(&rref).unwrap_or_default();
                        self.release_all(env, inside);
                    }
                }
            } else {
                return;
            }
        }
    }

    /// What must hold between events.
    pub(crate) fn check(&self, env: &mut Env) {
        for &handle in &self.handles {
            match handle {
                Handle::User { fork, .. } => match self.user.standing(fork).map(|fork| fork.error) {
                    Some(None | Some(RRefError::CreationFailed)) => {}
                    Some(Some(_)) => env.ledger.check_gone(fork),
                    None => env.ledger.breaks("early free", || format!("{fork} is held, but not here")),
                },
                Handle::Owned { rref } => {
                    if let Found::Gone(_) = self.owner.lookup(rref) {
                        env.ledger.check_own_gone(rref);
                    }
                }
            }
        }
    }

    /// What a wave is told (TERM-1).
    pub(crate) fn under_way(&self, env: &Env) -> usize {
        let reported = self.user.counts().unacknowledged + self.owner.counts().unacknowledged;
        let is_reported = !env.has(Fault::NothingReported);
        self.calls.len() + self.runs.len() + if is_reported { reported } else { 0 }
    }

    /// What is left when everything is over: nothing, if all is well.
    pub(crate) fn leftover(&self) -> Option<String> {
        let (user, owner) = (self.user.counts(), self.owner.counts());
        let is_clean = user == UserCounts::default() && owner == OwnerCounts::default();
        let forks: Vec<_> = self.owner.forks().chain(self.user.forks()).collect();
        (!is_clean).then(|| format!("{} ends with {owner:?}, {user:?}, {forks:?}\n", self.life))
    }

    /// What never ended.
    pub(crate) fn unfinished(&self) -> Option<String> {
        let Self { life, runs, calls, values, .. } = self;
        let is_done = runs.is_empty() && calls.is_empty() && values.is_empty();
        (!is_done).then(|| format!("{life} ends with {runs:?}, {calls:?}, {values:?}\n"))
    }

    fn say(&mut self, env: &mut Env, to: Life, message: RRefMessage) {
        let link = (self.life, to);
        let generation = env.net.generation(link, self.life);
        self.send(env, to, link, generation, Body::RRef(message));
    }
}
