"""Case of the tables: an optimizer, its options, its oracle; and common strategies."""

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
        factory: its constructor.
        oracle: the torch.optim class that it equals bit for bit.
        options: a strategy over every documented option that changes the numbers.
        refused: keyword arguments that raise ValueError in constructor and oracle alike.
        refused_here: keyword arguments that raise ValueError in the constructor only (NaN, mostly,
            which some of torch's classes let through).
        matrices: whether parameters must be real matrices.
        one_chain: whether all leaves have the same stages, and nothing is kept that belongs to no
            leaf: it can then be bound, scripted and captured.
        takes_complex: whether parameters may be complex.
        max_steps: most steps of a run that is drawn.
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
        """The case as the laws take it."""
        return Subject(
            self.factory,
            plain_oracle(self.oracle),
            self.options,
            matrices=self.matrices,
            takes_complex=self.takes_complex,
            max_steps=self.max_steps,
        )


def some(**options: st.SearchStrategy[Any]) -> Options:
    """Any subset of these options."""
    return st.fixed_dictionaries({}, optional=options)


LR = st.sampled_from([0.0, 1e-3, 0.1, 1.0])
DECAY = st.sampled_from([0.0, 0.01, 0.5])
BETAS = st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.8, 0.0)])
EPS = st.sampled_from([1e-8, 1e-3])
FLAG = st.booleans()
