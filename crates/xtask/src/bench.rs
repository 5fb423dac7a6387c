//! `cargo xtask bench`: torch's own agent and ours, in turn, in one run.

use crate::{plan::Plan, process::run, project::Project};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project, args: &'a [String]) {
    plan.step("benchmark", move |_| run(project.python().arg("python/benches/run.py").args(args)));
}
