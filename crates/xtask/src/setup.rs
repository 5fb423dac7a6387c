//! The steps from a fresh checkout to a working `import tensorcall`; each skips what is up to date.

use anyhow::{Context, Result, ensure};

use crate::{
    plan::Plan,
    process::{run, succeeds},
    project::Project,
    python,
    stamp::Stamp,
    torch,
};

/// What the extension is built from.
const SOURCES: [&str; 8] = [
    "Cargo.toml",
    "Cargo.lock",
    "pyproject.toml",
    "rust-toolchain.toml",
    "crates/tensorcall-proto",
    "crates/tensorcall",
    "crates/tensorcall-python",
    "python/startup",
];

/// All of it: the environment with torch and the tools, and the extension.
pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    add_environment(plan, project);
    add_extension(plan, project);
}

pub(crate) fn add_environment<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("Python environment", |_| environment(project));
    plan.step("tools (versions in pyproject.toml)", |_| tools(project));
    plan.step("torch", |_| torch::provide(project));
}

/// Packages that use torch's RPC, which some tests run.
pub(crate) fn add_ecosystem<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("packages that use torch's RPC (versions in pyproject.toml)", |_| ecosystem(project));
}

pub(crate) fn add_extension<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("extension, release build", |_| extension(project));
}

fn environment(project: &Project) -> Result<()> {
    let venv = &project.venv;
    if !venv.exists() {
        let base = project.torch_from.clone().map_or_else(python::find, Ok)?;
        python::check(&base)?;
        python::make_environment(&base, venv)?;
    }
    let usable = succeeds(&mut project.pip(&["--version"]));
    ensure!(usable, "{0} has no working pip: remove it (`rm -r {0}`) and run this again", venv.display());
    let (major, minor) = python::version(&venv.join("bin/python"))?;
    println!("      Python {major}.{minor} in {}", venv.display());
    Ok(())
}

fn tools(project: &Project) -> Result<()> {
    let stamp = Stamp::new(project, "tools", &["pyproject.toml"])?;
    if stamp.is_fresh() {
        println!("      up to date");
        return Ok(());
    }
    torch::give_back(project)?; // a lender's tools would have no programs in this environment
    run(&mut project.pip(&["install", "--quiet", "pip>=25.1"])).context("pip could not renew itself")?;
    run(&mut project.pip(&["install", "--progress-bar", "on", "--group", "dev"]))
        .context("the tools could not be installed: is there a network?")?;
    stamp.write()
}

fn ecosystem(project: &Project) -> Result<()> {
    let stamp = Stamp::new(project, "ecosystem", &["pyproject.toml"])?;
    if stamp.is_fresh() {
        println!("      up to date");
        return Ok(());
    }
    let torch = format!("torch=={}", torch::version(project)?); // stays what it is
    run(&mut project.pip(&["install", "--quiet", "--group", "ecosystem", &torch]))
        .context("the packages could not be installed: is there a network?")?;
    stamp.write()
}

fn extension(project: &Project) -> Result<()> {
    let stamp = Stamp::new(project, "extension", &SOURCES)?;
    let module = project.root.join("python/tensorcall/_tensorcall.abi3.so");
    if stamp.is_fresh() && module.exists() {
        println!("      up to date");
        return Ok(());
    }
    run(project.tool("maturin").args(["develop", "--release"])).context(
        "the extension did not build (a C compiler is needed too: Debian, Ubuntu: `apt-get install gcc`)",
    )?;
    stamp.write()
}
