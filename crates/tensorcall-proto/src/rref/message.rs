//! What workers say to each other about references, and how a reference is written in a message.

use serde::{Deserialize, Serialize};

use crate::ids::{ForkId, Life, RRefId};

/// What workers say to each other about references. All of it may be repeated, reordered and said again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RRefMessage {
    /// From a holder to the owner: I hold this fork.
    Fork {
        /// The reference.
        rref: RRefId,
        /// The fork.
        fork: ForkId,
    },
    /// From the owner to a holder: this fork is counted, or the value is gone. A holder that has no such
    /// fork (any more) answers [`RRefMessage::Delete`].
    Known {
        /// The fork.
        fork: ForkId,
        /// Whether there is a value for it, or will be.
        alive: bool,
    },
    /// From a holder to the worker that shared with it: the owner knows my fork, stand by no longer.
    Accept {
        /// The fork.
        fork: ForkId,
    },
    /// From the worker that shared to a holder: I stand by no longer.
    Accepted {
        /// The fork.
        fork: ForkId,
    },
    /// From a holder to the owner: I hold this fork no longer, and nobody waits for me to vouch for a child.
    Delete {
        /// The fork.
        fork: ForkId,
    },
    /// From the owner to a holder: this fork does not count (any more).
    Deleted {
        /// The fork.
        fork: ForkId,
    },
    /// From a sharing worker, after a link broke: have you got this fork?
    Rescind {
        /// The fork.
        fork: ForkId,
    },
    /// Answers [`RRefMessage::Rescind`]: no.
    Unknown {
        /// The fork.
        fork: ForkId,
    },
    /// From an end that noticed that a link broke: answers to you may be lost, ask again.
    AskAgain,
}

/// A reference in a message, whose sender shares it with the receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RRefDesc {
    /// The reference.
    pub rref: RRefId,
    /// Who has the value.
    pub owner: Life,
    /// This act of sharing.
    pub fork: ForkId,
}

/// What a call to `remote` asks its callee to keep: the result, for the caller's first fork of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NewRRef {
    /// The reference.
    pub rref: RRefId,
    /// The caller's fork.
    pub fork: ForkId,
}
