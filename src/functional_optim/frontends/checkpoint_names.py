"""Matching of the parameters of a checkpoint and of an optimizer, by name or by position."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from functional_optim.core.format import format_names
from functional_optim.frontends.torch_checkpoint import require_state_dict

_SHOWN = 4
"""Maximal number of names that an error lists."""


def match_params(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups of a state dict as :func:`match_by_name` does; check its numbers."""
    require_state_dict(state_dict)
    saved = match_by_name(state_dict["param_groups"], groups)
    check_numbers(state_dict["state"], saved, groups)
    return saved


def check_numbers(
    state: Mapping[Any, Any],
    saved: Sequence[Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Raise ValueError if the parameter numbers of a checkpoint would lose state.

    A parameter that is twice in a group of the optimizer has the same number twice. Keys of other
    types than int are entries of the caller, which torch.optim keeps. ``saved`` has the groups of
    the checkpoint, in the order of the groups of the optimizer.
    """
    if [len(one["params"]) for one in saved] != [len(one["params"]) for one in groups]:
        return  # each front-end has its own error for groups of other sizes
    known: dict[Any, tuple[Any, str]] = {}
    numbers: dict[Any, tuple[Any, str]] = {}
    for index, (one, own) in enumerate(zip(saved, groups, strict=True)):
        for k, (number, param) in enumerate(zip(one["params"], own["params"], strict=True)):
            here = f"params[{k}] of group {index}"
            before, there = known.setdefault(number, (param, here))
            if before is not param:
                raise ValueError(
                    f"this checkpoint lists the parameter number {number!r} twice, as {there} and "
                    f"as {here}, which are two parameters of this optimizer; give each parameter "
                    "a number of its own in the checkpoint's groups, and its state that number"
                )
            first, there = numbers.setdefault(param, (number, here))
            if first != number:
                raise ValueError(
                    f"this checkpoint has the parameter numbers {first!r} and {number!r} for "
                    f"{there} and {here}, which are one parameter of this optimizer; give the "
                    "optimizer this parameter once, or the checkpoint one number for both"
                )
    listed = {number for one in saved for number in one["params"]}
    unknown = [key for key in state if isinstance(key, int) and key not in listed]
    if unknown:
        raise ValueError(
            f"this checkpoint has state for the parameter number {unknown[0]}, which is in none of "
            f"its groups (numbers in groups: {len(listed)}); add the number to the 'params' of a "
            "group, or remove its state"
        )


def match_by_name(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the groups of a checkpoint in the order of an optimizer's groups and parameters.

    Groups are matched by the names of their parameters, and parameters by their names. If one side
    has no names, the groups are returned unchanged, and parameters are matched by position. torch's
    distributed checkpoints identify parameters by strings: their parameters are already in the
    optimizer's order, but "param_names" is not, so it is removed.
    """
    kept = [dict(group) for group in saved]
    if any(isinstance(one, str) for group in kept for one in group["params"]):
        return [{key: group[key] for key in group if key != "param_names"} for group in kept]
    ours, theirs = _names(groups), _names(kept)
    if ours is None or theirs is None or ours == theirs:
        return kept
    same_groups = [*map(Counter, ours)] == [*map(Counter, theirs)]
    if not (same_groups and all(len({*names}) == len(names) for names in ours)):
        _check_names(ours, theirs)
        kept = [kept[number] for number in _matched_groups(ours, theirs)]
    return [_reorder(group, names) for group, names in zip(kept, ours, strict=True)]


def _names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    """Return the names of each group's parameters, or None if a parameter has no name."""
    found = [list(group.get("param_names") or ()) for group in groups]
    sizes = [len(group["params"]) for group in groups]
    return found if [*map(len, found)] == sizes and any(sizes) else None


def _check_names(ours: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> None:
    """Raise ValueError unless both sides have the same names, each once."""
    own, other = Counter(chain.from_iterable(ours)), Counter(chain.from_iterable(theirs))
    missing = [name for name in own if name not in other]
    unknown = [name for name in other if name not in own]
    if missing or unknown:
        told = [f"the checkpoint has no {format_names(missing, _SHOWN)}"] if missing else []
        told += [f"the optimizer has no {format_names(unknown, _SHOWN)}"] if unknown else []
        raise ValueError(
            "the parameters of this checkpoint and of this optimizer have names, so they are "
            f"matched by name: {'; '.join(told)}. Rename them under 'param_names' in the "
            "checkpoint's groups; or remove 'param_names' there, and parameters are matched by "
            "position"
        )
    for counts, side in ((own, "optimizer"), (other, "checkpoint")):
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                f"two parameters of the {side} have the name {twice[0]!r}, so parameters cannot be "
                "matched by name; give each parameter a name of its own, or remove 'param_names' "
                "from the checkpoint's groups, and parameters are matched by position"
            )


def _matched_groups(ours: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]) -> list[int]:
    """Return, for each group of the optimizer, the index of the same group in the checkpoint."""
    left = list(range(len(theirs)))
    found = []
    for number, names in enumerate(ours):
        alike = [other for other in left if {*theirs[other]} == {*names}]
        if not alike:
            raise ValueError(
                f"parameter group {number} of this optimizer has "
                f"{format_names(list(names), _SHOWN)}, and no group of the checkpoint has the "
                "same parameters; give the optimizer the groups that it had when the checkpoint "
                "was saved"
            )
        left.remove(alike[0])
        found.append(alike[0])
    if left:
        raise ValueError(
            f"this checkpoint has {len(theirs)} parameter groups, the optimizer has {len(ours)}; "
            "give the optimizer the groups that it had when the checkpoint was saved"
        )
    return found


def _reorder(group: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a group with its parameters in the order of ``names``."""
    known = dict(zip(group["param_names"], group["params"], strict=True)) if names else {}
    numbers = [known[name] for name in names]
    return {**group, "params": numbers} | ({"param_names": list(names)} if names else {})
