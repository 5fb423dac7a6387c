"""gRPC from Python: raw bytes as messages, pickle for the two small tensors, eight threads at the callee."""

from __future__ import annotations

import pickle
import sys
from concurrent import futures
from typing import Any

import both
import functions
import grpc
import numpy as np
import settings as bench
import workloads

UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
ANSWERS = {
    "trivial": lambda request: b"\x07",
    "add": lambda request: pickle.dumps(functions.add(*pickle.loads(request)), 5),
    "sleep": lambda request: functions.sleep() or b"",
    "swallow": lambda request: b"",
    "echo": lambda request: request,
}


class GrpcClient(workloads.Client):
    """Calls over one channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._methods = {name: channel.unary_unary(f"/bench.Bench/{name}") for name in ANSWERS}
        self._pair = np.ones((2, 2), "f4"), np.ones((2, 2), "f4")

    def trivial(self) -> Any:
        return self._methods["trivial"](b"")

    def add(self) -> Any:
        return pickle.loads(self._methods["add"](pickle.dumps(self._pair, 5)))

    def start(self, function: str, tensor: Any = b"") -> Any:
        return self._methods[function].future(tensor)

    def wait(self, handle: Any) -> Any:
        return handle.result()

    def tensor(self, size: int) -> Any:
        return bytes(size)


def serve() -> None:
    """Answers until standard input ends."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=UNLIMITED)
    methods = {
        name: grpc.unary_unary_rpc_method_handler(lambda request, _, answer=answer: answer(request))
        for name, answer in ANSWERS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bench", methods),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None)


def main() -> None:
    """Calls, or is called."""
    options = bench.parser().parse_args()
    bench.place(options.placement, options.role)
    if options.role == "callee":
        return serve()
    with both.callee() as callee:
        where = f"127.0.0.1:{both.greeting(callee)}"
        with grpc.insecure_channel(where, options=UNLIMITED) as channel:
            workloads.run(GrpcClient(channel), bench.settings_of(options))
    return None


if __name__ == "__main__":
    main()
