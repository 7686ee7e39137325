"""Long gradients, read where they lie; the short ones beside them are copied."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, lion, sgd, stored
from functional_optim import long_gradients as module
from functional_optim.flat_layout import FlatLayout

from .support import assert_same, noise

Tree = dict[str, Tensor]

pytestmark = pytest.mark.usefixtures("both_ways")

SHAPES = {
    "small": (8,),
    "matrix": (16, 8),
    "other": (9,),
    "scalar": (),
    "empty": (0, 3),
    "image": (2, 3, 4, 5),
    "rows": (20, 8),
    "last": (7,),
}
LONG = {"matrix", "image", "rows"}

OPTIMIZERS = {
    "sgd": sgd(0.1, momentum=0.9),
    "adamw": adamw(0.1),
    "lion": lion(0.1),
    "clipped": chain(clip_by_global_norm(0.5), lion(0.1)),
}


@pytest.fixture(autouse=True)
def long_from_100(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG", 100)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[int]]:
    """Which gradients each gathering left where they were."""
    seen: list[frozenset[int]] = []
    gather, at_once = FlatLayout.gather, FlatLayout.gather_at_once

    def spoil(self: FlatLayout, read: frozenset[int]) -> None:
        """Nobody may have copied these, and nobody may see the buffer's."""
        found = self._of_gradients()
        for i in read:
            found.views[found.order.index(i)].fill_(torch.nan)

    def noted(self: FlatLayout, grads: Any, *, read: frozenset[int] = frozenset()) -> None:
        spoil(self, read)
        seen.append(read)
        gather(self, grads, read=read)

    def noted_at_once(self: FlatLayout, grads: Any, read: frozenset[int]) -> bool:
        spoil(self, read)
        done = at_once(self, grads, read)
        seen.extend([read] * done)
        return done

    monkeypatch.setattr(FlatLayout, "gather", noted)
    monkeypatch.setattr(FlatLayout, "gather_at_once", noted_at_once)
    return seen


def tree(seed: int, dtype: torch.dtype = torch.float32) -> Tree:
    made = {n: noise(seed + k, *size, dtype=dtype) for k, (n, size) in enumerate(SHAPES.items())}
    made["image"] = made["image"].to(memory_format=torch.channels_last)
    return made


def places(*names: str) -> frozenset[int]:
    return frozenset(sorted(SHAPES).index(name) for name in names)


@pytest.mark.parametrize("executor", ["reference", "script", "blocked"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_as_leaf_by_leaf(name: str, executor: Any, reads: list[frozenset[int]]) -> None:
    optimizer = OPTIMIZERS[name].using(executor=executor)
    bound, plain = optimizer.bind(tree(0)), tree(0)
    state = optimizer.init(plain)
    for step in range(6):
        given: dict[str, Any] = tree(10 * step + 1)
        given |= dict.fromkeys({2: ["small"], 3: ["matrix", "last"]}.get(step, []))
        totals = [optimizer.measure(plain, given, state)] if name == "clipped" else []
        optimizer.update_(plain, given, state, measured=totals)
        bound.step(given, measured=totals)
        assert_same((bound.params, bound.state), (plain, state))
    if executor != "reference":
        assert reads == [places(*LONG)] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_of_other_dtypes(dtype: torch.dtype, reads: list[frozenset[int]]) -> None:
    optimizer = sgd(0.1, momentum=0.9).using(executor="blocked")
    bound, plain = optimizer.bind(tree(0, dtype)), tree(0, dtype)
    state = optimizer.init(plain)
    for step in range(3):
        given = tree(10 * step + 1, dtype)
        bound.step(given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))
    assert reads == [places(*LONG)] * 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_by_kernels_that_round_by_where_a_lane_ends(name: str) -> None:
    optimizer = OPTIMIZERS[name].using(executor="auto")
    bound, plain = optimizer.bind(tree(0)), tree(0)
    state = optimizer.init(plain)
    for step in range(3):
        given = tree(10 * step + 1)
        bound.step(given)
        optimizer.update_(plain, given, state)
        for path, one in plain.items():
            torch.testing.assert_close(bound.params[path], one)


def test_stored_in_blocks(reads: list[frozenset[int]]) -> None:
    """A long parameter whose last block is not full ends its lane there."""
    optimizer: Optimizer = stored(lion(0.1), state="int8").using(executor="blocked")
    bound, plain = optimizer.bind(tree(0)), tree(0)
    state = optimizer.init(plain)
    for step in range(3):
        given = tree(10 * step + 1)
        bound.step(given)
        optimizer.update_(plain, given, state)
        assert_same((bound.params, bound.state), (plain, state))
    assert all(reads)


def test_of_the_parameters_themselves(reads: list[frozenset[int]]) -> None:
    bound = sgd(0.1).using(executor="blocked").bind(params := tree(0))
    want = {name: one - 0.1 * torch.ones_like(one) for name, one in params.items()}
    for one in params.values():
        one.grad = torch.ones_like(one)
    bound.step()
    assert_same(bound.params, want)
    assert reads == [places(*LONG)]


def strided(grad: Tensor) -> Tensor:
    return grad.t().contiguous().t()


def negated(grad: Tensor) -> Tensor:
    return torch._neg_view(-grad)


def expanded(grad: Tensor) -> Tensor:
    return torch.full((), 3.0).expand(grad.shape)


@pytest.mark.parametrize("make", [strided, negated, expanded])
def test_what_a_kernel_cannot_read_is_copied(make: Any, reads: list[frozenset[int]]) -> None:
    optimizer = sgd(0.1, momentum=0.9).using(executor="blocked")
    bound, plain = optimizer.bind(tree(0)), tree(0)
    state = optimizer.init(plain)
    given = tree(1)
    given["matrix"] = make(given["matrix"])
    bound.step(given)
    optimizer.update_(plain, given, state)
    assert_same((bound.params, bound.state), (plain, state))
    assert all(not places("matrix") & one for one in reads)


def test_a_tensor_of_zeros_that_has_no_memory_is_copied(reads: list[frozenset[int]]) -> None:
    bound = sgd(0.1).using(executor="blocked").bind(params := tree(0))
    want = {name: one.clone() for name, one in params.items()}
    given = {name: torch.zeros_like(one) for name, one in params.items()}
    given["matrix"] = torch._efficientzerotensor((16, 8))
    bound.step(given)
    assert_same(bound.params, want)
    assert all(not places("matrix") & one for one in reads)


def test_memory_that_another_library_has_handed_over_is_seen() -> None:
    """Its storage begins where the parameter does, and not where the buffer does."""
    names = ("a", "b", "c")
    params = {name: noise(k, 128) for k, name in enumerate(names)}
    plain = {name: one.clone() for name, one in params.items()}
    optimizer = sgd(0.5).using(executor="blocked")
    bound = optimizer.bind(params)
    given = {
        "a": noise(5, 128),
        "b": noise(6, 128),
        "c": torch.from_dlpack(params["b"].detach()),
    }
    want, _ = optimizer.update(
        plain, {name: one.clone() for name, one in given.items()}, optimizer.init(plain)
    )
    bound.step(given)
    assert_same(bound.params, want)


@pytest.mark.parametrize("of", ["param", "state", "gradient"])
def test_what_a_step_writes_to_is_copied_first(of: str) -> None:
    """A gradient at one place may be what is written at another."""
    optimizer = sgd(0.5, momentum=0.5).using(executor="blocked")
    shape = {"a": (128,), "b": (128,), "c": (3,)}
    bound, plain = ({n: noise(k, *s) for k, (n, s) in enumerate(shape.items())} for _ in range(2))
    stepped = optimizer.bind(bound)
    state = optimizer.init(plain)
    first = {name: noise(9, *size) for name, size in shape.items()}
    stepped.step(first)
    optimizer.update_(plain, first, state)
    if of == "param":
        lying = {name: one.detach() for name, one in bound.items()}
    elif of == "state":
        leaves = stepped.state.leaves
        lying = {name: leaves[name].stages[-1].momentum_buffer[0] for name in shape}
    else:
        lying = dict(stepped.gradients)
        for name, one in lying.items():
            one.copy_(noise(7, *shape[name]))
    given = {"a": lying["b"], "b": lying["a"], "c": lying["c"]}
    optimizer.update_(plain, {name: one.clone() for name, one in given.items()}, state)
    stepped.step(given)
    assert_same((stepped.params, stepped.state), (plain, state))


def test_a_wrong_gradient_is_an_error_before_anything_is_written() -> None:
    optimizer = sgd(0.1).using(executor="blocked")
    bound = optimizer.bind(params := tree(0))
    before = {name: one.clone() for name, one in params.items()}
    for name, wrong in {"matrix": torch.ones(3, 3), "last": torch.ones(6)}.items():
        with pytest.raises(ValueError, match=name):
            bound.step(tree(1) | {name: wrong})
    assert_same(bound.params, before)
    assert int(bound.state.leaves["matrix"].step) == 0


def test_a_step_of_long_gradients_takes_no_memory_for_them() -> None:
    """Their places in the flat gradient are never touched, so the system gives them no memory."""
    bound = sgd(0.1).using(executor="blocked").bind({"w": noise(0, 300), "b": noise(1, 3)})
    bound.step({"w": noise(2, 300), "b": noise(3, 3)})
    assert not bound.gradients["w"].any()
    assert bound.gradients["b"].all()


def test_it_is_explained() -> None:
    optimizer = sgd(0.1).using(executor="blocked")
    assert "3 long gradients are read where they lie" in optimizer.bind(tree(0)).explain()
    for size in (3, 300):
        assert "long gradients" not in optimizer.bind({"w": noise(0, size)}).explain()
