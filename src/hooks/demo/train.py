"""Training on each rank: equal models side by side, one for each way of stepping, and a comparison.

Started by ``torchrun`` (see ``launch.py``); it saves its results for the process that started it.
"""

import argparse
import copy
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from hooks.demo import text
from hooks.demo.front_ends import FRONT_ENDS, ComparedRun, HyperParameters
from hooks.demo.model import Decoder, generate
from hooks.demo.progress import Progress
from hooks.demo.result import RankResult
from hooks.demo.run import BaseRun, DemoRun
from hooks.demo.settings import Settings

SAMPLE_PROMPT = "The "
SAMPLE_LENGTH = 240
VALIDATION_SIZE = 32
POINTS = 12  # how many times the validation loss is taken, after the first


def train_ways(
    settings: Settings,
    ways: Sequence[ComparedRun],
    run_of: Callable[[ComparedRun, Decoder, HyperParameters], BaseRun],
    rank: int,
) -> RankResult:
    """A run for each way, from the same model, interleaved step by step on the same batches.

    Args:
        settings: of the demo.
        ways: what is compared.
        run_of: makes a run.
        rank: of this process; every rank has its own batches.
    """
    torch.manual_seed(settings.seed)
    model = Decoder(len(text.corpus().alphabet))
    models = [model, *(copy.deepcopy(model) for _ in ways[1:])]
    hyper = HyperParameters(settings.learning_rate)
    runs = [run_of(way, one, hyper) for way, one in zip(ways, models, strict=True)]
    chance = train_runs(settings, runs, model.context, rank)
    return RankResult(
        rank=rank,
        numel=sum(param.numel() for param in model.parameters()),
        runs=[run.result(runs[0]) for run in runs],
        peak_rss_bytes=peak_rss_bytes(),
        sample=sample(model, text.corpus().alphabet, chance) if rank == 0 else "",
    )


def train_runs(
    settings: Settings, runs: Sequence[BaseRun], context: int, rank: int
) -> torch.Generator:
    """Train all runs; every rank has its own batches, all runs the same.

    Args:
        settings: of the demo.
        runs: trained side by side.
        context: how many characters each row of a batch has.
        rank: of this process; 0 shows how far it has come.

    Returns:
        The source of chance, as it is after the last batch.
    """
    corpus = text.corpus()
    chance = torch.Generator().manual_seed(settings.seed * settings.ranks + rank)
    validation = text.even_batch(corpus.validation, VALIDATION_SIZE, context)
    every = max(1, settings.steps // POINTS)

    def validated() -> dict[str, float]:
        return {run.way.name: run.validate(validation) for run in runs}

    with Progress(settings.steps, shown=rank == 0) as progress:
        for step in range(settings.steps):
            if step % every == 0:
                progress.note(step, validated())
            batch = text.random_batch(corpus.train, settings.batch_size, context, chance)
            for run in runs:
                run.step(batch)
            progress.advance()
        for run in runs:
            run.finish()
        progress.note(settings.steps, validated())
    return chance


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
    settings, folder = given("One rank of `functional-optim demo`.")
    with process_group():
        ways = FRONT_ENDS[settings.front_end](settings.ranks)
        train_ways(settings, ways, DemoRun, dist.get_rank()).save(folder)


def given(description: str) -> tuple[Settings, Path]:
    """Parse the command line: the settings, and the folder for results. Torch gets one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores, and sums keep one order
    return arguments.settings, arguments.results


if __name__ == "__main__":
    main()
