"""LocalOptimizer: an optimizer over parameters of this process that gets gradients as arguments."""

import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from functional_optim.core.format import format_value
from functional_optim.frontends.explicit_gradients import ExplicitGradients
from functional_optim.frontends.group_overlap import check_group_overlap
from functional_optim.frontends.opaque_optimizer import OpaqueOptimizer, OpaqueRecipe
from functional_optim.frontends.recipe import Recipe, class_of_functional, recipe_of


class LocalOptimizer(Protocol):
    """Protocol of an optimizer over parameters of this process that gets gradients as arguments.

    A step neither reads nor changes ``.grad``, so several backward passes, each with its own
    gradients, may run at the same time. Steps run one after the other.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups as in torch. Options may be changed between steps."""

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group as in ``param_groups``. Gradients are in the same order.

        A composed optimizer divides groups, so this order may differ from the order in which the
        parameters were given.
        """

    @property
    def measured_stages(self) -> int:
        """Number of totals over all gradients that a step needs; 0 for most optimizers."""

    @property
    def state_keys(self) -> Collection[str]:
        """The keys of groups that are no options, such as those of shared scalars."""

    def step_by(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> None:
        """Run a step.

        Args:
            gradients: one for each parameter, in the order of ``params``. A parameter with None is
                skipped, and its step count stays the same.
            measured: the totals, if other processes contribute to them.
        """

    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total after those in ``measured``, in float64.

        The addends are in the order of ``params``. A stage with several totals has one row per
        parameter.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return options and state in torch's form."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load options and state in torch's form. After an error, nothing has changed."""


def local_optimizer(
    optimizer_class: Any, params: Iterable[Any], *args: Any, **options: Any
) -> LocalOptimizer:
    """Bind an optimizer to parameters of this process.

    ``optimizer_class`` is a class of torch.optim or a registered class; or an Optimizer or its
    constructor. Any other class gives a warning, and its own ``step`` is called. ``args`` and
    ``options`` are the arguments of the class after ``params``.
    """
    found = resolve_recipe(optimizer_class, args, options)
    if isinstance(found, OpaqueRecipe):
        warn_opaque(found, stacklevel=3)
    return bind_recipe(found, params)


def resolve_recipe(
    optimizer_class: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Recipe | OpaqueRecipe:
    """Return the recipe of a local optimizer. It can be pickled, and bound in another process."""
    optimizer_class = class_of_functional(optimizer_class) or optimizer_class
    recipe = recipe_of(optimizer_class, _bind_names(optimizer_class, args, options))
    return OpaqueRecipe(optimizer_class, args, dict(options)) if recipe is None else recipe


def warn_opaque(found: OpaqueRecipe, stacklevel: int = 2) -> None:
    """Warn that the class's own ``step`` is called."""
    warnings.warn(
        f"{format_value(found.make)} has no functional equivalent, so it is stepped by its own "
        "Python code, with gradients put into .grad for that time; to step it without the GIL, "
        "register "
        "one with register_functional_optim",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def bind_recipe(found: Recipe | OpaqueRecipe, params: Iterable[Any]) -> LocalOptimizer:
    """Return a local optimizer over parameters, from a recipe of :func:`resolve_recipe`."""
    groups = as_groups(params)
    if isinstance(found, OpaqueRecipe):
        return OpaqueOptimizer(found, groups)
    return ExplicitGradients(groups, found)


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups whose "params" are lists of parameters, or of pairs with names."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be parameters, (name, parameter) pairs or parameter groups, in a list or "
            f"another iterable, got {format_value(params)}"
        )
    given = list(params)
    dicts = [isinstance(one, dict) for one in given]
    if any(dicts) and not all(dicts):
        raise TypeError(
            f"params must be all parameter groups or all parameters, got {sum(dicts)} groups "
            f"among {len(given)} entries"
        )
    groups = given if any(dicts) else [{"params": given}]
    made = []
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(
                f'parameter group {number} has no "params", only {", ".join(map(str, group))}'
            )
        own = group["params"]
        alone = isinstance(own, Tensor) or not isinstance(own, Iterable)
        made.append({**group, "params": [own] if alone else list(own)})
    _check_unique(made)
    check_group_overlap(made)
    return made


def _check_unique(groups: Sequence[Mapping[str, Any]]) -> None:
    seen: dict[int, str] = {}
    for number, group in enumerate(groups):
        for place, one in enumerate(group["params"]):
            param = one[1] if isinstance(one, tuple) else one
            name = one[0] if isinstance(one, tuple) else f"param_groups[{number}][{place}]"
            if id(param) in seen:
                raise ValueError(
                    f"{name!r} is the same parameter as {seen[id(param)]!r}; a parameter is "
                    "stepped once, so give it once"
                )
            seen[id(param)] = name
    if not seen:
        raise ValueError("there are no parameters; an optimizer needs at least one")


def _bind_names(
    optimizer_class: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all arguments that have a name in the signature, by name."""
    if not args:
        return dict(options)
    if not callable(optimizer_class):
        raise TypeError(
            f"{format_value(optimizer_class)} takes its options by name, got {len(args)} without "
            "one"
        )
    signature = inspect.signature(optimizer_class)
    takes_params = isinstance(optimizer_class, type) or "params" in signature.parameters
    before = (None,) if takes_params else ()
    found = signature.bind(*before, *args, **options).arguments
    named: dict[str, Any] = {}
    for place, (name, value) in enumerate(found.items()):
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif kind is not inspect.Parameter.VAR_POSITIONAL and place >= len(before):
            named[name] = value
    return named
