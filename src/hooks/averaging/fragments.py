"""Fragments: parameters dealt out to parts that are averaged in turns."""

from collections.abc import Sequence

from torch import Tensor

from sharding import ParameterSpec, ShardPlan, plan


def fragments_of(params: Sequence[Tensor], wanted: int | ShardPlan, period: int) -> list[list[int]]:
    """The places of the parameters of each fragment.

    Args:
        params: all of them.
        wanted: how many fragments, about as large as one another; or a plan over them.
        period: in which each has its turn.

    Raises:
        ValueError: no parameters; fewer than one fragment, or more than the period has steps or
            than there are parameters; a plan of other parameters, or one that cuts some.
    """
    if not params:
        raise ValueError("params has no parameters of floating numbers: nothing can be averaged")
    if isinstance(wanted, int):
        if not 1 <= wanted <= min(period, len(params)):
            raise ValueError(
                f"fragments must be from 1 to {min(period, len(params))}, as each of the {period} "
                f"steps of a period is one's turn and each has a parameter, got {wanted}"
            )
        specs = [ParameterSpec(str(k), tuple(param.shape)) for k, param in enumerate(params)]
        wanted = plan(specs, wanted, policy="greedy")
    shapes = [tuple(spec.shape) for spec in wanted.specs]
    if shapes != [tuple(param.shape) for param in params] or not wanted.is_whole:
        raise ValueError(
            "a plan of fragments must be over the parameters as they are given, and cut none; make "
            "it by plan(specs, fragments, policy='greedy') with one spec for each, in their order"
        )
    found = [[one.parameter for one in wanted.owned(k)] for k in range(wanted.world_size)]
    if not all(found):
        raise ValueError(f"fragment {found.index([])} of {len(found)} has no parameter")
    if len(found) > period:
        raise ValueError(f"{len(found)} fragments have no turn each in {period} steps")
    return found
