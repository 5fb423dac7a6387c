//! The bytes of the wire format, for ever.
//!
//! Each sample is here as Rust and as hex, and in `docs/wire-format.md` as commented hex: all three
//! must agree. Whoever changes the bytes of an existing sample makes a new version of the format.

#![expect(clippy::expect_used, clippy::unwrap_used, reason = "a test stops where something is wrong")]

use tensorcall_proto::autograd::{AutogradCall, Pass, Step};
use tensorcall_proto::connection::Segment;
use tensorcall_proto::group::{Departures, Parcel, WireLink};
use tensorcall_proto::ids::{ForkId, Incarnation, Life, MessageId, PassId, RRefId, Rank};
use tensorcall_proto::termination::{Counts, TerminationMessage};
use tensorcall_proto::wire::{
    AutogradRef, BlockMessage, BufferDesc, Call, DType, Descriptor, Encoding, Exception, FailureKind,
    FrameHeader, FrameKind, FunctionRef, GoodbyeReason, HEADER_LEN, Limits, Message, NewRRef, Outcome, Phase,
    Place, Priority, RRefDesc, RRefMessage, Reply, TensorDesc, Value,
};

const DOCUMENT: &str = include_str!("../../../docs/wire-format.md");

/// The hex of the document's block `name`, without its comments.
fn documented(name: &str) -> String {
    let fence = format!("```hex {name}\n");
    let start = DOCUMENT.find(&fence).unwrap_or_else(|| panic!("no block {name} in the document"));
    let block = &DOCUMENT[start + fence.len()..];
    let block = &block[..block.find("```").expect("the block has an end")];
    let bytes = block.lines().flat_map(|line| line.split(';').next().unwrap_or_default().split_whitespace());
    bytes.collect::<Vec<_>>().join(" ")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
}

/// Checks that `bytes` are `expected`, here and in the document.
fn check(name: &str, bytes: &[u8], expected: &str) {
    let expected = expected.split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(hex(bytes), expected, "sample {name}");
    assert_eq!(documented(name), expected, "block {name} of the document");
}

/// Checks a descriptor alone, both ways.
fn check_descriptor(name: &str, descriptor: &Descriptor, expected: &str) {
    let bytes = descriptor.encode();
    check(name, &bytes, expected);
    assert_eq!(Descriptor::decode(&bytes, &Limits::default()).as_ref(), Ok(descriptor), "{name}");
}

fn check_message(name: &str, message: Message, expected: &str) {
    check_descriptor(name, &Descriptor::plain(message), expected);
}

/// The call of the first example in the document: its frame's header, descriptor and payload.
fn small_call() -> (FrameHeader, Descriptor, Vec<u8>) {
    let arguments = Value::Tuple(vec![
        Value::Tuple(vec![Value::Int(3), Value::Float(0.5)]),
        Value::Map(vec![(Value::Str("out".into()), Value::Nil)]),
    ]);
    let payload = arguments.encode(&Limits::default()).unwrap();
    let message = Message::Call(Call {
        id: MessageId::new(1),
        function: FunctionRef::Define { slot: 0, name: "f".into() },
        encoding: Encoding::Value,
        timeout_us: Some(60_000_000),
        nested: false,
        plain: false,
        autograd: None,
        creates: None,
    });
    let descriptor = Descriptor::with_payload(message, payload.len() as u64);
    let header = FrameHeader {
        kind: FrameKind::Message,
        end: true,
        priority: descriptor.priority(),
        stream: 1,
        control_len: u32::try_from(descriptor.encode().len()).unwrap(),
        body_len: descriptor.body_len().unwrap(),
    };
    (header, descriptor, payload)
}

/// LOG row 103.
#[test]
fn frame_of_a_small_call() {
    let (header, descriptor, payload) = small_call();

    let frame = [&header.encode()[..], &descriptor.encode(), &payload].concat();

    check(
        "call",
        &frame,
        "54 43 00 01 01 01 00 00 01 00 00 00 14 00 00 00 17 00 00 00 00 00 00 00 \
         00 01 02 00 01 66 00 01 80 8e ce 1c 00 00 00 00 17 00 00 00 \
         08 02 08 02 03 06 04 00 00 00 00 00 00 e0 3f 09 01 05 03 6f 75 74 00",
    );
    let decoded = FrameHeader::decode(frame.first_chunk::<HEADER_LEN>().unwrap(), &Limits::default());
    assert_eq!(decoded, Ok(header));
}

#[test]
fn header_of_a_data_frame() {
    let header = FrameHeader {
        kind: FrameKind::Data,
        end: false,
        priority: Priority::Bulk,
        stream: 2,
        control_len: 0,
        body_len: 1 << 20,
    };

    check(
        "data",
        &header.encode(),
        "54 43 00 02 00 02 00 00 02 00 00 00 00 00 00 00 00 00 10 00 00 00 00 00",
    );
}

#[test]
fn headers_of_ping_and_pong() {
    check(
        "ping",
        &FrameHeader::ping(7).encode(),
        "54 43 00 03 00 00 00 00 07 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
    );
    check(
        "pong",
        &FrameHeader::pong(7).encode(),
        "54 43 00 04 00 00 00 00 07 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
    );
}

#[test]
fn call_with_two_tensors_in_one_buffer() {
    let descriptor = Descriptor {
        message: Message::Call(Call {
            id: MessageId::new(300),
            function: FunctionRef::InPayload,
            encoding: Encoding::Pickle,
            timeout_us: None,
            nested: true,
            plain: false,
            autograd: None,
            creates: None,
        }),
        payload_len: 150,
        buffers: vec![BufferDesc::body(64)],
        tensors: vec![
            TensorDesc { requires_grad: true, ..TensorDesc::contiguous(DType::Float32, vec![4, 4], 0) },
            TensorDesc {
                strides: Some(vec![4]),
                offset: 4,
                ..TensorDesc::contiguous(DType::Float32, vec![4], 0)
            },
        ],
        rrefs: Vec::new(),
    };

    check_descriptor(
        "tensors",
        &descriptor,
        "00 ac 02 00 01 00 01 00 00 00 96 01 01 40 00 02 \
         01 02 04 04 00 00 00 00 00 01 00 00 \
         01 01 04 01 01 04 00 04 00 00 00 00 00 00",
    );
}

/// Ranks 0 and 1, in lives 7 and 300; rank 1 created the reference on rank 0, as its 4th and 5th id.
fn reference() -> (Life, Life, NewRRef) {
    let life = |rank, incarnation| Life {
        rank: Rank::new(rank).unwrap(),
        incarnation: Incarnation::new(incarnation),
    };
    let (owner, creator) = (life(0, 7), life(1, 300));
    (owner, creator, NewRRef { rref: RRefId::new(creator, 4), fork: ForkId::new(creator, 5) })
}

#[test]
fn calls_that_create_pass_and_fetch_a_reference() {
    let (owner, creator, new) = reference();
    let call = |function, encoding, creates| {
        let (id, timeout_us) = (MessageId::new(1), None);
        Message::Call(Call {
            id,
            function,
            encoding,
            timeout_us,
            nested: false,
            plain: false,
            autograd: None,
            creates,
        })
    };

    let creates = call(FunctionRef::InPayload, Encoding::Pickle, Some(new.into()));
    check_descriptor(
        "remote",
        &Descriptor::with_payload(creates, 99),
        "00 01 00 01 00 00 00 00 01 01 ac 02 04 01 ac 02 05 63 00 00 00",
    );
    let shared = RRefDesc { rref: new.rref, owner, fork: ForkId::new(creator, 6) };
    let passes = call(FunctionRef::InPayload, Encoding::Pickle, None);
    check_descriptor(
        "pass",
        &Descriptor { rrefs: vec![shared], ..Descriptor::with_payload(passes, 99) },
        "00 01 00 01 00 00 00 00 00 63 00 00 01 01 ac 02 04 00 07 01 ac 02 06",
    );
    let fetches = call(FunctionRef::Fetch(new.rref), Encoding::Bytes, None);
    check_message("fetch", fetches, "00 01 04 01 ac 02 04 02 00 00 00 00 00 00 00 00 00");
}

#[test]
fn messages_about_references() {
    let NewRRef { rref, fork } = reference().2;

    let check = |name, message, expected| check_message(name, Message::RRef(message), expected);

    check("fork", RRefMessage::Fork { rref, fork }, "06 00 01 ac 02 04 01 ac 02 05 00 00 00 00");
    check("known", RRefMessage::Known { fork, alive: true }, "06 01 01 ac 02 05 01 00 00 00 00");
    check("accept", RRefMessage::Accept { fork }, "06 02 01 ac 02 05 00 00 00 00");
    check("accepted", RRefMessage::Accepted { fork }, "06 03 01 ac 02 05 00 00 00 00");
    check("delete", RRefMessage::Delete { fork }, "06 04 01 ac 02 05 00 00 00 00");
    check("deleted", RRefMessage::Deleted { fork }, "06 05 01 ac 02 05 00 00 00 00");
    check("rescind", RRefMessage::Rescind { fork }, "06 06 01 ac 02 05 00 00 00 00");
    check("unknown", RRefMessage::Unknown { fork }, "06 07 01 ac 02 05 00 00 00 00");
    check("ask-again", RRefMessage::AskAgain, "06 08 00 00 00 00");
}

#[test]
fn messages_about_shared_memory() {
    let check = |name, message, expected| check_message(name, Message::Blocks(message), expected);
    let segment = 3;

    let offer = BlockMessage::Offer { segment, block_len: 1 << 20, blocks: 4 };
    check("offer", offer, "07 00 03 80 80 40 04 00 00 00 00");
    let answer = BlockMessage::Answer { segment, accepted: true };
    check("answer", answer, "07 01 03 01 00 00 00 00");
    let back = BlockMessage::Return { segment, block: 1, reusable: true };
    check("return", back, "07 02 03 01 01 00 00 00 00");
    check("withdraw", BlockMessage::Withdraw { segment }, "07 03 03 00 00 00 00");
}

#[test]
fn a_call_whose_tensor_is_in_a_block() {
    let place = Place::Block { segment: 3, offset: 1 << 20 };
    let descriptor = Descriptor {
        buffers: vec![BufferDesc { len: 1 << 20, place }],
        tensors: vec![TensorDesc::contiguous(DType::Float32, vec![1 << 18], 0)],
        ..Descriptor::with_payload(
            Message::Call(Call {
                id: MessageId::new(1),
                function: FunctionRef::Name("f".into()),
                encoding: Encoding::Value,
                timeout_us: None,
                nested: false,
                plain: false,
                autograd: None,
                creates: None,
            }),
            8,
        )
    };
    let bytes = descriptor.encode();

    check(
        "block",
        &bytes,
        "00 01 01 01 66 00 00 00 00 00 00 08 01 80 80 40 01 03 80 80 40 \
         01 01 01 80 80 10 00 00 00 00 00 00 00 00 00",
    );
    let limits = Limits { blocks: true, ..Limits::default() };
    assert_eq!(Descriptor::decode(&bytes, &limits), Ok(descriptor));
}

#[test]
fn calls_and_replies_in_an_autograd_context() {
    let (id, context) = (MessageId::new(1), 1 << 48);
    let call = Message::Call(Call {
        id,
        function: FunctionRef::InPayload,
        encoding: Encoding::Pickle,
        timeout_us: None,
        nested: false,
        plain: false,
        autograd: Some(AutogradRef { context, message: Some(context + 3) }),
        creates: None,
    });
    let autograd = Some(AutogradRef { context, message: None });
    let returned = Outcome::Returned { encoding: Encoding::Pickle, autograd };

    check_descriptor(
        "recorded",
        &Descriptor::with_payload(call, 99),
        "00 01 00 01 00 00 00 01 80 80 80 80 80 80 40 01 83 80 80 80 80 80 40 00 63 00 00 00",
    );
    check_descriptor(
        "returned-in-context",
        &Descriptor::with_payload(Message::Reply(Reply { id, outcome: returned }), 2),
        "01 01 00 01 01 80 80 80 80 80 80 40 00 02 00 00 00",
    );
}

#[test]
fn steps_of_a_backward_pass() {
    let call = |step| {
        let id = PassId::new(reference().1, 9);
        let pass = Pass { id, context: 5, retain_graph: true, patience_us: Some(300) };
        Message::Call(Call {
            id: MessageId::new(1),
            function: FunctionRef::Autograd(AutogradCall { pass, step }.into()),
            encoding: Encoding::Bytes,
            timeout_us: None,
            nested: false,
            plain: false,
            autograd: None,
            creates: None,
        })
    };
    let origin = Rank::new(2).unwrap();
    let check = |name, step, expected: &str| {
        let pass = "00 01 05 01 ac 02 09 05 01 01 ac 02";
        check_message(name, call(step), &format!("{pass} {expected} 02 00 00 00 00 00 00 00 00 00"));
    };

    check("begin", Step::Begin, "00");
    check("gradient", Step::Gradient { message: 6 }, "01 06");
    check("no-gradient", Step::NoGradient { message: 6 }, "02 06");
    check("ask", Step::Ask { message: 6 }, "03 06");
    check("probe", Step::Probe { origin }, "04 02");
    check("abort", Step::Abort, "05");
}

#[test]
fn replies_of_each_outcome() {
    let reply = |outcome| Message::Reply(Reply { id: MessageId::new(1), outcome });

    let returned = reply(Outcome::Returned { encoding: Encoding::Value, autograd: None });
    check_descriptor("returned", &Descriptor::with_payload(returned, 2), "01 01 00 00 00 02 00 00 00");
    let raised = reply(Outcome::Raised { encoding: Encoding::Pickle });
    check_descriptor("raised", &Descriptor::with_payload(raised, 99), "01 01 01 01 63 00 00 00");
    let failed = reply(Outcome::Failed { kind: FailureKind::Expired, text: "late".into() });
    check_message("failed", failed, "01 01 02 03 04 6c 61 74 65 00 00 00 00");
}

#[test]
fn messages_without_a_body() {
    let id = MessageId::new(1);

    check_message("cancel", Message::Cancel { id }, "02 01 00 00 00 00");
    check_message("progress", Message::Progress { id, phase: Phase::Running }, "03 01 03 00 00 00 00");
    check_message("goodbye", Message::Goodbye { reason: GoodbyeReason::Graceful }, "05 00 00 00 00 00");
}

#[test]
fn termination_messages() {
    let counts = Counts { outstanding: 0, processing: 1, activity: 20 };
    let gone = [Rank::new(3).unwrap()].into();
    let (round, epoch, wave) = (1, 0, 2);

    let arrive = TerminationMessage::Arrive { round, epoch, quiet: 0 };
    check_message("arrive", Message::Termination(arrive), "04 00 01 00 00 00 00 00 00");
    let ask = TerminationMessage::Wave { round, epoch, wave, gone };
    check_message("wave", Message::Termination(ask), "04 01 01 00 02 01 03 00 00 00 00");
    let report = TerminationMessage::Report { round, epoch, wave, counts };
    check_message("report", Message::Termination(report), "04 02 01 00 02 00 01 14 00 00 00 00");
    let quiet = TerminationMessage::Quiet { round, epoch };
    check_message("quiet", Message::Termination(quiet), "04 03 01 00 00 00 00 00");
}

#[test]
fn one_value_of_each_kind() {
    let value = Value::List(vec![
        Value::Nil,
        Value::Bool(false),
        Value::Bool(true),
        Value::Int(-1),
        Value::Int(300),
        Value::Float(1.5),
        Value::Str("hé".into()),
        Value::Bytes(vec![0, 255]),
        Value::List(vec![]),
        Value::Tuple(vec![Value::Nil]),
        Value::Map(vec![(Value::Int(0), Value::Bool(true))]),
        Value::Tensor(1),
        Value::RRef(0),
        Value::Exception(Box::new(Exception {
            classes: "a:E".into(),
            message: "no".into(),
            origin: "w".into(),
        })),
        Value::Pickle(vec![0x80, 4]),
    ]);

    let bytes = value.encode(&Limits::default()).unwrap();

    check(
        "values",
        &bytes,
        "07 0f 00 01 02 03 01 03 d8 04 04 00 00 00 00 00 00 f8 3f 05 03 68 c3 a9 \
         06 02 00 ff 07 00 08 01 00 09 01 03 00 02 0a 01 0b 00 0c 03 61 3a 45 02 6e 6f 01 77 0d 02 80 04",
    );
    assert_eq!(Value::decode(&bytes, &Limits::default()), Ok(value));
}

#[test]
fn every_dtype_has_its_row() {
    for dtype in DType::ALL {
        let entry = format!("{} `{}` {}", dtype.code(), dtype.name(), dtype.size());
        assert!(DOCUMENT.contains(&entry), "the document lacks {entry}");
    }
}

#[test]
fn every_sample_of_the_document_is_checked_here() {
    let source = include_str!("golden.rs");

    for block in DOCUMENT.split("```hex ").skip(1) {
        let name = block.lines().next().expect("a name");
        assert!(source.contains(&format!("\"{name}\",")), "no test checks the block {name}");
    }
}

#[test]
fn an_envelope_between_ranks() {
    let link = WireLink { opened_here: true, number: 9 };
    let call = Call {
        id: MessageId::new(1),
        function: FunctionRef::InPayload,
        encoding: Encoding::Bytes,
        timeout_us: None,
        nested: false,
        autograd: None,
        creates: None,
        plain: false,
    };
    let narrow = Descriptor::with_payload(Message::Call(call), 40_000).encode();
    let control_len = u32::try_from(narrow.len()).unwrap();
    let mut out: Departures<Nothing> = Departures::new(2, 3, 1);
    out.handshake(WireLink { number: 10, ..link }, b"hello".to_vec());
    out.push(Parcel {
        link,
        id: None,
        priority: Priority::Normal,
        after: None,
        narrow,
        control_len,
        wide: vec![Nothing],
    });

    let bytes = out.poll_envelope().unwrap().bytes;

    check(
        "envelope",
        &bytes,
        "54 43 50 47 00 00 00 00 76 00 00 00 02 00 00 00 03 00 00 00 00 00 00 00 8a da 69 04 b4 6c \
         8b 50 01 01 0a 00 00 00 00 00 00 00 05 00 00 00 68 65 6c 6c 6f 02 01 09 00 00 00 00 00 00 \
         00 01 00 00 00 01 0f 00 00 00 0f 00 00 00 00 00 00 00 0f 00 00 00 00 01 00 02 00 00 00 00 \
         00 c0 b8 02 00 00 00 04 01 00 00 00 00 00 00 00 00 00 00 00 40 9c 00 00 00 00 00 00",
    );
}

/// A part of a message that lies nowhere.
#[derive(Clone)]
struct Nothing;

impl Segment for Nothing {
    fn size(&self) -> u64 {
        40_000
    }
}
