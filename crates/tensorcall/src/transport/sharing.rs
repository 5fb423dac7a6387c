//! Shared memory of one connection within a host: what we lend to the peer, and what it lends to us.
//!
//! Who may have which block is the business of the accounts in [`tensorcall_proto::blocks`]; here are the segments
//! themselves. A sender copies a buffer into a block on its own thread ([`Sharing::place`]), and the message names
//! the block. The receiver's buffer lies in it ([`Sharing::borrow`]). When it dies, on any thread and under any
//! lock, that is pushed into a queue without a lock; it is said to the peer with the next message, or, where much is
//! in the queue, by the reactor at once, else within [`LOOK_EVERY`].
//!
//! A connection that ends takes its segments along. Buffers that still lie in blocks of the peer keep them mapped,
//! also when the peer is dead.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_queue::SegQueue;
use tensorcall_proto::blocks::{
    Block, BlockMessage, Borrower, Effect, Lender, MAX_SEGMENTS, MIN_BLOCK, Plan, Terms,
};
use tensorcall_proto::wire::tensor::Place;

use super::reactor::Shared;
use crate::buffer::{Buffer, Region};
use crate::fork::{self, Fd};
use crate::shared::{BlockOrigin, Returns, SharedBlock, SharedMemory};
use crate::sync::Mutex;

/// How often a connection that has shared memory is looked after.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(1);
/// When so many bytes have become free, the peer hears of it at once.
const TELL_AT_ONCE: usize = 1 << 20;
/// Shared memory of one connection.
#[derive(Debug)]
pub(crate) struct Sharing {
    lending: Mutex<Option<Lending>>,
    borrowing: Mutex<Option<Borrowing>>,
    returned: Arc<Returned>,
}

/// What the peer may lay hands on.
#[derive(Debug)]
struct Lending {
    account: Lender,
    segments: HashMap<u64, Arc<SharedMemory>>,
}

/// What the peer has lent to us.
#[derive(Debug)]
struct Borrowing {
    account: Borrower,
    segments: HashMap<u64, Arc<SharedMemory>>,
    /// Descriptors that were passed, of segments that are about to be offered.
    passed: VecDeque<Fd>,
    /// One of them was lost: nobody knows any more which of them belongs to which offer.
    lost: bool,
}

/// Blocks that are not used any more and whose lender has not heard of it.
struct Returned {
    queue: SegQueue<BlockMessage>,
    /// Bytes in the queue, about.
    bytes: AtomicUsize,
    /// The connection has ended: nobody is to be told.
    over: AtomicBool,
    reactor: Weak<Shared>,
}

impl std::fmt::Debug for Returned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Returned").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Returns for Returned {
    fn give_back(&self, segment: u64, block: u32, len: usize, reusable: bool) {
        if self.over.load(Ordering::Acquire) {
            return;
        }
        // Counted first: whoever empties the queue sets the count back before that, and so forgets nothing that
        // it does not say.
        let before = self.bytes.fetch_add(len, Ordering::AcqRel);
        self.queue.push(BlockMessage::Return { segment, block, reusable });
        if before < TELL_AT_ONCE
            && before + len >= TELL_AT_ONCE
            && let Some(reactor) = self.reactor.upgrade()
        {
            reactor.tell_returns();
        }
    }
}

/// A message about shared memory, and the descriptor that goes with it.
pub(crate) type Said = (BlockMessage, Option<Fd>);

impl Sharing {
    /// Nothing is shared until [`start`](Self::start).
    pub(crate) fn new(reactor: &Arc<Shared>) -> Arc<Self> {
        Arc::new(Self {
            lending: Mutex::default(),
            borrowing: Mutex::default(),
            returned: Arc::new(Returned {
                queue: SegQueue::new(),
                bytes: AtomicUsize::new(0),
                over: AtomicBool::new(false),
                reactor: Arc::downgrade(reactor),
            }),
        })
    }

    /// The connection is open, and one over which descriptors can be passed.
    pub(crate) fn start(&self, terms: Terms) {
        *self.borrowing.lock() = Some(Borrowing {
            // A segment that the peer offers may come before another one is withdrawn.
            account: Borrower::new(terms.max_bytes.saturating_mul(2)),
            segments: HashMap::new(),
            passed: VecDeque::new(),
            lost: false,
        });
        *self.lending.lock() = Some(Lending { account: Lender::new(terms), segments: HashMap::new() });
    }

    /// The connection has ended.
    pub(crate) fn end(&self) {
        self.returned.over.store(true, Ordering::Release);
        let (lending, borrowing) = (self.lending.lock().take(), self.borrowing.lock().take());
        drop((lending, borrowing));
        while self.returned.queue.pop().is_some() {}
    }

    /// Whether there are blocks for most of the bytes of large buffers; what is missing is noted.
    pub(crate) fn has_room_for(&self, buffers: &[Region], now: Instant) -> bool {
        let mut lending = self.lending.lock();
        let Some(lending) = &mut *lending else { return false };
        let lens = buffers.iter().map(|region| region.len() as u64);
        lending.account.has_room(lens.filter(|&len| len >= MIN_BLOCK), now)
    }

    /// Copies the large ones of `buffers` into blocks, as far as there are any, and says where each is now. Nothing
    /// is said if none is. The second answer is whether blocks were missing.
    pub(crate) fn place(&self, buffers: &[Region], now: Instant) -> (Vec<Place>, bool) {
        let is_large = |region: &Region| region.len() as u64 >= MIN_BLOCK;
        if !buffers.iter().any(is_large) {
            return (Vec::new(), false);
        }
        let mut blocks = Vec::with_capacity(buffers.len());
        let mut missing = false;
        {
            let mut lending = self.lending.lock();
            let Some(lending) = &mut *lending else { return (Vec::new(), false) };
            for region in buffers {
                let block = is_large(region).then(|| lending.lend(region.len() as u64, now));
                missing |= matches!(block, Some(None));
                blocks.push(block.flatten());
            }
        }
        if blocks.iter().all(Option::is_none) {
            return (Vec::new(), missing);
        }
        let fill = |(region, block): (&Region, Option<(Block, Arc<SharedMemory>)>)| {
            let Some((Block { segment, offset, .. }, memory)) = block else { return Place::Body };
            // The account gives no offset that is not inside.
            memory.fill(usize::try_from(offset).unwrap_or(usize::MAX), region);
            Place::Block { segment, offset }
        };
        (buffers.iter().zip(blocks).map(fill).collect(), missing)
    }

    /// Makes segments that were missed, and says what the peer is to be told of them. Takes a while.
    pub(crate) fn make(&self) -> Vec<Said> {
        let mut said = self.effects();
        while let Some(plan) = self.next_plan() {
            let Plan { segment, block_len, blocks } = plan;
            let len = usize::try_from(block_len).ok().and_then(|len| len.checked_mul(blocks as usize));
            let made = len.map_or_else(
                || Err(std::io::ErrorKind::OutOfMemory.into()),
                // Without the lock: it takes a millisecond for 4 MiB.
                SharedMemory::create,
            );
            let mut lending = self.lending.lock();
            let Some(lending) = &mut *lending else { break };
            lending.account.handle_made(segment, made.is_ok());
            match made {
                Ok((memory, fd)) => {
                    lending.segments.insert(segment, Arc::new(memory));
                    said.push((BlockMessage::Offer { segment, block_len, blocks }, Some(fd)));
                }
                Err(error) => tracing::info!(%error, "no shared memory; tensors go through sockets"),
            }
        }
        said
    }

    fn next_plan(&self) -> Option<Plan> {
        self.lending.lock().as_mut()?.account.poll_plan()
    }

    /// What the peer is to be told about what we lend, segments to be made aside.
    fn effects(&self) -> Vec<Said> {
        let mut said = Vec::new();
        let mut dropped = Vec::new();
        let mut lending = self.lending.lock();
        let Some(open) = &mut *lending else { return said };
        while let Some(effect) = open.account.poll_effect() {
            let (Effect::Withdraw { segment } | Effect::Forget { segment }) = effect;
            dropped.extend(open.segments.remove(&segment));
            if let Effect::Withdraw { .. } = effect {
                said.push((BlockMessage::Withdraw { segment }, None));
            }
        }
        drop(lending);
        // Unmapping takes a while.
        drop(dropped);
        said
    }

    /// What the peer is to be told of blocks that it has lent us and that are free now.
    pub(crate) fn returns(&self) -> Vec<BlockMessage> {
        let mut said = Vec::new();
        if self.returned.bytes.load(Ordering::Acquire) == 0 && self.returned.queue.is_empty() {
            return said;
        }
        self.returned.bytes.store(0, Ordering::Release);
        let mut borrowing = self.borrowing.lock();
        while let Some(message) = self.returned.queue.pop() {
            let (BlockMessage::Return { segment, block, .. }, Some(borrowing)) = (message, &mut *borrowing)
            else {
                continue;
            };
            borrowing.account.give_back(segment, block);
            said.push(message);
        }
        said
    }

    /// Takes back what has been idle for long; returns what the peer is to be told.
    pub(crate) fn look(&self, now: Instant) -> Vec<Said> {
        if let Some(lending) = &mut *self.lending.lock() {
            lending.account.handle_timeout(now);
        }
        let mut said = self.effects();
        said.extend(self.returns().into_iter().map(|message| (message, None)));
        said
    }

    /// Whether there is something to look after.
    pub(crate) fn is_used(&self) -> bool {
        let lends = || self.lending.lock().as_ref().is_some_and(|lending| !lending.account.is_empty());
        let borrows =
            || self.borrowing.lock().as_ref().is_some_and(|borrowing| borrowing.account.borrowed() > 0);
        lends() || borrows()
    }

    /// Descriptors came from the peer.
    ///
    /// # Errors
    ///
    /// If it passes more than it offers.
    pub(crate) fn passed(&self, fds: Vec<Fd>) -> Result<(), String> {
        let mut borrowing = self.borrowing.lock();
        let Some(borrowing) = borrowing.as_mut().filter(|borrowing| !borrowing.lost) else { return Ok(()) };
        // As many as can be offered at once: where the socket was full, all of them may come before the first offer.
        if borrowing.passed.len() + fds.len() > MAX_SEGMENTS {
            return Err("it passes descriptors without saying what for".to_owned());
        }
        borrowing.passed.extend(fds);
        Ok(())
    }

    /// A descriptor came from the peer and this process could not take it.
    pub(crate) fn lost(&self) {
        if let Some(borrowing) = &mut *self.borrowing.lock() {
            borrowing.lose();
        }
    }

    /// The peer says something about shared memory. Returns what it is to be told.
    ///
    /// # Errors
    ///
    /// What a correct peer would not have said.
    pub(crate) fn handle(&self, message: BlockMessage, now: Instant) -> Result<Vec<Said>, String> {
        let mut dropped = None;
        match message {
            BlockMessage::Offer { segment, block_len, blocks } => {
                let accepted = self.take_offer(segment, block_len, blocks)?;
                return Ok(vec![(BlockMessage::Answer { segment, accepted }, None)]);
            }
            BlockMessage::Withdraw { segment } => {
                let mut borrowing = self.borrowing.lock();
                let open = borrowing.as_mut().ok_or(NOT_SHARED)?;
                open.account.handle_withdraw(segment).map_err(|error| error.to_string())?;
                dropped = open.segments.remove(&segment);
            }
            BlockMessage::Answer { segment, accepted } => {
                let mut lending = self.lending.lock();
                let open = lending.as_mut().ok_or(NOT_SHARED)?;
                let answered = open.account.handle_answer(segment, accepted, now);
                answered.map_err(|error| error.to_string())?;
            }
            BlockMessage::Return { segment, block, reusable } => {
                let mut lending = self.lending.lock();
                let open = lending.as_mut().ok_or(NOT_SHARED)?;
                let returned = open.account.handle_return(segment, block, reusable, now);
                returned.map_err(|error| error.to_string())?;
            }
        }
        drop(dropped);
        Ok(self.effects())
    }

    fn take_offer(&self, segment: u64, block_len: u64, blocks: u32) -> Result<bool, String> {
        let mut borrowing = self.borrowing.lock();
        // What is passed where nobody wants it the system has closed.
        let Some(open) = &mut *borrowing else { return Ok(false) };
        let fd = open.passed.pop_front();
        if fd.is_none() {
            open.lose();
        }
        let offer = open.account.handle_offer(segment, block_len, blocks);
        let Some(len) = offer.map_err(|error| error.to_string())? else { return Ok(false) };
        let Some(fd) = fd else {
            open.account.handle_unmapped(segment);
            return Ok(false);
        };
        match usize::try_from(len).map_err(std::io::Error::other).and_then(|len| SharedMemory::map(fd, len)) {
            Ok(memory) => {
                open.segments.insert(segment, Arc::new(memory));
                Ok(true)
            }
            Err(error) => {
                tracing::info!(%error, "cannot map the memory of a peer; its tensors come through sockets");
                open.account.handle_unmapped(segment);
                Ok(false)
            }
        }
    }

    /// A buffer in memory that the peer has lent us; `None` if it has not.
    pub(crate) fn borrow(&self, segment: u64, offset: u64, len: u64) -> Option<Buffer> {
        let mut borrowing = self.borrowing.lock();
        let open = borrowing.as_mut()?;
        let memory = Arc::clone(open.segments.get(&segment)?);
        let place = open.account.borrow(segment, offset, len);
        let place =
            place.inspect_err(|error| tracing::warn!(%error, "a peer lends what it must not")).ok()?;
        let origin = BlockOrigin {
            memory,
            place: (segment, place.index),
            returns: Arc::clone(&self.returned) as Arc<dyn Returns>,
            forks: fork::count(),
        };
        let block = SharedBlock::new(origin, usize::try_from(offset).ok()?, usize::try_from(len).ok()?)?;
        Some(Buffer::from_shared(block))
    }
}

impl Borrowing {
    fn lose(&mut self) {
        if !std::mem::replace(&mut self.lost, true) {
            tracing::info!("a descriptor of a peer was lost; no more memory is shared with it");
        }
        self.passed.clear();
    }
}

impl Lending {
    fn lend(&mut self, len: u64, now: Instant) -> Option<(Block, Arc<SharedMemory>)> {
        let block = self.account.lend(len, now)?;
        // What is mapped at the peer is mapped here.
        Some((block, Arc::clone(self.segments.get(&block.segment)?)))
    }
}

/// Why a message about shared memory is refused where there is none.
const NOT_SHARED: &str = "it speaks of shared memory on a connection that has none";
