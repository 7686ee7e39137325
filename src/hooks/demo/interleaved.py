"""Training several runs side by side, step by step, on the same batches."""

from collections.abc import Sequence
from typing import Protocol

import torch

from hooks.demo import text
from hooks.demo.model import Decoder
from hooks.demo.progress import Progress
from hooks.demo.settings import Settings

VALIDATION_SIZE = 32
POINTS = 12  # how many times the validation loss is taken, after the first


class Named(Protocol):
    """How a run is called."""

    @property
    def name(self) -> str:
        """A letter, for tables."""


class Trained(Protocol):
    """A run, as the loop sees it."""

    @property
    def way(self) -> Named:
        """How it is stepped."""

    def step(self, batch: text.Batch) -> None:
        """One step of training."""

    def validate(self, batch: text.Batch) -> float:
        """Take the validation loss."""

    def finish(self) -> None:
        """Called after the last step."""


def first_model(settings: Settings) -> Decoder:
    """The model with which all runs begin, on every rank the same."""
    torch.manual_seed(settings.seed)
    return Decoder(len(text.corpus().alphabet))


def train_runs(
    settings: Settings, runs: Sequence[Trained], context: int, rank: int
) -> torch.Generator:
    """Train all runs; every rank has its own batches, all runs the same.

    Args:
        settings: of the demo.
        runs: trained side by side.
        context: length of a stretch of text.
        rank: of this process; 0 shows how far it has come.

    Returns:
        The source of chance, as it is after the last batch.
    """
    corpus = text.corpus()
    chance = torch.Generator().manual_seed(settings.seed * settings.ranks + rank)
    validation = text.even_batch(corpus.validation, VALIDATION_SIZE, context)
    every = max(1, settings.steps // POINTS)
    with Progress(settings.steps, shown=rank == 0) as progress:
        for step in range(settings.steps):
            if step % every == 0:
                progress.note(step, _validated(runs, validation))
            batch = text.random_batch(corpus.train, settings.batch_size, context, chance)
            for run in runs:
                run.step(batch)
            progress.advance()
        for run in runs:
            run.finish()
        progress.note(settings.steps, _validated(runs, validation))
    return chance


def _validated(runs: Sequence[Trained], batch: text.Batch) -> dict[str, float]:
    """The validation loss of each run, by its name."""
    return {run.way.name: run.validate(batch) for run in runs}
