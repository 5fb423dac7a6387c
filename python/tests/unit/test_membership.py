"""How workers meet in the store, each a thread here with a store of its own."""

from __future__ import annotations

import json
import re
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from tensorcall import _tensorcall
from tensorcall.rpc import _membership
from tensorcall.rpc._membership import Deadline, _Meeting


def meet(path, size, entries, seconds=5.0, ranks=None, shared=None):
    """Run the meeting of `entries`; returns the roster or the error of each."""
    results = {}

    def member(number, rank, entry):
        store = shared or dist.FileStore(str(path), size)
        store.set_timeout(timedelta(seconds=20))
        keys = _membership.keys_of(store)
        meeting = _Meeting(keys, rank, size, Deadline(seconds))
        try:
            job = _membership.agree_on_job(keys)
            if "error" in entry:
                meeting.spoil(entry["error"])
                raise RuntimeError(entry["error"])
            meeting.enter(entry | {"secret": _membership._fingerprint(job[1], job[0])})
            roster = meeting.roster()
            meeting.wait_until_all_serve()
            results[number] = job, roster
        except Exception as error:
            results[number] = error

    threads = []
    for number, entry in enumerate(entries):
        if entry is not None:
            rank = number if ranks is None else ranks[number]
            threads.append(threading.Thread(target=member, args=(number, rank, entry)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def entry(name, size):
    devices = {"count": 0, "maps": {}, "devices": []}
    return {"name": name, "contact": json.dumps({"at": name}), "world_size": size, "devices": devices}


def test_all_learn_the_same_roster_and_secret(tmp_path):
    results = meet(tmp_path / "s", 4, [entry(f"w{n}", 4) for n in range(4)])

    assert len({json.dumps([job[0], job[1].hex(), roster]) for job, roster in results.values()}) == 1
    assert [name for name, _, _ in results[2][1]] == ["w0", "w1", "w2", "w3"]
    assert [rank for _, rank, _ in results[2][1]] == [0, 1, 2, 3]
    assert len(results[0][0][1]) == 32


def test_a_name_that_is_not_unique_is_told_to_all(tmp_path):
    results = meet(tmp_path / "s", 3, [entry("same", 3), entry("other", 3), entry("same", 3)])

    assert {str(error) for error in results.values()} == {
        "RPC worker name same is not unique. Workers 2 and 0 share the same name."
    }


def test_who_did_not_come_is_named_to_all_in_bounded_time(tmp_path):
    begin = time.monotonic()

    results = meet(tmp_path / "s", 4, [entry("a", 4), None, entry("c", 4), None], seconds=0.5)

    assert time.monotonic() - begin < 5
    assert len(results) == 2
    for error in results.values():
        assert "missing rank(s) [1, 3] of world size 4" in str(error)


def test_without_rank_0_the_others_end_in_bounded_time(tmp_path):
    results = meet(tmp_path / "s", 2, [None, entry("b", 2)], seconds=0.5)

    assert "missing rank(s) [0]" in str(results[1])


def test_two_workers_with_one_rank_are_told_at_once(tmp_path):
    begin = time.monotonic()

    results = meet(tmp_path / "s", 2, [entry("a", 2), entry("b", 2)], ranks=[0, 0])

    assert time.monotonic() - begin < 3
    assert len(results) == 2
    assert all("two workers claim rank 0" in str(error) for error in results.values())


def test_who_waits_for_a_rank_0_that_comes_after_a_mistake_is_told_at_once():
    store, begin = dist.HashStore(), time.monotonic()

    early = meet(None, 3, [entry("b", 3), entry("c", 3)], ranks=[2, 2], shared=store)
    late = meet(None, 3, [entry("a", 3)], shared=store)

    assert time.monotonic() - begin < 3
    assert len(early) == 2
    assert all("two workers claim rank 2" in str(error) for error in [*early.values(), late[0]])


def test_different_world_sizes_are_told_to_all(tmp_path):
    results = meet(tmp_path / "s", 2, [entry("a", 2), entry("b", 3)])

    assert {str(error) for error in results.values()} == {"rank 0 was given world size 2, rank 1 3"}


def test_an_error_of_one_worker_is_told_to_all(tmp_path):
    results = meet(tmp_path / "s", 3, [entry("a", 3), {"error": "worker 'b' cannot join: broken"}, None])

    assert {str(error) for error in results.values()} == {"worker 'b' cannot join: broken"}


def test_a_given_secret_does_not_go_through_the_store(monkeypatch):
    monkeypatch.setenv("TENSORCALL_SECRET", "xyzzy")

    store = dist.HashStore()
    results = meet(None, 2, [entry("a", 2), entry("b", 2)], shared=store)

    assert results[0][0][1] == results[1][0][1] == b"xyzzy"
    assert json.loads(dist.PrefixStore("tensorcall//", store).get("job"))["secret"] is None


def test_a_secret_can_come_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("from a file\n")
    monkeypatch.setenv("TENSORCALL_SECRET_FILE", str(tmp_path / "secret"))

    assert _membership._given_secret() == b"from a file"


def test_a_worker_without_the_secret_of_the_job_gets_none(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("TENSORCALL_SECRET", "xyzzy")
    job, _ = _membership.agree_on_job(store)
    monkeypatch.delenv("TENSORCALL_SECRET")

    assert _membership.agree_on_job(store) == (job, None)


def with_secrets(*secrets):
    return [
        entry(f"w{rank}", len(secrets)) | {"secret": _membership._fingerprint(secret, "job")}
        for rank, secret in enumerate(secrets)
    ]


def test_different_secrets_are_an_error_that_names_the_ranks():
    text = _membership._fault(with_secrets(b"one", b"other", b"one", None), 4)

    assert "rank(s) [0, 2] have one, rank(s) [1] have another, rank(s) [3] have no secret" in text
    assert _membership._fault(with_secrets(b"one", b"one"), 2) is None


def test_a_fingerprint_belongs_to_one_job_and_does_not_hold_the_secret():
    first, second = (_membership._fingerprint(b"xyzzy", job) for job in ("a", "b"))

    assert first != second
    assert len(first) == 16
    assert "xyzzy" not in first


def test_a_restart_by_torchrun_does_not_meet_the_keys_of_the_first_run(monkeypatch):
    store = dist.HashStore()
    jobs = set()
    for restart in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        jobs.add(_membership.agree_on_job(_membership.keys_of(store))[0])

    assert len(jobs) == 2


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("a while", 'must be a number, but is "a while"'),
        ("-1", 'must be a number, but is "-1"'),
        ("0.5", 'must be a number, but is "0.5"'),
        ("1000001", "must be at most 1000000 microseconds, but is 1000001"),
    ],
)
def test_a_busy_poll_that_is_none_is_refused(monkeypatch, value, why):
    monkeypatch.setenv("TENSORCALL_BUSY_POLL", value)

    with pytest.raises((RuntimeError, ValueError)) as raised:
        _tensorcall.Agent("w", 0, job="j", secret=b"s", num_worker_threads=1, host=None, handler=object())

    assert str(raised.value) == f"environment variable TENSORCALL_BUSY_POLL {why}"


def test_workers_listen_where_the_others_meet(monkeypatch):
    """LOG row 39."""
    for name in ("TENSORCALL_ADDR", "TENSORCALL_IFACE", "TP_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "localhost")

    def ip(init_method):
        return _tensorcall.listening(_membership.meeting_host(init_method))[0]

    assert ip("file:///tmp/x") == "127.0.0.1"
    assert ip("tcp://127.0.0.1:29500") == "127.0.0.1"
    assert ip("env://") in ("127.0.0.1", "::1")
    monkeypatch.setenv("MASTER_ADDR", "no.such.host.invalid")
    with pytest.raises(RuntimeError, match=re.escape("no.such.host.invalid")):
        ip("env://")
    monkeypatch.setenv("TP_SOCKET_IFNAME", "lo")
    assert ip("env://") == "127.0.0.1"
    monkeypatch.setenv("TENSORCALL_IFACE", "nothing0")
    with pytest.raises(RuntimeError, match="nothing0"):
        ip("env://")
    monkeypatch.setenv("TENSORCALL_ADDR", "10.1.2.3")
    assert ip("env://") == "10.1.2.3"


@pytest.mark.parametrize(
    ("address", "warned"),
    [("tcp:127.0.0.1:9", False), ("tcp:[::1]:9", False), ("unix:here/name", False), ("tcp:10.1.2.3:9", True)],
)
def test_a_secret_in_the_store_is_warned_of_where_other_hosts_can_come(address, warned, caplog):
    _membership._warn_if_reachable(json.dumps({"incarnation": "1", "addresses": [address]}))

    assert ("TENSORCALL_SECRET" in caplog.text) == warned


def test_a_limit_of_0_never_ends():
    assert Deadline(0).left() == timedelta(milliseconds=2**31 - 1)
    assert Deadline.of_rendezvous(0.5).seconds == _membership.MIN_PATIENCE
    assert Deadline.of_rendezvous(60).seconds == 60
