//! Fault injection: what a test lets happen to messages on their way out.
//!
//! An agent without [`Faults`] only looks whether it has some. A call that fails does so before it is
//! sent. Any other message that fails is sent again after [`AGAIN`], and asked about again: whoever
//! waits for its effect sees what a retry over a bad network would give. What is held back here counts
//! as outstanding (TERM-1).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcall_proto::ids::MessageId;

use super::Inner;
use super::peers::Peer;
use crate::clock::now;
use crate::error::{Error, ErrorKind};
use crate::sync::Mutex;
use crate::transport::Outbound;

/// How long a message that failed waits for its next attempt.
const AGAIN: Duration = Duration::from_millis(50);

/// What happens to a message in the place of being sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It is sent after this long.
    Delay(Duration),
    /// It is not sent. A call fails with an error that says this.
    Fail(String),
}

/// Decides what happens to messages. For tests of programs that must bear delays and failures.
pub trait Faults: fmt::Debug + Send + Sync {
    /// Asked before a message is sent; `None` sends it. `label` names the function of a call and is
    /// empty for other messages; `attempt` counts how often this message failed before.
    fn before_send(&self, message: &Outbound, label: &str, attempt: u32) -> Option<Fault>;
}

/// Messages that are held back.
pub(super) struct FaultLine {
    faults: Arc<dyn Faults>,
    held: Mutex<Vec<Held>>,
}

struct Held {
    until: Instant,
    peer: Arc<Peer>,
    message: Outbound,
    /// How often it failed; `None` if it was only delayed, and is not asked about again.
    attempts: Option<u32>,
}

impl FaultLine {
    pub(super) fn new(faults: Arc<dyn Faults>) -> Self {
        Self { faults, held: Mutex::default() }
    }

    /// What is to happen to a call of `label`.
    pub(super) fn of_call(&self, message: &Outbound, label: &str) -> Option<Fault> {
        self.faults.before_send(message, label, 0)
    }

    /// Messages other than calls that are held back.
    pub(super) fn held(&self) -> usize {
        self.held.lock().iter().filter(|held| held.message.id.is_none()).count()
    }
}

impl Inner {
    /// Lets `fault` happen to a call that was just registered.
    pub(super) fn hurt_call(&self, peer: &Arc<Peer>, id: MessageId, message: Outbound, fault: Fault) {
        match fault {
            Fault::Delay(delay) => {
                self.hold_back(Held {
                    until: now() + delay,
                    peer: Arc::clone(peer),
                    message,
                    attempts: None,
                });
            }
            Fault::Fail(text) => {
                self.forks_unsent(&message.rrefs);
                self.complete(|| {
                    let ticket = peer.state.lock().calls.finish(id)?;
                    Some((ticket, Err(Error::new(ErrorKind::Io, text))))
                });
                peer.room.notify_all();
            }
        }
    }

    /// Holds a message other than a call back if a fault is to happen to it; else gives it back.
    pub(super) fn hurt(&self, peer: &Arc<Peer>, message: Outbound, attempts: u32) -> Option<Outbound> {
        let Some(line) = &self.fault_line else { return Some(message) };
        let (pause, attempts) = match line.faults.before_send(&message, "", attempts) {
            None => return Some(message),
            Some(Fault::Delay(delay)) => (delay, None),
            Some(Fault::Fail(text)) => {
                tracing::info!(peer = %peer.info.identity, "{text}");
                (AGAIN, Some(attempts + 1))
            }
        };
        self.hold_back(Held { until: now() + pause, peer: Arc::clone(peer), message, attempts });
        None
    }

    fn hold_back(&self, held: Held) {
        let until = held.until;
        if let Some(line) = &self.fault_line {
            line.held.lock().push(held);
        }
        self.schedule(until);
    }

    /// Sends what has been held back long enough.
    pub(super) fn tick_faults(&self, now: Instant) {
        let Some(line) = &self.fault_line else { return };
        let mut held = line.held.lock();
        let due: Vec<_> = held.extract_if(.., |held| held.until <= now).collect();
        let next = held.iter().map(|held| held.until).min();
        drop(held);
        for Held { peer, message, attempts, .. } in due {
            let message = match attempts {
                Some(attempts) => self.hurt(&peer, message, attempts),
                None => Some(message),
            };
            if let Some(message) = message {
                self.post_now(&peer, message);
            }
        }
        if let Some(next) = next {
            self.schedule(next);
        }
    }
}
