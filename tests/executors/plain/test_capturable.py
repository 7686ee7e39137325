"""Steps that CUDA graphs can capture: each replay uses its own step number."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Rule,
    Transform,
    adamw,
    chain,
    clip_by_global_norm,
    constant,
    cosine,
    joined,
    one_cycle,
    sgd,
    warmup,
    weight_decay,
)
from functional_optim.transforms.decoupled_weight_decay import DECOUPLED_WEIGHT_DECAY
from tests.cases import ONE_CHAIN

from ...choices import case, one_in
from ..bound_tree import full, parameters
from ..capturing import (
    REFERENCE,
    assert_close,
    gradients,
    recorded,
    require_replayed,
    steps,
    tree,
)
from ..graph_recorder import Graph
from ..rules import stateless
from ..support import assert_same, copied, noise

pytestmark = pytest.mark.usefixtures("captured_on_the_cpu")


class Hyper(NamedTuple):
    lr: float
    betas: tuple[float, float] = (0.9, 0.99)


class NoHyper(NamedTuple):
    pass


class Moments(NamedTuple):
    first: Tensor  # has the parameter's shape and dtype
    second: Tensor  # has the parameter's shape and dtype


def plain_adam(param: Tensor, grad: Tensor, state: Moments, c: Hyper) -> tuple[Tensor, Moments]:
    """Step by Adam, with arithmetic on numbers and with torch functions that take numbers."""
    beta_1, beta_2 = c.betas
    first = beta_1 * state.first + (1 - beta_1) * grad
    second = torch.addcmul(beta_2 * state.second, grad, grad, value=1 - beta_2)
    return torch.addcdiv(param, first, second.sqrt() + 1e-3, value=-c.lr), Moments(first, second)


def signed(param: Tensor, grad: Tensor, state: Moments, c: Hyper) -> tuple[Tensor, Moments]:
    """Step by the sign of an average, with torch functions that need plain numbers."""
    average = torch.lerp(grad, state.first, c.betas[0])
    step = torch.add(param, average.sign().clamp(max=c.betas[0]), alpha=-c.lr)
    return step, Moments(average, state.second)


PLAIN = Rule(
    name="plain",
    hyper=Hyper,
    state=Moments,
    init=lambda p, hyper: Moments(torch.zeros_like(p), torch.zeros_like(p)),
    rule=plain_adam,
)
SIGNED = replace(PLAIN, name="signed", rule=signed)


ROWS = stateless(
    lambda p, g, s, c: (p - c.lr * g / g.norm(dim=-1, keepdim=True), s), kind="per_matrix"
)
NORMED = Transform(
    name="normed",
    hyper=NoHyper,
    transform=lambda g, p, s, c, total: (g / total.sqrt().to(g.dtype), s),
    measure=lambda g: g.double().square().sum(),
)
MINUS = Rule(name="minus", hyper=NoHyper, rule=lambda p, g, s, c: (p - g, s))
DECAY = DECOUPLED_WEIGHT_DECAY(weight_decay=0.1, lr=0.3)
REPLAYED = {
    # The law "capturable is close" steps each algorithm with scalars on the device.
    **{name: ONE_CHAIN[name].factory() for name in one_in(4, ONE_CHAIN)},
    "momentum": sgd(0.1, momentum=0.9, dampening=0.1),
    "amsgrad": adamw(0.1, amsgrad=True, maximize=True),
    "norm in between": chain(weight_decay(0.1), clip_by_global_norm(1.0), adamw(0.1)),
    "whole matrices": ROWS.replace(lr=lambda k: 0.1 * 0.5**k),
    "torch's functions": chain(SIGNED(lr=0.1)),
    "no numbers but a sum": chain(NORMED(), MINUS()),
    "a schedule": adamw(lambda k: 0.1 * 0.9**k),
    "schedules as data": adamw(
        warmup(1, then=joined([cosine(0.1, steps=9), constant(0.05)], [1]), start=0.01),
        (one_cycle(0.5, steps=4, pct_start=0.5, div_factor=0.6), 0.99),
    ),
    "a schedule of tensors": adamw(
        lambda k: 0.1 * torch.cos(torch.as_tensor(k, dtype=torch.float64) / 8)
    ),
}


def test_each_replay_is_a_step_of_its_own_number() -> None:
    for name, optimizer in REPLAYED.items():
        dtype = next((s.dtypes[0] for s in optimizer.stages if s.dtypes), torch.float64)
        with case(name=name):
            _, state = require_replayed(
                optimizer.using(executor="reference"),
                lambda dtype=dtype: tree(dtype, 12),
                gradients(dtype, 12),
                count=4,
                ulps=64.0,
            )
            assert [int(leaf.step) for leaf in state.leaves.values()] == [4, 4]


def test_parameters_of_every_kind() -> None:
    optimizer = adamw(0.01).using(executor="reference")
    require_replayed(optimizer, parameters, lambda k: full(50 + k), ulps=32.0)


def set_some(k: int, bound: Any) -> None:
    bound.set_hyper(lr=0.1 / (k + 1), betas=(0.9, 0.99 - 0.01 * k))


def set_rate(k: int, bound: Any) -> None:
    bound.set_hyper(lr=0.1 / (k + 1))


def set_decay(k: int, bound: Any) -> None:
    """Set a weight decay that is zero for two steps."""
    bound.set_hyper(weight_decay=[0.1, 0.0, 0.0, 0.3][k])


def test_hyper_parameters_change_between_replays() -> None:
    """Replays follow new hyper-parameters, also if a stage has its own learning rate."""
    for optimizer, change in (
        (REFERENCE.override(("b",), lr=0.5), set_some),
        (chain(DECAY, sgd(0.1)).using(executor="reference"), set_rate),
        (adamw(0.1, weight_decay=0.1).using(executor="reference"), set_decay),
        (adamw(0.1, weight_decay=lambda k: 0.05 * k).using(executor="reference"), lambda *_: None),
    ):
        with case(optimizer=optimizer):
            require_replayed(optimizer, between=change)


def test_what_is_written_into_a_tensor_holds_from_the_next_replay_on() -> None:
    lr, decay = (torch.tensor(number, dtype=torch.float64) for number in (0.1, 0.0))
    optimizer = adamw(lr, weight_decay=decay).using(executor="reference")

    def change(k: int, bound: Any) -> None:
        optimizer.hyper["lr"].fill_(0.1 / (k + 1))
        optimizer.hyper["weight_decay"].fill_([0.0, 0.1, 0.0, 0.2][k])

    require_replayed(optimizer, between=change)


def test_gradients_are_read_where_they_were() -> None:
    """Replays read ``.grad`` tensors and flat gradients, which backward writes to again."""
    for attached in (False, True):
        params = {name: one.requires_grad_() for name, one in tree().items()}
        bound = REFERENCE.bind(params, capturable=True)
        if attached:
            bound.layout.attach_gradients()
        graph = Graph()
        for k in range(4):
            for name, one in gradients()(k).items():
                if params[name].grad is None:
                    params[name].grad = one
                else:
                    params[name].grad.copy_(one)
            if k == 0:
                with graph.recording():
                    bound.step(bound.gradients if attached else None)
            else:
                graph.replay()
        want, _ = steps(REFERENCE, tree(), gradients())
        assert_close({name: one.detach() for name, one in params.items()}, want)


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    _, state = require_replayed(REFERENCE, grads=lambda k: {**gradients()(k), "b": None})
    assert [int(leaf.step) for leaf in state.leaves.values()] == [4, 0]


def test_parameters_at_different_steps_keep_their_own_numbers() -> None:
    """Replays keep separate step counts, also after a load makes them equal."""
    plain, given = REFERENCE.bind(tree()), gradients()(0)
    plain.step({**gradients()(7), "b": None})
    bound = REFERENCE.bind(tree(), plain.state, capturable=True)
    other = REFERENCE.bind(tree(), plain.state)
    graph = recorded(bound, given, replayed=1)
    for _ in range(2):
        other.step(given)
    assert [int(leaf.step) for leaf in bound.state.leaves.values()] == [3, 2]
    assert_close((bound.params, bound.state), (other.params, other.state))
    bound.load_state(REFERENCE.init(tree()))
    for name, one in tree().items():
        bound.params[name].copy_(one)
    graph.replay()
    bound.step(given)
    graph.replay()
    want = steps(REFERENCE, tree(), lambda _: given, count=3)
    assert_close((bound.params, bound.state), want)


def test_state_is_saved_and_loaded_between_replays() -> None:
    bound, given = REFERENCE.bind(tree(), capturable=True), gradients()(0)
    graph = recorded(bound, given, replayed=1)
    saved = copied((bound.params, bound.state))
    graph.replay()
    once = copied((bound.params, bound.state))
    for name, one in bound.params.items():
        one.copy_(saved[0][name])
    bound.load_state(saved[1])
    assert int(bound.state.leaves["a"].step) == 2
    graph.replay()
    assert_same((bound.params, bound.state), once)
    assert_close(REFERENCE.update(saved[0], given, saved[1]), once)


def test_a_step_without_a_graph_and_replays_take_turns() -> None:
    bound, given = REFERENCE.bind(tree(), capturable=True), gradients()(0)
    graph = recorded(bound, given, replayed=1)
    bound.step(given)
    graph.replay()
    bound.step(given)
    want = steps(REFERENCE, tree(), lambda _: given, count=5)
    assert_close((bound.params, bound.state), want)


def test_before_that_a_schedule_may_take_the_place_of_a_number() -> None:
    bound = REFERENCE.bind(tree(), capturable=True)
    bound.set_hyper(lr=lambda k: 0.3 * 0.5**k)
    for k in range(3):
        bound.step(gradients()(k))
    want = steps(REFERENCE.replace(lr=lambda k: 0.3 * 0.5**k), tree(), gradients(), count=3)
    assert_close((bound.params, bound.state), want)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float64"), ("float64", "float64", "float64")], ids=str
)
def test_chunks_that_were_at_one_step_count_on_their_own(dtypes: tuple[str, ...]) -> None:
    """Chunks of different buffers, or apart in one buffer, can get different step counts."""
    sizes = {name: getattr(torch, one) for name, one in zip("abc", dtypes, strict=False)}

    def made() -> dict[str, Tensor]:
        return {name: noise(3, 20, dtype=dtype) for name, dtype in sizes.items()}

    def state_at(*counts: int) -> Any:
        state = REFERENCE.init(made())
        for leaf, count in zip(state.leaves.values(), counts, strict=True):
            leaf.step.fill_(count)
        return state

    grads = {name: noise(4, 20, dtype=dtype) for name, dtype in sizes.items()}
    first, then = ((0, 0), (0, 499)) if len(sizes) == 2 else ((0, 1, 0), (0, 1, 499))
    bound = REFERENCE.bind(made(), state_at(*first), capturable=True)
    graph = recorded(bound, grads)
    bound.load_state(state_at(*then))
    for name, one in made().items():
        bound.params[name].copy_(one)
    graph.replay()
    want = REFERENCE.update(made(), grads, state_at(*then))
    assert_close((bound.params, bound.state), want)


def test_a_count_set_between_replays_is_that_parameter_s_alone() -> None:
    params = {"a": noise(1, 20), "b": noise(2, 20, dtype=torch.float64)}
    grads = {"a": noise(3, 20), "b": noise(4, 20, dtype=torch.float64)}
    bound = REFERENCE.bind(params, capturable=True)
    recorded(bound, grads, replayed=50)
    bound.state.leaves["a"].step.fill_(1)
    before = copied((bound.params, bound.state))
    bound.step(grads)
    assert_close((bound.params, bound.state), REFERENCE.update(before[0], grads, before[1]))


def test_the_first_step_may_be_the_one_that_is_captured() -> None:
    """Binding does all checks that read numbers, so the first step can be captured."""
    bound, given = adamw(0.01).using(executor="reference"), full(50)
    bound = bound.bind(parameters(), capturable=True)
    assert bound.ready()
    recorded(bound, given, replayed=1)
    want = steps(REFERENCE.replace(lr=0.01), parameters(), lambda _: given, count=2)
    assert_close((bound.params, bound.state), want, 32.0)


def test_rules_of_torch_s_functions_round_as_with_numbers() -> None:
    """A captured step rounds only where a step with Python's numbers rounds."""
    optimizer = chain(PLAIN(lr=1e-3)).using(executor="reference")
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        with case(dtype=dtype):
            require_replayed(
                optimizer,
                lambda dtype=dtype: 0.01 * noise(1, 300, dtype=dtype),
                lambda k, dtype=dtype: 1e-3 * noise(5 + k, 300, dtype=dtype),
                count=20,
                ulps=4.0,
            )


def test_bound_in_inference_mode() -> None:
    params = tree()
    with torch.inference_mode():
        bound = REFERENCE.bind(params, capturable=True)
    bound.set_hyper(lr=0.2)
    bound.step(gradients()(0))
    assert_close(bound.params, steps(REFERENCE.replace(lr=0.2), tree(), gradients(), count=1)[0])


def test_its_own_state_can_be_loaded_whatever_had_no_gradient() -> None:
    bound = REFERENCE.bind(tree(), capturable=True)
    recorded(bound, {**gradients()(0), "b": None})
    for count in (0, 3):
        state = REFERENCE.init(tree())
        for leaf in state.leaves.values():
            leaf.step.fill_(count)
        bound.load_state(state)
