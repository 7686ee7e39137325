"""Optimizers of parameters: the bytes of their state and the FLOPs of their step, by shape."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.core.brief import brief
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.initial import init_leaf
from functional_optim.core.stage import Stage, block_size_of
from functional_optim.core.state import state_tensors
from functional_optim.optimizer.flops import step_flops
from sharding.spec import BlockSpec, ParameterSpec, kind_of
from sharding.weights import Weight

Stepper = Optimizer | Callable[[ParameterSpec], Optimizer]
"""The optimizer of all parameters, or the one of each."""

COUNTED = 64
"""Elements on which the operations of a pointwise rule are counted."""


def optimizers_of(specs: Sequence[ParameterSpec], stepper: Stepper) -> list[Optimizer]:
    """Return the optimizer of each parameter; of a block, that of its parameter.

    Raises:
        TypeError: no optimizer, and no function that gives one.
    """
    refuse_closure(stepper, "a shard plan")
    if isinstance(stepper, Optimizer):
        if not stepper.is_composed:
            return [stepper] * len(specs)
        chains = _by_parameter(specs, stepper.chains_for)
        made = {id(chain): stepper.of_chain(chain) for chain in chains}
        return [made[id(chain)] for chain in chains]
    if not callable(stepper):
        raise TypeError(
            "optimizer must be a functional_optim.Optimizer or a function from a ParameterSpec to "
            f"one, got {brief(stepper)}"
        )
    found = _by_parameter(specs, lambda params: list(map(stepper, params)), whole=True)
    for spec, one in zip(specs, found, strict=True):
        refuse_closure(one, "a shard plan")
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"the optimizer of {spec.path!r} must be an Optimizer, got {brief(one)}"
            )
    return found


def hypers_of(specs: Sequence[ParameterSpec], optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """Return the hyper-parameters of each parameter, with overrides; equal ones are one object."""
    return _by_parameter(specs, optimizer.hypers_for)


def _by_parameter(
    specs: Sequence[ParameterSpec], ask: Callable[[Any], list[Any]], *, whole: bool = False
) -> list[Any]:
    """Ask once for all parameters, and return the answer for each spec.

    Args:
        specs: of parameters and of blocks.
        ask: takes a tree of tensors without memory, or with ``whole`` the specs.
    """
    wholes = [spec.parameter if isinstance(spec, BlockSpec) else spec for spec in specs]
    params = {spec.path: spec for spec in wholes}
    every = list(params.values())
    answers = ask(every if whole else _tree(every))
    if len(every) == len(specs):
        return answers
    by_path = dict(zip(params, answers, strict=True))
    return [by_path[spec.path] for spec in wholes]


def _tree(specs: Sequence[ParameterSpec]) -> Any:
    """Return parameters of these shapes by path, without memory."""
    return OrderedDict(
        (spec.path, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs
    )


class SteppedSpec(NamedTuple):
    """A parameter or block, with the chain that steps it."""

    spec: ParameterSpec
    stages: Sequence[Stage]
    hypers: Sequence[Any]
    is_whole: bool
    """True if the chain needs the whole tensor."""


def state_weights(specs: Sequence[ParameterSpec], stepper: Stepper) -> list[Weight]:
    """Return the bytes of state of each parameter, as a function of the elements in a piece.

    Raises:
        ValueError: the state of a pointwise rule that does not grow evenly with its parameter.
    """
    return _weights(specs, stepper, _state_weight)


def flop_weights(specs: Sequence[ParameterSpec], stepper: Stepper) -> list[Weight]:
    """Return the operations of a step of each parameter, as a function of its elements.

    Raises:
        ValueError: a rule multiplies matrices and declares no FLOPs.
    """
    return _weights(specs, stepper, _flop_weight)


def _weights(
    specs: Sequence[ParameterSpec], stepper: Stepper, weigh: Callable[[SteppedSpec], Weight]
) -> list[Weight]:
    optimizers = optimizers_of(specs, stepper)
    places: dict[int, list[int]] = {}
    for place, optimizer in enumerate(optimizers):
        places.setdefault(id(optimizer), []).append(place)
    weights: list[Weight] = [Weight(0)] * len(specs)
    for own in places.values():
        optimizer = optimizers[own[0]]
        cut = kind_of(optimizer)
        part = specs if len(own) == len(specs) else [specs[place] for place in own]
        hypers = hypers_of(part, optimizer)
        known: dict[tuple[Any, ...], Weight] = {}
        for place, spec, values in zip(own, part, hypers, strict=True):
            whole = cut == "per_matrix" or spec.kind == "per_matrix"
            # Of a rule that needs the whole tensor, the state may be of any shape.
            source = spec.parameter if isinstance(spec, BlockSpec) else None
            parts = None if source is None else (source.blocks, source.shape)
            key = (id(values), spec.dtype, spec.shape if whole else None, parts)
            weight = known.get(key)
            if weight is None:
                own_values = unsplit_hypers(spec, optimizer.stages, values)
                weight = weigh(SteppedSpec(spec, optimizer.stages, own_values, whole))
                known[key] = weight
            weights[place] = weight
    return weights


def unsplit_hypers(
    spec: ParameterSpec, stages: Sequence[Stage], hypers: Sequence[Any]
) -> Sequence[Any]:
    """Return the hyper-parameters that step a block alone; of a whole parameter, its own.

    Raises:
        ValueError: the rule divides the parameter otherwise than its spec does.
    """
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


def _flop_weight(one: SteppedSpec) -> Weight:
    if one.is_whole:
        return Weight(0, per_piece=step_flops(one.stages, one.hypers, one.spec.shape))
    count = step_flops(one.stages, one.hypers, (COUNTED,))
    return Weight(-(-count // COUNTED))


def _state_weight(one: SteppedSpec) -> Weight:
    spec, stages = one.spec, one.stages

    def kept(*shape: int) -> int:
        return state_bytes(stages, one.hypers, torch.empty(shape, dtype=spec.dtype, device="meta"))

    if one.is_whole:
        return Weight(0, per_piece=kept(*spec.shape))
    block = block_size_of(stages)
    if block == 1:
        per_element = kept(2) - kept(1)
        weight = Weight(per_element, per_piece=kept(1) - per_element)
    else:
        per_element = kept(2) - kept(1)
        per_block = kept(block + 1) - kept(block) - per_element
        once = kept(1) - per_element - per_block
        weight = Weight(per_element, per_block, once, block)
    for elements in (3, 5 * block + 2):
        if kept(elements) != weight.of(elements):
            raise ValueError(
                f"the state of {spec.path!r} does not grow evenly with its elements "
                f"({kept(elements)} bytes for {elements}, {weight.of(elements)} expected), so "
                "its bytes cannot be planned for; a rule with such a state is per_matrix"
            )
    return weight


def state_bytes(stages: Sequence[Stage], hypers: Sequence[Any], param: Tensor) -> int:
    """The bytes of the state that ``init`` makes for a parameter, its step count included."""
    with torch.no_grad():
        leaf = init_leaf(stages, hypers, param)
    return sum(tensor.nbytes for tensor in (leaf.step, *state_tensors(leaf.stages)))
