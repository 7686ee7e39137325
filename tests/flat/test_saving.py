"""What torch.save writes of a model in flat buffers: each buffer once, and how a part is saved."""

import inspect
import io
import pickle
from pathlib import Path

import torch
from torch import nn

from functional_optim import Optimizer, TorchOptimizer, adamw

from ..choices import case
from ..tensors import assert_same
from .support import of_module

README = Path(__file__).parents[2] / "README.md"
SLACK = 1.1
"""Names, zip entries and padding."""


def saved(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def model_of() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])


def bound(model: nn.Module) -> None:
    adamw().bind(dict(model.named_parameters()))


def flat(model: nn.Module) -> None:
    TorchOptimizer(model.parameters(), adamw(), flat=True)


PUT_IN_BUFFERS = (bound, flat, of_module)


def test_a_whole_model_takes_what_it_took() -> None:
    """Each buffer is written once, not once for each tensor."""
    for put_in_buffers in PUT_IN_BUFFERS:
        model = model_of()
        before = saved(model.state_dict())
        put_in_buffers(model)
        after = saved(model.state_dict())
        with case(by=put_in_buffers):
            assert len(after) < SLACK * len(before)
            assert_same(torch.load(io.BytesIO(after)), model.state_dict())


def test_a_part_is_saved_by_clones() -> None:
    """Else it takes the whole buffer; the docs say so, and the way."""
    for put_in_buffers in PUT_IN_BUFFERS:
        model = model_of()
        alone = len(saved(model[0].state_dict()))
        layout = put_in_buffers(model)
        part = model[0].state_dict()
        with case(by=put_in_buffers):
            assert len(saved(part)) > 6 * alone
            assert len(pickle.dumps(part)) > 12 * alone
            cloned = {name: tensor.clone() for name, tensor in part.items()}
            assert len(saved(cloned)) < SLACK * alone
            if layout is not None:
                layout.undo()
                assert len(saved(model[0].state_dict())) < SLACK * alone


def test_the_docs_say_so() -> None:
    """Where one looks who binds a model."""
    assert "``clone()``" in (inspect.getdoc(Optimizer.bind) or "")
    assert "tensor.clone() for name, tensor in part.state_dict().items()" in README.read_text(
        "utf-8"
    )
