//! Backward passes between agents, with a local engine that can do one thing.
//!
//! The workers stand in a ring. A number goes round and is multiplied by each worker's weight; the gradient
//! comes back the other way. Message `k` goes from worker `k % count` to the next one.

#![expect(clippy::unwrap_used, reason = "a test stops where something is wrong")]

mod common;

use std::any::Any;
use std::collections::HashSet;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Duration;

use common::gate::Gate;
use common::*;
use tensorcall::engine::autograd::{Arrived, Found, LocalEngine, PassError, Roots};
use tensorcall::engine::body::Body;
use tensorcall::engine::proto::autograd::{Pass, Plan, PlannedRecv};
use tensorcall::engine::proto::ids::PassId;
use tensorcall::engine::proto::wire::message::{Encoding, FailureKind};
use tensorcall::engine::sync::Mutex;
use tensorcall::engine::transport::group::Fabric;
use tensorcall::engine::transport::memory::Hub;
use tensorcall::engine::{
    Agent, ErrorKind, Handler, InboundCall, Responder, Response, RpcFuture, ThreadHook,
};

/// What a worker's engine does instead of its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    Raise,
    Panic,
    /// It sent something that nobody has read.
    Unread,
    /// Its plan says that each of two workers waits for the other.
    Knot,
}

/// A worker of the ring.
#[derive(Clone)]
struct Ring {
    own: u64,
    count: u64,
    hops: u64,
    trouble: Arc<Mutex<Option<Trouble>>>,
    gate: Option<Gate>,
    /// Gradients of the number that set out, and how passes ended.
    arrived: Arc<Mutex<Vec<u64>>>,
    ended: Arc<Mutex<Vec<Option<String>>>>,
    busy: Arc<Mutex<HashSet<PassId>>>,
    /// Who ran products.
    threads: Arc<Mutex<HashSet<ThreadId>>>,
}

impl Ring {
    fn new(own: u64, count: u64, hops: u64) -> Self {
        Self {
            own,
            count,
            hops,
            trouble: Arc::default(),
            gate: None,
            arrived: Arc::default(),
            ended: Arc::default(),
            busy: Arc::default(),
            threads: Arc::default(),
        }
    }

    fn weight(&self) -> u64 {
        self.own + 2
    }

    fn sent(&self) -> Vec<u64> {
        (0..self.hops).filter(|hop| hop % self.count == self.own).collect()
    }

    fn knot(&self) -> Plan {
        let other = rank(u32::try_from(1 - self.own).unwrap());
        let (sent, received) = (90 + self.own, 91 - self.own);
        Plan {
            sends: vec![(sent, other)],
            roots: self.own == 0,
            recvs: vec![PlannedRecv { message: received, from: other, reach: vec![0] }],
            known: vec![],
        }
    }
}

impl LocalEngine for Ring {
    fn plan(&self, _: &Pass, roots: Option<Roots>) -> Result<Plan, PassError> {
        if *self.trouble.lock() == Some(Trouble::Knot) {
            return Ok(self.knot());
        }
        let mut sent = self.sent();
        if *self.trouble.lock() == Some(Trouble::Unread) {
            sent.push(1000 + self.own);
        }
        let neighbour = |rank_of: u64| rank(u32::try_from(rank_of % self.count).unwrap());
        let received = (0..self.hops).filter(|hop| (hop + 1) % self.count == self.own);
        let recvs = received.map(|hop| {
            // What comes in goes out by the next hop, or is what the pass begins from.
            let reach = sent.iter().position(|&next| next == hop + 1);
            let reach = reach.or(roots.is_some().then_some(sent.len()));
            PlannedRecv {
                message: hop,
                from: neighbour(self.own + self.count - 1),
                reach: reach.into_iter().collect(),
            }
        });
        Ok(Plan {
            recvs: recvs.collect(),
            sends: sent.iter().map(|&hop| (hop, neighbour(self.own + 1))).collect(),
            roots: roots.is_some(),
            known: vec![],
        })
    }

    fn vjp(
        &self,
        pass: &Pass,
        arrived: Vec<Arrived>,
        wanted: &[u64],
        _: bool,
    ) -> Result<Vec<Found>, PassError> {
        assert!(self.busy.lock().insert(pass.id), "two things at once in one pass");
        self.threads.lock().insert(std::thread::current().id());
        if let Some(gate) = &self.gate {
            gate.pass();
        }
        self.busy.lock().remove(&pass.id);
        match *self.trouble.lock() {
            Some(Trouble::Raise) => {
                return Err(PassError::raised(Encoding::Pickle, Body::of(b"an exception".to_vec())));
            }
            Some(Trouble::Panic) => panic!("as planned"),
            _ => {}
        }
        let mut found = Vec::new();
        for Arrived { message, gradients } in arrived {
            let (next, gradient) = match gradients {
                None => (self.hops, 1),
                Some((_, body)) => {
                    let bytes: [u8; 8] = body.payload.as_ref().try_into().unwrap();
                    (message.unwrap(), u64::from_le_bytes(bytes).wrapping_mul(self.weight()))
                }
            };
            let Some(hop) = next.checked_sub(1) else {
                self.arrived.lock().push(gradient);
                continue;
            };
            assert!(wanted.contains(&hop));
            let body = Body::of(gradient.to_le_bytes().to_vec());
            found.push(Found { message: hop, gradients: Some((Encoding::Bytes, body)) });
        }
        Ok(found)
    }

    fn end(&self, _: &Pass, error: Option<&PassError>) {
        self.ended.lock().push(error.map(ToString::to_string));
    }
}

impl ThreadHook for Ring {
    fn run(&self, body: &mut (dyn FnMut() + Send)) {
        body();
    }
}

impl Handler for Ring {
    fn handle(&self, _: InboundCall, responder: Responder) {
        responder.failed(FailureKind::Usage, "there are no functions here".to_owned());
    }

    fn local_engine(&self) -> Option<&dyn LocalEngine> {
        Some(self)
    }
}

fn start(kind: Kind, rings: &[Ring]) -> Vec<Agent> {
    let hub = Hub::new();
    let fabric = Fabric::new(u32::try_from(rings.len()).unwrap(), true);
    let start = |(number, ring): (u32, &Ring)| {
        let handler = Arc::new(ring.clone());
        match kind {
            Kind::Memory => Agent::start_in_memory(config(number), handler, &hub).unwrap(),
            Kind::Unix | Kind::Tcp => Agent::start(config(number), handler).unwrap(),
            Kind::Group { .. } => {
                Agent::start_over_group(config(number), handler, fabric.member(number)).unwrap()
            }
        }
    };
    let agents: Vec<_> = (0..).zip(rings).map(start).collect();
    introduce(&agents);
    agents
}

/// Workers that pass a number on `hops` times, so that it ends where it set out.
fn ring(kind: Kind, count: u64, hops: u64) -> (Vec<Agent>, Vec<Ring>) {
    assert_eq!(hops % count, 0);
    let rings: Vec<_> = (0..count).map(|own| Ring::new(own, count, hops)).collect();
    (start(kind, &rings), rings)
}

fn backward(agent: &Agent, patience: Option<Duration>) -> RpcFuture {
    let roots: Arc<dyn Any + Send + Sync> = Arc::new("roots");
    agent.backward(5, roots, false, patience).unwrap()
}

fn outcome(future: &RpcFuture) -> tensorcall::engine::Result<Response> {
    assert!(future.wait_until(Some(deadline(SOON))), "the pass does not end");
    future.take().unwrap()
}

fn await_ends(rings: &[Ring], count: usize) {
    for ring in rings {
        eventually("the pass ends everywhere", || ring.ended.lock().len() == count);
    }
}

#[test]
fn a_gradient_goes_round_as_often_as_the_number_did() {
    for kind in [Kind::Memory, Kind::Unix, Kind::Group { any_source: false }] {
        let (agents, rings) = ring(kind, 3, 12);
        let weights: u64 = 2 * 3 * 4;

        for pass in 1..=3 {
            let response = outcome(&backward(&agents[0], Some(SOON))).unwrap();

            assert!(!response.raised && response.body.is_empty());
            assert_eq!(*rings[0].arrived.lock(), vec![weights.pow(4); pass], "{kind:?}");
            // It has ended everywhere before its beginner knows.
            assert!(rings.iter().all(|ring| *ring.ended.lock() == vec![None; pass]));
            assert!(agents.iter().all(|agent| agent.current_passes() == 0));
        }
        leave_together(agents);
    }
}

#[test]
fn a_thread_that_waits_at_a_desk_does_its_workers_part() {
    let (agents, rings) = ring(Kind::Unix, 3, 12);
    let me = std::thread::current().id();

    let desk = agents[0].begin_backward(5, Arc::new("roots"), false, Some(SOON)).unwrap();
    assert!(desk.work_until(Some(deadline(SOON))));

    assert!(!outcome(desk.future()).unwrap().raised);
    assert_eq!(*rings[0].threads.lock(), HashSet::from([me]));
    assert!(!rings[1].threads.lock().contains(&me));
    leave_together(agents);
}

#[test]
fn a_desk_that_is_left_leaves_its_work_to_the_pool() {
    let gate = Gate::default();
    let held = Ring { gate: Some(gate.clone()), ..Ring::new(1, 3, 12) };
    let rings = [Ring::new(0, 3, 12), held, Ring::new(2, 3, 12)];
    let agents = start(Kind::Memory, &rings);

    let desk = agents[0].begin_backward(5, Arc::new("roots"), false, Some(SOON)).unwrap();
    assert!(!desk.work_until(Some(deadline(Duration::from_millis(20)))), "the second worker is held");
    let future = desk.future().clone();
    drop(desk);
    gate.open();

    assert!(!outcome(&future).unwrap().raised);
    assert!(rings[0].threads.lock().len() > 1, "what came later was done elsewhere");
}

#[test]
fn a_worker_that_sends_to_itself_is_its_own_ring() {
    let (agents, rings) = ring(Kind::Memory, 1, 10);

    outcome(&backward(&agents[0], Some(SOON))).unwrap();

    assert_eq!(*rings[0].arrived.lock(), [1 << 10]);
}

#[test]
fn many_passes_go_on_at_once() {
    let (agents, rings) = ring(Kind::Memory, 4, 8);

    let passes: Vec<_> = (0..50).map(|_| backward(&agents[0], Some(SOON))).collect();

    for pass in passes {
        assert!(!outcome(&pass).unwrap().raised);
    }
    let product: u64 = 2 * 3 * 4 * 5;
    assert_eq!(*rings[0].arrived.lock(), vec![product.pow(2); 50]);
}

#[test]
fn an_exception_of_one_engine_comes_to_the_beginner_and_ends_the_pass_everywhere() {
    for trouble in [Trouble::Raise, Trouble::Panic] {
        let (agents, rings) = ring(Kind::Memory, 4, 8);
        *rings[2].trouble.lock() = Some(trouble);

        match outcome(&backward(&agents[0], Some(SOON))) {
            Ok(response) => {
                assert_eq!(trouble, Trouble::Raise);
                assert!(response.raised);
                assert_eq!(response.body.payload.as_ref(), b"an exception");
            }
            Err(error) => {
                assert_eq!(trouble, Trouble::Panic);
                assert_eq!((error.kind(), error.to_string().as_str()), PANICKED);
            }
        }
        await_ends(&rings, 1);
        assert!(rings.iter().all(|ring| ring.ended.lock()[0].is_some()));

        *rings[2].trouble.lock() = None;
        assert!(!outcome(&backward(&agents[0], Some(SOON))).unwrap().raised);
        leave_together(agents);
    }
}

const PANICKED: (ErrorKind, &str) = (ErrorKind::Autograd, "the local engine panicked");

#[test]
fn a_pass_whose_worker_dies_ends_on_all_others() {
    for kind in [Kind::Memory, Kind::Unix, Kind::Group { any_source: false }] {
        let gate = Gate::default();
        let mut rings: Vec<_> = (0..4).map(|own| Ring::new(own, 4, 8)).collect();
        rings[2].gate = Some(gate.clone());
        let mut agents = start(kind, &rings);
        let pass = backward(&agents[0], None);
        gate.await_arrivals(1);

        let lost = agents.remove(2);
        let closing = thread(move || lost.close(false, deadline(Duration::ZERO)));

        let error = outcome(&pass).unwrap_err();
        assert!(error.to_string().contains("worker2"), "{error}");
        gate.open();
        finish(&closing);
        let others: Vec<_> = rings.iter().filter(|ring| ring.own != 2).cloned().collect();
        await_ends(&others, 1);
        assert!(agents.iter().all(|agent| agent.current_passes() == 0));
    }
}

#[test]
fn messages_that_nobody_has_read_hold_no_pass_up() {
    let (agents, rings) = ring(Kind::Unix, 3, 6);
    for ring in &rings {
        *ring.trouble.lock() = Some(Trouble::Unread);
    }

    assert!(!outcome(&backward(&agents[0], Some(SOON / 2))).unwrap().raised);

    assert_eq!(*rings[0].arrived.lock(), [24 * 24]);
}

#[test]
fn a_pass_that_cannot_move_ends_when_patience_is_over_and_names_what_did_not_come() {
    let (agents, rings) = ring(Kind::Memory, 2, 2);
    for ring in &rings {
        *ring.trouble.lock() = Some(Trouble::Knot);
    }

    let error = outcome(&backward(&agents[0], Some(Duration::from_millis(300)))).unwrap_err();

    let text = error.to_string();
    assert!(text.contains("no progress for") && text.contains("to rank"), "{text}");
    await_ends(&rings, 1);
}

#[test]
fn a_group_is_not_quiet_while_a_pass_goes_on() {
    let gate = Gate::default();
    let mut rings: Vec<_> = (0..2).map(|own| Ring::new(own, 2, 4)).collect();
    rings[1].gate = Some(gate.clone());
    let agents = start(Kind::Memory, &rings);
    let pass = backward(&agents[0], None);
    gate.await_arrivals(1);

    for agent in &agents {
        let quiet = agent.quiesce(false, Some(deadline(Duration::from_millis(50))));
        assert_eq!(quiet.unwrap_err().kind(), ErrorKind::Timeout);
    }
    gate.open();

    assert!(!outcome(&pass).unwrap().raised);
    leave_together(agents);
}

#[test]
fn closing_an_agent_ends_the_passes_that_began_there() {
    let gate = Gate::default();
    let mut rings: Vec<_> = (0..2).map(|own| Ring::new(own, 2, 4)).collect();
    rings[1].gate = Some(gate.clone());
    let agents = start(Kind::Memory, &rings);
    let pass = backward(&agents[0], None);
    gate.await_arrivals(1);

    agents[0].close(false, deadline(Duration::ZERO));

    assert_eq!(outcome(&pass).unwrap_err().kind(), ErrorKind::ShuttingDown);
    gate.open();
    assert!(agents[0].backward(5, Arc::new(()), false, None).is_err());
}

#[test]
fn workers_without_a_local_engine_take_no_part() {
    let agents = memory_group(1, |_| {}, Functions::default);

    let error = agents[0].backward(5, Arc::new(()), false, None).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Usage);
}
