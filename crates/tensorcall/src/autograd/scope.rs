//! Which context is that of a thread or task: calls that are made there are recorded in it.

use std::cell::RefCell;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};

use super::tape::Tape;

thread_local! {
    static CURRENT: RefCell<Option<Arc<Tape>>> = const { RefCell::new(None) };
}

/// The context of this thread, unless it has ended.
pub(super) fn current() -> Option<Arc<Tape>> {
    CURRENT.with_borrow(|current| current.as_ref().filter(|tape| !tape.is_over()).map(Arc::clone))
}

/// While this lives, a context is that of the thread; then the one before is again.
#[must_use = "the context is left when this is dropped"]
pub struct Entered<'a> {
    outer: Option<Arc<Tape>>,
    /// It belongs to its thread, and to the context.
    _thread: PhantomData<(*const (), &'a ())>,
}

impl Entered<'_> {
    pub(crate) fn new(tape: Option<Arc<Tape>>) -> Self {
        Self { outer: CURRENT.replace(tape), _thread: PhantomData }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // While the thread ends there may be nothing to go back to.
        let inner = CURRENT.try_with(|current| current.replace(self.outer.take()));
        drop(inner);
    }
}

impl fmt::Debug for Entered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entered").finish_non_exhaustive()
    }
}

/// A future that runs in a context, on whatever threads.
#[derive(Debug)]
#[must_use = "futures do nothing unless they are awaited"]
pub struct Within<F> {
    tape: Option<Arc<Tape>>,
    future: Pin<Box<F>>,
}

impl<F: Future> Within<F> {
    pub(crate) fn new(tape: Option<Arc<Tape>>, future: F) -> Self {
        Self { tape, future: Box::pin(future) }
    }
}

impl<F: Future> Future for Within<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<F::Output> {
        let _inside = Entered::new(self.tape.clone());
        self.future.as_mut().poll(task)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;
    use std::task::Waker;

    use super::*;

    fn tape(id: u64) -> Arc<Tape> {
        Arc::new(Tape::new(id, Weak::new()))
    }

    fn current_id() -> Option<u64> {
        current().map(|tape| tape.id())
    }

    #[test]
    fn contexts_nest_and_a_thread_has_its_own() {
        let outer = Entered::new(Some(tape(1)));
        {
            let _inner = Entered::new(Some(tape(2)));
            assert_eq!(current_id(), Some(2));
            assert_eq!(std::thread::spawn(current_id).join().unwrap(), None);
            let _none = Entered::new(None);
            assert_eq!(current_id(), None);
        }
        assert_eq!(current_id(), Some(1));
        drop(outer);
        assert_eq!(current_id(), None);
    }

    #[test]
    fn a_context_that_has_ended_is_nobodys() {
        let ended = tape(1);
        let _inside = Entered::new(Some(Arc::clone(&ended)));

        ended.end();

        assert_eq!(current_id(), None);
    }

    #[test]
    fn a_task_is_in_its_context_whenever_it_runs() {
        let mut polls = 0;
        let task = std::future::poll_fn(|_| {
            polls += 1;
            assert_eq!(current_id(), Some(3));
            if polls == 2 { Poll::Ready(()) } else { Poll::Pending }
        });
        let mut task = std::pin::pin!(Within::new(Some(tape(3)), task));
        let mut context = TaskContext::from_waker(Waker::noop());

        assert!(task.as_mut().poll(&mut context).is_pending());
        assert_eq!(current_id(), None);
        assert!(task.as_mut().poll(&mut context).is_ready());
    }
}
