//! Memory that another process of this host has mapped too.
//!
//! [`SharedMemory`] is one segment, as its owner has it ([`SharedMemory::create`]) or as the other one has
//! ([`SharedMemory::map`]). Nothing of it has a name, so nothing is left anywhere when both are gone, however they
//! went. Its size is sealed: no access to it can fail because the other process made it smaller. Who may touch which
//! part of it is decided elsewhere ([`tensorcall_proto::blocks`]); a part that was borrowed is a [`SharedBlock`], and
//! its end is told.
//!
//! The other process belongs to this job and proved it. Should it write where it must not, what is read there is
//! garbled, as it would be had it sent other bytes.
#![expect(unsafe_code, reason = "mapping memory and copying into it; each use carries its proof (ADR 23)")]

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat};

use crate::buffer::Region;
use crate::fork::{self, Fd, Home, Inherited};

/// Bytes whose pages are taken in one step, in half a millisecond or so.
const STEP: u64 = 2 << 20;
/// Steps of one segment that may be interrupted.
const TRIES: u32 = 1000;

/// A segment of shared memory.
pub(crate) struct SharedMemory {
    start: NonNull<u8>,
    len: usize,
    home: Home,
    /// What a forked child has instead of memory that somebody else may write to.
    inherited: Option<Inherited>,
}

// SAFETY: a mapping belongs to no thread. It is written through `fill`, and by who has a block of it, each of whom
// has a part of its own.
unsafe impl Send for SharedMemory {}
// SAFETY: `&SharedMemory` gives addresses, and `fill`, whose callers have the part for themselves.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes `len` bytes, and the descriptor by which another process can map them. A forked child has nothing of
    /// them.
    ///
    /// # Errors
    ///
    /// If there is not so much memory, or the system has no such thing.
    pub(crate) fn create(len: usize) -> io::Result<(Self, Fd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = Fd::open(|| rustix::fs::memfd_create("tensorcall", flags))?;
        take_pages(&fd, len as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = Self { start: map_shared(&fd, len)?, len, home: Home::here(), inherited: None };
        // SAFETY: exactly the mapping that was just made. In a child its addresses are free for others, and this
        // value knows that it is not at home there.
        if unsafe { libc::madvise(memory.start.as_ptr().cast(), len, libc::MADV_DONTFORK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((memory, fd))
    }

    /// Maps what another process made. Forked children see it as it is then, and change copies of their own.
    ///
    /// # Errors
    ///
    /// If it is not `len` bytes that nobody can take away.
    pub(crate) fn map(fd: Fd, len: usize) -> io::Result<Self> {
        let refuse = |why: &str| Err(io::Error::new(io::ErrorKind::InvalidData, why));
        // Before anything else: only memory has seals.
        if !fcntl_get_seals(&fd)?.contains(SealFlags::SHRINK) {
            return refuse("the segment could be made smaller");
        }
        if u64::try_from(fstat(&fd)?.st_size).ok() != u64::try_from(len).ok() {
            return refuse("the segment is not of the announced size");
        }
        let start = map_shared(&fd, len)?;
        let inherited = Some(Inherited::new(start.as_ptr().expose_provenance(), len, fd));
        Ok(Self { start, len, home: Home::here(), inherited })
    }

    /// Copies `source` to `offset`. The caller has that part for itself.
    ///
    /// # Panics
    ///
    /// If it is not all inside.
    pub(crate) fn fill(&self, offset: usize, source: &Region) {
        assert!(offset <= self.len && source.len() <= self.len - offset, "a block lies in its segment");
        // SAFETY: inside the mapping by the assertion.
        let target = unsafe { self.start.add(offset) };
        // SAFETY: `source` keeps its bytes readable, and as many are writable at `target` by the assertion. A
        // region never lies in memory that is lent out from here, so the two do not overlap. No reference to
        // either is formed (MEM-1): a write to the source meanwhile garbles bytes and no more.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target.as_ptr(), source.len()) }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if self.home.is_here() {
            // First, so that no child maps a copy where there is something else by then.
            self.inherited = None;
            // SAFETY: the mapping that `map_shared` made, unmapped once; who has a part of it keeps it alive.
            unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
        }
    }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Takes all pages now: later there might be none, and who touches one then dies.
fn take_pages(fd: &Fd, len: u64) -> io::Result<()> {
    let mut at = 0;
    let mut tries = TRIES;
    while at < len {
        // Short steps: one that a signal interrupts begins anew.
        let step = STEP.min(len - at);
        match fallocate(fd, FallocateFlags::empty(), at, step) {
            Ok(()) => at += step,
            Err(rustix::io::Errno::INTR) if tries > 0 => tries -= 1,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn map_shared(fd: &Fd, len: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address that the system chooses touches no memory that anybody has.
    let start = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            fd.as_fd().as_raw_fd(),
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Hears that a block is not used any more, on whatever thread that happens. It must not wait.
pub(crate) trait Returns: Send + Sync {
    /// `block` of `segment`, of which `len` bytes were used; `reusable` unless a forked child may see it still.
    fn give_back(&self, segment: u64, block: u32, len: usize, reusable: bool);
}

/// Part of a segment that is ours until this is dropped.
pub(crate) struct SharedBlock {
    start: NonNull<u8>,
    len: usize,
    home: Home,
    /// `Some` until it is dropped.
    lender: Option<BlockOrigin>,
}

/// Where a block comes from and goes back to.
pub(crate) struct BlockOrigin {
    /// Keeps the mapping.
    pub(crate) memory: Arc<SharedMemory>,
    /// The number of its segment, and its own therein.
    pub(crate) place: (u64, u32),
    pub(crate) returns: Arc<dyn Returns>,
    /// How often this process had forked when the block came.
    pub(crate) forks: u32,
}

// SAFETY: the memory is this value's alone until it is dropped, as heap memory would be.
unsafe impl Send for SharedBlock {}
// SAFETY: `&SharedBlock` gives an address and no access.
unsafe impl Sync for SharedBlock {}

impl SharedBlock {
    /// The `len` bytes at `offset` of what `origin` keeps, which nobody else here uses; `None` if they are not all
    /// inside.
    pub(crate) fn new(origin: BlockOrigin, offset: usize, len: usize) -> Option<Self> {
        let memory = &origin.memory;
        if offset > memory.len || len > memory.len - offset {
            return None;
        }
        // SAFETY: inside the mapping, as was just found.
        let start = unsafe { memory.start.add(offset) };
        Some(Self { start, len, home: Home::here(), lender: Some(origin) })
    }

    /// Number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first byte. [`len`](Self::len) bytes from there on are initialised, and this block's alone as long as it lives.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for SharedBlock {
    fn drop(&mut self) {
        let Some(origin) = self.lender.take() else { return };
        if self.home.is_here() {
            let (segment, block) = origin.place;
            let reusable = origin.forks == fork::count();
            origin.returns.give_back(segment, block, self.len, reusable);
        } else {
            // The parent has it still; what it comes from is not ours to change (FORK-1).
            std::mem::forget(origin);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Mutex;

    const LEN: usize = 1 << 16;

    #[derive(Default)]
    struct Told(Mutex<Vec<(u64, u32, usize, bool)>>);

    impl Returns for Told {
        fn give_back(&self, segment: u64, block: u32, len: usize, reusable: bool) {
            self.0.lock().push((segment, block, len, reusable));
        }
    }

    fn block(memory: &Arc<SharedMemory>, told: &Arc<Told>, offset: usize, len: usize) -> Option<SharedBlock> {
        let (memory, returns) = (Arc::clone(memory), Arc::clone(told) as Arc<dyn Returns>);
        SharedBlock::new(BlockOrigin { memory, place: (7, 1), returns, forks: fork::count() }, offset, len)
    }

    #[test]
    fn what_one_end_fills_in_the_other_has_and_its_end_is_told_once() {
        let (here, fd) = SharedMemory::create(LEN).unwrap();
        let there = Arc::new(SharedMemory::map(fd, LEN).unwrap());
        let told = Arc::new(Told::default());
        here.fill(64, &Region::from_vec(vec![1, 2, 3]));
        drop(here);

        let block = block(&there, &told, 64, 3).unwrap();
        let buffer = crate::buffer::Buffer::from_shared(block);

        assert_eq!(buffer.as_ref(), [1, 2, 3]);
        assert!(told.0.lock().is_empty());
        drop(there);
        std::thread::spawn(move || drop(buffer)).join().unwrap();
        assert_eq!(*told.0.lock(), [(7, 1, 3, true)]);
    }

    #[test]
    fn a_segment_that_could_shrink_or_has_another_size_is_refused() {
        let open = |flags| Fd::open(|| rustix::fs::memfd_create("test", flags)).unwrap();
        let unsealed = open(MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        rustix::fs::ftruncate(&unsealed, LEN as u64).unwrap();
        let (_memory, sealed) = SharedMemory::create(LEN).unwrap();
        let pipe = Fd::open(|| rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)).unwrap();

        assert!(SharedMemory::map(unsealed, LEN).is_err());
        assert!(SharedMemory::map(sealed, LEN + 1).is_err());
        assert!(SharedMemory::map(pipe, LEN).is_err());
    }

    #[test]
    fn the_size_of_a_segment_is_sealed() {
        let (_memory, fd) = SharedMemory::create(LEN).unwrap();

        assert!(rustix::fs::ftruncate(&fd, 0).is_err());
        assert!(rustix::fs::ftruncate(&fd, 2 * LEN as u64).is_err());
    }

    #[test]
    fn a_block_lies_inside_its_segment() {
        let (memory, _fd) = SharedMemory::create(LEN).unwrap();
        let (memory, told) = (Arc::new(memory), Arc::new(Told::default()));

        assert!(block(&memory, &told, LEN - 1, 1).is_some());
        assert!(block(&memory, &told, LEN, 1).is_none());
        assert!(block(&memory, &told, usize::MAX, 1).is_none());
    }
}
