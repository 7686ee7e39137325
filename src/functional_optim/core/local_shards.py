"""Parameters of which a rank holds a shard: DTensors, as FSDP2 and tensor parallelism make them.

A pointwise chain steps the shard of this rank as if it were the parameter, which is the same. A
chain that needs whole tensors is run by the reference over DTensors, by torch's operators, where
all of its stages take DTensors.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from functional_optim._torch import is_strided_shard
from functional_optim.core.dtensors import is_sharded, local, placed_as, sum_over_ranks
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import map_state

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def check_whole(params: Mapping[str, Tensor], what: str) -> None:
    """Make sure that parameters are no DTensors, for what holds their memory.

    Args:
        params: by name.
        what: cannot take them; an error says so.

    Raises:
        ValueError: names the first that is one.
    """
    for name, param in params.items():
        if is_sharded(param):
            raise ValueError(
                f"the parameter at {name!r} is a DTensor ({placed(param)}), of which this rank "
                f"holds a part, and {what} takes plain tensors only; step it by update_, bind or "
                "TorchOptimizer, or give to_local() of parameters and gradients"
            )


def can_step_shards(stages: Sequence[Stage]) -> bool:
    """Return True if stages step a shard without the rest of its tensor.

    A stage that needs totals does so too: every total is reduced over all ranks first.
    """
    return all(stage.kind == "pointwise" for stage in stages) and block_size_of(stages) == 1


def can_step_rows(stages: Sequence[Stage], hypers: Sequence[Any]) -> bool:
    """Return True if stages step some indices of dimension 0 without the rest of the tensor.

    Beside pointwise stages, a rule over stacked matrices does so: each matrix is stepped alone.

    Args:
        stages: of the chain.
        hypers: its hyper-parameters.
    """
    if block_size_of(stages) != 1:
        return False
    return all(
        stage.kind == "pointwise"
        or (stage.blocks is not None and stage.blocks.of(hyper).batch_axes > 0)
        for stage, hyper in zip(stages, hypers, strict=True)
    )


def check_takes_dtensor(stages: Sequence[Stage], param: Tensor, name: str) -> None:
    """Make sure that a chain steps a parameter that may be a DTensor.

    Args:
        stages: of the chain.
        param: any tensor; a plain one is not refused.
        name: of the parameter.

    Raises:
        ValueError: names the parameter and the stage that needs the whole tensor.
    """
    if not is_sharded(param) or can_step_shards(stages):
        return
    blocks = next((stage for stage in stages if stage.granularity > 1), None)
    if blocks is not None:
        raise ValueError(
            f"the parameter at {name!r} is a DTensor ({placed(param)}), of which this rank holds "
            f"a part, and {blocks.name} works in blocks of {blocks.granularity} elements, which a "
            "shard may cut: step it by sharding.MatrixOwnerOptimizer, which gathers it on one "
            "rank, keep the state by float32 or bfloat16, or give to_local() of parameters and "
            "gradients where blocks of a shard will do"
        )
    whole = [one for one in stages if one.kind != "pointwise" and not one.takes_dtensors]
    if whole:
        raise ValueError(
            f"the parameter at {name!r} is a DTensor ({placed(param)}), of which this rank holds "
            f"a part, and {whole[0].name} needs the whole tensor: step it by "
            "sharding.MatrixOwnerOptimizer, which gathers it on one rank, keep this parameter out "
            "of fully_shard (ignored_params), step it by another optimizer (see partition), or, "
            "for a stage of your own that torch's operators compute over DTensors, declare "
            "takes_dtensors=True"
        )


def refuse_executor(stages: Sequence[Stage], param: Tensor, name: str) -> None:
    """Refuse what only the reference computes with DTensors, for another executor.

    Raises:
        ValueError: names the stage that needs more than a shard.
    """
    whole = next(stage.name for stage in stages if stage.kind != "pointwise")
    complex_one = "complex " if param.is_complex() else ""
    raise ValueError(
        f"the parameter at {name!r} is a {complex_one}DTensor, of which this rank holds a part, "
        f"and {whole} needs more than that; executor='reference' computes with real DTensors by "
        "their own operations, over all ranks"
    )


def check_placements(tensor: "DTensor", what: str) -> None:
    """Make sure that it is known how the parts of a DTensor make it up.

    Args:
        tensor: a DTensor.
        what: it is, for the error.

    Raises:
        ValueError: names a placement that is none of Shard, Replicate and Partial.
    """
    for one in tensor.placements:
        known = one.is_shard() or one.is_replicate() or one.is_partial() or is_strided_shard(one)
        if not known:
            raise ValueError(
                f"the {what} is a DTensor ({placed(tensor)}), and how parts placed by {one!r} "
                "make up a tensor is not known here: redistribute() it to Shard or Replicate"
            )


def local_gradient(param: "DTensor", grad: Tensor, name: str) -> Tensor:
    """Return what of a gradient belongs to the shard of its parameter.

    A gradient of other placements, such as one whose parts are not summed yet, is redistributed to
    those of its parameter.

    Raises:
        ValueError: a plain tensor; another mesh; a placement that is not known.
    """
    what = f"gradient at {name!r}"
    if is_sharded(grad) and grad.device_mesh == param.device_mesh:
        check_placements(grad, what)
        grad = placed_as(grad, param)
    check_same_places(param, grad, what)
    return local(grad)


def check_same_places(param: "DTensor", other: Tensor, what: str) -> None:
    """Make sure that a gradient or state has the shard that the parameter has.

    Raises:
        ValueError: it does not.
    """
    if not is_sharded(other):
        raise ValueError(
            f"the {what} is a plain tensor, and its parameter a DTensor ({placed(param)}): give "
            "a DTensor of the same mesh and placements, as backward does"
        )
    if any(one.is_partial() for one in other.placements):
        raise ValueError(
            f"the {what} is a DTensor of {placed(other)}, whose parts are not summed yet: "
            "redistribute() it to the placements of its parameter"
        )
    if other.device_mesh != param.device_mesh or other.placements != param.placements:
        raise ValueError(
            f"the {what} is a DTensor of {placed(other)}, and its parameter of {placed(param)}: "
            "redistribute() it to the parameter's mesh and placements"
        )


def like(old: Any, new: Any) -> Any:
    """A shard after its step, as the DTensor that it is a part of; a State field by field."""
    if isinstance(old, tuple):
        return map_state(like, old, new)
    if not is_sharded(old):
        return new
    return type(old).from_local(
        new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )


def local_states(param: "DTensor", states: Sequence[Any], name: str) -> tuple[Any, ...]:
    """State as the shard of its parameter has it; what is one number for a leaf stays that."""

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() > 0 or is_sharded(tensor):
            check_same_places(param, tensor, f"state at {name!r}")
        return local(tensor)

    return tuple(map_state(part, state) for state in states)


class RankSums:
    """Sums of which several ranks hold a part each.

    What shards add is summed on each rank first. Then one collective for each mesh and placements,
    not one for each parameter, makes the sum over all ranks, with the same bits on each of them.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[Any, tuple[Any, ...]], tuple[DTensor, Tensor]] = {}

    def add(self, like: "DTensor", part: Tensor) -> None:
        """Add what shards of this rank add.

        Args:
            like: a parameter that is cut as theirs are.
            part: their sum on this rank: of the same shape on all ranks.
        """
        key = like.device_mesh, like.placements
        before = self._parts.get(key)
        total = part if before is None else before[1] + part.to(before[1].device)
        self._parts[key] = like, total

    def reduced(self, rest: Tensor | None) -> Tensor | None:
        """Return the sum over all ranks, together with that of plain tensors.

        Args:
            rest: the sum of plain tensors, which all ranks have; None for none.
        """
        total = rest
        for like, part in self._parts.values():
            made = sum_over_ranks(part, like)
            total = made if total is None else total + made.to(total.device)
        return total


def placed(tensor: "DTensor") -> str:
    """Return the mesh and the placements of a DTensor, for errors."""
    return f"mesh {tuple(tensor.device_mesh.shape)}, {', '.join(map(repr, tensor.placements))}"
