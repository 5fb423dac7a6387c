//! Workers that poll busily: everything works as ever, in time, and nothing is asked for that hurts.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::gate::Gate;
use common::{Functions, Kind, SOON, answer, config, deadline, group, now, rank, request};
use tensorcall::engine::sync::Mutex;
use tensorcall::engine::{Agent, ErrorKind};

/// The longest there may be. Whatever waits for its end is late by far.
const LONG: Duration = Duration::from_secs(1);
/// Tries of what takes no time, on a machine that others use.
const TRIES: usize = 10;

fn busy_group(kind: Kind, time: Duration, functions: impl Fn() -> Functions) -> Vec<Agent> {
    group(kind, 2, |config| config.busy_poll = time, functions)
}

fn echoing() -> Functions {
    Functions::default().plain("echo", <[u8]>::to_vec)
}

/// Whether `act` is done in half the time of a busy poll, at least once.
fn is_prompt(mut act: impl FnMut()) -> bool {
    (0..TRIES).any(|_| {
        let start = now();
        act();
        start.elapsed() < LONG / 2
    })
}

#[test]
fn more_than_a_second_is_refused() {
    let mut config = config(0);
    config.busy_poll = LONG + Duration::from_micros(1);

    let error = Agent::start(config, Arc::new(echoing())).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(error.to_string(), "busy_poll must be at most 1s, but is 1.000001s");
}

#[test]
fn calls_are_answered_from_many_threads_at_once() {
    for kind in [Kind::Memory, Kind::Unix, Kind::Tcp] {
        for time in [Duration::from_micros(50), LONG] {
            let agents = busy_group(kind, time, echoing);
            std::thread::scope(|scope| {
                for thread in 0..8_u8 {
                    let caller = &agents[usize::from(thread % 2)];
                    let to = rank(u32::from(1 - thread % 2));
                    scope.spawn(move || {
                        for number in 0..50 {
                            let payload = [thread, number];
                            let future = caller.call(to, request("echo", &payload, Some(SOON))).unwrap();
                            assert_eq!(answer(&future).unwrap(), payload);
                        }
                    });
                }
            });
        }
    }
}

#[test]
fn functions_that_call_back_are_answered() {
    let agents: Arc<Mutex<Vec<Agent>>> = Arc::default();
    let known = Arc::clone(&agents);
    let functions = || {
        let known = Arc::clone(&known);
        echoing().plain("bounce", move |payload| {
            let Some((&hops, _)) = payload.split_first().filter(|(hops, _)| **hops > 0) else {
                return payload.to_vec();
            };
            let (to, next) = (u32::from(hops % 2), request("bounce", &[hops - 1], Some(SOON)));
            let future = known.lock()[1 - to as usize].call(rank(to), next).unwrap();
            tensorcall::engine::lend(None, || assert!(future.wait_until(Some(deadline(SOON)))));
            let mut said = answer(&future).unwrap();
            said.push(hops);
            said
        })
    };
    *agents.lock() = busy_group(Kind::Unix, Duration::from_millis(1), functions);

    let first = agents.lock()[0].call(rank(1), request("bounce", &[6], Some(SOON))).unwrap();

    assert_eq!(answer(&first).unwrap(), [0, 1, 2, 3, 4, 5, 6]);
    agents.lock().clear();
}

#[test]
fn a_deadline_comes_while_all_look_for_an_answer() {
    let gate = Gate::default();
    let functions = || {
        let gate = gate.clone();
        echoing().plain("wait", move |_| {
            gate.pass();
            Vec::new()
        })
    };
    let agents = busy_group(Kind::Unix, LONG, functions);

    let prompt = is_prompt(|| {
        let echoed = agents[0].call(rank(1), request("echo", b"", Some(SOON))).unwrap();
        answer(&echoed).unwrap();
        let brief = Some(Duration::from_millis(20));
        let future = agents[0].call(rank(1), request("wait", b"", brief)).unwrap();
        assert_eq!(answer(&future).unwrap_err().kind(), ErrorKind::Timeout);
    });

    gate.open();
    assert!(prompt, "the I/O thread does not look at the clock while it polls");
}

#[test]
fn a_wait_ends_at_its_limit() {
    let gate = Gate::default();
    let functions = || {
        let gate = gate.clone();
        Functions::default().plain("wait", move |_| {
            gate.pass();
            Vec::new()
        })
    };
    let agents = busy_group(Kind::Unix, LONG, functions);

    let prompt = is_prompt(|| {
        let future = agents[0].call(rank(1), request("wait", b"", Some(SOON))).unwrap();
        assert!(!future.wait_until(Some(deadline(Duration::from_millis(20)))));
    });

    gate.open();
    assert!(prompt);
}

#[test]
fn an_agent_ends_while_its_threads_look_for_work() {
    let prompt = is_prompt(|| {
        let agents = busy_group(Kind::Unix, LONG, echoing);
        let future = agents[0].call(rank(1), request("echo", b"", Some(SOON))).unwrap();
        answer(&future).unwrap();
        for agent in agents {
            agent.close(false, deadline(SOON));
            assert!(agent.wait_threads_ended(deadline(SOON)));
        }
    });

    assert!(prompt);
}
