//! [`Answer`]: from what a function came to, to what its caller gets.

use std::any::Any;
use std::sync::Arc;

use tensorcall_proto::wire::message::{Encoding, FailureKind};
use tensorcall_proto::wire::value::Exception;

use super::agent::{Agent, Shared};
use super::function::{Failure, Outcome, Returned};
use super::message;
use super::value::Value;
use crate::agent::Responder;
use crate::body::Body;
use crate::error::Result;

/// How errors of native functions are also known, so that Python raises one of its own.
const ALSO: &str = "builtins:RuntimeError builtins:Exception";
const PANIC: &str = "rust:panic";

/// What owners keep for those who refer to it.
pub(super) enum Object {
    /// Something that can be sent.
    Value(Value),
    /// Something that stays.
    Kept { object: Arc<dyn Any + Send + Sync>, type_name: &'static str },
}

/// The answer to one request, to be given once.
pub(super) struct Answer {
    responder: Responder,
    shared: Arc<Shared>,
    function: Arc<str>,
}

impl Answer {
    pub(super) fn new(responder: Responder, shared: Arc<Shared>, function: Arc<str>) -> Self {
        Self { responder, shared, function }
    }

    pub(super) fn responder(&self) -> &Responder {
        &self.responder
    }

    /// The agent that was called, if somebody has a handle of it still.
    pub(super) fn agent(&self) -> Option<Agent> {
        Some(Agent::new(self.responder.agent()?, Arc::clone(&self.shared)))
    }

    pub(super) fn give(self, outcome: Outcome) {
        match outcome {
            Ok(Returned::Value(value)) if self.responder.creates() => {
                #[cfg(feature = "candle")]
                let value = match value.settled() {
                    Ok(value) => value,
                    Err(error) => return self.refuse(&format!("the result: {error}")),
                };
                self.responder.keep(Arc::new(Object::Value(value)));
            }
            Ok(Returned::Value(value)) => self.send(&value),
            Ok(Returned::Kept { object, type_name }) if self.responder.creates() => {
                self.responder.keep(Arc::new(Object::Kept { object, type_name }));
            }
            Ok(Returned::Kept { .. }) => {
                self.refuse("its result stays on its worker: call it with remote() for a reference to that");
            }
            Err(Failure::Usage(text)) => self.refuse(&text),
            Err(Failure::Raised { class, message }) => self.raise(&class, message),
        }
    }

    pub(super) fn send(self, value: &Value) {
        match message::pack(value, &self.shared.limits).and_then(|packed| self.recorded(packed)) {
            Ok(body) => self.responder.returned(Encoding::Value, body),
            Err(error) => self.refuse(&format!("the result: {error}")),
        }
    }

    /// A result, which is recorded if the call belongs to an autograd context.
    fn recorded(&self, (body, graphs): message::Packed) -> Result<Body> {
        let (Some(contexts), Some(mark)) = (&self.shared.contexts, self.responder.autograd()) else {
            return Ok(body);
        };
        let autograd = contexts.reply(mark.context, self.responder.caller(), graphs)?;
        Ok(Body { autograd, ..body })
    }

    /// It was not called as it must be.
    pub(super) fn refuse(self, text: &str) {
        let text = format!("function '{}': {text}", self.function);
        self.responder.failed(FailureKind::Usage, text);
    }

    fn raise(self, class: &str, message: String) {
        let origin = format!("function '{}' on worker '{}'", self.function, self.shared.name);
        let exception = Exception { classes: format!("{class} {ALSO}"), message, origin };
        self.responder.raised(Encoding::Value, message::pack_exception(&exception));
    }
}

impl Failure {
    /// A function panicked with this.
    pub(super) fn panicked(payload: &(dyn Any + Send)) -> Self {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let message = format!("panicked: {}", text.unwrap_or("with something that is no text"));
        Self::Raised { class: PANIC.to_owned(), message }
    }
}
