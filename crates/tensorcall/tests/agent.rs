//! How an agent deals with its calls: back-pressure, cancellation, deadlines, the pool, its numbers.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use common::gate::Gate;
use common::{
    Functions, Kind, SOON, answer, answer_all, ask, call, deadline, eventually, finish, group,
    leave_together, now, rank, request, thread, threads,
};
use tensorcall::engine::body::Body;
use tensorcall::engine::proto::ids::WorkerName;
use tensorcall::engine::proto::wire::message::Encoding;
use tensorcall::engine::{Agent, AgentConfig, CallError, ErrorKind, Responder, lend, promise};

/// The agents of a test, for functions that make calls.
type Book = Arc<OnceLock<Vec<Agent>>>;

/// `echo`, `hold` (waits at the gate) and `count` (counts its runs).
#[derive(Clone, Default)]
struct Setup {
    gate: Gate,
    runs: Arc<AtomicUsize>,
    agents: Book,
}

impl Setup {
    fn functions(&self) -> Functions {
        let (gate, runs) = (self.gate.clone(), Arc::clone(&self.runs));
        Functions::default()
            .plain("echo", <[u8]>::to_vec)
            .plain("hold", move |payload| {
                gate.pass();
                payload.to_vec()
            })
            .plain("count", move |_| {
                runs.fetch_add(1, Ordering::SeqCst);
                Vec::new()
            })
    }

    fn group(&self, kind: Kind, count: u32, adjust: impl Fn(&mut AgentConfig)) -> Vec<Agent> {
        group(kind, count, adjust, || self.functions())
    }
}

fn is_full(agent: &Agent, to: u32, function: &str) -> bool {
    matches!(agent.try_call(rank(to), request(function, b"", Some(SOON))), Err(CallError::Full(_)))
}

/// LOG row 11.
#[test]
fn a_call_beyond_the_window_waits_until_another_one_ends() {
    for kind in Kind::ALL {
        let setup = Setup::default();
        let agents = setup.group(kind, 2, |config| config.max_outstanding_calls = 4);
        let held: Vec<_> = (0..4).map(|_| call(&agents[0], 1, "hold", b"").unwrap()).collect();
        assert!(is_full(&agents[0], 1, "hold"));
        let fifth = thread({
            let agent = agents[0].clone();
            move || answer(&call(&agent, 1, "hold", b"fifth").unwrap()).unwrap()
        });
        setup.gate.await_arrivals(4);

        setup.gate.admit_one();

        setup.gate.await_arrivals(5);
        setup.gate.open();
        assert_eq!(finish(&fifth), b"fifth");
        answer_all(&held);
        leave_together(agents);
    }
}

#[test]
fn a_call_that_waits_for_room_obeys_its_deadline() {
    let setup = Setup::default();
    let agents = setup.group(Kind::Unix, 2, |config| config.max_outstanding_calls = 1);
    let held = call(&agents[0], 1, "hold", b"").unwrap();

    let error = agents[0].call(rank(1), request("count", b"", Some(Duration::from_millis(50)))).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Timeout);
    let text = error.to_string();
    assert!(text.contains("50 ms") && text.contains("worker1") && text.contains("queued"), "{text}");
    setup.gate.open();
    answer(&held).unwrap();
    assert_eq!(setup.runs.load(Ordering::SeqCst), 0);
    leave_together(agents);
}

#[test]
fn the_window_is_one_of_bytes_too() {
    let setup = Setup::default();
    let agents = setup.group(Kind::Memory, 2, |config| config.max_outstanding_bytes = 1000);
    let large = call(&agents[0], 1, "hold", &[0; 900]).unwrap();
    let limited = request("hold", &[0; 200], Some(Duration::from_millis(50)));

    let refused = agents[0].call(rank(1), limited).unwrap_err();
    ask(&agents[0], 1, "echo", b"small").unwrap();
    let waiting = thread({
        let agent = agents[0].clone();
        move || answer(&call(&agent, 1, "echo", &[0; 200]).unwrap()).unwrap().len()
    });
    setup.gate.open();

    assert_eq!(refused.kind(), ErrorKind::Timeout);
    assert_eq!(finish(&waiting), 200);
    answer(&large).unwrap();
    leave_together(agents);
}

#[test]
fn who_waits_for_room_is_told_when_the_peer_leaves() {
    let setup = Setup::default();
    let mut agents = setup.group(Kind::Tcp, 2, |config| config.max_outstanding_calls = 1);
    let held = call(&agents[0], 1, "hold", b"").unwrap();
    setup.gate.await_arrivals(1);
    let waiting = thread({
        let agent = agents[0].clone();
        move || call(&agent, 1, "hold", b"").map(drop).unwrap_err()
    });

    agents.remove(1).close(false, deadline(SOON));

    assert_eq!(finish(&waiting).kind(), ErrorKind::PeerLeft);
    assert_eq!(answer(&held).unwrap_err().kind(), ErrorKind::PeerLeft);
    setup.gate.open();
    leave_together(agents);
}

#[test]
fn a_call_from_inside_a_function_is_never_held_back() {
    let setup = Setup::default();
    let relaying = || {
        let agents = Arc::clone(&setup.agents);
        setup
            .functions()
            .plain("relay", move |payload| ask(&agents.get().unwrap()[1], 0, "echo", payload).unwrap())
    };
    let agents = group(Kind::Unix, 2, |config| config.max_outstanding_calls = 1, relaying);
    setup.agents.set(agents.clone()).unwrap();
    let held = call(&agents[1], 0, "hold", b"").unwrap();
    assert!(is_full(&agents[1], 0, "echo"));

    assert_eq!(ask(&agents[0], 1, "relay", b"nested").unwrap(), b"nested");

    setup.gate.open();
    answer(&held).unwrap();
    leave_together(agents);
}

#[test]
fn a_cancelled_call_fails_at_once_and_does_not_run_if_it_waits() {
    for kind in Kind::ALL {
        let setup = Setup::default();
        let agents = setup.group(kind, 2, |config| config.num_worker_threads = threads(1));
        let held = call(&agents[0], 1, "hold", b"").unwrap();
        setup.gate.await_arrivals(1);
        let waiting = call(&agents[0], 1, "count", b"").unwrap();

        assert!(agents[0].cancel(rank(1), waiting.call().unwrap()));

        assert!(waiting.is_done());
        assert_eq!(answer(&waiting).unwrap_err().kind(), ErrorKind::Cancelled);
        assert!(!agents[0].cancel(rank(1), waiting.call().unwrap()), "it is over");
        eventually("worker1 confirms", || agents[0].metrics().late_replies == 1);
        setup.gate.open();
        answer(&held).unwrap();
        ask(&agents[0], 1, "echo", b"comes after it").unwrap();
        assert_eq!(setup.runs.load(Ordering::SeqCst), 0);
        leave_together(agents);
    }
}

#[test]
fn a_function_that_runs_can_see_that_its_call_was_cancelled() {
    for kind in Kind::ALL {
        let (told, tells) = channel();
        let started = Gate::default();
        let patient = || {
            let (told, started) = (told.clone(), started.clone());
            Functions::default().with("patient", move |_, responder| {
                started.pass();
                let limit = deadline(SOON);
                while !responder.is_cancelled() && now() < limit {
                    std::thread::park_timeout(Duration::from_millis(1));
                }
                told.send(responder.is_cancelled()).unwrap();
            })
        };
        let agents = group(kind, 2, |_| {}, patient);
        started.open();
        let future = call(&agents[0], 1, "patient", b"").unwrap();
        started.await_arrivals(1);

        agents[0].cancel(rank(1), future.call().unwrap());

        assert_eq!(answer(&future).unwrap_err().kind(), ErrorKind::Cancelled);
        assert_eq!(tells.recv_timeout(SOON), Ok(true));
        leave_together(agents);
    }
}

#[test]
fn who_runs_a_function_is_told_when_its_call_is_cancelled_or_its_caller_is_lost() {
    for kind in Kind::ALL {
        let (told, tells) = channel();
        let (kept, keeps) = channel();
        let patient = || {
            let (told, kept) = (told.clone(), kept.clone());
            Functions::default().with("patient", move |_, responder: Responder| {
                let told = told.clone();
                responder.on_cancelled(move || told.send(()).unwrap());
                kept.send(responder).unwrap();
            })
        };
        let agents = group(kind, 2, |_| {}, patient);

        let future = call(&agents[0], 1, "patient", b"").unwrap();
        let cancelled = keeps.recv_timeout(SOON).unwrap();
        agents[0].cancel(rank(1), future.call().unwrap());
        assert_eq!(tells.recv_timeout(SOON), Ok(()));
        cancelled.returned(Encoding::Value, Body::default());

        let answered = call(&agents[0], 1, "patient", b"").unwrap();
        keeps.recv_timeout(SOON).unwrap().returned(Encoding::Value, Body::default());
        answer(&answered).unwrap();
        assert!(!agents[0].cancel(rank(1), answered.call().unwrap()));

        call(&agents[0], 1, "patient", b"").unwrap();
        let orphan = keeps.recv_timeout(SOON).unwrap();
        agents[0].close(false, deadline(SOON));
        assert_eq!(tells.recv_timeout(SOON), Ok(()), "once for each");
        orphan.on_cancelled({
            let told = told.clone();
            move || told.send(()).unwrap()
        });
        assert_eq!(tells.recv_timeout(SOON), Ok(()), "at once if it is known");
        drop(orphan);
        assert!(tells.try_recv().is_err());
    }
}

/// The callee's deadline begins when the request arrives: in memory that is before the call returns.
#[test]
fn a_request_whose_deadline_passed_while_it_waited_never_runs() {
    let setup = Setup::default();
    let agents = setup.group(Kind::Memory, 2, |config| config.num_worker_threads = threads(1));
    let held = call(&agents[0], 1, "hold", b"").unwrap();
    setup.gate.await_arrivals(1);
    let limit = Duration::from_millis(30);
    let late = agents[0].call(rank(1), request("count", b"", Some(limit))).unwrap();
    let (_kept, never) = promise();

    never.wait_until(Some(now() + limit));
    setup.gate.open();

    assert_eq!(answer(&late).unwrap_err().kind(), ErrorKind::Timeout);
    answer(&held).unwrap();
    ask(&agents[0], 1, "echo", b"comes after it").unwrap();
    assert_eq!(setup.runs.load(Ordering::SeqCst), 0);
    leave_together(agents);
}

#[test]
fn an_answer_after_the_deadline_is_dropped_and_counted() {
    for kind in Kind::ALL {
        let setup = Setup::default();
        let agents = setup.group(kind, 2, |_| {});
        let late = agents[0].call(rank(1), request("hold", b"", Some(Duration::from_millis(20)))).unwrap();
        setup.gate.await_arrivals(1);
        assert_eq!(answer(&late).unwrap_err().kind(), ErrorKind::Timeout);

        setup.gate.open();
        leave_together(agents.clone());

        let metrics = agents[0].metrics();
        assert_eq!((metrics.late_replies, metrics.client_active_calls), (1, 0));
    }
}

#[test]
fn at_the_cap_of_threads_with_all_of_them_waiting_a_call_fails_and_says_for_whom_they_wait() {
    for kind in Kind::ALL {
        let setup = Setup::default();
        let waiting = || {
            let agents = Arc::clone(&setup.agents);
            setup.functions().plain("wait for worker0", move |_| {
                let agent = &agents.get().unwrap()[1];
                let future = call(agent, 0, "hold", b"").unwrap();
                let worker0 = WorkerName::parse("worker0").unwrap();
                lend(Some(&worker0), || future.wait_until(Some(deadline(SOON))));
                future.take().unwrap().unwrap().body.payload.as_ref().to_vec()
            })
        };
        let adjust = |config: &mut AgentConfig| {
            if config.rank == rank(1) {
                (config.num_worker_threads, config.max_threads) = (threads(2), 3);
            }
        };
        let agents = group(kind, 2, adjust, waiting);
        setup.agents.set(agents.clone()).unwrap();
        let waits: Vec<_> = (0..3).map(|_| call(&agents[0], 1, "wait for worker0", b"").unwrap()).collect();
        setup.gate.await_arrivals(3);

        // The last of them may be about to wait but not waiting yet; then this one waits for its turn.
        let error = ask(&agents[0], 1, "echo", b"").unwrap_err();

        assert_eq!(error.kind(), ErrorKind::PoolExhausted);
        assert!(error.to_string().contains("3 for worker 'worker0'"), "{error}");
        setup.gate.open();
        answer_all(&waits);
        assert!(ask(&agents[0], 1, "echo", b"").is_ok(), "there are threads again");
        leave_together(agents);
    }
}

/// Two workers, windows of 4, pools of 2, 200 calls that call back while they hold one lock per worker.
#[test]
fn many_mutually_nested_calls_that_share_locks_all_finish() {
    for kind in Kind::ALL {
        let agents: Book = Arc::default();
        let locking = || {
            let (agents, lock) = (Arc::clone(&agents), tensorcall::engine::sync::Mutex::new(()));
            Functions::default()
                .plain("nest", move |payload| {
                    let (me, depth) = (payload[0], payload[1]);
                    if depth == 0 {
                        return vec![1];
                    }
                    let _held = lock.lock();
                    let agent = &agents.get().unwrap()[usize::from(me)];
                    ask(agent, u32::from(1 - me), "leaf", &[1 - me, depth - 1]).unwrap()
                })
                .plain("leaf", |_| vec![1])
        };
        let adjust = |config: &mut AgentConfig| {
            (config.num_worker_threads, config.max_outstanding_calls) = (threads(2), 4);
        };
        let pair = group(kind, 2, adjust, locking);
        agents.set(pair.clone()).unwrap();
        let caller = |me: u8| {
            let agent = pair[usize::from(me)].clone();
            thread(move || {
                let futures: Vec<_> = (0..100)
                    .map(|_| call(&agent, u32::from(1 - me), "nest", &[1 - me, 1]).unwrap())
                    .collect();
                futures.iter().all(|future| answer(future).unwrap() == [1])
            })
        };

        let callers = [caller(0), caller(1)];

        assert!(callers.iter().all(finish));
        leave_together(pair);
    }
}

#[test]
fn the_numbers_of_an_agent_tell_what_is_under_way() {
    let setup = Setup::default();
    let agents = setup.group(Kind::Unix, 2, |config| config.num_worker_threads = threads(3));
    ask(&agents[0], 1, "echo", b"").unwrap();
    let held: Vec<_> = (0..2).map(|_| call(&agents[0], 1, "hold", b"").unwrap()).collect();
    setup.gate.await_arrivals(2);

    let (here, there) = (agents[0].metrics(), agents[1].metrics());

    assert_eq!((here.client_active_calls, here.server_active_calls, here.calls_sent), (2, 0, 3));
    assert_eq!((there.client_active_calls, there.server_active_calls, there.calls_received), (0, 2, 3));
    assert_eq!(there.thread_pool_size, 3);
    assert!((2..=3).contains(&there.threads) && there.idle_threads <= there.threads - 2, "{there:?}");
    setup.gate.open();
    answer_all(&held);
    leave_together(agents.clone());
    let (here, there) = (agents[0].metrics(), agents[1].metrics());
    assert_eq!((here.client_active_calls, there.server_active_calls, here.late_replies), (0, 0, 0));
}

#[test]
fn an_answer_is_given_once_even_if_its_responder_is_used_on_another_thread() {
    let later = || {
        Functions::default().with("later", |call, responder| {
            std::thread::spawn(move || {
                let payload = call.body.payload.as_ref().to_vec();
                responder.returned(Encoding::Bytes, Body::of(payload));
            });
        })
    };
    for kind in Kind::ALL {
        let agents = group(kind, 2, |_| {}, later);
        let futures: Vec<_> = (0..50u8).map(|i| call(&agents[0], 1, "later", &[i]).unwrap()).collect();

        for (i, future) in (0u8..).zip(&futures) {
            assert_eq!(answer(future).unwrap(), [i]);
        }

        leave_together(agents.clone());
        assert_eq!(agents[0].metrics().late_replies, 0);
    }
}
