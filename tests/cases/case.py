"""Case: a constructor, its options and its oracle; and strategies that cases share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

from functional_optim.optimizer import Optimizer
from functional_optim.testing.runs import MAX_STEPS
from functional_optim.testing.subject import Subject, plain_oracle

Options = st.SearchStrategy[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """Case of one optimizer of this package.

    Args:
        factory: the constructor.
        oracle: the torch.optim class that it equals bit for bit.
        options: strategy over all options that change the result.
        refused: keyword arguments for which the constructor and the oracle raise ValueError.
        refused_here: keyword arguments for which only the constructor raises ValueError. Mostly
            NaN, which some classes of torch accept.
        matrices: True if parameters must be real matrices.
        one_chain: True if all leaves have the same stages, and there are no shared scalars. Then
            the optimizer can be bound, scripted and captured.
        takes_complex: True if parameters may be complex.
        max_steps: largest number of steps in a run.
    """

    factory: Callable[..., Optimizer]
    oracle: type[torch.optim.Optimizer] | None = None
    options: Options = field(default_factory=lambda: st.just({}))
    refused: tuple[dict[str, Any], ...] = ()
    refused_here: tuple[dict[str, Any], ...] = ()
    matrices: bool = False
    one_chain: bool = True
    takes_complex: bool = True
    max_steps: int = MAX_STEPS

    def subject(self) -> Subject:
        """Return the subject for the laws."""
        return Subject(
            self.factory,
            plain_oracle(self.oracle),
            self.options,
            matrices=self.matrices,
            takes_complex=self.takes_complex,
            max_steps=self.max_steps,
        )


def some(**options: st.SearchStrategy[Any]) -> Options:
    """Return a strategy that draws a subset of these options."""
    return st.fixed_dictionaries({}, optional=options)


def bad_values(**values: list[Any]) -> tuple[dict[str, Any], ...]:
    """Return keyword arguments with one invalid value each."""
    return tuple({name: value} for name, several in values.items() for value in several)


NAN = float("nan")
BAD_LR = bad_values(lr=[-0.1])
NAN_LR = bad_values(lr=[NAN, float("inf")])
BAD_ADAM = (
    *BAD_LR,
    *bad_values(betas=[(1.0, 0.9), (0.9, 1.0), (-0.1, 0.9)], eps=[-1.0], weight_decay=[-1.0]),
)
NAN_ADAM = (*NAN_LR, *bad_values(betas=[(NAN, 0.9), (0.9, NAN)], eps=[NAN]))

LR = st.sampled_from([0.0, 1e-3, 0.1, 1.0])
DECAY = st.sampled_from([0.0, 0.01, 0.5])
BETAS = st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.8, 0.0)])
EPS = st.sampled_from([1e-8, 1e-3])
FLAG = st.booleans()
