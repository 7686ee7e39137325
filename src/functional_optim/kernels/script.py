"""The script executor: a chain as one TorchScript program, one call for any number of leaves.

TorchScript is compiled at the first use of a chain, never at import, and runs without the GIL.
"""

import inspect
import itertools
import typing
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from functional_optim._torch import SCRIPT_QUALNAME
from functional_optim.core.brief import brief
from functional_optim.core.hyper import field_types, is_plain
from functional_optim.core.leaf import Leaf, Stepped
from functional_optim.core.stage import NoState, Stage, Transform, same_coefficients
from functional_optim.kernels.cache import ENTRIES, Cache
from functional_optim.kernels.chunk_executor import ChunkExecutor
from functional_optim.kernels.chunks import tensors_of, with_tensors
from functional_optim.kernels.errors import UnscriptableError, UntraceableError
from functional_optim.kernels.executor import Executor
from functional_optim.kernels.free_variables import free_variables_of, function_of
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.kernels.script_chunk import (
    SCRIPT_NAMES,
    ScriptedChunkKernel,
    example_totals,
    piece_elements,
    scripted_chunk,
)
from functional_optim.kernels.script_compiler import module_of, script, unfused, with_source
from functional_optim.kernels.script_flat import KINDS, ProgramChunk
from functional_optim.kernels.script_source import program_source, source
from functional_optim.kernels.validate import EXAMPLE_ELEMENTS


def _annotations(stage: Stage, function: Any, arguments: int) -> list[Any]:
    """The types of a function's arguments.

    Raises:
        UnscriptableError: it is no plain function, or its annotations are missing.
    """
    if not inspect.isfunction(function):
        raise UnscriptableError(
            f"{stage.name}: {brief(function)} is no plain function; TorchScript reads the source "
            "of module-level functions only: write one, or use executor='reference'"
        )
    names = list(inspect.signature(function).parameters)
    hints = typing.get_type_hints(function)
    if len(names) < arguments or any(name not in hints for name in names):
        count = {2: "two", 4: "four"}[arguments]
        raise UnscriptableError(
            f"{stage.name}: {function.__name__} must take {count} annotated arguments for "
            f"TorchScript, it takes ({', '.join(names)}) and annotates ({', '.join(hints)}): "
            "annotate them, or use executor='reference'"
        )
    return [hints[name] for name in names]


def coefficients_type(stage: Stage) -> type:
    """The class of a stage's coefficients: the annotation of its rule's fourth argument."""
    found: type = _annotations(stage, function_of(stage), 4)[3]
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
        if getattr(one, "__module__", "") == "__main__" and SCRIPT_QUALNAME not in vars(one):
            name = f"__torch__.functional_optim_{next(_CELL_CLASSES)}.{one.__name__}"
            setattr(one, SCRIPT_QUALNAME, name)


_SCRIPTED: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
"""For each function that TorchScript has compiled, the key of what it read then."""


def _require_constants(named: Sequence[tuple[str, Any]]) -> None:
    """Make sure that functions read what they read when TorchScript compiled them.

    TorchScript compiles a function once in a process, and keeps the values that it reads.

    Args:
        named: functions, each with the name of its stage.

    Raises:
        UnscriptableError: a function reads a value that may change, or one that has changed.
    """
    way_out = "executor='auto' or 'reference', which follow the new value"
    free = free_variables_of(named)
    if free.reason is not None:
        raise UnscriptableError(f"{free.reason}; or use {way_out}")
    for function, key in free.functions.items():
        if _SCRIPTED.setdefault(function, key) != key:
            raise UnscriptableError(
                f"{function.__name__} reads a constant or a function that was replaced after "
                f"TorchScript compiled it, and TorchScript keeps the first one; use {way_out}"
            )


def _functions(stages: Sequence[Stage]) -> list[tuple[str, Any]]:
    """The functions of stages that a step calls for each leaf, each with its stage's name."""
    found = [(stage.name, function_of(stage)) for stage in stages]
    transforms = [stage for stage in stages if isinstance(stage, Transform)]
    measures = [(one.name, one.measure) for one in transforms if one.measure is not None]
    return [*found, *measures]


@lru_cache(maxsize=ENTRIES)
def _namespace(stages: tuple[Stage, ...], chunks: tuple[ProgramChunk, ...] = ()) -> ModuleType:
    """A module with the stages' functions and types, and the text that calls them."""
    names: dict[str, Any] = dict(SCRIPT_NAMES)
    for i, stage in enumerate(stages):
        names[f"apply_{i}"] = function_of(stage)
        names[f"State_{i}"] = stage.state if stage.stateful else NoState
        names[f"Coefficients_{i}"] = coefficients_type(stage)
        names[f"Hyper_{i}"] = stage.hyper
        names[f"coefficients_{i}"] = stage.coefficients
        _name_apart(names[f"State_{i}"], names[f"Coefficients_{i}"], stage.hyper)
        if isinstance(stage, Transform) and stage.measure is not None:
            names[f"measure_{i}"] = stage.measure
    fields = [_list_fields(stage) for stage in stages]
    text = source(stages, fields, chunks) + program_source(stages)
    return module_of(f"functional_optim_script_{abs(hash((stages, chunks))):x}", text, names)


_COMPILED: Cache[Any] = Cache()


def _compiled(stages: tuple[Stage, ...], name: str) -> Any:
    """The scripted function ``name`` of a chain, compiled once."""
    key = (stages, name)
    _require_constants(_functions(stages))
    return _COMPILED.get_or_make(
        key, lambda: _scripted(stages, with_source(_namespace(stages), name))
    )


def _scripted(stages: tuple[Stage, ...], thing: Any) -> Any:
    """What is made of a chain's functions, scripted.

    Raises:
        UnscriptableError: TorchScript does not take it; names the stage that is at fault.
    """
    try:
        return script(thing)
    except Exception as error:
        raise UnscriptableError(_refusal(stages, error)) from error


def _refusal(stages: tuple[Stage, ...], error: Exception) -> str:
    """Why TorchScript does not take a chain: of which stage it does not, and what it says."""
    way_out = (
        "rewrite that with what TorchScript has, or use executor='reference' or 'blocked', which "
        "need none"
    )
    for stage in stages:
        try:
            script(function_of(stage))
        except Exception as own:  # noqa: BLE001  whatever it says is handed on
            name = function_of(stage).__name__
            return f"{stage.name}: TorchScript does not take {name}: {_said(own)}; {way_out}"
    return f"TorchScript does not take this chain: {_said(error)}; {way_out}"


def _said(error: Exception) -> str:
    """The first line of what TorchScript says, and the line of the source that it points to."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    marked = [before for before, line in itertools.pairwise(lines) if "<--- HERE" in line]
    return f"{lines[0].rstrip(':.')} (at: {marked[0]})" if marked else lines[0].rstrip(":.")


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


class LeafScript(Executor):
    """A chain compiled by TorchScript, over leaves as they are."""

    exact = True

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        if not leaves:
            return []
        chain = tuple(stages)
        run = _compiled(chain, "run")
        rows = unfused([leaves[0].param], run, *_arguments(chain, leaves, measured))
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
            run = _compiled(chain, "run_")
            unfused([leaves[0].param], run, *_arguments(chain, leaves, measured))

    def measure(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> Tensor:
        return ReferenceExecutor().measure(stages, leaves, measured)

    def require(self, stages: Sequence[Stage], leaves: Sequence[Leaf]) -> None:
        """Make sure that TorchScript takes the coefficients of every leaf.

        Raises:
            TypeError: one of them is a tensor.
        """
        for coefficients in {id(leaf.coefficients): leaf.coefficients for leaf in leaves}.values():
            for stage, one in zip(stages, coefficients, strict=True):
                _numbers(stage, one)


NEW_MEMORY = "with new memory for each operation"


class ScriptExecutor(ChunkExecutor):
    """A chain compiled by TorchScript; bit for bit the reference executor."""

    steps_copies = False

    def __init__(self) -> None:
        self._as_they_are = LeafScript()
        super().__init__(
            ScriptedChunkKernel(), leaves=self._as_they_are, called=f"script, {NEW_MEMORY}"
        )

    def update(
        self, stages: Sequence[Stage], leaves: Sequence[Leaf], measured: Sequence[Tensor]
    ) -> list[Stepped]:
        """The step of leaves as they are: a pure one has new memory anyway, and needs no copy."""
        return self._as_they_are.update(stages, leaves, measured)


def _kinds(leaves: Sequence[Leaf]) -> list[Leaf]:
    """One chunk for each kind of leaves, of a few elements."""
    found: dict[Any, Leaf] = {}
    for leaf in leaves:
        tensors = tensors_of(leaf)
        key = (id(leaf.coefficients), *((tensor.dtype, tensor.device) for tensor in tensors))
        if key not in found:
            few = [tensor.new_zeros(EXAMPLE_ELEMENTS) for tensor in tensors]
            found[key] = with_tensors(leaf, few)
    return list(found.values())


def _chunk(stages: tuple[Stage, ...], kind: Leaf) -> ProgramChunk | str:
    """The chunk for leaves of one kind, or why there is none."""
    devices = {tensor.device for tensor in tensors_of(kind)}
    if len(devices) > 1 or not (kind.param.is_cpu or kind.param.is_cuda):
        return f"it lies on {', '.join(map(str, devices))}"
    try:
        made = scripted_chunk(stages, kind, example_totals(stages, kind.param.device))
    except UntraceableError as error:
        return str(error)
    return ProgramChunk(made.text, piece_elements(made))


def _chunks(
    stages: tuple[Stage, ...], leaves: Sequence[Leaf]
) -> tuple[tuple[ProgramChunk, ...], tuple[str, ...]]:
    """The chunks that a program can step leaves by, and why it steps some without one."""
    found: dict[ProgramChunk | str, None] = {}
    for kind in _kinds(leaves):
        found[_chunk(stages, kind)] = None
    chunks = [one for one in found if isinstance(one, ProgramChunk)]
    reasons = [one for one in found if isinstance(one, str)]
    if len(chunks) > KINDS:
        reasons.append(f"there are more than {KINDS} kinds of leaves")
    return tuple(chunks[:KINDS]), tuple(reasons)


class ScriptedProgram(NamedTuple):
    """A scripted program."""

    module: Any
    """The ``Program`` module (see ``program_source``)."""
    reasons: tuple[str, ...]
    """Why it steps some leaves, or all, with new memory for each operation."""


def program(stages: tuple[Stage, ...], leaves: Sequence[Leaf], *arguments: Any) -> ScriptedProgram:
    """The scripted program of a chain.

    Args:
        stages: of the chain.
        leaves: that it will step, with the coefficients of the next step of each; gradients only
            show their dtype.
        arguments: of the module.

    Raises:
        UnscriptableError: TorchScript does not take a stage.
    """
    scripted = [stage for stage in stages if stage.coefficients is not same_coefficients]
    for stage in scripted:
        _annotations(stage, stage.coefficients, 2)
    named = [(stage.name, stage.coefficients) for stage in scripted]
    _require_constants([*_functions(stages), *named])
    chunks, reasons = _chunks(stages, leaves)
    made = with_source(_namespace(stages, chunks), "Program")(*arguments)
    return ScriptedProgram(_scripted(stages, made), reasons)
