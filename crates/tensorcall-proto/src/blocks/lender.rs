//! The sender's account of the blocks of one direction of a connection.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use super::{Block, BlockError, MAX_BLOCKS, MAX_SEGMENTS, block_len};

/// Segments of small blocks have about this many bytes.
const SEGMENT_LEN: u64 = 4 << 20;
/// Sizes that were missed once and may be missed again: more than there are from 64 KiB to 1 GiB.
const MISSED: usize = 64;
/// A segment that was used within this time does not make room for one of another size.
const SETTLED: Duration = Duration::from_secs(1);

/// How much is lent, and for how long it is kept for later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// Most bytes of all segments together.
    pub max_bytes: u64,
    /// A segment of which nothing was lent for so long is withdrawn.
    pub idle: Duration,
}

/// A segment to be made and offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Its number.
    pub segment: u64,
    /// Bytes of each block.
    pub block_len: u64,
    /// How many blocks.
    pub blocks: u32,
}

/// What the driver is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Drop a segment and tell the peer that it is withdrawn.
    Withdraw {
        /// Its number.
        segment: u64,
    },
    /// Drop a segment that the peer does not have.
    Forget {
        /// Its number.
        segment: u64,
    },
}

/// The sender's account of the blocks of one direction of a connection.
#[derive(Debug)]
pub struct Lender {
    terms: Terms,
    segments: BTreeMap<u64, Segment>,
    /// Bytes of all segments.
    total: u64,
    next: u64,
    /// Block sizes that were asked for once, the latest last.
    missed: VecDeque<u64>,
    plans: VecDeque<Plan>,
    effects: VecDeque<Effect>,
}

#[derive(Debug)]
struct Segment {
    block_len: u64,
    stage: Stage,
    blocks: Vec<State>,
    /// Indices of free blocks; the one that was lent last, whose memory is warm, last.
    free: Vec<u32>,
    /// Some block came back for good: nothing more is lent.
    worn: bool,
    used: Instant,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The driver is making it.
    New,
    /// The peer has not answered.
    Offered,
    /// The peer has mapped it.
    Mapped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Lent,
    /// Back, but not to be used again.
    Spent,
}

impl Segment {
    fn bytes(&self) -> u64 {
        self.block_len * self.blocks.len() as u64
    }

    /// Whether a block of it is there for `len` bytes, and not much too large.
    fn suits(&self, len: u64, class: u64) -> bool {
        let size = self.block_len >= len && self.block_len / 2 <= class;
        size && self.stage == Stage::Mapped && !self.worn && !self.free.is_empty()
    }

    fn is_lent(&self) -> bool {
        self.blocks.contains(&State::Lent)
    }

    /// Whether it can be taken back for want of use since `since`.
    fn is_idle(&self, since: Option<Instant>) -> bool {
        self.stage == Stage::Mapped && !self.is_lent() && since.is_some_and(|since| self.used <= since)
    }
}

impl Lender {
    /// An account of nothing.
    pub fn new(terms: Terms) -> Self {
        Self {
            terms,
            segments: BTreeMap::new(),
            total: 0,
            next: 1,
            missed: VecDeque::new(),
            plans: VecDeque::new(),
            effects: VecDeque::new(),
        }
    }

    /// Whether a buffer of `len` bytes could be lent now.
    pub fn has(&self, len: u64) -> bool {
        block_len(len).is_some_and(|class| self.segments.values().any(|segment| segment.suits(len, class)))
    }

    /// Whether most of the bytes of a message with buffers of these lengths could be lent now. Those that could not
    /// are noted, as by [`handle_miss`](Self::handle_miss), each size once, unless there can never be room for
    /// most of it.
    pub fn has_room(&mut self, lens: impl IntoIterator<Item = u64>, now: Instant) -> bool {
        let (mut total, mut lacking, mut missing) = (0u64, 0u64, Vec::new());
        for len in lens {
            total = total.saturating_add(len);
            let Some(class) = block_len(len) else { return false };
            let mut suiting = self.segments.values_mut().filter(|segment| segment.suits(len, class));
            if let Some(segment) = suiting.next() {
                // It is about to be used: it makes no room for the others.
                segment.used = now;
            } else {
                lacking += len;
                missing.push(class);
            }
        }
        if total / 2 > self.terms.max_bytes {
            return false;
        }
        missing.sort_unstable_by(|one, other| other.cmp(one));
        missing.dedup();
        for class in missing {
            self.handle_miss(class, now);
        }
        lacking <= total / 2
    }

    /// Lends a block for `len` bytes, the smallest one that is free. If there is none, it may come to
    /// be made: see [`poll_plan`](Self::poll_plan).
    pub fn lend(&mut self, len: u64, now: Instant) -> Option<Block> {
        let class = block_len(len)?;
        let suiting = self.segments.iter_mut().filter(|(_, segment)| segment.suits(len, class));
        let Some((&number, segment)) = suiting.min_by_key(|(number, segment)| (segment.block_len, **number))
        else {
            self.handle_miss(len, now);
            return None;
        };
        let index = segment.free.pop()?;
        segment.blocks[index as usize] = State::Lent;
        segment.used = now;
        Some(Block { segment: number, index, offset: u64::from(index) * segment.block_len })
    }

    /// There was no block for a buffer of `len` bytes. Where that is worth it, one is made: a size that is seen
    /// once may never come again.
    pub fn handle_miss(&mut self, len: u64, now: Instant) {
        let Some(class) = block_len(len).filter(|&class| class <= self.terms.max_bytes) else { return };
        let mut alike = self.segments.values().filter(|segment| segment.block_len == class).peekable();
        let is_known = alike.peek().is_some();
        if alike.any(|segment| segment.stage != Stage::Mapped) {
            return;
        }
        if !is_known && !self.missed.contains(&class) {
            self.missed.push_back(class);
            if self.missed.len() > MISSED {
                self.missed.pop_front();
            }
            return;
        }
        self.make_room(class, now);
        let room = self.terms.max_bytes.saturating_sub(self.total) / class;
        if room == 0 || self.segments.len() >= MAX_SEGMENTS {
            return;
        }
        self.missed.retain(|&missed| missed != class);
        let blocks = (SEGMENT_LEN / class).clamp(1, room.min(MAX_BLOCKS.into()));
        let blocks = u32::try_from(blocks).unwrap_or(1);
        let number = self.next;
        self.next += 1;
        let segment = Segment {
            block_len: class,
            stage: Stage::New,
            blocks: vec![State::Free; blocks as usize],
            free: (0..blocks).rev().collect(),
            worn: false,
            used: now,
        };
        self.total += segment.bytes();
        self.segments.insert(number, segment);
        self.plans.push_back(Plan { segment: number, block_len: class, blocks });
    }

    /// The driver has made a segment and offers it now, or there was no memory for it.
    pub fn handle_made(&mut self, number: u64, made: bool) {
        let Some(segment) = self.segments.get_mut(&number) else { return };
        segment.stage = Stage::Offered;
        if !made {
            self.refused(number);
        }
    }

    /// The peer has mapped a segment, or maps none.
    ///
    /// # Errors
    ///
    /// If it was not asked.
    pub fn handle_answer(&mut self, number: u64, accepted: bool, now: Instant) -> Result<(), BlockError> {
        let segment = self.segments.get_mut(&number).filter(|segment| segment.stage == Stage::Offered);
        let segment = segment.ok_or(BlockError::UnknownSegment(number))?;
        segment.stage = Stage::Mapped;
        segment.used = now;
        if !accepted {
            self.refused(number);
            self.effects.push_back(Effect::Forget { segment: number });
        }
        Ok(())
    }

    /// The peer gives a block back.
    ///
    /// # Errors
    ///
    /// If it does not have it.
    pub fn handle_return(
        &mut self,
        number: u64,
        index: u32,
        reusable: bool,
        now: Instant,
    ) -> Result<(), BlockError> {
        let segment = self.segments.get_mut(&number).ok_or(BlockError::UnknownSegment(number))?;
        let state = segment.blocks.get_mut(index as usize).filter(|state| **state == State::Lent);
        let state = state.ok_or(BlockError::Twice { segment: number, block: index })?;
        segment.used = now;
        if reusable {
            *state = State::Free;
            segment.free.push(index);
        } else {
            *state = State::Spent;
            segment.worn = true;
        }
        if segment.worn && !segment.is_lent() {
            self.withdraw(number);
        }
        Ok(())
    }

    /// Takes back what has not been used for as long as the terms say.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.withdraw_idle(now.checked_sub(self.terms.idle));
    }

    /// The next segment to make; say by [`handle_made`](Self::handle_made) what came of it. Making one takes a
    /// while: not a thing for every thread.
    pub fn poll_plan(&mut self) -> Option<Plan> {
        self.plans.pop_front()
    }

    /// What to do next.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Whether there are no segments.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes of all segments together.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Takes back what others do not use, the longest unused first, until there is room for a block of `class`.
    fn make_room(&mut self, class: u64, now: Instant) {
        let since = now.checked_sub(SETTLED);
        while self.terms.max_bytes.saturating_sub(self.total) < class || self.segments.len() >= MAX_SEGMENTS {
            let idle = self.segments.iter().filter(|(_, segment)| segment.is_idle(since));
            let Some((&number, _)) = idle.min_by_key(|(_, segment)| segment.used) else { return };
            self.withdraw(number);
        }
    }

    fn withdraw_idle(&mut self, since: Option<Instant>) {
        let idle = self.segments.iter().filter(|(_, segment)| segment.is_idle(since));
        let idle: Vec<_> = idle.map(|(&number, _)| number).collect();
        for number in idle {
            self.withdraw(number);
        }
    }

    fn withdraw(&mut self, number: u64) {
        self.remove(number);
        self.effects.push_back(Effect::Withdraw { segment: number });
    }

    /// There is no room for this one: from now on there are never more than without it.
    fn refused(&mut self, number: u64) {
        self.remove(number);
        self.terms.max_bytes = self.total;
    }

    fn remove(&mut self, number: u64) {
        if let Some(segment) = self.segments.remove(&number) {
            self.total -= segment.bytes();
        }
    }
}
