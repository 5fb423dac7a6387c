//! Announced counts take no memory before they are checked (NET-2). This test has a program of
//! its own, because it counts what the whole program allocates.

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};
use tensorcall_proto::ids::{ForkId, Incarnation, Life, MessageId, RRefId, Rank};
use tensorcall_proto::wire::{
    BufferDesc, Call, DType, Descriptor, Encoding, FunctionRef, Limits, Message, RRefDesc, TensorDesc, Value,
    WireError,
};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The largest number in postcard's and in values' notation.
const HUGE: [u8; 10] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1];

/// Bytes that `work` allocates in all, freed or not.
fn allocated<T>(work: impl FnOnce() -> T) -> (T, usize) {
    let region = Region::new(ALLOCATOR);
    let result = work();
    (result, region.change().bytes_allocated)
}

fn call(function: FunctionRef) -> Message {
    let (id, encoding) = (MessageId::new(1), Encoding::Pickle);
    Message::Call(Call {
        id,
        function,
        encoding,
        timeout_us: None,
        nested: false,
        plain: false,
        autograd: None,
        creates: None,
    })
}

/// A descriptor with one tensor, one buffer and one reference.
fn descriptor(function: FunctionRef) -> Descriptor {
    let life = Life { rank: Rank::MAX, incarnation: Incarnation::new(3) };
    Descriptor {
        message: call(function),
        payload_len: 0,
        buffers: vec![BufferDesc::body(64)],
        tensors: vec![TensorDesc::contiguous(DType::Float32, vec![0x55], 0)],
        rrefs: vec![RRefDesc { rref: RRefId::new(life, 1), owner: life, fork: ForkId::new(life, 2) }],
    }
}

/// `bytes` with a huge number in the place of each byte in turn, and the rest kept.
fn with_huge_numbers(bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    (0..bytes.len()).map(|at| [&bytes[..at], &HUGE, &bytes[at + 1..]].concat())
}

#[test]
fn hostile_counts_allocate_little_and_are_refused() {
    let limits = Limits::default();

    for function in [FunctionRef::InPayload, FunctionRef::Name("f".into())] {
        for bytes in with_huge_numbers(&descriptor(function).encode()) {
            let (_, allocated) = allocated(|| Descriptor::decode(&bytes, &limits));
            assert!(allocated < 64 << 10, "{allocated} bytes for {bytes:02x?}");
        }
    }

    let tree = Value::Tuple(vec![
        Value::List(vec![Value::Nil]),
        Value::Map(vec![(Value::Str("key".into()), Value::Bytes(vec![1]))]),
        Value::Pickle(vec![2]),
    ]);
    for bytes in with_huge_numbers(&tree.encode(&limits).unwrap()) {
        let (_, allocated) = allocated(|| Value::decode(&bytes, &limits));
        assert!(allocated < 64 << 10, "{allocated} bytes for {bytes:02x?}");
    }

    // Lists in lists, each of which announces everything that is left: in sum they may not.
    let bytes: Vec<u8> = [[7, 0xff, 0x3f], [7, 0xff, 0x3f]].concat().into_iter().chain([0; 8191]).collect();
    let (result, allocated) = allocated(|| Value::decode(&bytes, &limits));
    assert_eq!(result, Err(WireError::ValueTruncated));
    assert!(allocated < 64 << 10, "{allocated} bytes");
}
