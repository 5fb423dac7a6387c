//! A group of workers under virtual time, and what must be true of them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use tensorcall_proto::autograd::{
    AutogradCall, AutogradError, Content, Effect, Pass, Passes, Plan, Step, Work,
};
use tensorcall_proto::ids::{Incarnation, Life, PassId};

use crate::fault::Fault;
use crate::graph::{Id, Program};
use crate::local::{self, Gradient, Local, rank};
use crate::rng::Rng;
use crate::scenario::{Family, Scenario, Trouble};

/// How long a worker waits without progress.
const PATIENCE: u64 = 60_000_000;
/// The longest time until the death of a worker is noticed.
const NOTICE: u64 = 50_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Error {
    Machine(AutogradError),
    Raised(usize),
    Lost(usize),
}

impl From<AutogradError> for Error {
    fn from(error: AutogradError) -> Self {
        Self::Machine(error)
    }
}

/// What answers a call.
#[derive(Debug, Clone, Copy)]
struct Token {
    call: u64,
    /// The call came a second time, and nobody waits for this answer.
    again: bool,
}

type Machine = Passes<Gradient, Error, Token>;

#[derive(Debug)]
pub(crate) struct Violation {
    pub(crate) invariant: &'static str,
    pub(crate) text: String,
}

#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Summary {
    pub(crate) events: u64,
    pub(crate) passes: u64,
    pub(crate) failed: u64,
    pub(crate) products: u64,
    pub(crate) probes: u64,
    pub(crate) asks: u64,
}

pub(crate) struct World {
    rng: Rng,
    scenario: Scenario,
    fault: Option<Fault>,
    base: Instant,
    micros: u64,
    /// When something happened last, other than that time passed.
    last: u64,
    workers: Vec<Worker>,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    payloads: BTreeMap<u64, Event>,
    next_event: u64,
    calls: BTreeMap<u64, Pending>,
    next_call: u64,
    /// Calls that have arrived.
    arrived: BTreeSet<u64>,
    /// Those that were lost in arriving.
    swallowed: BTreeSet<u64>,
    /// Which workers have heard of which passes.
    heard: BTreeSet<(usize, PassId)>,
    /// Passes by their number in the program's list of starts.
    begun: BTreeMap<PassId, usize>,
    outcomes: BTreeMap<PassId, Result<(), Error>>,
    /// What goes wrong, and when it has: the number of a product, of a call.
    countdown: Option<u64>,
    happened: bool,
    summary: Summary,
    trace: Option<String>,
}

struct Worker {
    machine: Machine,
    alive: bool,
    locals: BTreeMap<PassId, Local>,
    at_work: BTreeSet<PassId>,
    tick: Option<u64>,
}

/// A call whose answer is awaited.
struct Pending {
    caller: usize,
    callee: usize,
    pass: PassId,
    step: Step,
}

enum Event {
    Call { from: usize, to: usize, call: AutogradCall, content: Content<Gradient, Error>, token: Token },
    Answer { call: u64, result: Result<(), Error> },
    Thread { at: usize, pass: Pass },
    Finished { at: usize, pass: PassId, done: Done },
    Tick { at: usize },
    Crash { at: usize },
    Lost { at: usize, about: usize },
}

enum Done {
    Planned(Result<Plan, Error>),
    Vjp(Result<Vec<(u64, Option<Gradient>)>, Error>),
    Ended,
}

impl World {
    pub(crate) fn new(family: Family, seed: u64, fault: Option<Fault>) -> Self {
        let mut rng = Rng::new(seed);
        let scenario = family.scenario(&mut rng);
        let worker = |number| Worker {
            machine: Passes::new(Life { rank: rank(number), incarnation: Incarnation::new(1) }),
            alive: true,
            locals: BTreeMap::new(),
            at_work: BTreeSet::new(),
            tick: None,
        };
        Self {
            workers: (0..scenario.workers).map(worker).collect(),
            rng,
            scenario,
            fault,
            base: start(),
            micros: 0,
            last: 0,
            events: BinaryHeap::new(),
            payloads: BTreeMap::new(),
            next_event: 0,
            calls: BTreeMap::new(),
            next_call: 0,
            arrived: BTreeSet::new(),
            swallowed: BTreeSet::new(),
            heard: BTreeSet::new(),
            begun: BTreeMap::new(),
            outcomes: BTreeMap::new(),
            countdown: None,
            happened: false,
            summary: Summary::default(),
            trace: None,
        }
    }

    pub(crate) fn with_trace(mut self) -> Self {
        self.trace = Some(String::new());
        self
    }

    pub(crate) fn into_trace(self) -> String {
        self.trace.unwrap_or_default()
    }

    /// A program and its passes, with what goes wrong; then the passes again, and nothing goes wrong.
    pub(crate) fn run(&mut self) -> Result<Summary, Violation> {
        let scenario = self.scenario.clone();
        let program = Program::random(&mut self.rng, &scenario);
        self.passes(&program, scenario.trouble)?;
        let living: Vec<_> = (0..scenario.workers).filter(|&worker| self.workers[worker].alive).collect();
        if living.len() == scenario.workers {
            self.passes(&program, Trouble::None)?;
        } else {
            let scenario = Scenario { workers: living.len(), ..scenario };
            let program = Program::random(&mut self.rng, &scenario).on_workers(&living);
            self.passes(&program, Trouble::None)?;
        }
        Ok(self.summary)
    }

    fn passes(&mut self, program: &Program, trouble: Trouble) -> Result<(), Violation> {
        self.begun.clear();
        self.outcomes.clear();
        self.happened = false;
        self.countdown = match trouble {
            Trouble::Error => Some(self.rng.below(6)),
            Trouble::Silence => Some(self.rng.below(4)),
            _ => None,
        };
        for (number, (starter, _)) in program.starts.iter().enumerate() {
            let now = self.now();
            let context = number as u64;
            let pass = self.workers[*starter].machine.begin(now, context, true, Some(PATIENCE));
            self.begun.insert(pass, number);
            self.carry_out(*starter);
        }
        if trouble == Trouble::Loss {
            let (at, after) = (self.rng.index(self.workers.len()), self.rng.below(20 * self.scenario.delay));
            self.after(after, Event::Crash { at });
        }
        let began = self.micros;
        while let Some(Reverse((at, event))) = self.events.pop() {
            self.micros = at;
            self.summary.events += 1;
            let Some(event) = self.payloads.remove(&event) else { continue };
            if !matches!(event, Event::Tick { .. }) {
                self.last = at;
            }
            self.handle(program, event, trouble)?;
        }
        self.check(program, trouble, self.last.saturating_sub(began))
    }

    fn now(&self) -> Instant {
        self.base + Duration::from_micros(self.micros)
    }

    fn delay(&mut self) -> u64 {
        let usual = self.rng.between(1, self.scenario.delay);
        if self.rng.chance(self.scenario.stragglers) { usual * self.rng.between(10, 400) } else { usual }
    }

    fn after(&mut self, delay: u64, event: Event) {
        self.next_event += 1;
        self.events.push(Reverse((self.micros + delay, self.next_event)));
        self.payloads.insert(self.next_event, event);
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        let micros = self.micros;
        if let Some(trace) = &mut self.trace {
            let _ = writeln!(trace, "{micros:>10} {}", text());
        }
    }

    fn handle(&mut self, program: &Program, event: Event, trouble: Trouble) -> Result<(), Violation> {
        let at = match &event {
            Event::Call { to, .. } => *to,
            Event::Answer { call, .. } => match self.calls.get(call) {
                Some(pending) => pending.caller,
                None => return Ok(()),
            },
            Event::Thread { at, .. }
            | Event::Finished { at, .. }
            | Event::Tick { at }
            | Event::Crash { at }
            | Event::Lost { at, .. } => *at,
        };
        if !self.workers[at].alive {
            return Ok(());
        }
        let now = self.now();
        match event {
            Event::Call { from, call, content, token, .. } => {
                self.note(|| format!("{at} <- {from} {:?} {:?}", call.pass.id.local, call.step));
                self.arrive(at, from, call, content, token, trouble);
            }
            Event::Answer { call, result } => {
                let Some(Pending { pass, step, .. }) = self.calls.remove(&call) else { return Ok(()) };
                self.workers[at].machine.handle_answer(now, pass, step, result);
            }
            Event::Thread { pass, .. } => self.work(program, at, pass, trouble)?,
            Event::Finished { pass, done, .. } => {
                self.workers[at].at_work.remove(&pass);
                let machine = &mut self.workers[at].machine;
                match done {
                    Done::Planned(plan) => machine.handle_planned(now, pass, plan),
                    Done::Vjp(found) => machine.handle_vjp_done(now, pass, found),
                    Done::Ended => machine.handle_ended(pass),
                }
            }
            Event::Tick { .. } => {
                self.workers[at].tick = None;
                self.workers[at].machine.handle_time(now);
            }
            Event::Crash { .. } => self.crash(at),
            Event::Lost { about, .. } => {
                self.workers[at].machine.handle_lost(rank(about), &Error::Lost(about));
            }
        }
        self.carry_out(at);
        Ok(())
    }

    fn arrive(
        &mut self,
        at: usize,
        from: usize,
        call: AutogradCall,
        content: Content<Gradient, Error>,
        token: Token,
        trouble: Trouble,
    ) {
        // Whoever serves calls answers the first arrival alone.
        let token = Token { again: !self.arrived.insert(token.call), ..token };
        let swallows = match call.step {
            Step::Gradient { .. } if trouble == Trouble::Silence => self.strikes(),
            Step::Gradient { .. } => self.fault == Some(Fault::GradientSwallowed) && self.rng.chance(30),
            Step::Abort => self.fault == Some(Fault::AbortSwallowed),
            Step::Ask { .. } => self.fault == Some(Fault::AskSwallowed),
            Step::Probe { .. } => self.fault == Some(Fault::ProbeSwallowed),
            _ => false,
        };
        if swallows || self.swallowed.contains(&token.call) {
            self.swallowed.insert(token.call);
            // The first call of a pass is answered when all is done, so never.
            if trouble != Trouble::Silence || self.heard.contains(&(at, call.pass.id)) {
                self.answer(token, Ok(()));
            }
            return;
        }
        self.heard.insert((at, call.pass.id));
        let now = self.now();
        if call.step == Step::Begin && self.fault == Some(Fault::DoneAtOnce) {
            self.answer(token, Ok(()));
        }
        self.workers[at].machine.handle_call(now, rank(from), call, content, token);
        if self.fault == Some(Fault::NeverWaits) {
            let probe = AutogradCall { step: Step::Probe { origin: rank(at) }, ..call };
            let token = Token { call: 0, again: true };
            self.workers[at].machine.handle_call(now, rank(from), probe, Content::Nothing, token);
        }
    }

    /// Whether it is now that something goes wrong.
    fn strikes(&mut self) -> bool {
        match self.countdown {
            Some(0) => {
                self.countdown = None;
                self.happened = true;
                true
            }
            Some(left) => {
                self.countdown = Some(left - 1);
                false
            }
            None => false,
        }
    }

    /// A thread asks for something to do, and does it.
    fn work(&mut self, program: &Program, at: usize, pass: Pass, trouble: Trouble) -> Result<(), Violation> {
        let Some(work) = self.workers[at].machine.take_work(pass.id) else { return Ok(()) };
        self.note(|| format!("{at} works on {}: {work:?}", pass.id.local));
        if !self.workers[at].at_work.insert(pass.id) {
            return Err(violation("one at a time", format!("worker {at} does two things in one pass")));
        }
        let number = usize::try_from(pass.context).unwrap_or(0);
        let (starter, roots) = &program.starts[number];
        let roots = (*starter == at).then_some(roots.as_slice());
        let raises = !matches!(work, Work::End(_)) && trouble == Trouble::Error && self.strikes();
        let trips = || if raises { Some(Error::Raised(at)) } else { None };
        let fault = self.fault;
        let local = self.workers[at].locals.entry(pass.id).or_default();
        if local.ended {
            return Err(violation("end is last", format!("worker {at} works after the end")));
        }
        let done = match work {
            Work::Plan => Done::Planned(match trips() {
                Some(error) => Err(error),
                None => Ok(local::plan(program, at, roots, fault)),
            }),
            Work::Vjp { arrived, wanted, .. } => {
                let sent = |(message, gradient): (Option<u64>, Option<Gradient>)| {
                    let ids: Vec<Id> = match message {
                        Some(id) => program.messages.iter().find(|message| message.id == id)?.sent.clone(),
                        None => roots.unwrap_or_default().to_vec(),
                    };
                    let ones = |ids: &[Id]| {
                        ids.iter().map(|&id| Some(vec![1; program.nodes[id].value.len()])).collect()
                    };
                    let gradient = gradient.unwrap_or_else(|| ones(&ids));
                    Some((ids, gradient))
                };
                let arrived: Vec<_> = arrived.into_iter().filter_map(sent).collect();
                let found = local.vjp(program, arrived, &wanted, fault);
                Done::Vjp(match trips() {
                    Some(_) if fault == Some(Fault::ErrorNotTold) => Ok(Vec::new()),
                    Some(error) => Err(error),
                    None => Ok(found),
                })
            }
            Work::End(_) => {
                local.ended = true;
                Done::Ended
            }
        };
        let delay = self.delay();
        self.after(delay, Event::Finished { at, pass: pass.id, done });
        Ok(())
    }

    fn crash(&mut self, at: usize) {
        self.note(|| format!("{at} dies"));
        self.workers[at].alive = false;
        self.happened = true;
        for other in 0..self.workers.len() {
            let delay = self.rng.between(1, NOTICE);
            self.after(delay, Event::Lost { at: other, about: at });
            let waiting = self.calls.iter().filter(|(_, call)| call.callee == at && call.caller == other);
            let waiting: Vec<_> = waiting.map(|(&call, _)| call).collect();
            for call in waiting {
                self.after(delay, Event::Answer { call, result: Err(Error::Lost(at)) });
            }
        }
    }

    fn answer(&mut self, token: Token, result: Result<(), Error>) {
        if !token.again {
            let delay = self.delay();
            self.after(delay, Event::Answer { call: token.call, result });
        }
    }

    /// Does what a machine asks for.
    fn carry_out(&mut self, at: usize) {
        while let Some(effect) = self.workers[at].machine.poll_effect() {
            match effect {
                Effect::Work(pass) => {
                    let delay = self.delay();
                    self.after(delay, Event::Thread { at, pass });
                }
                Effect::Call { pass, to, step, content } => {
                    self.call(at, pass, to.get().into(), step, &content);
                }
                Effect::Answer(token, result) => self.answer(token, result),
                Effect::Ended(pass, outcome) => {
                    self.note(|| format!("{at} pass {} is over: {outcome:?}", pass.local));
                    let unfinished = self.workers.iter().filter(|worker| {
                        worker.alive && worker.locals.get(&pass).is_some_and(|local| !local.ended)
                    });
                    // Recorded here, judged in the end.
                    if outcome.is_ok() && unfinished.count() > 0 {
                        self.outcomes.insert(pass, Err(Error::Machine(AutogradError::Over)));
                    } else {
                        self.outcomes.insert(pass, outcome);
                    }
                }
            }
        }
        if let Some(deadline) = self.workers[at].machine.next_deadline() {
            let micros = deadline.saturating_duration_since(self.base).as_micros();
            let micros = u64::try_from(micros).unwrap_or(u64::MAX).max(self.micros);
            if self.workers[at].tick.is_none_or(|tick| tick > micros) {
                self.workers[at].tick = Some(micros);
                self.after(micros - self.micros, Event::Tick { at });
            }
        }
    }

    fn call(&mut self, from: usize, pass: Pass, to: usize, step: Step, content: &Content<Gradient, Error>) {
        match step {
            Step::Probe { .. } => self.summary.probes += 1,
            Step::Ask { .. } => self.summary.asks += 1,
            _ => {}
        }
        self.next_call += 1;
        let call = self.next_call;
        self.calls.insert(call, Pending { caller: from, callee: to, pass: pass.id, step });
        if !self.workers[to].alive {
            let delay = self.delay();
            return self.after(delay, Event::Answer { call, result: Err(Error::Lost(to)) });
        }
        let again = self.rng.chance(self.scenario.duplicates);
        for _ in 0..=u8::from(again) {
            let delay = self.delay();
            let (token, content) = (Token { call, again: false }, content.clone());
            let call = AutogradCall { pass, step };
            self.after(delay, Event::Call { from, to, call, content, token });
        }
    }

    /// Everything has come to rest.
    fn check(&mut self, program: &Program, trouble: Trouble, took: u64) -> Result<(), Violation> {
        for (number, worker) in self.workers.iter().enumerate() {
            if worker.alive && !worker.machine.is_empty() {
                return Err(violation("every pass ends", format!("worker {number} has one left")));
            }
        }
        let begun = std::mem::take(&mut self.begun);
        for (pass, number) in begun {
            let (starter, roots) = &program.starts[number];
            if !self.workers[*starter].alive {
                continue;
            }
            self.summary.passes += 1;
            match self.outcomes.get(&pass) {
                None => return Err(violation("every pass ends", format!("pass {number} has no outcome"))),
                Some(Err(Error::Machine(AutogradError::Over))) => {
                    return Err(violation("ends everywhere", format!("pass {number} goes on elsewhere")));
                }
                Some(Err(error)) => {
                    let stalled = matches!(error, Error::Machine(AutogradError::Stalled { .. }));
                    if !self.happened || stalled != (trouble == Trouble::Silence) {
                        return Err(violation("no error without cause", format!("{error:?}")));
                    }
                    if took > 2 * PATIENCE {
                        return Err(violation("ends in time", format!("it took {took} us")));
                    }
                    self.summary.failed += 1;
                }
                Some(Ok(())) => self.check_gradients(program, pass, roots)?,
            }
        }
        if trouble == Trouble::Error && self.happened && self.outcomes.values().all(Result::is_ok) {
            return Err(violation("errors arrive", "all passes have succeeded".to_owned()));
        }
        if trouble != Trouble::Silence && took > PATIENCE {
            return Err(violation("ends in time", format!("it took {took} us")));
        }
        for worker in &mut self.workers {
            worker.locals.clear();
        }
        Ok(())
    }

    fn check_gradients(&mut self, program: &Program, pass: PassId, roots: &[Id]) -> Result<(), Violation> {
        let expected = program.gradients(roots);
        for (id, node) in program.nodes.iter().enumerate() {
            let worker = &self.workers[node.worker];
            if !worker.alive {
                continue;
            }
            let local = worker.locals.get(&pass);
            let runs = local.and_then(|local| local.runs.get(&id)).copied().unwrap_or(0);
            if program.is_acyclic && runs != u32::from(expected.contains_key(&id)) {
                return Err(violation(
                    "once",
                    format!("node {id} of worker {} ran {runs} times", node.worker),
                ));
            }
            if matches!(node.op, crate::graph::Op::Leaf) {
                let found = local.and_then(|local| local.gradients.get(&id));
                if found != expected.get(&id) {
                    let text = format!("leaf {id} has {found:?}, and should have {:?}", expected.get(&id));
                    return Err(violation("gradients", text));
                }
            }
        }
        let products = self.workers.iter().filter_map(|worker| worker.locals.get(&pass));
        self.summary.products += products.map(|local| u64::from(local.products)).sum::<u64>();
        Ok(())
    }
}

fn violation(invariant: &'static str, text: String) -> Violation {
    Violation { invariant, text }
}

#[expect(clippy::disallowed_methods, reason = "some instant to begin with; time is virtual")]
fn start() -> Instant {
    Instant::now()
}
