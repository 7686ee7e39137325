"""Named tuple classes of a stored chain: for its hyper-parameters, coefficients and state.

Pickle saves a state by the name of its class, and another process must find that class. So the
class is an attribute of this module, and its name lists its fields. Names of hyper-parameters may
contain a dot.
"""

import re
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, cast

from torch import Tensor

_LOCK = threading.RLock()
_CLASSES: dict[Any, type] = {}
"""All classes created so far. Classes compare by identity, so each is created once."""


class Record(tuple[Any, ...]):
    """Tuple with named fields, like a NamedTuple. A name may be any text."""

    __slots__ = ()
    # Without annotation, since annotations of a class of hyper-parameters are its fields.
    _fields = cast("tuple[str, ...]", ())

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Take all values, either in order or by name."""
        if named and (values or named.keys() != set(cls._fields)):
            raise TypeError(f"{cls.__name__} takes {', '.join(cls._fields)}, got {sorted(named)}")
        given = tuple(named[field] for field in cls._fields) if named else values
        if len(given) != len(cls._fields):
            raise TypeError(f"{cls.__name__} takes {len(cls._fields)} values, got {len(given)}")
        return super().__new__(cls, given)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[type(self)._fields.index(name)]
        except ValueError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}") from None

    def __repr__(self) -> str:
        parts = (f"{key}={value!r}" for key, value in self._asdict().items())
        return f"{type(self).__name__}({', '.join(parts)})"

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))


def record_class(
    name: str, fields: Sequence[str], kinds: Sequence[Any], key: Any, **extra: Any
) -> Any:
    """Return the subclass of :class:`Record` with these fields.

    ``key`` distinguishes classes with equal fields, and determines ``extra``, more attributes of
    the class.
    """
    with _LOCK:
        known = (name, tuple(fields), tuple(kinds), key)
        if known not in _CLASSES:
            annotations = dict(zip(fields, kinds, strict=True))
            body = {"__slots__": (), "_fields": tuple(fields), "__annotations__": annotations}
            _CLASSES[known] = type(name, (Record,), {**body, **extra, "__module__": __name__})
        return _CLASSES[known]


_PREFIX = "StoredState_"
_FIELD = re.compile(r"([TL])(\d+)_")


def state_class(fields: Sequence[tuple[str, bool]]) -> Any:
    """Return a NamedTuple class of tensors, from names and True for each list of tensors."""
    parts = (f"{'L' if many else 'T'}{len(name)}_{name}" for name, many in fields)
    made = __getattr__(_PREFIX + "".join(parts))
    assert made._fields == tuple(name for name, _ in fields)
    return made


def __getattr__(name: str) -> Any:
    """Return a class of states by its name, for pickle and torch.load in another process."""
    if not name.startswith(_PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _LOCK:
        if name not in _CLASSES:
            _CLASSES[name] = _state_class(name)
        return _CLASSES[name]


def _state_class(name: str) -> type:
    fields: list[tuple[str, Any]] = []
    place = len(_PREFIX)
    while place < len(name):
        head = _FIELD.match(name, place)
        if head is None:
            raise AttributeError(f"{name!r} is no name of a class of states")
        end = head.end() + int(head[2])
        kind: Any = Tensor if head[1] == "T" else list[Tensor]
        fields.append((name[head.end() : end], kind))
        place = end
    made: type = NamedTuple("StoredState", fields)  # type: ignore[misc]  # known at run time
    made.__module__ = __name__
    made.__qualname__ = name
    made.__doc__ = "State of a stored chain."
    return made
