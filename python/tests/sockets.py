"""The sockets of this process, by what the kernel says of them."""

from __future__ import annotations

import os
from pathlib import Path

_LISTENING = "0A"
_ACCEPTING = "00010000"


def listening() -> list[str]:
    """Those at which others can connect."""
    mine = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(descriptor))
        except FileNotFoundError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == _LISTENING and f"socket:[{columns[9]}]" in mine:
                found.append(f"{table} {columns[1]}")
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == _ACCEPTING and f"socket:[{columns[6]}]" in mine:
            found.append(f"unix {columns[7:]}")
    return sorted(found)
