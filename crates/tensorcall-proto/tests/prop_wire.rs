//! Properties of the wire format: what is written reads back the same, and nothing else gets
//! through, whatever the bytes.

#![expect(clippy::unwrap_used, reason = "a test stops where something is wrong")]

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{Index, select};

use tensorcall_proto::autograd::{AutogradCall, Pass, Step};
use tensorcall_proto::ids::{ForkId, Incarnation, Life, MessageId, PassId, RRefId, Rank};
use tensorcall_proto::termination::{Counts, TerminationMessage};
use tensorcall_proto::wire::function::MAX_SLOTS;
use tensorcall_proto::wire::{
    AutogradRef, BlockMessage, BufferDesc, Call, DType, Descriptor, Device, DeviceKind, Encoding, Event,
    Exception, FailureKind, FrameHeader, FrameKind, FunctionRef, GoodbyeReason, HEADER_LEN, Limits, Message,
    NewRRef, Outcome, Phase, Place, Priority, RRefDesc, RRefMessage, Reply, TensorDesc, Value, ValueReader,
};

/// Accepts everything that the strategies below make.
fn limits() -> Limits {
    Limits { blocks: true, ..Limits::default() }
}

fn any_header() -> impl Strategy<Value = FrameHeader> {
    let kind = select(vec![FrameKind::Message, FrameKind::Data, FrameKind::Ping, FrameKind::Pong]);
    let lengths = (1..=limits().max_control, 1..=limits().max_message);
    (kind, any::<bool>(), select(Priority::ALL.to_vec()), any::<u32>(), lengths).prop_map(
        |(kind, end, priority, stream, (control_len, body_len))| match kind {
            FrameKind::Message => FrameHeader { kind, end, priority, stream, control_len, body_len },
            FrameKind::Data => FrameHeader { kind, end, priority, stream, control_len: 0, body_len },
            _ => FrameHeader { kind, priority, ..FrameHeader::ping(stream) },
        },
    )
}

fn any_id() -> impl Strategy<Value = MessageId> {
    any::<u64>().prop_map(MessageId::new)
}

fn any_life() -> impl Strategy<Value = Life> {
    let rank = (0..=32_767u32).prop_filter_map("a rank", Rank::new);
    (rank, any::<u64>()).prop_map(|(rank, life)| Life { rank, incarnation: Incarnation::new(life) })
}

fn any_rref() -> impl Strategy<Value = RRefId> {
    (any_life(), any::<u64>()).prop_map(|(life, local)| RRefId::new(life, local))
}

fn any_fork() -> impl Strategy<Value = ForkId> {
    (any_life(), any::<u64>()).prop_map(|(life, local)| ForkId::new(life, local))
}

fn any_function() -> impl Strategy<Value = FunctionRef> {
    let slot = 0..MAX_SLOTS;
    prop_oneof![
        Just(FunctionRef::InPayload),
        ".{0,40}".prop_map(|name| FunctionRef::Name(name.into())),
        (slot.clone(), ".{0,40}").prop_map(|(slot, name)| FunctionRef::Define { slot, name: name.into() }),
        slot.prop_map(FunctionRef::Slot),
        any_rref().prop_map(FunctionRef::Fetch),
        any_step().prop_map(|step| FunctionRef::Autograd(step.into())),
    ]
}

fn any_encoding() -> impl Strategy<Value = Encoding> {
    select(vec![Encoding::Value, Encoding::Pickle, Encoding::Bytes])
}

fn any_autograd() -> impl Strategy<Value = Option<AutogradRef>> {
    let place = any::<(u64, Option<u64>)>();
    option::of(place.prop_map(|(context, message)| AutogradRef { context, message }))
}

fn any_step() -> impl Strategy<Value = AutogradCall> {
    let message = any::<u64>();
    let step = prop_oneof![
        Just(Step::Begin),
        message.prop_map(|message| Step::Gradient { message }),
        message.prop_map(|message| Step::NoGradient { message }),
        message.prop_map(|message| Step::Ask { message }),
        any_life().prop_map(|life| Step::Probe { origin: life.rank }),
        Just(Step::Abort),
    ];
    let pass = (any_life(), any::<(u64, u64, bool, Option<u64>)>()).prop_map(
        |(life, (local, context, retain_graph, patience_us))| {
            let id = PassId::new(life, local);
            Pass { id, context, retain_graph, patience_us }
        },
    );
    (pass, step).prop_map(|(pass, step)| AutogradCall { pass, step })
}

fn any_call() -> impl Strategy<Value = Message> {
    let creates = (any_rref(), any_fork()).prop_map(|(rref, fork)| NewRRef { rref, fork }.into());
    let options = (any::<Option<u64>>(), any::<[bool; 2]>(), any_autograd(), option::of(creates));
    (any_id(), any_function(), any_encoding(), options).prop_map(
        |(id, function, encoding, (timeout_us, [nested, plain], autograd, creates))| {
            Message::Call(Call { id, function, encoding, timeout_us, nested, plain, autograd, creates })
        },
    )
}

fn any_rref_message() -> impl Strategy<Value = RRefMessage> {
    prop_oneof![
        (any_rref(), any_fork()).prop_map(|(rref, fork)| RRefMessage::Fork { rref, fork }),
        (any_fork(), any::<bool>()).prop_map(|(fork, alive)| RRefMessage::Known { fork, alive }),
        any_fork().prop_map(|fork| RRefMessage::Accept { fork }),
        Just(RRefMessage::AskAgain),
        any_fork().prop_map(|fork| RRefMessage::Accepted { fork }),
        any_fork().prop_map(|fork| RRefMessage::Delete { fork }),
        any_fork().prop_map(|fork| RRefMessage::Deleted { fork }),
        any_fork().prop_map(|fork| RRefMessage::Rescind { fork }),
        any_fork().prop_map(|fork| RRefMessage::Unknown { fork }),
    ]
}

fn any_outcome() -> impl Strategy<Value = Outcome> {
    let kind = select(vec![
        FailureKind::Usage,
        FailureKind::PoolExhausted,
        FailureKind::ShuttingDown,
        FailureKind::Expired,
        FailureKind::Cancelled,
        FailureKind::Protocol,
        FailureKind::Internal,
    ]);
    prop_oneof![
        (any_encoding(), any_autograd())
            .prop_map(|(encoding, autograd)| Outcome::Returned { encoding, autograd }),
        any_encoding().prop_map(|encoding| Outcome::Raised { encoding }),
        (kind, ".{0,80}").prop_map(|(kind, text)| Outcome::Failed { kind, text }),
    ]
}

fn any_termination() -> impl Strategy<Value = TerminationMessage> {
    let counts = any::<[u64; 3]>().prop_map(|[outstanding, processing, activity]| Counts {
        outstanding,
        processing,
        activity,
    });
    let gone = vec((0..=32_767u32).prop_filter_map("a rank", Rank::new), 0..4);
    prop_oneof![
        any::<[u64; 3]>().prop_map(|[round, epoch, quiet]| TerminationMessage::Arrive {
            round,
            epoch,
            quiet
        }),
        (any::<[u64; 3]>(), gone).prop_map(|([round, epoch, wave], gone)| TerminationMessage::Wave {
            round,
            epoch,
            wave,
            gone: gone.into(),
        }),
        (any::<[u64; 3]>(), counts).prop_map(|([round, epoch, wave], counts)| TerminationMessage::Report {
            round,
            epoch,
            wave,
            counts
        }),
        any::<[u64; 2]>().prop_map(|[round, epoch]| TerminationMessage::Quiet { round, epoch }),
    ]
}

fn any_block_message() -> impl Strategy<Value = BlockMessage> {
    prop_oneof![
        any::<(u64, u64, u32)>().prop_map(|(segment, block_len, blocks)| BlockMessage::Offer {
            segment,
            block_len,
            blocks
        }),
        any::<(u64, bool)>().prop_map(|(segment, accepted)| BlockMessage::Answer { segment, accepted }),
        any::<(u64, u32, bool)>().prop_map(|(segment, block, reusable)| BlockMessage::Return {
            segment,
            block,
            reusable
        }),
        any::<u64>().prop_map(|segment| BlockMessage::Withdraw { segment }),
    ]
}

fn any_message() -> impl Strategy<Value = Message> {
    let phase = select(vec![Phase::Queued, Phase::Sent, Phase::Waiting, Phase::Running, Phase::Replying]);
    let reason = select(vec![GoodbyeReason::Graceful, GoodbyeReason::Forced]);
    prop_oneof![
        3 => any_call(),
        3 => (any_id(), any_outcome()).prop_map(|(id, outcome)| Message::Reply(Reply { id, outcome })),
        1 => any_id().prop_map(|id| Message::Cancel { id }),
        1 => (any_id(), phase).prop_map(|(id, phase)| Message::Progress { id, phase }),
        1 => any_termination().prop_map(Message::Termination),
        1 => reason.prop_map(|reason| Message::Goodbye { reason }),
        1 => any_rref_message().prop_map(Message::RRef),
        1 => any_block_message().prop_map(Message::Blocks),
    ]
}

/// A tensor that lies in a buffer of its own, and that buffer.
fn any_tensor() -> impl Strategy<Value = (TensorDesc, BufferDesc)> {
    let kind =
        prop_oneof![Just(DeviceKind::Cpu), Just(DeviceKind::Cuda), any::<u8>().prop_map(DeviceKind::Other)];
    let device = (kind, any::<u16>()).prop_map(|(kind, index)| Device { kind, index });
    let dims = vec((0..20u64, option::of(0..50u64)), 0..5);
    let place = prop_oneof![
        Just(Place::Body),
        (any::<u64>(), 0..1u64 << 40).prop_map(|(segment, offset)| Place::Block { segment, offset })
    ];
    let parts = (select(DType::ALL.to_vec()), dims, 0..10u64, device, any::<[bool; 3]>());
    (parts, place, 0..100u64).prop_map(|((dtype, dims, skip, device, flags), place, spare)| {
        let strides = dims.iter().map(|&(_, stride)| stride).collect();
        let [requires_grad, conj, neg] = flags;
        let tensor = TensorDesc {
            strides,
            offset: skip * dtype.size(),
            device,
            requires_grad,
            conj,
            neg,
            ..TensorDesc::contiguous(dtype, dims.iter().map(|&(size, _)| size).collect(), 0)
        };
        let len = tensor.offset + tensor.extent().unwrap() + spare;
        (tensor, BufferDesc { len, place })
    })
}

fn any_descriptor() -> impl Strategy<Value = Descriptor> {
    let rref = (any_rref(), any_life(), any_fork());
    let rrefs = vec(rref.prop_map(|(rref, owner, fork)| RRefDesc { rref, owner, fork }), 0..4);
    let parts = (any_message(), 0..1u64 << 20, vec(any_tensor(), 0..5), rrefs);
    parts.prop_map(|(message, payload_len, tensors, rrefs)| {
        if !message.may_have_body() {
            return Descriptor::plain(message);
        }
        let mut descriptor = Descriptor { rrefs, ..Descriptor::with_payload(message, payload_len) };
        for (buffer, (tensor, place)) in (0..).zip(tensors) {
            descriptor.tensors.push(TensorDesc { buffer, ..tensor });
            descriptor.buffers.push(place);
        }
        descriptor
    })
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Nil),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        (-100..100i64).prop_map(Value::Int),
        // Any bits but those of a NaN, which is not equal to itself.
        any::<f64>().prop_filter("a number", |value| !value.is_nan()).prop_map(Value::Float),
        ".{0,20}".prop_map(Value::Str),
        vec(any::<u8>(), 0..200).prop_map(Value::Bytes),
        any::<u32>().prop_map(Value::Tensor),
        any::<u32>().prop_map(Value::RRef),
        [".{0,20}", ".{0,20}", ".{0,20}"].prop_map(|[classes, message, origin]| {
            Value::Exception(Box::new(Exception { classes, message, origin }))
        }),
        vec(any::<u8>(), 0..20).prop_map(Value::Pickle),
    ];
    leaf.prop_recursive(6, 64, 8, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..8).prop_map(Value::List),
            vec(inner.clone(), 0..8).prop_map(Value::Tuple),
            vec((inner.clone(), inner), 0..4).prop_map(Value::Map),
        ]
    })
}

/// Replaces some bytes.
fn corrupt(bytes: &mut [u8], changes: &[(Index, u8)]) {
    if !bytes.is_empty() {
        for (at, byte) in changes {
            bytes[at.index(bytes.len())] = *byte;
        }
    }
}

fn any_changes() -> impl Strategy<Value = Vec<(Index, u8)>> {
    vec(any::<(Index, u8)>(), 1..4)
}

/// How many items a container announces that the bytes before it have room for.
fn announced(event: Event<'_>) -> usize {
    match event {
        Event::List(len) | Event::Tuple(len) => len,
        Event::Map(len) => 2 * len,
        _ => 0,
    }
}

proptest! {
    #[test]
    fn any_header_reads_back_the_same(header in any_header()) {
        prop_assert_eq!(FrameHeader::decode(&header.encode(), &limits()), Ok(header));
    }

    #[test]
    fn any_24_bytes_are_that_header_or_none(bytes in any::<[u8; HEADER_LEN]>(), plausible in any::<bool>()) {
        let mut bytes = bytes;
        if plausible {
            let [_, _, _, kind, flags, priority, ..] = bytes;
            bytes[..8].copy_from_slice(&[b'T', b'C', 0, kind % 6, flags % 3, priority % 4, 0, 0]);
            bytes[14..16].fill(0);
            bytes[20..24].fill(0);
        }

        if let Ok(header) = FrameHeader::decode(&bytes, &limits()) {
            prop_assert_eq!(header.encode(), bytes);
        }
    }

    #[test]
    fn any_descriptor_reads_back_the_same(descriptor in any_descriptor()) {
        let bytes = descriptor.encode();

        prop_assert_eq!(Descriptor::decode(&bytes, &limits()), Ok(descriptor));
    }

    #[test]
    fn any_cut_of_a_descriptor_is_refused(descriptor in any_descriptor(), at in any::<Index>()) {
        let bytes = descriptor.encode();

        let cut = &bytes[..at.index(bytes.len())];

        prop_assert!(Descriptor::decode(cut, &limits()).is_err());
    }

    #[test]
    fn any_corrupt_descriptor_is_refused_or_sound(descriptor in any_descriptor(), changes in any_changes()) {
        let mut bytes = descriptor.encode();
        corrupt(&mut bytes, &changes);

        if let Ok(read) = Descriptor::decode(&bytes, &limits()) {
            prop_assert_eq!(read.check(&limits()), Ok(()));
            prop_assert!(read.body_len().unwrap() <= limits().max_message);
            prop_assert_eq!(Descriptor::decode(&read.encode(), &limits()), Ok(read));
        }
    }

    #[test]
    fn any_bytes_are_a_sound_descriptor_or_none(bytes in vec(any::<u8>(), 0..200)) {
        if let Ok(read) = Descriptor::decode(&bytes, &limits()) {
            prop_assert_eq!(read.check(&limits()), Ok(()));
        }
    }

    #[test]
    fn any_value_reads_back_the_same(value in any_value()) {
        let bytes = value.encode(&limits()).unwrap();

        prop_assert_eq!(Value::decode(&bytes, &limits()), Ok(value));
    }

    #[test]
    fn any_value_has_one_encoding(value in any_value(), changes in any_changes()) {
        let mut bytes = value.encode(&limits()).unwrap();
        corrupt(&mut bytes, &changes);

        if let Ok(read) = Value::decode(&bytes, &limits()) {
            prop_assert_eq!(read.encode(&limits()), Ok(bytes));
        }
    }

    #[test]
    fn any_cut_of_a_value_is_refused(value in any_value(), at in any::<Index>()) {
        let bytes = value.encode(&limits()).unwrap();

        let cut = &bytes[..at.index(bytes.len())];

        prop_assert!(Value::decode(cut, &limits()).is_err());
    }

    #[test]
    fn containers_announce_no_more_in_sum_than_there_are_bytes(
        bytes in vec(prop_oneof![0..14u8, any::<u8>()], 0..300),
    ) {
        let mut reader = ValueReader::new(&bytes, &limits());

        let mut sum = 0;
        while let Ok(event) = reader.next() {
            sum += announced(event);
        }

        prop_assert!(sum <= bytes.len(), "{sum} items announced in {} bytes", bytes.len());
    }
}
