//! Messages that wait for others, so that one write takes several.
//!
//! An answer may wait while further requests are queued behind the one that it answers. Whoever then finds nothing
//! more to run sends all of them, and so does the I/O thread, which looks after queued requests in any case: none
//! waits longer than they do. A call may wait while its caller makes more of them: that sends all when it waits for
//! one, and so does the I/O thread soon.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::sync::Mutex;
use crate::transport::{Link, Outbound};

/// So many messages wait at most: whom they are for may have something to do.
pub(crate) const MOST: usize = 16;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Held {
    links: Mutex<Vec<Arc<dyn Link>>>,
    /// Messages that wait, about.
    count: AtomicUsize,
}

impl Held {
    /// Sends an answer, at once or with others.
    pub(crate) fn hold(&self, link: &Arc<dyn Link>, answer: Outbound) {
        if link.hold(answer) {
            self.links.lock().push(Arc::clone(link));
        }
        if self.count.fetch_add(1, Ordering::AcqRel) + 1 >= MOST {
            self.flush();
        }
    }

    /// Messages wait on this link.
    pub(crate) fn note(&self, link: &Arc<dyn Link>) {
        self.links.lock().push(Arc::clone(link));
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether any may wait.
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    /// Sends those that wait.
    pub(crate) fn flush(&self) {
        if !self.any() {
            return;
        }
        // Before the links are taken: who counts one later flushes it later.
        self.count.store(0, Ordering::Release);
        let links = std::mem::take(&mut *self.links.lock());
        for link in links {
            link.flush();
        }
    }
}
