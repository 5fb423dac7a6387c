//! Threads that run the functions of other workers.
//!
//! A *place* is the right to be at work: there are `num_worker_threads` of them. A function takes a
//! place when it starts and lends it to others while it waits inside an RPC ([`lend`]), so waiting
//! functions never use up the pool; when its wait ends it goes on at once, so the number at work may
//! briefly exceed the places, and no new function starts until it is back under. Threads are made on
//! demand up to a cap; at the cap, with every thread waiting, a request is refused at once, because
//! nobody is left who could ever run it.
//!
//! *Tasks* (callbacks of futures) run on the same threads but take no place.
//!
//! A call that came from inside a running function elsewhere is *nested*. If functions here block on
//! something that only such a call would release, a lock for instance, no place ever becomes free; so
//! when nothing has moved for [`STALL`] a nested call starts without one.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tensorcall_proto::ids::WorkerName;
use tensorcall_proto::wire::message::FailureKind;

use crate::clock::now;
use crate::fork::Home;
use crate::held::Held;
use crate::spin;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::transport::{Link, Outbound};

/// A nested call starts without a place after the pool has been still for this long.
const STALL: Duration = Duration::from_millis(20);
/// A thread beyond the number of places ends after it was idle for this long.
const LINGER: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 5000 });

/// Wraps the life of each pool thread, for languages in which a thread has to sign in.
pub trait ThreadHook: Send + Sync {
    /// Runs `body`, which returns when the thread ends, with the thread signed in.
    fn run(&self, body: &mut (dyn FnMut() + Send));

    /// How long a request waits for a thread that is at work before another thread is woken for it.
    /// None by default. Where threads share one lock, many of them for short functions only get in
    /// each other's way.
    fn patience(&self) -> Duration {
        Duration::ZERO
    }
}

/// What a request comes to, once.
pub(crate) trait Run: Send {
    /// Runs it, or says for which reason it never will be.
    fn run(self: Box<Self>, refused: Option<Refusal>);
}

impl<F: FnOnce(Option<Refusal>) + Send> Run for F {
    fn run(self: Box<Self>, refused: Option<Refusal>) {
        self(refused);
    }
}

/// A request to run.
pub(crate) type Job = Box<dyn Run>;
/// Work that takes no place.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// Why a request is never run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) kind: FailureKind,
    pub(crate) text: String,
}

impl Refusal {
    fn shutting_down() -> Self {
        Self { kind: FailureKind::ShuttingDown, text: "the worker is shutting down".to_owned() }
    }
}

/// How many threads, and what wraps them.
pub(crate) struct PoolConfig {
    pub(crate) places: usize,
    pub(crate) max_threads: usize,
    /// How long one thread goes on looking for work after it had some.
    pub(crate) busy_poll: Duration,
    pub(crate) hook: Arc<dyn ThreadHook>,
}

/// See the module.
pub(crate) struct Pool(Arc<Shared>);

struct Shared {
    config: PoolConfig,
    state: Mutex<State>,
    ended: Condvar,
    /// Requests that could start and for which no thread is on its way: [`Pool::tick`] looks after them.
    ahead: AtomicUsize,
    held: Held,
}

#[derive(Default)]
struct State {
    nested: VecDeque<Job>,
    requests: VecDeque<Job>,
    tasks: VecDeque<Task>,
    /// Requests are started.
    open: bool,
    stopping: bool,
    threads: usize,
    /// Those of them that have decided to end.
    ending: usize,
    /// Threads made that have not yet looked for work.
    starting: usize,
    /// What wakes each idle thread that has not been told to look for work. The last one that fell idle
    /// is woken first: what it needs is still in the caches, and those that are not needed can end.
    idle: Vec<Arc<Seat>>,
    /// One of them looks busily, and no other does. It is the last, so that it is told first.
    looking: bool,
    /// Idle threads that were told to look for work and have not yet.
    signaled: usize,
    /// Functions at work, waiting ones not counted.
    at_work: usize,
    /// Threads inside an RPC wait, by the worker they wait for.
    waits: BTreeMap<Option<WorkerName>, usize>,
    waiting: usize,
    tasks_running: usize,
    /// Nested calls that may start although no place is free.
    extra: usize,
    last_progress: Option<Instant>,
    /// When a request was last started, or a thread woken for one.
    last_start: Option<Instant>,
}

/// Where an idle thread is told to look for work.
#[derive(Default)]
struct Seat {
    told: AtomicBool,
    bell: Condvar,
}

impl Seat {
    /// Call under the lock of the state.
    fn tell(&self) {
        self.told.store(true, Ordering::Relaxed);
        self.bell.notify_one();
    }

    fn is_told(&self) -> bool {
        self.told.load(Ordering::Relaxed)
    }
}

/// What a pool is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolCounts {
    pub(crate) threads: usize,
    pub(crate) idle: usize,
    /// Callbacks queued or running.
    pub(crate) tasks: usize,
}

enum Work {
    Request(Job),
    Task(Task),
    End,
}

thread_local! {
    static CURRENT: RefCell<Option<Membership>> = const { RefCell::new(None) };
}

/// What a pool thread knows about itself. The thread that a forked child has may have it from its parent.
struct Membership {
    home: Home,
    pool: Arc<Shared>,
    /// Whether what runs now holds a place.
    has_place: bool,
    /// Inside a wait already: waits nest when a callback runs in one.
    lending: bool,
}

impl Membership {
    fn of(pool: &Arc<Shared>, lending: bool) -> Self {
        Self { home: Home::here(), pool: Arc::clone(pool), has_place: false, lending }
    }
}

impl Pool {
    pub(crate) fn new(config: PoolConfig) -> Self {
        let (ahead, held) = (AtomicUsize::new(0), Held::default());
        Self(Arc::new(Shared { config, state: Mutex::default(), ended: Condvar::new(), ahead, held }))
    }

    /// Starts to start requests. If some may need help to start, returns when to call [`tick`](Self::tick).
    pub(crate) fn open(&self) -> Option<Instant> {
        let mut state = self.0.state.lock();
        state.open = true;
        self.0.kick(&mut state);
        self.0.next_check(&state)
    }

    /// Queues requests, each of which says whether it is nested. If some may need help to start, returns when to
    /// call [`tick`](Self::tick).
    pub(crate) fn submit(&self, jobs: impl IntoIterator<Item = (bool, Job)>) -> Option<Instant> {
        let mut state = self.0.state.lock();
        if state.stopping {
            drop(state);
            refuse(jobs.into_iter().map(|(_, job)| job), &Refusal::shutting_down());
            return None;
        }
        for (nested, job) in jobs {
            if nested { &mut state.nested } else { &mut state.requests }.push_back(job);
        }
        self.0.kick(&mut state);
        let check = self.0.next_check(&state);
        self.0.refuse_if_exhausted(state);
        check
    }

    /// Sends the answer to a request: with others, if there are more to come soon.
    pub(crate) fn answer(&self, link: &Arc<dyn Link>, answer: Outbound) {
        let is_ahead = || self.0.ahead.load(Ordering::SeqCst) > 0;
        if !is_ahead() {
            link.send(answer);
            return;
        }
        self.0.held.hold(link, answer);
        // The look that was to send it may have been just before.
        if !is_ahead() {
            self.0.held.flush();
        }
    }

    /// Queues a task. Tasks run also after [`stop`](Self::stop): futures wait for them.
    pub(crate) fn spawn(&self, task: Task) {
        let mut state = self.0.state.lock();
        state.tasks.push_back(task);
        self.0.kick(&mut state);
    }

    /// Runs `body` on a thread of its own, which is none of the pool's and holds no place. The calls that
    /// it makes are nested ones all the same. Tells whether there is such a thread.
    pub(crate) fn run_apart(&self, body: Task) -> bool {
        let pool = Arc::clone(&self.0);
        spawn_thread("tensorcall-apart", move || {
            let mut body = Some(body);
            Arc::clone(&pool.config.hook).run(&mut || {
                // It has nothing to lend, as if it were inside a wait already.
                CURRENT.set(Some(Membership::of(&pool, true)));
                if let Some(body) = body.take() {
                    guarded(body);
                }
                CURRENT.set(None);
            });
        })
    }

    /// Wakes more threads if those at work take long, and lets a nested call pass if nothing has moved
    /// for a while; returns when to look again.
    pub(crate) fn tick(&self, now: Instant) -> Option<Instant> {
        let mut state = self.0.state.lock();
        self.0.kick(&mut state);
        if self.0.stalled(&state).is_some_and(|due| due <= now) {
            state.extra += 1;
            state.last_progress = Some(now);
            self.0.kick(&mut state);
        }
        let next = self.0.next_check(&state);
        drop(state);
        // After `ahead` was set: whoever holds an answer later sees that.
        self.0.held.flush();
        next
    }

    pub(crate) fn counts(&self) -> PoolCounts {
        let state = self.0.state.lock();
        PoolCounts {
            threads: state.threads,
            idle: state.idle.len() + state.signaled,
            tasks: state.tasks.len() + state.tasks_running,
        }
    }

    /// Starts no requests any more and tells idle threads to end. Functions that run are left alone.
    pub(crate) fn stop(&self) {
        self.0.held.flush();
        let mut state = self.0.state.lock();
        state.stopping = true;
        let refused: Vec<_> = take_requests(&mut state);
        for thread in &state.idle {
            thread.tell();
        }
        drop(state);
        refuse(refused, &Refusal::shutting_down());
    }

    /// Waits until all threads have ended or `limit` has come; tells which.
    pub(crate) fn wait_ended(&self, limit: Instant) -> bool {
        let mut state = self.0.state.lock();
        // A pool thread that shuts its own agent down cannot wait for itself.
        let own = usize::from(with_member(|m| m.is_some_and(|m| Arc::ptr_eq(&m.pool, &self.0))));
        while state.threads > own {
            if self.0.ended.wait_until(&mut state, limit).timed_out() {
                return state.threads <= own;
            }
        }
        true
    }
}

impl Shared {
    /// When to look whether something in the queue needs help.
    fn next_check(&self, state: &State) -> Option<Instant> {
        let held_back = if self.ahead(state) > 0 { self.patient_until(state) } else { None };
        held_back.into_iter().chain(self.stalled(state)).min()
    }

    /// When a nested call that waits for a place may start without one.
    fn stalled(&self, state: &State) -> Option<Instant> {
        let stuck = state.open && !state.stopping && !state.nested.is_empty() && self.free_places(state) == 0;
        stuck.then(|| state.last_progress.unwrap_or_else(now) + STALL)
    }

    /// Until when requests are left to the threads that are at work or on their way.
    fn patient_until(&self, state: &State) -> Option<Instant> {
        let patience = self.config.hook.patience();
        let someone = state.at_work + state.signaled + state.starting > 0;
        if patience.is_zero() || !someone { None } else { state.last_start.map(|start| start + patience) }
    }

    fn free_places(&self, state: &State) -> usize {
        self.config.places.saturating_sub(state.at_work)
    }

    /// Requests that could start now.
    fn startable(&self, state: &State) -> usize {
        if !state.open {
            return 0;
        }
        let free = self.free_places(state);
        let queued = state.nested.len() + state.requests.len();
        free.min(queued) + state.extra.min(state.nested.len().saturating_sub(free))
    }

    /// Requests that could start now and for which no thread is on its way.
    fn ahead(&self, state: &State) -> usize {
        self.startable(state).saturating_sub(state.signaled + state.starting)
    }

    /// Sees to it that a thread will look at everything that could start now, at once or after some patience.
    fn kick(self: &Arc<Self>, state: &mut State) {
        self.wake_threads(state);
        let ahead = if self.config.hook.patience().is_zero() { 0 } else { self.ahead(state) };
        self.ahead.store(ahead, Ordering::SeqCst);
    }

    fn wake_threads(self: &Arc<Self>, state: &mut State) {
        let cap = self.config.max_threads;
        loop {
            let startable = self.startable(state);
            let coming = state.signaled + state.starting;
            if startable + state.tasks.len() <= coming {
                return;
            }
            if state.tasks.len() <= coming {
                let now = now();
                if self.patient_until(state).is_some_and(|until| now < until) {
                    return;
                }
                state.last_start = Some(now);
            }
            if let Some(thread) = state.idle.pop() {
                state.signaled += 1;
                thread.tell();
                continue;
            }
            // Tasks have room of their own beyond the cap: they complete what others wait for.
            let room = if state.tasks.is_empty() { cap } else { cap.saturating_mul(2) };
            if state.threads >= room || !self.start_thread() {
                return;
            }
            state.threads += 1;
            state.starting += 1;
        }
    }

    fn start_thread(self: &Arc<Self>) -> bool {
        let pool = Arc::clone(self);
        spawn_thread("tensorcall-pool", move || {
            let (hook, home) = (Arc::clone(&pool.config.hook), Home::here());
            hook.run(&mut || pool.work_until_end());
            if home.is_here() {
                pool.thread_ended();
            } else {
                // A function forked and came back in the child too. It was the child's only thread.
                std::mem::forget(pool);
            }
        })
    }

    fn work_until_end(self: &Arc<Self>) {
        let member = Membership::of(self, false);
        let home = member.home;
        CURRENT.set(Some(member));
        let wake = Arc::new(Seat::default());
        let mut state = self.state.lock();
        state.starting -= 1;
        loop {
            match self.next_work(state, &wake) {
                Work::Request(job) => {
                    set_has_place(true);
                    guarded(|| job.run(None));
                    if !home.is_here() {
                        return;
                    }
                    set_has_place(false);
                    state = self.state.lock();
                    state.at_work -= 1;
                }
                Work::Task(task) => {
                    guarded(task);
                    if !home.is_here() {
                        return;
                    }
                    state = self.state.lock();
                    state.tasks_running -= 1;
                }
                Work::End => break,
            }
        }
        CURRENT.set(None);
    }

    fn next_work<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State>, wake: &Arc<Seat>) -> Work {
        let mut had_work = true;
        loop {
            if let Some(task) = state.tasks.pop_front() {
                state.tasks_running += 1;
                self.kick(&mut state);
                return Work::Task(task);
            }
            if state.stopping {
                state.ending += 1;
                return Work::End;
            }
            if let Some(job) = self.take_request(&mut state) {
                state.at_work += 1;
                let now = now();
                (state.last_progress, state.last_start) = (Some(now), Some(now));
                self.kick(&mut state);
                return Work::Request(job);
            }
            if self.held.any() {
                drop(state);
                self.held.flush();
                state = self.state.lock();
                continue;
            }
            state.last_progress = Some(now());
            wake.told.store(false, Ordering::Relaxed);
            let place = state.idle.len().saturating_sub(usize::from(state.looking));
            state.idle.insert(place, Arc::clone(wake));
            if had_work && !state.looking && !self.config.busy_poll.is_zero() {
                state = self.look_busily(state, wake);
            }
            let timed_out = !wake.is_told() && wake.bell.wait_for(&mut state, LINGER).timed_out();
            had_work = !timed_out;
            match state.idle.iter().rposition(|thread| Arc::ptr_eq(thread, wake)) {
                Some(place) => {
                    state.idle.remove(place);
                }
                None => state.signaled -= 1,
            }
            if timed_out
                && state.threads - state.ending > self.config.places
                && self.startable(&state) + state.tasks.len() == 0
            {
                state.ending += 1;
                return Work::End;
            }
        }
    }

    /// Looks for a while whether the thread of this seat is told to look for work, and lets go of the lock for that.
    fn look_busily<'a>(&'a self, mut state: MutexGuard<'a, State>, wake: &Seat) -> MutexGuard<'a, State> {
        state.looking = true;
        drop(state);
        spin::poll(now() + self.config.busy_poll, |_| wake.is_told());
        let mut state = self.state.lock();
        state.looking = false;
        state
    }

    fn take_request(&self, state: &mut State) -> Option<Job> {
        if !state.open {
            return None;
        }
        if self.free_places(state) > 0 {
            return state.nested.pop_front().or_else(|| state.requests.pop_front());
        }
        if state.extra == 0 {
            return None;
        }
        state.extra -= 1;
        state.nested.pop_front()
    }

    fn thread_ended(self: &Arc<Self>) {
        let mut state = self.state.lock();
        state.threads -= 1;
        state.ending = state.ending.saturating_sub(1);
        // Work that came since this thread decided to end may have found the cap reached.
        self.kick(&mut state);
        drop(state);
        self.ended.notify_all();
    }

    fn begin_wait(self: &Arc<Self>, has_place: bool, target: Option<&WorkerName>) {
        self.held.flush();
        let mut state = self.state.lock();
        state.waiting += 1;
        *state.waits.entry(target.cloned()).or_default() += 1;
        if has_place {
            state.at_work -= 1;
            state.last_progress = Some(now());
            // This thread will not take the next request: there is nothing to be patient for.
            state.last_start = None;
            self.kick(&mut state);
        }
        self.refuse_if_exhausted(state);
    }

    fn end_wait(&self, has_place: bool, target: Option<&WorkerName>) {
        let mut state = self.state.lock();
        state.waiting -= 1;
        let target = target.cloned();
        if let Some(count) = state.waits.get_mut(&target) {
            *count -= 1;
            if *count == 0 {
                state.waits.remove(&target);
            }
        }
        if has_place {
            state.at_work += 1;
        }
    }

    /// Refuses all requests if no thread is left that could ever run one.
    fn refuse_if_exhausted(&self, mut state: MutexGuard<'_, State>) {
        let queued = !state.nested.is_empty() || !state.requests.is_empty();
        let exhausted = state.threads >= self.config.max_threads && state.waiting >= state.threads;
        if !(queued && exhausted) {
            return;
        }
        let waits = state.waits.iter().map(|(name, count)| match name {
            Some(name) => format!("{count} for worker '{name}'"),
            None => format!("{count} for a local future"),
        });
        let text = format!(
            "the thread pool is exhausted: all {} threads (the cap, TENSORCALL_MAX_THREADS) wait inside an RPC: {}",
            state.threads,
            waits.collect::<Vec<_>>().join(", ")
        );
        let refused = take_requests(&mut state);
        drop(state);
        refuse(refused, &Refusal { kind: FailureKind::PoolExhausted, text });
    }
}

fn spawn_thread(name: &str, body: impl FnOnce() + Send + 'static) -> bool {
    match std::thread::Builder::new().name(name.to_owned()).spawn(body) {
        Ok(_) => true,
        Err(error) => {
            tracing::error!(%error, "cannot start thread {name}");
            false
        }
    }
}

fn take_requests(state: &mut State) -> Vec<Job> {
    let nested = std::mem::take(&mut state.nested);
    nested.into_iter().chain(std::mem::take(&mut state.requests)).collect()
}

fn refuse(jobs: impl IntoIterator<Item = Job>, why: &Refusal) {
    for job in jobs {
        guarded(|| job.run(Some(why.clone())));
    }
}

/// A panic ends what runs, not the thread; whoever waits for it learns by the drop of its responder.
fn guarded(run: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(run)).is_err() {
        tracing::error!("a function panicked");
    }
}

fn set_has_place(has_place: bool) {
    with_member(|member| {
        if let Some(member) = member {
            member.has_place = has_place;
        }
    });
}

/// What this thread knows about itself, if it is a pool's.
fn with_member<R>(look: impl FnOnce(Option<&mut Membership>) -> R) -> R {
    CURRENT.with_borrow_mut(|member| look(member.as_mut().filter(|member| member.home.is_here())))
}

/// Whether this thread runs something for a pool: then its calls are nested.
pub(crate) fn is_inside() -> bool {
    with_member(|member| member.is_some())
}

/// Runs `wait`, which waits for an RPC to `target`, and lends this thread's place meanwhile.
pub(crate) fn lend<R>(target: Option<&WorkerName>, wait: impl FnOnce() -> R) -> R {
    let lender = with_member(|member| match member {
        Some(member) if !member.lending => {
            member.lending = true;
            Some((Arc::clone(&member.pool), member.has_place))
        }
        _ => None,
    });
    let Some((pool, has_place)) = lender else { return wait() };
    pool.begin_wait(has_place, target);
    let _loan = Loan(pool, has_place, target);
    wait()
}

/// Ends the wait also when what waits panics.
struct Loan<'a>(Arc<Shared>, bool, Option<&'a WorkerName>);

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.0.end_wait(self.1, self.2);
        CURRENT.with_borrow_mut(|member| {
            if let Some(member) = member {
                member.lending = false;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{self, Receiver, Sender};

    struct Plain;

    impl ThreadHook for Plain {
        fn run(&self, body: &mut (dyn FnMut() + Send)) {
            body();
        }
    }

    /// As threads are that have signed in to Python.
    struct SlowToEnd;

    impl ThreadHook for SlowToEnd {
        fn run(&self, body: &mut (dyn FnMut() + Send)) {
            body();
            std::thread::park_timeout(Duration::from_millis(50));
        }
    }

    const SOON: Duration = Duration::from_secs(20);

    fn pool(places: usize, max_threads: usize) -> Pool {
        let pool =
            Pool::new(PoolConfig { places, max_threads, busy_poll: Duration::ZERO, hook: Arc::new(Plain) });
        pool.open();
        pool
    }

    fn submit(pool: &Pool, nested: bool, job: Job) -> Option<Instant> {
        pool.submit([(nested, job)])
    }

    /// A request that says that it runs, then does what it is told.
    fn blocked_request(pool: &Pool, nested: bool) -> (Receiver<Option<Refusal>>, Sender<()>) {
        let (said, says) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        submit(
            pool,
            nested,
            Box::new(move |refused: Option<Refusal>| {
                let run = refused.is_none();
                said.send(refused).unwrap();
                if run {
                    let _ = gone.recv_timeout(SOON);
                }
            }),
        );
        (says, go)
    }

    fn waiting_request(pool: &Pool) -> (Receiver<Option<Refusal>>, Sender<()>) {
        let (said, says) = mpsc::channel();
        let (go, gone) = mpsc::channel::<()>();
        submit(
            pool,
            false,
            Box::new(move |refused: Option<Refusal>| {
                lend(Some(&WorkerName::parse("worker1").unwrap()), || {
                    said.send(refused).unwrap();
                    let _ = gone.recv_timeout(SOON);
                });
            }),
        );
        (says, go)
    }

    #[test]
    fn no_more_functions_run_at_once_than_there_are_places() {
        let pool = pool(2, 10);
        let (a, _go_a) = blocked_request(&pool, false);
        let (b, go_b) = blocked_request(&pool, false);
        let (c, _go_c) = blocked_request(&pool, false);
        a.recv_timeout(SOON).unwrap();
        b.recv_timeout(SOON).unwrap();
        assert!(c.try_recv().is_err());

        go_b.send(()).unwrap();

        assert_eq!(c.recv_timeout(SOON), Ok(None));
    }

    #[test]
    fn threads_of_a_burst_end_but_as_many_as_there_are_places_stay() {
        let hook = Arc::new(SlowToEnd);
        let pool = Pool::new(PoolConfig { places: 4, max_threads: 40, busy_poll: Duration::ZERO, hook });
        pool.open();
        let (ended, ends) = mpsc::channel::<()>();
        let meeting = Arc::new(std::sync::Barrier::new(30));
        for _ in 0..30 {
            let (meeting, ended) = (Arc::clone(&meeting), ended.clone());
            pool.spawn(Box::new(move || {
                meeting.wait();
                drop(ended);
            }));
        }
        drop(ended);
        assert!(ends.recv_timeout(SOON).is_err(), "all ran");

        // They become idle at about the same moment, so all look at the count at about the same moment.
        let mut state = pool.0.state.lock();
        let limit = now() + SOON;
        while state.threads > 4 && !pool.0.ended.wait_until(&mut state, limit).timed_out() {}
        pool.0.ended.wait_for(&mut state, LINGER);

        assert_eq!(state.threads, 4);
    }

    #[test]
    fn a_waiting_function_lends_its_place() {
        let pool = pool(1, 10);
        let (a, _go) = waiting_request(&pool);
        a.recv_timeout(SOON).unwrap();

        let (b, _go) = blocked_request(&pool, false);

        assert_eq!(b.recv_timeout(SOON), Ok(None));
    }

    #[test]
    fn at_the_cap_with_all_waiting_a_request_is_refused_and_told_why() {
        let pool = pool(1, 2);
        let (a, _go_a) = waiting_request(&pool);
        let (b, _go_b) = waiting_request(&pool);
        a.recv_timeout(SOON).unwrap();
        b.recv_timeout(SOON).unwrap();

        let (c, _go_c) = blocked_request(&pool, false);

        let Refusal { kind, text } = c.recv_timeout(SOON).unwrap().unwrap();
        assert_eq!(kind, FailureKind::PoolExhausted);
        assert!(text.contains("exhausted") && text.contains("2 for worker 'worker1'"), "{text}");
    }

    #[test]
    fn a_nested_call_passes_functions_that_block_without_an_rpc_wait() {
        let pool = pool(1, 10);
        let (a, _go) = blocked_request(&pool, false);
        a.recv_timeout(SOON).unwrap();
        let (b, _go) = blocked_request(&pool, true);
        assert!(b.try_recv().is_err());

        let due = pool.tick(now()).unwrap();
        pool.tick(due);

        assert_eq!(b.recv_timeout(SOON), Ok(None));
    }

    #[test]
    fn tasks_take_no_place() {
        let pool = pool(1, 10);
        let (a, _go) = blocked_request(&pool, false);
        a.recv_timeout(SOON).unwrap();
        let (said, says) = mpsc::channel();

        pool.spawn(Box::new(move || said.send(()).unwrap()));

        says.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn a_thread_apart_takes_no_place_and_makes_nested_calls() {
        let pool = pool(1, 1);
        let (a, _go) = blocked_request(&pool, false);
        a.recv_timeout(SOON).unwrap();
        let (said, says) = mpsc::channel();

        assert!(pool.run_apart(Box::new(move || said.send(lend(None, is_inside)).unwrap())));

        assert_eq!(says.recv_timeout(SOON), Ok(true));
        assert_eq!(pool.counts().tasks, 0);
    }

    struct Patient;

    impl ThreadHook for Patient {
        fn run(&self, body: &mut (dyn FnMut() + Send)) {
            body();
        }

        fn patience(&self) -> Duration {
            Duration::from_millis(50)
        }
    }

    #[test]
    fn a_patient_pool_wakes_another_thread_when_the_one_at_work_takes_long() {
        let pool = Pool::new(PoolConfig {
            places: 4,
            max_threads: 10,
            busy_poll: Duration::ZERO,
            hook: Arc::new(Patient),
        });
        pool.open();
        let (a, _go_a) = blocked_request(&pool, false);
        a.recv_timeout(SOON).unwrap();
        let (b, _go_b) = blocked_request(&pool, false);
        let due = pool.tick(now()).unwrap();

        while now() < due {
            assert!(b.recv_timeout(due.saturating_duration_since(now())).is_err());
        }
        pool.tick(now());

        assert_eq!(b.recv_timeout(SOON), Ok(None));
    }

    #[test]
    fn a_patient_pool_leaves_a_burst_to_the_thread_that_it_woke() {
        let pool = Pool::new(PoolConfig {
            places: 4,
            max_threads: 10,
            busy_poll: Duration::ZERO,
            hook: Arc::new(Patient),
        });
        let all: Vec<_> = (0..8).map(|_| blocked_request(&pool, false)).collect();
        for (_, go) in &all {
            go.send(()).unwrap();
        }

        let due = pool.open();

        for (said, _) in &all {
            assert_eq!(said.recv_timeout(SOON), Ok(None));
        }
        assert!(due.is_some() && pool.counts().threads == 1, "{:?}", pool.counts());
    }

    #[test]
    fn a_patient_pool_that_opens_on_many_requests_says_when_to_look_after_them() {
        let pool = Pool::new(PoolConfig {
            places: 4,
            max_threads: 10,
            busy_poll: Duration::ZERO,
            hook: Arc::new(Patient),
        });
        let all: Vec<_> = (0..4).map(|_| blocked_request(&pool, false)).collect();

        let mut due = pool.open();

        // Nobody lets any of them end: each needs a thread of its own.
        for (said, _) in &all {
            let mut started = said.try_recv();
            while started.is_err() {
                started = match due {
                    Some(next) => {
                        while now() < next {
                            std::thread::yield_now();
                        }
                        due = pool.tick(now());
                        said.try_recv()
                    }
                    // A thread is on its way for each.
                    None => Ok(said.recv_timeout(SOON).unwrap()),
                };
            }
        }
    }

    #[test]
    fn a_patient_pool_wakes_another_thread_at_once_when_the_one_at_work_waits() {
        let pool = Pool::new(PoolConfig {
            places: 1,
            max_threads: 10,
            busy_poll: Duration::ZERO,
            hook: Arc::new(Patient),
        });
        pool.open();
        let (a, _go_a) = waiting_request(&pool);
        a.recv_timeout(SOON).unwrap();

        let (b, _go_b) = blocked_request(&pool, false);

        assert_eq!(b.recv_timeout(SOON), Ok(None));
    }

    #[test]
    fn a_panic_ends_the_function_and_not_the_pool() {
        let pool = pool(1, 1);
        submit(&pool, false, Box::new(|_| panic!("planted")));

        let (a, _go) = blocked_request(&pool, false);

        assert_eq!(a.recv_timeout(SOON), Ok(None));
    }

    #[test]
    fn a_stopped_pool_refuses_requests_and_its_threads_end() {
        let pool = pool(2, 4);
        let (a, go) = blocked_request(&pool, false);
        a.recv_timeout(SOON).unwrap();

        pool.stop();
        go.send(()).unwrap();

        let (b, _go) = blocked_request(&pool, false);
        assert_eq!(b.recv_timeout(SOON).unwrap().unwrap().kind, FailureKind::ShuttingDown);
        assert!(pool.wait_ended(now() + SOON));
    }

    #[test]
    fn nothing_starts_before_the_pool_is_open() {
        let pool = Pool::new(PoolConfig {
            places: 1,
            max_threads: 2,
            busy_poll: Duration::ZERO,
            hook: Arc::new(Plain),
        });
        let (a, _go) = blocked_request(&pool, false);
        assert!(a.try_recv().is_err());

        pool.open();

        assert_eq!(a.recv_timeout(SOON), Ok(None));
    }
}
