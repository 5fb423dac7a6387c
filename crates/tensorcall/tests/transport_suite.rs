//! What every transport promises: one list of tests, run over each of them.
//!
//! The agents of a test know one kind of address of each other, so that all links between them are of
//! that transport. A new transport is one line at the end of this file.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use common::gate::Gate;
use common::raw::{Listener, identity};
use common::{
    Functions, Kind, SOON, answer, ask, call, deadline, finish, group, info, info_over, is_aligned,
    leave_together, mirror, nobody, now, pattern, rank, request, strangers, thread, threads,
};
use tensorcall::engine::body::Body;
use tensorcall::engine::buffer::Region;
use tensorcall::engine::proto::ids::Incarnation;
use tensorcall::engine::proto::wire::message::Encoding;
use tensorcall::engine::proto::wire::tensor::{DType, TensorDesc};
use tensorcall::engine::sync::Mutex;
use tensorcall::engine::transport::Address;
use tensorcall::engine::{Agent, ErrorKind, PeerInfo, Request, Response, Result};

fn functions() -> Functions {
    Functions::default().with("mirror", mirror).plain("echo", <[u8]>::to_vec)
}

fn pair(kind: Kind) -> Vec<Agent> {
    group(kind, 2, |_| {}, functions)
}

/// A request whose tensors are whole buffers of bytes.
fn with_buffers(function: &str, payload: Vec<u8>, buffers: &[Vec<u8>]) -> Request {
    let tensors = (0..).zip(buffers);
    let tensors =
        tensors.map(|(i, buffer)| TensorDesc::contiguous(DType::UInt8, vec![buffer.len() as u64], i));
    let body = Body {
        payload,
        tensors: tensors.collect(),
        buffers: buffers.iter().map(|buffer| Region::from_vec(buffer.clone())).collect(),
        ..Body::default()
    };
    Request { body, ..request(function, b"", Some(SOON)) }
}

fn response(agent: &Agent, to: u32, request: Request) -> Response {
    let future = agent.call(rank(to), request).unwrap();
    assert!(future.wait_until(Some(deadline(SOON))), "no answer in time");
    future.take().unwrap().unwrap()
}

fn a_message_of_any_size_arrives_whole_and_aligned(kind: Kind) {
    let agents = pair(kind);
    let edges = [64 << 10, 1 << 20].into_iter().flat_map(|edge| edge - 1..=edge + 1);
    let sizes: Vec<usize> = [0, 1, 8 << 10].into_iter().chain(edges).chain([20 << 20]).collect();

    for &size in &sizes {
        let (payload, buffer) = (pattern(size, 1), pattern(size, 2));

        let Response { body, .. } =
            response(&agents[0], 1, with_buffers("mirror", payload.clone(), std::slice::from_ref(&buffer)));

        assert!(body.payload.as_ref() == payload, "payload of {size} bytes");
        assert!(body.buffers[0].as_ref() == buffer, "buffer of {size} bytes");
        assert!(is_aligned(&body.payload) && is_aligned(&body.buffers[0]), "{size} bytes");
    }
    leave_together(agents);
}

fn tensors_keep_their_order_their_views_and_what_they_share(kind: Kind) {
    let agents = pair(kind);
    let sizes = [0, 1, 63, 4096, 0, 70_000, 300_000, 8];
    let buffers: Vec<_> = (0..).zip(sizes).map(|(seed, size)| pattern(size, seed)).collect();
    let mut request = with_buffers("mirror", b"payload".to_vec(), &buffers);
    let mut view = TensorDesc::contiguous(DType::Float32, vec![10, 3], 5);
    (view.strides, view.offset, view.requires_grad) = (Some(vec![7, 2]), 8, true);
    request.body.tensors.push(view);
    let expected = request.body.tensors.clone();

    let Response { body, .. } = response(&agents[0], 1, request);

    assert_eq!(body.payload.as_ref(), b"payload");
    assert_eq!(body.tensors, expected);
    assert_eq!(body.buffers.len(), buffers.len());
    for (arrived, sent) in body.buffers.iter().zip(&buffers) {
        assert!(arrived.as_ref() == sent && is_aligned(arrived));
    }
    leave_together(agents);
}

fn messages_from_many_threads_all_arrive_and_find_their_callers(kind: Kind) {
    let agents = pair(kind);
    let caller = |number: u8| {
        let agent = agents[usize::from(number % 2)].clone();
        let to = u32::from((number + 1) % 2);
        thread(move || {
            let payloads: Vec<_> = (0..40).map(|i| pattern(i * i * 13, number)).collect();
            let futures: Vec<_> =
                payloads.iter().map(|payload| call(&agent, to, "echo", payload).unwrap()).collect();
            futures.iter().zip(&payloads).all(|(future, payload)| answer(future).unwrap() == *payload)
        })
    };

    let callers: Vec<_> = (0..12).map(caller).collect();

    assert!(callers.iter().all(finish));
    assert_eq!(agents[0].metrics().calls_received, 6 * 40);
    leave_together(agents);
}

/// Between the two calls the peer reads nothing, so that the large one cannot be through.
fn a_small_call_overtakes_a_large_one_that_is_under_way(kind: Kind) {
    if kind == Kind::Memory {
        // A message in memory is delivered whole by the one who sends it: nothing is ever under way.
        return;
    }
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (answers, reads) = (Gate::default(), Gate::default());
    let noting = || {
        let (heard, answers) = (Arc::clone(&heard), answers.clone());
        let noting = functions().with("note", move |call, responder| {
            heard.lock().push(call.body.payload.len());
            responder.returned(Encoding::Bytes, Body::default());
        });
        noting.plain("answer later", move |_| {
            answers.pass();
            Vec::new()
        })
    };
    let agents = group(kind, 2, |config| config.num_worker_threads = threads(1), noting);
    ask(&agents[0], 1, "echo", b"the link is open").unwrap();
    // What no user of an agent may do: this blocks the thread of worker1 that reads.
    call(&agents[1], 0, "answer later", b"").unwrap().on_done({
        let reads = reads.clone();
        move || reads.pass()
    });
    answers.open();
    reads.await_arrivals(1);

    let large = call(&agents[0], 1, "note", &vec![0; 64 << 20]).unwrap();
    let small = call(&agents[0], 1, "note", b"small").unwrap();
    reads.open();

    answer(&small).unwrap();
    answer(&large).unwrap();
    assert_eq!(*heard.lock(), [5, 64 << 20]);
    leave_together(agents);
}

fn bulk_in_both_directions_at_once_finishes(kind: Kind) {
    let agents = pair(kind);
    let tensor = pattern(50 << 20, 3);
    let exchange = |from: usize| {
        let (agent, tensor) = (agents[from].clone(), tensor.clone());
        thread(move || {
            let to = u32::try_from(1 - from).unwrap();
            let Response { body, .. } =
                response(&agent, to, with_buffers("mirror", Vec::new(), std::slice::from_ref(&tensor)));
            body.buffers[0].as_ref() == tensor
        })
    };

    let both = [exchange(0), exchange(1)];

    assert!(both.iter().all(finish));
    leave_together(agents);
}

fn what_is_queued_when_a_worker_closes_still_arrives(kind: Kind) {
    let own = Arc::new(Mutex::new(None::<Agent>));
    let closing = || {
        let own = Arc::clone(&own);
        functions().with("last words", move |_, responder| {
            responder.returned(Encoding::Bytes, Body::of(pattern(30 << 20, 4)));
            if let Some(agent) = own.lock().take() {
                agent.close(false, deadline(SOON));
            }
        })
    };
    let agents = group(kind, 2, |_| {}, closing);
    ask(&agents[1], 0, "echo", b"a link the other way, which closes too").unwrap();
    *own.lock() = Some(agents[1].clone());

    let words = ask(&agents[0], 1, "last words", b"").unwrap();

    assert!(words == pattern(30 << 20, 4));
    assert_eq!(ask(&agents[0], 1, "echo", b"").unwrap_err().kind(), ErrorKind::PeerLeft);
}

fn a_peer_that_vanishes_without_a_word_is_lost_once_with_a_reason(kind: Kind) {
    if !Kind::SOCKETS.contains(&kind) {
        // An agent in memory cannot vanish: its end says goodbye. Groups lose ranks in tests/groups.rs.
        return;
    }
    let agents = strangers(kind, 1, |_| {}, functions);
    let mine = info(&agents[0]);
    let (listener, address) = Listener::new(kind, &mine);
    let peer = PeerInfo { identity: identity(1), addresses: vec![address], plain: false };
    agents[0].open(vec![mine, peer]).unwrap();
    let pending: Vec<_> = (0..3).map(|_| call(&agents[0], 1, "echo", b"").unwrap()).collect();
    let mut wire = listener.accept();
    wire.welcome(identity(1)).unwrap();
    wire.next_frame().unwrap();

    drop(listener);
    drop(wire);

    for future in &pending {
        let error = answer(future).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        let text = error.to_string();
        assert!(text.contains("worker1") && text.contains("is lost: ") && text.contains("echo"), "{text}");
    }
    // Finding no way back tells that the worker itself is gone; a call may come before that is known.
    let again = ask(&agents[0], 1, "echo", b"").unwrap_err();
    assert_eq!(again.kind(), ErrorKind::PeerLost);
    assert_eq!(agents[0].gone(), [rank(1)]);
    assert_eq!(agents[0].metrics().client_active_calls, 0);
    ask(&agents[0], 0, "echo", b"others are unharmed").unwrap();
}

fn a_call_to_nobody_fails_soon_and_names_what_was_tried(kind: Kind) {
    let agents = strangers(kind, 1, |_| {}, functions);
    let mine = info(&agents[0]);
    let address = match kind {
        Kind::Memory => Address::Memory(99),
        Kind::Group { .. } => Address::Group(99),
        // Nobody listens there any more.
        _ => Listener::new(kind, &mine).1,
    };
    agents[0].open(vec![mine, nobody(1, vec![address.clone()])]).unwrap();
    let start = now();

    let error = ask(&agents[0], 1, "echo", b"").unwrap_err();

    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

fn another_life_of_a_worker_is_not_taken_for_the_one_that_was_called(kind: Kind) {
    let agents = strangers(kind, 2, |_| {}, functions);
    let mut other = info_over(kind, &agents[1]);
    other.identity.incarnation = Incarnation::new(other.identity.incarnation.get() ^ 1);
    agents[0].open(vec![info(&agents[0]), other]).unwrap();
    agents[1].open(vec![info(&agents[1])]).unwrap();

    let error = ask(&agents[0], 1, "echo", b"").unwrap_err();

    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert_eq!(agents[1].metrics().calls_received, 0);
    if kind != Kind::Memory {
        assert!(error.to_string().contains("incarnation"), "{error}");
    }
}

fn a_worker_may_call_itself(kind: Kind) {
    let agents = group(kind, 1, |_| {}, functions);
    let tensor = pattern(3 << 20, 5);

    let Response { body, .. } =
        response(&agents[0], 0, with_buffers("mirror", b"me".to_vec(), std::slice::from_ref(&tensor)));

    assert_eq!(body.payload.as_ref(), b"me");
    assert!(body.buffers[0].as_ref() == tensor);
    leave_together(agents);
}

fn later_writes_to_what_was_received_do_not_reach_the_sender(kind: Kind) {
    let agents = pair(kind);
    let tensor = pattern(100_000, 6);
    let region = Region::from_vec(tensor.clone());
    let mut request = with_buffers("mirror", Vec::new(), std::slice::from_ref(&tensor));
    request.body.buffers = vec![region.clone()];

    let Response { mut body, .. } = response(&agents[0], 1, request);
    body.buffers[0].as_mut().fill(0);

    let mut still = vec![0; tensor.len()];
    region.copy_to(&mut still);
    assert!(still == tensor);
    leave_together(agents);
}

/// A message that peers would not accept costs itself, not the connection.
fn a_message_beyond_the_limits_is_refused_where_it_is_made(kind: Kind) {
    let huge = || {
        functions().with("huge", |_, responder| {
            let tensors = vec![TensorDesc::contiguous(DType::UInt8, vec![0], 0); 70_000];
            let buffers = vec![Region::from_vec(Vec::new())];
            responder.returned(Encoding::Bytes, Body { tensors, buffers, ..Body::default() });
        })
    };
    let agents = group(kind, 2, |_| {}, huge);
    let pending = call(&agents[0], 1, "echo", &pattern(1 << 20, 7)).unwrap();
    let mut request = with_buffers("mirror", Vec::new(), &[vec![]]);
    request.body.tensors = vec![request.body.tensors[0].clone(); 70_000];

    let asked = agents[0].call(rank(1), request).unwrap_err();
    let answered = ask(&agents[0], 1, "huge", b"").unwrap_err();

    for error in [asked, answered] {
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains("70000 tensors"), "{error}");
    }
    answer(&pending).unwrap();
    leave_together(agents);
}

/// A handle to an outcome may outlive everything that could bring it about.
fn a_future_ends_although_its_agent_is_dropped(kind: Kind) {
    let never = || {
        Functions::default().with("never", |_, responder| {
            std::mem::forget(responder);
        })
    };
    let agents = group(kind, 2, |_| {}, never);
    let future = call(&agents[0], 1, "never", b"").unwrap();

    drop(agents);

    assert!(matches!(answer(&future).unwrap_err().kind(), ErrorKind::ShuttingDown | ErrorKind::PeerLeft));
}

type Wait = fn(&Agent, Option<Instant>) -> Result<()>;

/// Each message of a chain causes the next one, back and forth, and nobody waits for any of them.
fn sync_and_join_return_when_messages_of_messages_are_processed(kind: Kind) {
    const LENGTH: u8 = 10;
    let processed = Arc::new(AtomicU32::new(0));
    let book: Arc<OnceLock<Vec<Agent>>> = Arc::default();
    let chain = || {
        let (processed, book) = (Arc::clone(&processed), Arc::clone(&book));
        Functions::default().plain("chain", move |payload| {
            let &[me, left] = payload else { panic!("{payload:?}") };
            if left > 0 {
                let agent = &book.get().unwrap()[usize::from(me)];
                call(agent, (1 - me).into(), "chain", &[1 - me, left - 1]).unwrap().on_done(|| {});
            }
            processed.fetch_add(1, Ordering::Relaxed);
            Vec::new()
        })
    };
    let agents = group(kind, 2, |_| {}, chain);
    book.set(agents.clone()).unwrap();

    for (round, wait) in (1..).zip([Agent::sync as Wait, Agent::join]) {
        call(&agents[0], 1, "chain", &[1, LENGTH - 1]).unwrap().on_done(|| {});
        let waits: Vec<_> = agents
            .iter()
            .map(|agent| {
                let agent = agent.clone();
                thread(move || wait(&agent, Some(deadline(SOON))).unwrap())
            })
            .collect();
        waits.iter().for_each(finish);
        assert_eq!(processed.load(Ordering::Relaxed), round * u32::from(LENGTH));
    }
    for agent in &agents {
        agent.close(true, deadline(SOON));
    }
}

/// Instantiates the list for each transport.
macro_rules! suite {
    ([$($transport:ident = $kind:expr;)*] $tests:tt) => {
        $(suite!(@ $transport $kind; $tests);)*
    };
    (@ $transport:ident $kind:expr; [$($test:ident,)*]) => {
        mod $transport {
            $(
                #[test]
                fn $test() {
                    super::$test($kind);
                }
            )*
        }
    };
}

suite! {
    [
        memory = super::Kind::Memory;
        unix = super::Kind::Unix;
        tcp = super::Kind::Tcp;
        group = super::Kind::Group { any_source: true };
        group_by_source = super::Kind::Group { any_source: false };
    ]
    [
        a_message_of_any_size_arrives_whole_and_aligned,
        tensors_keep_their_order_their_views_and_what_they_share,
        messages_from_many_threads_all_arrive_and_find_their_callers,
        a_small_call_overtakes_a_large_one_that_is_under_way,
        bulk_in_both_directions_at_once_finishes,
        what_is_queued_when_a_worker_closes_still_arrives,
        a_peer_that_vanishes_without_a_word_is_lost_once_with_a_reason,
        a_call_to_nobody_fails_soon_and_names_what_was_tried,
        another_life_of_a_worker_is_not_taken_for_the_one_that_was_called,
        a_worker_may_call_itself,
        later_writes_to_what_was_received_do_not_reach_the_sender,
        a_message_beyond_the_limits_is_refused_where_it_is_made,
        a_future_ends_although_its_agent_is_dropped,
        sync_and_join_return_when_messages_of_messages_are_processed,
    ]
}
