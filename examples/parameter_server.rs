//! A parameter server: trainers compute gradients, the server adds them up and gives everybody the same model.
//!
//! The twin of `parameter_server.py`. The server is an object that stays on one worker; all trainers have a
//! reference for it. They send the gradients of each step by `server.call("update", …)`, an `async` function:
//! it holds no thread of the server while it waits for the other trainers. Each gets the parameters of the
//! next step.
//!
//! ```text
//! cargo run --release --example parameter_server
//! ```

#![allow(
    clippy::pedantic,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an ordinary program, which need not follow the habits of this repository"
)]

mod launch;

use std::future::poll_fn;
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use tensorcall::{Agent, Error, ErrorKind, RRef, Result, RpcFuture, Tensor};

const TRAINERS: usize = 3;
const STEPS: usize = 60;
const TRUTH: [f32; 3] = [2.0, -1.0, 0.5];
const RATE: f32 = 0.1;
const BATCH: u16 = 16;

fn main() -> ExitCode {
    launch::run(&["server", "trainer1", "trainer2", "trainer3"], |name| match name {
        "server" => serve(),
        _ => be_trained(name),
    })
}

/// Lives on one worker; the others have a reference for it.
#[derive(Default)]
struct Server(Mutex<Model>);

#[derive(Default)]
struct Model {
    weight: [f32; 3],
    gradient: [f32; 3],
    step: usize,
    arrived: usize,
    waiting: Vec<Waker>,
}

impl Server {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the gradients of one trainer; returns the number of this step.
    fn add(&self, gradient: &[f32]) -> usize {
        let mut model = self.model();
        let step = model.step;
        for (sum, part) in model.gradient.iter_mut().zip(gradient) {
            *sum += part;
        }
        model.arrived += 1;
        if model.arrived == TRAINERS {
            let gradient = std::mem::take(&mut model.gradient);
            for (weight, slope) in model.weight.iter_mut().zip(gradient) {
                *weight -= RATE * slope;
            }
            model.step += 1;
            model.arrived = 0;
            model.waiting.drain(..).for_each(Waker::wake);
        }
        step
    }
}

// Functions of the server.

/// What the trainers begin with.
fn parameters(server: RRef<Server>) -> Result<Tensor> {
    Tensor::from_slice(&server.local()?.model().weight, &[3])
}

/// Adds the gradients of one trainer; its answer comes when all have sent theirs.
async fn update(server: RRef<Server>, gradient: Tensor) -> Result<Tensor> {
    let server = server.local()?;
    let step = server.add(gradient.as_slice::<f32>()?);
    poll_fn(|context| {
        let mut model = server.model();
        if model.step > step {
            return Poll::Ready(());
        }
        model.waiting.push(context.waker().clone());
        Poll::Pending
    })
    .await;
    Tensor::from_slice(&server.model().weight, &[3])
}

// The function of trainers.

/// One trainer's part: its own data, a model as the server says; returns its last loss.
fn train(server: RRef<Server>, seed: u64) -> Result<f32> {
    let mut random = Random(seed);
    let mut weight: Tensor = server.call("parameters", ()).wait()?;
    let mut loss = 0.0;
    for _ in 0..STEPS {
        let mut gradient = [0.0f32; 3];
        loss = 0.0;
        for _ in 0..BATCH {
            let input = [random.next(), random.next(), random.next()];
            let dot = |weight: &[f32]| weight.iter().zip(input).map(|(weight, x)| weight * x).sum::<f32>();
            let wrong = dot(weight.as_slice()?) - dot(&TRUTH);
            let share = f32::from(BATCH) * TRAINERS as f32;
            loss += wrong * wrong / share;
            for (slope, x) in gradient.iter_mut().zip(input) {
                *slope += 2.0 * wrong * x / share;
            }
        }
        weight = server.call("update", (Tensor::from_slice(&gradient, &[3])?,)).wait()?;
    }
    Ok(loss)
}

// The workers.

fn serve() -> Result<()> {
    let agent = Agent::builder("server")
        .rendezvous(launch::meeting_place())
        .function("parameters", parameters)
        .function("update", update)
        .start()?;
    let server = agent.keep(Server::default());
    let trainers: Vec<RpcFuture<f32>> = (1..=TRAINERS)
        .map(|number| agent.call(&format!("trainer{number}"), "train", (&server, number)))
        .collect();
    let losses = trainers.into_iter().map(RpcFuture::wait).collect::<Result<Vec<_>>>()?;
    let weight = server.local()?.model().weight;
    println!("after {STEPS} steps of {TRAINERS} trainers the weight is {weight:.2?}");
    let found = weight.iter().zip(TRUTH).all(|(weight, truth)| (weight - truth).abs() < 0.02);
    if !found || losses.iter().any(|&loss| loss > 0.001) {
        let text = format!("it should be {TRUTH:?}; the losses are {losses:?}");
        return Err(Error::new(ErrorKind::Usage, text));
    }
    agent.shutdown()
}

fn be_trained(name: &str) -> Result<()> {
    let agent = Agent::builder(name).rendezvous(launch::meeting_place()).function("train", train).start()?;
    agent.shutdown()
}

/// Numbers from -1.7 to 1.7, of variance one: xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let unit = ((bits >> 40) as f32) / ((1u64 << 24) as f32);
        (2.0 * unit - 1.0) * 3.0f32.sqrt()
    }
}
