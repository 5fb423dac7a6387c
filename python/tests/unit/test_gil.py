"""Threads of ours at the doors of the interpreter, above all when it closes."""

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import atexit, sys, threading, time
from tensorcall import _tensorcall
testing = _tensorcall._testing
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program of its own, which must end by itself and say nothing on stderr."""
    source = PRELUDE + textwrap.dedent(program)
    result = subprocess.run(
        [sys.executable, "-X", "dev", "-c", source], capture_output=True, text=True, timeout=50, check=False
    )
    assert result.stderr == ""
    assert result.returncode == 0
    return result


def test_a_thread_of_ours_calls_python_until_told_to_stop() -> None:
    result = run("""
        calls = []
        done = threading.Event()

        def call():
            calls.append(threading.get_ident())
            if len(calls) == 1000:
                done.set()
            return len(calls) >= 1000

        testing.call_from_thread(call)
        assert done.wait(20)
        print(len(set(calls)), calls[0] == threading.get_ident())
        """)

    assert result.stdout == "1 False\n"


def test_no_thread_enters_once_the_door_is_closed() -> None:
    result = run("""
        calls = []
        for _ in range(8):
            testing.call_from_thread(lambda: calls.append(None))
        while len(calls) < 100:
            time.sleep(0)

        inside = _tensorcall.stop_entering(20.0)
        count = len(calls)
        # The threads get every chance: this one lets go of the interpreter again and again.
        for _ in range(2000):
            time.sleep(0)

        print(inside, len(calls) - count)
        """)

    assert result.stdout == "0 0\n"


@pytest.mark.parametrize("threads", [1, 8])
def test_the_interpreter_ends_while_threads_of_ours_keep_calling(threads: int) -> None:
    run(f"""
        atexit.register(_tensorcall.stop_entering, 20.0)
        calls = []
        for _ in range({threads}):
            testing.call_from_thread(lambda: calls.append(None))
        while len(calls) < 100:
            time.sleep(0)
        """)


def test_destructors_may_use_the_interpreter_as_their_thread_ends() -> None:
    # Before Python 3.12.4 that destroyed the thread's state twice (python/cpython#119585).
    result = run("""
        import contextvars, ctypes
        ensure, release = ctypes.pythonapi.PyGILState_Ensure, ctypes.pythonapi.PyGILState_Release
        local, variable, destroyed = threading.local(), contextvars.ContextVar("variable"), []

        class ComesAndGoes:
            def __init__(self, successors):
                self.successors = successors

            def __del__(self):
                release(ensure())
                destroyed.append(self.successors)
                if self.successors:
                    local.object = ComesAndGoes(self.successors - 1)

        def call():
            local.object = ComesAndGoes(2)
            variable.set(ComesAndGoes(0))

        for _ in range(20):
            testing.call_on_thread(call)
        print(len(destroyed))
        """)

    # Newer Pythons never destroy what such a destructor leaves behind.
    assert int(result.stdout) >= 40


def test_a_thread_of_ours_may_end_with_a_sparse_tensor_in_its_hands() -> None:
    run("""
        import torch, warnings
        warnings.simplefilter("ignore")
        local = threading.local()

        def call():
            local.tensor = torch.eye(3).to_sparse_csr()
            local.parts = local.tensor.crow_indices(), local.tensor.values()

        for _ in range(20):
            testing.call_on_thread(call)
        """)


def test_a_function_that_runs_at_exit_is_interrupted() -> None:
    result = run("""
        started = threading.Event()
        came = []

        def call():
            started.set()
            try:
                while True:
                    pass
            except BaseException as error:
                came.append(type(error).__name__)
            return True

        testing.call_from_thread(call)
        assert started.wait(20)
        print(_tensorcall.stop_entering(4.0), came)
        """)

    assert result.stdout == "0 ['SystemExit']\n"


def test_a_function_that_ends_soon_is_not_interrupted() -> None:
    result = run("""
        started, going = threading.Event(), threading.Event()
        came = []

        def call():
            started.set()
            going.wait(20)
            came.append("ended")
            return True

        testing.call_from_thread(call)
        assert started.wait(20)
        threading.Timer(0.2, going.set).start()
        print(_tensorcall.stop_entering(20.0), came)
        """)

    assert result.stdout == "0 ['ended']\n"


def test_a_function_that_ignores_interruption_is_parked_when_the_interpreter_ends() -> None:
    run("""
        started = threading.Event()

        def call(*_):
            started.set()
            while True:
                try:
                    while True:
                        pass
                except BaseException:
                    pass

        testing.call_from_thread(call)
        assert started.wait(20)
        atexit.register(_tensorcall.stop_entering, 0.1)
        """)


def test_a_function_that_does_not_end_is_not_waited_for() -> None:
    result = run("""
        started = threading.Event()

        def call():
            started.set()
            time.sleep(1000)

        testing.call_from_thread(call)
        assert started.wait(20)
        print(_tensorcall.stop_entering(0.01))
        """)

    assert result.stdout == "1\n"


def test_a_function_that_wants_the_interpreter_back_too_late_parks() -> None:
    run("""
        started = threading.Event()

        def call():
            started.set()
            while True:
                time.sleep(0.0005)

        class LetsOthersRun:
            def __del__(self):
                time.sleep(0.1)

        testing.call_from_thread(call)
        assert started.wait(20)
        atexit.register(_tensorcall.stop_entering, 0.0)
        sys.modules["kept until the interpreter ends"] = LetsOthersRun()
        """)


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    result = run("""
        import os
        started = threading.Event()

        def call():
            started.set()
            time.sleep(1000)

        testing.call_from_thread(call)
        assert started.wait(20)
        sys.stdout.flush()
        # Python 3.12 and newer warn of a fork beside threads, which is what this is about.
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        if os.fork() == 0:
            _tensorcall.after_fork_in_child(None)
            print(_tensorcall.stop_entering(20.0))
            sys.stdout.flush()
            os._exit(0)
        os.wait()
        """)

    assert result.stdout == "0\n"


def test_the_thread_that_closes_may_still_come_and_go() -> None:
    result = run("""
        _tensorcall.stop_entering(1.0)
        print(testing.owner_dropped_outside([1], lambda: None), _tensorcall.stop_entering(1.0))
        """)

    assert result.stdout == "[1] 0\n"


def test_a_daemon_thread_parks_instead_of_coming_back() -> None:
    result = run("""
        came_back = []

        def wander():
            while True:
                testing.owner_dropped_outside(1, lambda: None)
                came_back.append(None)

        threading.Thread(target=wander, daemon=True).start()
        while len(came_back) < 10:
            time.sleep(0)
        _tensorcall.stop_entering(1.0)
        count = len(came_back)
        for _ in range(2000):
            time.sleep(0)
        print(len(came_back) - count <= 1)
        """)

    assert result.stdout == "True\n"
