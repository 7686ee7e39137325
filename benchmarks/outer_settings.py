"""Published settings of outer optimizers, each with its source."""

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
    """Inner optimizer of the source."""

    def optimizer(self) -> Optimizer:
        """Return the outer rule."""
        return sgd(lr=self.lr, momentum=self.momentum, nesterov=self.nesterov)


_MULOCO = "Therien et al. 2025, arXiv 2505.23725"

OUTER_SETTINGS: Mapping[str, OuterSettings] = {
    "OpenDiLoCo": OuterSettings(
        500, 0.7, 0.9, nesterov=True, source="Jaghouar et al. 2024, arXiv 2407.07852"
    ),
    "MuLoCo, AdamW": OuterSettings(30, 0.8, 0.9, nesterov=True, source=_MULOCO),
    # benchmarks.claims.muloco builds the inner optimizer.
    "MuLoCo, Muon": OuterSettings(30, 0.9, 0.8, nesterov=True, source=_MULOCO, inner="Muon"),
    "MaxText": OuterSettings(
        36, 0.3, 0.9, nesterov=True, source="the defaults of MaxText's DiLoCo trainer"
    ),
}
"""Settings by name."""
