//! Memory of messages: [`Buffer`] is ours, [`Region`] may be anybody's.
//!
//! A [`Buffer`] is 64-byte aligned, initialised memory that a message is received into; large ones
//! come from and return to a [`BufferPool`], because touching fresh pages costs more than the copy
//! (16 MiB: 4 ms fresh, 1.3 ms warm). A [`Region`] is raw memory with the owner that keeps it alive;
//! no `&[u8]` is ever formed over it, since Python may write it meanwhile (MEM-1). A buffer may also lie in a
//! block of memory that its sender shares with us (`shared.rs`), and goes back there.
#![expect(unsafe_code, reason = "aligned allocation and raw regions; each use carries its proof")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_queue::ArrayQueue;

use crate::fork::Home;
use crate::shared::SharedBlock;

/// Alignment of every buffer: a cache line, and what vectorised kernels ask for at most.
pub const ALIGNMENT: usize = 64;

/// Buffers below this size are not pooled, unless they are [small](SMALL): the allocator recycles them well.
const POOLED_FROM: usize = 64 << 10;
/// Size classes per power of two; at most a quarter of a pooled buffer is unused (and untouched).
const STEPS: usize = 4;
const CLASSES: usize = STEPS * (usize::BITS as usize);
/// Sizes of small buffers: the allocator is slow to align, and a small message has one. Each is the double of the one
/// before.
const SMALL: [usize; 6] = [64, 128, 256, 512, 1024, 2048];
/// Idle small buffers kept for each size.
const KEPT_SMALL: usize = 128;
/// Idle buffers kept per size class.
const KEPT_PER_CLASS: usize = 8;

/// From this size on memory is not touched before it is written. The allocator zeroes memory of more than
/// its own alignment by writing to it; a peer that announced gigabytes would get them for a few bytes.
const LAZY_FROM: usize = 64 << 10;
/// What every allocator aligns to, so that it may give out zero pages as they are.
const NATURAL_ALIGNMENT: usize = 16;

/// Owned, initialised, 64-byte aligned memory.
pub struct Buffer {
    /// `None` if there are no bytes.
    memory: Option<Place>,
    len: usize,
    pool: Option<Arc<BufferPool>>,
}

/// Where a buffer lies.
enum Place {
    Heap(Memory),
    /// Apart, for it is large and rare.
    Shared(Box<SharedBlock>),
}

impl Place {
    fn start(&self) -> NonNull<u8> {
        match self {
            Self::Heap(memory) => memory.start(),
            Self::Shared(block) => block.start(),
        }
    }
}

/// The allocator had no memory for a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no memory for a buffer of {0} bytes")]
pub struct OutOfMemory(pub usize);

impl Buffer {
    /// Zeroed memory of `len` bytes, outside any pool.
    pub fn zeroed(len: usize) -> Result<Self, OutOfMemory> {
        Self::allocate(len, len)
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Result<Self, OutOfMemory> {
        let mut buffer = Self::zeroed(bytes.len())?;
        buffer.as_mut().copy_from_slice(bytes);
        Ok(buffer)
    }

    /// The bytes of a block.
    pub(crate) fn from_shared(block: SharedBlock) -> Self {
        let len = block.len();
        Self { memory: Some(Place::Shared(Box::new(block))), len, pool: None }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes are; aligned to [`ALIGNMENT`] and valid as long as the buffer lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start().as_ptr()
    }

    fn start(&self) -> NonNull<u8> {
        // An aligned address that is never read or freed.
        let nothing = NonNull::without_provenance(const { std::num::NonZero::new(ALIGNMENT).unwrap() });
        self.memory.as_ref().map_or(nothing, Place::start)
    }

    fn allocate(len: usize, capacity: usize) -> Result<Self, OutOfMemory> {
        let memory = if capacity == 0 { None } else { Some(Memory::new(capacity).ok_or(OutOfMemory(len))?) };
        Ok(Self { memory: memory.map(Place::Heap), len, pool: None })
    }
}

impl AsRef<[u8]> for Buffer {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `start` points to `capacity >= len` initialised bytes (zeroed at allocation, only
        // ever overwritten) that `self` owns, or to the `len` bytes of a block that is ours alone;
        // for `len == 0` it is non-null and aligned.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for Buffer {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_ref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let (Some(Place::Heap(memory)), Some(pool)) = (self.memory.take(), self.pool.take()) {
            pool.put(memory);
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Uniquely owned heap memory, zeroed when it was new.
struct Memory {
    base: NonNull<u8>,
    /// Usable bytes from [`Memory::start`] on; not zero.
    capacity: usize,
}

// SAFETY: `base` is uniquely owned heap memory; nothing in it is tied to a thread.
unsafe impl Send for Memory {}
// SAFETY: `&Memory` gives an address and no access.
unsafe impl Sync for Memory {}

impl Memory {
    /// `capacity` must not be zero.
    fn new(capacity: usize) -> Option<Self> {
        let layout = Self::layout(capacity).filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout has a non-zero size.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, capacity })
    }

    /// Small memory is aligned as asked; large memory by leaving out up to [`ALIGNMENT`] bytes.
    fn layout(capacity: usize) -> Option<Layout> {
        let (size, alignment) = match capacity {
            0..LAZY_FROM => (capacity, ALIGNMENT),
            _ => (capacity.checked_add(ALIGNMENT)?, NATURAL_ALIGNMENT),
        };
        Layout::from_size_align(size, alignment).ok()
    }

    /// The first usable byte.
    fn start(&self) -> NonNull<u8> {
        let shift = self.base.addr().get().wrapping_neg() % ALIGNMENT;
        // SAFETY: `shift` is 0 for a layout that is aligned to `ALIGNMENT`, and less than the
        // `ALIGNMENT` bytes of which the other kind has more than `capacity`.
        unsafe { self.base.add(shift) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.capacity) {
            // SAFETY: `base` came from `alloc_zeroed` in `Memory::new` with this very layout and is
            // freed once, here.
            unsafe { dealloc(self.base.as_ptr(), layout) }
        }
    }
}

/// Warm memory for large messages.
///
/// Returning a buffer is one lock-free push, so it may happen on any thread, under any lock and
/// after the agent is gone.
pub struct BufferPool {
    classes: Box<[ArrayQueue<Memory>]>,
    small: [ArrayQueue<Memory>; SMALL.len()],
    idle_bytes: AtomicUsize,
    max_idle_bytes: usize,
    home: Home,
}

impl BufferPool {
    /// A pool that keeps at most `max_idle_bytes` of unused memory.
    pub fn new(max_idle_bytes: usize) -> Arc<Self> {
        let classes = (0..CLASSES).map(|_| ArrayQueue::new(KEPT_PER_CLASS)).collect();
        let small = SMALL.map(|_| ArrayQueue::new(KEPT_SMALL));
        Arc::new(Self { classes, small, idle_bytes: AtomicUsize::new(0), max_idle_bytes, home: Home::here() })
    }

    /// A buffer of `len` initialised bytes with unspecified content.
    pub fn take(self: &Arc<Self>, len: usize) -> Result<Buffer, OutOfMemory> {
        if let Some(class) = small_class(len) {
            let memory = self.small[class].pop();
            let memory = memory.or_else(|| Memory::new(SMALL[class])).ok_or(OutOfMemory(len))?;
            return Ok(Buffer { memory: Some(Place::Heap(memory)), len, pool: Some(Arc::clone(self)) });
        }
        if len < POOLED_FROM {
            return Buffer::zeroed(len);
        }
        let (class, capacity) = size_class(len).ok_or(OutOfMemory(len))?;
        let mut buffer = match self.classes[class].pop() {
            Some(memory) => {
                self.idle_bytes.fetch_sub(memory.capacity, Ordering::Relaxed);
                Buffer { memory: Some(Place::Heap(memory)), len, pool: None }
            }
            None => Buffer::allocate(len, capacity)?,
        };
        buffer.pool = Some(Arc::clone(self));
        Ok(buffer)
    }

    /// Bytes of unused memory held now, small buffers aside.
    pub fn idle_bytes(&self) -> usize {
        self.idle_bytes.load(Ordering::Relaxed)
    }

    /// Frees all unused memory.
    pub fn trim(&self) {
        for class in &self.small {
            while class.pop().is_some() {}
        }
        for class in &self.classes {
            while let Some(memory) = class.pop() {
                self.idle_bytes.fetch_sub(memory.capacity, Ordering::Relaxed);
            }
        }
    }

    fn put(&self, memory: Memory) {
        if !self.home.is_here() {
            // Some thread of the parent may have been at the queue. The copy of the memory is the child's.
            return;
        }
        let size = memory.capacity;
        if let Some(class) = small_class(size) {
            // Full: it is freed.
            let _ = self.small[class].push(memory);
            return;
        }
        let Some((class, _)) = size_class(size) else { return };
        let before = self.idle_bytes.fetch_add(size, Ordering::Relaxed);
        if before + size > self.max_idle_bytes || self.classes[class].push(memory).is_err() {
            self.idle_bytes.fetch_sub(size, Ordering::Relaxed);
        }
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufferPool").field("idle_bytes", &self.idle_bytes()).finish_non_exhaustive()
    }
}

/// The class of a size that is small.
fn small_class(len: usize) -> Option<usize> {
    SMALL.iter().position(|&size| 0 < len && len <= size)
}

/// The class of a size and the capacity of that class: the next of 4/4, 5/4, 6/4, 7/4 of a power of two.
fn size_class(len: usize) -> Option<(usize, usize)> {
    let exponent = len.checked_ilog2()? as usize;
    let unit = (1usize << exponent) / STEPS;
    let step = (len - (1 << exponent)).div_ceil(unit.max(1));
    let capacity = (1usize << exponent).checked_add(step.checked_mul(unit)?)?;
    let class = exponent * STEPS + step;
    (class < CLASSES).then_some((class, capacity))
}

/// Raw memory and the owner that keeps it alive.
///
/// The memory may be written by others while it is read here; then the bytes read are unspecified,
/// but nothing else happens. Cloning is cheap.
#[derive(Clone)]
pub struct Region {
    start: *const u8,
    len: usize,
    owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the pointer is only read, through `copy_to` and the kernel, and `owner` (Send + Sync)
// keeps it valid on whatever thread the region is.
unsafe impl Send for Region {}
// SAFETY: as for `Send`; `&Region` allows nothing that `Region` does not.
unsafe impl Sync for Region {}

impl Region {
    /// Names `len` bytes at `start`, kept alive by `owner`.
    ///
    /// # Safety
    ///
    /// `start..start + len` must be readable memory as long as `owner` lives.
    pub unsafe fn new(start: *const u8, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { start, len, owner }
    }

    /// The bytes of `owner`, which nobody can reach any more but to drop it.
    pub(crate) fn from_owner(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let owner = Arc::new(owner);
        let bytes = (*owner).as_ref();
        let (start, len) = (bytes.as_ptr(), bytes.len());
        // SAFETY: `bytes` borrows `*owner`, which stays where it is behind its `Arc` and is not touched again
        // before that is dropped: the borrow could last as long as the region keeps `owner`.
        unsafe { Self::new(start, len, owner) }
    }

    /// The bytes of a vector.
    pub fn from_vec(bytes: Vec<u8>) -> Self {
        let owner = Arc::new(bytes);
        // SAFETY: the vector is behind an `Arc` that `owner` holds and is never changed again.
        unsafe { Self::new(owner.as_ptr(), owner.len(), owner) }
    }

    /// The bytes of a buffer.
    pub fn from_buffer(buffer: Buffer) -> Self {
        let owner = Arc::new(buffer);
        // SAFETY: the buffer is behind an `Arc` that `owner` holds and is never changed again.
        unsafe { Self::new(owner.as_ptr(), owner.len(), owner) }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes are.
    pub fn as_ptr(&self) -> *const u8 {
        self.start
    }

    /// A part of the region.
    ///
    /// # Panics
    ///
    /// If there is no such part.
    pub(crate) fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "a part of a region is within it");
        Self { start: self.start.wrapping_add(range.start), len: range.len(), owner: Arc::clone(&self.owner) }
    }

    /// Copies the whole region into `target`, which must be as long.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    pub fn copy_to(&self, target: &mut [u8]) {
        assert_eq!(target.len(), self.len, "a region is copied whole");
        // SAFETY: `self.owner` keeps `self.len` readable bytes at `self.start`; `target` is
        // exclusively ours and as long, so the two cannot overlap. No reference to the source is
        // formed (MEM-1).
        unsafe { std::ptr::copy_nonoverlapping(self.start, target.as_mut_ptr(), self.len) }
    }

    /// `len` bytes from `offset` on; `None` if they are not all inside.
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        let inside = offset <= self.len && len <= self.len - offset;
        // `wrapping_add` is safe; the bounds make it an address inside the region.
        inside.then(|| Self { start: self.start.wrapping_add(offset), len, owner: Arc::clone(&self.owner) })
    }

    /// A copy in memory of our own, which later writes to the original cannot change.
    pub fn snapshot(&self) -> Result<Self, OutOfMemory> {
        let mut copy = Buffer::zeroed(self.len)?;
        self.copy_to(copy.as_mut());
        Ok(Self::from_buffer(copy))
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = &self.owner;
        f.debug_struct("Region").field("len", &self.len).finish_non_exhaustive()
    }
}

/// A buffer that several receive into at once, each into a part of its own.
///
/// Parts are cut off from the front, so no two overlap, and nobody reads before all of them are given back:
/// no reference to the bytes exists while somebody may write them (MEM-1).
#[derive(Debug)]
pub struct Landing {
    buffer: Arc<Buffer>,
    next: usize,
}

/// Part of a [`Landing`], to be written by whoever has it.
pub struct Target {
    start: *mut u8,
    len: usize,
    /// Keeps the memory in place.
    owner: Arc<Buffer>,
}

// SAFETY: the memory belongs to `owner` and is written through this one handle only; nothing in it is tied
// to a thread.
unsafe impl Send for Target {}
// SAFETY: `&Target` gives an address and no access.
unsafe impl Sync for Target {}

impl Landing {
    /// Nothing of `buffer` has been cut off.
    pub fn new(buffer: Buffer) -> Self {
        Self { buffer: Arc::new(buffer), next: 0 }
    }

    /// The next `len` bytes, if there are as many.
    pub fn carve(&mut self, len: usize) -> Option<Target> {
        let end = self.next.checked_add(len).filter(|&end| end <= self.buffer.len())?;
        // `wrapping_add` is safe; the bounds make it an address inside the buffer.
        let start = self.buffer.as_ptr().wrapping_add(self.next);
        self.next = end;
        Some(Target { start, len, owner: Arc::clone(&self.buffer) })
    }

    /// The buffer, when all parts have been given back; else a copy of it as it is now, for whoever kept a
    /// part may still write to it.
    pub fn finish(self) -> Result<Buffer, OutOfMemory> {
        match Arc::try_unwrap(self.buffer) {
            Ok(buffer) => Ok(buffer),
            Err(kept) => {
                let mut copy = Buffer::zeroed(kept.len())?;
                // SAFETY: `kept` owns `len` initialised bytes and the copy as many of its own. They are
                // copied without forming a reference to them, so a write meanwhile garbles bytes and no
                // more, as with regions.
                unsafe {
                    std::ptr::copy_nonoverlapping(kept.as_ptr(), copy.as_mut().as_mut_ptr(), kept.len());
                }
                Ok(copy)
            }
        }
    }
}

impl Target {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes are: initialised, and nobody else's as long as this lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Writes the bytes of `source` from the start on.
    ///
    /// # Panics
    ///
    /// If it is longer.
    pub fn fill(&mut self, source: &Region) {
        assert!(source.len <= self.len, "a target takes no more than its length");
        // SAFETY: `source` keeps `source.len` readable bytes; `self.owner` keeps as many writable ones at
        // `self.start`, which `Landing::carve` gave to this target alone. A region over the same buffer
        // would own it, and so would not exist while `owner` does: the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(source.start, self.start, source.len) }
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = &self.owner;
        f.debug_struct("Target").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_landing_do_not_overlap_and_end_with_it() {
        let mut landing = Landing::new(Buffer::zeroed(10).unwrap());
        let mut first = landing.carve(4).unwrap();
        let mut second = landing.carve(6).unwrap();
        assert!(landing.carve(1).is_none());

        second.fill(&Region::from_vec(vec![2; 6]));
        first.fill(&Region::from_vec(vec![1; 3]));
        drop((first, second));

        assert_eq!(landing.finish().unwrap().as_ref(), [1, 1, 1, 0, 2, 2, 2, 2, 2, 2]);
    }

    #[test]
    fn a_landing_of_which_a_part_is_kept_is_copied() {
        let mut landing = Landing::new(Buffer::zeroed(3).unwrap());
        let mut kept = landing.carve(3).unwrap();
        kept.fill(&Region::from_vec(vec![1, 2, 3]));

        let buffer = landing.finish().unwrap();
        kept.fill(&Region::from_vec(vec![9, 9, 9]));

        assert_eq!(buffer.as_ref(), [1, 2, 3]);
    }

    #[test]
    fn a_part_of_a_region_lies_inside_it() {
        let region = Region::from_vec(vec![1, 2, 3, 4]);
        let mut out = [0; 2];

        region.part(1, 2).unwrap().copy_to(&mut out);

        assert_eq!(out, [2, 3]);
        assert!(region.part(3, 2).is_none() && region.part(5, 0).is_none());
    }

    #[test]
    fn a_buffer_is_aligned_zeroed_and_as_long_as_asked() {
        for len in [0, 1, 63, 64, 65, 4096, LAZY_FROM - 1, LAZY_FROM, POOLED_FROM + 1] {
            let buffer = Buffer::zeroed(len).unwrap();

            assert_eq!(buffer.as_ref().len(), len);
            assert_eq!(buffer.as_ptr() as usize % ALIGNMENT, 0);
            assert!(buffer.as_ref().iter().all(|&b| b == 0));
        }
    }

    #[test]
    fn an_absurd_size_is_an_error_not_an_abort() {
        assert_eq!(Buffer::zeroed(usize::MAX - 1).unwrap_err(), OutOfMemory(usize::MAX - 1));
        assert!(BufferPool::new(0).take(usize::MAX / 2).is_err());
    }

    #[test]
    fn a_pooled_buffer_is_used_again() {
        let pool = BufferPool::new(1 << 20);
        let first = pool.take(100_000).unwrap();
        let place = first.as_ptr();
        drop(first);

        let second = pool.take(99_000).unwrap();

        assert_eq!(second.as_ptr(), place);
        assert_eq!(second.len(), 99_000);
        assert_eq!(pool.idle_bytes(), 0);
    }

    #[test]
    fn a_pool_keeps_no_more_than_its_limit() {
        let pool = BufferPool::new(100 << 10);
        drop(pool.take(80 << 10).unwrap());
        drop((pool.take(64 << 10).unwrap(), pool.take(64 << 10).unwrap()));
        assert!(pool.idle_bytes() <= 100 << 10);

        pool.trim();

        assert_eq!(pool.idle_bytes(), 0);
    }

    #[test]
    fn a_size_class_fits_and_wastes_at_most_a_quarter() {
        for len in (POOLED_FROM..4 << 20).step_by(40_009) {
            let (class, capacity) = size_class(len).unwrap();
            assert!(capacity >= len && capacity - len <= len / 4, "{len} -> {capacity}");
            let (again, same) = size_class(capacity).unwrap();
            assert_eq!(capacity, same);
            // 2^k is both the last step of one power and the first of the next.
            assert!(again == class || again == class + STEPS - STEPS % STEPS, "{len}");
        }
    }

    #[test]
    fn a_snapshot_does_not_see_later_writes() {
        let region = Region::from_vec(vec![1, 2, 3]);
        let copy = region.snapshot().unwrap();
        drop(region);

        let mut out = [0; 3];
        copy.copy_to(&mut out);

        assert_eq!(out, [1, 2, 3]);
    }
}
