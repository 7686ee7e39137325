"""Training in every storage: the demo's transformer, text and AdamW, with one process each.

All runs start with the same weights and use the same batches. They differ only in the storage of
the parameters and the state between steps.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.records import Convergence
from benchmarks.timing import take_turns
from benchmarks.workloads import Size
from functional_optim import BoundOptimizer, Optimizer, adamw
from functional_optim.storage import CHOICES, PARAM_STORAGES, describe, stored
from hooks.demo import text
from hooks.demo.model import Decoder, mean_loss
from hooks.demo.run import HyperParameters
from hooks.demo.settings import PEAK_LEARNING_RATE, Settings

Tell = Callable[[str], object]

RULE = "AdamW"
WAY: Literal["auto"] = "auto"
TITLE = "training in "
"""Prefix of the names of these parts, before the name of the run."""
FLOAT32 = "float32"
AGAIN = "float32, other seed"
"""Run with other first weights and batches: it shows the effect of chance alone."""
NEAREST = "bfloat16, to nearest"
"""Run that is not meant for use: it loses small updates, because nothing compensates rounding."""


class Run(NamedTuple):
    """A training run: its storage and its seed."""

    storage: Mapping[str, Any]
    """Arguments of ``stored``."""
    seed: int = 0


RUNS: dict[str, Run] = {
    FLOAT32: Run({}),
    AGAIN: Run({}, seed=1),
    **{name: Run(storage) for name, storage in CHOICES.items() if storage},
    NEAREST: Run({"param": "bfloat16"}),
}
JUDGED = tuple(name for name, storage in CHOICES.items() if storage)
"""Runs that should learn as well as float32."""
QUICK_RUNS = (
    FLOAT32,
    AGAIN,
    "bfloat16+kahan",
    "bfloat16+stochastic, state int8+stochastic",
    NEAREST,
)
"""Runs in size quick. There are few, because a process starts more slowly than a small model
trains."""


class Scale(NamedTuple):
    """Size of a training run."""

    steps: int
    validation: int
    """Stretches of text for the validation loss."""
    rate: float
    """Learning rate, in multiples of the demo's."""
    model: Mapping[str, int]
    """Options that differ from the demo's transformer."""


SCALES: dict[Size, Scale] = {
    "full": Scale(200, 256, 0.1, {}),
    "quick": Scale(100, 64, 1.0, {"width": 32, "heads": 2, "blocks": 1}),
    "tiny": Scale(40, 16, 1.0, {"context": 8, "width": 8, "heads": 2, "blocks": 1}),
}
"""Sizes of the runs. The full size has a tenth of the demo's rate: rounding to nearest then loses
steps, so the result shows if a storage keeps them. A small model would learn little at this rate.

A model with less than 32,768 parameters uses the executor that needs no compilation."""


class Widened(nn.Module):
    """A model whose logits are float32, so that the loss is not rounded to three digits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of these tokens."""
        logits: Tensor = self.model(tokens)
        return logits.float()


def run_convergence(
    *, name: str, size: Size, rounds: int, turn_seconds: float, tell: Tell
) -> Convergence:
    """Train in one storage, then time its step in turns with float32's.

    Args:
        name: a key of RUNS.
        size: a key of SCALES.
        rounds: turns of each of the two steps.
        turn_seconds: length of a turn.
        tell: called with lines of progress.
    """
    run, scale = RUNS[name], SCALES[size]
    corpus = text.corpus()
    settings = Settings(steps=scale.steps, seed=run.seed)
    plain = _adamw(settings, scale.rate)
    optimizer = stored(plain, **run.storage)
    model = _decoder(len(corpus.alphabet), scale, run)
    params = list(model.parameters())
    tell("compiling")
    bound = _bound(optimizer, params)

    validation = text.even_batch(corpus.validation, scale.validation, model.context)
    start = _loss(model, validation)
    _train(model, bound, corpus.train, settings, tell)
    loss = _loss(model, validation)

    tell("timing its step")
    others = list(_decoder(len(corpus.alphabet), scale, RUNS[FLOAT32]).parameters())
    steps = {FLOAT32: _step(_bound(plain, others))}
    if run.storage:
        steps[name] = _step(bound)
    return Convergence(
        name=name,
        parameters=sum(param.numel() for param in params),
        steps=scale.steps,
        rate=scale.rate * PEAK_LEARNING_RATE,
        start=start,
        loss=loss,
        bytes_per_parameter=describe(optimizer, params).bytes_per_parameter,
        seconds=take_turns(
            steps, rounds=rounds, turn_seconds=turn_seconds, wait=_nothing, tell=_nothing
        ),
        ran=bound.explain(),
    )


def _nothing(*_: object) -> None:
    return None


def _adamw(settings: Settings, rate: float) -> Optimizer:
    """Return the demo's AdamW, with another peak of the schedule."""
    hyper = HyperParameters(lambda step: rate * settings.learning_rate(step))
    return adamw(lr=hyper.learning_rate, betas=hyper.betas, weight_decay=hyper.weight_decay)


def _decoder(tokens: int, scale: Scale, run: Run) -> Decoder:
    """Return the model before its first step, in the dtype of the storage."""
    torch.manual_seed(run.seed)
    options: Any = scale.model
    model = Decoder(tokens, **options)
    model.to(PARAM_STORAGES[run.storage.get("param", FLOAT32)].dtype)
    return model


def _bound(optimizer: Optimizer, params: list[nn.Parameter]) -> BoundOptimizer:
    bound = optimizer.using(executor=WAY).bind(params)
    bound.ready()  # otherwise another executor would run the first steps
    return bound


def _train(
    model: Decoder, bound: BoundOptimizer, tokens: Tensor, settings: Settings, tell: Tell
) -> None:
    chance = torch.Generator().manual_seed(settings.seed)
    widened = Widened(model)
    for step in range(settings.steps):
        if step % 10 == 0:
            tell(f"step {step} of {settings.steps}")
        batch = text.random_batch(tokens, settings.batch_size, model.context, chance)
        mean_loss(widened, *batch).backward()
        bound.step()
        model.zero_grad()


@torch.no_grad()
def _loss(model: nn.Module, batch: text.Batch) -> float:
    return mean_loss(Widened(model), *batch).item()


def _step(bound: BoundOptimizer) -> Callable[[], object]:
    """Return a step with gradients in the flat buffers that are neither zero nor large."""
    generator = torch.Generator().manual_seed(0)
    for grad in bound.gradients:
        grad.normal_(std=1e-3, generator=generator)
    return lambda: bound.step(bound.gradients)
