"""Tests of local_optimizer, which binds a class to parameters and steps by given gradients."""

import pickle
import threading
import warnings
from typing import Any

import pytest
import torch

from functional_optim import (
    accumulate,
    adamw,
    chain,
    clip_by_global_norm,
    partition,
    sgd,
)
from functional_optim.frontends.local_optimizer import bind_recipe, local_optimizer, resolve_recipe
from tests.cases import ANY_SHAPE
from tests.choices import case, each_value

from .support import WithoutEquivalent, assert_same, gradients, locally, noise, parameters


def test_a_class_for_sparse_gradients_takes_no_others() -> None:
    param, twin = (torch.nn.Parameter(noise(0, 4, 2)) for _ in range(2))
    local = local_optimizer(torch.optim.SparseAdam, [param], lr=0.1)
    other = torch.optim.SparseAdam([twin], lr=0.1)
    for step in range(3):
        rows = torch.tensor([[step, 3]])
        values = noise(step, 2, 2)
        twin.grad = torch.sparse_coo_tensor(rows, values, (4, 2), check_invariants=True)
        local.step_by([twin.grad])
        other.step()
        assert_same({"param": param}, {"param": twin})
    with pytest.raises(RuntimeError, match="sparse_adam takes sparse ones"):
        local.step_by([torch.ones(4, 2)])
    assert_same({"param": param}, {"param": twin})


def test_every_class_as_torch_and_its_state_both_ways() -> None:
    for cls in [one.oracle for one in ANY_SHAPE.values() if one.oracle is not None]:
        if cls is torch.optim.SparseAdam:
            continue  # SparseAdam takes only sparse gradients
        with case(cls=cls):
            params, twins = parameters(), parameters()
            local = local_optimizer(cls, params.values(), lr=0.1)
            twin: torch.optim.Optimizer = cls(twins.values(), lr=0.1, foreach=False)
            for step in range(4):
                given = gradients(step, ("scale",) if step == 1 else ())
                for name, grad in given.items():
                    twins[name].grad = grad
                local.step_by(list(given.values()))
                twin.step()
                local.param_groups[0]["lr"] = twin.param_groups[0]["lr"] = 0.05
                if step == 1:
                    saved, kept = local.state_dict(), twin.state_dict()
                    assert saved["param_groups"][0].keys() == kept["param_groups"][0].keys()
                    twin.load_state_dict(saved)
                    local.load_state_dict(kept)
            assert_same(params, twins)
            assert all(param.grad is None for param in params.values())


def test_what_stands_in_grad_is_neither_read_nor_changed() -> None:
    composed = chain(accumulate(2), sgd(lr=0.5))
    for chosen in (torch.optim.AdamW, sgd(lr=0.1), composed, WithoutEquivalent):
        with case(chosen=chosen):
            made = []
            for there in (None, torch.tensor(float("nan"))):
                params = parameters()
                kept = [None if there is None else there.expand_as(p) for p in params.values()]
                for param, grad in zip(params.values(), kept, strict=True):
                    param.grad = grad
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    local = local_optimizer(chosen, params.items())
                for step in range(2):
                    local.step_by(list(gradients(step, ("scale",)).values()))
                found = [param.grad for param in params.values()]
                assert all(a is b for a, b in zip(found, kept, strict=True))
                made.append(params)
            assert_same(*made)
            assert torch.equal(made[0]["scale"], parameters()["scale"])


def test_what_was_resolved_can_be_sent() -> None:
    for given in (torch.optim.AdamW, adamw, adamw(), lambda lr: chain(adamw(lr=lr))):
        found = pickle.loads(pickle.dumps(resolve_recipe(given, (), {"lr": 0.1})))
        params = parameters()
        bind_recipe(found, params.items()).step_by(list(gradients(0).values()))
        assert_same(params, locally(adamw(lr=0.1), [gradients(0)]))


def test_groups_and_bad_input() -> None:
    params = list(parameters().values())
    wrong: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "params must be parameters", lambda: local_optimizer(sgd, params[0])),
        (TypeError, "all parameter groups or all", lambda: local_optimizer(sgd, [params[0], {}])),
        (ValueError, 'has no "params"', lambda: local_optimizer(sgd, [{"lr": 1.0}])),
        (ValueError, "same parameter", lambda: local_optimizer(sgd, [params[0], params[0]])),
        (ValueError, "no parameters", lambda: local_optimizer(sgd, [])),
        (TypeError, "takes its options by name", lambda: local_optimizer(sgd(), params, 0.1)),
    ]
    for kind, text, make in wrong:
        with case(text=text), pytest.raises(kind, match=text):
            make()
    local = local_optimizer(sgd, [{"params": params[:1], "lr": 0.5}, {"params": params[1:]}])
    assert [group["lr"] for group in local.param_groups] == [0.5, 1e-3]
    with pytest.raises(ValueError, match="got 1 gradients for 4 parameters"):
        local.step_by([None])
    with pytest.raises(ValueError, match="no such stage"):
        local.measure([None] * 4)
    before = [param.detach().clone() for param in params]
    odd = [*list(gradients(0).values())[:3], noise(0, 2)]
    with pytest.raises(ValueError, match="has shape"):
        local.step_by(odd)
    assert all(map(torch.equal, params, before))


class Divides(torch.optim.SGD):
    """Optimizer class without functional equivalent that makes its own groups."""

    def __init__(self, params: Any, lr: float) -> None:
        first, *others = params
        super().__init__([{"params": others}, {"params": [first]}], lr=lr)


def last_first(path: Any, _: Any) -> str:
    return "late" if path[0] in "ab" else "early"


PARTS = partition({"early": sgd(0.5), "late": sgd(0.25)}, last_first)
OF_GROUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a class": (torch.optim.SGD, {"lr": 0.5}),
    "an optimizer": (sgd(0.5), {}),
    "parts": (PARTS, {}),
    "parts behind a clip": (chain(clip_by_global_norm(1e9), PARTS), {}),
    "a class without equivalent": (WithoutEquivalent, {"lr": 0.5}),
    "one that divides groups": (Divides, {"lr": 0.5}),
}


@each_value(name=list(OF_GROUPS))
def test_gradients_are_in_the_order_of_the_groups(name: str) -> None:
    """With equal shapes, another order would silently step wrong parameters (fault 43)."""
    chosen, options = OF_GROUPS[name]
    params = {key: torch.zeros(2, requires_grad=True) for key in "abcd"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = params.values() if isinstance(chosen, type) else params.items()
        local = local_optimizer(chosen, made, **options)
    order = [param for group in local.param_groups for param in group["params"]]
    assert [id(one) for one in local.params] == [id(one) for one in order]
    assert {id(one) for one in order} == {id(one) for one in params.values()}
    numbers = {id(one): float(k + 1) for k, one in enumerate(params.values())}
    gradients_of = [torch.full((2,), numbers[id(one)]) for one in order]
    if local.measured_stages:
        squares = [2.0 * numbers[id(one)] ** 2 for one in order]
        assert local.measure(gradients_of).tolist() == pytest.approx(squares)
    local.step_by(gradients_of)
    for key, param in params.items():
        lr = 0.25 if "parts" in name and key in "ab" else 0.5
        assert param.tolist() == [-lr * numbers[id(param)]] * 2


def test_a_step_waits_until_a_checkpoint_is_loaded_or_saved() -> None:
    """Another thread stepped by a state of which only some parts were loaded."""
    local: Any = local_optimizer(torch.optim.Adam, [torch.ones(2)], lr=0.1)
    is_stepped = threading.Event()

    def step() -> None:
        local.step_by([torch.ones(2)])
        is_stepped.set()

    def check(*_: Any) -> None:
        is_stepped.clear()
        threads.append(threading.Thread(target=step))
        threads[-1].start()
        assert not is_stepped.wait(0.1)

    threads: list[threading.Thread] = []
    local.register_load_state_dict_post_hook(check)
    local.register_state_dict_post_hook(check)
    local.load_state_dict(local.state_dict())
    for thread in threads:
        thread.join()
    assert len(threads) == 2
    assert int(local.state[local.params[0]]["step"]) == 2
