"""The ways of stepping a DDP model that the demo compares.

A front-end is a function of (ddp, hyper-parameters) that sets everything up and returns an
object with ``step()`` and ``state_bytes()``. To add one that can be run A: write it, and name it in
FRONT_ENDS.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import optree
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from functional_optim import adamw
from hooks import OptimizerState, step_hook, zero_step_hook
from sharding import ZeroRedundancyOptimizer


class HyperParameters(NamedTuple):
    """AdamW's, the same for every run."""

    learning_rate: Callable[[float], float]  # of the number of steps made
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1


class FrontEnd(Protocol):
    """What the training loop asks of a way of stepping."""

    def step(self) -> None:
        """Called after each backward: do what is left to do of the step."""

    def state_bytes(self) -> int:
        """The memory of this rank's optimizer state."""


class StepHook:
    """AdamW of the pure core, stepped bucket by bucket inside DDP, while backward goes on."""

    def __init__(self, ddp: DistributedDataParallel, hyper: HyperParameters) -> None:
        optimizer = adamw(
            lr=hyper.learning_rate, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self._optimizer_state = OptimizerState(optimizer, ddp)
        ddp.register_comm_hook(None, step_hook(self._optimizer_state))

    def step(self) -> None:
        """Nothing: when backward returns, every parameter has been stepped."""

    def state_bytes(self) -> int:
        """The memory of this rank's optimizer state."""
        leaves = optree.tree_leaves(self._optimizer_state.state.leaves)
        return tensor_bytes(leaf for leaf in leaves if isinstance(leaf, Tensor))


class TorchAdamW:
    """The twin: torch.optim.AdamW after DDP, with a scheduler."""

    def __init__(self, ddp: DistributedDataParallel, hyper: HyperParameters) -> None:
        # The base rate is 1, so that the scheduler's product is exactly the schedule's value.
        self._optimizer = torch.optim.AdamW(
            ddp.parameters(),
            lr=1.0,
            betas=hyper.betas,
            weight_decay=hyper.weight_decay,
            foreach=False,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, hyper.learning_rate)
        # DDP without a hook multiplies by 1 / ranks where its all-reduce hook divides by ranks:
        # for 3 ranks these differ in the last bit. All runs divide.
        ddp.register_comm_hook(None, allreduce_hook)

    def step(self) -> None:
        """Step all parameters."""
        self._optimizer.step()
        self._scheduler.step()

    def state_bytes(self) -> int:
        """The memory of this rank's optimizer state."""
        return state_bytes(self._optimizer)


class ZeroStepHook:
    """AdamW with its state sharded, stepped while backward goes on.

    Each gradient is reduced to the rank that owns it, and parameters come back from their owners.
    """

    def __init__(self, ddp: DistributedDataParallel, hyper: HyperParameters) -> None:
        self._zero = ZeroRedundancyOptimizer(
            ddp.parameters(),
            torch.optim.AdamW,
            overlap_with_ddp=True,
            policy="elements",
            lr=1.0,
            betas=hyper.betas,
            weight_decay=hyper.weight_decay,
        )
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._zero, hyper.learning_rate)
        ddp.register_comm_hook(None, zero_step_hook(ddp, self._zero))

    def step(self) -> None:
        """Set the rate of the next step: when backward returns, this one has been made."""
        self._scheduler.step()

    def state_bytes(self) -> int:
        """The memory of this rank's optimizer state: of what it owns."""
        return state_bytes(self._zero.optim)


MakeFrontEnd = Callable[[DistributedDataParallel, HyperParameters], FrontEnd]

FRONT_ENDS: Mapping[str, MakeFrontEnd] = {"step-hook": StepHook}
"""By the name that ``--front-end`` takes."""


class Way(NamedTuple):
    """One of the runs that are compared."""

    name: str
    """A letter, for tables."""
    title: str
    """What steps it."""
    make: MakeFrontEnd
    exact: bool
    """Whether it must have the bits of the first: it adds the same numbers in the same order."""


def ways(front_end: str, ranks: int) -> list[Way]:
    """The runs of one demo.

    Args:
        front_end: what steps run A, a key of FRONT_ENDS.
        ranks: how many there are. A and B reduce gradients by an all-reduce, whose order of sums is
            its own, C in rank order; of up to two numbers there is but one sum.
    """
    return [
        Way("A", f"functional-optim, {front_end}", FRONT_ENDS[front_end], exact=True),
        Way("B", "torch.optim.AdamW, after DDP", TorchAdamW, exact=True),
        Way("C", "ZeroRedundancyOptimizer, zero_step_hook", ZeroStepHook, exact=ranks <= 2),
    ]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The memory of the tensors that stand in an optimizer's ``state``."""
    return tensor_bytes(
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that is held for these tensors.

    Views of the same memory count once, and a view of a part of it counts as all of it.
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
