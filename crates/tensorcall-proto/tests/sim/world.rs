//! A whole job: delivers events, crashes workers, and checks TERM-1 with an eye on everybody.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use tensorcall_proto::ids::{Incarnation, Rank};
use tensorcall_proto::termination::{Config, Effect, Termination, TerminationMessage};

use crate::fault::Fault;
use crate::ledger::{Ledger, Violation};
use crate::network::{Body, Event, Life, Network, Packet};
use crate::rng::Rng;
use crate::scenario::{Family, Scenario};
use crate::worker::{Env, Request, State, Worker, first_life};

/// What a run that broke nothing came to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Summary {
    pub(crate) events: u64,
    pub(crate) calls: usize,
    pub(crate) crashes: usize,
    pub(crate) termination_messages: u64,
    /// Virtual microseconds.
    pub(crate) took: u64,
}

pub(crate) struct World {
    env: Env,
    workers: Vec<Worker>,
    /// Rounds that were found quiet, and the members that this was said of.
    quiet: Vec<(u64, BTreeSet<Rank>)>,
    crashed: BTreeSet<Life>,
    /// Workers that are still to crash right after they sent a termination message.
    ambushes: u64,
    events: u64,
    trace: Option<String>,
}

impl World {
    pub(crate) fn new(family: Family, seed: u64, fault: Option<Fault>) -> Self {
        let mut rng = Rng::new(seed);
        let scenario = family.scenario(&mut rng);
        let ledger = Ledger::default();
        let net = Network::new();
        let env = Env { scenario, fault, rng, net, ledger, waves: BTreeMap::new(), origin: origin() };
        let mut world = Self {
            env,
            workers: Vec::new(),
            quiet: Vec::new(),
            crashed: BTreeSet::new(),
            ambushes: 0,
            events: 0,
            trace: None,
        };
        world.populate();
        world.plan_misfortune();
        world
    }

    /// Keeps the last events for the text of a violation.
    pub(crate) fn with_trace(mut self) -> Self {
        self.trace = Some(format!("{:?}\n", self.env.scenario));
        self
    }

    /// Runs to the end, or to the first violation.
    pub(crate) fn run(&mut self) -> Result<Summary, Violation> {
        while let Some(event) = self.env.net.pop() {
            self.events += 1;
            if self.env.net.now > TIME_LIMIT || self.events > EVENT_LIMIT {
                return Err(self.hang());
            }
            self.trace(|| format!("{event:?}"));
            self.handle(event);
            if let Some(violation) = self.env.ledger.violation() {
                return Err(violation.clone());
            }
            if self.everybody_left() {
                break;
            }
        }
        self.check_end()?;
        Ok(Summary {
            events: self.events,
            calls: self.env.ledger.len(),
            crashes: self.crashed.len(),
            termination_messages: self.env.net.termination_messages,
            took: self.env.net.now,
        })
    }

    pub(crate) fn into_trace(self) -> String {
        let trace = self.trace.unwrap_or_default();
        let lines: Vec<&str> = trace.lines().collect();
        let (head, tail) = lines.split_at(lines.len().min(1));
        let skipped = tail.len().saturating_sub(TRACED_LINES);
        format!("{}\n… {skipped} events …\n{}", head.join(""), tail[skipped..].join("\n"))
    }

    fn populate(&mut self) {
        let count = u32::try_from(self.env.scenario.workers).unwrap_or(u32::MAX);
        let ranks: Vec<Rank> = (0..count).filter_map(Rank::new).collect();
        for &rank in &ranks {
            let config = Config {
                agreeing_waves: if self.env.has(Fault::OneWave) { 1 } else { 2 },
                first_pause: Duration::from_micros(self.env.scenario.pause),
                ..Config::default()
            };
            let has_group = self.env.scenario.rounds > 0;
            let termination = has_group.then(|| Termination::new(rank, ranks.iter().copied(), config));
            let life = first_life(rank);
            self.workers.push(Worker::new(life, termination));
            self.begin_phase(life);
        }
    }

    /// A worker's program makes some calls, and then synchronises or shuts down.
    fn begin_phase(&mut self, life: Life) {
        let Scenario { roots, fuel, busy_for, rounds, .. } = self.env.scenario;
        let busy_for = self.env.rng.below(busy_for + 1);
        for _ in 0..self.env.rng.below(roots + 1) {
            let after = self.env.rng.below(busy_for + 1);
            let fuel = self.env.rng.between(1, fuel);
            self.env.net.after(after, Event::Root { at: life, fuel });
        }
        if rounds > 0 {
            self.env.net.after(busy_for + 1, Event::Arrive { at: life });
        }
    }

    fn plan_misfortune(&mut self) {
        let Scenario { crashes, cuts, restarts, delay, .. } = self.env.scenario;
        let horizon = 100 * delay;
        for _ in 0..crashes.min(self.env.scenario.workers.saturating_sub(1)) {
            if !restarts && self.env.rng.chance(50) {
                self.ambushes += 1;
                continue;
            }
            let at = self.env.rng.below(horizon);
            let life = self.any_worker();
            self.env.net.at(at, Event::Crash { at: life });
            if restarts {
                let after = at + self.env.rng.below(horizon);
                self.env.net.at(after, Event::Restart { rank: life.rank });
            }
        }
        for _ in 0..cuts {
            let (one, other) = (self.any_worker(), self.any_worker());
            let at = self.env.rng.below(horizon);
            self.env.net.at(at, Event::Cut { one, other });
        }
    }

    /// Low ranks, which coordinate, are met more often.
    fn any_worker(&mut self) -> Life {
        let all = self.workers.len();
        let among = if self.env.rng.chance(50) { all.min(2) } else { all };
        self.workers[self.env.rng.index(among)].life
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Deliver(packet) => self.deliver(packet),
            Event::Notice { at, about } => self.with(at, |worker, env| {
                worker.lose(env, about);
                let now = env.now();
                if let Some(termination) = &mut worker.termination
                    && !env.has(Fault::LossNotTold)
                {
                    termination.handle_lost(now, about.rank);
                }
            }),
            Event::Timer { at } => self.with(at, Worker::expire),
            Event::Computed { at, key } => self.with(at, |worker, env| worker.computed(env, key)),
            Event::Callback { at, fuel } => self.with(at, |worker, env| worker.callback(env, fuel)),
            Event::Root { at, fuel } => self.with(at, |worker, env| worker.call_somebody(env, fuel)),
            Event::UserCancel { at, peer, id } => {
                self.with(at, |worker, env| worker.user_cancel(env, peer, id));
            }
            Event::Arrive { at } => self.with(at, |worker, env| {
                let leaving = worker.rounds + 1 >= env.scenario.rounds;
                let now = env.now();
                if let Some(termination) = &mut worker.termination {
                    termination.arrive(now, leaving);
                }
            }),
            Event::Crash { at } => self.crash(at),
            Event::Restart { rank } => self.restart(rank),
            Event::Cut { one, other } => {
                if one != other {
                    self.env.notice(one, other);
                    self.env.notice(other, one);
                }
            }
            Event::Roster { at, about } => self.with(at, |worker, env| worker.meet(env, about)),
        }
    }

    /// Does something at a worker, if this life of it is there, and what follows from it.
    fn with(&mut self, life: Life, act: impl FnOnce(&mut Worker, &mut Env)) {
        let index = usize::from(life.rank.get());
        let worker = &mut self.workers[index];
        if worker.life != life || worker.state != State::Alive {
            return;
        }
        act(worker, &mut self.env);
        if let Some(termination) = &mut worker.termination
            && self.env.rng.chance(10)
        {
            termination.handle_idle();
        }
        self.follow_effects(index);
        let worker = &self.workers[index];
        if worker.state == State::Alive && (self.workers.len() < 20 || self.events.is_multiple_of(32)) {
            worker.check(&mut self.env);
        }
    }

    fn deliver(&mut self, packet: Packet) {
        let Packet { from, to, body } = packet;
        let index = usize::from(to.rank.get());
        let worker = &mut self.workers[index];
        let is_there = worker.life == to || (self.env.has(Fault::IncarnationIgnored) && worker.life > to);
        if !is_there || worker.state != State::Alive {
            self.miss(from, to, &body);
            return;
        }
        if worker.has_dropped(from) {
            self.env.notice(from, to);
            return;
        }
        let to = worker.life;
        if !self.env.has(Fault::IncarnationIgnored) {
            worker.meet(&mut self.env, from);
        }
        self.with(to, |worker, env| match body {
            Body::Call { id, uid, fuel, timeout } => {
                let deadline = timeout.map(|left| env.net.now + left);
                worker.receive_call(env, from, id, Request::new(uid, fuel, deadline));
            }
            Body::Reply { id, uid } => worker.receive_reply(env, from, id, uid),
            Body::Cancel { id } => worker.receive_cancel(env, from, id),
            Body::Goodbye => {
                let now = env.now();
                if let Some(termination) = &mut worker.termination {
                    termination.handle_goodbye(now, from.rank);
                }
                worker.lose(env, from);
            }
            Body::Termination(message) => Self::receive_termination(worker, env, from, message),
        });
    }

    /// A message comes to a worker that has left or crashed.
    fn miss(&mut self, from: Life, to: Life, body: &Body) {
        let worker = &self.workers[usize::from(to.rank.get())];
        let sender = &self.workers[usize::from(from.rank.get())];
        let is_heard = worker.life == to && !worker.has_dropped(from);
        let is_member = sender.life == from && sender.state == State::Alive;
        if worker.state == State::Left && is_heard && is_member && body.is_work() {
            let text = || format!("{from} had {body:?} under way to {to}, which has left");
            self.env.ledger.breaks("TERM-1", text);
        }
        self.env.notice(from, to);
    }

    fn receive_termination(worker: &mut Worker, env: &mut Env, from: Life, mut message: TerminationMessage) {
        let now = env.now();
        let rounds = worker.rounds;
        let Some(termination) = &mut worker.termination else { return };
        match (&mut message, env.fault) {
            (TerminationMessage::Wave { gone, .. }, Some(Fault::GoneIgnored)) => *gone = [].into(),
            (TerminationMessage::Quiet { round, .. }, Some(Fault::StaleQuietAccepted)) => {
                *round = rounds + 1;
            }
            (TerminationMessage::Report { round, wave, .. }, Some(Fault::StaleReportAccepted)) => {
                (*round, *wave) = env.waves.get(&worker.life.rank).copied().unwrap_or((*round, *wave));
            }
            (TerminationMessage::Arrive { quiet, .. }, Some(Fault::QuietNotPassedOn)) => *quiet = 0,
            (TerminationMessage::Arrive { epoch, .. }, Some(Fault::TakeoverIgnored)) if *epoch > 0 => return,
            _ => {}
        }
        termination.handle_message(now, from.rank, message);
        worker.settle(env);
    }

    fn follow_effects(&mut self, index: usize) {
        loop {
            let worker = &mut self.workers[index];
            let life = worker.life;
            if worker.state != State::Alive {
                return;
            }
            let Some(effect) = worker.termination.as_mut().and_then(Termination::poll_effect) else { break };
            self.trace(|| format!("    {life} {effect:?}"));
            self.follow(index, effect);
        }
        self.workers[index].settle(&mut self.env);
    }

    fn follow(&mut self, index: usize, effect: Effect) {
        let env = &mut self.env;
        let worker = &mut self.workers[index];
        let now = env.now();
        match effect {
            Effect::Send(to, message) => {
                let life = worker.life;
                match message {
                    TerminationMessage::Wave { round, wave, .. } => {
                        env.waves.insert(life.rank, (round, wave));
                    }
                    TerminationMessage::Quiet { round, .. } => self.check_quiet(index, round),
                    _ => {}
                }
                if !self.workers[index].has_dropped(first_life(to)) {
                    self.env.send(life, first_life(to), Body::Termination(message));
                    self.ambush(life);
                }
            }
            Effect::Watch(rank) => {
                let life = worker.life;
                env.net.connect(life, first_life(rank));
                if self.workers[usize::from(rank.get())].state != State::Alive {
                    env.notice(life, first_life(rank));
                }
            }
            Effect::PeerGone(rank) => worker.lose(env, first_life(rank)),
            Effect::TakeCounts => {
                let counts = worker.counts(env);
                if let Some(termination) = &mut worker.termination {
                    termination.handle_counts(now, counts);
                }
            }
            Effect::Quiet { round, leaving } => self.quiet(index, round, leaving),
        }
    }

    /// A worker sees that a round is over.
    fn quiet(&mut self, index: usize, round: u64, leaving: bool) {
        let life = self.workers[index].life;
        self.check_quiet(index, round);
        let worker = &mut self.workers[index];
        worker.rounds = round;
        if !leaving {
            self.begin_phase(life);
            return;
        }
        let counts = worker.true_counts();
        if !counts.is_calm() {
            self.env.ledger.breaks("TERM-1", || format!("{life} leaves with {counts:?}"));
        }
        worker.state = State::Left;
        for peer in self.env.net.peers_of(life) {
            self.env.send(life, peer, Body::Goodbye);
        }
    }

    /// A worker says or hears that a round is over. If it is the first, the group must be quiet.
    fn check_quiet(&mut self, index: usize, round: u64) {
        let life = self.workers[index].life;
        if self.quiet.iter().any(|(said, of)| *said == round && of.contains(&life.rank)) {
            return;
        }
        let Some(termination) = &self.workers[index].termination else { return };
        let ledger = &mut self.env.ledger;
        if !termination.is_coordinator() {
            ledger.breaks("TERM-1", || format!("{life} believes round {round} over, which nobody said"));
        }
        let view: BTreeSet<Rank> = termination.live().collect();
        let is_alive = |rank: Rank| {
            let worker = &self.workers[usize::from(rank.get())];
            (view.contains(&rank) && worker.state == State::Alive).then_some(worker)
        };
        for worker in view.iter().filter_map(|&rank| is_alive(rank)) {
            let counts = worker.true_counts();
            if !counts.is_calm() {
                ledger.breaks("TERM-1", || format!("{life} says quiet, {} has {counts:?}", worker.life));
            }
        }
        for packet in self.env.net.in_transit().filter(|packet| packet.body.is_work()) {
            if let (Some(_), Some(to)) = (is_alive(packet.from.rank), is_alive(packet.to.rank))
                && !to.has_dropped(packet.from)
            {
                ledger.breaks("TERM-1", || format!("{life} says quiet, {packet:?} is under way"));
            }
        }
        self.quiet.push((round, view));
    }

    /// Some workers crash in the middle of telling the others something.
    fn ambush(&mut self, life: Life) {
        if self.ambushes > 0 && self.env.rng.chance(5) {
            self.ambushes -= 1;
            self.crash(life);
        }
    }

    fn crash(&mut self, life: Life) {
        let worker = &mut self.workers[usize::from(life.rank.get())];
        if worker.life != life || worker.state != State::Alive {
            return;
        }
        worker.state = State::Dead;
        self.crashed.insert(life);
        self.trace(|| format!("    {life} is dead"));
        for peer in self.env.net.peers_of(life) {
            self.env.notice(peer, life);
        }
    }

    fn restart(&mut self, rank: Rank) {
        let worker = &mut self.workers[usize::from(rank.get())];
        if worker.state != State::Dead {
            return;
        }
        let incarnation = Incarnation::new(worker.life.incarnation.get() + 1);
        let life = Life { rank, incarnation };
        *worker = Worker::new(life, None);
        self.begin_phase(life);
        for index in 0..self.workers.len() {
            let at = self.workers[index].life;
            let after = self.env.rng.below(2 * self.env.scenario.notice);
            self.env.net.after(after, Event::Roster { at, about: life });
        }
    }

    fn everybody_left(&self) -> bool {
        self.env.scenario.rounds > 0 && self.workers.iter().all(|worker| worker.state != State::Alive)
    }

    fn check_end(&mut self) -> Result<(), Violation> {
        let has_group = self.env.scenario.rounds > 0;
        for worker in &self.workers {
            let open = self.env.ledger.open(worker.life);
            let is_over =
                if has_group { worker.state != State::Alive } else { worker.true_counts().is_calm() };
            if worker.state != State::Dead && (open > 0 || !is_over) {
                return Err(self.hang());
            }
        }
        Ok(())
    }

    fn hang(&self) -> Violation {
        let mut text = format!("not over after {} us and {} events:", self.env.net.now, self.events);
        for worker in self.workers.iter().filter(|worker| worker.state == State::Alive) {
            let waiting = worker.termination.as_ref().map(Termination::waiting_for);
            let open = self.env.ledger.open(worker.life);
            let counts = worker.true_counts();
            let _ = write!(text, " [{}: {open} calls open, {counts:?}, waits for {waiting:?}]", worker.life);
        }
        Violation { invariant: "nothing hangs", text }
    }

    fn trace(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{:>9} {}", self.env.net.now, line());
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "any instant will do: virtual time counts from it")]
fn origin() -> Instant {
    Instant::now()
}

/// A healthy run of any scenario is over within a few virtual seconds.
const TIME_LIMIT: u64 = 20_000_000;
const EVENT_LIMIT: u64 = 2_000_000;
const TRACED_LINES: usize = 120;
