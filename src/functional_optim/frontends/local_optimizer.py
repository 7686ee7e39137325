"""The seam: what every front-end binds to parameters, and steps by gradients that it is given."""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.hyper import copy_tensors
from functional_optim.core.known_options import KnownOptions
from functional_optim.core.links import values
from functional_optim.core.one_at_a_time import StepLock, one_at_a_time
from functional_optim.core.stage import Link
from functional_optim.frontends.checkpoint_names import matched_by_name
from functional_optim.frontends.composed_local import ComposedLocal
from functional_optim.frontends.foreign import ForeignOptimizer
from functional_optim.frontends.recipe import (
    Chains,
    ComposedRecipe,
    GroupChain,
    Recipe,
    class_of_functional,
    recipe_of,
)
from functional_optim.frontends.torch_checkpoint import DECOUPLED
from functional_optim.frontends.torch_given import GivenGradients
from functional_optim.frontends.torch_groups import (
    NOT_OPTIONS,
    neutral_flags,
    options_of,
    params_of_groups,
    require_options,
)
from functional_optim.frontends.torch_schedule import guarded

_WRITTEN = ("step", DECOUPLED)
"""What checkpoints have in groups beside options of their class, and need to be read."""


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
        A :class:`LocalOptimizer`. What has a functional equivalent is stepped in flat buffers; an
        optimizer of optimizers where parameters lie, in groups that are divided by chain.

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
    if isinstance(found, ComposedRecipe):
        return ComposedLocal(found, groups)
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
    """A local optimizer by a chain: groups have the options of the class that was given.

    Args:
        recipe: turns options into chains.
        groups: of parameters.

    Raises:
        TypeError, ValueError: an option with a wrong value; groups that need different chains.
    """

    def __init__(self, recipe: Recipe, groups: Sequence[Mapping[str, Any]]) -> None:
        self._lock = StepLock()
        self._chains = Chains(lambda number: recipe)
        for group in groups:
            require_options(group, recipe.defaults)
        options = [copy_tensors({**recipe.defaults, **options_of(group)}) for group in groups]
        given = [group["params"] for group in groups]
        first = next(one for params in given for one in params)
        param = first[1] if isinstance(first, tuple) else first
        self._device = param.device.type if isinstance(param, Tensor) else "cpu"
        chain = recipe.made(options[0], self._device)
        self._stages = chain.stages
        # A class that counts steps for a group has the count written there.
        counted = {key: 0 for key in ("step",) if key in recipe.form.options}
        self._inner = GivenGradients(
            [
                {**_hyper_of(self._chain(number, one)), **counted, "params": params}
                for number, (one, params) in enumerate(zip(options, given, strict=True))
            ],
            chain,
        )
        self._taken: dict[int, GroupChain] = {}
        self._known = KnownOptions(beside=NOT_OPTIONS)
        self.param_groups: list[dict[str, Any]] = [
            guarded({**_parameters_of(inner), **one}, recipe.defaults)
            for inner, one in zip(self._inner.param_groups, options, strict=True)
        ]

    @property
    def params(self) -> list[Tensor]:
        """The parameters, group by group."""
        return params_of_groups(self._inner.param_groups)

    @property
    def measured_stages(self) -> int:
        """Number of totals over all gradients that the chain needs."""
        return self._inner.measured_stages

    @one_at_a_time
    def step(self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()) -> None:
        """Make a step, by the current options."""
        self._take_options()
        self._inner.step_by(gradients, measured=measured)

    @one_at_a_time
    def measure(
        self, gradients: Sequence[Tensor | None], *, measured: Sequence[Tensor] = ()
    ) -> Tensor:
        """Return each parameter's addend to the next total."""
        self._take_options()
        return self._inner.measure(gradients, measured=measured)

    @one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Options and state, as the class that was given writes them."""
        self._take_options()
        found = self._inner.state_dict()
        groups = [
            {
                **options_of(own),
                **{key: inner[key] for key in _WRITTEN if key in inner},
                **_parameters_of(inner),
            }
            for inner, own in zip(found["param_groups"], self.param_groups, strict=True)
        ]
        return {**found, "param_groups": groups}

    @one_at_a_time
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over options and state: of this class, or of the equivalent torch.optim class."""
        saved = matched_by_name(state_dict["param_groups"], self.param_groups)
        if len(saved) != len(self.param_groups):
            raise ValueError(
                f"this state has {len(saved)} parameter groups, the optimizer "
                f"{len(self.param_groups)}"
            )
        taken = [
            {**options_of(own), **neutral_flags(one, own), **options_of(one)}
            for own, one in zip(self.param_groups, saved, strict=True)
        ]
        groups = [
            {
                **_hyper_of(self._chain(number, options)),
                **{key: one[key] for key in _WRITTEN if key in one},
                **_parameters_of(one),
            }
            for number, (options, one) in enumerate(zip(taken, saved, strict=True))
        ]
        self._inner.load_state_dict({**state_dict, "param_groups": groups})
        self._taken = {}
        self._known.forget()
        for own, options, inner in zip(
            self.param_groups, taken, self._inner.param_groups, strict=True
        ):
            kept = {key: value for key, value in options.items() if key != "step"}
            own.clear()
            own.update({**_parameters_of(inner), **kept})

    def _take_options(self) -> None:
        """Hand options on that have changed."""
        if self._known.hold(self.param_groups):
            return
        for number, own in enumerate(self.param_groups):
            chain = self._chain(number, own)
            if self._taken.get(number) is not chain:
                self._inner.param_groups[number].update(_hyper_of(chain))
                self._taken[number] = chain
        self._known.learn(self.param_groups)

    def _chain(self, number: int, options: Mapping[str, Any]) -> GroupChain:
        """The chain for a group's options.

        Raises:
            ValueError: it is another than the first group's.
        """
        chain = self._chains.of(number, options, self._device)
        if chain.stages != self._stages:
            raise ValueError(
                f"the options of parameter group {number} need another chain than those of group "
                "0; make an optimizer of its own for that group"
            )
        return chain


def _hyper_of(chain: GroupChain) -> dict[str, Any]:
    """The hyper-parameters of a chain, by name."""
    return values(tuple(map(Link, chain.stages, chain.hypers)))


def _parameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in NOT_OPTIONS if key in group}


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
