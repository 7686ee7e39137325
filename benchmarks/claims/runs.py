"""Training runs of the claims: a small transformer, with replicas stacked in this process.

All runs of one seed start with the same weights and use the same batches. Only the averaging of the
replicas differs.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.claims.muloco import muloco_inner
from benchmarks.claims.replicas import (
    ReplicatedAverager,
    ReplicatedModel,
    ReplicatedOptimizer,
    mean_of_slices,
)
from benchmarks.outer_settings import OUTER_SETTINGS
from functional_optim import Optimizer, adamw, matching
from hooks.averaging import ModelAverager, OuterModelAverager, PeriodicModelAverager
from hooks.averaging.compression import Compression
from hooks.averaging.contrib import Statistical
from hooks.demo import text
from hooks.demo.model import Decoder, mean_loss
from hooks.demo.run import HyperParameters
from hooks.demo.settings import Settings

REPLICAS = 4
PERIOD = 16
"""Number of steps between two means, in runs with only one period."""
OUTER = OUTER_SETTINGS["MaxText"]
"""The outer rule: SGD with Nesterov's momentum, with a rate for few outer steps."""


class Scale(NamedTuple):
    """Size of a training run."""

    steps: int = 320
    """A multiple of all periods."""
    batch_size: int = 8
    """Stretches of text for each replica and step."""
    context: int = 32
    width: int = 32
    heads: int = 2
    blocks: int = 1
    validation: int = 256
    """Stretches of text for the validation loss."""


SMALL = Scale()
TINY = Scale(steps=32, batch_size=4, context=8, width=8, validation=16)

RATES = (1.0, 2.0, 4.0)
"""Inner learning rates, as multiples of the demo's. The page compares runs at the first rate, and
at each run's best rate."""

Averager = Callable[[Sequence[Tensor], Any], ModelAverager]
"""Builder of the averager of one replica: ``averager(params, group)``."""
Inner = Callable[[HyperParameters], Optimizer]


def adamw_within(hyper: HyperParameters) -> Optimizer:
    """Return the default inner optimizer, which steps all parameters."""
    return adamw(lr=hyper.learning_rate, betas=hyper.betas, weight_decay=hyper.weight_decay)


def muon_within(hyper: HyperParameters) -> Optimizer:
    """Return MuLoCo's inner optimizer: Muon for the matrices of blocks, AdamW for all else."""
    return muloco_inner(
        hyper.learning_rate,
        hyper.weight_decay,
        not_hidden=matching("*embedding*"),
        adjust_lr_fn="match_rms_adamw",
    ).replace(**{"rest.betas": hyper.betas})


class Run(NamedTuple):
    """A way of training."""

    replicas: int
    averager: Averager | None
    """Builder of the averagers. None averages the gradients of the replicas at each step."""
    inner: Inner = adamw_within
    batch_parts: int = 1
    """Number of parts of a batch, of which each replica gets one. More replicas with more parts see
    as many stretches together."""


def _mean_every(period: int) -> Averager:
    return lambda params, group: PeriodicModelAverager(period, process_group=group)


def _nesterov(compression: Compression | None = None, *, error_feedback: bool = True) -> Averager:
    return lambda params, group: OuterModelAverager(
        params,
        OUTER.optimizer(),
        PERIOD,
        process_group=group,
        compression=compression,
        error_feedback=error_feedback,
    )


DATA_PARALLEL = "data-parallel"
MEAN_4 = "mean every 4 steps"
MEAN_16 = "mean every 16 steps"
DILOCO = "DiLoCo, float32"
FED_BACK = "DiLoCo, 2 bits with error feedback"
FORGETFUL = "DiLoCo, 2 bits without"
ALONE = "1 replica"
AHEAD = "1 replica, outer Nesterov"
ADAMW_2 = "DiLoCo, AdamW within, 2 replicas"
ADAMW_8 = "DiLoCo, AdamW within, 8 replicas"
MUON_2 = "DiLoCo, Muon within, 2 replicas"
MUON_8 = "DiLoCo, Muon within, 8 replicas"

RUNS: Mapping[str, Run] = {
    DATA_PARALLEL: Run(REPLICAS, None),
    MEAN_4: Run(REPLICAS, _mean_every(4)),
    MEAN_16: Run(REPLICAS, _mean_every(16)),
    DILOCO: Run(REPLICAS, _nesterov()),
    FED_BACK: Run(REPLICAS, _nesterov(Statistical(2))),
    FORGETFUL: Run(REPLICAS, _nesterov(Statistical(2), error_feedback=False)),
    ALONE: Run(1, None),
    AHEAD: Run(1, _nesterov()),
    ADAMW_2: Run(2, _nesterov()),
    ADAMW_8: Run(8, _nesterov(), batch_parts=4),
    MUON_2: Run(2, _nesterov(), muon_within),
    MUON_8: Run(8, _nesterov(), muon_within, batch_parts=4),
}
"""Runs by name. The outer rule of DiLoCo is that of MaxText every 16 steps."""


def train(run: Run, seed: int, scale: Scale, rate: float = 1.0) -> float:
    """Train, and return the validation loss of the mean of the replicas, in nats per character.

    Args:
        run: the way of training.
        seed: the seed of the first weights and of the batches.
        scale: the size of the run.
        rate: the inner learning rate, as a multiple of the demo's.
    """
    corpus = text.corpus()
    torch.manual_seed(seed)
    module = Decoder(
        len(corpus.alphabet),
        context=scale.context,
        width=scale.width,
        heads=scale.heads,
        blocks=scale.blocks,
    )
    model = ReplicatedModel(module, run.replicas)
    settings = Settings(steps=scale.steps)
    hyper = HyperParameters(lambda made: rate * settings.learning_rate(made))
    inner = ReplicatedOptimizer(model.params, run.inner(hyper))
    averager = None if run.averager is None else ReplicatedAverager(model, run.averager)
    own = scale._replace(batch_size=scale.batch_size // run.batch_parts)
    chances = [torch.Generator().manual_seed(1000 * seed + k) for k in range(run.replicas)]
    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels for the CPU take no stacks
        for _ in range(scale.steps):
            inputs, targets = _batches(corpus.train, chances, own)
            _, grads = model.gradients(mean_loss, inputs, targets)
            if averager is None:
                inner.step({name: _shared(grad) for name, grad in grads.items()})
            else:
                inner.step(grads)
                averager.average_parameters()
    return _loss(model, text.even_batch(corpus.validation, scale.validation, scale.context))


def best_rate(losses: Mapping[float, Sequence[float]]) -> float:
    """Return the learning rate with the least mean loss over seeds. NaN is never the best.

    Args:
        losses: the losses of all seeds, by rate.
    """
    means = {rate: sum(found) / len(found) for rate, found in losses.items()}
    return min(means, key=lambda rate: (math.isnan(means[rate]), means[rate]))


def _batches(tokens: Tensor, chances: list[torch.Generator], scale: Scale) -> tuple[Tensor, Tensor]:
    own = [text.random_batch(tokens, scale.batch_size, scale.context, one) for one in chances]
    return torch.stack([one.inputs for one in own]), torch.stack([one.targets for one in own])


def _shared(grad: Tensor) -> Tensor:
    """Return the mean over replicas, repeated for each of them."""
    return mean_of_slices(grad).expand_as(grad)


@torch.no_grad()
def _loss(model: ReplicatedModel, batch: text.Batch) -> float:
    """Return the loss of the mean of all replicas."""
    for param in model.params.values():
        param.copy_(mean_of_slices(param))
    return mean_loss(model.replica(0), *batch).item()
