"""Optimizers of stages and of optimizers: one after the other, and other stages for other leaves.

A leaf is stepped by a chain in any case; here is said by which. What stands around a partition (a
clip by the global norm, say) acts on all of its leaves together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, overload

from torch import Tensor

from functional_optim.core.brief import brief
from functional_optim.core.closure_optimizer import refuse_closure
from functional_optim.core.links import FREEZE, join, moved, no_part, order, under
from functional_optim.core.overrides import Override
from functional_optim.core.selectors import HasLabel, Shape, Where, both, check_where
from functional_optim.core.stage import Link, NoState, Rule, rows_of_sparse
from functional_optim.optimizer import Optimizer


def chain(*parts: Link | Optimizer) -> Optimizer:
    """Join stages into an optimizer; parameter and gradient run through them in order.

    Args:
        parts: links (transforms, rules such as decoupled weight decay, averages such as
            :func:`ema`) and optimizers (``sgd()``, ``adam()``, another chain, a partition), which
            are taken apart, in any order. One of them has a rule. A stage that is given no ``lr``
            takes that of the last one that has its own.

    Returns:
        An :class:`Optimizer`; its executor and namespace are those of the last optimizer among the
        parts.

    Raises:
        TypeError: a part that is neither, or no rule.

    Example::

        >>> from functional_optim import adam, chain, clip_by_value
        >>> print(chain(clip_by_value(1.0), adam(lr=0.1)).replace(amsgrad=True).hyper["lr"])
        0.1
    """
    return joined([("", None, part) for part in parts])


def joined(parts: Sequence[tuple[str, Where | None, Link | Optimizer]]) -> Optimizer:
    """Parts as one optimizer: each with a label, and the leaves it acts on (None: all)."""
    links: list[Link] = []
    given: list[tuple[int, str, Where | None, Optimizer]] = []
    for index, (label, where, part) in enumerate(parts):
        if isinstance(part, Optimizer):
            given.append((len(links), label, where, part))
            own: Sequence[Link] = part.links
        elif isinstance(part, Link):
            own = [part]
        else:
            refuse_closure(part, "a chain or a partition")
            raise TypeError(no_part(part, index))
        links += [
            one._replace(where=both(where, one.where), label=under(label, one.label)) for one in own
        ]
    made = join(links)
    if not given:
        return Optimizer(made)
    places = order(links)
    overrides: list[Override] = []
    for before, label, _, part in given:
        now = [places.index(before + i) for i in range(len(part.links))]
        overrides += [(at, moved(changes, now, label)) for at, changes in part.overrides]
    return replace(given[-1][3], links=made, overrides=tuple(overrides))


class FreezeHyper(NamedTuple):
    pass


def freeze_rule(
    param: Tensor, grad: Tensor, state: NoState, c: FreezeHyper
) -> tuple[Tensor, NoState]:
    return param, state


FROZEN = Rule(
    name=FREEZE,
    hyper=FreezeHyper,
    rule=freeze_rule,
    sparse=rows_of_sparse,
    uses_gradient=False,
)


def freeze(where: Where | None = None) -> Link:
    """Leave some leaves as they are: no stage of the chain acts on them, and no step is counted.

    Their gradients, if they have any, have no part in a global norm.

    Args:
        where: the leaves meant, as for :meth:`Optimizer.override`; without it all of them, as a
            part of a :func:`partition`.

    Returns:
        A link for :func:`~functional_optim.chain`, which stands anywhere in it.

    Raises:
        TypeError: ``where`` is neither a tuple, a function nor a selector.
        ValueError: from ``init``, or whatever is made over parameters: it says something of paths
            that is true of none; it may be misspelt. See :func:`~functional_optim.if_any`.

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
    """Let a stage, or a whole optimizer, act on some leaves only.

    Args:
        part: what acts on them.
        where: the leaves meant, as for :meth:`Optimizer.override`.

    Returns:
        A link of a link, an optimizer of an optimizer. The other leaves need a rule too, in the
        chain around it, or :func:`freeze`.

    Raises:
        TypeError: a part that is neither, or ``where`` that means no leaves.
        ValueError: as of :func:`freeze`.

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
        return part._replace(where=both(where, part.where))
    refuse_closure(part, "masked")
    if not isinstance(part, Optimizer):
        raise TypeError(no_part(part, 0))
    return joined([("", where, part)])


def partition(
    optimizers: Mapping[str, Optimizer | Link],
    label_of: Callable[[tuple[Any, ...], Shape], str | None],
) -> Optimizer:
    """Step each leaf by the optimizer of its label.

    Args:
        optimizers: by label; :func:`freeze` for leaves that are to stay as they are. Labels stand
            in front of the names of hyper-parameters: ``optimizer.hyper["muon.lr"]``.
        label_of: gives the label of a leaf, of its path (a tuple of keys) and the shape of the
            whole parameter; :func:`labels` makes such a function of patterns.

    Returns:
        An :class:`Optimizer`. The state of a leaf is that which its own optimizer would make.

    Raises:
        TypeError: something else than optimizers by label, or no function.
        ValueError: no optimizer; a label that is empty. From ``init`` and ``update``: a leaf whose
            label is none of these. From ``init``: as of :func:`freeze`, of what
            :func:`~functional_optim.labels` says of paths.

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
        raise TypeError(f"partition takes optimizers by label, got {brief(optimizers)}")
    if not optimizers:
        raise ValueError("partition needs an optimizer for at least one label")
    if not callable(label_of):
        raise TypeError(f"label_of must be a function of a path and a shape, got {brief(label_of)}")
    for label, part in optimizers.items():
        if not str(label).replace("_", "a").replace("-", "a").isalnum():
            raise ValueError(
                f"labels must be of letters, digits, _ and -, got {label!r}: they stand in front "
                "of the names of hyper-parameters"
            )
        refuse_closure(part, "a chain or a partition")
        is_frozen = isinstance(part, Link) and part.stage is FROZEN
        if not isinstance(part, Optimizer) and not is_frozen:
            raise TypeError(
                f"the part {label!r} must be an optimizer, such as adamw(), or freeze(), got "
                f"{brief(part)}"
            )
    return joined([(label, HasLabel(label_of, label), part) for label, part in optimizers.items()])
