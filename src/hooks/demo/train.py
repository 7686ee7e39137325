"""Training on each rank: equal models with different optimizers, and their comparison.

Started by ``torchrun`` (see ``launch.py``); saves its results for the process that started it.
"""

import argparse
import copy
import os
import resource
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hooks.demo import text
from hooks.demo.front_ends import FRONT_ENDS, TorchAdamW
from hooks.demo.model import Decoder, generate
from hooks.demo.processes import rpc_process
from hooks.demo.progress import Progress
from hooks.demo.result import RankResult
from hooks.demo.rpc_run import WorkerRun
from hooks.demo.run import ComparedRun, DemoRun, HyperParameters
from hooks.demo.settings import RPC, Settings

SAMPLE_PROMPT = "The "
SAMPLE_LENGTH = 240
VALIDATION_SIZE = 32
POINTS = 12  # number of validation losses after the first


def train_and_compare(settings: Settings, specs: Sequence[ComparedRun], rank: int) -> RankResult:
    """Train one run per spec, from equal models, step by step on the same batches."""
    torch.manual_seed(settings.seed)
    model = Decoder(len(text.corpus().alphabet))
    models = [model, *(copy.deepcopy(model) for _ in specs[1:])]
    hyper = HyperParameters(settings.learning_rate)
    runs = [spec.build(spec, one, hyper) for spec, one in zip(specs, models, strict=True)]
    generator = train_runs(settings, runs, model.context, rank)
    return RankResult(
        rank=rank,
        numel=sum(param.numel() for param in model.parameters()),
        runs=[run.result(runs[0]) for run in runs],
        peak_rss_bytes=peak_rss_bytes(),
        sample=sample(model, text.corpus().alphabet, generator) if rank == 0 else "",
    )


def train_runs(
    settings: Settings, runs: Sequence[DemoRun], context: int, rank: int
) -> torch.Generator:
    """Train all runs on the same batches, which differ between ranks. Rank 0 shows the progress.

    Returns:
        The generator of random numbers, after the last batch.
    """
    corpus = text.corpus()
    generator = torch.Generator().manual_seed(settings.seed * settings.ranks + rank)
    validation = text.even_batch(corpus.validation, VALIDATION_SIZE, context)
    every = max(1, settings.steps // POINTS)

    def validate() -> dict[str, float]:
        return {run.spec.name: run.validate(validation) for run in runs}

    with Progress(settings.steps, shown=rank == 0) as progress:
        for step in range(settings.steps):
            if step % every == 0:
                progress.note(step, validate())
            batch = text.random_batch(corpus.train, settings.batch_size, context, generator)
            for run in runs:
                run.step(batch)
            progress.advance()
        for run in runs:
            run.finish()
        progress.note(settings.steps, validate())
    return generator


def sample(model: Decoder, alphabet: str, generator: torch.Generator) -> str:
    prompt = [alphabet.index(character) for character in SAMPLE_PROMPT]
    return "".join(alphabet[token] for token in generate(model, prompt, SAMPLE_LENGTH, generator))


def peak_rss_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of `functional-optim demo`.")
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores, and sums keep one order
    train = _train_over_rpc if arguments.settings.front_end == RPC else _train_by_ddp
    train(arguments.settings, arguments.results)


def _train_by_ddp(settings: Settings, folder: Path) -> None:
    dist.init_process_group("gloo")
    try:
        specs = FRONT_ENDS[settings.front_end](settings.ranks)
        train_and_compare(settings, specs, dist.get_rank()).save(folder)
    finally:
        dist.destroy_process_group()


def _train_over_rpc(settings: Settings, folder: Path) -> None:
    """Train on rank 0; the other ranks own the parameters."""
    rank = int(os.environ["RANK"])
    workers = [f"worker{one}" for one in range(1, settings.ranks)]
    where = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    here, away = partial(TorchAdamW, under_ddp=False), partial(WorkerRun, workers=workers)
    specs = [
        ComparedRun("A", "torch.optim.AdamW, in one process", here, exact=True),
        ComparedRun("B", f"DistributedOptimizer, parameters on {where}", away, exact=True),
    ]
    with rpc_process(["trainer", *workers][rank], rank, settings.ranks):
        if rank == 0:
            train_and_compare(settings, specs, rank=0).save(folder)


if __name__ == "__main__":
    main()
