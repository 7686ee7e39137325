"""Snapshots: the parameters of all workers at the time when they were read."""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from functional_optim._torch.modules import copy_module, get_children
from functional_optim.remote.versions import Lease

_ALIGNMENT = 16
"""Alignment of tensors in a buffer, in bytes. It is enough for every dtype."""


class Packed(NamedTuple):
    """Tensors in one flat buffer that can be sent."""

    data: Tensor
    """All tensors, as bytes."""
    specs: tuple[tuple[tuple[int, ...], torch.dtype, bool], ...]
    """The shape and dtype of each tensor, and True if it requires a gradient."""


class Reading(NamedTuple):
    """Parameters that a worker sends to a reader."""

    values: Sequence[Tensor] | Packed
    """The parameters."""
    lease: Lease | None
    """The reader returns the lease; None if the reader shares no memory with the parameters."""
    copied_bytes: int
    numbers: tuple[int, ...] = ()
    """The version of each parameter: its number of steps."""


def pack(params: Sequence[Tensor]) -> Packed:
    """Copy tensors to one buffer on the CPU."""
    starts, size = _offsets([(tuple(one.shape), one.dtype) for one in params])
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    with torch.no_grad():
        for start, one in zip(starts, params, strict=True):
            _view(data, start, tuple(one.shape), one.dtype).copy_(one)
    return Packed(data, tuple((tuple(one.shape), one.dtype, one.requires_grad) for one in params))


def unpack(packed: Packed) -> list[Tensor]:
    """Return leaf tensors that are views of the buffer."""
    starts, _ = _offsets([(shape, dtype) for shape, dtype, _ in packed.specs])
    return [
        _view(packed.data, start, shape, dtype).detach().requires_grad_(requires_grad)
        for start, (shape, dtype, requires_grad) in zip(starts, packed.specs, strict=True)
    ]


def _offsets(specs: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> tuple[list[int], int]:
    """Return the offset of each tensor in bytes, and the size of the buffer."""
    starts, end = [], 0
    for shape, dtype in specs:
        starts.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return starts, end


def _view(data: Tensor, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a view of the buffer with this shape and dtype."""
    return data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class Snapshot:
    """Snapshot of one version of all parameters, which no step changes.

    ``DistributedOptimizer.snapshot`` builds it. Call ``snapshot.run(model, inputs)`` to run the
    model with it, from several threads if you like. Pass it to the step with the gradients:
    ``optimizer.step(gradients, snapshot)``. The step gives its memory back. So do :meth:`close`,
    the end of a ``with`` block, and the garbage collector, once nothing refers to the snapshot or
    to tensors computed from it. A backward pass through a snapshot that was given back raises
    torch's RuntimeError about variables modified in place.

    Attributes:
        parameters: leaf tensors by name, in the order of the groups. They require a gradient if the
            parameters do. Empty once the snapshot is given back.
        numbers: for each worker, the number of steps that each of its parameters had made.

    Example::

        >>> from functional_optim import DistributedOptimizer, sgd
        >>> params = {"weight": torch.ones(2, requires_grad=True)}
        >>> optimizer = DistributedOptimizer.over_threads(sgd, params, {"weight": "ps"}, lr=0.5)
        >>> with optimizer.snapshot() as snapshot:
        ...     weight = snapshot.parameters["weight"]
        ...     optimizer.step([torch.ones(2)])  # of another trainer
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

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module with the parameters of this version.

        Args:
            module: its parameters have the same names as in the optimizer. The module does not
                change, so several threads may run it. Buffers, and parameters that the snapshot
                lacks, are the module's own.
            args: positional arguments of the module.
            kwargs: keyword arguments of the module.

        Raises:
            RuntimeError: the snapshot was given back.
        """
        if not self.parameters:
            raise RuntimeError("this snapshot was given back: read a new one with snapshot()")
        return call_with_parameters(module, self.parameters, args, kwargs)

    def give_back(self) -> None:
        """Allow steps to overwrite the memory. The snapshot is in use until :meth:`close`."""
        leaves, self.parameters = tuple(self.parameters.values()), {}
        # Do this first, so that a backward pass raises, and never reads what a step writes.
        torch.autograd.graph.increment_version(leaves)
        for lease in self._leases:
            lease.given_back = True

    def close(self) -> None:
        """Give the snapshot back. No trainer waits for its step any more."""
        self.give_back()
        self._leave()


def call_with_parameters(
    module: nn.Module, parameters: Mapping[str, Tensor], args: Any, kwargs: Any
) -> Any:
    """Call a module with these parameters in place of its own. Several threads may call it.

    ``torch.func.functional_call`` changes the module during the call, so this function calls a
    shallow copy. The copy shares the buffers; attributes that the forward pass sets are lost.
    """
    return functional_call(_copy_modules(module, {}), dict(parameters), args, kwargs)


def _copy_modules(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a shallow copy of a tree of modules. ``copies`` has the copies so far."""
    if module not in copies:
        replica = copies[module] = copy_module(module)
        children = get_children(replica)
        for name, child in children.items():
            children[name] = None if child is None else _copy_modules(child, copies)
    return copies[module]


def build_snapshot(
    readings: Mapping[str, Reading],
    names: Mapping[str, Sequence[str]],
    order: Sequence[str],
    leave: Callable[[], None],
) -> Snapshot:
    """Return a snapshot of all workers, which calls ``leave`` when it is no longer in use."""
    found: dict[str, Any] = {}
    for worker, one in readings.items():
        leaves = unpack(one.values) if isinstance(one.values, Packed) else one.values
        found.update(zip(names[worker], leaves, strict=True))
    return Snapshot(
        {name: found[name] for name in order},
        {worker: one.numbers for worker, one in readings.items()},
        [one.lease for one in readings.values() if one.lease is not None],
        leave,
    )
