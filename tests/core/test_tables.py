"""Rules for embedding tables: exact zeros, rows of any shape, and steps by rows."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, State, chain, clip_by_value, ftrl, rowwise_adagrad
from functional_optim.kernels import ExecutorName
from tests.agreement.formulas_first import rowwise_adagrad_formula
from tests.choices import each_value

from ..choices import case
from .support import IN_PYTHON, Frozen, assert_differ, assert_same, noise, same_bits, step, steps

ROWS, WIDTH = 9, 5


def test_ftrl_makes_weights_exactly_0() -> None:
    """A gradient of 0 changes no weight, not even an infinite one."""
    start = torch.tensor([0.0, 3.0, -3.0, -0.0, torch.inf, 2.0])
    grad = torch.tensor([0.5, -0.1, 0.1, 0.0, 0.0, -0.0])
    for beta in (0.0, 1.0):
        found = step(ftrl(1.0, beta, l1=10.0), start, grad)
        with case(beta=beta):
            assert same_bits(found, torch.tensor([0.0, 0.0, 0.0, -0.0, torch.inf, 2.0]))


@each_value(shape=[(ROWS, WIDTH), (3, 2, 4), (4, 1), (6,), ()], decay=[0.0, 0.2], eps=[1e-8, 0.1])
def test_rowwise_adagrad_is_the_formula(shape: tuple[int, ...], decay: float, eps: float) -> None:
    start, grads = noise(0, *shape), [noise(seed, *shape) for seed in (1, 2, 3)]
    width = start[0].numel() if start.dim() else 1
    values, *lists = (one.flatten().tolist() for one in (start, *grads))
    weights, momentum = rowwise_adagrad_formula(
        values, lists, width=width, lr=0.1, eps=eps, weight_decay=decay
    )
    optimizer = rowwise_adagrad(0.1, eps, decay)
    param, state = steps(optimizer, start, lambda index: grads[index], 3)
    total = state.leaves.stages[-1].sum
    assert total.shape == shape[:1]
    want = start.new_tensor(weights).reshape(shape)
    torch.testing.assert_close(param - start, want - start, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        total, want.new_tensor(momentum).reshape(shape[:1]), rtol=1e-13, atol=0
    )


RULES: dict[str, Optimizer] = {
    "rowwise_adagrad": rowwise_adagrad(0.1),
    "rowwise_adagrad decays": rowwise_adagrad(0.1, weight_decay=0.3, maximize=True),
    "rowwise_adagrad clipped": chain(clip_by_value(0.7), rowwise_adagrad(0.1)),
    "ftrl": ftrl(0.1),
    "ftrl l1": ftrl(0.5, l1=0.4, l2=0.2, maximize=True),
}
SHAPES = [(ROWS, WIDTH), (ROWS, 1), (ROWS, 3, 2), (ROWS, 130), (ROWS,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def stored(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a gradient that stores some of the first five rows, duplicated or a single one."""
    rows = [[1, 4, 1], [3], [4, 0, 2, 2, 1]][seed % 3]
    values = noise(seed, len(rows), *shape[1:], dtype=dtype)
    return torch.sparse_coo_tensor([rows], values, shape, check_invariants=True)


def with_rows(optimizer: Optimizer, param: Tensor, grad: Tensor, state: State) -> Any:
    """Step the stored rows as a dense table, and put them back."""
    grad = grad.coalesce()
    (rows,) = grad.indices()
    leaf = state.leaves

    def picked(value: Any) -> Any:
        return type(value)(*(one[rows] for one in value))

    few = leaf._replace(stages=tuple(map(picked, leaf.stages)))
    new, made = optimizer.update(param[rows], grad.values(), State(few))

    def put(old: Any, value: Any) -> Any:
        pair = zip(old, value, strict=True)
        return type(old)(*(one.index_put((rows,), other) for one, other in pair))

    stages = tuple(map(put, leaf.stages, made.leaves.stages))
    return param.index_put((rows,), new), State(made.leaves._replace(stages=stages))


def trained(optimizer: Optimizer, start: Tensor) -> Iterator[Any]:
    """Yield parameter, gradient and state before each of three steps by rows."""
    param, state = start, optimizer.init(start)
    for seed in range(3):
        grad = stored(seed, tuple(start.shape), start.dtype)
        yield param, grad, state
        param, state = optimizer.update(param, grad, state)


@each_value(name=list(RULES), shape=SHAPES, dtype=DTYPES, executor=IN_PYTHON)
def test_a_step_by_rows_is_the_dense_step_of_these_rows(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, executor: ExecutorName
) -> None:
    optimizer, start = RULES[name].using(executor=executor), noise(0, *shape, dtype=dtype)
    written, written_state = start.clone(), optimizer.init(start)
    for param, grad, state in trained(optimizer, start):
        made = optimizer.update(param, grad, state)
        assert_same(made, with_rows(optimizer, param, grad, state))
        optimizer.update_(written, grad, written_state)
        assert_same((written, written_state), made)
        if "decays" not in name:
            assert_same(made, optimizer.update(param, grad.to_dense(), state))
        assert_differ(made[0][:5], param[:5])


@each_value(name=list(RULES), dtype=[torch.float32, torch.bfloat16])
def test_other_rows_are_neither_read_nor_written(name: str, dtype: torch.dtype) -> None:
    """Rows that are not stored keep NaN, infinities and signed zeros, and affect no other row."""
    optimizer, start = RULES[name], noise(0, ROWS, WIDTH, dtype=dtype)
    odd = start.clone()
    odd[5], odd[6], odd[7] = torch.nan, -0.0, torch.inf
    params = odd, odd.clone()
    states = tuple(optimizer.init(odd) for _ in params)
    for state in states:
        for one in state.leaves.stages[-1]:
            one[5], one[6] = torch.nan, -0.0
    grad = stored(0, (ROWS, WIDTH), dtype)
    made = optimizer.update(params[0], grad, states[0])
    optimizer.update_(params[1], grad, states[1])
    want, _ = optimizer.update(start, grad, optimizer.init(start))
    for param, state in (made, (params[1], states[1])):
        assert same_bits(param[:5], want[:5])
        assert same_bits(param[5:], odd[5:])
        for one in state.leaves.stages[-1]:
            assert bool(one[5].isnan().all())
            assert bool(one[6].signbit().all())
            assert bool(one[:5].isfinite().all())


def test_a_gradient_that_stores_parts_of_rows_is_refused_where_rows_are_needed() -> None:
    start, cells = noise(0, ROWS, WIDTH), [[1, 1, 4], [2, 3, 0]]
    grad = torch.sparse_coo_tensor(cells, noise(1, 3), (ROWS, WIDTH), check_invariants=True)
    optimizer = rowwise_adagrad()
    params, state = start.clone(), optimizer.init(start)
    frozen = Frozen(params, state)
    for way in (optimizer.update, optimizer.update_):
        with case(way=way), pytest.raises(RuntimeError, match=r"'<root>' has 2 sparse.*to_dense"):
            way(params, grad, state)
        frozen.assert_untouched()
    assert_same(step(ftrl(), start, grad), step(ftrl(), start, grad.to_dense()))
