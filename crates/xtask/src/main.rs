//! Habits of the project as code: `cargo xtask demo | test | ci | …`.
//!
//! One file per command. A command lays out a [`plan::Plan`], a numbered list of steps, and runs it;
//! [`setup`] gives the steps with which nearly every plan begins, so a fresh machine and a used one
//! are served by the same words. `.ci/run` calls `cargo xtask ci`: what passes here passes there.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a command-line tool: it prints, reads the environment and takes the time itself"
)]

mod api;
mod bench;
mod ci;
mod demo;
mod features;
mod fmt;
mod fuzz;
mod gpu_check;
mod licences;
mod packages;
mod peer_suite;
mod plan;
mod process;
mod project;
mod python;
mod setup;
mod soak;
mod stamp;
mod stubs;
mod tally;
mod test;
mod torch;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::{plan::Plan, project::Project};

/// Set up, run, test and check tensorcall.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    /// Use the torch (2.9 or newer) of this Python interpreter instead of one from PyPI.
    #[arg(long, global = true, value_name = "INTERPRETER", env = "TENSORCALL_PYTHON")]
    python: Option<PathBuf>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make the virtual environment and build the extension, if they are not up to date.
    Setup,
    /// Set up, then run the program this project was born from.
    Demo,
    /// Set up, then run every test, Rust and Python.
    Test {
        /// Leave out what is slow: tests marked so, and torch's own RPC tests.
        #[arg(long)]
        fast: bool,
    },
    /// Everything a change must pass: formats, lints, types, documentation, stubs, tests, the demo.
    Ci {
        /// Go on after a failure, and report all of them at the end.
        #[arg(long)]
        keep_going: bool,
    },
    /// Format the code, Rust and Python, and repair what the linter can.
    Fmt,
    /// Compare the public interface of the crate `tensorcall` with the list that is checked in.
    Api {
        /// Write the list instead.
        #[arg(long)]
        bless: bool,
    },
    /// Check the hand-written stub of the extension against the extension.
    Stubs,
    /// Make the wheel, the source distribution and the crates, and try them as a user would.
    Packages,
    /// Write the licences of the crates that wheels contain into LICENSE-THIRD-PARTY.
    Licences,
    /// Run torch's own RPC tests against us; arguments go to `python/tests/peer/run.py`.
    PeerSuite {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run what needs a CUDA device; without one, say so and pass.
    GpuCheck,
    /// Compare our speed with that of our peers and of the machine; arguments go to
    /// `python/benches/run.py` (`--quick` for three minutes, `--help` for the rest).
    Bench {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Call a million times and see whether memory, descriptors or threads grow; arguments go to
    /// `python/benches/soak.py`.
    Soak {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Fuzz one target (needs `cargo install cargo-fuzz`); arguments go to the fuzzer.
    Fuzz {
        target: String,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let project = Project::find(cli.python);
    let mut plan = Plan::new();
    match &cli.command {
        Command::Setup => setup::add(&mut plan, &project),
        Command::Demo => {
            setup::add(&mut plan, &project);
            demo::add(&mut plan, &project);
        }
        Command::Test { fast } => {
            setup::add(&mut plan, &project);
            test::add(&mut plan, &project, *fast);
        }
        Command::Ci { keep_going } => {
            plan.keep_going(*keep_going);
            ci::add(&mut plan, &project);
        }
        Command::Fmt => {
            setup::add_environment(&mut plan, &project);
            fmt::add(&mut plan, &project);
        }
        Command::Api { bless } => api::add(&mut plan, &project, *bless),
        Command::Stubs => {
            setup::add(&mut plan, &project);
            stubs::add(&mut plan, &project);
        }
        Command::Packages => {
            setup::add_environment(&mut plan, &project);
            packages::add(&mut plan, &project);
        }
        Command::Licences => licences::add(&mut plan, &project),
        Command::PeerSuite { args } => {
            setup::add(&mut plan, &project);
            peer_suite::add(&mut plan, &project, args);
        }
        Command::GpuCheck => {
            setup::add(&mut plan, &project);
            gpu_check::add(&mut plan, &project);
        }
        Command::Bench { args } => bench::add(&mut plan, &project, args),
        Command::Soak { args } => {
            setup::add(&mut plan, &project);
            soak::add(&mut plan, &project, args);
        }
        Command::Fuzz { target, args } => fuzz::add(&mut plan, &project, target, args),
    }
    if plan.run() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
