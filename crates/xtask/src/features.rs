//! The features of the crate, which are in no other step since candle compiles for a minute or two: lints,
//! documentation, tests, and jobs of workers with torch and workers with candle.

use anyhow::Result;

use crate::{
    packages,
    plan::Plan,
    process::run,
    project::Project,
    tally::Tally,
    test::{libtest, reported},
};

/// The package with its features.
const PACKAGE: [&str; 3] = ["--package", "tensorcall", "--all-features"];
/// What has to do with them.
const TARGETS: [&str; 5] = ["--lib", "--test", "candle", "--example", "candle_worker"];

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("lints with all features", |_| {
        run(project.cargo(&["clippy", "--locked"]).args(PACKAGE).args(TARGETS).args(["--", "-D", "warnings"]))
    });
    plan.step("Rust documentation with all features", |_| {
        let mut doc = project.cargo(&["doc", "--no-deps", "--locked"]);
        run(doc.args(PACKAGE).env("RUSTDOCFLAGS", "-D warnings"))
    });
    plan.step("tests with all features", |tally| {
        for tests in [&["--lib", "--", "candle::", "native::"][..], &["--test", "candle"], &["--doc"]] {
            libtest(project.cargo(&["test", "--locked"]).args(PACKAGE).args(tests), tally)?;
        }
        with_torch(project, tally)
    });
}

fn with_torch(project: &Project, tally: &mut Tally) -> Result<()> {
    run(project.cargo(&["build", "--locked"]).args(PACKAGE).args(["--example", "candle_worker"]))?;
    let report = project.venv.join("pytest-candle.xml");
    let mut pytest = project.python();
    pytest
        .args(["-m", "pytest", "python/tests/integration/test_candle.py", "--junit-xml"])
        .arg(&report)
        .env("TENSORCALL_CANDLE_WORKER", packages::target(project)?.join("debug/examples/candle_worker"));
    reported(&mut pytest, &report, tally)
}
