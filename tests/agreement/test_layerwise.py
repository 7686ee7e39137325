"""Algorithms with one step size per tensor, per block or for all: formulas and identities."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    accumulate,
    adam_mini,
    adamw,
    came,
    chain,
    dadapt_adam,
    dadapt_sgd,
    dog,
    ldog,
    novograd,
    sgd,
    sign_sgd,
    signum,
)
from functional_optim.core.block_sums import SUM_BLOCK
from functional_optim.core.state import field_tensors

from ..choices import case, pairs
from ..tensors import normal
from . import formulas_layerwise as formulas

STEPS = 20
SHAPE = (3, 4)
Tree = dict[str, Any]
OPTIONS: dict[str, tuple[Callable[..., Optimizer], Callable[..., Any], Tree, Tree]] = {
    "sign_sgd": (sign_sgd, formulas.sign_sgd_formula, {"lr": [0.1], "weight_decay": [0, 0.1]}, {}),
    "signum": (
        signum,
        formulas.signum_formula,
        {"lr": [0.1], "momentum": [0.0, 0.9], "weight_decay": [0.0, 0.1]},
        {},
    ),
    "novograd": (
        novograd,
        formulas.novograd_formula,
        {
            "lr": [0.1],
            "betas": [(0.95, 0.98), (0.0, 0.5)],
            "eps": [1e-8, 0.1],
            "weight_decay": [0.0, 0.1],
            "grad_averaging": [False, True],
        },
        {},
    ),
    "came": (
        came,
        formulas.came_formula,
        {
            "lr": [0.01],
            "betas": [(0.9, 0.999, 0.9999), (0.5, 0.9, 0.8)],
            "eps": [(1e-30, 1e-16), (1e-2, 1e-1)],
            "clip_threshold": [1.0, 0.3],
            "weight_decay": [0.0, 0.1],
        },
        {"columns": SHAPE[1]},
    ),
    "adam_mini": (
        adam_mini,
        formulas.adam_mini_formula,
        {
            "lr": [0.1],
            "betas": [(0.9, 0.95), (0.0, 0.5)],
            "eps": [1e-8, 0.1],
            "weight_decay": [0.0, 0.1],
            "blocks": [1, 3],
        },
        {},
    ),
    "dog": (
        dog,
        formulas.dog_formula,
        {
            "lr": [1.0, 0.5],
            "reps_rel": [1e-6, 0.1],
            "eps": [1e-8, 0.1],
            "weight_decay": [0.0, 0.1],
        },
        {},
    ),
    "dadapt_sgd": (
        dadapt_sgd,
        formulas.dadapt_sgd_formula,
        {
            "lr": [1.0, 0.5],
            "momentum": [0.0, 0.9],
            "weight_decay": [0.0, 0.1],
            "d0": [1e-6, 0.1],
            "growth_rate": [float("inf"), 1.3],
        },
        {},
    ),
    "dadapt_adam": (
        dadapt_adam,
        formulas.dadapt_adam_formula,
        {
            "lr": [1.0, 0.5],
            "betas": [(0.9, 0.999), (0.0, 0.5)],
            "eps": [1e-8, 0.1],
            "weight_decay": [0.0, 0.1],
            "decouple": [False, True],
            "use_bias_correction": [False, True],
            "d0": [1e-6, 0.1],
            "growth_rate": [float("inf"), 1.3],
        },
        {},
    ),
}
OPTIONS["ldog"] = (ldog, *OPTIONS["dog"][1:])


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


@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_formula_of_its_paper(name: str) -> None:
    """Each algorithm matches its paper's formula over 20 steps in float64, with all options."""
    build, formula, options, more = OPTIONS[name]
    start = noise(99, *SHAPE)
    grads = gradients(start)
    lists = [one.flatten().tolist() for one in grads]
    for hyper in pairs(**options):
        found, state = stepped(build(**hyper), start, grads)
        want = formula(start.flatten().tolist(), lists, **hyper, **more)
        kept = [
            one for stage in state.leaves.stages for field in stage for one in field_tensors(field)
        ]
        with case(**hyper):
            for got, expected in zip((found, *kept), want, strict=False):
                exact = torch.tensor(expected, dtype=torch.float64).reshape(SHAPE)
                torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)


def test_signum_without_momentum_is_sign_sgd() -> None:
    """Without momentum, Signum equals sign SGD in every bit, and has no state."""
    start = noise(0, *SHAPE)
    for hyper in pairs(
        weight_decay=[0.0, 0.3], decoupled_weight_decay=[True, False], maximize=[False, True]
    ):
        one, state = stepped(signum(0.1, 0.0, **hyper), start, gradients(start))
        other, _ = stepped(sign_sgd(0.1, **hyper), start, gradients(start))
        assert torch.equal(one, other)
        assert not field_tensors(state.leaves.stages[-1][0])


def test_novograd_of_one_element_is_normalised_by_its_own_square() -> None:
    """For one element, NovoGrad is Adam without bias corrections, with v from the first square.

    The momentum averages the normalized gradients.
    """
    b1, b2, m, v, x = 0.9, 0.7, 0.0, 0.0, 2.0
    grads = [float(one) for one in noise(1, STEPS)]
    for t, g in enumerate(grads):
        v = g * g if t == 0 else b2 * v + (1 - b2) * g * g
        m = b1 * m + g / v**0.5
        x -= 0.1 * m
    found, _ = stepped(
        novograd(0.1, (b1, b2), eps=0.0),
        torch.tensor([2.0], dtype=torch.float64),
        [torch.tensor([g], dtype=torch.float64) for g in grads],
    )
    assert float(found) == pytest.approx(x, rel=1e-12)


def test_novograd_does_not_see_the_scale_of_gradients() -> None:
    start = noise(2, *SHAPE)
    grads = gradients(start)
    one, _ = stepped(novograd(0.1, eps=0.0), start, grads)
    other, _ = stepped(novograd(0.1, eps=0.0), start, [1024 * g for g in grads])
    assert torch.equal(one, other)


def test_adam_mini_with_blocks_of_one_element_is_adamw() -> None:
    start = noise(3, 12)
    for hyper in pairs(betas=[(0.9, 0.999), (0.0, 0.5)], weight_decay=[0.0, 0.1], eps=[1e-8, 0.1]):
        one, _ = stepped(adam_mini(0.1, blocks=12, **hyper), start, gradients(start))
        other, _ = stepped(adamw(0.1, **hyper), start, gradients(start))
        with case(**hyper):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-14)


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


def test_came_on_gradients_of_rank_one_has_their_exact_second_moment() -> None:
    """For gradients of rank one, each element moves by its sign times a common factor.

    Without momentum, u - m is 0, and S is its floor e2 alone.
    """
    left, right, sizes = noise(6, 3, 1), noise(7, 1, 4), noise(8, STEPS).tolist()
    lr, b2, b3, e2 = 0.01, 0.9, 0.8, 0.25
    start, second, floor, moved = noise(9, 3, 4), 0.0, 0.0, 0.0
    for s in sizes:
        second = b2 * second + (1 - b2) * s * s
        floor = b3 * floor + (1 - b3) * e2
        update = s / second**0.5
        moved -= lr * update / max(1.0, abs(update)) / floor**0.5
    optimizer = came(lr, (0.0, b2, b3), (0.0, e2))
    found, _ = stepped(optimizer, start, [s * left @ right for s in sizes])
    torch.testing.assert_close(found, start + moved * (left @ right).sign(), rtol=1e-12, atol=1e-13)


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


@pytest.mark.parametrize("build", [dog, ldog])
def test_dog_does_not_see_the_scale_of_gradients(build: Callable[..., Optimizer]) -> None:
    """Scaling the gradients by a power of two does not change DoG in any bit."""
    start = noise(11, *SHAPE)
    grads = gradients(start)
    one, _ = stepped(build(eps=0.0), start, grads)
    other, _ = stepped(build(eps=0.0), start, [1024 * g for g in grads])
    assert torch.equal(one, other)
    assert float((one - start).norm()) > 1e-6 * (1 + float(start.norm()))


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


def test_dadapt_sgd_with_a_fixed_distance_is_sgd() -> None:
    """With a fixed distance, D-Adapt SGD is SGD with learning rate ``d0 * lr / ||g_1||``."""
    start = noise(12, *SHAPE)
    grads = gradients(start)
    found, state = stepped(dadapt_sgd(0.5, d0=0.1, growth_rate=1.0), start, grads)
    want, _ = stepped(sgd(0.1 * 0.5 / float(grads[0].norm())), start, grads)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-13)
    assert dadapt_sgd().shared(state)["dadapt_sgd"].d == 0.1


def test_dadapt_adam_with_a_fixed_distance_is_adam() -> None:
    """With a fixed distance, D-Adapt Adam is Adam with learning rate ``d0 * lr``.

    Both have bias correction and a tiny eps.
    """
    start = noise(13, *SHAPE)
    grads = gradients(start)
    optimizer = dadapt_adam(
        0.5, eps=1e-30, d0=0.1, growth_rate=1.0, use_bias_correction=True, betas=(0.0, 0.9)
    )
    found, _ = stepped(optimizer, start, grads)
    want, _ = stepped(adamw(0.05, (0.0, 0.9), eps=1e-30, weight_decay=0.0), start, grads)
    torch.testing.assert_close(found, want, rtol=1e-11, atol=1e-12)


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
