//! The faults of the backend `FAULTY_TENSORPIPE`: which messages fail or are late, by torch's names.

use std::collections::HashMap;
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use tensorcall::engine::sync::Mutex;
use tensorcall::engine::transport::Outbound;
use tensorcall::engine::{Fault, Faults};
use tensorcall_proto::autograd::Step;
use tensorcall_proto::rref::RRefMessage;
use tensorcall_proto::wire::message::{FunctionRef, Message};

use crate::time;

/// Tells a worker that an autograd context has ended; a call like others here.
const RELEASE: &str = "tensorcall.autograd._release:release_here";

/// Messages that fail, messages that are late by so many seconds, and how often one fails before it is
/// sent.
pub(crate) type Spec = (Vec<String>, HashMap<String, f64>, u32);

/// Which messages fail or are late.
#[derive(Debug)]
pub(crate) struct NamedFaults {
    fail: Vec<String>,
    delay: HashMap<String, Duration>,
    times: u32,
    /// How often a call of the same function with the same payload failed: who retries makes a new call.
    failed: Mutex<HashMap<u64, u32>>,
}

impl NamedFaults {
    pub(crate) fn new((fail, delay, times): Spec) -> Self {
        let delay = delay.into_iter().map(|(name, seconds)| (name, time::duration(seconds))).collect();
        Self { fail, delay, times, failed: Mutex::default() }
    }

    fn attempts(&self, message: &Outbound, label: &str) -> u32 {
        let mut hasher = DefaultHasher::new();
        (label, &message.body.payload).hash(&mut hasher);
        let mut failed = self.failed.lock();
        let count = failed.entry(hasher.finish()).or_default();
        *count += 1;
        *count - 1
    }
}

impl Faults for NamedFaults {
    fn before_send(&self, message: &Outbound, label: &str, attempt: u32) -> Option<Fault> {
        let name = name_of(&message.message, label)?;
        if self.fail.iter().any(|failing| failing == name) {
            let is_call = matches!(message.message, Message::Call(_));
            let attempt = if is_call { self.attempts(message, label) } else { attempt };
            if attempt < self.times {
                let number = attempt + 1;
                return Some(Fault::Fail(format!(
                    "fault injection: send attempt {number} of {name} {label} failed intentionally"
                )));
            }
        }
        self.delay.get(name).copied().filter(|delay| !delay.is_zero()).map(Fault::Delay)
    }
}

/// What torch calls a message; `None` if it has no such message.
fn name_of(message: &Message, label: &str) -> Option<&'static str> {
    let call = match message {
        Message::Call(call) => call,
        Message::RRef(RRefMessage::Fork { .. }) => return Some("RREF_FORK_REQUEST"),
        Message::RRef(RRefMessage::Accept { .. }) => return Some("RREF_CHILD_ACCEPT"),
        Message::RRef(RRefMessage::Delete { .. }) => return Some("RREF_USER_DELETE"),
        _ => return None,
    };
    if label == RELEASE {
        return Some("CLEANUP_AUTOGRAD_CONTEXT_REQ");
    }
    // Functions are named as in `rpc/_target.py`.
    let is_script = label.contains("::") || label.contains("__torch__.");
    Some(match (&call.function, &call.creates, is_script) {
        (FunctionRef::Autograd(call), ..) => match call.step {
            Step::Gradient { .. } | Step::NoGradient { .. } => "BACKWARD_AUTOGRAD_REQ",
            _ => return None,
        },
        (FunctionRef::Fetch(_), _, true) => "SCRIPT_RREF_FETCH_CALL",
        (FunctionRef::Fetch(_), _, false) => "PYTHON_RREF_FETCH_CALL",
        (_, Some(_), true) => "SCRIPT_REMOTE_CALL",
        (_, Some(_), false) => "PYTHON_REMOTE_CALL",
        (_, None, true) => "SCRIPT_CALL",
        (_, None, false) => "PYTHON_CALL",
    })
}
