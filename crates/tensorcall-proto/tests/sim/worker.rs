//! One simulated worker: the real state machines and the smallest driver that makes calls with them.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use tensorcall_proto::ids::{Incarnation, MessageId, Rank};
use tensorcall_proto::in_flight::{InFlight, Window};
use tensorcall_proto::serving::{CancelOutcome, RequestKey, Serving, Start};
use tensorcall_proto::termination::{Counts, Termination};
use tensorcall_proto::wire::message::Phase;

use crate::fault::Fault;
use crate::ledger::{Ledger, Uid};
use crate::network::{Body, Event, Life, Network, Packet};
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
    /// The last round and wave of each coordinator, for [`Fault::StaleReportAccepted`].
    pub(crate) waves: BTreeMap<Rank, (u64, u64)>,
    /// What virtual time counts from.
    pub(crate) origin: Instant,
}

#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) life: Life,
    pub(crate) state: State,
    pub(crate) termination: Option<Termination>,
    /// Rounds that are over.
    pub(crate) rounds: u64,
    peers: BTreeMap<Rank, Peer>,
    serving: Serving<Request>,
    ready: VecDeque<RequestKey>,
    frames: BTreeMap<RequestKey, Frame>,
    /// Pool threads at work.
    working: usize,
    /// Callbacks that are due.
    callbacks: u64,
    activity: u64,
    timer: Option<u64>,
    /// Calls that ended and whose consequences have not been seen to.
    completed: VecDeque<Purpose>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Alive,
    Left,
    Dead,
}

#[derive(Debug)]
struct Peer {
    life: Life,
    is_lost: bool,
    in_flight: InFlight<Token>,
    /// Calls held back by the window.
    held: VecDeque<Held>,
    /// Completed without having been taken out or answered: only faults look here.
    remembered: BTreeMap<MessageId, Token>,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    uid: Uid,
    purpose: Purpose,
}

/// What the end of a call leads to.
#[derive(Debug, Clone, Copy)]
enum Purpose {
    /// A callback, perhaps, which may make so many calls.
    Callback { fuel: u64 },
    /// A running function goes on.
    Child { of: RequestKey },
}

#[derive(Debug)]
struct Held {
    token: Token,
    deadline: Option<u64>,
    bytes: u64,
    fuel: u64,
}

#[derive(Debug)]
pub(crate) struct Request {
    uid: Uid,
    fuel: u64,
    deadline: Option<u64>,
}

/// A function that runs.
#[derive(Debug)]
struct Frame {
    uid: Uid,
    fuel: u64,
    /// Nested calls that it waits for.
    children: usize,
}

impl Env {
    pub(crate) fn instant(&self, at: u64) -> Instant {
        self.origin + Duration::from_micros(at)
    }

    pub(crate) fn now(&self) -> Instant {
        self.instant(self.net.now)
    }

    pub(crate) fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    pub(crate) fn send(&mut self, from: Life, to: Life, body: Body) {
        self.net.send(&mut self.rng, &self.scenario, Packet { from, to, body });
    }

    /// `at` will notice that its connection to `about` is gone.
    pub(crate) fn notice(&mut self, at: Life, about: Life) {
        let delay = self.rng.between(1, self.scenario.notice);
        self.net.after(delay, Event::Notice { at, about });
    }

    fn micros(&self, at: Instant) -> u64 {
        u64::try_from(at.duration_since(self.origin).as_micros()).unwrap_or(u64::MAX)
    }
}

impl Worker {
    pub(crate) fn new(life: Life, termination: Option<Termination>) -> Self {
        Self {
            life,
            state: State::Alive,
            termination,
            rounds: 0,
            peers: BTreeMap::new(),
            serving: Serving::new(),
            ready: VecDeque::new(),
            frames: BTreeMap::new(),
            working: 0,
            callbacks: 0,
            activity: 0,
            timer: None,
            completed: VecDeque::new(),
        }
    }

    /// A detached call to anybody, made by the program, a callback or a function that does not wait.
    pub(crate) fn call_somebody(&mut self, env: &mut Env, fuel: u64) {
        if let Some(to) = self.somebody(env) {
            let fuel = fuel.saturating_sub(1);
            let is_baton = env.rng.chance(env.scenario.batons);
            let callback = if is_baton { 0 } else { env.rng.below(fuel + 1) };
            self.call(env, to, Purpose::Callback { fuel: callback }, fuel - callback, false);
        }
        self.settle(env);
    }

    pub(crate) fn callback(&mut self, env: &mut Env, fuel: u64) {
        self.callbacks -= 1;
        let calls = env.rng.between(1, fuel.min(2));
        for _ in 0..calls {
            self.call_somebody(env, fuel / calls);
        }
    }

    pub(crate) fn user_cancel(&mut self, env: &mut Env, peer: Rank, id: MessageId) {
        let Some(peer) = self.peers.get_mut(&peer).filter(|peer| !peer.is_lost) else { return };
        if let Some(token) = peer.in_flight.abandon(id) {
            let to = peer.life;
            peer.remembered.insert(id, token);
            env.send(self.life, to, Body::Cancel { id });
            self.complete(env, token);
        }
        self.settle(env);
    }

    pub(crate) fn receive_call(&mut self, env: &mut Env, from: Life, id: MessageId, request: Request) {
        let key = key(env, from, id);
        let deadline = request.deadline.filter(|_| !env.has(Fault::ExpiredRequestRuns));
        let deadline = deadline.map(|at| env.instant(at));
        self.activity += 1;
        match self.serving.admit(key, deadline, request) {
            Ok(()) => self.ready.push_back(key),
            Err(error) => env.ledger.breaks("LIFE-1", || format!("at {}: {error}", self.life)),
        }
        self.settle(env);
    }

    pub(crate) fn receive_reply(&mut self, env: &mut Env, from: Life, id: MessageId, uid: Uid) {
        let Some(peer) = self.peers.get_mut(&from.rank) else { return };
        let mut token = peer.in_flight.finish(id);
        if env.has(Fault::LateReplyDelivered) {
            token = token.or_else(|| peer.remembered.remove(&id));
        }
        if let Some(token) = token {
            env.ledger.check_reply(token.uid, uid);
            self.complete(env, token);
        }
        self.settle(env);
    }

    pub(crate) fn receive_cancel(&mut self, env: &mut Env, from: Life, id: MessageId) {
        let key = key(env, from, id);
        if let CancelOutcome::Waiting(request) = self.serving.cancel(key) {
            self.reply(env, key, request.uid);
        }
        self.settle(env);
    }

    /// A function has computed for a while: it calls others, or is done.
    pub(crate) fn computed(&mut self, env: &mut Env, key: RequestKey) {
        self.working -= 1;
        let is_cancelled = self.serving.is_cancelled(key);
        let Some(frame) = self.frames.get_mut(&key) else { return };
        let fuel = if is_cancelled { 0 } else { std::mem::take(&mut frame.fuel) };
        let detached = if env.rng.chance(env.scenario.batons) { fuel } else { 0 };
        let nested = fuel - detached;
        if detached > 0 {
            self.call_somebody(env, detached);
        }
        let children = env.rng.between(1, 3).min(nested);
        for _ in 0..children {
            let Some(to) = self.somebody(env) else { break };
            if let Some(frame) = self.frames.get_mut(&key) {
                frame.children += 1;
            }
            self.call(env, to, Purpose::Child { of: key }, nested / children - 1, true);
        }
        self.finish_if_done(env, key);
        self.settle(env);
    }

    /// The connection to `about` is gone, or is to be.
    pub(crate) fn lose(&mut self, env: &mut Env, about: Life) {
        let peer = self.peer(env, about);
        if peer.life != about || peer.is_lost {
            return;
        }
        peer.is_lost = true;
        let keeps = env.has(Fault::LossCompletesTwice);
        let failed = if keeps { Vec::new() } else { peer.in_flight.fail_all() };
        let mut tokens: Vec<Token> = failed.into_iter().map(|(_, token, _)| token).collect();
        tokens.extend(peer.held.drain(..).map(|held| held.token));
        if keeps {
            tokens.extend(std::mem::take(&mut peer.remembered).into_values());
        }
        if !env.has(Fault::LostPeersRequestsRun) {
            self.serving.peer_lost(about.rank, incarnation(env, about));
        }
        for token in tokens {
            self.complete(env, token);
        }
        // Closing the connection is noticed at the other end.
        env.notice(about, self.life);
        self.settle(env);
    }

    /// Another life of a worker is there.
    pub(crate) fn meet(&mut self, env: &mut Env, about: Life) {
        let known = self.peer(env, about).life;
        if known.incarnation < about.incarnation {
            self.lose(env, known);
            self.peers.insert(about.rank, Peer::new(env, about));
        }
    }

    /// Whether messages of `life` are listened to.
    pub(crate) fn has_dropped(&self, life: Life) -> bool {
        self.peers.get(&life.rank).is_some_and(|peer| peer.life > life || (peer.life == life && peer.is_lost))
    }

    pub(crate) fn expire(&mut self, env: &mut Env) {
        self.timer = None;
        let now = env.net.now;
        let instant = env.now();
        let mut ended = Vec::new();
        for peer in self.peers.values_mut() {
            for expired in peer.in_flight.expire(instant) {
                peer.remembered.insert(expired.id, expired.token);
                if !peer.is_lost && expired.phase == Phase::Sent {
                    env.net.send(
                        &mut env.rng,
                        &env.scenario,
                        Packet { from: self.life, to: peer.life, body: Body::Cancel { id: expired.id } },
                    );
                }
                ended.push(expired.token);
            }
            peer.held.retain(|held| {
                let is_over = held.deadline.is_some_and(|deadline| deadline <= now);
                if is_over {
                    ended.push(held.token);
                }
                !is_over
            });
        }
        for token in ended {
            self.complete(env, token);
        }
        if let Some(termination) = &mut self.termination {
            termination.handle_timeout(instant);
        }
        self.settle(env);
    }

    /// What a wave is told.
    pub(crate) fn counts(&self, env: &Env) -> Counts {
        let mut counts = self.true_counts();
        match env.fault {
            Some(Fault::FrozenActivity) => counts.activity = 0,
            Some(Fault::ProcessingNotReported) => counts.processing = 0,
            Some(Fault::AbandonedNotReported) => {
                let waited = self.peers.values().map(|peer| peer.in_flight.len() + peer.held.len());
                counts.outstanding = waited.sum::<usize>() as u64;
            }
            _ => {}
        }
        counts
    }

    /// What is really under way.
    pub(crate) fn true_counts(&self) -> Counts {
        let owed = self.peers.values().map(|peer| peer.in_flight.unanswered() + peer.held.len());
        Counts {
            outstanding: owed.sum::<usize>() as u64,
            processing: self.serving.len() as u64 + self.callbacks,
            activity: self.activity,
        }
    }

    /// What must hold between events.
    pub(crate) fn check(&self, env: &mut Env) {
        let waited: usize = self.peers.values().map(|peer| peer.in_flight.len() + peer.held.len()).sum();
        let open = env.ledger.open(self.life);
        if waited != open {
            let text = || format!("{} waits for {waited} calls, but {open} have no outcome", self.life);
            env.ledger.breaks("CALL-1", text);
        }
        if self.serving.running() != self.frames.len() {
            let (counted, run) = (self.serving.running(), self.frames.len());
            env.ledger.breaks("serving", || format!("{} counts {counted} functions, {run} run", self.life));
        }
    }

    /// Sees to everything that the last event made possible, and sets the timer.
    pub(crate) fn settle(&mut self, env: &mut Env) {
        loop {
            while let Some(purpose) = self.completed.pop_front() {
                self.see_to(env, purpose);
            }
            self.send_held(env);
            self.start_ready(env);
            if self.completed.is_empty() {
                break;
            }
        }
        self.set_timer(env);
    }

    fn see_to(&mut self, env: &mut Env, purpose: Purpose) {
        match purpose {
            Purpose::Callback { fuel: 0 } => {}
            Purpose::Callback { fuel } => {
                self.callbacks += 1;
                let delay = env.rng.between(1, env.scenario.delay);
                env.net.after(delay, Event::Callback { at: self.life, fuel });
            }
            Purpose::Child { of } => {
                if let Some(frame) = self.frames.get_mut(&of) {
                    frame.children -= 1;
                }
                self.finish_if_done(env, of);
            }
        }
    }

    fn finish_if_done(&mut self, env: &mut Env, key: RequestKey) {
        if self.frames.get(&key).is_some_and(|frame| frame.children == 0)
            && let Some(frame) = self.frames.remove(&key)
            && self.serving.finish(key)
        {
            self.reply(env, key, frame.uid);
        }
    }

    fn reply(&mut self, env: &mut Env, key: RequestKey, uid: Uid) {
        let mut to = Life { rank: key.peer, incarnation: key.incarnation };
        if env.has(Fault::IncarnationIgnored)
            && let Some(peer) = self.peers.get(&key.peer)
        {
            to = peer.life;
        }
        env.send(self.life, to, Body::Reply { id: key.id, uid });
    }

    fn start_ready(&mut self, env: &mut Env) {
        while self.working < env.scenario.pool
            && let Some(key) = self.ready.pop_front()
        {
            match self.serving.start(key, env.now()) {
                Start::Gone => {}
                Start::Expired(request) => self.reply(env, key, request.uid),
                Start::Run(request) => self.run(env, key, &request),
            }
        }
    }

    fn run(&mut self, env: &mut Env, key: RequestKey, request: &Request) {
        let caller = Life { rank: key.peer, incarnation: key.incarnation };
        let is_expired = request.deadline.is_some_and(|deadline| deadline <= env.net.now);
        env.ledger.start(request.uid, caller, is_expired, self.has_dropped(caller));
        self.working += 1;
        self.frames.insert(key, Frame { uid: request.uid, fuel: request.fuel, children: 0 });
        let duration = env.rng.between(1, 2 * env.scenario.delay);
        env.net.after(duration, Event::Computed { at: self.life, key });
    }

    fn call(&mut self, env: &mut Env, to: Life, purpose: Purpose, fuel: u64, nested: bool) {
        self.activity += 1;
        let token = Token { uid: env.ledger.begin(self.life), purpose };
        let has_deadline = env.rng.chance(env.scenario.deadlines);
        let patience = env.rng.between(1, 30 * env.scenario.delay);
        let deadline = has_deadline.then(|| env.net.now + patience);
        let call = Held { token, deadline, bytes: env.rng.below(100), fuel };
        let peer = self.peer(env, to);
        if peer.is_lost {
            self.complete(env, token);
        } else if let Err(call) = self.try_send(env, to.rank, call, nested)
            && let Some(peer) = self.peers.get_mut(&to.rank)
        {
            peer.held.push_back(call);
        }
    }

    fn try_send(&mut self, env: &mut Env, to: Rank, call: Held, nested: bool) -> Result<(), Held> {
        let Some(peer) = self.peers.get_mut(&to) else { return Err(call) };
        let Held { token, deadline, bytes, fuel } = call;
        let instant = deadline.map(|at| env.instant(at));
        let Ok(id) = peer.in_flight.try_start(instant, bytes, nested, token) else { return Err(call) };
        peer.in_flight.set_phase(id, Phase::Sent);
        if env.has(Fault::LossCompletesTwice) {
            peer.remembered.insert(id, token);
        }
        let life = peer.life;
        let timeout = deadline.map(|at| at.saturating_sub(env.net.now));
        env.send(self.life, life, Body::Call { id, uid: token.uid, fuel, timeout });
        if env.rng.chance(env.scenario.cancels) {
            let delay = env.rng.between(1, 10 * env.scenario.delay);
            env.net.after(delay, Event::UserCancel { at: self.life, peer: to, id });
        }
        Ok(())
    }

    fn send_held(&mut self, env: &mut Env) {
        let ranks: Vec<Rank> =
            self.peers.iter().filter(|(_, peer)| !peer.held.is_empty()).map(|(&rank, _)| rank).collect();
        for rank in ranks {
            while let Some(call) = self.peers.get_mut(&rank).and_then(|peer| peer.held.pop_front()) {
                if let Err(call) = self.try_send(env, rank, call, false) {
                    if let Some(peer) = self.peers.get_mut(&rank) {
                        peer.held.push_front(call);
                    }
                    break;
                }
            }
        }
    }

    fn complete(&mut self, env: &mut Env, token: Token) {
        env.ledger.complete(token.uid, self.life);
        self.completed.push_back(token.purpose);
    }

    /// Anybody but this worker whom it does not know to be gone.
    fn somebody(&mut self, env: &mut Env) -> Option<Life> {
        for _ in 0..4 {
            let rank = Rank::new(u32::try_from(env.rng.below(env.scenario.workers)).ok()?)?;
            if rank == self.life.rank {
                continue;
            }
            let peer = self.peer(env, first_life(rank));
            if !peer.is_lost {
                return Some(peer.life);
            }
        }
        None
    }

    fn peer(&mut self, env: &Env, life: Life) -> &mut Peer {
        self.peers.entry(life.rank).or_insert_with(|| Peer::new(env, life))
    }

    fn set_timer(&mut self, env: &mut Env) {
        let calls = self.peers.values().filter_map(|peer| peer.in_flight.next_deadline());
        let shutdown = self.termination.as_ref().and_then(Termination::next_deadline);
        let next = calls.chain(shutdown).min().map(|at| env.micros(at));
        let held = self.peers.values().flat_map(|peer| &peer.held).filter_map(|held| held.deadline).min();
        let next = next.into_iter().chain(held).min();
        if let Some(next) = next
            && self.timer.is_none_or(|timer| next < timer)
        {
            self.timer = Some(next);
            env.net.at(next, Event::Timer { at: self.life });
        }
    }
}

impl Peer {
    fn new(env: &Env, life: Life) -> Self {
        let window = Window { max_calls: env.scenario.window, max_bytes: 150 };
        Self {
            life,
            is_lost: false,
            in_flight: InFlight::new(window),
            held: VecDeque::new(),
            remembered: BTreeMap::new(),
        }
    }
}

impl Request {
    pub(crate) fn new(uid: Uid, fuel: u64, deadline: Option<u64>) -> Self {
        Self { uid, fuel, deadline }
    }
}

/// The life that a rank begins with.
pub(crate) fn first_life(rank: Rank) -> Life {
    Life { rank, incarnation: Incarnation::new(1) }
}

fn key(env: &Env, from: Life, id: MessageId) -> RequestKey {
    RequestKey { peer: from.rank, incarnation: incarnation(env, from), id }
}

/// The incarnation that requests go by.
fn incarnation(env: &Env, life: Life) -> Incarnation {
    if env.has(Fault::IncarnationIgnored) { Incarnation::new(1) } else { life.incarnation }
}
