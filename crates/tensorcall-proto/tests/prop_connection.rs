//! Properties of a connection: whatever is pushed arrives, whole and in the order of its priority,
//! however the bytes are written and cut on their way.

#![expect(clippy::unwrap_used, reason = "a test stops where something is wrong")]

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

use tensorcall_proto::connection::{Allocate, Arrival, Inbox, Outbox, Piece, Segment};
use tensorcall_proto::ids::MessageId;
use tensorcall_proto::wire::{
    BufferDesc, Call, Descriptor, Encoding, FunctionRef, Limits, Message, Phase, Priority,
};

#[derive(Debug, Clone, PartialEq)]
struct Bytes(Vec<u8>);

impl Segment for Bytes {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }
}

struct Heap;

impl Allocate for Heap {
    type Memory = Vec<u8>;

    fn allocate(&mut self, len: u64) -> Option<Vec<u8>> {
        usize::try_from(len).ok().map(|len| vec![0; len])
    }
}

/// A message with its body, as it is sent and as it has to arrive.
#[derive(Debug, Clone, PartialEq)]
struct Parcel {
    descriptor: Descriptor,
    payload: Vec<u8>,
    buffers: Vec<Vec<u8>>,
}

/// `len` bytes that tell their places apart.
fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|at| (at % 251).to_le_bytes()[0].wrapping_add(seed)).collect()
}

fn any_parcel() -> impl Strategy<Value = Parcel> {
    let len = prop_oneof![
        4 => 0..300usize,
        // Two chunks and some.
        1 => Just((5 << 19) + 3),
    ];
    let function =
        prop_oneof![Just(FunctionRef::InPayload), "[f-h]".prop_map(|name| FunctionRef::Name(name.into())),];
    (any::<bool>(), any::<u64>(), function, 0..300usize, vec(len, 0..3), any::<u8>()).prop_map(
        |(call, id, function, payload, buffers, seed)| {
            let id = MessageId::new(id);
            if !call {
                let message = Message::Progress { id, phase: Phase::Waiting };
                return Parcel {
                    descriptor: Descriptor::plain(message),
                    payload: Vec::new(),
                    buffers: Vec::new(),
                };
            }
            let message = Message::Call(Call {
                id,
                function,
                encoding: Encoding::Bytes,
                timeout_us: None,
                nested: false,
                plain: false,
                autograd: None,
                creates: None,
            });
            let descs = buffers.iter().map(|&len| BufferDesc::body(len as u64)).collect();
            let descriptor =
                Descriptor { buffers: descs, ..Descriptor::with_payload(message, payload as u64) };
            let buffers = buffers.iter().map(|&len| pattern(len, seed)).collect();
            Parcel { descriptor, payload: pattern(payload, !seed), buffers }
        },
    )
}

/// Writes at most `most` bytes of what waits.
fn write(outbox: &mut Outbox<Bytes>, most: usize, stream: &mut Vec<u8>) {
    let before = stream.len();
    for piece in outbox.pieces() {
        let bytes = match piece {
            Piece::Bytes(bytes) => bytes,
            Piece::Part { segment: Bytes(bytes), offset, len } => {
                &bytes[usize::try_from(offset).unwrap()..][..usize::try_from(len).unwrap()]
            }
        };
        let room = most - (stream.len() - before);
        stream.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }
    outbox.advance((stream.len() - before) as u64, |_| {});
}

/// The bytes of all `parcels`, of which `writes` tells how much is written after each push.
fn sent(parcels: &[Parcel], writes: &[usize]) -> Vec<u8> {
    let mut outbox = Outbox::new();
    let mut stream = Vec::new();
    for (parcel, &most) in parcels.iter().zip(writes.iter().cycle()) {
        let body = parcel.buffers.iter().cloned().map(Bytes).collect();
        outbox.push(parcel.descriptor.clone(), &parcel.payload, body, None);
        write(&mut outbox, most, &mut stream);
    }
    while !outbox.is_empty() {
        write(&mut outbox, usize::MAX, &mut stream);
    }
    stream
}

fn drain(inbox: &mut Inbox<Heap>) -> Vec<Parcel> {
    let arrivals = std::iter::from_fn(|| inbox.poll());
    let parcels = arrivals.filter_map(|arrival| match arrival {
        Arrival::Message(arrived) => Some(Parcel {
            descriptor: arrived.descriptor,
            payload: arrived.payload,
            buffers: arrived.buffers,
        }),
        _ => None,
    });
    parcels.collect()
}

/// What arrives of `stream`, fed in pieces that end at `cuts`.
fn received(stream: &[u8], cuts: &[usize]) -> Vec<Parcel> {
    let mut inbox = Inbox::new(Limits::default(), Heap);
    let mut from = 0;
    for &cut in cuts.iter().chain([&stream.len()]) {
        inbox.feed(&stream[from..cut]).unwrap();
        from = cut;
    }
    assert!(inbox.is_idle());
    drain(&mut inbox)
}

fn of_priority(parcels: &[Parcel], priority: Priority) -> Vec<&Parcel> {
    parcels.iter().filter(|parcel| parcel.descriptor.priority() == priority).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_parcels_arrive_whole_and_in_the_order_of_their_priority(
        parcels in vec(any_parcel(), 1..8),
        writes in vec(prop_oneof![0..200usize, 0..3_000_000usize], 1..4),
    ) {
        let stream = sent(&parcels, &writes);
        let arrived = received(&stream, &[]);

        prop_assert_eq!(arrived.len(), parcels.len());
        for priority in Priority::ALL {
            prop_assert!(of_priority(&arrived, priority) == of_priority(&parcels, priority));
        }
    }

    #[test]
    fn any_split_of_a_stream_arrives_alike(
        parcels in vec(any_parcel(), 1..6),
        cuts in vec(any::<Index>(), 0..20),
    ) {
        let stream = sent(&parcels, &[0]);
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(stream.len())).collect();
        cuts.sort_unstable();

        prop_assert!(received(&stream, &cuts) == received(&stream, &[]));
    }
}
