"""What all gradients add to a total is taken by one call: the bits of one after the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    TorchOptimizer,
    Transform,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    maximized,
    partition,
    sgd,
    trace,
    weight_decay,
)
from functional_optim.kernels import numbers_of_each, total_of
from functional_optim.kernels.each import number_of_each
from functional_optim.kernels.totals import added
from functional_optim.transforms.clip_by_global_norm import (
    BLOCK,
    CLIP_BY_GLOBAL_NORM,
    sum_of_squares,
)
from functional_optim.wrappers.apply_if_finite import count_not_finite
from tests.choices import case, each_value
from tests.steady import made_by
from tests.tensors import assert_same, bits, normal


def gradients(dtype: torch.dtype) -> list[Tensor]:
    whole = normal(8, 9, seed=1)
    made = [normal(70_000), whole, whole[:, ::2], normal(), normal(0, 2), normal(3)]
    return [*(one.to(dtype) for one in made), whole.to(dtype).t()[1:]]


@each_value(dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_total_of_many_is_that_of_one_after_the_other(dtype: torch.dtype) -> None:
    given = gradients(dtype)
    assert number_of_each(sum_of_squares, given) is not None
    one_by_one = added(map(sum_of_squares, given))
    assert torch.equal(bits(total_of(CLIP_BY_GLOBAL_NORM, given)), bits(one_by_one))


@each_value(bad=[float("nan"), float("inf"), -0.0])
def test_so_it_is_of_numbers_that_are_none(bad: float) -> None:
    given = [torch.tensor([bad, 1.0]), torch.tensor([bad]), torch.tensor([2.0])]
    one_by_one = added(map(sum_of_squares, given))
    assert torch.equal(bits(total_of(CLIP_BY_GLOBAL_NORM, given)), bits(one_by_one))


def test_what_is_not_finite_is_counted_by_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one after the other; also of an empty tensor, of several dtypes, of large numbers."""
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
    wanted = [count_not_finite(one, one, (), ())[0].item() for one in given]  # type: ignore[arg-type]  # it looks at the gradient
    assert wanted == [0, 2, 1, 0, 0, 0, 2]
    assert numbers_of_each(count_not_finite, given, given, [()], ()) == [wanted]
    assert numbers_of_each(
        lambda p, g, s, c: (torch.isfinite(g).sum(dtype=torch.float64),), given, given, [()], ()
    ) == [[one.numel() - bad for one, bad in zip(given, wanted, strict=True)]]
    assert numbers_of_each(count_not_finite, [normal(0)], [normal(0)], [()], ()) == [[0.0]]
    asked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "sum", lambda *_, **__: asked.append(0))
    finite = [normal(4), normal(3, seed=1)]
    assert numbers_of_each(count_not_finite, finite, finite, [()], ()) == [[0.0, 0.0]]
    assert asked == []


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
    """Whether stages before the sum hand gradients on is asked again for other numbers."""
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


def test_a_stage_that_reduces_otherwise_is_called_for_each() -> None:
    given = [normal(4), normal(3, seed=1)]
    for reduce in (
        lambda p, g, s, c: (g.double().sum(),),
        lambda p, g, s, c: ((p * g).sum(),),
        lambda p, g, s, c: (torch.isfinite(g).all(),),
        lambda p, g, s, c: (torch.isfinite(g).sum(),),
    ):
        assert numbers_of_each(reduce, given, given, [()], ()) is None


NOT_AT_ONCE: dict[str, Callable[[Tensor], Tensor]] = {
    "another function": lambda grad: grad.double().square().sum(),
    "what follows looks at all": lambda grad: torch.linalg.vector_norm(grad, 2.0).cumsum(0),
    "along a dimension": lambda grad: torch.linalg.vector_norm(grad, 2.0, dim=0),
    "a power": lambda grad: torch.linalg.vector_norm(grad, 2.5, dtype=torch.float64).pow(2.5),
    "none of it": lambda grad: torch.zeros((), dtype=torch.float64),
}


@pytest.mark.parametrize("name", NOT_AT_ONCE)
def test_what_is_not_known_is_called_for_each(name: str) -> None:
    given = [normal(4), normal(3, seed=1)]
    assert number_of_each(NOT_AT_ONCE[name], given) is None
    if name == "another function":
        measured = Transform(
            name="measured",
            hyper=CLIP_BY_GLOBAL_NORM.hyper,
            transform=CLIP_BY_GLOBAL_NORM.transform,
            measure=NOT_AT_ONCE[name],
        )
        torch.testing.assert_close(total_of(measured, given), added(map(sum_of_squares, given)))


def test_tensors_that_are_looked_at_otherwise_are_called_for_each() -> None:
    """A sparse one, one that a derivative is taken of, one inside of torch.func, several dtypes."""
    plain = normal(4)
    for other in (normal(4).to_sparse(), normal(4).requires_grad_(), normal(4).to("meta")):
        with case(other=other):
            assert number_of_each(sum_of_squares, [plain, other]) is None
    seen: list[Any] = []

    def asked(x: Tensor) -> Tensor:
        seen.append(number_of_each(sum_of_squares, [x, x]))
        return x

    torch.func.vmap(asked)(normal(2, 4))
    assert seen == [None]

    def in_float32(grad: Tensor) -> Tensor:
        return sum_of_squares(grad.to(torch.float32))

    assert number_of_each(in_float32, [plain, plain.bfloat16()]) is None  # no copies of all at once
    assert number_of_each(in_float32, [plain, plain]) is not None


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
    """In planned steps, in which gradients that no stage changes are summed as they are."""
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


class Momentum(NamedTuple):
    average: Tensor
    more: list[Tensor]


class Weights(NamedTuple):
    decay: float


STATES = [Momentum(normal(5, 3, seed=40 + k), [normal(5, 3, seed=60 + k)]) for k in range(5)]
SUMS: dict[str, Callable[..., Any]] = {
    "differences": lambda p, g, s, c: ((p - s.average).abs().sum(dtype=torch.float64),),
    "a product": lambda p, g, s, c: (
        0.25 * torch.dot(g.reshape(-1), s.more[0].reshape(-1)[::1]).double(),
        torch.add(s.average * c.decay, g, alpha=0.3).sum(dtype=torch.float64),
    ),
    "what is finite": lambda p, g, s, c: (
        torch.where(
            torch.isfinite((p * g).sum(dtype=torch.float64)) & True, g.sum(dtype=torch.float64), 0.0
        ),
    ),
    "few elements": lambda p, g, s, c: (
        g.sum(dtype=torch.float64) + (0.5 if p.numel() > 15 else 1.0),
    ),
}
ASKED: dict[str, Callable[..., Any]] = {
    "their truth": lambda p, g, s, c: (
        g.sum(dtype=torch.float64) if p.sum(dtype=g.dtype) else 0.0,
    ),
    "whether they are equal": lambda p, g, s, c: (p.sum(dtype=g.dtype) == 1.0,),
    "their elements": lambda p, g, s, c: (sum(one for one in g),),
    "pieces": lambda p, g, s, c: ((p * g).split(4)[0].sum(dtype=torch.float64),),
    "how many": lambda p, g, s, c: (g.sum(dtype=torch.float64) * (1.0 / g.numel()),),
    "one element": lambda p, g, s, c: (g[0].sum(dtype=torch.float64),),
    "a dimension": lambda p, g, s, c: (g.sum(0)[0],),
    "a number that is none of theirs": lambda p, g, s, c: (g.sum(dtype=g.dtype) + torch.ones(()),),
}


@each_value(reduce=SUMS, dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_sums_over_states_have_the_bits_of_one_after_the_other(
    reduce: Callable[..., Any], dtype: torch.dtype
) -> None:
    params, grads = ([normal(5, 3, seed=k + s).to(dtype) for k in range(5)] for s in (0, 20))
    params[2][0, 0] = torch.inf
    states = [Momentum(a.to(dtype), [b.to(dtype)]) for a, (b,) in STATES]
    alone = zip(params, grads, states, strict=True)
    one_by_one = [[float(x) for x in reduce(*one, Weights(0.7))] for one in alone]
    found = numbers_of_each(reduce, params, grads, states, Weights(0.7), copies=True)
    assert found is not None
    wanted = list(map(list, zip(*one_by_one, strict=True)))
    assert torch.equal(bits(torch.tensor(found)), bits(torch.tensor(wanted)))


def test_of_tensors_that_may_be_large_nothing_is_made_for_all_at_once() -> None:
    tensors = [normal(5, 3, seed=k) for k in range(5)]
    for name in ("differences", "a product"):
        assert numbers_of_each(SUMS[name], tensors, tensors, STATES, Weights(0.7)) is None
    assert numbers_of_each(SUMS["few elements"], tensors, tensors, STATES, Weights(0.7)) is not None


@each_value(reduce=ASKED)
def test_what_is_asked_of_one_tensor_is_not_answered_for_several(
    reduce: Callable[..., Any],
) -> None:
    tensors = [normal(5, 3, seed=k) for k in range(5)]
    assert numbers_of_each(reduce, tensors, tensors, STATES, Weights(0.7), copies=True) is None


def test_large_gradients_are_squared_in_blocks_beside_small_ones_that_are_asked_at_once() -> None:
    large = normal(3, BLOCK, seed=2)
    given = [*gradients(torch.float32), large, large.t()[::2], large.bfloat16(), normal(9)]
    for own in (given, [*given[:3], large]):
        one_by_one = added(map(sum_of_squares, own))
        assert torch.equal(bits(total_of(CLIP_BY_GLOBAL_NORM, own)), bits(one_by_one))
        exact = sum(float(one.double().square().sum()) for one in own)
        assert float(one_by_one) == pytest.approx(exact, rel=1e-13)
    assert number_of_each(sum_of_squares, given) is not None
    assert number_of_each(sum_of_squares, [large, large]) is None
    grad = torch.func.grad(sum_of_squares)(large)
    torch.testing.assert_close(grad, 2 * large)


def test_no_large_gradient_is_copied_in_double_precision() -> None:
    large = normal(8, BLOCK)
    assert made_by(lambda: sum_of_squares(large)).largest <= 8 * BLOCK
