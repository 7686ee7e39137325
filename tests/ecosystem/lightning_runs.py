"""Runs with Lightning. Its import takes seconds, so only a fixture imports this module."""

import logging
from pathlib import Path
from typing import Any

import lightning

from .support import Model, batches, schedule_of

for name_ in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name_).setLevel(logging.ERROR)


class Trained(lightning.LightningModule):
    """Module with a model, an optimizer and a schedule, which advances by steps or by epochs."""

    def __init__(self, optimizer: Any, *, manual: bool = False, every: str = "step") -> None:
        super().__init__()
        self.model = Model()
        self.automatic_optimization = not manual
        self._optimizer, self._every = optimizer, every

    def configure_optimizers(self) -> Any:
        made = self._optimizer(self.model)
        schedule = {"scheduler": schedule_of(made), "interval": self._every}
        return {"optimizer": made, "lr_scheduler": schedule}

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.model(**batch)["loss"]
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()
        return None


def fit(module: Any, epochs: int, folder: Path, *, resume: Any = None, **more: Any) -> Any:
    options: dict[str, Any] = {"logger": False, **more}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module, batches(), ckpt_path=resume)
    return trainer
