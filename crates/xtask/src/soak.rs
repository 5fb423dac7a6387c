//! `cargo xtask soak`: a million calls and more, and what the two processes come to hold meanwhile.
//!
//! A short one is among the Python tests.

use crate::{plan::Plan, process::run, project::Project};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project, args: &'a [String]) {
    plan.step("soak", move |_| run(project.python().arg("python/benches/soak.py").args(args)));
}
