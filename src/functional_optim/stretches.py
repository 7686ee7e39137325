"""Gradients that lie end to end in memory as their parameters do, to be read where they are.

DistributedDataParallel with ``gradient_as_bucket_view=True`` keeps gradients in a few buckets.
Where the parameters of a buffer stand in the order of a bucket, a stretch of both is one lane, and
nothing is gathered.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.executors.lanes import LARGE
from functional_optim.flat_buffer import FlatBuffer
from functional_optim.flat_gradients import PLAIN
from functional_optim.places import Alike

PROBES = 16
"""Pairs of neighbours that are looked at before all are."""

_NONE = type(None)


class Stretch(NamedTuple):
    """Neighbours of one buffer whose gradients lie end to end."""

    first: int
    """The first of their segments."""
    grad: Tensor
    """All their gradients, flat; it begins with that of the first."""
    bring: Callable[[], None] | None = None
    """What puts them there; None where they are there."""


class InStretches(NamedTuple):
    """Where the gradients of one buffer are."""

    mask: tuple[int | None, ...]
    """For each segment, which stretch its gradient is in; None where there is none."""
    stretches: tuple[Stretch, ...]
    elsewhere: frozenset[int]
    """The stretches that are not in the flat gradient."""

    def grad(self, buffer: FlatBuffer, part: slice, length: int) -> Tensor:
        """The flat gradient of neighbouring segments of one stretch, so many elements."""
        number = self.mask[part.start]
        assert number is not None
        stretch = self.stretches[number]
        base = buffer.segments[stretch.first].offset
        start = buffer.segments[part.start].offset - base
        found: Tensor = stretch.grad[start : start + length]
        return found

    def bring(self, part: slice) -> Callable[[], None] | None:
        """What has to be called before the gradient of these segments is read.

        Of several lanes in one stretch, at different steps, it is called before the first.
        """
        number = self.mask[part.start]
        assert number is not None
        same = part.start > 0 and self.mask[part.start - 1] == number
        return None if same else self.stretches[number].bring


class Stretches:
    """Looks for such gradients.

    Args:
        buffers: of the layout, those that are stepped as lanes.
        views: for each parameter of the layout, a gradient as its buffer would hold it.
        written: what a step writes to: gradients that lie there are not read there.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        views: Sequence[Tensor | None],
        written: Iterable[Tensor],
    ) -> None:
        self._buffers = buffers
        self._written = list(written)
        self._order = [one.index for buffer in buffers for one in buffer.segments]
        mine = [views[i] for i in self._order]
        self._worth = sum(buffer.numel for buffer in buffers) // LARGE
        self._addresses: tuple[list[bool] | None, list[int]] = (None, [])
        self._found: list[InStretches] | None = None
        like = [view for view in mine if view is not None]
        assert len(like) == len(mine)
        self._alike = Alike(like)

    def find(self, given: Sequence[Any]) -> list[InStretches] | None:
        """Where the gradients of each buffer lie; None where they are not worth a lane per stretch.

        Args:
            given: a gradient or None for each parameter that the layout was given.
        """
        if not self.promises(given):
            return None
        mine = list(map(given.__getitem__, self._order))
        # A mode such as that of torch.set_default_device would run Python at every call.
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            given_of = [grad is not None for grad in mine] if _NONE in map(type, mine) else None
            present = mine if given_of is None else list(compress(mine, given_of))
            if not PLAIN.issuperset(map(type, present)) or not self._alike(present, given_of):
                return None
            addresses = (given_of, list(map(Tensor.data_ptr, present)))
            if addresses != self._addresses:
                self._addresses, self._found = addresses, self._search(mine)
        return self._found

    def promises(self, given: Sequence[Any]) -> bool:
        """Whether some neighbours share a storage: a glance, since most gradients do not.

        Args:
            given: as for :meth:`find`.
        """
        if self._worth == 0:
            return False
        if len(self._order) == 1:
            return given[self._order[0]] is not None
        step = max(1, len(self._order) // PROBES)
        pairs = zip(self._order[::step], self._order[1::step], strict=False)
        # A mode such as that of torch.set_default_device would run Python at every call.
        with torch._C.DisableTorchFunction():  # noqa: SLF001  torch has no public name
            return any(_share(given[one], given[other]) for one, other in pairs)

    def _search(self, mine: Sequence[Tensor | None]) -> list[InStretches] | None:
        """The stretches, in each buffer; None if there are too many."""
        found = []
        first = 0
        for buffer in self._buffers:
            grads = mine[first : first + len(buffer.segments)]
            first += len(buffer.segments)
            found.append(_stretches_of(buffer, grads))
        if sum(len(one.stretches) for one in found) > self._worth:
            return None
        written = spans_of(self._written)
        apart = all(is_apart(s.grad, written) for one in found for s in one.stretches)
        return found if apart else None


def _share(one: Any, other: Any) -> bool:
    """Whether two gradients share a storage; if one is missing, they might."""
    if one is None or other is None:
        return True
    if type(one) not in PLAIN or type(other) not in PLAIN:
        return False
    try:
        return bool(one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a sparse gradient
        return False


def _stretches_of(buffer: FlatBuffer, grads: Sequence[Tensor | None]) -> InStretches:
    mask: list[int | None] = []
    ends: list[tuple[int, int]] = []
    last: int | None = None  # of the stretch at hand, the last that has elements
    for k, grad in enumerate(grads):
        if grad is None:
            mask.append(None)
            last = None
            continue
        if last is not None and _follows(buffer, grads, last, k):
            ends[-1] = (ends[-1][0], k)
        else:
            ends.append((k, k))
        if last is None or grad.numel():
            last = k
        mask.append(len(ends) - 1)
    stretches = tuple(_stretch(buffer, grads, *pair) for pair in ends)
    return InStretches(tuple(mask), stretches, frozenset(range(len(stretches))))


def _follows(buffer: FlatBuffer, grads: Sequence[Tensor | None], last: int, k: int) -> bool:
    """Whether a gradient lies behind an earlier one as its parameter does, without a gap.

    A gap in the buffer holds zeros, and would be stepped by whatever lies between the gradients.
    """
    before, grad = grads[last], grads[k]
    assert before is not None
    assert grad is not None
    if buffer.segments[k].offset != buffer.segments[last].offset + buffer.segments[last].numel:
        return False
    if before.numel() == 0 or grad.numel() == 0:  # it lies nowhere
        return True
    apart = (buffer.segments[k].offset - buffer.segments[last].offset) * buffer.dtype.itemsize
    return (
        grad.data_ptr() - before.data_ptr() == apart
        and grad.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
    )


def _stretch(buffer: FlatBuffer, grads: Sequence[Tensor | None], first: int, last: int) -> Stretch:
    start, end = buffer.segments[first], buffer.segments[last]
    present = [grad for grad in grads[first : last + 1] if grad is not None]
    grad = next((grad for grad in present if grad.numel()), present[0])
    return Stretch(first, flat_from(grad, end.offset + end.numel - start.offset))


def flat_from(grad: Tensor, length: int) -> Tensor:
    """The real numbers that lie in memory from a gradient on, so many of them."""
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    return real.detach().as_strided((length,), (1,))


def order_in_memory(grads: Sequence[Tensor | None], names: Sequence[str]) -> list[int]:
    """The places of gradients in the order in which they lie in memory.

    Raises:
        ValueError: one is missing or sparse.
    """
    found = []
    for place, (grad, name) in enumerate(zip(grads, names, strict=True)):
        if grad is None or grad.layout != torch.strided:
            what = "none" if grad is None else f"one with layout {grad.layout}"
            raise ValueError(
                f"the parameter at {name!r} must have a dense gradient whose place is to be "
                f"followed, got {what}: call this after a backward pass that reaches every "
                "parameter"
            )
        found.append((grad.untyped_storage().data_ptr(), grad.data_ptr(), place))
    return [place for *_, place in sorted(found)]


def spans_of(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The memory that tensors are parts of: where it begins, and where it ends."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return [(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages]


def is_apart(grad: Tensor, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a gradient without gaps shares no memory with the spans, whoever made it."""
    begin = grad.data_ptr()
    end = begin + grad.numel() * grad.element_size()
    return all(end <= first or last <= begin for first, last in spans)
