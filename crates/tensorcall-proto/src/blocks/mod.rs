//! Memory that two workers of one host share, so that large tensors are copied once.
//!
//! A sender owns *segments* of shared memory, each cut into *blocks* of one size. It offers a segment, the
//! receiver maps it and says so, and from then on a message may name a block instead of bringing its bytes.
//! The block is then lent: the receiver's tensor lies in it, and the sender does not touch it until the receiver
//! gives it back, or is gone. [`Lender`] is the sender's account of one direction of a connection and
//! [`Borrower`] the receiver's; neither has memory, a socket or a clock.
//!
//! - Nothing depends on a block: if none is free, or the account is at its limit, the bytes travel.
//! - A block that comes back as not reusable makes its segment *worn*: nothing of it is lent any more, and it is
//!   withdrawn once all of it is back.
//! - What has not been used for a while is withdrawn, so that the account shrinks to nothing.

mod borrower;
mod lender;
mod message;
#[cfg(test)]
mod tests;

pub use borrower::Borrower;
pub use lender::{Effect, Lender, Plan, Terms};
pub use message::BlockMessage;

/// Smaller buffers are not lent: copying their bytes into a socket costs no more than the messages about a block.
pub const MIN_BLOCK: u64 = 64 << 10;
/// Size classes per power of two: at most a quarter of a block is unused.
const STEPS: u64 = 4;
/// Segments that one end may offer at once.
pub const MAX_SEGMENTS: usize = 128;
/// Blocks of one segment.
pub const MAX_BLOCKS: u32 = 64;
/// Blocks are whole cache lines.
pub const BLOCK_ALIGNMENT: u64 = 64;

/// A block that is lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Block {
    /// Its segment.
    pub segment: u64,
    /// Which of the segment's blocks.
    pub index: u32,
    /// Its first byte within the segment.
    pub offset: u64,
}

/// What a correct peer would not say about shared memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockError {
    /// There is no such segment, or it is not at the point where one can say this of it.
    #[error("shared segment {0} is not known")]
    UnknownSegment(u64),
    /// A segment's number is used twice.
    #[error("shared segment {0} is offered twice")]
    OfferedTwice(u64),
    /// A segment cannot be like this.
    #[error("shared segment {segment} of {blocks} blocks of {block_len} bytes is malformed")]
    Shape {
        /// The segment.
        segment: u64,
        /// Announced bytes of a block.
        block_len: u64,
        /// Announced number of blocks.
        blocks: u32,
    },
    /// A message names memory that is not a block of its segment.
    #[error("{len} bytes at {offset} of shared segment {segment} are not a block")]
    NoBlock {
        /// The segment.
        segment: u64,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u64,
    },
    /// A block is lent twice, or given back without having been lent.
    #[error("block {block} of shared segment {segment} changes hands twice")]
    Twice {
        /// The segment.
        segment: u64,
        /// Which of its blocks.
        block: u32,
    },
    /// A segment is withdrawn while something of it is lent.
    #[error("shared segment {0} is withdrawn while it is used")]
    WithdrawnInUse(u64),
}

/// Bytes of the blocks that buffers of `len` bytes are lent in: the next of 4/4, 5/4, 6/4, 7/4 of a power of two.
/// `None` if there is no such number.
pub fn block_len(len: u64) -> Option<u64> {
    let len = len.max(MIN_BLOCK);
    let base = 1u64 << len.ilog2();
    let unit = base / STEPS;
    base.checked_add((len - base).div_ceil(unit).checked_mul(unit)?)
}
