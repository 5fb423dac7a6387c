"""Stores of the Rust crate beside torch's, and workers of both languages that meet in them."""

from __future__ import annotations

import os
import subprocess
import threading
import uuid
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from harness import Group, Worker, _free_port
from rust_program import LIMIT, RustProgram, built

SOON = timedelta(seconds=20)


def store_worker(*arguments: object, **environment: str) -> RustProgram:
    return RustProgram("store_worker", *arguments, **environment)


def test_our_client_passes_the_suite_on_torchs_server() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)

    command = [built("store_worker"), "suite", str(server.port)]
    suite = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)

    assert suite.returncode == 0, suite.stdout + suite.stderr
    assert "who_waits_goes_on_when_all_keys_are_there" in suite.stdout


def connect(port: str, **options: Any) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=SOON, **options)


def test_torchs_client_gets_from_our_server_what_it_gets_from_torchs() -> None:
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SOON)
    with store_worker("serve") as ours:
        results = [use_all_of(str(torchs.port)), use_all_of(ours.hear())]
        ours.end()

    assert results[0] == results[1]


def use_all_of(port: str) -> list[Any]:
    """What every operation gives on the server at that port."""
    store, other = connect(port, world_size=2), connect(port)
    prefixed = dist.PrefixStore("a/prefix", store)
    seen: list[Any] = []
    store.set("k", "v")
    seen += [other.get("k"), store.compare_set("k", "v", "w"), store.compare_set("k", "v", "x")]
    seen += [store.compare_set("new", "", "first"), store.compare_set("none", "x", "y")]
    seen += [store.add("n", 5), other.add("n", -7), store.get("n")]
    store.append("k", "+")
    store.multi_set(["m1", "m2"], ["1", "2"])
    seen += [store.multi_get(["k", "m1", "m2"]), store.check(["k", "m1"]), store.check(["k", "absent"])]
    seen += [store.delete_key("m1"), store.delete_key("m1"), store.num_keys(), sorted(store.list_keys())]
    prefixed.set("p", b"\0\xff")
    seen += [prefixed.get("p"), other.get("a/prefix/p"), prefixed.check(["p"])]
    for value in ("first", "second"):
        store.queue_push("q", value)
    seen += [store.queue_len("q"), other.queue_pop("q"), other.queue_pop("q"), store.queue_len("q")]
    seen.append(kind_of_error(lambda: store.queue_pop("q", False)))
    late = connect(port)
    late.set_timeout(timedelta(milliseconds=50))
    seen += [kind_of_error(lambda: late.wait(["absent"])), kind_of_error(lambda: late.get("absent"))]
    seen.append(late.get("k"))
    popped = in_thread(lambda: other.queue_pop("later"))
    waited = in_thread(lambda: connect(port).get("later too"))
    met = [in_thread(lambda: connect(port).barrier("barrier", 3, SOON)) for _ in range(2)]
    store.queue_push("later", "pushed")
    store.set("later too", "set")
    store.barrier("barrier", 3, SOON)
    seen += [popped(), waited(), *(each() for each in met), store.clone().get("k")]
    seen += [store.get("n"), kind_of_error(lambda: connect(port).add("k", 1)), store.get("k")]
    return seen


def kind_of_error(run: Any) -> str:
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return "none"


def in_thread(run: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()

    def result() -> Any:
        thread.join(20)
        return results[0]

    return result


def reduce_over(worker: Worker, port: int) -> list[float]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    dist.init_process_group("gloo", rank=worker.rank, world_size=worker.world_size, timeout=SOON)
    tensor = torch.full((3,), float(worker.rank + 1))
    dist.all_reduce(tensor)
    dist.barrier()
    gathered: list[Any] = [None] * worker.world_size
    dist.all_gather_object(gathered, worker.name)
    assert gathered == ["w0", "w1"]
    dist.destroy_process_group()
    return tensor.tolist()


def test_a_process_group_of_torch_meets_on_our_server(group: Group) -> None:
    with store_worker("serve") as server:
        results = group.run(reduce_over, reduce_over, arguments=(int(server.hear()),))
        server.end()

    assert results == [[3.0] * 3] * 2


def test_a_file_is_shared_with_torch_and_removed_by_the_last(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = dist.FileStore(str(path), 2)
    store.set("theirs", "torch")
    with store_worker("file", path, 2) as ours:
        assert ours.hear() == "open"
        assert ours.ask("get theirs") == 'Ok(Some("torch"))'
        assert ours.ask("set ours rust") == "Ok(())"
        assert [ours.ask("add n 2"), store.add("n", 3), ours.ask("add n 4")] == ["Ok(2)", 5, "Ok(9)"]
        assert store.get("ours") == b"rust"
        assert store.compare_set("ours", "rust", "again") == b"again"
        store.delete_key("theirs")
        assert [ours.ask("get ours"), ours.ask("get theirs")] == ['Ok(Some("again"))', "Ok(None)"]
        ours.end()

    assert path.exists()
    del store
    assert not path.exists()


def echo(value: Any) -> Any:
    return value


def call_all(worker: Worker, others: list[str]) -> list[Any]:
    worker.start(timeout=20)
    seen = [rpc.rpc_sync(other, "echo" if other.startswith("rust") else echo, args=(7,)) for other in others]
    seen.append(sorted(info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()))
    worker.tell("called")
    worker.hear()
    rpc.shutdown()
    return seen


@pytest.mark.parametrize("host", ["python", "rust", "file"])
def test_a_static_group_of_both_languages_meets(group: Group, tmp_path: Path, host: str) -> None:
    """Whoever hosts the store, and whoever is rank 0, which collects and tells all."""
    place = f"file://{tmp_path / 'store'}" if host == "file" else f"tcp://127.0.0.1:{group._port}"
    ranks = {"python": ([0, 2], 1), "rust": ([1, 2], 0), "file": ([0, 1], 2)}[host]
    with store_worker("join", "rust", place, ranks[1], 3) as rust:
        for rank in ranks[0]:
            group.add(call_in_place, rank, 3, (place, [f"w{other}" for other in ranks[0]] + ["rust"]))
        named = " ".join(sorted((f"w{rank}:{rank}" for rank in ranks[0]), key=lambda name: name[1:]))
        assert sorted(rust.hear().split()) == sorted([*named.split(), f"rust:{ranks[1]}"])
        for rank in ranks[0]:
            assert rust.ask(f"call w{rank} {__name__}:echo 5") == "Ok(Int(5))"
        for index in range(2):
            assert group.hear(index) == "called"
            group.tell(index, "leave")
        assert rust.ask("leave") == "Ok(())"
        outcomes = group.finish()
        rust.end()

    everybody = sorted(["rust", *(f"w{rank}" for rank in ranks[0])])
    assert [outcome.value for outcome in outcomes] == [[7, 7, 7, everybody]] * 2


def call_in_place(worker: Worker, place: str, others: list[str]) -> list[Any]:
    worker.init_method = place
    return call_all(worker, others)


def wait_in_the_store(worker: Worker, port: int) -> int:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
    options = rpc.TensorPipeRpcBackendOptions(init_method="env://", rpc_timeout=20)
    rpc.init_rpc("py", world_size=2, rpc_backend_options=options)
    result = rpc.rpc_sync("rust", "echo", args=(6,))
    rpc.shutdown()
    return int(result)


def test_a_server_of_torch_that_waits_for_all_of_its_workers_is_told_of_one_in_rust(group: Group) -> None:
    """As it does where the rank is that of the environment."""
    with store_worker("join", "rust", f"tcp://127.0.0.1:{group._port}", 1, 2) as rust:
        group.add(wait_in_the_store, 0, 2, (group._port,))
        assert rust.hear() == "py:0 rust:1"
        assert rust.ask("leave") == "Ok(())"
        outcomes = group.finish()
        rust.end()

    assert outcomes[0].value == 6


def live_twice(worker: Worker) -> list[int]:
    seen = []
    for life in range(2):
        worker.start(timeout=20, name=f"python{life}")
        seen.append(rpc.rpc_sync(f"rust{life}", "echo", args=(life,)))
        rpc.shutdown()
    return seen


def test_one_group_of_both_after_another_meets_at_one_place(group: Group) -> None:
    with store_worker("join", "rust0", f"tcp://127.0.0.1:{group._port}", 1, 2) as rust:
        group.add(live_twice, 0, 2)
        assert rust.hear() == "python0:0 rust0:1"
        assert rust.ask("leave") == "Ok(())"
        assert rust.ask("again rust1") == "python1:0 rust1:1"
        assert rust.ask("leave") == "Ok(())"
        outcomes = group.finish()
        rust.end()

    assert outcomes[0].value == [0, 1]


def fail_to_join(worker: Worker, name: str, seconds: float) -> str:
    worker.tell("ready")
    worker.hear()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        worker.start(timeout=seconds, name=name)
    assert not rpc.api._is_current_rpc_agent_set()
    return str(raised.value)


def ready_to_fail(group: Group, rank: int, size: int, name: str, seconds: float) -> int:
    """Starts a worker that tries to join when told to, so that its start takes none of the time for it."""
    number = group.add(fail_to_join, rank, size, (name, seconds))
    assert group.hear(number) == "ready"
    return number


@pytest.mark.parametrize("rank_of_rust", [0, 1])
def test_what_is_wrong_is_told_alike_in_both_languages(group: Group, rank_of_rust: int) -> None:
    place = f"tcp://127.0.0.1:{group._port}"
    python = ready_to_fail(group, 1 - rank_of_rust, 2, "same", 20.0)
    with store_worker("join", "same", place, rank_of_rust, 2) as rust:
        group.tell(python, "go")
        text = rust.hear()
        outcomes = group.finish()
        rust.end()

    assert text == "error RPC worker name same is not unique. Workers 1 and 0 share the same name."
    assert f"error {outcomes[0].value}" == text


@pytest.mark.parametrize("rank_of_rust", [0, 1])
def test_who_does_not_come_is_named_in_both_languages(group: Group, rank_of_rust: int) -> None:
    place = f"tcp://127.0.0.1:{group._port}"
    python = ready_to_fail(group, 1 - rank_of_rust, 3, "python", 1.0)
    with store_worker("join", "rust", place, rank_of_rust, 3, STORE_WORKER_TIMEOUT="1") as rust:
        group.tell(python, "go")
        text = rust.hear()
        outcomes = group.finish()
        rust.end()

    assert text == "error workers did not come after 5 s: missing rank(s) [2] of world size 3"
    assert f"error {outcomes[0].value}" == text


def test_workers_of_different_secrets_are_told_so_in_both_languages(group: Group) -> None:
    with store_worker(
        "join", "rust", f"tcp://127.0.0.1:{group._port}", 1, 2, TENSORCALL_SECRET="one"
    ) as rust:
        group.environment["TENSORCALL_SECRET"] = "another"
        group.tell(ready_to_fail(group, 0, 2, "python", 20.0), "go")
        text = rust.hear()
        outcomes = group.finish()
        rust.end()

    assert "rank(s) [0] have one, rank(s) [1] have another" in text
    assert f"error {outcomes[0].value}" == text


def member(worker: Worker, init_method: str) -> None:
    """Does what it is told to, until that is nothing."""
    while (order := worker.hear()) is not None:
        try:
            worker.tell(obey(order, init_method))
        except (RuntimeError, ValueError) as error:
            worker.tell(f"error {error}")


def obey(order: tuple[Any, ...], init_method: str) -> Any:
    what, *arguments = order
    if what == "join":
        name, rank = arguments
        options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=20)
        rpc.init_rpc(name, rank=rank, rpc_backend_options=options)
        return what
    if what == "call":
        return rpc.rpc_sync(arguments[0], "echo" if arguments[0].startswith("rust") else echo, args=(3,))
    if what == "names":
        return [info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()]
    assert what == "leave"
    rpc.shutdown()
    return what


def test_workers_of_both_languages_come_and_go(group: Group, tmp_path: Path) -> None:
    """LOG rows 111 and 112, with a Rust worker: joining, leaving, dying and coming back."""
    place = f"file://{tmp_path / 'store'}"

    def order(number: int, *what: Any) -> Any:
        group.tell(number, what)
        return group.hear(number)

    first = group.add(member, 0, 0, (place,))
    assert order(first, "join", "py0", 0) == "join"
    with store_worker("join", "rust1", place, 1) as rust:
        assert rust.hear() == "py0:0 rust1:1"
        assert order(first, "names") == ["py0", "rust1"]
        assert order(first, "call", "rust1") == 3
        second = group.add(member, 0, 0, (place,))
        assert order(second, "join", "rust1", 2) == (
            "error RPC worker name rust1 is not unique. Workers 2 and 1 share the same name."
        )
        assert order(second, "join", "py2", 2) == "join"
        assert rust.ask("names") == "py0:0 rust1:1 py2:2"
        assert order(second, "call", "rust1") == 3
        assert rust.ask(f"call py2 {__name__}:echo 4") == "Ok(Int(4))"
        assert order(first, "leave") == "leave"
        assert rust.ask("names") == "rust1:1 py2:2"
        assert rust.ask("leave") == "Ok(())"
        assert order(second, "names") == ["py2"]
        assert rust.ask("again rust1") == "rust1:1 py2:2"
        assert order(second, "call", "rust1") == 3
        rust.kill()
    with store_worker("join", "rust1", place, 1) as rust:
        assert rust.hear() == "rust1:1 py2:2"
        assert order(second, "call", "rust1") == 3
        rust.kill()
    # The next one, in Python, finds out that it died and takes its name and rank.
    assert order(first, "join", "rust1", 1) == "join"
    assert order(second, "call", "py2") == 3
    assert order(first, "names") == ["rust1", "py2"]
    for number in (first, second):
        group.tell(number, None)
    group.finish()


def test_a_rust_worker_does_not_mix_with_the_other_kind_of_group(group: Group, tmp_path: Path) -> None:
    place = f"file://{tmp_path / 'store'}"
    number = group.add(member, 0, 0, (place,))
    group.tell(number, ("join", "py0", 0))
    assert group.hear(number) == "join"

    with store_worker("join", "rust", place, 0, 1) as rust:
        assert rust.hear().startswith("error RPC group mixes statically and dynamically initialized members")
        rust.end()
    group.tell(number, None)
    group.finish()


def test_a_rust_worker_says_who_does_not_answer_where_it_is_to_meet() -> None:
    place = f"tcp://127.0.0.1:{_free_port()}"

    with store_worker("join", "rust", place, 5, 3) as rust:
        assert rust.hear() == "error rank must be from 0 to world_size - 1: got rank 5 with world_size 3"


def as_launched_by(launcher: str, rank: int, size: int, job: str, port: int) -> dict[str, str]:
    """What each of the processes on one host finds in its environment."""
    variables: dict[str, Any] = {
        "torchrun": {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        "Open MPI": {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": size,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": size,
            "PMIX_NAMESPACE": f"prterun-{job}@1",
        },
        "MPICH": {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALNRANKS": size, "MASTER_PORT": port},
        "Slurm": {
            "SLURM_PROCID": rank,
            "SLURM_NTASKS": size + 1,
            "SLURM_STEP_NUM_TASKS": size,
            "SLURM_JOB_NUM_NODES": 1,
            "SLURM_JOB_NODELIST": "node[07-09]",
            "SLURM_JOB_ID": job,
            "SLURM_STEP_ID": 0,
        },
    }
    return {name: str(value) for name, value in variables[launcher].items()}


@pytest.mark.parametrize("launcher", ["torchrun", "Open MPI", "MPICH", "Slurm"])
def test_rust_workers_meet_by_what_their_launcher_says(launcher: str) -> None:
    """Open MPI and Slurm say no port: it is derived from the name of the job."""
    job, port = uuid.uuid4().hex, _free_port()
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                store_worker("join", "w%", "env://", "-", "-", **as_launched_by(launcher, rank, 3, job, port))
            )
            for rank in range(3)
        ]
        assert [worker.hear() for worker in workers] == ["w0:0 w1:1 w2:2"] * 3
        assert workers[2].ask("call w0 echo 5") == "Ok(Int(5))"
        for worker in workers:
            worker.say("leave")
        assert [worker.hear() for worker in workers] == ["Ok(())"] * 3
        for worker in workers:
            worker.end()
