//! `Bell`: tells an event loop of Python what has come about, many things in one go.
//!
//! Whoever rings leaves a number and, if nobody has rung since the loop last came to look, writes an
//! eventfd that the loop watches. That is done on any thread, the reactor included: it takes a lock
//! for a moment and never enters Python (NET-1).

use std::os::fd::AsRawFd;
use std::sync::Arc;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};
use tensorcall::engine::fork::{Fd, Home};
use tensorcall::engine::sync::Mutex;

/// Rings an event loop.
#[pyclass(frozen, module = "tensorcall._tensorcall")]
pub(crate) struct Bell(Arc<Shared>);

/// What the loop and those who ring have in common; it outlives the loop as long as somebody may ring.
pub(crate) struct Shared {
    rung: Mutex<Vec<u64>>,
    event: Fd,
    /// A forked child must not ring the loop of its parent (FORK-1).
    home: Home,
}

impl Shared {
    pub(crate) fn ring(&self, number: u64) {
        if !self.home.is_here() {
            return;
        }
        let mut rung = self.rung.lock();
        let first = rung.is_empty();
        rung.push(number);
        drop(rung);
        if first {
            // It fails only if the counter is full, and then the loop is about to look.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

impl Bell {
    pub(crate) fn shared(&self) -> Arc<Shared> {
        Arc::clone(&self.0)
    }
}

#[pymethods]
impl Bell {
    #[new]
    fn new() -> PyResult<Self> {
        let event = Fd::open(|| eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK))
            .map_err(|errno| PyOSError::new_err((errno.raw_os_error(), errno.to_string())))?;
        Ok(Self(Arc::new(Shared { rung: Mutex::default(), event, home: Home::here() })))
    }

    /// The descriptor that is readable when somebody has rung.
    fn fileno(&self) -> i32 {
        self.0.event.as_raw_fd()
    }

    /// Rings with this number.
    fn ring(&self, number: u64) {
        self.0.ring(number);
    }

    /// The numbers that were rung since the last time, in that order.
    fn take(&self) -> Vec<u64> {
        if !self.0.home.is_here() {
            return Vec::new();
        }
        // First the eventfd: who rings after the list was taken writes it again.
        let _ = rustix::io::read(&self.0.event, &mut [0u8; 8]);
        std::mem::take(&mut *self.0.rung.lock())
    }
}
