//! A numbered list of steps, run one after another with the time each took.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::tally::Tally;

/// Steps in order. Each sees the [`Tally`] of tests so far and may add to it.
pub(crate) struct Plan<'a> {
    steps: Vec<Step<'a>>,
    keep_going: bool,
}

struct Step<'a> {
    name: &'static str,
    action: Action<'a>,
}

type Action<'a> = Box<dyn FnOnce(&mut Tally) -> Result<()> + 'a>;

/// What became of a step; `failure` is the whole chain of causes.
struct Outcome {
    name: &'static str,
    took: Duration,
    failure: Option<String>,
}

impl<'a> Plan<'a> {
    pub(crate) fn new() -> Self {
        Plan { steps: Vec::new(), keep_going: false }
    }

    /// Whether a failed step ends the plan (the default) or only its outcome.
    pub(crate) fn keep_going(&mut self, keep_going: bool) {
        self.keep_going = keep_going;
    }

    pub(crate) fn step(&mut self, name: &'static str, action: impl FnOnce(&mut Tally) -> Result<()> + 'a) {
        self.steps.push(Step { name, action: Box::new(action) });
    }

    /// Runs the steps and says whether all went well.
    ///
    /// When tests ran, the last line printed is `N passed, M failed, K skipped`, summed over all runners.
    pub(crate) fn run(self) -> bool {
        let start = Instant::now();
        let planned = self.steps.len();
        let mut tally = Tally::default();
        let mut outcomes = Vec::new();
        for (index, step) in self.steps.into_iter().enumerate() {
            println!("\n[{}/{planned}] {}", index + 1, step.name);
            let outcome = step.run(&mut tally);
            println!("      {} {}, {} in all", outcome.state(), human(outcome.took), human(start.elapsed()));
            let failed = outcome.failure.is_some();
            if let Some(failure) = &outcome.failure {
                println!("\nerror: {failure}");
            }
            outcomes.push(outcome);
            if failed && !self.keep_going {
                break;
            }
        }
        println!();
        for outcome in &outcomes {
            println!("{:>12}  {:<8}{}", human(outcome.took), outcome.state(), outcome.name);
        }
        println!("{:>12}  in all, {} of {planned} steps run", human(start.elapsed()), outcomes.len());
        if !tally.is_empty() {
            println!("\n{tally}");
        }
        outcomes.iter().all(|outcome| outcome.failure.is_none())
    }
}

impl Outcome {
    fn state(&self) -> &'static str {
        if self.failure.is_some() { "FAILED" } else { "ok" }
    }
}

impl Step<'_> {
    fn run(self, tally: &mut Tally) -> Outcome {
        let start = Instant::now();
        let failure = (self.action)(tally).err().map(|error| format!("{error:#}"));
        Outcome { name: self.name, took: start.elapsed(), failure }
    }
}

fn human(time: Duration) -> String {
    match time.as_secs() {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        seconds => format!("{} min {:02} s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn plan_stops_at_the_first_failure() {
        let mut reached = false;
        let mut plan = Plan::new();
        plan.step("fails", |_| bail!("no"));
        plan.step("not reached", |_| {
            reached = true;
            Ok(())
        });

        let all_well = plan.run();

        assert!(!all_well);
        assert!(!reached);
    }

    #[test]
    fn plan_told_to_keep_going_runs_every_step_and_still_fails() {
        let mut reached = false;
        let mut plan = Plan::new();
        plan.keep_going(true);
        plan.step("fails", |_| bail!("no"));
        plan.step("reached", |_| {
            reached = true;
            Ok(())
        });

        let all_well = plan.run();

        assert!(!all_well);
        assert!(reached);
    }

    #[test]
    fn times_read_as_seconds_then_minutes() {
        assert_eq!(human(Duration::from_millis(1250)), "1.2 s");
        assert_eq!(human(Duration::from_secs(61)), "1 min 01 s");
    }
}
