"""Jobs of the ranks: what each process of the demo does."""

from pathlib import Path

import torch.distributed as dist

from hooks.demo.front_ends import FRONT_ENDS
from hooks.demo.run import DemoRun
from hooks.demo.settings import Settings
from hooks.demo.train import train_and_compare


def train(settings: str, folder: str) -> None:
    """Train in all ways, and save what this rank measured."""
    chosen = Settings.from_json(settings)
    ways = FRONT_ENDS[chosen.front_end](chosen.ranks)
    train_and_compare(chosen, ways, DemoRun, dist.get_rank()).save(Path(folder))
