//! [`Errands`]: what a thread that waits for a call does for its whole agent, before and after.

use crate::held::Held;
use crate::wakes::WakeQueue;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Errands {
    /// Tasks whose calls are answered. One that runs wakes the others.
    pub(crate) tasks: WakeQueue,
    /// Links on which calls wait for further ones. There are none when the caller waits.
    pub(crate) calls: Held,
}
