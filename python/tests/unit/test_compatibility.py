"""COMPATIBILITY.md has a line for every public name of torch, and its states are true."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest
import tensorcall.autograd
import tensorcall.rpc

PAGE = Path(__file__).resolve().parents[3] / "COMPATIBILITY.md"
PACKAGES = ("rpc", "autograd", "optim", "nn")
STATES = ("works", "partly", "not yet", "torch's")

INTERNAL = {
    "rpc": [
        "_set_rpc_timeout",
        "_init_rpc_backend",
        "_get_debug_info",
        "_rref_context_get_debug_info",
        "_is_current_rpc_agent_set",
        "_get_current_rpc_agent",
        "_enable_jit_rref_pickle",
        "_disable_jit_rref_pickle",
        "_server_process_global_profile",
        "PyRRef._deserialize",
        "api._get_current_rpc_agent",
        "api._is_current_rpc_agent_set",
        "api._set_and_start_rpc_agent",
        "api._init_rpc_states",
        "api._all_gather",
        "api._barrier",
        "api._wait_all",
        "api._wait_all_workers",
        "api._thread_local_var",
        "api._use_rpc_pickler",
        "api._default_pickler",
        "api._ignore_rref_leak",
        "api._broadcast_to_followers",
        "api._delete_all_user_and_unforked_owner_rrefs",
        "internal._internal_rpc_pickler",
        "internal._build_rpc_profiling_key",
    ],
    "autograd": [
        "_init",
        "_new_context",
        "_release_context",
        "_retrieve_context",
        "_current_context",
        "_is_valid_context",
        "_get_max_id",
        "_get_debug_info",
    ],
}
"""Names with an underscore that torch's modules and tests, and known programs, use from outside."""

_MISSING = object()


def rows(package: str) -> dict[str, tuple[str, str]]:
    """State and remark by name, from the section on a package."""
    _, _, rest = PAGE.read_text().partition(f"\n## torch.distributed.{package}\n")
    section = rest.partition("\n## ")[0]
    found = re.findall(r"^\| `([\w.]+)` \| ([^|]*) \| ?([^|]*)\|$", section, re.MULTILINE)
    return {name: (state.strip(), remark.strip()) for name, state, remark in found}


def modules(package: str) -> Iterator[ModuleType]:
    root = importlib.import_module(f"torch.distributed.{package}")
    yield root
    for info in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        yield importlib.import_module(info.name)


def public_names(module: ModuleType, package: str) -> set[str]:
    """What a module says is public and has, and what it has of its package's own without an underscore."""
    homes = (f"torch.distributed.{package}", f"torch._C._distributed_{package}")
    names = {name for name in getattr(module, "__all__", ()) if hasattr(module, name)}
    for name, value in vars(module).items():
        if name.startswith("_") or inspect.ismodule(value) or isinstance(value, TypeVar):
            continue
        home = getattr(value, "__module__", None)
        is_constant = name.isupper() and module.__name__.endswith(".constants")
        if is_constant or (isinstance(home, str) and home.startswith(homes)):
            names.add(name)
    return names


def look_up(root: ModuleType, name: str) -> Any:
    """What a name of a package stands for, submodules imported as needed; `_MISSING` if nothing."""
    found: Any = root
    for part in name.split("."):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            try:
                importlib.import_module(f"{found.__name__}.{part}")
            except ImportError:
                return _MISSING
        found = getattr(found, part, _MISSING)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_of_torch_has_a_line(package: str) -> None:
    with warnings.catch_warnings():
        # Importing torch's modules may warn that they are deprecated.
        warnings.simplefilter("ignore")
        found = list(modules(package))
    root, table = found[0], rows(package)
    known = [look_up(root, name) for name in table]

    missing = [
        f"{module.__name__}.{name}"
        for module in found
        for name in sorted(public_names(module, package))
        if name not in table and not any(getattr(module, name) is value for value in known)
    ]

    assert missing == []


@pytest.mark.parametrize("package", INTERNAL)
def test_every_internal_name_that_others_use_has_a_line(package: str) -> None:
    assert [name for name in INTERNAL[package] if name not in rows(package)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_line_is_about_a_name_of_torch_and_has_a_state(package: str) -> None:
    root = importlib.import_module(f"torch.distributed.{package}")
    for name, (state, _) in rows(package).items():
        assert state in STATES, name
        assert look_up(root, name) is not _MISSING, name


@pytest.mark.parametrize(("package", "ours"), [("rpc", tensorcall.rpc), ("autograd", tensorcall.autograd)])
def test_names_are_there_or_absent_as_the_table_says(package: str, ours: ModuleType) -> None:
    for name, (state, remark) in rows(package).items():
        elsewhere = re.match(r"as `([\w.]+)` only", remark)
        is_there = look_up(ours, elsewhere[1] if elsewhere else name) is not _MISSING
        if state == "not yet":
            assert ("*absent*" in remark) != ("*raises*" in remark), name
            assert is_there == ("*raises*" in remark), name
        else:
            assert is_there, name
