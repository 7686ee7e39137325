"""The problems: parameters at the start, a loss to descend, and a score to judge by."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from hooks.demo import text
from hooks.demo.model import Decoder, mean_loss

Params = dict[str, Tensor]


class Instance(NamedTuple):
    """Problem with drawn numbers."""

    params: Params
    """The parameters at the start."""
    loss: Callable[[Params, int], Tensor]
    """Called as ``loss(params, step)``. Each step may have its own data."""
    score: Callable[[Params], float]
    """The score: the loss itself, or the loss on held-out data."""


class Task(NamedTuple):
    """Problem, and the score that passes."""

    title: str
    words: str
    build: Callable[[int], Instance]
    """Draws the numbers of the problem from a seed."""
    steps: int
    threshold: float
    """Largest score that passes."""
    rates: tuple[float, ...]
    """Learning rates to choose from."""
    axis: str
    """Label of the score on the axis of a picture."""
    logarithmic: bool = True


def quadratic(seed: int) -> Instance:
    """Return a rotated quadratic of 20 parameters. Its curvatures span a factor of 1000."""
    chance = torch.Generator().manual_seed(seed)
    axes = torch.linalg.qr(torch.randn(20, 20, generator=chance))[0]
    hessian = axes * torch.logspace(0, -3, 20) @ axes.mT
    start = torch.randn(20, generator=chance)
    scale = float(start @ hessian @ start)

    def loss(params: Params, step: int = 0) -> Tensor:
        value: Tensor = params["p"] @ hessian @ params["p"] / scale
        return value

    return Instance({"p": start}, loss, lambda params: float(loss(params)))


def rosenbrock(seed: int) -> Instance:
    """Return Rosenbrock's valley, with a start near (-1.2, 1)."""
    chance = torch.Generator().manual_seed(seed)
    start = torch.tensor([-1.2, 1.0]) + 0.1 * torch.randn(2, generator=chance)

    def loss(params: Params, step: int = 0) -> Tensor:
        x, y = params["p"]
        value: Tensor = (1 - x) ** 2 + 100 * (y - x**2) ** 2
        return value

    return Instance({"p": start}, loss, lambda params: float(loss(params)))


def matrix(seed: int) -> Instance:
    """Return ``|A W B - C|^2`` for W of 16 rows and 12 columns, with ill-conditioned A and B."""
    chance = torch.Generator().manual_seed(seed)

    def conditioned(size: int) -> Tensor:
        left, right = (
            torch.linalg.qr(torch.randn(size, size, generator=chance))[0] for _ in range(2)
        )
        value: Tensor = left * torch.logspace(0, -1.5, size) @ right
        return value

    left, right = conditioned(16), conditioned(12)
    target = left @ torch.randn(16, 12, generator=chance) @ right
    scale = float(target.square().sum())

    def loss(params: Params, step: int = 0) -> Tensor:
        value: Tensor = (left @ params["w"] @ right - target).square().sum() / scale
        return value

    return Instance({"w": torch.zeros(16, 12)}, loss, lambda params: float(loss(params)))


LETTERS = 4
"""Number of letters from which the next one is guessed."""
KINDS = ("aeiou", "bcdfghjklmnpqrstvwxyz", " \n", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""Kinds of characters: vowels, consonants, space, capitals; the rest is a fifth."""


def logistic(seed: int) -> Instance:
    """Return logistic regression of the kind of the next character, from 4 characters before it."""
    corpus = text.corpus()
    kinds = torch.tensor(
        [next((i for i, one in enumerate(KINDS) if c in one), len(KINDS)) for c in corpus.alphabet]
    )
    offsets = torch.arange(LETTERS) * len(corpus.alphabet)

    def examples(tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        return tokens[starts[:, None] + torch.arange(LETTERS)] + offsets, kinds[
            tokens[starts + LETTERS]
        ]

    def mean(weight: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        logits = weight[features].sum(1)  # equals a product with a matrix of zeros and ones
        return torch.nn.functional.cross_entropy(logits, labels)

    def loss(params: Params, step: int) -> Tensor:
        starts = torch.randint(len(corpus.train) - LETTERS, (256,), generator=_chance(seed, step))
        return mean(params["w"], *examples(corpus.train, starts))

    held_out = torch.arange(2000) * (len(corpus.validation) - LETTERS - 1) // 2000
    judged = examples(corpus.validation, held_out)
    start = torch.zeros(LETTERS * len(corpus.alphabet), len(KINDS) + 1)
    return Instance({"w": start}, loss, lambda params: float(mean(params["w"], *judged)))


MODEL = {"context": 32, "width": 32, "heads": 2, "blocks": 1}
BATCH = 16


def transformer(seed: int) -> Instance:
    """Return the demo's transformer, with one block of width 32, on the demo's text."""
    return transformer_of(seed, MODEL, BATCH)


def transformer_of(seed: int, options: Mapping[str, int], batch_size: int) -> Instance:
    """Return a transformer of any size on the demo's text."""
    corpus = text.corpus()
    torch.manual_seed(seed)
    model = Decoder(len(corpus.alphabet), **options)
    judged = text.even_batch(corpus.validation, 64, model.context)

    def mean(params: Params, batch: text.Batch) -> Tensor:
        return mean_loss(
            lambda tokens: torch.func.functional_call(model, params, (tokens,)), *batch
        )

    def loss(params: Params, step: int) -> Tensor:
        chance = _chance(seed, step)
        return mean(params, text.random_batch(corpus.train, batch_size, model.context, chance))

    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    return Instance(start, loss, lambda params: float(mean(params, judged)))


def _chance(seed: int, step: int) -> torch.Generator:
    """Return the generator for the data of a step. All evaluations in a step see the same data."""
    return torch.Generator().manual_seed(1_000_000 * seed + step)


def entropy_of_letters() -> float:
    """Return the loss of a model that knows only the frequency of each character."""
    corpus = text.corpus()
    counts = torch.bincount(corpus.train, minlength=len(corpus.alphabet)).double()
    shares = counts[counts > 0] / counts.sum()
    return -float((shares * shares.log()).sum())


RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)

TASKS: dict[str, Task] = {
    "quadratic": Task(
        "Quadratic",
        "20 parameters, curvatures from 1 to 1/1000 in rotated axes; the score is the loss divided "
        "by the first loss",
        quadratic,
        300,
        0.01,
        RATES,
        "loss",
    ),
    "rosenbrock": Task(
        "Rosenbrock",
        "Rosenbrock's valley with 2 parameters, from about (-1.2, 1); the score is the loss",
        rosenbrock,
        1000,
        0.1,
        RATES,
        "loss",
    ),
    "matrix": Task(
        "Matrix",
        "`|A W B - C|^2` for W of 16 rows and 12 columns, where the singular values of A and B "
        "span a factor of 32; the score is the loss divided by the first loss",
        matrix,
        300,
        0.01,
        RATES,
        "loss",
    ),
    "logistic": Task(
        "Logistic regression",
        "the kind of the next character (vowel, consonant, space, capital, other) from the 4 "
        "characters before it, on the Python language reference, which Python ships; the score is "
        "the loss on held-out text, in nats",
        logistic,
        200,
        1.0,
        RATES,
        "held-out loss",
        logarithmic=False,
    ),
    "transformer": Task(
        "Transformer",
        "the demo's transformer, one block of width 32, on the same text; the score is the loss on "
        "held-out text, in nats a character",
        transformer,
        200,
        2.75,
        RATES,
        "held-out loss",
        logarithmic=False,
    ),
}
"""Problems, by the names under which results are stored."""
