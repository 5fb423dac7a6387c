"""torch's own RPC test classes, taken from the installed wheel and mixed with our fixtures.

torch's ``test/distributed/rpc/test_tensorpipe_agent.py`` is not in the wheel; it only combines the
classes below with a fixture, and so does this file, under the same names. Nothing is copied: the
classes are imported, and what differs is how their ranks start (forked from a process that has
torch loaded) and that each rank is watched (`witness.py`).
"""

from __future__ import annotations

import importlib
import os
import unittest
from typing import Any, NamedTuple

_HOME = "torch.testing._internal.distributed."
_TENSORPIPE = (_HOME + "rpc.tensorpipe_rpc_agent_test_fixture", "TensorPipeRpcAgentTestFixture")
_FAULTY = (_HOME + "rpc.faulty_rpc_agent_test_fixture", "FaultyRpcAgentTestFixture")


class Recipe(NamedTuple):
    """Where a test class and the fixture that it is mixed with are found."""

    module: str
    test_class: str
    fixture: tuple[str, str]


def _recipes() -> dict[str, Recipe]:
    tensorpipe = {
        "rpc.rpc_test": [
            "RpcTest",
            "TensorPipeAgentRpcTest",
            "CudaRpcTest",
            "TensorPipeAgentCudaRpcTest",
        ],
        "rpc.dist_autograd_test": [
            "DistAutogradTest",
            "TensorPipeAgentDistAutogradTest",
            "CudaDistAutogradTest",
            "TensorPipeCudaDistAutogradTest",
        ],
        "rpc.dist_optimizer_test": ["DistOptimizerTest"],
        "rpc.examples.parameter_server_test": ["ParameterServerTest"],
        "rpc.examples.reinforcement_learning_rpc_test": ["ReinforcementLearningRpcTest"],
        "rpc.jit.rpc_test": ["JitRpcTest"],
        "rpc.jit.dist_autograd_test": ["JitDistAutogradTest"],
        "nn.api.remote_module_test": [
            "RemoteModuleTest",
            "ThreeWorkersRemoteModuleTest",
            "CudaRemoteModuleTest",
        ],
        "ddp_under_dist_autograd_test": [
            "DdpUnderDistAutogradTest",
            "DdpComparisonTest",
            "CudaDdpComparisonTest",
        ],
    }
    faulty = {
        "rpc.faulty_agent_rpc_test": ["FaultyAgentRpcTest"],
        "rpc.dist_autograd_test": ["FaultyAgentDistAutogradTest"],
        "rpc.jit.rpc_test_faulty": ["JitFaultyAgentRpcTest"],
    }
    table = {}
    for prefix, fixture, modules in (
        ("TensorPipe", _TENSORPIPE, tensorpipe),
        ("Faulty", _FAULTY, faulty),
    ):
        for module, classes in modules.items():
            for name in classes:
                table[prefix + name] = Recipe(_HOME + module, name, fixture)
    return table


RECIPES = _recipes()
"""Suite name, as in a test's id, to what it is made of."""


def add_module(name: str) -> None:
    """Adds the test classes that module `name` of this project defines (for the runner's tests)."""
    for attribute, value in vars(importlib.import_module(name)).items():
        if getattr(value, "__module__", None) == name and attribute.endswith("Test"):
            RECIPES[attribute] = Recipe(name, attribute, _TENSORPIPE)


def load(suite: str) -> list[str]:
    """Imports the module that `suite` comes from; the names of its tests.

    The fixture is left to `build`: importing the faulty one adds a backend to the process, which
    some tests of other suites would notice.
    """
    recipe = RECIPES[suite]
    _allow_calls_in_scripts()
    test_class = getattr(importlib.import_module(recipe.module), recipe.test_class)
    return unittest.TestLoader().getTestCaseNames(test_class)  # type: ignore[return-value]


def _allow_calls_in_scripts() -> None:
    """Lets modules be loaded that hold script functions with calls inside (see tensorcall.rpc._scripts).

    They compile, and fail if they are called; those tests are not among the expected ones.
    """
    if os.environ.get("TENSORCALL_PEER_ENGINE") == "tensorcall":
        from tensorcall.rpc import _scripts

        _scripts.refusing = False


def build(suite: str) -> type[Any]:
    """The class called `suite`, ready to run.

    The class becomes an attribute of this module, because some tests send methods of their own
    class to other workers, and pickle looks classes up by module and name.
    """
    from ranks import ForkedRanks

    recipe = RECIPES[suite]
    test_class = getattr(importlib.import_module(recipe.module), recipe.test_class)
    fixture = getattr(importlib.import_module(recipe.fixture[0]), recipe.fixture[1])
    built = type(suite, (test_class, fixture, ForkedRanks), {"__module__": __name__})
    globals()[suite] = built
    return built
