//! The other process: this program once more.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result};

/// The callee, ended when this is dropped.
pub struct Callee {
    process: Child,
    input: ChildStdin,
    /// The line it printed when it was ready: where it is to be found.
    pub greeting: String,
}

impl Callee {
    /// Starts it, with the arguments of this process, and waits for its greeting.
    ///
    /// # Errors
    ///
    /// If it does not start or says nothing.
    pub fn start(variables: &[(&str, String)]) -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.arg("callee").args(env::args().skip(1).filter(|argument| argument != "caller"));
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = process.stdin.take().context("no input")?;
        let mut greeting = String::new();
        BufReader::new(process.stdout.take().context("no output")?).read_line(&mut greeting)?;
        Ok(Self { process, input, greeting: greeting.trim_end().to_owned() })
    }

    /// Tells it something.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub fn tell(&mut self, line: &str) -> Result<()> {
        Ok(writeln!(self.input, "{line}")?)
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for Callee {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
