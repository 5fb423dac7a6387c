"""What the unit tests share: a group of one worker."""

from __future__ import annotations

import pytest


@pytest.fixture
def alone(tmp_path):
    """RPC initialised with this process as the only worker, called ``me``."""
    import tensorcall.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/store", rpc_timeout=20)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options)
    yield rpc
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()
