"""A language model split over a parameter server, trained by distributed autograd on torch RPC.

    python examples/parameter_server.py

The server has the embedding and the decoder, and the trainer has the LSTM between them. Forward and
backward passes go through both processes. Gradients stay on the process of their parameters, and
DistributedOptimizer steps each parameter there. The text is the Python language reference,
character by character.
"""

from pathlib import Path

import click
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc
from torch.nn import functional as F  # noqa: N812  the name that torch's own examples use

from functional_optim import DistributedOptimizer
from functional_optim.remote import SnapshotModule
from hooks.demo import text
from hooks.demo.processes import run_processes
from hooks.demo.progress import Progress

TRAINER, SERVER = "trainer", "server"
CONTEXT = 32
POINTS = 12


class LanguageModel:
    """Predictor of the next character: embedding (server), LSTM (here), decoder (server).

    Args:
        tokens: the number of different characters.
        width: the length of the hidden vectors.
    """

    def __init__(self, tokens: int, width: int) -> None:
        # In a SnapshotModule, a backward pass uses the parameters of its forward pass, even if
        # another trainer steps in between.
        self.there = {
            "embedding": rpc.remote(SERVER, SnapshotModule, args=(nn.Embedding(tokens, width),)),
            "decoder": rpc.remote(SERVER, SnapshotModule, args=(nn.Linear(width, tokens),)),
        }
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def parameters(self) -> list[tuple[str, rpc.RRef]]:
        """Return the name and the RRef of each parameter, on both processes."""
        found = [(f"lstm.{name}", rpc.RRef(param)) for name, param in self.lstm.named_parameters()]
        for part, module in self.there.items():
            rrefs = module.rpc_sync().parameter_rrefs()
            found += [(f"{part}.{name}", rref) for name, rref in rrefs]
        return found

    def loss(self, batch: text.Batch) -> Tensor:
        """Return the cross-entropy per character, in nats."""
        embedded = self.there["embedding"].rpc_sync().forward(batch.inputs)
        hidden, _ = self.lstm(embedded)
        logits = self.there["decoder"].rpc_sync().forward(hidden)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def train(steps: int, batch_size: int, output: Path) -> None:
    """Train in the trainer's process, and draw the losses."""
    torch.manual_seed(0)
    corpus, chance = text.corpus(), torch.Generator().manual_seed(0)
    validation = text.even_batch(corpus.validation, 64, CONTEXT)
    model = LanguageModel(len(corpus.alphabet), width=128)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[float] = []
    points: list[tuple[int, float]] = []

    def validate(progress: Progress) -> None:
        with torch.no_grad():
            points.append((len(losses), model.loss(validation).item()))
        progress.note(len(losses), {"": points[-1][1]})

    with Progress(steps, shown=True) as progress:
        for step in range(steps):
            if step % max(1, steps // POINTS) == 0:
                validate(progress)
            batch = text.random_batch(corpus.train, batch_size, CONTEXT, chance)
            with dist_autograd.context() as context_id:
                loss = model.loss(batch)
                dist_autograd.backward(context_id, [loss])
                optimizer.clip_grad_norm_(context_id, 1.0)  # over both processes
                optimizer.step(context_id)
            scheduler.step()
            losses.append(loss.item())
            progress.advance()
        validate(progress)
    for worker, names in optimizer.state_dict()["workers"].items():
        steps_there = optimizer.counters()[worker].steps
        print(f"{worker} made {steps_there} steps of {', '.join(names)}")
    print(f"validation loss {points[0][1]:.3f} -> {points[-1][1]:.3f} nats per character")
    draw(losses, points, output)
    print(f"The curves: {output}")


def draw(losses: list[float], points: list[tuple[int, float]], output: Path) -> None:
    """Write the curves as a picture."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label="training")
    axes.plot(*zip(*points, strict=True), "o", label="validation")
    axes.set(
        xlabel="steps",
        ylabel="loss per character (nats)",
        title="Embedding and decoder on a server, LSTM on the trainer",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


@click.command(context_settings={"show_default": True})
@click.option("--steps", type=click.IntRange(min=1), default=500)
@click.option("--batch-size", type=click.IntRange(min=1), default=32)
@click.option("--output", type=Path, default=Path("runs/parameter_server.png"))
def main(*, steps: int, batch_size: int, output: Path) -> None:
    """Train a language model whose embedding and decoder are on a parameter server."""
    run_processes([TRAINER, SERVER], train, steps, batch_size, output)


if __name__ == "__main__":
    main()
