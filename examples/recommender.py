"""Train a small recommender whose embedding tables live on two Ray actors.

    pip install "functional-optim[cli,ray]"
    python examples/recommender.py            # under a minute on 2 cores
    python examples/recommender.py --steps 20

Users click on items. Only the items of earlier clicks describe a user: the mean of these items'
rows in one table is multiplied with a candidate's row in another one. Row-wise Adagrad steps both
tables on their actors, and their gradients hold only the rows of a batch.

The data are synthetic, so that the best possible result is known: users and items have hidden
factors, and a click is drawn by their product,

    P(click) = sigmoid(3 <user, item> / sqrt(k) + popularity of the item),      k = 2.

Each batch has new users, and so does the test. A model that knows the hidden factors gives the best
possible result on them. The picture compares it with the result of the trained tables.

A real recommender would look up rows on the actors. For brevity, this example reads whole tables
as one snapshot, half a megabyte a step.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from functional_optim import DistributedOptimizer, rowwise_adagrad

ITEMS, FACTORS, DIM = 4000, 2, 16
BATCH, SHOWN, HISTORY, CANDIDATES = 128, 64, 12, 8
PLACEMENT = {"history.weight": "first", "items.weight": "second", "popularity.weight": "second"}


class Users(NamedTuple):
    """Histories of users' clicks, candidates for each user, and clicks on these."""

    history: Tensor
    candidates: Tensor
    clicked: Tensor
    chances: Tensor
    """Probabilities of these clicks, from the hidden factors."""


class Recommender(nn.Module):
    """Model of three tables, without other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(ITEMS, DIM, mode="mean", sparse=True)
        self.items = nn.Embedding(ITEMS, DIM, sparse=True)
        self.popularity = nn.Embedding(ITEMS, 1, sparse=True)
        for table in (self.history, self.items):
            nn.init.normal_(table.weight, std=0.3)
        nn.init.zeros_(self.popularity.weight)

    def forward(self, history: Tensor, candidates: Tensor) -> Tensor:
        """Return the log odds of clicks, of shape (users, candidates)."""
        products = (self.history(history)[:, None] * self.items(candidates)).sum(2)
        found: Tensor = products + self.popularity(candidates).squeeze(2)
        return found


def made_up(users: int, draws: torch.Generator, items: Tensor, popularity: Tensor) -> Users:
    """Draw users with hidden factors, and their clicks by these factors."""
    hidden = torch.randn(users, 1, FACTORS, generator=draws)
    shown = torch.randint(ITEMS, (users, SHOWN + CANDIDATES), generator=draws)
    products = (hidden * items[shown]).sum(2) / FACTORS**0.5
    chances = torch.sigmoid(3 * products + popularity[shown])
    chosen = torch.multinomial(chances[:, :SHOWN], HISTORY, generator=draws)
    history = shown.gather(1, chosen)
    clicked = torch.bernoulli(chances[:, SHOWN:], generator=draws)
    return Users(history, shown[:, SHOWN:], clicked, chances[:, SHOWN:])


def ranked_right(scores: Tensor, clicked: Tensor) -> float:
    """Return the area under the ROC curve: how often a click ranks above a non-click."""
    scores, clicked = scores.flatten(), clicked.flatten()
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    clicks = clicked.sum().double()
    others = len(clicked) - clicks
    area = (ranks[clicked.bool()].sum() - clicks * (clicks + 1) / 2) / (clicks * others)
    return float(area)


class Result(NamedTuple):
    """Result of a training run."""

    losses: list[float]
    areas: list[tuple[int, float]]
    """Areas under the ROC curve for test users, by step."""
    best: float
    """The area of the hidden factors themselves."""
    counters: dict[str, Any]
    dense_bytes: int
    """Bytes of gradients with all rows."""


def train(steps: int, make: Callable[..., DistributedOptimizer], console: Console) -> Result:
    """Train for some steps.

    Args:
        steps: each of one batch.
        make: ``DistributedOptimizer.over_ray``, or ``over_threads``, which has the same numbers.
        console: for the progress.
    """
    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(0)
    items = torch.randn(ITEMS, FACTORS, generator=draws)
    popularity = torch.randn(ITEMS, generator=draws) / 2 - 1.0
    test = made_up(2000, draws, items, popularity)
    model = Recommender()
    optimizer = make(rowwise_adagrad, model, PLACEMENT, lr=0.3)
    losses: list[float] = []
    areas: list[tuple[int, float]] = []

    def examine(step: int) -> None:
        with torch.no_grad(), optimizer.snapshot() as snapshot:
            scores = snapshot.run(model, test.history, test.candidates)
        areas.append((step, ranked_right(scores, test.clicked)))

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as progress:
        task = progress.add_task("training", total=steps, loss="")
        for step in range(steps):
            if step % max(1, steps // 15) == 0:
                examine(step)
            users = made_up(BATCH, draws, items, popularity)
            snapshot = optimizer.snapshot()
            scores = snapshot.run(model, users.history, users.candidates)
            loss = nn.functional.binary_cross_entropy_with_logits(scores, users.clicked)
            grads = torch.autograd.grad(loss, list(snapshot.parameters.values()))
            optimizer.step(grads, snapshot)
            losses.append(loss.item())
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.3f}")
        examine(steps)
    counters = optimizer.counters()
    optimizer.close()
    best = ranked_right(test.chances, test.clicked)
    dense = 4 * steps * sum(param.numel() for param in model.parameters())
    return Result(losses, areas, best, counters, dense)


def draw(result: Result, path: Path) -> None:
    """Draw the loss, and the share of test pairs that are ranked right."""
    mpl.use("agg")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.plot(result.losses, linewidth=0.8)
    left.set(xlabel="step", ylabel="loss in training")
    right.plot(*zip(*result.areas, strict=True), marker=".", label="trained tables")
    right.axhline(result.best, linestyle="--", color="black", label="hidden factors")
    right.axhline(0.5, linestyle=":", color="grey", label="chance")
    right.set(xlabel="step", ylabel="area under the ROC curve, new users")
    right.legend(loc="center right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def ray_is_up() -> None:
    """Start a small cluster on this machine, unless this process has one."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # noqa: PLC0415  after these settings

    if not ray.is_initialized():
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            logging_level="ERROR",
            log_to_driver=False,
        )


@click.command(help=__doc__.partition("\n")[0])
@click.option("--steps", default=600, show_default=True, help="Batches to train on.")
@click.option(
    "--picture", default="runs/recommender.png", show_default=True, type=click.Path(path_type=Path)
)
def main(steps: int, picture: Path) -> None:
    """Train, tell, draw."""
    console = Console()
    with console.status("starting Ray"):
        ray_is_up()
    result = train(steps, DistributedOptimizer.over_ray, console)
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(result, picture)
    (_, first), *_, (_, last) = result.areas
    console.print(
        f"pairs of new users' candidates ranked right: {first:.1%} before, {last:.1%} after "
        f"{steps} steps; {result.best:.1%} by the hidden factors"
    )
    sent = sum(one.gradient_bytes for one in result.counters.values())
    console.print(
        f"gradients: {sent / 2**20:.1f} MiB in the rows of the batches, where all rows would have "
        f"been {result.dense_bytes / 2**20:.1f} MiB"
    )
    console.print(f"picture: {picture}")


if __name__ == "__main__":
    main()
