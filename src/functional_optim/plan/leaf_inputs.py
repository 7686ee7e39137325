"""Inputs per leaf besides the gradient, such as an estimate of the Hessian.

During a step, the inputs are part of the state of the stages that take them. So forms, kernels,
shards and plans handle them as any tensor of a state. After the step, they are removed.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim._torch.operators import foreach_copy_
from functional_optim.core.aliasing import match_strides
from functional_optim.core.dtensors import is_dtensor
from functional_optim.core.format import format_value
from functional_optim.core.links import Links
from functional_optim.core.local_shards import check_same_places
from functional_optim.core.overrides import paths_of
from functional_optim.core.stage import Stage
from functional_optim.core.tree import flatten_like, path_name
from functional_optim.plan.item import Item
from functional_optim.plan.leaf_positions import LeafPositions
from functional_optim.plan.points import LeafPart
from functional_optim.plan.step_leaves import StepLeaf


def input_names(links: Links) -> frozenset[str]:
    """Return the names of all inputs per leaf, required or not."""
    return frozenset([one.name for link in links for one in link.stage.inputs])


def flatten_inputs(
    links: Links, spec: optree.PyTreeSpec, leaves: Sequence[StepLeaf], extra: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the inputs, with inputs per leaf as lists instead of trees."""
    names = input_names(links).intersection(extra) if extra else ()
    if not names:
        return extra
    made = dict(extra)
    places = dict.fromkeys(leaf.position for leaf in leaves)
    for name in sorted(names):
        found = flatten_like(spec, extra[name], f"extra[{name!r}]")
        for place, value in enumerate(found):
            if value is not None and place not in places:
                raise ValueError(
                    f"extra[{name!r}] has {format_value(value)} at "
                    f"{path_name(paths_of(spec)[place])!r}, but the parameter is None: leave None "
                    "there too"
                )
        made[name] = [found[place] for place in places]
    return made


class LeafInputs:
    """Inputs of each leaf in a step, besides its gradient.

    Args:
        extra: all inputs by name; inputs per leaf are lists with a tensor or None for each leaf.
    """

    def __init__(self, links: Links, leaves: Sequence[StepLeaf], extra: Mapping[str, Any]) -> None:
        names = input_names(links).intersection(extra)
        needed = {one.name for link in links for one in link.stage.inputs if one.required}
        self.names = tuple(sorted(names))
        """The names of the inputs of this step."""
        self.are_seldom = not names <= needed
        """True if one of these inputs is optional."""
        self._leaves = leaves
        self._given: dict[str, Sequence[Tensor | None]] = {name: extra[name] for name in names}
        taken = {id(leaf.chain): _taken_by(leaf.chain.stages) for leaf in leaves} if names else {}
        for name in self.names:
            for leaf, value in zip(leaves, extra[name], strict=True):
                if value is not None and name in taken[id(leaf.chain)]:
                    _check_like(leaf.param, value, f"input {name!r} at {leaf.name!r}")

    def __bool__(self) -> bool:
        return bool(self._given)

    def require(self, part: LeafPart) -> None:
        """Raise TypeError or ValueError if an input is missing for all or for some leaves."""
        for stage in part.stages:
            for name, required in stage.inputs:
                if name in self._given:
                    self._require_each(stage, name, part.members)
                elif required:
                    raise TypeError(
                        f"{stage.name} needs {name!r} of each parameter at each step: give "
                        f"extra={{{name!r}: ...}}, a tensor for each parameter that has a gradient"
                    )

    def _require_each(self, stage: Stage, name: str, members: Sequence[int]) -> None:
        for k in members:
            if self._given[name][k] is None:
                required = any(one.required for one in stage.inputs if one.name == name)
                way = "" if required else f", or leave {name!r} out of this step"
                raise ValueError(
                    f"extra[{name!r}] has no tensor for {self._leaves[k].name!r}, which "
                    f"{stage.name} needs: give a tensor for each parameter that is stepped{way}"
                )

    def refuse_held(self, gate: Stage, behind: Sequence[Stage]) -> None:
        """Refuse an input that would be lost at a closed gate, which keeps only gradients."""
        for name, stage in _taken_by(behind).items():
            if name in self._given:
                raise ValueError(
                    f"extra[{name!r}] is for {stage.name}, and {gate.name} lets no step through "
                    f"at this call, so that it would be lost: give it at the call that makes the "
                    "step"
                )

    def put(self, member: int, stages: Sequence[Stage], states: Sequence[Any]) -> tuple[Any, ...]:
        """Return the states of a leaf's stages with their inputs, laid out as the parameter."""
        made = []
        for stage, state in zip(stages, states, strict=True):
            own = {name: self._given[name][member] for name, _ in stage.inputs if self._has(name)}
            given = {name: [self._laid(member, one)] for name, one in own.items()}
            made.append(state._replace(**given) if given else state)
        return tuple(made)

    def copies(self, part: LeafPart) -> list[Tensor]:
        """Return copies of the inputs of a part, in the layouts of the parameters.

        The order is that of :func:`rows_with_inputs`.
        """
        names = [one.name for stage in part.stages for one in stage.inputs if self._has(one.name)]
        pairs = [(k, name) for k in part.members for name in names]
        given: list[Any] = [self._given[name][k] for k, name in pairs]
        made = [torch.empty_like(self._leaves[k].param) for k, _ in pairs]
        if made:
            foreach_copy_(made, [one.detach() for one in given])
        return made

    def _has(self, name: str) -> bool:
        return name in self._given

    def _laid(self, member: int, value: Tensor | None) -> Tensor:
        assert value is not None, "that is required first"
        return match_strides(value, torch.empty_like(self._leaves[member].param))


def copy_inputs(stages: Sequence[Stage], items: Sequence[Item]) -> list[Item]:
    """Return items with copies of their inputs, because a step in place may write to any state."""
    if not any(stage.inputs for stage in stages):
        return list(items)
    copies = []
    for item in items:
        states = []
        for stage, state in zip(stages, item.state.stages, strict=True):
            names = [one.name for one in stage.inputs]
            own = {name: [one.detach().clone() for one in getattr(state, name)] for name in names}
            states.append(state._replace(**own) if own else state)
        copies.append(item._replace(state=item.state._replace(stages=tuple(states))))
    return copies


def rows_with_inputs(
    stages: Sequence[Stage], rows: Sequence[LeafPositions], names: Collection[str], start: int
) -> list[LeafPositions]:
    """Return positions of leaves, with the positions of inputs in the states of the stages."""
    at, found = count(start), []
    for row in rows:
        states: list[Any] = []
        for stage, state in zip(stages, row.states, strict=True):
            own: dict[str, Any] = {k: [next(at)] for k, _ in stage.inputs if k in names}
            states.append(state._replace(**own) if own else state)
        found.append(row._replace(states=tuple(states)))
    return found


def remove_inputs(stages: Sequence[Stage], states: Sequence[Any]) -> tuple[Any, ...]:
    """Return the states of stages after a step, without the inputs."""
    return tuple(
        state._replace(**{one.name: [] for one in stage.inputs}) if stage.inputs else state
        for stage, state in zip(stages, states, strict=True)
    )


def _taken_by(stages: Sequence[Stage]) -> dict[str, Stage]:
    """Return the first stage that takes each input, by name."""
    found: dict[str, Stage] = {}
    for stage in stages:
        for one in stage.inputs:
            found.setdefault(one.name, stage)
    return found


def _check_like(param: Tensor, value: Any, what: str) -> None:
    """Raise TypeError or ValueError unless a value is a dense tensor like its parameter."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"the {what} must be a tensor like the parameter, or None, got {format_value(value)}"
        )
    if value.layout != torch.strided:
        raise ValueError(
            f"the {what} has layout {value.layout}, and must be dense: give to_dense() of it"
        )
    pairs: list[tuple[str, Any, Any, str]] = [
        ("shape", tuple(value.shape), tuple(param.shape), "give a number for each element"),
        ("dtype", value.dtype, param.dtype, f"convert it by .to({param.dtype})"),
        ("device", value.device, param.device, f"move it by .to({str(param.device)!r})"),
    ]
    for kind, got, wanted, way in pairs:
        if got != wanted:
            raise ValueError(
                f"the {what} has {kind} {got}, but its parameter has {kind} {wanted}: {way}"
            )
    if is_dtensor(param):
        check_same_places(param, value, what)
    elif is_dtensor(value):
        raise ValueError(
            f"the {what} is a DTensor, and its parameter a plain tensor: give full_tensor() of it"
        )
