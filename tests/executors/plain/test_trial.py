"""A step is tried on a leaf before anything is written: what a rule must not do, and its errors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim.kernels.reference import SMALL

from ...choices import case, pairs
from ..rules import OneState, optimizer_of
from ..support import assert_same, copied, noise

pytestmark = pytest.mark.usefixtures("near_borders")


def written(tensor: Tensor, how: str) -> Tensor:
    """Write to a tensor, and return it."""
    if how == "statement":
        tensor *= 0.5
    elif how == "method":
        tensor.mul_(0.5)
    elif how == "out":
        torch.mul(tensor, 0.5, out=tensor)
    else:  # autograd's version of the tensor does not change
        tensor.data.mul_(0.5)
    return tensor


ARGUMENTS = {
    "param": lambda how: lambda p, g, s, c: (written(p, how), s),
    "grad": lambda how: lambda p, g, s, c: (p - written(g, how), s),
    "the state kept": lambda how: lambda p, g, s, c: (p - g, OneState(written(s.kept, how))),
}


@pytest.mark.parametrize("how", ["statement", "method", "out", "data"])
def test_a_rule_that_writes_to_its_arguments_is_refused(how: str, executors: Any) -> None:
    """It would be stepped twice, since it is tried on a leaf before anything is written."""
    for one in pairs(name=ARGUMENTS, executor=executors, run=("update", "update_", "bind")):
        optimizer = optimizer_of(ARGUMENTS[one["name"]](how)).using(executor=one["executor"])
        params = noise(1, 5) if how == "data" else torch.zeros(5)  # autograd counts other writes
        grads = torch.where(params == 0, params, noise(2, 5))
        state = optimizer.init(params)
        steps = {
            "bind": lambda o=optimizer, p=params, g=grads: o.bind(p).step(g),
            "update": lambda o=optimizer, p=params, g=grads, s=state: o.update(p, g, s),
            "update_": lambda o=optimizer, p=params, g=grads, s=state: o.update_(p, g, s),
        }
        given = [params, grads, state.leaves.stages[0].kept]
        before = copied(given)
        with case(**one), pytest.raises(RuntimeError) as raised:
            steps[one["run"]]()
        assert f"mine: a rule wrote to {one['name']}, which is an argument" in str(raised.value)
        assert_same(given, before)


def test_a_rule_that_writes_is_found_on_the_first_elements_of_a_large_leaf(executors: Any) -> None:
    """A leaf is not copied. If its stages need all of it, the error says that it has changed."""
    for executor in executors:
        for kind, is_changed in (("pointwise", False), ("per_tensor", True)):
            optimizer = optimizer_of(ARGUMENTS["param"]("method"), kind=kind)
            params = {"w": torch.ones(SMALL + 1)}
            with case(executor=executor, kind=kind), pytest.raises(RuntimeError) as raised:
                optimizer.using(executor=executor).update_(
                    params, {"w": torch.ones(SMALL + 1)}, optimizer.init(params)
                )
            assert "a rule wrote to param, which is an argument" in str(raised.value)
            said = str(raised.value).endswith("'w' has been changed by it: load it again")
            assert said == is_changed
            assert_same(params["w"], torch.full_like(params["w"], 0.5 if is_changed else 1.0))


def test_a_large_leaf_is_tried_on_its_first_elements(executors: Any) -> None:
    """Its temporaries would take more memory than all later steps."""
    for executor in executors:
        seen = list[int]()

        def rule(p: Any, g: Any, s: Any, c: Any, seen: list[int] = seen) -> Any:
            if type(p) is Tensor:
                seen.append(p.numel())
            return p - c.lr * g, s

        optimizer = optimizer_of(rule).using(executor=executor)
        params = {"w": torch.ones(2, SMALL)}
        with case(executor=executor):
            optimizer.update_(params, {"w": torch.ones(2, SMALL)}, optimizer.init(params))
            assert SMALL in seen
            assert seen.count(2 * SMALL) == (executor == "reference")


def test_the_whole_of_a_large_leaf_gives_the_error(executors: Any) -> None:
    def rule(p: Any, g: Any, s: Any, c: Any) -> Any:
        raise ValueError(f"no step of {p.numel()} elements")

    for executor in executors:
        optimizer = optimizer_of(rule).using(executor=executor)
        params = {"w": torch.ones(2, SMALL)}
        with case(executor=executor), pytest.raises(ValueError, match=f"of {2 * SMALL} elements"):
            optimizer.update_(params, {"w": torch.ones(2, SMALL)}, optimizer.init(params))
