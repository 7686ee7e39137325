"""Checks of parameters and gradients, DTensors, and the memory of tensors."""

from functional_optim.core.aliasing import clone_aliased
from functional_optim.core.checks import (
    check_count,
    check_fit,
    check_grad,
    check_measured,
    check_param,
    check_params,
    check_writable,
)
from functional_optim.core.dtensors import full_tensor, is_dtensor, to_local, unshard_like
from functional_optim.core.local_shards import (
    can_step_rows,
    can_step_shards,
    check_no_dtensor,
    format_placements,
    local_gradient,
)
from functional_optim.core.overlap import check_no_overlap
from functional_optim.kernels.chunks import LARGE, is_dense
from functional_optim.plan.flat.buffer import difference
from functional_optim.plan.flat.layout import FlatBuffer, FlatLayout, copy_with_strides
from functional_optim.plan.flat.move_checks import immovable_reasons
from functional_optim.plan.guard import grads_of, mark_changed
from functional_optim.plan.list_layout import MemoryGuard
