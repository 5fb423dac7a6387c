//! Threads that grow in number with what blocks, and end when they have had nothing to do for a while.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ProcessGroup;
use crate::sync::{Condvar, Mutex};

/// How long a thread waits for something to do.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) type Task = Box<dyn FnOnce() + Send>;

thread_local! {
    /// Whether this is such a thread.
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// See the module. A task never waits for a thread that is busy with another.
#[derive(Debug)]
pub(super) struct Threads {
    group: Arc<dyn ProcessGroup>,
    state: Mutex<State>,
    /// There is a task, or it is over.
    changed: Condvar,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    tasks: VecDeque<Task>,
    idle: usize,
    threads: usize,
    closed: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State")
            .field("threads", &self.threads)
            .field("idle", &self.idle)
            .finish_non_exhaustive()
    }
}

impl Threads {
    pub(super) fn new(group: Arc<dyn ProcessGroup>) -> Arc<Self> {
        Arc::new(Self { group, state: Mutex::default(), changed: Condvar::new(), ended: Condvar::new() })
    }

    /// Has `task` done now, by a thread that is idle or a new one. Drops it when all is over.
    pub(super) fn run(self: &Arc<Self>, task: Task) {
        let mut state = self.state.lock();
        if state.closed {
            drop(state);
            return drop(task);
        }
        if state.idle > state.tasks.len() {
            state.tasks.push_back(task);
            drop(state);
            return self.changed.notify_one();
        }
        state.threads += 1;
        drop(state);
        let this = Arc::clone(self);
        let body = move || {
            OURS.set(true);
            let _end = End(&this);
            let mut first = Some(task);
            this.group.run_thread(&mut || this.work(&mut first));
        };
        if let Err(error) = std::thread::Builder::new().name("tensorcall-group".to_owned()).spawn(body) {
            self.state.lock().threads -= 1;
            tracing::error!(%error, "no thread for the process group: what it was to do is not done");
        }
    }

    /// Lets threads end that have nothing to do, from now on at once.
    fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until all threads have ended, which they do when their tasks have; tells whether. On one of
    /// these threads it does not wait.
    pub(super) fn wait_ended(&self, limit: Instant) -> bool {
        self.close();
        if OURS.get() {
            return true;
        }
        let mut state = self.state.lock();
        while state.threads > 0 {
            if self.ended.wait_until(&mut state, limit).timed_out() {
                return state.threads == 0;
            }
        }
        true
    }

    fn work(&self, first: &mut Option<Task>) {
        let mut next = first.take();
        while let Some(task) = next {
            task();
            next = self.next();
        }
    }

    fn next(&self) -> Option<Task> {
        let mut state = self.state.lock();
        state.idle += 1;
        let limit = crate::clock::now() + PATIENCE;
        while state.tasks.is_empty() && !state.closed {
            if self.changed.wait_until(&mut state, limit).timed_out() {
                break;
            }
        }
        state.idle -= 1;
        state.tasks.pop_front()
    }
}

/// The end of a thread, also by a panic.
struct End<'a>(&'a Threads);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.state.lock().threads -= 1;
        self.0.ended.notify_all();
    }
}
