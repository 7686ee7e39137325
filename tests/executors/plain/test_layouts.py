"""Steps of tensors with any strides or shared memory have the reference's results."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import Optimizer, adamw, chain, clip_by_global_norm, qhm
from functional_optim.core.state import LeafState, State, map_state
from functional_optim.testing.runs import laid_out

from ...choices import case, examples, pairs
from ..rules import RULES, VARIANTS
from ..support import LARGE, assert_same, copied, differ, noise

RULE = RULES["reuses"]
CLIPPED = chain(clip_by_global_norm(0.5), RULE)
COUNTS = (3, 700, LARGE)
"""Sizes of a small leaf, of a leaf that is a chunk, and of a leaf that is cut."""
LAYOUTS = ("contiguous", "transposed", "sliced", "channels_last", "expanded", "backwards")
SHAPES = ((), (1,), (0,), (3,), (5, 7), (4, 1), (2, 0, 3), (2, 3, 4, 5), (1, 2, 1, 2), (LARGE,))


def in_layout(tensor: Tensor, layout: str) -> Tensor:
    """Return the same values in a layout; "expanded" repeats the first."""
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
    """Return the state with each leaf in its drawn layout."""

    def laid(leaf: LeafState, layout: str) -> LeafState:
        stages = (map_state(lambda t: in_layout(t, layout).clone(), one) for one in leaf.stages)
        return LeafState(leaf.step, tuple(stages))

    leaves = zip(state.leaves.items(), drawn, strict=True)
    return State({key: laid(leaf, one[3]) for (key, leaf), one in leaves})


@examples(25)
@given(drawn=leaves, seed=st.integers(0, 99))
def test_any_strides(executors: Any, drawn: list[Any], seed: int) -> None:
    """A step keeps the strides, and neither writes to a gradient nor changes its version."""
    params, grads = made(drawn, seed)
    given, versions = copied(grads), [grad._version for grad in grads.values()]
    for optimizer, executor in itertools.product((RULE, VARIANTS["lion"]), executors):
        (ours, _), other = made(drawn, seed), optimizer.using(executor=executor)
        state = with_layouts(optimizer.init(params), drawn)
        start, strides = copied(state), [param.stride() for param in ours.values()]
        want = optimizer.using(executor="reference").update(params, grads, start)
        with case(executor=executor, optimizer=optimizer):
            assert_same(other.update(ours, grads, state), want)
            assert_same((ours, grads, state), (params, given, start))
            other.update_(ours, grads, state)
            assert_same((ours, grads, state), (want[0], given, want[1]))
            assert [param.stride() for param in ours.values()] == strides
            assert [grad._version for grad in grads.values()] == versions


def test_conjugate_and_negative_gradients(executors: Any) -> None:
    cases = [
        (dtype, count, noise(1, count, dtype=dtype).conj())
        for dtype in (torch.complex64, torch.complex128)
        for count in COUNTS
    ]
    negative = [noise(1, count, dtype=torch.complex64).conj().imag for count in COUNTS]
    cases += [(torch.float32, grad.numel(), grad) for grad in negative]
    for dtype, count, grad in cases:
        param = noise(0, count, dtype=dtype)
        state = RULE.init(param)
        want = RULE.update(param, grad, state)
        for executor in executors:
            with case(dtype=dtype, count=count, executor=executor):
                other = RULE.using(executor=executor)
                assert_same(other.update(param, grad, state), want)
                again, written = param.clone(), copied(state)
                other.update_(again, grad, written)
                assert_same((again, written), want)


def test_the_gradient_may_be_the_parameter_itself(executors: Any) -> None:
    for one in pairs(executor=executors, count=COUNTS):
        with case(**one):
            optimizer, param = RULE.using(executor=one["executor"]), noise(0, one["count"])
            state, bound = optimizer.init(param), optimizer.bind({"w": param.clone()})
            want = RULE.update(param, param.clone(), state)
            assert_same(optimizer.update(param, param, state), want)
            optimizer.update_(param, param, state)
            assert_same((param, state), want)
            bound.step(bound.params)
            assert_same(bound.params["w"], want[0])


def test_the_gradient_may_be_a_state_or_another_s_parameter(executors: Any) -> None:
    """A gradient that is an earlier parameter of the step is read with its new values."""
    optimizer = VARIANTS["sgd nesterov"]

    def stepped(executor: Any, count: int) -> Any:
        params = {"a": noise(0, count), "b": noise(1, count), "c": noise(2, 4)}
        state, other = optimizer.init(params), optimizer.using(executor=executor)
        other.update_(params, {key: noise(9, *one.shape) for key, one in params.items()}, state)
        (buffer,) = state.leaves["a"].stages[-1].momentum_buffer
        other.update_(params, {"a": buffer, "b": params["b"], "c": noise(3, 4)}, state)
        before = params["a"].clone()
        other.update_(params, {"a": params["b"], "b": params["a"], "c": noise(3, 4)}, state)
        return params, state, before

    for count in COUNTS:
        params, state, before = stepped("reference", count)
        assert differ(before, params["a"])
        for executor in executors:
            with case(count=count, executor=executor):
                assert_same(stepped(executor, count), (params, state, before))


def test_a_state_that_is_kept_may_be_the_gradient(executors: Any) -> None:
    optimizer = RULES["keep_grad"]
    for one in pairs(executor=executors, count=COUNTS):
        with case(**one):
            param, grad = noise(0, one["count"]), noise(1, one["count"])
            state = optimizer.init(param)
            kept = state.leaves.stages[0]._replace(kept=grad)
            aliased = State(LeafState(state.leaves.step, (kept,)))
            want = optimizer.using(executor="reference").update(param, grad, aliased)
            optimizer.using(executor=one["executor"]).update_(param, grad, aliased)
            assert_same((param, aliased), want)


def test_a_parameter_that_overlaps_itself_is_stepped_on_a_copy(executors: Any) -> None:
    """Elements that share memory get separate values in a pure step."""
    param, grad = noise(0, 9).unfold(0, 3, 2), noise(1, 4, 3)
    want = RULE.update(param, grad, RULE.init(param))
    assert len(set(want[0].flatten().tolist())) == param.numel()
    for executor in executors:
        with case(executor=executor):
            optimizer = RULE.using(executor=executor)
            assert_same(optimizer.update(param, grad, optimizer.init(param)), want)


def interleaved(count: int) -> tuple[Tensor, Tensor]:
    base = noise(0, 2 * count)
    return base[::2], base[1::2]


def columns(count: int) -> tuple[Tensor, Tensor]:
    base = noise(0, count, 5)
    return base[:, 1:3], base[:, 3]


def test_leaves_between_the_elements_of_others_have_results_of_their_own(executors: Any) -> None:
    """Leaves with no common element, but with overlapping ranges of addresses."""

    def stepped(executor: Any, optimizer: Optimizer, make: Any, count: int) -> Any:
        a, b = make(count)
        # The order differs from the order in memory. Unrelated leaves come first and last.
        params = {"x": noise(7, 9), "b": b, "a": a, "y": noise(8, count)}
        grads = {key: noise(k, *p.shape) for k, (key, p) in enumerate(params.items())}
        state = optimizer.init(params)
        for _ in range(2):
            optimizer.using(executor=executor).update_(params, grads, state)
        return params, state

    makes = [interleaved, columns]
    for one in pairs(optimizer=[RULE, CLIPPED, qhm(0.1)], make=makes, count=COUNTS):
        want = stepped("reference", **one)
        for executor in executors:
            with case(executor=executor, **one):
                assert_same(stepped(executor, **one), want)


def test_leaves_may_share_their_gradient(executors: Any) -> None:
    params = {key: noise(k, 6) for k, key in enumerate("abc")}
    grads = dict.fromkeys(params, noise(9, 6))
    state = RULE.init(params)
    for executor in executors:
        got = RULE.using(executor=executor).update(params, grads, state)
        assert_same(got, RULE.update(params, grads, state))


def test_tensors_without_memory(executors: Any) -> None:
    for executor in executors:
        with case(executor=executor):
            optimizer = VARIANTS["adamw"].using(executor=executor)
            params = {"w": torch.ones(3, device="meta"), "z": torch.ones(LARGE, device="meta")}
            state, bound = optimizer.init(params), optimizer.bind(params)
            new, after = optimizer.update(params, params, state)
            assert new["w"].shape == (3,) and new["w"].device.type == "meta"
            optimizer.update_(params, params, state)
            bound.step(params)
            for one in (after, state, bound.state):
                assert int(one.leaves["z"].step) == 1
    with pytest.raises(ValueError, match=r"its kernels step no tensors on meta|meta"):
        VARIANTS["adamw"].using(executor="fused").update(params, params, state)


def test_a_default_device_or_dtype_changes_nothing(executors: Any) -> None:
    params, grads = ({"w": noise(k, 40), "z": noise(k + 2, LARGE)} for k in range(2))
    try:
        for executor in executors:
            optimizer = adamw(0.1).using(executor=executor)
            state = optimizer.init(params)
            want = optimizer.update(params, grads, state)
            for one in pairs(device=["meta", "cpu"], dtype=[torch.float32, torch.float64]):
                torch.set_default_dtype(one["dtype"])
                with case(executor=executor, **one), torch.device(one["device"]):
                    assert_same(optimizer.update(params, grads, state), want)
                    bound = optimizer.bind(copied(params))
                    bound.step(grads)
                    assert_same(bound.params, want[0])
    finally:
        torch.set_default_dtype(torch.float32)
