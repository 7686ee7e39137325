"""Translation between the parameter groups of a caller and those of an ExplicitGradients."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.hyper import copy_tensors
from functional_optim.core.links import hyper_values
from functional_optim.core.option_cache import OptionCache
from functional_optim.core.stage import Link
from functional_optim.frontends.checkpoint_names import match_by_name
from functional_optim.frontends.explicit_gradients import ExplicitGradients
from functional_optim.frontends.recipe import ChainCache, ComposedRecipe, GroupChain, Recipe
from functional_optim.frontends.torch_checkpoint import DECOUPLED
from functional_optim.frontends.torch_groups import (
    NOT_OPTIONS,
    missing_flags,
    options_of,
    require_options,
)
from functional_optim.frontends.torch_schedule import guard_schedules

_EXTRA_KEYS = ("step", DECOUPLED)
"""Keys of groups in checkpoints that are no options of the class, but are needed for loading."""

Group = dict[str, Any]
Dict = Mapping[str, Any]


class LocalOptions(Protocol):
    """Translation between the groups that a caller sees and those of an ExplicitGradients."""

    inner: ExplicitGradients
    """Steps the parameters."""

    def visible_groups(self) -> list[Group]:
        """Return the groups that a caller sees after construction."""

    def update_inner(self, groups: Sequence[Group]) -> None:
        """Write the current options to the inner groups.

        Raises:
            TypeError, ValueError: an option with a wrong value.
        """

    def format_state_dict(
        self, state_dict: dict[str, Any], groups: Sequence[Group]
    ) -> dict[str, Any]:
        """Return a state dict of the inner optimizer in the form that a caller expects."""

    def load(self, state_dict: Dict, groups: list[Group]) -> None:
        """Load a state dict, and write its options to ``groups``.

        Raises:
            TypeError, ValueError: the state dict does not fit; nothing has changed.
        """


class ComposedOptions:
    """Options of a composed optimizer. A caller sees the inner groups, which have one chain each.

    Shared scalars are no options, so callers do not see them. Each part of a model computes them by
    the same functions from the same totals, so all parts have the same values.

    Args:
        groups: groups with parameters, or pairs of a name and a parameter.
        device: type of the device of the parameters.

    Raises:
        TypeError: a stage that needs inputs besides gradients.
        ValueError: a parameter on which no rule acts; an option out of bounds.
    """

    def __init__(self, recipe: ComposedRecipe, groups: Sequence[Dict], device: str) -> None:
        require_gradients_alone(recipe.optimizer, "an optimizer that is given its gradients")
        optimizer = recipe.build({}, device)
        self.inner = ExplicitGradients(list(map(dict, groups)), optimizer)

    def visible_groups(self) -> list[Group]:
        """Return the inner groups without shared scalars."""
        hidden = self.inner.shared_entries
        return [
            {key: value for key, value in group.items() if key not in hidden}
            for group in self.inner.param_groups
        ]

    def update_inner(self, groups: Sequence[Group]) -> None:
        """Write all options to the inner groups."""
        for own, inner in zip(groups, self.inner.param_groups, strict=True):
            inner.update(options_of(own))

    def format_state_dict(
        self, state_dict: dict[str, Any], groups: Sequence[Group]
    ) -> dict[str, Any]:
        """Return the state dict unchanged: it has the form of a TorchOptimizer's state dict."""
        return state_dict

    def load(self, state_dict: Dict, groups: list[Group]) -> None:
        """Load the state dict of a TorchOptimizer with the same optimizer."""
        self.inner.load_state_dict(state_dict)
        groups[:] = self.visible_groups()


class ClassOptions:
    """Options of a class, translated to hyper-parameters of a chain.

    Args:
        recipe: builds chains from options.
        groups: groups with parameters, or pairs of a name and a parameter.
        device: type of the device of the parameters.

    Raises:
        TypeError, ValueError: an option with a wrong value; groups that need different chains.
    """

    def __init__(self, recipe: Recipe, groups: Sequence[Dict], device: str) -> None:
        self._recipe, self._device = recipe, device
        self._chains = ChainCache(lambda number: recipe)
        for group in groups:
            require_options(group, recipe.defaults)
        self._given = [copy_tensors({**recipe.defaults, **options_of(group)}) for group in groups]
        chain = recipe.build(self._given[0], device)
        self._stages = chain.stages
        # Some classes keep one step count per group, and the inner group then stores it too.
        counted = {key: 0 for key in ("step",) if key in recipe.form.options}
        made = [
            {**_hyper_of(self._chain(number, one)), **counted, "params": group["params"]}
            for number, (one, group) in enumerate(zip(self._given, groups, strict=True))
        ]
        self.inner = ExplicitGradients(made, chain)
        self._applied: dict[int, GroupChain] = {}
        """For each group, the chain whose hyper-parameters the inner group has."""
        self._known = OptionCache(other_keys=NOT_OPTIONS)

    def visible_groups(self) -> list[Group]:
        """Return groups with the options of the class."""
        return [
            guard_schedules({**_params_of(inner), **one}, self._recipe.defaults)
            for inner, one in zip(self.inner.param_groups, self._given, strict=True)
        ]

    def update_inner(self, groups: Sequence[Group]) -> None:
        """Write the hyper-parameters of changed options to the inner groups."""
        if self._known.is_current(groups):
            return
        for number, own in enumerate(groups):
            chain = self._chain(number, own)
            if self._applied.get(number) is not chain:
                self.inner.param_groups[number].update(_hyper_of(chain))
                self._applied[number] = chain
        self._known.store(groups)

    def format_state_dict(
        self, state_dict: dict[str, Any], groups: Sequence[Group]
    ) -> dict[str, Any]:
        """Return the state dict with the options of the class in its groups."""
        made = [
            {**options_of(own), **_extra_entries(inner), **_params_of(inner)}
            for inner, own in zip(state_dict["param_groups"], groups, strict=True)
        ]
        return {**state_dict, "param_groups": made}

    def load(self, state_dict: Dict, groups: list[Group]) -> None:
        """Load a state dict of this class, or of the equivalent class of torch.optim."""
        saved = match_by_name(state_dict["param_groups"], groups)
        if len(saved) != len(groups):
            raise ValueError(
                f"this state has {len(saved)} parameter groups, the optimizer {len(groups)}"
            )
        loaded = [
            {**options_of(own), **missing_flags(one, own), **options_of(one)}
            for own, one in zip(groups, saved, strict=True)
        ]
        made = [
            {**_hyper_of(self._chain(number, options)), **_extra_entries(one), **_params_of(one)}
            for number, (options, one) in enumerate(zip(loaded, saved, strict=True))
        ]
        self.inner.load_state_dict({**state_dict, "param_groups": made})
        self._applied = {}
        self._known.clear()
        for own, options, inner in zip(groups, loaded, self.inner.param_groups, strict=True):
            kept = {key: value for key, value in options.items() if key != "step"}
            own.clear()
            own.update({**_params_of(inner), **kept})

    def _chain(self, number: int, options: Dict) -> GroupChain:
        """Return the chain of a group; raise ValueError if the first group has another chain."""
        chain = self._chains.of(number, options, self._device)
        if chain.stages != self._stages:
            raise ValueError(
                f"the options of parameter group {number} need another chain than those of group "
                "0; make an optimizer of its own for that group"
            )
        return chain


def _hyper_of(chain: GroupChain) -> dict[str, Any]:
    return hyper_values(tuple(map(Link, chain.stages, chain.hypers)))


def _params_of(group: Dict) -> dict[str, Any]:
    return {key: group[key] for key in NOT_OPTIONS if key in group}


def _extra_entries(group: Dict) -> dict[str, Any]:
    return {key: group[key] for key in _EXTRA_KEYS if key in group}
