"""Free variables of the functions of a stage: the globals, closures and defaults that they read.

A kernel is compiled once for many steps, so the compiled code depends on these values. A value that
cannot change is part of the kernel's key. A value that can change in place has no key, and a rule
that reads such a value is not compiled.
"""

import builtins
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_optim.core.format import format_value
from functional_optim.core.stage import Rule, Stage, Transform
from functional_optim.kernels.cache import MAX_ENTRIES

_OURS = "functional_optim"
_PACKAGES = frozenset({_OURS, "hooks", "numpy", "optree", "sharding", "torch"})
"""Packages whose functions and modules are assumed constant, like the standard library."""

_CONSTANTS = (
    *(bool, int, str, bytes, range, type(None), type(...), type(NotImplemented)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, Enum),
)
"""Types whose values are immutable, and equal only if no code can tell them apart."""

_FUNCTIONS = (
    *(type, types.BuiltinFunctionType, types.ClassMethodDescriptorType),
    *(types.GenericAlias, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.MethodDescriptorType, types.MethodWrapperType, types.UnionType),
    *(types.WrapperDescriptorType,),
)
"""Types of classes, and of functions written in C."""

_OWNERS = (types.FunctionType, types.ModuleType, type)
"""Types of objects whose attributes a function reads like global variables."""

_CACHED = type(functools.lru_cache(len))

_LOOK_UPS = (__import__, eval, exec, getattr, globals, vars)
"""Builtins that read variables whose names are not in the code."""


class _Identity:
    """Key of a function, class or module, compared by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Read(NamedTuple):
    """Look-up of a variable by a function, and its result."""

    get: Callable[[Any, str], Any]
    owner: Any
    name: str
    value: Any


class FreeVariables(NamedTuple):
    """Free variables of functions, and of the functions that they call."""

    key: tuple[Any, ...]
    """Part of the key of a kernel. Keys are equal if the functions read equal values."""
    reason: str | None
    """The reason why the functions cannot be compiled; None if they can."""
    functions: dict[Any, tuple[Any, ...]]
    """For each function written in Python, its part of the key."""
    reads: tuple[_Read, ...]

    def hold(self) -> bool:
        """Return True if every variable is still the same object."""
        for get, owner, name, value in self.reads:  # noqa: SIM110  runs in each step
            if get(owner, name) is not value:
                return False
        return True


_FOUND: dict[tuple[Stage, ...], FreeVariables] = {}


def free_variables(stages: Sequence[Stage]) -> FreeVariables:
    """Return the current free variables of the rules and transforms of a chain."""
    chain = tuple(stages)
    found = _FOUND.get(chain)
    if found is None or not found.hold():
        every = [part for stage in chain for part in stage.parts()]
        found = free_variables_of([(one.name, read) for one in every for read in _sources_of(one)])
        if len(_FOUND) >= MAX_ENTRIES:
            _FOUND.clear()
        _FOUND[chain] = found
    return found


def function_of(stage: Stage) -> Any:
    """Return the function of a Rule or a Transform."""
    if isinstance(stage, Rule):
        return stage.rule
    assert isinstance(stage, Transform)
    return stage.transform


def _sources_of(stage: Stage) -> list[Any]:
    """Return the function of a stage, and the classes of its arguments."""
    made = getattr(stage.coefficients, "__annotations__", {}).get("return")
    kinds = (stage.state, stage.hyper, made)
    return [function_of(stage), *(one for one in kinds if isinstance(one, type))]


def free_variables_of(functions: Sequence[tuple[str, Any]]) -> FreeVariables:
    """Return the current free variables of functions, and of the methods of classes.

    Each is given after the name of its stage, for the reason.
    """
    walk = _Search()
    key = []
    for stage, function in functions:
        walk.stage = stage
        key.append(walk.key_of(function, "its own attributes"))
    return FreeVariables(tuple(key), walk.reason, walk.functions, tuple(walk.reads))


class _Search:
    """Search for the free variables of functions, and of the functions that these call."""

    def __init__(self) -> None:
        self.stage = ""
        self.reason: str | None = None
        self.functions: dict[Any, tuple[Any, ...]] = {}
        self.reads: list[_Read] = []

    def key_of(self, value: Any, what: str) -> Any:
        """Return the key of a value. Record the reason if the value may change."""
        if isinstance(value, _CONSTANTS):
            return type(value), value
        if isinstance(value, (float, complex)):
            return type(value), repr(value)  # 0.0 equals -0.0, and NaN does not equal itself
        if isinstance(value, types.FunctionType):
            return self._key_of_function(value)
        if isinstance(value, type) and not _is_trusted(value.__module__):
            return _Identity(value), *map(self._key_of_function, _methods(value))
        parts = _parts(value)
        if parts is not None:
            return type(value), tuple(self.key_of(one, what) for one in parts)
        if not _is_constant(value):
            self._record_reason(what, value)
        return _Identity(value)

    def _record_reason(self, what: str, value: Any) -> None:
        shown = f"{format_value(value)}, which is neither a function nor a constant"
        self.reason = self.reason or (
            f"{self.stage} reads {what}: {shown}, and may change while a compiled step would go on "
            "with the first value; make it a hyper-parameter or a field of the state, or a "
            "constant that never changes (a number, a str, a tuple of them)"
        )

    def _key_of_function(self, function: types.FunctionType) -> Any:
        """Return the code of a function, and the keys of its free variables, once."""
        if function in self.functions:
            return function.__code__
        self.functions[function] = ()  # the function may be recursive
        if _is_trusted(function.__globals__.get("__name__", "")):
            # Its closure may contain functions of the user.
            contents = [_cell_contents(one, "") for one in function.__closure__ or ()]
            given = [one for one in contents if isinstance(one, types.FunctionType)]
            parts = (_Identity(function), *map(self._key_of_function, given))
        else:
            parts = (function.__code__, *self._keys_of_variables(function))
        self.functions[function] = parts
        return parts

    def _keys_of_variables(self, function: types.FunctionType) -> Iterator[Any]:
        code, name = function.__code__, function.__name__
        for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
            self._read(getattr, function, attribute)
        for value in function.__defaults__ or ():
            yield self.key_of(value, f"a default of {name}")
        for key in function.__kwdefaults__ or ():
            value = self._read(dict.get, function.__kwdefaults__, key)
            yield self.key_of(value, f"the default of {key!r} of {name}")
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        for path in _paths(code):
            if path.op in _WRITING and (path.name in cells or "GLOBAL" in path.op):
                self._record_reason(f"and writes {path.name!r} in {name}", path.name)
            elif path.op == "IMPORT_NAME":
                yield self.key_of(sys.modules.get(path.name), f"{path.name!r} in {name}")
            elif path.op in _READING:
                yield self._key_of_path(function, path, cells)

    def _key_of_path(
        self, function: types.FunctionType, path: "_Path", cells: dict[str, Any]
    ) -> Any:
        """Return the key of a variable, or of the attribute of it that is read."""
        if path.name in cells:
            value = self._read(_cell_contents, cells[path.name], path.name)
        elif "DEREF" in path.op:
            return None  # a local variable that an inner function reads
        else:
            value = self._read(dict.get, function.__globals__, path.name)
            if value is None:
                value = getattr(builtins, path.name, None)
        shown = path.name
        for attribute in path.attributes:
            if not isinstance(value, _OWNERS):
                break
            known = isinstance(value, types.ModuleType) and _is_trusted(value.__name__)
            value = getattr(value, attribute, None) if known else self._read(_get, value, attribute)
            shown = f"{shown}.{attribute}"
        return shown, self.key_of(value, f"{shown!r} in {function.__name__}")

    def _read(self, get: Callable[[Any, str], Any], owner: Any, name: str) -> Any:
        value = get(owner, name)
        self.reads.append(_Read(get, owner, name, value))
        return value


_READING = frozenset({"LOAD_CLASSDEREF", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME"})
_WRITING = frozenset({"DELETE_DEREF", "DELETE_GLOBAL", "STORE_DEREF", "STORE_GLOBAL"})


class _Path(NamedTuple):
    """Variable that is read or written, and the attributes of it that are read."""

    op: str
    name: str
    attributes: tuple[str, ...]


def _paths(code: types.CodeType) -> Iterator[_Path]:
    """Yield the variables of a function's code and of its inner functions."""
    ops = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    for at, one in enumerate(ops):
        if one.opname in _READING | _WRITING or one.opname == "IMPORT_NAME":
            end = at + 1
            while end < len(ops) and ops[end].opname in ("LOAD_ATTR", "LOAD_METHOD"):
                end += 1
            yield _Path(one.opname, one.argval, tuple(each.argval for each in ops[at + 1 : end]))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _paths(constant)


def _get(owner: Any, name: str) -> Any:
    return getattr(owner, name, None)


def _cell_contents(cell: types.CellType, name: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return None


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_trusted(module: str) -> bool:
    return _package(module) in _PACKAGES or _package(module) in sys.stdlib_module_names


def _parts(value: Any) -> Iterable[Any] | None:
    """Return the parts of a compound constant; None for all other values."""
    if isinstance(value, (tuple, frozenset)):
        return value
    if isinstance(value, types.MethodType) and not isinstance(value.__self__, type):
        return value.__func__, value.__self__
    if isinstance(value, functools.partial):
        return value.func, value.args, *sorted(value.keywords.items())
    if type(value) is _CACHED:
        return (value.__wrapped__,)
    if is_dataclass(value) and not isinstance(value, type):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined]  # all have it
        values = (getattr(value, one.name) for one in fields(value))
        return (type(value).__dict__.get("__call__"), *values) if frozen else None
    return None


def _methods(value: type) -> Iterator[types.FunctionType]:
    """Yield the methods that a user's class defines itself, without generated methods."""
    for one in vars(value).values():
        method = getattr(one, "fget", getattr(one, "__func__", one))
        is_method = isinstance(method, types.FunctionType)
        if is_method and method.__globals__.get("__name__") == value.__module__:
            yield method


def _is_constant(value: Any) -> bool:
    """Return True for classes, and for functions and modules that are assumed constant."""
    module = type(value).__module__
    if any(value is one for one in _LOOK_UPS):
        return False
    if isinstance(value, _FUNCTIONS) or module == "typing" or _package(module) == _OURS:
        return True
    if isinstance(value, types.ModuleType):
        return _is_trusted(value.__name__)
    is_own = isinstance(value, types.MethodType)  # a class method, which may read class attributes
    return (
        callable(value)
        and (_is_trusted(value.__module__) if is_own else _is_trusted(module))
        and not isinstance(value, (Tensor, nn.Module))
    )
