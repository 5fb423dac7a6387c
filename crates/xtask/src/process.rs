//! Running other programs in plain sight.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};

/// Shows the command line, then runs it; its output goes where ours goes.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    announce(command);
    let status = command.status().with_context(|| not_started(command))?;
    ensure!(status.success(), "`{}` ended with {status}", name(command));
    Ok(())
}

/// Like [`run`], and hands each line of standard output to `watch` as well.
pub(crate) fn run_watched(command: &mut Command, mut watch: impl FnMut(&str)) -> Result<()> {
    announce(command);
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| not_started(command))?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            watch(line.trim_end());
        }
    }
    let status = child.wait()?;
    ensure!(status.success(), "`{}` ended with {status}", name(command));
    Ok(())
}

/// Runs silently and returns the trimmed standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| not_started(command))?;
    if !output.status.success() {
        bail!("`{}`: {}", name(command), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Whether the program starts and ends well; what it says is not shown.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    output(command).is_ok()
}

fn announce(command: &Command) {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy()).collect();
    println!("      $ {} {}", command.get_program().to_string_lossy(), words.join(" "));
}

fn name(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy()];
    words.extend(command.get_args().take(3).map(|word| word.to_string_lossy()));
    words.join(" ")
}

fn not_started(command: &Command) -> String {
    format!("`{}` did not start: is it installed?", command.get_program().to_string_lossy())
}
