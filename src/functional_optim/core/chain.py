"""Chain: stages, their hyper-parameters, and the leaves they are for. It steps nothing itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.expression import AUTO, expression
from functional_optim.core.global_step import has_global_schedule
from functional_optim.core.hyper import copy_tensors, frozen
from functional_optim.core.links import Links, apply, changes_of, is_composed, values, with_values
from functional_optim.core.overrides import LeafChain, Override, chain_at, chains_of
from functional_optim.core.selectors import Listed, Shape, Where, applies, check_where, if_any
from functional_optim.core.stage import Link, Stage
from functional_optim.core.tree import Path, flatten

_Chain = TypeVar("_Chain", bound="Chain")

_OF_TORCH = frozenset(
    {
        "add_param_group",
        "defaults",
        "load_state_dict",
        "param_groups",
        "state",
        "state_dict",
        "step",
        "zero_grad",
    }
)
"""Attributes of a torch.optim.Optimizer that an optimizer without parameters cannot have."""


@dataclass(frozen=True, eq=False, repr=False)
class Chain:
    """Transforms and rules in the order they run, with all their values.

    It holds no parameter and no state, and can be hashed, compared and pickled. What steps trees of
    parameters by it is :class:`functional_optim.Optimizer`.
    """

    links: Links
    executor: str = AUTO
    namespace: str = ""
    overrides: tuple[Override, ...] = ()

    stages: tuple[Stage, ...] = field(init=False, repr=False)
    """The stages, in the order they run."""

    is_composed: bool = field(init=False, repr=False)
    """Whether a step is decided as a whole: leaves differ in their stages, or take more than
    gradients, or something is kept that belongs to no leaf."""

    def __post_init__(self) -> None:
        changed = [(value,) for _, changes in self.overrides for *_, value in changes]
        composes = is_composed(self.links) or has_global_schedule(changed)
        object.__setattr__(self, "is_composed", composes)
        object.__setattr__(self, "stages", tuple(link.stage for link in self.links))

    @property
    def hyper(self) -> dict[str, Any]:
        """Every hyper-parameter by the name under which ``replace`` and ``update`` take it."""
        return values(self.links)

    def chain_at(self, path: Path, shape: Shape | None = None) -> LeafChain:
        """The stages that act on the leaf at ``path``, and their hyper-parameters.

        Args:
            path: of the leaf.
            shape: of the parameter; only an optimizer that tells leaves apart by it needs it.

        Raises:
            ValueError: no rule acts on it; or the shape is needed.
        """
        return chain_at(self.links, self.overrides, path, shape)

    def own(self, path: Path, shape: Shape | None = None) -> Self:
        """The optimizer of one leaf alone: its stages with the hyper-parameters that hold for it.

        Args:
            path: of the leaf.
            shape: of the parameter; only an optimizer that tells leaves apart by it needs it.

        Raises:
            ValueError: no rule acts on it; or the shape is needed.

        Example::

            >>> from functional_optim import adamw, partition, sgd
            >>> optimizer = partition(
            ...     {"a": sgd(lr=0.5), "b": adamw()}, lambda path, shape: path[0])
            >>> optimizer.own(("a",), (2, 3)) == sgd(lr=0.5)
            True
        """
        return self.of_chain(self.chain_at(path, shape))

    def of_chain(self, chain: LeafChain) -> Self:
        """Return the values for leaves that have a chain of this optimizer."""
        links = tuple(map(Link, chain.stages, chain.hypers))
        return type(self)(links, self.executor, self.namespace)

    def hypers_at(self, path: Path, shape: Shape | None = None) -> tuple[Any, ...]:
        """The Hyper of each stage that acts on the leaf at ``path``."""
        return self.chain_at(path, shape).hypers

    def chains_for(self, params: Any) -> list[LeafChain]:
        """``chain_at`` for every leaf of a tree; leaves with the same one share an object."""
        leaves, spec = flatten(params, self.namespace)
        return chains_of(self.links, self.overrides, spec, leaves)

    def hypers_for(self, params: Any) -> list[tuple[Any, ...]]:
        """``hypers_at`` for every leaf of a tree; leaves with the same ones share one tuple."""
        return [one.hypers for one in self.chains_for(params)]

    if not TYPE_CHECKING:  # a type checker refuses any attribute that the class lacks

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            text = f"{kind!r} object has no attribute {name!r}"
            if name in _OF_TORCH:
                text += (
                    ", since it is a pure function, which holds neither parameters nor state: "
                    f"TorchOptimizer(params, optimizer).{name} is torch's; or write params, state "
                    "= optimizer.update(params, grads, state)"
                )
            raise AttributeError(text, name=name, obj=self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chain) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        links = tuple((one.stage, frozen(one.hyper), one.where, one.label) for one in self.links)
        overrides = tuple(
            (where, tuple((place, field, frozen(value)) for place, field, value in changes))
            for where, changes in self.overrides
        )
        return links, self.executor, self.namespace, overrides

    def __repr__(self) -> str:
        return expression(self.links, self.overrides, self.executor, self.namespace)

    def replace(self, **hyper: Any) -> Self:
        """A new optimizer with other hyper-parameters; this one stays as it is.

        Args:
            hyper: by name, as in :attr:`hyper` (a number, a 0-d tensor or a schedule each). A
                tensor is copied, unless autograd or torch.func follows it.

        Raises:
            TypeError: a name that the chain does not have.
            ValueError: a value out of bounds.

        Example::

            >>> from functional_optim import sgd
            >>> sgd(lr=0.1).replace(lr=0.2).hyper["lr"]
            0.2
        """
        return with_hyper(self, copy_tensors(hyper))

    def override(self, where: Where, **hyper: Any) -> Self:
        """A new optimizer with other hyper-parameters for some leaves.

        Args:
            where: the beginning of the paths meant, as a tuple of keys, or a predicate on paths.
                Parameters of which it is meant for none are refused by ``init``, ``bind``,
                ``script``, ``export_step`` and whatever is made over parameters;
                :func:`functional_optim.if_any` says that there may be none.
            hyper: by name. Later overrides win; all win over ``replace`` and ``update(lr=...)``.

        Raises:
            TypeError: ``where`` is neither, or a name that the chain does not have.
            ValueError: a value out of bounds.

        Example::

            >>> from functional_optim import adamw
            >>> optimizer = adamw(weight_decay=0.1).override(
            ...     lambda path: path[-1].endswith("bias"), weight_decay=0.0)
            >>> optimizer.hypers_at(("layer.bias",))[1].weight_decay
            0.0
        """
        check_where(where)
        changes = changes_of(self.links, copy_tensors(hyper))
        made = apply(self.links, changes)
        changes = tuple(
            (place, field, getattr(_having(made, place, field).hyper, field))
            for place, field, _ in changes
        )
        return replace(self, overrides=(*self.overrides, (where, changes)))


def _having(links: Links, place: int | str, field: str) -> Link:
    """A link that a change is meant for."""
    if isinstance(place, int):
        return links[place]
    return next(one for one in links if one.label == place and field in one.hyper._fields)


def with_hyper(optimizer: _Chain, hyper: Mapping[str, Any]) -> _Chain:
    """Return the optimizer for one step with other hyper-parameters; tensors are not copied.

    Raises:
        TypeError, ValueError: as of :meth:`Chain.replace`.
    """
    return replace(optimizer, links=with_values(optimizer.links, hyper))


def tolerant(optimizer: _Chain) -> _Chain:
    """Return the optimizer for trees in which its selectors may match no leaf."""
    overrides = tuple((if_any(where), changes) for where, changes in optimizer.overrides)
    links = tuple(
        link if link.where is None else link._replace(where=if_any(link.where))
        for link in optimizer.links
    )
    if not overrides and links == optimizer.links:
        return optimizer
    return replace(optimizer, links=links, overrides=overrides)


def listed(optimizer: _Chain, shapes: Mapping[Path, Shape]) -> _Chain:
    """Return the optimizer for these leaves, with paths instead of functions of path and shape.

    So it can be pickled, whatever functions the caller wrote.

    Args:
        optimizer: any.
        shapes: of all leaves, by path.
    """

    def found(where: Where) -> Listed:
        return Listed(frozenset(path for path in shapes if applies(where, path, shapes[path])))

    links = tuple(
        link if link.where is None else link._replace(where=found(link.where))
        for link in optimizer.links
    )
    overrides = tuple((if_any(found(where)), changes) for where, changes in optimizer.overrides)
    return replace(optimizer, links=links, overrides=overrides)


def require_one_chain(optimizer: Chain, what: str) -> None:
    """Make sure that all leaves have the same stages, and that these keep nothing together.

    Raises:
        TypeError: names what is asked of the optimizer, and the stage that stands against it.
    """
    refuse_closure(optimizer, what)
    if not optimizer.is_composed:
        return
    require_gradients_alone(optimizer, what)
    for link in optimizer.links:
        counts = has_global_schedule([link.hyper])
        if link.where is not None or link.stage.combine is not None or counts:
            why = "keeps numbers that belong to no leaf"
            if link.where is not None:
                why = "acts on some leaves only"
            elif counts:
                why = "has a schedule on the global step"
            raise TypeError(
                f"{what} takes optimizers with one chain for all leaves, and {link.stage.name} "
                f"{why}: use update, update_, TorchOptimizer or a hook; or {what} each part alone"
            )


def require_one_dense_chain(optimizer: Chain, what: str) -> None:
    """Make sure that all leaves have one chain, as above, whose stages take dense gradients.

    Raises:
        TypeError: names what is asked of the optimizer, and the stage that stands against it.
        RuntimeError: names the stage that takes sparse gradients only.
    """
    require_one_chain(optimizer, what)
    for link in optimizer.links:
        if not link.stage.dense(link.hyper):
            raise RuntimeError(
                f"{what} takes dense gradients, and {link.stage.name} takes sparse ones: use "
                "update, update_ or TorchOptimizer, or set takes_dense=True"
            )


def require_gradients_alone(optimizer: Chain, what: str) -> None:
    """Make sure that no stage takes inputs beside the gradients.

    Raises:
        TypeError: names what is asked of the optimizer, the stage and its input.
    """
    refuse_closure(optimizer, what)
    for link in optimizer.links:
        names = [*link.stage.extra, *(one.name for one in link.stage.inputs)]
        if names:
            raise TypeError(
                f"{what} takes nothing beside gradients, and {link.stage.name} takes {names[0]!r} "
                "too: use update, update_ or TorchOptimizer, which are given it as extra="
            )
