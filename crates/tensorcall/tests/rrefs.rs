//! References: created, fetched, shared, passed on and given back, over every transport (RREF-1).
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::bench::{
    Bench, await_empty, benches, created, give, holder_of, remote, take, value_of, with_rrefs,
};
use common::{
    Kind, SOON, answer, answer_all, ask, deadline, eventually, finish, group, leave_together, now, rank,
    request, thread, threads,
};
use tensorcall::engine::{Agent, ErrorKind, RRef, RRefCounts, RRefState, Request};

#[test]
fn a_value_stays_where_it_was_made_until_its_reference_goes() {
    for kind in Kind::ALL {
        let (agents, _) = benches(kind, 2);

        let (rref, creation) = remote(&agents[0], 1, "keep", b"value");
        assert_eq!(value_of(&rref).unwrap(), b"value");
        assert_eq!(value_of(&rref).unwrap(), b"value", "a copy each time");
        answer(&creation).unwrap();

        assert!(rref.confirmed() && !rref.is_owner());
        assert_eq!(rref.owner_name().unwrap().as_str(), "worker1");
        assert_eq!(agents[1].rref_counts(), RRefCounts { owners: 1, forks: 1, ..RRefCounts::default() });
        drop(rref);
        await_empty(&agents);
        leave_together(agents);
    }
}

#[test]
fn clones_of_a_handle_are_one_reference() {
    let (agents, _) = benches(Kind::Memory, 2);
    let rref = created(&agents[0], 1, b"x");
    let clone = rref.clone();

    drop(rref);

    assert_eq!(value_of(&clone).unwrap(), b"x");
    assert_eq!(agents[1].rref_counts().forks, 1);
    drop(clone);
    await_empty(&agents);
}

#[test]
fn a_third_worker_gets_a_reference_of_its_own_and_either_may_go_first() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 3);
        for creator_goes_first in [true, false] {
            let rref = created(&agents[0], 1, b"shared");
            give(&agents[0], 2, "shelve", &[&rref]).unwrap();
            let passed = take(&benches[2]);
            assert_eq!(passed.id(), rref.id());
            assert_ne!(passed.fork_id(), rref.fork_id());
            assert_eq!(agents[1].rref_counts().forks, 2);

            let (first, second) = if creator_goes_first { (rref, passed) } else { (passed, rref) };
            drop(first);
            eventually("one is given back", || agents[1].rref_counts().forks == 1);
            assert_eq!(value_of(&second).unwrap(), b"shared");
            drop(second);
            await_empty(&agents);
        }
        leave_together(agents);
    }
}

#[test]
fn references_in_arguments_are_confirmed_before_the_function_starts() {
    for kind in Kind::ALL {
        let (agents, _) = benches(kind, 3);
        let [of_1, of_2, of_0] = [created(&agents[0], 1, b"1"), created(&agents[0], 2, b"2"), {
            agents[0].make_rref(Arc::new(b"0".to_vec()), "here")
        }];
        for _ in 0..20 {
            assert_eq!(give(&agents[0], 2, "confirmed?", &[&of_1, &of_2, &of_0]).unwrap(), [1]);
            assert_eq!(give(&agents[0], 2, "fetch", &[&of_1, &of_2, &of_0]).unwrap(), b"120");
        }
        drop([of_1, of_2, of_0]);
        await_empty(&agents);
        leave_together(agents);
    }
}

#[test]
fn the_owner_that_gets_its_reference_back_has_the_value() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 2);
        let rref = created(&agents[0], 1, b"home");
        give(&agents[0], 1, "shelve", &[&rref]).unwrap();
        let back = take(&benches[1]);
        assert!(back.is_owner() && back.confirmed());

        drop(rref);
        eventually("the fork is given back", || agents[1].rref_counts().forks == 0);

        assert_eq!(value_of(&back).unwrap(), b"home");
        drop(back);
        await_empty(&agents);
    }
}

#[test]
fn a_local_value_enters_the_table_when_it_is_shared_and_stays_while_anybody_refers_to_it() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 3);
        let rref = agents[0].make_rref(Arc::new(b"mine".to_vec()), "a test");
        assert_eq!(rref.id().local, 0, "a local reference takes one number");
        assert_eq!(agents[0].rref_counts(), RRefCounts::default());

        give(&agents[0], 1, "shelve", &[&rref]).unwrap();
        drop(rref);
        let passed = take(&benches[1]);
        give(&agents[1], 2, "shelve", &[&passed]).unwrap();
        drop(passed);

        let last = take(&benches[2]);
        assert_eq!(value_of(&last).unwrap(), b"mine");
        eventually("one fork is left", || agents[0].rref_counts().forks == 1);
        let leak = &agents[0].rref_leaks()[0];
        assert_eq!((leak.rref, &*leak.label), (last.id(), "a test"));
        assert_eq!(leak.holder.rank, rank(2));
        drop(last);
        await_empty(&agents);
    }
}

#[test]
fn a_reference_to_oneself_is_there_before_its_value() {
    let (agents, benches) = benches(Kind::Memory, 2);
    let (rref, creation) = remote(&agents[0], 0, "keep at the gate", b"self");
    assert!(rref.is_owner() && rref.confirmed());
    assert!(rref.local_value().unwrap().is_none());
    let local = rref.when_local().unwrap();

    // Shared before the value is there, and fetched by a worker that waits.
    let fetch = agents[0].call(rank(1), with_rrefs("fetch", &[&rref])).unwrap();
    assert!(!fetch.wait_until(Some(deadline(Duration::from_millis(5)))));
    benches[0].gate.open();

    assert!(local.wait_until(Some(deadline(SOON))));
    assert_eq!(value_of(&rref).unwrap(), b"self");
    assert_eq!(answer(&fetch).unwrap(), b"self");
    assert_eq!(answer(&rref.fetch("to_here", Some(SOON)).unwrap()).unwrap(), b"self");
    answer(&creation).unwrap();
    assert_eq!(give(&agents[0], 0, "fetch", &[&rref, &rref]).unwrap(), b"selfself");
    drop(rref);
    await_empty(&agents);
}

#[test]
fn a_reference_of_another_worker_may_be_passed_to_oneself() {
    for kind in Kind::ALL {
        let (agents, _) = benches(kind, 2);
        let rref = created(&agents[0], 1, b"there");

        assert_eq!(give(&agents[0], 0, "fetch", &[&rref]).unwrap(), b"there");
        assert_eq!(give(&agents[0], 0, "confirmed?", &[&rref]).unwrap(), [1]);

        drop(rref);
        await_empty(&agents);
    }
}

#[test]
fn results_bring_references_and_late_ones_are_given_back() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 3);
        let rref = created(&agents[0], 1, b"x");
        give(&agents[0], 2, "shelve", &[&rref]).unwrap();

        let future = agents[0].call(rank(2), request("return", b"", Some(SOON))).unwrap();
        assert!(future.wait_until(Some(deadline(SOON))));
        let returned = future.take().unwrap().unwrap().body.rrefs;
        assert_eq!(returned.len(), 1);
        assert_eq!(value_of(&returned[0]).unwrap(), b"x");

        // Nobody waits for this answer any more when it comes.
        let given_up = agents[0]
            .call(rank(2), request("return at the gate", b"", Some(Duration::from_millis(1))))
            .unwrap();
        assert_eq!(answer(&given_up).unwrap_err().kind(), ErrorKind::Timeout);
        benches[2].gate.open();

        drop((returned, rref));
        benches[2].shelf.lock().clear();
        await_empty(&agents);
        leave_together(agents);
    }
}

#[test]
fn what_the_function_raised_comes_with_every_fetch() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 3);
        let (rref, creation) = remote(&agents[0], 1, "raise", b"");
        let early = rref.fetch("to_here", Some(SOON)).unwrap();
        benches[1].gate.open();

        let fetches = [early, rref.fetch("to_here", Some(SOON)).unwrap()];
        for future in fetches.iter().chain([&creation]) {
            assert!(future.wait_until(Some(deadline(SOON))));
            let response = future.take().unwrap().unwrap();
            assert!(response.raised);
            assert_eq!(response.body.payload.as_ref(), b"raised");
        }
        assert_eq!(rref.state(), RRefState::Alive, "the owner has it, whatever it is");
        give(&agents[0], 2, "shelve", &[&rref]).unwrap();
        let passed = take(&benches[2]).fetch("to_here", Some(SOON)).unwrap();
        assert!(passed.wait_until(Some(deadline(SOON))));
        assert!(passed.take().unwrap().unwrap().raised);
        drop(rref);
        await_empty(&agents);
    }
}

#[test]
fn fetches_wait_without_a_thread() {
    let benches: Vec<_> = (0..2).map(|_| Bench::default()).collect();
    let mut next = benches.iter();
    let next = std::cell::RefCell::new(&mut next);
    let agents = group(
        Kind::Memory,
        2,
        |config| {
            config.num_worker_threads = threads(2);
            config.max_threads = 2;
        },
        || next.borrow_mut().next().unwrap().functions(),
    );
    let (rref, _) = remote(&agents[0], 1, "keep at the gate", b"late");
    let fetches: Vec<_> = (0..100).map(|_| rref.fetch("to_here", Some(SOON)).unwrap()).collect();

    assert_eq!(ask(&agents[0], 1, "echo", b"free").unwrap(), b"free");
    assert_eq!(agents[1].metrics().server_active_calls, 101);
    benches[1].gate.open();

    for fetch in &fetches {
        assert_eq!(answer(fetch).unwrap(), b"late");
    }
}

#[test]
fn a_fetch_ends_at_its_deadline_on_both_sides_and_marks_nothing() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 2);
        let (rref, _) = remote(&agents[0], 1, "keep at the gate", b"late");
        benches[1].gate.await_arrivals(1);

        let fetch = rref.fetch("to_here", Some(Duration::from_millis(5))).unwrap();
        let error = answer(&fetch).unwrap_err();

        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().contains("to_here"), "{error}");
        eventually("only the creation is served", || agents[1].metrics().server_active_calls == 1);
        benches[1].gate.open();
        assert_eq!(value_of(&rref).unwrap(), b"late");
        leave_together(agents);
    }
}

#[test]
fn a_fetch_that_is_cancelled_waits_no_longer() {
    let (agents, benches) = benches(Kind::Memory, 2);
    let (rref, _) = remote(&agents[0], 1, "keep at the gate", b"late");
    benches[1].gate.await_arrivals(1);
    let fetch = rref.fetch("to_here", None).unwrap();

    assert!(agents[0].cancel(rank(1), fetch.call().unwrap()));

    assert_eq!(answer(&fetch).unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(agents[1].metrics().server_active_calls, 1);
    benches[1].gate.open();
}

#[test]
fn a_creation_that_times_out_marks_its_reference_and_leaves_nothing_behind() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 2);
        let brief = request("keep at the gate", b"", Some(Duration::from_millis(5)));
        let (rref, creation) = agents[0].remote(rank(1), brief).unwrap();
        assert_eq!(answer(&creation).unwrap_err().kind(), ErrorKind::Timeout);

        assert_eq!(rref.state(), RRefState::Failed);
        let errors = [
            rref.fetch("to_here", Some(SOON)).unwrap_err(),
            give(&agents[0], 1, "shelve", &[&rref]).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(
                error.to_string(),
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node \
                 does not exist."
            );
        }
        assert_eq!(agents[0].rref_counts(), RRefCounts::default());
        benches[1].gate.open();
        drop(rref);
        await_empty(&agents);
        leave_together(agents);
    }
}

#[test]
fn a_creation_that_is_never_run_fails_those_who_wait_for_it() {
    let (agents, benches) = benches(Kind::Memory, 3);
    let tell = |error: tensorcall::engine::Error| error.to_string();
    // The only way to be late for certain: all places taken, then a deadline that passes.
    let holds: Vec<_> =
        (0..16).map(|_| agents[2].call(rank(1), request("hold", b"", Some(SOON))).unwrap()).collect();
    benches[1].gate.await_arrivals(16);
    let brief = request("keep", b"", Some(Duration::from_millis(5)));
    let (rref, creation) = agents[0].remote(rank(1), brief).unwrap();
    let fetch = rref.fetch("to_here", Some(SOON)).unwrap();
    assert_eq!(answer(&creation).unwrap_err().kind(), ErrorKind::Timeout);

    benches[1].gate.open();

    let error = tell(answer(&fetch).unwrap_err());
    assert!(error.contains("deadline passed") || error.contains("timeout"), "{error}");
    answer_all(&holds);
    drop(rref);
    await_empty(&agents);
}

#[test]
fn ten_thousand_references_come_and_go_and_leave_nothing() {
    let (agents, _) = benches(Kind::Unix, 3);
    let mut kept = Vec::new();
    for round in 0..10_000u32 {
        let (rref, _) = remote(&agents[0], 1, "keep", &round.to_le_bytes());
        match round % 5 {
            0 => assert_eq!(value_of(&rref).unwrap(), round.to_le_bytes()),
            1 => drop(agents[0].call(rank(2), with_rrefs("confirmed?", &[&rref])).unwrap()),
            2 => kept.push(rref),
            _ => {}
        }
        if kept.len() > 100 {
            kept.clear();
        }
    }
    kept.clear();

    await_empty(&agents);
    leave_together(agents);
}

#[test]
fn many_threads_share_and_drop_at_once() {
    let (agents, _) = benches(Kind::Unix, 4);
    let busy = |from: usize| {
        let agents = agents.clone();
        thread(move || {
            for round in 0..100u8 {
                let owner = (from + 1 + usize::from(round) % 3) % 4;
                let to = u32::try_from((from + usize::from(round)) % 4).unwrap();
                let (rref, _) = remote(&agents[from], u32::try_from(owner).unwrap(), "keep", &[round]);
                let future = agents[from].call(rank(to), with_rrefs("fetch", &[&rref])).unwrap();
                if round % 2 == 0 {
                    drop(rref);
                }
                assert_eq!(answer(&future).unwrap(), [round]);
            }
        })
    };

    let running: Vec<_> = (0..4).chain(0..4).map(busy).collect();
    running.iter().for_each(finish);

    await_empty(&agents);
    leave_together(agents);
}

#[test]
fn a_group_leaves_while_references_are_under_way() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 3);
        for bench in &benches {
            bench.gate.open();
        }
        let mut calls = Vec::new();
        for (from, agent) in agents.iter().enumerate() {
            for round in 0..30 {
                let to = u32::try_from((from + 1 + round % 2) % 3).unwrap();
                let (rref, creation) = remote(agent, to, "keep at the gate", b"x");
                let other = u32::try_from((from + 2 - round % 2) % 3).unwrap();
                calls.push(agent.call(rank(other), with_rrefs("fetch", &[&rref])).unwrap());
                calls.push(agent.call(rank(to), with_rrefs("confirmed?", &[&rref])).unwrap());
                calls.push(creation);
            }
        }
        let leave = |agent: Agent| {
            thread(move || {
                agent.quiesce(false, Some(deadline(SOON))).unwrap();
                assert!(agent.delete_rrefs(Some(deadline(SOON))), "{:?}", agent.rref_counts());
                assert_eq!(agent.rref_leaks(), []);
                agent.quiesce(true, Some(deadline(SOON))).unwrap();
                assert_eq!(agent.rref_counts(), RRefCounts::default());
                agent.close(true, deadline(Duration::from_secs(2)));
            })
        };
        let leaving: Vec<_> = agents.into_iter().map(leave).collect();
        leaving.iter().for_each(finish);

        answer_all(&calls);
    }
}

#[test]
fn handles_that_are_held_still_are_deleted_at_the_end_and_say_so() {
    let (agents, _) = benches(Kind::Unix, 2);
    let rref = created(&agents[0], 1, b"x");
    let own = agents[0].make_rref(Arc::new(b"mine".to_vec()), "");

    let delete = |agent: &Agent| {
        let agent = agent.clone();
        thread(move || agent.delete_rrefs(Some(deadline(SOON))))
    };
    let both: Vec<_> = agents.iter().map(delete).collect();
    assert!(both.iter().all(finish));

    assert_eq!(rref.state(), RRefState::Deleted);
    let texts = [
        ("to_here", rref.fetch("to_here", Some(SOON)).unwrap_err()),
        ("fork", give(&agents[0], 1, "shelve", &[&rref]).unwrap_err()),
    ];
    for (what, error) in texts {
        let text = error.to_string();
        assert!(text.starts_with("UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=0), "), "{text}");
        assert!(text.contains(&format!("has been deleted. Cannot call {what}")), "{text}");
        assert!(text.ends_with(" after deletion."), "{text}");
    }
    leave_together(agents);
    assert_eq!(rref.owner().rank, rank(1));
    assert_eq!(rref.owner_name().unwrap().as_str(), "worker1");
    assert_eq!(value_of(&own).unwrap(), b"mine");
}

#[test]
fn what_is_left_over_is_reported_with_who_has_it() {
    let (agents, benches) = benches(Kind::Memory, 3);
    give(&agents[1], 2, "shelve", &[&agents[1].make_rref(Arc::new(Vec::<u8>::new()), "a place")]).unwrap();
    let rref = created(&agents[0], 1, b"x");

    let done = agents[1].delete_rrefs(Some(deadline(Duration::from_millis(5))));

    assert!(!done);
    let leaks = agents[1].rref_leaks();
    let found: Vec<_> = leaks.iter().map(|leak| (leak.holder.rank, leak.rref, &*leak.label)).collect();
    let shelved = holder_of(&benches[2]);
    assert_eq!(found, [(rank(0), rref.id(), "keep"), (rank(2), shelved, "a place")]);
}

#[test]
fn a_handle_may_be_dropped_under_a_lock_that_the_value_needs_to_go() {
    let (agents, benches) = benches(Kind::Memory, 2);
    let (rref, creation) = remote(&agents[0], 1, "tell", b"");
    answer(&creation).unwrap();
    let lock = benches[1].lock.lock();

    let start = now();
    drop(rref);
    assert!(start.elapsed() < Duration::from_secs(1), "dropping a handle waited");
    drop(lock);

    eventually("the value is gone", || benches[1].dropped.lock().len() == 1);
}

#[test]
fn values_go_on_threads_of_the_pool() {
    for kind in Kind::ALL {
        let (agents, benches) = benches(kind, 2);
        for _ in 0..10 {
            let (rref, creation) = remote(&agents[0], 1, "tell", b"");
            answer(&creation).unwrap();
            drop(rref);
        }
        eventually("all values are gone", || benches[1].dropped.lock().len() == 10);
        for name in &*benches[1].dropped.lock() {
            assert_eq!(name, "tensorcall-pool");
        }
    }
}

#[test]
fn references_of_another_agent_are_refused() {
    let (agents, _) = benches(Kind::Memory, 2);
    let rref = created(&agents[0], 1, b"x");

    let error = give(&agents[1], 0, "shelve", &[&rref]).unwrap_err();

    assert!(error.to_string().contains("belongs to another agent"), "{error}");
    assert_eq!(error.kind(), ErrorKind::Usage);
    drop(rref);
    await_empty(&agents);
}

#[test]
fn a_call_that_cannot_be_made_shares_nothing() {
    let (agents, _) = benches(Kind::Memory, 3);
    let rref = created(&agents[0], 1, b"x");
    agents[2].close(false, deadline(SOON));
    eventually("worker2 is gone", || {
        let _ = ask(&agents[0], 2, "echo", b"");
        agents[0].gone() == [rank(2)]
    });

    give(&agents[0], 2, "shelve", &[&rref]).unwrap_err();
    let creates = Request { body: with_rrefs("", &[&rref]).body, ..request("keep", b"", Some(SOON)) };
    let error = agents[0].remote(rank(2), creates).map(|(rref, _): (RRef, _)| rref.id()).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert_eq!(agents[0].rref_counts().pending_futures, 0);
    drop(rref);
    await_empty(&agents[..2]);
}
