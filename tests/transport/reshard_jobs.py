"""Jobs of the ranks: parameters that go from the owners of one plan to those of another."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sharding import ParameterSpec, ShardPlan, exchange, plan, reshard

SPECS = [
    ParameterSpec("wide", (6, 50)),
    ParameterSpec("b", (7,), torch.bfloat16),
    ParameterSpec("empty", (0, 3)),
    ParameterSpec("deep", (5, 3, 2), torch.float64),
    ParameterSpec("scale", ()),
    ParameterSpec("last", (11,)),
]


def made(given: Mapping[str, Any]) -> ShardPlan:
    return plan(SPECS, **given)


def whole(spec: ParameterSpec) -> Tensor:
    """Return a parameter, flattened, with values that only it has."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.path.encode()))
    return torch.randn(spec.numel, generator=generator, dtype=torch.float64).to(spec.dtype)


def held(layout: ShardPlan, rank: int) -> dict[str, Tensor]:
    """Return the elements of each parameter that a rank has."""
    found: dict[str, list[Tensor]] = {}
    for one in layout.owned(rank) if rank < layout.world_size else ():
        spec = layout.specs[one.parameter]
        found.setdefault(one.path, []).append(whole(spec)[one.start : one.stop])
    return {path: torch.cat(parts) for path, parts in found.items()}


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [path for path in one if not torch.equal(one[path], other[path])]


def moved(old: Mapping[str, Any], new: Mapping[str, Any], ranks: Sequence[int] = ()) -> list[str]:
    """Move parameters, step counts and, in place, parameters again; return what is wrong.

    Args:
        old, new: the arguments of the two plans.
        ranks: the global ranks of a group; by default the world.
    """
    group = dist.new_group(list(ranks)) if ranks else dist.group.WORLD
    if ranks and dist.get_rank() not in ranks:
        return []
    before, after, rank = made(old), made(new), group.rank()
    own, wanted = held(before, rank), held(after, rank)
    here = rank < max(before.world_size, after.world_size)
    copies = reshard(before, after, rank=rank) if here else ()
    found = {path: torch.zeros_like(one) for path, one in wanted.items()}
    exchange(copies, own, found, group)
    wrong = differing(found, wanted)

    steps = {path: torch.tensor(len(path)) for path in own}
    counts = {path: torch.tensor(-1) for path in wanted}
    exchange(copies, steps, counts, group)
    wrong += [f"count of {path}" for path, one in counts.items() if int(one) != len(path)]

    room = {}
    for path in {**own, **wanted}:
        both = [one[path] for one in (own, wanted) if path in one]
        room[path] = torch.zeros(max(map(len, both)), dtype=both[0].dtype)
    for path, one in own.items():
        room[path][: one.numel()] = one
    exchange(copies, room, room, group)
    same = {path: room[path][: one.numel()] for path, one in wanted.items()}
    return wrong + [f"{path} in place" for path in differing(same, wanted)]


def refused(fault: str, on: int) -> tuple[str, bool]:
    """Make an exchange with a fault on one rank; return the error, and if nothing changed."""
    rank = dist.get_rank()
    before, after = made({"world_size": 4, "policy": "elements"}), made({"world_size": 3})
    own, found = held(before, rank), {path: one.zero_() for path, one in held(after, rank).items()}
    copies = reshard(before, after, rank=rank)
    if rank == on:
        first = next(one for one in copies if one.source == rank)
        if fault == "missing":
            del own[first.path]
        elif fault == "short":
            own[first.path] = own[first.path][:0]
        elif fault == "dtype":
            own[first.path] = own[first.path].to(torch.float16)
        elif fault == "no tensor":
            own[first.path] = [1.0]  # type: ignore[assignment]
        else:
            copies = reshard(before, made({"world_size": 2}), rank=rank)
    try:
        exchange(copies, own, found)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", not any(map(torch.any, found.values()))
    return "", False
