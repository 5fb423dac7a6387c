//! The bytes of an envelope: a header with a checksum, then records.
//!
//! ```text
//! "TCPG"  version u8  0 u8 x3  length u32  from u32  to u32  0 u32  checksum u64  records…
//! ```
//!
//! Numbers are little-endian. `length` counts the header, so that a receiver whose memory is larger than
//! the envelope finds its end. Any single word that is damaged changes the checksum.

use crate::wire::frame::{Priority, VERSION};

/// Bytes of an envelope's header.
const HEADER_LEN: usize = 32;
const MAGIC: [u8; 4] = *b"TCPG";

/// Longest text of a [`Record::Close`].
const MAX_TEXT: usize = 1024;

/// Names a link between two ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WireLink {
    /// Whether the rank that says this opened the link. The other one says it the other way round.
    pub opened_here: bool,
    /// The number that the rank which opened it gave it.
    pub number: u64,
}

impl WireLink {
    /// As the other end names it.
    pub const fn mirrored(self) -> Self {
        Self { opened_here: !self.opened_here, ..self }
    }
}

/// What an envelope says. Links are named as its sender names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record<'a> {
    /// Bytes of the handshake of a link; the first of them open it.
    Handshake {
        /// The link.
        link: WireLink,
        /// What is said.
        bytes: &'a [u8],
    },
    /// A message begins.
    Begin {
        /// The link that it is on.
        link: WireLink,
        /// Names the message until it is complete.
        stream: u32,
        /// Messages of one link and priority are handed on in the order in which they began.
        priority: Priority,
        /// Bytes of its descriptor.
        control_len: u32,
        /// Bytes of the descriptor and of all parts that are not wide.
        narrow_len: u64,
        /// The first of these bytes.
        bytes: &'a [u8],
    },
    /// Further narrow bytes of a message.
    More {
        /// The message.
        stream: u32,
        /// The next bytes.
        bytes: &'a [u8],
    },
    /// The next bytes of the wide parts of a message come as a piece. It crosses no end of a part.
    Piece {
        /// The message; 0 if nobody wants it any more.
        stream: u32,
        /// Pieces are numbered without gaps. The number gives the tag.
        number: u64,
        /// How many bytes.
        len: u64,
    },
    /// A link is over.
    Close {
        /// The link.
        link: WireLink,
        /// Whether it is at once, instead of after the messages that have begun.
        at_once: bool,
        /// Why, for people.
        text: &'a str,
    },
    /// An envelope of the receiver came damaged: all links between the two ranks are over.
    Reset,
    /// Nothing comes after this.
    Bye,
}

/// Why bytes are no envelope.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvelopeError {
    /// It begins with something else.
    #[error("it starts with {found:02x?}")]
    Magic {
        /// What is there.
        found: [u8; 4],
    },
    /// It is of another version.
    #[error("its version is {0}, not {VERSION}")]
    Version(u8),
    /// It is shorter than a header, or longer than what came.
    #[error("it announces {len} bytes where {room} may have come")]
    Length {
        /// What it says.
        len: u32,
        /// The room there was.
        room: usize,
    },
    /// It is not for this rank, or not from that one.
    #[error("it goes from rank {from} to rank {to}")]
    Ranks {
        /// From where it says to come.
        from: u32,
        /// Where it says to go.
        to: u32,
    },
    /// Its bytes are not those that were sent.
    #[error("its checksum is wrong")]
    Checksum,
    /// A record makes no sense.
    #[error("a record of kind {0} is malformed")]
    Record(u8),
    /// A piece is larger than any may be, or one too many.
    #[error("piece {number} of {len} bytes cannot be taken")]
    Piece {
        /// Its number.
        number: u64,
        /// Its length.
        len: u64,
    },
}

/// Makes an envelope.
#[derive(Debug)]
pub(super) struct Writer {
    bytes: Vec<u8>,
    capacity: usize,
}

impl Writer {
    /// An empty envelope of at most `capacity` bytes.
    pub(super) fn new(from: u32, to: u32, capacity: usize) -> Self {
        let mut bytes = Vec::with_capacity(1024);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&[VERSION, 0, 0, 0]);
        bytes.extend_from_slice(&0u32.to_le_bytes());
        bytes.extend_from_slice(&from.to_le_bytes());
        bytes.extend_from_slice(&to.to_le_bytes());
        bytes.extend_from_slice(&[0; HEADER_LEN - 20]);
        Self { bytes, capacity }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.len() == HEADER_LEN
    }

    /// Bytes that there is room for.
    pub(super) fn room(&self) -> usize {
        self.capacity.saturating_sub(self.bytes.len())
    }

    /// Adds a record. The caller sees to it that there is [`room`](Self::room) for its [`Record::len`].
    pub(super) fn push(&mut self, record: &Record<'_>) {
        self.bytes.push(record.kind());
        match *record {
            Record::Handshake { link, bytes } => {
                self.put_link(link);
                self.put_bytes(bytes);
            }
            Record::Begin { link, stream, priority, control_len, narrow_len, bytes } => {
                self.put_link(link);
                self.put(&stream.to_le_bytes());
                self.put(&[priority as u8]);
                self.put(&control_len.to_le_bytes());
                self.put(&narrow_len.to_le_bytes());
                self.put_bytes(bytes);
            }
            Record::More { stream, bytes } => {
                self.put(&stream.to_le_bytes());
                self.put_bytes(bytes);
            }
            Record::Piece { stream, number, len } => {
                self.put(&stream.to_le_bytes());
                self.put(&number.to_le_bytes());
                self.put(&len.to_le_bytes());
            }
            Record::Close { link, at_once, text } => {
                self.put_link(link);
                self.put(&[u8::from(at_once)]);
                self.put_bytes(shorten(text).as_bytes());
            }
            Record::Reset | Record::Bye => {}
        }
    }

    /// The finished envelope.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let len = u32::try_from(self.bytes.len()).unwrap_or(u32::MAX);
        self.bytes[8..12].copy_from_slice(&len.to_le_bytes());
        let sum = checksum(&self.bytes);
        self.bytes[24..HEADER_LEN].copy_from_slice(&sum.to_le_bytes());
        self.bytes
    }

    fn put(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    fn put_link(&mut self, link: WireLink) {
        self.put(&[u8::from(link.opened_here)]);
        self.put(&link.number.to_le_bytes());
    }

    fn put_bytes(&mut self, bytes: &[u8]) {
        self.put(&u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.put(bytes);
    }
}

/// An envelope from rank `from` to rank `to` with these bytes in the place of records, whatever they are: for
/// tests.
pub fn seal(from: u32, to: u32, records: &[u8]) -> Vec<u8> {
    let mut writer = Writer::new(from, to, usize::MAX);
    writer.put(records);
    writer.finish()
}

/// What there is of `text` up to [`MAX_TEXT`] bytes.
fn shorten(text: &str) -> &str {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

impl Record<'_> {
    /// Bytes that the record takes.
    pub(super) fn len(&self) -> usize {
        1 + match self {
            Self::Handshake { bytes, .. } => 13 + bytes.len(),
            Self::Begin { bytes, .. } => Self::BEGIN - 1 + bytes.len(),
            Self::More { bytes, .. } => Self::MORE - 1 + bytes.len(),
            Self::Piece { .. } => Self::PIECE - 1,
            Self::Close { text, .. } => 14 + shorten(text).len(),
            Self::Reset | Self::Bye => 0,
        }
    }

    /// Bytes of a [`Record::Begin`] without those that it brings.
    pub(super) const BEGIN: usize = 1 + 9 + 4 + 1 + 4 + 8 + 4;
    /// The same of a [`Record::More`].
    pub(super) const MORE: usize = 1 + 4 + 4;
    /// Bytes of a [`Record::Piece`].
    pub(super) const PIECE: usize = 1 + 4 + 8 + 8;

    fn kind(&self) -> u8 {
        match self {
            Self::Handshake { .. } => 1,
            Self::Begin { .. } => 2,
            Self::More { .. } => 3,
            Self::Piece { .. } => 4,
            Self::Close { .. } => 5,
            Self::Reset => 6,
            Self::Bye => 7,
        }
    }
}

/// Checks an envelope that goes from rank `from` to rank `to` and lies at the start of `bytes`; gives its
/// records. Nothing comes after one that is malformed.
///
/// # Errors
///
/// The bytes are no such envelope, or damaged.
pub fn read(
    bytes: &[u8],
    from: u32,
    to: u32,
) -> Result<impl Iterator<Item = Result<Record<'_>, EnvelopeError>>, EnvelopeError> {
    let mut reader = Reader(bytes);
    let short = EnvelopeError::Length { len: 0, room: bytes.len() };
    let found: [u8; 4] = reader.array().ok_or(short.clone())?;
    if found != MAGIC {
        return Err(EnvelopeError::Magic { found });
    }
    let [version, ..] = reader.array::<4>().ok_or(short.clone())?;
    if version != VERSION {
        return Err(EnvelopeError::Version(version));
    }
    let len = reader.u32().ok_or(short.clone())?;
    let envelope = usize::try_from(len).ok().and_then(|len| bytes.get(..len));
    let envelope = envelope.filter(|envelope| envelope.len() >= HEADER_LEN);
    let envelope = envelope.ok_or(EnvelopeError::Length { len, room: bytes.len() })?;
    let (says_from, says_to) = (reader.u32().ok_or(short.clone())?, reader.u32().ok_or(short.clone())?);
    let sum = envelope.get(24..HEADER_LEN).and_then(|sum| sum.try_into().ok()).map(u64::from_le_bytes);
    if sum != Some(checksum(envelope)) {
        return Err(EnvelopeError::Checksum);
    }
    if (says_from, says_to) != (from, to) {
        return Err(EnvelopeError::Ranks { from: says_from, to: says_to });
    }
    Ok(Records(Reader(&envelope[HEADER_LEN..])))
}

struct Records<'a>(Reader<'a>);

impl<'a> Iterator for Records<'a> {
    type Item = Result<Record<'a>, EnvelopeError>;

    fn next(&mut self) -> Option<Self::Item> {
        let [kind] = self.0.array()?;
        let record = self.0.record(kind).ok_or(EnvelopeError::Record(kind));
        if record.is_err() {
            self.0 = Reader(&[]);
        }
        Some(record)
    }
}

#[derive(Debug)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn record(&mut self, kind: u8) -> Option<Record<'a>> {
        Some(match kind {
            1 => Record::Handshake { link: self.link()?, bytes: self.bytes()? },
            2 => Record::Begin {
                link: self.link()?,
                stream: self.u32()?,
                priority: {
                    let code = usize::from(self.array::<1>()?[0]);
                    *Priority::ALL.get(code)?
                },
                control_len: self.u32()?,
                narrow_len: self.u64()?,
                bytes: self.bytes()?,
            },
            3 => Record::More { stream: self.u32()?, bytes: self.bytes()? },
            4 => Record::Piece { stream: self.u32()?, number: self.u64()?, len: self.u64()? },
            5 => Record::Close {
                link: self.link()?,
                at_once: self.flag()?,
                text: std::str::from_utf8(self.bytes()?).ok()?,
            },
            6 => Record::Reset,
            7 => Record::Bye,
            _ => return None,
        })
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.array()? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }

    fn link(&mut self) -> Option<WireLink> {
        Some(WireLink { opened_here: self.flag()?, number: self.u64()? })
    }

    fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u32()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }
}

/// Of everything but the checksum itself. Each step is a bijection of the state, so that one word that
/// changes always changes the result.
fn checksum(envelope: &[u8]) -> u64 {
    const PRIME: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |state: u64, word: u64| (state ^ word).wrapping_mul(PRIME).rotate_left(29);
    let covered = envelope.get(..24).into_iter().chain(envelope.get(HEADER_LEN..));
    covered.fold(PRIME, |state, bytes| {
        let (words, rest) = bytes.as_chunks::<8>();
        let state = words.iter().fold(state, |state, word| mix(state, u64::from_le_bytes(*word)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        mix(mix(state, u64::from_le_bytes(last)), bytes.len() as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LINK: WireLink = WireLink { opened_here: true, number: 7 };

    fn records() -> Vec<Record<'static>> {
        vec![
            Record::Handshake { link: LINK, bytes: b"hello" },
            Record::Begin {
                link: LINK.mirrored(),
                stream: 3,
                priority: Priority::Bulk,
                control_len: 2,
                narrow_len: 1 << 40,
                bytes: b"abc",
            },
            Record::More { stream: 3, bytes: b"" },
            Record::Piece { stream: 3, number: 1 << 50, len: 9 },
            Record::Close { link: LINK, at_once: true, text: "ümlaut" },
            Record::Reset,
            Record::Bye,
        ]
    }

    fn envelope() -> Vec<u8> {
        let mut writer = Writer::new(1, 2, 4096);
        for record in records() {
            let before = writer.room();
            writer.push(&record);
            assert_eq!(before - writer.room(), record.len(), "{record:?}");
        }
        writer.finish()
    }

    #[test]
    fn records_read_as_they_are_written_whatever_lies_behind_them() {
        let mut bytes = envelope();
        bytes.extend([0xff; 100]);

        let read: Result<Vec<_>, _> = read(&bytes, 1, 2).unwrap().collect();

        assert_eq!(read.unwrap(), records());
    }

    #[test]
    fn every_damaged_bit_is_noticed() {
        let bytes = envelope();

        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&damaged, 1, 2).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn an_envelope_for_somebody_else_is_refused() {
        assert_eq!(read(&envelope(), 2, 1).err(), Some(EnvelopeError::Ranks { from: 1, to: 2 }));
    }

    #[test]
    fn a_long_text_is_cut_between_two_characters() {
        let text = "é".repeat(MAX_TEXT);

        assert!(shorten(&text).len() <= MAX_TEXT);
        assert!(text.starts_with(shorten(&text)));
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_reader_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for record in read(&seal(0, 1, &bytes), 0, 1).unwrap() {
                let _ = record;
            }
            let _ = read(&bytes, 0, 1);
        }
    }
}
