"""Default functions of a stage, and names that its fields must not have."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.hyper import field_types

NoState = tuple[()]
"""The state of a stateless stage: always ``()``."""


class NoHyper(NamedTuple):
    """Hyper-parameters of a stage that has none."""


Sparse = Literal["refuse", "rows", "dense"]
"""How a stage handles a sparse gradient (see ``Stage.sparse``)."""


def no_init(param: Tensor, hyper: Any) -> NoState:
    """Return the state of a stateless stage."""
    return ()


@dataclass(frozen=True)
class ZeroInit:
    """The ``init`` of a stage that declares none: zeros like the parameter, and empty lists."""

    state: Any

    def __call__(self, param: Tensor, hyper: Any) -> Any:
        kinds = field_types(self.state).values()
        return self.state(*(torch.zeros_like(param) if kind is Tensor else [] for kind in kinds))


def same_coefficients(step: float, hyper: Any) -> Any:
    """Return the hyper-parameters as coefficients."""
    return hyper


def no_shared(hyper: Any) -> NoState:
    """Return the shared scalars of a stage that has none."""
    return ()


def no_check(hyper: Any) -> None:
    """Accept all combinations of hyper-parameters."""


def refuse_sparse(hyper: Any) -> Sparse:
    """Refuse sparse gradients."""
    return "refuse"


def takes_dense(hyper: Any) -> bool:
    """Accept dense gradients."""
    return True


def rows_of_sparse(hyper: Any) -> Sparse:
    """Step only the stored rows of a sparse gradient: a zero gradient must change nothing."""
    return "rows"


RESERVED_STATE = ("step",)
"""Keys of torch's state dicts with another meaning: the step count of a parameter."""

RESERVED_HYPER = ("params", "param_names", "initial_lr", "decoupled_weight_decay", "step")
"""Keys of torch's parameter groups that are not hyper-parameters."""


def require_free(stage: str, what: str, record: Any, reserved: Iterable[str]) -> None:
    """Raise ValueError if a field of a NamedTuple class has a reserved name."""
    taken = [name for name in getattr(record, "_fields", ()) if name in reserved]
    if taken:
        raise ValueError(
            f"{stage}: {what} cannot be called {taken[0]!r}, since torch's state dicts keep "
            f"something else under {', '.join(map(repr, reserved))}; rename it (such as "
            f"{stage}_{taken[0]})"
        )
