"""Pure steps inside torch.func transforms that do not act on the stepped tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, lion, schedule_free_adamw
from functional_optim.plan import tree_steps
from tests.composition.trees import COMPOSED, grads_at, params_of
from tests.tensors import assert_same

pytestmark = [
    pytest.mark.usefixtures("with_loops"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),  # from jvp
]

CHAINS: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: adamw(0.1),
    "lion": lambda: lion(0.1),
    "clipped": lambda: chain(clip_by_global_norm(0.5), adamw(0.1)),
    "accumulate": COMPOSED["accumulate"],
    "schedule-free": schedule_free_adamw,
}
INSIDE: dict[str, Callable[[Callable[[], object]], object]] = {
    "grad": lambda step: torch.func.grad(_beside(step))(torch.tensor(1.0)),
    "jvp": lambda step: torch.func.jvp(_beside(step), (torch.ones(()),), (torch.ones(()),)),
    "vmap": lambda step: torch.func.vmap(_beside(step))(torch.ones(2)),
}


def _beside(step: Callable[[], object]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        step()
        return 2 * x

    return function


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for plans in (tree_steps,):
        monkeypatch.setattr(plans, "_PLANS", [])


@pytest.mark.parametrize("transform", INSIDE)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("first", [0, 2])
@torch.no_grad()
def test_what_a_transform_does_not_follow_is_stepped_there(
    first: int, name: str, transform: str
) -> None:
    """No tensor that a transform creates is kept for later steps."""
    optimizer, reference = (CHAINS[name]().using(executor=one) for one in ("auto", "reference"))
    params, want = params_of(), params_of()
    state, own = optimizer.init(params), reference.init(want)
    for step in range(6):
        grads, before, given = grads_at(step), params, state
        if step == first:
            made: list[Any] = []

            def inside(given: Any = (params, grads, state), made: list[Any] = made) -> None:
                made[:] = optimizer.update(*given)

            INSIDE[transform](inside)
        params, state = optimizer.update(before, grads, given)
        want, own = reference.update(want, grads, own)
        assert_same([params, state], [want, own])
        if step == first and transform != "vmap":
            assert_same(
                [torch.func.debug_unwrap(one) for one in made[0].values()], [*want.values()]
            )


@pytest.mark.parametrize("name", CHAINS)
def test_the_derivative_by_the_learning_rate_of_a_tree_that_is_known(name: str) -> None:
    found = []
    for executor in ("auto", "reference"):
        optimizer = CHAINS[name]().using(executor=executor)
        params = params_of()
        state = optimizer.init(params)
        with torch.no_grad():
            for step in range(2):  # the third step completes a batch
                params, state = optimizer.update(params, grads_at(step), state)

        given = params, grads_at(3), state

        def after(lr: Tensor, own: Optimizer = optimizer, given: Any = given) -> Tensor:
            made, _ = own.update(*given, lr=lr)
            total: Any = sum(one.square().sum() for one in made.values())
            return total

        found.append([torch.func.grad(after)(torch.tensor(0.1)) for _ in range(2)])
        assert float(found[-1][0]) != 0
    assert_same(*found)
