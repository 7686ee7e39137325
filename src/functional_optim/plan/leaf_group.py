"""Leaves that have the same hyper-parameters, known by one of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.chain import Chain
from functional_optim.core.initial import fields_of
from functional_optim.core.stage import Stage
from functional_optim.core.tree import Path
from functional_optim.core.where import Shape


class LeafGroup(NamedTuple):
    """Leaves that have the same hyper-parameters, by one of them."""

    path: Path
    shape: Shape
    kinds: frozenset[tuple[Shape, torch.dtype]]
    """The shapes and dtypes of all of them."""

    @classmethod
    def of(cls, path: Path, params: Sequence[Tensor]) -> "LeafGroup":
        """The group of some parameters, of which the first is at ``path``."""
        kinds = frozenset((tuple(one.shape), one.dtype) for one in params)
        return cls(path, tuple(params[0].shape), kinds)

    def hypers(self, optimizer: Chain) -> tuple[Any, ...]:
        """The hyper-parameters of these leaves."""
        if not optimizer.overrides:
            return tuple([link.hyper for link in optimizer.links])
        return optimizer.hypers_at(self.path, self.shape)

    def ask_alike(self, stages: Sequence[Stage], one: Any, other: Any) -> bool:
        """Whether two sets of hyper-parameters ask for the same fields of state."""
        return one is other or all(
            fields_of(stages, one, *kind) == fields_of(stages, other, *kind) for kind in self.kinds
        )
