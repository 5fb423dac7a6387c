//! [`NativeHandler`]: runs the functions of a native worker.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use tensorcall_proto::wire::message::FailureKind;

use super::agent::Shared;
use super::answer::{Answer, Object};
use super::function::{Failure, GONE, Incoming, Running};
use super::message;
use super::states::{Functions, Registered, States};
use super::task::Task;
use super::value::Value;
use crate::agent::{Handler, InboundCall, Responder, ThreadHook};
use crate::autograd::{Entered, LocalEngine, RELEASE, Within};

/// A burst of short calls is best run by one thread; functions that take longer than this run side by side.
const PATIENCE: Duration = Duration::from_micros(50);

/// How the names of functions begin that workers call of themselves.
const OURS: &str = "tensorcall.";

/// See the module.
pub(super) struct NativeHandler {
    pub(super) functions: Functions,
    pub(super) states: States,
    pub(super) shared: Arc<Shared>,
    pub(super) local_engine: Option<Arc<dyn LocalEngine>>,
}

impl NativeHandler {
    fn run(&self, function: &Registered, call: InboundCall, responder: Responder) {
        let name = call.function.unwrap_or_default();
        let (caller, mark) = (call.caller, responder.autograd());
        let answer = Answer::new(responder, Arc::clone(&self.shared), name);
        // The context is the function's, and that of the calls which it makes.
        let tape = match self.shared.contexts.as_ref().zip(mark) {
            Some((contexts, mark)) => {
                let Some(agent) = answer.responder().agent() else { return answer.refuse(GONE) };
                contexts.join(&agent);
                Some(contexts.enter(mark.context))
            }
            None => None,
        };
        let arguments = match message::unpack_arguments(call.encoding, call.body, &self.shared) {
            Ok(arguments) => arguments,
            Err(error) => return answer.refuse(&error.to_string()),
        };
        if let Some(text) = wrong_number(function.arity(), arguments.len()) {
            return answer.refuse(&text);
        }
        let states = &self.states;
        let arguments = arguments.into_iter();
        let incoming = Incoming { arguments, taken: 0, states, caller: &caller, answer: &answer };
        let _inside = tape.clone().map(|tape| Entered::new(Some(tape)));
        match catch_unwind(AssertUnwindSafe(|| function.run(incoming))) {
            Ok(Running::Done(outcome)) => answer.give(outcome),
            Ok(Running::Later(future)) if tape.is_some() => {
                Task::start(Box::pin(Within::new(tape, future)), answer);
            }
            Ok(Running::Later(future)) => Task::start(future, answer),
            Err(panic) => answer.give(Err(Failure::panicked(&*panic))),
        }
    }
}

impl NativeHandler {
    fn handle_theirs(&self, call: InboundCall, responder: Responder) {
        let Some(name) = call.function.as_deref() else {
            let text = "this worker runs no Python: it takes functions by the names that they are registered \
                        with, and plain data";
            return responder.failed(FailureKind::Usage, text.to_owned());
        };
        match self.functions.get(name) {
            Some(function) => NativeHandler::run(self, function, call, responder),
            None => responder.failed(FailureKind::Usage, self.functions.missing(name)),
        }
    }

    /// A call whose name is one of those that workers call of themselves, or looks like it.
    fn handle_ours(&self, call: InboundCall, responder: Responder) {
        let Some((call, responder)) = self.shared.gatherings.handle(call, responder) else { return };
        let Some((call, responder)) = self.shared.roster.handle(call, responder) else { return };
        if let Some((call, responder)) = self.release(call, responder) {
            self.handle_theirs(call, responder);
        }
    }

    /// Ends an autograd context whose sender has ended it, if the call is about that.
    fn release(&self, call: InboundCall, responder: Responder) -> Option<(InboundCall, Responder)> {
        if call.function.as_deref() != Some(RELEASE) {
            return Some((call, responder));
        }
        let answer = Answer::new(responder, Arc::clone(&self.shared), RELEASE.into());
        let arguments = message::unpack_arguments(call.encoding, call.body, &self.shared);
        match arguments.as_deref() {
            Ok([Value::Int(id)]) => {
                if let Some(contexts) = &self.shared.contexts {
                    contexts.release(id.cast_unsigned());
                }
                answer.send(&Value::Nil);
            }
            Ok(_) => answer.refuse("it takes the number of a context"),
            Err(error) => answer.refuse(&error.to_string()),
        }
        None
    }
}

impl ThreadHook for NativeHandler {
    fn run(&self, body: &mut (dyn FnMut() + Send)) {
        body();
    }

    fn patience(&self) -> Duration {
        PATIENCE
    }
}

impl Handler for NativeHandler {
    fn handle(&self, call: InboundCall, responder: Responder) {
        if call.function.as_deref().is_some_and(|name| name.starts_with(OURS)) {
            self.handle_ours(call, responder);
        } else {
            self.handle_theirs(call, responder);
        }
    }

    fn local_engine(&self) -> Option<&dyn LocalEngine> {
        self.local_engine.as_deref()
    }

    fn fetch(&self, value: Arc<dyn Any + Send + Sync>, _: InboundCall, responder: Responder) {
        let answer = Answer::new(responder, Arc::clone(&self.shared), "fetch".into());
        match value.downcast_ref::<Object>() {
            Some(Object::Value(value)) => answer.send(value),
            Some(Object::Kept { type_name, .. }) => {
                answer.refuse(&format!("a value of type {type_name} stays on its worker"));
            }
            None => answer.refuse("the value is not one of a native worker"),
        }
    }
}

fn wrong_number(expected: usize, found: usize) -> Option<String> {
    let plural = if expected == 1 { "" } else { "s" };
    let was = if found == 1 { "was" } else { "were" };
    (expected != found).then(|| format!("it takes {expected} argument{plural}, but {found} {was} given"))
}
