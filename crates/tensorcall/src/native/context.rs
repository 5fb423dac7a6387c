//! [`Caller`]: who asks, and whether the answer is still wanted.

use tensorcall_proto::ids::{Identity, WorkerName};

use crate::agent::Watch;

/// Who called a function: an argument of functions that callers do not pass.
#[derive(Debug, Clone)]
pub struct Caller {
    name: WorkerName,
    rank: u32,
    watch: Watch,
}

impl Caller {
    pub(super) fn new(caller: Identity, watch: Watch) -> Self {
        Self { name: caller.name, rank: caller.rank.get().into(), watch }
    }

    /// The calling worker's name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// The calling worker's rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Whether nobody wants the answer any more: the caller dropped its future or is
    /// gone. A blocking function that takes long may look now and then; an `async` one is dropped then.
    pub fn is_gone(&self) -> bool {
        self.watch.is_cancelled()
    }
}
