"""Settings of outer optimizers, as they were published, each with its source."""

from collections.abc import Mapping
from typing import NamedTuple

from functional_optim import Optimizer, sgd


class OuterSettings(NamedTuple):
    """An outer SGD with momentum, and how often it steps.

    Example::

        >>> OUTER_SETTINGS["OpenDiLoCo"].optimizer().hyper["nesterov"]
        True
    """

    period: int
    """The number of inner steps from one outer step to the next."""
    lr: float
    momentum: float
    nesterov: bool
    source: str
    inner: str = "AdamW"
    """What the ranks step by, in the source."""

    def optimizer(self) -> Optimizer:
        """The outer rule."""
        return sgd(lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


_MULOCO = "Therien et al. 2025, arXiv 2505.23725"

OUTER_SETTINGS: Mapping[str, OuterSettings] = {
    "OpenDiLoCo": OuterSettings(
        500, 0.7, 0.9, nesterov=True, source="Jaghouar et al. 2024, arXiv 2407.07852"
    ),
    "MuLoCo, AdamW": OuterSettings(30, 0.8, 0.9, nesterov=True, source=_MULOCO),
    # Its inner optimizer is made by hooks.averaging.muloco_inner.
    "MuLoCo, Muon": OuterSettings(30, 0.9, 0.8, nesterov=True, source=_MULOCO, inner="Muon"),
    "MaxText": OuterSettings(
        36, 0.3, 0.9, nesterov=True, source="the defaults of MaxText's DiLoCo trainer"
    ),
}
"""By name."""


class GossipSettings(NamedTuple):
    """An outer step of random pairs, by :class:`~hooks.averaging.GossipModelAverager`.

    Example::

        >>> GOSSIP_SETTINGS["NoLoCo"].momentum
        0.5
    """

    period: int
    """The number of inner steps from one outer step to the next."""
    lr: float
    momentum: float
    gamma: float
    """The pull towards the partner."""
    source: str
    inner: str = "AdamW"
    """What the ranks step by, in the source."""


NOLOCO = GossipSettings(
    50,
    0.7,
    0.5,
    gamma=0.7,  # the learning rate, as in the code that the authors published
    source="Kolehmainen et al. 2025, arXiv 2506.10911",
)
"""Those of NoLoCo."""

GOSSIP_SETTINGS: Mapping[str, GossipSettings] = {"NoLoCo": NOLOCO}
"""By name."""


def slowmo(momentum: float = 0.7, lr: float = 1.0) -> Optimizer:
    """The outer rule of SlowMo, for a constant inner learning rate.

    With ``d`` the mean change, ``u <- momentum u + d`` and ``a <- a - lr u``: algorithm 1 of Wang,
    Tantia, Ballas and Rabbat 2019 (arXiv 1910.00643), whose division of ``d`` by the inner rate and
    multiplication of ``u`` by it cancel. With momentum 0 and lr 1 it is local SGD.

    Args:
        momentum: beta, of the slow momentum.
        lr: alpha, the slow learning rate.

    Example::

        >>> slowmo(momentum=0.5).hyper["momentum"]
        0.5
    """
    return sgd(lr=lr, momentum=momentum)
