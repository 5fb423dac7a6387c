//! The receiver's account of the blocks of one direction of a connection.

use std::collections::HashMap;

use super::{BLOCK_ALIGNMENT, Block, BlockError, MAX_BLOCKS, MAX_SEGMENTS};

/// The receiver's account of the blocks of one direction of a connection.
///
/// It trusts no number (NET-2): what it lets through lies within a segment of the announced size, and belongs to
/// nobody else here.
#[derive(Debug)]
pub struct Borrower {
    max_bytes: u64,
    segments: HashMap<u64, Segment>,
    /// Bytes of all segments.
    total: u64,
    /// Blocks that are in use.
    borrowed: usize,
}

#[derive(Debug)]
struct Segment {
    block_len: u64,
    in_use: Vec<bool>,
}

impl Borrower {
    /// An account of nothing that takes segments of at most `max_bytes` in all.
    pub fn new(max_bytes: u64) -> Self {
        Self { max_bytes, segments: HashMap::new(), total: 0, borrowed: 0 }
    }

    /// The peer offers a segment. Returns its length if it is welcome: it counts as mapped from now on, unless
    /// [`handle_unmapped`](Self::handle_unmapped) follows.
    ///
    /// # Errors
    ///
    /// If there cannot be such a segment.
    pub fn handle_offer(
        &mut self,
        number: u64,
        block_len: u64,
        blocks: u32,
    ) -> Result<Option<u64>, BlockError> {
        let malformed = BlockError::Shape { segment: number, block_len, blocks };
        let is_sound = block_len > 0 && block_len.is_multiple_of(BLOCK_ALIGNMENT) && blocks > 0;
        let len = block_len.checked_mul(blocks.into()).filter(|_| is_sound && blocks <= MAX_BLOCKS);
        let len = len.ok_or(malformed)?;
        if self.segments.contains_key(&number) {
            return Err(BlockError::OfferedTwice(number));
        }
        let total = self.total.saturating_add(len);
        if total > self.max_bytes || self.segments.len() >= MAX_SEGMENTS {
            return Ok(None);
        }
        self.total = total;
        self.segments.insert(number, Segment { block_len, in_use: vec![false; blocks as usize] });
        Ok(Some(len))
    }

    /// A segment could not be mapped.
    pub fn handle_unmapped(&mut self, number: u64) {
        if let Some(segment) = self.segments.remove(&number) {
            self.total -= segment.block_len * segment.in_use.len() as u64;
        }
    }

    /// A message has its bytes in `len` bytes at `offset` of a segment: nobody else has that block from now on,
    /// until [`give_back`](Self::give_back).
    ///
    /// # Errors
    ///
    /// If that is not a block, or one that is in use.
    pub fn borrow(&mut self, number: u64, offset: u64, len: u64) -> Result<Block, BlockError> {
        let segment = self.segments.get_mut(&number).ok_or(BlockError::UnknownSegment(number))?;
        let no_block = BlockError::NoBlock { segment: number, offset, len };
        let is_block = offset.is_multiple_of(segment.block_len) && len <= segment.block_len && len > 0;
        let index =
            u32::try_from(offset / segment.block_len).ok().filter(|_| is_block).ok_or(no_block.clone())?;
        let in_use = segment.in_use.get_mut(index as usize).ok_or(no_block)?;
        if std::mem::replace(in_use, true) {
            return Err(BlockError::Twice { segment: number, block: index });
        }
        self.borrowed += 1;
        Ok(Block { segment: number, index, offset })
    }

    /// Nothing here lies in a block any more. Tell the peer after this.
    pub fn give_back(&mut self, number: u64, index: u32) {
        let segment = self.segments.get_mut(&number);
        if let Some(in_use) = segment.and_then(|segment| segment.in_use.get_mut(index as usize))
            && std::mem::take(in_use)
        {
            self.borrowed -= 1;
        }
    }

    /// The peer takes a segment back.
    ///
    /// # Errors
    ///
    /// If it is in use, or not known.
    pub fn handle_withdraw(&mut self, number: u64) -> Result<(), BlockError> {
        let segment = self.segments.get(&number).ok_or(BlockError::UnknownSegment(number))?;
        if segment.in_use.contains(&true) {
            return Err(BlockError::WithdrawnInUse(number));
        }
        self.handle_unmapped(number);
        Ok(())
    }

    /// Blocks that are in use.
    pub fn borrowed(&self) -> usize {
        self.borrowed
    }

    /// Bytes of all segments together.
    pub fn total(&self) -> u64 {
        self.total
    }
}
