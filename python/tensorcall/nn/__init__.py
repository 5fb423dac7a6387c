"""Modules on other workers: the names of ``torch.distributed.nn`` that use RPC."""

from .api.remote_module import RemoteModule

__all__ = ["RemoteModule"]
