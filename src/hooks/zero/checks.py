"""Checks that a DDP module and a ZeroRedundancyOptimizer fit, before anything is changed."""

from torch.nn.parallel import DistributedDataParallel

from functional_optim.engine.messages import format_names
from hooks.buckets import reduced_parameters
from sharding import ZeroRedundancyOptimizer
from sharding.transport.groups import ranks_of


def sharded_paths(
    ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, *, all_of_ddp: bool
) -> dict[int, str]:
    """Return the paths in ``zero`` of the parameters to step, by ``id``, after all checks.

    Args:
        ddp: the module with the buckets.
        zero: the optimizer.
        all_of_ddp: True if ``zero`` must have every parameter that DDP reduces.

    Raises:
        TypeError: ``ddp`` or ``zero`` is something else.
        ValueError: ``zero`` was created without ``overlap_with_ddp``, for other ranks, or for other
            parameters.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(
            "ddp must be the DistributedDataParallel module that the hook is registered on, got "
            f"{type(ddp).__name__}"
        )
    if not isinstance(zero, ZeroRedundancyOptimizer):
        raise TypeError(
            f"zero must be a sharding.ZeroRedundancyOptimizer, got {type(zero).__module__}."
            f"{type(zero).__qualname__}"
        )
    if not zero.overlap_with_ddp:
        raise ValueError(
            "zero must be made with overlap_with_ddp=True to be stepped by a hook; without it, "
            "call zero.step() after backward"
        )
    ranks, others = (ranks_of(group) for group in (ddp.process_group, zero.process_group))
    if ranks != others:
        raise ValueError(
            f"ddp reduces over ranks {ranks} and zero shards over ranks {others}; give both the "
            "same process_group"
        )
    reduced = {id(param): name for name, param in reduced_parameters(ddp).items()}
    paths = {id(param): path for path, param in zero.params.items() if param.requires_grad}
    if not paths:
        raise ValueError("zero has no parameter that requires a gradient; there is nothing to step")
    strange = [path for key, path in paths.items() if key not in reduced]
    if strange:
        raise ValueError(
            f"ddp does not reduce {format_names(strange, most=1)}, so no bucket would ever bring a "
            "gradient to step by; wrap the module that has it, do not have ddp ignore it, or leave "
            "it out of zero"
        )
    left = [name for key, name in reduced.items() if key not in paths]
    if left and all_of_ddp:
        raise ValueError(
            f"zero does not have {format_names(left, most=1)}, whose gradients would reach no "
            "rank; give zero all parameters that ddp reduces, or use hook_with_zero_step, which "
            "reduces them all"
        )
    devices = sorted({str(zero.params[path].device) for path in paths.values()})
    if len(devices) > 1:
        raise ValueError(
            f"the parameters are on {', '.join(devices)}, but gathers run on one device; move the "
            "module to one, or step after backward, without overlap_with_ddp"
        )
    return paths
