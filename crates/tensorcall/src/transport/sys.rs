//! System calls that the safe wrappers do not offer.
#![expect(unsafe_code, reason = "gather-write from memory that others may write to (MEM-1); forks (FORK-1)")]

use std::ffi::CStr;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use tensorcall_proto::connection::{Piece, Segment};

use crate::buffer::Region;

/// Most pieces in one gather-write; Linux takes 1024, small ones rarely come to more than this.
const MAX_PIECES: usize = 64;

/// Descriptors that are taken with one read. What a peer passes beyond that is closed by the system.
const MAX_PASSED: usize = 4;

/// A body segment that lies where its owner keeps it.
#[derive(Debug, Clone)]
pub(crate) struct BodySegment(pub(crate) Region);

impl Segment for BodySegment {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }
}

/// Writes as much of `pieces` to a non-blocking socket as it takes now. If it takes anything, the other end also
/// gets `passed`, at the latest with the first of these bytes.
///
/// # Errors
///
/// [`io::ErrorKind::WouldBlock`] if it takes nothing; others mean that the connection is gone.
pub(crate) fn send_pieces<'a>(
    socket: BorrowedFd<'_>,
    pieces: impl Iterator<Item = Piece<'a, BodySegment>>,
    passed: Option<BorrowedFd<'_>>,
) -> io::Result<u64> {
    let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
    let mut iovecs = [empty; MAX_PIECES];
    let mut count = 0;
    for piece in pieces.take(MAX_PIECES) {
        let (start, len) = match piece {
            Piece::Bytes(bytes) => (bytes.as_ptr(), bytes.len()),
            Piece::Part { segment, offset, len } => part(&segment.0, offset, len)?,
        };
        iovecs[count] = libc::iovec { iov_base: start.cast_mut().cast(), iov_len: len };
        count += 1;
    }
    // SAFETY: `msghdr` is plain data for which all zeroes is a valid value: no name, no control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = iovecs.as_mut_ptr();
    header.msg_iovlen = count as _;
    let mut control = Passed::new(passed);
    if passed.is_some() {
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = size_of::<Passed>();
    }
    // SAFETY: `header` names `count` initialised entries of `iovecs`. Each entry is either a slice
    // borrowed for `'a` or lies inside a region (`part` checked the bounds) whose owner the segment,
    // borrowed for `'a`, keeps alive. The kernel only reads; no `&[u8]` is formed over foreign memory,
    // so a concurrent write can garble bytes and nothing else (MEM-1). `control`, where it is named, is as the
    // kernel expects it and outlives the call, and the descriptor in it is open: `passed` borrows it.
    let sent = unsafe {
        libc::sendmsg(socket.as_raw_fd(), &raw const header, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    u64::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// The control message that passes one descriptor: a header, the number, padding.
#[repr(C)]
struct Passed {
    header: libc::cmsghdr,
    fd: RawFd,
}

impl Passed {
    fn new(fd: Option<BorrowedFd<'_>>) -> Self {
        // SAFETY: `cmsghdr` is plain data for which all zeroes is a valid value.
        let mut header: libc::cmsghdr = unsafe { std::mem::zeroed() };
        // Without the padding behind the number, as the kernel counts it.
        header.cmsg_len = size_of::<libc::cmsghdr>() + size_of::<RawFd>();
        header.cmsg_level = libc::SOL_SOCKET;
        header.cmsg_type = libc::SCM_RIGHTS;
        Self { header, fd: fd.map_or(-1, |fd| fd.as_raw_fd()) }
    }
}

/// Reads once from a non-blocking Unix socket into `targets`; returns how much came, whether a descriptor that came
/// with it was lost, and the others.
pub(crate) fn receive(
    socket: BorrowedFd<'_>,
    targets: &mut [IoSliceMut<'_>],
) -> rustix::io::Result<((usize, bool), Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PASSED))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = recvmsg(socket, targets, &mut control, flags)?;
    let mut passed = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            passed.extend(fds);
        }
    }
    // Where this process may have no more, the system drops them and says so here.
    Ok(((received.bytes, received.flags.contains(ReturnFlags::CTRUNC)), passed))
}

/// Runs `before` and `after_in_parent` around every fork of this process, on the thread that forks, and
/// `after_in_child` in the child, before anything else runs there.
pub(crate) fn at_fork(
    before: extern "C" fn(),
    after_in_parent: extern "C" fn(),
    after_in_child: extern "C" fn(),
) -> io::Result<()> {
    // SAFETY: functions with no arguments that live as long as this library, which is never unloaded while
    // they are registered: the C library takes handlers of an unloaded library off its list.
    let code = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

/// Closes a descriptor that a forked child has from its parent. Whoever owns it must not use it here.
pub(crate) fn close_inherited(fd: RawFd) {
    // SAFETY: `close` touches no memory. The number is that of a descriptor which [`Fd`](crate::fork::Fd)
    // owns in the parent and forgets in the child, so nobody else closes or uses it.
    let _ = unsafe { libc::close(fd) };
}

/// Puts a copy on write of `fd`'s memory in the place of a forked child's mapping of it. If the system does not do
/// that, the mapping stays as it is.
pub(crate) fn map_copy(start: usize, len: usize, fd: RawFd) {
    let start = std::ptr::with_exposed_provenance_mut(start);
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: `len` bytes at `start` are a mapping of all of `fd`, made by `SharedMemory` and not unmapped before
    // it leaves the table that this comes from. What is there afterwards are the same bytes, so whoever has a
    // pointer into it can go on. It is one system call, which may be made in a child of many threads.
    let _ = unsafe { libc::mmap(start, len, access, libc::MAP_PRIVATE | libc::MAP_FIXED, fd, 0) };
}

/// The addresses of a network interface, or of all; none if there is no such interface.
pub(crate) fn addresses_of(interface: Option<&str>) -> io::Result<Vec<IpAddr>> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `first` is a valid place for the list's address.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: null, or an entry of the list, which is freed below and not before.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: every entry has a name that ends in a zero, and lives as long as the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        if interface.is_none_or(|interface| name.to_bytes() == interface.as_bytes()) {
            found.extend(address_in(entry));
        }
    }
    // SAFETY: the list came from `getifaddrs` and no reference into it is left.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

fn address_in(entry: &libc::ifaddrs) -> Option<IpAddr> {
    // SAFETY: null, or an address that lives as long as its entry; every kind begins with its family.
    let family = unsafe { entry.ifa_addr.as_ref() }?.sa_family;
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: addresses of this family are `sockaddr_in`, and the list aligns them as such.
            let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: addresses of this family are `sockaddr_in6`.
            let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

fn part(region: &Region, offset: u64, len: u64) -> io::Result<(*const u8, usize)> {
    let within = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
    match within.filter(|&(offset, len)| offset <= region.len() && len <= region.len() - offset) {
        // `wrapping_add` is safe; the bounds above make it an address inside the region.
        Some((offset, len)) => Ok((region.as_ptr().wrapping_add(offset), len)),
        None => Err(io::Error::new(io::ErrorKind::InvalidInput, "piece outside its segment")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn pieces_arrive_in_order_and_parts_are_cut_right() {
        let (here, mut there) = UnixStream::pair().unwrap();
        let segment = BodySegment(Region::from_vec((0..100).collect()));
        let pieces = [Piece::Bytes(&b"head"[..]), Piece::Part { segment: &segment, offset: 10, len: 3 }];

        let sent = send_pieces(here.as_fd(), pieces.into_iter(), None).unwrap();

        drop(here);
        let mut bytes = Vec::new();
        there.read_to_end(&mut bytes).unwrap();
        assert_eq!(sent, 7);
        assert_eq!(bytes, b"head\x0a\x0b\x0c");
    }

    #[test]
    fn a_descriptor_comes_with_the_bytes_that_it_was_sent_with() {
        let (here, there) = UnixStream::pair().unwrap();
        let (reader, mut writer) = io::pipe().unwrap();
        let send = |bytes, passed| {
            send_pieces(here.as_fd(), std::iter::once(Piece::Bytes(bytes)), passed).unwrap();
        };
        send(&b"one"[..], None);
        send(b"two", Some(reader.as_fd()));
        drop(reader);

        let (mut bytes, mut passed) = ([0; 16], Vec::new());
        let mut count = 0;
        while count < 6 {
            let target = &mut [IoSliceMut::new(&mut bytes[count..])];
            let ((more, lost), fds) = receive(there.as_fd(), target).unwrap();
            assert!(!lost);
            count += more;
            passed.extend(fds);
        }

        assert_eq!(&bytes[..count], b"onetwo");
        writer.write_all(b"x").unwrap();
        let mut byte = [0; 1];
        std::fs::File::from(passed.pop().unwrap()).read_exact(&mut byte).unwrap();
        assert_eq!((byte, passed.len()), (*b"x", 0));
    }

    #[test]
    fn a_part_outside_its_segment_is_refused() {
        let (here, _there) = UnixStream::pair().unwrap();
        let segment = BodySegment(Region::from_vec(vec![0; 4]));

        let piece = Piece::Part { segment: &segment, offset: 2, len: 3 };
        let result = send_pieces(here.as_fd(), std::iter::once(piece), None);

        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
