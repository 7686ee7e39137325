"""From a parameter group's options, as they are at this very step, to a chain that steps it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.chain import listed
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.expression import AUTO
from functional_optim.core.hyper import are_unchanged
from functional_optim.core.links import with_values
from functional_optim.core.stage import Stage
from functional_optim.core.unmatched_selectors import UnmatchedSelectors
from functional_optim.frontends.group_parts import GroupPart, divided, needs_groups
from functional_optim.frontends.registry import (
    as_functional_optim,
    factory_of,
    functional_optim_map,
    made_by_factory,
)
from functional_optim.frontends.torch_arguments import (
    EXECUTION_OPTIONS,
    is_open,
    is_optimizer_class,
    step_once,
)
from functional_optim.frontends.torch_checkpoint import decay_options
from functional_optim.frontends.torch_schedule import refuse_schedulers
from functional_optim.kernels import EXECUTORS, check_executor
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.constructors import PARTS, made_without_params


class GroupChain(NamedTuple):
    """Chain that steps the parameters of a group."""

    stages: tuple[Stage, ...]
    hypers: tuple[Any, ...]
    """One Hyper per stage; the same object until an option changes."""
    executor: str


class StateDictForm(NamedTuple):
    """Form of the state dicts that a class of torch.optim writes."""

    counts_steps: bool = True
    """Whether it keeps a step count, for each parameter or for a group of them."""
    eager: bool = True
    """Whether it makes its state when it is constructed, and not in the first step."""
    frozen: bool = False
    """Whether it makes state for parameters that are not trained, too."""
    options: Mapping[str, Any] = {}
    """What else it keeps in its groups."""


class Recipe(Protocol):
    """Recipe of a chain, from a group's options. It can be pickled, without the registry."""

    defaults: dict[str, Any]
    """The options of every group, with their defaults."""
    optimizer: Optimizer
    """The chain, with the defaults."""
    form: "StateDictForm"
    """What its state dicts look like."""

    def made(self, options: Mapping[str, Any], device: str) -> Optimizer:
        """The chain for a group's options, with the executor for a type of device."""
        ...


class OptimizerRecipe:
    """Recipe of one of our optimizers with one chain: groups have its hyper-parameters."""

    def __init__(self, optimizer: Optimizer, executor: str | None) -> None:
        self._unsaid = executor is None and bool(EXECUTORS[optimizer.executor].stand_ins)
        if self._unsaid:
            executor = _unsaid("cpu")
        self.optimizer = optimizer.using(executor=executor)
        self.defaults = optimizer.hyper
        # As TorchOptimizer writes it, so that either reads the other's checkpoints.
        self.form = StateDictForm(options=decay_options(optimizer.stages))

    def made(self, options: Mapping[str, Any], device: str) -> Optimizer:
        values = {name: options[name] for name in self.defaults}
        chain = Optimizer(with_values(self.optimizer.links, values))
        executor = _unsaid(device) if self._unsaid else self.optimizer.executor
        return chain.using(executor=executor)


class ComposedRecipe:
    """Recipe of an optimizer whose leaves differ in their chains: each group has its own recipe."""

    def __init__(self, optimizer: Optimizer, executor: str | None) -> None:
        self._executor = executor
        self._unsaid = executor is None and bool(EXECUTORS[optimizer.executor].stand_ins)
        self.optimizer = optimizer
        self.defaults: dict[str, Any] = {}
        self.form = StateDictForm()

    def made(self, options: Mapping[str, Any], device: str) -> Optimizer:
        """The whole optimizer; groups have their options in recipes of their own."""
        executor = _unsaid(device) if self._unsaid else self._executor
        return self.optimizer.using(executor=executor)

    def listed(self, params: Mapping[str, Tensor]) -> "ComposedRecipe":
        """Return the recipe for these parameters, by name; it can be pickled."""
        shapes = {(name,): tuple(param.shape) for name, param in params.items()}
        return ComposedRecipe(listed(self.optimizer, shapes), self._executor)

    def parts(
        self, group: Mapping[str, Any], first: int, unmet: UnmatchedSelectors
    ) -> list[tuple[GroupPart, Recipe]]:
        """A parameter group as groups that have one chain each, each with its recipe.

        Args:
            group: as for :func:`~functional_optim.frontends.group_parts.divided`.
            first, unmet: likewise.
        """
        return [
            (part, OptimizerRecipe(part.optimizer, self._executor))
            for part in divided(self.optimizer, group, first, unmet)
        ]


class ClassRecipe:
    """Recipe of a torch.optim class: groups have its options, and it interprets them."""

    def __init__(self, cls: type, defaults: Mapping[str, Any], executor: str | None) -> None:
        # The class itself says which options are wrong, and what others there are.
        probe = cls([torch.zeros(1, device="cpu", requires_grad=True)], **defaults)
        self._class = cls
        # Kept, so that a process where nobody registered the class makes the same chain.
        self._factory = factory_of(cls)
        self._executor = executor
        self.defaults: dict[str, Any] = dict(probe.defaults)
        self.optimizer = self.made(self.defaults, "cpu")
        self.form = _form_of(probe)

    def made(self, options: Mapping[str, Any], device: str) -> Optimizer:
        taken = self.defaults if is_open(self._class) else inspect.signature(self._class).parameters
        told = [key for key in self.defaults if key not in EXECUTION_OPTIONS]
        for key in told:
            if key not in taken and options[key] != self.defaults[key]:
                raise ValueError(
                    f"{key} is {self.defaults[key]!r} for {self._class.__name__}, and cannot be "
                    f"{options[key]!r}; it is of another class"
                )
        values = {key: options[key] for key in told if key in taken}
        executor = self._executor or _executor(options, device)
        made = made_by_factory(self._factory, self._class, (), values)
        refuse_closure(made, PARTS)
        found: Optimizer = made.using(executor=executor)
        return found


def _form_of(probe: torch.optim.Optimizer) -> StateDictForm:
    """Seen on an instance that makes one step."""
    param = probe.param_groups[0]["params"][0]
    eager = bool(probe.state[param])
    try:
        step_once(probe, param)
    except NotImplementedError:  # a class that has arguments only, and its equivalent the rest
        return StateDictForm(eager=eager, frozen=eager)
    if "step" in probe.param_groups[0]:
        return StateDictForm(eager=eager, frozen=eager, options={"step": 0})
    return StateDictForm("step" in probe.state[param], eager, frozen=eager)


def _unsaid(device: str) -> str:
    """The executor of an optimizer that was told of none, on a type of device."""
    return EXECUTORS[AUTO].stand_ins.get(device, "blocked")


def _exact(device: str) -> str:
    """The executor that gives the reference's bits, without temporaries as large as a shard."""
    return "auto" if device == "cpu" else "blocked"


def _executor(options: Mapping[str, Any], device: str) -> str:
    """The executor that an option of torch's stands for.

    On the CPU there is one that is torch's for-loop bit for bit and faster than all that torch has.
    """
    fused, foreach = options.get("fused"), options.get("foreach")
    if fused is None and foreach is None:
        return _unsaid(device)
    if fused and device == "cuda":
        return "prefer_fused"
    return "auto" if fused or foreach else _exact(device)


def recipe_of(
    optimizer_class: Any, options: Mapping[str, Any], executor: str | None = None
) -> Recipe | None:
    """The recipe of what a caller gave as ``optimizer_class``; None where only it can step.

    Args:
        optimizer_class: a class of torch.optim, or a registered one; one of our optimizers, or a
            function that makes one of its hyper-parameters.
        options: for all groups, by name.
        executor: what runs the steps, where the options are not to say so.

    Raises:
        TypeError: something else than an optimizer, or an option that it does not have.
        ValueError: a value out of bounds, an unknown executor.

    Example::

        >>> recipe_of(torch.optim.AdamW, {"lr": 0.1}).defaults["weight_decay"]
        0.01
    """
    if executor is not None:
        check_executor(executor)
    refuse_closure(optimizer_class, PARTS)
    if isinstance(optimizer_class, Optimizer):
        return _of_optimizer(optimizer_class.replace(**options), executor)
    if _is_key(optimizer_class):
        if is_optimizer_class(optimizer_class):
            return ClassRecipe(optimizer_class, options, executor)
        return _of_optimizer(as_functional_optim(optimizer_class, **options), executor)
    if not callable(optimizer_class):
        raise TypeError(
            "optimizer_class must be a class of torch.optim, or an optimizer or constructor of "
            f"functional_optim, got {brief(optimizer_class)}"
        )
    own = made_without_params(optimizer_class, options)
    return None if own is None else _of_optimizer(own, executor)


def functional_of(optimizer_class: Any, options: Mapping[str, Any]) -> Optimizer:
    """The optimizer of what a caller gave, for who steps parts of a model at a time.

    Args:
        optimizer_class: as for :func:`recipe_of`, or one of torch's own functional classes.
        options: likewise.

    Raises:
        TypeError, ValueError: as for :func:`recipe_of`; a class without functional equivalent.
    """
    found = recipe_of(class_of_functional(optimizer_class) or optimizer_class, options)
    if found is None:
        raise TypeError(
            f"{brief(optimizer_class)} has no functional equivalent, so it cannot step parts of "
            "the parameters while backward goes on: register one with register_functional_optim"
        )
    return found.optimizer


def _of_optimizer(optimizer: Optimizer, executor: str | None) -> Recipe:
    refuse_closure(optimizer, PARTS)
    kind = ComposedRecipe if needs_groups(optimizer) else OptimizerRecipe
    return kind(optimizer, executor)


def class_of_functional(given: Any) -> type | None:
    """The torch.optim class that one of torch's own functional classes stands for."""
    module = getattr(given, "__module__", None) or ""
    if not isinstance(given, type) or not module.startswith("torch.distributed.optim.functional_"):
        return None
    name = given.__name__.removeprefix("_Functional")
    found: type | None = getattr(torch.optim, name, None)
    return found


def _is_key(optimizer_class: Any) -> bool:
    try:
        return optimizer_class in functional_optim_map
    except TypeError:  # not hashable
        return False


class Chains:
    """The chains of groups, made anew only when an option has changed.

    Args:
        recipe_of: gives the recipe of the group of a number.
    """

    def __init__(self, recipe_of: Callable[[int], Recipe]) -> None:
        self._recipe_of = recipe_of
        self._known: dict[tuple[int, str], tuple[tuple[Any, ...], GroupChain]] = {}

    def of(self, number: int, options: Mapping[str, Any], device: str) -> GroupChain:
        """The chain for a group's options of now.

        Args:
            number: of the group.
            options: its options.
            device: the type of device that the parameters are on.

        Raises:
            TypeError, ValueError: an option with a wrong value, or one that is missing.
        """
        recipe = self._recipe_of(number)
        missing = [name for name in recipe.defaults if name not in options]
        if missing:
            raise ValueError(
                f"parameter group {number} has no {', '.join(missing)}; it had, so put it back"
            )
        refuse_schedulers(options)
        values = tuple(options[name] for name in recipe.defaults)
        known = self._known.get((number, device))
        if known is not None and are_unchanged(known[0], values):
            return known[1]
        made = recipe.made(options, device)
        stages = made.stages
        if known is not None and known[1].stages == stages:
            stages = known[1].stages  # what is compiled for them is found by identity
        chain = GroupChain(stages, tuple(link.hyper for link in made.links), made.executor)
        self._known[number, device] = (values, chain)
        return chain
