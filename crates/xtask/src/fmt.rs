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

/// The workspace and, beside it, those of the fuzz targets and of the benchmark.
pub(crate) fn rust(project: &Project, args: &[&str]) -> Result<()> {
    run(project.cargo(&["fmt", "--all"]).args(args))?;
    for manifest in ["fuzz/Cargo.toml", "benches/Cargo.toml"] {
        if project.root.join(manifest).exists() {
            run(project.cargo(&["fmt", "--all", "--manifest-path", manifest]).args(args))?;
        }
    }
    Ok(())
}
