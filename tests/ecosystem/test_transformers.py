"""Tests of Hugging Face Trainer: trained, saved and resumed runs."""

from pathlib import Path
from typing import Any

import pytest

from functional_optim import TorchOptimizer
from tests.choices import each

from ..tensors import assert_same
from .support import OPTIMIZERS, QUIET, TORCH, Model, Samples, optimizer_of, schedule_of, values

pytestmark = QUIET

STEPS = 8


def trainer_of(model: Any, folder: Path, optimizer: Any, schedule: Any = None, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments  # takes seconds

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=3,
        save_strategy="steps",
        per_device_train_batch_size=4,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=3,
        **more,
    )
    return Trainer(model, arguments, train_dataset=Samples(), optimizers=(optimizer, schedule))


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return lambda: tmp_path_factory.mktemp("trainer")


@each(name=TORCH, more=[{}, {"gradient_accumulation_steps": 2}])
def test_it_is_torchs_optimizer(name: str, more: dict[str, Any], folder: Any) -> None:
    """The bits are those of torch's optimizer, with the schedule that Trainer makes."""
    results = []
    for made in (
        lambda model: optimizer_of(name, model),
        lambda model: TORCH[name](model.parameters()),
    ):
        model = Model()
        trainer_of(model, folder(), made(model), **more).train()
        results.append(values(model))
    assert_same(*results)


@each(name=OPTIMIZERS, scheduled=[False, True])
def test_a_run_is_resumed(name: str, scheduled: bool, folder: Any) -> None:
    """A run with any optimizer continues from a checkpoint of Trainer, bit for bit."""
    place, results = folder(), []
    for resume in (None, str(place / "checkpoint-3")):
        model = Model()
        optimizer = optimizer_of(name, model)
        trainer = trainer_of(model, place, optimizer, schedule_of(optimizer) if scheduled else None)
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == STEPS
        assert model.calls == (STEPS - 3 if resume else STEPS)
        results.append((values(model), optimizer.state_dict()["state"]))
    assert_same(results[1][0], results[0][0])
    assert_same(results[1][1], results[0][1])


def test_a_class_and_its_arguments(folder: Any) -> None:
    """With ``optimizer_cls_and_kwargs``, Trainer makes the groups and sets the rates."""
    from transformers import Trainer

    model, other = Model(), Model()
    made = Trainer(
        model,
        trainer_of(model, folder(), None).args,
        train_dataset=Samples(),
        optimizer_cls_and_kwargs=(TorchOptimizer, {"optimizer": OPTIMIZERS["adamw"]()}),
    )
    made.train()
    assert isinstance(made.optimizer.optimizer, TorchOptimizer)
    decays = [group["weight_decay"] for group in made.optimizer.param_groups]
    assert decays == [0.0, 0.0]
    theirs = TORCH["adamw"]([{"params": other.parameters(), "weight_decay": 0.0}])
    trainer_of(other, folder(), theirs).train()
    assert_same(values(model), values(other))
