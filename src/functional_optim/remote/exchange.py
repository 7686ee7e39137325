"""Exchange of gradients and parameters with a worker, within one process."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from functional_optim.remote.snapshot import Packed
from functional_optim.remote.versions import Lease, Versions, leaves


class Handed(NamedTuple):
    """Parameters for a reader."""

    values: Sequence[Tensor] | Packed
    lease: Lease | None
    """To be given back by the reader, where memory is shared."""
    copied_bytes: int


class Exchange(Protocol):
    """Interface between a worker's optimizer and the transport on the worker."""

    def gradients(self, source: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients that the caller named."""

    def numbers(self, source: Any, params: Sequence[Tensor]) -> Sequence[int | None] | None:
        """The step at which each parameter was read for them; None where nobody knows."""

    def done(self, source: Any, params: Sequence[Tensor]) -> None:
        """Their backward pass is over, and they are about to be applied."""

    def handed(self, params: Sequence[Tensor], versions: Sequence[Versions]) -> Handed:
        """The parameters as they are now."""


class InProcess:
    """Gradients are handed over as they are, and readers share memory with the parameters."""

    def gradients(self, source: Any, params: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients that were given."""
        return list(source)

    def numbers(self, source: Any, params: Sequence[Tensor]) -> None:
        """Known by the caller alone."""

    def done(self, source: Any, params: Sequence[Tensor]) -> None:
        """Nothing: the caller gives its snapshot back."""

    def handed(self, params: Sequence[Tensor], versions: Sequence[Versions]) -> Handed:
        """Leaves of autograd, by one lease."""
        lease = Lease()
        found = leaves(params, versions, [lease] * len(params))
        return Handed([one.tensor for one in found], lease, sum(one.copied_bytes for one in found))
