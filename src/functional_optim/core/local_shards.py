"""Checks and conversions of DTensor parameters, gradients and state, as of FSDP2.

A pointwise chain steps the local shard like a parameter. For a chain that needs whole tensors, the
reference executor runs torch's operators on DTensors, if all stages have ``takes_dtensors``.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from functional_optim._torch.distributed import is_strided_shard
from functional_optim.core.dtensors import (
    is_dtensor,
    redistribute_like,
    sum_over_ranks,
    to_local,
    unshard_like,
)
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import map_state

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def check_no_dtensor(params: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError if a parameter is a DTensor; ``what`` names the caller."""
    for name, param in params.items():
        if is_dtensor(param):
            raise ValueError(
                f"{_describe(name, param)}, and {what} takes plain tensors only; step it by "
                "update_, bind or TorchOptimizer, or give to_local() of parameters and gradients"
            )


def can_step_shards(stages: Sequence[Stage]) -> bool:
    """Return True if stages can step a shard without the rest of its tensor.

    Stages with totals can, since totals are first reduced over all ranks.
    """
    return all(stage.kind == "pointwise" for stage in stages) and block_size_of(stages) == 1


def can_step_rows(stages: Sequence[Stage], hypers: Sequence[Any]) -> bool:
    """Return True if stages can step a slice of dimension 0 without the rest of the tensor.

    Pointwise stages can, and rules on batches of matrices, since each matrix is stepped alone.
    """
    if block_size_of(stages) != 1:
        return False
    return all(
        stage.kind == "pointwise"
        or (stage.blocks is not None and stage.blocks.of(hyper).batch_axes > 0)
        for stage, hyper in zip(stages, hypers, strict=True)
    )


def check_takes_dtensor(stages: Sequence[Stage], param: Tensor, name: str) -> None:
    """Raise ValueError if the parameter is a DTensor, and a stage needs the whole tensor."""
    if not is_dtensor(param) or can_step_shards(stages):
        return
    blocks = next((stage for stage in stages if stage.granularity > 1), None)
    if blocks is not None:
        raise ValueError(
            f"{_describe(name, param)}, and {blocks.name} works in blocks of {blocks.granularity} "
            "elements, which a shard may cut: step it by sharding.MatrixOwnerOptimizer, which "
            "gathers it on one rank, keep the state by float32 or bfloat16, or give to_local() of "
            "parameters and gradients where blocks of a shard will do"
        )
    whole = [one for one in stages if one.kind != "pointwise" and not one.takes_dtensors]
    if whole:
        raise ValueError(
            f"{_describe(name, param)}, and {whole[0].name} needs the whole tensor: step it by "
            "sharding.MatrixOwnerOptimizer, which gathers it on one rank, keep this parameter out "
            "of fully_shard (ignored_params), step it by another optimizer (see partition), or, "
            "for a stage of your own that torch's operators compute over DTensors, declare "
            "takes_dtensors=True"
        )


def _describe(name: str, param: "DTensor") -> str:
    return (
        f"the parameter at {name!r} is a DTensor ({format_placements(param)}), of which this rank "
        "holds a part"
    )


def refuse_executor(stages: Sequence[Stage], param: Tensor, name: str) -> None:
    """Raise the ValueError of an executor that cannot step DTensors with these stages."""
    whole = next(stage.name for stage in stages if stage.kind != "pointwise")
    complex_one = "complex " if param.is_complex() else ""
    raise ValueError(
        f"the parameter at {name!r} is a {complex_one}DTensor, of which this rank holds a part, "
        f"and {whole} needs more than that; executor='reference' computes with real DTensors by "
        "their own operations, over all ranks"
    )


def check_placements(tensor: "DTensor", what: str) -> None:
    """Raise ValueError for other placements than Shard, Replicate and Partial."""
    for one in tensor.placements:
        known = one.is_shard() or one.is_replicate() or one.is_partial() or is_strided_shard(one)
        if not known:
            raise ValueError(
                f"the {what} is a DTensor ({format_placements(tensor)}), and how parts placed by "
                f"{one!r} make up a tensor is not known here: redistribute() it to Shard or "
                "Replicate"
            )


def local_gradient(param: "DTensor", grad: Tensor, name: str) -> Tensor:
    """Return the local shard of a gradient, redistributed to the placements of its parameter."""
    what = f"gradient at {name!r}"
    if is_dtensor(grad) and grad.device_mesh == param.device_mesh:
        check_placements(grad, what)
        grad = redistribute_like(grad, param)
    check_same_places(param, grad, what)
    return to_local(grad)


def check_same_places(param: "DTensor", other: Tensor, what: str) -> None:
    """Raise ValueError if a gradient or state has not the mesh and placements of its parameter."""
    if not is_dtensor(other):
        raise ValueError(
            f"the {what} is a plain tensor, and its parameter a DTensor "
            f"({format_placements(param)}): give a DTensor of the same mesh and placements, as "
            "backward does"
        )
    if any(one.is_partial() for one in other.placements):
        raise ValueError(
            f"the {what} is a DTensor of {format_placements(other)}, whose parts are not summed "
            "yet: redistribute() it to the placements of its parameter"
        )
    if other.device_mesh != param.device_mesh or other.placements != param.placements:
        raise ValueError(
            f"the {what} is a DTensor of {format_placements(other)}, and its parameter of "
            f"{format_placements(param)}: redistribute() it to the parameter's mesh and placements"
        )


def wrap_like(old: Any, new: Any) -> Any:
    """Wrap a local tensor, or each tensor of a State, as a DTensor like ``old``."""
    if isinstance(old, tuple):
        return map_state(wrap_like, old, new)
    return unshard_like(new, old)


def local_states(param: "DTensor", states: Sequence[Any], name: str) -> tuple[Any, ...]:
    """Return the local shards of a state; 0-d plain tensors are not changed."""

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() > 0 or is_dtensor(tensor):
            check_same_places(param, tensor, f"state at {name!r}")
        return to_local(tensor)

    return tuple(map_state(part, state) for state in states)


class RankSums:
    """Sum over the shards of all ranks.

    Addends are summed on each rank first. Then one collective for each mesh and placements, not for
    each parameter, sums over ranks. All ranks get the same bits.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[Any, tuple[Any, ...]], tuple[DTensor, Tensor]] = {}

    def add(self, like: "DTensor", part: Tensor) -> None:
        """Add an addend of this rank, for shards placed as ``like``. All have the same shape."""
        key = like.device_mesh, like.placements
        before = self._parts.get(key)
        total = part if before is None else before[1] + part.to(before[1].device)
        self._parts[key] = like, total

    def reduced(self, rest: Tensor | None) -> Tensor | None:
        """Return the sum over all ranks plus ``rest``, an equal addend on all ranks, or None."""
        total = rest
        for like, part in self._parts.values():
            made = sum_over_ranks(part, like)
            total = made if total is None else total + made.to(total.device)
        return total


def format_placements(tensor: "DTensor") -> str:
    """Format the mesh and the placements of a DTensor for errors."""
    return f"mesh {tuple(tensor.device_mesh.shape)}, {', '.join(map(repr, tensor.placements))}"
