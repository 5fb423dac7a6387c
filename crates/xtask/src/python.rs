//! Finding a Python interpreter and making a virtual environment with it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{output, run, succeeds};

/// The oldest Python that works, as in `requires-python`.
const OLDEST: (u32, u32) = (3, 11);
/// Tried in this order when `PYTHON` is not set.
const CANDIDATES: [&str; 5] = ["python3", "python3.13", "python3.12", "python3.11", "python3.14"];

/// `PYTHON` if it is set, else the first candidate on `PATH` that is new enough.
pub(crate) fn find() -> Result<PathBuf> {
    if let Some(named) = env::var_os("PYTHON") {
        let python = PathBuf::from(named);
        check(&python).context("the interpreter that PYTHON names")?;
        return Ok(python);
    }
    let found = CANDIDATES.iter().map(PathBuf::from).find(|python| check(python).is_ok());
    found.with_context(|| {
        format!(
            "no Python {}.{} or newer on PATH: install one (Debian, Ubuntu: `apt-get install python3 \
             python3-venv`) or name it with PYTHON=/path/to/python",
            OLDEST.0, OLDEST.1
        )
    })
}

/// Whether this interpreter starts and is new enough.
pub(crate) fn check(python: &Path) -> Result<()> {
    let version = version(python)?;
    ensure!(version >= OLDEST, "{} is Python {}.{}, too old", python.display(), version.0, version.1);
    Ok(())
}

pub(crate) fn version(python: &Path) -> Result<(u32, u32)> {
    let text = evaluate(python, "import sys; print(*sys.version_info[:2])")?;
    let (major, minor) = text.split_once(' ').with_context(|| format!("odd version: {text}"))?;
    Ok((major.parse()?, minor.parse()?))
}

/// What a line of Python prints, without any of the user's site settings.
pub(crate) fn evaluate(python: &Path, program: &str) -> Result<String> {
    output(Command::new(python).env_remove("PYTHONPATH").args(["-c", program]))
}

/// Makes the environment `venv` with pip in it.
///
/// Debian keeps `ensurepip`, which `venv` needs, in a package of its own; without it `virtualenv` does
/// the same, which pip can bring without touching the system.
pub(crate) fn make_environment(python: &Path, venv: &Path) -> Result<()> {
    if has(python, "ensurepip") {
        return run(Command::new(python).args(["-m", "venv"]).arg(venv));
    }
    if !has(python, "pip") {
        let (major, minor) = version(python)?;
        bail!(
            "{} can make no virtual environment: install its venv module (Debian, Ubuntu: `apt-get install \
             python{major}.{minor}-venv`), then run this again",
            python.display()
        );
    }
    println!("      no ensurepip: taking virtualenv for it");
    let borrowed = venv.with_extension("virtualenv");
    run(Command::new(python).args(["-m", "pip", "install", "virtualenv", "--target"]).arg(&borrowed))?;
    run(Command::new(python).env("PYTHONPATH", &borrowed).args(["-m", "virtualenv"]).arg(venv))?;
    Ok(fs::remove_dir_all(borrowed)?)
}

fn has(python: &Path, module: &str) -> bool {
    succeeds(Command::new(python).args(["-c", &format!("import {module}")]))
}
