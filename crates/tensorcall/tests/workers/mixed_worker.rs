//! A Rust worker for the tests of jobs in both languages (`python/tests/integration/test_mixed_jobs.py`).
//!
//! `mixed_worker NAME [--dynamic]` joins the job that the environment describes, says `ready` on its standard
//! output and serves until all shut down, or, in a dynamic group, until its standard input ends. The tests drive
//! it by calls: it calls whom it is told to call.

#![allow(
    clippy::needless_pass_by_value,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "an ordinary program, whose functions take what they are sent"
)]

use std::error::Error as StdError;
use std::io::Read;
use std::num::ParseIntError;
use std::process::ExitCode;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tensorcall::{
    Agent, DType, Error, ErrorKind, Keep, RRef, RemoteError, Result, RpcFuture, State, Tensor, Value,
};

type Counter = Mutex<i64>;

/// An error: kind, class, message and origin of what was raised, and all in one text.
type Described = (String, String, String, String, String);

fn matmul(left: Tensor, right: Tensor) -> Result<Tensor> {
    let (rows, inner, columns) = (left.shape()[0], left.shape()[1], right.shape()[1]);
    let mut product = Tensor::zeros(DType::Float32, &[rows, columns])?;
    for (place, target) in product.as_mut_slice::<f32>()?.iter_mut().enumerate() {
        for at in 0..inner {
            *target += left.get::<f32>(&[place / columns, at])? * right.get::<f32>(&[at, place % columns])?;
        }
    }
    Ok(product)
}

fn echo(value: Value) -> Value {
    value
}

fn parse(text: String) -> Result<i64, ParseIntError> {
    text.parse()
}

fn panics() -> i64 {
    panic!("as it was told to");
}

fn new_counter(start: i64) -> Keep<Counter> {
    Keep(Mutex::new(start))
}

fn add(counter: RRef<Counter>, more: i64) -> Result<i64> {
    let counter = counter.local()?;
    let mut count = counter.lock().map_err(|_| Error::new(ErrorKind::RRef, "poisoned"))?;
    *count += more;
    Ok(*count)
}

/// Calls a function of another worker and returns its result.
fn forward(agent: Agent, to: String, function: String, arguments: Vec<Value>) -> Result<Value> {
    agent.call_blocking(&to, &function, arguments)
}

/// What such a call fails with.
fn failure(
    agent: Agent,
    to: String,
    function: String,
    arguments: Vec<Value>,
    seconds: f64,
) -> Option<Described> {
    let agent = agent.with_timeout(Duration::from_secs_f64(seconds));
    let result: Result<Value> = agent.call_blocking(&to, &function, arguments);
    result.err().as_ref().map(describe)
}

fn describe(error: &Error) -> Described {
    let remote = error.remote();
    let message = remote.map(RemoteError::message).unwrap_or_default().to_owned();
    let origin = remote.map(RemoteError::origin).unwrap_or_default().to_owned();
    let class = remote.map(RemoteError::class).unwrap_or_default();
    (format!("{:?}", error.kind()), class, message, origin, error.to_string())
}

/// A reference to what a function of another worker returns there.
fn remote(agent: Agent, to: String, function: String, arguments: Vec<Value>) -> Result<RRef<Value>> {
    agent.remote(&to, &function, arguments)
}

/// The value of a reference, whoever has it.
fn fetch(rref: RRef<Value>) -> Result<Value> {
    rref.fetch_blocking()
}

/// What fetching it fails with.
fn fetch_failure(rref: RRef<Value>) -> Option<Described> {
    rref.fetch_blocking().err().as_ref().map(describe)
}

/// A reference to a value of this worker.
fn share(agent: Agent, value: Value) -> Result<RRef<Value>> {
    agent.share(value)
}

/// Takes its time.
fn nap(seconds: f64) {
    std::thread::sleep(Duration::from_secs_f64(seconds));
}

/// How many calls of `hang` there have been, and how many of them are given up.
#[derive(Default)]
struct Hanging {
    begun: AtomicI64,
    dropped: AtomicI64,
}

/// Does not end by itself.
async fn hang(State(hanging): State<Arc<Hanging>>) {
    struct Guard(Arc<Hanging>);

    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.dropped.fetch_add(1, Ordering::SeqCst);
        }
    }
    hanging.begun.fetch_add(1, Ordering::SeqCst);
    let _guard = Guard(hanging);
    std::future::pending::<()>().await;
}

fn hanging(State(hanging): State<Arc<Hanging>>) -> (i64, i64) {
    (hanging.begun.load(Ordering::SeqCst), hanging.dropped.load(Ordering::SeqCst))
}

/// Begins a call of `hang` on another worker and drops it; returns when that worker knows of both.
fn abandon(agent: Agent, to: String) -> Result<()> {
    let limit = Instant::now() + Duration::from_secs(30);
    let await_state = |expected: (i64, i64)| {
        while agent.call_blocking::<(i64, i64)>(&to, "hanging", ())? != expected {
            if Instant::now() > limit {
                return Err(Error::new(ErrorKind::Timeout, format!("it never was {expected:?} on {to}")));
            }
        }
        Ok(())
    };
    let call: RpcFuture<()> = agent.call(&to, "hang", ());
    await_state((1, 0))?;
    drop(call);
    await_state((1, 1))
}

/// Begins a call of another worker's function and returns.
fn begin(agent: Agent, to: String, function: String, arguments: Vec<Value>) {
    agent.call::<Value>(&to, &function, arguments).detach();
}

fn workers(agent: Agent) -> Vec<String> {
    agent.workers().into_iter().map(|worker| worker.name).collect()
}

/// Ends this process at once, like one that crashes but for the exit status, at which torchrun would end all.
fn die() {
    std::process::exit(0);
}

fn run() -> Result<(), Box<dyn StdError>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().ok_or("usage: mixed_worker NAME [--dynamic]")?;
    let dynamic = arguments.next().is_some();
    let builder = Agent::builder(name).from_env();
    let agent = if dynamic { builder.dynamic() } else { builder }
        .state(Arc::new(Hanging::default()))
        .function("matmul", matmul)
        .function("echo", echo)
        .function("parse", parse)
        .function("panics", panics)
        .function("new_counter", new_counter)
        .function("add", add)
        .function("forward", forward)
        .function("failure", failure)
        .function("remote", remote)
        .function("fetch", fetch)
        .function("fetch_failure", fetch_failure)
        .function("share", share)
        .function("nap", nap)
        .function("hang", hang)
        .function("hanging", hanging)
        .function("abandon", abandon)
        .function("begin", begin)
        .function("workers", workers)
        .function("die", die)
        .timeout(Duration::from_secs(30))
        .start()?;
    println!("ready");
    if dynamic {
        let mut nothing = Vec::new();
        std::io::stdin().read_to_end(&mut nothing)?;
    }
    agent.shutdown_timeout(Duration::from_secs(30))?;
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
