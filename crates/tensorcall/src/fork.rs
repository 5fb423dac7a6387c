//! What a forked child does with what it inherits: nothing (FORK-1).
//!
//! A child has a copy of every agent of its parent, none of the agent's threads, and all its
//! descriptors. If it kept these, a peer of a killed parent would see nothing happen; if it used the rest,
//! it would wait for threads that are not there, or write to the parent's peers. So:
//!
//! - [`Fd`] owns a descriptor and enters it in a table. A handler that the system runs in every child,
//!   before anything else, closes all that are in the table: closed and not shut down, the parent goes on.
//! - [`Home`] is the process in which something was made. What has locks, threads or descriptors knows its
//!   home; elsewhere its functions fail or do nothing, and it is forgotten instead of dropped.
//! - [`PerProcess`] is for what is static: a child begins with one of its own.
//!
//! Descriptors are also closed on `exec`. A child by `vfork` or `posix_spawn` shares or replaces its
//! parent's memory and runs no such handler; all it can do is `exec`.

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{self, Once, OnceLock, PoisonError};

use crate::transport::sys;

/// How many forks lie between the process that loaded this library and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// How many forks this process has made.
static MADE: AtomicU32 = AtomicU32::new(0);

/// How many forks this process has made, or is making. What was there before the last of them, a child has too.
pub(crate) fn count() -> u32 {
    MADE.load(Ordering::SeqCst)
}

/// The process in which something was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Home(u32);

impl Home {
    /// This process.
    pub fn here() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether it is this process. If not, this is a forked child of that one.
    pub fn is_here(self) -> bool {
        self == Self::here()
    }
}

/// A descriptor of ours. Made in one process, it is closed in every forked child of it.
#[derive(Debug)]
pub struct Fd {
    /// `Some` until it is dropped.
    owned: Option<OwnedFd>,
    raw: RawFd,
    home: Home,
}

impl Fd {
    /// Opens a descriptor by `make`, which must not wait: a thread that forks waits for it.
    ///
    /// # Errors
    ///
    /// Those of `make`.
    pub fn open<E>(make: impl FnOnce() -> Result<OwnedFd, E>) -> Result<Self, E> {
        watch_forks();
        // Under the lock, so that no child has it before the table does.
        let mut table = table();
        Ok(table.enter(make()?))
    }

    /// As [`Fd::open`], for a call that may bring descriptors along with something else.
    ///
    /// # Errors
    ///
    /// Those of `make`.
    pub(crate) fn receive<R, E>(
        make: impl FnOnce() -> Result<(R, Vec<OwnedFd>), E>,
    ) -> Result<(R, Vec<Self>), E> {
        watch_forks();
        let mut table = table();
        let (result, fds) = make()?;
        Ok((result, fds.into_iter().map(|fd| table.enter(fd)).collect()))
    }
}

impl AsFd for Fd {
    #[expect(clippy::expect_used, reason = "taken by `drop` alone")]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.owned.as_ref().expect("it is not dropped").as_fd()
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.raw
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let mut table = table();
        if self.home.is_here() {
            table.set(self.raw, false);
            self.owned = None;
        } else {
            // It is closed, and its number may be somebody else's by now.
            std::mem::forget(self.owned.take());
        }
    }
}

/// Shared memory of which a forked child gets a copy on write: what it changes there, its parent does not see.
#[derive(Debug)]
pub(crate) struct Inherited {
    start: usize,
    _fd: Fd,
}

impl Inherited {
    /// The `len` bytes at `start` are a mapping of all that `fd` has, as long as this lives.
    pub(crate) fn new(start: usize, len: usize, fd: Fd) -> Self {
        table().mapped.push(Mapped { start, len, fd: fd.as_raw_fd() });
        Self { start, _fd: fd }
    }
}

impl Drop for Inherited {
    fn drop(&mut self) {
        table().mapped.retain(|mapped| mapped.start != self.start);
    }
}

/// Something static of which every process has its own; that of the parent is left alone.
#[derive(Debug)]
pub struct PerProcess<T> {
    home: u32,
    value: OnceLock<T>,
    child: OnceLock<Box<Self>>,
}

impl<T> PerProcess<T> {
    /// One that no process has asked for.
    pub const fn new() -> Self {
        Self::of(0)
    }

    const fn of(home: u32) -> Self {
        Self { home, value: OnceLock::new(), child: OnceLock::new() }
    }

    /// This process's own, made when it is first asked for.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        let Home(here) = Home::here();
        let mut own = self;
        while own.home != here {
            own = own.child.get_or_init(|| Box::new(Self::of(here)));
        }
        own.value.get_or_init(make)
    }
}

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// What a child is to be rid of.
struct Table {
    /// Which descriptors are ours, by number.
    ours: Vec<bool>,
    mapped: Vec<Mapped>,
}

/// See [`Inherited`].
struct Mapped {
    start: usize,
    len: usize,
    fd: RawFd,
}

impl Table {
    const EMPTY: Self = Self { ours: Vec::new(), mapped: Vec::new() };

    fn enter(&mut self, fd: OwnedFd) -> Fd {
        let raw = fd.as_raw_fd();
        self.set(raw, true);
        Fd { owned: Some(fd), raw, home: Home::here() }
    }

    fn set(&mut self, fd: RawFd, ours: bool) {
        let Ok(place) = usize::try_from(fd) else { return };
        if place >= self.ours.len() {
            self.ours.resize(place + 1, false);
        }
        self.ours[place] = ours;
    }
}

type TableGuard = sync::MutexGuard<'static, Table>;

static TABLE: sync::Mutex<Table> = sync::Mutex::new(Table::EMPTY);

fn table() -> TableGuard {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// Held by the thread that forks, from before until after: in the child, nobody else could let go of it.
    static HELD: RefCell<Option<TableGuard>> = const { RefCell::new(None) };
}

/// From now on the functions below run around each fork of this process.
fn watch_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Err(error) = sys::at_fork(before_fork, after_in_parent, after_in_child) {
            tracing::error!(%error, "forked children will keep the connections of this process open");
        }
    });
}

extern "C" fn before_fork() {
    let held = table();
    MADE.fetch_add(1, Ordering::SeqCst);
    let _ = HELD.try_with(|place| place.replace(Some(held)));
}

extern "C" fn after_in_parent() {
    let _ = HELD.try_with(RefCell::take);
}

/// The child's first act: nothing here waits or takes memory.
extern "C" fn after_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    let held = HELD.try_with(RefCell::take).ok().flatten();
    let Some(mut table) = held else { return };
    for &Mapped { start, len, fd } in &table.mapped {
        sys::map_copy(start, len, fd);
    }
    // Their owners are the parent's, and forget them here.
    let _ = std::mem::ManuallyDrop::new(std::mem::take(&mut table.mapped));
    for (fd, ours) in table.ours.iter_mut().enumerate() {
        if std::mem::take(ours)
            && let Ok(fd) = RawFd::try_from(fd)
        {
            sys::close_inherited(fd);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_knows_what_was_entered_last() {
        let mut table = Table::EMPTY;
        table.set(5, true);
        table.set(2, true);
        table.set(5, false);
        table.set(-1, true);

        assert_eq!(table.ours, [false, false, true, false, false, false]);
    }

    #[test]
    fn a_static_thing_is_made_once_in_a_process() {
        static NUMBER: PerProcess<u32> = PerProcess::new();

        assert_eq!(*NUMBER.get_or_init(|| 1), 1);
        assert_eq!(*NUMBER.get_or_init(|| 2), 1);
    }

    #[test]
    fn what_is_made_here_is_at_home_here() {
        assert!(Home::here().is_here());
    }
}
