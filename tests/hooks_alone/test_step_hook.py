"""Step hook on one rank: equal bit for bit to DDP and torch.optim, without silent losses.

Tests on several ranks are in ``tests/ddp``.
"""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from functional_optim import chain, clip_by_global_norm, sgd, sophia
from hooks import OptimizerState, step_hook
from hooks.step_hook import build_hook
from tests.choices import case
from tests.ddp.cases import CASES, CLIPPED, ONE, SMALL, UNUSED
from tests.ddp.comparison import copied, moved
from tests.ddp.models import WIDTH, Tower
from tests.ddp.torch_side import Hook, done, fails_at_once, fails_later
from tests.ddp.twins import backward, compare, loss_of
from tests.steady import calls_of

pytestmark = pytest.mark.usefixtures("world_of_one")

BESIDE = (
    "bucket views",
    "static graph",
    "set_hyper",
    "override",
    "no_sync",
    "unused, momentum",
    "complex",
    "channels_last",
    "transposed",
    "frozen, 0-d, empty",
    "sparse",
    "copy",
    "list",
    "in order, unused",
)


def test_equal_to_the_twin() -> None:
    for name in BESIDE:
        before: dict[str, int] = {}
        for number, seen in enumerate(compare(CASES[name]._replace(executor="reference"))):
            with case(name=name, iteration=number):
                assert seen["differences"] == [] and seen["finite"]
                stepped = {n for n, steps in seen["steps"].items() if steps > before.get(n, 0)}
                assert stepped
                assert set(seen["moved"]) == stepped - {"nothing"}  # a parameter without elements
            before = seen["steps"]


def test_clipping_is_that_of_clip_grad_norm() -> None:
    for seen in compare(CLIPPED["clip"]._replace(executor="reference")):
        assert seen["norm"] > 2 * CLIPPED["clip"].clip  # otherwise clipping changes nothing
        assert seen["apart"] < 1e-12 and seen["finite"]


def wrapped(**options: Any) -> DistributedDataParallel:
    """Return a tower under DDP, with several buckets from the first iteration on."""
    return DistributedDataParallel(Tower(), **{**UNUSED, **options})


def with_hook(ddp: DistributedDataParallel, **options: Any) -> OptimizerState:
    return step_hook(ddp, sgd(lr=0.1), executor="reference", **options)


# -- each parameter once ------------------------------------------------------------------------


def test_a_parameter_that_comes_twice() -> None:
    """Two DDP modules around the same parameters, with one OptimizerState, cause an error."""
    for options, text in ((ONE, "came twice in one iteration"), (UNUSED, "never stepped: ")):
        module = Tower()
        both = [DistributedDataParallel(module, **options) for _ in range(2)]
        state = OptimizerState(sgd(lr=0.1), both[0], executor="reference")
        hook = build_hook(state)
        for ddp in both:
            ddp.register_comm_hook(None, hook)
        loss = sum(ddp(torch.ones(2, WIDTH), 0, 0).sum() for ddp in both)
        with case(options=options):
            with pytest.raises(RuntimeError, match=text) as caught:
                loss.backward()
            assert re.search(r"'layers\.0\.(weight|bias)'", str(caught.value))
            assert {int(leaf.step) for leaf in state.state.leaves.values()} <= {0, 1}


def test_a_parameter_that_never_comes() -> None:
    """A parameter is unknown to DDP; the other requires gradients only after wrapping."""
    ddp = wrapped()
    params = {**dict(ddp.module.named_parameters()), "stranger": nn.Parameter(torch.ones(2))}
    state = with_hook(ddp, params=params)
    with pytest.raises(RuntimeError, match=r"never stepped: 'stranger'\. "):
        backward(ddp, 0)
    assert int(state.state.leaves["stranger"].step) == 0
    assert torch.equal(params["stranger"], torch.ones(2))
    module = Tower()
    module.layers[1].weight.requires_grad_(False)
    ddp = DistributedDataParallel(module, **SMALL)
    module.layers[1].weight.requires_grad_(True)
    before = module.layers[1].weight.detach().clone()
    with_hook(ddp)
    with pytest.raises(RuntimeError, match=r"never stepped: 'layers\.1\.weight'\. "):
        backward(ddp, 0)
    assert torch.equal(module.layers[1].weight, before)


def test_what_takes_more_than_gradients_is_refused() -> None:
    match = "a communication hook takes only gradients, but scale_by_sophia also needs 'hess"
    with pytest.raises(TypeError, match=match):
        OptimizerState(sophia(), wrapped())


def test_an_ignored_parameter() -> None:
    """A parameter that DDP ignores is refused, unless ``params=`` leaves it out."""
    module = Tower()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layers.1.weight"])
    ddp = DistributedDataParallel(module, **SMALL)
    with pytest.raises(ValueError, match=r"'layers\.1\.weight', .*params= without it"):
        OptimizerState(sgd(), ddp)
    rest = {name: p for name, p in module.named_parameters() if name != "layers.1.weight"}
    twin = copy.deepcopy(module)
    with_hook(ddp, params=rest)
    loss_of(twin, 0, 0).backward()
    twin.layers[1].weight.grad = None
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    backward(ddp, 0)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


class HalfUsed(nn.Module):
    """Model with one layer that takes no part in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(WIDTH, WIDTH)
        self.used = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rank: int, iteration: int) -> Tensor:
        return self.used(x)


def test_buckets_that_ddp_leaves_out_are_no_silent_loss() -> None:
    """With ``skip_all_reduce_unused_params``, DDP calls no hook for buckets that are not used."""
    ddp = DistributedDataParallel(HalfUsed(), **UNUSED, skip_all_reduce_unused_params=True)
    twin = copy.deepcopy(ddp.module)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, foreach=False)
    state = step_hook(ddp, sgd(lr=0.1, momentum=0.9), executor="reference")
    for iteration in range(2):
        backward(ddp, iteration)
        ddp.zero_grad()
        loss_of(twin, 0, iteration).backward()
        plain.step()
        plain.zero_grad()
    steps = {name: int(leaf.step) for name, leaf in state.state.leaves.items()}
    assert steps == {"used.weight": 2, "used.bias": 2, "never.weight": 0, "never.bias": 0}
    for ours, theirs in zip(ddp.module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# -- inner hooks --------------------------------------------------------------------------------


FIRST = ("layers.5.bias",)
"""Parameters of the first bucket, which is stepped before the second one fails."""
INNER: dict[str, tuple[Hook, type[Exception], str, tuple[str, ...]]] = {
    "too small": (
        lambda group, bucket: done(bucket.buffer()[:3]),
        RuntimeError,
        "the inner hook returned 3 elements for a bucket of 64 elements",
        (),
    ),
    "no tensor": (
        lambda group, bucket: done("gradients"),
        RuntimeError,
        "the inner hook returned str for a bucket of 64 elements",
        (),
    ),
    "fails later": (fails_later, RuntimeError, "OSError: bucket 1 is lost", FIRST),
    "fails at once": (fails_at_once, OSError, "bucket 1 is lost", FIRST),
}


def test_an_inner_hook_that_breaks_its_promise() -> None:
    """No bucket is stepped from the failed one on; a chain with a total steps no bucket at all."""
    for name, (inner, error, text, first) in INNER.items():
        for optimizer in (sgd(), chain(clip_by_global_norm(1.0), sgd())):
            ddp = wrapped()
            state = step_hook(ddp, optimizer, executor="reference", inner_hook=inner)
            before = copied(ddp)
            with case(inner=name, measured=state.measured), pytest.raises(error, match=text):
                backward(ddp, 0)
            # The bucket before the failed one may still be on its way.
            assert set(moved(before, ddp)) <= set(() if state.measured else first)


# -- calls --------------------------------------------------------------------------------------


def test_a_step_takes_as_many_calls_for_many_parameters_as_for_few() -> None:
    """A step of a bucket runs no Python call for each parameter."""
    counts = []
    for count in (4, 40):
        module = nn.ParameterList(torch.ones(3) for _ in range(count))
        state = OptimizerState(sgd(lr=0.1, momentum=0.9), DistributedDataParallel(module))
        given = [torch.ones(3)] * count
        for _ in range(4):
            state.step_some(list(state.params), [one.clone() for one in given])
        given = [one.clone() for one in given]
        counts.append(calls_of(lambda: state.step_some(list(state.params), given)))  # noqa: B023
    assert counts[0] == counts[1]
