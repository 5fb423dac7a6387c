//! A worker that computes with candle, for jobs whose other workers are Python processes with torch
//! (`python/tests/integration/test_candle.py`).

mod program;
mod spread;

use std::env;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let number = |name| Ok::<u64, Box<dyn std::error::Error>>(env::var(name)?.parse()?);
    let agent = spread::worker(number("RANK")?, number("WORLD_SIZE")?).from_env().start()?;
    agent.shutdown()?;
    Ok(())
}
