"""Optimizers as the caller named them: a chain, a constructor, or a class of torch.optim."""

from functional_optim.frontends.group_options import GroupChain, OptionsReader
from functional_optim.frontends.local_optimizer import (
    as_groups,
    bind_recipe,
    resolve_recipe,
    warn_opaque,
)
from functional_optim.frontends.opaque_optimizer import OpaqueRecipe
from functional_optim.frontends.recipe import (
    ComposedRecipe,
    OptimizerRecipe,
    Recipe,
    StateDictForm,
    class_of_functional,
    recipe_of,
    recipe_of_optimizer,
    resolve_functional,
)
from functional_optim.frontends.torch_arguments import EXECUTION_OPTIONS, is_optimizer_class
from functional_optim.optimizer.constructors import call_constructor
