//! A process that runs out of file descriptors: its agent goes on, quietly, and accepts again later.
//!
//! Alone in its file: the limit is one of the whole process.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::File;
use std::time::Duration;

use common::log::Log;
use common::{Functions, ask, deadline, leave_together, now, socket_group};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tensorcall::engine::promise;
use tensorcall::engine::transport::Address;

mod serial {
    use super::*;

    /// LOG row 52.
    #[test]
    fn an_agent_without_a_descriptor_for_a_connection_waits_without_noise_and_then_takes_it() {
        let log = Log::listen();
        let agents = socket_group(2, |_| {}, || Functions::default().plain("echo", <[u8]>::to_vec));
        let address = common::info(&agents[0]).addresses.into_iter().find_map(|address| match address {
            Address::Tcp(address) => Some(address),
            _ => None,
        });
        // A socket that is there before the descriptors are used up, and connected after that.
        let socket =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
        let mut hoard = Vec::new();
        while let Ok(file) = File::open("/dev/null") {
            hoard.push(file);
        }
        log.take();

        rustix::net::connect(socket.as_ref().unwrap(), &address.unwrap()).unwrap();

        assert!(log.next().contains("connection refused"));
        let (_kept, never) = promise();
        never.wait_until(Some(deadline(Duration::from_millis(700))));
        assert!(log.take().len() <= 2, "it tries now and then, not all the time");
        assert_eq!(ask(&agents[0], 0, "echo", b"others are unharmed").unwrap(), b"others are unharmed");
        drop(hoard);
        let start = now();
        assert_eq!(ask(&agents[1], 0, "echo", b"accepted").unwrap(), b"accepted");
        assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
        setrlimit(Resource::Nofile, limit).unwrap();
        leave_together(agents);
    }
}
