"""Job of the demo for each of its processes."""

from pathlib import Path

import torch.distributed as dist

from hooks.demo.front_ends import FRONT_ENDS
from hooks.demo.settings import Settings
from hooks.demo.train import train_and_compare


def train(settings: str, folder: str) -> None:
    """Train with all front-ends, and save the measurements of this rank."""
    chosen = Settings.from_json(settings)
    ways = FRONT_ENDS[chosen.front_end](chosen.ranks)
    train_and_compare(chosen, ways, dist.get_rank()).save(Path(folder))
