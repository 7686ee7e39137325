"""LocalOptimizer: an optimizer over parameters of this process that gets gradients as arguments."""

import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.format import format_value
from functional_optim.core.hyper import copy_tensors
from functional_optim.core.links import hyper_values
from functional_optim.core.lock import StepLock, with_lock
from functional_optim.core.stage import Link
from functional_optim.frontends.checkpoint_names import match_params
from functional_optim.frontends.explicit_gradients import ExplicitGradients
from functional_optim.frontends.opaque_optimizer import OpaqueOptimizer, OpaqueRecipe
from functional_optim.frontends.recipe import (
    ChainCache,
    ClassRecipe,
    GroupChain,
    Recipe,
    class_of_functional,
    recipe_of,
)
from functional_optim.frontends.torch_checkpoint import DECOUPLED
from functional_optim.frontends.torch_groups import (
    NOT_OPTIONS,
    missing_flags,
    options_of,
    require_options,
)
from functional_optim.frontends.torch_schedule import guard_schedules


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

    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
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

    Args:
        optimizer_class: a class of torch.optim or a registered class; or an Optimizer or its
            constructor. Any other class gives a warning, and its own ``step`` is called.
        params: parameters, (name, parameter) pairs, or parameter groups.
        args: the arguments of the class after ``params``.
        options: the same by name: options of the class, or hyper-parameters of the Optimizer.

    Raises:
        TypeError: ``optimizer_class`` is not an optimizer, or lacks an option.
        ValueError: a value out of bounds; no parameters; a parameter twice.

    Example::

        >>> import torch
        >>> weight = torch.ones(2)
        >>> local = local_optimizer(torch.optim.SGD, [("weight", weight)], lr=0.5)
        >>> local.step([torch.ones(2)])
        >>> local.param_groups[0]["lr"] = 0.25
        >>> local.step([torch.ones(2)])
        >>> weight
        tensor([0.2500, 0.2500])
    """
    found = resolve_recipe(optimizer_class, args, options)
    if isinstance(found, OpaqueRecipe):
        warn_opaque(found, stacklevel=3)
    return bind_recipe(found, params)


def resolve_recipe(
    optimizer_class: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Recipe | OpaqueRecipe:
    """Return the recipe of a local optimizer. It can be pickled, and bound in another process.

    Arguments and errors are those of :func:`local_optimizer`.
    """
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
    if isinstance(found, ClassRecipe):
        return ClassOptimizer(found, groups)
    return FunctionalOptimizer(found, groups)


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameter groups whose "params" are lists of parameters, or of pairs with names.

    Raises:
        TypeError: ``params`` is a tensor, no iterable, or a mixed list.
        ValueError: no parameters, a group without "params", a parameter twice.
    """
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
        own = [own] if alone else list(own)
        made.append({**group, "params": own})
    _check_unique(made)
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


class FunctionalOptimizer:
    """A local optimizer that steps parameters by a chain. Groups have its hyper-parameters.

    Shared scalars are not options, so ``param_groups`` does not contain them. Each part of a model
    computes them by the same functions from the same totals, so all parts have the same values.

    Args:
        recipe: of the optimizer.
        groups: groups with parameters, or pairs of a name and a parameter.

    Raises:
        TypeError: a stage that needs inputs besides gradients.
        ValueError: a parameter on which no rule acts; an option out of bounds.
    """

    def __init__(self, recipe: Recipe, groups: Sequence[Mapping[str, Any]]) -> None:
        require_gradients_alone(recipe.optimizer, "an optimizer that is given its gradients")
        self._lock = StepLock()
        self._inner = ExplicitGradients(list(map(dict, groups)), recipe.optimizer)
        self._hidden = self._inner.shared_entries.keys()
        self.param_groups = self._visible_groups()

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group."""
        return self._inner.params

    @property
    def measured_stages(self) -> int:
        """Number of totals over all gradients that a step needs."""
        return self._inner.measured_stages

    @with_lock
    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """Run a step with the current options."""
        self._update_inner()
        self._inner.step_by(gradients, measured=measured)

    @with_lock
    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total: see :meth:`LocalOptimizer.measure`."""
        self._update_inner()
        return self._inner.measure(gradients, measured=measured)

    @with_lock
    def state_dict(self) -> dict[str, Any]:
        """Return options and state in torch's form."""
        self._update_inner()
        return self._inner.state_dict()

    @with_lock
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load options and state of this optimizer, or of the equivalent class of torch.optim."""
        self._inner.load_state_dict(state_dict)
        self.param_groups[:] = self._visible_groups()

    def _visible_groups(self) -> list[dict[str, Any]]:
        hidden = self._hidden
        return [
            guard_schedules({key: one[key] for key in one if key not in hidden}, ())
            for one in self._inner.param_groups
        ]

    def _update_inner(self) -> None:
        """Write the current options to the inner groups; raise ValueError if one is missing."""
        pairs = zip(self.param_groups, self._inner.param_groups, strict=True)
        for number, (own, inner) in enumerate(pairs):
            missing = inner.keys() - own.keys() - self._hidden
            if missing:
                raise ValueError(
                    f"parameter group {number} has no {', '.join(sorted(missing))}; it had, so put "
                    "it back"
                )
            inner.update(options_of(own))


class ClassOptimizer(FunctionalOptimizer):
    """A local optimizer whose groups have the options of a class.

    Raises:
        TypeError, ValueError: an option with a wrong value; groups that need different chains.
    """

    def __init__(self, recipe: ClassRecipe, groups: Sequence[Mapping[str, Any]]) -> None:
        self._lock = StepLock()
        first = next(one for group in groups for one in group["params"])
        param = first[1] if isinstance(first, tuple) else first
        self._device = param.device.type if isinstance(param, Tensor) else "cpu"
        self._chains = ChainCache(lambda number: recipe)
        for group in groups:
            require_options(group, recipe.defaults)
        given = [copy_tensors({**recipe.defaults, **options_of(group)}) for group in groups]
        chain = recipe.build(given[0], self._device)
        self._stages = chain.stages
        # Some classes keep one step count per group, and the inner group then stores it too.
        counted = {key: 0 for key in ("step",) if key in recipe.form.options}
        made = [
            {**self._hyper(number, one), **counted, "params": group["params"]}
            for number, (one, group) in enumerate(zip(given, groups, strict=True))
        ]
        self._inner = ExplicitGradients(made, chain)
        self._applied: dict[int, GroupChain] = {}
        """For each group, the chain whose hyper-parameters the inner group has."""
        self.param_groups = [
            guard_schedules({**_params_of(inner), **one}, recipe.defaults)
            for inner, one in zip(self._inner.param_groups, given, strict=True)
        ]

    def _update_inner(self) -> None:
        for number, own in enumerate(self.param_groups):
            chain = self._chain(number, own)
            if self._applied.get(number) is not chain:
                self._inner.param_groups[number].update(self._hyper(number, own))
                self._applied[number] = chain

    @with_lock
    def state_dict(self) -> dict[str, Any]:
        """Return options and state in the form of the class."""
        found = super().state_dict()
        made = [
            {**options_of(own), **_extra_entries(inner), **_params_of(inner)}
            for inner, own in zip(found["param_groups"], self.param_groups, strict=True)
        ]
        return {**found, "param_groups": made}

    @with_lock
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict of this class, or of the equivalent class of torch.optim."""
        groups = self.param_groups
        saved = match_params(state_dict, groups)
        if len(saved) != len(groups):
            raise ValueError(
                f"this state has {len(saved)} parameter groups, the optimizer {len(groups)}"
            )
        loaded = [
            {**options_of(own), **missing_flags(one, own), **options_of(one)}
            for own, one in zip(groups, saved, strict=True)
        ]
        made = [
            {**self._hyper(number, options), **_extra_entries(one), **_params_of(one)}
            for number, (options, one) in enumerate(zip(loaded, saved, strict=True))
        ]
        self._inner.load_state_dict({**state_dict, "param_groups": made})
        self._applied = {}
        for own, options, inner in zip(groups, loaded, self._inner.param_groups, strict=True):
            kept = {key: value for key, value in options.items() if key != "step"}
            own.clear()
            own.update({**_params_of(inner), **kept})

    def _chain(self, number: int, options: Mapping[str, Any]) -> GroupChain:
        """Return the chain of a group; raise ValueError for another chain than at construction."""
        chain = self._chains.of(number, options, self._device)
        if chain.stages != self._stages:
            raise ValueError(
                f"the options of parameter group {number} need another chain than the first group "
                "had at construction; put the option back, or make another optimizer for that group"
            )
        return chain

    def _hyper(self, number: int, options: Mapping[str, Any]) -> dict[str, Any]:
        chain = self._chain(number, options)
        return hyper_values(tuple(map(Link, chain.stages, chain.hypers)))


def _params_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in NOT_OPTIONS if key in group}


def _extra_entries(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are no options of the class, but are needed for loading."""
    return {key: group[key] for key in ("step", DECOUPLED) if key in group}


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
