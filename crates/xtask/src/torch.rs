//! Torch for the environment: there already, lent by an interpreter that has it, or from PyPI.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    process::{output, run, succeeds},
    project::Project,
    python,
};

/// What is needed, as in `pyproject.toml`.
const REQUIREMENT: &str = "torch>=2.9";
/// Room that torch from PyPI, its libraries and our build take.
const DISK_GIB: u64 = 8;

/// The file with the lender's folders, beside the borrower's packages.
const LENT: &str = "lent_torch.pth";
/// Prints where an interpreter's packages are.
pub(crate) const SITE: &str = "import sysconfig; print(sysconfig.get_path('purelib'))";
const IMPORT_PATHS: &str = "import sys; print(*[p for p in sys.path if p.endswith('-packages')], sep='\\n')";
const VERSION: &str = "from importlib.metadata import version; print(version('torch'))";

pub(crate) fn provide(project: &Project) -> Result<()> {
    if let Some(lender) = &project.torch_from {
        lend(project, lender)?;
    }
    // Pip's own judgement, without the network.
    let check = ["install", "--quiet", "--no-index", "--no-deps", "--dry-run", REQUIREMENT];
    if succeeds(&mut project.pip(&check)) {
        println!("      torch {}: up to date", version(project)?);
        return Ok(());
    }
    check_disk(&project.venv)?;
    println!("      from PyPI: the download is large and takes minutes");
    run(&mut project.pip(&["install", "--progress-bar", "on", REQUIREMENT])).context(
        "no torch. Without network, name an interpreter that has one: `--python /path/to/python` or \
         TENSORCALL_PYTHON. If pip found no version, this Python may be too new for torch: remove the \
         environment and name another with PYTHON=/path/to/python",
    )
}

/// The version of torch that the environment has.
pub(crate) fn version(project: &Project) -> Result<String> {
    project.evaluate(VERSION)
}

/// Lets the environment import what `lender` can, behind what it has itself.
///
/// By lines in a `.pth` file and not `--system-site-packages`: that would show the packages of the
/// interpreter under `lender`, which are not `lender`'s own if it is a virtual environment too.
fn lend(project: &Project, lender: &Path) -> Result<()> {
    let file = lent(project)?;
    let paths = python::evaluate(lender, IMPORT_PATHS)?;
    if fs::read_to_string(&file).is_ok_and(|then| then == paths) {
        return Ok(());
    }
    ensure!(
        python::version(lender)? == python::version(&project.venv.join("bin/python"))?,
        "{} is of another version: remove the environment and run this again",
        lender.display()
    );
    let torch = python::evaluate(lender, "import torch; print(torch.__version__)")
        .with_context(|| format!("torch of {} cannot be imported", lender.display()))?;
    println!("      torch {torch} is lent by {}", lender.display());
    Ok(fs::write(file, paths)?)
}

/// The same for an environment that is not the project's, nor checked.
pub(crate) fn lend_to(borrower: &Path, lender: &Path) -> Result<()> {
    let file = Path::new(&python::evaluate(borrower, SITE)?).join(LENT);
    Ok(fs::write(file, python::evaluate(lender, IMPORT_PATHS)?)?)
}

/// Ends a loan, if there is one.
pub(crate) fn give_back(project: &Project) -> Result<()> {
    let file = lent(project)?;
    if file.exists() {
        fs::remove_file(file)?;
    }
    Ok(())
}

fn lent(project: &Project) -> Result<PathBuf> {
    Ok(PathBuf::from(project.evaluate(SITE)?).join(LENT))
}

fn check_disk(place: &Path) -> Result<()> {
    let table = output(Command::new("df").arg("-Pk").arg(place))?;
    let free = table.lines().last().and_then(|line| line.split_whitespace().nth(3));
    let Some(kib) = free.and_then(|kib| kib.parse::<u64>().ok()) else {
        return Ok(());
    };
    ensure!(
        kib >> 20 >= DISK_GIB,
        "{} GiB are free at {}, {DISK_GIB} are needed: make room, or put the environment elsewhere with \
         TENSORCALL_VENV=/path, or name an interpreter that has torch with TENSORCALL_PYTHON",
        kib >> 20,
        place.display()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torch_requirement_is_the_one_of_the_package() {
        assert!(include_str!("../../../pyproject.toml").contains(&format!("\"{REQUIREMENT}\"")));
    }
}
