"""TorchOptimizer: a torch.optim.Optimizer that steps its parameters by any chain."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any, Self

import torch
from torch import Tensor

from functional_optim.core.closure_optimizer import ClosureOptimizer
from functional_optim.core.dynamo import disable_compile
from functional_optim.core.format import format_value
from functional_optim.core.interrupts import defer_untraced
from functional_optim.core.lock import StepLock
from functional_optim.core.stage import Stage
from functional_optim.core.state import LeafState
from functional_optim.frontends.averaged_params import AveragedParams
from functional_optim.frontends.checkpoint_names import match_params
from functional_optim.frontends.group_chains import GroupChains
from functional_optim.frontends.group_options import GroupOptions, OptionsReader
from functional_optim.frontends.group_overlap import check_group_overlap
from functional_optim.frontends.group_steps import GroupSteps
from functional_optim.frontends.group_tensors import Group, new_group
from functional_optim.frontends.param_inputs import list_inputs
from functional_optim.frontends.recipe import Recipe, recipe_of_optimizer
from functional_optim.frontends.torch_arguments import FLAT_WAS_REMOVED
from functional_optim.frontends.torch_checkpoint import own_copy, require_dict
from functional_optim.frontends.torch_entries import (
    Start,
    States,
    check_complete,
    complete_state,
    drop_replaced,
    format_checkpoint,
    leaf_states,
    restore_form,
)
from functional_optim.frontends.torch_groups import (
    check_group_order,
    common_options,
    copy_option_tensors,
    params_of_groups,
    remove_groups,
    require_optimizer,
    require_params,
    with_checked_params,
)
from functional_optim.frontends.torch_schedule import guard_schedules
from functional_optim.optimizer import Optimizer
from functional_optim.plan.shared_numbers import shared_by_name

FOR_CLOSURES: list[type["TorchOptimizer"]] = []
"""The subclass for a :class:`ClosureOptimizer`, which adds itself when it is imported."""


class TorchOptimizer(AveragedParams, torch.optim.Optimizer):
    """An :class:`~functional_optim.Optimizer` with the interface of ``torch.optim.Optimizer``.

    Parameter groups contain the hyper-parameters of the chain by name. So learning-rate schedulers,
    per-group options, closures, hooks, GradScaler and checkpoints work as for torch's own classes.
    If the chain has a schedule, torch's schedulers are refused: they need a number.

    The constructor creates all state. A checkpoint of the equivalent torch.optim class can be
    loaded. State that depends on a parameter (an average, a float32 master) is computed again
    before its first step, so weights may be loaded after construction, in place or by
    ``param.data = ...``.

    Several threads may call :meth:`step`: closures may run at the same time, and steps run one
    after the other. Ctrl-C waits until a step is complete.

    Args:
        params: an iterable of parameters, of (name, parameter) pairs, or of dicts with "params"
            and the hyper-parameters that differ for that group.
        optimizer: the chain, with the defaults for all groups, run by its executor; or a
            :class:`ClosureOptimizer`, which takes one group, and whose ``step`` needs a closure.

    Raises:
        TypeError: ``params`` is not an iterable of tensors, pairs or dicts; ``optimizer`` is not an
            Optimizer; the argument ``flat``, which was removed.
        ValueError: no parameters; a parameter in two groups; groups of which only some have names;
            an integer or sparse parameter; parameters that share a part of their memory; a
            hyper-parameter out of bounds; an override that matches no parameter; an optimizer that
            selects by name if parameters have no names.

    Example::

        >>> from functional_optim import adamw, chain, clip_by_global_norm
        >>> model = torch.nn.Linear(2, 1)
        >>> decay, plain = [model.weight], [model.bias]
        >>> optimizer = TorchOptimizer(
        ...     [{"params": decay}, {"params": plain, "weight_decay": 0.0}],
        ...     chain(clip_by_global_norm(1.0), adamw(lr=0.1)))
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.param_groups[1]["weight_decay"]
        0.0
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # copies and pickles pass no arguments
        if "flat" in kwargs:
            raise TypeError(FLAT_WAS_REMOVED)
        given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        is_closure = cls is TorchOptimizer and isinstance(given, ClosureOptimizer)
        kind: Any = FOR_CLOSURES[0] if is_closure else cls
        made: Self = object.__new__(kind)
        return made

    @disable_compile
    def __init__(self, params: Iterable[Any], optimizer: Optimizer | ClosureOptimizer) -> None:
        self._start(params, recipe_of_optimizer(require_optimizer(optimizer)))

    def _start(self, params: Iterable[Any], recipe: Recipe) -> None:
        require_params(params)
        self._use_chains(self._chains_of(recipe))
        self._is_built = False  # groups are then checked together, which takes less time
        super().__init__(params, {} if self._chains.divides else self._recipe.new_group)
        check_group_overlap(self.param_groups)
        self._is_built = True
        self._translate_checkpoints()
        if self._chains.divides:
            self._chains.selectors.check()

    def _use_chains(self, chains: GroupChains) -> None:
        self._lock, recipe = StepLock(), chains.recipe
        self._recipe, self._optimizer, self._chains = recipe, recipe.optimizer, chains
        self._steps = GroupSteps(recipe.optimizer.executor)
        self._starts: dict[Tensor, Start] = {}
        self._loaded: dict[str, Any] = {}
        self._known: list[dict[str, Any]] = []

    @staticmethod
    def _chains_of(recipe: Recipe) -> GroupChains:
        """Return the chains for an optimizer without groups."""
        return GroupChains(recipe)

    def _tensors(self, number: int) -> list[Tensor]:
        """Return the tensor to step for each parameter of a group, such as a local shard."""
        return list(self.param_groups[number]["params"])

    # This getter is no Python call, and runs in every step.
    _stepped_groups = property(attrgetter("param_groups"))
    """The parameter groups with the tensors to step as "params"."""

    @property
    def _states(self) -> States:
        """The state of each tensor to step."""
        return self.state

    @property
    def chain(self) -> Optimizer:
        """The chain, with the defaults for all groups."""
        return self._optimizer

    def explain(self) -> str:
        """Return how the executor steps each kind of parameter, and why, if all gates are open."""
        return self._chains.explain(self._groups(), self._states)

    @disable_compile
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch, and create its state. After an error, nothing has changed."""
        count, defaults = len(self.param_groups), self.defaults
        try:
            self._add_group(param_group)
        except BaseException:  # also KeyboardInterrupt
            remove_groups(self, count, self._starts)
            del self._chains.parts[count:]
            self.defaults = defaults
            raise
        finally:
            self._known = list(self.param_groups)

    def _add_group(self, group: Any) -> None:
        chains = self._chains
        if isinstance(group, dict) and "params" in group:
            if not chains.divides:
                self._recipe.check_options({**self.defaults, **group})
            group = with_checked_params(group, () if chains.divides else self._optimizer.stages)
            if self._is_built:
                check_group_overlap([*self.param_groups, group])
        if chains.divides and isinstance(group.get("params"), list):
            parts = chains.divide(group, len(params_of_groups(self.param_groups)))
            more = [(one, GroupOptions(one.optimizer).checked_hypers(one.group)) for one in parts]
            chains.check_common_options(self._groups(), more)
            self.defaults = {}  # torch must not add options of other parts
            for part in parts:
                super().add_param_group(part.group)
                chains.add(part.group["params"], part)
                self._complete_state(len(self.param_groups) - 1)
            chains.write_shared(self.param_groups)
            names = [one.optimizer.hyper for one in chains.parts]
            self.defaults = common_options(self.param_groups, names)
            return
        super().add_param_group(group)
        copy_option_tensors(self.param_groups[-1])
        if chains.divides:
            raise TypeError("params must be parameters, or pairs of a name and a parameter")
        chains.add(self.param_groups[-1]["params"])
        self._complete_state(len(self.param_groups) - 1)

    def _viewed(self) -> list[Tensor]:
        return self._chains.views(self._groups(), self._leaf_states)

    @property
    def shared(self) -> dict[str, Any]:
        """The shared scalars: see :meth:`Optimizer.shared`."""
        return shared_by_name(self._optimizer, self._chains.shared)

    def step(
        self, closure: Callable[[], Any] | None = None, *, extra: Mapping[str, Any] | None = None
    ) -> Any:
        """Step every parameter that has a gradient. torch.compile does not trace it.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.
            extra: inputs besides gradients, by name, if a stage needs them. An input with a tensor
                for each parameter is a mapping by parameter, or by name if the optimizer was given
                names; see :meth:`Optimizer.update`. It must have the scale of the unscaled loss,
                since a GradScaler unscales only gradients. If a stage needs "loss", it is the
                result of ``closure``.

        Returns:
            The result of the closure, or None.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`Optimizer.update`; ``closure`` is not
                a function; or an input has a key that is not a parameter. Nothing has changed.
        """
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(
                    f"closure must be a function that returns the loss, got {format_value(closure)}"
                    "; step() reads gradients from the .grad of parameters, and takes none"
                )
            with torch.enable_grad():
                loss = closure()
        self._step(loss, extra or {})
        return loss

    @disable_compile
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of this class or of the equivalent torch.optim class.

        If both have parameter names, parameters are matched by name, else by position. Options in
        the checkpoint replace those of the groups, schedules included.

        ``state_dict`` does not change, and shares no memory with the optimizer afterwards. A
        ``stored`` chain can load plain state, and state of another storage: the values are encoded
        again, rounded to nearest. If the remainder of a bfloat16 parameter was not saved, it is
        computed from the parameter, so load the module first. A step count in a parameter group,
        under "step", is used for parameters without a step count. Entries of "state" under keys
        that are no integers are kept, as in torch.

        Raises:
            TypeError: ``state_dict`` is not a dict.
            ValueError: not the state dict of an optimizer; groups or names differ; a number is used
                for two parameters, or has state and is in no group; the state does not fit the
                chain; or a step count is missing or no whole number >= 0. Nothing has changed.
        """
        require_dict(state_dict)
        before = (self.state, self.param_groups, dict(self._starts))
        shared = self._chains.shared_entries()
        # It must run after the hooks of the caller, which may return another dict.
        store: Any = TorchOptimizer._store_loaded
        handle = self.register_load_state_dict_pre_hook(store)
        try:
            super().load_state_dict(own_copy(state_dict))
        except Exception:
            self.state, self.param_groups, self._starts = before
            if shared:
                self._chains.load_shared([dict(shared)])
            raise
        finally:
            handle.remove()
            self._loaded = {}
            self._steps.forget()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_recipe", "_optimizer", "_chains", "_steps", "_starts")
        own = {name: self.__dict__[name] for name in kept}
        return {**super().__getstate__(), **own, "_loaded": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_optimizer" in state:  # copied or unpickled, without its hooks
            self._lock = StepLock()
            self._known, self._is_built = list(self.param_groups), True
            self._translate_checkpoints()

    def _translate_checkpoints(self) -> None:
        """Register the hooks for state dicts in torch's form, before the hooks of the caller."""
        before: Any = TorchOptimizer._complete_replaced  # torch calls a hook with the optimizer
        after: Any = TorchOptimizer._format_state_dict
        loaded: Any = TorchOptimizer._complete_loaded
        self.register_state_dict_pre_hook(before)
        self.register_state_dict_post_hook(after, prepend=True)
        self.register_load_state_dict_post_hook(loaded, prepend=True)

    def _complete_replaced(self) -> None:
        """Create state for parameters that replaced other parameters in ``param_groups``."""
        self._check_groups()
        if drop_replaced(self.param_groups, self.state, self._starts):
            for number in range(len(self.param_groups)):
                self._complete_state(number)

    def _format_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Change a state dict to torch's form."""
        chains, groups = [], []
        for k, (own, group) in enumerate(zip(self._groups(), self.param_groups, strict=True)):
            chains.append((self._optimizer_of(k).stages, own.hypers))
            groups.append({**group, "params": self._tensors(k)})
        format_checkpoint(chains, groups, state_dict, self._starts)

    def _store_loaded(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a state dict with groups in the order of this optimizer, and store it."""
        saved = match_params(state_dict, self.param_groups)
        groups = self._recipe.loaded_groups(saved, self.param_groups)
        self._loaded = {**state_dict, "param_groups": groups}
        return self._loaded

    def _complete_loaded(self) -> None:
        """Complete the loaded state of all parameters, and restore its dtypes and storages."""
        self._chains.load_shared(self.param_groups)
        self._starts.clear()
        for number, loaded_group in enumerate(self.param_groups):
            stages = self._stages_of(number, loaded_group)
            group = self.param_groups[number] = self._recipe.loaded_group(stages, loaded_group)
            hypers = self._options_of(number).checked_hypers(group)
            kept = self._loaded["param_groups"][number]["params"]
            loaded = [self._loaded["state"].get(key, {}) for key in kept]
            tensors = {**group, "params": self._tensors(number)}
            check_complete(stages, hypers, tensors, loaded)
            restore_form(stages, hypers, tensors, loaded, self._states)
            self._complete_state(number)
        self._known = list(self.param_groups)

    def _groups(self) -> list[Group]:
        """Return the parameter groups with their current options."""
        known, parts = self._known, self._chains.parts
        if len(self.param_groups) != len(parts) or not all(map(is_, self.param_groups, known)):
            self._check_groups()
        made = []
        for index, group in enumerate(self._stepped_groups):
            options = parts[index].reader or self._options_of(index)
            names = group.get("param_names")
            made.append(new_group((options.hypers(group), group["params"], names, index)))
        return made

    def _check_groups(self) -> None:
        """Raise ValueError if groups were added, removed or reordered by hand."""
        groups, count = self.param_groups, len(self._chains.parts)
        check_group_order(groups, self._known, count, is_divided=self._chains.divides)
        self._known = list(groups)

    def _optimizer_of(self, number: int) -> Optimizer:
        return self._chains.parts[number].optimizer

    def _stages_of(self, number: int, group: Mapping[str, Any]) -> tuple[Stage, ...]:
        return self._optimizer_of(number).stages

    @disable_compile
    def _step(self, loss: Any, extra: Mapping[str, Any]) -> None:
        with self._lock.lock:
            defer_untraced(self._step_now, loss, extra)

    def _step_now(self, loss: Any, extra: Mapping[str, Any]) -> None:
        groups, chains = self._groups(), self._chains
        if loss is not None and any("loss" in link.stage.extra for link in self._optimizer.links):
            extra = {"loss": loss.detach() if isinstance(loss, Tensor) else loss, **extra}
        now = chains.current_groups(groups, self.state, self._leaf_states)
        given = partial(list_inputs, now.links, groups, extra) if extra else None
        self._steps.prepare(now, extra=given)()
        if chains.has_shared:
            chains.write_shared(self.param_groups)

    def _leaf_states(
        self, group: Group, params: Sequence[Tensor], names: Sequence[str], begins: Iterable[bool]
    ) -> list[LeafState]:
        """Return the states of parameters of a group: see :func:`leaf_states`."""
        own = self._optimizer_of(group.number).stages, group.hypers, params, self._states
        return leaf_states(*own, names, begins, self._starts)

    def _complete_state(self, number: int) -> None:
        """Check the state of a group's parameters, and create missing state."""
        options = self._options_of(number)
        self.param_groups[number] = guard_schedules(self.param_groups[number], options.names)
        group = self._stepped_groups[number]
        start = self._stages_of(number, group), options.checked_hypers(group)
        complete_state(*start, group, self._states)
        for param in group["params"]:
            self._starts.setdefault(param, start)

    def _options_of(self, index: int) -> OptionsReader:
        return self._chains.reader(index, self.param_groups[index]["params"])
