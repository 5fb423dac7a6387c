//! Who is in the interpreter, and how it is closed (EXIT-1).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, ThreadId};
use std::time::Instant;

use pyo3::prelude::*;
use tensorcall::engine::sync::{Condvar, Mutex};

use crate::thread_state::{self, ThreadIdent};

pub(crate) static VISITORS: Visitors = Visitors {
    closed: AtomicBool::new(false),
    inside: AtomicUsize::new(0),
    keeper: OnceLock::new(),
    lock: Mutex::new(()),
    left: Condvar::new(),
    signed_in: Mutex::new(Vec::new()),
};

/// Counts threads of ours inside the interpreter or about to enter.
///
/// A thread first counts itself, then looks whether the door is closed; the closing thread first
/// closes, then looks at the count. In the total order of these (`SeqCst`), one sees the other.
pub(crate) struct Visitors {
    closed: AtomicBool,
    inside: AtomicUsize,
    /// The one thread that may enter after closing: the one that runs the exit hooks.
    keeper: OnceLock<ThreadId>,
    lock: Mutex<()>,
    left: Condvar,
    /// Threads that Python knows only through us. Used with the interpreter lock held.
    signed_in: Mutex<Vec<ThreadIdent>>,
}

impl Visitors {
    pub(crate) fn enter(&self) {
        self.inside.fetch_add(1, Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) && !self.is_keeper() {
            self.leave();
            park_for_ever();
        }
    }

    pub(crate) fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
        if self.closed.load(Ordering::SeqCst) {
            drop(self.lock.lock());
            self.left.notify_all();
        }
    }

    pub(crate) fn park_if_closed(&self) {
        if self.closed.load(Ordering::SeqCst) && !self.is_keeper() {
            park_for_ever();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    fn is_keeper(&self) -> bool {
        self.keeper.get() == Some(&thread::current().id())
    }

    pub(crate) fn close(&self) {
        self.keeper.get_or_init(|| thread::current().id());
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Returns how many are inside at `limit`, or 0 as soon as nobody is.
    pub(crate) fn wait_until_gone(&self, limit: Instant) -> usize {
        let mut held = self.lock.lock();
        while self.inside.load(Ordering::SeqCst) > 0 && !self.left.wait_until(&mut held, limit).timed_out() {}
        self.inside.load(Ordering::SeqCst)
    }

    /// For a thread that has no other state in Python, for as long as it is inside or will be again.
    pub(crate) fn sign_in(&self, py: Python<'_>) -> SignedIn<'_> {
        let ident = thread_state::ident(py);
        self.signed_in.lock().push(ident);
        SignedIn(self, ident)
    }

    /// Tells all functions that run on threads of ours to end.
    pub(crate) fn interrupt(&self, py: Python<'_>) {
        let threads = self.signed_in.lock().clone();
        for thread in threads {
            thread_state::interrupt(py, thread);
        }
    }

    /// A forked child has only the thread that forked, which is inside or is not.
    pub(crate) fn forget_others(&self, py: Python<'_>, is_inside: bool) {
        let this = thread_state::ident(py);
        self.signed_in.lock().retain(|&thread| thread == this);
        self.inside.store(usize::from(is_inside), Ordering::SeqCst);
    }
}

/// Ends an entry in the list of threads.
pub(crate) struct SignedIn<'a>(&'a Visitors, ThreadIdent);

impl Drop for SignedIn<'_> {
    fn drop(&mut self) {
        let mut signed_in = self.0.signed_in.lock();
        if let Some(place) = signed_in.iter().position(|&thread| thread == self.1) {
            signed_in.swap_remove(place);
        }
    }
}

/// The end of a thread that must not come back to Python.
pub(crate) fn park_for_ever() -> ! {
    loop {
        thread::park();
    }
}
