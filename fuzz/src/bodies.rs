//! The body of each fuzz target: takes any bytes and panics if an invariant does not hold.
//!
//! The tests of `tensorcall-proto` include this file to run it over the seed corpus on stable
//! Rust, so it uses nothing but that crate.

use std::mem::{Discriminant, discriminant};

use tensorcall_proto::connection::{Allocate, Arrival, ConnectionError, Inbox};
use tensorcall_proto::group;
use tensorcall_proto::handshake::{
    Established, Expect, HandshakeError, Initiator, MAX_MESSAGE, Responder, Role,
};
use tensorcall_proto::ids::{Identity, Incarnation, Rank, WorkerName};
use tensorcall_proto::store::{ClientId, Table};
use tensorcall_proto::wire::store::{
    MAGIC, Reply, ReplyDecoder, ReplyShape, Request, RequestDecoder, StoreLimits, StoreWireError,
};
use tensorcall_proto::wire::{
    BufferDesc, Descriptor, Event, FrameHeader, HEADER_LEN, Limits, Value, ValueReader,
};

/// The most body bytes that [`connection`] lets a peer announce.
const MEMORY: u64 = 1 << 20;

/// A header is refused or encodes to the bytes it came from.
pub fn frame(data: &[u8]) {
    let Some(bytes) = data.first_chunk::<HEADER_LEN>() else {
        return;
    };
    if let Ok(header) = FrameHeader::decode(bytes, &Limits::default()) {
        assert_eq!(&header.encode(), bytes);
        assert!(header.control_len <= Limits::default().max_control);
        assert!(header.body_len <= Limits::default().max_message);
    }
}

/// A descriptor is refused or is within all limits, and reads back the same.
pub fn message(data: &[u8]) {
    for blocks in [false, true] {
        let limits = Limits { blocks, ..Limits::default() };
        let Ok(descriptor) = Descriptor::decode(data, &limits) else {
            continue;
        };
        assert_eq!(descriptor.check(&limits), Ok(()));
        let body = descriptor.body_len().expect("a checked length");
        assert!(body <= limits.max_message);
        for tensor in &descriptor.tensors {
            let buffer = &descriptor.buffers[tensor.buffer as usize];
            assert!(tensor.offset + tensor.extent().expect("a checked extent") <= buffer.len);
        }
        let encoded = descriptor.encode();
        assert!(encoded.len() <= data.len(), "the encoder is never longer than a peer");
        assert_eq!(Descriptor::decode(&encoded, &limits), Ok(descriptor));
    }
}

/// A value is refused or encodes to the bytes it came from, and never announces more than it has.
pub fn value(data: &[u8]) {
    let limits = Limits::default();
    let mut reader = ValueReader::new(data, &limits);
    let mut announced = 0;
    let walked = loop {
        match reader.next() {
            Ok(Event::List(len) | Event::Tuple(len)) => announced += len,
            Ok(Event::Map(len)) => announced += 2 * len,
            Ok(_) => {}
            Err(error) => break Err(error),
        }
        assert!(announced <= data.len());
        if reader.is_done() {
            break reader.finish();
        }
    };
    let tree = Value::decode(data, &limits);
    assert_eq!(tree.as_ref().map(|_| ()), walked.as_ref().copied());
    if let Ok(tree) = tree {
        assert_eq!(tree.encode(&limits).as_deref(), Ok(data));
    }
}

/// Either end takes any bytes, in any split, with the same result, and says little. The first byte of
/// `data` says how it is split.
pub fn handshake(data: &[u8]) {
    let Some((&step, data)) = data.split_first() else {
        return;
    };
    let whole = initiator(data, data.len());
    assert_eq!(initiator(data, step.into()), whole);
    let whole = responder(data, data.len());
    assert_eq!(responder(data, step.into()), whole);
}

/// What a handshake came to: the peer if it is done, the kind of error (which may quote as much as
/// had come), and what was sent.
type HandshakeResult = (Option<Established>, Result<(), Discriminant<HandshakeError>>, Vec<u8>);

/// The secret, job and nonces of the handshake seeds.
pub const SECRET: &[u8] = b"a secret of no importance";
/// See [`SECRET`].
pub const JOB: &str = "fuzz";

/// One of the two workers of the handshake seeds.
pub fn worker(rank: u32) -> Identity {
    Identity {
        name: WorkerName::parse(&format!("worker{rank}")).expect("a valid name"),
        rank: Rank::new(rank).expect("a valid rank"),
        incarnation: Incarnation::new(7 + u64::from(rank)),
    }
}

/// The initiating end of the handshake seeds.
pub fn new_initiator() -> Initiator {
    let expect = Expect { rank: worker(1).rank, incarnation: None };
    Initiator::new(SECRET, JOB, worker(0), expect, Role::Calls, [1; 32])
}

/// The responding end of the handshake seeds.
pub fn new_responder() -> Responder {
    Responder::new(SECRET, JOB, worker(1), [2; 32])
}

fn initiator(data: &[u8], step: usize) -> HandshakeResult {
    let mut end = new_initiator();
    let fed = data.chunks(step.max(1)).try_for_each(|part| end.feed(part));
    result(end.done(), fed, || end.poll_send(), data)
}

fn responder(data: &[u8], step: usize) -> HandshakeResult {
    let mut end = new_responder();
    let fed = data.chunks(step.max(1)).try_for_each(|part| end.feed(part));
    result(end.done(), fed, || end.poll_send(), data)
}

fn result(
    done: Option<Established>,
    fed: Result<(), HandshakeError>,
    poll_send: impl FnMut() -> Option<Vec<u8>>,
    data: &[u8],
) -> HandshakeResult {
    let sent = std::iter::from_fn(poll_send).flatten().collect::<Vec<u8>>();
    assert!(sent.len() <= 3 * MAX_MESSAGE);
    if let Some(done) = &done {
        assert!(data.ends_with(&done.leftover));
    }
    (done, fed.map_err(|error| discriminant(&error)), sent)
}

/// An inbox takes any bytes, in any split, with the same result and in bounded memory. The first
/// byte of `data` says how it is split.
pub fn connection(data: &[u8]) {
    let Some((&step, data)) = data.split_first() else {
        return;
    };
    let whole = arrivals(data, data.len());
    assert_eq!(arrivals(data, step.into()), whole);
    assert_eq!(arrivals_read_in_place(data, step.into()), whole);
}

/// What another rank says makes no panic and takes no more memory than allowed. `data` is one envelope's
/// records; links 0 and 1 of either side are open.
pub fn group(data: &[u8]) {
    let mut arrivals =
        group::Arrivals::new(0, 1, Limits { max_message: MEMORY, ..Limits::default() }, Counting);
    for number in 0..4 {
        arrivals.open(group::WireLink { opened_here: number % 2 == 0, number: number / 2 });
    }
    let _ = arrivals.feed(data);
    let _ = arrivals.feed(&group::seal(0, 1, data));
    while let Some(arrival) = arrivals.poll() {
        match arrival {
            group::Arrival::Piece { number, len, .. } => {
                assert!(0 < len && len <= group::PIECE);
                arrivals.landed(number);
            }
            group::Arrival::Message { arrived, .. } => {
                let lens = arrived.descriptor.buffers.iter().map(BufferDesc::body_len);
                assert!(lens.eq(arrived.buffers.iter().map(|buffer| buffer.len() as u64)));
            }
            group::Arrival::Broken { link, .. } | group::Arrival::Closed { link, .. } => arrivals.close(link),
            group::Arrival::Handshake { .. } | group::Arrival::Reset | group::Arrival::Bye => {}
        }
    }
}

/// What arrives on a connection, and the error that ends it.
type Arrivals = (Vec<String>, Result<(), ConnectionError>);

/// Feeds `data` in parts of `step` bytes.
fn arrivals(data: &[u8], step: usize) -> Arrivals {
    let mut inbox = inbox();
    let fed = data.chunks(step.max(1)).try_for_each(|part| inbox.feed(part));
    (drain(&mut inbox), fed)
}

/// Copies what belongs to a body into the place that the inbox names, and feeds the rest.
fn arrivals_read_in_place(mut data: &[u8], step: usize) -> Arrivals {
    let mut inbox = inbox();
    let mut fed = Ok(());
    while fed.is_ok() && !data.is_empty() {
        let count = data.len().min(step.max(1));
        let (used, result) = match inbox.target() {
            Some(target) => {
                let count = count.min(target.len());
                target[..count].copy_from_slice(&data[..count]);
                (count, inbox.filled(count))
            }
            None => (count, inbox.feed(&data[..count])),
        };
        fed = result;
        data = &data[used..];
    }
    (drain(&mut inbox), fed)
}

fn inbox() -> Inbox<Counting> {
    Inbox::new(Limits { max_message: MEMORY, ..Limits::default() }, Counting)
}

fn drain(inbox: &mut Inbox<Counting>) -> Vec<String> {
    let mut seen = Vec::new();
    while let Some(arrival) = inbox.poll() {
        if let Arrival::Message(arrived) = &arrival {
            let lens = arrived.descriptor.buffers.iter().map(BufferDesc::body_len);
            assert!(lens.eq(arrived.buffers.iter().map(|buffer| buffer.len() as u64)));
            assert_eq!(arrived.payload.len() as u64, arrived.descriptor.payload_len);
        }
        seen.push(format!("{arrival:?}"));
    }
    seen
}

/// Gives memory, and checks that nobody asks for more than the limit of one message.
struct Counting;

impl group::Places for Counting {
    type Memory = Vec<u8>;
    type Wide = (Vec<u8>, u64);
    type Target = ();

    fn allocate(&mut self, len: u64) -> Option<Vec<u8>> {
        Allocate::allocate(self, len)
    }

    fn allocate_wide(&mut self, len: u64) -> Option<(Vec<u8>, u64)> {
        Some((Allocate::allocate(self, len)?, len))
    }

    fn carve(&mut self, wide: &mut (Vec<u8>, u64), len: u64) -> Option<()> {
        wide.1 = wide.1.checked_sub(len)?;
        Some(())
    }

    fn close(&mut self, wide: (Vec<u8>, u64)) -> Option<Vec<u8>> {
        assert_eq!(wide.1, 0, "all of it was received");
        Some(wide.0)
    }
}

impl Allocate for Counting {
    type Memory = Vec<u8>;

    fn allocate(&mut self, len: u64) -> Option<Vec<u8>> {
        assert!(len <= MEMORY, "{len} bytes were asked for");
        Some(vec![0; usize::try_from(len).ok()?])
    }
}

/// How large the store of [`store`] may be, and what it accepts.
const STORE: usize = 1 << 16;
const STORE_LIMITS: StoreLimits =
    StoreLimits { max_key: 64, max_value: 1 << 12, max_keys: 64, max_message: 1 << 14 };

/// What clients of a store send is cut into the same requests in any split, and a store that does what they say
/// stays within its limit, answers each as it should and is left clean. What a server sends is the same reply in any
/// split. The first byte of `data` says how it is split.
pub fn store(data: &[u8]) {
    let Some((&step, data)) = data.split_first() else {
        return;
    };
    let (requests, end) = store_requests(data, data.len());
    let again = store_requests(data, step.into());
    assert_eq!((&requests, &end), (&again.0, &again.1));
    let encoded = requests.iter().fold(Vec::new(), |mut bytes, request| {
        request.encode(&mut bytes);
        bytes
    });
    assert!(data.starts_with(&encoded));
    serve(requests);
    for shape in [
        ReplyShape::Value,
        ReplyShape::Values(3),
        ReplyShape::Keys,
        ReplyShape::Number,
        ReplyShape::Flag,
        ReplyShape::Nonce,
        ReplyShape::Popped,
    ] {
        assert_eq!(store_reply(data, shape, data.len()), store_reply(data, shape, step.into()));
    }
}

/// What came, and the error that ended it.
type Requests = (Vec<Request>, Result<(), StoreWireError>);

fn store_requests(data: &[u8], step: usize) -> Requests {
    let mut decoder = RequestDecoder::new(STORE_LIMITS);
    let mut found = Vec::new();
    for mut part in data.chunks(step.max(1)) {
        loop {
            match decoder.next(&mut part) {
                Ok(Some(request)) => found.push(request),
                Ok(None) => break,
                Err(error) => return (found, Err(error)),
            }
        }
        assert!(part.is_empty());
    }
    (found, Ok(()))
}

fn store_reply(data: &[u8], shape: ReplyShape, step: usize) -> Result<Option<Reply>, StoreWireError> {
    let mut decoder = ReplyDecoder::new(shape, STORE_LIMITS);
    for mut part in data.chunks(step.max(1)) {
        if let Some(reply) = decoder.next(&mut part)? {
            return Ok(Some(reply));
        }
    }
    Ok(None)
}

/// Three clients take turns in asking; one that breaks the rules is gone, and comes again.
fn serve(requests: Vec<Request>) {
    let mut table = Table::new(STORE);
    let mut owed: [Vec<ReplyShape>; 3] = Default::default();
    for client in 0..3 {
        assert_eq!(table.handle(ClientId(client), Request::Validate(MAGIC)), Ok(()));
    }
    for (client, request) in (0..3).cycle().zip(requests) {
        let (id, shape) = (ClientId(client), request.reply_shape());
        let place = usize::try_from(client).expect("one of three");
        let cancels = request == Request::CancelWait;
        if table.handle(id, request).is_ok() {
            owed[place].extend(shape);
        } else {
            table.handle_gone(id);
            owed[place].clear();
            assert_eq!(table.handle(id, Request::Validate(MAGIC)), Ok(()));
        }
        assert!(table.size() <= STORE);
        while let Some((ClientId(to), reply)) = table.poll_reply() {
            let owed = &mut owed[usize::try_from(to).expect("one of three")];
            let place = owed.iter().position(|shape| *shape == shape_of(&reply));
            let shape = owed.swap_remove(place.expect("a reply that is owed"));
            let mut bytes = Vec::new();
            reply.encode(&mut bytes);
            let limits = StoreLimits { max_keys: u64::MAX, max_message: usize::MAX, ..STORE_LIMITS };
            let mut decoder = ReplyDecoder::new(shape, StoreLimits { max_value: STORE, ..limits });
            assert_eq!(decoder.next(&mut &bytes[..]), Ok(Some(reply)));
        }
        if cancels {
            owed[place].clear();
        }
    }
    for client in 0..3 {
        table.handle_gone(ClientId(client));
    }
    assert!(table.poll_reply().is_none());
}

fn shape_of(reply: &Reply) -> ReplyShape {
    match reply {
        Reply::Value(_) => ReplyShape::Value,
        Reply::Values(values) => ReplyShape::Values(values.len()),
        Reply::Keys(_) => ReplyShape::Keys,
        Reply::Number(_) => ReplyShape::Number,
        Reply::Flag(_) => ReplyShape::Flag,
        Reply::Nonce(_) => ReplyShape::Nonce,
        Reply::Popped(_) => ReplyShape::Popped,
    }
}
