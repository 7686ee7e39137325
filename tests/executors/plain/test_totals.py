"""Totals over all gradients in one call, with the same bits as one gradient after another."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    Transform,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    maximized,
    partition,
    prodigy,
    sgd,
    trace,
    weight_decay,
)
from functional_optim.algorithms.prodigy import SUM_BLOCK
from functional_optim.kernels import EXECUTORS, total_of
from functional_optim.kernels.totals import (
    columns_of,
    sum_tensors,
    try_measure_each,
    try_reduce_each,
)
from functional_optim.transforms.clip_by_global_norm import (
    BLOCK,
    CLIP_BY_GLOBAL_NORM,
    sum_of_squares,
)
from functional_optim.transforms.scale_by_trust_ratio import SCALE_BY_TRUST_RATIO
from functional_optim.wrappers.apply_if_finite import APPLY_IF_FINITE, ApplyIfFiniteCoefficients
from functional_optim.wrappers.sam import SAM
from tests.choices import case, each_value
from tests.steady import made_by
from tests.tensors import assert_same, bits, normal

from ..support import chunk_of


def gradients(dtype: torch.dtype) -> list[Tensor]:
    whole = normal(8, 9, seed=1)
    made = [normal(70_000), whole, whole[:, ::2], normal(), normal(0, 2), normal(3)]
    return [*(one.to(dtype) for one in made), whole.to(dtype).t()[1:]]


@each_value(dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_total_of_many_is_that_of_one_after_the_other(dtype: torch.dtype) -> None:
    given = gradients(dtype)
    assert try_measure_each(CLIP_BY_GLOBAL_NORM, given) is not None
    one_by_one = sum_tensors(map(sum_of_squares, given))
    assert torch.equal(bits(total_of(CLIP_BY_GLOBAL_NORM, given)), bits(one_by_one))


@each_value(bad=[float("nan"), float("inf"), -0.0])
def test_so_it_is_of_numbers_that_are_none(bad: float) -> None:
    given = [torch.tensor([bad, 1.0]), torch.tensor([bad]), torch.tensor([2.0])]
    one_by_one = sum_tensors(map(sum_of_squares, given))
    assert torch.equal(bits(total_of(CLIP_BY_GLOBAL_NORM, given)), bits(one_by_one))


def test_what_is_not_finite_is_counted_by_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is right for empty tensors, several dtypes, and large numbers.

    If all gradients are finite, their norms suffice and no elements are summed.
    """
    whole = torch.tensor([[1.0, torch.nan], [-torch.inf, 2.0]])
    given = [
        normal(4),
        whole,
        whole.t()[1:],
        normal(0),
        torch.full((3,), 3e38),
        torch.full((2,), 6e4, dtype=torch.float16),
        torch.full((2,), torch.inf, dtype=torch.bfloat16),
    ]
    assert counts(given) == [[0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 2.0]]
    assert counts([normal(0), normal(0)]) == [[0.0, 0.0]]
    asked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "sum", lambda *_, **__: asked.append(0))
    assert counts([normal(4), normal(3, seed=1)]) == [[0.0, 0.0]]
    assert asked == []


def counts(given: list[Tensor]) -> Any:
    coefficients = ApplyIfFiniteCoefficients()
    return try_reduce_each(APPLY_IF_FINITE, given, given, (), coefficients)


@each_value(last=[torch.float32, torch.bfloat16], decay=[0.0, 0.1])
def test_complex_gradients_of_bound_parameters_are_measured_as_their_real_views(
    last: torch.dtype, decay: float
) -> None:
    dtypes = (torch.float32, torch.complex64, last)
    params = [normal(6, 5, seed=k, dtype=dtype) for k, dtype in enumerate(dtypes)]
    grads = [normal(6, 5, seed=9 - k, dtype=dtype) for k, dtype in enumerate(dtypes)]
    optimizer = chain(weight_decay(decay), clip_by_global_norm(1.0), sgd(0.1))
    optimizer = optimizer.using(executor="auto")
    want, _ = optimizer.update(params, grads, optimizer.init(params))
    bound = optimizer.bind(params)
    bound.step(grads)
    assert_same(list(bound.params), list(want))


@each_value(parts=[False, True])
def test_a_stage_that_begins_to_change_gradients_is_in_the_total(parts: bool) -> None:
    """New numbers lead to a new check if the stages before the sum change gradients."""
    rule = partition({"all": sgd(1.0)}, lambda *_: "all") if parts else sgd(1.0)
    optimizer = chain(weight_decay(0.0), clip_by_global_norm(0.1), rule)
    name = "weight_decay" if parts else "weight_decay.weight_decay"
    params = {str(k): normal(3, seed=k).requires_grad_() for k in range(2)}
    want = {name: one.detach().clone() for name, one in params.items()}
    ours, state = TorchOptimizer(params.items(), optimizer), optimizer.init(want)
    for step in range(8):
        grads = {name: normal(3, seed=10 * step + k) for k, name in enumerate(params)}
        decay = 0.0 if step < 5 else 0.5
        for one, grad in grads.items():
            params[one].grad = grad
        ours.param_groups[0]["weight_decay.weight_decay"] = decay
        ours.step()
        want, state = optimizer.update(want, grads, state, **{name: decay})
        assert_same({name: one.detach() for name, one in params.items()}, want)


def test_a_stage_without_a_form_for_lists_is_called_for_each() -> None:
    given = [normal(4), normal(3, seed=1)]
    plain = replace(CLIP_BY_GLOBAL_NORM, measure_each=None)
    assert try_measure_each(plain, given) is None
    assert torch.equal(total_of(plain, given), total_of(CLIP_BY_GLOBAL_NORM, given))
    alone = replace(SAM, reduce_each=None)
    assert try_reduce_each(alone, given, given, (), ()) is None


def test_a_form_for_lists_belongs_to_one_for_a_tensor() -> None:
    with pytest.raises(ValueError, match="measure_each needs measure"):
        replace(CLIP_BY_GLOBAL_NORM, measure=None)
    with pytest.raises(ValueError, match="reduce_each needs reduce"):
        replace(SAM, reduce=None, totals=0)
    changes: tuple[dict[str, Any], ...] = (
        {"kind": "pointwise"},
        {"raw": True},
        {"measure": CLIP_BY_GLOBAL_NORM.measure},
    )
    for other in changes:
        with (
            case(other=other),
            pytest.raises(ValueError, match="transform_each_ is for a transform with"),
        ):
            replace(SCALE_BY_TRUST_RATIO, **other)


def test_tensors_that_are_looked_at_otherwise_are_called_for_each() -> None:
    """A list with a sparse, differentiated, vmapped, or meta tensor is not measured in one call."""
    plain = normal(4)
    for other in (normal(4).to_sparse(), normal(4).requires_grad_(), normal(4).to("meta")):
        with case(other=other):
            assert try_measure_each(CLIP_BY_GLOBAL_NORM, [plain, other]) is None
            assert try_measure_each(CLIP_BY_GLOBAL_NORM, [other, other]) is None
    seen: list[Any] = []

    def asked(x: Tensor) -> Tensor:
        seen.append(try_measure_each(CLIP_BY_GLOBAL_NORM, [x, x]))
        return x

    torch.func.vmap(asked)(normal(2, 4))
    assert seen == [None]


def test_a_derivative_goes_through_the_total() -> None:
    optimizer = chain(clip_by_global_norm(0.5), sgd(1.0))
    grads = [normal(3).requires_grad_(), normal(2, seed=1)]
    params = [torch.zeros(3), torch.zeros(2)]
    after, _ = optimizer.update(params, grads, optimizer.init(params))
    (found,) = torch.autograd.grad(after[1].sum(), grads[:1])
    assert found.abs().sum() > 0


class Nothing(NamedTuple):
    pass


def doubled(grad: Tensor, param: Tensor, state: tuple[()], c: Nothing) -> tuple[Tensor, tuple[()]]:
    return grad * 2.0 if grad.dim() == 2 else grad, state


MATRICES = Transform(name="matrices_doubled", hyper=Nothing, transform=doubled, kind="per_matrix")
BEFORE: dict[str, Callable[[], Any]] = {
    "nothing": lambda: (),
    "nothing for vectors": lambda: (MATRICES(),),
    "the opposite": lambda: (maximized(),),
    "what it keeps": lambda: (trace(0.9),),
    "a clip": lambda: (clip_by_value(0.1),),
}


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("name", BEFORE)
def test_what_is_summed_is_what_the_stages_before_have_made(name: str, parts: bool) -> None:
    """Planned steps sum the gradients that the stages before the sum return."""
    rule = sgd(0.1, momentum=0.9)
    last = partition({"odd": rule, "even": adamw(0.1)}, odd) if parts else rule
    chosen = chain(*BEFORE[name](), clip_by_global_norm(0.5), last)
    want: Any = [normal(3), normal(3, 2, seed=1), normal(3, 2, seed=2), normal(seed=3)]
    params = [one.clone().requires_grad_() for one in want]
    optimizer, state = TorchOptimizer(params, chosen), chosen.init(want)
    for step in range(6):
        grads = [normal(*one.shape, seed=10 * step + k) for k, one in enumerate(params)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        want, state = chosen.update(want, grads, state)
        with case(step=step):
            assert_same([one.detach() for one in params], want)


def odd(path: Any, shape: Any) -> str:
    return "odd" if path[0] % 2 else "even"


PRODIGIES = {
    "plain": prodigy(),
    "without momentum": prodigy(betas=(0.0, 0.9), weight_decay=0.1, decouple=False),
    "of some elements": prodigy(slice_p=3),
    "safe": prodigy(safeguard_warmup=True, beta3=0.3),
}


@each_value(optimizer=PRODIGIES, dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_sums_over_states_have_the_bits_of_one_after_the_other(
    optimizer: Optimizer, dtype: torch.dtype
) -> None:
    (link,) = (one for one in optimizer.links if one.stage.reduce is not None)
    stage, shared = link.stage, link.stage.init_shared(link.hyper)
    coefficients = stage.coefficients(3.0, link.hyper, shared._replace(d=0.3, k=2.0))
    shapes = ((5, 3), (7,), (), (0, 2), (4, 1), (3, 3))
    params, grads = (
        [normal(*one, seed=k + seed).to(dtype) for k, one in enumerate(shapes)] for seed in (0, 20)
    )
    params[0][0, 0] = torch.inf
    states = [stage.init(normal(*one.shape, seed=40).to(dtype), link.hyper) for one in params]
    states = [one._replace(s=normal(*one.s.shape, seed=50).to(dtype)) for one in states]
    alone = zip(params, grads, states, strict=True)
    one_by_one = [[float(x) for x in stage.reduce(*one, coefficients)] for one in alone]
    found = try_reduce_each(stage, params, grads, columns_of(states), coefficients)
    assert found is not None
    wanted = list(map(list, zip(*one_by_one, strict=True)))
    assert torch.equal(bits(torch.tensor(found)), bits(torch.tensor(wanted)))
    assert any(wanted[0])


def test_sums_over_large_states_are_taken_one_by_one() -> None:
    (link,) = (one for one in prodigy().links if one.stage.reduce is not None)
    coefficients = link.stage.coefficients(1.0, link.hyper, link.stage.init_shared(link.hyper))
    given = [normal(3), normal(SUM_BLOCK + 1)]
    states = [link.stage.init(one, link.hyper) for one in given]
    columns = columns_of(states)
    assert try_reduce_each(link.stage, given, given, columns, coefficients) is None


def test_large_gradients_are_squared_in_blocks_beside_small_ones_that_are_asked_at_once() -> None:
    large = normal(3, BLOCK, seed=2)
    given = [*gradients(torch.float32), large, large.t()[::2], large.bfloat16(), normal(9)]
    for own in (given, [*given[:3], large]):
        one_by_one = sum_tensors(map(sum_of_squares, own))
        assert torch.equal(bits(total_of(CLIP_BY_GLOBAL_NORM, own)), bits(one_by_one))
        exact = sum(float(one.double().square().sum()) for one in own)
        assert float(one_by_one) == pytest.approx(exact, rel=1e-13)
    assert try_measure_each(CLIP_BY_GLOBAL_NORM, [large, large]) is not None
    grad = torch.func.grad(sum_of_squares)(large)
    torch.testing.assert_close(grad, 2 * large)


def test_no_large_gradient_is_copied_in_double_precision() -> None:
    large = normal(8, BLOCK)
    assert made_by(lambda: sum_of_squares(large)).largest <= 8 * BLOCK


@each_value(executor=["auto", "blocked"])
def test_a_total_of_large_gradients_that_were_changed_has_the_bits_of_the_reference(
    executor: Any,
) -> None:
    """The sum of squares of a gradient depends on how it is divided, so it is measured whole."""
    chosen = chain(weight_decay(0.1), clip_by_global_norm(0.5), sgd(0.1))
    counts = (1_500_001, 3, 1_200_000)
    params, grads = ([normal(count, seed=count + k) for count in counts] for k in range(2))

    def total(name: Any) -> Tensor:
        optimizer = chosen.using(executor=name)
        return optimizer.measure(params, grads, optimizer.init(params))

    assert torch.equal(total(executor), total("reference"))


def test_a_changed_gradient_is_freed_before_the_next_one_is_computed() -> None:
    count = 1 << 16
    chosen = chain(weight_decay(0.1), clip_by_global_norm(0.5), sgd(0.1))
    leaves = [chunk_of(chosen, normal(count, seed=k), normal(count, seed=9 - k)) for k in range(6)]
    stages = chosen.stages[: chosen.stages.index(CLIP_BY_GLOBAL_NORM) + 1]
    alive: list[int] = []
    held: list[Any] = []
    measure = CLIP_BY_GLOBAL_NORM.measure
    assert measure is not None

    def noted(grad: Tensor) -> Tensor:
        held.append(weakref.ref(grad))
        alive.append(sum(one() is not None for one in held))
        return measure(grad)

    watched = replace(CLIP_BY_GLOBAL_NORM, measure=noted, measure_each=None)
    EXECUTORS["auto"].measure([*stages[:-1], watched], leaves, [])
    assert max(alive) <= 2 and len(alive) == len(leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128], ids=str)
def test_a_norm_of_bound_parameters_is_that_of_the_tree(dtype: torch.dtype) -> None:
    """Sums of squares of 64-bit numbers depend on their division, so no buffer is one leaf."""
    optimizer = chain(clip_by_global_norm(1.0), sgd(0.1))
    for seed in range(20):
        draws = torch.Generator().manual_seed(seed)
        params, grads = (
            {
                name: torch.randn(5, 2 + k, dtype=dtype, generator=draws)
                for k, name in enumerate("ab")
            }
            for _ in range(2)
        )
        want = optimizer.update(params, grads, optimizer.init(params))[0]
        bound = optimizer.bind(params)
        for name, grad in grads.items():
            bound.gradients[name].copy_(grad)
        bound.step(bound.gradients)
        with case(seed=seed):
            assert_same(params, want)
