"""Run by test_install as ``python -m tensorcall run -m prog_module``."""

import os
import sys

import torch.distributed.rpc as rpc

if __name__ == "__main__":
    assert rpc.__name__ == "tensorcall.rpc", rpc
    print(__name__, os.path.basename(__file__), sys.argv[1:])
