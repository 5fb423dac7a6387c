//! `cargo xtask stubs`: the stub of the extension is written by hand and checked here.

use crate::{plan::Plan, process::run, project::Project};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("stub of the extension", |_| {
        let mut stubtest = project.python();
        stubtest.args([
            "-m",
            "mypy.stubtest",
            "--mypy-config-file",
            "pyproject.toml",
            "tensorcall._tensorcall",
        ]);
        run(&mut stubtest)
    });
}
