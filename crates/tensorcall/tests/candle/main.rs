//! Gradients over workers that compute with candle, compared with those of one process.
//!
//! The tolerance is 1e-9 of the larger number, or of 1: all is double precision, and sums are made in another
//! order.

#![expect(clippy::unwrap_used, reason = "a test stops where something is wrong")]

mod program;
mod spread;

use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor, Var};
use program::{distance, expected};
use spread::{name, worker};
use tensorcall::candle::BackwardOptions;
use tensorcall::{Agent, AgentBuilder, Context, ErrorKind};

const TOLERANCE: f64 = 1e-9;

fn group(workers: u64) -> Vec<Agent> {
    Agent::start_together((0..workers).map(|number| worker(number, workers))).unwrap()
}

/// All workers leave together.
fn leave(agents: &[Agent]) {
    std::thread::scope(|scope| {
        for agent in agents {
            scope.spawn(|| agent.shutdown_timeout(Duration::from_secs(30)).unwrap());
        }
    });
}

/// Runs a program and its backward passes from worker `first`, and compares what each worker has. Tells on
/// how many of them there are gradients.
fn check(agents: &[Agent], first: u64, seed: u64, depth: u64, passes: u32) -> usize {
    let workers = agents.len() as u64;
    let found = agents[0].call_blocking(&name(first), "drive", (seed, depth, passes));
    let found: Vec<Vec<Tensor>> = found.unwrap();
    let expected = expected(workers, first, seed, depth);
    for (worker, (found, expected)) in found.iter().zip(&expected).enumerate() {
        for (variable, (found, expected)) in found.iter().zip(expected).enumerate() {
            let expected = (expected * f64::from(passes)).unwrap();
            let off = distance(found, &expected);
            assert!(
                off <= TOLERANCE,
                "program {seed} of {first}, depth {depth}: variable {variable} of worker {worker} is off by {off}:\n\
                 {found}\n{expected}"
            );
        }
    }
    let is_zero = |tensor: &Tensor| distance(tensor, &tensor.zeros_like().unwrap()) == 0.0;
    expected.iter().filter(|gradients| !gradients.iter().all(is_zero)).count()
}

#[test]
fn gradients_of_random_programs_over_candle_workers_are_those_of_one_process() {
    for workers in 2..=4 {
        let agents = group(workers);
        let mut spread = 0;
        for seed in 0..60 {
            let passes = 1 + u32::try_from(seed % 2).unwrap();
            spread += check(&agents, seed % workers, seed * 7 + workers, 1 + seed % 3, passes);
        }
        // The programs are not such that one worker does all.
        assert!(spread > 60 * 3 / 2, "{spread} workers had gradients");
        await_no_contexts(&agents);
        leave(&agents);
    }
}

/// Two workers: `w0` calls, `w1` has these functions.
fn pair(serving: AgentBuilder) -> (Agent, Agent) {
    let mut agents = Agent::start_together([worker(0, 2), serving.candle()]).unwrap().into_iter();
    (agents.next().unwrap(), agents.next().unwrap())
}

fn variable() -> Var {
    Var::new(&[1f32, 2.0, 3.0], &Device::Cpu).unwrap()
}

/// The gradient of a variable for the sum of what a call makes of it.
fn gradient(
    agent: &Agent,
    variable: &Var,
    call: impl FnOnce(&Var) -> tensorcall::Result<Tensor>,
) -> tensorcall::Result<Vec<f32>> {
    let context = Context::begin(agent)?;
    let output = {
        let _inside = context.enter();
        call(variable)?
    };
    context.backward(&[output.sum_all()?])?;
    Ok(context.gradients().get(variable).map(|gradient| gradient.to_vec1().unwrap()).unwrap_or_default())
}

#[test]
fn without_an_open_context_calls_are_like_any_others() {
    let (here, there) = pair(Agent::builder("w1").function("double", |x: Tensor| x * 2.0));
    let variable = variable();

    let doubled: Tensor = here.call_blocking("w1", "double", (&variable,)).unwrap();

    assert_eq!(doubled.to_vec1::<f32>().unwrap(), [2.0, 4.0, 6.0]);
    assert!(!doubled.track_op());
    assert_eq!((here.autograd_contexts(), there.autograd_contexts()), (0, 0));
}

#[test]
fn tensors_that_are_passed_on_as_they_came_keep_their_place_in_the_graph() {
    let serving = Agent::builder("w1")
        .function("same", |x: tensorcall::Tensor| x)
        .function("away_and_back", |agent: Agent, x: tensorcall::Tensor| {
            let double: tensorcall::Tensor = agent.call_blocking("w1", "double", (&x,))?;
            Ok::<_, tensorcall::Error>(vec![x, double])
        })
        .function("view", |x: tensorcall::Tensor| x.reshape(&[3, 1]))
        .function("double", |x: Tensor| x * 2.0);
    let (here, _there) = pair(serving);
    let variable = variable();

    let same = gradient(&here, &variable, |x| here.call_blocking("w1", "same", (x,))).unwrap();
    let both = gradient(&here, &variable, |x| {
        let both: Vec<Tensor> = here.call_blocking("w1", "away_and_back", (x,))?;
        Ok((&both[0] + (&both[1] * 10.0)?)?)
    });
    let view = gradient(&here, &variable, |x| here.call_blocking("w1", "view", (x,)));

    assert_eq!(same, [1.0; 3]);
    assert_eq!(both.unwrap(), [21.0; 3]);
    assert_eq!(view.unwrap_err().kind(), ErrorKind::Usage);
}

#[test]
fn a_task_is_in_the_context_that_it_was_given() {
    let serving = Agent::builder("w1")
        .function("twice", async |agent: Agent, x: Tensor| {
            let once: Tensor = agent.call("w1", "double", (x,)).await?;
            agent.call::<Tensor>("w1", "double", (once,)).await
        })
        .function("double", |x: Tensor| x * 2.0);
    let (here, _there) = pair(serving);
    let variable = variable();
    let context = Context::begin(&here).unwrap();

    let task = context.within(async {
        let output: Tensor = here.call("w1", "twice", (&variable,)).await?;
        context.begin_backward(&[output.sum_all()?], BackwardOptions::default())?.await
    });
    block_on(task).unwrap();

    assert_eq!(context.gradients().get(&variable).unwrap().to_vec1::<f32>().unwrap(), [4.0; 3]);
}

#[test]
fn a_variable_that_is_kept_for_references_can_be_set() {
    let kept = variable();
    let serving = Agent::builder("w1").function("weight", {
        let kept = kept.clone();
        move || kept.as_tensor().clone()
    });
    let (here, there) = pair(serving);
    let large = Var::zeros(1 << 16, DType::F32, &Device::Cpu).unwrap();
    let shared = here.share(large.as_tensor().clone()).unwrap();
    let context = Context::begin(&here).unwrap();
    let inside = context.enter();
    let weight = here.remote::<Tensor>("w1", "weight", ()).unwrap();

    let fetched = weight.fetch_blocking().unwrap();
    context.backward(&[(fetched * 3.0).unwrap().sum_all().unwrap()]).unwrap();
    for variable in [&kept, &large] {
        variable.set(&variable.ones_like().unwrap()).unwrap();
    }

    drop(inside);
    let before = shared.fetch_blocking().unwrap();
    assert_eq!(before.to_vec1::<f32>().unwrap(), vec![0.0; 1 << 16]);
    let gradients = Context::find(&there, context.id()).unwrap().gradients();
    assert_eq!(gradients.get(&kept).unwrap().to_vec1::<f32>().unwrap(), [3.0; 3]);
}

#[test]
fn calls_without_an_answer_hold_no_pass_up() {
    let (here, _there) = pair(Agent::builder("w1").function("double", |x: Tensor| x * 2.0));
    let variable = variable();

    let found = gradient(&here, &variable, |x| {
        here.call_blocking::<Tensor>("w1", "missing", (x,)).unwrap_err();
        drop(here.call::<Tensor>("w1", "double", (x,)));
        here.call::<Tensor>("w1", "double", (x,)).detach();
        here.call_blocking("w1", "double", (x,))
    });

    assert_eq!(found.unwrap(), [2.0; 3]);
}

#[test]
fn a_pass_through_a_worker_that_takes_no_part_says_so() {
    let serving = Agent::builder("w1").function("double", |x: Tensor| x * 2.0);
    let mut agents = Agent::start_together([worker(0, 2), serving]).unwrap().into_iter();
    let (here, there) = (agents.next().unwrap(), agents.next().unwrap());
    let variable = variable();

    let error = gradient(&here, &variable, |x| {
        let doubled: Tensor = here.call_blocking("w1", "double", (x,))?;
        Ok((doubled + x.as_tensor())?)
    });

    assert!(error.unwrap_err().to_string().contains("no local engine"));
    assert_eq!(Context::begin(&there).unwrap_err().kind(), ErrorKind::Usage);
}

#[test]
fn a_received_tensor_is_of_no_use_in_another_context() {
    let (here, _there) = pair(Agent::builder("w1").function("double", |x: Tensor| x * 2.0));
    let variable = variable();
    let mut first = None;
    gradient(&here, &variable, |x| {
        let doubled: Tensor = here.call_blocking("w1", "double", (x,))?;
        first = Some(doubled.clone());
        Ok(doubled)
    })
    .unwrap();

    let error = gradient(&here, &variable, |_| Ok((first.unwrap() * 2.0)?)).unwrap_err();

    assert_eq!(error.kind(), ErrorKind::Autograd);
    assert!(error.to_string().contains("another autograd context"), "{error}");
}

#[test]
fn graphs_may_be_deep() {
    let deep = |x: &Tensor| {
        let mut x = x.clone();
        for _ in 0..4000 {
            x = (x + 1.0)?;
        }
        candle_core::Result::Ok(x)
    };
    let (here, _there) = pair(Agent::builder("w1").function("deep", move |x: Tensor| deep(&x)));
    let variable = variable();

    let found = gradient(&here, &variable, |x| {
        let here_first = deep(x)?;
        here.call_blocking("w1", "deep", (here_first,))
    });

    assert_eq!(found.unwrap(), [1.0; 3]);
}

#[test]
fn roots_are_numbers_that_depend_on_something() {
    let (here, _there) = pair(Agent::builder("w1"));
    let context = Context::begin(&here).unwrap();
    let number = Tensor::new(1f32, &Device::Cpu).unwrap();

    for roots in [vec![], vec![variable().as_tensor().clone()], vec![number]] {
        assert_eq!(context.backward(&roots).unwrap_err().kind(), ErrorKind::Usage);
    }
}

/// Runs a future to its end on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = std::pin::pin!(future);
    let limit = now() + Duration::from_secs(20);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut TaskContext::from_waker(&waker)) {
            return output;
        }
        assert!(now() < limit, "a task does not end");
        std::thread::park_timeout(Duration::from_secs(1));
    }
}

fn await_no_contexts(agents: &[Agent]) {
    let limit = now() + Duration::from_secs(20);
    for agent in agents {
        while agent.autograd_contexts() > 0 {
            assert!(now() < limit, "{} still has a context", agent.name());
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "tests have their own clock")]
fn now() -> Instant {
    Instant::now()
}
