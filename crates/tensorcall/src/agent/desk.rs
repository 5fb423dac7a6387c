//! [`Desk`]: where the thread that waits for a backward pass finds what its worker has to do in it.
//!
//! A pass that began here needs this worker's local engine several times, and somebody waits for the pass
//! anyway. Its work is laid on a desk, where the waiting thread takes it: two hand-overs between threads less
//! than on a thread of the pool. Who waits no longer closes the desk, and the pool does the rest.

use std::sync::{Arc, Weak};
use std::time::Instant;

use tensorcall_proto::autograd::Pass;

use super::Inner;
use crate::future::{self, RpcFuture};
use crate::sync::{Condvar, Mutex};

/// A backward pass that a thread is going to wait for, see
/// [`Agent::begin_backward`](super::Agent::begin_backward). Dropping it is [closing](Desk::close) it.
pub struct Desk {
    agent: Weak<Inner>,
    future: RpcFuture,
    tray: Arc<Tray>,
}

/// What the desk and the agent share.
#[derive(Default)]
pub(super) struct Tray {
    state: Mutex<State>,
    bell: Condvar,
}

#[derive(Default)]
struct State {
    /// What is to be done: at most one thing at a time.
    work: Option<Pass>,
    /// Nobody takes anything any more.
    closed: bool,
}

impl Tray {
    /// Lays down that there is work for the pass, unless nobody will take it; tells whether.
    pub(super) fn lay(&self, pass: Pass) -> bool {
        let mut state = self.state.lock();
        if state.closed {
            return false;
        }
        state.work = Some(pass);
        drop(state);
        self.bell.notify_one();
        true
    }

    /// Wakes who waits here, who looks then whether the pass has ended.
    fn ring(&self) {
        drop(self.state.lock());
        self.bell.notify_one();
    }
}

impl Desk {
    pub(super) fn new(agent: Weak<Inner>, future: RpcFuture, tray: Arc<Tray>) -> Self {
        let bell = Arc::clone(&tray);
        future.on_done(move || bell.ring());
        Self { agent, future, tray }
    }

    /// The outcome of the pass.
    pub fn future(&self) -> &RpcFuture {
        &self.future
    }

    /// Does what there is to do until the pass has ended or `limit` has come; tells which. What the local
    /// engine is at is finished first.
    pub fn work_until(&self, limit: Option<Instant>) -> bool {
        loop {
            let there = || self.future.is_done() || self.tray.state.lock().work.is_some();
            if !future::look_or(limit, there, || self.sleep_until(limit)) {
                return false;
            }
            let work = self.tray.state.lock().work.take();
            match (work, self.agent.upgrade()) {
                (Some(pass), Some(agent)) => agent.work_on(pass),
                _ => return true,
            }
        }
    }

    fn sleep_until(&self, limit: Option<Instant>) -> bool {
        let mut state = self.tray.state.lock();
        while state.work.is_none() && !self.future.is_done() {
            match limit {
                None => self.tray.bell.wait(&mut state),
                Some(limit) => {
                    if self.tray.bell.wait_until(&mut state, limit).timed_out() {
                        return state.work.is_some() || self.future.is_done();
                    }
                }
            }
        }
        true
    }

    /// Nobody waits here any more: the pass goes on without.
    pub fn close(&self) {
        let Some(agent) = self.agent.upgrade().filter(|agent| agent.home.is_here()) else { return };
        let mut state = self.tray.state.lock();
        state.closed = true;
        let left = state.work.take();
        drop(state);
        if let Some(pass) = left {
            agent.work_on_pool(pass);
        }
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        self.close();
    }
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("future", &self.future).finish_non_exhaustive()
    }
}
