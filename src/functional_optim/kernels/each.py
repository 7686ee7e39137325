"""A function of one tensor, called once for several: torch's operations over lists do it for each.

What a stage measures is written for one gradient. Where it is a norm, or counts what is finite, and
what follows takes every number alone, all gradients are measured by one call; the numbers have the
same bits.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import foreach_vector_norm, is_functorch_wrapped_tensor

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_IS_CPU, _IS_CUDA = attrgetter("is_cpu"), attrgetter("is_cuda")
_DEVICE, _LAYOUT = attrgetter("device"), attrgetter("layout")
_DTYPE, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")
_ALONE = frozenset({"abs", "double", "pow", "sqrt", "square", "to"})
"""Methods of tensors that take every element alone."""


class _NumberOfEach:
    """A number of each tensor, in the place of the number of one."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers

    def __getattr__(self, name: str) -> Callable[..., "_NumberOfEach"]:
        if name not in _ALONE:
            raise AttributeError(name)
        method = getattr(self.numbers, name)

        def called(*args: Any, **options: Any) -> "_NumberOfEach":
            if name == "pow" and args not in ((2,), (2.0,)):
                raise AttributeError("pow of several is rounded otherwise than that of one")
            return _NumberOfEach(method(*args, **options))

        return called


class _FiniteOfEach:
    """Which elements of each tensor are finite, or are not."""

    def __init__(self, tensors: list[Tensor], *, are: bool = True) -> None:
        self._tensors, self._are = tensors, are

    def __invert__(self) -> "_FiniteOfEach":
        return _FiniteOfEach(self._tensors, are=not self._are)

    def sum(self, *, dtype: torch.dtype) -> _NumberOfEach:
        """How many: of a tensor whose norm is finite, all or none."""
        counts = [float(one.numel() if self._are else 0) for one in self._tensors]
        filled = [k for k, one in enumerate(self._tensors) if one.numel()]
        some = [self._tensors[k] for k in filled]
        norms = torch.stack(foreach_vector_norm(some, 2.0)).tolist() if some else ()
        for k, number in zip(filled, norms, strict=True):  # squares may be too large where none is
            if not math.isfinite(number):
                found = torch.isfinite(self._tensors[k])
                counts[k] = (found if self._are else ~found).sum(dtype=torch.float64).item()
        return _NumberOfEach(torch.tensor(counts, dtype=dtype, device="cpu"))


class _Each:
    """Several tensors, in the place of one."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def to(self, dtype: torch.dtype) -> "_Each":
        """All of them, which have this dtype: else there would be copies of all of them at once.

        Raises:
            TypeError: some have another.
        """
        if {*map(_DTYPE, self.tensors)} != {dtype}:
            raise TypeError(f"not all tensors are of {dtype}")
        return self

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if function is torch.isfinite and len(args) == 1 and not options:
            return _FiniteOfEach(args[0].tensors)
        if function is not torch.linalg.vector_norm or len(args) != 2 or options.keys() > {"dtype"}:
            return NotImplemented  # torch makes a TypeError of it
        own, order = args
        return _NumberOfEach(torch.stack(foreach_vector_norm(own.tensors, order, **options)))


def number_of_each(function: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> list[Any] | None:
    """``[function(one).item() for one in tensors]`` by one call; None where that is not known.

    Args:
        function: gives a 0-d tensor for one.
        tensors: to be given to it.

    Example::

        >>> tensors = [torch.ones(4), torch.ones(9)]
        >>> number_of_each(lambda x: torch.linalg.vector_norm(x, 2.0).square(), tensors)
        [4.0, 9.0]
        >>> number_of_each(torch.sum, tensors) is None
        True
    """
    found = tensor_of_each(function, tensors)
    return None if found is None else found.tolist()


def sum_over_each(function: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> Tensor | None:
    """The sum of these numbers on an accelerator, in float64; None where that is not known.

    It is left there: nothing waits for the device. The order is torch's own.

    Args:
        function: gives a 0-d tensor for one, and 0 for one without elements.
        tensors: to be given to it.
    """
    filled = [one for one in tensors if one.numel()]
    if len(filled) < 2 or len({*map(_DEVICE, filled)}) > 1:
        return None
    found = tensor_of_each(function, filled, _IS_CUDA)
    return None if found is None else found.to(torch.float64).sum()


def tensor_of_each(
    function: Callable[[Tensor], Tensor],
    tensors: list[Tensor],
    there: Callable[[Tensor], bool] = _IS_CPU,
) -> Tensor | None:
    """The numbers of :func:`number_of_each` in a tensor.

    Args:
        function, tensors: as there.
        there: whether a tensor is where they have to be, if not on the CPU.
    """
    if not are_plain(tensors, there):
        return None
    of_one: Any = function
    try:
        found = of_one(_Each(tensors))
    except (AttributeError, TypeError):  # it is written for a tensor, and asks for something else
        return None
    return found.numbers if isinstance(found, _NumberOfEach) else None


def numbers_of_each(
    reduce: Callable[..., Sequence[Tensor]],
    params: list[Tensor],
    grads: list[Tensor],
    coefficients: Any,
) -> list[list[float]] | None:
    """The same for a stage without state that gives several numbers: one list for each of them."""
    if not (are_plain(params) and are_plain(grads)):
        return None
    try:
        found = reduce(_Each(params), _Each(grads), (), coefficients)
    except (AttributeError, TypeError):
        return None
    if not all(isinstance(one, _NumberOfEach) for one in found):
        return None
    every: Any = found
    return [one.numbers.tolist() for one in every]


def are_plain(tensors: Sequence[Tensor], there: Callable[[Tensor], bool] = _IS_CPU) -> bool:
    """Whether they are numbers in the memory of the CPU, of which no derivative is taken.

    Args:
        tensors: any.
        there: whether a tensor is where they have to be, if not on the CPU.
    """
    if torch.compiler.is_compiling() or not _PLAIN.issuperset(map(type, tensors)):
        return False
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)):
        return False
    if not all(map(there, tensors)) or {*map(_LAYOUT, tensors)} != {torch.strided}:
        return False
    return not any(map(is_functorch_wrapped_tensor, tensors))
