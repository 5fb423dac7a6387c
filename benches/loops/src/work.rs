//! The loops that time a client.

use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::time::{Duration, Instant};

use futures::stream::{FuturesUnordered, StreamExt};

use crate::cpu;
use crate::figure::{emit, emit_times, micros};
use crate::settings::Settings;

/// The most bytes that a call carries.
pub const LARGEST: usize = 256 << 20;

/// A call under way.
type Pending = Pin<Box<dyn Future<Output = ()>>>;

/// Makes the calls that are measured. What it does not know how to do is not measured.
pub trait Client {
    /// A call as small as can be: a short text comes back.
    fn trivial(&self, text: &str) -> impl Future<Output = ()> + 'static;

    /// The same for a caller that does nothing else meanwhile: it may block its thread.
    fn single(&self, text: &str) -> impl Future<Output = ()> + 'static {
        self.trivial(text)
    }

    /// Sends so many bytes, at most [`LARGEST`]; nothing comes back.
    fn give(&self, bytes: usize) -> impl Future<Output = ()> + 'static;

    /// Sends so many bytes; the same come back.
    fn echo(&self, bytes: usize) -> impl Future<Output = ()> + 'static;

    /// Sleeps for 50 ms at the callee.
    fn sleep(&self) -> impl Future<Output = ()> + 'static;

    /// How many large calls may be under way at once.
    fn bulk_in_flight(&self) -> &'static [usize] {
        &[1, 4]
    }
}

/// Runs the workloads that `settings` name, waiting by `block_on`.
pub fn run(
    settings: &Settings,
    client: &impl Client,
    callee: u32,
    block_on: impl Fn(Pin<Box<dyn Future<Output = ()> + '_>>),
) {
    let loops = Loops { settings, processes: [std::process::id(), callee], block_on };
    for workload in settings.workloads.split(',') {
        match workload {
            "L1" => loops.latency("L1", &|| client.single("a short text")),
            "C1" => {
                loops.rate("C1", 64, &|| Box::pin(client.trivial("a short text")));
                loops.rate("C1 1 KiB", 64, &|| Box::pin(client.give(1 << 10)));
            }
            "C2" => loops.parallel(&|| Box::pin(client.sleep())),
            "B1" => loops.bulk("B1", client.bulk_in_flight(), &|size| Box::pin(client.give(size))),
            "B2" => loops.bulk("B2", client.bulk_in_flight(), &|size| Box::pin(client.echo(size))),
            _ => {}
        }
    }
}

struct Loops<'a, B> {
    settings: &'a Settings,
    processes: [u32; 2],
    block_on: B,
}

impl<B: Fn(Pin<Box<dyn Future<Output = ()> + '_>>)> Loops<'_, B> {
    /// Single calls, one after another: as many as were asked for, unless that takes four times the length of the
    /// other workloads.
    fn latency<F: Future<Output = ()> + 'static>(&self, name: &str, call: &dyn Fn() -> F) {
        let once = || (self.block_on)(Box::pin(call()));
        let repeat = |calls: usize, limit: Duration| -> Vec<Duration> {
            let began = Instant::now();
            let time = |_| {
                let start = Instant::now();
                once();
                start.elapsed()
            };
            (0..calls).take_while(|&call| call == 0 || began.elapsed() < limit).map(time).collect()
        };
        black_box(repeat(self.settings.calls / 4, self.settings.seconds));
        let before = cpu::used(&self.processes);
        let times = repeat(self.settings.calls, 4 * self.settings.seconds);
        let used = cpu::used(&self.processes) - before;
        emit(name, "CPU us", micros(used) / times.len() as f64);
        emit_times(name, times);
    }

    /// Calls per second with so many under way all the time.
    fn rate(&self, name: &str, in_flight: usize, start: &dyn Fn() -> Pending) {
        (self.block_on)(Box::pin(async {
            black_box(window(start, in_flight, self.settings.seconds / 4, 0).await);
            let before = cpu::used(&self.processes);
            let times = window(start, in_flight, self.settings.seconds, 0).await;
            let used = cpu::used(&self.processes) - before;
            let (calls, took) = (times.len() as f64, times.iter().sum::<Duration>());
            emit(name, "calls/s", calls / took.as_secs_f64());
            emit(name, "CPU us", micros(used) / calls);
        }));
    }

    /// Eight calls that sleep: the median of how long they take together.
    fn parallel(&self, start: &dyn Fn() -> Pending) {
        (self.block_on)(Box::pin(async {
            let mut times = Vec::new();
            for _ in 0..4 {
                let began = Instant::now();
                let mut waiting: FuturesUnordered<_> = (0..8).map(|_| start()).collect();
                while waiting.next().await.is_some() {}
                times.push(began.elapsed());
            }
            times.sort_unstable();
            emit("C2", "ms", micros(times[1]) / 1e3);
        }));
    }

    fn bulk(&self, name: &str, in_flight: &[usize], start: &dyn Fn(usize) -> Pending) {
        for (size, bytes) in self.settings.sizes() {
            for &count in in_flight {
                (self.block_on)(Box::pin(async move {
                    let call = || start(bytes);
                    let half = self.settings.seconds / 2;
                    window(&call, count, half / 4, count).await;
                    let before = cpu::used(&self.processes);
                    let times = window(&call, count, half, 2 * count).await;
                    let used = cpu::used(&self.processes) - before;
                    let (calls, took) = (times.len() as f64, times.iter().sum::<Duration>());
                    let workload = format!("{name} {size} x{count}");
                    emit(&workload, "GB/s", calls * bytes as f64 / took.as_secs_f64() / 1e9);
                    emit(&workload, "CPU us", micros(used) / calls);
                    if count == 1 {
                        emit_times(&workload, times);
                    }
                }));
            }
        }
    }
}

/// Keeps calls under way; the times between the ends of one and the next.
async fn window(
    start: &dyn Fn() -> Pending,
    in_flight: usize,
    time: Duration,
    at_least: usize,
) -> Vec<Duration> {
    let mut waiting: FuturesUnordered<_> = (0..in_flight).map(|_| start()).collect();
    let (mut times, began) = (Vec::new(), Instant::now());
    let mut before = began;
    while times.len() < at_least.max(1) || before - began < time {
        waiting.next().await;
        waiting.push(start());
        let after = Instant::now();
        times.push(after - before);
        before = after;
    }
    while waiting.next().await.is_some() {}
    times
}
