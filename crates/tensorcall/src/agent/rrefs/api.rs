//! What an [`Agent`] offers of references.

use std::any::Any;
use std::sync::Arc;
use std::time::Instant;

use tensorcall_proto::ids::Rank;

use super::{Leak, RRefCounts};
use crate::agent::{Agent, Request};
use crate::error::Result;
use crate::future::RpcFuture;
use crate::rref::{Kept, RRef};

impl Agent {
    /// Calls a function of worker `to` whose result stays there; returns at once with a reference to that
    /// result. The future completes when `to` has run the function: what it raised is its outcome then, and
    /// that of every fetch.
    ///
    /// # Errors
    ///
    /// As [`Agent::call`]. If the call fails later, for example by its timeout, the reference is of no use.
    pub fn remote(&self, to: Rank, request: Request) -> Result<(RRef, RpcFuture)> {
        let rref = self.new_rref(to)?;
        let future = self.call(to, Request { creates: Some(rref.clone()), ..request })?;
        Ok((rref, future))
    }

    /// A reference for [`Request::creates`] of a call to `to`. It means nothing before that call.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if there is no such worker.
    pub fn new_rref(&self, to: Rank) -> Result<RRef> {
        self.inner.check_home()?;
        self.inner.new_rref(to)
    }

    /// A reference to a value of this worker. `label` says in reports of leaks where it comes from.
    pub fn make_rref(&self, value: Arc<dyn Any + Send + Sync>, label: &str) -> RRef {
        self.inner.local_rref(Kept::Value(value), label)
    }

    /// The next number of the counter that ids of references are made with.
    pub fn next_local_id(&self) -> u64 {
        self.inner.rrefs.next_local()
    }

    /// Numbers about references; all zero in a forked child.
    pub fn rref_counts(&self) -> RRefCounts {
        if self.is_here() { self.inner.rref_counts() } else { RRefCounts::default() }
    }

    /// Deletes all references of this worker, once everything that was shared is known to its owner, and
    /// waits for those that others have to its values, until `limit`. Tells whether nothing is left; what
    /// is, [`Agent::rref_leaks`] tells. For workers that leave together: each does it before
    /// [`Agent::quiesce`].
    pub fn delete_rrefs(&self, limit: Option<Instant>) -> bool {
        self.rrefs_settled(limit);
        self.delete_all_rrefs();
        self.rrefs_gone(true, limit)
    }

    /// Waits until `limit` for every reference of this worker, and all that it has shared, to be known to
    /// the owner; tells whether they are.
    pub fn rrefs_settled(&self, limit: Option<Instant>) -> bool {
        !self.is_here() || self.inner.rrefs_settled(limit)
    }

    /// Deletes all references of this worker to values of others, whoever has a handle still.
    pub fn delete_all_rrefs(&self) {
        if self.is_here() {
            self.inner.delete_all_rrefs();
        }
    }

    /// Waits until `limit` for all references of this worker to be gone and, with `others`, for those that
    /// others have to its values; tells whether they are.
    pub fn rrefs_gone(&self, others: bool, limit: Option<Instant>) -> bool {
        !self.is_here() || self.inner.rrefs_gone(others, limit)
    }

    /// References that others have to values of this worker.
    pub fn rref_leaks(&self) -> Vec<Leak> {
        if self.is_here() { self.inner.rref_leaks() } else { Vec::new() }
    }
}
