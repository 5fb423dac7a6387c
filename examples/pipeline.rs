//! A pipeline: a network of two layers lies on two workers, and batches go through it in pieces.
//!
//! The twin of `train_pipeline.py`, with the gradients written by hand. The master cuts each batch into
//! pieces: while the second worker has the first of them, the first worker has the next. What the first half
//! makes of a piece goes straight to the second half, by a reference that the master hands on without looking
//! at it; the gradients take the same way back. Each half is a value that stays on its worker and is
//! optimized there.
//!
//! ```text
//! cargo run --release --example pipeline
//! ```

#![allow(
    clippy::pedantic,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an ordinary program, which need not follow the habits of this repository"
)]

mod launch;

use std::collections::HashMap;
use std::process::ExitCode;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tensorcall::{Agent, Error, ErrorKind, Keep, RRef, Result, RpcFuture, Tensor};

const STEPS: usize = 300;
const BATCH: usize = 32;
const PIECES: usize = 4;
const INPUTS: usize = 2;
const HIDDEN: usize = 16;
const RATE: f32 = 0.2;

fn main() -> ExitCode {
    launch::run(&["master", "first", "second"], |name| match name {
        "master" => master(),
        _ => serve(name),
    })
}

/// One half of the network: a layer, with `tanh` behind it or without.
struct Half {
    tanh: bool,
    state: Mutex<State>,
}

struct State {
    weight: Matrix,
    gradient: Matrix,
    /// What went in and what came out, by piece, until the gradient comes back.
    pieces: HashMap<usize, (Matrix, Matrix)>,
}

impl Half {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// The functions of both halves.

fn half(inputs: usize, outputs: usize, tanh: bool) -> Keep<Half> {
    let mut random = Random(inputs as u64);
    let weight = Matrix::new(inputs, outputs, |_, _| random.next());
    let gradient = Matrix::new(inputs, outputs, |_, _| 0.0);
    Keep(Half { tanh, state: Mutex::new(State { weight, gradient, pieces: HashMap::new() }) })
}

/// Takes a reference to its input: it is fetched from wherever it is.
fn forward(half: RRef<Half>, piece: usize, input: RRef<Tensor>) -> Result<Tensor> {
    let (half, input) = (half.local()?, Matrix::from(&input.fetch_blocking()?)?);
    let mut state = half.state();
    let mut output = input.times(&state.weight);
    if half.tanh {
        output.each(|x| *x = x.tanh());
    }
    let tensor = output.tensor();
    state.pieces.insert(piece, (input, output));
    tensor
}

/// Takes a reference to the gradient of its output; returns that of its input.
fn backward(half: RRef<Half>, piece: usize, gradient: RRef<Tensor>) -> Result<Tensor> {
    let (half, mut gradient) = (half.local()?, Matrix::from(&gradient.fetch_blocking()?)?);
    let mut state = half.state();
    let Some((input, output)) = state.pieces.remove(&piece) else {
        return Err(Error::new(ErrorKind::Usage, format!("piece {piece} did not come this way")));
    };
    if half.tanh {
        for (slope, y) in gradient.items.iter_mut().zip(&output.items) {
            *slope *= 1.0 - y * y;
        }
    }
    let part = input.transposed().times(&gradient);
    for (sum, part) in state.gradient.items.iter_mut().zip(part.items) {
        *sum += part;
    }
    gradient.times(&state.weight.transposed()).tensor()
}

fn optimize(half: RRef<Half>) -> Result<()> {
    let half = half.local()?;
    let state = &mut *half.state();
    for (weight, slope) in state.weight.items.iter_mut().zip(&mut state.gradient.items) {
        *weight -= RATE * std::mem::take(slope);
    }
    Ok(())
}

fn serve(name: &str) -> Result<()> {
    let agent = Agent::builder(name)
        .rendezvous(launch::meeting_place())
        .function("half", half)
        .function("forward", forward)
        .function("backward", backward)
        .function("optimize", optimize)
        .start()?;
    agent.shutdown()
}

// What the master does.

fn master() -> Result<()> {
    let agent = Agent::builder("master").rendezvous(launch::meeting_place()).start()?;
    let first: RRef<Half> = agent.remote("first", "half", (INPUTS + 1, HIDDEN, true))?;
    let second: RRef<Half> = agent.remote("second", "half", (HIDDEN, 1, false))?;
    let mut random = Random(7);
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        losses.push(step(&agent, &first, &second, &mut random)?);
    }
    let mean = |losses: &[f32]| losses.iter().sum::<f32>() / losses.len() as f32;
    let (before, after) = (mean(&losses[..10]), mean(&losses[STEPS - 10..]));
    println!("{STEPS} steps through a pipeline of two workers: the loss went from {before:.3} to {after:.3}");
    if after > 0.3 * before {
        return Err(Error::new(ErrorKind::Usage, "it should have gone down to less than a third"));
    }
    agent.shutdown()
}

/// One step; returns the loss before it. The network learns whether the signs of two numbers differ.
fn step(agent: &Agent, first: &RRef<Half>, second: &RRef<Half>, random: &mut Random) -> Result<f32> {
    let rows = BATCH / PIECES;
    let mut targets = Vec::new();
    let mut outputs = Vec::new();
    for piece in 0..PIECES {
        let inputs =
            Matrix::new(rows, INPUTS + 1, |_, column| if column < INPUTS { random.next() } else { 1.0 });
        let differ = |row: usize| if inputs.at(row, 0) * inputs.at(row, 1) < 0.0 { 1.0 } else { -1.0 };
        targets.push((0..rows).map(differ).collect::<Vec<f32>>());
        let between: RRef<Tensor> =
            agent.remote("first", "forward", (first, piece, agent.share(inputs.tensor()?)?))?;
        outputs.push(second.call("forward", (piece, between)) as RpcFuture<Tensor>);
    }
    let mut loss = 0.0;
    let mut done = Vec::new();
    for (piece, (output, targets)) in outputs.into_iter().zip(targets).enumerate() {
        let mut gradient = Matrix::from(&output.wait()?)?;
        for (slope, target) in gradient.items.iter_mut().zip(targets) {
            let wrong = *slope - target;
            loss += wrong * wrong / BATCH as f32;
            *slope = 2.0 * wrong / BATCH as f32;
        }
        let between: RRef<Tensor> =
            agent.remote("second", "backward", (second, piece, agent.share(gradient.tensor()?)?))?;
        done.push(first.call("backward", (piece, between)) as RpcFuture<Tensor>);
    }
    done.into_iter().try_for_each(|piece| piece.wait().map(drop))?;
    let optimized = [first, second].map(|half| half.call::<()>("optimize", ()));
    optimized.into_iter().try_for_each(RpcFuture::wait)?;
    Ok(loss)
}

/// Rows and columns of numbers.
struct Matrix {
    rows: usize,
    columns: usize,
    items: Vec<f32>,
}

impl Matrix {
    fn new(rows: usize, columns: usize, mut item: impl FnMut(usize, usize) -> f32) -> Self {
        let items = (0..rows * columns).map(|place| item(place / columns, place % columns)).collect();
        Self { rows, columns, items }
    }

    fn from(tensor: &Tensor) -> Result<Self> {
        Ok(Self { rows: tensor.shape()[0], columns: tensor.shape()[1], items: tensor.to_vec()? })
    }

    fn tensor(&self) -> Result<Tensor> {
        Tensor::from_slice(&self.items, &[self.rows, self.columns])
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        self.items[row * self.columns + column]
    }

    fn times(&self, other: &Self) -> Self {
        let cell = |row, column| (0..self.columns).map(|at| self.at(row, at) * other.at(at, column)).sum();
        Self::new(self.rows, other.columns, cell)
    }

    fn transposed(&self) -> Self {
        Self::new(self.columns, self.rows, |row, column| self.at(column, row))
    }

    fn each(&mut self, change: impl FnMut(&mut f32)) {
        self.items.iter_mut().for_each(change);
    }
}

/// Numbers from -1 to 1.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        2.0 * ((bits >> 40) as f32) / ((1u64 << 24) as f32) - 1.0
    }
}
