//! References: created, fetched, shared, given back, over every transport, and when workers or links go.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use common::gate::Gate;
use common::{
    Functions, Kind, SOON, answer, ask, config, deadline, eventually, finish, group, info, introduce,
    leave_together, nobody, now, rank, request, strangers, thread,
};
use parking_lot::Mutex;
use tensorcall::body::Body;
use tensorcall::proto::wire::message::{Encoding, FailureKind};
use tensorcall::{Agent, Error, ErrorKind, Kept, RRef, RRefCounts, RRefState, Request, Result, RpcFuture};

/// References that functions keep beyond their end.
type Shelf = Arc<Mutex<Vec<RRef>>>;

/// What a worker of these tests can do.
#[derive(Clone, Default)]
struct Bench {
    shelf: Shelf,
    gate: Gate,
    dropped: Arc<Mutex<Vec<std::thread::ThreadId>>>,
}

/// A value that tells on which thread it is dropped.
struct Tells(#[expect(dead_code, reason = "the value")] Vec<u8>, Bench);

impl Drop for Tells {
    fn drop(&mut self) {
        self.1.dropped.lock().push(std::thread::current().id());
    }
}

impl Bench {
    fn functions(&self) -> Functions {
        let (keeping, holding, raising, shelving) = (self.clone(), self.clone(), self.clone(), self.clone());
        let (returning, telling) = (self.clone(), self.clone());
        Functions::default()
            .plain("echo", <[u8]>::to_vec)
            .with("keep", |call, responder| {
                let value: Arc<dyn Any + Send + Sync> = Arc::new(call.body.payload.as_ref().to_vec());
                responder.keep(value);
            })
            .with("keep at the gate", move |call, responder| {
                keeping.gate.pass();
                responder.keep(Arc::new(call.body.payload.as_ref().to_vec()));
            })
            .with("tell", move |_, responder| responder.keep(Arc::new(Tells(vec![1], telling.clone()))))
            .with("raise", move |_, responder| {
                raising.gate.pass();
                responder.raised(Encoding::Bytes, Body::of(b"raised".to_vec()));
            })
            // Fetches what it gets and answers that.
            .with("fetch", |call, responder| {
                let values: Result<Vec<_>> = call.body.rrefs.iter().map(value_of).collect();
                match values {
                    Ok(values) => responder.returned(Encoding::Bytes, Body::of(values.concat())),
                    Err(error) => responder.failed(FailureKind::Internal, error.to_string()),
                }
            })
            .with("confirmed?", |call, responder| {
                let all = call.body.rrefs.iter().all(RRef::confirmed);
                responder.returned(Encoding::Bytes, Body::of(vec![u8::from(all)]));
            })
            .with("shelve", move |mut call, responder| {
                shelving.shelf.lock().append(&mut call.body.rrefs);
                responder.returned(Encoding::Bytes, Body::default());
            })
            .with("return", move |_, responder| {
                let rrefs = returning.shelf.lock().clone();
                responder.returned(Encoding::Bytes, Body { rrefs, ..Body::default() });
            })
            .with("hold", move |_, responder| {
                holding.gate.pass();
                responder.returned(Encoding::Bytes, Body::default());
            })
    }
}

/// One bench for each worker, shared by nobody.
fn benches(kind: Kind, count: u32) -> (Vec<Agent>, Vec<Bench>) {
    let benches: Vec<Bench> = (0..count).map(|_| Bench::default()).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let functions = || benches[next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)].functions();
    (group(kind, count, |_| {}, functions), benches)
}

fn remote(agent: &Agent, to: u32, function: &str, payload: &[u8]) -> (RRef, RpcFuture) {
    agent.remote(rank(to), request(function, payload, Some(SOON))).unwrap()
}

fn created(agent: &Agent, to: u32, payload: &[u8]) -> RRef {
    let (rref, creation) = remote(agent, to, "keep", payload);
    answer(&creation).unwrap();
    rref
}

/// The value of a reference, wherever it is.
fn value_of(rref: &RRef) -> Result<Vec<u8>> {
    if rref.is_owner() {
        let there = rref.when_local()?;
        tensorcall::lend(None, || assert!(there.wait_until(Some(deadline(SOON)))));
        return match rref.local_value()?.unwrap() {
            Kept::Value(value) => Ok(value.downcast_ref::<Vec<u8>>().unwrap().clone()),
            Kept::Packed(packed) => Ok(packed.body.payload.clone()),
            Kept::Failed { text, .. } => Err(Error::new(ErrorKind::Remote, &*text)),
        };
    }
    answer(&rref.fetch("to_here", Some(SOON))?)
}

fn with_rrefs(function: &str, rrefs: &[&RRef]) -> Request {
    let rrefs = rrefs.iter().map(|&rref| rref.clone()).collect();
    let plain = request(function, b"", Some(SOON));
    Request { body: Body { rrefs, ..Body::default() }, ..plain }
}

fn give(agent: &Agent, to: u32, function: &str, rrefs: &[&RRef]) -> Result<Vec<u8>> {
    answer(&agent.call(rank(to), with_rrefs(function, rrefs))?)
}

fn await_empty(agents: &[Agent]) {
    for agent in agents {
        eventually("the tables are empty", || agent.rref_counts() == RRefCounts::default());
    }
}

#[test]
fn a_value_stays_where_it_was_made_until_its_reference_goes() {
    for kind in Kind::ALL {
        let (agents, _) = benches(kind, 2);

        let (rref, creation) = remote(&agents[0], 1, "keep", b"value");
        assert_eq!(value_of(&rref).unwrap(), b"value");
        assert_eq!(value_of(&rref).unwrap(), b"value", "a copy each time");
        answer(&creation).unwrap();

        assert!(rref.confirmed() && !rref.is_owner());
        assert_eq!(rref.owner_name().unwrap().as_str(), "worker1");
        assert_eq!(agents[1].rref_counts(), RRefCounts { owners: 1, forks: 1, ..RRefCounts::default() });
        drop(rref);
        await_empty(&agents);
        leave_together(agents);
    }
}
