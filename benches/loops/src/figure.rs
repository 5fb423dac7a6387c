//! What was measured, as lines of JSON.

use std::time::Duration;

/// Prints one figure.
pub(crate) fn emit(workload: &str, metric: &str, value: f64) {
    println!(r#"{{"workload": "{workload}", "metric": "{metric}", "value": {value}}}"#);
}

/// Prints the median and the 99th percentile.
pub(crate) fn emit_times(workload: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    emit(workload, "p50 us", micros(times[times.len() / 2]));
    emit(workload, "p99 us", micros(times[times.len() * 99 / 100]));
}

pub(crate) fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
