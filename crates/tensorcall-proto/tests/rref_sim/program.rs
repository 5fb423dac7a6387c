//! What simulated programs do with references: make, pass on, fetch and drop them.

use tensorcall_proto::ids::{ForkId, Life, RRefId};
use tensorcall_proto::rref::{Created, Found, NewRRef, RRefDesc, RRefError, Wait};

use crate::fault::Fault;
use crate::network::{Body, Event, LinkKey, Outcome, What};
use crate::worker::{Env, Handle, Value, Worker};

/// A call that is not answered.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) to: Life,
    generation: u64,
    what: What,
    /// Whether the caller waits for it; else only its answer is owed.
    is_waited_for: bool,
    /// What the caller holds for the time of the call.
    handle: Option<Handle>,
}

/// A request that waits or runs.
#[derive(Debug)]
pub(crate) struct Run {
    from: Life,
    id: u64,
    link: LinkKey,
    generation: u64,
    what: What,
    handles: Vec<Handle>,
    is_running: bool,
}

impl Worker {
    /// The program does something.
    pub(crate) fn act(&mut self, env: &mut Env) {
        if self.is_quitting {
            return;
        }
        match env.rng.below(100) {
            0..8 => self.make_local(env),
            8..40 => self.remote(env),
            40..65 => self.pass(env),
            65..80 => self.fetch(env),
            _ => {
                if let Some(handle) = self.take_handle(env) {
                    self.release(env, handle);
                }
            }
        }
    }

    /// The program drops all it has.
    pub(crate) fn quit(&mut self, env: &mut Env) {
        self.is_quitting = true;
        self.keep(env, Vec::new());
    }

    fn make_local(&mut self, env: &mut Env) {
        let rref = RRefId::new(self.life, self.next_id());
        env.ledger.new_rref(rref, self.life);
        env.ledger.made(rref);
        env.ledger.owner_holds(rref);
        self.owner.create_local(rref, Value(rref));
        self.handles.push(Handle::Owned { rref });
    }

    fn remote(&mut self, env: &mut Env) {
        let to = self.somebody(env, None);
        let rref = RRefId::new(self.life, self.next_id());
        env.ledger.new_rref(rref, to);
        if to == self.life {
            env.ledger.owner_holds(rref);
            self.owner.create_pending(rref);
            self.handles.push(Handle::Owned { rref });
            let delay = env.rng.between(1, env.scenario.delay);
            env.net.after(delay, Event::Made { at: self.life, rref });
            return;
        }
        let fork = ForkId::new(self.life, self.next_id());
        let new = NewRRef { rref, fork };
        env.ledger.created(rref, fork, self.life);
        self.user.create(new, to);
        let rrefs = self.pack_some(env, to);
        if env.rng.chance(env.scenario.unsent) {
            self.unsend(env, &rrefs);
            self.user.unsent(fork);
            env.ledger.never(rref);
        } else {
            self.call(env, to, What::Create(new), rrefs, None);
        }
        self.handles.push(Handle::User { rref, fork, owner: to });
    }

    fn pass(&mut self, env: &mut Env) {
        let to = self.somebody(env, self.handles.last().copied());
        let rrefs = self.pack_some(env, to);
        if env.rng.chance(env.scenario.unsent) {
            self.unsend(env, &rrefs);
        } else {
            self.call(env, to, What::Run, rrefs, None);
        }
    }

    fn fetch(&mut self, env: &mut Env) {
        let Some(handle) = self.take_handle(env) else { return };
        match handle {
            Handle::User { rref, fork, owner } => {
                if self.user.standing(fork).is_some_and(|fork| fork.error.is_none()) {
                    self.call(env, owner, What::Fetch(rref), Vec::new(), Some(handle));
                } else {
                    self.handles.push(handle);
                }
            }
            Handle::Owned { rref } => {
                if let Found::Gone(_) = self.owner.lookup(rref) {
                    env.ledger.check_own_gone(rref);
                }
                self.handles.push(handle);
            }
        }
    }

    fn call(&mut self, env: &mut Env, to: Life, what: What, rrefs: Vec<RRefDesc>, handle: Option<Handle>) {
        let id = self.next_id();
        self.last_called = Some(to.rank);
        let generation = env.net.generation((self.life, to), self.life);
        self.calls.insert(id, Call { to, generation, what, is_waited_for: true, handle });
        if self.lost.contains(&to) {
            self.unsend(env, &rrefs);
            return self.fail_calls(env, |call| call.to == to);
        }
        self.send(env, to, (self.life, to), generation, Body::Call { id, what, rrefs });
        if env.rng.chance(env.scenario.timeouts) {
            let patience = env.rng.between(1, 6 * env.scenario.delay);
            env.net.after(patience, Event::Timeout { at: self.life, call: id });
        }
    }

    /// The caller waits no longer; the answer is still owed.
    pub(crate) fn give_up(&mut self, env: &mut Env, id: u64) {
        let Some(call) = self.calls.get_mut(&id).filter(|call| call.is_waited_for) else { return };
        call.is_waited_for = false;
        let (what, handle) = (call.what, call.handle.take());
        self.call_failed(env, what, handle);
    }

    /// Calls that are never answered.
    pub(crate) fn fail_calls(&mut self, env: &mut Env, which: impl Fn(&Call) -> bool) {
        let failed: Vec<u64> = self.calls.iter().filter(|(_, call)| which(call)).map(|(&id, _)| id).collect();
        for id in failed {
            if let Some(call) = self.calls.remove(&id).filter(|call| call.is_waited_for) {
                self.call_failed(env, call.what, call.handle);
            }
        }
    }

    /// The calls on a link of this worker's own are lost with it.
    pub(crate) fn fail_calls_on(&mut self, env: &mut Env, link: LinkKey, generation: u64) {
        if link.0 == self.life {
            self.fail_calls(env, |call| call.to == link.1 && call.generation <= generation);
        }
    }

    fn call_failed(&mut self, env: &mut Env, what: What, handle: Option<Handle>) {
        if let What::Create(NewRRef { fork, .. }) = what {
            self.user.creation_failed(fork);
        }
        self.keep(env, handle.into_iter().collect());
    }

    /// A request arrives.
    pub(crate) fn receive_call(&mut self, env: &mut Env, from: Life, run: Run, rrefs: &[RRefDesc]) {
        if env.rng.chance(env.scenario.unread) {
            if !env.has(Fault::UnreadNotRegistered) {
                let handles = self.unpack(env, rrefs, from);
                self.release_all(env, handles);
            }
            if let What::Create(NewRRef { rref, .. }) = run.what {
                env.ledger.never(rref);
            }
            return self.answer(env, &run, Outcome::NotRun, Vec::new());
        }
        let mut run = run;
        run.handles = self.unpack(env, rrefs, from);
        match run.what {
            What::Run => {}
            What::Create(NewRRef { rref, fork }) => {
                if self.owner.create(rref, fork, from) != Created::New {
                    env.ledger.never(rref);
                    self.release_all(env, std::mem::take(&mut run.handles));
                    return self.answer(env, &run, Outcome::NotRun, Vec::new());
                }
                env.ledger.counted(fork);
            }
            What::Fetch(rref) => return self.serve_fetch(env, rref, run),
        }
        let key = self.next_id();
        let users = run.handles.iter().filter_map(|handle| match handle {
            Handle::User { fork, .. } => Some(*fork),
            Handle::Owned { .. } => None,
        });
        let users: Vec<ForkId> = users.collect();
        self.runs.insert(key, run);
        let at_once = env.has(Fault::RunsUnconfirmed);
        if let Some(key) = if at_once { Some(key) } else { self.user.when_confirmed(&users, key) } {
            self.start(env, key);
        }
    }

    /// The arguments of a request are confirmed.
    pub(crate) fn start(&mut self, env: &mut Env, key: u64) {
        let Some(run) = self.runs.get_mut(&key).filter(|run| !run.is_running) else { return };
        run.is_running = true;
        for handle in &run.handles {
            if let Handle::User { fork, .. } = handle {
                env.ledger.check_confirmed(*fork);
            }
        }
        let duration = env.rng.between(1, 2 * env.scenario.delay);
        env.net.after(duration, Event::Ran { at: self.life, run: key });
    }

    /// An argument of a request is of no use.
    pub(crate) fn refuse(&mut self, env: &mut Env, key: u64, fork: ForkId, _: RRefError) {
        env.ledger.check_gone(fork);
        if let Some(run) = self.runs.remove(&key) {
            self.drop_run(env, run);
        }
    }

    /// A function is done: it keeps some of what it was given, and returns some.
    pub(crate) fn ran(&mut self, env: &mut Env, key: u64) {
        let Some(mut run) = self.runs.remove(&key) else { return };
        let (mut kept, mut inside, mut returned, mut dropped) = (vec![], vec![], vec![], vec![]);
        for handle in std::mem::take(&mut run.handles) {
            let place = [&mut kept, &mut inside, &mut returned, &mut dropped];
            place[env.rng.index(4)].push(handle);
        }
        let is_wanted = !self.lost.contains(&run.from);
        if let What::Create(NewRRef { rref, .. }) = run.what {
            env.ledger.made(rref);
            self.values.insert(rref, inside);
            self.owner.resolve(rref, Value(rref));
        } else {
            kept.extend(inside);
        }
        let rrefs = if is_wanted {
            returned.iter().filter_map(|&handle| self.pack(env, handle, run.from)).collect()
        } else {
            Vec::new()
        };
        self.answer(env, &run, Outcome::Done, rrefs);
        self.keep(env, kept);
        self.release_all(env, returned);
        self.release_all(env, dropped);
    }

    /// A value that this worker makes on itself is there.
    pub(crate) fn made(&mut self, env: &mut Env, rref: RRefId) {
        env.ledger.made(rref);
        self.owner.resolve(rref, Value(rref));
    }

    /// One life of a caller is gone: what has not begun does not run.
    pub(crate) fn drop_runs(&mut self, env: &mut Env, caller: Life) {
        let waiting = self.runs.iter().filter(|(_, run)| run.from == caller && !run.is_running);
        let waiting: Vec<u64> = waiting.map(|(&key, _)| key).collect();
        for key in waiting {
            if let Some(run) = self.runs.remove(&key) {
                self.drop_run(env, run);
            }
        }
    }

    fn drop_run(&mut self, env: &mut Env, mut run: Run) {
        if let What::Create(NewRRef { rref, .. }) = run.what {
            env.ledger.never(rref);
            if !env.has(Fault::AbandonedNotTold) {
                self.owner.abandon(rref);
            }
        }
        if let What::Fetch(rref) = run.what {
            self.owner.cancel_wait(rref, |&waiter| !self.runs.contains_key(&waiter));
        }
        self.release_all(env, std::mem::take(&mut run.handles));
        self.answer(env, &run, Outcome::NotRun, Vec::new());
    }

    fn serve_fetch(&mut self, env: &mut Env, rref: RRefId, run: Run) {
        let key = self.next_id();
        self.runs.insert(key, run);
        match self.owner.wait(rref, key) {
            Wait::Ready(key, value) => self.fetched(env, key, Some(value)),
            Wait::Gone(key, _) => self.fetched(env, key, None),
            Wait::Waiting => {
                let patience = env.rng.between(1, 20 * env.scenario.delay);
                env.net.after(patience, Event::Expire { at: self.life, rref, run: key });
            }
        }
    }

    /// A value that was asked for is there, with the references in it, or is gone.
    pub(crate) fn fetched(&mut self, env: &mut Env, key: u64, value: Option<Value>) {
        let Some(run) = self.runs.remove(&key) else { return };
        let Some(Value(rref)) = value else {
            return self.answer(env, &run, Outcome::Gone, Vec::new());
        };
        let inside = self.values.get(&rref).cloned().unwrap_or_default();
        let rrefs = inside.into_iter().filter_map(|handle| self.pack(env, handle, run.from)).collect();
        self.answer(env, &run, Outcome::Done, rrefs);
    }

    /// A fetch waits no longer.
    pub(crate) fn expire(&mut self, env: &mut Env, rref: RRefId, key: u64) {
        for key in self.owner.cancel_wait(rref, |&waiter| waiter == key) {
            if let Some(run) = self.runs.remove(&key) {
                self.answer(env, &run, Outcome::NotRun, Vec::new());
            }
        }
    }

    fn answer(&mut self, env: &mut Env, run: &Run, outcome: Outcome, rrefs: Vec<RRefDesc>) {
        if self.lost.contains(&run.from) {
            return self.unsend(env, &rrefs);
        }
        let body = Body::Reply { id: run.id, outcome, rrefs };
        self.send(env, run.from, run.link, run.generation, body);
    }

    /// An answer arrives, perhaps late.
    pub(crate) fn receive_reply(
        &mut self,
        env: &mut Env,
        from: Life,
        id: u64,
        outcome: Outcome,
        rrefs: &[RRefDesc],
    ) {
        let handles = self.unpack(env, rrefs, from);
        let Some(call) = self.calls.remove(&id) else {
            return self.release_all(env, handles);
        };
        match call.what {
            What::Create(NewRRef { fork, .. })
                if outcome == Outcome::Done
                    && (call.is_waited_for || !env.has(Fault::TombstoneForgotten)) =>
            {
                self.user.creation_done(fork, from);
            }
            What::Fetch(_) if outcome == Outcome::Gone => {
                if let Some(Handle::User { fork, .. }) = call.handle {
                    env.ledger.check_gone(fork);
                }
            }
            _ => {}
        }
        if !call.is_waited_for {
            return self.release_all(env, handles);
        }
        if outcome == Outcome::NotRun {
            self.call_failed(env, call.what, call.handle);
        } else {
            self.keep(env, call.handle.into_iter().collect());
        }
        self.keep(env, handles);
    }

    /// Up to three references, each of which the program may have in its hands afterwards or not.
    fn pack_some(&mut self, env: &mut Env, to: Life) -> Vec<RRefDesc> {
        let mut rrefs = Vec::new();
        for _ in 0..env.rng.below(4) {
            let Some(handle) = self.take_handle(env) else { break };
            rrefs.extend(self.pack(env, handle, to));
            if env.rng.chance(50) {
                self.release(env, handle);
            } else {
                self.handles.push(handle);
            }
        }
        rrefs
    }

    fn take_handle(&mut self, env: &mut Env) -> Option<Handle> {
        if self.handles.is_empty() {
            return None;
        }
        let index = env.rng.index(self.handles.len());
        Some(self.handles.swap_remove(index))
    }

    /// Anybody, this worker included, whom it does not know to be lost.
    fn somebody(&mut self, env: &mut Env, about: Option<Handle>) -> Life {
        if env.rng.chance(env.scenario.homing) {
            let last = self.last_called.and_then(|rank| self.peers.get(&rank).copied());
            let home = match about {
                Some(Handle::User { owner, .. }) => Some(owner),
                _ => last,
            };
            if let Some(home) = home.filter(|home| !self.lost.contains(home)) {
                return home;
            }
        }
        let peers: Vec<Life> =
            self.peers.values().copied().filter(|peer| !self.lost.contains(peer)).collect();
        let index = env.rng.index(peers.len() + 1);
        peers.get(index).copied().unwrap_or(self.life)
    }
}

impl Run {
    pub(crate) fn new(from: Life, id: u64, link: LinkKey, generation: u64, what: What) -> Self {
        Self { from, id, link, generation, what, handles: Vec::new(), is_running: false }
    }
}
