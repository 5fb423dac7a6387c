//! Calls between agents over every transport: answers, errors, deadlines, nesting, shutdown.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{
    Functions, answer, ask, call, leave_together, memory_group, rank, request, socket_group, threads,
};
use std::time::Duration;
use tensorcall::engine::{Agent, ErrorKind};

type Group = fn(u32, fn() -> Functions) -> Vec<Agent>;

const GROUPS: [Group; 2] = [|n, f| socket_group(n, |_| {}, f), |n, f| memory_group(n, |_| {}, f)];

fn echo() -> Functions {
    Functions::default().plain("echo", <[u8]>::to_vec)
}

#[test]
fn a_call_is_answered_by_every_worker_and_by_oneself() {
    for group in GROUPS {
        let agents = group(3, echo);
        for to in 0..3 {
            assert_eq!(ask(&agents[0], to, "echo", b"hello").unwrap(), b"hello");
        }
        leave_together(agents);
    }
}

#[test]
fn large_payloads_arrive_whole() {
    for group in GROUPS {
        let agents = group(2, echo);
        let payload: Vec<u8> = (0..5_000_000u32).map(|i| (i % 251) as u8).collect();
        let many: Vec<_> = (0..4).map(|_| call(&agents[0], 1, "echo", &payload).unwrap()).collect();
        for future in many {
            assert!(answer(&future).unwrap() == payload);
        }
        leave_together(agents);
    }
}

#[test]
fn an_unknown_function_is_an_error_that_names_the_worker() {
    for group in GROUPS {
        let agents = group(2, echo);
        let error = ask(&agents[0], 1, "nope", b"").unwrap_err();
        assert!(error.to_string().contains("worker1") && error.to_string().contains("nope"), "{error}");
        leave_together(agents);
    }
}

#[test]
fn a_call_without_an_answer_ends_at_its_deadline() {
    let functions = || {
        Functions::default().with("never", |_, responder| {
            std::mem::forget(responder);
        })
    };
    let agents = socket_group(2, |_| {}, functions);

    let future = agents[0].call(rank(1), request("never", b"", Some(Duration::from_millis(50)))).unwrap();

    let error = answer(&future).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("50 ms") && error.to_string().contains("worker1"), "{error}");
}

#[test]
fn a_worker_that_closes_fails_calls_to_it_and_no_others() {
    let functions = || {
        echo().with("never", |_, responder| {
            std::mem::forget(responder);
        })
    };
    let mut agents = socket_group(3, |_| {}, functions);
    let pending = call(&agents[0], 1, "never", b"").unwrap();
    ask(&agents[0], 2, "echo", b"").unwrap();

    agents.remove(1).close(false, common::deadline(Duration::from_secs(1)));

    let error = answer(&pending).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLeft | ErrorKind::PeerLost), "{error}");
    assert!(ask(&agents[0], 1, "echo", b"").unwrap_err().to_string().contains("worker1"));
    assert_eq!(ask(&agents[0], 2, "echo", b"x").unwrap(), b"x");
    leave_together(agents);
}

#[test]
fn a_panic_in_a_function_is_an_error_at_the_caller() {
    let agents =
        socket_group(2, |_| {}, || Functions::default().with("panic", |_, _responder| panic!("planted")));
    assert!(ask(&agents[0], 1, "panic", b"").unwrap_err().to_string().contains("panicked"));
    leave_together(agents);
}

#[test]
fn shutdown_waits_for_calls_that_are_under_way() {
    let functions = || {
        Functions::default().with("slow", |_, responder| {
            std::thread::spawn(move || {
                std::thread::park_timeout(Duration::from_millis(100));
                responder.returned(
                    tensorcall::engine::proto::wire::message::Encoding::Bytes,
                    tensorcall::engine::body::Body::of(vec![1]),
                );
            });
        })
    };
    for _ in 0..3 {
        let agents = socket_group(3, |_| {}, functions);
        let future = call(&agents[2], 1, "slow", b"").unwrap();
        leave_together(agents);
        assert_eq!(answer(&future).unwrap(), [1]);
    }
}

#[test]
fn one_thread_each_is_enough_for_deep_nesting() {
    use std::sync::OnceLock;
    static AGENTS: OnceLock<Vec<Agent>> = OnceLock::new();
    // Each function calls the other worker and waits, 50 deep.
    let functions = || {
        Functions::default().plain("hop", |payload| {
            let (me, depth) = (payload[0], payload[1]);
            if depth == 0 {
                return vec![0];
            }
            let next = [1 - me, depth - 1];
            let agent = &AGENTS.get().unwrap()[usize::from(me)];
            let below = ask(agent, u32::from(next[0]), "hop", &next).unwrap();
            vec![below[0] + 1]
        })
    };
    let agents = socket_group(2, |config| config.num_worker_threads = threads(1), functions);
    AGENTS.set(agents).unwrap();

    let result = ask(&AGENTS.get().unwrap()[0], 1, "hop", &[1, 50]).unwrap();

    assert_eq!(result, [50]);
}
