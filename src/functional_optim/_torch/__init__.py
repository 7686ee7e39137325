"""The private parts of torch that this project calls or names: in this folder, and nowhere else.

Of each it is said why it is needed, and what is done where a later torch lacks it: the same by
public names, or an error. The error is an ImportError, raised before anything is written; it says
what is missing and what to do. A test says when torch has changed one of them.

Importing this brings nothing that ``import torch`` has not brought: what is slow to import is
imported by the function that needs it.
"""

from functional_optim._torch.compilers import (
    COMPILER,
    SCRIPT_QUALNAME,
    aoti_compile_and_package,
    disable_dynamo,
    fake_tensor_mode,
    has_dispatch_mode,
    is_higher_order,
    is_mutable,
)
from functional_optim._torch.derivatives import (
    get_unwrapped,
    is_forward_mode,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    is_transforming,
    tangent_of,
)
from functional_optim._torch.distributed import (
    ACTIVE_DDP_MODULE,
    IN_BACKWARD_OPTIMIZERS,
    OPTIMIZER_CLASSES,
    OPTIMIZER_KWARGS,
    current_context_id,
    current_graph_task_id,
    ignored_by_ddp,
    is_joining,
    is_profiling,
    is_valid_context,
    process_group_names,
    queue_callback,
    rpc_over_sockets,
    timeout_of,
)
from functional_optim._torch.missing import why_missing
from functional_optim._torch.modules import (
    children_of,
    has_scaled,
    load_state_dict_hooks,
    replica_of,
    scaler_state,
)
from functional_optim._torch.operators import (
    amp_foreach_non_finite_check_and_unscale_,
    foreach_add_,
    foreach_clone,
    foreach_copy_,
    foreach_mul_,
    foreach_norm,
    foreach_vector_norm,
    fused_adagrad_,
    fused_adam_,
    fused_adamw_,
    fused_sgd_,
)
from functional_optim._torch.tensors import (
    DisableTorchFunction,
    TensorGuards,
    has_versions,
    indices_of,
    is_view,
    may_be_view,
    memory_of,
    values_of,
    version_of,
)

__all__ = [
    "ACTIVE_DDP_MODULE",
    "COMPILER",
    "IN_BACKWARD_OPTIMIZERS",
    "OPTIMIZER_CLASSES",
    "OPTIMIZER_KWARGS",
    "SCRIPT_QUALNAME",
    "DisableTorchFunction",
    "TensorGuards",
    "amp_foreach_non_finite_check_and_unscale_",
    "aoti_compile_and_package",
    "children_of",
    "current_context_id",
    "current_graph_task_id",
    "disable_dynamo",
    "fake_tensor_mode",
    "foreach_add_",
    "foreach_clone",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "foreach_vector_norm",
    "fused_adagrad_",
    "fused_adam_",
    "fused_adamw_",
    "fused_sgd_",
    "get_unwrapped",
    "has_dispatch_mode",
    "has_scaled",
    "has_versions",
    "ignored_by_ddp",
    "indices_of",
    "is_forward_mode",
    "is_functorch_wrapped_tensor",
    "is_gradtrackingtensor",
    "is_higher_order",
    "is_joining",
    "is_mutable",
    "is_profiling",
    "is_transforming",
    "is_valid_context",
    "is_view",
    "load_state_dict_hooks",
    "may_be_view",
    "memory_of",
    "process_group_names",
    "queue_callback",
    "replica_of",
    "rpc_over_sockets",
    "scaler_state",
    "tangent_of",
    "timeout_of",
    "values_of",
    "version_of",
    "why_missing",
]
