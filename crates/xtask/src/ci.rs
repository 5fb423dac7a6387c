//! `cargo xtask ci`: all that a change must pass, the quick checks first.

use anyhow::Result;

use crate::{
    api, bench, demo, features, fmt, packages, plan::Plan, process::run, project::Project, setup, stubs, test,
};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("Rust format", |_| fmt::rust(project, &["--check"]));
    setup::add_environment(plan, project);
    plan.step("Python format and lint", |_| python_lint(project));
    plan.step("spelling", |_| run(&mut project.tool("typos")));
    plan.step("dependencies", |_| dependencies(project));
    plan.step("clippy", |_| clippy(project));
    plan.step("Rust documentation", |_| documentation(project));
    plan.step("Python types", |_| run(project.python().args(["-m", "mypy"])));
    setup::add_extension(plan, project);
    stubs::add(plan, project);
    demo::add(plan, project);
    packages::add(plan, project);
    plan.step("models of lock-free state", |tally| test::models(project, tally));
    test::add(plan, project, false);
    features::add(plan, project);
    api::add(plan, project, false);
    bench::add_gate(plan, project);
}

fn python_lint(project: &Project) -> Result<()> {
    run(project.tool("ruff").args(["format", "--check"]))?;
    run(project.tool("ruff").arg("check"))
}

/// Advisories are left out: their database is a git repository that CI may not reach (ADR 0008). What only tests
/// use may be what users are spared, such as a runtime.
fn dependencies(project: &Project) -> Result<()> {
    let deny = ["deny", "--workspace", "--locked"];
    run(project.cargo(&deny).args(["--exclude-dev", "check", "bans", "licenses"]))?;
    run(project.cargo(&deny).args(["check", "sources"]))
}

fn clippy(project: &Project) -> Result<()> {
    run(&mut project.cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"]))
}

fn documentation(project: &Project) -> Result<()> {
    let mut doc = project.cargo(&["doc", "--workspace", "--no-deps"]);
    run(doc.env("RUSTDOCFLAGS", "-D warnings"))
}
