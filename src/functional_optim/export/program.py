"""The step as a module that torch.export traces: it calls the stages on its inputs.

Input numbers are read from their tensors at the start; during tracing they are symbols. So Python
computes the coefficients, and torch's functions get plain numbers where they need them. The program
equals the reference executor bit for bit.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim._torch.compilers import is_higher_order, is_mutable
from functional_optim.core.aliasing import match_strides
from functional_optim.core.hyper_inputs import InputHypers
from functional_optim.core.leaf import Leaf, check_kept
from functional_optim.core.stage import Rule, Stage, Transform
from functional_optim.core.state import map_state, state_tensors
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.plan.fed_coefficients import (
    Evaluation,
    coefficients,
    first_line,
    next_step,
    stand_in,
)


class LeafPlan(NamedTuple):
    """Leaf of an exported program."""

    name: str
    state: tuple[Any, ...]
    """One State per stage, of meta tensors."""
    hypers: InputHypers
    ways: tuple[Evaluation, ...]
    """How the coefficients of each stage are computed."""


class StepProgram(torch.nn.Module):
    """``program(params, grads, states, steps, hyper)``: five lists of tensors.

    Args:
        stages: of the chain.
        leaves: a plan for each leaf, in order.
        inputs: the names of the numbers in ``hyper``, in order.
        in_place: True to write into params, states and steps, and return ``(steps,)``; False to
            return new ``(params, states, steps)``.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        leaves: Sequence[LeafPlan],
        inputs: Sequence[str],
        *,
        in_place: bool,
    ) -> None:
        super().__init__()
        self.stages = tuple(map(_name_stage_in_errors, stages))
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
        fed = self._fed(hyper)
        leaves = [
            self._leaf(plan, param, grad, left, step, fed)
            for plan, param, grad, step in zip(self.leaves, params, grads, steps, strict=True)
        ]
        if self.in_place:
            ReferenceExecutor().update_(self.stages, leaves, ())
            # torch.export.save needs a program with a result.
            return ([step.add_(1) for step in steps],)
        made = ReferenceExecutor().update(self.stages, leaves, ())
        for leaf, one in zip(leaves, made, strict=True):
            check_kept(leaf, one)
        found = [tensor for one in made for tensor in state_tensors(one.states)]
        return (
            [match_strides(one.param, old) for old, one in zip(params, made, strict=True)],
            [match_strides(new, old) for old, new in zip(states, found, strict=True)],
            [step + 1 for step in steps],
        )

    def _fed(self, hyper: Sequence[Tensor]) -> dict[Evaluation, dict[str, Any]]:
        """Return the stand-ins of input numbers, for each way of evaluation in use."""
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


def _name_stage_in_errors(stage: Stage) -> Stage:
    """Return a stage whose functions name it in errors."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
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


def unused_inputs(program: Any, inputs: Sequence[str]) -> list[str]:
    """Return the names of inputs that do not affect a traced program."""
    nodes = list(program.graph.nodes)
    needed: set[Any] = set()
    for node in reversed(nodes):
        if node in needed or node.op == "output" or _has_effects(node.target):
            needed.update(node.all_input_nodes)
    named = {node.name: node for node in nodes if node.op == "placeholder"}
    last = program.graph_signature.user_inputs[-len(inputs) :] if inputs else ()
    return [name for name, node in zip(inputs, last, strict=True) if named[node] not in needed]


def _has_effects(target: Any) -> bool:
    """Return True if a call has effects other than its result."""
    if isinstance(target, type(torch.ops.aten.add.Tensor)):
        return is_mutable(target)
    return is_higher_order(target)


def trace(program: StepProgram, example_inputs: tuple[list[Tensor], ...], shapes: Any) -> Any:
    """Trace the program with torch.export. ``shapes`` has the dynamic sizes, or is None.

    Raises:
        UntraceableError: a stage cannot be traced; the error names it.
    """
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecations
            made = torch.export.export(program, example_inputs, dynamic_shapes=shapes)
    except UntraceableError:
        raise
    except Exception as error:
        names = ", ".join(stage.name for stage in program.stages)
        raise UntraceableError(f"torch.export refuses ({names}): {first_line(error)}") from error
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)  # contains paths of this machine
    made.example_inputs = None  # torch.export.load fails on tensors without values
    return made
