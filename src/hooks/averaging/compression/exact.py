"""No compression: the words of float32."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hooks.averaging.compression.checks import check_payload, finite_float32, whole
from hooks.averaging.compression.packing import from_bytes, to_bytes


@dataclass(frozen=True)
class Exact:
    """The vector in float32, bit for bit: 4 bytes an element, and no error.

    Example::

        >>> import torch
        >>> from hooks.averaging.compression import Exact
        >>> exact, flat = Exact(), torch.tensor([0.1, -2.0])
        >>> exact.payload_bytes(2)
        8
        >>> exact.decode(exact.encode(flat), 2, torch.float32)
        tensor([ 0.1000, -2.0000])
        >>> exact.error_bound(flat)
        tensor([0., 0.], dtype=torch.float64)
    """

    def encode(self, flat: Tensor) -> Tensor:
        """See :meth:`Compression.encode`."""
        return to_bytes(finite_float32(flat)).clone()

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Compression.decode`."""
        check_payload(payload, self.payload_bytes(numel), numel, dtype)
        return from_bytes(payload, torch.float32).to(dtype, copy=True)

    def payload_bytes(self, numel: int) -> int:
        """See :meth:`Compression.payload_bytes`."""
        return 4 * whole("numel", numel, least=0)

    def error_bound(self, flat: Tensor) -> Tensor:
        """Zero; see :meth:`Compression.error_bound`."""
        return torch.zeros_like(finite_float32(flat), dtype=torch.float64)
