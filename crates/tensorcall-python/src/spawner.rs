//! A thread for work that must not be done where it comes up: on the reactor, or under a lock.
//!
//! The agent that was made last lends its pool; without one a thread is made. A forked child has no agent
//! until it makes one (FORK-1).

use tensorcall::engine::Agent;
use tensorcall::engine::fork::PerProcess;
use tensorcall::engine::sync::Mutex;

static AGENT: PerProcess<Mutex<Option<Agent>>> = PerProcess::new();

fn agent() -> &'static Mutex<Option<Agent>> {
    AGENT.get_or_init(Mutex::default)
}

/// From now on `agent` lends its pool.
pub(crate) fn lend(agent: &Agent) {
    let before = self::agent().lock().replace(agent.clone());
    drop(before);
}

/// `agent` is closing.
pub(crate) fn forget(agent: &Agent) {
    let mut current = self::agent().lock();
    let is_it = current.as_ref().is_some_and(|other| other.identity() == agent.identity());
    let before = if is_it { current.take() } else { None };
    drop(current);
    drop(before);
}

/// Runs `task` soon.
pub(crate) fn spawn(task: impl FnOnce() + Send + 'static) {
    let agent = agent().lock().clone();
    match agent {
        Some(agent) => agent.spawn(task),
        None => drop(std::thread::Builder::new().name("tensorcall-task".to_owned()).spawn(task)),
    }
}

/// Runs `body`, which may take as long as the agent lives, on a thread apart. Tells whether there is one:
/// not without an agent.
pub(crate) fn run_apart(body: impl FnOnce() + Send + 'static) -> bool {
    let agent = agent().lock().clone();
    agent.is_some_and(|agent| agent.run_apart(body))
}
