//! `cargo xtask peer-suite`: the RPC tests inside the installed torch, run against us.
//!
//! Those that the project lists as passing run with the Python tests too, as tests of their own.

use crate::{plan::Plan, process::run, project::Project};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project, args: &'a [String]) {
    plan.step("torch's own RPC tests", move |_| {
        run(project.python().arg("python/tests/peer/run.py").args(args))
    });
}
