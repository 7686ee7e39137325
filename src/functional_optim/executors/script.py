"""The script executor: a chain as one TorchScript program, one call for any number of leaves.

TorchScript is compiled at the first use of a chain, never at import, and runs without the GIL.
"""

import inspect
import itertools
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

from functional_optim.executors.lane_executor import LaneExecutor
from functional_optim.executors.leaf import Leaf, Stepped
from functional_optim.executors.reference import ReferenceExecutor
from functional_optim.executors.script_source import program_source, source
from functional_optim.hyper import field_types, is_plain
from functional_optim.stage import NoState, Rule, Stage, Transform, same_coefficients


def _function(stage: Stage) -> Any:
    if isinstance(stage, Rule):
        return stage.rule
    assert isinstance(stage, Transform)
    return stage.transform


def _annotations(stage: Stage, function: Any, arguments: int) -> list[Any]:
    """The types of a function's arguments.

    Raises:
        TypeError: it is no plain function, or its annotations are missing.
    """
    if not inspect.isfunction(function):
        raise TypeError(
            f"{stage.name}: {function!r} is no plain function; TorchScript reads the source of "
            "module-level functions only: write one, or use executor='reference'"
        )
    names = list(inspect.signature(function).parameters)
    hints = typing.get_type_hints(function)
    if len(names) < arguments or any(name not in hints for name in names):
        count = {2: "two", 4: "four"}[arguments]
        raise TypeError(
            f"{stage.name}: {function.__name__} must take {count} annotated arguments for "
            f"TorchScript, it takes ({', '.join(names)}) and annotates ({', '.join(hints)}): "
            "annotate them, or use executor='reference'"
        )
    return [hints[name] for name in names]


def coefficients_type(stage: Stage) -> type:
    """The class of a stage's coefficients: the annotation of its rule's fourth argument."""
    found: type = _annotations(stage, _function(stage), 4)[3]
    return found


def _list_fields(stage: Stage) -> list[str]:
    if not stage.stateful:
        return []
    hints = typing.get_type_hints(stage.state)
    return [name for name in stage.state._fields if typing.get_origin(hints[name]) is list]


_CELL_CLASSES = itertools.count()


def _name_apart(*classes: Any) -> None:
    """Give NamedTuples of ``__main__`` a name of their own in TorchScript.

    It knows classes by qualified name and refuses a second one with other fields; in a notebook,
    running an edited cell again makes just that.
    """
    for one in classes:
        if getattr(one, "__module__", "") == "__main__" and "_jit_override_qualname" not in vars(
            one
        ):
            one._jit_override_qualname = (  # noqa: SLF001  torch has no public way
                f"__torch__.functional_optim_{next(_CELL_CLASSES)}.{one.__name__}"
            )


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
        _name_apart(names[f"State_{i}"], names[f"Coefficients_{i}"], stage.hyper)
        if isinstance(stage, Transform) and stage.measure is not None:
            names[f"measure_{i}"] = stage.measure
    module.__dict__.update(names)
    text = source(stages, [_list_fields(stage) for stage in stages]) + program_source(stages)
    module.__file__ = f"<{module.__name__}>"
    module.__doc__ = text
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def _with_source(module: ModuleType, name: str) -> Any:
    """A name of a generated module, its source where TorchScript looks for it.

    That is a cache which debuggers and test tools clear, so it is filled again each time.
    """
    assert module.__file__ is not None
    assert module.__doc__ is not None
    lines = module.__doc__.splitlines(keepends=True)
    linecache.cache[module.__file__] = (len(module.__doc__), None, lines, module.__file__)
    return module.__dict__[name]


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
                _COMPILED[key] = script(_with_source(_namespace(stages), name))
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
            coefficients.append(tuple(map(_numbers, stages, leaf.coefficients)))
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


def _numbers(stage: Stage, coefficients: Any) -> Any:
    """Coefficients as TorchScript takes them: whole numbers as floats where a float is declared.

    Raises:
        TypeError: one of them is a tensor.
    """
    if not is_plain(coefficients):
        raise TypeError(
            f"{stage.name} has a hyper-parameter that is a tensor; the script executor takes "
            "numbers: use float(value), or executor='reference'"
        )
    if not any(type(value) is int for value in coefficients):
        return coefficients
    coefficients_class: Any = type(coefficients)
    kinds = field_types(coefficients_class).values()
    return type(coefficients)(
        *(float(v) if kind is float else v for v, kind in zip(coefficients, kinds, strict=True))
    )


class LeafScript:
    """A chain compiled by TorchScript, over leaves as they are."""

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


class ScriptKernel:
    """A chain compiled by TorchScript, over a lane: one call, without the GIL."""

    exact = True

    def refuses(self, stages: Sequence[Stage], lane: Leaf) -> str | None:
        return None

    def attempt(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> str | None:
        LeafScript().update_(stages, [lane], totals)
        return None

    def explain(self, stages: Sequence[Stage], lane: Leaf) -> str:
        return "script"

    def ready(self, stages: Sequence[Stage], lane: Leaf, timeout: float | None) -> bool:
        return True


class ScriptExecutor(LaneExecutor):
    """A chain compiled by TorchScript; bit for bit the reference executor."""

    def __init__(self) -> None:
        super().__init__(ScriptKernel())
        self._reference = LeafScript()

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Make sure that TorchScript takes the coefficients of every leaf.

        Raises:
            TypeError: one of them is a tensor.
        """
        for coefficients in {id(leaf.coefficients): leaf.coefficients for leaf in leaves}.values():
            for stage, one in zip(stages, coefficients, strict=True):
                _numbers(stage, one)

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        return self._reference.update(stages, leaves, measured)

    def step_lane(self, stages: Sequence[Stage], lane: Leaf, totals: Sequence[Tensor]) -> None:
        """Step one lane; other than graphs, a script does not show what it looks at."""
        self._require_pointwise(stages, lane, totals)
        super().step_lane(stages, lane, totals)


def program(stages: tuple[Stage, ...], *arguments: Any) -> Any:
    """The scripted ``Program`` module of a chain (see ``program_source``)."""
    for stage in stages:
        if stage.coefficients is not same_coefficients:
            _annotations(stage, stage.coefficients, 2)
    return script(_with_source(_namespace(stages), "Program")(*arguments))
