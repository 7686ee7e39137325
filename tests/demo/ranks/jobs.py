"""Job of the demo for each of its processes."""

from pathlib import Path
from unittest import mock

import torch.distributed as dist

from hooks.demo import train as training
from hooks.demo.front_ends import FRONT_ENDS
from hooks.demo.settings import Settings


def train(settings: str, folder: str) -> None:
    """Train with all front-ends, and save the measurements of this rank.

    Little text is validated and written, which would take more time than the training.
    """
    chosen = Settings.from_json(settings)
    ways = FRONT_ENDS[chosen.front_end](chosen.ranks)
    with mock.patch.multiple(training, VALIDATION_SIZE=4, SAMPLE_LENGTH=12):
        found = training.train_and_compare(chosen, ways, dist.get_rank())
    found.save(Path(folder))
