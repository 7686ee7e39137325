"""Leaves that are stepped in passes have the reference's bits, for all shapes and numbers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    TorchOptimizer,
    Transform,
    accumulate,
    adamw,
    chain,
    clip_by_block_rms,
    clip_by_global_norm,
    descend,
    lamb,
    lars,
    masked,
    scale_by_trust_ratio,
    sgd,
    with_shape,
)
from functional_optim.kernels import leaf_passes, scratch

from ..choices import case, each, pairs
from .support import assert_same, noise

SHAPES = ((4, 6), (40, 30), (7,), (), (0, 3), (3, 2, 2), (1,), (129, 17), (4_099,))
CHAINS: dict[str, Callable[[], Optimizer]] = {
    "lamb": lambda: lamb(lr=0.1),
    "lamb, bounded": lambda: lamb(lr=0.1, min_norm=0.5, max_ratio=0.75, weight_decay=0.0),
    "lamb, maximized": lambda: lamb(lr=0.1, maximize=True),
    "lars": lambda: lars(lr=0.1, weight_decay=0.1, trust_coefficient=0.5),
    "clipped by its root": lambda: chain(clip_by_block_rms(0.5), adamw(lr=0.1)),
    "clipped lamb": lambda: chain(clip_by_global_norm(0.5), lamb(lr=0.1)),
    "accumulated": lambda: chain(accumulate(2), lamb(lr=0.1)),
    "parts": lambda: chain(
        adamw(lr=0.1), masked(scale_by_trust_ratio(), with_shape(ndim=2)), descend(lr=0.1)
    ),
    "twice in a row": lambda: chain(clip_by_block_rms(0.5), scale_by_trust_ratio(), sgd(lr=0.1)),
    "three times": lambda: chain(
        clip_by_block_rms(0.9),
        lars(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        scale_by_trust_ratio(),
        sgd(lr=0.1, momentum=0.9),
    ),
    "behind a rule": lambda: chain(sgd(lr=0.1), scale_by_trust_ratio(), descend(lr=0.1)),
}


class Spied(NamedTuple):
    """Record of the steps bound in passes: the number of parts of each."""

    parts: list[int]


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Spied:
    """Make loops worth compiling for any leaf, and record the steps bound in passes."""
    monkeypatch.setattr("functional_optim.kernels.exact.kernel.WORTH_COMPILING", 1)
    found = Spied([])
    bind = leaf_passes.LeafPasses.bind

    def noted(self: Any, *step: Any) -> Any:
        parts = bind(self, *step)
        if parts is not None:
            found.parts.append(len(parts))
        return parts

    monkeypatch.setattr(leaf_passes.LeafPasses, "bind", noted)
    return found


def set_grads(params: list[Any], seed: int) -> None:
    """Set gradients: most are ordinary, some are missing, zero, not finite, or transposed."""
    for k, param in enumerate(params):
        grad = noise(1000 * seed + k, *param.shape, dtype=param.dtype)
        if k == 1 and seed % 3 == 1:
            grad = grad.t().contiguous().t()
        if k == 2 and seed == 2:
            grad.zero_()
        if k == 5 and seed > 4:
            grad.view(-1)[3] = (float("inf"), float("nan"))[seed % 2]
        param.grad = None if k == seed % 5 and seed > 3 else grad


def stepped(
    optimizer: Optimizer, shapes: Any, dtype: torch.dtype, steps: int = 8
) -> list[list[Any]]:
    """Return parameters and states after some steps, with new numbers in each step."""
    params = [Parameter(noise(k, *shape, dtype=dtype)) for k, shape in enumerate(shapes)]
    with torch.no_grad():
        params[-2].zero_()  # a parameter with norm 0
    made = TorchOptimizer(params, optimizer)
    for seed in range(steps):
        set_grads(params, seed)
        if "lr" in made.param_groups[0]:
            made.param_groups[0]["lr"] = 0.1 if seed < 4 else 0.1 / seed
        before = [None if one.grad is None else one.grad.clone() for one in params]
        made.step()
        for param, grad in zip(params, before, strict=True):
            if grad is not None and param.grad is not None:
                assert_same(param.grad, grad)
    states = [
        {k: _one_nan(v) for k, v in made.state[one].items() if torch.is_tensor(v)} for one in params
    ]
    return [[_one_nan(one.detach()) for one in params], states]


def _one_nan(tensor: Tensor) -> Tensor:
    """Return a tensor in which every NaN has the same bits, because kernels do not fix its sign."""
    if not tensor.is_floating_point():
        return tensor
    return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)


def test_bits_are_the_references(spied: Spied, both_ways: str) -> None:
    """Steps in passes have the reference's bits, with torch's norms and with native norms."""
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    for one in pairs(name=CHAINS, dtype=dtypes, way=["with_loops", "without_loops"]):
        if one["way"] == both_ways:
            make, dtype = CHAINS[one["name"]], one["dtype"]
            with case(**one):
                spied.parts.clear()
                want = stepped(make().using(executor="reference"), SHAPES, dtype)
                got = stepped(make(), SHAPES, dtype)
                assert_same(got, want)
                # In bfloat16, torch's rounding of Adam's averages depends on an element's position.
                assert spied.parts or dtype == torch.bfloat16


def test_in_batches_and_without_memory_that_is_kept(
    spied: Spied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaf_passes, "BATCH", 30)
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())
    for kept in (scratch.KEPT_BYTES, 1000, 0):
        monkeypatch.setattr(scratch, "KEPT_BYTES", kept)
        for name in ("lamb", "three times"):
            with case(name=name, kept=kept):
                spied.parts.clear()
                want = stepped(CHAINS[name]().using(executor="reference"), SHAPES, torch.float32)
                assert_same(stepped(CHAINS[name](), SHAPES, torch.float32), want)
                assert max(spied.parts) > 3


def test_many_leaves_and_few_have_the_same_bits(spied: Spied, with_loops: None) -> None:
    """Trust ratios of many leaves are one tensor. A huge ratio is infinite in float32."""
    for count in (3, 100):
        for dtype in (torch.float32, torch.float64):
            shapes = [(1 + k % 5, 3) for k in range(count)]
            optimizer = lars(lr=0.1, weight_decay=0.1, trust_coefficient=1e300)
            with case(count=count, dtype=dtype):
                want = stepped(optimizer.using(executor="reference"), shapes, dtype, 3)
                assert_same(stepped(optimizer, shapes, dtype, 3), want)
    assert spied.parts


def test_in_two_threads(spied: Spied, with_loops: None) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        shapes = [(300, 300), (5, 4), (40_001,), (7,)]
        want = stepped(lamb(lr=0.1).using(executor="reference"), shapes, torch.float32, 4)
        assert_same(stepped(lamb(lr=0.1), shapes, torch.float32, 4), want)
    finally:
        torch.set_num_threads(threads)
    assert spied.parts


class Limit(NamedTuple):
    limit: float
    squared: bool


class Largest(NamedTuple):
    largest: Tensor  # 0-d: the largest norm so far
    last: list[Tensor]  # the last gradient, if it is kept


def largest_init(param: Tensor, hyper: Limit) -> Largest:
    return Largest(param.new_zeros(()), [torch.zeros_like(param)] if hyper.squared else [])


def largest_transform(
    grad: Tensor, param: Tensor, state: Largest, c: Limit
) -> tuple[Tensor, Largest]:
    largest = torch.maximum(state.largest, grad.abs().sum())
    last = [grad] if c.squared else []
    return grad / (largest + c.limit), Largest(largest, last)


def largest_each_(grads: list[Tensor], params: list[Tensor], state: Largest, c: Limit) -> None:
    for k, grad in enumerate(grads):
        state.largest[k].copy_(torch.maximum(state.largest[k], grad.abs().sum()))
        if c.squared:
            state.last[0][k].copy_(grad)
        grad.div_(state.largest[k] + c.limit)


LARGEST = Transform(
    name="largest",
    hyper=Limit,
    state=Largest,
    init=largest_init,
    transform=largest_transform,
    transform_each_=largest_each_,
    kind="per_matrix",
)


class Nothing(NamedTuple):
    pass


def take_rule(param: Tensor, grad: Tensor, state: NoState, c: Nothing) -> tuple[Tensor, NoState]:
    return param - grad, state


TAKE = Rule(name="take", hyper=Nothing, rule=take_rule)


@each(
    dtype=[torch.float32, torch.float64, torch.bfloat16],
    squared=[False, True],
    first=[False, True],
)
def test_a_stage_of_your_own_has_a_state(
    spied: Spied, dtype: torch.dtype, *, squared: bool, first: bool
) -> None:
    """Custom state can have another shape than the parameter, and is written in place."""
    spied.parts.clear()
    own = LARGEST(limit=0.5, squared=squared)
    optimizer = chain(own, TAKE()) if first else chain(TAKE(), own, TAKE())
    want = stepped(optimizer.using(executor="reference"), SHAPES, dtype)
    assert_same(stepped(optimizer, SHAPES, dtype), want)
    assert len(spied.parts) >= 2


@each(
    dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16],
    link=[scale_by_trust_ratio(), clip_by_block_rms(0.5), scale_by_trust_ratio(max_ratio=0.3)],
    count=[3, 90],
)
def test_factors_are_rounded_as_for_one_leaf(
    spied: Spied, both_ways: str, dtype: torch.dtype, link: Any, count: int
) -> None:
    """Factors round as for one leaf in every dtype, for few leaves and for many."""
    spied.parts.clear()
    shapes = [(1 + k % 7, 5) for k in range(count)]
    optimizer = chain(link, TAKE())
    want = stepped(optimizer.using(executor="reference"), shapes, dtype, 3)
    assert_same(stepped(optimizer, shapes, dtype, 3), want)
    assert spied.parts


def test_a_number_that_is_a_choice_may_change(spied: Spied) -> None:
    """Loops are bound again if a coefficient that is not a float changes."""
    found = []
    for executor in ("auto", "reference"):
        params = [Parameter(noise(k, 5, 4)) for k in range(3)]
        optimizer = TorchOptimizer(params, lamb(lr=0.1).using(executor=executor))
        for step in range(9):
            for k, param in enumerate(params):
                param.grad = noise(100 * step + k, 5, 4)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (step % 3)
            optimizer.step()
        found.append([one.detach() for one in params])
    assert_same(*found)
    assert len(spied.parts) == 9


def test_a_number_with_a_derivative_is_left_to_torch(spied: Spied) -> None:
    """A step in place uses the differentiated number as a tensor, as the reference does."""
    found = []
    for executor in ("auto", "reference"):
        factor = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        optimizer = lars(lr=0.1, weight_decay=0.1, trust_coefficient=factor)
        params = [noise(k, 5, 4) for k in range(3)]
        state = optimizer.init(params)
        for step in range(3):
            grads = [noise(100 * step + k, 5, 4) for k in range(3)]
            optimizer.using(executor=executor).update_(params, grads, state)
        found.append([one.detach() for one in params])
    assert_same(*found)
    assert not spied.parts


def mean_transform(
    grad: Tensor, param: Tensor, state: NoState, c: Nothing
) -> tuple[Tensor, NoState]:
    return grad - grad.mean(), state


def test_a_stage_that_is_not_pointwise_is_left_to_others(spied: Spied) -> None:
    """A stage that claims to be pointwise but reads all elements is stepped on whole leaves."""
    mean = Transform(name="mean", hyper=Nothing, transform=mean_transform)
    optimizer = chain(mean(), scale_by_trust_ratio(), TAKE())
    want = stepped(optimizer.using(executor="reference"), SHAPES, torch.float32, 4)
    assert_same(stepped(optimizer, SHAPES, torch.float32, 4), want)
    assert not spied.parts


def test_copies_are_stepped_as_well(spied: Spied) -> None:
    """``update`` steps in passes too, although its tensors move at each step."""
    optimizer, params = lamb(lr=0.1), {"a": noise(0, 5, 4), "b": noise(1, 9)}
    want, state = params, optimizer.init(params)
    wanted = state
    for step in range(5):
        grads = {
            key: noise(10 * step + k, *one.shape) for k, (key, one) in enumerate(params.items())
        }
        params, state = optimizer.update(params, grads, state)
        want, wanted = optimizer.using(executor="reference").update(want, grads, wanted)
        assert_same((params, state), (want, wanted))
    assert spied.parts


def test_explained(spied: Spied) -> None:
    said = lamb().explain([torch.ones(3, 4)])
    assert said.endswith(
        "exact; compiled, in 2 passes, around scale_by_trust_ratio on lists of leaves"
    )
    said = chain(clip_by_block_rms(1.0), lamb()).explain([torch.ones(3, 4)])
    assert said.endswith(
        "in 3 passes, around clip_by_block_rms and scale_by_trust_ratio on lists of leaves"
    )
    said = lamb().using(executor="blocked").explain([torch.ones(3, 4)])
    assert said.endswith("one by one; scale_by_trust_ratio needs its whole tensor")
