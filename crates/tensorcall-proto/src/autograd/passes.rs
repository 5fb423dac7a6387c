//! [`Passes`]: one worker's part in all backward passes.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use super::error::AutogradError;
use super::message::{AutogradCall, Pass, Step};
use super::pass::Engine;
use super::{Content, Effect, Plan, Work};
use crate::ids::{Life, PassId, Rank};

/// How many passes that are over are remembered, so that what comes late finds out.
const REMEMBERED: usize = 256;

/// One worker's part in all backward passes. `G` are gradients, `E` errors, `A` what answers a call.
///
/// Call [`poll_effect`](Self::poll_effect) until there are none after every `handle_*` and `take_work`.
#[derive(Debug)]
pub struct Passes<G, E, A> {
    me: Life,
    current: BTreeMap<PassId, Engine<G, E, A>>,
    over: Over<E>,
    next_pass: u64,
    effects: VecDeque<Effect<G, E, A>>,
}

/// How the last passes ended here.
#[derive(Debug)]
struct Over<E> {
    outcomes: BTreeMap<PassId, Outcome<E>>,
    order: VecDeque<PassId>,
}

#[derive(Debug, Clone)]
struct Outcome<E> {
    result: Result<(), E>,
    /// The messages whose gradients were sent.
    sent: Vec<u64>,
}

impl<G, E: Clone + From<AutogradError>, A> Passes<G, E, A> {
    /// No passes yet, on the worker `me`.
    pub fn new(me: Life) -> Self {
        let over = Over { outcomes: BTreeMap::new(), order: VecDeque::new() };
        Self { me, current: BTreeMap::new(), over, next_pass: 0, effects: VecDeque::new() }
    }

    /// How many passes are under way here.
    pub fn len(&self) -> usize {
        self.current.len()
    }

    /// Whether no pass is under way here.
    pub fn is_empty(&self) -> bool {
        self.current.is_empty()
    }

    /// Begins a pass, whose roots are on this worker. [`Effect::Ended`] says how it ended.
    pub fn begin(
        &mut self,
        now: Instant,
        context: u64,
        retain_graph: bool,
        patience_us: Option<u64>,
    ) -> PassId {
        let id = PassId::new(self.me, self.next_pass);
        self.next_pass += 1;
        let pass = Pass { id, context, retain_graph, patience_us };
        self.start(now, pass, true);
        id
    }

    /// A worker has called; `answer` is what answers it.
    pub fn handle_call(
        &mut self,
        now: Instant,
        from: Rank,
        call: AutogradCall,
        content: Content<G, E>,
        answer: A,
    ) {
        let AutogradCall { pass, step } = call;
        if let Some(outcome) = self.over.outcomes.get(&pass.id) {
            return self.effects.extend(outcome.answer(from, pass, step, answer));
        }
        if step == Step::Abort && !self.current.contains_key(&pass.id) {
            let error = if let Content::Error(error) = content { error } else { AutogradError::Over.into() };
            self.over.insert(pass.id, Err(error), Vec::new());
            return self.effects.push_back(Effect::Answer(answer, Ok(())));
        }
        if !self.current.contains_key(&pass.id) {
            self.start(now, pass, false);
        }
        if let Some(engine) = self.current.get_mut(&pass.id) {
            engine.handle_call(now, from, step, content, answer, &mut self.effects);
        }
    }

    /// What became of the call `step` of an [`Effect::Call`].
    pub fn handle_answer(&mut self, now: Instant, pass: PassId, step: Step, result: Result<(), E>) {
        if let Some(engine) = self.current.get_mut(&pass) {
            engine.handle_answer(now, step, result, &mut self.effects);
        }
    }

    /// What a thread that [`Effect::Work`] asked for is to do; `None` if nothing is left to do. Report the
    /// outcome by the method that [`Work`] names.
    pub fn take_work(&mut self, pass: PassId) -> Option<Work<G, E>> {
        self.current.get_mut(&pass)?.take_work(&mut self.effects)
    }

    /// The local engine has done [`Work::Plan`].
    pub fn handle_planned(&mut self, now: Instant, pass: PassId, plan: Result<Plan, E>) {
        if let Some(engine) = self.current.get_mut(&pass) {
            engine.handle_planned(now, plan, &mut self.effects);
        }
    }

    /// The local engine has done [`Work::Vjp`]: what it has for each of the wanted recv functions. One that
    /// it does not name has no gradient.
    pub fn handle_vjp_done(
        &mut self,
        now: Instant,
        pass: PassId,
        gradients: Result<Vec<(u64, Option<G>)>, E>,
    ) {
        if let Some(engine) = self.current.get_mut(&pass) {
            engine.handle_vjp_done(now, gradients, &mut self.effects);
        }
    }

    /// The local engine has done [`Work::End`].
    pub fn handle_ended(&mut self, pass: PassId) {
        if let Some(mut engine) = self.current.remove(&pass) {
            let (result, sent) = engine.handle_ended(&mut self.effects);
            self.over.insert(pass, result, sent);
        }
    }

    /// A worker is lost, or has left: all passes that it takes part in fail with `error`.
    pub fn handle_lost(&mut self, rank: Rank, error: &E) {
        for engine in self.current.values_mut() {
            engine.handle_lost(rank, error.clone(), &mut self.effects);
        }
    }

    /// This worker ends: all passes fail with `error`.
    pub fn fail_all(&mut self, error: &E) {
        for engine in self.current.values_mut() {
            engine.handle_end(error.clone(), &mut self.effects);
        }
    }

    /// It is `now`, which may be later than [`next_deadline`](Self::next_deadline).
    pub fn handle_time(&mut self, now: Instant) {
        for engine in self.current.values_mut() {
            engine.handle_time(now, &mut self.effects);
        }
    }

    /// When [`handle_time`](Self::handle_time) is called next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.current.values().filter_map(Engine::next_deadline).min()
    }

    /// The next thing to do.
    pub fn poll_effect(&mut self) -> Option<Effect<G, E, A>> {
        self.effects.pop_front()
    }

    fn start(&mut self, now: Instant, pass: Pass, starter: bool) {
        let engine = Engine::new(self.me.rank, pass, starter, now);
        let engine = self.current.entry(pass.id).or_insert(engine);
        engine.advance(&mut self.effects);
    }
}

impl<E: Clone> Outcome<E> {
    /// Something about a pass that is over here.
    fn answer<G, A>(&self, from: Rank, pass: Pass, step: Step, answer: A) -> Vec<Effect<G, E, A>> {
        let result = if step == Step::Abort { Ok(()) } else { self.result.clone() };
        let mut effects = vec![Effect::Answer(answer, result)];
        // Whoever asks for what was not sent waits for what never was.
        if let (Step::Ask { message }, Ok(())) = (step, &self.result)
            && !self.sent.contains(&message)
        {
            let step = Step::NoGradient { message };
            effects.push(Effect::Call { pass, to: from, step, content: Content::Nothing });
        }
        effects
    }
}

impl<E> Over<E> {
    fn insert(&mut self, pass: PassId, result: Result<(), E>, sent: Vec<u64>) {
        if self.outcomes.insert(pass, Outcome { result, sent }).is_none() {
            self.order.push_back(pass);
        }
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.outcomes.remove(&oldest);
        }
    }
}
