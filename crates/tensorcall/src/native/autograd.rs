//! Autograd contexts of a native worker.

use super::agent::Agent;
use crate::autograd::Context;
use crate::error::Result;

impl Context {
    /// Begins a context on this worker. It is that of nobody's calls before [`enter`](Self::enter) or
    /// [`within`](Self::within).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if the worker takes no part in backward passes.
    pub fn begin(agent: &Agent) -> Result<Self> {
        Self::begin_in(agent.contexts()?)
    }

    /// The context of this number, which a call has brought to this worker: functions get to know it as an
    /// argument. It ends with whoever began it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Autograd`](crate::ErrorKind::Autograd) if it is not here, and as [`begin`](Self::begin).
    pub fn find(agent: &Agent, id: u64) -> Result<Self> {
        Self::find_in(agent.contexts()?, id)
    }
}
