"""What the demo is asked to do, and the learning rate that follows from it."""

import json
import math
from dataclasses import asdict, dataclass

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
        """As text, for the command line of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        """The inverse of :meth:`to_json`."""
        return cls(**json.loads(text))

    def learning_rate(self, step: float) -> float:
        """Rises for a tenth of the run, then falls along a cosine to a tenth of its peak.

        Args:
            step: how many steps have been made.
        """
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return PEAK_LEARNING_RATE * (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return PEAK_LEARNING_RATE * (0.55 + 0.45 * math.cos(math.pi * progress))
