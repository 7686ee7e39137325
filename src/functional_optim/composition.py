"""Composition of stages and optimizers: in sequence, and by leaf.

The result gives every leaf one chain. A stage before or after a partition, such as a clip by the
global norm, acts on all leaves of the partition together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

from torch import Tensor

from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.format import format_value
from functional_optim.core.links import (
    FREEZE,
    format_part_error,
    join_links,
    move_changes,
    prefix_label,
    run_order,
)
from functional_optim.core.overrides import Override
from functional_optim.core.selectors import HasLabel, Shape, Where, check_where, intersect
from functional_optim.core.stage import Link, NoState, Rule, rows_of_sparse
from functional_optim.optimizer import Optimizer


def chain(*parts: Link | Optimizer) -> Optimizer:
    """Join stages into an optimizer; parameter and gradient run through them in order.

    Args:
        parts: links and optimizers in any order. Links are transforms, rules such as decoupled
            weight decay, or averages such as :func:`ema`. Optimizers are ``sgd()``, ``adam()``,
            another chain, or a partition; their links become links of the chain. At least one part
            has a rule. A stage without an ``lr`` argument uses the ``lr`` of the last stage that
            has one.

    Returns:
        An :class:`Optimizer`; its executor and namespace are those of the last optimizer among the
        parts.

    Raises:
        TypeError: a part that is neither a link nor an optimizer, or parts without a rule.

    Example::

        >>> from functional_optim import adam, chain, clip_by_value
        >>> print(chain(clip_by_value(1.0), adam(lr=0.1)).replace(amsgrad=True).hyper["lr"])
        0.1
    """
    return join_parts([("", None, part) for part in parts])


def join_parts(parts: Sequence[tuple[str, Where | None, Link | Optimizer]]) -> Optimizer:
    """Join parts into one optimizer. Each has a label and a selector of leaves (None for all)."""
    links: list[Link] = []
    optimizers: list[tuple[int, str, Optimizer]] = []
    for index, (label, where, part) in enumerate(parts):
        if isinstance(part, Optimizer):
            optimizers.append((len(links), label, part))
            own: Sequence[Link] = part.links
        elif isinstance(part, Link):
            own = [part]
        else:
            refuse_closure(part, "a chain or a partition")
            raise TypeError(format_part_error(part, index))
        links += [
            one._replace(where=intersect(where, one.where), label=prefix_label(label, one.label))
            for one in own
        ]
    if not optimizers:
        return Optimizer(join_links(links))
    places = run_order(links)
    overrides: list[Override] = []
    for before, label, part in optimizers:
        now = [places.index(before + i) for i in range(len(part.links))]
        overrides += [(at, move_changes(changes, now, label)) for at, changes in part.overrides]
    return replace(optimizers[-1][2], links=join_links(links), overrides=tuple(overrides))


class FreezeHyper(NamedTuple):
    pass


def freeze_rule(
    param: Tensor, grad: Tensor, state: NoState, c: FreezeHyper
) -> tuple[Tensor, NoState]:
    return param, state


FROZEN = Rule(
    name=FREEZE, hyper=FreezeHyper, rule=freeze_rule, sparse=rows_of_sparse, uses_gradient=False
)


def freeze(where: Where | None = None) -> Link:
    """Exclude leaves from all steps: no stage acts on them, and their steps are not counted.

    A global norm does not include their gradients.

    Args:
        where: selector of the leaves, as for :meth:`Optimizer.override`; by default all leaves, for
            a part of a :func:`partition`.

    Returns:
        A link for any position in a :func:`~functional_optim.chain`.

    Raises:
        TypeError: ``where`` is neither a tuple, a function nor a selector.
        ValueError: from ``init``, or from a front-end: a selector that matches no path, which may
            be misspelt. See :func:`~functional_optim.if_any`.

    Example::

        >>> import torch
        >>> from functional_optim import chain, freeze, sgd
        >>> optimizer = chain(freeze(("body",)), sgd(lr=1.0))
        >>> params = {"body": torch.ones(1), "head": torch.ones(1)}
        >>> optimizer.update(params, params, optimizer.init(params))[0]
        {'body': tensor([1.]), 'head': tensor([0.])}
    """
    if where is not None:
        check_where(where)
    return FROZEN()._replace(where=where)


@overload
def masked(part: Link, where: Where) -> Link: ...
@overload
def masked(part: Optimizer, where: Where) -> Optimizer: ...
def masked(part: Link | Optimizer, where: Where) -> Link | Optimizer:
    """Restrict a stage or an optimizer to some leaves.

    Args:
        part: a link or an optimizer.
        where: selector of the leaves, as for :meth:`Optimizer.override`.

    Returns:
        A link for a link, or an optimizer for an optimizer. All other leaves need another rule in
        the chain, or :func:`freeze`.

    Raises:
        TypeError: a part is neither a link nor an optimizer, or ``where`` is not a selector.
        ValueError: as for :func:`freeze`.

    Example::

        >>> import torch
        >>> from functional_optim import chain, decoupled_weight_decay, masked, matching, sgd
        >>> decay = masked(decoupled_weight_decay(0.5), ~matching("*bias"))
        >>> optimizer = chain(decay, sgd(lr=1.0))
        >>> params = {"bias": torch.ones(1), "weight": torch.ones(1)}
        >>> grads = {"bias": torch.zeros(1), "weight": torch.zeros(1)}
        >>> optimizer.update(params, grads, optimizer.init(params))[0]
        {'bias': tensor([1.]), 'weight': tensor([0.5000])}
    """
    check_where(where)
    if isinstance(part, Link):
        return part._replace(where=intersect(where, part.where))
    refuse_closure(part, "masked")
    if not isinstance(part, Optimizer):
        raise TypeError(format_part_error(part, 0))
    return join_parts([("", where, part)])


def partition(
    optimizers: Mapping[str, Optimizer | Link],
    label_of: Callable[[tuple[Any, ...], Shape], str | None],
) -> Optimizer:
    """Step each leaf with the optimizer of its label.

    Args:
        optimizers: an optimizer for each label. Use :func:`freeze` for leaves that must not change.
            Labels are prefixes of the names of hyper-parameters: ``optimizer.hyper["muon.lr"]``.
        label_of: returns the label of a leaf, from its path (a tuple of keys) and the shape of the
            whole parameter. :func:`labels` builds such a function from patterns.

    Returns:
        An :class:`Optimizer`. The state of a leaf is that of its own optimizer.

    Raises:
        TypeError: ``optimizers`` is not a mapping of optimizers, or ``label_of`` is not a function.
        ValueError: no optimizer; an invalid label. From ``init`` and ``update``: a leaf with an
            unknown label. From ``init``: a pattern of :func:`~functional_optim.labels` that matches
            no path.

    Example::

        >>> import torch
        >>> from functional_optim import adamw, partition, sgd
        >>> optimizer = partition(
        ...     {"matrices": sgd(lr=0.5), "rest": adamw(lr=0.25, weight_decay=0.0)},
        ...     lambda path, shape: "matrices" if len(shape) == 2 else "rest")
        >>> params = {"bias": torch.ones(1), "weight": torch.ones(1, 1)}
        >>> optimizer.update(params, params, optimizer.init(params))[0]
        {'bias': tensor([0.7500]), 'weight': tensor([[0.5000]])}
        >>> optimizer.replace(**{"rest.lr": 0.125}).hyper["rest.lr"]
        0.125
    """
    if not isinstance(optimizers, Mapping):
        raise TypeError(f"partition takes optimizers by label, got {format_value(optimizers)}")
    if not optimizers:
        raise ValueError("partition needs an optimizer for at least one label")
    if not callable(label_of):
        raise TypeError(
            f"label_of must be a function of a path and a shape, got {format_value(label_of)}"
        )
    for label, part in optimizers.items():
        if not str(label).replace("_", "a").replace("-", "a").isalnum():
            raise ValueError(
                f"labels must consist of letters, digits, _ and -, got {label!r}: names of "
                "hyper-parameters begin with them"
            )
        refuse_closure(part, "a chain or a partition")
        is_frozen = isinstance(part, Link) and part.stage is FROZEN
        if not isinstance(part, Optimizer) and not is_frozen:
            raise TypeError(
                f"the part {label!r} must be an optimizer, such as adamw(), or freeze(), got "
                f"{format_value(part)}"
            )
    return join_parts(
        [(label, HasLabel(label_of, label), part) for label, part in optimizers.items()]
    )
