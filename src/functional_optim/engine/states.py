"""State of parameters, and its form in torch's state dicts."""

from functional_optim.core.state import state_tensors
from functional_optim.core.state_init import check_dtype, init_leaf
from functional_optim.core.state_reinit import starts_as_param
from functional_optim.core.torch_state import (
    entry_layout,
    from_entries,
    has_begun,
    starts_in_first_step,
    to_entries,
)
from functional_optim.frontends.averaged_params import AveragedParams, Views
from functional_optim.frontends.checkpoint_names import match_params
from functional_optim.frontends.torch_checkpoint import (
    own_copy,
    torch_step,
    with_group_steps,
)
from functional_optim.frontends.torch_entries import Start, complete_state, leaf_states
from functional_optim.optimizer.bound_buffer import copy_states
from functional_optim.plan.leaf_by_leaf import states_by_name, view_leaf
from functional_optim.plan.shared_numbers import with_common_hypers
