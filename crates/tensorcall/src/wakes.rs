//! [`WakeQueue`]: tasks that are to be woken, since the calls that they await are answered.
//!
//! Answers come in bursts, and a thread that is woken may run at once, in the place of the one that woke it. If it
//! found only the first answer it would fall asleep again, once for each answer. So those who are to be woken stand in
//! a queue, and a task that gets an outcome wakes all that are left in it: a burst costs the thread of those tasks one
//! wake-up.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;

use crate::sync::Mutex;

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct WakeQueue {
    queue: Mutex<VecDeque<Waker>>,
    /// How many are in it, about.
    len: AtomicUsize,
}

impl WakeQueue {
    /// Wakes these, together with the tasks that run meanwhile.
    pub(crate) fn wake_all(&self, wakers: impl IntoIterator<Item = Waker>) {
        {
            let mut queue = self.queue.lock();
            queue.extend(wakers);
            self.len.store(queue.len(), Ordering::Release);
        }
        self.wake_rest();
    }

    /// Wakes those that are left.
    pub(crate) fn wake_rest(&self) {
        // Who has put some in looks itself until there are none.
        while self.len.load(Ordering::Acquire) > 0 {
            let next = {
                let mut queue = self.queue.lock();
                let next = queue.pop_front();
                self.len.store(queue.len(), Ordering::Release);
                next
            };
            // Without the lock: a waker may run anything.
            if let Some(waker) = next
                && catch_unwind(AssertUnwindSafe(|| waker.wake())).is_err()
            {
                tracing::error!("a waker panicked");
            }
        }
    }
}

/// Tasks that await the same thing: one, as a rule.
#[derive(Debug, Default)]
pub(crate) struct Wakers {
    first: Option<Waker>,
    others: Vec<Waker>,
}

impl Wakers {
    pub(crate) fn add(&mut self, waker: &Waker) {
        if self.first.iter().chain(&self.others).any(|known| known.will_wake(waker)) {
            return;
        }
        match self.first {
            None => self.first = Some(waker.clone()),
            Some(_) => self.others.push(waker.clone()),
        }
    }
}

impl IntoIterator for Wakers {
    type Item = Waker;
    type IntoIter = std::iter::Chain<std::option::IntoIter<Waker>, std::vec::IntoIter<Waker>>;

    fn into_iter(self) -> Self::IntoIter {
        self.first.into_iter().chain(self.others)
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::{Context, Poll, Wake};

    use super::*;
    use crate::errands::Errands;
    use crate::error::Error;
    use crate::future::{RpcFuture, promise_in};

    /// Counts how often it is woken; polls a future whenever it is, as a thread does that runs at once.
    struct Task {
        woken: AtomicUsize,
        polls: Option<RpcFuture>,
    }

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.woken.fetch_add(1, Ordering::SeqCst);
            if let Some(future) = self.polls.clone() {
                assert!(poll(future, Waker::noop()).is_ready());
            }
        }
    }

    fn task(polls: Option<RpcFuture>) -> Arc<Task> {
        Arc::new(Task { woken: AtomicUsize::new(0), polls })
    }

    fn poll(future: RpcFuture, waker: &Waker) -> Poll<()> {
        pin!(future).as_mut().poll(&mut Context::from_waker(waker)).map(drop)
    }

    #[test]
    fn a_task_that_runs_at_once_wakes_the_others() {
        let errands = Arc::new(Errands::default());
        let (promise, future) = promise_in(&errands);
        promise.complete(Err(Error::usage("answered")));
        let (first, second) = (task(Some(future)), task(None));
        let woken_by_then = Arc::clone(&second);
        let after_first = task(None);

        errands.tasks.wake_all([
            Waker::from(Arc::clone(&first)),
            second.into(),
            Arc::clone(&after_first).into(),
        ]);

        for task in [first, woken_by_then, after_first] {
            assert_eq!(task.woken.load(Ordering::SeqCst), 1);
        }
    }

    #[test]
    fn a_waker_that_panics_costs_nobody_else_a_wake_up() {
        struct Panics;
        impl Wake for Panics {
            fn wake(self: Arc<Self>) {
                panic!("planted");
            }
        }
        let (queue, other) = (WakeQueue::default(), task(None));
        let wakers = [Waker::from(Arc::new(Panics)), Arc::clone(&other).into()];

        queue.wake_all(wakers);

        assert_eq!(other.woken.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn each_task_is_noted_once() {
        let (one, other) = (task(None), task(None));
        let mut wakers = Wakers::default();
        for waker in [&one, &one, &other, &one, &other] {
            wakers.add(&Arc::clone(waker).into());
        }

        assert_eq!(wakers.into_iter().count(), 2);
    }
}
