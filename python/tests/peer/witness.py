"""Which agent a rank used: the evidence that a test ran on tensorcall and not on torch's agent.

A drop-in that is not in place is easy to miss: the tests would pass on torch's own agent. So in
every rank torch's agents cannot be made (`forbid_torch_agents`), and each rank writes down which
agents were current and how many calls they sent (`Witness`); `verdict` judges what the ranks of
one test wrote.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

FORBIDDEN = "torch's own RPC agent is out of reach in the peer suite"
"""What a process is told that tries to make one of torch's agents."""

_ENGINE_VARIABLE = "TENSORCALL_PEER_ENGINE"
_BACKEND_VARIABLE = "TENSORCALL_BACKEND"


class Demands(Enum):
    """What the evidence must show; each includes those before it."""

    PLACE = 1
    """torch.distributed.rpc is tensorcall's, and torch's agents cannot be made."""
    AGENT = 2
    """A rank had an agent of tensorcall."""
    CALLS = 3
    """Such agents sent calls."""


def choose_engine(engine: str, backend: str) -> None:
    """Makes `engine` ("tensorcall" or "torch") the one that the tests of this process use, on `backend`.

    Call it before torch is imported. Processes forked later inherit the choice.
    """
    os.environ[_ENGINE_VARIABLE] = engine
    os.environ[_BACKEND_VARIABLE] = backend
    if engine == "tensorcall":
        import tensorcall

        _remember_torchs_classes()
        tensorcall.install()
        forbid_torch_agents()


_remembered: dict[str, type[Any]] = {}
"""Torch's own classes by name; installing puts others in their place."""


def _remember_torchs_classes() -> None:
    import torch
    import torch.distributed.rpc

    for name in ("RpcAgent", "TensorPipeAgent"):
        _remembered[name] = getattr(torch._C._distributed_rpc, name)


def forbid_torch_agents() -> None:
    """Lets the constructors of torch's RPC agents raise, now and when they are registered later.

    torch registers them when `torch.distributed.rpc` is first imported, so a process in which
    that never happens has none; then the two functions that would register them are wrapped.
    """
    import torch

    _break_agents()
    for name in ("_rpc_init", "_faulty_agent_init"):
        register = getattr(torch._C, name, None)
        if register is not None:
            setattr(torch._C, name, _breaking(register))


def _breaking(register: Any) -> Any:
    @functools.wraps(register)
    def registered(*args: Any) -> Any:
        done = register(*args)
        _break_agents()
        return done

    return registered


def _break_agents() -> None:
    for agent in torch_agents():
        agent.__init__ = _refuse


def torch_agents() -> list[type[Any]]:
    """The classes of torch's agents that exist in this process."""
    import torch

    places = (
        ("_distributed_rpc", "TensorPipeAgent"),
        ("_distributed_rpc_testing", "FaultyTensorPipeAgent"),
    )
    found = [
        _remembered.get(name) or getattr(getattr(torch._C, module, None), name, None)
        for module, name in places
    ]
    return [agent for agent in found if agent is not None]


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise RuntimeError(FORBIDDEN)


def torch_agents_are_out_of_reach() -> bool:
    """Whether each of torch's agents that exists here refuses to be made."""
    for agent in torch_agents():
        try:
            agent()
        except RuntimeError as error:
            if FORBIDDEN not in str(error):
                return False
        except TypeError:
            return False
        else:
            return False
    return True


class Witness:
    """What one rank saw, written to `folder` after each step, since a rank may end abruptly.

    It keeps no agent alive: what it needs is read off while the agent is the current one.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / f"witness-{rank}.json"
        self._in_place = False
        self._agents: dict[int, dict[str, Any]] = {}
        self._problems: list[str] = []

    def watch(self) -> None:
        """Looks at the current agent after each `init_rpc`, and before and after each `shutdown`."""
        from torch.distributed import rpc

        self._in_place = _is_ours(inspect.unwrap(rpc.init_rpc))
        self._write()
        init_rpc, shutdown = rpc.init_rpc, rpc.shutdown

        @functools.wraps(init_rpc)
        def watched_init(*args: Any, **kwargs: Any) -> Any:
            result = init_rpc(*args, **kwargs)
            self._look()
            return result

        @functools.wraps(shutdown)
        def watched_shutdown(*args: Any, **kwargs: Any) -> Any:
            agent = self._look()
            try:
                return shutdown(*args, **kwargs)
            finally:
                self._look(agent)  # leaving takes calls, too

        rpc.init_rpc, rpc.shutdown = watched_init, watched_shutdown

    def leave(self) -> None:
        """The rank's last look, after its test."""
        self._look()

    def _look(self, agent: Any = None) -> Any:
        from torch.distributed.rpc import api

        if agent is None and api._is_current_rpc_agent_set():
            agent = api._get_current_rpc_agent()
        if agent is not None:
            seen = self._agents.setdefault(
                id(agent),
                {
                    "class": _describe(agent),
                    "ours": False,
                    "torchs": _is_torchs(agent),
                    "group": getattr(agent, "_group", None) is not None,
                    "calls": 0,
                },
            )
            if _is_ours(type(agent)):
                seen["ours"] = True
                seen["calls"] = max(seen["calls"], self._calls_of(agent))
        self._write()
        return agent if self._agents.get(id(agent), {}).get("ours") else None

    def _calls_of(self, agent: Any) -> int:
        try:
            return int(agent.calls_sent())
        except Exception as error:  # whatever it is, the report should show it
            self._problems.append(f"calls_sent() of a tensorcall agent raised {error!r}")
            return 0

    def _write(self) -> None:
        engine = os.environ[_ENGINE_VARIABLE]
        seen = {
            "in_place": self._in_place,
            "out_of_reach": engine != "tensorcall" or torch_agents_are_out_of_reach(),
            "agents": list(self._agents.values()),
            "problems": self._problems,
        }
        draft = self._file.with_suffix(".draft")  # a rank may be killed while it writes
        draft.write_text(json.dumps(seen))
        draft.replace(self._file)


def _describe(agent: Any) -> str:
    return f"{type(agent).__module__}.{type(agent).__qualname__}"


def _is_ours(thing: Any) -> bool:
    """Whether a class or function comes from the tensorcall package, whatever it calls itself."""
    if str(getattr(thing, "__module__", "")).split(".")[0] == "tensorcall":
        return True
    try:
        import tensorcall

        home = Path(inspect.getfile(tensorcall)).resolve().parent
        return home in Path(inspect.getfile(thing)).resolve().parents
    except (ImportError, TypeError):
        return False


def _is_torchs(agent: Any) -> bool:
    import torch

    native = getattr(torch._C, "_distributed_rpc", None)
    base = _remembered.get("RpcAgent") or getattr(native, "RpcAgent", None)
    return base is not None and isinstance(agent, base)


def read(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of the test in `folder` wrote, one entry for each."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("witness-*.json"))]


def agents(ranks: list[dict[str, Any]]) -> list[str]:
    """The kinds of agent that any rank had."""
    return sorted({agent["class"] for seen in ranks for agent in seen["agents"]})


def calls(ranks: list[dict[str, Any]]) -> int:
    """How many calls the agents of all ranks had sent when last looked at."""
    return sum(agent["calls"] for seen in ranks for agent in seen["agents"])


def verdict(ranks: list[dict[str, Any]], demands: Demands) -> str | None:
    """Why the ranks' evidence does not show a run on tensorcall; `None` if it does."""
    if not ranks:
        return "no rank left evidence of the agent it used"
    for rank, seen in enumerate(ranks):
        if not seen["in_place"]:
            return f"rank {rank}: torch.distributed.rpc.init_rpc is not tensorcall's"
        if not seen["out_of_reach"]:
            return f"rank {rank}: one of torch's own agents could be made"
        if any(agent["torchs"] for agent in seen["agents"]):
            return f"rank {rank}: the current agent was torch's"
        expected = os.environ.get(_BACKEND_VARIABLE) == "process_group"
        if any(agent["ours"] and agent["group"] != expected for agent in seen["agents"]):
            return f"rank {rank}: its agent {'is not' if expected else 'is'} on a process group"
        if seen["problems"]:
            return f"rank {rank}: {seen['problems'][0]}"
    ours = any(agent["ours"] for seen in ranks for agent in seen["agents"])
    if demands is not Demands.PLACE and not ours:
        return f"no rank had a tensorcall agent, but {agents(ranks) or 'none'}"
    if demands is Demands.CALLS and calls(ranks) == 0:
        return "the call counters of the tensorcall agents did not move"
    return None
