//! [`Departures`]: what waits to be sent to one rank.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::envelope::{Record, WireLink, Writer};
use super::{ENVELOPE, MAX_WINDOW, PIECE};
use crate::connection::Segment;
use crate::ids::MessageId;
use crate::wire::frame::Priority;

/// At least so many bytes of a message share an envelope with what is before them; else they wait for the
/// next one.
const WORTHWHILE: usize = 512;

/// A message to be sent.
#[derive(Debug)]
pub struct Parcel<S> {
    /// On which link.
    pub link: WireLink,
    /// Given back when all of it is out.
    pub id: Option<MessageId>,
    /// How urgent it is.
    pub priority: Priority,
    /// It is about this message, which it must not overtake, whatever their priorities.
    pub after: Option<MessageId>,
    /// Its descriptor, then all parts that are not wide ([`is_wide`](super::is_wide)).
    pub narrow: Vec<u8>,
    /// How much of that is the descriptor.
    pub control_len: u32,
    /// The wide parts.
    pub wide: Vec<S>,
}

/// An envelope to be sent, before any later one.
#[derive(Debug)]
pub struct Envelope {
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Messages of which everything but pieces is in here or before; for [`Departures::envelope_sent`].
    pub finishes: Vec<u32>,
}

/// A piece to be sent, at any time.
#[derive(Debug, Clone)]
pub struct PieceOut<S> {
    /// Its number, for the tag and for [`Departures::piece_sent`].
    pub number: u64,
    /// Where it lies.
    pub segment: S,
    /// Its first byte there.
    pub offset: u64,
    /// How many bytes.
    pub len: u64,
}

/// See the module. `S` names memory that large parts lie in.
#[derive(Debug)]
pub struct Departures<S> {
    from: u32,
    to: u32,
    /// Most pieces on their way.
    window: usize,
    signals: VecDeque<Signal>,
    queues: [VecDeque<Departing<S>>; 3],
    /// Messages that are not all out, from their beginning on.
    open: HashMap<u32, Progress>,
    /// Pieces on their way: of which message, and how long.
    pieces: BTreeMap<u64, (u32, u64)>,
    ready: VecDeque<PieceOut<S>>,
    next_stream: u32,
    next_piece: u64,
    bye: Bye,
}

/// Whether it is said that nothing more comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bye {
    No,
    /// When all else is out.
    Soon,
    Said,
}

/// What is said before any message.
#[derive(Debug)]
enum Signal {
    Handshake(WireLink, Vec<u8>),
    Close(WireLink, String),
    Reset,
    Piece { number: u64, len: u64 },
}

/// What waits in a queue.
#[derive(Debug)]
pub struct Departing<S>(Item<S>);

#[derive(Debug)]
enum Item<S> {
    Message {
        parcel: Parcel<S>,
        /// Set when it has begun.
        stream: Option<u32>,
        /// Narrow bytes that are out.
        written: usize,
        /// The next byte of the wide parts: which part, and where in it.
        part: usize,
        offset: u64,
    },
    /// Ends the link after everything on it.
    Close(WireLink, String),
}

#[derive(Debug)]
struct Progress {
    link: WireLink,
    id: Option<MessageId>,
    priority: Priority,
    /// Whether all of it has been put into envelopes that are out.
    narrow_is_out: bool,
    /// Whether all pieces have been announced.
    announced: bool,
    pieces: usize,
}

impl<S: Segment> Departures<S> {
    /// Nothing waits. At most `window` pieces, and at most [`MAX_WINDOW`], are ever on their way.
    pub fn new(from: u32, to: u32, window: usize) -> Self {
        Self {
            from,
            to,
            window: window.clamp(1, MAX_WINDOW),
            signals: VecDeque::new(),
            queues: Default::default(),
            open: HashMap::new(),
            pieces: BTreeMap::new(),
            ready: VecDeque::new(),
            next_stream: 1,
            next_piece: 0,
            bye: Bye::No,
        }
    }

    /// Queues a message.
    pub fn push(&mut self, mut parcel: Parcel<S>) {
        if let Some(priority) = parcel.after.and_then(|id| self.priority_of(parcel.link, id)) {
            parcel.priority = parcel.priority.max(priority);
        }
        let queue = parcel.priority as usize;
        let item = Item::Message { parcel, stream: None, written: 0, part: 0, offset: 0 };
        self.queues[queue].push_back(Departing(item));
    }

    /// At which priority a message is queued or on its way.
    fn priority_of(&self, link: WireLink, id: MessageId) -> Option<Priority> {
        let queued = self.queues.iter().flatten().find_map(|item| match &item.0 {
            Item::Message { parcel, .. } if (parcel.link, parcel.id) == (link, Some(id)) => {
                Some(parcel.priority)
            }
            _ => None,
        });
        let mut open = self.open.values();
        queued.or_else(|| {
            let progress = open.find(|progress| (progress.link, progress.id) == (link, Some(id)))?;
            Some(progress.priority)
        })
    }

    /// Queues bytes of a handshake.
    pub fn handshake(&mut self, link: WireLink, bytes: Vec<u8>) {
        self.signals.push_back(Signal::Handshake(link, bytes));
    }

    /// Ends a link after everything that is queued on it.
    pub fn close(&mut self, link: WireLink, text: &str) {
        self.queues[Priority::Bulk as usize].push_back(Departing(Item::Close(link, text.to_owned())));
    }

    /// Ends a link at once. Returns what was queued on it, to be dropped.
    pub fn abandon(&mut self, link: WireLink, text: &str) -> Vec<Departing<S>> {
        let dropped = self.drop_queued(link);
        self.signals.push_back(Signal::Close(link, text.to_owned()));
        dropped
    }

    /// Says nothing more on a link. Returns what was queued on it, to be dropped.
    pub fn forget(&mut self, link: WireLink) -> Vec<Departing<S>> {
        self.signals.retain(|signal| !matches!(signal, Signal::Handshake(of, _) if *of == link));
        self.drop_queued(link)
    }

    fn drop_queued(&mut self, link: WireLink) -> Vec<Departing<S>> {
        let mut dropped = Vec::new();
        for queue in &mut self.queues {
            let (gone, kept) = std::mem::take(queue).into_iter().partition(|item| item.0.link() == link);
            let gone: VecDeque<_> = gone;
            *queue = kept;
            dropped.extend(gone);
        }
        // Pieces that are on their way arrive, and then the rest of their messages is not waited for.
        for progress in self.open.values_mut().filter(|progress| progress.link == link) {
            (progress.id, progress.narrow_is_out, progress.announced) = (None, true, true);
        }
        self.open.retain(|_, progress| !progress.is_out());
        dropped
    }

    /// Tells the other rank that an envelope of its came damaged.
    pub fn reset(&mut self) {
        self.signals.push_back(Signal::Reset);
    }

    /// An envelope to that rank may have come damaged: announces the pieces on their way again, for nobody.
    /// That says nothing of those whose announcement came.
    pub fn announce_again(&mut self) {
        let pieces = self.pieces.iter().map(|(&number, &(_, len))| Signal::Piece { number, len });
        self.signals.extend(pieces);
    }

    /// Says that nothing more comes, when nothing more does; once.
    pub fn bye(&mut self) {
        if self.bye == Bye::No {
            self.bye = Bye::Soon;
        }
    }

    /// Whether everything is out, or about to be.
    pub fn is_empty(&self) -> bool {
        self.is_silent() && self.bye != Bye::Soon && self.open.is_empty()
    }

    fn is_silent(&self) -> bool {
        self.signals.is_empty() && self.queues.iter().all(VecDeque::is_empty) && self.pieces.is_empty()
    }

    /// The next envelope, if there is something to say. Its pieces come from [`poll_piece`](Self::poll_piece).
    pub fn poll_envelope(&mut self) -> Option<Envelope> {
        let mut writer = Writer::new(self.from, self.to, ENVELOPE);
        let mut finishes = Vec::new();
        self.write_signals(&mut writer);
        if self.signals.is_empty() {
            for queue in 0..self.queues.len() {
                while self.write_front(queue, &mut writer, &mut finishes) {}
            }
        }
        if self.bye == Bye::Soon && self.is_silent() && writer.room() > 0 {
            self.bye = Bye::Said;
            writer.push(&Record::Bye);
        }
        (!writer.is_empty()).then(|| Envelope { bytes: writer.finish(), finishes })
    }

    /// A piece that has been announced, or is announced by the last envelope.
    pub fn poll_piece(&mut self) -> Option<PieceOut<S>> {
        self.ready.pop_front()
    }

    /// An envelope is out. Calls `sent` for each message that is out by that.
    pub fn envelope_sent(&mut self, finishes: &[u32], mut sent: impl FnMut(WireLink, MessageId)) {
        for &stream in finishes {
            if let Some(progress) = self.open.get_mut(&stream) {
                progress.narrow_is_out = true;
                self.finish(stream, &mut sent);
            }
        }
    }

    /// A piece is out. Calls `sent` if its message is out by that.
    pub fn piece_sent(&mut self, number: u64, mut sent: impl FnMut(WireLink, MessageId)) {
        let Some((stream, _)) = self.pieces.remove(&number) else { return };
        if let Some(progress) = self.open.get_mut(&stream) {
            progress.pieces = progress.pieces.saturating_sub(1);
            self.finish(stream, &mut sent);
        }
    }

    fn finish(&mut self, stream: u32, sent: &mut impl FnMut(WireLink, MessageId)) {
        if self.open.get(&stream).is_some_and(Progress::is_out)
            && let Some(progress) = self.open.remove(&stream)
            && let Some(id) = progress.id
        {
            sent(progress.link, id);
        }
    }

    fn write_signals(&mut self, writer: &mut Writer) {
        while let Some(signal) = self.signals.front() {
            let record = match signal {
                Signal::Handshake(link, bytes) => Record::Handshake { link: *link, bytes },
                Signal::Close(link, text) => Record::Close { link: *link, at_once: true, text },
                Signal::Reset => Record::Reset,
                Signal::Piece { number, len } => Record::Piece { stream: 0, number: *number, len: *len },
            };
            if record.len() > writer.room() {
                return;
            }
            writer.push(&record);
            self.signals.pop_front();
        }
    }

    /// Writes what fits of the first item of a queue. Tells whether to go on with the next.
    fn write_front(&mut self, queue: usize, writer: &mut Writer, finishes: &mut Vec<u32>) -> bool {
        let Some(Departing(item)) = self.queues[queue].front_mut() else { return false };
        let (parcel, stream, written, part, offset) = match item {
            Item::Close(link, text) => {
                let record = Record::Close { link: *link, at_once: false, text };
                let fits = record.len() <= writer.room();
                if fits {
                    writer.push(&record);
                    self.queues[queue].pop_front();
                }
                return fits;
            }
            Item::Message { parcel, stream, written, part, offset } => {
                (parcel, stream, written, part, offset)
            }
        };
        let left = parcel.narrow.len() - *written;
        let number = match *stream {
            Some(number) => number,
            None => self.next_stream,
        };
        if stream.is_none() || left > 0 {
            let overhead = if stream.is_none() { Record::BEGIN } else { Record::MORE };
            let room = writer.room().saturating_sub(overhead);
            let count = left.min(room);
            if count < left.min(WORTHWHILE) {
                return false;
            }
            let bytes = &parcel.narrow[*written..*written + count];
            if stream.is_none() {
                writer.push(&Record::Begin {
                    link: parcel.link,
                    stream: number,
                    priority: parcel.priority,
                    control_len: parcel.control_len,
                    narrow_len: parcel.narrow.len() as u64,
                    bytes,
                });
                *stream = Some(number);
                self.next_stream = self.next_stream.checked_add(1).unwrap_or(1);
                let progress = Progress {
                    link: parcel.link,
                    id: parcel.id,
                    priority: parcel.priority,
                    narrow_is_out: false,
                    announced: false,
                    pieces: 0,
                };
                self.open.insert(number, progress);
            } else {
                writer.push(&Record::More { stream: number, bytes });
            }
            *written += count;
            if *written < parcel.narrow.len() {
                return false;
            }
            finishes.push(number);
        }
        while let Some(segment) = parcel.wide.get(*part) {
            let len = (segment.size() - *offset).min(PIECE);
            if len > 0 {
                if self.pieces.len() >= self.window || writer.room() < Record::PIECE {
                    return false;
                }
                writer.push(&Record::Piece { stream: number, number: self.next_piece, len });
                let piece =
                    PieceOut { number: self.next_piece, segment: segment.clone(), offset: *offset, len };
                self.pieces.insert(self.next_piece, (number, len));
                self.ready.push_back(piece);
                self.next_piece += 1;
                if let Some(progress) = self.open.get_mut(&number) {
                    progress.pieces += 1;
                }
            }
            *offset += len;
            if *offset == segment.size() {
                (*part, *offset) = (*part + 1, 0);
            }
        }
        if let Some(progress) = self.open.get_mut(&number) {
            progress.announced = true;
        }
        self.queues[queue].pop_front();
        true
    }
}

impl<S> Item<S> {
    fn link(&self) -> WireLink {
        match self {
            Self::Message { parcel, .. } => parcel.link,
            Self::Close(link, _) => *link,
        }
    }
}

impl Progress {
    fn is_out(&self) -> bool {
        self.narrow_is_out && self.announced && self.pieces == 0
    }
}
