//! The command line of a program that is measured.

use std::time::Duration;

use anyhow::Result;
use clap::{Parser, ValueEnum};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// What to measure, and how long.
#[derive(Debug, Clone, Parser)]
pub struct Settings {
    /// Which of the two processes this is.
    #[arg(value_enum, default_value_t = Role::Caller)]
    pub role: Role,
    /// What to measure, separated by commas.
    #[arg(long, default_value = "L1,C1,C2,B1,B2")]
    pub workloads: String,
    /// Calls per latency workload.
    #[arg(long, default_value_t = 1500)]
    pub calls: usize,
    /// Length of each other workload.
    #[arg(long, default_value = "0.5", value_parser = seconds)]
    pub seconds: Duration,
    /// Sizes of tensors, separated by commas.
    #[arg(long, default_value = "64K,1M,16M,256M")]
    pub sizes: String,
    /// Where the two processes may run.
    #[arg(long, value_enum, default_value_t = Placement::Free)]
    pub placement: Placement,
    /// How bytes go from one process to the other, where a program knows several ways.
    #[arg(long, value_enum, default_value_t = Way::Unix)]
    pub way: Way,
}

/// One of the two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Times its calls.
    Caller,
    /// Answers until its standard input ends.
    Callee,
}

/// Where the two processes may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Placement {
    /// Wherever the kernel puts them.
    Free,
    /// Both on one core.
    Same,
    /// Each on a core of its own.
    Split,
}

/// A way for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// TCP over loopback.
    Tcp,
    /// A Unix socket.
    Unix,
    /// Memory that both have mapped; who waits sleeps.
    Memory,
    /// The same; who waits spins.
    Spin,
    /// No second process: memory is copied.
    Copy,
}

impl Settings {
    /// Reads the command line and takes this process's place.
    ///
    /// # Errors
    ///
    /// If the kernel refuses the core.
    pub fn take() -> Result<Self> {
        let settings = Self::parse();
        settings.place()?;
        Ok(settings)
    }

    fn place(&self) -> Result<()> {
        // The callee has its place from the caller, who has taken one by then.
        let mut every = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|core| every.set(core));
        sched_setaffinity(None, &every)?;
        let all = sched_getaffinity(None)?;
        let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|core| all.is_set(*core)).collect();
        let core = match (self.placement, self.role) {
            (Placement::Free, _) => return Ok(()),
            (Placement::Split, Role::Callee) if cores.len() > 1 => cores[1],
            _ => cores[0],
        };
        let mut own = CpuSet::new();
        own.set(core);
        Ok(sched_setaffinity(None, &own)?)
    }

    /// The sizes with their names.
    pub(crate) fn sizes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.sizes.split(',').map(|name| (name, bytes(name)))
    }
}

fn seconds(text: &str) -> Result<Duration> {
    Ok(Duration::try_from_secs_f64(text.parse()?)?)
}

/// Bytes of a size such as `64K`.
fn bytes(name: &str) -> usize {
    let (digits, unit) = name.split_at(name.len().saturating_sub(1));
    let number: usize = digits.parse().unwrap_or_default();
    number << if unit == "K" { 10 } else { 20 }
}
