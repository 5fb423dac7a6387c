"""Workers on several hosts: network namespaces, joined by a cable that a test may cut.

To the kernel these are hosts of one boot id, as containers of a machine are, so that nothing but the
namespace tells that their Unix sockets do not reach each other.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from harness import Group, Worker, serve

_CLONE_NEWNS, _CLONE_NEWNET = 0x20000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_NOBODY = "02:00:00:00:00:99"
"""Frames for this one get lost, without a word to whoever sent them."""
PORT = 29500
"""Free in a namespace of its own."""


class Hosts:
    """Hosts 1 and 2, with addresses 10.77.0.N and fd77::N on eth0, 10.78.0.N on eth1."""

    def __init__(self, prefix: str) -> None:
        self.names = {number: f"{prefix}-{number}" for number in (1, 2)}
        for number in self.names:
            self._ip("netns", "add", self.names[number])
        for network in (0, 1):
            ends = [("name", f"eth{network}", "netns", self.names[number]) for number in self.names]
            self._ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for number in self.names:
            self.ip(number, "link", "set", "lo", "up")
            for network in (0, 1):
                self.ip(number, "address", "add", f"10.{77 + network}.0.{number}/24", "dev", f"eth{network}")
                self.ip(number, "link", "set", f"eth{network}", "up")
            self.ip(number, "address", "add", f"fd77::{number}/64", "dev", "eth0", "nodad")

    def ip(self, number: int, *command: str) -> None:
        """Runs ``ip`` on a host."""
        self._ip("-n", self.names[number], *command)

    def cut(self, number: int) -> None:
        """From now on nothing that a host sends arrives."""
        for network in (0, 1):
            other = f"10.{77 + network}.0.{3 - number}"
            self.ip(
                number,
                "neigh",
                "replace",
                other,
                "lladdr",
                _NOBODY,
                "nud",
                "permanent",
                "dev",
                f"eth{network}",
            )

    def remove(self) -> None:
        for name in self.names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _ip(self, *command: str) -> None:
        subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    prefix = f"tensorcall-{os.getpid()}"
    try:
        made = Hosts(prefix)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        for number in (1, 2):
            subprocess.run(f"ip netns delete {prefix}-{number}", shell=True, capture_output=True, check=False)
        pytest.skip(f"no network namespaces here: {reason.strip()}")
    yield made
    made.remove()


def move_to(name: str, knows: str = "") -> None:
    """Take this process to a host, which knows other hosts by the names in the text `knows`."""
    os.environ.pop("TP_SOCKET_IFNAME", None)
    libc = ctypes.CDLL(None, use_errno=True)

    def checked(result: int) -> None:
        assert result == 0, os.strerror(ctypes.get_errno())

    with open(f"/var/run/netns/{name}", "rb") as namespace:
        checked(libc.setns(namespace.fileno(), _CLONE_NEWNET))
    if knows:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(knows)
            file.flush()
            checked(libc.unshare(_CLONE_NEWNS))
            checked(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
            checked(libc.mount(file.name.encode(), b"/etc/hosts", None, _MS_BIND, None))


def meet(
    worker: Worker, names: dict[int, str], init_method: str, hosts: list[str], environment: dict[str, str]
) -> Any:
    """Join from two hosts, call both ways, and tell where this worker listens."""
    number = worker.rank + 1
    move_to(names[number], hosts[worker.rank] if hosts else "")
    os.environ.update(environment)
    worker.init_method = init_method
    with worker.joined(timeout=15):
        peer = f"w{1 - worker.rank}"
        assert rpc.rpc_sync(peer, max, args=(1, 2)) == 2
        assert rpc.rpc_sync(peer, torch.add, args=(torch.ones(1 << 20), 1))[-1] == 2
        contact = rpc.api._get_current_rpc_agent()._native.contact()
    return json.loads(contact)["addresses"]


def tcp(addresses: list[str]) -> str:
    [found] = [address.partition(":")[2] for address in addresses if address.startswith("tcp:")]
    return found.rpartition(":")[0]


def unix_host(addresses: list[str]) -> str:
    [found] = [address for address in addresses if address.startswith("unix:")]
    return found.partition("/")[0]


@pytest.mark.parametrize(
    ("init_method", "environment", "listened_at"),
    [
        (f"tcp://10.77.0.1:{PORT}", {}, "10.77.0.{}"),
        (f"tcp://10.78.0.1:{PORT}", {}, "10.78.0.{}"),
        (f"tcp://10.78.0.1:{PORT}", {"TENSORCALL_IFACE": "eth0"}, "10.77.0.{}"),
        (f"tcp://10.77.0.1:{PORT}", {"TP_SOCKET_IFNAME": "eth1"}, "10.78.0.{}"),
        (f"tcp://[fd77::1]:{PORT}", {}, "[fd77::{}]"),
    ],
    ids=["one network", "the other network", "an interface", "what torch reads", "IPv6"],
)
def test_hosts_meet_on_the_network_where_the_rendezvous_is(
    group: Group, hosts: Hosts, init_method: str, environment: dict[str, str], listened_at: str
) -> None:
    """LOG rows 39 and 40: every address that is published can be reached."""
    seen = group.run(meet, meet, arguments=(hosts.names, init_method, [], environment))

    assert [tcp(addresses) for addresses in seen] == [listened_at.format(1), listened_at.format(2)]
    # One boot, two network namespaces: the Unix socket of one is not tried by the other.
    assert unix_host(seen[0]) != unix_host(seen[1])
    assert unix_host(seen[0]).partition(".")[0] == unix_host(seen[1]).partition(".")[0]


def test_a_host_that_knows_itself_as_loopback_is_reached_by_others(group: Group, hosts: Hosts) -> None:
    """LOG row 39: its own name, which is where the workers meet, resolves to 127.0.1.1 there."""
    known = ["127.0.0.1 localhost\n127.0.1.1 head\n", "127.0.0.1 localhost\n10.77.0.1 head\n"]

    seen = group.run(meet, meet, arguments=(hosts.names, f"tcp://head:{PORT}", known, {}))

    assert [tcp(addresses) for addresses in seen] == ["10.77.0.1", "10.77.0.2"]


SILENCE = 1.5
"""Seconds after which a silent peer is lost."""


def wait_for(seconds: float) -> str:
    time.sleep(seconds)
    return "waited"


def be_cut_off(worker: Worker, names: dict[int, str]) -> None:
    os.environ["TENSORCALL_SILENCE_LIMIT"] = str(SILENCE)
    move_to(names[worker.rank + 1])
    worker.init_method = f"tcp://10.77.0.1:{PORT}"
    worker.start(timeout=60)
    pending = [rpc.rpc_async("w1", wait_for, args=(60,)) for _ in range(3)]
    rpc.rpc_sync("w1", max, args=(1, 2))
    worker.tell("calls are under way")
    worker.hear()
    began = time.monotonic()
    said = []
    for future in pending:
        with pytest.raises(RuntimeError) as raised:
            future.wait()
        said.append(str(raised.value))
    seconds = time.monotonic() - began
    worker.tell({"said": said, "seconds": seconds})
    rpc.shutdown(graceful=False)


def stay_on_the_other_side(worker: Worker, names: dict[int, str]) -> None:
    os.environ["TENSORCALL_SILENCE_LIMIT"] = str(SILENCE)
    move_to(names[worker.rank + 1])
    worker.init_method = f"tcp://10.77.0.1:{PORT}"
    serve(worker)


@pytest.mark.parametrize("cut", [1, 2], ids=["towards the callee", "towards the caller"])
def test_when_packets_get_lost_pending_calls_fail_in_time(group: Group, hosts: Hosts, cut: int) -> None:
    """LOG row 33, without a connection that ends."""
    group.start(be_cut_off, stay_on_the_other_side, arguments=(hosts.names,))
    group.hear(0)
    hosts.cut(cut)
    group.tell(0, "cut")

    seen = group.hear(0)
    group.kill(1)
    group.finish(expect_killed=(1,))

    assert seen["seconds"] < 3 * SILENCE
    for text in seen["said"]:
        assert "w1" in text
