//! Where things lie, and how our tools are called.

use std::{
    env,
    ffi::{OsStr, OsString},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::process::output;

/// The checkout, its virtual environment, and the interpreter whose torch is to be used, if named.
pub(crate) struct Project {
    pub(crate) root: PathBuf,
    pub(crate) venv: PathBuf,
    pub(crate) torch_from: Option<PathBuf>,
}

impl Project {
    /// The checkout this was started from; `TENSORCALL_VENV` moves the virtual environment elsewhere.
    pub(crate) fn find(torch_from: Option<PathBuf>) -> Self {
        let manifest = env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest).join("../..");
        let root = root.canonicalize().unwrap_or(root);
        let venv = root.join(env::var_os("TENSORCALL_VENV").unwrap_or_else(|| ".venv".into()));
        Project { root, venv, torch_from }
    }

    /// A program of the virtual environment.
    pub(crate) fn tool(&self, name: &str) -> Command {
        self.command(self.venv.join("bin").join(name))
    }

    pub(crate) fn python(&self) -> Command {
        self.tool("python")
    }

    /// What a line of Python prints in the virtual environment.
    pub(crate) fn evaluate(&self, program: &str) -> Result<String> {
        output(self.python().args(["-c", program]))
    }

    pub(crate) fn pip(&self, args: &[&str]) -> Command {
        let mut command = self.python();
        command.args(["-m", "pip"]).args(args);
        command
    }

    pub(crate) fn cargo(&self, args: &[&str]) -> Command {
        let mut command = self.command(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        command.args(args);
        command
    }

    /// A command in the root of the checkout that finds the environment's programs first.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .current_dir(&self.root)
            .env("PATH", self.search_path())
            .env("VIRTUAL_ENV", &self.venv)
            .env("PYO3_PYTHON", self.venv.join("bin/python"))
            .env("PYTHONUNBUFFERED", "1")
            .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
            .env_remove("PYTHONHOME")
            .env_remove("PYTHONPATH");
        command
    }

    fn search_path(&self) -> OsString {
        let inherited = env::var_os("PATH").unwrap_or_default();
        let mut path = self.venv.join("bin").into_os_string();
        path.push(":");
        path.push(inherited);
        path
    }
}
