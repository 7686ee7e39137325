"""Settings of the demo, and its learning rate."""

import json
from dataclasses import asdict, dataclass

from functional_optim import cosine, warmup
from functional_optim.engine.options import Schedule

PEAK_LEARNING_RATE = 3e-3

RPC = "rpc"
"""The front-end in which one process trains, and the others own the parameters."""


@dataclass(frozen=True)
class Settings:
    """Options of one demo, equal on every rank."""

    steps: int = 400
    """Steps of each run."""
    ranks: int = 2
    """Number of processes, each with its own data; for RPC, one trainer and workers."""
    batch_size: int = 16
    """Sequences per rank and step."""
    seed: int = 0
    """Seed of the model's first weights and of the batches."""
    front_end: str = "step-hook"
    """Key of :data:`hooks.demo.front_ends.FRONT_ENDS`, or RPC."""

    def to_json(self) -> str:
        """Return the settings as text, for the command line of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """Return settings from the text of :meth:`to_json`."""
        return cls(**json.loads(text))

    @property
    def learning_rate(self) -> Schedule:
        """Schedule: rises for a tenth of the run, then falls on a cosine to a tenth of the peak."""
        rise = max(1, self.steps // 10)
        fall = cosine(
            PEAK_LEARNING_RATE, to=0.1 * PEAK_LEARNING_RATE, steps=max(1, self.steps - rise)
        )
        return warmup(rise, then=fall, start=PEAK_LEARNING_RATE / rise)
