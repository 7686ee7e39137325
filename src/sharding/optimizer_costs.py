"""Bytes of optimizer state and FLOPs of a step, for each parameter."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.engine.messages import format_value
from functional_optim.engine.stages import Stage, block_size_of, refuse_closure, step_flops
from functional_optim.engine.states import init_leaf, state_tensors
from sharding.spec import BlockSpec, ParameterSpec, kind_of
from sharding.weights import Weight

OptimizerOrFactory = Optimizer | Callable[[ParameterSpec], Optimizer]
"""The optimizer of all parameters, or a function that returns the optimizer of each parameter."""

COUNTED = 64
"""Number of elements with which the operations of a pointwise rule are counted."""


def optimizers_of(specs: Sequence[ParameterSpec], optimizer: OptimizerOrFactory) -> list[Optimizer]:
    """Return the optimizer of each parameter; for a block, the optimizer of its parameter."""
    refuse_closure(optimizer, "a shard plan")
    if isinstance(optimizer, Optimizer):
        if not optimizer.is_composed:
            return [optimizer] * len(specs)
        chains = _by_parameter(specs, lambda params: optimizer.chains_for(_tree(params)))
        by_chain = {id(chain): optimizer.of_chain(chain) for chain in chains}
        return [by_chain[id(chain)] for chain in chains]
    if not callable(optimizer):
        raise TypeError(
            "optimizer must be a functional_optim.Optimizer or a function from a ParameterSpec to "
            f"one, got {format_value(optimizer)}"
        )
    found = _by_parameter(specs, lambda params: list(map(optimizer, params)))
    for spec, one in zip(specs, found, strict=True):
        refuse_closure(one, "a shard plan")
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"the optimizer of {spec.path!r} must be an Optimizer, got {format_value(one)}"
            )
    return found


def by_optimizer(
    specs: Sequence[ParameterSpec], optimizer: OptimizerOrFactory
) -> list[tuple[Optimizer, list[int]]]:
    """Return the optimizers of parameters, each with the indices of its specs."""
    found: dict[int, tuple[Optimizer, list[int]]] = {}
    for index, one in enumerate(optimizers_of(specs, optimizer)):
        found.setdefault(id(one), (one, []))[1].append(index)
    return list(found.values())


def hypers_of(specs: Sequence[ParameterSpec], optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """Return the hyper-parameters of each parameter, with overrides; equal ones are one object."""
    return _by_parameter(specs, lambda params: optimizer.hypers_for(_tree(params)))


def _tree(specs: Sequence[ParameterSpec]) -> OrderedDict[str, Tensor]:
    """Return parameters on the meta device, by path."""
    return OrderedDict(
        (spec.path, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs
    )


def _by_parameter(
    specs: Sequence[ParameterSpec], function: Callable[[list[ParameterSpec]], list[Any]]
) -> list[Any]:
    """Call a function once, with all parameters, and return its result for each spec."""
    wholes = [spec.parameter if isinstance(spec, BlockSpec) else spec for spec in specs]
    params = {spec.path: spec for spec in wholes}
    by_path = dict(zip(params, function(list(params.values())), strict=True))
    return [by_path[spec.path] for spec in wholes]


WeightFunction = Callable[[ParameterSpec, Sequence[Stage], Sequence[Any], bool], Weight]
"""Function of a parameter or block, and of the stages and hyper-parameters that step it.

The last argument is True if the stages need the whole tensor.
"""


def weigh(
    specs: Sequence[ParameterSpec], optimizer: OptimizerOrFactory, function: WeightFunction
) -> list[Weight]:
    """Return the weight of each parameter by a function, as a function of the elements in a piece.

    Raises:
        ValueError: as for :func:`state_weight` and :func:`flop_weight`.
    """
    weights: list[Weight] = [Weight(0)] * len(specs)
    for one, indices in by_optimizer(specs, optimizer):
        kind = kind_of(one)
        part = specs if len(indices) == len(specs) else [specs[index] for index in indices]
        known: dict[tuple[Any, ...], Weight] = {}
        for index, spec, hypers in zip(indices, part, hypers_of(part, one), strict=True):
            whole = kind == "per_matrix" or spec.kind == "per_matrix"
            # The state of a rule that needs the whole tensor can have any shape.
            source = spec.parameter if isinstance(spec, BlockSpec) else None
            parts = None if source is None else (source.blocks, source.shape)
            key = (id(hypers), spec.dtype, spec.shape if whole else None, parts)
            if key not in known:
                own = unsplit_hypers(spec, one.stages, hypers)
                known[key] = function(spec, one.stages, own, whole)
            weights[index] = known[key]
    return weights


def unsplit_hypers(
    spec: ParameterSpec, stages: Sequence[Stage], hypers: Sequence[Any]
) -> Sequence[Any]:
    """Return the hyper-parameters for stepping a block alone; for a parameter, its own."""
    if not isinstance(spec, BlockSpec):
        return hypers
    whole, found = spec.parameter, []
    for stage, hyper in zip(stages, hypers, strict=True):
        if stage.blocks is None:
            found.append(hyper)
            continue
        theirs, ours = stage.blocks.of(hyper), whole.blocks
        assert ours is not None, "it has a block"
        if theirs.has_parts and theirs.bounds(whole.shape) != ours.bounds(whole.shape):
            raise ValueError(
                f"{whole.path!r} is declared with {ours}, and its rule {stage.name} divides it by "
                f"{theirs}; declare the same blocks, or leave out the options of the rule"
            )
        found.append(stage.blocks.unsplit(hyper))
    return found


def flop_weight(
    spec: ParameterSpec, stages: Sequence[Stage], hypers: Sequence[Any], is_whole: bool
) -> Weight:
    """Return the operations of a step. Raise ValueError if a rule multiplies and declares none."""
    if is_whole:
        return Weight(0, per_piece=step_flops(stages, hypers, spec.shape))
    count = step_flops(stages, hypers, (COUNTED,))
    return Weight(-(-count // COUNTED))


def state_weight(
    spec: ParameterSpec, stages: Sequence[Stage], hypers: Sequence[Any], is_whole: bool
) -> Weight:
    """Return the bytes of state. Raise ValueError if they are not linear in the elements."""

    def nbytes(*shape: int) -> int:
        param = torch.empty(shape, dtype=spec.dtype, device="meta")
        with torch.no_grad():
            leaf = init_leaf(stages, hypers, param)
        return sum(tensor.nbytes for tensor in (leaf.step, *state_tensors(leaf.stages)))

    if is_whole:
        return Weight(0, per_piece=nbytes(*spec.shape))
    block = block_size_of(stages)
    per_element = nbytes(2) - nbytes(1)
    per_block = 0 if block == 1 else nbytes(block + 1) - nbytes(block) - per_element
    weight = Weight(per_element, per_block, nbytes(1) - per_element - per_block, block)
    for elements in (3, 5 * block + 2):
        if nbytes(elements) != weight.of(elements):
            raise ValueError(
                f"the state of {spec.path!r} does not grow evenly with its elements "
                f"({nbytes(elements)} bytes for {elements}, {weight.of(elements)} expected), so "
                "its bytes cannot be planned for; a rule with such a state is per_matrix"
            )
    return weight
