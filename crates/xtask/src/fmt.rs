//! `cargo xtask fmt`: write the formats that `cargo xtask ci` checks.

use anyhow::Result;

use crate::{plan::Plan, process::run, project::Project};

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("Rust format", |_| rust(project, &[]));
    plan.step("Python format and lint", |_| {
        run(project.tool("ruff").args(["check", "--fix"]))?;
        run(project.tool("ruff").arg("format"))
    });
}

/// The workspace and, beside it, the fuzz targets' own.
pub(crate) fn rust(project: &Project, args: &[&str]) -> Result<()> {
    run(project.cargo(&["fmt", "--all"]).args(args))?;
    if project.root.join("fuzz/Cargo.toml").exists() {
        run(project.cargo(&["fmt", "--manifest-path", "fuzz/Cargo.toml"]).args(args))?;
    }
    Ok(())
}
