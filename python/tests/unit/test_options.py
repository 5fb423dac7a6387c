"""Options, backends and worker infos."""

from __future__ import annotations

import copy
import datetime
import pickle

import pytest
import tensorcall.rpc as rpc
import torch
from tensorcall.rpc import backend_registry


def test_options_have_torchs_defaults():
    options = rpc.TensorPipeRpcBackendOptions()

    assert options.num_worker_threads == 16
    assert options.rpc_timeout == 60.0
    assert options.init_method == "env://"
    assert options.device_maps == {}
    assert options.devices == []


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        rpc.TensorPipeRpcBackendOptions(3)


def test_timeout_that_is_not_a_number_is_refused():
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        rpc.TensorPipeRpcBackendOptions(rpc_timeout=datetime.timedelta(seconds=1))


def test_negative_timeout_is_refused():
    with pytest.raises(RuntimeError, match="RPC Timeout must be non-negative"):
        rpc.RpcBackendOptions(-1)
    options = rpc.RpcBackendOptions()
    with pytest.raises(RuntimeError, match="RPC Timeout must be non-negative"):
        options.rpc_timeout = -0.5


def test_no_worker_threads_are_refused():
    with pytest.raises(RuntimeError, match="num_worker_threads must be positive, got 0"):
        rpc.TensorPipeRpcBackendOptions(num_worker_threads=0)


def test_unknown_transport_and_channel_are_refused():
    with pytest.raises(RuntimeError, match="Unknown transport: pigeon"):
        rpc.TensorPipeRpcBackendOptions(_transports=["uv", "pigeon"])
    with pytest.raises(RuntimeError, match="Unknown channel: drum"):
        rpc.TensorPipeRpcBackendOptions(_channels=["drum"])


def test_subclass_may_call_the_base_constructor_directly():
    class Foo(rpc.RpcBackendOptions):
        def __init__(self):
            rpc.RpcBackendOptions.__init__(self)
            self.init_method = "tcp://x"

    assert Foo().init_method == "tcp://x"


def test_device_maps_are_one_to_one():
    with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping, trying to map"):
        rpc.TensorPipeRpcBackendOptions(device_maps={"w": {0: 1, 2: 1}})

    options = rpc.TensorPipeRpcBackendOptions()
    options.set_device_map("w", {0: 1})
    options.set_device_map("w", {1: 0})
    assert options.device_maps["w"][torch.device("cuda:1")] == torch.device("cuda:0")
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping"):
        options.set_device_map("w", {0: 2})


def test_device_maps_take_numbers_names_and_devices():
    """LOG row 53."""
    options = rpc.TensorPipeRpcBackendOptions(device_maps={"w": {0: "cuda:1"}})
    options.set_device_map("w", {torch.device("cuda:1"): 0, "cuda:2": torch.device("cuda", 2)})

    assert {str(here): str(there) for here, there in options.device_maps["w"].items()} == {
        "cuda:0": "cuda:1",
        "cuda:1": "cuda:0",
        "cuda:2": "cuda:2",
    }


def test_devices_must_be_accelerators():
    with pytest.raises(ValueError, match="expect a list of CUDA devices"):
        rpc.TensorPipeRpcBackendOptions(devices=["cpu"])


def test_worker_info_is_a_value():
    info = rpc.WorkerInfo(name="worker1", id=1)

    assert str(info) == repr(info) == "WorkerInfo(id=1, name=worker1)"
    assert info == rpc.WorkerInfo("worker1", 1)
    assert info != rpc.WorkerInfo("worker1", 2)
    assert info != "worker1"
    assert {info: 3}[rpc.WorkerInfo("worker1", 1)] == 3
    assert pickle.loads(pickle.dumps(info)) == copy.deepcopy(info) == info
    with pytest.raises(AttributeError):
        info.name = "x"


@pytest.mark.parametrize("name", ["", " ", "abc*", "a" * 128, "a\n"])
def test_a_bad_name_is_told_what_a_name_is(name):
    with pytest.raises(
        RuntimeError, match=r"Worker name must match .* must be non-empty and shorter than 128"
    ):
        rpc.WorkerInfo(name, 0)


@pytest.mark.parametrize("number", [2**15, -(2**15) - 1, 1.5, "1", None])
def test_an_id_that_is_not_a_rank_is_refused(number):
    with pytest.raises(TypeError):
        rpc.WorkerInfo("w", number)


def test_a_registered_backend_is_a_member_under_both_names():
    old = rpc.BackendType.TENSORPIPE
    backend = backend_registry.register_backend("unit_test", lambda **kw: kw, lambda **kw: None)

    assert repr(backend) == "BackendType.unit_test"
    assert rpc.BackendType is backend_registry.BackendType
    assert rpc.BackendType["unit_test"] is backend
    assert backend_registry.is_backend(old)
    assert backend_registry.construct_rpc_backend_options(backend, spam=1) == {
        "rpc_timeout": 60.0,
        "init_method": "env://",
        "spam": 1,
    }
    with pytest.raises(RuntimeError, match=r"^RPC backend .+: already registered$"):
        backend_registry.register_backend("unit_test", None, None)


def test_construct_handler_ignores_unknown_keywords():
    options = rpc.construct_rpc_backend_options(rpc.BackendType.TENSORPIPE, num_worker_threads=3, spam=1)

    assert options.num_worker_threads == 3


class _Foo(rpc.RpcBackendOptions):
    pass


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"backend": "TENSORPIPE"}, TypeError, "Argument backend must be a member of BackendType"),
        (
            {"rpc_backend_options": {"init_method": "x"}},
            TypeError,
            "Argument rpc_backend_options must be an instance of RpcBackendOptions",
        ),
        ({"rpc_backend_options": _Foo()}, TypeError, "Could not infer backend for options"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank 2 with world_size 2"),
        ({"rank": -2, "world_size": 2}, ValueError, "rank -2 with world_size 2"),
        ({"rank": "0", "world_size": 2}, RuntimeError, "Argument 0 must be of type .* but got type"),
    ],
)
def test_wrong_arguments_are_found_before_waiting_for_anybody(arguments, error, text):
    with pytest.raises(error, match=text):
        rpc.init_rpc("w", **arguments)

    assert not rpc._is_current_rpc_agent_set()


def test_options_of_the_wrong_class_for_the_backend_are_refused(tmp_path):
    options = _Foo(init_method=f"file://{tmp_path}/store")

    with pytest.raises(TypeError, match="`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`"):
        rpc.init_rpc("w", rpc.BackendType.TENSORPIPE, 0, 1, options)


def test_c10ds_errors_about_the_rendezvous_pass(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(ValueError, match="environment variable RANK expected"):
        rpc.init_rpc("w", world_size=1)
    with pytest.raises(ValueError, match="rank parameter missing"):
        tcp = rpc.TensorPipeRpcBackendOptions(init_method="tcp://127.0.0.1:1")
        rpc.init_rpc("w", world_size=1, rpc_backend_options=tcp)
    with pytest.raises(RuntimeError, match="No rendezvous handler for foo://"):
        foo = rpc.TensorPipeRpcBackendOptions(init_method="foo://x")
        rpc.init_rpc("w", rank=0, world_size=1, rpc_backend_options=foo)
