"""Rules that read a scalar of their leaf in each step: programs step them, not the reference."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adafactor,
    add_noise,
    asgd,
    chain,
    constrain_norm,
    lookahead,
    nadam,
    sgd,
)
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Link
from functional_optim.core.state import state_tensors
from functional_optim.kernels.chunks import tensors_of, why_not_pointwise
from functional_optim.kernels.leaf_program import program_of
from functional_optim.kernels.passes import passes_of
from functional_optim.kernels.signature import signature
from functional_optim.numeric import above, number
from tests.cases import ONE_CHAIN

from ...choices import case
from ..support import noise

RULES: dict[str, tuple[Callable[[], Optimizer], Callable[[list[Parameter]], torch.optim.Optimizer]]]
RULES = {
    "nadam": (nadam, torch.optim.NAdam),
    "asgd": (lambda: asgd(t0=2), lambda params: torch.optim.ASGD(params, t0=2)),
    "adafactor": (adafactor, torch.optim.Adafactor),
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (3, 4), (2, 3, 4), (40, 30)]


def leaf_of(optimizer: Optimizer, param: Tensor) -> Leaf:
    hypers = tuple(link.hyper for link in optimizer.links)
    coefficients = tuple(
        stage.coefficients(2.0, hyper)
        for stage, hyper in zip(optimizer.stages, hypers, strict=True)
    )
    states = optimizer.init(param).leaves.stages
    return Leaf(param, torch.ones_like(param), states, coefficients, "w", hypers, 2.0)


def test_every_algorithm_that_needs_whole_leaves_has_a_program() -> None:
    """An algorithm without a program would silently run by the slow reference executor."""
    for name, one in ONE_CHAIN.items():
        optimizer = one.factory()
        pointwise = why_not_pointwise(optimizer.stages) is None and name not in RULES
        if not pointwise and passes_of(optimizer.stages) is None:
            with case(name=name):
                found = program_of(optimizer.stages, leaf_of(optimizer, noise(1, 6, 4)))
                assert not isinstance(found, str), found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", RULES)
def test_its_program_has_torchs_bits(name: str, dtype: torch.dtype) -> None:
    """Steps with changing numbers, every shape, and late gradients have torch's bits."""
    make, make_theirs = RULES[name]
    params = [Parameter(noise(k, *shape, dtype=dtype)) for k, shape in enumerate(SHAPES)]
    twins = [Parameter(param.detach().clone()) for param in params]
    ours, theirs = TorchOptimizer(params, make()), make_theirs(twins)
    for step in range(6):
        for k, (param, twin) in enumerate(zip(params, twins, strict=True)):
            late = step == 3 and k % 2 == 0
            param.grad = None if late else noise(10 * step + k, *param.shape, dtype=dtype)
            twin.grad = None if param.grad is None else param.grad.clone()
        ours.step()
        theirs.step()
        for k, (param, twin) in enumerate(zip(params, twins, strict=True)):
            with case(step=step, shape=SHAPES[k]):
                assert torch.equal(param, twin)
                for key, value in theirs.state[twin].items():
                    assert torch.equal(ours.state[param][key].to(value.dtype), value), key


@pytest.mark.parametrize("later", [lookahead(2), constrain_norm(1.0)], ids=["lookahead", "norm"])
def test_a_later_stage_does_not_write_to_an_average_that_is_the_parameter(later: Link) -> None:
    """ASGD's average is the parameter until step t0 + 2, before later stages change it."""
    theirs = chain(asgd(0.1, t0=2), later).using(executor="reference")
    ours = theirs.using(executor="auto")
    params = {str(k): noise(k, *shape) for k, shape in enumerate(SHAPES)}
    state = twin_state = theirs.init(params)
    twins = params
    for step in range(6):
        grads = {name: noise(10 * step + k, *SHAPES[k]) for k, name in enumerate(params)}
        params, state = ours.update(params, grads, state)
        twins, twin_state = theirs.update(twins, grads, twin_state)
        for name in params:
            with case(step=step, shape=tuple(params[name].shape)):
                assert torch.equal(params[name], twins[name])
                pair = state.leaves[name].stages, twin_state.leaves[name].stages
                for one, other in zip(*map(state_tensors, pair), strict=True):
                    assert torch.equal(one, other)


@pytest.mark.parametrize("name", RULES)
def test_it_is_explained_as_it_is_stepped(name: str) -> None:
    params = [Parameter(noise(k, 30, 20)) for k in range(3)]
    assert ": one by one; " in TorchOptimizer(params, RULES[name][0]()).explain()


class _Alive(TorchDispatchMode):
    """Counter of the bytes of live tensors that operations returned."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (*args, *(kwargs or {}).values())
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and not any(made is one for one in given):
            size = made.nbytes
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(made, self._dropped, size)
        return made

    def _dropped(self, size: int) -> None:
        self.now -= size


def test_a_program_drops_what_it_reads_no_more() -> None:
    """A program frees temporaries early. Noise takes about 30 operations without ``out=``."""
    optimizer, count = chain(add_noise(0.1), sgd(lr=0.1)), 1000
    leaf = leaf_of(optimizer, noise(1, count))
    found = program_of(optimizer.stages, leaf)
    assert not isinstance(found, str), found
    _, numbers, _ = signature(optimizer.stages, leaf)
    arguments = found.arguments(numbers, [])
    with _Alive() as alive:
        found.step(*tensors_of(leaf), *arguments)
    assert alive.most <= 6 * 8 * count


def test_a_number_is_read_in_a_graph_for_known_shapes_alone() -> None:
    assert number(torch.tensor(0.25)) == 0.25
    assert above(0.5, 0.25, 1.0, 2.0) == 1.0
    assert above(0.25, 0.5, 1.0, 2.0) == 2.0
