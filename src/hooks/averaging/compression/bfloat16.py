"""Compression to half the bytes of float32: each number rounded to bfloat16."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hooks.averaging.compression.checks import check_int, check_payload, finite_float32
from hooks.averaging.compression.packing import from_bytes, to_bytes

_LARGEST = torch.finfo(torch.bfloat16).max


@dataclass(frozen=True)
class BFloat16:
    """Each number rounded to the nearest bfloat16, ties to even: 2 bytes per element.

    ::

        |x' - x| <= 2^-8 |x| + 2^-134

    The second term covers numbers too small for eight significant bits. A number beyond the
    largest bfloat16 becomes the largest bfloat16, not infinity; the bound covers this too.

    Example::

        >>> import torch
        >>> from hooks.averaging.compression import BFloat16
        >>> short, flat = BFloat16(), torch.tensor([0.1, -2.0])
        >>> short.payload_bytes(2)
        4
        >>> short.decode(short.encode(flat), 2, torch.float32)
        tensor([ 0.1001, -2.0000])
    """

    def encode(self, flat: Tensor) -> Tensor:
        """See :meth:`Compression.encode`."""
        wide = finite_float32(flat)
        return to_bytes(wide.clamp(-_LARGEST, _LARGEST).to(torch.bfloat16))

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :meth:`Compression.decode`."""
        check_payload(payload, self.payload_bytes(numel), numel, dtype)
        return from_bytes(payload, torch.bfloat16).to(dtype, copy=True)

    def payload_bytes(self, numel: int) -> int:
        """See :meth:`Compression.payload_bytes`."""
        return 2 * check_int("numel", numel, least=0)

    def error_bound(self, flat: Tensor) -> Tensor:
        """Return the bound of the class; see :meth:`Compression.error_bound`."""
        return finite_float32(flat).to(torch.float64).abs() * 2.0**-8 + 2.0**-134
