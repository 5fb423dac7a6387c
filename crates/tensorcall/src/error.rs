//! What can go wrong, as a caller sees it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tensorcall_proto::ids::{Rank, WorkerName};
use tensorcall_proto::wire::Exception;
use tensorcall_proto::wire::message::{FailureKind, Phase};

/// Why a call, a wait or an agent failed.
#[derive(Debug, Clone)]
pub struct Error(Box<Inner>);

#[derive(Debug, Clone)]
struct Inner {
    kind: ErrorKind,
    text: String,
    remote: Option<Arc<RemoteError>>,
}

/// What a function of another worker raised, returned as its error, or panicked with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteError {
    worker: String,
    exception: Exception,
}

/// What a caller can do about an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The deadline passed. The call may still run on the other worker.
    Timeout,
    /// The other worker, or the way to it, is gone.
    PeerLost,
    /// The other worker left the group in good order.
    PeerLeft,
    /// The call was cancelled.
    Cancelled,
    /// The other worker could not run the call (not: its function failed).
    Remote,
    /// The function that was called failed: it returned an error, raised an exception or panicked.
    /// [`Error::remote`] tells more.
    Raised,
    /// All threads of the other worker wait and no more may be made.
    PoolExhausted,
    /// This agent is shutting down or has shut down.
    ShuttingDown,
    /// The reference is of no use: deleted, never created, or its owner is gone.
    RRef,
    /// A backward pass failed: on some worker, or because nothing moved.
    Autograd,
    /// The arguments make no sense: an unknown worker, a bad option.
    Usage,
    /// A peer broke the protocol.
    Protocol,
    /// The operating system refused something.
    Io,
    /// The agent, or the future, is that of the process that this one was forked from.
    Forked,
}

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` that says `text`.
    pub fn new(kind: ErrorKind, text: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, text: text.into(), remote: None }))
    }

    /// What the function that was called raised, if it was that ([`ErrorKind::Raised`]).
    pub fn remote(&self) -> Option<&RemoteError> {
        self.0.remote.as_deref()
    }

    /// `function` of worker `worker` raised this.
    pub(crate) fn raised(worker: &WorkerName, function: &str, exception: Exception) -> Self {
        let remote = RemoteError { worker: worker.as_str().to_owned(), exception };
        let text = format!("{function} on worker '{worker}' raised {}: {}", remote.class(), remote.message());
        Self(Box::new(Inner { kind: ErrorKind::Raised, text, remote: Some(Arc::new(remote)) }))
    }

    /// What can be done about it.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// A mistake of the caller.
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::new(ErrorKind::Usage, text)
    }

    /// The operating system said no while we were about to do `what`.
    pub(crate) fn io(what: &str, error: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Io, format!("{what}: {error}"))
    }

    /// This agent no longer makes or answers calls.
    pub(crate) fn shutting_down() -> Self {
        Self::new(ErrorKind::ShuttingDown, "this worker's agent is shutting down or has shut down")
    }

    /// This process is a forked child of `worker`, whose agent does not work here (FORK-1).
    pub(crate) fn forked(worker: Option<&WorkerName>) -> Self {
        let whose = worker.map_or_else(|| "another process".to_owned(), |name| format!("worker '{name}'"));
        let text = format!(
            "this process was forked from {whose}, whose agent and calls do not work here: a forked child that \
             wants to make calls joins a group itself, under a name of its own"
        );
        Self::new(ErrorKind::Forked, text)
    }

    /// A call to `name` was not answered within `limit`; it had come as far as `phase`.
    ///
    /// The first sentence is the one that programs written for PyTorch match.
    pub(crate) fn timeout(name: &WorkerName, function: &str, limit: Duration, phase: Phase) -> Self {
        let text = format!(
            "RPC ran for more than set timeout ({} ms) and will now be marked with an error: {function} on worker \
             '{name}' was {}",
            limit.as_millis(),
            phase_name(phase)
        );
        Self::new(ErrorKind::Timeout, text)
    }

    /// A call to `name` failed because the worker is gone.
    pub(crate) fn peer_lost(name: &WorkerName, rank: Rank, why: &str, function: &str, phase: Phase) -> Self {
        let text = format!(
            "worker '{name}' (rank {rank}) is lost: {why}; the call of {function} was {}",
            phase_name(phase)
        );
        Self::new(ErrorKind::PeerLost, text)
    }

    /// A call to `name` failed because the worker left.
    pub(crate) fn peer_left(name: &WorkerName, rank: Rank) -> Self {
        Self::new(
            ErrorKind::PeerLeft,
            format!("worker '{name}' (rank {rank}) has shut down and left the group"),
        )
    }

    /// What worker `name` says it could not do.
    pub(crate) fn failure(name: &WorkerName, kind: FailureKind, text: &str) -> Self {
        let kind = match kind {
            FailureKind::PoolExhausted => ErrorKind::PoolExhausted,
            FailureKind::ShuttingDown => ErrorKind::PeerLeft,
            FailureKind::Expired => ErrorKind::Timeout,
            FailureKind::Cancelled => ErrorKind::Cancelled,
            FailureKind::Usage => ErrorKind::Usage,
            FailureKind::Protocol => ErrorKind::Protocol,
            FailureKind::Internal => ErrorKind::Remote,
        };
        Self::new(kind, format!("worker '{name}': {text}"))
    }
}

impl RemoteError {
    /// The worker whose function it was.
    pub fn worker(&self) -> &str {
        &self.worker
    }

    /// The class of the exception, `builtins.ValueError`, or the type of the error, `std.io.Error`.
    pub fn class(&self) -> String {
        self.classes().next().unwrap_or_else(|| "an exception".to_owned())
    }

    /// Whether it is of this class, or of one that derives from it; by full name or by its last part.
    pub fn is(&self, class: &str) -> bool {
        self.classes().any(|name| name == class || name.rsplit('.').next() == Some(class))
    }

    /// What it says.
    pub fn message(&self) -> &str {
        &self.exception.message
    }

    /// Where it was raised, for people: the function and, from Python, the traceback.
    pub fn origin(&self) -> &str {
        &self.exception.origin
    }

    /// Each is on the wire as `module:qualified.name`.
    fn classes(&self) -> impl Iterator<Item = String> + '_ {
        let name = |class: &str| match class.split_once(':') {
            Some(("rust", name)) => name.to_owned(),
            Some((module, name)) => format!("{module}.{name}"),
            None => class.to_owned(),
        };
        self.exception.classes.split_whitespace().map(name)
    }
}

/// Where a call was, for a person.
fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Queued => "queued here",
        Phase::Sent => "sent, not answered",
        Phase::Waiting => "waiting for a thread there",
        Phase::Running => "running there",
        Phase::Replying => "on its way back",
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.text)
    }
}

impl std::error::Error for Error {}
