//! Workers that make references, share them, keep them and give them back.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tensorcall::engine::body::Body;
use tensorcall::engine::proto::ids::RRefId;
use tensorcall::engine::proto::wire::message::{Encoding, FailureKind};
use tensorcall::engine::sync::Mutex;
use tensorcall::engine::{Agent, Error, ErrorKind, Kept, RRef, RRefCounts, Request, Result, RpcFuture};

use super::gate::Gate;
use super::{Functions, Kind, SOON, answer, deadline, eventually, group, rank, request};

/// References that functions keep beyond their end.
pub(crate) type Shelf = Arc<Mutex<Vec<RRef>>>;

/// What a worker of these tests can do.
#[derive(Clone, Default)]
pub(crate) struct Bench {
    pub(crate) shelf: Shelf,
    pub(crate) gate: Gate,
    /// Names of the threads on which values went.
    pub(crate) dropped: Arc<Mutex<Vec<String>>>,
    /// Held by a value while it goes.
    pub(crate) lock: Arc<Mutex<()>>,
}

/// A value that tells on which thread it is dropped.
struct Tells(Bench);

impl Drop for Tells {
    fn drop(&mut self) {
        let _lock = self.0.lock.lock();
        self.0.dropped.lock().push(std::thread::current().name().unwrap_or_default().to_owned());
    }
}

impl Bench {
    pub(crate) fn functions(&self) -> Functions {
        let (keeping, holding, raising, shelving) = (self.clone(), self.clone(), self.clone(), self.clone());
        let (returning, telling, late) = (self.clone(), self.clone(), self.clone());
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
            .with("tell", move |_, responder| responder.keep(Arc::new(Tells(telling.clone()))))
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
            .with("return at the gate", move |_, responder| {
                late.gate.pass();
                let rrefs = late.shelf.lock().clone();
                responder.returned(Encoding::Bytes, Body { rrefs, ..Body::default() });
            })
            .with("hold", move |_, responder| {
                holding.gate.pass();
                responder.returned(Encoding::Bytes, Body::default());
            })
    }
}

/// One bench for each worker, shared by nobody.
pub(crate) fn benches(kind: Kind, count: u32) -> (Vec<Agent>, Vec<Bench>) {
    let benches: Vec<Bench> = (0..count).map(|_| Bench::default()).collect();
    let next = AtomicUsize::new(0);
    let functions = || benches[next.fetch_add(1, Ordering::Relaxed)].functions();
    (group(kind, count, |_| {}, functions), benches)
}

pub(crate) fn remote(agent: &Agent, to: u32, function: &str, payload: &[u8]) -> (RRef, RpcFuture) {
    agent.remote(rank(to), request(function, payload, Some(SOON))).unwrap()
}

pub(crate) fn created(agent: &Agent, to: u32, payload: &[u8]) -> RRef {
    let (rref, creation) = remote(agent, to, "keep", payload);
    answer(&creation).unwrap();
    rref
}

/// The value of a reference, wherever it is.
pub(crate) fn value_of(rref: &RRef) -> Result<Vec<u8>> {
    if rref.is_owner() {
        let there = rref.when_local()?;
        tensorcall::engine::lend(None, || assert!(there.wait_until(Some(deadline(SOON)))));
        return match rref.local_value()?.unwrap() {
            Kept::Value(value) => Ok(value.downcast_ref::<Vec<u8>>().unwrap().clone()),
            Kept::Packed(packed) => Ok(packed.body.payload.clone()),
            Kept::Failed { text, .. } => Err(Error::new(ErrorKind::Remote, &*text)),
        };
    }
    answer(&rref.fetch("to_here", Some(SOON))?)
}

pub(crate) fn with_rrefs(function: &str, rrefs: &[&RRef]) -> Request {
    let rrefs = rrefs.iter().map(|&rref| rref.clone()).collect();
    let plain = request(function, b"", Some(SOON));
    Request { body: Body { rrefs, ..Body::default() }, ..plain }
}

pub(crate) fn give(agent: &Agent, to: u32, function: &str, rrefs: &[&RRef]) -> Result<Vec<u8>> {
    answer(&agent.call(rank(to), with_rrefs(function, rrefs))?)
}

pub(crate) fn await_empty(agents: &[Agent]) {
    for agent in agents {
        eventually("the tables are empty", || agent.rref_counts() == RRefCounts::default());
    }
}

/// The one reference that a worker has kept.
pub(crate) fn take(bench: &Bench) -> RRef {
    let mut shelf = bench.shelf.lock();
    assert_eq!(shelf.len(), 1);
    shelf.pop().unwrap()
}

/// What that refers to.
pub(crate) fn holder_of(bench: &Bench) -> RRefId {
    bench.shelf.lock()[0].id()
}
