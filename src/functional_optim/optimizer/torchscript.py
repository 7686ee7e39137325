"""TorchScript programs: modules that step the parameters of a chain without Python.

TorchScript has no closures and no lists of functions. So the source of a small module is generated,
which calls the functions of the stages by name. It contains none of their mathematics.
"""

import inspect
import itertools
import linecache
import threading
import typing
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from string import Template
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from functional_optim._torch.compilers import SCRIPT_QUALNAME, set_script_fusion
from functional_optim.core.format import format_value
from functional_optim.core.leaf import is_measured, split_at_measured
from functional_optim.core.stage import NoState, Rule, Stage, Transform, same_coefficients
from functional_optim.core.stage_contract import is_raw_source
from functional_optim.core.views import real_view
from functional_optim.kernels.cache import MAX_ENTRIES, compile_lock
from functional_optim.kernels.errors import UnscriptableError
from functional_optim.kernels.free_variables import free_variables_of, function_of
from functional_optim.optimizer.empty_records import without_empty_records

_WAY_OUT = "or step this chain by update_ or bind, which need no TorchScript"

_PROGRAM = Template("""
def write(olds: List[Tensor], news: List[Tensor]) -> None:
    if len(olds) != len(news):
        raise ValueError("a rule returned another number of tensors than its state has")
    values: List[Tensor] = []
    for j in range(len(olds)):
        old, new = olds[j], news[j]
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ValueError(
                "a rule must keep shape and dtype: it made of " + str(old.shape) + ", dtype "
                + str(old.dtype) + ", " + str(new.shape) + ", dtype " + str(new.dtype)
            )
        if new.is_cpu or new.is_cuda:
            for other in olds:
                if other is not old and other.device == new.device and new.is_set_to(other):
                    new = new.clone()
        values.append(new)
    for j in range(len(olds)):
        olds[j].copy_(values[j])


$functions
class Program(torch.nn.Module):
    params: List[Tensor]
    steps: List[Tensor]
    groups: List[int]
    index: Dict[Tensor, int]
$attributes

    def __init__(self, params: List[Tensor], steps: List[Tensor], groups: List[int]$arguments):
        super().__init__()
        self.params = params
        self.steps = steps
        self.groups = groups
        self.index = {param: k for k, param in enumerate(params)}
$assignments

    @torch.jit.export
    def set_hypers(self$hyper_arguments) -> None:
$set_hypers

    @torch.jit.export
    def step(self, gradients: List[Optional[Tensor]]) -> None:
        if len(gradients) != len(self.params):
            raise ValueError(
                "step takes one gradient (or None) per parameter: got "
                + str(len(gradients)) + " gradients for " + str(len(self.params)) + " parameters"
            )
        indices: List[int] = []
        grads: List[Tensor] = []
        params = self.params
        for k, gradient in enumerate(gradients):
            if gradient is not None:
                if not gradient.is_same_size(params[k]):
                    raise ValueError(
                        "gradient " + str(k) + " has shape " + str(gradient.shape)
                        + ", its parameter " + str(params[k].shape)
                    )
                indices.append(k)
                grads.append(real_view(gradient))
        self._advance(indices, grads)

    @torch.jit.export
    def step_param(self, param: Tensor, gradient: Optional[Tensor]) -> None:
$step_param

    def _advance(self, indices: List[int], grads: List[Tensor]) -> None:
        with torch.no_grad():
            coefficients: List[$coefficient_tuple] = []
            which: List[int] = []
            last_step = -1
            last_group = -1
            for k in indices:
                step = int(self.steps[k].item()) + 1
                group = self.groups[k]
                if step != last_step or group != last_group:
                    coefficients.append(($coefficients,))
                    last_step = step
                    last_group = group
                which.append(len(coefficients) - 1)
            targets = [real_view(self.params[k]) for k in indices]
            params = targets
            raws = grads
$stages
            for k in indices:
                self.steps[k].add_(1)
""")

_STEP_PARAM = """\
        if gradient is not None:
            self._advance([self.index[param]], [real_view(gradient)])"""

_REFUSE_STEP_PARAM = """\
        raise ValueError("this chain needs all gradients at once: call step(gradients)")"""


def program_source(stages: Sequence[Stage]) -> str:
    """Return the source of a module with parameters, state and hyper-parameters."""
    stateful = [i for i, stage in enumerate(stages) if stage.stateful]
    every = range(len(stages))
    hypers = [f"h{i}: List[Hyper_{i}]" for i in every]
    typed = [f"s{i}: List[State_{i}]" for i in stateful] + hypers
    names = [one.split(":")[0] for one in typed]
    return _PROGRAM.substitute(
        functions="".join(_tensors_source(stages[i], i) for i in stateful),
        attributes="\n".join(f"    {one}" for one in typed),
        arguments="".join(f", {one}" for one in typed),
        assignments="\n".join(f"        self.{name} = {name}" for name in names),
        hyper_arguments="".join(f", {one}" for one in hypers),
        set_hypers="\n".join(f"        self.h{i} = h{i}" for i in every),
        step_param=_REFUSE_STEP_PARAM if any(map(is_measured, stages)) else _STEP_PARAM,
        coefficient_tuple="Tuple[" + ", ".join(f"Coefficients_{i}" for i in every) + "]",
        coefficients=", ".join(_coefficients(stage, i) for i, stage in enumerate(stages)),
        stages="\n".join(f"            {line}" for line in _stages_source(stages)),
    )


def _coefficients(stage: Stage, i: int) -> str:
    if stage.coefficients is same_coefficients:
        return f"self.h{i}[group]"
    return f"coefficients_{i}(float(step), self.h{i}[group])"


def _tensors_source(stage: Stage, i: int) -> str:
    """Return a function that lists the tensors of one stage's state."""
    hints = typing.get_type_hints(stage.state)
    lines = [f"def tensors_{i}(state: State_{i}) -> List[Tensor]:", "    found: List[Tensor] = []"]
    for field in stage.state._fields:
        add = "extend" if typing.get_origin(hints[field]) is list else "append"
        lines.append(f"    found.{add}(state.{field})")
    return "\n".join([*lines, "    return found"]) + "\n\n\n"


def _stages_source(stages: Sequence[Stage]) -> list[str]:
    """Return the loops over parameters: one per segment, since a reduction needs all gradients."""
    lines: list[str] = []
    stateful = [i for i, stage in enumerate(stages) if stage.stateful]
    for part in split_at_measured(stages):
        first, is_last = part.start, part.stop == len(stages)
        if is_measured(stages[first]):
            lines += [
                "total = torch.zeros((), dtype=torch.float64, device='cpu')",
                "for grad in grads:",
                f"    total = total + measure_{first}(grad).to(total.device)",
            ]
        body = ["param, grad, raw, c = params[j], grads[j], raws[j], coefficients[which[j]]"]
        for i in part:
            body += _call_source(stages[i], i)
        if is_last:
            body += ["olds, news = [targets[j]], [param]"]
            for i in stateful:
                new = f"new_{i}" if i in part else f"news_{i}[j]"
                body += [f"olds.extend(tensors_{i}(self.s{i}[indices[j]]))"]
                body += [f"news.extend(tensors_{i}({new}))"]
            body.append("write(olds, news)")
        else:
            kept = {f"{name}s_{first}": name for name in ("param", "grad", "raw")}
            kinds = dict.fromkeys(kept, "Tensor")
            for i in stateful:
                if i in part:
                    kept[f"news_{i}"], kinds[f"news_{i}"] = f"new_{i}", f"State_{i}"
            lines += [f"{name}: List[{kind}] = []" for name, kind in kinds.items()]
            body += [f"{name}.append({value})" for name, value in kept.items()]
        lines += ["for j in range(len(indices)):", *(f"    {line}" for line in body)]
        if not is_last:
            lines.append(f"params, grads, raws = params_{first}, grads_{first}, raws_{first}")
    return lines


def _call_source(stage: Stage, i: int) -> list[str]:
    """Return the call of one stage for one parameter."""
    state = f"self.s{i}[indices[j]]" if stage.stateful else "()"
    new = f"new_{i}" if stage.stateful else f"none_{i}"
    if isinstance(stage, Rule):
        lines = [f"param, {new} = apply_{i}(param, grad, {state}, c[{i}])"]
    else:
        more = ", total.to(grad.device)" if is_measured(stage) else ""
        more += ", raw" if isinstance(stage, Transform) and stage.raw else ""
        lines = [f"grad, {new} = apply_{i}(grad, param, {state}, c[{i}]{more})"]
    return [*lines, "raw = grad"] if is_raw_source(stage) else lines


# ------------------------------------------------------------------------------------- compiling


def compile_program(stages: tuple[Stage, ...], *arguments: Any) -> Any:
    """Return the compiled module of a chain."""
    scripted = [stage for stage in stages if stage.coefficients is not same_coefficients]
    for stage in scripted:
        _annotations(stage, stage.coefficients, 2)
    named = [(stage.name, stage.coefficients) for stage in scripted]
    named += [(stage.name, function_of(stage)) for stage in stages]
    measured = [one for one in stages if isinstance(one, Transform)]
    named += [(one.name, one.measure) for one in measured if one.measure is not None]
    _check_constants(named)
    module = _module(stages)
    # TorchScript reads the source from this cache, which debuggers and test tools clear.
    assert module.__doc__ is not None
    lines = module.__doc__.splitlines(keepends=True)
    file = str(module.__file__)
    linecache.cache[file] = (len(module.__doc__), None, lines, file)
    try:
        return script(module.Program(*arguments))
    except Exception as error:
        raise UnscriptableError(_format_error(stages, error)) from error


def script(thing: Any) -> Any:
    """Return ``torch.jit.script(thing)``, compiled by one thread at a time.

    torch's deprecation warning is ignored, since the caller cannot act on it.
    """
    with compile_lock(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*")
        return torch.jit.script(thing)


_FUSION = threading.Lock()
"""Acquired while torch's setting of fusion, which is one for all threads, is changed."""


def run_unfused(params: Sequence[Tensor], run: Callable[..., Any], *arguments: Any) -> None:
    """Call a program for these parameters, without fusion of operations.

    On an accelerator, TorchScript fuses operations after the first call. A fused operation rounds
    in another way, and some do not compile (bfloat16 without elements). On the CPU, there is no
    fusion.
    """
    if not params or params[0].is_cpu:
        run(*arguments)
        return
    with _FUSION:
        before = set_script_fusion(fuse=False)
        try:
            run(*arguments)
        finally:
            set_script_fusion(fuse=before)


@lru_cache(maxsize=MAX_ENTRIES)
def _module(stages: tuple[Stage, ...]) -> ModuleType:
    """Return a module with the functions and types of the stages, and the generated source."""
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "real_view": real_view}
    names |= {name: getattr(typing, name) for name in ("List", "Dict", "Tuple", "Optional")}
    for i, stage in enumerate(stages):
        functions, convert = without_empty_records([function_of(stage), stage.coefficients])
        names[f"apply_{i}"], names[f"coefficients_{i}"] = functions
        names[f"State_{i}"] = stage.state if stage.stateful else NoState
        names[f"Coefficients_{i}"] = convert(_annotations(stage, function_of(stage), 4)[3])
        names[f"Hyper_{i}"] = convert(stage.hyper)
        _rename_in_main(names[f"State_{i}"], names[f"Coefficients_{i}"], stage.hyper)
        if isinstance(stage, Transform) and stage.measure is not None:
            names[f"measure_{i}"] = stage.measure
    name = f"functional_optim_script_{abs(hash(stages)):x}"
    module = ModuleType(name, program_source(stages))
    module.__file__ = f"<{name}>"
    module.__dict__.update(names)
    exec(compile(str(module.__doc__), module.__file__, "exec"), module.__dict__)  # noqa: S102  our source
    return module


def _annotations(stage: Stage, function: Any, arguments: int) -> list[Any]:
    """Return the types of a function's arguments."""
    if not inspect.isfunction(function):
        raise UnscriptableError(
            f"{stage.name}: {format_value(function)} is no plain function; TorchScript reads the "
            f"source of module-level functions only: write one, {_WAY_OUT}"
        )
    names = list(inspect.signature(function).parameters)
    hints = typing.get_type_hints(function)
    if len(names) < arguments or any(name not in hints for name in names):
        count = {2: "two", 4: "four"}[arguments]
        raise UnscriptableError(
            f"{stage.name}: {function.__name__} must take {count} annotated arguments for "
            f"TorchScript, it takes ({', '.join(names)}) and annotates ({', '.join(hints)}): "
            f"annotate them, {_WAY_OUT}"
        )
    return [hints[name] for name in names]


_CELL_CLASSES = itertools.count()


def _rename_in_main(*classes: Any) -> None:
    """Give NamedTuples of ``__main__`` a unique name in TorchScript.

    TorchScript refuses a second class of one qualified name with other fields, which is what a
    notebook makes when an edited cell runs again.
    """
    for one in classes:
        if getattr(one, "__module__", "") == "__main__" and SCRIPT_QUALNAME not in vars(one):
            name = f"__torch__.functional_optim_{next(_CELL_CLASSES)}.{one.__name__}"
            setattr(one, SCRIPT_QUALNAME, name)


_SCRIPTED: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
"""For each function that TorchScript has compiled, the key of the values that it read."""


def _check_constants(named: Sequence[tuple[str, Any]]) -> None:
    """Raise UnscriptableError if a function reads a value that may change, or has changed.

    TorchScript compiles a function once in a process, with the values of that time.
    """
    way_out = "update_ or bind, which follow the new value"
    free = free_variables_of(named)
    if free.reason is not None:
        raise UnscriptableError(f"{free.reason}; or use {way_out}")
    for function, key in free.functions.items():
        if _SCRIPTED.setdefault(function, key) != key:
            raise UnscriptableError(
                f"{function.__name__} reads a constant or a function that was replaced after "
                f"TorchScript compiled it, and TorchScript keeps the first one; use {way_out}"
            )


def _format_error(stages: tuple[Stage, ...], error: Exception) -> str:
    """Return an error text with the stage that TorchScript does not support, and its reason."""
    way_out = f"rewrite that with what TorchScript has, {_WAY_OUT}"
    for stage in stages:
        try:
            script(function_of(stage))
        except Exception as own:  # noqa: BLE001  its text is part of our error
            name = function_of(stage).__name__
            return f"{stage.name}: TorchScript does not take {name}: {_summary(own)}; {way_out}"
    return f"TorchScript does not take this chain: {_summary(error)}; {way_out}"


def _summary(error: Exception) -> str:
    """Return the first line of TorchScript's error, and the line of source that it points to."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    marked = [before for before, line in itertools.pairwise(lines) if "<--- HERE" in line]
    return f"{lines[0].rstrip(':.')} (at: {marked[0]})" if marked else lines[0].rstrip(":.")
