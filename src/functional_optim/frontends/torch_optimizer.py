"""The local front-end: a torch.optim.Optimizer whose mathematics is any chain."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor

from functional_optim.core.chain import require_one_dense_chain
from functional_optim.core.closure_optimizer import ClosureOptimizer
from functional_optim.core.compiling import uncompiled
from functional_optim.core.one_at_a_time import StepLock
from functional_optim.core.state import LeafState
from functional_optim.frontends.averaged_params import AveragedParams
from functional_optim.frontends.group_chains import GroupChains, viewed_params
from functional_optim.frontends.group_steps import GroupSteps
from functional_optim.frontends.group_tensors import Group
from functional_optim.frontends.torch_checkpoint import own_copy
from functional_optim.frontends.torch_entries import (
    States,
    complete_state,
    keep_form,
    leaf_state,
)
from functional_optim.frontends.torch_explain import explain_groups
from functional_optim.frontends.torch_flat import FlatGroups
from functional_optim.frontends.torch_groups import (
    GroupOptions,
    check_group,
    common_options,
    links_of,
    own_options,
    remove_groups,
    require_optimizer,
    with_checked_params,
)
from functional_optim.frontends.torch_inputs import of_parameters
from functional_optim.frontends.torch_replaced import complete_replaced
from functional_optim.frontends.torch_schedule import guarded
from functional_optim.frontends.torch_state_dict import (
    complete_loaded,
    note_loaded,
    write_as_torch_does,
)
from functional_optim.optimizer import Optimizer
from functional_optim.optimizer.bound import BoundOptimizer
from functional_optim.plan.flat.layout import FlatLayout
from functional_optim.plan.leaf_by_leaf import check_extra
from functional_optim.plan.shared_numbers import shared_by_name

_FOR_CLOSURES: list[type["TorchOptimizer"]] = []
"""The subclass that runs a :class:`ClosureOptimizer`, which registers itself here."""


class TorchOptimizer(AveragedParams, torch.optim.Optimizer):
    """An :class:`~functional_optim.Optimizer` where torch wants a ``torch.optim.Optimizer``.

    Parameter groups carry the chain's hyper-parameters under their names, so learning-rate
    schedulers, per-group options, closures, hooks, GradScaler and checkpoints work as they do for
    torch's own classes. Where the chain has a schedule of its own, torch's schedulers, which
    compute with a number, are refused. State is complete from construction on, and a checkpoint of
    the equivalent torch.optim class loads. State that depends on a parameter (an average, a float32
    master) is made again from the parameter's value at its first step: weights may be loaded after
    construction, in place or by ``param.data = ...``. After that step, such state is kept. Several
    threads may call :meth:`step`: after their closures, steps are made one after the other. Ctrl-C
    waits for the step that is being made.

    Args:
        params: an iterable of parameters, of (name, parameter) pairs, or of dicts with "params"
            and the hyper-parameters that differ for that group.
        optimizer: the chain, with the defaults for all groups, run by its executor; or a
            :class:`ClosureOptimizer`, which takes one group, and whose ``step`` needs a closure.
        flat: move parameters and state into flat buffers, as :meth:`Optimizer.bind` does, so that
            a step of many small parameters is a few passes over memory. The parameters stay the
            objects that they are; :class:`~functional_optim.plan.flat.layout.FlatLayout` says what
            changes for them. State is as without, in views of flat buffers.

    Raises:
        TypeError: ``params`` is no iterable of tensors, pairs or dicts; ``optimizer`` no Optimizer.
        ValueError: no parameters; one in two groups; groups partly with names; an integer or
            sparse parameter; a hyper-parameter out of bounds; an override meant for no parameter;
            an optimizer that selects by name, where parameters have none.

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

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:  # bare where it is copied or unpickled
        given = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        is_closure = cls is TorchOptimizer and isinstance(given, ClosureOptimizer)
        kind: Any = _FOR_CLOSURES[0] if is_closure else cls
        made: Self = object.__new__(kind)
        return made

    @uncompiled
    def __init__(
        self, params: Iterable[Any], optimizer: Optimizer | ClosureOptimizer, *, flat: bool = False
    ) -> None:
        optimizer = require_optimizer(optimizer)
        if flat:
            require_one_dense_chain(optimizer, "TorchOptimizer(flat=True)")
        self._lock = StepLock()
        self._optimizer = optimizer
        self._chains = self._chains_of(optimizer)
        self._steps = GroupSteps(optimizer.executor)
        self._names = tuple(optimizer.hyper)
        self._options: dict[int, GroupOptions] = {}
        self._made_for: dict[int, tuple[Any, ...]] = {}
        self._loaded: dict[str, Any] = {}
        self._flat: FlatGroups | None = None
        super().__init__(params, {} if self._chains.divides else optimizer.hyper)
        self._translate_checkpoints()
        if self._chains.divides:
            self._chains.unmet.check()
        if flat:
            self._flat = FlatGroups(optimizer, self._made_for)
            self._flat.bind(self._groups(), self.state)

    @staticmethod
    def _chains_of(optimizer: Optimizer) -> GroupChains:
        """Return the chains of an optimizer's groups, before there are any."""
        return GroupChains(optimizer)

    def _tensors(self, number: int) -> list[Tensor]:
        """Return the tensor that stands for each parameter of a group."""
        params: list[Tensor] = self.param_groups[number]["params"]
        return params

    def _stepped_groups(self) -> Sequence[dict[str, Any]]:
        """Return the parameter groups, with the tensors that this process steps."""
        return self.param_groups

    @property
    def _states(self) -> States:
        """State by the tensor that is stepped."""
        return self.state

    @property
    def chain(self) -> Optimizer:
        """The chain, with the defaults for all groups."""
        return self._optimizer

    @property
    def layout(self) -> FlatLayout | None:
        """Current layout of flat parameters; None unless they are flat."""
        bound = self._bound()
        return None if bound is None else bound.layout

    def explain(self) -> str:
        """Return what the executor does in a step with all gates open, and why, in lines."""
        if (bound := self._bound()) is not None:
            return bound.explain()
        return explain_groups(self._groups(), self._states, self._optimizer_of, self._optimizer)

    def ready(self, timeout: float | None = None) -> bool:
        """Wait until what compiles in the background is done; steps do not need it.

        Args:
            timeout: seconds to wait at most.

        Returns:
            Whether all is stepped by what it will be stepped by from now on.

        Raises:
            RuntimeError: parameters are not flat, so that it is not known before they are stepped.
        """
        if self._flat is None:
            raise RuntimeError("only flat parameters can be waited for; construct with flat=True")
        bound = self._bound()
        return bound is None or bound.ready(timeout)

    @uncompiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and state for its parameters: as torch's, or nothing after an error."""
        count, mark, defaults = len(self.param_groups), self._chains.mark(), self.defaults
        try:
            self._add_group(param_group)
        except BaseException:  # an interrupt, too
            remove_groups(self, count, self._options, self._made_for)
            self._chains.back_to(mark)
            self.defaults = defaults
            raise

    def _add_group(self, group: Any) -> None:
        chains = self._chains
        if isinstance(group, dict) and "params" in group:
            if not chains.divides:
                check_group(self._optimizer, self._names, self.defaults, group)
            group = with_checked_params(group, () if chains.divides else self._optimizer.stages)
        if chains.divides and isinstance(group.get("params"), list):
            parts = chains.divided(group)
            own = [links_of(one.optimizer, tuple(one.optimizer.hyper), one.group) for one in parts]
            more = [(*one[1:], links) for one, links in zip(parts, own, strict=True)]
            chains.require_common(self._groups(), more)
            self.defaults = {}  # a part has its own options, and no other
            for part in parts:
                super().add_param_group(part.group)
                chains.add(part.optimizer, part.places)
                self._complete_state(len(self.param_groups) - 1)
            chains.show(self.param_groups)
            self.defaults = common_options(self.param_groups, chains.names)
            return
        super().add_param_group(group)
        own_options(self.param_groups[-1])
        if chains.divides:
            raise TypeError("params must be parameters, or pairs of a name and a parameter")
        chains.add(self._optimizer, tuple(range(len(self._optimizer.links))))
        self._complete_state(len(self.param_groups) - 1)
        if self._flat is not None:
            self._flat.bind(self._groups(), self.state)

    def _viewed(self) -> list[Tensor]:
        return viewed_params(self._groups(), self._optimizer_of, self._leaf_state)

    @property
    def shared(self) -> dict[str, Any]:
        """The numbers that belong to no parameter: see :meth:`Optimizer.shared`."""
        return shared_by_name(self._optimizer.links, self._chains.shared)

    def step(
        self, closure: Callable[[], Any] | None = None, *, extra: Mapping[str, Any] | None = None
    ) -> Any:
        """Step every parameter that has a gradient; torch.compile runs it as it is.

        Args:
            closure: re-evaluates the model and returns the loss; called first, with autograd on.
            extra: inputs beside the gradients, by name, where a stage needs them. One that is a
                tensor for each parameter is a mapping, by parameter or, where the optimizer was
                given names, by name; see :meth:`Optimizer.update`. It is in the scale of the loss:
                a GradScaler unscales gradients alone. What ``closure`` returns is "loss", if a
                stage needs that.

        Returns:
            What the closure returned, else None.

        Raises:
            TypeError, ValueError, RuntimeError: as for :meth:`Optimizer.update`; and an input for
                what is no parameter of this optimizer. Nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(loss, extra or {})
        return loss

    @uncompiled
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a checkpoint of this class or of the equivalent torch.optim class.

        Where the parameters of both have names, they are matched by name, and else by position.

        ``state_dict`` is left as it is, and shares no memory with the optimizer afterwards. A chain
        that is ``stored`` also takes plain state, and state from another storage: it is encoded as
        it is kept here, rounded to nearest. What is kept of a bfloat16 parameter and was not saved
        is made of the parameter, so load the module first. A step count that a class keeps in its
        parameter groups, under "step", is taken for the parameters that have none of their own.

        Raises:
            ValueError: other groups or names, a state that does not fit the chain, or one of steps
                that nothing counts; nothing is changed.
        """
        before = (self.state, self.param_groups)
        numbers = self._chains.numbers()
        # After the caller's hooks, which may put another dict in its place.
        handle = self.register_load_state_dict_pre_hook(note_loaded)
        try:
            super().load_state_dict(own_copy(state_dict))
        except Exception:
            self.state, self.param_groups = before
            if numbers:
                self._chains.take_numbers([dict(numbers)])
            raise
        finally:
            handle.remove()
            self._loaded = {}
            self._steps.forget()  # what was there before
        if self._flat is not None:
            self._flat.bind(self._groups(), self.state)

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_optimizer": self._optimizer,
            "_chains": self._chains,
            "_steps": self._steps,
            "_names": self._names,
            "_options": {},
            "_made_for": self._made_for,
            "_loaded": {},
            "_flat": None if self._flat is None else FlatGroups(self._optimizer, self._made_for),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_optimizer" in state:  # copied or unpickled, without its hooks
            self._lock = StepLock()
            self._translate_checkpoints()

    def _translate_checkpoints(self) -> None:
        """Write checkpoints as torch.optim does, and complete what is read from them.

        Both are done before any hook of the caller looks.
        """
        self.register_state_dict_pre_hook(complete_replaced)
        self.register_state_dict_post_hook(write_as_torch_does, prepend=True)
        self.register_load_state_dict_post_hook(complete_loaded, prepend=True)

    def _bound(self) -> BoundOptimizer | None:
        """Return the bound optimizer of flat parameters."""
        return None if self._flat is None else self._flat.bound(self._groups(), self.state)

    def _groups(self) -> list[Group]:
        """The parameter groups as they are now."""
        made = []
        for index, group in enumerate(self._stepped_groups()):
            options = self._options.get(index) or self._options_of(index)
            names = group.get("param_names")
            made.append(Group(options.hypers(group), group["params"], names, index))
        return made

    def _optimizer_of(self, number: int) -> Optimizer:
        """The chain of a group."""
        return self._chains.parts[number][0] if self._chains.divides else self._optimizer

    @uncompiled
    def _step(self, loss: Any, extra: Mapping[str, Any]) -> None:
        self._lock.alone(self._step_now, loss, extra)

    def _step_now(self, loss: Any, extra: Mapping[str, Any]) -> None:
        """Step each parameter, in flat buffers or where it lies."""
        groups, chains = self._groups(), self._chains
        if self._flat is not None:
            if extra:
                check_extra(self._optimizer.links, extra)
            self._flat.step(groups, self.state)
            return
        if loss is not None and any("loss" in link.stage.extra for link in self._optimizer.links):
            extra = {"loss": loss.detach() if isinstance(loss, Tensor) else loss, **extra}
        now = chains.now(groups, self.state, self._leaf_state)
        given = partial(of_parameters, now.links, groups, extra) if extra else None
        self._steps.prepared(now, extra=given)()
        if chains.keeps_numbers:
            chains.show(self.param_groups)

    def _leaf_state(
        self, group: Group, param: Tensor, name: str, *, begins: bool = True
    ) -> LeafState:
        """The state of a parameter, which stands in its dict: see :func:`leaf_state`."""
        stages, made_for = self._optimizer_of(group.number).stages, self._made_for.get(group.number)
        states = self._states
        return leaf_state(
            stages, group.hypers, param, states, name, begins=begins, made_for=made_for
        )

    def _complete_state(self, number: int) -> None:
        """State for every parameter of a group."""
        own, names = self._optimizer_of(number), self._names_of(number)
        self.param_groups[number] = guarded(self.param_groups[number], names)
        group = self._stepped_groups()[number]
        hypers = tuple(link.hyper for link in links_of(own, names, group))
        complete_state(own.stages, hypers, group, self._states)
        self._made_for[number] = hypers

    def _load_group(self, number: int) -> None:
        """The state of a group as it was loaded, in its own form, and complete."""
        group, own = self.param_groups[number], self._optimizer_of(number)
        hypers = tuple(link.hyper for link in links_of(own, self._names_of(number), group))
        group = {**group, "params": self._tensors(number)}
        kept = self._loaded["param_groups"][number]["params"]
        loaded = [self._loaded["state"].get(key, {}) for key in kept]
        keep_form(own.stages, hypers, group, loaded, self._states)
        self._complete_state(number)

    def _names_of(self, number: int) -> tuple[str, ...]:
        """The names of a group's hyper-parameters."""
        return self._chains.names[number] if self._chains.divides else self._names

    def _hypers(self, index: int, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """The hyper-parameters in a group now."""
        return self._options_of(index).hypers(group)

    def _options_of(self, index: int) -> GroupOptions:
        """Return the reader of a group's options, which is kept as long as its chain."""
        if index not in self._options:
            own = self._optimizer_of(index)
            self._options[index] = GroupOptions(own, self._names_of(index))
        return self._options[index]
