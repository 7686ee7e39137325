"""Parameters of which a rank holds a shard: DTensors, as FSDP2 and tensor parallelism make them.

The reference computes with real ones as they are, by their own operations, as torch.optim does.
Every other executor looks into memory: it steps the shard that lies here as if it were the
parameter, which for a pointwise chain is the same.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from functional_optim.core.dtensors import is_sharded, local
from functional_optim.core.forms import map_state
from functional_optim.core.leaf import is_measured
from functional_optim.core.stage import Stage, block_size_of

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
                f"the parameter at {name!r} is a DTensor ({_placed(param)}), of which this rank "
                f"holds a part, and {what} takes plain tensors only; step it by update_, bind or "
                "TorchOptimizer, or give to_local() of parameters and gradients"
            )


def check_steps_shards(stages: Sequence[Stage], name: str) -> None:
    """Make sure that a shard may be stepped without the others.

    Raises:
        ValueError: names the stage that needs more than a shard.
    """
    whole = [stage.name for stage in stages if stage.kind != "pointwise" or is_measured(stage)]
    if whole or block_size_of(stages) > 1:
        of = whole[0] if whole else next(one.name for one in stages if one.granularity > 1)
        raise ValueError(
            f"the parameter at {name!r} is a DTensor, of which this rank holds a part, and {of} "
            "needs more than that; executor='reference' computes with real DTensors by their own "
            "operations, over all ranks"
        )


def check_same_places(param: "DTensor", other: Tensor, what: str) -> None:
    """Make sure that a gradient or state has the shard that the parameter has.

    Raises:
        ValueError: it does not.
    """
    if not is_sharded(other):
        raise ValueError(
            f"the {what} is a plain tensor, and its parameter a DTensor ({_placed(param)}): give "
            "a DTensor of the same mesh and placements, as backward does"
        )
    if any(one.is_partial() for one in other.placements):
        raise ValueError(
            f"the {what} is a DTensor of {_placed(other)}, whose parts are not summed yet: "
            "redistribute() it to the placements of its parameter"
        )
    if other.device_mesh != param.device_mesh or other.placements != param.placements:
        raise ValueError(
            f"the {what} is a DTensor of {_placed(other)}, and its parameter of {_placed(param)}: "
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


def _placed(tensor: "DTensor") -> str:
    return f"mesh {tuple(tensor.device_mesh.shape)}, {', '.join(map(repr, tensor.placements))}"
