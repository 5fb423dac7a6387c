//! Memory that both processes have mapped, and one copy into it.

use std::fs::{File, OpenOptions};
use std::future::{Future, ready};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::{hint, ptr};

use anyhow::{Context, Result};
use bench_loops::{Callee, Client, LARGEST, Settings, Way, run};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use rustix::thread::futex;

/// Apart, so that no two of them share a line of the cache.
const QUESTIONS: usize = 0;
const ANSWERS: usize = 128;
const BYTES: usize = 4096;

/// The mapping; it stays until the process ends.
struct Shared {
    start: *mut u8,
    spins: bool,
}

impl Shared {
    fn map(file: &File, spins: bool) -> Result<Self> {
        let (length, may) = (BYTES + LARGEST, ProtFlags::READ | ProtFlags::WRITE);
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let start = unsafe { mmap(ptr::null_mut(), length, may, flags, file, 0)? };
        Ok(Self { start: start.cast(), spins })
    }

    fn counter(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `at` is one of two multiples of 128 below `BYTES`, so inside the mapping, which is never
        // removed, and aligned; both processes touch these four bytes only as an atomic.
        unsafe { AtomicU32::from_ptr(self.start.add(at).cast()) }
    }

    fn post(&self, at: usize) {
        self.counter(at).fetch_add(1, Ordering::Release);
        if !self.spins {
            let _ = futex::wake(self.counter(at), futex::Flags::empty(), 1);
        }
    }

    /// Waits until the counter is no longer `old`.
    fn wait(&self, at: usize, old: u32) {
        while self.counter(at).load(Ordering::Acquire) == old {
            if self.spins {
                hint::spin_loop();
            } else {
                let _ = futex::wait(self.counter(at), futex::Flags::empty(), old, None);
            }
        }
    }
}

struct Caller {
    shared: Shared,
    source: Vec<u8>,
    alone: bool,
}

impl Caller {
    fn exchange(&self, bytes: usize) {
        // SAFETY: the block behind `BYTES` is `LARGEST` long, as `source` is; both are mapped, and they do
        // not overlap. The callee does not read.
        unsafe {
            ptr::copy_nonoverlapping(self.source[..bytes].as_ptr(), self.shared.start.add(BYTES), bytes)
        };
        if !self.alone {
            let old = self.shared.counter(ANSWERS).load(Ordering::Relaxed);
            self.shared.post(QUESTIONS);
            self.shared.wait(ANSWERS, old);
        }
    }
}

impl Client for Caller {
    fn trivial(&self, _: &str) -> impl Future<Output = ()> + 'static {
        self.exchange(64);
        ready(())
    }

    fn give(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        self.exchange(bytes);
        ready(())
    }

    /// As far as one copy there and one back come to: the callee leaves the bytes where they are.
    fn echo(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        self.exchange(bytes);
        self.exchange(bytes);
        ready(())
    }

    fn sleep(&self) -> impl Future<Output = ()> + 'static {
        ready(())
    }

    fn bulk_in_flight(&self) -> &'static [usize] {
        &[1]
    }
}

pub(crate) fn call(settings: &Settings) -> Result<()> {
    let file = File::from(memfd_create("bench", MemfdFlags::CLOEXEC)?);
    ftruncate(&file, (BYTES + LARGEST) as u64)?;
    let shared = Shared::map(&file, settings.way == Way::Spin)?;
    let place = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let callee = Callee::start(&[("BENCH_MEMORY", place)])?;
    let caller = Caller { shared, source: vec![1; LARGEST], alone: settings.way == Way::Copy };
    run(settings, &caller, callee.id(), |work| futures::executor::block_on(work));
    Ok(())
}

/// Answers for ever: the caller ends this process.
pub(crate) fn answer(way: Way) -> Result<()> {
    let place = std::env::var_os("BENCH_MEMORY").context("no memory was named")?;
    let shared = Shared::map(&OpenOptions::new().read(true).write(true).open(place)?, way == Way::Spin)?;
    println!("ready");
    if way == Way::Copy {
        std::io::stdin().lines().for_each(drop);
        return Ok(());
    }
    let mut seen = 0;
    loop {
        shared.wait(QUESTIONS, seen);
        seen += 1;
        shared.post(ANSWERS);
    }
}
