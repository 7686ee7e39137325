"""Where the coefficients of a bound optimizer are computed: by Python, or on the device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from functional_optim import engine
from functional_optim.bound_work import At
from functional_optim.executors import EXECUTORS, Executor
from functional_optim.stage import Stage

if TYPE_CHECKING:
    from functional_optim.optimizer import Optimizer


class Numbers(Protocol):
    """A place where coefficients are computed."""

    counts_beside: bool
    """Whether step counts are on the devices of their parameters."""
    watched: list[Tensor]
    """Parameters of which no step may be captured."""

    def executor(self, optimizer: "Optimizer") -> Executor:
        """What steps parameters."""
        ...

    def at(self, stages: Sequence[Stage], *, plain: bool) -> At:
        """What gives the coefficients of lanes."""
        ...

    def make(self) -> Callable[[engine.Item], engine.Made] | None:
        """What gives those of parameters that are stepped one by one; None for Python's."""
        ...


class OnHost:
    """Coefficients are computed in Python, in double precision.

    Args:
        params: whose steps no CUDA graph may capture.
    """

    counts_beside = False

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.watched = [param for param in params if param.is_cuda][:1]

    def executor(self, optimizer: "Optimizer") -> Executor:
        return EXECUTORS[optimizer.executor]

    def at(self, stages: Sequence[Stage], *, plain: bool) -> At:
        return partial(_at, stages, plain)

    def make(self) -> None:
        return None


def _at(
    stages: Sequence[Stage], plain: bool, hypers: tuple[Any, ...], step: float, count: Tensor
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    return engine.coefficients_at(stages, hypers, step, plain=plain)
