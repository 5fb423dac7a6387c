"""Which process group a worker takes, and what mpirun says of a process."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import tensorcall.rpc as rpc
import torch.distributed as dist
from tensorcall import __main__, _launcher, _run
from tensorcall.rpc import _groups
from torch._C._distributed_c10d import HashStore

MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


class Fake:
    """Something that carries messages, as far as one can see."""

    rank, size, any_source = 1, 3, False

    def send(self, memory: Any, to: int, tag: int) -> None: ...

    def receive(self, memory: Any, source: Any, tag: int) -> None: ...

    def all_gather(self, data: bytes, limit: Any) -> Any: ...

    def abort(self) -> None: ...

    def close(self, is_quiet: bool) -> None: ...


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*MPICH, *OPEN_MPI, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("BACKEND", "MPI"):
        monkeypatch.delenv(f"TENSORCALL_{name}", raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture
def default_group():
    """torch.distributed with this process as its only rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_options_have_the_defaults_of_the_old_agent() -> None:
    options = rpc.ProcessGroupRpcBackendOptions()

    assert (options.num_send_recv_threads, options.rpc_timeout) == (4, 60)
    assert options.init_method == "env://"
    assert options.process_group is None
    assert options.num_worker_threads == 16
    assert options.device_maps == {}


def test_options_may_be_given_by_place_as_they_could() -> None:
    options = rpc.ProcessGroupRpcBackendOptions(32, 5.0, "tcp://there:1")

    assert (options.num_send_recv_threads, options.rpc_timeout) == (32, 5)
    assert options.init_method == "tcp://there:1"
    assert options.num_worker_threads == 32  # functions used to run on the same threads


def test_a_timeout_may_be_a_timedelta_as_it_once_had_to_be() -> None:
    assert rpc.ProcessGroupRpcBackendOptions(rpc_timeout=timedelta(minutes=2)).rpc_timeout == 120


def test_options_are_checked() -> None:
    with pytest.raises(RuntimeError, match="num_send_recv_threads must be positive, got 0"):
        rpc.ProcessGroupRpcBackendOptions(0)
    with pytest.raises(TypeError, match="num_send_recv_threads must be an int"):
        rpc.ProcessGroupRpcBackendOptions("4")


def test_the_registry_makes_options_of_the_backend() -> None:
    backend = rpc.BackendType.PROCESS_GROUP

    options = rpc.construct_rpc_backend_options(backend, init_method="file://x", num_send_recv_threads=7)

    assert type(options) is rpc.ProcessGroupRpcBackendOptions
    assert (options.num_send_recv_threads, options.init_method) == (7, "file://x")
    with pytest.raises(TypeError, match="must be a `ProcessGroupRpcBackendOptions`"):
        rpc.init_backend(
            backend,
            store=HashStore(),
            name="w",
            rank=0,
            world_size=1,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(),
        )


def test_without_any_group_workers_meet_at_the_init_method() -> None:
    assert _groups.choose(rpc.ProcessGroupRpcBackendOptions(), 0, 2) is None


def test_a_group_that_is_given_is_taken_if_it_fits(default_group: Any) -> None:
    options = rpc.ProcessGroupRpcBackendOptions(process_group=Fake())

    assert _groups.choose(options, -1, None) is options.process_group
    assert _groups.choose(options, 1, 3) is options.process_group
    with pytest.raises(ValueError, match=r"rank 1 of 3, but init_rpc was given rank 0 and world_size 3"):
        _groups.choose(options, 0, 3)


def test_what_is_no_group_is_refused() -> None:
    options = rpc.ProcessGroupRpcBackendOptions(process_group="gloo")

    with pytest.raises(TypeError, match=r"process_group must be a torch.distributed.ProcessGroup or"):
        _groups.choose(options, 0, 1)


def test_the_default_group_is_taken_if_it_fits(default_group: Any) -> None:
    options = rpc.TensorPipeRpcBackendOptions()

    assert _groups.choose(options, -1, None) is default_group
    assert _groups.choose(options, 0, 1) is default_group
    assert _groups.choose(options, 0, 2) is None


def test_each_join_has_a_part_of_the_store_of_its_own(default_group: Any) -> None:
    first, second = (_groups.store_of(default_group) for _ in range(2))
    first.set("key", "value")

    assert not second.check(["key"])
    assert not default_group.get_group_store().check(["key"])


def test_the_environment_chooses_the_backend_of_programs_that_name_none(monkeypatch) -> None:
    assert not _groups.takes_group("TENSORPIPE")
    assert _groups.takes_group("PROCESS_GROUP")

    monkeypatch.setenv("TENSORCALL_BACKEND", "process_group")
    assert _groups.takes_group("TENSORPIPE")
    assert _groups.takes_group("FAULTY_TENSORPIPE")
    assert not _groups.takes_group("SOMEBODYS_OWN")

    monkeypatch.setenv("TENSORCALL_BACKEND", "pigeon")
    with pytest.raises(RuntimeError, match="TENSORCALL_BACKEND is 'pigeon', but must be"):
        _groups.takes_group("TENSORPIPE")


@pytest.mark.parametrize("variables", [MPICH, OPEN_MPI])
def test_mpirun_says_which_rank_a_process_is(variables: dict[str, str]) -> None:
    assert _launcher.read() is None
    os.environ.update(variables)

    launched = _launcher.read()

    assert launched is not None
    assert (launched.rank, launched.size, launched.local_rank) == (2, 4, "1")
    assert not launched.is_ours


def test_the_command_tells_a_program_under_mpirun_what_torchrun_would() -> None:
    os.environ.update(MPICH)

    _run.choose_backend("process_group")

    assert os.environ["TENSORCALL_BACKEND"] == "process_group"
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")] == ["2", "4", "1"]
    launched = _launcher.read()
    assert launched is not None
    assert launched.is_ours
    os.environ["TENSORCALL_MPI"] = "1"  # a process that our program has started
    assert not launched.is_ours


def test_without_mpirun_the_command_chooses_the_backend_only() -> None:
    _run.choose_backend("process_group")

    assert "RANK" not in os.environ
    assert os.environ["TENSORCALL_BACKEND"] == "process_group"


def test_the_command_line_knows_two_backends(capsys) -> None:
    with pytest.raises(SystemExit):
        __main__.main(["run", "--backend", "pigeon", "program.py"])
    assert "process_group" in capsys.readouterr().err
