//! What a job costs as it grows: its workers are alike, so each of them may take only so much.

use std::time::Duration;

#[path = "common/job.rs"]
mod job;

/// Messages and operations on the store for each worker, whatever the number of workers.
const BOUNDS: [(&str, u64, u64); 4] = [("init", 0, 8), ("ring", 2, 0), ("star", 2, 0), ("shutdown", 20, 0)];
/// Jobs of which the calmest counts. A goodbye through memory, of another thread, may overtake the word that the
/// group is quiet; whom that happens to asks around once more.
const JOBS: usize = 5;

#[test]
fn each_worker_of_a_job_takes_no_more_messages_in_a_larger_one() {
    for workers in [8, 32, 128] {
        let run = |_| job::run(workers, Duration::from_secs(30)).unwrap();
        let jobs = (0..JOBS).map(run);
        let calmest = jobs.min_by_key(|phases| phases.iter().map(|phase| phase.messages).sum::<u64>());

        for (phase, (name, messages, operations)) in calmest.unwrap().iter().zip(BOUNDS) {
            assert_eq!(phase.name, name);
            let all = u64::from(workers);
            assert!(phase.messages <= messages * all, "{workers} workers: {phase:?}");
            assert!(phase.operations <= operations * all, "{workers} workers: {phase:?}");
        }
    }
}
