//! What workers say to each other in a backward pass. Each is a call, answered as calls are.

use serde::{Deserialize, Serialize};

use crate::ids::PassId;

/// One backward pass. Whatever comes first to a worker tells it all of this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Pass {
    /// Names the pass. The next one in the same autograd context has another name, so that what is left
    /// of a failed pass never reaches it.
    pub id: PassId,
    /// Number of the autograd context.
    pub context: u64,
    /// Whether the graphs are kept for another pass.
    pub retain_graph: bool,
    /// How long a worker waits without any progress before the pass fails, in microseconds; `None` is for
    /// ever.
    pub patience_us: Option<u64>,
}

/// Part of a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AutogradCall {
    /// Of which pass.
    pub pass: Pass,
    /// What is said.
    pub step: Step,
}

/// What one worker says to another in a backward pass.
///
/// The first of these calls that a worker gets in a pass is answered when its part is done, and those of all
/// that it told in its turn: so the answers come together at the worker where the pass began. All others
/// are answered at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Step {
    /// The pass has begun.
    Begin,
    /// The body has the gradients of the tensors that the receiver sent in this message.
    Gradient {
        /// The autograd message.
        message: u64,
    },
    /// As [`Step::Gradient`], but none of those tensors has a gradient.
    NoGradient {
        /// The autograd message.
        message: u64,
    },
    /// The sender has waited for the gradients of this message: a receiver that has no recv function of
    /// it answers [`Step::NoGradient`].
    Ask {
        /// The autograd message.
        message: u64,
    },
    /// Looks for a cycle: passed on to those whose gradients the receiver waits for, and so back to the
    /// worker that began it if that one waits for itself.
    Probe {
        /// The rank of that worker.
        origin: crate::ids::Rank,
    },
    /// The pass has failed; the payload says why.
    Abort,
}
