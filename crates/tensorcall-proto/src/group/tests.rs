use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::connection::Segment;
use crate::ids::MessageId;
use crate::wire::Descriptor;
use crate::wire::frame::Priority;
use crate::wire::limits::Limits;
use crate::wire::message::{Call, Encoding, FunctionRef, Message};
use crate::wire::tensor::BufferDesc;

const LINK: WireLink = WireLink { opened_here: true, number: 5 };

/// Memory of a test: plain bytes; a target says which of them.
#[derive(Debug, Clone, Default)]
struct Heap;

#[derive(Debug)]
struct Wide {
    bytes: std::rc::Rc<std::cell::RefCell<Vec<u8>>>,
    next: usize,
}

#[derive(Debug)]
struct Target {
    bytes: std::rc::Rc<std::cell::RefCell<Vec<u8>>>,
    start: usize,
}

impl Places for Heap {
    type Memory = Vec<u8>;
    type Wide = Wide;
    type Target = Target;

    fn allocate(&mut self, len: u64) -> Option<Vec<u8>> {
        Some(vec![0; usize::try_from(len).ok()?])
    }

    fn allocate_wide(&mut self, len: u64) -> Option<Wide> {
        Some(Wide { bytes: std::rc::Rc::new(self.allocate(len)?.into()), next: 0 })
    }

    fn carve(&mut self, wide: &mut Wide, len: u64) -> Option<Target> {
        let start = wide.next;
        wide.next += usize::try_from(len).ok()?;
        Some(Target { bytes: std::rc::Rc::clone(&wide.bytes), start })
    }

    fn close(&mut self, wide: Wide) -> Option<Vec<u8>> {
        Some(wide.bytes.borrow().clone())
    }
}

#[derive(Debug, Clone)]
struct Bytes(std::rc::Rc<Vec<u8>>);

impl Segment for Bytes {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }
}

/// A message whose number is its id.
#[derive(Debug, Clone, PartialEq)]
struct Sent {
    id: u64,
    parts: Vec<Vec<u8>>,
}

fn parcel(sent: &Sent) -> Parcel<Bytes> {
    parcel_on(LINK, sent)
}

fn parcel_on(link: WireLink, sent: &Sent) -> Parcel<Bytes> {
    let call = Call {
        id: MessageId::new(sent.id),
        function: FunctionRef::InPayload,
        encoding: Encoding::Bytes,
        timeout_us: None,
        nested: false,
        autograd: None,
        creates: None,
        plain: false,
    };
    let lens: Vec<_> = sent.parts.iter().map(|part| part.len() as u64).collect();
    let buffers = lens[1..].iter().map(|&len| BufferDesc::body(len)).collect();
    let descriptor = Descriptor { buffers, ..Descriptor::with_payload(Message::Call(call), lens[0]) };
    let mut narrow = descriptor.encode();
    let control_len = u32::try_from(narrow.len()).unwrap();
    let mut wide = Vec::new();
    for part in &sent.parts {
        if is_wide(part.len() as u64) {
            wide.push(Bytes(std::rc::Rc::new(part.clone())));
        } else {
            narrow.extend_from_slice(part);
        }
    }
    let id = Some(MessageId::new(sent.id));
    Parcel { link, id, priority: descriptor.priority(), after: None, narrow, control_len, wide }
}

/// Two ranks and what is between them.
struct World {
    out: Departures<Bytes>,
    arrivals: Arrivals<Heap>,
    flying: VecDeque<PieceOut<Bytes>>,
    expected: Vec<(u64, Option<Target>)>,
    received: Vec<Sent>,
    sent: Vec<u64>,
    others: Vec<Arrival<Vec<u8>, Target>>,
}

impl World {
    fn new(window: usize) -> Self {
        let mut arrivals = Arrivals::new(0, 1, Limits::default(), Heap);
        arrivals.open(LINK.mirrored());
        Self {
            out: Departures::new(0, 1, window),
            arrivals,
            flying: VecDeque::new(),
            expected: Vec::new(),
            received: Vec::new(),
            sent: Vec::new(),
            others: Vec::new(),
        }
    }

    /// One envelope leaves, if there is one, with the pieces that it announces.
    fn leaves(&mut self) -> Option<Vec<u8>> {
        let Envelope { bytes, finishes } = self.out.poll_envelope()?;
        assert!(bytes.len() <= ENVELOPE);
        self.out.envelope_sent(&finishes, |_, id| self.sent.push(id.get()));
        while let Some(piece) = self.out.poll_piece() {
            self.flying.push_back(piece);
        }
        Some(bytes)
    }

    /// One envelope crosses, if there is one.
    fn envelope(&mut self) -> bool {
        let Some(bytes) = self.leaves() else { return false };
        self.arrivals.feed(&bytes).unwrap();
        self.look();
        true
    }

    /// One envelope comes damaged, if there is one: its receiver ends `link`.
    fn damaged_envelope(&mut self, link: WireLink) -> bool {
        let Some(mut bytes) = self.leaves() else { return false };
        let last = bytes.len() - 1;
        bytes[last] ^= 4;
        assert_eq!(self.arrivals.feed(&bytes), Err(EnvelopeError::Checksum));
        self.arrivals.close(link.mirrored());
        true
    }

    /// The sender hears that an envelope came damaged: it ends `link`.
    fn reset(&mut self, link: WireLink) {
        drop(self.out.forget(link));
        self.out.announce_again();
    }

    /// The sender is done with the piece at this place, as some groups are before it is received.
    fn early(&mut self, place: usize) {
        let number = self.flying[place].number;
        self.out.piece_sent(number, |_, id| self.sent.push(id.get()));
    }

    /// The piece at this place among those on their way arrives, if somebody receives it.
    fn piece(&mut self, place: usize) -> bool {
        let piece = self.flying.remove(place).unwrap();
        let Some(place) = self.expected.iter().position(|(number, _)| *number == piece.number) else {
            self.flying.push_back(piece);
            return false;
        };
        let (number, target) = self.expected.remove(place);
        if let Some(Target { bytes, start }) = target {
            let offset = usize::try_from(piece.offset).unwrap();
            let len = usize::try_from(piece.len).unwrap();
            let source = &piece.segment.0[offset..offset + len];
            bytes.borrow_mut()[start..start + len].copy_from_slice(source);
        }
        self.out.piece_sent(number, |_, id| self.sent.push(id.get()));
        self.arrivals.landed(number);
        self.look();
        true
    }

    fn look(&mut self) {
        while let Some(arrival) = self.arrivals.poll() {
            match arrival {
                Arrival::Piece { number, target, .. } => self.expected.push((number, target)),
                Arrival::Message { arrived, .. } => {
                    let Message::Call(call) = arrived.descriptor.message else { panic!("a call was sent") };
                    let parts = std::iter::once(arrived.payload).chain(arrived.buffers).collect();
                    self.received.push(Sent { id: call.id.get(), parts });
                }
                other => self.others.push(other),
            }
        }
    }

    /// Everything crosses that can.
    fn run(&mut self) {
        while self.envelope() || (0..self.flying.len()).any(|_| self.piece(0)) {}
    }
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let block: Vec<u8> = (0..251).map(|i| i ^ seed.to_le_bytes()[0]).collect();
    block.iter().copied().cycle().take(len).collect()
}

fn message(id: u64, lens: &[usize]) -> Sent {
    Sent { id, parts: lens.iter().map(|&len| bytes(len, id)).collect() }
}

#[test]
fn a_message_with_parts_of_all_sizes_arrives_whole_and_is_reported_sent_once() {
    let mut world = World::new(2);
    let narrow = usize::try_from(NARROW).unwrap();
    let sent = message(1, &[10, 0, narrow, narrow + 1, 3, 20 << 20, 100]);

    world.out.push(parcel(&sent));
    world.run();

    assert!(world.received == [sent]);
    assert_eq!(world.sent, [1]);
    assert!(world.out.is_empty() && world.expected.is_empty());
}

#[test]
fn a_small_message_passes_a_large_one_that_is_under_way() {
    let mut world = World::new(1);
    world.out.push(parcel(&message(1, &[17 << 20])));
    world.envelope();

    world.out.push(parcel(&message(2, &[10])));
    world.envelope();

    assert_eq!(world.received.iter().map(|sent| sent.id).collect::<Vec<_>>(), [2]);
    world.run();
    assert_eq!(world.received.len(), 2);
}

#[test]
fn as_many_pieces_are_under_way_as_the_window_has_places() {
    let mut world = World::new(4);
    world.out.push(parcel(&message(1, &[48 << 20])));

    world.envelope();
    assert_eq!((world.flying.len(), world.expected.len()), (4, 4));
    world.piece(2);
    world.envelope();

    assert_eq!((world.flying.len(), world.expected.len()), (4, 4));
}

#[test]
fn large_messages_are_handed_on_in_order_although_their_pieces_arrive_in_any() {
    let mut world = World::new(4);
    world.out.push(parcel(&message(1, &[260 << 10])));
    world.out.push(parcel(&message(2, &[260 << 10])));
    world.envelope();

    world.piece(1);
    assert!(world.received.is_empty());
    world.piece(0);

    assert_eq!(world.received.iter().map(|sent| sent.id).collect::<Vec<_>>(), [1, 2]);
}

#[test]
fn what_is_about_a_message_does_not_overtake_it() {
    for begun in [false, true] {
        let mut world = World::new(1);
        world.out.push(parcel(&message(1, &[260 << 10])));
        if begun {
            world.envelope();
        }

        let after = Some(MessageId::new(1));
        world.out.push(Parcel { priority: Priority::Control, after, ..parcel(&message(2, &[1])) });
        world.run();

        assert_eq!(world.received.iter().map(|sent| sent.id).collect::<Vec<_>>(), [1, 2]);
    }
}

#[test]
fn many_small_messages_share_an_envelope() {
    let mut world = World::new(1);
    for id in 0..64 {
        world.out.push(parcel(&message(id, &[200])));
    }

    world.envelope();

    assert_eq!(world.received.len(), 64);
}

#[test]
fn a_link_is_closed_after_what_was_queued_on_it() {
    let mut world = World::new(1);
    world.out.push(parcel(&message(1, &[20 << 20])));
    world.out.close(LINK, "done");
    world.out.bye();

    world.run();

    assert_eq!(world.received.len(), 1);
    let [Arrival::Closed { link, text }, Arrival::Bye] = &world.others[..] else {
        panic!("{:?}", world.others)
    };
    assert_eq!((*link, text.as_str()), (LINK.mirrored(), "done"));
}

#[test]
fn after_a_lost_envelope_its_pieces_are_taken_and_dropped_and_new_ones_find_their_place() {
    let mut world = World::new(2);
    world.out.push(parcel(&message(1, &[20 << 20])));
    assert!(world.damaged_envelope(LINK));
    world.reset(LINK);
    world.run();
    assert!(world.flying.is_empty() && world.received.is_empty() && world.out.is_empty());

    world.arrivals.open(LINK.mirrored());
    let second = message(2, &[9 << 20]);
    world.out.push(parcel(&second));
    world.run();
    assert!(world.received == [second]);
}

/// A group may be done with sending a piece that nobody has received: then it is not announced again, but
/// its tag comes round.
#[test]
fn a_piece_that_was_lost_track_of_is_received_before_a_later_one_is() {
    let mut world = World::new(4);
    world.out.push(parcel(&message(1, &[100 << 10, 100 << 10])));
    assert!(world.damaged_envelope(LINK));
    world.early(0);
    world.early(1);
    world.reset(LINK);
    world.run();
    assert_eq!(world.flying.len(), 2, "nobody knows of them");

    world.arrivals.open(LINK.mirrored());
    let second = message(2, &[100 << 10]);
    world.out.push(parcel(&second));
    world.run();

    assert!(world.flying.is_empty() && world.expected.is_empty());
    assert!(world.received == [second]);
}

#[test]
fn a_gap_in_the_numbers_of_pieces_has_a_limit() {
    let mut arrivals = Arrivals::new(0, 1, Limits::default(), Heap);
    let announces = |number: u64| {
        let (kind, stream, len) = ([4], 0u32.to_le_bytes(), 1u64.to_le_bytes());
        seal(0, 1, &[&kind[..], &stream, &number.to_le_bytes(), &len].concat())
    };

    let far = 1 << 14;
    assert_eq!(arrivals.feed(&announces(far)), Err(EnvelopeError::Piece { number: far, len: 1 }));
    assert_eq!(arrivals.feed(&announces(far - 1)), Ok(()));
    assert_eq!(arrivals.feed(&announces(far)), Err(EnvelopeError::Piece { number: far, len: 1 }));
}

#[test]
fn what_comes_on_a_link_that_is_not_open_takes_no_memory_and_harms_nothing() {
    let mut world = World::new(2);
    world.arrivals.close(LINK.mirrored());
    world.out.push(parcel(&message(1, &[100, 1 << 20])));

    world.run();

    assert!(world.received.is_empty() && world.others.is_empty() && world.flying.is_empty());
}

/// The other rank ends a handshake and says something in one envelope.
#[test]
fn what_comes_before_the_end_of_a_handshake_is_known_is_kept_until_then() {
    let mut world = World::new(2);
    world.arrivals.close(LINK.mirrored());
    world.arrivals.expect(LINK.mirrored());
    world.out.handshake(LINK, b"welcome".to_vec());
    world.out.push(parcel(&message(1, &[100, 1 << 20])));
    world.run();
    assert!(world.received.is_empty() && matches!(&world.others[..], [Arrival::Handshake { .. }]));

    world.arrivals.open(LINK.mirrored());
    world.look();

    assert_eq!(world.received.len(), 1);
}

#[test]
fn a_descriptor_that_makes_no_sense_ends_its_link_alone() {
    let mut world = World::new(2);
    let mut senseless = parcel(&message(1, &[100]));
    senseless.narrow[0] = 99;
    world.out.push(senseless);
    let other = WireLink { number: 6, ..LINK };
    world.arrivals.open(other.mirrored());

    world.run();
    world.out.push(Parcel { link: other, ..parcel(&message(2, &[1])) });
    world.run();

    assert!(matches!(&world.others[..], [Arrival::Broken { link, .. }] if *link == LINK.mirrored()));
    assert_eq!(world.received.len(), 1);
}

#[test]
fn narrow_bytes_that_do_not_add_up_end_the_link() {
    for surplus in [-1i64, 1] {
        let mut world = World::new(2);
        let mut parcel = parcel(&message(1, &[100]));
        let len = usize::try_from(i64::try_from(parcel.narrow.len()).unwrap() + surplus).unwrap();
        parcel.narrow.resize(len, 0);
        world.out.push(parcel);

        world.run();

        assert!(matches!(&world.others[..], [Arrival::Broken { .. }]), "{surplus}");
    }
}

#[test]
fn tags_of_pieces_are_neither_that_of_envelopes_nor_beyond_what_groups_have() {
    for number in [0, 1, PIECE_TAGS - 1, PIECE_TAGS, u64::MAX - 1] {
        assert!((ENVELOPE_TAG + 1..=32_767).contains(&piece_tag(number)));
    }
}

fn any_message() -> impl Strategy<Value = Vec<usize>> {
    let len = prop_oneof![Just(0), 1..2000usize, 30_000..40_000usize, 100_000..150_000usize];
    proptest::collection::vec(len, 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn everything_arrives_whatever_the_order_of_events(
        messages in proptest::collection::vec(any_message(), 1..10),
        window in 1..5usize,
        choices in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut world = World::new(window);
        let sent: Vec<_> = (0..).zip(&messages).map(|(id, lens)| message(id, lens)).collect();
        let mut left = sent.iter();

        for choice in choices {
            match choice % 3 {
                0 => left.next().into_iter().for_each(|sent| world.out.push(parcel(sent))),
                1 => drop(world.envelope()),
                _ if world.flying.is_empty() => {}
                _ => {
                    let place = usize::from(choice / 3) % world.flying.len();
                    world.piece(place);
                }
            }
        }
        left.for_each(|sent| world.out.push(parcel(sent)));
        world.run();

        for priority in Priority::ALL {
            let of = |messages: &[Sent]| -> Vec<Sent> {
                messages.iter().filter(|sent| parcel(sent).priority == priority).cloned().collect()
            };
            prop_assert!(of(&world.received) == of(&sent));
        }
        prop_assert_eq!(world.sent.len(), sent.len());
        prop_assert!(world.out.is_empty());
    }

    /// Each damage costs what was under way, and nothing that is said after the reset.
    #[test]
    fn after_any_damage_pieces_still_find_their_place(
        messages in proptest::collection::vec(any_message(), 1..10),
        window in 1..5usize,
        choices in proptest::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut world = World::new(window);
        let sent: Vec<_> = (0..).zip(&messages).map(|(id, lens)| message(id, lens)).collect();
        let (mut left, mut link, mut is_damaged) = (sent.iter(), LINK, false);
        let reset = |world: &mut World, link: &mut WireLink| {
            world.arrivals.close(link.mirrored());
            world.reset(*link);
            link.number += 1;
            world.arrivals.open(link.mirrored());
        };

        for choice in choices {
            let place = usize::from(choice / 6) % world.flying.len().max(1);
            match choice % 6 {
                0 => left.next().into_iter().for_each(|sent| world.out.push(parcel_on(link, sent))),
                1 => drop(world.envelope()),
                2 => is_damaged |= world.damaged_envelope(link),
                3 if is_damaged => {
                    is_damaged = false;
                    reset(&mut world, &mut link);
                }
                4 if !world.flying.is_empty() => world.early(place),
                5 if !world.flying.is_empty() => drop(world.piece(place)),
                _ => {}
            }
        }
        // The end of the link that is damaged now, and what is left, on a new one.
        reset(&mut world, &mut link);
        let before = world.received.len();
        let last = message(99, &[100, 100_000]);
        let rest: Vec<_> = left.chain([&last]).cloned().collect();
        for sent in &rest {
            world.out.push(parcel_on(link, sent));
        }
        world.run();

        prop_assert!(world.flying.is_empty() && world.expected.is_empty() && world.out.is_empty());
        prop_assert!(world.received.iter().all(|received| *received == last || sent.contains(received)));
        for priority in Priority::ALL {
            let of = |messages: &[Sent]| -> Vec<Sent> {
                messages.iter().filter(|sent| parcel(sent).priority == priority).cloned().collect()
            };
            prop_assert!(of(&world.received[before..]) == of(&rest));
            prop_assert!(of(&world.received).is_sorted_by_key(|sent| sent.id));
        }
    }
}
