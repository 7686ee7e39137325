"""Key of a kernel's program for a chunk.

:func:`~.signature.signature` visits every coefficient. If a chunk is stepped again, its signature
is usually the same, and only the numbers differ. So a generated Python function returns the
numbers, and checks that all other coefficients are unchanged.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Stage
from functional_optim.kernels.chunks import tensors_of
from functional_optim.kernels.errors import UntraceableError
from functional_optim.kernels.expressions import Namespace
from functional_optim.kernels.free_variables import FreeVariables, free_variables
from functional_optim.kernels.signature import VARIES, Container, Numbers, Signature, signature

Reader = Callable[[tuple[Any, ...]], "list[float] | None"]
"""Returns the numbers in the coefficients; None if another part of the coefficients changed."""

_Found = TypeVar("_Found")
_DTYPE = attrgetter("dtype")


class CacheKey(NamedTuple):
    """Key of a kernel's program for a chunk."""

    shape: Signature
    """What the graph depends on."""
    classes: tuple[type, ...]
    """The class of each stage's coefficients."""
    dtypes: tuple[torch.dtype, ...]
    """The dtypes of the parameter, the gradient and the state."""


class _Known(NamedTuple):
    """Cached key of a chunk, with the means to check it."""

    key: CacheKey
    fetch: Reader
    free: FreeVariables
    """Free variables of the functions of the stages."""


def key_of(
    stages: Sequence[Stage], chunk: Leaf, *, on_device: bool = False
) -> tuple[CacheKey, Numbers, list[Tensor]]:
    """Return the key of a chunk's program, the numbers of this step, and the chunk's tensors.

    If the chunk has ``entries``, the key is the same object in each step until it changes. The
    entries hold no tensor. ``on_device`` treats coefficients that are 0-d tensors as numbers.
    """
    known: _Known | None = None if chunk.entries is None else chunk.entries.get("key")
    if known is not None and known.free.hold():
        tensors = tensors_of(chunk)
        same = tuple(map(_DTYPE, tensors)) == known.key.dtypes
        numbers = known.fetch(chunk.coefficients) if same else None
        if numbers is not None:
            return known.key, numbers, tensors
    shape, numbers, tensors = signature(stages, chunk, on_device=on_device)
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UntraceableError(f"its tensors are on several devices ({names})")
    dtypes = tuple(tensor.dtype for tensor in tensors)
    key = CacheKey(shape, tuple(map(type, chunk.coefficients)), dtypes)
    if chunk.entries is not None:
        fetch = reader(key.classes, shape.static)
        chunk.entries["key"] = _Known(key, fetch, free_variables(stages))
    return key, numbers, tensors


def entry(chunk: Leaf, name: str, key: CacheKey, make: Callable[[], _Found]) -> _Found:
    """Return the entry of a chunk for a key, and make it if there is none."""
    known = None if chunk.entries is None else chunk.entries.get(name)
    if known is not None and known[0] is key:
        made: _Found = known[1]
        return made
    made = make()
    if chunk.entries is not None:
        chunk.entries[name] = key, made
    return made


def has_entry(chunk: Leaf, name: str, key: CacheKey) -> bool:
    """Return True if the chunk has an entry for a key."""
    known = None if chunk.entries is None else chunk.entries.get(name)
    return known is not None and known[0] is key


class ProgramKey(Protocol):
    """Key of a program in the cache of a kernel."""

    @property
    def stages(self) -> tuple[Stage, ...]: ...

    @property
    def key(self) -> CacheKey: ...


CHOICES = 32
"""Largest number of signatures for which a chain is compiled."""


def require_few_choices(want: ProgramKey, made: Iterable[ProgramKey]) -> None:
    """Check that static coefficients do not change with each step."""
    stages, shape = want.stages, want.key.shape
    alike = [one for one in made if one.stages == stages]
    if sum(one.key._replace(shape=shape) == want.key for one in alike) >= CHOICES:
        raise UntraceableError(
            "its coefficients that are not floats, or the constants that its stages read, have had "
            f"{CHOICES} different values, and each value is compiled separately: make a value that "
            "changes with the step a coefficient that is annotated as float"
        )


@lru_cache(maxsize=512)
def reader(classes: tuple[type, ...], static: tuple[Any, ...]) -> Reader:
    """Return a function that reads coefficients of these classes with these static values.

    The function raises no error. It returns None for all other coefficients.
    """
    return _Writer().write(classes, static)


class _Writer:
    """Writer of one reader."""

    def __init__(self) -> None:
        self._namespace = Namespace()
        self._lines: list[str] = []
        self._numbers: list[str] = []

    def write(self, classes: Sequence[type], static: Sequence[Any]) -> Reader:
        self._unpack("coefficients", tuple, len(classes))
        for i, (one, values) in enumerate(zip(classes, static, strict=True)):
            self._read_items(f"coefficients_{i}", one, values)
        body = "".join(f"    {line}\n" for line in self._lines)
        text = f"def fetch(coefficients):\n{body}    return [{', '.join(self._numbers)}]\n"
        return self._namespace.function(text, "fetch")

    def _read_items(self, name: str, kind: Any, values: Sequence[Any]) -> None:
        self._unpack(name, kind, len(values))
        for item, value in zip(self._items(name, len(values)), values, strict=True):
            if value is VARIES:
                self._require(f"type({item}) is float")
                self._numbers.append(item)
            elif isinstance(value, Container):
                self._read_items(item, value.kind, value.items)
            else:
                constant = self._namespace.name(value, "constant")
                kind_name = self._namespace.name(type(value), "kind")
                self._require(f"type({item}) is {kind_name} and {item} == {constant}")

    def _unpack(self, name: str, kind: type, count: int) -> None:
        self._require(
            f"type({name}) is {self._namespace.name(kind, 'kind')} and len({name}) == {count}"
        )
        if count:
            self._lines.append(f"{', '.join(self._items(name, count))}, = {name}")

    @staticmethod
    def _items(name: str, count: int) -> Iterator[str]:
        return (f"{name}_{k}" for k in range(count))

    def _require(self, condition: str) -> None:
        self._lines += [f"if not ({condition}):", "    return None"]
