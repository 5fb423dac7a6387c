//! How do remote calls run in parallel, and on which threads?
//!
//! The twin of `parallel_calls.py`: worker2 sends a tensor to worker1 while the main thread of worker1 is in a
//! long computation, and once more while it sits in `shutdown()`. Then it makes eight calls at once of a
//! function that takes 50 ms. What happens is printed as it happens: when, on which worker, on which thread.
//!
//! ```text
//! cargo run --release --example parallel_calls
//! ```

#![allow(
    clippy::pedantic,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an ordinary program, which need not follow the habits of this repository"
)]

mod launch;

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tensorcall::{Agent, ErrorKind, Result, RpcFuture, State, Tensor};

/// How long worker1's main thread is busy.
const COMPUTATION: Duration = Duration::from_millis(1500);
/// What one call of `nap` takes.
const NAP: Duration = Duration::from_millis(50);

fn main() -> ExitCode {
    launch::run(&["worker1", "worker2"], |name| match name {
        "worker1" => worker1(),
        _ => worker2(),
    })
}

// What worker1 runs: its own long computation, and functions that worker2 calls.

/// How far worker1 has come. Its functions share it.
#[derive(Clone)]
struct Progress(Arc<(Mutex<Stage>, Condvar)>);

#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
enum Stage {
    Beginning,
    Computing,
    Halfway,
    Leaving,
}

fn worker1() -> Result<()> {
    let progress = Progress(Arc::new((Mutex::new(Stage::Beginning), Condvar::new())));
    let agent = Agent::builder("worker1")
        .rendezvous(launch::meeting_place())
        .state(progress.clone())
        .function("square", square)
        .function("wait_for", wait_for)
        .function("nap", nap)
        .start()?;
    say("worker1", &format!("begins a computation of {} s", COMPUTATION.as_secs_f32()));
    progress.reach(Stage::Computing);
    let start = Instant::now();
    let mut sum = 0.0f64;
    while start.elapsed() < COMPUTATION {
        sum = black_box((0..100_000).fold(sum, |sum, number| (sum + f64::from(number)).sqrt()));
        if start.elapsed() > COMPUTATION / 2 {
            progress.reach(Stage::Halfway);
        }
    }
    say("worker1", "is done computing and calls shutdown()");
    progress.reach(Stage::Leaving);
    agent.shutdown()?;
    say("worker1", "has left shutdown()");
    Ok(())
}

fn square(State(progress): State<Progress>, mut tensor: Tensor) -> Result<Tensor> {
    let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
    say("worker1", &format!("got {dtype} {shape:?}; the main thread is {:?}", progress.stage()));
    for element in tensor.as_mut_slice::<f32>()? {
        *element *= *element;
    }
    Ok(tensor)
}

/// Returns when worker1 has come so far; meanwhile it blocks one thread, and no other call.
fn wait_for(State(progress): State<Progress>, stage: String) {
    progress.wait_for(if stage == "halfway" { Stage::Halfway } else { Stage::Leaving });
}

fn nap(number: u32) -> String {
    say("worker1", &format!("nap {number} begins"));
    thread::sleep(NAP);
    format!("{:?}", thread::current().id())
}

impl Progress {
    fn stage(&self) -> Stage {
        *self.0.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn reach(&self, stage: Stage) {
        let mut now = self.0.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *now < stage {
            *now = stage;
            self.0.1.notify_all();
        }
    }

    fn wait_for(&self, stage: Stage) {
        let now = self.0.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let limit = Duration::from_secs(30);
        drop(self.0.1.wait_timeout_while(now, limit, |now| *now < stage));
    }
}

// What worker2 runs: the calls.

fn worker2() -> Result<()> {
    let agent = Agent::builder("worker2").rendezvous(launch::meeting_place()).start()?;
    let elements = (0..640_000).map(|number| f32::from(number as u16) / 1000.0).collect();
    let tensor = Tensor::from_vec(elements, &[2, 32, 100, 100])?;
    for stage in ["halfway", "leaving"] {
        agent.call_blocking::<()>("worker1", "wait_for", (stage,))?;
        say("worker2", "sends the tensor with call()");
        let future: RpcFuture<Tensor> = agent.call("worker1", "square", (&tensor,));
        let result = future.wait()?;
        let pairs = result.as_slice::<f32>()?.iter().zip(tensor.as_slice::<f32>()?);
        check(
            pairs.into_iter().all(|(square, number)| *square == number * number),
            "the squares are not exact",
        )?;
        say("worker2", "has the result, and it is exactly the square");
    }

    say("worker2", &format!("makes eight calls at once of a function that takes {} ms", NAP.as_millis()));
    let start = Instant::now();
    let naps: Vec<RpcFuture<String>> = (0..8).map(|number| agent.call("worker1", "nap", (number,))).collect();
    let mut threads = naps.into_iter().map(RpcFuture::wait).collect::<Result<Vec<_>>>()?;
    let took = start.elapsed();
    threads.sort();
    threads.dedup();
    let count = threads.len();
    say("worker2", &format!("all took {} ms together, on {count} threads of worker1", took.as_millis()));
    check(took < 8 * NAP, "the calls did not run in parallel")?;
    agent.shutdown()?;
    say("worker2", "so: calls run on threads of their own, whatever the main thread does, many at a time");
    Ok(())
}

fn check(holds: bool, otherwise: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(tensorcall::Error::new(ErrorKind::Usage, otherwise)) }
}

/// Prints one line of the timeline.
fn say(worker: &str, what: &str) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let thread = thread::current();
    let thread =
        if thread.name() == Some("main") { "main thread".to_owned() } else { format!("{:?}", thread.id()) };
    println!("{:3}.{:03} s  {worker}  {thread:12}  {what}", now.as_secs() % 1000, now.subsec_millis());
}
