"""The modules of ``torch.distributed.nn.api``."""
