//! [`LocalEngine`]: what a tensor library supplies for backward passes, and how passes fail.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use tensorcall_proto::autograd::{AutogradError, Pass, Plan};
use tensorcall_proto::wire::message::{Encoding, FailureKind};

use crate::body::{Body, Received};
use crate::buffer::Region;
use crate::error::{Error, ErrorKind};
use crate::rref::Packed;

/// What starts a pass, as the local engine knows it: tensors whose gradients are known.
pub type Roots = Arc<dyn Any + Send + Sync>;

/// Gradients that came: those of the tensors of one message.
#[derive(Debug)]
pub struct Arrived {
    /// The autograd message; `None` for the roots.
    pub message: Option<u64>,
    /// The gradients, as the local engine of the sender packed them. `None` for the roots.
    pub gradients: Option<(Encoding, Received)>,
}

/// The gradients that a recv function has for the worker that sent the message, or that there are none.
#[derive(Debug)]
pub struct Found {
    /// The autograd message.
    pub message: u64,
    /// The gradients of its tensors, packed for the local engine of that worker.
    pub gradients: Option<(Encoding, Body)>,
}

/// One worker's autograd, for [`Handler::local_engine`](crate::engine::Handler::local_engine).
///
/// Its methods are called on pool threads that count as no place of the pool, one at a time for each pass
/// and in order: `plan`, any number of `vjp`, `end`. Passes may overlap.
pub trait LocalEngine: Send + Sync {
    /// Looks which sources there are in the context's graphs (send functions, and the `roots` if the pass
    /// began here), and which of them reach each recv function.
    ///
    /// # Errors
    ///
    /// Any error ends the pass, on all workers.
    fn plan(&self, pass: &Pass, roots: Option<Roots>) -> Result<Plan, PassError>;

    /// Runs the sources that `arrived`, and adds what comes out to the context: to the leaves, and to the
    /// recv functions. Those that are `wanted` are complete by this; returns what they have got in this pass.
    /// Unless it is the `last` time, the graphs are needed again; the last of several times there may be
    /// nothing to run.
    ///
    /// # Errors
    ///
    /// Any error ends the pass, on all workers.
    fn vjp(
        &self,
        pass: &Pass,
        arrived: Vec<Arrived>,
        wanted: &[u64],
        last: bool,
    ) -> Result<Vec<Found>, PassError>;

    /// The pass is over; `error` says why, if it failed. It may have failed before it was planned.
    fn end(&self, pass: &Pass, error: Option<&PassError>);
}

/// Why a backward pass failed.
#[derive(Debug, Clone)]
pub struct PassError(Why);

#[derive(Debug, Clone)]
enum Why {
    /// The exception of a function.
    Raised(Arc<Packed>),
    Failed {
        kind: ErrorKind,
        text: Arc<str>,
    },
}

impl PassError {
    /// The local engine raised an exception, packed like that of a function.
    pub fn raised(encoding: Encoding, body: Body) -> Self {
        Self(Why::Raised(Arc::new(Packed { raised: true, encoding, body })))
    }

    /// There is no exception, but a text.
    pub fn failed(kind: ErrorKind, text: impl Into<Arc<str>>) -> Self {
        Self(Why::Failed { kind, text: text.into() })
    }

    /// The exception of the local engine, if it was that.
    pub fn exception(&self) -> Option<&Packed> {
        match &self.0 {
            Why::Raised(packed) => Some(packed),
            Why::Failed { .. } => None,
        }
    }

    /// As a program sees it.
    pub(crate) fn to_error(&self) -> Error {
        match &self.0 {
            Why::Raised(_) => Error::new(ErrorKind::Autograd, self.to_string()),
            Why::Failed { kind, text } => Error::new(*kind, text.to_string()),
        }
    }

    /// As it travels: an exception as it was packed, a text as bytes.
    pub(crate) fn pack(&self) -> (Encoding, Body) {
        match &self.0 {
            Why::Raised(packed) => (packed.encoding, packed.body.clone()),
            Why::Failed { text, .. } => (Encoding::Bytes, Body::of(text.as_bytes().to_vec())),
        }
    }

    /// What [`pack`](Self::pack) made.
    pub(crate) fn unpack(encoding: Encoding, body: Received) -> Self {
        let Received { payload, tensors, buffers, rrefs, .. } = body;
        if encoding == Encoding::Bytes {
            return Self::failed(ErrorKind::Autograd, String::from_utf8_lossy(payload.as_ref()));
        }
        let buffers = buffers.into_iter().map(Region::from_buffer).collect();
        let payload = payload.as_ref().to_vec();
        Self::raised(encoding, Body { payload, tensors, buffers, rrefs, ..Body::default() })
    }
}

impl From<AutogradError> for PassError {
    fn from(error: AutogradError) -> Self {
        Self::failed(ErrorKind::Autograd, error.to_string())
    }
}

impl From<Error> for PassError {
    fn from(error: Error) -> Self {
        Self::failed(error.kind(), error.to_string())
    }
}

impl fmt::Display for PassError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Why::Raised(_) => f.write_str("an exception was raised in a backward pass"),
            Why::Failed { text, .. } => f.write_str(text),
        }
    }
}

/// How a worker says that it takes no part in backward passes.
pub(crate) const NO_ENGINE: (FailureKind, &str) =
    (FailureKind::Usage, "this worker has no local engine for backward passes");
