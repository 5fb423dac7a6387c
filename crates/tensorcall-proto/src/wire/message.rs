//! What one agent says to another: one variant of [`Message`] for each thing there is to say.
//!
//! The messages say nothing of payloads and tensors: those are in the [`Descriptor`] around them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use super::descriptor::Descriptor;
use super::frame::Priority;
use crate::autograd::AutogradCall;
use crate::blocks::BlockMessage;
use crate::ids::{MessageId, RRefId};
use crate::rref::{NewRRef, RRefMessage};
use crate::termination::TerminationMessage;

/// Bodies larger than this are sent at [`Priority::Bulk`], so that others may overtake them.
pub const BULK_BYTES: u64 = 256 << 10;

/// What one agent says to another. New variants are appended: their order is their number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// Asks the receiver to run a function; has a body.
    Call(Call),
    /// Answers a call; has a body unless it is a [`Outcome::Failed`].
    Reply(Reply),
    /// The caller no longer wants the answer to this call.
    Cancel {
        /// The call.
        id: MessageId,
    },
    /// The receiver of a call says how far it has come.
    Progress {
        /// The call.
        id: MessageId,
        /// What it is doing now.
        phase: Phase,
    },
    /// Part of agreeing that the group is quiet (TERM-1).
    Termination(TerminationMessage),
    /// The last message on a connection: the sender closes it on purpose.
    Goodbye {
        /// Why.
        reason: GoodbyeReason,
    },
    /// Part of counting who refers to a value (RREF-1).
    RRef(RRefMessage),
    /// Part of sharing memory within a host; about the connection that it comes on.
    Blocks(BlockMessage),
}

impl Message {
    /// The priority at which this message is sent, given the length of its body in bytes.
    pub fn priority(&self, body_len: u64) -> Priority {
        match self {
            Self::Call(_) | Self::Reply(_) if body_len > BULK_BYTES => Priority::Bulk,
            Self::Call(_) | Self::Reply(_) => Priority::Normal,
            // The last message: it overtakes nothing.
            Self::Goodbye { .. } => Priority::Bulk,
            Self::Cancel { .. }
            | Self::Progress { .. }
            | Self::Termination(_)
            | Self::RRef(_)
            | Self::Blocks(_) => Priority::Control,
        }
    }

    /// Whether this message can have a payload, tensors and references.
    pub fn may_have_body(&self) -> bool {
        match self {
            Self::Call(_) => true,
            Self::Reply(reply) => !matches!(reply.outcome, Outcome::Failed { .. }),
            Self::Cancel { .. }
            | Self::Progress { .. }
            | Self::Termination(_)
            | Self::Goodbye { .. }
            | Self::RRef(_)
            | Self::Blocks(_) => false,
        }
    }
}

/// Asks the receiver to run a function on the arguments in the body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Number of the call, chosen by the caller.
    pub id: MessageId,
    /// Which function.
    pub function: FunctionRef,
    /// How the payload is written.
    pub encoding: Encoding,
    /// What is left of the deadline, in microseconds; `None` means there is none.
    pub timeout_us: Option<u64>,
    /// Whether a pool thread of the caller waits for this call, so that refusing it could
    /// deadlock.
    pub nested: bool,
    /// Whether the caller reads plain data only: it needs an answer, result or exception, that is a
    /// [`Value`](super::value::Value).
    pub plain: bool,
    /// The autograd context this call belongs to, if to one.
    pub autograd: Option<AutogradRef>,
    /// What to keep the result as. The reply then says how the function ended, and has an empty payload
    /// unless it raised.
    pub creates: Option<Box<NewRRef>>,
}

/// Names the function of a [`Call`].
///
/// A connection remembers functions by slot, see [`function`](super::function): only what comes over one has
/// [`FunctionRef::Define`] and [`FunctionRef::Slot`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FunctionRef {
    /// The payload says which, as pickles do.
    InPayload,
    /// The function of this name.
    Name(Arc<str>),
    /// The function of this name, which `slot` stands for from now on.
    Define {
        /// The slot, below [`MAX_SLOTS`](super::function::MAX_SLOTS).
        slot: u32,
        /// The name, of at most [`MAX_SLOT_NAME`](super::function::MAX_SLOT_NAME) bytes.
        name: Arc<str>,
    },
    /// The function that this slot was defined as.
    Slot(u32),
    /// None: the value of this reference, which the receiver owns. Answered when it is there.
    Fetch(RRefId),
    /// None: part of a backward pass.
    Autograd(Box<AutogradCall>),
}

/// How a payload is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Encoding {
    /// One [`Value`](super::value::Value).
    Value,
    /// A Python pickle, opaque to this crate.
    Pickle,
    /// Bytes that only the function knows how to read.
    Bytes,
}

/// A place in a distributed autograd graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AutogradRef {
    /// Number of the autograd context.
    pub context: u64,
    /// Number that joins the send function to the recv function: those tensors of the message that require
    /// gradients, in their order, are inputs of the one and outputs of the other. `None` if there are none.
    pub message: Option<u64>,
}

/// Answers a [`Call`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// The call's number.
    pub id: MessageId,
    /// How it went.
    pub outcome: Outcome,
}

/// How a call went.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The function returned; the body is its result.
    Returned {
        /// How the payload is written.
        encoding: Encoding,
        /// The autograd context that the result belongs to, if to one.
        autograd: Option<AutogradRef>,
    },
    /// The function raised an exception of its own; the body is that exception.
    Raised {
        /// How the payload is written.
        encoding: Encoding,
    },
    /// The function did not run, or its result could not be sent. There is no body.
    Failed {
        /// What went wrong, for programs.
        kind: FailureKind,
        /// What went wrong, for people.
        text: String,
    },
}

/// Why a call failed without the function having a say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FailureKind {
    /// The call asks for something that does not exist, such as an unknown function.
    Usage,
    /// No pool thread was free and none could become free.
    PoolExhausted,
    /// The receiver is shutting down.
    ShuttingDown,
    /// The deadline passed before the function began.
    Expired,
    /// The caller cancelled the call.
    Cancelled,
    /// The call's bytes could not be read.
    Protocol,
    /// A fault of the receiving agent itself.
    Internal,
}

/// How far a call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// At the caller, not yet handed to the connection.
    Queued,
    /// Handed to the connection.
    Sent,
    /// At the receiver, which has not begun to run it.
    Waiting,
    /// The function runs.
    Running,
    /// The function is done and its result is being sent.
    Replying,
}

/// Why a connection is closed on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GoodbyeReason {
    /// The group agreed that it is quiet; nothing is lost.
    Graceful,
    /// The worker leaves at once; what is outstanding is lost.
    Forced,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ForkId, Incarnation, Life, Rank};

    #[test]
    fn priority_follows_kind_and_size() {
        let id = MessageId::new(1);
        let reply = Message::Reply(Reply {
            id,
            outcome: Outcome::Returned { encoding: Encoding::Bytes, autograd: None },
        });

        assert_eq!(Message::Cancel { id }.priority(0), Priority::Control);
        assert_eq!(Message::Goodbye { reason: GoodbyeReason::Forced }.priority(0), Priority::Bulk);
        let fork = ForkId::new(Life { rank: Rank::MAX, incarnation: Incarnation::new(1) }, 1);
        assert_eq!(Message::RRef(RRefMessage::Delete { fork }).priority(0), Priority::Control);
        assert_eq!(reply.priority(BULK_BYTES), Priority::Normal);
        assert_eq!(reply.priority(BULK_BYTES + 1), Priority::Bulk);
    }

    #[test]
    fn failures_have_no_body_but_exceptions_do() {
        let reply = |outcome| Message::Reply(Reply { id: MessageId::new(1), outcome });

        assert!(reply(Outcome::Raised { encoding: Encoding::Pickle }).may_have_body());
        assert!(!reply(Outcome::Failed { kind: FailureKind::Usage, text: String::new() }).may_have_body());
    }
}
