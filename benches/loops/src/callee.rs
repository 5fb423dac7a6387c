//! The other process: this program once more.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// The callee, ended when this is dropped.
pub struct Callee {
    process: Child,
    _input: ChildStdin,
    output: BufReader<ChildStdout>,
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
        let output = BufReader::new(process.stdout.take().context("no output")?);
        let mut callee = Self { process, _input: input, output, greeting: String::new() };
        callee.greeting = callee.hear()?;
        Ok(callee)
    }

    /// The next line that it prints.
    ///
    /// # Errors
    ///
    /// If it is gone.
    pub fn hear(&mut self) -> Result<String> {
        let mut line = String::new();
        ensure!(self.output.read_line(&mut line)? > 0, "the callee ended");
        Ok(line.trim_end().to_owned())
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
