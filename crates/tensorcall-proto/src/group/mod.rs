//! Messages over a process group, which moves bytes from rank to rank and knows nothing of connections.
//!
//! Between two ranks go *envelopes* of at most [`ENVELOPE`] bytes, all with the same tag and so in order.
//! An envelope carries as many [`Record`]s as are due: the handshakes of links, the starts of messages with
//! everything of them that is small, and the announcements of *pieces*. A piece is a run of bytes of a large
//! part of a message, at most [`PIECE`] of them, that travels by itself, with a tag of its own, straight from
//! where it lies to where it ends. So a small message never waits for a large one, and the receiver knows of
//! every piece, and where its bytes belong, before they come.
//!
//! - `envelope.rs`: the bytes of envelopes
//! - `departures.rs`: what waits to be sent to one rank
//! - `arrivals.rs`: what comes from one rank, put together
//!
//! A group delivers what is sent, or says that a rank is lost. An envelope that is damaged all the same ends
//! the links between the two ranks and nothing else: [`Record::Reset`] tells the sender, who announces
//! again which pieces are on their way, so that the receiver can let them arrive and drop them.

mod arrivals;
mod departures;
mod envelope;
#[cfg(test)]
mod tests;

pub use self::arrivals::{Arrival, Arrivals, Places};
pub use self::departures::{Departing, Departures, Envelope, Parcel, PieceOut};
pub use self::envelope::{EnvelopeError, Record, WireLink, read, seal};

/// Most bytes of an envelope: what a receiver has ready for the next one.
pub const ENVELOPE: usize = 64 << 10;

/// Most bytes of a piece.
pub const PIECE: u64 = 8 << 20;

/// Parts of a message, its payload and its buffers, of up to this many bytes travel in envelopes; larger
/// ones in pieces. A copy of this size costs less than the two more operations that a piece takes.
pub const NARROW: u64 = 32 << 10;

/// Most pieces from one rank to another that are being sent, or received, at once.
pub const MAX_WINDOW: usize = 32;

/// The tag of envelopes.
pub const ENVELOPE_TAG: u32 = 1;

/// How many tags pieces take turns with. With MPI every tag up to 32,767 may be used.
const PIECE_TAGS: u64 = 1 << 14;

/// The tag of the piece with this number. So many pieces are never on their way.
pub const fn piece_tag(number: u64) -> u32 {
    // Less than `PIECE_TAGS`, which fits.
    (number % PIECE_TAGS) as u32 + ENVELOPE_TAG + 1
}

/// Whether a part of `len` bytes travels in pieces.
pub const fn is_wide(len: u64) -> bool {
    len > NARROW
}
