"""A stranger's bytes cost a closed connection and a line in the log, nothing else."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest
import stranger
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

SAYINGS = {
    "random bytes": os.urandom(4096),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "half a handshake": stranger.hello()[:20],
    "nothing": b"",
    "a frame of 2^60 bytes": stranger.frame_of_two_to_the_sixty_bytes(),
    "a hello of 64 KiB": b"TCHS\0\1\xff\xff" + bytes(65535),
    "a proof before a hello": stranger.handshake(stranger.AUTH, bytes(64)),
    "an unknown version": b"TCHS\x63\1\x20\0" + bytes(32),
}
GREETING_LIMIT = 5.0
"""Seconds that a connection has to prove that it is of the job."""

SLACK = 3.0


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def nap(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


def keep_calling(worker: Worker, seconds: float) -> tuple[int, int, str]:
    """Calls w1 without a break until the test says stop, and then 50 times more.

    One more call lasts for `seconds` meanwhile. Counts the calls and the wrong results.
    """
    calls = wrong = 0
    tensor = torch.arange(1000.0)
    with worker.joined(timeout=25):
        long = rpc.rpc_async("w1", nap, args=(seconds,))
        rpc.rpc_sync("w1", double, args=(tensor,))
        worker.tell("calls are under way")
        end: int | None = None
        while end is None or calls < end:
            if end is None and worker.heard():
                end = calls + 50
            wrong += not torch.equal(rpc.rpc_sync("w1", double, args=(tensor,)), 2 * tensor)
            calls += 1
        return calls, wrong, long.wait()


def closed_after(connection: socket.socket, since: float) -> float | None:
    """Seconds from `since` until the other end had closed the connection; `None` if it did not."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return None
    return time.monotonic() - since


def say(connection: socket.socket, what: bytes) -> None:
    """Sends what the other end will take; it may hang up before all is said."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(what)


def claim_to_be_a_worker(connection: socket.socket) -> None:
    first = stranger.hello()
    say(connection, first)
    challenge = connection.recv(4096)
    assert challenge[:4] == b"TCHS"
    assert len(challenge) == 40
    say(connection, stranger.proof_of_a_wrong_secret(first, challenge))


Connect = Callable[[stranger.Address], socket.socket]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Makes connections that end with the test."""
    with ExitStack() as stack:
        yield lambda address: stack.enter_context(stranger.connect(address))


def test_strangers_are_turned_away_and_calls_go_on(group: Group, connect: Connect) -> None:
    group.start(keep_calling, serve, arguments=(GREETING_LIMIT + 1,))
    group.hear(0)
    target = group.pid(1)
    addresses = stranger.listening(target)
    assert {type(address) for address in addresses} == {tuple, str}  # TCP and Unix
    before = stranger.resident(target)

    began = time.monotonic()
    connections = {}
    for address in addresses:
        for name, what in SAYINGS.items():
            connections[name, address] = connect(address)
            say(connections[name, address], what)
        connections["a wrong secret", address] = connect(address)
        claim_to_be_a_worker(connections["a wrong secret", address])
    still_open = [
        key
        for key, connection in connections.items()
        if (closed := closed_after(connection, began)) is None or closed > GREETING_LIMIT + SLACK
    ]
    after = stranger.resident(target)
    group.tell(0, "stop")
    calls, wrong, long = group.finish()[0].value

    assert still_open == []
    assert after - before < 8
    assert calls >= 50
    assert wrong == 0
    assert long == "slept"
    log = group.log(1)
    assert log.count("connection refused") == len(connections), log
    assert log.count("GET / HTTP") == len(addresses)
    assert log.count("some job") == len(addresses)


def test_a_crowd_of_strangers_harms_nobody(group: Group, connect: Connect) -> None:
    """More silent connections than there are places, and more memory announced than there is."""
    group.start(keep_calling, serve, arguments=(1.0,))
    group.hear(0)
    target = group.pid(1)
    addresses = stranger.listening(target)
    before = stranger.resident(target)

    for number in range(400):
        connection = connect(addresses[number % len(addresses)])
        say(connection, stranger.hello() if number % 2 else b"")
    after = stranger.resident(target)
    group.tell(0, "stop")
    calls, wrong, _ = group.finish()[0].value

    assert after - before < 8
    assert calls >= 50
    assert wrong == 0
