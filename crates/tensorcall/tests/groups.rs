//! Agents over a process group: what the group does to them, and that they need nothing else.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::gate::Gate;
use common::{
    Functions, SOON, answer, ask, call, config, deadline, eventually, finish, info, leave_together, now,
    pattern, rank, request, thread,
};
use tensorcall::engine::body::Body;
use tensorcall::engine::buffer::{Region, Target};
use tensorcall::engine::proto::group::{ENVELOPE_TAG, seal};
use tensorcall::engine::proto::ids::WorkerName;
use tensorcall::engine::proto::wire::message::Encoding;
use tensorcall::engine::proto::wire::tensor::{DType, TensorDesc};
use tensorcall::engine::sync::Mutex;
use tensorcall::engine::transport::group::{Fabric, GroupError, MemoryGroup, ProcessGroup};
use tensorcall::engine::{Agent, ErrorKind, over_group};

fn functions() -> Functions {
    Functions::default().plain("echo", <[u8]>::to_vec)
}

/// Agents that met over a group.
fn agents(fabric: &Arc<Fabric>, count: u32, functions: impl Fn() -> Functions) -> Vec<Agent> {
    start(count, |number| {
        Agent::start_over_group(config(number), Arc::new(functions()), fabric.member(number))
    })
}

fn start(count: u32, start: impl Fn(u32) -> tensorcall::engine::Result<Agent>) -> Vec<Agent> {
    let agents: Vec<_> = (0..count).map(|number| start(number).unwrap()).collect();
    let meeting = |agent: &Agent| {
        let agent = agent.clone();
        thread(move || agent.meet(SOON).unwrap())
    };
    let meetings: Vec<_> = agents.iter().map(meeting).collect();
    meetings.iter().for_each(finish);
    agents
}

#[test]
fn workers_meet_by_name_and_call_each_other_without_a_socket() {
    let fabric = Fabric::new(3, true);
    let agents = agents(&fabric, 3, functions);

    assert!(
        agents.iter().all(|agent| !agent.contact().contains("tcp:") && !agent.contact().contains("unix:"))
    );
    assert_eq!(agents[0].rank_of(&WorkerName::parse("worker2").unwrap()), Some(rank(2)));
    for (from, to) in [(0, 1), (1, 2), (2, 0), (1, 1)] {
        assert_eq!(ask(&agents[from], to, "echo", b"hello").unwrap(), b"hello");
    }
    leave_together(agents);
}

#[test]
fn a_group_of_one_works() {
    let fabric = Fabric::new(1, false);
    let agents = agents(&fabric, 1, functions);

    assert_eq!(ask(&agents[0], 0, "echo", b"me").unwrap(), b"me");
    agents[0].sync(Some(deadline(SOON))).unwrap();
    leave_together(agents);
}

#[test]
fn two_workers_of_one_name_do_not_meet() {
    let fabric = Fabric::new(2, true);
    let start = |number| {
        let mut config = config(number);
        config.name = WorkerName::parse("same").unwrap();
        Agent::start_over_group(config, Arc::new(functions()), fabric.member(number)).unwrap()
    };
    let agents = [start(0), start(1)];

    let meetings = agents.clone().map(|agent| thread(move || agent.meet(SOON).unwrap_err()));

    for meeting in &meetings {
        assert!(finish(meeting).to_string().contains("not unique"));
    }
}

#[test]
fn a_worker_that_meets_nobody_fails_in_time() {
    let fabric = Fabric::new(2, true);
    let agent = Agent::start_over_group(config(0), Arc::new(functions()), fabric.member(0)).unwrap();
    let start = now();

    let error = agent.meet(Duration::from_millis(100)).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Timeout);
    agent.close(false, now());
    assert!(start.elapsed() < SOON);
}

#[test]
fn a_lost_rank_is_reported_by_name_and_harms_no_other() {
    let answers = Gate::default();
    let functions = || {
        let answers = answers.clone();
        functions().plain("answer later", move |_| {
            answers.pass();
            Vec::new()
        })
    };
    let fabric = Fabric::new(3, false);
    let agents = agents(&fabric, 3, functions);
    let pending = call(&agents[0], 1, "answer later", b"").unwrap();
    answers.await_arrivals(1);

    fabric.lose(1);

    let error = answer(&pending).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    let text = error.to_string();
    assert!(
        text.contains("worker1") && text.contains("lost rank 1") && text.contains("answer later"),
        "{text}"
    );
    assert_eq!(ask(&agents[0], 1, "echo", b"").unwrap_err().kind(), ErrorKind::PeerLost);
    eventually("worker1 is lost for worker0", || agents[0].gone() == [rank(1)]);
    assert_eq!(ask(&agents[0], 2, "echo", b"x").unwrap(), b"x");
    answers.open();
}

#[test]
fn where_a_group_does_not_tell_of_a_loss_the_deadline_does() {
    let fabric = Fabric::new(2, true);
    let agents = agents(&fabric, 2, functions);
    ask(&agents[0], 1, "echo", b"").unwrap();
    fabric.delay(Duration::from_hours(1));

    let future = agents[0].call(rank(1), request("echo", b"", Some(Duration::from_millis(50)))).unwrap();

    assert_eq!(answer(&future).unwrap_err().kind(), ErrorKind::Timeout);
    let start = now();
    for agent in &agents {
        agent.close(false, now());
    }
    assert!(start.elapsed() < Duration::from_secs(10), "aborted in bounded time");
}

#[test]
fn a_damaged_message_costs_its_links_and_the_next_call_works() {
    for large in [10, 3 << 20] {
        let fabric = Fabric::new(2, false);
        let agents = agents(&fabric, 2, functions);
        ask(&agents[0], 1, "echo", b"all is well").unwrap();
        let left = Arc::new(AtomicU32::new(1));
        fabric.tamper({
            let left = Arc::clone(&left);
            move |from, _, tag, bytes| {
                if (from, tag) == (0, 1) && left.swap(0, Ordering::Relaxed) == 1 {
                    bytes[45] ^= 0x10;
                }
            }
        });

        let error = ask(&agents[0], 1, "echo", &vec![1; large]).unwrap_err();

        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(error.to_string().contains("damaged"), "{error}");
        eventually("the way back is found", || ask(&agents[0], 1, "echo", b"again").is_ok());
        assert_eq!(ask(&agents[0], 1, "echo", &vec![2; large]).unwrap(), vec![2; large]);
        assert_eq!(ask(&agents[1], 0, "echo", b"and back").unwrap(), b"and back");
        leave_together(agents);
    }
}

/// A message from a later version, say: its link ends, which answers what is under way on it, and no other.
#[test]
fn an_unknown_message_is_answered_by_an_error_and_harms_no_other_link() {
    // Behind the header of the envelope and the fields of its one record.
    const RECORD: usize = 32;
    const DESCRIPTOR: usize = RECORD + 31;
    let answers = Gate::default();
    let functions = || {
        let answers = answers.clone();
        functions().plain("answer later", move |_| {
            answers.pass();
            b"late".to_vec()
        })
    };
    let fabric = Fabric::new(2, true);
    let agents = agents(&fabric, 2, functions);
    ask(&agents[0], 1, "echo", b"all is well").unwrap();
    let other = call(&agents[1], 0, "answer later", b"").unwrap();
    answers.await_arrivals(1);
    let left = AtomicU32::new(1);
    fabric.tamper(move |from, to, tag, bytes| {
        let begins = (from, tag, bytes.get(RECORD)) == (0, ENVELOPE_TAG, Some(&2));
        if begins && left.swap(0, Ordering::Relaxed) == 1 {
            bytes[DESCRIPTOR] = 99;
            *bytes = seal(from, to, &bytes[RECORD..]);
        }
    });

    let error = ask(&agents[0], 1, "echo", b"of a kind that nobody knows").unwrap_err();

    assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
    assert!(error.to_string().contains("the other end broke the protocol"), "{error}");
    eventually("the way back is found", || ask(&agents[0], 1, "echo", b"again").is_ok());
    answers.open();
    assert_eq!(answer(&other).unwrap(), b"late");
    leave_together(agents);
}

#[test]
fn slow_messages_change_nothing_but_the_time() {
    let fabric = Fabric::new(2, true);
    fabric.delay(Duration::from_millis(3));
    let agents = agents(&fabric, 2, functions);

    let futures: Vec<_> =
        (0..64).map(|i| call(&agents[0], 1, "echo", &pattern(i * 3000, 1)).unwrap()).collect();

    for (i, future) in futures.iter().enumerate() {
        assert!(answer(future).unwrap() == pattern(i * 3000, 1), "{i}");
    }
    leave_together(agents);
}

/// A group that notes what memory it was asked to send, and to receive into: address and length.
#[derive(Debug)]
struct Watched {
    group: Arc<MemoryGroup>,
    sent: Mutex<Vec<(usize, usize)>>,
    received: Mutex<Vec<(usize, usize)>>,
}

impl ProcessGroup for Watched {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn send(&self, to: u32, tag: u32, bytes: &Region) -> Result<(), GroupError> {
        self.sent.lock().push((bytes.as_ptr() as usize, bytes.len()));
        self.group.send(to, tag, bytes)
    }

    fn receive(&self, from: Option<u32>, tag: u32, target: Target) -> Result<u32, GroupError> {
        self.received.lock().push((target.as_ptr() as usize, target.len()));
        self.group.receive(from, tag, target)
    }

    fn all_gather(&self, bytes: &[u8], limit: Instant) -> Result<Vec<Vec<u8>>, GroupError> {
        self.group.all_gather(bytes, limit)
    }

    fn barrier(&self, limit: Instant) -> Result<(), GroupError> {
        self.group.barrier(limit)
    }

    fn abort(&self) {
        self.group.abort();
    }
}

/// How many bytes of the `len` at `start` are in these runs of memory.
fn covered(runs: &Mutex<Vec<(usize, usize)>>, start: usize, len: usize) -> usize {
    let within = |&&(at, run): &&(usize, usize)| start <= at && at + run <= start + len;
    runs.lock().iter().filter(within).map(|(_, run)| run).sum()
}

#[test]
fn a_large_tensor_is_sent_from_where_it_lies_and_received_where_it_ends() {
    const LEN: usize = 20 << 20;
    let fabric = Fabric::new(2, true);
    let watched = [0, 1].map(|rank| {
        let group = fabric.member(rank);
        Arc::new(Watched { group, sent: Mutex::default(), received: Mutex::default() })
    });
    let agents = start(2, |number| {
        let functions = Functions::default().with("where", |call, responder| {
            let address = call.body.buffers[0].as_ptr() as usize;
            responder.returned(Encoding::Bytes, Body::of(address.to_le_bytes().to_vec()));
        });
        Agent::start_over_group(config(number), Arc::new(functions), watched[number as usize].clone())
    });
    let region = Region::from_vec(vec![7; LEN]);
    let here = region.as_ptr() as usize;
    let tensors = vec![TensorDesc::contiguous(DType::UInt8, vec![LEN as u64], 0)];
    let mut large = request("where", b"", Some(SOON));
    large.body = Body { tensors, buffers: vec![region], ..Body::default() };

    let future = agents[0].call(rank(1), large).unwrap();

    let there = usize::from_le_bytes(answer(&future).unwrap().try_into().unwrap());
    assert_eq!(covered(&watched[0].sent, here, LEN), LEN);
    assert_eq!(covered(&watched[1].received, there, LEN), LEN);
    leave_together(agents);
}

#[test]
fn closing_takes_a_moment_although_no_peer_says_anything() {
    let fabric = Fabric::new(2, false);
    let agent = Agent::start_over_group(config(0), Arc::new(functions()), fabric.member(0)).unwrap();
    agent.open(vec![info(&agent)]).unwrap();
    let start = now();

    agent.close(true, deadline(SOON));

    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

#[test]
fn a_rank_must_be_its_own_in_the_group() {
    let member = Fabric::new(2, true).member(1);
    assert_eq!(member.size(), 2);

    let error = Agent::start_over_group(config(0), Arc::new(functions()), member).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Usage);
}

/// The native interface over a group: names, calls, shutdown.
#[test]
fn native_workers_meet_over_a_group() {
    let fabric = Fabric::new(2, true);
    let start = |number: u32| {
        let member = fabric.member(number);
        thread(move || {
            let builder = over_group(tensorcall::Agent::builder(format!("native{number}")), member);
            builder.function("add", |a: i64, b: i64| a + b).start().unwrap()
        })
    };
    let starting = [start(0), start(1)];
    let agents: Vec<_> = starting.iter().map(finish).collect();

    let sum: i64 = agents[0].call_blocking("native1", "add", (2, 3)).unwrap();

    assert_eq!(sum, 5);
    let leaving: Vec<_> = agents.into_iter().map(|agent| thread(move || agent.shutdown().unwrap())).collect();
    leaving.iter().for_each(finish);
}

#[test]
fn a_native_worker_cannot_have_another_rank_than_its_group() {
    let member = Fabric::new(2, true).member(1);

    let error = over_group(tensorcall::Agent::builder("x").rank(0), member).start().unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Usage);
}
