"""Somebody who is not of the job: finds where a process listens and says things there."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import socket
import struct
from pathlib import Path

Address = tuple[str, int] | str
"""Of a TCP socket, or the name of a Unix socket (an abstract one begins with a zero byte)."""

_LISTEN = "0A"
_ACCEPTS = 1 << 16

HELLO, AUTH = 1, 3


def listening(pid: int) -> list[Address]:
    """Every address on which a process takes connections."""
    links = (Path(f"/proc/{pid}/fd") / fd for fd in os.listdir(f"/proc/{pid}/fd"))
    inodes = {match[1] for link in links if (match := re.match(r"socket:\[(\d+)\]", _target(link)))}
    found: list[Address] = []
    for line in _table(pid, "tcp"):
        fields = line.split()
        if fields[3] == _LISTEN and fields[9] in inodes:
            found.append(_ipv4(fields[1]))
    for line in _table(pid, "tcp6"):
        fields = line.split()
        if fields[3] == _LISTEN and fields[9] in inodes:
            found.append(_ipv6(fields[1]))
    for line in _table(pid, "unix"):
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS and fields[6] in inodes:
            name = fields[7]
            found.append("\0" + name[1:] if name.startswith("@") else name)
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed in the meantime
        return ""


def _table(pid: int, name: str) -> list[str]:
    file = Path(f"/proc/{pid}/net/{name}")
    return file.read_text().splitlines()[1:] if file.exists() else []


def _ipv4(text: str) -> Address:
    host, port = text.split(":")
    return socket.inet_ntoa(bytes.fromhex(host)[::-1]), int(port, 16)


def _ipv6(text: str) -> Address:
    host, port = text.split(":")
    words = struct.unpack(">4I", bytes.fromhex(host))
    return socket.inet_ntop(socket.AF_INET6, struct.pack("<4I", *words)), int(port, 16)


def connect(address: Address) -> socket.socket:
    """A connection; every wait on it ends within ten seconds."""
    if isinstance(address, str):
        stranger = socket.socket(socket.AF_UNIX)
    else:
        stranger = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    stranger.settimeout(10)
    stranger.connect(address)
    return stranger


def resident(pid: int) -> float:
    """Resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]


def handshake(kind: int, body: bytes) -> bytes:
    """A handshake message: magic, version, kind, length, body (docs/wire-format.md)."""
    return b"TCHS" + struct.pack("<BBH", 0, kind, len(body)) + body


def hello(job: bytes = b"some job") -> bytes:
    """The first thing that a worker says to another."""
    return handshake(HELLO, os.urandom(32) + bytes([len(job)]) + job)


def proof_of_a_wrong_secret(first: bytes, challenge: bytes) -> bytes:
    """What a worker answers to a challenge, made with another secret than the job's."""
    worker = bytes([2]) + b"w0" + b"\0" + bytes([7])  # name, rank, incarnation
    body = challenge[8:40] + worker + bytes([1, 0, 0])  # calls rank 1, any life, to make calls
    said = b"TCHS" + struct.pack("<BBH", 0, AUTH, len(body) + 32) + body
    transcript = hashlib.sha256(first + challenge + said).digest()
    tag = b"tensorcall handshake: initiator\0"
    return said + hmac.digest(b"a wrong secret", tag + transcript, "sha256")


def frame_of_two_to_the_sixty_bytes() -> bytes:
    """The header of a frame that announces more than anybody has."""
    return struct.pack("<2sBBBBHIIQ", b"TC", 0, 1, 1, 1, 0, 1, 64, 1 << 60) + bytes(64)
