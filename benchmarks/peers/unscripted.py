"""Classes of torch.optim under names for which torch's DistributedOptimizer has no TorchScript."""

import torch


class SGD(torch.optim.SGD):
    """SGD that a worker steps in Python, under the GIL."""


class AdamW(torch.optim.AdamW):
    """AdamW that a worker steps in Python, under the GIL."""
