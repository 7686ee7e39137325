"""Registry by parameter: finds what serves a parameter.

torch's post-local SGD hook and its averager keep two counts that only agree as long as nobody makes
a mistake, and lose one of them in checkpoints. Here what a hook keeps is noted at each parameter
that it meets; the optimizer that steps these parameters finds it, compares, saves and loads it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar
from weakref import ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


class ByParameter(Generic[T]):
    """Notes of who serves which parameter; neither is kept alive by it.

    Example::

        >>> import torch
        >>> class Hook: ...
        >>> hooks, hook, params = ByParameter(), Hook(), [torch.ones(1), torch.ones(2)]
        >>> hooks.add(hook, params)
        >>> hooks.find(params) == [hook]
        True
    """

    def __init__(self) -> None:
        self._notes: Any = WeakIdKeyDictionary()

    def add(self, one: T, params: Iterable[Tensor]) -> None:
        """It serves these parameters from now on."""
        for param in params:
            self._notes[param] = ref(one)

    def find(self, params: Iterable[Tensor]) -> list[T]:
        """Return what serves some of these parameters, each once."""
        found: dict[int, T] = {}
        for param in params:
            one = self._notes[param]() if param in self._notes else None
            if one is not None:
                found[id(one)] = one
        return list(found.values())


class HookMemory(Protocol):
    """State that a communication hook keeps from one backward pass to the next.

    Example::

        >>> from hooks.averaging.contrib import PowerSGDMemory
        >>> all(hasattr(PowerSGDMemory, name) for name in ("state_dict", "check"))
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, between two backward passes."""
        ...

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Check that :meth:`load_state_dict` can load a state dict.

        Raises:
            ValueError: it is of other parameters.
        """
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there."""
        ...


MEMORIES: ByParameter[HookMemory] = ByParameter()
"""The memories that serve parameters: the optimizer that steps them saves and loads these."""
