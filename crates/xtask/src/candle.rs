//! The feature `candle`, which compiles for a minute or two and is in no other step: lints, tests, and jobs of
//! workers with torch and workers with candle.

use anyhow::Result;

use crate::{
    packages,
    plan::Plan,
    process::run,
    project::Project,
    tally::Tally,
    test::{libtest, reported},
};

/// The package with the feature.
const PACKAGE: [&str; 4] = ["--package", "tensorcall", "--features", "candle"];
/// What has to do with it.
const TARGETS: [&str; 5] = ["--lib", "--test", "candle", "--example", "candle_worker"];

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("lints with candle", |_| {
        run(project.cargo(&["clippy", "--locked"]).args(PACKAGE).args(TARGETS).args(["--", "-D", "warnings"]))
    });
    plan.step("tests with candle", |tally| {
        libtest(project.cargo(&["test", "--locked"]).args(PACKAGE).args(["--lib", "candle::"]), tally)?;
        libtest(project.cargo(&["test", "--locked"]).args(PACKAGE).args(["--test", "candle"]), tally)?;
        libtest(project.cargo(&["test", "--locked"]).args(PACKAGE).args(["--doc", "gradients"]), tally)?;
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
