"""The step as a module that torch.export reads: the stages themselves, called on its inputs.

The numbers that are fed are taken out of their tensors at the beginning (as symbols, while it is
traced), so that coefficients are computed as Python computes them, and torch's functions get
plain numbers where they want such: the program is bit for bit the reference executor.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch import is_higher_order, is_mutable
from functional_optim.core.aliasing import laid_as
from functional_optim.core.leaf import Leaf, require_kept
from functional_optim.core.slots import Slotted
from functional_optim.core.stage import Rule, Stage, Transform
from functional_optim.core.state import map_state, state_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.lowering import Lowered
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.plan.fed_coefficients import (
    Evaluation,
    coefficients,
    first_line,
    next_step,
    stand_in,
)


class LeafPlan(NamedTuple):
    """Plan of a leaf in the program."""

    name: str
    state: tuple[Any, ...]
    """One State per stage, of tensors without memory."""
    hypers: Slotted
    ways: tuple[Evaluation, ...]
    """How the coefficients of each stage are computed."""


class StepProgram(torch.nn.Module):
    """``program(params, grads, states, steps, hyper)``: five lists of tensors.

    Args:
        stages: of the chain.
        leaves: what is known of each, in order.
        inputs: the names of the numbers in ``hyper``, in order.
        compiled: whether Inductor is to compile it, so that numbers stay in their tensors.
        in_place: write into the tensors of params, states and steps, and return ``(steps,)``; else
            return ``(params, states, steps)``, which are new.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        leaves: Sequence[LeafPlan],
        inputs: Sequence[str],
        *,
        compiled: bool,
        in_place: bool,
    ) -> None:
        super().__init__()
        self.stages = tuple(_guarded(stage, narrow=compiled) for stage in stages)
        self.compiled = compiled
        self.leaves = tuple(leaves)
        self.inputs = tuple(inputs)
        self.in_place = in_place

    def forward(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        states: list[Tensor],
        steps: list[Tensor],
        hyper: list[Tensor],
    ) -> tuple[list[Tensor], ...]:
        """Make a step."""
        left = iter(states)
        with Lowered() if self.compiled else nullcontext():
            fed = self._fed(hyper)
            leaves = [
                self._leaf(plan, param, grad, left, step, fed)
                for plan, param, grad, step in zip(self.leaves, params, grads, steps, strict=True)
            ]
            if self.in_place:
                ReferenceExecutor().update_(self.stages, leaves, ())
                # Something has to be returned: torch.export.save takes no program without a result.
                return ([step.add_(1) for step in steps],)
            made = ReferenceExecutor().update(self.stages, leaves, ())
            for leaf, one in zip(leaves, made, strict=True):
                require_kept(leaf, one)
            found = [tensor for one in made for tensor in state_tensors(one.states)]
            return (
                [laid_as(one.param, old) for old, one in zip(params, made, strict=True)],
                [laid_as(new, old) for old, new in zip(states, found, strict=True)],
                [step + 1 for step in steps],
            )

    def _fed(self, hyper: Sequence[Tensor]) -> dict[Evaluation, dict[str, Any]]:
        """Return the stand-ins for numbers, for each way of evaluation in use."""
        ways = {way for plan in self.leaves for way in plan.ways}
        named = dict(zip(self.inputs, hyper, strict=True))
        return {
            way: {name: stand_in(way, number) for name, number in named.items()}
            for way in Evaluation
            if way in ways
        }

    def _leaf(
        self,
        plan: LeafPlan,
        param: Tensor,
        grad: Tensor,
        states: Iterator[Tensor],
        step: Tensor,
        fed: Mapping[Evaluation, Mapping[str, Any]],
    ) -> Leaf:
        own = tuple(map_state(lambda _: next(states), state) for state in plan.state)
        count = {way: next_step(way, step) for way in fed if way in plan.ways}
        made = tuple(
            coefficients(stage, hyper, way, fed[way], count[way])
            for stage, hyper, way in zip(self.stages, plan.hypers, plan.ways, strict=True)
        )
        return Leaf(param, grad, own, made, plan.name)


def _guarded(stage: Stage, *, narrow: bool) -> Stage:
    """The stage, whose functions say in an error that they are its own.

    Args:
        stage: of the chain.
        narrow: whether 0-d results are brought back to their dtypes.
    """

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                result = function(*arguments)
                return _narrowed(result, arguments) if narrow else result
            except UntraceableError:
                raise
            except Exception as error:
                raise UntraceableError(
                    f"{stage.name} cannot be exported: {first_line(error)}. A rule computes with "
                    "torch's functions, and branches neither on a number that is fed (make the "
                    "choice a bool among its coefficients, or leave that name out of inputs) nor "
                    "on data"
                ) from error

        return call

    if isinstance(stage, Rule):
        return replace(stage, rule=guarded(stage.rule))
    assert isinstance(stage, Transform)
    measure = None if stage.measure is None else guarded(stage.measure)
    return replace(stage, transform=guarded(stage.transform), measure=measure)


def _narrowed(result: Any, arguments: tuple[Any, ...]) -> Any:
    """A stage's result, its 0-d tensors in their dtypes.

    A number in a 0-d tensor of double precision widens other 0-d tensors, and no larger ones.
    """
    if len(arguments) < 4:  # a measure
        return result
    value, state = result

    def narrowed(old: Tensor, new: Tensor) -> Tensor:
        return new.to(old.dtype) if new.dim() == 0 else new

    kept = map_state(narrowed, arguments[2], state) if arguments[2] else state
    return narrowed(arguments[0], value), kept


def unread(program: Any, inputs: Sequence[str]) -> list[str]:
    """The numbers among the inputs of a traced program that it makes nothing of."""
    nodes = list(program.graph.nodes)
    needed: set[Any] = set()
    for node in reversed(nodes):
        if node in needed or node.op == "output" or _acts(node.target):
            needed.update(node.all_input_nodes)
    named = {node.name: node for node in nodes if node.op == "placeholder"}
    last = program.graph_signature.user_inputs[-len(inputs) :] if inputs else ()
    return [name for name, node in zip(inputs, last, strict=True) if named[node] not in needed]


def _acts(target: Any) -> bool:
    """Return True if a call does more than give a result."""
    if isinstance(target, type(torch.ops.aten.add.Tensor)):
        return is_mutable(target)
    return is_higher_order(target)


def exported(program: StepProgram, examples: tuple[list[Tensor], ...], shapes: Any) -> Any:
    """The program, traced by torch.export.

    Args:
        program: to trace.
        examples: its arguments.
        shapes: their dynamic sizes, or None.

    Raises:
        UntraceableError: names the stage that cannot be traced.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecations, on its way
            made = torch.export.export(program, examples, dynamic_shapes=shapes)
    except UntraceableError:
        raise
    except Exception as error:
        names = ", ".join(stage.name for stage in program.stages)
        raise UntraceableError(f"torch.export refuses ({names}): {first_line(error)}") from error
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine have no place in a package
    if not program.compiled:
        made.example_inputs = None  # they hold no values, and torch.export.load trips over that
    return made
