"""Transforms and wrappers match formulas from their papers; identities of transforms."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import functional_optim as fo
from tests.agreement import formulas_transforms as formulas
from tests.agreement.transform_runs import STEPS, largest_logits, problem, run

LARGEST = {torch.float64: 1e-12, torch.float32: 3e-5}
"""Largest difference from the formula, relative to the largest element."""


class Comparison(NamedTuple):
    """An optimizer and its formula. ``view`` is True if the formula gives the view."""

    optimizer: fo.Optimizer
    formula: Callable[..., formulas.Matrix]
    view: bool = False


COMPARISONS = {
    "clip_by_block_rms": Comparison(
        fo.chain(fo.scale_by_adam(), fo.clip_by_block_rms(0.7), fo.descend(0.1)),
        formulas.clipped_by_rms,
    ),
    "centralize": Comparison(fo.chain(fo.centralize(), fo.sgd(0.1)), formulas.centralized),
    "adaptive_grad_clip": Comparison(
        fo.chain(fo.adaptive_grad_clip(0.2), fo.sgd(0.1)), formulas.clipped_by_unit
    ),
    "cautious_weight_decay": Comparison(
        fo.chain(fo.scale_by_adam(), fo.cautious_weight_decay(0.3), fo.descend(0.1)),
        formulas.cautiously_decayed,
    ),
    "mars": Comparison(
        fo.chain(fo.mars(gamma=0.3), fo.adamw(0.1, (0.95, 0.99))), formulas.mars_adamw
    ),
    "mars from zero": Comparison(
        fo.chain(fo.mars(gamma=0.3, from_zero=True), fo.adamw(0.1, (0.95, 0.99))),
        formulas.mars_from_zero,
    ),
    "add_noise": Comparison(fo.chain(fo.add_noise(seed=7), fo.sgd(0.1)), formulas.noisy),
    "constrain_norm of rows": Comparison(
        fo.chain(fo.sgd(0.1), fo.constrain_norm(rows=True)), formulas.kept_row_norms
    ),
    "constrain_norm as hyperball": Comparison(
        fo.chain(
            fo.scale_by_adam(), fo.scale_by_trust_ratio(), fo.descend(0.1), fo.constrain_norm()
        ),
        formulas.hyperball,
    ),
    "constrain_norm to a radius": Comparison(
        fo.chain(fo.sgd(0.1), fo.constrain_norm(2.5)), formulas.of_radius
    ),
    "swa": Comparison(fo.chain(fo.sgd(0.1), fo.swa(5, 3)), formulas.averaged, view=True),
    "tail_ema": Comparison(
        fo.chain(fo.sgd(0.1), fo.tail_ema(0.8, 5)), formulas.tail_averaged, view=True
    ),
    "outer_nesterov": Comparison(
        fo.chain(fo.sgd(0.1), fo.outer_nesterov(4)), formulas.stepped_outside
    ),
    "qk_clip": Comparison(fo.chain(fo.sgd(0.1), fo.qk_clip(20.0)), formulas.qk_clipped),
}


def difference(name: str, dtype: torch.dtype) -> float:
    """Return the largest difference from the formula, relative to the largest element."""
    optimizer, formula, view = COMPARISONS[name]
    param, grads = problem()
    extra = {"max_logit": largest_logits} if name == "qk_clip" else {}
    found, state = run(optimizer, param.to(dtype), [grad.to(dtype) for grad in grads], **extra)
    if view:
        found = optimizer.view(found, state)
    wanted = torch.tensor(
        formula(param.tolist(), [grad.tolist() for grad in grads]), dtype=torch.float64
    )
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", COMPARISONS)
def test_it_is_the_formula(name: str) -> None:
    for dtype, largest in LARGEST.items():
        assert difference(name, dtype) <= largest


def test_no_formula_is_that_of_the_chain_without_the_transform() -> None:
    param, grads = problem()
    given = [grad.double() for grad in grads]
    for name, (optimizer, formula, _) in COMPARISONS.items():
        own = name.split()[0]
        links = [one for one in optimizer.links if not one.stage.name.startswith(own)]
        without, _ = run(fo.chain(*links), param.double(), given)
        wanted = torch.tensor(
            formula(param.tolist(), [grad.tolist() for grad in grads]), dtype=torch.float64
        )
        assert float((without - wanted).abs().max()) > 0.01, name


def test_limits_that_nothing_exceeds_change_nothing() -> None:
    param, grads = problem()
    plain, _ = run(fo.adamw(0.1), param, grads)
    for link in (
        fo.clip_by_block_rms(math.inf),
        fo.adaptive_grad_clip(math.inf),
        fo.mars(gamma=0.0, max_norm=math.inf),
        fo.add_noise(eta=0.0),
    ):
        found, _ = run(fo.chain(link, fo.adamw(0.1)), param, grads)
        assert torch.equal(found, plain), link


def test_each_unit_of_a_centralized_gradient_has_mean_zero() -> None:
    for shape in ((4, 6), (3, 2, 5, 5), (1, 8)):
        param, grads = problem(shape)
        made, _ = run(fo.chain(fo.centralize(), fo.descend(1.0)), param * 0, grads[:1])
        assert float(made.flatten(1).mean(1).abs().max()) < 1e-6
    for shape in ((7,), ()):
        param, grads = problem(shape)
        made, _ = run(fo.chain(fo.centralize(), fo.descend(1.0)), param, grads)
        assert torch.equal(made, run(fo.chain(fo.descend(1.0)), param, grads)[0])


def test_a_unit_is_a_row_a_filter_or_a_vector() -> None:
    for shape, dims in (((4, 6), (1,)), ((3, 2, 5, 5), (1, 2, 3)), ((7,), (0,)), ((), ())):
        param, grads = problem(shape)
        big = grads[0] * 100
        made, _ = run(fo.chain(fo.adaptive_grad_clip(0.5, eps=1e-3), fo.descend(1.0)), param, [big])
        ratio = torch.linalg.vector_norm(param - made, dim=dims or None) / (
            torch.linalg.vector_norm(param, dim=dims or None)
        )
        torch.testing.assert_close(ratio, torch.full_like(ratio, 0.5))


def test_units_of_weight_zero_can_grow() -> None:
    start = torch.zeros(2, 3)
    made, _ = run(
        fo.chain(fo.adaptive_grad_clip(0.5, eps=0.25), fo.descend(1.0)), start, [start + 7.0]
    )
    torch.testing.assert_close(made.norm(dim=1), torch.full((2,), 0.125))


def test_the_correction_of_a_constant_gradient_is_zero() -> None:
    param, grads = problem()
    same = [grads[0]] * STEPS
    found, _ = run(fo.chain(fo.mars(gamma=5.0, max_norm=math.inf), fo.sgd(0.1)), param, same)
    assert torch.equal(found, run(fo.sgd(0.1), param, same)[0])


def noise_of(optimizer: fo.Optimizer, start: Tensor, steps: int = 1) -> list[Tensor]:
    state, found, param = optimizer.init(start), [], start
    for _ in range(steps):
        new, state = optimizer.update(param, torch.zeros_like(param), state)
        found.append(param - new)
        param = new
    return found


def test_noise_is_normal_and_independent_between_elements_steps_seeds_and_parameters() -> None:
    size = 40_000
    noisy = fo.chain(fo.add_noise(eta=1.0, gamma=1.0), fo.descend(1.0))
    other = fo.chain(fo.add_noise(eta=1.0, gamma=1.0, seed=1), fo.descend(1.0))
    start = torch.zeros(size, dtype=torch.float64)
    first, second = noise_of(noisy, start, 2)
    draws = {
        "first": first,
        "second": second * math.sqrt(2),  # the variance is eta / step
        "seed": noise_of(other, start)[0],
        "parameter": noise_of(noisy, start + 1)[0],
    }
    near = 5 / math.sqrt(size)  # tolerance of five standard errors
    for name, z in draws.items():
        moments = [float((z**k).mean()) for k in (1, 2, 3, 4)]
        assert abs(moments[0]) < near, name
        assert abs(moments[1] - 1) < near * math.sqrt(2), name
        assert abs(moments[2]) < near * math.sqrt(15), name
        assert abs(moments[3] - 3) < near * math.sqrt(96), name
        assert abs(float((z[1:] * z[:-1]).mean())) < near, name
        for also, y in draws.items():
            assert name == also or abs(float((z * y).mean())) < near, (name, also)


def test_noise_is_the_same_however_a_run_is_stepped() -> None:
    """Noise does not depend on the tree, on skipped steps, or on the dtype."""
    param, grads = problem()
    link = fo.add_noise(seed=5)
    alone, _ = run(fo.chain(link, fo.sgd(0.1)), param, grads)
    optimizer = fo.chain(fo.apply_if_finite(9), link, fo.sgd(0.1))
    tree = {"other": torch.ones(3), "w": param.clone()}
    state = optimizer.init(tree)
    for grad in grads:
        bad = {"other": torch.ones(3), "w": grad * math.nan}
        optimizer.update_(tree, bad, state)  # skipped: the step adds no noise
        optimizer.update_(tree, {"other": torch.ones(3), "w": grad}, state)
    assert torch.equal(tree["w"], alone)
    wide = noise_of(fo.chain(link, fo.descend(1.0)), param.double())[0]
    torch.testing.assert_close(
        noise_of(fo.chain(link, fo.descend(1.0)), param)[0].double(), wide, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (fo.clip_by_block_rms, {"threshold": 0.0}),
        (fo.clip_by_block_rms, {"threshold": math.nan}),
        (fo.adaptive_grad_clip, {"clipping": -1.0}),
        (fo.adaptive_grad_clip, {"eps": math.nan}),
        (fo.cautious_weight_decay, {"weight_decay": -1.0}),
        (fo.mars, {"beta": 1.0}),
        (fo.mars, {"gamma": math.inf}),
        (fo.mars, {"max_norm": 0.0}),
        (fo.add_noise, {"eta": -1.0}),
        (fo.add_noise, {"gamma": math.nan}),
        (fo.add_noise, {"seed": -1}),
        (fo.add_noise, {"seed": 2**24}),
        (fo.constrain_norm, {"radius": 0.0}),
        (fo.constrain_norm, {"radius": math.inf}),
        (fo.swa, {"start": 0}),
        (fo.swa, {"start": 1, "every": 0}),
        (fo.tail_ema, {"decay": 1.0, "start": 0}),
        (fo.tail_ema, {"decay": 0.5, "start": -1}),
        (fo.outer_nesterov, {"every": 0}),
        (fo.outer_nesterov, {"outer_lr": math.inf}),
        (fo.outer_nesterov, {"outer_momentum": -0.1}),
        (fo.qk_clip, {"tau": 0.0}),
        (fo.qk_clip, {"exponent": 1.5}),
    ],
)
def test_values_outside_the_bounds_are_refused(
    make: Callable[..., fo.Link], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="must be"):
        make(**options)
