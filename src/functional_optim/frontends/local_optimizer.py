"""The seam: what every front-end binds to parameters, and steps by gradients that it is given."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.one_at_a_time import StepLock, one_at_a_time
from functional_optim.frontends.foreign import ForeignOptimizer
from functional_optim.frontends.local_options import ClassOptions, LocalOptions, OwnOptions
from functional_optim.frontends.recipe import (
    ComposedRecipe,
    Recipe,
    class_of_functional,
    recipe_of,
)


class LocalOptimizer(Protocol):
    """An optimizer over parameters of this process. Gradients are given to it.

    It neither reads ``.grad`` nor leaves anything there, so that several passes, each with
    gradients of its own, may go on at once. Steps are made one after the other.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups as in torch: options may be changed between steps."""

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group as in ``param_groups``: the order of all gradients.

        An optimizer of optimizers divides groups, so this may differ from the order in which the
        parameters were given.
        """

    @property
    def measured_stages(self) -> int:
        """Number of totals over all gradients that a step needs; 0 for most optimizers."""

    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """Make a step.

        Args:
            gradients: one for each parameter, in the order of ``params``; a parameter that has None
                is left alone, its step count too.
            measured: the totals, where other processes have a part in them.
        """

    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total after those in ``measured``, in float64.

        In the order of ``params``; a row for each, where a stage needs several.
        """

    def state_dict(self) -> dict[str, Any]:
        """Options and state in torch's form."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and state in torch's form; all of it, or nothing where that raises."""


class Foreign(NamedTuple):
    """A class that has no functional equivalent, with the arguments for it."""

    make: Callable[..., Any]
    args: tuple[Any, ...]
    options: dict[str, Any]


def local_optimizer(
    optimizer_class: Any, params: Iterable[Any], *args: Any, **options: Any
) -> LocalOptimizer:
    """Bind an optimizer to parameters of this process.

    Args:
        optimizer_class: a class of torch.optim or a registered one, with that class's options; one
            of our optimizers, or a constructor of one, with its hyper-parameters. Any other class
            is made over the parameters and called as it is, with one warning.
        params: parameters, (name, parameter) pairs, or parameter groups.
        args: the class's arguments after ``params``.
        options: the same, by name.

    Returns:
        A :class:`LocalOptimizer`. What has a functional equivalent is stepped by that; any other
        class by its own step.

    Raises:
        TypeError: something else than an optimizer, or an option that it does not have.
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
    found = resolved(optimizer_class, args, options)
    if isinstance(found, Foreign):
        warn_of(found, stacklevel=3)
    return bound(found, params)


def resolved(
    optimizer_class: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Recipe | Foreign:
    """Return the recipe of a local optimizer, here or in another process: it can be pickled.

    Args:
        optimizer_class: as for :func:`local_optimizer`.
        args: its arguments after ``params``.
        options: the same, by name.

    Raises:
        TypeError, ValueError: as for :func:`local_optimizer`.
    """
    optimizer_class = class_of_functional(optimizer_class) or optimizer_class
    recipe = recipe_of(optimizer_class, _named(optimizer_class, args, options))
    return Foreign(optimizer_class, args, dict(options)) if recipe is None else recipe


def warn_of(found: Foreign, stacklevel: int = 2) -> None:
    """Say that a class is stepped by itself."""
    warnings.warn(
        f"{brief(found.make)} has no functional equivalent, so it is stepped by its own Python "
        "code, with gradients put into .grad for that time; to step it without the GIL, register "
        "one with register_functional_optim",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def bound(found: Recipe | Foreign, params: Iterable[Any]) -> LocalOptimizer:
    """A local optimizer over parameters, by what :func:`resolved` returned."""
    groups = as_groups(params)
    if isinstance(found, Foreign):
        return ForeignOptimizer(found.make, groups, found.args, found.options)
    return FunctionalOptimizer(found, groups)


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Parameter groups, their parameters or pairs in lists.

    Raises:
        TypeError: ``params`` is a tensor, no iterable, or a mixed list.
        ValueError: no parameters, a group without "params", a parameter twice.
    """
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be parameters, (name, parameter) pairs or parameter groups, in a list or "
            f"another iterable, got {brief(params)}"
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
    _refuse_twice(made)
    return made


def _refuse_twice(groups: Sequence[Mapping[str, Any]]) -> None:
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
    """A local optimizer by what has a functional equivalent.

    Args:
        recipe: of the optimizer; groups have the options of the class that was given, or its
            hyper-parameters.
        groups: of parameters, or pairs of a name and a parameter.

    Raises:
        TypeError, ValueError: an option with a wrong value; groups that need different chains; a
            stage that needs inputs beside the gradients; a parameter on which no rule acts.
    """

    def __init__(self, recipe: Recipe, groups: Sequence[Mapping[str, Any]]) -> None:
        self._lock = StepLock()
        first = next(one for group in groups for one in group["params"])
        param = first[1] if isinstance(first, tuple) else first
        device = param.device.type if isinstance(param, Tensor) else "cpu"
        self._options: LocalOptions = (
            OwnOptions(recipe, groups, device)
            if isinstance(recipe, ComposedRecipe)
            else ClassOptions(recipe, groups, device)
        )
        self._inner = self._options.inner
        self.param_groups = self._options.shown()

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group."""
        return self._inner.params

    @property
    def measured_stages(self) -> int:
        """Number of totals over all gradients that a step needs."""
        return self._inner.measured_stages

    @one_at_a_time
    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """Make a step, by the current options."""
        self._options.hand_on(self.param_groups)
        self._inner.step_by(gradients, measured=measured)

    @one_at_a_time
    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total; a row of several, where needed."""
        self._options.hand_on(self.param_groups)
        return self._inner.measure(gradients, measured=measured)

    @one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Options and state, as the class that was given writes them."""
        self._options.hand_on(self.param_groups)
        return self._options.written(self._inner.state_dict(), self.param_groups)

    @one_at_a_time
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and state: of this class, or of the equivalent torch.optim class."""
        self._options.load(state_dict, self.param_groups)


def _named(
    optimizer_class: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> dict[str, Any]:
    """All arguments by name, as far as the signature has names for them."""
    if not args:
        return dict(options)
    if not callable(optimizer_class):
        raise TypeError(
            f"{brief(optimizer_class)} takes its options by name, got {len(args)} without one"
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
