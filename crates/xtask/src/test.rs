//! `cargo xtask test`: every test, Rust and Python.

use std::{fs, path::Path, process::Command};

use anyhow::{Result, ensure};

use crate::{
    plan::Plan,
    process::{run, run_watched, succeeds},
    project::Project,
    setup,
    tally::Tally,
};

/// What `--fast` leaves out of the Python tests.
const FAST: &str = "not slow and not peer";

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project, fast: bool) {
    plan.step("Rust tests", |tally| rust(project, tally));
    plan.step("Rust documentation tests", |tally| {
        libtest(&mut project.cargo(&["test", "--workspace", "--doc"]), tally)
    });
    if !fast {
        setup::add_ecosystem(plan, project);
    }
    plan.step("Python tests", move |tally| python(project, tally, fast));
}

fn rust(project: &Project, tally: &mut Tally) -> Result<()> {
    if !succeeds(&mut project.cargo(&["nextest", "--version"])) {
        return libtest(
            &mut project.cargo(&["test", "--workspace", "--all-targets", "--no-fail-fast"]),
            tally,
        );
    }
    // Where nextest keeps what `.config/nextest.toml` asks for, wherever cargo builds.
    let report = project.root.join("target/nextest/default/junit.xml");
    reported(&mut project.cargo(&["nextest", "run", "--workspace"]), &report, tally)
}

/// Every interleaving of the lock-free state. Loom's own `cfg` rebuilds all, so into a folder of its own.
pub(crate) fn models(project: &Project, tally: &mut Tally) -> Result<()> {
    let mut models = project.cargo(&["test", "--package", "tensorcall", "--lib", "model::"]);
    libtest(
        models.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", project.root.join("target/loom")),
        tally,
    )
}

fn python(project: &Project, tally: &mut Tally, fast: bool) -> Result<()> {
    let report = project.venv.join("pytest.xml");
    let mut pytest = project.python();
    pytest.args(["-m", "pytest", "--junit-xml"]).arg(&report);
    if fast {
        pytest.args(["-m", FAST]);
    }
    reported(&mut pytest, &report, tally)
}

/// Runs a test runner that writes a JUnit report, whose counts are kept even if tests failed.
pub(crate) fn reported(command: &mut Command, report: &Path, tally: &mut Tally) -> Result<()> {
    if report.exists() {
        fs::remove_file(report)?;
    }
    let result = run(command);
    let counts = Tally::from_junit(report);
    *tally += counts;
    result?;
    ensure!(!counts.is_empty(), "no test was counted in {}", report.display());
    Ok(())
}

/// Runs tests of libtest, which says its counts in a line for each binary.
pub(crate) fn libtest(command: &mut Command, tally: &mut Tally) -> Result<()> {
    run_watched(command, |line| {
        *tally += Tally::from_libtest(line).unwrap_or_default();
    })
}
