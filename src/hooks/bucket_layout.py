"""Offset and strides of each parameter's gradient in a DDP bucket.

DDP lays a gradient out as its parameter lies in memory, if that is dense (channels_last, a
transpose), and a complex one as its real view. ``GradBucket.gradients()`` does not say so: it views
every gradient as contiguous, which puts the elements of other layouts in the wrong places.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_optim.plan.flat.apart import is_dense


def gradient_views(buffer: Tensor, params: Sequence[Tensor]) -> list[Tensor]:
    """Views of a bucket's buffer, one per parameter, each in the parameter's shape and dtype."""
    views: list[Tensor] = []
    offset = buffer.storage_offset()
    for param in params:
        real = torch.view_as_real(param.detach()) if _as_real(buffer, param) else param.detach()
        if is_dense(real):
            strides = real.stride()
        else:
            strides = torch.empty(real.shape, device="meta").stride()
        view = buffer.as_strided(real.shape, strides, offset)
        views.append(torch.view_as_complex(view) if _as_real(buffer, param) else view)
        offset += real.numel()
    return views


def _as_real(buffer: Tensor, param: Tensor) -> bool:
    return param.is_complex() and not buffer.is_complex()
