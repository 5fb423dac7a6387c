//! A thread for work that must not be done where it comes up: on the reactor, or under a lock.
//!
//! The agent that was made last lends its pool; without one a thread is made.

use parking_lot::Mutex;
use tensorcall::Agent;

static AGENT: Mutex<Option<Agent>> = Mutex::new(None);

/// From now on `agent` lends its pool.
pub(crate) fn lend(agent: &Agent) {
    let before = AGENT.lock().replace(agent.clone());
    drop(before);
}

/// `agent` is closing.
pub(crate) fn forget(agent: &Agent) {
    let mut current = AGENT.lock();
    let is_it = current.as_ref().is_some_and(|other| other.identity() == agent.identity());
    let before = if is_it { current.take() } else { None };
    drop(current);
    drop(before);
}

/// For a forked child: the agent is its parent's, which it may neither use nor end (FORK-1).
pub(crate) fn disown() {
    // The lock may be held by a thread that only the parent has.
    if let Some(mut current) = AGENT.try_lock() {
        std::mem::forget(current.take());
    }
}

/// Runs `task` soon.
pub(crate) fn spawn(task: impl FnOnce() + Send + 'static) {
    let agent = AGENT.lock().clone();
    match agent {
        Some(agent) => agent.spawn(task),
        None => drop(std::thread::Builder::new().name("tensorcall-task".to_owned()).spawn(task)),
    }
}

/// Runs `body`, which may take as long as the agent lives, on a thread apart. Tells whether there is one:
/// not without an agent.
pub(crate) fn run_apart(body: impl FnOnce() + Send + 'static) -> bool {
    let agent = AGENT.lock().clone();
    agent.is_some_and(|agent| agent.run_apart(body))
}
