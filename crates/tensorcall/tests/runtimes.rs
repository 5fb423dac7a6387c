//! Futures of calls under runtimes that know nothing of them, and functions that use a runtime.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::future::poll_fn;
use std::pin::pin;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use tensorcall::{Agent, AgentBuilder, ErrorKind, RRef, Result, RpcFuture, State};

/// No wait of a test is longer.
const SOON: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(5);

/// What every runtime has.
trait Runtime: Clone + Send + Sync + 'static {
    fn new() -> Self;

    fn block_on<F: Future>(&self, future: F) -> F::Output;

    /// Runs a task on threads of the runtime.
    fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = T> + Send + 'static;

    /// By a timer of the runtime.
    fn sleep(time: Duration) -> impl Future<Output = ()> + Send;
}

#[derive(Clone)]
struct Tokio(Arc<tokio::runtime::Runtime>);

impl Runtime for Tokio {
    fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build();
        Self(Arc::new(runtime.unwrap()))
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.0.block_on(future)
    }

    fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = T> + Send + 'static {
        let handle = self.0.spawn(task);
        async { handle.await.unwrap() }
    }

    async fn sleep(time: Duration) {
        tokio::time::sleep(time).await;
    }
}

#[derive(Clone)]
struct Smol;

impl Runtime for Smol {
    fn new() -> Self {
        Self
    }

    fn block_on<F: Future>(&self, future: F) -> F::Output {
        smol::block_on(future)
    }

    fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> impl Future<Output = T> + Send + 'static {
        smol::spawn(task)
    }

    async fn sleep(time: Duration) {
        smol::Timer::after(time).await;
    }
}

macro_rules! under_all_runtimes {
    ($($case:ident,)*) => {
        mod tokio_runtime { $(#[test] fn $case() { super::$case(&<super::Tokio as super::Runtime>::new()); })* }
        mod smol_runtime { $(#[test] fn $case() { super::$case(&<super::Smol as super::Runtime>::new()); })* }
    };
}

under_all_runtimes! {
    tasks_await_calls_side_by_side,
    references_and_errors_are_awaited_too,
    a_call_that_loses_to_a_timer_is_cancelled,
    a_function_awaits_what_it_spawns_on_a_runtime,
}

fn pair(server: AgentBuilder) -> [Agent; 2] {
    let builders = [Agent::builder("caller"), server].map(|builder| builder.timeout(SOON));
    Agent::start_together(builders).unwrap().try_into().unwrap()
}

fn leave(agents: [Agent; 2]) {
    let threads = agents.map(|agent| std::thread::spawn(move || agent.shutdown_timeout(SOON).unwrap()));
    for thread in threads {
        thread.join().unwrap();
    }
}

fn tasks_await_calls_side_by_side<R: Runtime>(runtime: &R) {
    let agents = pair(Agent::builder("server").function("double", async |n: u32| 2 * n));
    let caller = agents[0].clone();

    let sum = runtime.block_on(async {
        let call = |n: u32| {
            let caller = caller.clone();
            runtime.spawn(async move { caller.call::<u32>("server", "double", (n,)).await.unwrap() })
        };
        let tasks: Vec<_> = (0..64).map(call).collect();
        let mut sum = 0;
        for task in tasks {
            sum += task.await;
        }
        sum
    });

    assert_eq!(sum, 64 * 63);
    leave(agents);
}

fn references_and_errors_are_awaited_too<R: Runtime>(runtime: &R) {
    let agents = pair(Agent::builder("server").function("parse", |text: String| text.parse::<i64>()));
    let caller = agents[0].clone();
    let fetch = |text: &str| {
        let rref: RRef<i64> = caller.remote("server", "parse", (text,)).unwrap();
        runtime.spawn(async move { rref.fetch().await })
    };

    let (number, error) = runtime.block_on(async { (fetch("7").await, fetch("x").await) });

    assert_eq!(number.unwrap(), 7);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Raised);
    leave(agents);
}

/// Tells when it is dropped.
struct Guard(Sender<()>);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.send(());
    }
}

fn a_call_that_loses_to_a_timer_is_cancelled<R: Runtime>(runtime: &R) {
    let (sender, dropped) = channel::<()>();
    let agents = pair(Agent::builder("server").state(Arc::new(Mutex::new(sender))).function(
        "forever",
        async |State(tell): State<Arc<Mutex<Sender<()>>>>| {
            let _guard = Guard(tell.lock().unwrap().clone());
            std::future::pending::<()>().await;
        },
    ));
    let caller = agents[0].clone();

    let won = runtime.block_on(async {
        let mut call: RpcFuture<()> = caller.call("server", "forever", ());
        let mut timer = pin!(R::sleep(SHORT));
        poll_fn(|context| match (pin!(&mut call).poll(context), timer.as_mut().poll(context)) {
            (Poll::Ready(result), _) => Poll::Ready(Some(result)),
            (_, Poll::Ready(())) => Poll::Ready(None),
            _ => Poll::Pending,
        })
        .await
    });

    assert!(won.is_none());
    dropped.recv_timeout(SOON).unwrap();
    leave(agents);
}

fn a_function_awaits_what_it_spawns_on_a_runtime<R: Runtime>(runtime: &R) {
    async fn later<R: Runtime>(State(runtime): State<R>, n: u32) -> u32 {
        runtime.spawn(R::sleep(SHORT)).await;
        n + 1
    }
    let agents = pair(Agent::builder("server").state(runtime.clone()).function("later", later::<R>));

    let results: Result<Vec<u32>> = runtime.block_on(async {
        let calls: Vec<RpcFuture<u32>> = (0..8).map(|n| agents[0].call("server", "later", (n,))).collect();
        let mut results = Vec::new();
        for call in calls {
            results.push(call.await?);
        }
        Ok(results)
    });

    assert_eq!(results.unwrap(), [1, 2, 3, 4, 5, 6, 7, 8]);
    leave(agents);
}
