//! A whole job: delivers events, breaks links, crashes workers, and looks at what is left in the end.

use std::fmt::Write as _;

use tensorcall_proto::ids::{Incarnation, Life, Rank};

use crate::fault::Fault;
use crate::ledger::{Ledger, Violation};
use crate::network::{Body, Event, Network, Packet};
use crate::program::Run;
use crate::rng::Rng;
use crate::scenario::{Family, Scenario};
use crate::worker::{Env, Worker};

/// What a run that broke nothing came to.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Summary {
    pub(crate) events: u64,
    pub(crate) rrefs: usize,
    pub(crate) forks: usize,
    pub(crate) crashes: usize,
    pub(crate) cuts: usize,
}

#[derive(Debug)]
pub(crate) struct World {
    env: Env,
    /// By rank: the life that each has now.
    workers: Vec<Worker>,
    summary: Summary,
    trace: Option<String>,
}

impl World {
    pub(crate) fn new(family: Family, seed: u64, fault: Option<Fault>) -> Self {
        let mut rng = Rng::new(seed);
        let scenario = family.scenario(&mut rng);
        let env = Env { scenario, fault, rng, net: Network::new(), ledger: Ledger::default() };
        let mut world = Self { env, workers: Vec::new(), summary: Summary::default(), trace: None };
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
            self.summary.events += 1;
            if self.summary.events > EVENT_LIMIT {
                self.env.ledger.breaks("nothing hangs", || "it never ends".to_owned());
            }
            let now = self.env.net.now;
            self.trace(|| format!("{now} {event:?}"));
            self.handle(event);
            if let Some(violation) = self.env.ledger.violation() {
                return Err(violation.clone());
            }
        }
        let live = || self.workers.iter().filter(|worker| worker.is_alive);
        for (invariant, text) in [
            ("leak", live().filter_map(Worker::leftover).collect::<String>()),
            ("nothing hangs", live().filter_map(Worker::unfinished).collect()),
        ] {
            if !text.is_empty() {
                self.env.ledger.breaks(invariant, || text);
            }
        }
        if let Some(violation) = self.env.ledger.violation() {
            return Err(violation.clone());
        }
        let (rrefs, forks) = self.env.ledger.len();
        Ok(Summary { rrefs, forks, ..self.summary })
    }

    pub(crate) fn into_trace(self) -> String {
        let trace = self.trace.unwrap_or_default();
        let lines: Vec<&str> = trace.lines().collect();
        let (head, tail) = lines.split_at(lines.len().min(1));
        let skipped = tail.len().saturating_sub(TRACED_LINES);
        format!("{}\n… {skipped} events …\n{}", head.join(""), tail[skipped..].join("\n"))
    }

    fn populate(&mut self) {
        let ranks: Vec<Rank> = (0..self.env.scenario.workers).filter_map(rank).collect();
        for &rank in &ranks {
            let mut worker = Worker::new(life(rank, 1));
            let others = ranks.iter().filter(|&&other| other != rank);
            worker.peers = others.map(|&other| (other, life(other, 1))).collect();
            self.employ(worker);
        }
    }

    /// A worker that has a program from now on.
    fn employ(&mut self, worker: Worker) {
        let Scenario { acts, busy_for, .. } = self.env.scenario;
        let at = worker.life;
        self.workers.push(worker);
        for _ in 0..self.env.rng.between(1, acts) {
            let after = self.env.rng.below(busy_for);
            self.env.net.after(after, Event::Act { at });
        }
        let after = busy_for + self.env.rng.below(busy_for);
        self.env.net.after(after, Event::Quit { at });
    }

    fn plan_misfortune(&mut self) {
        let Scenario { workers, crashes, cuts, restarts, busy_for, .. } = self.env.scenario;
        for _ in 0..crashes.min(workers - 1) {
            let Some(rank) = rank(self.env.rng.below(workers)) else { continue };
            let after = self.env.rng.below(2 * busy_for);
            self.env.net.after(after, Event::Crash { rank });
            if restarts {
                let after = after + self.env.rng.below(busy_for);
                self.env.net.after(after, Event::Restart { rank });
            }
        }
        for _ in 0..cuts {
            let ends = [(); 2].map(|()| rank(self.env.rng.below(workers)));
            if let [Some(one), Some(other)] = ends
                && one != other
            {
                let after = self.env.rng.below(3 * busy_for);
                self.env.net.after(after, Event::Cut { one, other });
            }
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Deliver(packet) => self.deliver(packet),
            Event::Act { at } => self.with(at, Worker::act),
            Event::Quit { at } => self.with(at, Worker::quit),
            Event::Ran { at, run } => self.with(at, |worker, env| worker.ran(env, run)),
            Event::Made { at, rref } => self.with(at, |worker, env| worker.made(env, rref)),
            Event::Timeout { at, call } => self.with(at, |worker, env| worker.give_up(env, call)),
            Event::Expire { at, rref, run } => self.with(at, |worker, env| worker.expire(env, rref, run)),
            Event::Cut { one, other } => {
                let (one, other) = (self.worker(one).life, self.worker(other).life);
                self.env.net.cut(&mut self.env.rng, &self.env.scenario, (one, other));
                self.summary.cuts += 1;
            }
            Event::Broken { at, link, generation } => self.with(at, |worker, env| {
                let peer = if link.0 == at { link.1 } else { link.0 };
                let news = env.net.notice(link, at, generation);
                worker.fail_calls_on(env, link, generation);
                for number in news {
                    worker.link_broken(env, peer, number);
                }
            }),
            Event::Crash { rank } => self.crash(rank),
            Event::Restart { rank } => self.restart(rank),
            Event::Lost { at, about } => self.with(at, |worker, env| worker.peer_lost(env, about)),
            Event::Met { at, about } => self.with(at, |worker, env| worker.meet(env, about)),
        }
    }

    /// Does something at a worker, if this life of it is there, and what follows from it.
    fn with(&mut self, life: Life, act: impl FnOnce(&mut Worker, &mut Env)) {
        let worker = &mut self.workers[usize::from(life.rank.get())];
        if worker.life == life && worker.is_alive {
            act(worker, &mut self.env);
            worker.settle(&mut self.env);
            worker.check(&mut self.env);
            self.check_reports();
        }
    }

    /// When nobody reports anything under way, nothing is. Not so where messages arrive twice: the second one
    /// may undo what was reported, for a while.
    fn check_reports(&mut self) {
        let Scenario { cuts, crashes, duplicates, .. } = self.env.scenario;
        if cuts + crashes + duplicates > 0 || self.workers.len() > 10 {
            return;
        }
        let is_idle = |worker: &Worker| worker.under_way(&self.env) == 0 && worker.user.counts().users == 0;
        if !self.workers.iter().all(is_idle) {
            return;
        }
        for worker in self.workers.iter().filter(|worker| worker.owner.counts().forks > 0) {
            let text = || format!("nothing is under way, but {} counts forks", worker.life);
            self.env.ledger.breaks("quiet", text);
        }
    }

    fn deliver(&mut self, packet: Packet) {
        let Packet { from, to, link, generation, .. } = packet;
        let worker = self.worker(to.rank);
        if worker.life != to || !worker.is_alive {
            let delay = self.env.rng.between(1, self.env.scenario.notice);
            self.env.net.after(delay, Event::Lost { at: from, about: to });
            return self.env.vanish(&packet);
        }
        if worker.lost.contains(&from) || !self.env.net.arrives(&mut self.env.rng, &packet) {
            return self.env.vanish(&packet);
        }
        self.with(to, |worker, env| {
            if from != to {
                worker.meet(env, from);
            }
            match packet.body {
                Body::Call { id, what, rrefs } => {
                    let run = Run::new(from, id, link, generation, what);
                    worker.receive_call(env, from, run, &rrefs);
                }
                Body::Reply { id, outcome, rrefs } => worker.receive_reply(env, from, id, outcome, &rrefs),
                Body::RRef(message) => worker.receive_rref(env, from, message),
            }
        });
    }

    fn crash(&mut self, rank: Rank) {
        let worker = &mut self.workers[usize::from(rank.get())];
        if !std::mem::replace(&mut worker.is_alive, false) {
            return;
        }
        let about = worker.life;
        self.summary.crashes += 1;
        self.env.ledger.died(about);
        self.tell_all(|at| Event::Lost { at, about }, self.env.scenario.notice);
    }

    fn restart(&mut self, rank: Rank) {
        let worker = &self.workers[usize::from(rank.get())];
        if worker.is_alive {
            return;
        }
        let about = Life { incarnation: Incarnation::new(worker.life.incarnation.get() + 1), ..worker.life };
        let mut next = Worker::new(about);
        let others = self.workers.iter().filter(|other| other.is_alive);
        next.peers = others.map(|other| (other.life.rank, other.life)).collect();
        self.employ(next);
        let last = self.workers.len() - 1;
        self.workers.swap_remove(usize::from(rank.get()));
        debug_assert!(last == self.workers.len());
        self.tell_all(|at| Event::Met { at, about }, 2 * self.env.scenario.notice);
    }

    fn tell_all(&mut self, news: impl Fn(Life) -> Event, within: u64) {
        for worker in &self.workers {
            let delay = self.env.rng.between(1, within);
            self.env.net.after(delay, news(worker.life));
        }
    }

    fn worker(&self, rank: Rank) -> &Worker {
        &self.workers[usize::from(rank.get())]
    }

    fn trace(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{}", line());
        }
    }
}

fn rank(number: u64) -> Option<Rank> {
    u32::try_from(number).ok().and_then(Rank::new)
}

fn life(rank: Rank, incarnation: u64) -> Life {
    Life { rank, incarnation: Incarnation::new(incarnation) }
}

/// A run that has more events than this goes round in circles.
const EVENT_LIMIT: u64 = 2_000_000;

const TRACED_LINES: usize = 400;
