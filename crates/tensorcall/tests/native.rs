//! The native interface: typed functions, calls, references, futures, shutdown.
#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::needless_pass_by_value, reason = "functions that others call own their arguments")]

use std::collections::HashMap;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use tensorcall::rendezvous::Rendezvous;
use tensorcall::store::{MemoryStore, Store};
use tensorcall::{
    Agent, AgentBuilder, Bytes, Caller, DType, ErrorKind, Keep, RRef, Result, RpcFuture, State, Tensor, Value,
};

/// No wait of a test is longer.
const SOON: Duration = Duration::from_secs(20);

fn pair(server: impl FnOnce(AgentBuilder) -> AgentBuilder) -> (Agent, Agent) {
    let builders = [Agent::builder("caller"), server(Agent::builder("server"))];
    let builders = builders.map(|builder| builder.timeout(SOON));
    let mut agents = Agent::start_together(builders).unwrap().into_iter();
    (agents.next().unwrap(), agents.next().unwrap())
}

fn leave(agents: impl IntoIterator<Item = Agent>) {
    let leave = |agent: Agent| std::thread::spawn(move || agent.shutdown_timeout(SOON).unwrap());
    let threads: Vec<_> = agents.into_iter().map(leave).collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

/// Runs a future as the simplest runtime would.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        std::thread::park_timeout(SOON);
    }
}

fn matmul(left: Tensor, right: Tensor) -> Result<Tensor> {
    let (rows, inner, columns) = (left.shape()[0], left.shape()[1], right.shape()[1]);
    let mut product = Tensor::zeros(DType::Float32, &[rows, columns])?;
    for (place, target) in product.as_mut_slice::<f32>()?.iter_mut().enumerate() {
        for at in 0..inner {
            *target += left.get::<f32>(&[place / columns, at])? * right.get::<f32>(&[at, place % columns])?;
        }
    }
    Ok(product)
}

#[test]
fn functions_take_and_return_what_they_say() {
    #[expect(clippy::many_single_char_names, clippy::too_many_arguments, reason = "as many as there may be")]
    fn twelve(a: u8, b: u8, c: u8, d: u8, e: u8, f: u8, g: u8, h: u8, i: u8, j: u8, k: u8, l: u8) -> Vec<u8> {
        vec![a, b, c, d, e, f, g, h, i, j, k, l]
    }
    let (caller, server) = pair(|agent| {
        agent
            .function("matmul", matmul)
            .function("nothing", || ())
            .function("twelve", twelve)
            .function("lengths", |words: Vec<String>| -> HashMap<String, usize> {
                words.into_iter().map(|word| (word.clone(), word.len())).collect()
            })
            .function("half", |number: Option<f64>| number.map(|number| number / 2.0))
            .function("anything", |value: Value| value.kind())
            .function("bytes", |bytes: Bytes| bytes.slice(1..3))
    });

    let a = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let b = a.transpose(0, 1).unwrap();
    let product: Tensor = caller.call_blocking("server", "matmul", (&a, b)).unwrap();
    assert_eq!(product.to_vec::<f32>().unwrap(), [5.0, 11.0, 11.0, 25.0]);
    caller.call_blocking::<()>("server", "nothing", ()).unwrap();
    let twelve: Vec<u8> =
        caller.call_blocking("server", "twelve", (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)).unwrap();
    assert_eq!(twelve.len(), 12);
    let lengths: HashMap<String, u8> = caller.call_blocking("server", "lengths", (["a", "bcd"],)).unwrap();
    assert_eq!(lengths["bcd"], 3);
    assert_eq!(caller.call_blocking::<Option<f64>>("server", "half", (None::<f64>,)).unwrap(), None);
    assert_eq!(caller.call_blocking::<Option<f64>>("server", "half", (3,)).unwrap(), Some(1.5));
    assert_eq!(caller.call_blocking::<String>("server", "anything", (b"xyz",)).unwrap(), "bytes");
    let part: Vec<u8> = caller.call_blocking("server", "bytes", (b"wxyz",)).unwrap();
    assert_eq!(part, b"xy");
    assert_eq!(server.call_blocking::<String>("server", "anything", (1,)).unwrap(), "int");
    leave([caller, server]);
}

#[test]
fn tensors_that_a_call_brings_are_aligned_for_every_use() {
    fn misaligned(tensors: Vec<Tensor>) -> Vec<usize> {
        let misaligned = |tensor: &Tensor| tensor.bytes().as_ptr().addr() % 64;
        tensors.iter().map(misaligned).filter(|&by| by != 0).collect()
    }
    let in_memory = pair(|agent| agent.function("misaligned", misaligned));
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let builder = |rank| {
        let rendezvous = Rendezvous::in_store(Arc::clone(&store), rank, Some(2)).unwrap();
        let name = ["caller", "server"][rank as usize];
        Agent::builder(name).meet_at(Arc::new(rendezvous)).function("misaligned", misaligned)
    };
    let mut over_sockets = meet((0..2).map(builder)).into_iter().map(Result::unwrap);
    let over_sockets = (over_sockets.next().unwrap(), over_sockets.next().unwrap());
    // Their bytes begin at odd addresses, and lie one after the other in a message.
    let odd = |len: usize| {
        let bytes = Bytes::zeroed(len + 1).unwrap().slice(1..len + 1);
        Tensor::from_bytes(DType::UInt8, &[len], bytes).unwrap()
    };

    for (caller, server) in [in_memory, over_sockets] {
        let tensors = [1, 3, 100, 5000, 70_001, 3 << 20].map(odd);
        let misaligned: Vec<usize> = caller.call_blocking("server", "misaligned", (tensors,)).unwrap();
        assert!(misaligned.is_empty(), "{misaligned:?}");
        leave([caller, server]);
    }
}

#[test]
fn wrong_names_numbers_and_types_are_told_apart() {
    let (caller, server) = pair(|agent| agent.function("add", |a: i64, b: i64| a + b).function("get", || 1));
    let error = |to: &str, function: &str, arguments: Vec<Value>| {
        let error = caller.call_blocking::<Vec<i64>>(to, function, arguments).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        error.to_string()
    };
    let ints = |count: usize| vec![Value::Int(1); count];

    assert_eq!(error("nobody", "add", ints(2)), "there is no worker 'nobody' in the group of 'caller'");
    assert_eq!(
        error("server", "sub", ints(2)),
        "worker 'server': there is no function 'sub' here; there is add, get"
    );
    assert_eq!(
        error("server", "add", ints(1)),
        "worker 'server': function 'add': it takes 2 arguments, but 1 was given"
    );
    assert_eq!(
        error("server", "add", vec![Value::Int(1), Value::Str("x".into())]),
        "worker 'server': function 'add': argument 2: expected int (i64), found str"
    );
    assert_eq!(
        error("server", "add", ints(2)),
        "the result of add on worker 'server': expected list, found int"
    );
    let unfit = caller.call_blocking::<i64>("server", "add", (1, u64::MAX)).unwrap_err().to_string();
    assert_eq!(unfit, "call of 'add': argument 2: 18446744073709551615 does not fit 64 bits with sign");
    leave([caller, server]);
}

#[test]
fn errors_and_panics_of_functions_are_errors_at_the_caller() {
    let (caller, server) = pair(|agent| {
        agent
            .function("fail", || -> Result<i64, std::num::ParseIntError> { "x".parse::<i64>() })
            .function("panic", |text: String| -> i64 { panic!("{text}") })
            .function("late_panic", async || -> i64 { panic!("later") })
    });

    let error = caller.call_blocking::<i64>("server", "fail", ()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Raised);
    let remote = error.remote().unwrap();
    assert!(remote.is("ParseIntError") && remote.is("RuntimeError"), "{remote:?}");
    assert_eq!(remote.message(), "invalid digit found in string");
    assert_eq!((remote.worker(), remote.origin()), ("server", "function 'fail' on worker 'server'"));
    for (function, arguments, text) in
        [("panic", vec![Value::Str("no".into())], "no"), ("late_panic", vec![], "later")]
    {
        let error = caller.call_blocking::<i64>("server", function, arguments).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{function} on worker 'server' raised panic: panicked: {text}")
        );
    }
    leave([caller, server]);
}

#[test]
fn functions_share_state_and_know_agent_and_caller() {
    #[derive(Clone)]
    struct Greeting(&'static str);

    let counter = Arc::new(AtomicUsize::new(0));
    let (caller, server) = pair(|agent| {
        agent
            .state(Arc::clone(&counter))
            .state(Greeting("hello"))
            .function("count", |State(counter): State<Arc<AtomicUsize>>, more: usize| {
                counter.fetch_add(more, Ordering::SeqCst) + more
            })
            .function("greet", |caller: Caller, State(greeting): State<Greeting>, here: Agent| {
                format!("{} {} of rank {}, from {}", greeting.0, caller.name(), caller.rank(), here.name())
            })
    });

    assert_eq!(caller.call_blocking::<usize>("server", "count", (2,)).unwrap(), 2);
    assert_eq!(caller.call_blocking::<usize>("server", "count", (3,)).unwrap(), 5);
    let greeting: String = caller.call_blocking("server", "greet", ()).unwrap();
    assert_eq!(greeting, "hello caller of rank 0, from server");
    assert_eq!(counter.load(Ordering::SeqCst), 5);
    leave([caller, server]);
}

#[test]
fn a_function_without_its_state_keeps_the_agent_from_starting() {
    let builder = Agent::builder("worker").function("count", |State(_): State<Arc<AtomicUsize>>| ());

    let error = Agent::start_together([builder]).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("'count'") && error.to_string().contains("AtomicUsize"), "{error}");
}

#[test]
fn futures_are_awaited_under_any_runtime_and_run_in_parallel() {
    let (sender, receiver) = mpsc::channel::<()>();
    let receiver = Arc::new(Mutex::new(receiver));
    let (caller, server) = pair(|agent| {
        agent.state(receiver).function("wait", |State(gate): State<Arc<Mutex<mpsc::Receiver<()>>>>| {
            gate.lock().unwrap().recv_timeout(SOON).unwrap();
            1
        })
    });

    let first: RpcFuture<i32> = caller.call("server", "wait", ());
    let second: RpcFuture<i32> = caller.call("server", "wait", ());
    assert!(!first.is_done());
    sender.send(()).unwrap();
    sender.send(()).unwrap();
    let sum = block_on(async { first.await.unwrap() + second.await.unwrap() });

    assert_eq!(sum, 2);
    leave([caller, server]);
}

#[test]
fn async_functions_wait_without_a_thread() {
    // Each waits for the one below on the other worker; one place and few threads do for all of them.
    async fn descend(agent: Agent, depth: u32) -> Result<u32> {
        if depth == 0 {
            return Ok(0);
        }
        let other = if agent.name() == "caller" { "server" } else { "caller" };
        let below: u32 = agent.call(other, "descend", (depth - 1,)).await?;
        Ok(below + 1)
    }
    let builder = |name| Agent::builder(name).timeout(SOON).threads(1).function("descend", descend);
    let agents = Agent::start_together([builder("caller"), builder("server")]).unwrap();

    let depth: u32 = agents[0].call_blocking("server", "descend", (200,)).unwrap();

    assert_eq!(depth, 200);
    leave(agents);
}

#[test]
fn blocking_functions_nest_with_one_thread_each() {
    fn descend(agent: Agent, depth: u32) -> Result<u32> {
        if depth == 0 {
            return Ok(0);
        }
        let other = if agent.name() == "caller" { "server" } else { "caller" };
        Ok(agent.call_blocking::<u32>(other, "descend", (depth - 1,))? + 1)
    }
    let builder = |name| Agent::builder(name).timeout(SOON).threads(1).function("descend", descend);
    let agents = Agent::start_together([builder("caller"), builder("server")]).unwrap();

    assert_eq!(agents[0].call_blocking::<u32>("server", "descend", (50,)).unwrap(), 50);
    leave(agents);
}

/// Tells when it is dropped.
struct Guard(mpsc::Sender<&'static str>);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.send("dropped");
    }
}

#[test]
fn dropping_a_future_drops_the_async_function() {
    type Tell = Arc<Mutex<mpsc::Sender<&'static str>>>;
    let (sender, receiver) = mpsc::channel();
    let (caller, server) = pair(|agent| {
        agent.state(Arc::new(Mutex::new(sender))).function("forever", async |State(tell): State<Tell>| {
            let tell = tell.lock().unwrap().clone();
            tell.send("begun").unwrap();
            let _guard = Guard(tell);
            std::future::pending::<()>().await;
        })
    });

    let future: RpcFuture<()> = caller.call("server", "forever", ());
    assert_eq!(receiver.recv_timeout(SOON), Ok("begun"));
    assert!(receiver.recv_timeout(Duration::from_millis(20)).is_err());
    drop(future);

    assert_eq!(receiver.recv_timeout(SOON), Ok("dropped"));
    leave([caller, server]);
}

#[test]
fn a_blocking_function_can_see_that_it_was_cancelled() {
    let (sender, receiver) = mpsc::channel();
    let sender = Arc::new(Mutex::new(sender));
    let (caller, server) = pair(|agent| {
        agent.state(sender).function(
            "work",
            |caller: Caller, State(tell): State<Arc<Mutex<mpsc::Sender<&'static str>>>>| {
                tell.lock().unwrap().send("begun").unwrap();
                while !caller.is_gone() {
                    std::thread::park_timeout(Duration::from_millis(1));
                }
                tell.lock().unwrap().send("ended").unwrap();
            },
        )
    });

    let future: RpcFuture<()> = caller.call("server", "work", ());
    assert_eq!(receiver.recv_timeout(SOON), Ok("begun"));
    future.cancel();

    assert_eq!(receiver.recv_timeout(SOON), Ok("ended"));
    leave([caller, server]);
}

#[test]
fn a_detached_call_runs() {
    let (sender, receiver) = mpsc::channel::<u8>();
    let (caller, server) = pair(|agent| {
        agent.state(Arc::new(Mutex::new(sender))).function(
            "tell",
            |State(tell): State<Arc<Mutex<mpsc::Sender<u8>>>>, what: u8| {
                tell.lock().unwrap().send(what).unwrap();
            },
        )
    });

    caller.call::<()>("server", "tell", (7,)).detach();

    assert_eq!(receiver.recv_timeout(SOON), Ok(7));
    leave([caller, server]);
}

#[test]
fn a_call_ends_at_its_timeout() {
    let (caller, server) =
        pair(|agent| agent.function("forever", async || std::future::pending::<()>().await));

    let hurried = caller.with_timeout(Duration::from_millis(50));
    let error = hurried.call_blocking::<()>("server", "forever", ()).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("forever on worker 'server'"), "{error}");
    leave([caller, server]);
}

#[test]
fn references_are_fetched_passed_on_and_called_through() {
    let (caller, server) = pair(|agent| {
        agent
            .function("make", |n: usize| Tensor::from_vec(vec![1i32; n], &[n]))
            .function("length", |agent: Agent, rref: RRef<Tensor>| -> Result<usize> {
                assert_eq!(agent.name(), "server");
                Ok(rref.fetch_blocking()?.len())
            })
            .function("more", async |rref: RRef<Tensor>, extra: usize| -> Result<usize> {
                Ok(rref.fetch().await?.len() + extra)
            })
    });

    let rref: RRef<Tensor> = caller.remote("server", "make", (3,)).unwrap();
    assert_eq!((rref.owner(), rref.is_owner()), ("server", false));
    assert_eq!(rref.fetch_blocking().unwrap().to_vec::<i32>().unwrap(), [1, 1, 1]);
    assert_eq!(caller.call_blocking::<usize>("server", "length", (&rref,)).unwrap(), 3);
    assert_eq!(block_on(rref.call::<usize>("more", (2,))).unwrap(), 5);

    let mine = caller.share(Tensor::scalar(1.5f64)).unwrap();
    assert!(mine.is_owner());
    assert_eq!(caller.call_blocking::<usize>("server", "length", (mine,)).unwrap(), 1);
    leave([caller, server]);
}

#[test]
fn objects_stay_with_their_owner_whose_functions_use_them() {
    struct Counter(AtomicUsize);

    let (caller, server) = pair(|agent| {
        agent
            .function("counter", |start: usize| Keep(Counter(AtomicUsize::new(start))))
            .function("count", |counter: RRef<Counter>| -> Result<usize> {
                Ok(counter.local()?.0.fetch_add(1, Ordering::SeqCst))
            })
            .function("broken", || -> Result<Keep<Counter>, String> { Err("no counters".into()) })
    });

    let counter: RRef<Counter> = caller.remote("server", "counter", (5,)).unwrap();
    assert_eq!(counter.call::<usize>("count", ()).wait().unwrap(), 5);
    assert_eq!(counter.call::<usize>("count", ()).wait().unwrap(), 6);

    assert_eq!(counter.local().err().unwrap().kind(), ErrorKind::RRef);
    let fetched = counter.clone().cast::<Value>().fetch_blocking().unwrap_err();
    assert!(fetched.to_string().contains("stays on its worker"), "{fetched}");
    let refused = caller.call_blocking::<Value>("server", "counter", (5,)).unwrap_err();
    assert!(refused.to_string().contains("remote()"), "{refused}");
    let broken: RRef<Value> = caller.remote("server", "broken", ()).unwrap();
    assert_eq!(broken.fetch_blocking().unwrap_err().remote().unwrap().message(), "no counters");
    let kept = caller.keep(Counter(AtomicUsize::new(1)));
    assert_eq!(kept.local().unwrap().0.load(Ordering::SeqCst), 1);
    assert!(kept.cast::<u8>().local().unwrap_err().to_string().contains("Counter"));
    leave([caller, server]);
}

#[test]
fn sync_waits_for_what_is_under_way() {
    let counter = Arc::new(AtomicUsize::new(0));
    let (caller, server) = pair(|agent| {
        agent.state(Arc::clone(&counter)).function("slow", |State(counter): State<Arc<AtomicUsize>>| {
            std::thread::park_timeout(Duration::from_millis(20));
            counter.fetch_add(1, Ordering::SeqCst);
        })
    });

    for _ in 0..3 {
        caller.call::<()>("server", "slow", ()).detach();
    }
    let other = std::thread::spawn({
        let server = server.clone();
        move || server.sync(SOON)
    });
    caller.sync(SOON).unwrap();
    other.join().unwrap().unwrap();

    assert_eq!(counter.load(Ordering::SeqCst), 3);
    leave([caller, server]);
}

type Wait = fn(&Agent, Duration) -> Result<()>;

#[test]
fn sync_and_join_wait_for_calls_that_calls_have_made() {
    const LENGTH: usize = 10;
    let count = Arc::new(AtomicUsize::new(0));
    let builders = ["w0", "w1"].map(|name| {
        let builder = Agent::builder(name).timeout(SOON).state(Arc::clone(&count));
        builder.function("chain", |here: Agent, State(count): State<Arc<AtomicUsize>>, left: usize| {
            if left > 0 {
                let other = if here.name() == "w0" { "w1" } else { "w0" };
                here.call::<()>(other, "chain", (left - 1,)).detach();
            }
            count.fetch_add(1, Ordering::SeqCst);
        })
    });
    let agents = Agent::start_together(builders).unwrap();

    for (round, wait) in (1..).zip([Agent::sync as Wait, Agent::join]) {
        agents[0].call::<()>("w1", "chain", (LENGTH - 1,)).detach();
        std::thread::scope(|scope| {
            for agent in &agents {
                scope.spawn(move || wait(agent, SOON).unwrap());
            }
        });
        assert_eq!(count.load(Ordering::SeqCst), round * LENGTH);
    }
    agents.iter().for_each(Agent::close);
}

#[test]
fn a_worker_that_closes_fails_calls_to_it() {
    let (caller, server) =
        pair(|agent| agent.function("forever", async || std::future::pending::<()>().await));
    let future: RpcFuture<()> = caller.call("server", "forever", ());

    server.close();

    let error = future.wait().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLeft | ErrorKind::PeerLost), "{error}");
    assert!(caller.call_blocking::<()>("server", "forever", ()).unwrap_err().to_string().contains("server"));
    assert!(server.is_closed());
}

#[test]
fn a_worker_whose_last_agent_is_dropped_is_gone() {
    let (caller, server) =
        pair(|agent| agent.function("forever", async || std::future::pending::<()>().await));
    let future: RpcFuture<()> = caller.call("server", "forever", ());

    drop(server);

    let error = future.wait().unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::PeerLeft | ErrorKind::PeerLost), "{error}");
    caller.shutdown_timeout(SOON).unwrap();
}

/// Starts workers that meet, each on a thread of its own as if in a process of its own.
fn meet(builders: impl IntoIterator<Item = AgentBuilder>) -> Vec<Result<Agent>> {
    let start = |builder: AgentBuilder| std::thread::spawn(move || builder.timeout(SOON).start());
    let threads: Vec<_> = builders.into_iter().map(start).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn workers_meet_in_a_store_and_call_each_other_over_sockets() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let builder = |rank| {
        let rendezvous = Rendezvous::in_store(Arc::clone(&store), rank, Some(3)).unwrap();
        let name = |agent: Agent| agent.name().to_owned();
        Agent::builder(format!("worker{rank}")).meet_at(Arc::new(rendezvous)).function("name", name)
    };

    let agents: Vec<Agent> = meet((0..3).map(builder)).into_iter().map(Result::unwrap).collect();

    let names: Vec<String> = agents[0].workers().into_iter().map(|worker| worker.name).collect();
    assert_eq!(names, ["worker0", "worker1", "worker2"]);
    for (agent, to) in agents.iter().zip([1, 2, 0]) {
        let to = format!("worker{to}");
        assert_eq!(agent.call_blocking::<String>(&to, "name", ()).unwrap(), to);
    }
    let numbers = Bytes::from((0..1_000_000u32).flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    let error = agents[0].call_blocking::<String>("worker1", "name", (&numbers,)).unwrap_err();
    assert!(error.to_string().contains("it takes 0 arguments"), "{error}");
    leave(agents);
}

/// Answers that come close together are written together, but none waits for a function to end.
#[test]
fn no_answer_of_a_burst_waits_for_a_function_that_takes_long() {
    let (gate, store) = (Arc::new((Mutex::new(0), Condvar::new())), Arc::new(MemoryStore::default()));
    let builder = |rank: u32| {
        let store = Arc::clone(&store) as Arc<dyn Store>;
        let rendezvous = Rendezvous::in_store(store, rank, Some(2)).unwrap();
        let gate = Arc::clone(&gate);
        let long = move |round: u32| {
            let (open, _) =
                gate.1.wait_timeout_while(gate.0.lock().unwrap(), SOON, |open| *open < round).unwrap();
            *open
        };
        let builder = Agent::builder(["caller", "server"][rank as usize]).meet_at(Arc::new(rendezvous));
        builder.function("short", |number: u32| number).function("long", long)
    };
    let agents: Vec<Agent> = meet((0..2).map(builder)).into_iter().map(Result::unwrap).collect();
    let call = |function: &str, argument: u32| agents[0].call::<u32>("server", function, (argument,));

    for round in 1..=200 {
        let short: Vec<_> = (0..round % 20).map(|number| (number, call("short", number))).collect();
        let long: Vec<_> = (0..3).map(|_| call("long", round)).collect();

        for (number, answer) in short {
            assert_eq!(answer.wait().unwrap(), number);
        }

        *gate.0.lock().unwrap() = round;
        gate.1.notify_all();
        for answer in long {
            assert_eq!(answer.wait().unwrap(), round);
        }
    }
    leave(agents);
}

/// Calls that follow each other closely may wait to be written together, but not for ever, and not while somebody
/// waits for one of them: at any pace, whether their caller waits, looks, or awaits them.
#[test]
#[expect(clippy::disallowed_methods, reason = "a pace, and a limit")]
fn calls_that_come_fast_are_all_sent() {
    let store = Arc::new(MemoryStore::default());
    let builder = |rank: u32| {
        let store = Arc::clone(&store) as Arc<dyn Store>;
        let rendezvous = Rendezvous::in_store(store, rank, Some(2)).unwrap();
        let builder = Agent::builder(["caller", "server"][rank as usize]).meet_at(Arc::new(rendezvous));
        builder.timeout(SOON).function("short", |number: u32| number)
    };
    let agents: Vec<Agent> = meet((0..2).map(builder)).into_iter().map(Result::unwrap).collect();

    for round in 0..300 {
        let pause = Duration::from_micros([0, 2, 6, 12][round % 4]);
        let answers: Vec<_> = (0..u32::try_from(round).unwrap() % 23)
            .map(|number| {
                let from = Instant::now();
                while from.elapsed() < pause {
                    std::hint::spin_loop();
                }
                (number, agents[0].call::<u32>("server", "short", (number,)))
            })
            .collect();
        for (number, answer) in answers {
            match round % 3 {
                0 => {}
                1 => {
                    let limit = Instant::now() + SOON;
                    while !answer.is_done() {
                        assert!(Instant::now() < limit, "answer {number} of round {round} did not come");
                        std::thread::yield_now();
                    }
                }
                _ => {
                    assert_eq!(block_on(answer).unwrap(), number);
                    continue;
                }
            }
            assert_eq!(answer.wait().unwrap(), number);
        }
    }
    leave(agents);
}

#[test]
fn workers_join_and_leave_a_group_that_changes() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::default());
    let join = |rank| {
        let rendezvous = Rendezvous::in_store(Arc::clone(&store), rank, None).unwrap();
        let builder = Agent::builder(format!("worker{rank}")).meet_at(Arc::new(rendezvous));
        builder.timeout(SOON).function("rank", |agent: Agent| agent.rank()).start().unwrap()
    };

    let first = join(0);
    let second = join(1);
    assert_eq!(first.call_blocking::<u32>("worker1", "rank", ()).unwrap(), 1);
    let third = join(2);
    assert_eq!(third.call_blocking::<u32>("worker0", "rank", ()).unwrap(), 0);
    second.shutdown_timeout(SOON).unwrap();

    let names = |agent: &Agent| agent.workers().into_iter().map(|worker| worker.name).collect::<Vec<_>>();
    assert_eq!(names(&first), ["worker0", "worker2"]);
    assert_eq!(first.call_blocking::<u32>("worker2", "rank", ()).unwrap(), 2);
    assert!(first.call_blocking::<u32>("worker1", "rank", ()).is_err());
    third.shutdown_timeout(SOON).unwrap();
    first.shutdown_timeout(SOON).unwrap();
}

#[test]
fn a_worker_says_what_it_needs_to_start() {
    let text = |builder: AgentBuilder| builder.start().unwrap_err().to_string();

    assert!(text(Agent::builder("alone")).contains("where does worker 'alone' meet the others?"));
    assert!(
        text(Agent::builder("a name").rendezvous("file:///tmp/x").rank(0).world_size(1)).contains("name")
    );
    assert!(text(Agent::builder("lost").rendezvous("nowhere").rank(0).world_size(1)).contains("nowhere"));
    let met = || Arc::new(Rendezvous::in_store(Arc::new(MemoryStore::default()), 1, Some(2)).unwrap());
    for builder in [Agent::builder("two").dynamic(), Agent::builder("two").rank(0)] {
        assert_eq!(
            text(builder.meet_at(met())),
            "worker 'two' meets others as rank 1 of 2 workers; its builder says otherwise"
        );
    }
}

#[test]
fn two_hundred_workers_of_one_process_call_each_other_and_leave() {
    const WORKERS: usize = 200;
    let builder = |number: usize| {
        Agent::builder(format!("worker{number}"))
            .timeout(SOON)
            .threads(1)
            .function("double", |n: usize| 2 * n)
    };
    let agents = Agent::start_together((0..WORKERS).map(builder)).unwrap();

    for agent in &agents {
        let calls: Vec<RpcFuture<usize>> =
            (0..WORKERS).map(|to| agent.call(&format!("worker{to}"), "double", (to,))).collect();
        for (to, call) in calls.into_iter().enumerate() {
            assert_eq!(call.wait().unwrap(), 2 * to);
        }
    }

    leave(agents);
}
