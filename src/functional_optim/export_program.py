"""The step as a module that torch.export reads: the stages themselves, called on its inputs.

The numbers that are fed are taken out of their tensors at the beginning (as symbols, while it is
traced), so that coefficients are computed as Python computes them, and torch's functions get
plain numbers where they want such: the program is bit for bit the reference executor.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from functional_optim.executors.leaf import Leaf
from functional_optim.executors.reference import ReferenceExecutor
from functional_optim.executors.trace import UntraceableError
from functional_optim.export_coefficients import coefficients, first_line
from functional_optim.export_hyper import Slotted
from functional_optim.forms import map_state
from functional_optim.stage import Rule, Stage, Transform


class LeafPlan(NamedTuple):
    """What the program knows of a leaf."""

    name: str
    state: tuple[Any, ...]
    """One State per stage, of tensors without memory."""
    hypers: Slotted
    tensors: tuple[bool, ...]
    """For each stage, whether its coefficients are computed with tensors instead of symbols."""


class StepProgram(torch.nn.Module):
    """``program(params, grads, states, steps, hyper)``: five lists of tensors.

    Args:
        stages: of the chain.
        leaves: what is known of each, in order.
        inputs: the names of the numbers in ``hyper``, in order.
        in_place: write into the tensors of params, states and steps; else return new lists.
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
        self.stages = tuple(map(_named, stages))
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
        """One step."""
        tensors = dict(zip(self.inputs, hyper, strict=True))
        symbols = {name: value.item() for name, value in tensors.items()}
        left = iter(states)
        leaves = [
            self._leaf(plan, param, grad, left, step, symbols, tensors)
            for plan, param, grad, step in zip(self.leaves, params, grads, steps, strict=True)
        ]
        if self.in_place:
            ReferenceExecutor().update_(self.stages, leaves, ())
            for step in steps:
                step.add_(1)
            return ()
        made = ReferenceExecutor().update(self.stages, leaves, ())
        return (
            [one.param for one in made],
            [tensor for one in made for tensor in state_tensors(one.states)],
            [step + 1 for step in steps],
        )

    def _leaf(
        self,
        plan: LeafPlan,
        param: Tensor,
        grad: Tensor,
        states: Iterator[Tensor],
        step: Tensor,
        symbols: Mapping[str, Any],
        tensors: Mapping[str, Any],
    ) -> Leaf:
        own = tuple(map_state(lambda _: next(states), state) for state in plan.state)
        symbol = torch.sym_float(step.item()) + 1
        tensor = step.to(torch.float64) + 1
        made = tuple(
            coefficients(
                stage, hyper, *((tensors, tensor) if with_tensors else (symbols, symbol))
            )
            for stage, hyper, with_tensors in zip(
                self.stages, plan.hypers, plan.tensors, strict=True
            )
        )
        return Leaf(param, grad, own, made, plan.name)


def state_tensors(states: Sequence[Any]) -> list[Tensor]:
    """The tensors of a leaf's states, in order."""
    found: list[Tensor] = []
    for state in states:
        for value in state:
            found += value if isinstance(value, list) else [value]
    return found


def _named(stage: Stage) -> Stage:
    """The stage, whose functions say in an error that they are its own."""

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
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
        return replace(stage, rule=named(stage.rule))
    assert isinstance(stage, Transform)
    measure = None if stage.measure is None else named(stage.measure)
    return replace(stage, transform=named(stage.transform), measure=measure)


class WeightsInTensors(TorchFunctionMode):
    """``torch.lerp`` with its weight in a tensor: Inductor looks at one that is a number."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        return (_lerp if function in (torch.lerp, Tensor.lerp) else function)(*args, **named)


def _lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:  # noqa: A002  torch's name
    if isinstance(weight, torch.SymFloat):
        weight = torch.full((), weight, dtype=input.dtype, device=input.device)
    return torch.lerp(input, end, weight)


def exported(
    program: StepProgram, examples: tuple[list[Tensor], ...], shapes: Any, *, compiled: bool
) -> Any:
    """The program, traced by torch.export.

    Args:
        program: to trace.
        examples: its arguments.
        shapes: their dynamic sizes, or None.
        compiled: whether Inductor is to compile it.

    Raises:
        UntraceableError: names the stage that cannot be traced.
    """
    forward = _through_mode(program) if compiled else program
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own deprecations, on its way
            made = torch.export.export(forward, examples, dynamic_shapes=shapes)
    except UntraceableError:
        raise
    except Exception as error:
        names = ", ".join(stage.name for stage in program.stages)
        raise UntraceableError(f"torch.export refuses ({names}): {first_line(error)}") from error
    for node in made.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine have no place in a package
    return made


def _through_mode(program: StepProgram) -> torch.nn.Module:
    class Through(torch.nn.Module):
        def forward(self, params: Any, grads: Any, states: Any, steps: Any, hyper: Any) -> Any:
            with WeightsInTensors():
                return program(params, grads, states, steps, hyper)

    return Through()
