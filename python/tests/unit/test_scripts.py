"""What TorchScript and torch.compile may hold of RPC, and script functions as targets."""

from __future__ import annotations

import linecache
import warnings

import pytest
import tensorcall
import tensorcall.rpc as rpc
import torch
from tensorcall.rpc import RRef

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls TorchScript deprecated

    @torch.jit.script
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @rpc.functions.async_execution
    @torch.jit.script
    def double_later(x: torch.Tensor) -> torch.jit.Future[torch.Tensor]:
        return torch.jit.fork(double, x)

    @rpc.functions.async_execution
    @torch.jit.script
    def double_now(x: torch.Tensor) -> torch.Tensor:
        return x * 2


def compile_call(name: str, module: object) -> None:
    source = f'def scripted(x: Tensor):\n    return rpc.{name}("me", torch.add, (x, x))\n'
    linecache.cache["<script>"] = (len(source), None, source.splitlines(keepends=True), "<script>")
    names = {"torch": torch, "rpc": module, "Tensor": torch.Tensor, "__name__": __name__}
    exec(compile(source, "<script>", "exec"), names)
    torch.jit.script(names["scripted"])


@pytest.mark.parametrize("name", ["rpc_sync", "rpc_async", "remote"])
def test_a_call_inside_torchscript_is_refused_when_it_is_compiled(name):
    with pytest.raises(
        RuntimeError, match=rf"Call it from Python instead; .*rpc\.{name}\(to, script_function"
    ):
        compile_call(name, rpc)


@pytest.mark.parametrize("name", ["rpc_sync", "rpc_async", "remote"])
def test_so_it_is_where_tensorcall_has_the_place_of_torchs(name, installed):
    with pytest.raises(
        RuntimeError, match=rf"Call it from Python instead; .*rpc\.{name}\(to, script_function"
    ):
        compile_call(name, installed)


def test_annotations_of_rrefs_compile(installed):
    def local(rref: RRef[torch.Tensor]) -> torch.Tensor:
        return rref.local_value()

    assert installed.is_available()
    assert "RRef[Tensor]" in str(torch.jit.script(local).graph)


@pytest.fixture
def installed():
    tensorcall.install()
    import torch.distributed.rpc

    yield torch.distributed.rpc
    tensorcall.uninstall()


def test_a_script_function_may_answer_by_a_future(alone):
    assert alone.rpc_sync("me", double_later, args=(torch.ones(1),)).item() == 2
    assert alone.rpc_async("me", double_later, args=[torch.ones(1)]).wait().item() == 2


def test_a_script_function_that_should_answer_by_a_future_must_return_one(alone):
    text = "^Async functions must return an IValue of Future type, but got Tensor"

    with pytest.raises(RuntimeError, match=text):
        alone.rpc_sync("me", double_now, args=(torch.ones(1),))


def test_arguments_of_such_a_function_are_checked_at_the_call(alone):
    with pytest.raises(RuntimeError, match=r"double_later\(\) expected at most 1 argument\(s\)"):
        alone.rpc_async("me", double_later, args=(torch.ones(1), 2))


def test_a_script_module_travels_with_its_code(alone):
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((1,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    module = torch.jit.script(Scale())

    got = alone.rpc_sync("me", identity, args=(module,))
    inside = alone.rpc_sync("me", identity, args=({"modules": [module]},))["modules"][0]

    for each in (got, inside):
        assert isinstance(each, torch.jit.ScriptModule)
        assert each(torch.ones(1)).item() == 3
    assert alone.rpc_sync("me", module, args=(torch.ones(1),)).item() == 3


def identity(value):
    return value


def call(x):
    y = x * 2
    z = rpc.rpc_sync("me", torch.add, args=(y, 1))
    return torch.sin(z) + rpc.rpc_async("me", torch.add, args=(y, 1)).wait()


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_breaks_the_graph_at_a_call(alone):
    compiled = torch.compile(call, backend="eager")

    assert torch.equal(compiled(torch.ones(3)), call(torch.ones(3)))
    assert torch._dynamo.explain(call)(torch.ones(3)).graph_break_count >= 1
    with pytest.raises(torch._dynamo.exc.Unsupported, match="tensorcall"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.ones(3))
