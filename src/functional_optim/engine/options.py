"""Options of parameter groups: hyper-parameters by name, in the dicts of torch.optim."""

from functional_optim.core.hyper import Schedule, are_unchanged, copy_tensors
from functional_optim.frontends.fixed_groups import FixedGroups
from functional_optim.frontends.group_overlap import check_group_overlap
from functional_optim.frontends.torch_groups import (
    NOT_OPTIONS,
    common_options,
    copy_option_tensors,
    missing_flags,
    options_of,
    params_of_groups,
    require_optimizer,
    require_options,
)
from functional_optim.frontends.torch_schedule import guard_schedules
