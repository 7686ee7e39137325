"""Placement of parameters on workers: read from RRefs, from a mapping, or from a plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from functional_optim.core.brief import brief, some
from functional_optim.core.checks import check_count
from functional_optim.frontends.local_optimizer import as_groups
from functional_optim.frontends.torch_groups import options_of
from functional_optim.remote.worker import Share


class PlacedParam(NamedTuple):
    """A parameter and where it lives."""

    name: str
    worker: str
    handle: Any
    """The parameter, or what refers to it."""
    like: Tensor
    """The parameter, or a tensor without memory of its shape and dtype."""


class PlacedGroup(NamedTuple):
    """A parameter group."""

    params: list[PlacedParam]
    options: dict[str, Any]
    named: bool
    """Whether the caller gave the names."""


class ElementOwner(Protocol):
    """Owner of elements of a parameter."""

    @property
    def ranks(self) -> Sequence[int]:
        """Return a rank for each replica."""


class AnyShardPlan(Protocol):
    """Interface of a plan, such as a ``sharding.ShardPlan``."""

    def owners(self, path: str) -> Sequence[ElementOwner]:
        """Return the owners of a parameter, range by range."""


Placement = Mapping[str, str] | AnyShardPlan
"""The worker of each parameter, by name; or a plan, whose rank 1 is the worker "rank1"."""


_UNKNOWN = torch.empty(0, device="meta")
"""In the place of what workers have yet to tell."""


def shares_of(groups: Sequence[PlacedGroup]) -> dict[str, list[Share]]:
    """Each worker's part of all groups; a worker has none of a group with no parameter there."""
    found: dict[str, list[Share]] = {}
    for number, group in enumerate(groups):
        by_worker: dict[str, list[tuple[int, PlacedParam]]] = {}
        for place, one in enumerate(group.params):
            by_worker.setdefault(one.worker, []).append((place, one))
        for worker, ones in by_worker.items():
            places = tuple(place for place, _ in ones)
            params = [(one.name, one.handle) for _, one in ones]
            found.setdefault(worker, []).append(Share(number, places, params, group.options))
    return found


def from_rrefs(
    params_rref: Any,
    is_rref: Callable[[Any], bool],
    owner_of: Callable[[Any], str],
    likes_of: Callable[[Mapping[str, Sequence[tuple[str, Any]]]], Mapping[str, Tensor]],
) -> list[PlacedGroup]:
    """Groups of RRefs, (name, RRef) pairs, or dicts of them.

    Args:
        params_rref: as the caller gave it.
        is_rref: whether something is a remote reference.
        owner_of: the worker that it lives on.
        likes_of: asks each worker for the shapes and dtypes of what RRefs refer to, by name.

    Raises:
        TypeError: something that is no RRef, or one to something else than a tensor.
        ValueError: no RRef; one twice; a name twice.
        WorkerError: workers gave no answer.
    """
    if is_rref(params_rref) or not isinstance(params_rref, Iterable):
        raise TypeError(
            f"params_rref must be a list of RRefs to parameters, got {brief(params_rref)}"
        )

    def placed(name: str, rref: Any) -> PlacedParam:
        if not is_rref(rref):
            raise TypeError(
                f"{name!r} must be an RRef to a parameter, got {brief(rref)}; for one of this "
                "process give torch.distributed.rpc.RRef(param), and for parameters of this "
                "process alone DistributedOptimizer.over_threads"
            )
        return PlacedParam(name, owner_of(rref), rref, _UNKNOWN)

    groups = _placed_groups(as_groups(params_rref), placed)
    asked: dict[str, list[tuple[str, Any]]] = {}
    for one in (one for group in groups for one in group.params):
        asked.setdefault(one.worker, []).append((one.name, one.handle))
    likes = likes_of(asked)
    return [
        group._replace(params=[one._replace(like=likes[one.name]) for one in group.params])
        for group in groups
    ]


def from_placement(params: Any, placement: Placement) -> list[PlacedGroup]:
    """Groups of a model's parameters, each on the worker that a placement has for it.

    Args:
        params: a module, its named parameters (pairs or a mapping), or groups of pairs.
        placement: the worker of each, by name, or a plan.

    Raises:
        TypeError: parameters without names; a worker that is no name.
        ValueError: a parameter that is placed nowhere; a name that no parameter has; a plan that
            cuts a parameter, or has several replicas.
    """
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    elif isinstance(params, Mapping):
        params = params.items()
    groups = as_groups(params)
    names = [_name_of(one) for group in groups for one in group["params"]]
    if isinstance(placement, Mapping):
        where = _by_name(names, placement)
    else:
        where = {name: _by_plan(name, placement) for name in names}
    return _placed_groups(groups, lambda name, param: PlacedParam(name, where[name], param, param))


def by_place(
    gradients: Any, groups: Sequence[PlacedGroup], given: Sequence[PlacedParam]
) -> list[list[Tensor | None]]:
    """Gradients for each group's parameters, from a list or a mapping by name.

    Args:
        gradients: as the caller gives them.
        groups: as workers have them.
        given: all parameters, in the order of the caller.

    Raises:
        TypeError: something else.
        ValueError: another number of gradients than of parameters; a name that no parameter has.
    """
    names = [one.name for one in given]
    if isinstance(gradients, Mapping):
        unknown = [name for name in gradients if name not in set(names)]
        if unknown:
            raise ValueError(
                f"there are gradients for {some(unknown)}, but no such parameters; there are "
                f"{some(names)}"
            )
        found = [gradients.get(name) for name in names]
    elif isinstance(gradients, Sequence):
        found = list(gradients)
        check_count(found, len(names))
    else:
        raise TypeError(
            "step takes gradients, in a list or a mapping by name, or over RPC the id of a "
            f"distributed autograd context; got {brief(gradients)}"
        )
    by_name = dict(zip(names, found, strict=True))
    return [[by_name[one.name] for one in group.params] for group in groups]


def torch_group(group: PlacedGroup, options: Mapping[str, Any]) -> dict[str, Any]:
    """A group as torch's optimizers have it."""
    made = {"params": [one.handle for one in group.params], **options}
    if group.named:
        made["param_names"] = [one.name for one in group.params]
    return made


def empty_entries(groups: Iterable[Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return an entry for each parameter, for ``optimizer.state``; the state is on the workers.

    ``torch.distributed.checkpoint.state_dict`` makes a step where ``optimizer.state`` is empty.
    """
    return {param: {} for group in groups for param in group["params"]}


def _placed_groups(
    groups: Sequence[Mapping[str, Any]], placed: Callable[[str, Any], PlacedParam]
) -> list[PlacedGroup]:
    found = []
    seen: set[str] = set()
    for number, group in enumerate(groups):
        given = group.get("param_names") or [None] * len(group["params"])
        params, named = [], False
        for place, (one, other) in enumerate(zip(group["params"], given, strict=True)):
            is_pair = isinstance(one, tuple) and len(one) == 2
            name = one[0] if is_pair else other
            named = named or name is not None
            name = f"{number}.{place}" if name is None else str(name)
            if name in seen:
                raise ValueError(f"two parameters have the name {name!r}; give each its own")
            seen.add(name)
            params.append(placed(name, one[1] if is_pair else one))
        found.append(PlacedGroup(params, options_of(group), named))
    return found


def _name_of(one: Any) -> str:
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor):
        return str(one[0])
    raise TypeError(
        "a placement is by name, so params must have names: give the module, "
        f"model.named_parameters(), or groups of (name, parameter) pairs; got {brief(one)}"
    )


def _by_name(names: Sequence[str], placement: Mapping[str, str]) -> dict[str, str]:
    nowhere = [name for name in names if name not in placement]
    if nowhere:
        raise ValueError(
            f"{len(nowhere)} of {len(names)} parameters are on no worker ({some(nowhere)}); give "
            "placement a worker for each"
        )
    unknown = [name for name in placement if name not in set(names)]
    if unknown:
        raise ValueError(
            f"placement names {some(unknown)}, but there is no such parameter; there are "
            f"{some(names)}"
        )
    for name in names:
        if not isinstance(placement[name], str) or not placement[name]:
            raise TypeError(
                f"the worker of {name!r} must be a name, such as 'ps0', got {placement[name]!r}"
            )
    return {name: placement[name] for name in names}


def _by_plan(name: str, plan: AnyShardPlan) -> str:
    owners = plan.owners(name)
    if len(owners) != 1:
        raise ValueError(
            f"the plan cuts {name!r} between {len(owners)} ranks; a worker steps whole "
            "parameters: take a policy that leaves them whole, such as 'greedy'"
        )
    ranks = owners[0].ranks
    if len(ranks) != 1:
        raise ValueError(
            f"the plan has {name!r} on {len(ranks)} replicas; a parameter lives on one worker: "
            "take a plan without replicas"
        )
    return f"rank{ranks[0]}"
