"""What the transport over a process group relies on, shown for gloo: ranks are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from tensorcall.rpc import _gloo
from tensorcall.rpc._gloo import GlooGroup
from tensorcall.rpc._groups import CONTROL_TAG, Group
from torch._C._distributed_c10d import HashStore

LIMIT = timedelta(seconds=10)
SOON = 5.0


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[GlooGroup]]]:
    """Makes a group of a number of ranks; all of them are in this process."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    made: list[GlooGroup] = []

    def make(size: int) -> list[GlooGroup]:
        store = HashStore()
        with ThreadPoolExecutor(size) as pool:
            devices = [_gloo.device_of("file:///here") for _ in range(size)]
            ranks = pool.map(lambda r: GlooGroup(store, r, size, LIMIT, devices[r]), range(size))
            made.extend(ranks)
        return made

    yield make
    for group in made:
        group.close(False)


def at_once(*actions: Callable[[], Any]) -> list[Any]:
    """Runs each in a thread of its own; what they return, or raise."""

    def outcome(action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(actions)) as pool:
        return list(pool.map(outcome, actions))


def test_a_message_may_be_shorter_than_the_memory_for_it(make) -> None:
    first, second = make(2)
    memory = bytearray(64)

    _, source = at_once(
        lambda: first.send(bytearray(b"short"), 1, CONTROL_TAG),
        lambda: second.receive(memory, 0, CONTROL_TAG),
    )

    assert source == 0
    assert memory.startswith(b"short\0")


def test_messages_of_one_tag_keep_their_order_and_tags_do_not_wait_for_each_other(make) -> None:
    first, second = make(2)
    tags = (CONTROL_TAG, 2, 16385)
    got: dict[int, list[int]] = {tag: [] for tag in tags}

    def take(tag: int) -> None:
        for _ in range(50):
            memory = bytearray(8)
            second.receive(memory, 0, tag)
            got[tag].append(memory[0])

    def send(tag: int) -> None:
        for number in range(50):
            first.send(bytearray([number]), 1, tag)

    at_once(*(lambda t=t, f=f: f(t) for t in tags for f in (take, send)))

    assert got == {tag: list(range(50)) for tag in tags}


def test_abort_ends_every_wait_of_its_rank_soon_and_the_others_notice(make) -> None:
    groups = make(3)
    begun = time.monotonic()
    threading.Timer(0.1, groups[0].abort).start()

    outcomes = at_once(
        lambda: groups[0].receive(bytearray(8), 1, CONTROL_TAG),
        lambda: groups[0].receive(bytearray(8), 2, 5),
        lambda: groups[0].send(bytearray(8), 2, CONTROL_TAG),
        lambda: groups[1].receive(bytearray(8), 0, CONTROL_TAG),
    )

    assert time.monotonic() - begun < SOON
    assert [str(outcome) for outcome in outcomes[:3]] == ["the group was aborted"] * 3
    assert str(outcomes[3]).startswith("Connection closed by peer")
    with pytest.raises(ConnectionError, match="the group was aborted"):
        groups[0].send(bytearray(8), 1, CONTROL_TAG)


def test_ranks_go_on_without_the_one_that_is_lost(make) -> None:
    groups = make(3)
    groups[0].abort()
    memory = bytearray(8)

    outcomes = at_once(
        lambda: groups[1].receive(bytearray(8), 0, CONTROL_TAG),
        lambda: groups[1].receive(memory, 2, CONTROL_TAG),
        lambda: groups[2].send(bytearray(b"hello"), 1, CONTROL_TAG),
    )

    assert isinstance(outcomes[0], ConnectionError)
    assert outcomes[1:] == [2, None]
    assert memory.startswith(b"hello")


def test_abort_works_when_a_peer_is_gone_already_and_may_be_repeated(make) -> None:
    groups = make(3)
    groups[1].abort()
    begun = time.monotonic()
    threading.Timer(0.1, groups[0].abort).start()

    outcomes = at_once(
        lambda: groups[0].receive(bytearray(8), 1, CONTROL_TAG),
        lambda: groups[0].receive(bytearray(8), 2, CONTROL_TAG),
    )
    groups[0].abort()

    assert all(isinstance(outcome, ConnectionError) for outcome in outcomes)
    assert time.monotonic() - begun < SOON


def test_all_gather_takes_bytes_of_any_length(make) -> None:
    groups = make(3)
    given = [b"", b"one", b"\0" * 1000]

    gathered = at_once(*(lambda g=g: g.all_gather(given[g.rank], LIMIT) for g in groups))

    assert gathered == [given] * 3


def test_all_gather_does_not_wait_for_ever(make) -> None:
    first, _ = make(2)

    with pytest.raises(RuntimeError, match="timed out"):
        first.all_gather(b"alone", timedelta(seconds=0.2))


def test_a_group_of_one_connects_to_nobody() -> None:
    group = GlooGroup(HashStore(), 0, 1, LIMIT, None)

    assert isinstance(group, Group)
    assert group.all_gather(b"me", LIMIT) == [b"me"]
    group.abort()
    group.close(True)
