"""RemoteModule and DistributedOptimizer with one worker, which is everybody."""

from __future__ import annotations

import pickle
import sys
import types
import warnings
from typing import Any

import pytest
import tensorcall.autograd as dist_autograd
import torch
from tensorcall.nn.api import remote_module
from tensorcall.nn.api.remote_module import RemoteModule
from tensorcall.optim import DistributedOptimizer
from tensorcall.rpc.internal import deserialize
from torch import nn


class Scale(nn.Module):
    def __init__(self, by: float = 2.0) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: torch.Tensor, *, plus: float = 0.0) -> torch.Tensor:
        return x * self.by + plus


class NoModule:
    pass


def test_it_is_made_there_and_used_like_a_module_here(alone: Any) -> None:
    module = RemoteModule("me/cpu", Scale, (3.0,))

    assert module(torch.ones(2), plus=1.0).tolist() == [4.0, 4.0]
    assert module.forward_async(torch.ones(2)).wait().tolist() == [3.0, 3.0]
    assert (module.on, module.device, module.is_scriptable) == ("me", "cpu", False)
    assert module.get_module_rref() is module.module_rref
    assert [rref.to_here().item() for rref in module.remote_parameters()] == [3.0]
    assert module.eval() is module
    assert module.module_rref.local_value().training is False
    assert repr(module) == "RemoteModule(on='me', device='cpu')"
    assert RemoteModule("rank:0", Scale).on == 0


def test_hooks_of_the_module_run(alone: Any) -> None:
    module = RemoteModule("me", Scale)
    module.module_rref.local_value().register_forward_hook(lambda module, args, result: result + 100)

    assert module(torch.ones(1)).tolist() == [102.0]


@pytest.mark.parametrize(
    ("place", "kind", "text"),
    [
        ("me/cpu/cpu", ValueError, "Could not parse remote_device"),
        ("/", ValueError, "Could not parse remote_device"),
        ("cpu", ValueError, "names no worker"),
        ("me/cpu2", RuntimeError, "Invalid device string"),
        ("nobody", RuntimeError, "could not find destination"),
    ],
)
def test_a_place_without_sense_is_refused(alone: Any, place: str, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        RemoteModule(place, Scale)


def test_what_makes_no_module_is_told_at_first_use(alone: Any) -> None:
    module = RemoteModule("me", NoModule)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>"):
        module.forward()


def test_without_an_agent_there_are_none() -> None:
    with pytest.raises(AssertionError, match="RemoteModule only works in RPC"):
        RemoteModule("me", Scale)


def test_every_method_of_a_module_works_or_is_refused_by_name(alone: Any) -> None:
    """LOG row 118: none does nothing without a word."""
    module: Any = RemoteModule("me", Scale)
    for name in remote_module._REFUSED:
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(module, name)()
    with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
        module.parameters()

    own = set(vars(remote_module._RemoteModule))
    public = {name for name in dir(nn.Module) if not name.startswith("_")}
    harmless = {
        *("T_destination", "call_super_init", "dump_patches", "forward"),
        *("get_extra_state", "set_extra_state"),  # torch's raise
        *("register_load_state_dict_post_hook", "register_load_state_dict_pre_hook"),
        *("register_state_dict_post_hook", "register_state_dict_pre_hook"),
    }
    assert public - own <= harmless


def test_it_travels_as_data_and_not_as_functions(alone: Any) -> None:
    """LOG row 100."""
    module = RemoteModule("me", Scale)
    module.extra = 1  # type: ignore[assignment]

    received = alone.rpc_sync("me", lists, args=([module],))[0]

    assert type(received) is RemoteModule
    assert received.forward(torch.ones(1)).tolist() == [2.0]
    assert list(vars(received)) == [
        *remote_module._REMOTE_MODULE_PICKLED_ATTRIBUTES,
        "forward_async",
        "forward",
    ]
    with pytest.raises(RuntimeError, match="Cannot pickle RemoteModule in python pickler"):
        pickle.dumps(module)


def lists(items: list[Any]) -> list[Any]:
    return list(items)


def test_a_message_cannot_bring_methods_of_its_own(alone: Any) -> None:
    class Planted:
        def __reduce__(self) -> Any:
            return remote_module._receive, ("me", "cpu", False, False, [print])

    with pytest.raises(TypeError, match="in the place of"):
        deserialize(pickle.dumps(Planted()), [])


def test_another_shell_for_the_same_module(alone: Any) -> None:
    module = RemoteModule("me", Scale)
    other = RemoteModule.init_from_module_rref("me", module.get_module_rref())

    assert other(torch.ones(1)).tolist() == [2.0]


def test_a_script_cannot_hold_one(alone: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="a RemoteModule cannot be part of a script"):
            torch.jit.script(RemoteModule("me", Scale))


def parameters(module: RemoteModule) -> list[nn.Parameter]:
    return list(module.module_rref.local_value().parameters())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD])
def test_a_step_is_that_of_the_local_optimizer_and_leaves_grad_alone(alone: Any, kind: Any) -> None:
    module, local = RemoteModule("me", Scale), Scale()
    optimizer = DistributedOptimizer(kind, module.remote_parameters(), lr=0.5)
    parameters(module)[0].grad = torch.tensor(77.0)
    assert optimizer.is_functional_optim == (kind is torch.optim.SGD)

    with dist_autograd.context() as number:
        dist_autograd.backward(number, [module(torch.ones(3)).sum()])
        optimizer.step(number)
    local(torch.ones(3)).sum().backward()
    kind(local.parameters(), lr=0.5).step()

    assert torch.equal(parameters(module)[0], local.by)
    assert parameters(module)[0].grad == torch.tensor(77.0)


def test_parameters_without_a_gradient_stay_as_they_are(alone: Any) -> None:
    used, unused = RemoteModule("me", Scale), RemoteModule("me", Scale)
    rrefs = [*used.remote_parameters(), *unused.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.ASGD, rrefs, lr=0.5)

    with dist_autograd.context() as number:
        dist_autograd.backward(number, [used(torch.ones(3)).sum()])
        optimizer.step(number)

    assert parameters(used)[0].item() != 2.0
    assert parameters(unused)[0].item() == 2.0
    with pytest.raises(RuntimeError, match="Could not find autograd context"):
        optimizer.step(number)


class Refuses(torch.optim.Optimizer):
    def __init__(self, params: Any, when: str) -> None:
        super().__init__(params, {})
        self.when = when
        if when == "made":
            raise ValueError("Error creating optimizer.")

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise ValueError("Error running optimizer.")


def test_errors_of_optimizers_are_raised_here(alone: Any) -> None:
    module = RemoteModule("me", Scale)
    with pytest.raises(ValueError, match=r"Error creating optimizer\."):
        DistributedOptimizer(Refuses, module.remote_parameters(), "made")
    optimizer = DistributedOptimizer(Refuses, module.remote_parameters(), when="used")
    with dist_autograd.context() as number, pytest.raises(ValueError, match=r"Error running optimizer\."):
        optimizer.step(number)


def test_install_puts_them_in_the_places_of_torchs() -> None:
    import tensorcall
    import torch.distributed.nn as distributed_nn
    import torch.distributed.optim as distributed_optim

    theirs: tuple[Any, ...] = distributed_nn.RemoteModule, distributed_optim.DistributedOptimizer
    tensorcall.install()
    try:
        assert distributed_nn.RemoteModule is RemoteModule
        assert distributed_optim.DistributedOptimizer is DistributedOptimizer
        assert sys.modules["torch.distributed.nn.api.remote_module"] is remote_module
        assert isinstance(distributed_optim.as_functional_optim, types.FunctionType)
    finally:
        tensorcall.uninstall()
    assert theirs == (distributed_nn.RemoteModule, distributed_optim.DistributedOptimizer)
