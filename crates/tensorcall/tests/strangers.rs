//! Bytes of strangers at the sockets of a live agent: the connection closes in bounded time, the log says
//! why once, memory stays flat and calls go on (NET-2).
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::Write;
use std::time::Duration;

use common::log::Log;
use common::raw::{JOB, SECRET, Wire, announced, frame, identity, plain_call, random};
use common::{Functions, Kind, ask, info, leave_together, now, socket_group, strangers};
use tensorcall::engine::proto::handshake::Expect;
use tensorcall::engine::proto::wire::frame::FrameHeader;
use tensorcall::engine::proto::wire::tensor::{BufferDesc, DType, TensorDesc};
use tensorcall::engine::proto::wire::{Descriptor, Limits};
use tensorcall::engine::transport::Address;
use tensorcall::engine::{Agent, PeerInfo};

/// Rank 0 is the agent under attack, rank 1 a worker that has nothing to do with it. Rank 2 is a worker
/// that has gone bad: see [`member`].
fn agents() -> Vec<Agent> {
    let agents = strangers(Kind::Tcp, 2, |_| {}, || Functions::default().plain("echo", <[u8]>::to_vec));
    let bad = PeerInfo { identity: identity(2), addresses: Vec::new(), plain: false };
    let infos: Vec<_> = agents.iter().map(info).chain([bad]).collect();
    for agent in &agents {
        agent.open(infos.clone()).unwrap();
    }
    assert_calls_go_on(&agents);
    agents
}

fn assert_calls_go_on(agents: &[Agent]) {
    assert_eq!(ask(&agents[1], 0, "echo", b"still here").unwrap(), b"still here");
}

fn sockets(agent: &Agent) -> Vec<Address> {
    let addresses = info(agent).addresses;
    addresses.into_iter().filter(|address| !matches!(address, Address::Memory(_))).collect()
}

/// Does `attack` to each socket of a live agent: it must close the connection and log one event, which
/// says `why`.
fn attack(why: &str, attack: impl Fn(&mut Wire)) {
    let log = Log::listen();
    let agents = agents();
    for address in sockets(&agents[0]) {
        log.take();
        let before = resident();
        let mut wire = Wire::dial(&address);

        attack(&mut wire);

        assert!(wire.is_closed_soon(), "{address} stays open");
        let events = log.take();
        assert_eq!(events.len(), 1, "{events:#?}");
        assert!(events[0].contains(why), "{}", events[0]);
        let grown = resident().saturating_sub(before);
        assert!(grown < 64 << 20, "{grown} bytes more");
        assert_calls_go_on(&agents);
    }
    leave_together(agents);
}

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// Says it all, whatever the other end thinks of it.
fn say(wire: &mut Wire, bytes: &[u8]) {
    let _ = wire.write_all(bytes);
}

/// A member of the group, as far as it can prove.
fn member(wire: &mut Wire) {
    wire.introduce(identity(2), SECRET, JOB).unwrap();
}

fn call_with(tensors: Vec<TensorDesc>, buffers: Vec<BufferDesc>) -> Descriptor {
    Descriptor { buffers, tensors, ..Descriptor::plain(plain_call(1, "echo")) }
}

#[test]
fn random_bytes_are_refused() {
    attack("did not prove", |wire| {
        let noise: Vec<u8> = std::iter::repeat_with(random).take(4096).flatten().collect();
        say(wire, &noise);
    });
}

#[test]
fn an_http_request_is_refused() {
    attack("not a tensorcall worker: it said \\\"GET / HTTP/1.1", |wire| {
        say(wire, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    });
}

#[test]
fn a_connection_that_ends_at_once_is_noted_and_forgotten() {
    let log = Log::listen();
    let agents = agents();
    for address in sockets(&agents[0]) {
        log.take();

        drop(Wire::dial(&address));

        let event = log.next();
        assert!(event.contains("did not prove"), "{event}");
        assert_calls_go_on(&agents);
    }
    leave_together(agents);
}

#[test]
fn a_wrong_secret_is_refused_without_a_word() {
    attack("does not know the job's secret", |wire| {
        let error = wire.introduce(identity(1), b"guess", JOB).unwrap_err();
        assert!(error.contains("its secret differs"), "{error}");
    });
}

#[test]
fn a_worker_of_another_job_is_told_so() {
    attack("belongs to job \\\"other\\\"", |wire| {
        let error = wire.introduce(identity(1), SECRET, "other").unwrap_err();
        assert!(error.contains("other"), "{error}");
    });
}

#[test]
fn a_call_for_another_worker_is_refused() {
    attack("rank 5 was called", |wire| {
        let expect = Expect { rank: common::rank(5), incarnation: None };
        wire.introduce_to(identity(1), SECRET, JOB, expect).unwrap_err();
    });
}

#[test]
fn a_worker_of_another_group_is_refused_although_it_knows_the_secret() {
    attack("not a worker of this group", |wire| {
        wire.introduce(identity(7), SECRET, JOB).unwrap();
    });
}

#[test]
fn a_replayed_proof_is_refused() {
    // What a member said in an earlier connection, which somebody overheard.
    let said = overheard();
    attack("a replay", |wire| say(wire, &said));
}

/// What a member says to some agent of the same secret and job.
fn overheard() -> Vec<u8> {
    let other = socket_group(1, |_| {}, Functions::default);
    let mut wire = Wire::dial(&sockets(&other[0])[0]);
    wire.introduce(identity(2), SECRET, JOB).unwrap()
}

#[test]
fn a_member_that_announces_more_than_there_is_memory_is_cut_off() {
    attack("broke the protocol", |wire| {
        member(wire);
        say(wire, &frame(&call_with(vec![], vec![]).encode(), 1 << 60, false));
    });
    attack("broke the protocol", |wire| {
        member(wire);
        let buffers = vec![BufferDesc::body(1 << 60)];
        say(wire, &announced(&call_with(vec![], buffers), 1 << 20));
    });
    attack("broke the protocol", |wire| {
        member(wire);
        let header = FrameHeader { control_len: u32::MAX, ..any_frame() };
        say(wire, &header.encode());
    });
}

fn any_frame() -> FrameHeader {
    let bytes = frame(b"x", 0, true)[..FrameHeader::LEN].try_into().unwrap();
    FrameHeader::decode(&bytes, &Limits::default()).unwrap()
}

/// What is within the limits is believed, but memory is only taken as the bytes come.
#[test]
fn a_member_that_announces_a_lot_and_sends_little_costs_little() {
    attack("broke the protocol", |wire| {
        member(wire);
        let buffers = vec![BufferDesc::body(8 << 30)];
        say(wire, &announced(&call_with(vec![], buffers), 1 << 20));
        say(wire, &vec![1; 1 << 20]);
        say(wire, b"this is no frame, whatever it may be");
    });
}

#[test]
fn a_descriptor_that_lies_is_refused() {
    let outside = TensorDesc::contiguous(DType::Float32, vec![1000], 0);
    let missing = TensorDesc::contiguous(DType::Float32, vec![1], 3);
    let huge = TensorDesc::contiguous(DType::Float32, vec![u64::MAX, 2], 0);
    for tensor in [outside, missing, huge] {
        attack("broke the protocol", |wire| {
            member(wire);
            let lie = call_with(vec![tensor.clone()], vec![BufferDesc::body(16)]);
            say(wire, &frame(&lie.encode(), 16, true));
            say(wire, &[0; 16]);
        });
    }
    attack("broke the protocol", |wire| {
        member(wire);
        say(wire, &frame(&[0xff; 200], 0, true));
    });
}

mod serial {
    use super::*;

    /// Half a handshake, or none, and then silence: after a while the place is free again.
    #[test]
    fn who_falls_silent_in_the_handshake_is_cut_off() {
        let log = Log::listen();
        let agents = agents();
        let hello = overheard();
        let mut wires = Vec::new();
        for address in sockets(&agents[0]) {
            for said in [&hello[..0], &hello[..7]] {
                let mut wire = Wire::dial(&address);
                say(&mut wire, said);
                wires.push(wire);
            }
        }
        log.take();
        assert_calls_go_on(&agents);

        assert!(wires.iter_mut().all(Wire::is_closed_soon));

        let events = log.take();
        assert_eq!(events.len(), wires.len(), "{events:#?}");
        assert!(events.iter().all(|event| event.contains("not finished in time")), "{events:#?}");
        leave_together(agents);
    }

    #[test]
    fn silent_connections_without_number_do_not_keep_a_peer_out() {
        const SILENT: usize = 300;
        let _log = Log::listen();
        let agents = socket_group(2, |_| {}, || Functions::default().plain("echo", <[u8]>::to_vec));
        let addresses = sockets(&agents[0]);
        let wires: Vec<_> =
            (0..SILENT).map(|number| Wire::dial(&addresses[number % addresses.len()])).collect();
        let start = now();

        // The first call of a worker that has no connection yet.
        assert_calls_go_on(&agents);

        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        drop(wires);
        leave_together(agents);
    }
}
