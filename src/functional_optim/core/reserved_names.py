"""Names that no field of a state and no hyper-parameter may have."""

from collections.abc import Iterable
from typing import Any

RESERVED_STATE = ("step",)
"""Keys of torch's dicts of state that hold something else: the step count of a parameter."""

RESERVED_HYPER = ("params", "param_names", "initial_lr", "decoupled_weight_decay", "step")
"""Keys of torch's parameter groups that hold something else than a hyper-parameter."""


def require_free(stage: str, what: str, record: Any, reserved: Iterable[str]) -> None:
    """Refuse a field with a name that torch's dicts keep for something else.

    Raises:
        ValueError: a field of the record has such a name.
    """
    taken = [name for name in getattr(record, "_fields", ()) if name in reserved]
    if taken:
        raise ValueError(
            f"{stage}: {what} cannot be called {taken[0]!r}, since torch's state dicts keep "
            f"something else under {', '.join(map(repr, reserved))}; rename it (such as "
            f"{stage}_{taken[0]})"
        )
