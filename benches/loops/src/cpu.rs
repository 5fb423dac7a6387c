//! CPU time of the two processes.

use std::time::Duration;

/// CPU time that processes have used so far, all threads, in the kernel and outside.
pub(crate) fn used(processes: &[u32]) -> Duration {
    processes.iter().map(|process| of_process(*process)).sum()
}

fn of_process(process: u32) -> Duration {
    // The clock of a process, as `clock_getcpuclockid` makes its number.
    let clock = (!process.cast_signed() << 3) | 2;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for writes during the call; a clock that does not exist leaves it as it is.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}
