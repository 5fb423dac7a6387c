//! The examples run, end by themselves and say what they did.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::PathBuf;
use std::process::Command;

/// What an example prints. It starts its own workers, and ends them in time.
fn printed(name: &str) -> String {
    let output = Command::new(binary(name)).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{name} failed: {text}{errors}");
    text
}

/// Cargo builds examples beside tests.
fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folder = test.parent().unwrap().parent().unwrap();
    folder.join("examples").join(name)
}

/// One at a time: each starts several.
mod processes {
    use super::*;

    #[test]
    fn calls_run_in_parallel_whatever_the_main_thread_does() {
        let text = printed("parallel_calls");

        assert!(text.contains("the main thread is Halfway"), "{text}");
        assert!(text.contains("the main thread is Leaving"), "{text}");
        assert_eq!(text.matches("it is exactly the square").count(), 2, "{text}");
        assert!(text.contains("so: calls run on threads of their own"), "{text}");
    }

    #[test]
    fn the_parameter_server_finds_the_weight() {
        let text = printed("parameter_server");

        assert_eq!(text, "after 60 steps of 3 trainers the weight is [2.00, -1.00, 0.50]\n");
    }

    #[test]
    fn the_pipeline_makes_its_loss_smaller() {
        let text = printed("pipeline");

        assert!(text.starts_with("300 steps through a pipeline of two workers"), "{text}");
    }
}
