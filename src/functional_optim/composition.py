"""chain: stages and optimizers, one after the other, as one optimizer."""

from collections.abc import Sequence
from dataclasses import replace

from functional_optim.links import join, moved, no_part, order, under
from functional_optim.optimizer import Optimizer
from functional_optim.overrides import Override
from functional_optim.stage import Link
from functional_optim.where import Where, both


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
