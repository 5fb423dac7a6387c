//! The fixed header in front of everything that is sent.
//!
//! A frame is 24 header bytes, then `control_len` bytes of a descriptor, then `body_len` bytes of
//! a body. A [`FrameKind::Message`] frame opens a stream with the descriptor and the first part
//! of the body; [`FrameKind::Data`] frames of the same stream bring the rest. Frames of different
//! streams may alternate, so a short message need not wait for a long one.

use super::error::WireError;
use super::limits::Limits;

/// The version of the wire format that this crate speaks.
pub const VERSION: u8 = 0;

/// Length of a frame's header in bytes.
pub const HEADER_LEN: usize = 24;

/// The first two bytes of every frame.
const MAGIC: [u8; 2] = *b"TC";

/// Flag of the frame that completes a message.
const END: u8 = 1;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum FrameKind {
    /// Opens a stream: a descriptor and the first bytes of its body, perhaps all of them.
    Message = 1,
    /// The next bytes of an open stream's body; never empty.
    Data = 2,
    /// Asks for a [`FrameKind::Pong`] with the same stream number, which here is only a mark.
    Ping = 3,
    /// Answers a [`FrameKind::Ping`].
    Pong = 4,
}

impl FrameKind {
    fn from_code(code: u8) -> Result<Self, WireError> {
        match code {
            1 => Ok(Self::Message),
            2 => Ok(Self::Data),
            3 => Ok(Self::Ping),
            4 => Ok(Self::Pong),
            _ => Err(WireError::FrameKind(code)),
        }
    }
}

/// How urgent a frame is: the sender sends what it has of the lower number first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Priority {
    /// Bookkeeping of the protocol.
    Control = 0,
    /// Calls and replies of ordinary size.
    Normal = 1,
    /// Calls and replies so large that others should overtake them.
    Bulk = 2,
}

impl Priority {
    /// Every priority, the most urgent first.
    pub const ALL: [Self; 3] = [Self::Control, Self::Normal, Self::Bulk];

    fn from_code(code: u8) -> Result<Self, WireError> {
        match code {
            0 => Ok(Self::Control),
            1 => Ok(Self::Normal),
            2 => Ok(Self::Bulk),
            _ => Err(WireError::FramePriority(code)),
        }
    }
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FrameHeader {
    /// What the frame is.
    pub kind: FrameKind,
    /// Whether this frame completes its message.
    pub end: bool,
    /// The priority at which the frame was sent; information for the receiver only.
    pub priority: Priority,
    /// Number of the stream, unique among the streams that this sender has open.
    pub stream: u32,
    /// Bytes of the descriptor that follow the header.
    pub control_len: u32,
    /// Bytes of the body that follow the descriptor.
    pub body_len: u64,
}

impl FrameHeader {
    /// Length of an encoded header in bytes.
    pub const LEN: usize = HEADER_LEN;

    /// A ping that the pong will repeat `mark` of.
    pub const fn ping(mark: u32) -> Self {
        Self::bare(FrameKind::Ping, mark)
    }

    /// The answer to the ping with this `mark`.
    pub const fn pong(mark: u32) -> Self {
        Self::bare(FrameKind::Pong, mark)
    }

    const fn bare(kind: FrameKind, stream: u32) -> Self {
        Self { kind, end: false, priority: Priority::Control, stream, control_len: 0, body_len: 0 }
    }

    /// The 24 bytes of this header.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..2].copy_from_slice(&MAGIC);
        bytes[2] = VERSION;
        bytes[3] = self.kind as u8;
        bytes[4] = if self.end { END } else { 0 };
        bytes[5] = self.priority as u8;
        bytes[8..12].copy_from_slice(&self.stream.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.control_len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.body_len.to_le_bytes());
        bytes
    }

    /// Reads a header and checks it against `limits` and against what its kind may have.
    ///
    /// # Errors
    ///
    /// A [`WireError`] names the first field that is wrong.
    pub fn decode(bytes: &[u8; HEADER_LEN], limits: &Limits) -> Result<Self, WireError> {
        let &[m0, m1, version, kind, flags, priority, r0, r1, ref numbers @ ..] = bytes;
        let &[s0, s1, s2, s3, c0, c1, c2, c3, b0, b1, b2, b3, b4, b5, b6, b7] = numbers;
        if [m0, m1] != MAGIC {
            return Err(WireError::Magic { found: [m0, m1] });
        }
        if version != VERSION {
            return Err(WireError::Version { found: version, supported: VERSION });
        }
        let kind = FrameKind::from_code(kind)?;
        if flags & !END != 0 {
            return Err(WireError::FrameFlags(flags));
        }
        let priority = Priority::from_code(priority)?;
        let reserved = u16::from_le_bytes([r0, r1]);
        if reserved != 0 {
            return Err(WireError::FrameReserved(reserved));
        }
        let header = Self {
            kind,
            end: flags & END != 0,
            priority,
            stream: u32::from_le_bytes([s0, s1, s2, s3]),
            control_len: u32::from_le_bytes([c0, c1, c2, c3]),
            body_len: u64::from_le_bytes([b0, b1, b2, b3, b4, b5, b6, b7]),
        };
        header.check(limits).map(|()| header)
    }

    fn check(&self, limits: &Limits) -> Result<(), WireError> {
        if self.control_len > limits.max_control {
            return Err(WireError::ControlTooLarge {
                len: self.control_len.into(),
                limit: limits.max_control,
            });
        }
        if self.body_len > limits.max_message {
            return Err(WireError::BodyTooLarge { len: self.body_len, limit: limits.max_message });
        }
        let possible = match self.kind {
            FrameKind::Message => self.control_len > 0,
            FrameKind::Data => self.control_len == 0 && self.body_len > 0,
            FrameKind::Ping | FrameKind::Pong => self.control_len == 0 && self.body_len == 0 && !self.end,
        };
        if possible {
            Ok(())
        } else {
            Err(WireError::FrameShape {
                kind: self.kind as u8,
                control_len: self.control_len,
                body_len: self.body_len,
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Message,
            end: true,
            priority: Priority::Normal,
            stream: 7,
            control_len: 12,
            body_len: 34,
        }
    }

    fn decode(bytes: &[u8; HEADER_LEN]) -> Result<FrameHeader, WireError> {
        FrameHeader::decode(bytes, &Limits::default())
    }

    /// The encoded sample header with the byte at `at` replaced.
    fn with_byte(at: usize, byte: u8) -> [u8; HEADER_LEN] {
        let mut bytes = header().encode();
        bytes[at] = byte;
        bytes
    }

    #[test]
    fn header_survives_the_round_trip() {
        for header in [header(), FrameHeader::ping(9), FrameHeader::pong(u32::MAX)] {
            assert_eq!(decode(&header.encode()), Ok(header));
        }
    }

    #[test]
    fn every_header_field_is_checked() {
        assert_eq!(decode(&with_byte(0, b'X')), Err(WireError::Magic { found: *b"XC" }));
        assert_eq!(decode(&with_byte(2, 1)), Err(WireError::Version { found: 1, supported: 0 }));
        assert_eq!(decode(&with_byte(3, 0)), Err(WireError::FrameKind(0)));
        assert_eq!(decode(&with_byte(3, 5)), Err(WireError::FrameKind(5)));
        assert_eq!(decode(&with_byte(4, 3)), Err(WireError::FrameFlags(3)));
        assert_eq!(decode(&with_byte(5, 3)), Err(WireError::FramePriority(3)));
        assert_eq!(decode(&with_byte(7, 1)), Err(WireError::FrameReserved(256)));
    }

    #[test]
    fn lengths_beyond_the_limits_are_refused() {
        let limits = Limits { max_control: 11, max_message: 33, ..Limits::default() };

        let control = FrameHeader::decode(&header().encode(), &limits);
        let body = FrameHeader::decode(&FrameHeader { control_len: 11, ..header() }.encode(), &limits);

        assert_eq!(control, Err(WireError::ControlTooLarge { len: 12, limit: 11 }));
        assert_eq!(body, Err(WireError::BodyTooLarge { len: 34, limit: 33 }));
    }

    #[test]
    fn each_kind_has_the_lengths_that_suit_it() {
        let data = FrameHeader { kind: FrameKind::Data, control_len: 0, ..header() };
        let wrong = [
            FrameHeader { control_len: 0, ..header() },
            FrameHeader { control_len: 1, ..data },
            FrameHeader { body_len: 0, ..data },
            FrameHeader { body_len: 1, ..FrameHeader::ping(0) },
            FrameHeader { control_len: 1, ..FrameHeader::pong(0) },
            FrameHeader { end: true, ..FrameHeader::ping(0) },
        ];

        assert_eq!(decode(&data.encode()), Ok(data));
        for header in wrong {
            assert!(matches!(decode(&header.encode()), Err(WireError::FrameShape { .. })), "{header:?}");
        }
    }

    #[test]
    fn urgent_priorities_order_first() {
        assert!(Priority::Control < Priority::Normal && Priority::Normal < Priority::Bulk);
        assert!(Priority::ALL.is_sorted());
    }
}
