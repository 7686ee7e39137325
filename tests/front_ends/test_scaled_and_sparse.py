"""GradScaler and sparse gradients of embeddings under TorchOptimizer."""

import copy
from typing import Any

import torch

from functional_optim import TorchOptimizer, as_functional_optim, chain, clip_by_value, sgd
from tests.choices import each

from .support import (
    CASES,
    ONE_EACH,
    Case,
    Twins,
    assert_same_tensors,
    assert_same_written,
    params_of,
    same_bits,
    set_grads,
    twins,
    values_of,
)


@each(name=ONE_EACH)
def test_a_grad_scaler_skips_the_step_with_an_inf(name: str) -> None:
    pair = twins(name)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.zeros(()))
    for seed in range(4):
        before, start = copy.deepcopy(pair.ours.state_dict()), values_of(pair.ours)
        for optimizer, scaler in zip(pair.both, scalers, strict=True):
            set_grads(params_of(optimizer), seed)
            grads = [param.grad for param in params_of(optimizer)]
            torch._foreach_mul_(grads, scaler.get_scale())
            if seed == 2:
                grads[1][0] = torch.inf
            if seed % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        pair.assert_same()
        if seed == 2:
            assert_same_tensors(params_of(pair.ours), start)
            assert_same_written(pair.ours.state_dict(), before)
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert int(next(iter(pair.ours.state.values()))["step"]) == 3


def test_a_grad_scaler_returns_what_the_step_returns() -> None:
    pair = twins("AdamW")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.zeros(()))
    set_grads(params_of(pair.ours), 0)
    assert scaler.step(pair.ours) is None


def embeddings(
    case: Case, *, executor: Any = "reference"
) -> tuple[Twins, list[torch.nn.Embedding]]:
    tables = []
    for _ in range(2):
        table = torch.nn.Embedding(7, 3, sparse=True)
        with torch.no_grad():
            table.weight.copy_(torch.arange(21.0).reshape(7, 3).sin())
        tables.append(table)
    cls, options = case
    made: Any = cls
    chain = as_functional_optim(cls, **options).using(executor=executor)
    theirs = made(tables[1].parameters(), foreach=False, **options)
    return Twins(theirs, TorchOptimizer(tables[0].parameters(), chain)), tables


def sparse_step(pair: Twins, tables: list[torch.nn.Embedding], rows: list[int]) -> None:
    for table, optimizer in zip(tables, pair.both, strict=True):
        optimizer.zero_grad()
        seen = table(torch.tensor(rows))
        seen.mul(torch.arange(float(seen.numel())).reshape(seen.shape).cos()).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        with torch.sparse.check_sparse_tensor_invariants():  # else torch's Adagrad warns
            optimizer.step()


def assert_close(tables: list[torch.nn.Embedding]) -> None:
    """Check equality up to rounding, because torch adds the entries of a row in another order."""
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-6, atol=1e-6)


SPARSE = {name: CASES[name] for name in CASES if name.startswith("SGD") and "decay" not in name}
CLOSE: dict[str, Case] = {
    **SPARSE,
    "SGD maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adagrad accumulated": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.3},
    ),
}


@each(name=CLOSE)
def test_rows_are_stepped_as_torch_steps_them(name: str) -> None:
    """SGD has torch's bits if no row repeats, and rows without a gradient stay unchanged."""
    pair, tables = embeddings(CLOSE[name])
    before = tables[0].weight.detach().clone()
    for rows in ([1, 4], [4, 0, 6], [2]):
        sparse_step(pair, tables, rows)
        if name in SPARSE:
            assert same_bits(tables[0].weight, tables[1].weight)
    for rows in ([1, 4, 1, 1], [4, 0, 6, 4]):
        sparse_step(pair, tables, rows)
        assert_close(tables)
    assert same_bits(tables[0].weight[[3, 5]], before[[3, 5]])


def test_sparse_and_dense_parameters_together() -> None:
    pair, tables = embeddings(CASES["SGD momentum"])
    extra = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for optimizer, param in zip(pair.both, extra, strict=True):
        optimizer.add_param_group({"params": [param], "lr": 0.5})
        optimizer.register_step_pre_hook(
            lambda one, *_: setattr(one.param_groups[1]["params"][0], "grad", torch.ones(2))
        )
    for rows in ([1, 4], [4, 0]):
        sparse_step(pair, tables, rows)
        assert same_bits(extra[0], extra[1])
        assert_close(tables)


def test_a_checkpoint_with_a_sparse_buffer_of_torch_s_is_continued() -> None:
    pair, tables = embeddings(CASES["SGD momentum"])
    sparse_step(pair, tables, [1, 4])
    assert pair.theirs.state[tables[1].weight]["momentum_buffer"].is_sparse
    pair.ours.load_state_dict(pair.theirs.state_dict())
    sparse_step(pair, tables, [4, 2])
    assert_close(tables)


def test_a_transform_before_sparse_rows() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = TorchOptimizer(table.parameters(), chain(clip_by_value(0.5), sgd(1.0)))
    table(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    moved = (before - table.weight).detach()
    torch.testing.assert_close(moved[1:3], torch.full((2, 2), 0.5))
    assert not moved[[0, 3]].any()


@each(kinds=["rows, dense", "dense, rows", "rows, rows"])
def test_parameters_that_share_memory_are_stepped_one_after_the_other(kinds: str) -> None:
    """A step reads rows after the earlier parameters in the same memory were stepped."""
    params, optimizers = [], []
    for make in (lambda own: TorchOptimizer(own, sgd(1.0)), lambda own: torch.optim.SGD(own, 1.0)):
        memory = torch.arange(6.0).view(3, 2)
        params.append([torch.nn.Parameter(memory), torch.nn.Parameter(memory)])
        optimizers.append(make(params[-1]))
    for step in range(2):
        for own, optimizer in zip(params, optimizers, strict=True):
            for place, kind in enumerate(kinds.split(", ")):
                grad = torch.full((3, 2), 1.0 + place + step)
                rows = torch.sparse_coo_tensor([[0]], grad[:1], (3, 2), check_invariants=True)
                own[place].grad = rows if kind == "rows" else grad
            optimizer.step()
        assert same_bits(params[0][0], params[1][0])
