"""Bytes of state that an optimizer keeps for a piece of a parameter, without making the state."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim import Optimizer
from functional_optim.core.brief import brief
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.initial import init_leaf
from functional_optim.core.stage import Kind, Stage, block_size_of
from functional_optim.core.state import state_tensors
from sharding.spec import ParameterSpec, kind_of

Stepper = Optimizer | Callable[[ParameterSpec], Optimizer]
"""The optimizer of all parameters, or the one of each."""


class Weight(NamedTuple):
    """Cost of a piece of a parameter: ``a * elements + b * blocks + c``, in whole numbers.

    Example::

        >>> Weight(per_element=1, per_block=4, per_piece=8, block=256).of(300)
        316
    """

    per_element: int
    per_block: int = 0
    """For what is kept per block of elements, such as the scales of 8-bit state."""
    per_piece: int = 0
    """For what a rank keeps once, however little of the parameter it owns: a step count."""
    block: int = 1
    """Elements in a block; the last may be shorter."""

    def of(self, elements: int) -> int:
        """The cost of a piece of that many elements."""
        blocks = -(-elements // self.block)
        return self.per_element * elements + self.per_block * blocks + self.per_piece


def optimizers_of(specs: Sequence[ParameterSpec], stepper: Stepper) -> list[Optimizer]:
    """The optimizer of each parameter."""
    refuse_closure(stepper, "a shard plan")
    if isinstance(stepper, Optimizer):
        if not stepper.is_composed:
            return [stepper] * len(specs)
        chains = stepper.chains_for(_tree(specs))
        made = {id(chain): stepper.of_chain(chain) for chain in chains}
        return [made[id(chain)] for chain in chains]
    if not callable(stepper):
        raise TypeError(
            "optimizer must be a functional_optim.Optimizer or a function from a ParameterSpec to "
            f"one, got {brief(stepper)}"
        )
    found = [stepper(spec) for spec in specs]
    for spec, one in zip(specs, found, strict=True):
        refuse_closure(one, "a shard plan")
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"the optimizer of {spec.path!r} must be an Optimizer, got {brief(one)}"
            )
    return found


def hypers_of(specs: Sequence[ParameterSpec], optimizer: Optimizer) -> list[tuple[Any, ...]]:
    """The hyper-parameters of each parameter, its overrides in place; equal ones are one object."""
    return optimizer.hypers_for(_tree(specs))


def _tree(specs: Sequence[ParameterSpec]) -> Any:
    """Parameters of these shapes by path, without memory."""
    return OrderedDict(
        (spec.path, torch.empty(spec.shape, dtype=spec.dtype, device="meta")) for spec in specs
    )


def state_weights(specs: Sequence[ParameterSpec], stepper: Stepper) -> list[Weight]:
    """The bytes of state of each parameter, as a function of the elements in a piece.

    Raises:
        ValueError: the state of a pointwise rule that does not grow evenly with its parameter.
    """
    optimizers = optimizers_of(specs, stepper)
    places: dict[int, list[int]] = {}
    for place, optimizer in enumerate(optimizers):
        places.setdefault(id(optimizer), []).append(place)
    weights: list[Weight] = [Weight(0)] * len(specs)
    for own in places.values():
        optimizer = optimizers[own[0]]
        part = specs if len(own) == len(specs) else [specs[place] for place in own]
        found = _weights(part, optimizer)
        for place, weight in zip(own, found, strict=True):
            weights[place] = weight
    return weights


def _weights(specs: Sequence[ParameterSpec], optimizer: Optimizer) -> list[Weight]:
    cut = kind_of(optimizer)
    known: dict[tuple[Any, ...], Weight] = {}
    weights = []
    for spec, hypers in zip(specs, hypers_of(specs, optimizer), strict=True):
        whole = cut == "per_matrix" or spec.kind == "per_matrix"
        # Of a rule that needs the whole tensor, the state may be of any shape.
        key = (id(hypers), spec.dtype, spec.shape if whole else None)
        weight = known.get(key)
        if weight is None:
            kind: Kind = "per_matrix" if whole else "pointwise"
            weight = known[key] = _weight(optimizer.stages, hypers, spec, kind)
        weights.append(weight)
    return weights


def _weight(
    stages: Sequence[Stage], hypers: Sequence[Any], spec: ParameterSpec, kind: Kind
) -> Weight:
    def kept(*shape: int) -> int:
        return state_bytes(stages, hypers, torch.empty(shape, dtype=spec.dtype, device="meta"))

    if kind == "per_matrix":
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
