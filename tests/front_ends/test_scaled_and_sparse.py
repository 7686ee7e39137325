"""GradScaler, and the sparse gradients of embeddings, under TorchOptimizer."""

from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, as_functional_optim, chain, clip_by_value, sgd

from .support import CASES, Case, Twins, assert_same_tensors, params_of, same_bits, set_grads, twins

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@every_case
def test_a_grad_scaler_skips_the_step_with_an_inf(case: Case) -> None:
    pair = twins(case)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    for scaler in scalers:
        scaler.scale(torch.zeros(()))
    for seed in range(5):
        before = repr(pair.ours.state)
        start = [param.detach().clone() for param in params_of(pair.ours)]
        for optimizer, scaler in zip((pair.ours, pair.theirs), scalers, strict=True):
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
            assert repr(pair.ours.state) == before
    assert scalers[0].state_dict() == scalers[1].state_dict()
    assert int(next(iter(pair.ours.state.values()))["step"]) == 4


def test_a_grad_scaler_returns_what_the_step_returns() -> None:
    pair = twins(CASES["AdamW"])
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
    chain = as_functional_optim(cls, **options).using(executor=executor)
    theirs = cls(tables[1].parameters(), foreach=False, **options)
    return Twins(theirs, TorchOptimizer(tables[0].parameters(), chain)), tables


def sparse_step(pair: Twins, tables: list[torch.nn.Embedding], rows: list[int]) -> None:
    for table, optimizer in zip(tables, (pair.ours, pair.theirs), strict=True):
        optimizer.zero_grad()
        seen = table(torch.tensor(rows))
        seen.mul(torch.arange(float(seen.numel())).reshape(seen.shape).cos()).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        with torch.sparse.check_sparse_tensor_invariants():  # torch's Adagrad warns without
            optimizer.step()


SPARSE = {name: CASES[name] for name in CASES if name.startswith("SGD") and "decay" not in name}


@pytest.mark.parametrize("executor", ["reference", "script"])
@pytest.mark.parametrize("case", SPARSE.values(), ids=SPARSE)
def test_sgd_on_rows_that_come_once(case: Case, executor: str) -> None:
    pair, tables = embeddings(case, executor=executor)
    for rows in ([1, 4], [4, 0, 6], [2]):
        sparse_step(pair, tables, rows)
        assert same_bits(tables[0].weight, tables[1].weight)


CLOSE: dict[str, Case] = {
    **SPARSE,
    "SGD maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adagrad accumulated": (
        torch.optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.2, "initial_accumulator_value": 0.3},
    ),
}


@pytest.mark.parametrize("executor", ["reference", "script"])
@pytest.mark.parametrize("case", CLOSE.values(), ids=CLOSE)
def test_rows_that_come_several_times(case: Case, executor: str) -> None:
    # torch adds the entries of one row one by one, or in another order: equal up to rounding.
    pair, tables = embeddings(case, executor=executor)
    before = tables[0].weight.detach().clone()
    for rows in ([1, 4, 1, 1], [4, 0, 6, 4], [2]):
        sparse_step(pair, tables, rows)
        torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-6, atol=1e-6)
    untouched = [3, 5]
    assert same_bits(tables[0].weight[untouched], before[untouched])


REFUSED = {
    name: case
    for name, case in CASES.items()
    if case[0] not in (torch.optim.SGD, torch.optim.Adagrad) or "weight_decay" in case[1]
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_where_torch_refuses_sparse_gradients_nothing_is_changed(case: Case) -> None:
    pair, tables = embeddings(case)
    dense = torch.nn.Parameter(torch.ones(2))
    pair.ours.add_param_group({"params": [dense]})
    dense.grad = torch.ones(2)
    before = tables[0].weight.detach().clone()
    for table, optimizer in zip(tables, (pair.ours, pair.theirs), strict=True):
        table(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(RuntimeError):
            optimizer.step()
    assert same_bits(tables[0].weight, before)
    assert torch.equal(dense, torch.ones(2))
    assert int(pair.ours.state[dense]["step"]) == 0


def test_sparse_and_dense_parameters_together() -> None:
    pair, tables = embeddings(CASES["SGD momentum"])
    extra = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    for optimizer, param in zip((pair.ours, pair.theirs), extra, strict=True):
        optimizer.add_param_group({"params": [param], "lr": 0.5})
    for rows in ([1, 4], [4, 0]):
        for param in extra:
            param.grad = torch.ones(2)
        for optimizer in (pair.ours, pair.theirs):
            optimizer.register_step_pre_hook(
                lambda one, *_: one.param_groups[1]["params"][0].__setattr__("grad", torch.ones(2))
            )
        sparse_step(pair, tables, rows)
        assert same_bits(extra[0], extra[1])
        torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_with_a_sparse_buffer_of_torch_s_is_continued() -> None:
    pair, tables = embeddings(CASES["SGD momentum"])
    sparse_step(pair, tables, [1, 4])
    assert pair.theirs.state[tables[1].weight]["momentum_buffer"].is_sparse
    pair.ours.load_state_dict(pair.theirs.state_dict())
    sparse_step(pair, tables, [4, 2])
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-6, atol=1e-6)


def test_a_transform_before_sparse_rows() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    optimizer = TorchOptimizer(table.parameters(), chain(clip_by_value(0.5), sgd(1.0)))
    table(torch.tensor([1, 1, 2])).sum().backward()
    optimizer.step()
    moved = (before - table.weight).detach()
    torch.testing.assert_close(moved[1:3], torch.full((2, 2), 0.5))
    assert not moved[[0, 3]].any()
