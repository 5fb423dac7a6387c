"""Waiting for the host of a store."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from tensorcall.rpc import _waiting


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that are made, in no time."""
    made: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        made.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(_waiting.time, "sleep", sleep)
    monkeypatch.setattr(_waiting.time, "monotonic", lambda: now[0])
    return made


def answer(monkeypatch: pytest.MonkeyPatch, *answers: type[OSError] | None) -> list[Any]:
    """Lets attempts to connect end like this, and the later ones like the last."""
    attempts: list[Any] = []

    def connect(address: Any, _timeout: float) -> socket.socket:
        attempts.append(address)
        error = answers[min(len(attempts), len(answers)) - 1]
        if error is not None:
            raise error
        return socket.socket()

    monkeypatch.setattr(_waiting.socket, "create_connection", connect)
    return attempts


def test_who_comes_a_moment_early_is_there_soon_after_the_host(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    attempts = answer(monkeypatch, ConnectionRefusedError, ConnectionRefusedError, None)

    _waiting.until_listening("host", 1, 10.0)

    assert attempts == [("host", 1)] * 3
    assert sum(pauses) < 0.01


def test_nobody_is_waited_for_beyond_the_limit(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    attempts = answer(monkeypatch, ConnectionRefusedError)

    _waiting.until_listening("host", 1, 10.0)

    assert sum(pauses) == pytest.approx(10.0)
    assert len(attempts) < 100


def test_what_is_no_matter_of_time_is_left_to_the_store(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    attempts = answer(monkeypatch, socket.gaierror)

    _waiting.until_listening("no such host", 1, 10.0)

    assert len(attempts) == 1
    assert pauses == []
