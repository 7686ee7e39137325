"""Models in flat buffers are saved like any other model."""

import io
import pickle
from itertools import product
from pathlib import Path

import accelerate
import safetensors.torch
import torch
from torch import Tensor, nn

from functional_optim import BoundOptimizer, TorchOptimizer, adamw
from functional_optim.plan.flat.layout import FlatLayout

from ..choices import case
from ..tensors import assert_same
from .support import of_module

SLACK = 1.1
"""Factor that leaves room for names, zip entries and padding."""


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def model_of() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


def bound(model: nn.Module) -> BoundOptimizer:
    return adamw().bind(dict(model.named_parameters()))


PUT_IN_BUFFERS = (bound, of_module)


def test_a_whole_model_takes_what_it_took() -> None:
    """A saved model is no larger than before, so each parameter is written once."""
    for put_in_buffers in PUT_IN_BUFFERS:
        model = model_of()
        before = saved(model.state_dict())
        put_in_buffers(model)
        after = saved(model.state_dict())
        with case(by=put_in_buffers):
            assert len(after) < SLACK * len(before)
            assert_same(torch.load(io.BytesIO(after)), model.state_dict())


def test_a_part_takes_what_it_took() -> None:
    """Fault 20: a part of a model wrote the whole buffer; ``pickle`` wrote it once per tensor."""
    for put_in_buffers in PUT_IN_BUFFERS:
        model = model_of()
        alone = len(saved(model[0].state_dict()))
        layout = put_in_buffers(model)
        part = model[0].state_dict()
        with case(by=put_in_buffers):
            assert len(saved(part)) < SLACK * alone
            assert len(pickle.dumps(part)) < SLACK * alone
            assert_same(pickle.loads(pickle.dumps(part)), part)
            if isinstance(layout, FlatLayout):
                layout.undo()
                assert_same(model[0].state_dict(), part)


def through_safetensors(model: nn.Module, path: Path) -> dict[str, Tensor]:
    safetensors.torch.save_file(model.state_dict(), path / "file.safetensors")
    safetensors.torch.save_model(model, str(path / "model.safetensors"))
    assert (path / "file.safetensors").stat().st_size == (path / "model.safetensors").stat().st_size
    return safetensors.torch.load_file(path / "model.safetensors")


def through_accelerate(model: nn.Module, path: Path) -> dict[str, Tensor]:
    accelerate.Accelerator(cpu=True).save_model(model, path)
    return safetensors.torch.load_file(path / "model.safetensors")


def test_safetensors_and_accelerate_write_every_parameter(tmp_path: Path) -> None:
    """Fault 20: only one of four tensors was written, or ``save_model`` raised."""
    for n, (put_in_buffers, save) in enumerate(
        product(PUT_IN_BUFFERS, (through_safetensors, through_accelerate))
    ):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
        kept = put_in_buffers(model)
        (tmp_path / str(n)).mkdir()
        with case(by=put_in_buffers, save=save):
            found = save(model, tmp_path / str(n))
            assert_same(found, {name: model.state_dict()[name] for name in found})
            assert len(found) == 4
        del kept


def test_a_run_that_accelerate_saved_goes_on(tmp_path: Path) -> None:
    """Fault 20: ``save_state`` raised. Another model that loads the state continues bit for bit."""
    layouts: list[FlatLayout] = []

    def prepared() -> tuple[nn.Module, torch.optim.Optimizer, accelerate.Accelerator]:
        own = accelerate.Accelerator(cpu=True)
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4))
        layouts.append(of_module(model))
        optimizer = TorchOptimizer(model.named_parameters(), adamw(0.1))
        model, optimizer = own.prepare(model, optimizer)
        return model, optimizer, own

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()

    model, optimizer, own = prepared()
    trained(model, optimizer, 0)
    own.save_state(str(tmp_path))
    other, loaded, its = prepared()
    its.load_state(str(tmp_path))
    for one in ((model, optimizer), (other, loaded)):
        trained(*one, seed=1)
    for layout in layouts:
        layout.check()
    assert_same(other.state_dict(), model.state_dict())
