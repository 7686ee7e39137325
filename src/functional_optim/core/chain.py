"""Chain: stages with their hyper-parameters, and the leaves that each stage acts on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.expression import AUTO, format_expression
from functional_optim.core.hyper import copy_tensors, hash_key
from functional_optim.core.links import (
    Links,
    apply_changes,
    counts_steps,
    hyper_values,
    is_composed,
    parse_changes,
    replace_values,
)
from functional_optim.core.overrides import LeafChain, Override, chain_at, chains_of
from functional_optim.core.selectors import Listed, Shape, Where, check_where, if_any, is_selected
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
"""Attributes of torch.optim.Optimizer that an optimizer without parameters does not have."""


@dataclass(frozen=True, eq=False, repr=False)
class Chain:
    """Transforms and rules in the order in which they run, with all hyper-parameters.

    A chain holds no parameter and no state. It can be hashed, compared and pickled. The subclass
    :class:`functional_optim.Optimizer` steps trees of parameters.
    """

    links: Links
    executor: str = AUTO
    namespace: str = ""
    overrides: tuple[Override, ...] = ()

    stages: tuple[Stage, ...] = field(init=False, repr=False)
    """The stages in the order in which they run."""

    is_composed: bool = field(init=False, repr=False)
    """True if leaves have different stages or extra inputs, or there is shared state."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_composed", is_composed(self.links, self.overrides))
        object.__setattr__(self, "stages", tuple(link.stage for link in self.links))

    @property
    def hyper(self) -> dict[str, Any]:
        """All hyper-parameters by the names that ``replace`` and ``update`` take."""
        return hyper_values(self.links)

    def chain_at(self, path: Path, shape: Shape | None = None) -> LeafChain:
        """Return the stages that act on the leaf at ``path``, and their hyper-parameters.

        Args:
            path: of the leaf.
            shape: of the parameter; only needed if the optimizer selects leaves by shape.

        Raises:
            ValueError: no rule acts on the leaf, or the shape is needed.
        """
        return chain_at(self.links, self.overrides, path, shape)

    def own(self, path: Path, shape: Shape | None = None) -> Self:
        """Return the optimizer of one leaf: its stages with its hyper-parameters.

        Arguments and errors are those of :meth:`chain_at`.

        Example::

            >>> from functional_optim import adamw, partition, sgd
            >>> optimizer = partition(
            ...     {"a": sgd(lr=0.5), "b": adamw()}, lambda path, shape: path[0])
            >>> optimizer.own(("a",), (2, 3)) == sgd(lr=0.5)
            True
        """
        return self.of_chain(self.chain_at(path, shape))

    def of_chain(self, chain: LeafChain) -> Self:
        """Return the optimizer of leaves that have this chain."""
        links = tuple(map(Link, chain.stages, chain.hypers))
        return type(self)(links, self.executor, self.namespace)

    def hypers_at(self, path: Path, shape: Shape | None = None) -> tuple[Any, ...]:
        """Return the Hyper of each stage that acts on the leaf at ``path``."""
        return self.chain_at(path, shape).hypers

    def chains_for(self, params: Any) -> list[LeafChain]:
        """Return ``chain_at`` of every leaf of a tree; equal chains are one object."""
        leaves, spec = flatten(params, self.namespace)
        return chains_of(self.links, self.overrides, spec, leaves)

    def hypers_for(self, params: Any) -> list[tuple[Any, ...]]:
        """Return ``hypers_at`` of every leaf of a tree; equal values are one tuple."""
        return [one.hypers for one in self.chains_for(params)]

    if not TYPE_CHECKING:  # with __getattr__, type checkers would accept any attribute

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
        links = tuple((one.stage, hash_key(one.hyper), one.where, one.label) for one in self.links)
        overrides = tuple(
            (where, tuple((place, field, hash_key(value)) for place, field, value in changes))
            for where, changes in self.overrides
        )
        return links, self.executor, self.namespace, overrides

    def __repr__(self) -> str:
        return format_expression(self.links, self.overrides, self.executor, self.namespace)

    def replace(self, **hyper: Any) -> Self:
        """Return a new optimizer with other hyper-parameters; this optimizer does not change.

        Args:
            hyper: by name, as in :attr:`hyper`; each is a number, a 0-d tensor or a schedule. A
                tensor is copied, unless autograd or torch.func tracks it.

        Raises:
            TypeError: the chain does not have the name.
            ValueError: a value is out of bounds.

        Example::

            >>> from functional_optim import sgd
            >>> sgd(lr=0.1).replace(lr=0.2).hyper["lr"]
            0.2
        """
        return with_hyper(self, copy_tensors(hyper))

    def override(self, where: Where, **hyper: Any) -> Self:
        """Return a new optimizer with other hyper-parameters for some leaves.

        Args:
            where: which leaves: the start of their paths as a tuple of keys, a predicate on paths,
                or a selector. ``init``, ``bind``, ``script``, ``export_step`` and all front-ends
                raise an error if no parameter is selected, unless it is in
                :func:`functional_optim.if_any`.
            hyper: by name. Later overrides win; all win over ``replace`` and ``update(lr=...)``.

        Raises:
            TypeError: ``where`` has another type, or the chain does not have the name.
            ValueError: a value is out of bounds.

        Example::

            >>> from functional_optim import adamw
            >>> optimizer = adamw(weight_decay=0.1).override(
            ...     lambda path: path[-1].endswith("bias"), weight_decay=0.0)
            >>> optimizer.hypers_at(("layer.bias",))[1].weight_decay
            0.0
        """
        check_where(where)
        changes = parse_changes(self.links, copy_tensors(hyper))
        links = apply_changes(self.links, changes)
        changes = tuple(
            (target, field, getattr(_find_link(links, target, field).hyper, field))
            for target, field, _ in changes
        )
        return replace(self, overrides=(*self.overrides, (where, changes)))


def _find_link(links: Links, target: int | str, field: str) -> Link:
    """Return a link that a change applies to."""
    if isinstance(target, int):
        return links[target]
    return next(one for one in links if one.label == target and field in one.hyper._fields)


def with_hyper(optimizer: _Chain, hyper: Mapping[str, Any]) -> _Chain:
    """Return the optimizer with other hyper-parameters for one step; tensors are not copied."""
    return replace(optimizer, links=replace_values(optimizer.links, hyper))


def allow_unmatched(optimizer: _Chain) -> _Chain:
    """Return the optimizer with :func:`if_any` around all of its selectors."""
    return _map_selectors(optimizer, if_any, if_any)


def list_paths(optimizer: _Chain, shapes: Mapping[Path, Shape]) -> _Chain:
    """Return the optimizer with lists of paths as selectors, so that it can be pickled."""

    def found(where: Where) -> Listed:
        return Listed(frozenset(path for path in shapes if is_selected(where, path, shapes[path])))

    return _map_selectors(optimizer, found, lambda where: if_any(found(where)))


def _map_selectors(
    optimizer: _Chain,
    of_link: Callable[[Where], Where],
    of_override: Callable[[Where], Where],
) -> _Chain:
    """Return the optimizer with other selectors of its links and overrides."""
    links = tuple(
        link if link.where is None else link._replace(where=of_link(link.where))
        for link in optimizer.links
    )
    overrides = tuple((of_override(where), changes) for where, changes in optimizer.overrides)
    return replace(optimizer, links=links, overrides=overrides)


def require_one_chain(optimizer: Chain, what: str) -> None:
    """Raise TypeError for different stages of leaves, or shared state; ``what`` is the caller."""
    refuse_closure(optimizer, what)
    if not optimizer.is_composed:
        return
    require_gradients_alone(optimizer, what)
    for link in optimizer.links:
        counts = counts_steps((link,), optimizer.overrides)
        if link.where is not None or link.stage.combine is not None or counts:
            why, way = "keeps numbers that belong to no leaf", ""
            if link.where is not None:
                why, way = "acts on some leaves only", f"; or {what} each part alone"
            elif counts:
                why = "has a schedule on the global step"
            raise TypeError(
                f"{what} takes optimizers with one chain for all leaves, and {link.stage.name} "
                f"{why}: use update, update_, TorchOptimizer or a hook{way}"
            )


def require_one_dense_chain(optimizer: Chain, what: str) -> None:
    """Check as :func:`require_one_chain`. Raise RuntimeError if a stage refuses dense gradients."""
    require_one_chain(optimizer, what)
    for link in optimizer.links:
        if not link.stage.dense(link.hyper):
            raise RuntimeError(
                f"{what} takes dense gradients, and {link.stage.name} takes sparse ones: use "
                "update, update_ or TorchOptimizer, or set takes_dense=True"
            )


def require_gradients_alone(optimizer: Chain, what: str) -> None:
    """Raise TypeError if a stage takes inputs besides the gradients; ``what`` names the caller."""
    refuse_closure(optimizer, what)
    for link in optimizer.links:
        names = [*link.stage.extra, *(one.name for one in link.stage.inputs)]
        if names:
            raise TypeError(
                f"{what} takes only gradients, but {link.stage.name} also needs {names[0]!r}: use "
                "update, update_ or TorchOptimizer, and pass it in extra="
            )
