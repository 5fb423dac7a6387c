//! Stores: where the workers of a job meet.
//!
//! A [`Store`] keeps small values by key for several processes, and lets them wait for each other's keys.
//! [`TcpStore`] is a client of a server that is ours ([`StoreServer`]) or PyTorch's, for both speak one
//! protocol; [`FileStore`] shares a file with PyTorch's; [`MemoryStore`] is for the threads of one process.
//! All of them behave alike: `tests/store_suite.rs` is one list of tests for all.
//!
//! ```
//! use std::time::Duration;
//! use tensorcall::store::{Store, StoreServer, TcpStore};
//!
//! let server = StoreServer::listen("127.0.0.1:0".parse()?)?;
//! let store = TcpStore::connect("127.0.0.1", server.address().port(), Duration::from_secs(10))?;
//! store.set("greeting", b"hello")?;
//! store.wait(&["greeting"], None)?;
//! assert_eq!(store.get("greeting")?.as_deref(), Some(&b"hello"[..]));
//! assert_eq!(store.add("workers", 1)?, 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! To add one, implement the trait and add a line to that suite.

mod file;
mod memory;
mod server;
mod tcp;

pub use file::FileStore;
pub use memory::MemoryStore;
pub use server::StoreServer;
pub use tcp::TcpStore;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tensorcall_proto::store::StoreFault;

use crate::error::{Error, ErrorKind};

/// Values by key that several workers share. Every operation happens as a whole.
pub trait Store: Send + Sync + fmt::Debug {
    /// Lets `key` have `value`. When this returns, everybody sees it.
    ///
    /// # Errors
    ///
    /// As everywhere here, what became of the store: see [`StoreError`].
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError>;

    /// The value of `key`, if it is there.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// Lets `key` have `desired` if it has `expected`, or is missing and `expected` is empty. Returns what it
    /// has then; for a missing key `expected`.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, StoreError>;

    /// Adds to a number, which is kept as decimal text; a missing one is 0. Returns the sum.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotANumber`] if the key has another value. A [`TcpStore`] cannot tell that from a store
    /// that is lost: the server only closes the connection.
    fn add(&self, key: &str, delta: i64) -> Result<i64, StoreError>;

    /// Adds bytes to the end of a value; a missing one is empty.
    fn append(&self, key: &str, more: &[u8]) -> Result<(), StoreError>;

    /// Whether all of `keys` are there.
    fn check(&self, keys: &[&str]) -> Result<bool, StoreError>;

    /// Returns when all of `keys` are there.
    ///
    /// # Errors
    ///
    /// [`StoreError::Timeout`] at `limit`. `None` waits for ever.
    fn wait(&self, keys: &[&str], limit: Option<Instant>) -> Result<(), StoreError>;

    /// Removes a key; tells whether it was there.
    fn delete(&self, key: &str) -> Result<bool, StoreError>;

    /// The values of several keys; an empty one for a key that is missing.
    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>, StoreError> {
        keys.iter().map(|key| Ok(self.get(key)?.unwrap_or_default())).collect()
    }
}

/// Why a store did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The keys did not come in time.
    #[error("the key(s) {} did not come in time", .keys.join(", "))]
    Timeout {
        /// The keys that were waited for.
        keys: Vec<String>,
    },
    /// Nobody answers there, or something else than a store does.
    #[error("no store answers at {place} after {:.1} s: {why}", .after.as_secs_f64())]
    Unreachable {
        /// Where it was looked for.
        place: String,
        /// For how long.
        after: Duration,
        /// What came instead.
        why: String,
    },
    /// It was there and is gone.
    #[error("the store at {place} is lost: {why}")]
    Lost {
        /// Where it was.
        place: String,
        /// What happened.
        why: String,
    },
    /// A value that is added to is not a number.
    #[error("the value of the key {key} is not a number")]
    NotANumber {
        /// The key.
        key: String,
    },
    /// A key or a value is longer than a server takes.
    #[error("{len} bytes are too many for a store, which takes {limit} at most")]
    TooLong {
        /// Its length.
        len: usize,
        /// The longest that is taken.
        limit: usize,
    },
    /// The operating system, or a store that is too large, refused something.
    #[error("{0}")]
    Io(String),
    /// The store is that of the process which this one was forked from.
    #[error("this process was forked from the one whose store this is: it opens one itself")]
    Forked,
}

impl StoreError {
    fn io(what: impl fmt::Display, error: impl fmt::Display) -> Self {
        Self::Io(format!("{what}: {error}"))
    }

    fn timeout(keys: &[&str]) -> Self {
        Self::Timeout { keys: keys.iter().map(|&key| key.to_owned()).collect() }
    }

    fn refused(key: &str, fault: StoreFault) -> Self {
        match fault {
            StoreFault::NotANumber(_) => Self::NotANumber { key: key.to_owned() },
            other => Self::io(key, other),
        }
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        let kind = match error {
            StoreError::Timeout { .. } => ErrorKind::Timeout,
            StoreError::NotANumber { .. } => ErrorKind::Protocol,
            StoreError::TooLong { .. } => ErrorKind::Usage,
            StoreError::Forked => ErrorKind::Forked,
            _ => ErrorKind::Io,
        };
        Self::new(kind, error.to_string())
    }
}

/// A part of a store: its keys are `prefix/key` there.
#[derive(Debug, Clone)]
pub struct PrefixStore {
    prefix: String,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// The part of `inner` under `prefix`.
    pub fn new(prefix: impl Into<String>, inner: Arc<dyn Store>) -> Self {
        Self { prefix: prefix.into(), inner }
    }

    fn full(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn with_all<R>(&self, keys: &[&str], run: impl FnOnce(&[&str]) -> R) -> R {
        let full: Vec<_> = keys.iter().map(|key| self.full(key)).collect();
        run(&full.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), StoreError> {
        self.inner.set(&self.full(key), value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.inner.get(&self.full(key))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>, StoreError> {
        self.inner.compare_set(&self.full(key), expected, desired)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64, StoreError> {
        self.inner.add(&self.full(key), delta)
    }

    fn append(&self, key: &str, more: &[u8]) -> Result<(), StoreError> {
        self.inner.append(&self.full(key), more)
    }

    fn check(&self, keys: &[&str]) -> Result<bool, StoreError> {
        self.with_all(keys, |full| self.inner.check(full))
    }

    fn wait(&self, keys: &[&str], limit: Option<Instant>) -> Result<(), StoreError> {
        self.with_all(keys, |full| self.inner.wait(full, limit))
    }

    fn delete(&self, key: &str) -> Result<bool, StoreError> {
        self.inner.delete(&self.full(key))
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>, StoreError> {
        self.with_all(keys, |full| self.inner.multi_get(full))
    }
}
