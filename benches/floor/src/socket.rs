//! Blocking reads and writes on one socket.

use std::cell::RefCell;
use std::future::{Future, ready};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};

use anyhow::Result;
use bench_loops::{Callee, Client, LARGEST, Settings, Way, run};

const HEADER: usize = 64;

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

struct Caller {
    stream: RefCell<Box<dyn Stream>>,
    memory: RefCell<Vec<u8>>,
}

impl Caller {
    /// Sends so many bytes and waits until `back` of them are here again.
    fn exchange(&self, bytes: usize, back: usize) -> io::Result<()> {
        let (mut stream, mut memory) = (self.stream.borrow_mut(), self.memory.borrow_mut());
        let mut header = [0; HEADER];
        header[..8].copy_from_slice(&(bytes as u64).to_le_bytes());
        header[8..16].copy_from_slice(&(back as u64).to_le_bytes());
        stream.write_all(&header)?;
        stream.write_all(&memory[..bytes])?;
        stream.read_exact(&mut header)?;
        stream.read_exact(&mut memory[..back])
    }
}

impl Client for Caller {
    fn trivial(&self, _: &str) -> impl Future<Output = ()> + 'static {
        self.exchange(0, 0).expect("an answer");
        ready(())
    }

    fn give(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        self.exchange(bytes, 0).expect("an answer");
        ready(())
    }

    fn echo(&self, bytes: usize) -> impl Future<Output = ()> + 'static {
        self.exchange(bytes, bytes).expect("an answer");
        ready(())
    }

    fn sleep(&self) -> impl Future<Output = ()> + 'static {
        ready(())
    }

    fn bulk_in_flight(&self) -> &'static [usize] {
        &[1]
    }
}

pub(crate) fn call(settings: &Settings) -> Result<()> {
    let callee = Callee::start(&[])?;
    let stream: Box<dyn Stream> = match settings.way {
        Way::Tcp => {
            let stream = TcpStream::connect(&callee.greeting)?;
            stream.set_nodelay(true)?;
            Box::new(stream)
        }
        _ => Box::new(UnixStream::connect_addr(&SocketAddr::from_abstract_name(&callee.greeting)?)?),
    };
    let caller = Caller { stream: RefCell::new(stream), memory: RefCell::new(vec![1; LARGEST]) };
    run(settings, &caller, callee.id(), |work| futures::executor::block_on(work));
    Ok(())
}

pub(crate) fn answer(way: Way) -> Result<()> {
    if way == Way::Tcp {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        println!("{}", listener.local_addr()?);
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        serve(stream)
    } else {
        let name = format!("tensorcall-bench-{}", std::process::id());
        let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
        println!("{name}");
        serve(listener.accept()?.0)
    }
}

/// Answers until the caller hangs up.
fn serve(mut stream: impl Stream) -> Result<()> {
    let mut memory = vec![1; LARGEST];
    let mut header = [0; HEADER];
    while stream.read_exact(&mut header).is_ok() {
        let [bytes, back] =
            [0, 8].map(|at| u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or_default()));
        stream.read_exact(&mut memory[..usize::try_from(bytes)?])?;
        stream.write_all(&header)?;
        stream.write_all(&memory[..usize::try_from(back)?])?;
    }
    Ok(())
}
