"""Recipes: functions from the current options of a parameter group to its chain."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_optim.core.chain import list_paths
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.expression import AUTO
from functional_optim.core.format import format_value
from functional_optim.core.stage import Stage
from functional_optim.frontends.group_options import ClassOptions, GroupOptions, OptionsReader
from functional_optim.frontends.group_parts import needs_groups
from functional_optim.frontends.registry import (
    as_functional_optim,
    call_factory,
    factory_of,
    functional_optim_map,
)
from functional_optim.frontends.torch_arguments import (
    EXECUTION_OPTIONS,
    is_open,
    is_optimizer_class,
    step_once,
)
from functional_optim.frontends.torch_checkpoint import (
    DECOUPLED,
    decay_options,
    without_decay_kind,
)
from functional_optim.frontends.torch_groups import (
    loaded_groups,
    missing_flags,
    options_of,
    require_options,
    warn_of_replaced_schedules,
)
from functional_optim.kernels import check_executor
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.constructors import PARTS, call_constructor


class StateDictForm(NamedTuple):
    """Form of the state dicts that a class of torch.optim writes."""

    counts_steps: bool = True
    """True if there is a step count for each parameter, or for each group."""
    eager: bool = True
    """True if state is created by the constructor, and not by the first step."""
    frozen: bool = False
    """True if parameters that are not trained have state too."""
    options: Mapping[str, Any] = {}
    """Other entries of the groups, such as a step count."""
    counts_in_python: bool = False
    """True if a step count is an int, not a tensor."""


class Recipe:
    """Recipe of an optimizer: the options of its groups, and the chain that they describe.

    A pickled recipe needs no registry.
    """

    defaults: dict[str, Any]
    """The options of every group, with their defaults."""
    optimizer: Optimizer
    """The chain, with the defaults."""
    form: StateDictForm
    """The form of its state dicts."""

    @property
    def new_group(self) -> dict[str, Any]:
        """The entries of a new group."""
        return dict(self.defaults)

    def reader(self, params: Sequence[Any] = (), number: int | None = None) -> OptionsReader:
        """Return a reader of the options of a group with these parameters."""
        raise NotImplementedError

    def check_options(self, group: Mapping[str, Any]) -> None:
        """Raise TypeError or ValueError if a new group, with all options, has a wrong one."""
        require_options(group, self.defaults)
        given = group["params"]
        params = given if isinstance(given, (list, tuple)) else ()
        self.reader(params).checked_hypers(group)

    def loaded_groups(
        self, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the groups of a checkpoint, with the options that they lack."""
        return loaded_groups(saved, groups)

    def loaded_group(self, stages: Sequence[Stage], loaded: dict[str, Any]) -> dict[str, Any]:
        """Return a loaded group, without torch's option for the kind of weight decay."""
        return without_decay_kind(stages, loaded)


class OptimizerRecipe(Recipe):
    """Recipe of an Optimizer with one chain. Groups have its hyper-parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults = optimizer.hyper
        # TorchOptimizer uses the same form, so both load each other's checkpoints.
        self.form = StateDictForm(options=decay_options(optimizer.stages))

    def reader(self, params: Sequence[Any] = (), number: int | None = None) -> OptionsReader:
        return GroupOptions(self.optimizer, number)


class ComposedRecipe(Recipe):
    """Recipe of an optimizer whose leaves differ in their chains. Each group has its own recipe."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.defaults: dict[str, Any] = {}
        self.form = StateDictForm()

    def list_paths(self, params: Mapping[str, Tensor]) -> "ComposedRecipe":
        """Return a recipe that can be pickled, since selectors become lists of these parameters."""
        shapes = {(name,): tuple(param.shape) for name, param in params.items()}
        return ComposedRecipe(list_paths(self.optimizer, shapes))


class ClassRecipe(Recipe):
    """Recipe of a class of torch.optim. Groups have the options of the class."""

    def __init__(self, cls: type, defaults: Mapping[str, Any], executor: str | None) -> None:
        # The class checks its options, and fills in its defaults.
        matrix = torch.zeros(1, 1, device="cpu", requires_grad=True)  # some classes need matrices
        probe = cls([matrix], **defaults)
        self._class = cls
        # Another process may not have registered the class, so the recipe contains the factory.
        self._factory = factory_of(cls)
        self._executor = executor
        self.defaults: dict[str, Any] = dict(probe.defaults)
        self.optimizer = self._build(self.defaults, "cpu")
        self.form = form_of(probe)

    def _build(self, options: Mapping[str, Any], device: str) -> Optimizer:
        arguments = (
            self.defaults if is_open(self._class) else inspect.signature(self._class).parameters
        )
        own = [key for key in self.defaults if key not in EXECUTION_OPTIONS]
        for key in own:
            if key not in arguments and options[key] != self.defaults[key]:
                raise ValueError(
                    f"{key} is {self.defaults[key]!r} for {self._class.__name__}, and cannot be "
                    f"{options[key]!r}; it is of another class"
                )
        values = {key: options[key] for key in own if key in arguments}
        executor = self._executor or _executor_for(options, device)
        made = call_factory(self._factory, self._class, (), values)
        refuse_closure(made, PARTS)
        found: Optimizer = made.using(executor=executor)
        return found

    def reader(self, params: Sequence[Any] = (), number: int | None = None) -> OptionsReader:
        device = _device_of(params)

        def build(options: Mapping[str, Any]) -> Optimizer:
            made = self._build(options, device)
            self.require_one_chain(made)
            return made

        return ClassOptions(self.defaults, build, number)

    def require_one_chain(self, made: Optimizer) -> None:
        """Raise TypeError if parameters differ in their stages, or share scalars."""
        if needs_groups(made):
            name = self._class.__name__
            raise TypeError(
                f"the functional equivalent of {name} is {made}, whose parameters differ in "
                "their stages or share scalars, and parameter groups with the options of a class "
                "cannot show that: pass the equivalent itself, as in "
                f"as_functional_optim({name}, ...), and groups have its hyper-parameters"
            )

    @property
    def new_group(self) -> dict[str, Any]:
        """The options, and entries such as a step count."""
        return {**self.defaults, **self.form.options}

    def loaded_groups(
        self, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the groups of a checkpoint; options that they lack keep their values."""
        pairs = list(zip(saved, [*groups, *[{}] * len(saved)], strict=False))
        made = [{**options_of(own), **missing_flags(one, own), **one} for one, own in pairs]
        for number, (loaded, (_, own)) in enumerate(zip(made, pairs, strict=True)):
            warn_of_replaced_schedules(number, own, loaded)
        return made

    def loaded_group(self, stages: Sequence[Stage], loaded: dict[str, Any]) -> dict[str, Any]:
        """Return a loaded group, which keeps the kind of weight decay if it is an option."""
        return loaded if DECOUPLED in self.defaults else without_decay_kind(stages, loaded)


def _device_of(params: Sequence[Any]) -> str:
    """Return the type of device of parameters, or of pairs of a name and a parameter."""
    every = [one[1] if isinstance(one, tuple) else one for one in params]
    kinds = {one.device.type for one in every if isinstance(one, Tensor)}
    return "cuda" if "cuda" in kinds else next(iter(kinds), "cpu")


def form_of(probe: torch.optim.Optimizer) -> StateDictForm:
    """Step a probe once, and return the form of its state dicts."""
    param = probe.param_groups[0]["params"][0]
    eager = bool(probe.state[param])
    try:
        step_once(probe, param)
    except NotImplementedError:  # only the functional equivalent of the class has a step
        return StateDictForm(eager=eager, frozen=eager)
    if "step" in probe.param_groups[0]:
        return StateDictForm(eager=eager, frozen=eager, options={"step": 0})
    step = probe.state[param].get("step")
    in_python = isinstance(step, int)
    return StateDictForm(step is not None, eager, eager, counts_in_python=in_python)


def _executor_for(options: Mapping[str, Any], device: str) -> str:
    """Return the executor for torch's options ``fused`` and ``foreach``.

    On the CPU, ``auto`` has the bits of torch's for-loop, and is the fastest.
    """
    fused, foreach = options.get("fused"), options.get("foreach")
    if fused is None and foreach is None:
        return AUTO
    if fused and device == "cuda":
        return "prefer_fused"
    # With foreach=False on a GPU, ``blocked`` avoids temporaries as large as a shard.
    return AUTO if fused or foreach or device == "cpu" else "blocked"


def recipe_of(
    optimizer_class: Any, options: Mapping[str, Any], executor: str | None = None
) -> Recipe | None:
    """Return the recipe of an optimizer, or None if the class has no functional equivalent.

    ``optimizer_class`` is a class of torch.optim or a registered class; an Optimizer, or a function
    of hyper-parameters that returns an Optimizer. The default executor depends on the options.
    """
    found = _find_recipe(optimizer_class, options, executor)
    if isinstance(found, ClassRecipe):
        found.require_one_chain(found.optimizer)
    return found


def _find_recipe(
    optimizer_class: Any, options: Mapping[str, Any], executor: str | None = None
) -> Recipe | None:
    if executor is not None:
        check_executor(executor)
    refuse_closure(optimizer_class, PARTS)
    if isinstance(optimizer_class, Optimizer):
        return recipe_of_optimizer(optimizer_class.replace(**options), executor)
    if _is_registered(optimizer_class):
        if is_optimizer_class(optimizer_class):
            return ClassRecipe(optimizer_class, options, executor)
        return recipe_of_optimizer(as_functional_optim(optimizer_class, **options), executor)
    if not callable(optimizer_class):
        raise TypeError(
            "optimizer_class must be a class of torch.optim, or an optimizer or constructor of "
            f"functional_optim, got {format_value(optimizer_class)}"
        )
    own = call_constructor(optimizer_class, options)
    return None if own is None else recipe_of_optimizer(own, executor)


def resolve_functional(optimizer_class: Any, options: Mapping[str, Any]) -> Optimizer:
    """Return the Optimizer for a front-end that steps parts of the parameters separately.

    ``optimizer_class`` may also be one of torch's own functional classes.
    """
    found = _find_recipe(class_of_functional(optimizer_class) or optimizer_class, options)
    if found is None:
        raise TypeError(
            f"{format_value(optimizer_class)} has no functional equivalent, so it cannot step "
            "parts of the parameters while backward goes on: register one with "
            "register_functional_optim"
        )
    return found.optimizer


def recipe_of_optimizer(optimizer: Optimizer, executor: str | None = None) -> Recipe:
    """Return the recipe of an Optimizer; ``executor`` replaces its executor."""
    refuse_closure(optimizer, PARTS)
    kind = ComposedRecipe if needs_groups(optimizer) else OptimizerRecipe
    return kind(optimizer.using(executor=executor))


def class_of_functional(given: Any) -> type | None:
    """Return the torch.optim class of one of torch's functional classes; None for other values."""
    module = getattr(given, "__module__", None) or ""
    if not isinstance(given, type) or not module.startswith("torch.distributed.optim.functional_"):
        return None
    name = given.__name__.removeprefix("_Functional")
    found: type | None = getattr(torch.optim, name, None)
    return found


def _is_registered(optimizer_class: Any) -> bool:
    try:
        return optimizer_class in functional_optim_map
    except TypeError:  # not hashable
        return False
