"""The script executor: a chain as one TorchScript program, one call for any number of leaves.

TorchScript is compiled at the first use of a chain, never at import, and runs without the GIL.
"""

import linecache
import threading
import typing
import warnings
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, Dict, List, Optional, Tuple  # noqa: UP035  TorchScript reads these

import torch
from torch import Tensor

from functional_optim.executors.leaf import Leaf, Stepped
from functional_optim.executors.reference import ReferenceExecutor
from functional_optim.executors.script_source import program_source, source
from functional_optim.hyper import is_plain
from functional_optim.stage import NoState, Rule, Stage, Transform


def _function(stage: Stage) -> Any:
    if isinstance(stage, Rule):
        return stage.rule
    assert isinstance(stage, Transform)
    return stage.transform


def coefficients_type(stage: Stage) -> type:
    """The class of a stage's coefficients: the annotation of its rule's fourth argument."""
    function = _function(stage)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    hints = typing.get_type_hints(function)
    if len(names) < 4 or names[3] not in hints:
        raise TypeError(
            f"{stage.name}: {function.__name__} must take four annotated arguments for the script "
            "executor, the fourth being its coefficients (a NamedTuple class)"
        )
    found: type = hints[names[3]]
    return found


def _list_fields(stage: Stage) -> list[str]:
    if not stage.stateful:
        return []
    hints = typing.get_type_hints(stage.state)
    return [name for name in stage.state._fields if typing.get_origin(hints[name]) is list]


@lru_cache(maxsize=None)
def _namespace(stages: tuple[Stage, ...]) -> ModuleType:
    """A module with the stages' functions and types, and the text that calls them."""
    module = ModuleType(f"functional_optim_script_{abs(hash(stages)):x}")
    names: dict[str, Any] = {
        "torch": torch,
        "Tensor": Tensor,
        "List": List,
        "Dict": Dict,
        "Tuple": Tuple,
        "Optional": Optional,
    }
    for i, stage in enumerate(stages):
        names[f"apply_{i}"] = _function(stage)
        names[f"State_{i}"] = stage.state if stage.stateful else NoState
        names[f"Coefficients_{i}"] = coefficients_type(stage)
        names[f"Hyper_{i}"] = stage.hyper
        names[f"coefficients_{i}"] = stage.coefficients
        if isinstance(stage, Transform) and stage.measure is not None:
            names[f"measure_{i}"] = stage.measure
    module.__dict__.update(names)
    text = source(stages, [_list_fields(stage) for stage in stages]) + program_source(stages)
    filename = f"<{module.__name__}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    exec(compile(text, filename, "exec"), module.__dict__)
    return module


_COMPILING = threading.RLock()
"""TorchScript must not be compiled by two threads at once, and hooks run in threads of gloo."""


def script(thing: Any) -> Any:
    """torch.jit.script without its deprecation warning, which is not the caller's to act on."""
    with _COMPILING, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*")
        return torch.jit.script(thing)


_COMPILED: dict[tuple[tuple[Stage, ...], str], Any] = {}


def _compiled(stages: tuple[Stage, ...], name: str) -> Any:
    """The scripted function ``name`` of a chain, compiled once."""
    key = (stages, name)
    if key not in _COMPILED:
        with _COMPILING:
            if key not in _COMPILED:
                _COMPILED[key] = script(_namespace(stages).__dict__[name])
    return _COMPILED[key]


def _arguments(
    stages: tuple[Stage, ...], leaves: Sequence[Leaf], measured: Sequence[Tensor]
) -> tuple[Any, ...]:
    distinct: dict[int, int] = {}
    coefficients: list[Any] = []
    which: list[int] = []
    for leaf in leaves:
        key = id(leaf.coefficients)
        if key not in distinct:
            distinct[key] = len(coefficients)
            coefficients.append(leaf.coefficients)
            _refuse_tensors(stages, leaf)
        which.append(distinct[key])
    states = [
        [leaf.states[i] for leaf in leaves] for i, stage in enumerate(stages) if stage.stateful
    ]
    return (
        [leaf.param for leaf in leaves],
        [leaf.grad for leaf in leaves],
        coefficients,
        which,
        list(measured),
        *states,
    )


def _refuse_tensors(stages: Sequence[Stage], leaf: Leaf) -> None:
    for stage, one in zip(stages, leaf.coefficients, strict=True):
        if not is_plain(one):
            raise TypeError(
                f"{stage.name} has a hyper-parameter that is a tensor; the script executor takes "
                "numbers: use float(value), or executor='reference'"
            )


class ScriptExecutor:
    """A chain compiled by TorchScript; bit for bit the reference executor."""

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        if not leaves:
            return []
        chain = tuple(stages)
        rows = _compiled(chain, "run")(*_arguments(chain, leaves, measured))
        results = []
        for param, *made in rows:
            found = iter(made)
            # What TorchScript returns is a new class at every call: make it ours again.
            states = tuple(stage.state(*next(found)) if stage.stateful else () for stage in chain)
            results.append(Stepped(param, states))
        return results

    def update_(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> None:
        if not leaves:
            return
        chain = tuple(stages)
        with torch.no_grad():
            _compiled(chain, "run_")(*_arguments(chain, leaves, measured))

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        return ReferenceExecutor().measure(stages, leaves, measured)


def program(stages: tuple[Stage, ...], *arguments: Any) -> Any:
    """The scripted ``Program`` module of a chain (see ``program_source``)."""
    return script(_namespace(stages).__dict__["Program"](*arguments))
