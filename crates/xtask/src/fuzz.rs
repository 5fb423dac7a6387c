//! `cargo xtask fuzz`: one fuzz target, on the stable compiler.

use crate::{plan::Plan, process::run, project::Project};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project, target: &'a str, args: &'a [String]) {
    plan.step("fuzz", move |_| {
        // Sanitizer flags are unstable; this lets the stable compiler take them.
        let mut fuzz = project.cargo(&["fuzz", "run", target, "--"]);
        run(fuzz.env("RUSTC_BOOTSTRAP", "1").args(args))
    });
}
