//! `cargo xtask bench`: tensorcall, its peers and the floor, in turn, in one run.
//!
//! A quick run needs nothing beside the project's environment. The others measure peers that we do not
//! depend on: those in Python go into an environment of their own, which is lent our torch, those in Rust
//! are a workspace of their own. A peer that cannot be had is left out, and the report says so.

use anyhow::{Context, Result};

use crate::{plan::Plan, process::run, project::Project, python, setup, stamp::Stamp, torch};

/// Groups of `pyproject.toml`, each of which may fail to install.
const PEERS: [&str; 3] = ["bench-grpcio", "bench-mpi", "bench-ray"];
/// Programs in `benches/`: ours and the floor.
const PROGRAMS: [&str; 3] = ["bench-floor", "bench-native", "bench-job"];
/// Those that may fail to build.
const PEER_PROGRAMS: [&str; 2] = ["bench-tarpc", "bench-tonic"];
const MANIFEST: &str = "benches/Cargo.toml";
const TARGET: &str = "benches/target";

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project, args: &'a [String]) {
    let says = |word: &str| args.iter().any(|argument| argument.starts_with(word));
    let (measures, with_all) = (!says("--from"), !(says("--quick") || says("--gate")));
    if measures {
        setup::add(plan, project);
    } else {
        setup::add_environment(plan, project);
    }
    if !with_all && !says("--page") {
        plan.step("benchmark", move |_| run(program(project).args(args)));
        return;
    }
    plan.step("environment of the benchmark", move |_| environment(project, measures && with_all));
    if measures && with_all {
        plan.step("peers in Rust, release build", |_| programs(project));
    }
    plan.step("benchmark", move |_| run(program(&apart(project)).args(args)));
}

/// Whether we are still as far ahead of torch as recorded; needs the environment and the extension.
pub(crate) fn add_gate<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("speed beside torch", |_| run(program(project).arg("--gate")));
}

fn program(project: &Project) -> std::process::Command {
    let mut command = project.python();
    command.arg("python/benches/run.py");
    command
}

/// The project with the environment of the benchmark, which lies beside its own.
fn apart(project: &Project) -> Project {
    let mut name = project.venv.clone().into_os_string();
    name.push("-bench");
    Project { root: project.root.clone(), venv: name.into(), torch_from: None }
}

fn environment(project: &Project, with_peers: bool) -> Result<()> {
    let apart = apart(project);
    let lender = project.venv.join("bin/python");
    if !apart.venv.exists() {
        python::make_environment(&lender, &apart.venv)?;
    }
    torch::lend_to(&apart.venv.join("bin/python"), &lender)?;
    install(&apart, "bench")
        .context("what the benchmark needs could not be installed: is there a network?")?;
    for group in PEERS.iter().filter(|_| with_peers) {
        if let Err(error) = install(&apart, group) {
            println!("      left out: {group}: {error:#}");
        }
    }
    Ok(())
}

fn install(apart: &Project, group: &str) -> Result<()> {
    let stamp = Stamp::new(apart, group, &["pyproject.toml"])?;
    if stamp.is_fresh() {
        println!("      {group}: up to date");
        return Ok(());
    }
    run(&mut apart.pip(&["install", "--quiet", "pip>=25.1"]))?;
    run(&mut apart.pip(&["install", "--progress-bar", "on", "--group", group]))?;
    stamp.write()
}

fn programs(project: &Project) -> Result<()> {
    let build = |program| {
        let build = ["build", "--release", "--manifest-path", MANIFEST, "--target-dir", TARGET];
        run(project.cargo(&build).args(["--package", program]))
    };
    PROGRAMS.into_iter().try_for_each(build)?;
    for program in PEER_PROGRAMS {
        if let Err(error) = build(program) {
            println!("      left out: {program}: {error:#}");
        }
    }
    Ok(())
}
