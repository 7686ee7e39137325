"""Tests of steps of a shard by given gradients, as those of a local optimizer."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, partition, sgd
from functional_optim.frontends.local_optimizer import LocalOptimizer, local_optimizer
from sharding import ZeroRedundancyOptimizer
from sharding.transport.local import LocalWorld
from sharding.zero.local_shards import Gradients
from tests.choices import case
from tests.composition.trees import grads_at, kind, params_of

from .composed import SHARDED

CHOSEN: dict[str, Callable[[], Optimizer]] = {
    "adamw": lambda: adamw(0.1),
    "clipped": lambda: chain(clip_by_global_norm(0.5), sgd(0.1, momentum=0.9)),
    "parts": lambda: chain(
        clip_by_global_norm(0.5), partition({"matrices": sgd(0.1), "rest": adamw(0.1)}, kind)
    ),
    # Scalars that all parameters share.
    **{name: SHARDED[name] for name in ("accumulate", "finite", "schedule-free", "prodigy")},
}


def named() -> dict[str, Tensor]:
    return {name: one.requires_grad_() for name, one in params_of().items()}


def stepped(
    local: LocalOptimizer, given: list[Tensor | None], summed: Callable[..., Tensor]
) -> None:
    """Measure all totals and step a local optimizer, as every front-end does."""
    measured: list[Tensor] = []
    for _ in range(local.measured_stages):
        measured.append(summed(local.measure(given, measured=measured)))
    local.step_by(given, measured=measured)


def in_order(added: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for one in added:
        total = total + one
    return total


def step_shards(zero: ZeroRedundancyOptimizer, gradients: Gradients) -> None:
    measured: list[Tensor] = []
    for _ in range(zero.measured_stages):
        measured.append(zero.total(zero.measure(gradients, measured=measured)))
    zero.step_owned(gradients, measured=measured)


def owned_gradients(
    zero: ZeroRedundancyOptimizer, grads: dict[str, Tensor | None], *, by_part: bool = False
) -> dict[str, list[tuple[int, int, Tensor]]]:
    """Return the gradients of a rank's ranges: those of whole parameters, or of the ranges."""
    found: dict[str, list[tuple[int, int, Tensor]]] = {}
    for one in zero.owned:
        grad = grads[one.path]
        if grad is not None:
            cut = by_part and not one.whole
            own = grad.reshape(-1)[one.start : one.stop] if cut else grad
            found.setdefault(one.path, []).append((one.start, one.stop, own))
    return found


@pytest.mark.parametrize("name", CHOSEN)
def test_alone_it_is_what_the_factory_makes(name: str) -> None:
    """On one rank, ZeRO steps by given gradients as the optimizer that local_optimizer makes.

    State and options can be restored in the middle of a run, also in another optimizer.
    """

    def of_rank(group: Any) -> None:
        params, twins = named(), named()
        zero = ZeroRedundancyOptimizer(params.items(), CHOSEN[name](), process_group=group)
        twin = local_optimizer(CHOSEN[name](), twins.items())
        names = [next(key for key, one in twins.items() if one is param) for param in twin.params]
        for step in range(6):
            grads = grads_at(step, missing={1: "scale", 4: "body.bias"})
            step_shards(zero, owned_gradients(zero, grads))
            stepped(twin, [grads[one] for one in names], in_order)
            for key, param in params.items():
                assert torch.equal(param, twins[key]), (step, key)
            assert all(param.grad is None for param in params.values())
            for one in (zero.optim, twin):
                for own in one.param_groups:
                    if "lr" in own:
                        own["lr"] *= 0.5
            if step == 2:
                saved = copy.deepcopy(zero.optim.state_dict())
                step_shards(zero, owned_gradients(zero, grads_at(7)))
                params = named()
                zero = ZeroRedundancyOptimizer(params.items(), CHOSEN[name](), process_group=group)
                zero.optim.load_state_dict(saved)
                for key, param in params.items():
                    param.data.copy_(twins[key].data)
                more = [torch.zeros(())] * (1 + zero.measured_stages)
                with pytest.raises(ValueError, match=f"needs {zero.measured_stages} totals"):
                    zero.step_owned(owned_gradients(zero, grads), measured=more)

    LocalWorld(1).run(of_rank)


def test_the_shard_is_a_local_optimizer() -> None:
    """``optim`` steps by given gradients; a frozen parameter has no state."""

    def of_rank(group: Any) -> None:
        made = []
        for by_step in (False, True):
            params = named()
            params["scale"].requires_grad_(False)
            zero = ZeroRedundancyOptimizer(params.items(), torch.optim.AdamW, group)
            local: Any = zero.optim
            for step in range(3):
                grads = grads_at(step, missing={0: "scale", 1: "scale", 2: "scale"})
                if by_step:
                    for key, one in params.items():
                        one.grad = grads[key]
                    zero.step()
                else:
                    paths = {id(one): key for key, one in params.items()}
                    local.step_by([grads[paths[id(one)]] for one in local.params])
            made.append(params)
            assert params["scale"] not in zero.optim.state
        assert all(map(torch.equal, made[0].values(), made[1].values()))

    LocalWorld(1).run(of_rank)


def test_ranks_that_are_given_the_same_totals_step_as_one() -> None:
    """Shards on several ranks are stepped as one process steps, also with cut parameters.

    A piece accepts its own gradient or the gradient of the whole parameter.
    """
    want, twin = named(), CHOSEN["adamw"]()
    state = twin.init(want)
    for step in range(2):
        twin.update_(want, grads_at(step), state)
    for by_part in (False, True):
        with case(by_part=by_part):
            cut_shards: list[Any] = []

            def of_rank(group: Any, by_part: bool = by_part, cut_shards: Any = cut_shards) -> None:
                params = named()
                zero = ZeroRedundancyOptimizer(
                    params.items(), twin, process_group=group, policy="elements"
                )
                for step in range(2):
                    step_shards(zero, owned_gradients(zero, grads_at(step), by_part=by_part))
                cut_shards.extend(one for one in zero.owned if not one.whole)
                for one in zero.owned:
                    found = params[one.path].detach().reshape(-1)[one.start : one.stop]
                    own = want[one.path].detach().reshape(-1)[one.start : one.stop]
                    assert torch.equal(found, own)

            LocalWorld(3).run(of_rank)
            assert cut_shards


def test_what_does_not_fit_changes_nothing() -> None:
    def of_rank(group: Any) -> None:
        params = named()
        zero = ZeroRedundancyOptimizer(params.items(), adamw(0.1), process_group=group)
        local = zero.optim
        given = owned_gradients(zero, grads_at(0))
        zero.step_owned(given)
        before = {name: one.detach().clone() for name, one in params.items()}
        *_, path = given
        misshapen = {path: [(start, stop, torch.zeros(2, 9)) for start, stop, _ in given[path]]}
        saved = copy.deepcopy(local.state_dict())
        odd = copy.deepcopy(saved)
        odd["param_groups"][0]["lr"] = 7.0
        first, *_, last = odd["state"]
        odd["state"][first]["exp_avg"].fill_(9.0)
        odd["state"][last]["exp_avg"] = torch.zeros(3, 3, 3)
        wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (ValueError, "has shape", lambda: zero.step_owned({**given, **misshapen})),
            (ValueError, "no total", lambda: zero.measure(given)),
            (ValueError, "exp_avg", lambda: local.load_state_dict(odd)),
        ]
        for kind_, text, call in wrong:
            with case(text=text), pytest.raises(kind_, match=text):
                call()
        assert all(torch.equal(one, before[name]) for name, one in params.items())
        now = local.state_dict()
        assert now["param_groups"] == saved["param_groups"]
        for key, entries in saved["state"].items():
            assert all(torch.equal(now["state"][key][one], entries[one]) for one in entries)

    LocalWorld(1).run(of_rank)


def test_a_copy_of_a_shard_is_refused_with_what_to_do() -> None:
    zero = ZeroRedundancyOptimizer(
        list(named().items()), torch.optim.Adam, LocalWorld(1).groups[0], lr=0.1
    )
    for one in (zero, zero.optim):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.* load the state_dict"):
            copy.deepcopy(one)
