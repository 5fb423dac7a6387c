"""Optimizers over several workers: the names of ``torch.distributed.optim`` that use RPC."""

from .optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer"]
