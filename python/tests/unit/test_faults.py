"""The backend FAULTY_TENSORPIPE: messages that fail or come late."""

from __future__ import annotations

import time

import pytest
import tensorcall.rpc as rpc
import torch
from tensorcall.rpc import _testing


def double(x):
    return 2 * x


@pytest.fixture
def faulty(tmp_path):
    """Makes this process the only worker, with these faults."""

    def start(**faults):
        backend = rpc.backend_registry.BackendType.FAULTY_TENSORPIPE
        options = rpc.construct_rpc_backend_options(
            backend, init_method=f"file://{tmp_path}/store", rpc_timeout=20, num_worker_threads=4, **faults
        )
        rpc.init_rpc("me", backend=backend, rank=0, world_size=1, rpc_backend_options=options)
        return options

    yield start
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()


def test_its_options_can_be_read_back(faulty):
    options = faulty(
        messages_to_fail=["PYTHON_CALL"], messages_to_delay={"SCRIPT_CALL": 0.1}, num_fail_sends=2
    )

    assert isinstance(options, _testing.FaultyTensorPipeRpcBackendOptions)
    assert isinstance(options, rpc.TensorPipeRpcBackendOptions)
    assert options.messages_to_fail == ["PYTHON_CALL"]
    assert options.messages_to_delay == {"SCRIPT_CALL": 0.1}
    assert options.num_fail_sends == 2
    assert isinstance(rpc.api._get_current_rpc_agent(), _testing.FaultyTensorPipeAgent)


def test_a_call_fails_so_often_and_is_then_sent(faulty):
    faulty(messages_to_fail=["PYTHON_CALL"], num_fail_sends=2)

    for number in (1, 2):
        future = rpc.rpc_async("me", double, args=(1,))
        assert future.done()
        with pytest.raises(
            RuntimeError, match=f"send attempt {number} of PYTHON_CALL .*failed intentionally"
        ):
            future.wait()
    assert rpc.rpc_sync("me", double, args=(1,)) == 2
    with pytest.raises(RuntimeError, match="send attempt 1 of PYTHON_CALL"):
        rpc.rpc_sync("me", double, args=(2,))
    assert rpc.rpc_sync("me", torch.add, args=(torch.ones(1), 1)).item() == 2


def test_a_call_comes_late_and_within_its_limit(faulty):
    faulty(messages_to_delay={"SCRIPT_CALL": 0.3})

    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rpc.rpc_sync("me", torch.add, args=(torch.ones(1), 1), timeout=0.05)
    began = time.monotonic()
    assert rpc.rpc_sync("me", torch.add, args=(torch.ones(1), 1)).item() == 2
    assert time.monotonic() - began >= 0.29
    assert rpc.rpc_sync("me", double, args=(1,), timeout=0.25) == 2


def test_shutdown_waits_for_calls_that_are_late(faulty):
    faulty(messages_to_delay={"SCRIPT_CALL": 0.2})

    future = rpc.rpc_async("me", torch.add, args=(torch.ones(1), 1))
    rpc.shutdown()

    assert future.done()
    assert future.wait().item() == 2


def test_faults_are_chosen_by_options_of_their_own_class(tmp_path):
    options = _testing.FaultyTensorPipeRpcBackendOptions(
        init_method=f"file://{tmp_path}/store", messages_to_fail=["PYTHON_CALL"], num_fail_sends=1
    )
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)

    assert isinstance(rpc.api._get_current_rpc_agent(), _testing.FaultyTensorPipeAgent)
    rpc.shutdown()


def test_other_options_are_refused(tmp_path):
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store")

    with pytest.raises(TypeError, match="must be a `FaultyTensorPipeRpcBackendOptions`"):
        rpc.init_rpc(
            "me",
            backend=rpc.backend_registry.BackendType.FAULTY_TENSORPIPE,
            rank=0,
            world_size=1,
            rpc_backend_options=options,
        )
