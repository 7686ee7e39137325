"""The law of storages: a step stores its result within the stated error."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, State, field_tensors
from functional_optim.storage.layout import Layout
from functional_optim.storage.state_storage import BLOCK
from functional_optim.storage.stored import Stored
from functional_optim.testing.runs import Params, Run
from functional_optim.testing.subject import Subject


class StorageBound(NamedTuple):
    """Bound on the distance of a stored value from the computed value."""

    share: float
    """Relative to the magnitude of the value."""
    of_block: float = 0.0
    """Relative to the largest magnitude in the block."""
    of_unsigned: float = 0.0
    """The same, for a block without negative numbers and minus zero."""


PARAM_BOUNDS: dict[str, StorageBound] = {
    "float32": StorageBound(0.0),
    "bfloat16": StorageBound(2.0**-8),
    "bfloat16+master": StorageBound(0.0),
    "bfloat16+kahan": StorageBound(2.0**-17),
    "bfloat16+stochastic": StorageBound(2.0**-7),
}
"""Stated errors of the storages of parameters."""

STATE_BOUNDS: dict[str, StorageBound] = {
    "float32": StorageBound(0.0),
    "bfloat16": StorageBound(2.0**-8),
    "bfloat16+stochastic": StorageBound(2.0**-7),
    "int8": StorageBound(1 / 16, 2.0**-19, 2.0**-34),
    "int8+stochastic": StorageBound(1 / 8, 2.0**-18, 2.0**-34),
}
"""Stated errors of the storages of state fields."""

SMALLEST = 2.0**-126
"""Smallest normal float. Below it floats are evenly spaced, and errors are absolute."""


def stored_is_bounded(plain: Subject, kept: Subject, run: Run) -> None:
    """Each step of a stored chain gives the step of the plain chain, within the stated error.

    The plain chain steps from the decoded parameters and state.

    Args:
        plain: subject of the chain.
        kept: subject of the same chain, stored.
        run: parameters and gradients in the dtype of the stored chain.
    """
    wide, narrow, params = plain.build(run), kept.build(run), run.params()
    if narrow.stages == wide.stages:
        return  # nothing is encoded, such as fields of another shape than the parameter
    state = narrow.init(params)
    for grads in run.grads():
        given = {name: None if grad is None else grad.float() for name, grad in grads.items()}
        start, start_state = _decode(narrow.stages, params, state)
        want, want_state = wide.update(start, given, start_state)
        params, state = narrow.update(params, grads, state)
        found, found_state = _decode(narrow.stages, params, state)
        for name in run.names:
            bound = PARAM_BOUNDS[_layouts(narrow.stages)[-1].param.name]
            _require_near(f"the parameter {name!r}", found[name], want[name], bound)
            rows = [row for one in _layouts(narrow.stages) for row in one.kept]
            pairs = zip(
                itertools.chain.from_iterable(rows),
                _tensors(found_state.leaves[name]),
                _tensors(want_state.leaves[name]),
                strict=True,
            )
            for field, several, others in pairs:
                for one, other in zip(several, others, strict=True):
                    label = f"{field.name} of {name!r}"
                    _require_near(label, one, other, STATE_BOUNDS[field.storage.name])


def _layouts(stages: Sequence[Stage]) -> list[Layout]:
    found = []
    for stage in stages:
        assert isinstance(stage, Stored), f"{stage.name} is not stored"
        found.append(stage.layout)
    return found


def _tensors(leaf: LeafState) -> list[list[Tensor]]:
    """Return the tensors of each field of a state."""
    return [field_tensors(value) for stage in leaf.stages for value in stage]


def _decode(stages: Sequence[Stage], params: Params, state: State) -> tuple[Params, State]:
    """Return parameters and state of a stored chain in the form of the plain chain, in float32."""
    layouts = _layouts(stages)
    of_param = layouts[-1]
    wide: Params = {}
    leaves: dict[str, LeafState] = {}
    for name, param in params.items():
        leaf = state.leaves[name]
        extras = tuple(leaf.stages[-1][: len(of_param.extras)])
        wide[name] = of_param.param.decode(param, extras)
        plain: list[Any] = []
        for layout, values in zip(layouts, leaf.stages, strict=True):
            plain += layout.decode_states(values)
        leaves[name] = LeafState(leaf.step, tuple(plain))
    return wide, State(leaves)


def _require_near(what: str, found: Tensor, want: Tensor, bound: StorageBound) -> None:
    """Check that all elements are within the bound. The error names the first one that is not."""
    x, y = found.double().reshape(-1), want.double().reshape(-1)
    room = bound.share * y.abs() + (SMALLEST if bound.share else 0.0)
    if bound.of_block:
        signed = _of_block(y.signbit().double()) > 0
        largest = _of_block(y.abs())
        room = room + torch.where(signed, bound.of_block, bound.of_unsigned) * largest
    far = ~((x - y).abs() <= room) & ~(x.isnan() & y.isnan()) & (x != y)
    if bool(far.any()):
        at = int(far.nonzero()[0])
        raise AssertionError(
            f"{what} is kept as {x[at].item()!r} at element {at}, where the step made "
            f"{y[at].item()!r}: further than the stated {bound}"
        )


def _of_block(tensor: Tensor) -> Tensor:
    """Return for each element the largest value of its block."""
    rows = torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    return rows.amax(dim=1).repeat_interleave(BLOCK)[: tensor.numel()]
