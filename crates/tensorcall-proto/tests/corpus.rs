//! The bodies of the fuzz targets, run over the seed corpus on stable Rust.

#![expect(clippy::expect_used, reason = "a test stops where something is wrong")]

use std::fs;
use std::path::{Path, PathBuf};

use tensorcall_proto::autograd::{AutogradCall, Pass, Step};
use tensorcall_proto::connection::{Outbox, Piece, Segment};
use tensorcall_proto::group::{Departures, Parcel, WireLink};
use tensorcall_proto::ids::{ForkId, Incarnation, Life, MessageId, PassId, RRefId, Rank};
use tensorcall_proto::wire::store::{MAGIC, Request};
use tensorcall_proto::wire::{
    AutogradRef, BlockMessage, BufferDesc, Call, DType, Descriptor, Encoding, Exception, FailureKind,
    FrameHeader, FunctionRef, GoodbyeReason, Limits, Message, NewRRef, Outcome, Phase, Place, RRefDesc,
    RRefMessage, Reply, TensorDesc, Value,
};

#[expect(unreachable_pub, reason = "in the fuzz crate it is public")]
#[path = "../../../fuzz/src/bodies.rs"]
mod bodies;
#[expect(unreachable_pub, reason = "in the fuzz crate it is public")]
#[path = "../../../fuzz/src/operations.rs"]
mod operations;
#[expect(unreachable_pub, reason = "in the fuzz crate it is public")]
#[path = "../../../fuzz/src/passes.rs"]
mod passes;

type Body = fn(&[u8]);

const TARGETS: [(&str, Body); 9] = [
    ("frame", bodies::frame),
    ("message", bodies::message),
    ("value", bodies::value),
    ("handshake", bodies::handshake),
    ("connection", bodies::connection),
    ("store", bodies::store),
    ("group", bodies::group),
    ("rref", operations::rref),
    ("autograd", passes::autograd),
];

fn corpus(target: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}

/// Every file of `target`'s corpus, with its name.
fn files(target: &str) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(corpus(target)).expect("the corpus is there");
    let paths = entries.map(|entry| entry.expect("a readable corpus").path());
    paths.map(|path| (path.display().to_string(), fs::read(&path).expect("a readable seed"))).collect()
}

#[test]
fn every_seed_passes_its_target() {
    for (target, body) in TARGETS {
        let files = files(target);
        assert!(files.len() >= 3, "{target} has too few seeds");
        for (name, data) in files {
            eprintln!("{name}");
            body(&data);
        }
    }
}

#[test]
fn every_cut_and_every_changed_byte_of_a_seed_passes_its_target() {
    for (target, body) in TARGETS {
        for (name, data) in files(target).into_iter().filter(|(_, data)| data.len() <= 1024) {
            eprintln!("{name}");
            for at in 0..data.len() {
                body(&data[..at]);
                for byte in [0, 0x7f, 0xff, data[at] ^ 1] {
                    let mut changed = data.clone();
                    changed[at] = byte;
                    body(&changed);
                }
            }
        }
    }
}

#[test]
fn the_seeds_are_those_that_the_encoders_make() {
    for (target, name, data) in seeds() {
        let path = corpus(target).join(name);
        assert_eq!(fs::read(&path).ok().as_ref(), Some(&data), "{} is out of date", path.display());
    }
}

#[test]
#[ignore = "writes the corpus"]
fn write_the_seeds() {
    for (target, name, data) in seeds() {
        fs::create_dir_all(corpus(target)).expect("a place for the corpus");
        fs::write(corpus(target).join(name), data).expect("a writable corpus");
    }
}

/// Target, name and bytes of every seed: valid ones of each kind, and nasty ones.
fn seeds() -> Vec<(&'static str, String, Vec<u8>)> {
    let mut seeds = Vec::new();
    let mut add = |target, made: Vec<(&str, Vec<u8>)>| {
        seeds.extend(made.into_iter().map(|(name, data)| (target, name.to_owned(), data)));
    };
    add("frame", frames());
    add("message", descriptors().into_iter().map(|(name, descriptor)| (name, descriptor.encode())).collect());
    add("message", nasty_descriptors());
    add("message", vec![("block", in_a_block().encode())]);
    add("value", values());
    add("handshake", handshakes());
    add("connection", connections());
    add("store", store_clients());
    add("group", records());
    add("rref", lists_of_operations());
    add("autograd", backward_passes());
    seeds
}

/// What may happen to references, as `operations::rref` reads it.
fn lists_of_operations() -> Vec<(&'static str, Vec<u8>)> {
    let (create, share, release, deliver, repeat, cut, misfortune) = (0, 1, 2, 3, 5, 6, 7);
    let list = |operations: &[(u8, u8)]| {
        operations.iter().map(|(operation, about)| operation << 5 | about).collect::<Vec<u8>>()
    };
    // Worker 1 creates, and shares with worker 2 by its first handle.
    let created = [(create, 1), (deliver, 0), (deliver, 0)];
    let shared = [&created[..], &[(share, 2), (deliver, 0), (deliver, 0)]].concat();
    vec![
        ("remote", list(&created)),
        ("to-a-third", list(&shared)),
        ("released-while-pending", list(&[&created[..], &[(share, 2), (release, 0), (deliver, 0)]].concat())),
        ("fork-before-creation", list(&[(create, 1), (share, 2), (deliver, 1), (deliver, 1), (release, 1)])),
        ("back-to-the-owner", list(&[&created[..], &[(share, 0), (release, 0), (deliver, 0)]].concat())),
        ("to-oneself", list(&[&created[..], &[(share, 1), (deliver, 0), (release, 0)]].concat())),
        ("owner-shares", list(&[(create, 0), (share, 1), (share, 0), (release, 0), (deliver, 0)])),
        ("given-up", list(&[(create, 1), (misfortune, 0), (release, 0), (deliver, 1), (deliver, 0)])),
        ("said-twice", list(&[&shared[..], &[(repeat, 0), (deliver, 0), (release, 1)]].concat())),
        ("link-breaks", list(&[&created[..], &[(share, 2), (cut, 5), (release, 0), (cut, 1)]].concat())),
        ("worker-is-lost", list(&[&shared[..], &[(misfortune, 31), (release, 0)]].concat())),
    ]
}

/// What a worker may hear of backward passes, as `passes::autograd` reads it.
fn backward_passes() -> Vec<(&'static str, Vec<u8>)> {
    let (begin, told, gradient, other, work, answer, misfortune, time) = (0, 1, 2, 3, 4, 5, 6, 7);
    let list = |operations: &[(u8, u8)]| {
        operations.iter().map(|(operation, about)| operation << 5 | about).collect::<Vec<u8>>()
    };
    // The first pass of another worker: told, planned, and the gradients of its three sources.
    let arrived = [(told, 0), (work, 0), (gradient, 0), (gradient, 4), (gradient, 8)];
    let answered = [(answer, 0); 8];
    vec![
        ("whole", list(&[&arrived[..], &[(work, 0)], &answered, &[(work, 0), (told, 0)]].concat())),
        ("begun-here", list(&[&[(begin, 0), (work, 4), (work, 4)][..], &answered, &[(work, 4)]].concat())),
        ("early-and-twice", list(&[(gradient, 0), (gradient, 0), (work, 0), (gradient, 0), (other, 7)])),
        ("cycle", list(&[(told, 0), (work, 3), (gradient, 0), (other, 1), (work, 0), (other, 3), (work, 0)])),
        ("aborted-unheard", list(&[(misfortune, 28), (told, 0), (other, 0)])),
        ("fails-while-at-work", list(&[&arrived[..], &[(work, 30), (misfortune, 28), (work, 0)]].concat())),
        ("lost", list(&[(told, 3), (work, 3), (misfortune, 31), (work, 3)])),
        (
            "stalls",
            list(&[
                (told, 0),
                (work, 0),
                (time, 26),
                (other, 0),
                (time, 31),
                (time, 31),
                (time, 31),
                (time, 31),
            ]),
        ),
    ]
}

/// What clients of a store say, in turns of three.
fn store_clients() -> Vec<(&'static str, Vec<u8>)> {
    let text = |text: &str| text.as_bytes().to_vec();
    let said = |requests: &[Request]| {
        let mut bytes = vec![5];
        for request in requests {
            request.encode(&mut bytes);
        }
        bytes
    };
    let wait = |key| Request::Wait(vec![text(key), text("other")]);
    let huge = |opcode: u8| [&[1, opcode][..], &[0xff; 8]].concat();
    vec![
        (
            "every-request",
            said(&[
                Request::Set(text("k"), text("v")),
                Request::CompareSet(text("k"), text("v"), text("w")),
                Request::Get(text("k")),
                Request::Add(text("n"), 3),
                Request::Check(vec![text("k"), text("n")]),
                Request::Append(text("k"), text("!")),
                Request::MultiSet(vec![(text("a"), text("1"))]),
                Request::MultiGet(vec![text("a"), text("b")]),
                Request::NumKeys,
                Request::ListKeys,
                Request::Delete(text("a")),
                Request::QueuePush(text("q"), text("x")),
                Request::QueueLen(text("q")),
                Request::QueuePop(text("q")),
                Request::Ping(7),
            ]),
        ),
        (
            "waits",
            said(&[
                wait("k"),
                wait("k"),
                Request::Set(text("other"), text("")),
                Request::CancelWait,
                Request::QueuePush(text("k"), text("x")),
                Request::Add(text("k"), 1),
            ]),
        ),
        ("barrier", said(&vec![Request::Barrier(text("b"), 3); 4])),
        (
            "waits-twice-for-one-key",
            said(&[Request::Wait(vec![text("k"); 2]), Request::Set(text("k"), text(""))]),
        ),
        (
            "not-a-number",
            said(&[Request::Set(text("k"), text("v")), Request::Add(text("k"), 1), Request::NumKeys]),
        ),
        ("full", said(&vec![Request::Append(text("k"), vec![7; 4000]); 18])),
        ("greets-twice", said(&[Request::Validate(MAGIC), Request::Ping(1)])),
        ("huge-key", huge(3)),
        ("huge-list", huge(6)),
        ("unknown", vec![1, 200]),
        ("half-of-a-pair", [&[2, 11, 2][..], &[0; 7], &[1], &[0; 7], b"k"].concat()),
    ]
}

fn frames() -> Vec<(&'static str, Vec<u8>)> {
    let message = frame_of(&descriptors()[0].1, b"payload");
    let (header, _) = message.split_first_chunk::<24>().expect("a whole header");
    let (mut version, mut long) = (*header, *header);
    version[2] = 1;
    long[16..].fill(0xff);
    vec![
        ("message", header.to_vec()),
        ("ping", FrameHeader::ping(7).encode().to_vec()),
        ("pong", FrameHeader::pong(u32::MAX).encode().to_vec()),
        ("next-version", version.to_vec()),
        ("huge-body", long.to_vec()),
    ]
}

fn call(function: FunctionRef, encoding: Encoding) -> Message {
    Message::Call(a_call(function, encoding))
}

fn a_call(function: FunctionRef, encoding: Encoding) -> Call {
    let (id, timeout_us) = (MessageId::new(300), Some(60_000_000));
    Call { id, function, encoding, timeout_us, nested: true, plain: false, autograd: None, creates: None }
}

/// A call that a receiver without shared memory refuses.
fn in_a_block() -> Descriptor {
    Descriptor {
        buffers: vec![BufferDesc { len: 64, place: Place::Block { segment: 3, offset: 1 << 20 } }],
        tensors: vec![TensorDesc::contiguous(DType::Float32, vec![16], 0)],
        ..Descriptor::with_payload(call(FunctionRef::InPayload, Encoding::Pickle), 7)
    }
}

fn descriptors() -> Vec<(&'static str, Descriptor)> {
    let id = MessageId::new(1);
    let reply = |outcome| Message::Reply(Reply { id, outcome });
    let failed = Outcome::Failed { kind: FailureKind::Usage, text: "no such function".into() };
    let offer = BlockMessage::Offer { segment: 3, block_len: 1 << 20, blocks: 4 };
    let back = BlockMessage::Return { segment: 3, block: 1, reusable: true };
    let shared = TensorDesc {
        strides: Some(vec![4]),
        offset: 4,
        ..TensorDesc::contiguous(DType::Float32, vec![4], 0)
    };
    let tensors = Descriptor {
        message: call(FunctionRef::InPayload, Encoding::Pickle),
        payload_len: 7,
        buffers: vec![BufferDesc::body(64), BufferDesc::body(0)],
        tensors: vec![
            TensorDesc::contiguous(DType::Float32, vec![4, 4], 0),
            shared,
            TensorDesc::contiguous(DType::Bool, vec![3, 0], 1),
        ],
        rrefs: Vec::new(),
    };
    let life = |rank| Life { rank: Rank::new(rank).expect("a valid rank"), incarnation: Incarnation::new(7) };
    let (rref, fork) = (RRefId::new(life(1), 4), ForkId::new(life(1), 5));
    let creating = Call {
        creates: Some(NewRRef { rref, fork }.into()),
        ..a_call(FunctionRef::InPayload, Encoding::Pickle)
    };
    let passing = Descriptor {
        rrefs: vec![RRefDesc { rref, owner: life(0), fork }; 2],
        ..Descriptor::with_payload(call(FunctionRef::InPayload, Encoding::Pickle), 7)
    };
    let autograd = Some(AutogradRef { context: 1 << 48, message: Some((1 << 48) + 3) });
    let recorded = Call { autograd, ..a_call(FunctionRef::InPayload, Encoding::Pickle) };
    let pass =
        Pass { id: PassId::new(life(1), 9), context: 1 << 48, retain_graph: true, patience_us: Some(300) };
    let step = |step| call(FunctionRef::Autograd(AutogradCall { pass, step }.into()), Encoding::Bytes);
    vec![
        (
            "define",
            Descriptor::with_payload(
                call(FunctionRef::Define { slot: 0, name: "f".into() }, Encoding::Bytes),
                7,
            ),
        ),
        ("call", Descriptor::with_payload(call(FunctionRef::Slot(0), Encoding::Value), 7)),
        ("tensors", tensors),
        (
            "returned",
            Descriptor::with_payload(
                reply(Outcome::Returned { encoding: Encoding::Value, autograd: None }),
                7,
            ),
        ),
        ("raised", Descriptor::with_payload(reply(Outcome::Raised { encoding: Encoding::Pickle }), 7)),
        ("failed", Descriptor::plain(reply(failed))),
        ("cancel", Descriptor::plain(Message::Cancel { id })),
        ("progress", Descriptor::plain(Message::Progress { id, phase: Phase::Running })),
        ("remote", Descriptor::with_payload(Message::Call(creating), 7)),
        ("pass", passing),
        ("fetch", Descriptor::plain(call(FunctionRef::Fetch(rref), Encoding::Bytes))),
        ("recorded", Descriptor::with_payload(Message::Call(recorded), 7)),
        ("begin", Descriptor::plain(step(Step::Begin))),
        ("gradient", Descriptor::with_payload(step(Step::Gradient { message: 1 << 48 }), 7)),
        ("probe", Descriptor::plain(step(Step::Probe { origin: Rank::MAX }))),
        ("fork", Descriptor::plain(Message::RRef(RRefMessage::Fork { rref, fork }))),
        ("known", Descriptor::plain(Message::RRef(RRefMessage::Known { fork, alive: false }))),
        ("offer", Descriptor::plain(Message::Blocks(offer))),
        ("return", Descriptor::plain(Message::Blocks(back))),
        ("goodbye", Descriptor::plain(Message::Goodbye { reason: GoodbyeReason::Graceful })),
    ]
}

/// The largest number in LEB128.
const HUGE: [u8; 10] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];

fn nasty_descriptors() -> Vec<(&'static str, Vec<u8>)> {
    let goodbye = [5, 0];
    let bare_call = [0, 1, 0, 1, 0, 0, 0, 0, 0, 0];
    let wave = [4, 1, 1, 0, 2];
    let tensor = [0, 1, 1, 0, 1, 1];
    vec![
        ("huge-payload", [&bare_call[..9], &HUGE, &[0, 0, 0]].concat()),
        ("huge-buffer-count", [&bare_call[..], &HUGE, &[0, 0]].concat()),
        ("huge-tensor-count", [&bare_call[..], &[0], &HUGE, &[0]].concat()),
        ("huge-rref-count", [&bare_call[..], &[0, 0], &HUGE].concat()),
        ("huge-shape", [&bare_call[..], &tensor, &HUGE].concat()),
        ("huge-text", [&[1, 1, 2, 0], &HUGE[..]].concat()),
        ("huge-gone", [&wave[..], &HUGE].concat()),
        ("two-huge-buffers", [&bare_call[..], &[2], &HUGE, &[0], &HUGE, &[0, 0, 0]].concat()),
        ("goodbye-with-body", [&goodbye[..], &[1, 0, 0, 0]].concat()),
        ("trailing", [&goodbye[..], &[0, 0, 0, 0, 0]].concat()),
    ]
}

fn values() -> Vec<(&'static str, Vec<u8>)> {
    let tree = Value::Tuple(vec![
        Value::Tuple(vec![
            Value::Int(i64::MIN),
            Value::Float(f64::NAN),
            Value::Nil,
            Value::Tensor(0),
            Value::RRef(0),
        ]),
        Value::Exception(Box::new(Exception {
            classes: "a:E".into(),
            message: "no".into(),
            origin: "here".into(),
        })),
        Value::Map(vec![
            (Value::Str("schlüssel".into()), Value::Bool(true)),
            (Value::Int(2), Value::List(vec![Value::Bytes(vec![0; 9]), Value::Pickle(vec![0x80, 5])])),
        ]),
    ]);
    let deep = (0..64).fold(Value::Nil, |inner, _| Value::List(vec![inner]));
    let encode = |value: &Value| value.encode(&Limits::default()).expect("a value within the limits");
    vec![
        ("tree", encode(&tree)),
        ("deep", encode(&deep)),
        ("too-deep", [[7, 1].repeat(200), vec![0]].concat()),
        ("huge-list", [&[7], &HUGE[..]].concat()),
        ("huge-map", [&[9], &HUGE[..]].concat()),
        ("huge-text", [&[5], &HUGE[..]].concat()),
        ("lists-that-promise-the-rest", [[7, 100].repeat(50), vec![0; 101]].concat()),
        ("long-number", vec![3, 0x80, 0x80, 0]),
        ("not-utf8", vec![5, 2, 0xc3, 0x28]),
        ("cut-exception", vec![12, 1, 0x61, 1, 0x62]),
    ]
}

/// What each end says in a handshake that succeeds, as the other end's input.
fn handshakes() -> Vec<(&'static str, Vec<u8>)> {
    let (mut initiator, mut responder) = (bodies::new_initiator(), bodies::new_responder());
    let (mut to_responder, mut to_initiator) = (vec![5], vec![5]);
    for _ in 0..2 {
        while let Some(bytes) = initiator.poll_send() {
            to_responder.extend_from_slice(&bytes);
            responder.feed(&bytes).expect("a good handshake");
        }
        while let Some(bytes) = responder.poll_send() {
            to_initiator.extend_from_slice(&bytes);
            initiator.feed(&bytes).expect("a good handshake");
        }
    }
    assert!(initiator.done().is_some() && responder.done().is_some());
    let reflected = [&[9], &to_responder[1..]].concat();
    let leftover = [&to_responder[..], b"TC the first frame"].concat();
    vec![
        ("from-initiator", to_responder),
        ("from-responder", to_initiator),
        ("twice", [&reflected[..], &reflected[1..]].concat()),
        ("with-the-first-frame", leftover),
    ]
}

#[derive(Clone)]
struct Bytes(Vec<u8>);

impl Segment for Bytes {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }
}

/// The bytes that `outbox` writes.
fn written(outbox: &mut Outbox<Bytes>) -> Vec<u8> {
    let mut all = Vec::new();
    while !outbox.is_empty() {
        let before = all.len();
        for piece in outbox.pieces() {
            match piece {
                Piece::Bytes(bytes) => all.extend_from_slice(bytes),
                Piece::Part { segment: Bytes(bytes), offset, len } => {
                    let start = usize::try_from(offset).expect("a small offset");
                    all.extend_from_slice(&bytes[start..][..usize::try_from(len).expect("a small length")]);
                }
            }
        }
        outbox.advance((all.len() - before) as u64, |_| {});
    }
    all
}

fn frame_of(descriptor: &Descriptor, payload: &[u8]) -> Vec<u8> {
    let mut outbox = Outbox::<Bytes>::new();
    outbox.push(descriptor.clone(), payload, Vec::new(), None);
    written(&mut outbox)
}

/// A message of `body` in two frames, with `between` between them.
fn in_two_frames(between: &[u8]) -> Vec<u8> {
    let descriptor = Descriptor::with_payload(call(FunctionRef::InPayload, Encoding::Bytes), 4);
    let whole = frame_of(&descriptor, b"body");
    let (head, body) = whole.split_at(whole.len() - 4);
    let mut head = head.to_vec();
    head[4] = 0;
    head[16] = 2;
    let mut tail = whole[..24].to_vec();
    tail[3] = 2;
    tail[12] = 0;
    tail[16] = 2;
    [&head, &body[..2], between, &tail, &body[2..]].concat()
}

/// The records of envelopes between ranks.
fn records() -> Vec<(&'static str, Vec<u8>)> {
    let link = |number| WireLink { opened_here: true, number };
    let parcel = |narrow: usize, wide: &[usize]| {
        let buffers = wide.iter().map(|&len| BufferDesc::body(len as u64)).collect();
        let message = descriptors().into_iter().find(|(name, _)| *name == "call").expect("a call").1.message;
        let descriptor = Descriptor { buffers, ..Descriptor::with_payload(message, narrow as u64) };
        let mut bytes = descriptor.encode();
        let control_len = u32::try_from(bytes.len()).expect("a short descriptor");
        bytes.resize(bytes.len() + narrow, 0x55);
        let wide = wide.iter().map(|&len| Bytes(vec![0x66; len])).collect();
        let priority = descriptor.priority();
        Parcel { link: link(0), id: None, priority, after: None, narrow: bytes, control_len, wide }
    };
    let said = |say: &dyn Fn(&mut Departures<Bytes>)| {
        let mut departures = Departures::new(0, 1, 4);
        say(&mut departures);
        departures.poll_envelope().expect("something was said").bytes.split_off(32)
    };
    vec![
        ("handshake", said(&|out| out.handshake(link(7), vec![1, 2, 3]))),
        ("small", said(&|out| (0..3).for_each(|_| out.push(parcel(5, &[]))))),
        ("pieces", said(&|out| out.push(parcel(5, &[40_000, 50_000])))),
        (
            "closing",
            said(&|out| {
                out.push(parcel(1, &[]));
                out.close(link(0), "done");
                out.bye();
            }),
        ),
        ("abandoned", said(&|out| drop(out.abandon(link(0), "no")))),
        ("reset", said(&Departures::reset)),
    ]
}

fn connections() -> Vec<(&'static str, Vec<u8>)> {
    let mut conversation = vec![11];
    let mut outbox = Outbox::new();
    for (_, descriptor) in descriptors() {
        let payload: &[u8] = if descriptor.payload_len > 0 { b"payload" } else { b"" };
        let body = descriptor
            .buffers
            .iter()
            .map(|buffer| Bytes(vec![0x55; usize::try_from(buffer.len).expect("a small buffer")]))
            .collect();
        outbox.push(descriptor, payload, body, None);
    }
    outbox.push_signal(FrameHeader::ping(1));
    conversation.extend(written(&mut outbox));

    let ping = FrameHeader::ping(2).encode();
    let cut = in_two_frames(&ping);
    let again = in_two_frames(&in_two_frames(&ping));
    vec![
        ("conversation", conversation),
        ("two-frames", [&[3], &cut[..]].concat()),
        ("stream-twice", [&[200], &again[..]].concat()),
        ("data-first", [&[1], &cut[cut.len() - 26..]].concat()),
        ("pings", [&[7], &ping[..], &FrameHeader::pong(2).encode()].concat()),
    ]
}
