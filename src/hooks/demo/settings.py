"""Settings of the demo, and the learning rate that follows from them."""

import json
from dataclasses import asdict, dataclass

from functional_optim import cosine, warmup
from functional_optim.core.hyper import Schedule

PEAK_LEARNING_RATE = 3e-3

RPC = "rpc"
"""The front-end for which one process trains, and the others own the parameters."""


@dataclass(frozen=True)
class Settings:
    """The choices of one demo; the same on every rank."""

    steps: int = 400
    """Steps of each run."""
    ranks: int = 2
    """Processes: each with its own data, or for RPC one trainer, and workers."""
    batch_size: int = 16
    """Stretches of text per rank and step."""
    seed: int = 0
    """For the model's first weights and the order of the text."""
    front_end: str = "step-hook"
    """Key of :data:`hooks.demo.front_ends.FRONT_ENDS`, or RPC."""

    def to_json(self) -> str:
        """Return the settings as text, for the command line of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(text))

    @property
    def learning_rate(self) -> Schedule:
        """Rises for a tenth of the run, then falls along a cosine to a tenth of its peak."""
        rise = max(1, self.steps // 10)
        fall = cosine(
            PEAK_LEARNING_RATE, to=0.1 * PEAK_LEARNING_RATE, steps=max(1, self.steps - rise)
        )
        return warmup(rise, then=fall, start=PEAK_LEARNING_RATE / rise)
