//! A TCP connection that a test can break while both of its ends live.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tensorcall::engine::transport::Address;

/// Hands on all that it gets to a target and back.
pub(crate) struct Proxy {
    pub(crate) address: Address,
    streams: Arc<Mutex<Vec<TcpStream>>>,
    /// Connections that are there now hand on nothing more.
    swallows: Arc<Mutex<Arc<AtomicBool>>>,
}

impl Proxy {
    pub(crate) fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap());
        let streams = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&streams);
        let swallows = Arc::<Mutex<Arc<AtomicBool>>>::default();
        let swallow = Arc::clone(&swallows);
        // Ends with the process: a test has no more to say to it.
        std::thread::spawn(move || {
            for here in listener.incoming().map_while(Result::ok) {
                let Ok(there) = TcpStream::connect(target) else { continue };
                for stream in [&here, &there] {
                    stream.set_nodelay(true).unwrap();
                    kept.lock().unwrap().push(stream.try_clone().unwrap());
                }
                for (mut from, mut to) in
                    [(here.try_clone().unwrap(), there.try_clone().unwrap()), (there, here)]
                {
                    let swallow = Arc::clone(&swallow.lock().unwrap());
                    std::thread::spawn(move || {
                        let mut bytes = [0; 4096];
                        while let Ok(count @ 1..) = from.read(&mut bytes) {
                            if !swallow.load(Ordering::SeqCst) && to.write_all(&bytes[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Self { address, streams, swallows }
    }

    /// From now on the present connections lose all that they get.
    pub(crate) fn swallow(&self) {
        std::mem::take(&mut *self.swallows.lock().unwrap()).store(true, Ordering::SeqCst);
    }

    /// Breaks every connection; new ones are welcome.
    pub(crate) fn reset(&self) {
        for stream in self.streams.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}
