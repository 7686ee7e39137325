"""Options of a local optimizer's parameter groups, and the groups of what steps its parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from functional_optim.core.chain import require_gradients_alone
from functional_optim.core.hyper import copy_tensors
from functional_optim.core.known_options import KnownOptions
from functional_optim.core.links import values
from functional_optim.core.stage import Link
from functional_optim.frontends.checkpoint_names import matched_by_name
from functional_optim.frontends.explicit_gradients import ExplicitGradients
from functional_optim.frontends.recipe import Chains, ComposedRecipe, GroupChain, Recipe
from functional_optim.frontends.torch_checkpoint import DECOUPLED
from functional_optim.frontends.torch_groups import (
    NOT_OPTIONS,
    neutral_flags,
    options_of,
    require_options,
)
from functional_optim.frontends.torch_schedule import guarded

_WRITTEN = ("step", DECOUPLED)
"""What checkpoints have in groups beside options of their class, and need to be read."""

Group = dict[str, Any]
Dict = Mapping[str, Any]


class LocalOptions(Protocol):
    """Translates between the groups that a caller sees and those of an ExplicitGradients."""

    inner: ExplicitGradients
    """Steps the parameters."""

    def shown(self) -> list[Group]:
        """Return the groups that a caller sees, after construction."""

    def hand_on(self, groups: Sequence[Group]) -> None:
        """Hand options on that a caller has changed.

        Raises:
            TypeError, ValueError: an option with a wrong value.
        """

    def written(self, state_dict: dict[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
        """Return a state dict of the inner optimizer as a caller is to have it."""

    def load(self, state_dict: Dict, groups: list[Group]) -> None:
        """Load a state dict, and show its options in ``groups``.

        Raises:
            TypeError, ValueError: one that does not fit; nothing is changed then.
        """


class OwnOptions:
    """Options of an optimizer of optimizers: a caller sees the inner groups, which are divided.

    Numbers that belong to no parameter are no options. They are the same functions of the same
    totals wherever they are made, so all parts of a model that are given the same totals agree on
    them.

    Args:
        recipe: of the optimizer.
        groups: of parameters, or pairs of a name and a parameter.
        device: type of the device that the parameters are on.

    Raises:
        TypeError: a stage that needs inputs beside the gradients.
        ValueError: a parameter on which no rule acts; an option out of bounds.
    """

    def __init__(self, recipe: ComposedRecipe, groups: Sequence[Dict], device: str) -> None:
        require_gradients_alone(recipe.optimizer, "an optimizer that is given its gradients")
        optimizer = recipe.made({}, device)
        self.inner = ExplicitGradients(list(map(dict, groups)), optimizer)

    def shown(self) -> list[Group]:
        """Return the inner groups without the numbers in them."""
        numbers = self.inner.numbers
        return [
            {key: value for key, value in group.items() if key not in numbers}
            for group in self.inner.param_groups
        ]

    def hand_on(self, groups: Sequence[Group]) -> None:
        """Write all options into the inner groups."""
        for own, inner in zip(groups, self.inner.param_groups, strict=True):
            inner.update(options_of(own))

    def written(self, state_dict: dict[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
        """Return the state dict as a TorchOptimizer of the same optimizer writes it."""
        return state_dict

    def load(self, state_dict: Dict, groups: list[Group]) -> None:
        """Load the state dict of a TorchOptimizer of the same optimizer."""
        self.inner.load_state_dict(state_dict)
        groups[:] = self.shown()


class ClassOptions:
    """Options of a class, which are translated to hyper-parameters of a chain.

    Args:
        recipe: turns options into chains.
        groups: of parameters, or pairs of a name and a parameter.
        device: type of the device that the parameters are on.

    Raises:
        TypeError, ValueError: an option with a wrong value; groups that need different chains.
    """

    def __init__(self, recipe: Recipe, groups: Sequence[Dict], device: str) -> None:
        self._recipe, self._device = recipe, device
        self._chains = Chains(lambda number: recipe)
        for group in groups:
            require_options(group, recipe.defaults)
        self._given = [copy_tensors({**recipe.defaults, **options_of(group)}) for group in groups]
        chain = recipe.made(self._given[0], device)
        self._stages = chain.stages
        # A class that counts steps for a group has the count written there.
        counted = {key: 0 for key in ("step",) if key in recipe.form.options}
        made = [
            {**_hyper_of(self._chain(number, one)), **counted, "params": group["params"]}
            for number, (one, group) in enumerate(zip(self._given, groups, strict=True))
        ]
        self.inner = ExplicitGradients(made, chain)
        self._taken: dict[int, GroupChain] = {}
        self._known = KnownOptions(beside=NOT_OPTIONS)

    def shown(self) -> list[Group]:
        """Return groups with the options of the class."""
        return [
            guarded({**_parameters_of(inner), **one}, self._recipe.defaults)
            for inner, one in zip(self.inner.param_groups, self._given, strict=True)
        ]

    def hand_on(self, groups: Sequence[Group]) -> None:
        """Write hyper-parameters into the inner groups where options have changed."""
        if self._known.hold(groups):
            return
        for number, own in enumerate(groups):
            chain = self._chain(number, own)
            if self._taken.get(number) is not chain:
                self.inner.param_groups[number].update(_hyper_of(chain))
                self._taken[number] = chain
        self._known.learn(groups)

    def written(self, state_dict: dict[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
        """Return the state dict with the options of the class in its groups."""
        made = [
            {
                **options_of(own),
                **{key: inner[key] for key in _WRITTEN if key in inner},
                **_parameters_of(inner),
            }
            for inner, own in zip(state_dict["param_groups"], groups, strict=True)
        ]
        return {**state_dict, "param_groups": made}

    def load(self, state_dict: Dict, groups: list[Group]) -> None:
        """Load a state dict of this class, or of the equivalent class of torch.optim."""
        saved = matched_by_name(state_dict["param_groups"], groups)
        if len(saved) != len(groups):
            raise ValueError(
                f"this state has {len(saved)} parameter groups, the optimizer {len(groups)}"
            )
        taken = [
            {**options_of(own), **neutral_flags(one, own), **options_of(one)}
            for own, one in zip(groups, saved, strict=True)
        ]
        made = [
            {
                **_hyper_of(self._chain(number, options)),
                **{key: one[key] for key in _WRITTEN if key in one},
                **_parameters_of(one),
            }
            for number, (options, one) in enumerate(zip(taken, saved, strict=True))
        ]
        self.inner.load_state_dict({**state_dict, "param_groups": made})
        self._taken = {}
        self._known.forget()
        for own, options, inner in zip(groups, taken, self.inner.param_groups, strict=True):
            kept = {key: value for key, value in options.items() if key != "step"}
            own.clear()
            own.update({**_parameters_of(inner), **kept})

    def _chain(self, number: int, options: Dict) -> GroupChain:
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


def _parameters_of(group: Dict) -> dict[str, Any]:
    return {key: group[key] for key in NOT_OPTIONS if key in group}
