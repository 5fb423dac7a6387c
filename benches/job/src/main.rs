//! Jobs of several sizes, each in this process: all workers are real, they talk through memory.
//!
//! Prints, for each part of a job's life, messages and operations on the store for each worker, and how long it
//! took all of them.

use std::time::Duration;

use anyhow::Result;
use clap::Parser;

#[path = "../../../crates/tensorcall/tests/common/job.rs"]
mod job;

/// For each part of the job.
const LIMIT: Duration = Duration::from_secs(120);

#[derive(Parser)]
struct Settings {
    /// How many workers, separated by commas.
    #[arg(long, default_value = "10,30,100,300,1000", value_delimiter = ',')]
    sizes: Vec<u32>,
}

fn main() -> Result<()> {
    for workers in Settings::parse().sizes {
        for phase in job::run(workers, LIMIT)? {
            let emit = |metric: &str, value: f64| {
                let workload = format!("{} of {workers}", phase.name);
                println!(r#"{{"workload": "{workload}", "metric": "{metric}", "value": {value}}}"#);
            };
            let each = |count: u64| count as f64 / f64::from(workers);
            emit("messages each", each(phase.messages));
            emit("store operations each", each(phase.operations));
            emit("ms", 1e3 * phase.took.as_secs_f64());
        }
    }
    Ok(())
}
