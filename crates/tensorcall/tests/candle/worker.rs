//! A worker that computes with candle, for jobs whose other workers are Python processes with torch
//! (`python/tests/integration/test_candle.py`).

mod program;
mod spread;

use std::env;
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let agent = spread::worker(number("RANK")?, number("WORLD_SIZE")?).from_env().start()?;
    agent.shutdown()?;
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "as a launcher tells")]
fn number(variable: &str) -> Result<u64, Box<dyn Error>> {
    Ok(env::var(variable)?.parse()?)
}
