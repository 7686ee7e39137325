"""A function of one tensor, called once for several: torch's operations over lists do it for each.

What a stage measures is written for one gradient. Where it is a norm, or counts what is finite, and
what follows takes every number alone, all gradients are measured by one call; of small ones also
where it is made of a few operations between tensors. The numbers have the same bits.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from functional_optim._torch import (
    foreach_function,
    foreach_vector_norm,
    is_functorch_wrapped_tensor,
)
from functional_optim.core.leaf import PLAIN

SMALL = 1 << 15
"""Most elements of a tensor that is asked together with others: copies of it stay in a cache."""

FEWEST = 4
"""Tensors of which fewer are sooner asked one by one."""

_IS_CPU, _IS_CUDA = attrgetter("is_cpu"), attrgetter("is_cuda")
_DEVICE, _LAYOUT = attrgetter("device"), attrgetter("layout")
_DTYPE, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")
_ALONE = frozenset({"abs", "double", "pow", "sqrt", "square", "to"})
"""Methods of tensors that take every element alone."""


class _Undecided:
    """Is neither true nor false, nor equal to anything: what is asked so is asked of one tensor."""

    __hash__ = None  # type: ignore[assignment]
    __iter__ = None

    def __bool__(self) -> bool:
        raise TypeError("it is not one of them")

    def __eq__(self, other: object) -> bool:
        raise TypeError("it is not one of them")


class _NumberOfEach(_Undecided):
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

    def __add__(self, other: Any) -> "_NumberOfEach":
        return _NumberOfEach(self.numbers + _numbers(other))

    def __mul__(self, other: Any) -> "_NumberOfEach":
        return _NumberOfEach(self.numbers * _numbers(other))

    __rmul__ = __mul__

    def __and__(self, other: Any) -> "_NumberOfEach":
        return _NumberOfEach(self.numbers & _numbers(other))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in {torch.isfinite, torch.where} or kwargs:
            return NotImplemented
        return _NumberOfEach(function(*map(_numbers, args)))


def _numbers(value: Any) -> Any:
    """What stands for it beside the numbers of each.

    Raises:
        TypeError: nothing does.
    """
    if isinstance(value, _NumberOfEach):
        return value.numbers
    if isinstance(value, (bool, float)):
        return value
    raise TypeError(f"{type(value).__name__} is no number of each tensor")


class _CountOfEach(_Undecided):
    """A whole number of each tensor, in the place of that of one."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def __gt__(self, other: int) -> bool:
        """Whether all of them are more.

        Raises:
            TypeError: only some are.
        """
        found = {one > other for one in self._counts}
        if len(found) > 1:
            raise TypeError("some are, and some are not")
        return found.pop()


class _FiniteOfEach(_Undecided):
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


class _Each(_Undecided):
    """Several tensors, in the place of one.

    Args:
        tensors: they.
        copies: whether all of them may be copied at once: they are small.
    """

    def __init__(self, tensors: Sequence[Tensor], *, copies: bool = False) -> None:
        self.tensors, self._copies = list(tensors), copies

    @property
    def dtype(self) -> torch.dtype:
        """That of all of them.

        Raises:
            AttributeError: they have several.
        """
        first = self.tensors[0].dtype
        if any(one.dtype != first for one in self.tensors):
            raise AttributeError("dtype")
        return first

    def to(self, dtype: torch.dtype) -> "_Each":
        """All of them in this dtype.

        Raises:
            TypeError: some have another, and there would be copies of all of them at once.
        """
        if {*map(_DTYPE, self.tensors)} == {dtype}:
            return self
        return self._made([one.to(dtype) for one in self._copied()])

    def numel(self) -> _CountOfEach:
        return _CountOfEach(list(map(Tensor.numel, self.tensors)))

    def reshape(self, *shape: int) -> "_Each":
        return self._made([one.reshape(*shape) for one in self._copied()])

    def abs(self) -> "_Each":
        return self._made(self._at_once("abs")(self._copied()))

    def sum(self, *, dtype: torch.dtype) -> _NumberOfEach:
        return _NumberOfEach(torch.stack([one.sum(dtype=dtype) for one in self.tensors]))

    def __getitem__(self, places: slice) -> "_Each":
        if not isinstance(places, slice):
            raise TypeError("they are not of the same shape")
        return self._made([one[places] for one in self.tensors])

    def __sub__(self, other: Any) -> "_Each":
        return self.beside("sub", other)

    def __mul__(self, other: Any) -> "_Each":
        return self.beside("mul", other)

    def beside(self, name: str, other: Any, **options: Any) -> "_Each":
        """What torch's function of this name makes of each and of another, or of a number."""
        if not isinstance(other, (_Each, float)):
            raise TypeError(f"{type(other).__name__} is not one for each tensor")
        given = other.tensors if isinstance(other, _Each) else other
        return self._made(self._at_once(name)(self._copied(), given, **options))

    def _at_once(self, name: str) -> Callable[..., Sequence[Tensor]]:
        found = foreach_function(name)
        if found is None:
            raise TypeError(f"torch has no {name} of lists")
        return found

    def _copied(self) -> list[Tensor]:
        """They, to make as many of.

        Raises:
            TypeError: they are large.
        """
        if not self._copies:
            raise TypeError("there would be copies of all tensors at once")
        return self.tensors

    def _made(self, tensors: Sequence[Tensor]) -> "_Each":
        return _Each(tensors, copies=self._copies)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        if function is torch.isfinite and len(args) == 1 and not options:
            return _FiniteOfEach(args[0].tensors)
        if function is torch.add and len(args) == 2 and options.keys() <= {"alpha"}:
            return args[0].beside("add", args[1], **options)
        if function is torch.dot and len(args) == 2 and all(isinstance(k, _Each) for k in args):
            pairs = zip(args[0].tensors, args[1].tensors, strict=True)
            return _NumberOfEach(torch.stack([torch.dot(*pair) for pair in pairs]))
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
    if there is _IS_CPU and max(map(Tensor.numel, tensors), default=0) > SMALL:
        return _beside_large(function, tensors)
    of_one: Any = function
    try:
        found = of_one(_Each(tensors))
    except (AttributeError, TypeError):  # it is written for a tensor, and asks for something else
        return None
    return found.numbers if isinstance(found, _NumberOfEach) else None


def _beside_large(function: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> Tensor | None:
    """The same, where some are large: it is called for each of these, and may do so in parts."""
    small = [k for k, one in enumerate(tensors) if one.numel() <= SMALL]
    if len(small) < FEWEST:
        return None
    numbers = tensor_of_each(function, [tensors[k] for k in small])
    if numbers is None:
        return None
    every = numbers.new_empty(len(tensors))
    every[small] = numbers
    for k in {*range(len(tensors))}.difference(small):
        every[k] = function(tensors[k])
    return every


def numbers_of_each(
    reduce: Callable[..., Sequence[Tensor]],
    params: list[Tensor],
    grads: list[Tensor],
    states: Sequence[Any],
    coefficients: Any,
    *,
    copies: bool = False,
) -> list[list[float]] | None:
    """The same for a stage that gives several numbers: one list for each of them.

    Args:
        reduce: of the stage.
        params, grads, states: of the leaves.
        coefficients: which they share.
        copies: whether all tensors may be copied at once: they are small.
    """
    if not (are_plain(params) and are_plain(grads)):
        return None
    try:
        state = _state_of_each(states, copies=copies)
        found = reduce(
            _Each(params, copies=copies), _Each(grads, copies=copies), state, coefficients
        )
    except (AttributeError, TypeError, IndexError):
        return None
    if not all(isinstance(one, _NumberOfEach) for one in found):
        return None
    every: Any = found
    return [one.numbers.tolist() for one in every]


def _state_of_each(states: Sequence[Any], *, copies: bool) -> Any:
    """States of the same fields as one, with several tensors in the place of each."""

    def column(values: Sequence[Any]) -> Any:
        if isinstance(values[0], list):
            return [_Each(one, copies=copies) for one in zip(*values, strict=True)]
        return _Each(values, copies=copies)

    return type(states[0])(*map(column, zip(*states, strict=True))) if states[0] else ()


def are_plain(tensors: Sequence[Tensor], there: Callable[[Tensor], bool] = _IS_CPU) -> bool:
    """Whether they are numbers in the memory of the CPU, of which no derivative is taken.

    Args:
        tensors: any.
        there: whether a tensor is where they have to be, if not on the CPU.
    """
    if torch.compiler.is_compiling() or not PLAIN.issuperset(map(type, tensors)):
        return False
    if torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors)):
        return False
    if not all(map(there, tensors)) or {*map(_LAYOUT, tensors)} != {torch.strided}:
        return False
    return not any(map(is_functorch_wrapped_tensor, tensors))
