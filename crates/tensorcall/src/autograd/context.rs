//! [`Context`]: a distributed forward and backward pass, as a program sees it.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use super::contexts::Contexts;
use super::scope::{Entered, Within};
use super::tape::Tape;
use crate::error::{Error, ErrorKind, Result};

/// A distributed forward and backward pass: what calls do in it is recorded.
///
/// The tensors that such calls bring to other workers and back are part of one graph. The context has one
/// number on all workers that calls lead to. Dropping what [`Context::begin`] gave releases it everywhere,
/// with its gradients.
pub struct Context {
    tape: Arc<Tape>,
    contexts: Arc<Contexts>,
    /// Whether it ends with this.
    is_own: bool,
}

impl Context {
    /// Begins a context on the worker of these contexts.
    pub(crate) fn begin_in(contexts: &Arc<Contexts>) -> Result<Self> {
        Ok(Self { tape: contexts.begin()?, contexts: Arc::clone(contexts), is_own: true })
    }

    /// The context of this number, which a call has brought here. It ends with whoever began it.
    pub(crate) fn find_in(contexts: &Arc<Contexts>, id: u64) -> Result<Self> {
        let missing = || Error::new(ErrorKind::Autograd, format!("there is no autograd context {id} here"));
        let tape = contexts.find(id).ok_or_else(missing)?;
        Ok(Self { tape, contexts: Arc::clone(contexts), is_own: false })
    }

    /// Its number, which other workers know it by.
    pub fn id(&self) -> u64 {
        self.tape.id()
    }

    /// Makes it the context of this thread, until what is returned is dropped.
    pub fn enter(&self) -> Entered<'_> {
        Entered::new(Some(Arc::clone(&self.tape)))
    }

    /// Makes it the context of a task.
    pub fn within<F: Future>(&self, future: F) -> Within<F> {
        Within::new(Some(Arc::clone(&self.tape)), future)
    }

    /// What this worker has of it.
    #[cfg(feature = "candle")]
    pub(crate) fn tape(&self) -> &Arc<Tape> {
        &self.tape
    }

    /// All contexts of this worker.
    #[cfg(feature = "candle")]
    pub(crate) fn contexts(&self) -> &Arc<Contexts> {
        &self.contexts
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.is_own {
            self.contexts.release(self.tape.id());
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("id", &self.id()).finish_non_exhaustive()
    }
}
