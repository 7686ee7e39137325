"""Placement of parameters on workers, from RRefs, a mapping or a shard plan."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from functional_optim.engine.messages import format_names, format_value
from functional_optim.engine.options import options_of
from functional_optim.engine.recipes import as_groups
from functional_optim.engine.tensors import check_count
from functional_optim.remote.worker import WorkerGroup


class PlacedParam(NamedTuple):
    """Parameter and its worker."""

    name: str
    worker: str
    handle: Any
    """The parameter, or an RRef to it."""
    like: Tensor
    """The parameter, or a meta tensor of its shape and dtype."""


class PlacedGroup(NamedTuple):
    """Parameter group."""

    params: list[PlacedParam]
    options: dict[str, Any]
    named: bool
    """True if the caller gave names."""

    def to_torch(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the group in the format of torch's optimizers."""
        group = {"params": [one.handle for one in self.params], **options}
        if self.named:
            group["param_names"] = [one.name for one in self.params]
        return group


class ElementOwner(Protocol):
    """Owner of elements of a parameter."""

    @property
    def ranks(self) -> Sequence[int]:
        """Return one rank for each replica."""


class ShardPlanLike(Protocol):
    """Interface of a shard plan, such as a ``sharding.ShardPlan``."""

    def owners(self, path: str) -> Sequence[ElementOwner]:
        """Return the owner of each range of a parameter."""


Placement = Mapping[str, str] | ShardPlanLike
"""The worker of each parameter, by name; or a plan, whose rank 1 is the worker "rank1"."""


_UNKNOWN = torch.empty(0, device="meta")
"""Placeholder until workers send the shape and dtype of a parameter."""


def groups_by_worker(groups: Sequence[PlacedGroup]) -> dict[str, list[WorkerGroup]]:
    """Return the groups of each worker. A worker has only groups with parameters on that worker."""
    found: dict[str, list[WorkerGroup]] = {}
    for number, group in enumerate(groups):
        for worker in dict.fromkeys(one.worker for one in group.params):
            params = [(one.name, one.handle) for one in group.params if one.worker == worker]
            found.setdefault(worker, []).append(WorkerGroup(number, params, group.options))
    return found


def place_rrefs(
    params_rref: Any,
    is_rref: Callable[[Any], bool],
    fetch_meta_tensors: Callable[[Mapping[str, Sequence[tuple[str, Any]]]], Mapping[str, Tensor]],
) -> list[PlacedGroup]:
    """Return groups of placed parameters, from RRefs, (name, RRef) pairs, or groups of them.

    ``fetch_meta_tensors`` asks each worker for shapes and dtypes.
    """
    if is_rref(params_rref) or not isinstance(params_rref, Iterable):
        raise TypeError(
            f"params_rref must be a list of RRefs to parameters, got {format_value(params_rref)}"
        )

    def place_rref(name: str, rref: Any) -> PlacedParam:
        if not is_rref(rref):
            raise TypeError(
                f"{name!r} must be an RRef to a parameter, got {format_value(rref)}; for one of "
                "this process give torch.distributed.rpc.RRef(param), and for parameters of this "
                "process alone DistributedOptimizer.over_threads"
            )
        return PlacedParam(name, rref.owner_name(), rref, _UNKNOWN)

    groups = _build_groups(as_groups(params_rref), place_rref)
    pairs: dict[str, list[tuple[str, Any]]] = {}
    for one in (one for group in groups for one in group.params):
        pairs.setdefault(one.worker, []).append((one.name, one.handle))
    likes = fetch_meta_tensors(pairs)
    return [
        group._replace(params=[one._replace(like=likes[one.name]) for one in group.params])
        for group in groups
    ]


def place_params(params: Any, placement: Placement) -> list[PlacedGroup]:
    """Return groups of a model's parameters, each on the worker of the placement.

    ``params`` is a module, its named parameters (pairs or a mapping), or groups of pairs.
    """
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    elif isinstance(params, Mapping):
        params = params.items()
    groups = as_groups(params)
    names = [_name_of(one) for group in groups for one in group["params"]]
    if isinstance(placement, Mapping):
        workers = _workers_from_mapping(names, placement)
    else:
        workers = {name: _worker_from_plan(name, placement) for name in names}
    return _build_groups(groups, lambda name, param: PlacedParam(name, workers[name], param, param))


def name_gradients(gradients: Any, params: Sequence[PlacedParam]) -> dict[str, Tensor | None]:
    """Return the gradient of each parameter by name, from a list or a mapping by name.

    ``params`` has all parameters in the order of the caller.
    """
    names = [one.name for one in params]
    if isinstance(gradients, Mapping):
        unknown = [name for name in gradients if name not in set(names)]
        if unknown:
            raise ValueError(
                f"there are gradients for {format_names(unknown)}, but no such parameters; there "
                f"are {format_names(names)}"
            )
        return {name: gradients.get(name) for name in names}
    if not isinstance(gradients, Sequence):
        raise TypeError(
            "step takes gradients, in a list or a mapping by name, or over RPC the id of a "
            f"distributed autograd context; got {format_value(gradients)}"
        )
    check_count(gradients, len(names))
    return dict(zip(names, gradients, strict=True))


def _build_groups(
    groups: Sequence[Mapping[str, Any]], place: Callable[[str, Any], PlacedParam]
) -> list[PlacedGroup]:
    found = []
    seen: set[str] = set()
    for number, group in enumerate(groups):
        names = group.get("param_names") or [None] * len(group["params"])
        params, named = [], False
        for index, (one, own) in enumerate(zip(group["params"], names, strict=True)):
            is_pair = isinstance(one, tuple) and len(one) == 2
            name = one[0] if is_pair else own
            named = named or name is not None
            name = f"{number}.{index}" if name is None else str(name)
            if name in seen:
                raise ValueError(f"two parameters have the name {name!r}; give each its own")
            seen.add(name)
            params.append(place(name, one[1] if is_pair else one))
        found.append(PlacedGroup(params, options_of(group), named))
    return found


def _name_of(one: Any) -> str:
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor):
        return str(one[0])
    raise TypeError(
        "a placement is by name, so params must have names: give the module, "
        f"model.named_parameters(), or groups of (name, parameter) pairs; got {format_value(one)}"
    )


def _workers_from_mapping(names: Sequence[str], placement: Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in names if name not in placement]
    if missing:
        raise ValueError(
            f"{len(missing)} of {len(names)} parameters are on no worker "
            f"({format_names(missing)}); give placement a worker for each"
        )
    unknown = [name for name in placement if name not in set(names)]
    if unknown:
        raise ValueError(
            f"placement names {format_names(unknown)}, but there is no such parameter; there are "
            f"{format_names(names)}"
        )
    for name in names:
        if not isinstance(placement[name], str) or not placement[name]:
            raise TypeError(
                f"the worker of {name!r} must be a name, such as 'ps0', got {placement[name]!r}"
            )
    return {name: placement[name] for name in names}


def _worker_from_plan(name: str, plan: ShardPlanLike) -> str:
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
