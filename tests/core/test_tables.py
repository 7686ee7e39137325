"""Rules for embedding tables, compared with their papers' pseudo code, and their rows."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, State, adagrad, chain, clip_by_value, ftrl, rowwise_adagrad
from functional_optim.kernels import ExecutorName
from tests.choices import each_value

from ..choices import case, pairs
from .support import IN_PYTHON, Frozen, assert_differ, assert_same, noise, same_bits, step, steps

COUNT, ROWS, WIDTH = 12, 9, 5
Example = tuple[list[float], float]
"""Features, most of them 0, and a label."""


def examples(count: int = 60) -> list[Example]:
    features = noise(7, count, COUNT)
    features[noise(8, count, COUNT) > 0.0] = 0.0
    labels = (features @ noise(9, COUNT) + 0.3 * noise(10, count) > 0).double()
    return list(zip(features.tolist(), labels.tolist(), strict=True))


def predicted(weights: list[float], features: list[float]) -> float:
    logit = sum(w * x for w, x in zip(weights, features, strict=True))
    return 1.0 / (1.0 + math.exp(-logit))


class OnPaper:
    """Algorithm 1 of McMahan et al. 2013, line by line, one feature after the other."""

    def __init__(self, alpha: float, beta: float, l1: float, l2: float) -> None:
        self.alpha, self.beta, self.l1, self.l2 = alpha, beta, l1, l2
        self.z, self.n = [0.0] * COUNT, [0.0] * COUNT

    def weight(self, i: int) -> float:
        if abs(self.z[i]) <= self.l1:
            return 0.0
        rate = (self.beta + math.sqrt(self.n[i])) / self.alpha + self.l2
        return -(self.z[i] - math.copysign(self.l1, self.z[i])) / rate

    def learn(self, features: list[float], label: float) -> None:
        weights = [self.weight(i) for i in range(COUNT)]
        p = predicted(weights, features)
        for i in (i for i in range(COUNT) if features[i] != 0.0):
            g = (p - label) * features[i]
            sigma = (math.sqrt(self.n[i] + g * g) - math.sqrt(self.n[i])) / self.alpha
            self.z[i] += g - sigma * weights[i]
            self.n[i] += g * g


def test_ftrl_is_the_algorithm() -> None:
    """Both train a logistic regression, each with its predictions."""
    for hyper in pairs(lr=[0.1, 2.0], beta=[0.0, 1.0], l1=[0.0, 4.0], l2=[0.0, 0.4]):
        paper = OnPaper(hyper["lr"], hyper["beta"], hyper["l1"], hyper["l2"])
        optimizer, param = ftrl(**hyper), torch.zeros(COUNT).double()
        state = optimizer.init(param)
        for features, label in examples():
            paper.learn(features, label)
            error = predicted(param.tolist(), features) - label
            grad = error * torch.tensor(features, dtype=torch.float64)
            param, state = optimizer.update(param, grad, state)
        weights = torch.tensor([paper.weight(i) for i in range(COUNT)], dtype=torch.float64)
        near: Any = {"rtol": 1e-10, "atol": 1e-13}
        with case(**hyper):
            kept = state.leaves.stages[-1]
            torch.testing.assert_close(param, weights, **near)
            torch.testing.assert_close(kept.z / hyper["lr"], weights.new_tensor(paper.z), **near)
            torch.testing.assert_close(kept.n, weights.new_tensor(paper.n), **near)
            assert torch.equal(param == 0, weights == 0)
            assert bool(param.all()) == (hyper["l1"] == 0.0)


def test_ftrl_makes_weights_exactly_0() -> None:
    """A gradient of 0 changes no weight, not even an infinite one."""
    start = torch.tensor([0.0, 3.0, -3.0, -0.0, torch.inf, 2.0])
    grad = torch.tensor([0.5, -0.1, 0.1, 0.0, 0.0, -0.0])
    for beta in (0.0, 1.0):
        found = step(ftrl(1.0, beta, l1=10.0), start, grad)
        with case(beta=beta):
            assert same_bits(found, torch.tensor([0.0, 0.0, 0.0, -0.0, torch.inf, 2.0]))


def test_without_penalties_ftrl_is_descent_at_a_rate_that_falls() -> None:
    """The rate can change between steps, and lr 0 moves nothing."""
    rates = [0.5, 0.5, 0.0, 0.1, 2.0]
    optimizer, param = ftrl(), torch.zeros(4).double()
    state, total, want = optimizer.init(param), torch.zeros(4).double(), param
    for index, rate in enumerate(rates):
        grad = noise(index, 4)
        param, state = optimizer.update(param, grad, state, lr=rate)
        total = total + grad**2
        want = want - rate * grad / (1.0 + total.sqrt())
        torch.testing.assert_close(param, want, rtol=1e-13, atol=1e-15)


Table = list[list[float]]


def rowwise(p: Table, grads: list[Table], lr: float, eps: float, decay: float) -> Any:
    """Return parameters and momentum by FBGEMM's EXACT_ROWWISE_ADAGRAD, row by row."""
    momentum = [0.0] * len(p)
    for grad in grads:
        for i, row in enumerate(grad):
            g = [a + decay * x for a, x in zip(row, p[i], strict=True)]
            momentum[i] += sum(a * a for a in g) / len(g)
            multiplier = lr / (math.sqrt(momentum[i]) + eps)
            p[i] = [x - multiplier * a for x, a in zip(p[i], g, strict=True)]
    return p, momentum


@each_value(shape=[(ROWS, WIDTH), (3, 2, 4), (4, 1), (6,), ()], decay=[0.0, 0.2], eps=[1e-8, 0.1])
def test_rowwise_adagrad_is_the_formula(shape: tuple[int, ...], decay: float, eps: float) -> None:
    start, grads = noise(0, *shape), [noise(seed, *shape) for seed in (1, 2, 3)]
    rows = start.shape[0] if start.dim() else 1
    tables = [one.reshape(rows, -1).tolist() for one in (start, *grads)]
    weights, momentum = rowwise(tables[0], tables[1:], 0.1, eps, decay)
    optimizer = rowwise_adagrad(0.1, eps, decay)
    param, state = steps(optimizer, start, lambda index: grads[index], 3)
    total = state.leaves.stages[-1].sum
    assert total.shape == shape[:1]
    want = start.new_tensor(weights).reshape(shape)
    torch.testing.assert_close(param - start, want - start, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        total, want.new_tensor(momentum).reshape(shape[:1]), rtol=1e-13, atol=0
    )


def test_rowwise_adagrad_of_one_dimension_is_adagrad() -> None:
    start = noise(0, 40)
    ends = [
        steps(make, start, lambda index: noise(index + 1, 40))
        for make in (rowwise_adagrad(0.1, 1e-3), adagrad(0.1, eps=1e-3))
    ]
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-14, atol=0)


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
