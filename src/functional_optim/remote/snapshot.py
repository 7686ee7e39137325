"""Snapshots: the parameters of all workers as they were when they were read."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from functional_optim.remote.running import run
from functional_optim.remote.versions import Lease

_ALIGNMENT = 16
"""Bytes; elements of every dtype may begin there."""


class Packed(NamedTuple):
    """Tensors in one flat buffer, to be sent."""

    data: Tensor
    """Bytes."""
    kinds: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """Of each tensor its shape and dtype, and whether it requires a gradient."""


class Reading(NamedTuple):
    """Answer of a worker to a reader."""

    values: Sequence[Tensor] | Packed
    """The parameters."""
    numbers: tuple[int, ...]
    """The step that each is at."""
    lease: Lease | None
    """To be given back, where memory is shared."""


def packed(params: Sequence[Tensor]) -> Packed:
    """Copies of tensors in one buffer, on the CPU."""
    starts, size = _places([(tuple(one.shape), one.dtype) for one in params])
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    with torch.no_grad():
        for start, one in zip(starts, params, strict=True):
            _view(data, start, tuple(one.shape), one.dtype).copy_(one)
    return Packed(data, tuple((tuple(one.shape), one.dtype, one.requires_grad) for one in params))


def unpacked(given: Packed) -> list[Tensor]:
    """Leaves of autograd over the buffer.

    Example::

        >>> unpacked(packed([torch.ones(2), torch.zeros(1, dtype=torch.float64)]))
        [tensor([1., 1.]), tensor([0.], dtype=torch.float64)]
    """
    starts, _ = _places([(shape, dtype) for shape, dtype, _ in given.kinds])
    return [
        _view(given.data, start, shape, dtype).detach().requires_grad_(wanted)
        for start, (shape, dtype, wanted) in zip(starts, given.kinds, strict=True)
    ]


def _places(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[list[int], int]:
    """Return the offset of each tensor in bytes, and the length of all."""
    starts, end = [], 0
    for shape, dtype in kinds:
        starts.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _view(data: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this kind in a buffer of bytes."""
    return data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class Snapshot:
    """Snapshot of one version of all parameters, which no step changes.

    ``DistributedOptimizer.snapshot`` makes it. Run the model on it by ``snapshot.run(model,
    inputs)``, which several threads may do at once, and hand it over with the gradients:
    ``optimizer.step(gradients, snapshot)``. That gives its memory back; so does
    :meth:`close`, the end of a ``with`` block, or that nobody holds it or anything that was
    computed from it. A backward pass through what was given back raises torch's RuntimeError of
    variables modified in place.

    Attributes:
        parameters: leaf tensors that require a gradient where the parameters do, by name, in the
            order of the groups; none once it is given back.
        numbers: for each worker, how many steps each of its parameters had made.

    Example::

        >>> from functional_optim import DistributedOptimizer, sgd
        >>> params = {"weight": torch.ones(2, requires_grad=True)}
        >>> optimizer = DistributedOptimizer.over_threads(sgd, params, {"weight": "ps"}, lr=0.5)
        >>> with optimizer.snapshot() as snapshot:
        ...     weight = snapshot.parameters["weight"]
        ...     optimizer.step([torch.ones(2)])  # another trainer's
        ...     torch.autograd.grad((weight * weight).sum(), [weight]), params["weight"].detach()
        ((tensor([2., 2.]),), tensor([0.5000, 0.5000]))
        >>> optimizer.close()
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        numbers: Mapping[str, tuple[int, ...]],
        leases: Sequence[Lease],
        leave: Callable[[], None],
    ) -> None:
        self.parameters = dict(parameters)
        self.numbers = dict(numbers)
        self._leases = leases
        self._leave = weakref.finalize(self, leave)

    def __repr__(self) -> str:
        steps = max((one for numbers in self.numbers.values() for one in numbers), default=0)
        held = f"{len(self.parameters)} parameters" if self.parameters else "given back"
        return f"Snapshot({held}, at step {steps})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module with the parameters of this version.

        Args:
            module: whose parameters have the names that the optimizer has for them. It is left as
                it is, so that several threads may run it. Those that are not among them, and
                buffers, are the module's own.
            args: for the module.
            kwargs: the same, by name.

        Raises:
            RuntimeError: it was given back.
        """
        if not self.parameters:
            raise RuntimeError("this snapshot was given back: read a new one with snapshot()")
        return run(module, self.parameters, args, kwargs)

    def give_back(self) -> None:
        """Let its memory be overwritten; its step, if one is on its way, is still its own."""
        leaves, self.parameters = tuple(self.parameters.values()), {}
        # First: from here on a backward pass raises, and cannot read what is written next.
        torch.autograd.graph.increment_version(leaves)
        for lease in self._leases:
            lease.given_back = True

    def close(self) -> None:
        """Give it back: it is read no longer, and no trainer waits for its step."""
        self.give_back()
        self._leave()


def joined(
    readings: Mapping[str, Reading],
    names: Mapping[str, Sequence[str]],
    order: Sequence[str],
    leave: Callable[[], None],
) -> Snapshot:
    """A snapshot of what all workers answered.

    Args:
        readings: by worker.
        names: of each worker's parameters.
        order: of all names.
        leave: called when nobody uses it any more.
    """
    found: dict[str, Any] = {}
    for worker, one in readings.items():
        leaves = unpacked(one.values) if isinstance(one.values, Packed) else one.values
        found.update(zip(names[worker], leaves, strict=True))
    return Snapshot(
        {name: found[name] for name in order},
        {worker: one.numbers for worker, one in readings.items()},
        [one.lease for one in readings.values() if one.lease is not None],
        leave,
    )
