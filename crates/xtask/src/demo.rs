//! `cargo xtask demo`: the program this project was born from, an ordinary one for torch's RPC, on tensorcall.

use crate::{plan::Plan, process::run, project::Project};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("demo", |_| {
        run(project.python().args(["-m", "tensorcall", "run", "examples/parallel_calls.py"]))
    });
}
