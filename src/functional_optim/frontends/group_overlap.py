"""Check that no two parameters of torch's parameter groups share a part of their memory."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from functional_optim.core.overlap import check_no_overlap


def check_group_overlap(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if two parameters of parameter groups share a part of their memory."""
    params = [one[1] if isinstance(one, tuple) else one for one in _listed_params(groups)]
    check_no_overlap(params, lambda: _labels_of(groups))


def _listed_params(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    lists = [group["params"] for group in groups]
    return [one for own in lists for one in ([own] if isinstance(own, Tensor) else own)]


def _labels_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the name of each parameter, or its group and its index in the group."""
    labels: list[str] = []
    for number, group in enumerate(groups):
        own = _listed_params([group])
        names = group.get("param_names") or [
            f"param_groups[{number}][{k}]" for k in range(len(own))
        ]
        pairs = zip(own, names, strict=True)
        labels += [str(one[0]) if isinstance(one, tuple) else name for one, name in pairs]
    return labels
