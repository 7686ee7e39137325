"""Subclasses of torch.optim that torch's DistributedOptimizer does not step in TorchScript."""

import torch


class SGD(torch.optim.SGD):
    """SGD that a worker steps in Python, under the GIL."""


class AdamW(torch.optim.AdamW):
    """AdamW that a worker steps in Python, under the GIL."""
