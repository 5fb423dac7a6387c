//! [`Alarm`]: when the I/O thread must look at the clock, and who has to wake it for that.
//!
//! Any thread may ask for a look, at any moment, without a lock. The thread sleeps until the earliest
//! of those times or of its own deadlines. Both sides first write and then read, with a fence between:
//! whoever asks writes its time and then looks how long the thread sleeps; the thread writes how long it
//! is about to sleep and then looks what was asked for. So at least one of them sees the other, and no
//! look is late. The models below (`--cfg loom`, see `CONTRIBUTING.md`) try every interleaving; they
//! need the fences spelled out, since loom takes sequentially consistent accesses for weaker ones.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

const NEVER: u64 = u64::MAX;
const AWAKE: u64 = 0;

/// See the module. Times are kept in microseconds after `base`.
#[derive(Debug)]
pub(crate) struct Alarm {
    base: Instant,
    /// The earliest look that was asked for since the last one.
    next: AtomicU64,
    /// Until when the thread sleeps if nobody asks for less.
    sleeping_until: AtomicU64,
}

impl Alarm {
    pub(crate) fn new(base: Instant) -> Self {
        Self { base, next: AtomicU64::new(NEVER), sleeping_until: AtomicU64::new(AWAKE) }
    }

    /// Asks for a look at `when`. Whatever the look is to find must be there before. Tells whether the
    /// thread has to be woken, by whoever calls this.
    #[must_use]
    pub(crate) fn set(&self, when: Instant) -> bool {
        let when = self.micros_up(when);
        if self.next.fetch_min(when, Ordering::AcqRel) <= when {
            // Whoever asked for that look sees to it that it is in time.
            return false;
        }
        fence(Ordering::SeqCst);
        when < self.sleeping_until.load(Ordering::Relaxed)
    }

    /// Whether it is time for a look. If so, the request is used up: look at everything after this.
    pub(crate) fn take_due(&self, now: Instant) -> bool {
        if !self.is_due(now) {
            return false;
        }
        // Reads what it overwrites, so that whatever was there before any `set` is seen by the look.
        self.next.swap(NEVER, Ordering::AcqRel);
        true
    }

    /// Whether it is time for a look.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let now = u64::try_from(now.saturating_duration_since(self.base).as_micros()).unwrap_or(NEVER - 1);
        self.next.load(Ordering::Relaxed) <= now
    }

    /// Whether the thread is awake. It may be about to sleep.
    pub(crate) fn is_awake(&self) -> bool {
        self.sleeping_until.load(Ordering::Relaxed) == AWAKE
    }

    /// Whether the thread, before it sleeps, still looks at what was written before this. If not, it has to be
    /// woken.
    pub(crate) fn looks_again(&self) -> bool {
        fence(Ordering::SeqCst);
        self.is_awake()
    }

    /// The thread is about to sleep until `own`, or for ever: says until when it may.
    pub(crate) fn go_to_sleep(&self, own: Option<Instant>) -> Option<Instant> {
        let own = own.map_or(NEVER, |own| self.micros_up(own));
        self.sleeping_until.store(own, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        match own.min(self.next.load(Ordering::Relaxed)) {
            NEVER => None,
            micros => Some(self.base + Duration::from_micros(micros)),
        }
    }

    /// The thread sleeps no more.
    pub(crate) fn awake(&self) {
        self.sleeping_until.store(AWAKE, Ordering::Relaxed);
    }

    /// Rounded up: at that microsecond the time has come.
    fn micros_up(&self, time: Instant) -> u64 {
        let nanos = time.saturating_duration_since(self.base).as_nanos();
        u64::try_from(nanos.div_ceil(1000)).unwrap_or(NEVER - 1)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::clock::now;

    fn at(alarm: &Alarm, millis: u64) -> Instant {
        alarm.base + Duration::from_millis(millis)
    }

    #[test]
    fn only_an_earlier_time_wakes_a_sleeper() {
        let alarm = Alarm::new(now());
        assert_eq!(alarm.go_to_sleep(Some(at(&alarm, 20))), Some(at(&alarm, 20)));

        assert!(!alarm.set(at(&alarm, 30)));
        assert!(alarm.set(at(&alarm, 10)));
        assert!(!alarm.set(at(&alarm, 15)), "the sleeper has been woken for an earlier time");
    }

    #[test]
    fn nobody_wakes_a_thread_that_is_awake() {
        let alarm = Alarm::new(now());

        assert!(!alarm.set(at(&alarm, 10)));

        assert_eq!(alarm.go_to_sleep(None), Some(at(&alarm, 10)));
        alarm.awake();
        assert!(!alarm.set(at(&alarm, 5)));
    }

    #[test]
    fn a_look_is_due_once() {
        let alarm = Alarm::new(now());
        let _ = alarm.set(at(&alarm, 10));

        assert!(!alarm.take_due(at(&alarm, 9)));
        assert!(alarm.take_due(at(&alarm, 10)));
        assert!(!alarm.take_due(at(&alarm, 11)));
        assert_eq!(alarm.go_to_sleep(None), None);
    }

    #[test]
    fn a_time_between_two_microseconds_has_come_when_the_thread_wakes() {
        let alarm = Alarm::new(now());
        let _ = alarm.set(alarm.base + Duration::from_nanos(1_500));

        let until = alarm.go_to_sleep(None).unwrap();

        assert!(until >= alarm.base + Duration::from_nanos(1_500));
        assert!(alarm.take_due(until));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::clock::now;
    use loom::sync::atomic::AtomicBool;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    /// An alarm, what a look finds, and whether the sleeper was woken.
    struct World {
        alarm: Alarm,
        deadlines: Mutex<Vec<u64>>,
        woken: AtomicBool,
    }

    impl World {
        fn new() -> Arc<Self> {
            let alarm = Alarm::new(now());
            Arc::new(Self { alarm, deadlines: Mutex::new(Vec::new()), woken: AtomicBool::new(false) })
        }

        fn at(&self, millis: u64) -> Instant {
            self.alarm.base + Duration::from_millis(millis)
        }

        /// What a calling thread does.
        fn ask(&self, millis: u64) {
            self.deadlines.lock().unwrap().push(millis);
            if self.alarm.set(self.at(millis)) {
                self.woken.store(true, Ordering::Release);
            }
        }

        /// What the I/O thread does when it is awake: one look if it is due, at time `now`.
        fn look(&self, now: u64) {
            if !self.alarm.take_due(self.at(now)) {
                return;
            }
            let earliest = {
                let mut deadlines = self.deadlines.lock().unwrap();
                deadlines.retain(|&deadline| deadline > now);
                deadlines.iter().min().copied()
            };
            if let Some(earliest) = earliest {
                assert!(!self.alarm.set(self.at(earliest)), "it is awake");
            }
        }

        fn sleeps_too_long(&self, until: Option<Instant>) -> bool {
            let earliest = self.deadlines.lock().unwrap().iter().min().copied();
            let late = earliest.is_some_and(|earliest| until.is_none_or(|until| until > self.at(earliest)));
            late && !self.woken.load(Ordering::Acquire)
        }
    }

    #[test]
    fn whoever_asks_while_the_thread_falls_asleep_is_seen_or_wakes_it() {
        loom::model(|| {
            let world = World::new();
            let askers = [20, 10].map(|millis| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.ask(millis))
            });

            let until = world.alarm.go_to_sleep(Some(world.at(30)));

            for asker in askers {
                asker.join().unwrap();
            }
            assert!(!world.sleeps_too_long(until));
        });
    }

    #[test]
    fn whoever_asks_while_a_look_is_under_way_is_not_forgotten() {
        loom::model(|| {
            let world = World::new();
            world.ask(1);
            let asker = thread::spawn({
                let world = Arc::clone(&world);
                move || world.ask(10)
            });

            world.look(1);
            let until = world.alarm.go_to_sleep(None);

            asker.join().unwrap();
            assert!(!world.sleeps_too_long(until));
        });
    }

    #[test]
    fn what_is_left_to_the_thread_is_seen_before_it_sleeps_or_wakes_it() {
        loom::model(|| {
            let (world, left) = (World::new(), Arc::new(AtomicBool::new(false)));
            let leaver = thread::spawn({
                let (world, left) = (Arc::clone(&world), Arc::clone(&left));
                move || {
                    left.store(true, Ordering::Release);
                    if !world.alarm.looks_again() {
                        world.woken.store(true, Ordering::Release);
                    }
                }
            });

            world.alarm.go_to_sleep(None);
            let seen = left.load(Ordering::Relaxed);

            leaver.join().unwrap();
            assert!(seen || world.woken.load(Ordering::Acquire));
        });
    }

    #[test]
    fn a_thread_that_sleeps_twice_misses_nothing_in_between() {
        loom::model(|| {
            let world = World::new();
            let asker = thread::spawn({
                let world = Arc::clone(&world);
                move || {
                    world.ask(20);
                    world.ask(10);
                }
            });

            world.alarm.go_to_sleep(Some(world.at(30)));
            world.alarm.awake();
            // The wake-up that may have come is used up here.
            world.woken.swap(false, Ordering::AcqRel);
            world.look(12);
            let until = world.alarm.go_to_sleep(Some(world.at(30)));

            asker.join().unwrap();
            assert!(!world.sleeps_too_long(until));
        });
    }
}
