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
        self.add(link.hold(answer).then_some(link));
    }

    /// Messages wait on this link. It is not kept for ever, also if nobody ever waits.
    pub(crate) fn note(&self, link: &Arc<dyn Link>) {
        self.add(Some(link));
    }

    fn add(&self, link: Option<&Arc<dyn Link>>) {
        if let Some(link) = link {
            self.links.lock().push(Arc::clone(link));
        }
        if self.count.fetch_add(1, Ordering::AcqRel) + 1 >= MOST {
            self.flush();
        }
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[derive(Debug, Default)]
    struct Counts(AtomicUsize);

    impl Link for Counts {
        fn send(&self, _: Outbound) -> bool {
            true
        }

        fn flush(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn keep_alive(&self, _: Instant, _: Duration) {}

        fn close(&self, _: Instant) {}
    }

    #[test]
    fn links_that_nobody_waits_on_are_not_kept_without_end() {
        let (held, counts) = (Held::default(), Arc::new(Counts::default()));
        let link = Arc::clone(&counts) as Arc<dyn Link>;

        for _ in 0..10 * MOST {
            held.note(&link);
            assert!(Arc::strong_count(&counts) <= 2 + MOST);
        }

        assert_eq!(counts.0.load(Ordering::SeqCst), 10 * MOST);
    }
}
