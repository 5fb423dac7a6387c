//! Starts the workers of an example: the program runs itself once for each, as a launcher such as torchrun
//! would, and waits for them.

use std::env;
use std::error::Error;
use std::process::{Child, Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

/// No example takes longer.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs `work` with the name of this process' worker, or, if it has none yet, starts one process for each of
/// `names`. They find each other by what a launcher tells: `RANK`, `WORLD_SIZE` and where to meet.
pub(crate) fn run<E: Into<Box<dyn Error>>>(
    names: &[&str],
    work: impl FnOnce(&str) -> Result<(), E>,
) -> ExitCode {
    let result = match env::args().nth(1) {
        Some(name) => work(&name).map_err(|error| format!("{name}: {}", error.into()).into()),
        None => launch(names),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Where the workers of this example meet: a file that the first process names.
pub(crate) fn meeting_place() -> String {
    env::var("EXAMPLE_MEETS_AT").unwrap_or_default()
}

fn launch(names: &[&str]) -> Result<(), Box<dyn Error>> {
    let folder = env::temp_dir().join(format!("tensorcall-example-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let start = |(rank, name): (usize, &&str)| {
        Command::new(env::current_exe()?)
            .arg(name)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", names.len().to_string())
            .env("EXAMPLE_MEETS_AT", format!("file://{}", folder.join("store").display()))
            .spawn()
    };
    let mut workers: Vec<Child> = names.iter().enumerate().map(start).collect::<Result<_, _>>()?;
    let result = wait(&mut workers);
    for worker in &mut workers {
        let _ = worker.kill();
        worker.wait()?;
    }
    std::fs::remove_dir_all(&folder)?;
    result
}

/// Waits until all have ended well, or one has not.
fn wait(workers: &mut [Child]) -> Result<(), Box<dyn Error>> {
    let start = Instant::now();
    loop {
        let mut running = 0;
        for worker in workers.iter_mut() {
            match worker.try_wait()? {
                Some(status) if !status.success() => {
                    return Err(format!("a worker ended with {status}").into());
                }
                Some(_) => {}
                None => running += 1,
            }
        }
        if running == 0 {
            return Ok(());
        }
        if start.elapsed() > LIMIT {
            return Err(format!("{running} workers have not ended after {} s", LIMIT.as_secs()).into());
        }
        thread::sleep(Duration::from_millis(5));
    }
}
