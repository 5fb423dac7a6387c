//! Why a connection was not opened.

use std::fmt;

use crate::ids::{Incarnation, Rank};
use crate::wire::VERSION;

use super::envelope::Kind;

/// Why a handshake failed. The texts are meant for a log line; whoever writes it adds the address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The first bytes are somebody else's protocol, or noise.
    #[error("not a tensorcall worker: it said \"{}\"", .found.escape_ascii())]
    NotAHandshake {
        /// What came instead, at most the first 16 bytes.
        found: Vec<u8>,
    },
    /// The peer speaks another version.
    #[error("the peer speaks version {theirs}, this worker version {VERSION}")]
    Version {
        /// The peer's version.
        theirs: u8,
    },
    /// A message kind that this version does not have.
    #[error("handshake message of unknown kind {0}")]
    UnknownKind(u8),
    /// A message announces more bytes than any may have.
    #[error("handshake message of {len} bytes exceeds the limit of {limit}")]
    TooLarge {
        /// Announced size, header included.
        len: usize,
        /// [`MAX_MESSAGE`](super::MAX_MESSAGE).
        limit: usize,
    },
    /// A message came when another was due.
    #[error("{found} came where {expected} was due")]
    OutOfTurn {
        /// What was due.
        expected: Kind,
        /// What came.
        found: Kind,
    },
    /// A message is not what its kind says.
    #[error("{0} cannot be read")]
    Malformed(Kind),
    /// The stream ended inside the handshake.
    #[error("the connection closed {received} bytes into {expected}")]
    Truncated {
        /// What was due.
        expected: Kind,
        /// How much of it had come.
        received: usize,
    },
    /// The stream ended after our proof without a word, which is how a worker with another secret acts.
    #[error("the peer closed the connection on our proof: its secret differs, or it is shutting down")]
    ProofRefused,
    /// The peer did not prove that it knows the secret.
    #[error("the peer does not know the job's secret")]
    WrongSecret,
    /// A job id, this worker's or the peer's, is longer than it may be.
    #[error("a job id of {len} bytes exceeds {}", super::MAX_JOB_LEN)]
    JobTooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// The peer is of another job.
    #[error("the peer belongs to job {theirs:?}, this worker to {ours:?}")]
    WrongJob {
        /// This worker's job.
        ours: String,
        /// The peer's job.
        theirs: String,
    },
    /// The proof answers a challenge of another connection.
    #[error("the peer's proof was made for another connection (a replay)")]
    Replayed,
    /// This worker's own words came back.
    #[error("this worker is talking to itself (a reflection, or its own address)")]
    Reflected,
    /// A worker answered, but not the one that was called.
    #[error("rank {expected} was called and rank {found} answered")]
    WrongRank {
        /// Who was called.
        expected: Rank,
        /// Who is there.
        found: Rank,
    },
    /// The worker answered, but another life of it (LIFE-1).
    #[error("incarnation {:016x} of rank {rank} was called and {:016x} answered", .expected.get(), .found.get())]
    WrongIncarnation {
        /// Whose life.
        rank: Rank,
        /// The life that was called.
        expected: Incarnation,
        /// The life that is there.
        found: Incarnation,
    },
    /// The peer wants a connection for something that this version does not have.
    #[error("connections of role {0} are unknown here")]
    UnknownRole(u8),
    /// The peer knows the secret and refused.
    #[error("the peer refused ({code}): {text:?}")]
    Rejected {
        /// Why, for code.
        code: RejectCode,
        /// Why, for people.
        text: String,
    },
    /// Somebody who does not know the secret refused in the peer's name.
    #[error("a refusal came from somebody who does not know the job's secret")]
    ForgedRefusal,
}

/// Why a peer that proved the secret was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RejectCode {
    /// Another version; the only refusal told to strangers.
    Version,
    /// Another job with the same secret.
    Job,
    /// Another rank was called.
    Rank,
    /// Another life of this rank was called.
    Incarnation,
    /// The connection's role is unknown.
    Role,
    /// The caller is the called.
    Reflected,
    /// A reason that this version does not know.
    Other(u8),
}

impl RejectCode {
    pub(super) fn to_wire(self) -> u8 {
        match self {
            Self::Version => 1,
            Self::Job => 2,
            Self::Rank => 3,
            Self::Incarnation => 4,
            Self::Role => 5,
            Self::Reflected => 6,
            Self::Other(code) => code,
        }
    }

    pub(super) fn from_wire(code: u8) -> Self {
        match code {
            1 => Self::Version,
            2 => Self::Job,
            3 => Self::Rank,
            4 => Self::Incarnation,
            5 => Self::Role,
            6 => Self::Reflected,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for RejectCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version => f.write_str("version"),
            Self::Job => f.write_str("job"),
            Self::Rank => f.write_str("rank"),
            Self::Incarnation => f.write_str("incarnation"),
            Self::Role => f.write_str("role"),
            Self::Reflected => f.write_str("itself"),
            Self::Other(code) => write!(f, "code {code}"),
        }
    }
}
