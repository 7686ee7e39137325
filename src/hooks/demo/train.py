"""What each rank does: train equal models side by side, one for each way of stepping, and compare.

Started by ``torchrun`` (see ``launch.py``); it saves its results for the process that started it.
"""

import argparse
import copy
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from hooks.demo import text
from hooks.demo.front_ends import FRONT_ENDS, HyperParameters
from hooks.demo.model import Decoder, generate
from hooks.demo.progress import Progress
from hooks.demo.result import RankResult
from hooks.demo.run import Run
from hooks.demo.settings import Settings

VALIDATION_SIZE = 32
POINTS = 12  # how many times the validation loss is taken, after the first
SAMPLE_PROMPT = "The "
SAMPLE_LENGTH = 240


def train(settings: Settings) -> RankResult:
    """All runs, interleaved step by step; every rank has its own batches, all runs the same."""
    rank = dist.get_rank()
    corpus = text.corpus()
    torch.manual_seed(settings.seed)
    model = Decoder(len(corpus.alphabet))
    hyper = HyperParameters(settings.learning_rate)
    first, *others = FRONT_ENDS[settings.front_end](settings.ranks)
    twins = [(way, copy.deepcopy(model)) for way in others]
    runs = [Run(way, one, hyper) for way, one in [(first, model), *twins]]

    chance = torch.Generator().manual_seed(settings.seed * settings.ranks + rank)
    validation = text.even_batch(corpus.validation, VALIDATION_SIZE, model.context)
    every = max(1, settings.steps // POINTS)
    with Progress(settings.steps, shown=rank == 0) as progress:
        for step in range(settings.steps):
            if step % every == 0:
                progress.note(step, _validated(runs, validation))
            batch = text.random_batch(corpus.train, settings.batch_size, model.context, chance)
            for run in runs:
                run.step(batch)
            progress.advance()
        for run in runs:
            run.finish()
        progress.note(settings.steps, _validated(runs, validation))

    return RankResult(
        rank=rank,
        numel=sum(param.numel() for param in model.parameters()),
        runs=[run.result(runs[0]) for run in runs],
        peak_rss_bytes=peak_rss_bytes(),
        sample=sample(model, corpus.alphabet, chance) if rank == 0 else "",
    )


def _validated(runs: list[Run], batch: text.Batch) -> dict[str, float]:
    """The validation loss of each run, by its name."""
    return {run.way.name: run.validate(batch) for run in runs}


def sample(model: Decoder, alphabet: str, chance: torch.Generator) -> str:
    """Let the model write."""
    prompt = [alphabet.index(character) for character in SAMPLE_PROMPT]
    return "".join(alphabet[token] for token in generate(model, prompt, SAMPLE_LENGTH, chance))


def peak_rss_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


@contextmanager
def process_group() -> Iterator[None]:
    """The ranks that torchrun started, connected by gloo."""
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Entry point of a rank."""
    parser = argparse.ArgumentParser(description="One rank of `functional-optim demo`.")
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores, and sums keep one order
    with process_group():
        train(arguments.settings).save(arguments.results)


if __name__ == "__main__":
    main()
