//! Large buffers between agents of one host: copied once, into memory that both have mapped.
//!
//! Alone in its file, and one test at a time: what the process has mapped is looked at.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use common::raw::{self, Wire};
use common::{
    Functions, Kind, SOON, answer, call, deadline, eventually, finish, info, leave_together, mirror, now,
    pattern, rank, request, socket_group, thread,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tensorcall::engine::body::{Body, Received};
use tensorcall::engine::buffer::{Buffer, Region};
use tensorcall::engine::proto::blocks::BlockMessage;
use tensorcall::engine::proto::wire::frame::{FrameHeader, FrameKind, HEADER_LEN};
use tensorcall::engine::proto::wire::message::{Encoding, Message};
use tensorcall::engine::proto::wire::{BufferDesc, DType, Descriptor, Limits, Place, TensorDesc};
use tensorcall::engine::{Agent, AgentConfig, Request};

const MIB: usize = 1 << 20;

static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    eventually("the test before has left", || shared_bytes() == 0);
    alone
}

/// Address ranges of shared segments in this process.
fn segments() -> Vec<std::ops::Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| line.contains("memfd:tensorcall"));
    let range = |line: &str| {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        usize::from_str_radix(from, 16).unwrap()..usize::from_str_radix(to, 16).unwrap()
    };
    ours.map(range).collect()
}

fn shared_bytes() -> usize {
    segments().iter().map(ExactSizeIterator::len).sum()
}

fn is_shared(buffer: &Buffer) -> bool {
    let start = buffer.as_ptr().addr();
    segments().iter().any(|range| range.contains(&start))
}

fn with_buffers(function: &str, buffers: Vec<Vec<u8>>) -> Request {
    let mut request = request(function, b"payload", Some(SOON));
    let lens = buffers.iter().map(|bytes| bytes.len() as u64).enumerate();
    let tensor =
        |(at, len): (usize, u64)| TensorDesc::contiguous(DType::UInt8, vec![len], u32::try_from(at).unwrap());
    request.body.tensors = lens.map(tensor).collect();
    request.body.buffers = buffers.into_iter().map(Region::from_vec).collect();
    request
}

/// What comes back for `buffers` from the other of two agents.
fn echo(agent: &Agent, buffers: Vec<Vec<u8>>) -> Received {
    let future = agent.call(rank(1), with_buffers("mirror", buffers)).unwrap();
    assert!(future.wait_until(Some(deadline(SOON))), "no answer in time");
    future.take().unwrap().unwrap().body
}

/// Two agents, the second of which mirrors, and keeps what it is told to.
fn pair(kept: &Arc<Mutex<Vec<Buffer>>>, adjust: impl Fn(&mut AgentConfig)) -> Vec<Agent> {
    socket_group(2, adjust, || {
        let kept = Arc::clone(kept);
        Functions::default().with("mirror", mirror).with("keep", move |call, responder| {
            kept.lock().unwrap().extend(call.body.buffers);
            responder.returned(Encoding::Bytes, Body::of(Vec::new()));
        })
    })
}

/// Sends and gets `len` bytes until both ways go through shared memory.
fn warm(agent: &Agent, len: usize) {
    eventually("memory is shared", || is_shared(&echo(agent, vec![pattern(len, 1)]).buffers[0]));
}

#[test]
fn large_buffers_lie_in_shared_memory_and_small_ones_travel() {
    let _alone = alone();
    let agents = pair(&Arc::default(), |_| {});
    warm(&agents[0], 3 * MIB);
    warm(&agents[0], MIB);

    for seed in 0..20 {
        let sent = vec![pattern(3 * MIB, seed), pattern(100, seed), pattern(0, seed), pattern(MIB, !seed)];
        let back = echo(&agents[0], sent.clone());

        let arrived: Vec<_> = back.buffers.iter().map(|buffer| buffer.as_ref().to_vec()).collect();
        assert!(arrived == sent, "what comes back is what was sent");
        assert!(is_shared(&back.buffers[0]));
        assert!(!is_shared(&back.buffers[1]));
    }
    leave_together(agents);
    eventually("nothing is left mapped", || shared_bytes() == 0);
}

#[test]
fn a_received_buffer_is_the_receivers_own() {
    let _alone = alone();
    let agents = pair(&Arc::default(), |_| {});
    warm(&agents[0], MIB);

    let mut first = echo(&agents[0], vec![pattern(MIB, 1)]).buffers.remove(0);
    assert!(is_shared(&first));
    first.as_mut().fill(7);
    for seed in 0..50 {
        assert_eq!(echo(&agents[0], vec![pattern(MIB, seed)]).buffers[0].as_ref(), pattern(MIB, seed));
    }

    assert!(first.as_ref().iter().all(|&byte| byte == 7));
    leave_together(agents);
    assert!(first.as_ref().iter().all(|&byte| byte == 7), "it outlives both agents");
    assert!(is_shared(&first));
    finish(&thread(move || drop(first)));
    eventually("nothing is left mapped", || shared_bytes() == 0);
}

#[test]
fn who_keeps_everything_neither_stalls_nor_grows_the_sender() {
    let _alone = alone();
    let kept = Arc::default();
    let cap = 32 * MIB;
    let agents = pair(&kept, |config| config.max_shared_memory = cap);
    warm(&agents[0], 4 * MIB);

    for seed in 0..40 {
        let request = with_buffers("keep", vec![pattern(4 * MIB, seed)]);
        answer(&agents[0].call(rank(1), request).unwrap()).unwrap();
        // Of each direction, here and there.
        assert!(shared_bytes() <= 4 * cap, "{}", shared_bytes());
    }

    let kept = std::mem::take(&mut *kept.lock().unwrap());
    assert_eq!(kept.len(), 40);
    for (buffer, seed) in kept.iter().zip(0..) {
        assert!(buffer.as_ref() == pattern(4 * MIB, seed), "buffer {seed}");
    }
    let shared = kept.iter().filter(|buffer| is_shared(buffer)).count();
    assert!((1..=cap / (4 * MIB)).contains(&shared), "{shared} of 40 lie in shared memory");
    drop(kept);
    warm(&agents[0], 4 * MIB);
    leave_together(agents);
}

#[test]
fn what_is_not_used_is_given_up() {
    let _alone = alone();
    let agents = pair(&Arc::default(), |config| config.shared_memory_idle = Duration::from_millis(50));
    warm(&agents[0], MIB);
    assert!(shared_bytes() > 0);

    eventually("idle memory is given up", || shared_bytes() == 0);
    warm(&agents[0], MIB);
    leave_together(agents);
}

#[test]
fn without_shared_memory_everything_travels() {
    let _alone = alone();
    for (mine, theirs) in [(0, 0), (64 * MIB, 0), (0, 64 * MIB)] {
        let agents = pair(&Arc::default(), |config| {
            config.max_shared_memory = if config.rank == rank(0) { mine } else { theirs };
        });

        for seed in 0..10 {
            assert_eq!(echo(&agents[0], vec![pattern(MIB, seed)]).buffers[0].as_ref(), pattern(MIB, seed));
        }

        assert!(mine.max(theirs) > 0 || shared_bytes() == 0);
        leave_together(agents);
    }
}

#[test]
fn many_sizes_from_many_threads_arrive_as_they_were_sent() {
    let _alone = alone();
    let agents = pair(&Arc::default(), |config| config.max_shared_memory = 16 * MIB);
    let rounds = |seed: u8| {
        let agent = agents[0].clone();
        thread(move || {
            for round in 0..60usize {
                let len = [70_000, 300_000, MIB, 5 * MIB][(round + usize::from(seed)) % 4] + round;
                let sent = pattern(len, seed ^ round.to_le_bytes()[0]);
                let back = echo(&agent, vec![sent.clone()]);
                assert!(back.buffers[0].as_ref() == sent, "{len} bytes");
            }
        })
    };

    let threads: Vec<_> = (0..4).map(rounds).collect();

    threads.iter().for_each(finish);
    leave_together(agents);
}

/// A worker that speaks for itself, connected to an agent over its Unix socket.
fn intruder(agents: &[Agent]) -> Wire {
    let me = agents[1].identity().clone();
    let address = info(&agents[0]).addresses.into_iter().find(|address| Kind::Unix.names(address));
    let mut wire = Wire::dial(&address.unwrap());
    wire.introduce(me, raw::SECRET, raw::JOB).unwrap();
    wire
}

fn borrowing_call(segment: u64, offset: u64) -> Descriptor {
    let buffers = vec![BufferDesc { len: 1 << 16, place: Place::Block { segment, offset } }];
    Descriptor { buffers, ..Descriptor::plain(raw::plain_call(1 << 40, "mirror")) }
}

#[test]
fn who_says_what_is_impossible_of_shared_memory_is_cut_off_and_harms_nobody() {
    let _alone = alone();
    let agents = pair(&Arc::default(), |_| {});
    warm(&agents[0], MIB);
    let say = |message| Descriptor::plain(Message::Blocks(message));
    let hostile = [
        say(BlockMessage::Offer { segment: 1, block_len: u64::MAX, blocks: u32::MAX }),
        say(BlockMessage::Answer { segment: 1, accepted: true }),
        say(BlockMessage::Return { segment: 1, block: 0, reusable: true }),
        say(BlockMessage::Withdraw { segment: 1 }),
        borrowing_call(1, 0),
        borrowing_call(u64::MAX, u64::MAX - (1 << 16)),
    ];

    for descriptor in hostile {
        let mut wire = intruder(&agents);
        wire.write_all(&raw::frame(&descriptor.encode(), 0, true)).unwrap();
        assert!(wire.is_closed_soon(), "{descriptor:?}");
    }

    let start = now();
    assert_eq!(answer(&call(&agents[1], 0, "mirror", b"unharmed").unwrap()).unwrap(), b"unharmed");
    assert!(start.elapsed() < SOON);
    leave_together(agents);
}

/// Sends `bytes`, and each of `passed` with a byte of its own.
fn pass(wire: &mut Wire, bytes: &[u8], passed: &[Vec<BorrowedFd<'_>>]) {
    let Wire::Unix(stream) = &*wire else { panic!("descriptors pass through Unix sockets") };
    for (byte, fds) in bytes.iter().zip(passed) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let bytes = [IoSlice::new(std::slice::from_ref(byte))];
        assert_eq!(sendmsg(stream, &bytes, &mut control, SendFlags::NOSIGNAL).unwrap(), 1);
    }
    wire.write_all(&bytes[passed.len()..]).unwrap();
}

/// Memory of a segment of one block of 64 KiB, as a peer would make it.
fn memory() -> OwnedFd {
    let memory = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&memory, 1 << 16).unwrap();
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    memory
}

fn offer(segment: u64) -> Vec<u8> {
    let message = Message::Blocks(BlockMessage::Offer { segment, block_len: 1 << 16, blocks: 1 });
    raw::frame(&Descriptor::plain(message).encode(), 0, true)
}

/// The next answer to an offer.
fn next_answer(wire: &mut Wire) -> (u64, bool) {
    loop {
        let mut header = [0; HEADER_LEN];
        wire.read_exact(&mut header).unwrap();
        let header = FrameHeader::decode(&header, &Limits::default()).unwrap();
        let mut control = vec![0; header.control_len as usize];
        wire.read_exact(&mut control).unwrap();
        if header.kind == FrameKind::Message
            && let Message::Blocks(BlockMessage::Answer { segment, accepted }) =
                Descriptor::decode(&control, &Limits::default()).unwrap().message
        {
            return (segment, accepted);
        }
    }
}

#[test]
fn descriptors_may_come_long_before_their_offers() {
    let _alone = alone();
    let agents = pair(&Arc::default(), |_| {});
    let mut wire = intruder(&agents);
    let segments = 100;
    let memory: Vec<_> = std::iter::repeat_with(memory).take(segments).collect();
    let passed: Vec<_> = memory.iter().map(|memory| vec![memory.as_fd()]).collect();
    let offers: Vec<_> = (0..segments as u64).flat_map(offer).collect();

    pass(&mut wire, &offers, &passed);

    for segment in 0..segments as u64 {
        assert_eq!(next_answer(&mut wire), (segment, true));
    }
    drop(wire);
    leave_together(agents);
}

#[test]
fn what_is_offered_after_a_descriptor_was_lost_is_declined() {
    let _alone = alone();
    let agents = pair(&Arc::default(), |_| {});
    let memory = memory();
    // None at all; more than are taken at once, as if there were room for some of them only.
    for lost in [0, 8] {
        let mut wire = intruder(&agents);
        pass(&mut wire, &offer(1), &[vec![memory.as_fd()]]);
        assert_eq!(next_answer(&mut wire), (1, true));

        let lost: Vec<_> = std::iter::repeat_n(vec![memory.as_fd(); lost], usize::from(lost > 0)).collect();
        pass(&mut wire, &offer(2), &lost);
        assert_eq!(next_answer(&mut wire), (2, false));
        pass(&mut wire, &offer(3), &[vec![memory.as_fd()]]);
        assert_eq!(next_answer(&mut wire), (3, false));

        // What was there before is used still.
        wire.write_all(&raw::frame(&borrowing_call(1, 0).encode(), 0, true)).unwrap();
        loop {
            let header = wire.next_frame().unwrap();
            if header.body_len > 0 {
                break;
            }
        }
    }
    leave_together(agents);
}
