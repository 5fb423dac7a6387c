//! [`Contexts`]: the autograd contexts of a worker, what messages do to them, and how they end.
//!
//! A context begins on one worker and is entered by the others as calls carry its number to them. Where it
//! began decides when it ends: then this worker tells those that it sent the context to, and they tell
//! theirs, as soon as their calls in it have outcomes. Python workers do the same (`autograd/_release.py`).

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tensorcall_proto::ids::Rank;
use tensorcall_proto::wire::ValueWriter;
use tensorcall_proto::wire::message::{AutogradRef, Encoding, FunctionRef};
use tensorcall_proto::wire::tensor::TensorDesc;

use super::scope::{self, Entered};
use super::tape::{Graph, Slot, Tape, WORKER_SHIFT, sender};
use crate::agent::{Agent, CallError, Inner, Request};
use crate::body::Body;
use crate::clock::now;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Mutex;

/// The function that ends a context on a worker that it was sent to, by its number.
pub const RELEASE: &str = "tensorcall.autograd._release:release_here";

/// How long a worker has to answer that it knows of the end, and how often it is told.
const TELL_TIMEOUT: Duration = Duration::from_mins(1);
const TELL_ATTEMPTS: u32 = 5;
/// So many contexts of others begin here before those of lost workers are looked for.
const SWEEP_EVERY: u32 = 64;
const COUNTER_MAX: u64 = (1 << WORKER_SHIFT) - 1;

/// The autograd contexts of one worker.
pub struct Contexts {
    this: Weak<Self>,
    agent: OnceLock<(Rank, Weak<Inner>)>,
    table: Mutex<Table>,
    kept: OnceLock<Arc<dyn Any + Send + Sync>>,
}

#[derive(Default)]
struct Table {
    tapes: HashMap<u64, Arc<Tape>>,
    contexts_made: u64,
    messages_made: u64,
    entered: u32,
}

impl Contexts {
    /// No contexts yet, and no agent.
    pub fn new() -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            agent: OnceLock::new(),
            table: Mutex::default(),
            kept: OnceLock::new(),
        })
    }

    /// Be those of this agent's worker; of the first that is given.
    pub fn join(&self, agent: &Agent) {
        if self.agent.get().is_none() {
            let _ = self.agent.set((agent.identity().rank, agent.weak()));
        }
    }

    /// Begins a context on this worker.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] before [`join`](Self::join).
    pub(super) fn begin(&self) -> Result<Arc<Tape>> {
        let rank = self.rank()?;
        let mut table = self.table.lock();
        let id = number(rank, &mut table.contexts_made)?;
        let tape = Arc::new(Tape::new(id, self.this.clone()));
        table.tapes.insert(id, Arc::clone(&tape));
        Ok(tape)
    }

    /// The context of this number, if it is here.
    pub fn find(&self, id: u64) -> Option<Arc<Tape>> {
        self.table.lock().tapes.get(&id).cloned()
    }

    /// The context of this number, which a message has brought; begins here if it is new.
    pub fn enter(&self, id: u64) -> Arc<Tape> {
        let mut table = self.table.lock();
        if let Some(tape) = table.tapes.get(&id) {
            return Arc::clone(tape);
        }
        let tape = Arc::new(Tape::new(id, self.this.clone()));
        table.tapes.insert(id, Arc::clone(&tape));
        table.entered += 1;
        let sweep = table.entered.is_multiple_of(SWEEP_EVERY);
        drop(table);
        if sweep {
            self.end_orphans();
        }
        tape
    }

    /// How many contexts there are.
    pub fn len(&self) -> usize {
        self.table.lock().tapes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A call to `to` is about to be made whose arguments have these tensors in graphs. `None` if no
    /// context is open here: it is like any other call then.
    pub fn request(&self, to: Rank, tensors: Vec<Graph>) -> Result<Option<Outgoing>> {
        let Some(tape) = scope::current().filter(|tape| tape.is_of(self)) else { return Ok(None) };
        let message = if tensors.is_empty() { None } else { Some(self.new_message()?) };
        tape.begin_call();
        tape.send(to, message, tensors);
        let Some(contexts) = self.this.upgrade() else { return Ok(None) };
        Ok(Some(Outgoing { contexts, tape, message, answered: AtomicBool::new(false) }))
    }

    /// A call of `to` in a context is about to be answered with these tensors. `None` if there are none.
    pub fn reply(&self, context: u64, to: Rank, tensors: Vec<Graph>) -> Result<Option<AutogradRef>> {
        if tensors.is_empty() {
            return Ok(None);
        }
        // Who fetches a value may be the first to bring its context here.
        let tape = self.enter(context);
        let message = self.new_message()?;
        tape.send(to, Some(message), tensors);
        Ok(Some(AutogradRef { context, message: Some(message) }))
    }

    /// What the local engine keeps here for all contexts: always of the same type.
    pub fn kept<T: Any + Default + Send + Sync>(&self) -> Arc<T> {
        let kept = self.kept.get_or_init(|| Arc::new(T::default()));
        Arc::clone(kept).downcast().unwrap_or_default()
    }

    /// Where a tensor that a message has brought will be in the graphs of this worker.
    pub fn slot(&self, desc: &TensorDesc) -> Arc<Slot> {
        Slot::new(desc, self.this.clone())
    }

    /// A message that belongs to a context has brought these tensors, those of its table that need gradients.
    /// False if that context has ended here: then nobody asks for their gradients.
    pub fn received(&self, mark: AutogradRef, tensors: Vec<Arc<Slot>>) -> bool {
        let (Some(message), Some(tape)) = (mark.message, self.find(mark.context)) else { return false };
        tape.receive(message, tensors)
    }

    /// Runs what follows on this thread in the context that a request has brought.
    pub fn scope(&self, mark: AutogradRef) -> Entered<'static> {
        Entered::new(Some(self.enter(mark.context)))
    }

    /// Ends a context here, and has those told that it was sent to. False if it is not here.
    pub fn release(&self, id: u64) -> bool {
        let Some(tape) = self.table.lock().tapes.remove(&id) else { return false };
        self.tell(id, tape.end());
        true
    }

    fn rank(&self) -> Result<Rank> {
        let missing = || Error::usage("this worker has no agent yet, so it has no autograd contexts");
        self.agent.get().map(|(rank, _)| *rank).ok_or_else(missing)
    }

    /// The agent of this worker, if it is still there.
    pub(crate) fn agent(&self) -> Option<Agent> {
        self.agent.get()?.1.upgrade()?.agent()
    }

    fn new_message(&self) -> Result<u64> {
        let rank = self.rank()?;
        number(rank, &mut self.table.lock().messages_made)
    }

    /// Ends what workers began that were lost since: nobody else will.
    fn end_orphans(&self) {
        let Some(agent) = self.agent() else { return };
        let gone = agent.gone();
        if gone.is_empty() {
            return;
        }
        let is_orphan = |id: &&u64| sender(**id).is_none_or(|rank| gone.contains(&rank));
        let orphans: Vec<u64> = self.table.lock().tapes.keys().filter(is_orphan).copied().collect();
        for id in orphans {
            self.release(id);
        }
    }

    fn tell(&self, id: u64, ranks: BTreeSet<Rank>) {
        if ranks.is_empty() {
            return;
        }
        // Whoever leaves takes its contexts along.
        let Some(agent) = self.agent() else { return };
        let me = agent.identity().rank;
        for to in ranks.into_iter().filter(|&to| to != me) {
            tell(&agent, id, to, TELL_ATTEMPTS);
        }
    }
}

impl fmt::Debug for Contexts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contexts").field("len", &self.len()).finish_non_exhaustive()
    }
}

/// A call in a context, from just before it is made until it has its outcome. If this is dropped before
/// [`answered`](Self::answered) it had no answer, and its tensors get no gradients.
#[must_use = "the call counts as unanswered when this is dropped"]
pub struct Outgoing {
    contexts: Arc<Contexts>,
    tape: Arc<Tape>,
    message: Option<u64>,
    answered: AtomicBool,
}

impl Outgoing {
    /// What the request carries.
    pub fn mark(&self) -> AutogradRef {
        AutogradRef { context: self.tape.id(), message: self.message }
    }

    /// The callee has answered, whatever.
    pub fn answered(&self) {
        self.answered.store(true, Ordering::Relaxed);
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if let (false, Some(message)) = (*self.answered.get_mut(), self.message) {
            self.tape.unsent(message);
        }
        let (id, ranks) = (self.tape.id(), self.tape.end_call());
        if let (false, Some(agent)) = (ranks.is_empty(), self.contexts.agent()) {
            // This may be a thread that must not call.
            let contexts = Arc::clone(&self.contexts);
            agent.spawn(move || contexts.tell(id, ranks));
        }
    }
}

impl fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing").field("mark", &self.mark()).finish_non_exhaustive()
    }
}

fn number(rank: Rank, counter: &mut u64) -> Result<u64> {
    if *counter > COUNTER_MAX {
        return Err(Error::usage("this worker has used up its ids of autograd contexts or messages"));
    }
    let number = u64::from(rank.get()) << WORKER_SHIFT | *counter;
    *counter += 1;
    Ok(number)
}

/// Tells a worker that a context has ended; again if there is no answer.
fn tell(agent: &Agent, id: u64, to: Rank, attempts: u32) {
    let call = match agent.try_call(to, release_request(id)) {
        Ok(call) => call,
        Err(CallError::Full(request)) => {
            let (again, limit) = (agent.clone(), now() + TELL_TIMEOUT);
            return agent.spawn(move || {
                if again.wait_for_room(to, request.body.len(), Some(limit)).unwrap_or(false) {
                    tell(&again, id, to, attempts);
                }
            });
        }
        Err(CallError::Failed(error)) => return untold(id, to, &error),
    };
    let (weak, answer) = (agent.weak(), call.clone());
    call.on_done(move || {
        let Some(agent) = weak.upgrade().and_then(|inner| inner.agent()) else { return };
        match answer.take() {
            Some(Err(error)) if error.kind() == ErrorKind::Timeout && attempts > 1 => {
                let again = agent.clone();
                agent.spawn(move || tell(&again, id, to, attempts - 1));
            }
            Some(Err(error)) => untold(id, to, &error),
            Some(Ok(_)) | None => {}
        }
    });
}

/// Lost, or left: it takes its contexts along.
fn untold(context: u64, to: Rank, error: &Error) {
    tracing::debug!(%error, context, %to, "a worker was not told that an autograd context has ended");
}

/// A call like that of a Python worker: one positional argument, and none by name.
fn release_request(id: u64) -> Request {
    let mut payload = Vec::new();
    let mut writer = ValueWriter::new(&mut payload);
    writer.tuple(2);
    writer.tuple(1);
    writer.int(id.cast_signed());
    writer.map(0);
    Request {
        function: FunctionRef::Name(RELEASE.into()),
        label: RELEASE.into(),
        encoding: Encoding::Value,
        body: Body::of(payload),
        timeout: Some(TELL_TIMEOUT),
        deadline: None,
        creates: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::super::Context;
    use super::*;
    use crate::agent::{Handler, InboundCall, PeerInfo, Responder, ThreadHook};
    use crate::config::AgentConfig;
    use crate::transport::memory::Hub;
    use tensorcall_proto::ids::WorkerName;
    use tensorcall_proto::wire::message::FailureKind;
    use tensorcall_proto::wire::{Limits, Value};

    /// A worker that knows contexts and nothing else.
    struct Worker(Arc<Contexts>);

    impl ThreadHook for Worker {
        fn run(&self, body: &mut (dyn FnMut() + Send)) {
            body();
        }
    }

    impl Handler for Worker {
        fn handle(&self, call: InboundCall, responder: Responder) {
            if call.function.as_deref() == Some(RELEASE) {
                self.0.release(released(call.body.payload.as_ref()));
            } else if let Some(mark) = responder.autograd() {
                drop(self.0.scope(mark));
            }
            responder.failed(FailureKind::Usage, "as asked".to_owned());
        }
    }

    fn released(payload: &[u8]) -> u64 {
        match Value::decode(payload, &Limits::default()).unwrap() {
            Value::Tuple(parts) => match &parts[..] {
                [Value::Tuple(args), Value::Map(_)] => match args[..] {
                    [Value::Int(id)] => id.cast_unsigned(),
                    _ => panic!("{args:?}"),
                },
                _ => panic!("{parts:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn group(count: u32) -> (Vec<Agent>, Vec<Arc<Contexts>>) {
        let hub = Hub::new();
        let start = |number: u32| {
            let name = WorkerName::parse(&format!("worker{number}")).unwrap();
            let contexts = Contexts::new();
            let handler = Arc::new(Worker(Arc::clone(&contexts)));
            let config = AgentConfig::new(name, Rank::new(number).unwrap());
            let agent = Agent::start_in_memory(config, handler, &hub).unwrap();
            contexts.join(&agent);
            (agent, contexts)
        };
        let (agents, contexts): (Vec<_>, Vec<_>) = (0..count).map(start).unzip();
        for agent in &agents {
            let info = |agent: &Agent| {
                let me = agent.identity();
                PeerInfo::from_contact(me.name.clone(), me.rank, &agent.contact()).unwrap()
            };
            agent.open(agents.iter().map(info).collect()).unwrap();
        }
        (agents, contexts)
    }

    /// A call that carries the context which is open, if one is.
    fn call(agent: &Agent, contexts: &Contexts, to: u32) -> Option<AutogradRef> {
        let to = Rank::new(to).unwrap();
        let outgoing = contexts.request(to, Vec::new()).unwrap();
        let mark = outgoing.as_ref().map(Outgoing::mark);
        let mut request = release_request(0);
        request.function = FunctionRef::Name("anything".into());
        request.body.autograd = mark;
        let future = agent.call(to, request).unwrap();
        assert!(future.wait_until(Some(now() + Duration::from_secs(20))));
        if let Some(outgoing) = outgoing {
            outgoing.answered();
        }
        mark
    }

    fn await_empty(contexts: &Contexts) {
        let limit = now() + Duration::from_secs(20);
        while !contexts.is_empty() {
            assert!(now() < limit, "a context does not end");
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_context_goes_where_calls_go_and_ends_everywhere() {
        let (agents, contexts) = group(3);
        let context = Context::begin_in(&contexts[0]).unwrap();
        assert_eq!(call(&agents[0], &contexts[0], 1), None);
        {
            let _inside = context.enter();
            assert_eq!(call(&agents[0], &contexts[0], 1).unwrap().context, context.id());
            // That thread's context is none of theirs.
            assert_eq!(call(&agents[1], &contexts[1], 2), None);
        }
        {
            let there = Context::find_in(&contexts[1], context.id()).unwrap();
            let _inside = there.enter();
            call(&agents[1], &contexts[1], 2);
        }
        assert!(contexts.iter().all(|contexts| contexts.len() == 1));

        drop(context);

        for contexts in &contexts {
            await_empty(contexts);
        }
    }

    #[test]
    fn ids_say_whose_they_are_and_are_never_the_same() {
        let (_agents, contexts) = group(2);
        let barrier = Barrier::new(4);
        let many = || {
            barrier.wait();
            (0..50).map(|_| contexts[1].new_message().unwrap()).collect::<Vec<_>>()
        };

        let mut ids = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(many)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        ids.sort_unstable();
        ids.dedup();

        assert_eq!(ids.len(), 200);
        assert!(ids.iter().all(|id| id >> WORKER_SHIFT == 1));
    }

    #[test]
    fn contexts_of_lost_workers_end_when_many_have_come() {
        let (agents, contexts) = group(2);
        contexts[0].enter(1 << WORKER_SHIFT);
        agents[1].close(false, now());
        let limit = now() + Duration::from_secs(20);
        while agents[0].gone().is_empty() {
            let _ = agents[0].try_call(Rank::new(1).unwrap(), release_request(0));
            assert!(now() < limit, "the worker is not lost");
        }

        for own in 0..u64::from(SWEEP_EVERY) {
            contexts[0].enter(own);
        }

        assert!(contexts[0].find(1 << WORKER_SHIFT).is_none());
        assert!(contexts[0].find(5).is_some());
    }

    #[test]
    fn without_an_agent_there_are_no_contexts() {
        assert!(Context::begin_in(&Contexts::new()).is_err());
    }
}
