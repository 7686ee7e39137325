"""Programs that step whole leaves in reused memory, with the same bits as the reference."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    cautious,
    chain,
    clip_by_global_norm,
    descend,
    lamb,
    lars,
    muon,
    rowwise_adagrad,
    trace,
    weight_decay,
)
from functional_optim.kernels import leaf_program, scratch
from functional_optim.kernels.cache_key import key_of
from functional_optim.testing.compare import require_same

from ...choices import case, pairs
from ...tensors import assert_same, normal
from ..support import chunk_of, new_tensors

SHAPES = ((5, 8), (8, 5), (1, 7), (6, 6), (0, 3), (70, 33))
CHAINS: dict[str, Any] = {
    "muon": lambda: muon(lambda step: 0.1 / (1 + step)),
    "muon without nesterov": lambda: muon(0.1, nesterov=False),
    "lamb": lambda: lamb(0.1),
    "lars": lambda: lars(0.1, momentum=0.9),
    "rowwise_adagrad": lambda: rowwise_adagrad(0.1),
    "cautious": lambda: chain(trace(momentum=0.9), cautious(), descend(0.1)),
    "clipped": lambda: chain(weight_decay(0.1), clip_by_global_norm(0.5), muon(0.1)),
}


def noise(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draws).to(dtype) for shape in SHAPES]


def steps(optimizer: Optimizer, dtype: torch.dtype, count: int = 4) -> tuple[Any, Any]:
    params = noise(0, dtype)
    state = optimizer.init(params)
    for step in range(count):
        optimizer.update_(params, noise(step + 1, dtype), state)
    return params, state


@pytest.fixture
def by_reference(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the names of the leaves that the reference executor steps."""
    found: list[str] = []
    plain = leaf_program.ReferenceExecutor.update_

    def noted(self: Any, stages: Any, leaves: Any, totals: Any) -> None:
        found.extend(leaf.name for leaf in leaves)
        plain(self, stages, leaves, totals)

    monkeypatch.setattr(leaf_program.ReferenceExecutor, "update_", noted)
    return found


def test_the_bits_of_the_reference(by_reference: list[str]) -> None:
    """Programs have the reference's bits over several steps with different scalars."""
    for one in pairs(name=list(CHAINS), dtype=[torch.float32, torch.float64, torch.bfloat16]):
        optimizer = CHAINS[one["name"]]()
        with case(**one):
            want = steps(optimizer.using(executor="reference"), one["dtype"])
            by_reference.clear()
            got = steps(optimizer.using(executor="auto"), one["dtype"])
            require_same("auto and reference", got, want)
            assert by_reference == []


def test_nothing_is_made_anew() -> None:
    """A second step of a matrix allocates no tensor and copies none."""
    made: dict[str, list[str]] = {}
    for executor in ("auto", "reference"):
        param, grad = torch.randn(6, 9), torch.randn(6, 9)
        optimizer = muon().using(executor=executor)
        state = optimizer.init(param)
        optimizer.update_(param, grad, state)
        with new_tensors() as made[executor]:
            optimizer.update_(param, grad, state)
    assert made["auto"] == []
    assert "aten.mm.default" in made["reference"]


def test_leaves_that_are_no_plain_tensors(by_reference: list[str]) -> None:
    """The reference steps a slice, and all leaves if one of them is its own gradient."""
    own = torch.randn(6, 8)
    for shares in (False, True):
        params = {"slice": torch.randn(6, 16)[:, ::2], "own": own, "plain": torch.randn(6, 7)}
        grads = {name: torch.randn(6, one.shape[1]) for name, one in params.items()}
        if shares:
            grads["own"] = own
        optimizer = muon(0.1)
        state = optimizer.init(params)
        want = optimizer.using(executor="reference").update(params, grads, state)
        by_reference.clear()
        optimizer.update_(params, grads, state)
        require_same("in place", (params, state), want)
        assert sorted(by_reference) == (["own", "plain", "slice"] if shares else ["slice"])


class Hyper(NamedTuple):
    lr: float


def looks_at_data(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> Any:
    return (param - c.lr * grad if float(grad.sum()) > 0 else param + 1.0), state


def looks_at_a_number(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> Any:
    return param - (c.lr if c.lr > 0.25 else 2 * c.lr) * grad, state


def asks_for_its_address(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> Any:
    return param - c.lr * grad * float(grad.data_ptr() != 0), state


def makes_a_tensor(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> Any:
    return param - c.lr * grad @ torch.eye(grad.size(1)), state


@pytest.mark.parametrize(
    "rule", [looks_at_data, looks_at_a_number, asks_for_its_address, makes_a_tensor]
)
def test_rules_of_which_there_is_no_program(rule: Any, by_reference: list[str]) -> None:
    one = Rule(name="own", hyper=Hyper, rule=rule, kind="per_matrix")
    for lr in (0.5, 0.125):
        optimizer = chain(one(lr=lr))
        want = steps(optimizer.using(executor="reference"), torch.float32)
        by_reference.clear()
        require_same("auto", steps(optimizer.using(executor="auto"), torch.float32), want)
        assert len(by_reference) == 4 * len(SHAPES)


class Two(NamedTuple):
    first: Tensor
    second: Tensor


def in_turn(param: Tensor, grad: Tensor, state: Two, c: Hyper) -> Any:
    """Exchange the two states."""
    step = grad * (2.0 - (1.0 - state.first))
    return param - c.lr * step + step.sum(), Two(state.second, state.first)


def keeps_the_gradient(param: Tensor, grad: Tensor, state: Two, c: Hyper) -> Any:
    """Return the gradient and a view of a temporary as states, and read the parameter last."""
    made = torch.addmm(param, grad, (grad * 3.0).mT @ param, beta=0.5)
    return made + param * c.lr, Two(grad, (made * 2.0)[:, :].mT.mT)


def reads_it_turned(param: Tensor, grad: Tensor, state: Two, c: Hyper) -> Any:
    """Read an operand twice, once transposed."""
    made = grad * c.lr
    if grad.size(0) == grad.size(1):
        made = made + made.mT
    return param - made, Two(state.first * 2.0, state.second)


@pytest.mark.parametrize("rule", [in_turn, keeps_the_gradient, reads_it_turned])
def test_what_is_still_wanted_is_not_written_over(rule: Any) -> None:
    def init(param: Tensor, hyper: Hyper) -> Two:
        return Two(torch.ones_like(param), torch.full_like(param, 2.0))

    optimizer = chain(
        Rule(name="own", hyper=Hyper, state=Two, init=init, rule=rule, kind="per_matrix")(lr=0.1)
    )
    want = steps(optimizer.using(executor="reference"), torch.float64)
    require_same("auto", steps(optimizer.using(executor="auto"), torch.float64), want)


def test_memory_is_bounded_and_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    want = steps(muon(0.1).using(executor="reference"), torch.float32)
    with ThreadPoolExecutor(4) as pool:
        optimizer = muon(0.1).using(executor="auto")
        for got in pool.map(lambda _: steps(optimizer, torch.float32, 4), range(8)):
            require_same("in a thread", got, want)
    monkeypatch.setattr(scratch, "KEPT_BYTES", 0)
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())
    require_same("nothing kept", steps(optimizer, torch.float32), want)
    assert not any(map(Tensor.numel, scratch._SCRATCH.pieces.values()))


def test_no_view_keeps_memory_that_was_outgrown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program finds its views of temporaries again when their memory grows."""
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())
    optimizer = muon(0.1)
    for sizes in ([4], [4, 9], [9, 4], [30, 4]):
        params = [noise(size)[0].new_ones(size, 2 * size) for size in sizes]
        want, state = [one.clone() for one in params], optimizer.init(params)
        wanted = optimizer.init(want)
        for step in range(3):
            grads = [torch.full_like(one, 0.1 * (step + 1)) for one in params]
            optimizer.using(executor="auto").update_(params, grads, state)
            want, wanted = optimizer.using(executor="reference").update(want, grads, wanted)
        require_same("auto", (params, state), (want, wanted))
        kept = scratch._SCRATCH
        pieces = {one.data_ptr() for one in kept.pieces.values()}
        views = {one.data_ptr() for own in kept.views.values() for one in own}
        assert views, "no place is kept"
        assert views <= pieces


def test_views_do_not_keep_what_they_belong_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views of a program are freed with the program. Other programs keep their views."""
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())

    class Owner:
        pass

    first, second = Owner(), Owner()
    for number, owner in enumerate((first, second)):
        room = partial(scratch.scratch, number, 4, torch.float32, torch.device("cpu"))
        made = scratch.views_of_scratch(owner, room)
        assert scratch.views_of_scratch(owner, room) is made
        del owner
    scratch.views_of_scratch(first, room)  # the second piece dropped the views of the first
    gone = weakref.ref(first)
    del first
    assert gone() is None
    assert list(scratch._SCRATCH.views) == [second]


def turns_itself(param: Tensor, grad: Tensor, state: Two, c: Hyper) -> Any:
    """Return the parameter transposed, and the second state transposed as the first state."""
    if param.size(0) == param.size(1):
        return param.mT, Two(state.second.mT, state.first + grad)
    return param + grad, state


def test_what_is_turned_on_its_side_is_read_before_it_is_written() -> None:
    def init(param: Tensor, hyper: Hyper) -> Two:
        return Two(param * 3.0, param - 1.0)

    optimizer = chain(
        Rule(name="own", hyper=Hyper, state=Two, init=init, rule=turns_itself, kind="per_matrix")(
            lr=0.1
        )
    )
    want = steps(optimizer.using(executor="reference"), torch.float64)
    require_same("auto", steps(optimizer.using(executor="auto"), torch.float64), want)


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_temporaries_may_be_made_for_each_call(name: str) -> None:
    """A program can allocate its temporaries in each call, as it does on accelerators."""
    param, grad = normal(33, 65), normal(33, 65, seed=1)
    pairs_of = [chunk_of(CHAINS[name](), param.clone(), grad) for _ in range(2)]
    for leaf, kept in zip(pairs_of, (True, False), strict=True):
        known = leaf_program.program_of(CHAINS[name]().stages, leaf)
        assert not isinstance(known, str)
        _, numbers, tensors = key_of(CHAINS[name]().stages, leaf)
        if kept:
            known.step(*tensors, *known.arguments(numbers, ()))
        else:
            known._step_on_device(*tensors, *known.compute_scalars(numbers, ()))
    assert_same([pairs_of[0].param], [pairs_of[1].param])
    assert not torch.equal(pairs_of[0].param, param)
