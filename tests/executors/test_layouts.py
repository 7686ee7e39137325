"""Where tensors lie in memory: any strides, any sharing. The results are the reference's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import Optimizer, chain, clip_by_global_norm
from functional_optim.executors import lanes
from functional_optim.forms import map_state
from functional_optim.state import LeafState, State
from functional_optim.testing.runs import laid_out

from .rules import RULES, VARIANTS
from .support import assert_same, bits, copied, differ, noise

EXECUTORS = ["script", "blocked", "auto"]
"""Those that are bit for bit the reference for a rule that torch has no fused kernel for."""

RULE = RULES["reuses"]
CLIPPED = chain(clip_by_global_norm(0.5), RULE)
LAYOUTS = ("contiguous", "transposed", "sliced", "channels_last", "expanded", "backwards")
SHAPES = ((), (1,), (0,), (3,), (5, 7), (4, 1), (2, 0, 3), (2, 3, 4, 5), (1, 2, 1, 2), (65_537,))


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """The same values, laid out somehow; "expanded" repeats the first."""
    if layout == "expanded":
        return tensor[:1].expand(tensor.shape) if tensor.dim() and len(tensor) else tensor
    if layout == "backwards" and tensor.dim():
        order = tuple(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    return laid_out(tensor, layout)


leaves = st.lists(
    st.tuples(
        st.sampled_from(SHAPES),
        st.sampled_from([one for one in LAYOUTS if one != "expanded"]),
        st.sampled_from(LAYOUTS),
        st.sampled_from(LAYOUTS[:4]),
        st.sampled_from([torch.float32, torch.float64, torch.complex64]),
    ),
    min_size=1,
    max_size=4,
)


def made(drawn: list[Any], seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    params, grads = {}, {}
    for k, (shape, layout, of_grad, _, dtype) in enumerate(drawn):
        params[str(k)] = in_layout(noise(seed + k, *shape, dtype=dtype), layout)
        grads[str(k)] = in_layout(noise(seed + 50 + k, *shape, dtype=dtype), of_grad)
    return params, grads


def with_layouts(state: State, drawn: list[Any]) -> State:
    """The state, each leaf's in a layout of its own."""
    return State(
        {
            key: LeafState(
                leaf.step,
                tuple(
                    map_state(lambda t, one=one: in_layout(t, one[3]).clone(), stage)
                    for stage in leaf.stages
                ),
            )
            for (key, leaf), one in zip(state.leaves.items(), drawn, strict=True)
        }
    )


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("optimizer", [RULE, VARIANTS["lion"]], ids=["reuses", "lion"])
def test_any_strides(executor: Any, optimizer: Optimizer) -> None:
    @settings(derandomize=True, max_examples=60, database=None)
    @given(drawn=leaves, seed=st.integers(0, 99))
    def check(drawn: list[Any], seed: int) -> None:
        params, grads = made(drawn, seed)
        state = with_layouts(optimizer.init(params), drawn)
        given = copied((params, grads, state))
        other = optimizer.using(executor=executor)
        want = optimizer.update(params, grads, state)
        assert_same(other.update(params, grads, state), want)
        assert_same((params, grads, state), given)
        strides = {key: param.stride() for key, param in params.items()}
        other.update_(params, grads, state)
        assert_same((params, state), want)
        assert_same(grads, given[1])
        assert {key: param.stride() for key, param in params.items()} == strides

    check()


def test_conjugate_and_negative_gradients() -> None:
    for dtype in (torch.complex64, torch.complex128):
        for count in (5, 70_001, lanes.PACK + 3):
            params, grads = noise(0, count, dtype=dtype), noise(1, count, dtype=dtype).conj()
            check_gradient(params, grads)
    for count in (5, lanes.PACK + 3):
        check_gradient(noise(0, count), noise(1, count, dtype=torch.complex64).conj().imag)


def check_gradient(param: Tensor, grad: Tensor) -> None:
    state = RULE.init(param)
    want = RULE.update(param, grad, state)
    for executor in EXECUTORS:
        other = RULE.using(executor=executor)
        assert_same(other.update(param, grad, state), want)
        again, written = param.clone(), copied(state)
        other.update_(again, grad, written)
        assert_same((again, written), want)


@pytest.mark.parametrize("count", [3, 70_001, lanes.PACK + 3])
def test_the_gradient_may_be_the_parameter_itself(count: int) -> None:
    for executor in ("reference", *EXECUTORS):
        optimizer = RULE.using(executor=executor)
        param = noise(0, count)
        state = optimizer.init(param)
        want = RULE.update(param, param.clone(), state)
        assert_same(optimizer.update(param, param, state), want)
        optimizer.update_(param, param, state)
        assert_same((param, state), want)
        bound = optimizer.bind({"w": noise(0, count)})
        bound.step(bound.params)
        assert_same(bound.params["w"], want[0])


@pytest.mark.parametrize("count", [3, 70_001, lanes.PACK + 3])
def test_a_state_may_be_the_gradient(count: int) -> None:
    optimizer = RULES["keep_grad"]
    for executor in ("reference", *EXECUTORS):
        param, grad = noise(0, count), noise(1, count)
        state = optimizer.init(param)
        aliased = State(LeafState(state.leaves.step, (state.leaves.stages[0]._replace(kept=grad),)))
        want = optimizer.update(param, grad, aliased)
        optimizer.using(executor=executor).update_(param, grad, aliased)
        assert_same((param, aliased), want)


def overlapping(count: int) -> dict[str, Tensor]:
    base = noise(0, 2 * count)
    return {"a": base[: count + 2], "b": base[count:]}


def interleaved(count: int) -> dict[str, Tensor]:
    base = noise(0, 2 * count)
    return {"a": base[::2], "b": base[1::2]}


def one_inside_the_other(count: int) -> dict[str, Tensor]:
    base = noise(0, count + 2)
    return {"a": base, "b": base[1 : count + 1]}


@pytest.mark.parametrize("count", [5, 1000, 70_001])
@pytest.mark.parametrize("make", [overlapping, interleaved, one_inside_the_other])
@pytest.mark.parametrize("optimizer", [RULE, CLIPPED], ids=["reuses", "clipped"])
def test_leaves_that_share_memory(
    optimizer: Optimizer, make: Callable[[int], dict[str, Tensor]], count: int
) -> None:
    def stepped(executor: Any) -> Any:
        params = make(count)
        # In another order than in memory, with a bystander before and after.
        params = {"x": noise(7, 9), "b": params["b"], "a": params["a"], "y": noise(8, count)}
        grads = {key: noise(k, *p.shape) for k, (key, p) in enumerate(params.items())}
        state = optimizer.init(params)
        for _ in range(2):
            optimizer.using(executor=executor).update_(params, grads, state)
        return params, state

    want = stepped("reference")
    for executor in EXECUTORS:
        assert_same(stepped(executor), want)


def test_a_gradient_that_is_the_parameter_of_another_leaf() -> None:
    def stepped(executor: Any, count: int) -> Any:
        params = {"a": noise(0, count), "b": noise(1, count), "c": noise(2, 4)}
        state = RULE.init(params)
        grads = {"a": params["b"], "b": params["a"], "c": noise(3, 4)}
        RULE.using(executor=executor).update_(params, grads, state)
        return params, state

    for count in (5, 70_001):
        want = stepped("reference", count)
        pure = RULE.update(noise(1, count), noise(0, count), RULE.init(noise(1, count)))
        assert differ(want[0]["b"], pure[0])  # its gradient was stepped before it
        for executor in EXECUTORS:
            assert_same(stepped(executor, count), want)


def test_leaves_may_share_their_gradient() -> None:
    params = {key: noise(k, 6) for k, key in enumerate("abc")}
    grad = noise(9, 6)
    grads = dict.fromkeys(params, grad)
    state = RULE.init(params)
    want = RULE.update(params, grads, state)
    for executor in EXECUTORS:
        assert_same(RULE.using(executor=executor).update(params, grads, state), want)
    assert lanes._tangled([]) == set()


@pytest.mark.parametrize("executor", ["reference", *EXECUTORS, "fused"])
def test_tensors_without_memory(executor: Any) -> None:
    optimizer = VARIANTS["adamw"].using(executor=executor)
    params = {"w": torch.ones(3, 4, device="meta"), "z": torch.ones(70_001, device="meta")}
    state = optimizer.init(params)
    if executor == "fused":
        with pytest.raises(ValueError, match=r"meta"):
            optimizer.update(params, params, state)
        return
    new, after = optimizer.update(params, params, state)
    assert new["w"].shape == (3, 4) and new["w"].device.type == "meta"
    optimizer.update_(params, params, state)
    assert int(after.leaves["z"].step) == int(state.leaves["z"].step) == 1
    bound = optimizer.bind(params)
    bound.step(params)
    assert int(bound.state.leaves["z"].step) == 1


def test_a_default_device_changes_nothing() -> None:
    params, grads = {"w": noise(0, 40)}, {"w": noise(1, 40)}
    for executor in ("reference", *EXECUTORS, "fused"):
        optimizer = VARIANTS["adamw"].using(executor=executor)
        state = optimizer.init(params)
        want = optimizer.update(params, grads, state)
        with torch.device("meta"):
            assert_same(optimizer.update(params, grads, state), want)
            bound = optimizer.bind({"w": params["w"].clone()})
            bound.step(grads)
            assert_same(bound.params, want[0])


@pytest.mark.parametrize("executor", ["reference", *EXECUTORS])
def test_values_that_are_not_finite(executor: Any) -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, 3e38, 1.0])
    for name, optimizer in {**RULES, **VARIANTS}.items():
        params, grads = {"w": special.flip(0), "v": special}, {"w": special, "v": special.roll(3)}
        state = optimizer.init(params)
        want = optimizer.update(params, grads, state)
        if executor == "auto" and name in {"adamw", "adam amsgrad", "adagrad", "sgd nesterov"}:
            continue  # torch's fused kernels, which have tests of their own
        got = optimizer.using(executor=executor).update(params, grads, state)
        # Which NaN it is does not matter.
        for key in params:
            same = bits(got[0][key]) == bits(want[0][key])
            assert bool((same | (got[0][key].isnan() & want[0][key].isnan())).all()), name
