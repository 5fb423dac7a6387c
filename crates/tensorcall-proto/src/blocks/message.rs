//! What two ends of a connection say to each other about shared memory.

use serde::{Deserialize, Serialize};

/// What two ends of a connection say to each other about shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BlockMessage {
    /// From the lender: here is a segment. Its descriptor comes beside these bytes or bytes before them.
    Offer {
        /// Number of the segment, never used twice on a connection and in a direction.
        segment: u64,
        /// Bytes of each block.
        block_len: u64,
        /// How many blocks there are, one after the other.
        blocks: u32,
    },
    /// From the borrower, once for each offer. Nothing is lent before.
    Answer {
        /// The segment.
        segment: u64,
        /// Whether it is mapped. If not, there is no need to offer more than what is.
        accepted: bool,
    },
    /// From the borrower: it has no use for a block any more.
    Return {
        /// The segment.
        segment: u64,
        /// Which of its blocks.
        block: u32,
        /// Whether it may be lent again. If not, some forked child may still see it.
        reusable: bool,
    },
    /// From the lender, when nothing of a segment is lent: nothing will be.
    Withdraw {
        /// The segment.
        segment: u64,
    },
}
