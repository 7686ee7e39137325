"""Registry of hook states by parameter.

torch's post-local SGD hook and averager keep two separate step counts, and checkpoints lose one of
them. Here, a hook registers its state for each parameter in its buckets. The optimizer that steps
these parameters finds the state, compares its count, saves it and loads it.
"""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar
from weakref import ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")


class ParameterRegistry(Generic[T]):
    """Objects registered for parameters, with weak references to both.

    Example::

        >>> import torch
        >>> class Hook: ...
        >>> hooks, hook, params = ParameterRegistry(), Hook(), [torch.ones(1), torch.ones(2)]
        >>> hooks.add(hook, params)
        >>> hooks.find(params) == [hook]
        True
    """

    def __init__(self) -> None:
        self._objects: Any = WeakIdKeyDictionary()

    def add(self, one: T, params: Iterable[Tensor]) -> None:
        for param in params:
            self._objects[param] = ref(one)

    def find(self, params: Iterable[Tensor]) -> list[T]:
        """Return the objects registered for some of these parameters, each once."""
        found: dict[int, T] = {}
        for param in params:
            one = self._objects[param]() if param in self._objects else None
            if one is not None:
                found[id(one)] = one
        return list(found.values())


HOOK_MEMORIES: ParameterRegistry[Any] = ParameterRegistry()
"""The :class:`~hooks.averaging.contrib.PowerSGDMemory` of each parameter.

The optimizer that steps the parameters saves and loads it by ``state_dict``, ``check`` and
``load_state_dict``.
"""
