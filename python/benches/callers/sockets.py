"""The least that Python can do: one socket, and pickle with the tensors' memory beside it.

Single calls are answered on the thread that makes them; of several, a thread reads the answers. The callee
runs calls one after another, but for those that sleep.
"""

from __future__ import annotations

import itertools
import pickle
import socket
import struct
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import both
import functions
import numpy as np
import settings as bench
import workloads

WAYS = ("tcp", "unix")


def send(link: socket.socket, message: Any, lock: threading.Lock | None = None) -> None:
    """Sends an object."""
    buffers: list[memoryview] = []
    payload = pickle.dumps(message, 5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
    lengths = [buffer.nbytes for buffer in buffers]
    parts = [memoryview(struct.pack(f"<II{len(lengths)}Q", len(payload), len(lengths), *lengths)), *buffers]
    parts.insert(1, memoryview(payload))
    if lock is None:
        _send_all(link, parts)
    else:
        with lock:
            _send_all(link, parts)


def _send_all(link: socket.socket, parts: list[memoryview]) -> None:
    sent = link.sendmsg(parts)
    for part in parts:
        if sent < part.nbytes:
            link.sendall(part[sent:])
        sent = max(0, sent - part.nbytes)


def receive(link: socket.socket) -> Any:
    """Receives an object."""
    length, count = struct.unpack("<II", _fill(link, bytearray(8)))
    lengths = struct.unpack(f"<{count}Q", _fill(link, bytearray(8 * count)))
    payload = _fill(link, bytearray(length))
    return pickle.loads(payload, buffers=[_fill(link, np.empty(length, "u1")) for length in lengths])


def _fill(link: socket.socket, target: Any) -> Any:
    view = memoryview(target)
    while view.nbytes:
        if not (got := link.recv_into(view)):
            raise EOFError
        view = view[got:]
    return target


class SocketClient(workloads.Client):
    """Calls over two connections: one for single calls, one whose answers a thread reads."""

    def __init__(self, single: socket.socket, many: socket.socket) -> None:
        self._single, self._many = single, many
        self._futures: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._pair = np.ones((2, 2), "f4"), np.ones((2, 2), "f4")
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                number, result = receive(self._many)
                self._futures.pop(number).set_result(result)
                del result
        except (EOFError, OSError):
            return

    def _call(self, function: Any, *arguments: Any) -> Any:
        send(self._single, (0, function, arguments))
        return receive(self._single)[1]

    def trivial(self) -> Any:
        return self._call(functions.trivial)

    def add(self) -> Any:
        return self._call(functions.add, *self._pair)

    def start(self, function: str, tensor: Any = None) -> Any:
        number, future = next(self._numbers), Future[Any]()
        self._futures[number] = future
        send(self._many, (number, getattr(functions, function), () if tensor is None else (tensor,)))
        return future

    def wait(self, handle: Any) -> Any:
        return handle.result() if isinstance(handle, Future) else handle

    def single(self, function: str, tensor: Any) -> Any:
        return self._call(getattr(functions, function), tensor)

    def tensor(self, size: int) -> Any:
        return np.ones(size // 4, "f4")


def serve(link: socket.socket) -> None:
    """Answers until the caller hangs up."""
    lock, pool = threading.Lock(), ThreadPoolExecutor(8)

    def answer(number: int, function: Any, arguments: Any) -> None:
        send(link, (number, function(*arguments)), lock)

    try:
        while True:
            call = receive(link)
            if call[1] is functions.sleep:
                pool.submit(answer, *call)
            else:
                answer(*call)
            del call
    except (EOFError, ConnectionError):
        return


def listen(way: str) -> socket.socket:
    """A socket that nobody else has."""
    listener = socket.socket(socket.AF_INET if way == "tcp" else socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0) if way == "tcp" else "")  # the kernel chooses
    listener.listen()
    return listener


def connect(way: str, where: str) -> socket.socket:
    """A connection to the callee."""
    link = socket.socket(socket.AF_INET if way == "tcp" else socket.AF_UNIX)
    link.connect(("127.0.0.1", int(where)) if way == "tcp" else bytes.fromhex(where))
    return at_once(link)


def at_once(link: socket.socket) -> socket.socket:
    """Lets small messages go without delay."""
    if link.family == socket.AF_INET:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def main() -> None:
    """Calls, or is called."""
    parser = bench.parser()
    parser.add_argument("--way", choices=WAYS, default="tcp")
    options = parser.parse_args()
    bench.place(options.placement, options.role)
    if options.role == "callee":
        with listen(options.way) as listener:
            name = listener.getsockname()
            print(name[1] if options.way == "tcp" else name.hex(), flush=True)
            links = [at_once(listener.accept()[0]) for _ in range(2)]
        threads = [threading.Thread(target=serve, args=(link,)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    with both.callee() as callee:
        where = both.greeting(callee)
        links = [connect(options.way, where) for _ in range(2)]
        workloads.run(SocketClient(*links), bench.settings_of(options))
        for link in links:
            link.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
