"""The law of storages: what a step keeps is what it computed, within the stated error."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState, State, field_tensors
from functional_optim.storage.layout import KeptField, Layout
from functional_optim.storage.state_storage import BLOCK
from functional_optim.storage.stored import StoredRule, StoredTransform
from functional_optim.testing.runs import Params, Run
from functional_optim.testing.subject import Subject


class StorageBound(NamedTuple):
    """Bound on the distance of a kept value from the computed one."""

    share: float
    """Of the value's own magnitude."""
    of_block: float = 0.0
    """Of the largest magnitude in its block."""
    of_unsigned: float = 0.0
    """The same, in a block that holds neither a negative number nor minus zero."""


PARAM_BOUNDS: dict[str, StorageBound] = {
    "float32": StorageBound(0.0),
    "bfloat16": StorageBound(2.0**-8),
    "bfloat16+master": StorageBound(0.0),
    "bfloat16+kahan": StorageBound(2.0**-17),
    "bfloat16+stochastic": StorageBound(2.0**-7),
}
"""The stated errors of the storages of parameters."""

STATE_BOUNDS: dict[str, StorageBound] = {
    "float32": StorageBound(0.0),
    "bfloat16": StorageBound(2.0**-8),
    "bfloat16+stochastic": StorageBound(2.0**-7),
    "int8": StorageBound(1 / 16, 2.0**-19, 2.0**-34),
    "int8+stochastic": StorageBound(1 / 8, 2.0**-18, 2.0**-34),
}
"""The stated errors of the storages of state."""

SMALLEST = 2.0**-126
"""Below this, floats lie evenly: half a step of bfloat16 there is less than this too."""


def stored_is_bounded(plain: Subject, kept: Subject, run: Run) -> None:
    """Each step keeps what the plain chain computes from what was kept, within the stated error.

    Args:
        plain: makes the chain.
        kept: makes the same chain, stored.
        run: parameters and gradients in the stored chain's dtype.
    """
    wide, narrow, params = plain.build(run), kept.build(run), run.params()
    if narrow.stages == wide.stages:
        return  # it has nothing to store, as of a state in another shape than the parameter's
    state = narrow.init(params)
    for grads in run.grads():
        given = {name: None if grad is None else grad.float() for name, grad in grads.items()}
        start, own = _decoded(narrow.stages, params, state)
        want, wanted = wide.update(start, given, own)
        params, state = narrow.update(params, grads, state)
        found, made = _decoded(narrow.stages, params, state)
        for name in run.names:
            bound = PARAM_BOUNDS[_layouts(narrow.stages)[-1].plan.param.name]
            _require_near(f"the parameter {name!r}", found[name], want[name], bound)
            pairs = zip(
                _fields(narrow.stages),
                _tensors(made.leaves[name]),
                _tensors(wanted.leaves[name]),
                strict=True,
            )
            for field, several, others in pairs:
                for one, other in zip(several, others, strict=True):
                    label = f"{field.name} of {name!r}"
                    _require_near(label, one, other, STATE_BOUNDS[field.storage.name])


def _layouts(stages: Sequence[Stage]) -> list[Layout]:
    found = []
    for stage in stages:
        assert isinstance(stage, (StoredRule, StoredTransform)), f"{stage.name} is not stored"
        found.append(stage.layout)
    return found


def _fields(stages: Sequence[Stage]) -> Iterator[KeptField]:
    """Every field of the plain state, in order."""
    for layout in _layouts(stages):
        for fields in layout.plan.kept:
            yield from fields


def _tensors(leaf: LeafState) -> list[list[Tensor]]:
    """The tensors of every field of a leaf's state."""
    return [field_tensors(value) for stage in leaf.stages for value in stage]


def _decoded(stages: Sequence[Stage], params: Params, state: State) -> tuple[Params, State]:
    """Parameters and state of a stored chain as the plain chain has them, in float32."""
    layouts = _layouts(stages)
    of_param = layouts[-1]
    wide: Params = {}
    leaves: dict[str, LeafState] = {}
    for name, param in params.items():
        leaf = state.leaves[name]
        extras = tuple(leaf.stages[-1][: len(of_param.extras)])
        wide[name] = of_param.plan.param.decode(param, extras)
        plain: list[Any] = []
        for layout, values in zip(layouts, leaf.stages, strict=True):
            plain += layout.decoded(values)
        leaves[name] = LeafState(leaf.step, tuple(plain))
    return wide, State(leaves)


def _require_near(what: str, found: Tensor, want: Tensor, bound: StorageBound) -> None:
    """Every element within the bound.

    Raises:
        AssertionError: names the first element that is not.
    """
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
    """For each element, the largest of its block."""
    rows = torch.nn.functional.pad(tensor, (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    return rows.amax(dim=1).repeat_interleave(BLOCK)[: tensor.numel()]
