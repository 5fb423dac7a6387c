//! Leaving: together when all is done (TERM-1), alone without a word of warning, in any order.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use common::gate::Gate;
use common::{
    Functions, Kind, SOON, answer, answer_all, ask, call, deadline, eventually, finish, group, info,
    leave_together, now, strangers, thread,
};
use tensorcall::engine::{Agent, ErrorKind, RpcFuture};

type Book = Arc<OnceLock<Vec<Agent>>>;

fn echo() -> Functions {
    Functions::default().plain("echo", <[u8]>::to_vec)
}

/// `hop`: calls another worker, which calls another one, and so on; the payload is `[me, depth, step]`.
fn hopping(agents: &Book, count: u8) -> Functions {
    let agents = Arc::clone(agents);
    echo().plain("hop", move |payload| {
        let &[me, depth, step] = payload else { panic!("{payload:?}") };
        if depth == 0 {
            return vec![0];
        }
        let next = (me + step) % count;
        let agent = &agents.get().unwrap()[usize::from(me)];
        let below = ask(agent, next.into(), "hop", &[next, depth - 1, step]).unwrap();
        vec![below[0] + 1]
    })
}

/// Every worker makes calls that nest `depth` deep through the group; nobody waits for them.
fn start_nested_calls(agents: &[Agent], depth: u8) -> Vec<RpcFuture> {
    let count = u8::try_from(agents.len()).unwrap();
    let calls = (0..count).zip(agents).flat_map(|(me, agent)| {
        (1..4u8).map(move |step| {
            let to = (me + step) % count;
            call(agent, to.into(), "hop", &[to, depth, step]).unwrap()
        })
    });
    calls.collect()
}

fn everybody_leaves_while_nested_calls_are_under_way(kind: Kind, count: u8) {
    let book = Book::default();
    let agents = group(kind, count.into(), |_| {}, || hopping(&book, count));
    book.set(agents.clone()).unwrap();
    let calls = start_nested_calls(&agents, 5);

    leave_together(agents);

    for future in &calls {
        assert!(future.is_done(), "a worker left before its calls were answered");
        assert_eq!(answer(future).unwrap(), [5]);
    }
}

#[test]
fn thirty_workers_in_memory_leave_together_and_every_nested_call_is_answered() {
    everybody_leaves_while_nested_calls_are_under_way(Kind::Memory, 30);
}

mod serial {
    use super::*;

    #[test]
    fn eight_workers_over_tcp_leave_together_and_every_nested_call_is_answered() {
        everybody_leaves_while_nested_calls_are_under_way(Kind::Tcp, 8);
    }

    #[test]
    fn eight_workers_over_unix_sockets_leave_together_and_every_nested_call_is_answered() {
        everybody_leaves_while_nested_calls_are_under_way(Kind::Unix, 8);
    }

    #[test]
    fn eight_workers_over_a_process_group_leave_together_and_every_nested_call_is_answered() {
        for any_source in [false, true] {
            everybody_leaves_while_nested_calls_are_under_way(Kind::Group { any_source }, 8);
        }
    }

    /// LOG row 52.
    #[test]
    fn a_hundred_workers_in_memory_meet_call_one_of_them_and_leave_in_twenty_seconds() {
        let start = now();
        let agents = group(Kind::Memory, 100, |_| {}, echo);

        let calls: Vec<_> =
            agents.iter().map(|agent| call(agent, 0, "echo", b"all to one").unwrap()).collect();
        answer_all(&calls);
        leave_together(agents);

        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }
}

/// Each of these waits for the group to be quiet, on a thread of its own.
fn quiesce(agents: &[Agent]) -> Vec<Receiver<Result<(), String>>> {
    let wait = |agent: &Agent| {
        let agent = agent.clone();
        thread(move || agent.quiesce(true, Some(deadline(SOON))).map_err(|error| error.to_string()))
    };
    agents.iter().map(wait).collect()
}

/// Waits until worker0, which must not have left, knows that all others have arrived.
fn await_arrivals(agents: &[Agent]) {
    eventually("all have arrived", || {
        let waits = agents[0].quiesce(false, Some(now())).map_err(|error| error.to_string());
        waits.err().is_none_or(|text| !text.contains("has not called shutdown"))
    });
}

fn others_leave_when(kind: Kind, gone: usize, goes: impl Fn(Agent)) {
    let mut agents = group(kind, 4, |_| {}, echo);
    for agent in &agents {
        // Everybody knows everybody.
        (0..4).for_each(|to| drop(ask(agent, to, "echo", b"").unwrap()));
    }
    let leaver = agents.remove(gone);
    let waits = quiesce(&agents);

    goes(leaver);

    for wait in &waits {
        assert_eq!(finish(wait), Ok(()));
    }
    for agent in &agents {
        agent.close(true, deadline(SOON));
    }
}

#[test]
fn a_worker_that_closes_without_leaving_strands_nobody() {
    for kind in Kind::ALL {
        others_leave_when(kind, 3, |agent| agent.close(false, deadline(SOON)));
    }
}

#[test]
fn a_worker_that_is_dropped_strands_nobody() {
    for kind in Kind::ALL {
        others_leave_when(kind, 2, drop);
    }
}

#[test]
fn a_coordinator_that_is_dropped_strands_nobody() {
    for kind in Kind::ALL {
        others_leave_when(kind, 0, drop);
    }
}

#[test]
fn a_coordinator_that_goes_while_it_waits_for_others_strands_nobody() {
    for kind in Kind::ALL {
        let gate = Gate::default();
        let holding = || {
            let gate = gate.clone();
            echo().plain("hold", move |_| {
                gate.pass();
                Vec::new()
            })
        };
        let agents = group(kind, 4, |_| {}, holding);
        let held = call(&agents[2], 3, "hold", b"").unwrap();
        gate.await_arrivals(1);
        let waits = quiesce(&agents[1..]);
        await_arrivals(&agents);

        // Waves are under way, and one of the members is busy.
        agents[0].close(false, deadline(SOON));
        gate.open();

        for wait in &waits {
            assert_eq!(finish(wait), Ok(()));
        }
        answer(&held).unwrap();
        for agent in agents {
            agent.close(true, deadline(SOON));
        }
    }
}

#[test]
fn who_waits_in_vain_is_told_for_whom() {
    let agents = group(Kind::Unix, 3, |_| {}, echo);
    let soon = || Some(deadline(Duration::from_millis(100)));

    let coordinator = agents[0].quiesce(true, soon()).unwrap_err();
    let member = agents[1].quiesce(true, soon()).unwrap_err();

    assert_eq!((coordinator.kind(), member.kind()), (ErrorKind::Timeout, ErrorKind::Timeout));
    let (coordinator, member) = (coordinator.to_string(), member.to_string());
    for name in ["worker1", "worker2"] {
        assert!(coordinator.contains(&format!("'{name}' has not called shutdown")), "{coordinator}");
    }
    assert!(member.contains("worker0"), "{member}");
    // Waiting in vain once does no harm.
    leave_together(agents);
}

#[test]
fn who_waits_for_a_busy_worker_is_told_what_it_does() {
    let gate = Gate::default();
    let holding = || {
        let gate = gate.clone();
        echo().plain("hold", move |_| {
            gate.pass();
            Vec::new()
        })
    };
    let agents = group(Kind::Tcp, 2, |_| {}, holding);
    let held = call(&agents[0], 1, "hold", b"").unwrap();
    gate.await_arrivals(1);
    let waits = quiesce(&agents[1..]);
    await_arrivals(&agents);

    let error = agents[0].quiesce(true, Some(deadline(Duration::from_millis(100)))).unwrap_err();

    let text = error.to_string();
    assert!(text.contains("worker1") && text.contains("requests"), "{text}");
    gate.open();
    answer(&held).unwrap();
    leave_together(agents);
    assert_eq!(finish(&waits[0]), Ok(()));
}

#[test]
fn a_group_may_become_quiet_many_times_before_it_leaves() {
    for kind in Kind::ALL {
        let book = Book::default();
        let agents = group(kind, 4, |_| {}, || hopping(&book, 4));
        book.set(agents.clone()).unwrap();
        for _ in 0..5 {
            let calls = start_nested_calls(&agents, 3);
            let waits: Vec<_> = agents
                .iter()
                .map(|agent| {
                    let agent = agent.clone();
                    thread(move || agent.quiesce(false, Some(deadline(SOON))).is_ok())
                })
                .collect();
            assert!(waits.iter().all(finish));
            assert!(calls.iter().all(RpcFuture::is_done));
        }
        leave_together(agents);
    }
}

/// A worker may know the group, and be done, before others have heard of anybody.
#[test]
fn a_worker_that_leaves_before_others_are_open_is_waited_for_no_more() {
    for kind in Kind::ALL {
        let agents = strangers(kind, 2, |_| {}, echo);
        let infos: Vec<_> = agents.iter().map(info).collect();
        agents[1].open(infos.clone()).unwrap();
        let early = call(&agents[1], 0, "echo", b"early").unwrap();
        let timeout = agents[1].quiesce(true, Some(deadline(Duration::from_millis(100)))).unwrap_err();
        assert_eq!(timeout.kind(), ErrorKind::Timeout);

        agents[0].open(infos).unwrap();

        assert_eq!(answer(&early).unwrap(), b"early");
        leave_together(agents);
    }
}

#[test]
fn closing_twice_and_using_what_is_closed_do_no_harm() {
    for kind in Kind::ALL {
        let mut agents = group(kind, 2, |_| {}, echo);
        ask(&agents[0], 1, "echo", b"").unwrap();
        let closed = agents.remove(1);

        closed.close(false, deadline(SOON));
        closed.close(true, deadline(SOON));

        assert!(closed.wait_threads_ended(deadline(SOON)));
        assert_eq!(ask(&closed, 0, "echo", b"").unwrap_err().kind(), ErrorKind::ShuttingDown);
        assert_eq!(closed.quiesce(true, Some(deadline(SOON))).unwrap_err().kind(), ErrorKind::ShuttingDown);
        assert_eq!(ask(&agents[0], 1, "echo", b"").unwrap_err().kind(), ErrorKind::PeerLeft);
        leave_together(agents);
    }
}

#[test]
fn an_agent_that_is_dropped_closes() {
    for kind in Kind::ALL {
        let mut agents = group(kind, 2, |_| {}, echo);
        ask(&agents[0], 1, "echo", b"").unwrap();
        let clone = agents[1].clone();
        drop(agents.remove(1));
        assert!(ask(&agents[0], 1, "echo", b"a clone is left").is_ok());

        drop(clone);

        let error = ask(&agents[0], 1, "echo", b"").unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::PeerLeft | ErrorKind::PeerLost), "{error}");
        leave_together(agents);
    }
}

#[test]
fn who_waits_for_the_group_is_released_when_its_own_agent_closes() {
    let agents = group(Kind::Unix, 2, |_| {}, echo);
    let waits = quiesce(&agents[1..]);

    agents[1].close(false, deadline(SOON));

    assert!(finish(&waits[0]).unwrap_err().contains("shut"), "told that it is shutting down");
    leave_together(vec![agents[0].clone()]);
}

#[test]
fn a_function_may_close_its_own_agent() {
    for kind in Kind::ALL {
        let book = Book::default();
        let closing = || {
            let book = Arc::clone(&book);
            echo().plain("close", move |_| {
                book.get().unwrap()[1].close(false, deadline(SOON));
                Vec::new()
            })
        };
        let agents = group(kind, 2, |_| {}, closing);
        book.set(agents.clone()).unwrap();

        let error = ask(&agents[0], 1, "close", b"").unwrap_err();

        assert_eq!(error.kind(), ErrorKind::PeerLeft);
        leave_together(vec![agents[0].clone()]);
    }
}
