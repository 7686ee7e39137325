"""Embedding tables under TorchOptimizer, with rules made for them."""

import copy
import io
from typing import Any

import torch
from torch import Tensor

from functional_optim import Optimizer, State, TorchOptimizer, ftrl, rowwise_adagrad
from functional_optim.kernels import ExecutorName
from tests.choices import each

from .support import assert_same_tensors, noise, same_bits

RULES: dict[str, Optimizer] = {
    "rowwise_adagrad": rowwise_adagrad(0.1),
    "rowwise_adagrad decays": rowwise_adagrad(0.1, weight_decay=0.2),
    "ftrl": ftrl(0.1, l1=0.05, l2=0.1),
}
EXECUTORS: tuple[ExecutorName, ...] = ("reference", "blocked")
ROWS, WIDTH = 12, 4
BAGS = [
    ([1, 4, 4, 0], [0, 2]),
    ([7], [0]),
    ([4, 1, 1, 9, 0, 4], [0, 1, 4]),
    ([2, 2, 3], [0, 1]),
]
"""Indices of rows, some of them repeated, and the offsets at which bags begin."""
MISSING = [5, 6, 8, 10, 11]


class Model(torch.nn.Module):
    """Embedding bags, and a dense layer above them."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.table = torch.nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse)
        self.top = torch.nn.Linear(WIDTH, 1)
        with torch.no_grad():
            for seed, param in enumerate(self.parameters()):
                param.copy_(noise(seed, *param.shape))

    def backward(self, number: int) -> None:
        self.zero_grad()
        indices, offsets = (torch.tensor(one) for one in BAGS[number % len(BAGS)])
        self.top(self.table(indices, offsets)).square().sum().backward()


def run(model: Model, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        model.backward(number)
        optimizer.step()


def by_update(optimizer: Optimizer, steps: range) -> tuple[dict[str, Tensor], State]:
    """Return parameters and state after pure updates with the gradients of the model."""
    model = Model(sparse=True)
    named = dict(model.named_parameters())
    params: Any = {name: one.detach().clone() for name, one in named.items()}
    state = optimizer.init(params)
    for number in steps:
        with torch.no_grad():
            for name, one in named.items():
                one.copy_(params[name])
        model.backward(number)
        grads = {name: one.grad for name, one in named.items()}
        params, state = optimizer.update(params, grads, state)
    return params, state


@each(name=RULES, executor=EXECUTORS)
def test_bags_are_trained_by_rows(name: str, executor: ExecutorName) -> None:
    """Steps have the bits of the pure update, and rows in no bag stay unchanged."""
    optimizer, model = RULES[name].using(executor=executor), Model(sparse=True)
    start = model.table.weight.detach().clone()
    front = TorchOptimizer(model.parameters(), optimizer)
    run(model, front, range(6))
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.is_sparse
    params, state = by_update(optimizer, range(6))
    assert_same_tensors(list(model.parameters()), list(params.values()))
    kept = state.leaves["table.weight"].stages[-1]._asdict()
    for field, value in kept.items():
        assert same_bits(front.state[model.table.weight][field], value)
    assert same_bits(model.table.weight[MISSING], start[MISSING])
    assert not torch.equal(model.table.weight[:5], start[:5])


@each(name=["rowwise_adagrad", "ftrl"])
def test_a_dense_gradient_does_the_same(name: str) -> None:
    """A dense gradient gives the same table, up to the order of sums within a row."""
    models = [Model(sparse=sparse) for sparse in (True, False)]
    for model in models:
        run(model, TorchOptimizer(model.parameters(), RULES[name]), range(6))
    sparse, dense = (model.table.weight for model in models)
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-6)


@each(name=RULES, sparse=[True, False])
def test_a_checkpoint_is_continued(name: str, sparse: bool) -> None:
    """A run continues from a file that torch.load reads with its safe defaults."""
    whole, model = Model(sparse=sparse), Model(sparse=sparse)
    run(whole, TorchOptimizer(whole.parameters(), RULES[name]), range(7))
    front = TorchOptimizer(model.parameters(), RULES[name])
    run(model, front, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": front.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    again = Model(sparse=sparse)
    again.load_state_dict(saved["model"])
    resumed = TorchOptimizer(again.parameters(), RULES[name])
    resumed.load_state_dict(copy.deepcopy(saved["optimizer"]))
    run(again, resumed, range(3, 7))
    assert_same_tensors(list(again.parameters()), list(whole.parameters()))
