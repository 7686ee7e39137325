"""torch's parameter groups: which of their entries are options."""

from collections.abc import Mapping
from typing import Any

NOT_OPTIONS = ("params", "param_names")
"""What a parameter group holds beside its options."""


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a parameter group but its parameters.

    Example::

        >>> options_of({"params": [], "param_names": [], "lr": 0.1})
        {'lr': 0.1}
    """
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}
