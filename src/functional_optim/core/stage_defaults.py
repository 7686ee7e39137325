"""Declarations that a stage has unless it says otherwise."""

from typing import Any, Literal

from torch import Tensor

NoState = tuple[()]
"""The state of a stage that keeps none; its one value is ``()``."""

Sparse = Literal["refuse", "rows", "dense"]
"""What a sparse gradient means to a stage."""


def no_init(param: Tensor, hyper: Any) -> NoState:
    """State of a stage that keeps none."""
    return ()


def same_coefficients(step: float, hyper: Any) -> Any:
    """Coefficients of a stage whose hyper-parameters are used as they are."""
    return hyper


def no_shared(hyper: Any) -> NoState:
    """Shared numbers of a stage that has none."""
    return ()


def no_check(hyper: Any) -> None:
    """Validation of a stage whose hyper-parameters have bounds, but no relation between them."""


def refuse_sparse(hyper: Any) -> Sparse:
    """A stage that has no meaning for a sparse gradient."""
    return "refuse"


def takes_dense(hyper: Any) -> bool:
    """A stage that takes a dense gradient."""
    return True


def rows_of_sparse(hyper: Any) -> Sparse:
    """A stage that does nothing where the gradient is zero, so that only stored rows matter."""
    return "rows"
