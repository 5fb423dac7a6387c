//! Driving [`Passes`]: backward passes, between the other workers and this one's local engine.
//!
//! What workers say to each other in a pass are ordinary calls, so that their loss, their end and the waves
//! (TERM-1) are those of all calls. They are never held back, and nobody's thread waits for their answers.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tensorcall_proto::autograd::{AutogradCall, Content, Effect, Pass, Passes, Step, Work};
use tensorcall_proto::ids::{Life, PassId, Rank};
use tensorcall_proto::wire::message::{Encoding, FunctionRef};

use super::calls::{CallError, Request};
use super::desk::{Desk, Tray};
use super::peers::Peer;
use super::serve::Responder;
use super::{Agent, Inner};
use crate::autograd::{Arrived, Found, LocalEngine, NO_ENGINE, PassError, Roots};
use crate::body::{Body, Received};
use crate::clock::now;
use crate::error::{Error, ErrorKind, Result};
use crate::future::{Promise, Response, RpcFuture, promise};
use crate::sync::Mutex;

/// How errors name the calls of a pass.
const LABEL: &str = "a backward pass";

/// This worker's part in backward passes.
pub(super) struct Backward(Mutex<State>);

struct State {
    passes: Passes<Gradient, PassError, Responder>,
    /// Of the passes that began here.
    begun: HashMap<PassId, Begun>,
}

struct Begun {
    promise: Promise,
    /// Until the plan is made.
    roots: Option<Roots>,
    /// Where the thread that waits for it takes work, if it is so.
    tray: Option<Arc<Tray>>,
}

/// Gradients on their way out or in.
#[derive(Debug)]
enum Gradient {
    Found(Encoding, Body),
    Arrived(Encoding, Received),
}

impl Backward {
    pub(super) fn new(me: Life) -> Self {
        Self(Mutex::new(State { passes: Passes::new(me), begun: HashMap::new() }))
    }
}

impl Agent {
    /// Begins a backward pass in an autograd context, from `roots`, which the local engine knows what to do
    /// with. The future has an empty response once all gradients are where they belong, on all workers; or it
    /// raises the exception of a local engine, or fails. After `patience` without any progress the pass fails.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] if the handler has no local engine, [`ErrorKind::ShuttingDown`] after
    /// [`Agent::close`].
    pub fn backward(
        &self,
        context: u64,
        roots: Roots,
        retain_graph: bool,
        patience: Option<Duration>,
    ) -> Result<RpcFuture> {
        self.inner.check_home()?;
        self.inner.begin_pass(context, roots, retain_graph, patience, None)
    }

    /// As [`Agent::backward`], for a thread that is going to wait: this worker's part of the pass is done by
    /// whoever is in [`Desk::work_until`].
    ///
    /// # Errors
    ///
    /// As [`Agent::backward`].
    pub fn begin_backward(
        &self,
        context: u64,
        roots: Roots,
        retain_graph: bool,
        patience: Option<Duration>,
    ) -> Result<Desk> {
        self.inner.check_home()?;
        let tray = Arc::<Tray>::default();
        let at = Some(Arc::clone(&tray));
        let future = self.inner.begin_pass(context, roots, retain_graph, patience, at)?;
        Ok(Desk::new(self.inner.this.clone(), future, tray))
    }

    /// How many backward passes this worker takes part in.
    pub fn current_passes(&self) -> usize {
        if self.is_here() { self.inner.passes() } else { 0 }
    }
}

impl Inner {
    fn begin_pass(
        &self,
        context: u64,
        roots: Roots,
        retain_graph: bool,
        patience: Option<Duration>,
        tray: Option<Arc<Tray>>,
    ) -> Result<RpcFuture> {
        if self.handler.local_engine().is_none() {
            return Err(Error::usage(NO_ENGINE.1));
        }
        self.members()?;
        if self.is_closed() {
            return Err(Error::shutting_down());
        }
        let (promise, future) = promise();
        let patience = patience.map(|limit| u64::try_from(limit.as_micros()).unwrap_or(u64::MAX));
        self.with_passes(|state| {
            let pass = state.passes.begin(now(), context, retain_graph, patience);
            state.begun.insert(pass, Begun { promise, roots: Some(roots), tray });
        });
        Ok(future)
    }

    /// A call that is part of a pass.
    pub(super) fn autograd_call(
        &self,
        call: AutogradCall,
        encoding: Encoding,
        body: Received,
        by: Responder,
    ) {
        if self.handler.local_engine().is_none() {
            let (kind, text) = NO_ENGINE;
            return by.failed(kind, text.to_owned());
        }
        let content = match call.step {
            Step::Gradient { .. } => Content::Gradient(Gradient::Arrived(encoding, body)),
            Step::Abort => Content::Error(PassError::unpack(encoding, body)),
            _ => Content::Nothing,
        };
        let from = by.caller();
        self.with_passes(|state| state.passes.handle_call(now(), from, call, content, by));
    }

    /// A worker is gone: passes do not wait for it.
    pub(super) fn autograd_lost(&self, peer: &Peer) {
        let text = format!(
            "worker '{}' (rank {}) is gone, which took part in a backward pass",
            peer.name(),
            peer.rank()
        );
        self.with_passes(|state| {
            let error = PassError::failed(ErrorKind::PeerLost, text);
            state.passes.handle_lost(peer.rank(), &error);
        });
    }

    /// The agent is closed, and so all passes are over.
    pub(super) fn close_passes(&self) {
        let (name, rank) = (&self.me.name, self.me.rank);
        let text = format!("worker '{name}' (rank {rank}) shuts down, which takes part in a backward pass");
        let error = PassError::failed(ErrorKind::ShuttingDown, text);
        self.with_passes(|state| state.passes.fail_all(&error));
    }

    /// Time has passed.
    pub(super) fn tick_passes(&self, now: Instant) {
        let next = self.backward.0.lock().passes.next_deadline();
        match next {
            Some(next) if next <= now => self.with_passes(|state| state.passes.handle_time(now)),
            Some(next) => self.schedule(next),
            None => {}
        }
    }

    /// How many passes this worker takes part in: what is processed here, for a wave (TERM-1).
    pub(super) fn passes(&self) -> usize {
        self.backward.0.lock().passes.len()
    }

    /// Tells the machine something, then does what it asks for.
    fn with_passes(&self, tell: impl FnOnce(&mut State)) {
        self.tell_passes(None, tell);
    }

    /// As [`with_passes`](Self::with_passes), on a thread that is at work on the pass `here`. Tells whether
    /// there is more to do for it.
    fn tell_passes(&self, here: Option<PassId>, tell: impl FnOnce(&mut State)) -> bool {
        // In sight of the waves until all that follows from it is (TERM-1).
        self.completing.fetch_add(1, Ordering::SeqCst);
        tell(&mut self.backward.0.lock());
        let mut more = false;
        for pass in self.drain_passes() {
            if here == Some(pass.id) {
                more = true;
                continue;
            }
            let tray = self.backward.0.lock().begun.get(&pass.id).and_then(|begun| begun.tray.clone());
            if !tray.is_some_and(|tray| tray.lay(pass)) {
                self.work_on_pool(pass);
            }
        }
        self.completing.fetch_sub(1, Ordering::SeqCst);
        self.became_idle();
        more
    }

    /// Carries out what the machine asks for, but for threads: for these passes.
    fn drain_passes(&self) -> Vec<Pass> {
        let mut threads = Vec::new();
        loop {
            let mut state = self.backward.0.lock();
            let Some(effect) = state.passes.poll_effect() else {
                let next = state.passes.next_deadline();
                drop(state);
                if let Some(next) = next {
                    self.schedule(next);
                }
                return threads;
            };
            let begun = match &effect {
                Effect::Ended(pass, _) => state.begun.remove(pass),
                _ => None,
            };
            drop(state);
            match effect {
                Effect::Work(pass) => threads.push(pass),
                Effect::Call { pass, to, step, content } => self.call_in_pass(pass, to, step, content),
                Effect::Answer(by, Ok(())) => by.returned(Encoding::Value, Body::default()),
                Effect::Answer(by, Err(error)) => {
                    let (encoding, body) = error.pack();
                    by.raised(encoding, body);
                }
                Effect::Ended(_, outcome) => {
                    if let Some(begun) = begun {
                        begun.promise.complete(response(&outcome));
                    }
                }
            }
        }
    }

    fn call_in_pass(&self, pass: Pass, to: Rank, step: Step, content: Content<Gradient, PassError>) {
        let (encoding, body) = match content {
            Content::Gradient(Gradient::Found(encoding, body)) => (encoding, body),
            Content::Error(error) => error.pack(),
            Content::Nothing | Content::Gradient(Gradient::Arrived(..)) => (Encoding::Bytes, Body::default()),
        };
        let request = Request {
            function: FunctionRef::Autograd(AutogradCall { pass, step }.into()),
            label: LABEL.into(),
            encoding,
            body,
            timeout: None,
            deadline: None,
            creates: None,
        };
        match self.call(to, request) {
            Ok(future) => {
                let (agent, answer) = (self.this.clone(), future.clone());
                future.on_done(move || {
                    if let Some(agent) = agent.upgrade() {
                        agent.answered(pass.id, step, &answer);
                    }
                });
            }
            Err(CallError::Failed(error)) => {
                let mut state = self.backward.0.lock();
                state.passes.handle_answer(now(), pass.id, step, Err(error.into()));
            }
            // What belongs to a pass is never held back.
            Err(CallError::Full(_)) => {}
        }
    }

    fn answered(&self, pass: PassId, step: Step, answer: &RpcFuture) {
        let result = match answer.take() {
            Some(Ok(Response { raised: false, .. })) => Ok(()),
            Some(Ok(Response { raised: true, encoding, body })) => Err(PassError::unpack(encoding, body)),
            Some(Err(error)) => Err(error.into()),
            None => Err(Error::shutting_down().into()),
        };
        self.with_passes(|state| state.passes.handle_answer(now(), pass, step, result));
    }

    /// Has a pool thread do what the local engine has to do in a pass.
    pub(super) fn work_on_pool(&self, pass: Pass) {
        let agent = self.this.clone();
        self.pool.spawn(Box::new(move || {
            if let Some(agent) = agent.upgrade() {
                agent.work_on(pass);
            }
        }));
    }

    /// Does what the local engine has to do in a pass.
    pub(super) fn work_on(&self, pass: Pass) {
        let handler = Arc::clone(&self.handler);
        let Some(engine) = handler.local_engine() else { return };
        loop {
            let (work, roots) = {
                let mut state = self.backward.0.lock();
                let work = state.passes.take_work(pass.id);
                let roots = match &work {
                    Some(Work::Plan) => state.begun.get_mut(&pass.id).and_then(|begun| begun.roots.take()),
                    _ => None,
                };
                (work, roots)
            };
            // Part of what was to be done may be settled by saying something to others.
            self.with_passes(|_| {});
            let Some(work) = work else { return };
            let report = run(engine, &pass, work, roots);
            if !self.tell_passes(Some(pass.id), |state| report(&mut state.passes)) {
                return;
            }
        }
    }
}

type Report = Box<dyn FnOnce(&mut Passes<Gradient, PassError, Responder>)>;

/// Lets the local engine do something. Returns what tells the machine the outcome.
fn run(
    engine: &dyn LocalEngine,
    pass: &Pass,
    work: Work<Gradient, PassError>,
    roots: Option<Roots>,
) -> Report {
    let id = pass.id;
    match work {
        Work::Plan => {
            let plan = guarded(|| engine.plan(pass, roots));
            Box::new(move |passes| passes.handle_planned(now(), id, plan))
        }
        Work::Vjp { arrived, wanted, last } => {
            let arrived = arrived.into_iter().map(|(message, gradient)| {
                let gradients = gradient.and_then(|gradient| match gradient {
                    Gradient::Arrived(encoding, body) => Some((encoding, body)),
                    Gradient::Found(..) => None,
                });
                Arrived { message, gradients }
            });
            let arrived = arrived.collect();
            let found = guarded(|| engine.vjp(pass, arrived, &wanted, last));
            let found = found.map(|found| {
                let found = found.into_iter();
                found
                    .map(|Found { message, gradients }| {
                        (message, gradients.map(|(encoding, body)| Gradient::Found(encoding, body)))
                    })
                    .collect()
            });
            Box::new(move |passes| passes.handle_vjp_done(now(), id, found))
        }
        Work::End(outcome) => {
            let ended = guarded(|| {
                engine.end(pass, outcome.as_ref().err());
                Ok(())
            });
            if let Err(error) = ended {
                tracing::error!(%error, "end of a backward pass");
            }
            Box::new(move |passes| passes.handle_ended(id))
        }
    }
}

/// A local engine that panics ends the pass, not the agent.
fn guarded<T>(run: impl FnOnce() -> Result<T, PassError>) -> Result<T, PassError> {
    catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|_| Err(PassError::failed(ErrorKind::Autograd, "the local engine panicked")))
}

fn response(outcome: &Result<(), PassError>) -> Result<Response> {
    let (raised, encoding, body) = match outcome {
        Ok(()) => (false, Encoding::Value, Body::default()),
        Err(error) => match error.exception() {
            Some(packed) => (true, packed.encoding, packed.body.clone()),
            None => return Err(error.to_error()),
        },
    };
    let body = body.receive().map_err(|error| Error::io("no memory for an exception", error))?;
    Ok(Response { raised, encoding, body })
}
