//! `cargo xtask packages`: what is published, made and tried as its users will have it.
//!
//! A wheel and a source distribution for PyPI, and two crates. The wheel is installed into an
//! environment that has nothing but pip, and used from another folder with no cargo on `PATH`; the
//! source distribution is unpacked and installed by `pip install .`. All lies in `dist/` afterwards.
//! Torch is lent to those environments: it need not be downloaded once more.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};

use crate::{
    licences,
    plan::Plan,
    process::{output, run},
    project::Project,
    python,
    stamp::Stamp,
    torch,
};

/// As old as what torch's own wheels ask for. The machine's C library is newer, hence zig's linker.
const PLATFORM: &str = "manylinux_2_28";
const CRATES: [&str; 2] = ["tensorcall-proto", "tensorcall"];
const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

pub(crate) fn add<'a>(plan: &mut Plan<'a>, project: &'a Project) {
    plan.step("tools for packages", |_| tools(project));
    plan.step("licences of linked crates", |_| licences::check(project));
    plan.step("wheel and source distribution", |_| build(project));
    plan.step("wheel in an empty environment", |_| try_wheel(project));
    plan.step("pip install . from the source distribution", |_| try_source(project));
    plan.step("crates", |_| crates(project));
}

fn tools(project: &Project) -> Result<()> {
    let stamp = Stamp::new(project, "packages", &["pyproject.toml"])?;
    if stamp.is_fresh() {
        println!("      up to date");
        return Ok(());
    }
    run(&mut project.pip(&["install", "--progress-bar", "on", "--group", "packages"]))
        .context("the tools could not be installed: is there a network?")?;
    stamp.write()
}

fn build(project: &Project) -> Result<()> {
    let folder = dist(project);
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let mut maturin = project.tool("maturin");
    maturin.args(["build", "--release", "--locked", "--zig", "--compatibility", PLATFORM, "--out"]);
    run(maturin.arg(&folder))?;
    run(project.tool("maturin").args(["sdist", "--out"]).arg(&folder))?;
    let (wheel, source) = (built(project, ".whl")?, built(project, ".tar.gz")?);
    run(project.tool("twine").args(["check", "--strict"]).args([&wheel, &source]))?;
    run(project.tool("abi3audit").args(["--strict", "--summary"]).arg(&wheel))
}

/// Where everything is put. Ignored by git.
fn dist(project: &Project) -> PathBuf {
    project.root.join("dist")
}

/// The one file in [`dist`] that ends so.
fn built(project: &Project, ending: &str) -> Result<PathBuf> {
    let entries = fs::read_dir(dist(project))?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let mut fitting: Vec<_> =
        entries.into_iter().filter(|path| path.to_string_lossy().ends_with(ending)).collect();
    ensure!(fitting.len() == 1, "{} files end with {ending}", fitting.len());
    fitting.pop().context("none")
}

fn try_wheel(project: &Project) -> Result<()> {
    let environment = Environment::make(project, "wheel")?;
    // Torch is not there yet, so its absence must not matter to pip.
    run(environment.pip(project).args(["--no-index", "--no-deps"]).arg(built(project, ".whl")?))?;
    environment.check(project)
}

fn try_source(project: &Project) -> Result<()> {
    let environment = Environment::make(project, "source")?;
    let unpacked = environment.folder.join("unpacked");
    fs::create_dir(&unpacked)?;
    let mut tar = Command::new("tar");
    run(tar
        .args(["--strip-components", "1", "-xzf"])
        .arg(built(project, ".tar.gz")?)
        .arg("-C")
        .arg(&unpacked))?;
    // The build has our maturin, so that nothing is downloaded, and finds what was compiled before.
    let mut pip = environment.pip(project);
    pip.args(["--no-index", "--no-deps", "--no-build-isolation", "."]).current_dir(&unpacked);
    pip.env("PYTHONPATH", project.evaluate(torch::SITE)?).env("CARGO_TARGET_DIR", target(project)?);
    run(&mut pip)?;
    environment.check(project)
}

/// Where cargo builds for this checkout.
pub(crate) fn target(project: &Project) -> Result<PathBuf> {
    let metadata = output(&mut project.cargo(&["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&metadata)?;
    Ok(PathBuf::from(metadata["target_directory"].as_str().context("cargo names no target directory")?))
}

/// A virtual environment with nothing in it.
struct Environment {
    folder: PathBuf,
}

impl Environment {
    fn make(project: &Project, name: &str) -> Result<Self> {
        let folder = project.venv.join("packages").join(name);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        python::make_environment(&project.venv.join("bin/python"), &folder)?;
        Ok(Self { folder })
    }

    fn python(&self) -> PathBuf {
        self.folder.join("bin/python")
    }

    /// `pip install` into this environment, with the tools of the project's.
    fn pip(&self, project: &Project) -> Command {
        let mut pip = project.pip(&["--python"]);
        pip.arg(self.python()).args(["install", "--quiet"]);
        pip
    }

    /// Runs `python/tests/installed.py` with this environment's programs and no others.
    fn check(&self, project: &Project) -> Result<()> {
        torch::lend_to(&self.python(), &project.venv.join("bin/python"))?;
        let elsewhere = self.folder.join("elsewhere");
        fs::create_dir(&elsewhere)?;
        let mut check = Command::new(self.python());
        check.arg("-P").arg(project.root.join("python/tests/installed.py")).current_dir(&elsewhere);
        run(check.env("PATH", self.folder.join("bin")).env_remove("PYTHONPATH"))
    }
}

fn crates(project: &Project) -> Result<()> {
    for name in CRATES {
        let files = output(&mut project.cargo(&["package", "--package", name, "--allow-dirty", "--list"]))?;
        let has = |file: &str| files.lines().any(|line| line == file);
        for file in LICENCES {
            ensure!(has(file), "the crate {name} lacks {file}");
        }
    }
    let folder = new_target(project)?;
    let mut package = project.cargo(&["package", "--locked", "--allow-dirty", "--target-dir"]);
    package.arg(&folder).env_remove("CARGO_BUILD_BUILD_DIR");
    for name in CRATES {
        package.args(["--package", name]);
    }
    run(&mut package)?;
    copy_crates(&folder.join("package"), &dist(project))?;
    Ok(fs::remove_dir_all(&folder)?)
}

/// A target directory that no run had before. `cargo package` builds a crate of the workspace against an unpacked copy
/// of the others, and takes one that an earlier run left in `CARGO_HOME` for the same target directory and version,
/// whatever lies in it.
fn new_target(project: &Project) -> Result<PathBuf> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    Ok(target(project)?.join(format!("crates-{}", now.as_nanos())))
}

fn copy_crates(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if let (Some(name), true) = (path.file_name(), path.extension().is_some_and(|end| end == "crate")) {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}
