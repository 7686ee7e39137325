"""Tests of Lightning: automatic and manual optimization, LearningRateMonitor, SWA, checkpoints."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import SWALR

from tests.choices import each

from ..tensors import assert_same
from .support import (
    OPTIMIZERS,
    QUIET,
    TORCH,
    Model,
    batches,
    optimizer_of,
    plainly,
    schedule_of,
    values,
)

pytestmark = QUIET

STEPS = 6
"""Number of steps in an epoch."""


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    """Import Lightning, which takes seconds, only in the process that runs these tests."""
    from . import lightning_runs

    return lightning_runs


@each(name=OPTIMIZERS, manual=[False, True])
def test_it_is_the_run_without_it(
    name: str, manual: bool, runs: ModuleType, tmp_path_factory: Any
) -> None:
    alone = Model()
    plainly(optimizer_of(name, alone), alone, 2 * STEPS)
    module = runs.Trained(lambda model: optimizer_of(name, model), manual=manual)
    runs.fit(module, 2, tmp_path_factory.mktemp("run"))
    assert_same(values(module.model), values(alone))


@each(name=TORCH, more=[{}, {"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 3}])
def test_it_is_torchs_optimizer(
    name: str, more: dict[str, Any], runs: ModuleType, tmp_path_factory: Any
) -> None:
    results = []
    for made in (
        lambda model: optimizer_of(name, model),
        lambda model: TORCH[name](model.parameters()),
    ):
        module = runs.Trained(made)
        runs.fit(module, 2, tmp_path_factory.mktemp("run"), **more)
        results.append(values(module.model))
    assert_same(*results)


@each(name=OPTIMIZERS)
def test_a_run_is_resumed(name: str, runs: ModuleType, tmp_path_factory: Any) -> None:
    """A run continues from a checkpoint of Lightning, bit for bit."""
    folder = tmp_path_factory.mktemp("run")
    whole, first, second = (runs.Trained(lambda model: optimizer_of(name, model)) for _ in range(3))
    runs.fit(whole, 3, folder)
    runs.fit(first, 1, folder).save_checkpoint(folder / "first.ckpt")
    trainer = runs.fit(second, 3, folder, resume=folder / "first.ckpt")
    assert trainer.global_step == 3 * STEPS
    assert second.model.calls == 2 * STEPS
    assert_same(values(second.model), values(whole.model))


@each(name=OPTIMIZERS)
def test_learning_rates_are_monitored(name: str, runs: ModuleType, tmp_path_factory: Any) -> None:
    """Faults 17 and 18: Lightning reads the rate, momentum and weight decay of every group."""
    from lightning.pytorch.callbacks import LearningRateMonitor
    from lightning.pytorch.loggers import CSVLogger

    folder = tmp_path_factory.mktemp("run")
    monitor = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    module = runs.Trained(lambda model: optimizer_of(name, model))
    logger = CSVLogger(folder)
    trainer = runs.fit(module, 1, folder, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    groups = trainer.optimizers[0].param_groups
    assert len(monitor.lrs) == len(groups)
    assert all(len(one) == STEPS for one in monitor.lrs.values())
    assert [one[-1] for one in monitor.lrs.values()] == [
        pytest.approx(group["initial_lr"] * 0.9 ** (STEPS - 1)) for group in groups
    ]


@each(name=OPTIMIZERS)
def test_weights_are_averaged_by_swa(name: str, runs: ModuleType, tmp_path_factory: Any) -> None:
    """Fault 18: SWALR writes a rate into every group.

    The average is that of a loop without Lightning, by torch's own optimizer where torch has it.
    """
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    folder = tmp_path_factory.mktemp("run")
    module = runs.Trained(lambda model: optimizer_of(name, model), every="epoch")
    trainer = runs.fit(
        module, 4, folder, callbacks=[StochasticWeightAveraging(0.02, swa_epoch_start=2)]
    )
    assert trainer.current_epoch == 4
    assert_same(values(module.model), averaged_by_hand(name))


def averaged_by_hand(name: str) -> dict[str, torch.Tensor]:
    """Return the mean of the parameters at the starts of the second, third and fourth epoch."""
    model = Model()
    optimizer: Any = TORCH[name](model.parameters()) if name in TORCH else optimizer_of(name, model)
    schedule, mean = schedule_of(optimizer), values(model)
    for epoch in range(4):
        if epoch == 1:
            for group in optimizer.param_groups:
                group["initial_lr"] = 0.02
            rates = [0.02] * len(optimizer.param_groups)
            schedule = SWALR(optimizer, rates, anneal_epochs=10, last_epoch=4)
            mean = values(model)
        if epoch > 1:
            now = values(model)
            mean = {key: one + (now[key] - one) / epoch for key, one in mean.items()}
        for batch in batches():
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
        schedule.step()
    return mean
