"""What each rank does: train two equal models side by side, one per optimizer, and compare them.

Started by ``torchrun`` (see ``command.py``); it saves its results for the process that started it.
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
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hooks.demo import text
from hooks.demo.front_ends import (
    FRONT_ENDS,
    HyperParameters,
    MakeFrontEnd,
    TorchAdamW,
    tensor_bytes,
)
from hooks.demo.model import Decoder, generate, mean_loss
from hooks.demo.progress import Progress
from hooks.demo.result import Difference, RankResult, RunResult
from hooks.demo.settings import Settings

VALIDATION_SIZE = 32
POINTS = 12  # how many times the validation loss is taken, after the first
SAMPLE_PROMPT = "The "
SAMPLE_LENGTH = 240


class Run:
    """A model under DDP, with a way of stepping it, and its curves so far."""

    def __init__(self, model: nn.Module, make: MakeFrontEnd, hyper: HyperParameters) -> None:
        # Small buckets (in MB), so that there are several and the steps overlap with backward.
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
        self.front_end = make(self.ddp, hyper)
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.gradient_bytes = 0

    def step(self, batch: text.Batch) -> None:
        """One step of training."""
        loss = mean_loss(self.ddp, *batch)
        loss.backward()
        self.front_end.step()
        self.gradient_bytes = tensor_bytes(
            param.grad for param in self.ddp.parameters() if param.grad is not None
        )
        self.ddp.zero_grad()
        self.losses.append(loss.item())

    @torch.no_grad()
    def validate(self, batch: text.Batch) -> float:
        """Take the validation loss."""
        # The wrapped model: DDP's own forward would talk to the other ranks.
        loss = mean_loss(self.ddp.module, *batch).item()
        self.validation.append((len(self.losses), loss))
        return loss

    def flat_parameters(self) -> Tensor:
        """A copy of all parameters, as one vector."""
        return torch.cat([param.detach().reshape(-1) for param in self.ddp.parameters()])

    def result(self) -> RunResult:
        """What this rank measured. All ranks must call it together."""
        parameters = self.flat_parameters()
        of_rank_zero = parameters.clone()
        dist.broadcast(of_rank_zero, src=0)
        return RunResult(
            losses=self.losses,
            validation=self.validation,
            from_rank_zero=compare(parameters, of_rank_zero),
            parameter_bytes=tensor_bytes(self.ddp.parameters()),
            gradient_bytes=self.gradient_bytes,
            state_bytes=self.front_end.state_bytes(),
        )


def compare(one: Tensor, other: Tensor) -> Difference:
    """Compare two float32 vectors, bit by bit and by value."""
    same = torch.equal(one.view(torch.int32), other.view(torch.int32))
    return Difference(same, (one - other).abs().max().item())


def train(settings: Settings) -> RankResult:
    """Both runs, interleaved step by step; every rank has its own batches, both runs the same."""
    rank = dist.get_rank()
    corpus = text.corpus()
    torch.manual_seed(settings.seed)
    model = Decoder(len(corpus.alphabet))
    twin = copy.deepcopy(model)
    hyper = HyperParameters(settings.learning_rate)
    hook = Run(model, FRONT_ENDS[settings.front_end], hyper)
    by_torch = Run(twin, TorchAdamW, hyper)

    chance = torch.Generator().manual_seed(settings.seed * settings.ranks + rank)
    validation = text.even_batch(corpus.validation, VALIDATION_SIZE, model.context)
    every = max(1, settings.steps // POINTS)
    with Progress(settings.steps, shown=rank == 0) as progress:
        for step in range(settings.steps):
            if step % every == 0:
                progress.note(step, hook.validate(validation), by_torch.validate(validation))
            batch = text.random_batch(corpus.train, settings.batch_size, model.context, chance)
            hook.step(batch)
            by_torch.step(batch)
            progress.advance()
        progress.note(settings.steps, hook.validate(validation), by_torch.validate(validation))

    return RankResult(
        rank=rank,
        front_end=settings.front_end,
        numel=sum(param.numel() for param in model.parameters()),
        hook=hook.result(),
        torch=by_torch.result(),
        difference=compare(hook.flat_parameters(), by_torch.flat_parameters()),
        peak_rss_bytes=peak_rss_bytes(),
        sample=sample(model, corpus.alphabet, chance) if rank == 0 else "",
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
    parser = argparse.ArgumentParser(description="One rank of `functional-optim demo`.")
    parser.add_argument("--settings", type=Settings.from_json, required=True)
    parser.add_argument("--results", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the ranks share the cores, and sums keep one order
    with process_group():
        train(arguments.settings).save(arguments.results)


if __name__ == "__main__":
    main()
