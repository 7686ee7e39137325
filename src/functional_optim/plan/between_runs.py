"""BetweenRuns: a call between the runs of a step."""

from collections.abc import Callable, Sequence
from itertools import compress
from operator import not_
from typing import NamedTuple

from torch import Tensor

Call = Callable[[], object]


class BetweenRuns(NamedTuple):
    """Call after the runs of some leaves, and before the runs of all other leaves.

    Runs are of different leaves, so their order changes no result.

    Example::

        >>> import torch
        >>> params = [torch.ones(2), torch.ones(2, 2)]
        >>> said = []
        >>> between = BetweenRuns(lambda param: param.dim() == 2, lambda: said.append("sent"))
        >>> runs = [lambda: said.append("vector"), lambda: said.append("matrix")]
        >>> for call in between.ordered(runs, [(0,), (1,)], params):
        ...     call()
        >>> said
        ['matrix', 'sent', 'vector']
    """

    is_first: Callable[[Tensor], bool]
    """Return True for a parameter whose run comes before the call."""
    call: Call

    def ordered(
        self, runs: Sequence[Call], members: Sequence[Sequence[int]], params: Sequence[Tensor]
    ) -> list[Call]:
        """Return all runs and the call, in order.

        Args:
            runs: of the step.
            members: for each run, the indices of its leaves.
            params: of all leaves.
        """
        first = [any(self.is_first(params[k]) for k in own) for own in members]
        return [*compress(runs, first), self.call, *compress(runs, map(not_, first))]
