//! What the machine allows: bytes back and forth between two processes with nothing around them.
//!
//! Over a socket a request is a header, then bytes, which the callee reads into the same memory each time;
//! the answer is a header too. In shared memory the caller copies into a block that both have mapped.

mod memory;
mod socket;

use anyhow::Result;
use bench_loops::{Role, Settings, Way};

fn main() -> Result<()> {
    let settings = Settings::take()?;
    match (settings.way, settings.role) {
        (Way::Tcp | Way::Unix, Role::Caller) => socket::call(&settings),
        (Way::Tcp | Way::Unix, Role::Callee) => socket::answer(settings.way),
        (_, Role::Caller) => memory::call(&settings),
        (_, Role::Callee) => memory::answer(settings.way),
    }
}
