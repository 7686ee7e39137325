"""Algorithms with one step size per tensor, block or tree: blocks, sums, and gradients of zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    accumulate,
    adam_mini,
    came,
    chain,
    dadapt_adam,
    dadapt_sgd,
    dog,
    ldog,
    sign_sgd,
    signum,
)
from functional_optim.core.block_sums import SUM_BLOCK

from ..tensors import normal

STEPS = 20
Tree = dict[str, Any]


def noise(seed: int, *shape: int) -> Tensor:
    return normal(*shape, seed=seed, dtype=torch.float64)


def gradients(start: Tensor, count: int = STEPS) -> list[Tensor]:
    """Return gradients of a slowly changing slope, plus noise, so that estimated distances grow."""
    return [start * (1 - step / 8) + 0.3 * noise(step, *start.shape) for step in range(count)]


def stepped(optimizer: Optimizer, param: Any, grads: list[Any]) -> tuple[Any, Any]:
    state = optimizer.init(param)
    for grad in grads:
        param, state = optimizer.update(param, grad, state)
    return param, state


def test_blocks_of_adam_mini_are_chosen_by_override_and_checked() -> None:
    """Blocks of Adam-mini step like separate tensors.

    ``override`` sets the number of blocks of a parameter, and a wrong number is refused.
    """
    start, heads = noise(4, 6, 2), {"q": noise(4, 6, 2), "v": noise(5, 6, 2)}
    optimizer = adam_mini(0.1).override(("q",), blocks=2)
    state = optimizer.init(heads)
    assert [len(state.leaves[k].stages[-1].exp_avg_sq) for k in heads] == [2, 6]
    grads = gradients(start)
    whole, _ = stepped(adam_mini(0.1, blocks=2), start, grads)
    for rows in (slice(0, 3), slice(3, 6)):
        part, _ = stepped(adam_mini(0.1, blocks=1), start[rows], [g[rows] for g in grads])
        torch.testing.assert_close(whole[rows], part, rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match=r"divisor of the first dimension, got blocks=4"):
        adam_mini(blocks=4).init(start)


def test_came_of_a_batch_of_matrices_averages_each_by_itself() -> None:
    """CAME averages each matrix of a batch separately, except for the clipping.

    A high threshold turns the clipping off.
    """
    start = noise(10, 2, 3, 4)
    optimizer, grads = came(0.01, clip_threshold=1e9), gradients(start)
    whole, _ = stepped(optimizer, start, grads)
    for k in range(2):
        part, _ = stepped(optimizer, start[k], [g[k] for g in grads])
        torch.testing.assert_close(whole[k], part, rtol=1e-13, atol=1e-14)


def tree(seed: int) -> Tree:
    return {"a": noise(seed, 5), "b": noise(seed + 1, 2, 3), "c": noise(seed + 2)}


GLOBAL: dict[str, tuple[Callable[..., Optimizer], Tree]] = {
    "dog": (dog, {"reps_rel": 0.1}),
    "dadapt_sgd": (dadapt_sgd, {"d0": 0.1, "momentum": 0.5}),
    "dadapt_adam": (dadapt_adam, {"d0": 0.1}),
}


@pytest.mark.parametrize("name", GLOBAL)
def test_a_tree_is_its_concatenation(name: str) -> None:
    """A tree steps like one concatenated tensor, since sums are over all tensors."""
    build, hyper = GLOBAL[name]
    starts, optimizer = tree(20), build(**hyper)
    joined = torch.cat([one.reshape(-1) for one in starts.values()])
    grads = [{k: one * (1 - t / 8) + tree(t)[k] for k, one in starts.items()} for t in range(STEPS)]
    flat = [torch.cat([one.reshape(-1) for one in g.values()]) for g in grads]
    parts, state = stepped(optimizer, starts, grads)
    whole, other = stepped(optimizer, joined, flat)
    found = torch.cat([one.reshape(-1) for one in parts.values()])
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-13)
    for got, want in zip(optimizer.shared(state)[name], optimizer.shared(other)[name], strict=True):
        assert got == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("name", GLOBAL)
def test_numbers_of_all_parameters_cannot_differ_by_group_and_wait_at_a_gate(name: str) -> None:
    build, hyper = GLOBAL[name]
    field = "reps_rel" if name == "dog" else "d0"
    with pytest.raises(ValueError, match="must be the same"):
        build(**hyper).override(("a",), **{field: 0.2}).init(tree(0))
    gated, params = chain(accumulate(2), build(**hyper)), tree(0)
    once, _ = stepped(gated, params, [tree(1)])
    assert all(torch.equal(once[k], params[k]) for k in params)
    twice, state = stepped(gated, params, [tree(1), tree(1)])
    plain, other = stepped(build(**hyper), params, [tree(1)])
    assert all(torch.equal(twice[k], plain[k]) for k in params)
    assert gated.shared(state)[name] == build(**hyper).shared(other)[name]


def test_ldog_is_dog_of_each_tensor() -> None:
    starts = tree(30)
    grads = [{k: one + tree(t)[k] for k, one in starts.items()} for t in range(STEPS)]
    layers, _ = stepped(ldog(reps_rel=0.1), starts, grads)
    for k, start in starts.items():
        alone, _ = stepped(dog(reps_rel=0.1), start, [g[k] for g in grads])
        torch.testing.assert_close(layers[k], alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["dadapt_sgd", "dadapt_adam"])
def test_gradients_of_zeros_change_nothing(name: str) -> None:
    """Steps before the first nonzero gradient change nothing."""
    build, hyper = GLOBAL[name]
    params = tree(40)
    zeros = {k: torch.zeros_like(one) for k, one in params.items()}
    late, state = stepped(build(**hyper), params, [zeros, zeros, tree(1), tree(2)])
    soon, other = stepped(build(**hyper), params, [tree(1), tree(2)])
    assert all(torch.equal(late[k], soon[k]) for k in params)
    assert build(**hyper).shared(state)[name] == build(**hyper).shared(other)[name]


@pytest.mark.parametrize("name", GLOBAL)
def test_a_tensor_with_infinite_gradients_has_no_part_in_the_sums(name: str) -> None:
    build, hyper = GLOBAL[name]
    params = tree(50)
    bad = {**tree(1), "a": torch.full_like(params["a"], float("inf"))}
    found, state = stepped(build(**hyper), params, [tree(0), bad, tree(2)])
    assert all(bool(found[k].isfinite().all()) for k in ("b", "c"))
    assert all(number < float("inf") for number in build(**hyper).shared(state)[name])


@pytest.mark.parametrize("build", [sign_sgd, lambda: signum(momentum=0.0)])
def test_signs_of_sparse_gradients_reach_the_stored_rows(build: Callable[..., Optimizer]) -> None:
    start = noise(60, 4, 2)
    start[0] = torch.nan
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 3]]), noise(61, 2, 2), (4, 2), check_invariants=True
    )
    found, _ = stepped(build(), start, [grad])
    want, _ = stepped(build(), start[1:], [grad.to_dense()[1:]])
    assert torch.equal(found[1:], want) and bool(found[0].isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_of_every_block_and_in_double_precision(dtype: torch.dtype) -> None:
    """DoG adds squares of all blocks in double precision."""
    grad = noise(70, 3 * SUM_BLOCK + 5).to(dtype)
    optimizer, start = dog(), torch.zeros_like(grad)
    _, state = stepped(optimizer, start, [grad])
    want = float(grad.double().square().sum())
    assert optimizer.shared(state)["dog"].grad_sum == pytest.approx(want, rel=1e-6)
