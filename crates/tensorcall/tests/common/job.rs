//! A whole job in one process: workers that meet in a store, call through memory and leave together, and what
//! that costs. The benchmark runs it as well (`benches/job`), so it uses nothing of the other tests.
#![allow(
    clippy::disallowed_methods,
    clippy::expect_used,
    reason = "it takes the time itself, and a worker that panics ends it"
)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tensorcall::engine::over_hub;
use tensorcall::engine::transport::memory::Hub;
use tensorcall::rendezvous::Rendezvous;
use tensorcall::store::{MemoryStore, Store, StoreError};
use tensorcall::{Agent, Result, RpcFuture};

/// Room for the thread of a worker, of which there are many.
const STACK: usize = 256 << 10;

/// What a part of the job's life took, of all workers together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Phase {
    pub(crate) name: &'static str,
    /// Between workers.
    pub(crate) messages: u64,
    /// Operations on the store.
    pub(crate) operations: u64,
    #[allow(dead_code, reason = "the benchmark shows it")]
    pub(crate) took: Duration,
}

/// Runs a job of so many workers, which has `limit` for each of its parts: `init`; `ring`, in which each worker
/// calls the next; `star`, in which all call the first; and `shutdown`, the graceful one.
///
/// # Errors
///
/// What the first worker that failed says.
pub(crate) fn run(workers: u32, limit: Duration) -> Result<Vec<Phase>> {
    let job = Job { hub: Hub::new(), store: Arc::default(), workers, limit };
    let mut phases = Vec::new();
    let agents = job.phase("init", &mut phases, || each(0..workers, |rank| job.start(rank)))?;
    let next = |rank: usize| (rank + 1) % agents.len();
    job.phase("ring", &mut phases, || call(&agents, next))?;
    job.phase("star", &mut phases, || call(&agents, |_| 0))?;
    job.phase("shutdown", &mut phases, || each(&agents, |agent| agent.shutdown_timeout(limit)))?;
    Ok(phases)
}

struct Job {
    hub: Arc<Hub>,
    store: Arc<Counting>,
    workers: u32,
    limit: Duration,
}

impl Job {
    fn start(&self, rank: u32) -> Result<Agent> {
        let store = Arc::clone(&self.store) as Arc<dyn Store>;
        let meeting = Rendezvous::in_store(store, rank, Some(self.workers))?;
        let builder = Agent::builder(name(rank as usize)).meet_at(Arc::new(meeting)).timeout(self.limit);
        over_hub(builder, Arc::clone(&self.hub)).function("double", |number: u64| 2 * number).start()
    }

    fn phase<T>(
        &self,
        name: &'static str,
        phases: &mut Vec<Phase>,
        run: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let (messages, operations, began) = (self.hub.messages(), self.store.operations(), Instant::now());
        let result = run()?;
        phases.push(Phase {
            name,
            messages: self.hub.messages() - messages,
            operations: self.store.operations() - operations,
            took: began.elapsed(),
        });
        Ok(result)
    }
}

fn name(rank: usize) -> String {
    format!("worker{rank}")
}

/// What all workers do at once, each on a thread of its own.
fn each<W: Send, T: Send>(
    workers: impl IntoIterator<Item = W>,
    run: impl Fn(W) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let run = &run;
    thread::scope(|scope| {
        let start = |worker| {
            let thread = thread::Builder::new().stack_size(STACK);
            thread.spawn_scoped(scope, move || run(worker)).expect("a thread for each worker")
        };
        let threads: Vec<_> = workers.into_iter().map(start).collect();
        threads.into_iter().map(|thread| thread.join().expect("a worker panicked")).collect()
    })
}

/// Each worker calls the one that `to` says, all at once.
fn call(agents: &[Agent], to: impl Fn(usize) -> usize) -> Result<()> {
    let start = |(rank, agent): (usize, &Agent)| agent.call(&name(to(rank)), "double", (rank as u64,));
    let calls: Vec<RpcFuture<u64>> = agents.iter().enumerate().map(start).collect();
    for (rank, call) in (0..).zip(calls) {
        assert_eq!(call.wait()?, 2 * rank);
    }
    Ok(())
}

type Found<T> = std::result::Result<T, StoreError>;

/// Counts the operations on a store.
#[derive(Default)]
struct Counting {
    store: MemoryStore,
    operations: AtomicU64,
}

impl Counting {
    fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    fn count(&self) -> &MemoryStore {
        self.operations.fetch_add(1, Ordering::Relaxed);
        &self.store
    }
}

impl fmt::Debug for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Counting").field("operations", &self.operations).finish_non_exhaustive()
    }
}

impl Store for Counting {
    fn set(&self, key: &str, value: &[u8]) -> Found<()> {
        self.count().set(key, value)
    }
    fn get(&self, key: &str) -> Found<Option<Vec<u8>>> {
        self.count().get(key)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Found<Vec<u8>> {
        self.count().compare_set(key, expected, desired)
    }
    fn add(&self, key: &str, delta: i64) -> Found<i64> {
        self.count().add(key, delta)
    }
    fn append(&self, key: &str, more: &[u8]) -> Found<()> {
        self.count().append(key, more)
    }
    fn check(&self, keys: &[&str]) -> Found<bool> {
        self.count().check(keys)
    }
    fn wait(&self, keys: &[&str], limit: Option<Instant>) -> Found<()> {
        self.count().wait(keys, limit)
    }
    fn delete(&self, key: &str) -> Found<bool> {
        self.count().delete(key)
    }
    fn multi_get(&self, keys: &[&str]) -> Found<Vec<Vec<u8>>> {
        self.count().multi_get(keys)
    }
}
