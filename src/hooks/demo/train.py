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
from hooks.demo.interleaved import first_model, train_runs
from hooks.demo.model import Decoder, generate
from hooks.demo.result import RankResult
from hooks.demo.run import Run
from hooks.demo.settings import Settings

SAMPLE_PROMPT = "The "
SAMPLE_LENGTH = 240


def train(settings: Settings) -> RankResult:
    """All runs, interleaved step by step; every rank has its own batches, all runs the same."""
    rank = dist.get_rank()
    model = first_model(settings)
    hyper = HyperParameters(settings.learning_rate)
    first, *others = FRONT_ENDS[settings.front_end](settings.ranks)
    twins = [(way, copy.deepcopy(model)) for way in others]
    runs = [Run(way, one, hyper) for way, one in [(first, model), *twins]]
    chance = train_runs(settings, runs, model.context, rank)
    return RankResult(
        rank=rank,
        numel=sum(param.numel() for param in model.parameters()),
        runs=[run.result(runs[0]) for run in runs],
        peak_rss_bytes=peak_rss_bytes(),
        sample=sample(model, text.corpus().alphabet, chance) if rank == 0 else "",
    )


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
        train(settings).save(folder)


def given(description: str) -> tuple[Settings, Path]:
    """What the command line asks for, and where to write results; this process has one thread."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores, and sums keep one order
    return arguments.settings, arguments.results


if __name__ == "__main__":
    main()
