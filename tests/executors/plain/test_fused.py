"""Torch's fused kernels compared with the reference executor, one step from equal inputs."""

import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_optim import (
    Optimizer,
    adagrad,
    adam,
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    decoupled_weight_decay,
    lion,
    sgd,
    weight_decay,
)
from functional_optim.core.leaf import Leaf
from functional_optim.core.stage import Link, Stage
from functional_optim.core.state import map_state
from functional_optim.kernels import fused_kernel
from functional_optim.kernels.fused_kernel import ULPS, FusedKernel
from functional_optim.kernels.reference import ReferenceExecutor
from functional_optim.testing.compare import require_same, same
from functional_optim.transforms import maximized

from ...choices import case, examples, pairs
from ..support import chunk_of, noise, together

KERNEL = FusedKernel()
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
CROWD = 512
"""Least number of elements of the tensor from which a short chunk is cut.

Errors are measured in units of that tensor, because a single element can cancel to zero.
"""

STEPS = (1.0, 2.0, 3.0, 10_000.0)


def small_chunk(
    optimizer: Optimizer, dtype: torch.dtype = torch.float32, step: float = 1.0
) -> Leaf:
    param, grad = torch.linspace(-1, 1, 40, dtype=dtype), torch.linspace(2, 3, 40, dtype=dtype)
    return chunk_of(optimizer, param, grad, step)


def mapped(chunk: Leaf, function: Callable[[Tensor], Tensor]) -> Leaf:
    states = tuple(map_state(function, state) for state in chunk.states)
    return chunk._replace(param=function(chunk.param), grad=function(chunk.grad), states=states)


def made(chunk: Leaf) -> tuple[Tensor, Any]:
    return chunk.param, chunk.states


def fused_step(stages: tuple[Stage, ...], chunk: Leaf) -> Leaf:
    """Return a copy of the chunk after the fused step."""
    copied = mapped(chunk, torch.clone)
    with torch.no_grad():
        assert KERNEL.supports(stages, copied) is None
        run = KERNEL.bind(stages, copied)
        assert not isinstance(run, str)
        run(())
    assert same(copied.grad, chunk.grad)
    return copied


def reference_step(stages: tuple[Stage, ...], chunk: Leaf) -> Leaf:
    """Return a copy of the chunk after the reference executor's step."""
    copied = mapped(chunk, torch.clone)
    ReferenceExecutor().update_(stages, [copied], ())
    return copied


def require_close(stages: tuple[Stage, ...], chunk: Leaf, size: int, ulps: float) -> Leaf:
    """Require that the fused step of the first ``size`` elements is close; return the reference's.

    Errors are relative to the magnitudes before and after the step. A sum that cancels keeps the
    errors of its terms.
    """
    want = reference_step(stages, chunk)
    got = fused_step(stages, mapped(chunk, lambda tensor: tensor[:size]))

    def in_the_crowd(part: Tensor, whole: Tensor, before: Tensor) -> Tensor:
        assert part.shape == (size,)
        return torch.cat([part, whole[size:], before])

    cut = mapped(want, lambda tensor: tensor[:size])
    require_same(
        "the fused step",
        optree.tree_map(in_the_crowd, made(got), made(want), made(chunk)),
        optree.tree_map(in_the_crowd, made(cut), made(want), made(chunk)),
        ulps,
    )
    return want


SCALES = st.sampled_from([1.0, 0.01, 100.0])
SIZES = st.sampled_from([0, 1, 7, 16, 64, 100, CROWD, 5_001])


def some(**options: list[Any]) -> dict[str, Any]:
    common = {"lr": [0.0, 1e-3, 0.1, 1.0, 30.0], "maximize": [False, True]}
    return {name: st.sampled_from(values) for name, values in {**common, **options}.items()}


WIDE = (torch.float32, torch.float64)
DECAY = [0.0, 0.01, 0.5]
MOMENTUM = [0.5, 0.9]
ADAM = {
    "betas": list(itertools.product([0.0, 0.5, 0.9], [0.5, 0.9, 0.999])),
    "eps": [1e-8, 1e-3, 1.0],
    "amsgrad": [False, True],
}
ADAGRAD = {
    "lr_decay": [0.0, 0.01, 1.0],
    "initial_accumulator_value": [0.0, 0.1],
    "eps": [1e-10, 1e-3],
}
KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], tuple[torch.dtype, ...]]] = {
    "sgd": (sgd, some(momentum=[0.0, *MOMENTUM], dampening=[0.0, 0.3], weight_decay=DECAY), WIDE),
    "nesterov": (sgd, some(momentum=MOMENTUM, nesterov=[True], weight_decay=DECAY), WIDE),
    "adam": (adam, some(**ADAM, weight_decay=DECAY), WIDE),
    "adam without decay": (adam, some(**ADAM), (torch.bfloat16,)),
    "adamw": (adamw, some(**ADAM, weight_decay=DECAY), (*WIDE, torch.bfloat16)),
    "adagrad": (adagrad, some(**ADAGRAD, weight_decay=DECAY), WIDE),
    "adagrad without decay": (adagrad, some(**ADAGRAD), (torch.bfloat16,)),
}
"""Constructor, options, and dtypes of each kind."""


@pytest.mark.parametrize("kind", KINDS)
@examples(20)
@given(data=st.data(), size=SIZES, seed=st.integers(0, 999), scales=st.tuples(SCALES, SCALES))
def test_every_step_is_within_the_bound(
    kind: str, data: st.DataObject, size: int, seed: int, scales: tuple[float, float]
) -> None:
    factory, options, dtypes = KINDS[kind]
    dtype = data.draw(st.sampled_from(dtypes))
    device = data.draw(st.sampled_from(DEVICES))
    given = data.draw(st.fixed_dictionaries(options))
    if device == "cuda" and factory is sgd:
        given["maximize"] = False  # refused there after weight decay or momentum
    optimizer = factory(**given)
    of_betas = 0.0
    if device == "cuda" and dtype == torch.float32 and "betas" in given:
        of_betas = 0.5 / (1 - max(given["betas"]))

    def tensor(index: int, scale: float) -> Tensor:
        drawn = scale * noise(100 * seed + index, max(size, CROWD), dtype=torch.float64)
        return drawn.to(dtype).to(device)

    param, states = tensor(99, scales[0]), None
    for index, step in enumerate(STEPS):
        chunk = chunk_of(optimizer, param, tensor(index, scales[1]), step)
        if states is not None:
            chunk = chunk._replace(states=states)
        after = require_close(optimizer.stages, chunk, size, ULPS[dtype] + of_betas)
        param, states = after.param, after.states


def test_every_fused_rule_is_tried() -> None:
    tried = {factory().stages[-1] for factory, _, _ in KINDS.values()}
    assert tried == set(fused_kernel.FUSED)


def test_the_first_gradient_goes_into_the_buffer_to_the_bit() -> None:
    grad = torch.tensor([-0.0, 0.0, 1.0, -3.0] * 10)
    for momentum in (0.0, 0.9):
        optimizer = sgd(lr=0.0, momentum=momentum, dampening=0.5)
        chunk = fused_step(optimizer.stages, chunk_of(optimizer, torch.zeros(40), grad))
        for buffer in chunk.states[-1].momentum_buffer:
            assert torch.equal(buffer.view(torch.int32), grad.view(torch.int32))


def test_a_buffer_that_is_there_at_the_first_step_counts() -> None:
    optimizer = sgd(lr=0.1, momentum=0.5, dampening=0.25)
    chunk = small_chunk(optimizer)
    chunk.states[-1].momentum_buffer[0].fill_(8.0)
    require_close(optimizer.stages, chunk, 40, ULPS[torch.float32])
    assert fused_step(optimizer.stages, chunk).states[-1].momentum_buffer[0][0] == 6.0


def test_a_momentum_that_is_zero_at_one_step_keeps_the_buffer() -> None:
    optimizer = sgd(lr=0.5, momentum=lambda made: 0.9 if made else 0.0)
    chunk = small_chunk(optimizer)
    chunk.states[-1].momentum_buffer[0].fill_(8.0)
    after = require_close(optimizer.stages, chunk, 40, ULPS[torch.float32])
    assert (after.states[-1].momentum_buffer[0] == 8.0).all()


OF_KIND: dict[str, Callable[[float], Any]] = {
    "number": lambda value: value,
    "tensor": torch.tensor,
    "double tensor": lambda value: torch.tensor(value, dtype=torch.float64),
    "schedule": lambda value: lambda made: value / (1 + made),
}


def test_numbers_may_be_tensors_or_schedules() -> None:
    for one in pairs(kind=OF_KIND, factory=[sgd, adam, adamw, adagrad], dtype=WIDE, step=STEPS):
        made = OF_KIND[one["kind"]]
        optimizer = one["factory"](lr=made(0.3), weight_decay=made(0.1))
        chunk = small_chunk(optimizer, one["dtype"], one["step"])
        with case(**one):
            require_close(optimizer.stages, chunk, 40, ULPS[one["dtype"]])


def test_a_decay_with_an_lr_of_its_own() -> None:
    own = Link(adamw().stages[1], adamw(lr=0.5, weight_decay=0.25).links[1].hyper)
    optimizer = chain(own, adam(lr=0.125).links[-1])
    assert optimizer.links[0].hyper.lr == 0.5
    require_close(optimizer.stages, small_chunk(optimizer, torch.float64), 40, ULPS[torch.float64])


def test_steps_past_what_float32_counts() -> None:
    # With this beta, the bias correction of the next step differs in the eighth digit.
    optimizer = adam(lr=0.1, betas=(0.9, 1 - 1e-9))
    count = 1 << 24
    for dtype, step in ((torch.float64, count), (torch.float32, count), (torch.float32, count + 1)):
        require_close(optimizer.stages, small_chunk(optimizer, dtype, float(step)), 40, ULPS[dtype])
    why = KERNEL.supports(optimizer.stages, small_chunk(optimizer, torch.float64, count + 1.0))
    assert why == f"torch's fused adam counts steps in float32: up to {count} for torch.float64"


def test_copied_and_pickled_stages_are_recognised() -> None:
    optimizer = adamw(lr=0.1, weight_decay=0.5, maximize=True)
    want = fused_step(optimizer.stages, small_chunk(optimizer))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.stages[0] is not optimizer.stages[0]
        require_same("a copy", made(fused_step(other.stages, small_chunk(other))), made(want))


def test_a_list_of_stages_is_read_anew() -> None:
    optimizer, other = adam(), lion()
    stages = list(optimizer.stages)
    assert KERNEL.supports(stages, small_chunk(optimizer)) is None
    stages[-1] = other.stages[-1]
    assert "lion" in str(KERNEL.supports(stages, small_chunk(other)))


def test_threads_do_not_share_a_step_number() -> None:
    optimizer = adam(lr=0.1)
    chunks = [small_chunk(optimizer, step=float(step)) for step in range(1, 5)]
    want = [made(fused_step(optimizer.stages, chunk))[0] for chunk in chunks]
    assert not torch.equal(want[0], want[1])

    def work(chunk: Leaf, param: Tensor) -> bool:
        got = (made(fused_step(optimizer.stages, chunk))[0] for _ in range(100))
        return all(torch.equal(one, param) for one in got)

    works = (partial(work, chunk, one) for chunk, one in zip(chunks, want, strict=True))
    assert all(together(*works))


def test_inference_mode_leaves_nothing_behind() -> None:
    def work() -> None:
        # A new thread has no step number yet.
        optimizers = adam(), adagrad()
        with torch.inference_mode():
            for optimizer in optimizers:
                fused_step(optimizer.stages, small_chunk(optimizer))
        for optimizer in optimizers:
            fused_step(optimizer.stages, small_chunk(optimizer, step=2.0))

    together(work)


TENSORS = (torch.tensor(0.9), 0.999)
OTHER_RATE = Link(adamw().stages[1], adamw(lr=0.5).links[1].hyper)
REFUSED: dict[str, list[Optimizer]] = {
    "torch has no fused lion, only sgd, adam, adagrad": [lion()],
    "no place for clip_by_value": [chain(clip_by_value(1.0), adam())],
    "no place for clip_by_global_norm": [chain(clip_by_global_norm(1.0), sgd())],
    "no place for sgd": [chain(sgd().links[-1], adam())],
    "torch's fused adam has one weight decay, and 2 are active": [
        chain(weight_decay(0.1), adam(weight_decay=0.1)),
        chain(weight_decay(0.1), adamw()),
    ],
    "torch's fused sgd has no decoupled_weight_decay": [chain(decoupled_weight_decay(0.1), sgd())],
    "fused adagrad has no decoupled_weight_decay": [chain(decoupled_weight_decay(0.1), adagrad())],
    "torch's fused adam takes numbers, and one of betas is a tensor": [adam(betas=TENSORS)],
    "a hyper-parameter is a tensor that is differentiated": [
        sgd(lr=torch.tensor(0.1, requires_grad=True))
    ],
    "lr is 0 where the decay's is not": [chain(OTHER_RATE, adam(lr=0.0).links[-1])],
}


def test_a_chain_that_is_something_else_is_refused() -> None:
    for why, chains in REFUSED.items():
        for optimizer in chains:
            chunk = small_chunk(optimizer)
            before = mapped(chunk, torch.clone)
            with case(optimizer=optimizer):
                assert why in str(KERNEL.supports(optimizer.stages, chunk))
                assert why in str(KERNEL.bind(optimizer.stages, chunk))
                require_same("a refused chunk", made(chunk), made(before))


IDLE = [
    chain(weight_decay(0.0), decoupled_weight_decay(0.0), sgd()),
    chain(weight_decay(0.0), adamw()),
    chain(decoupled_weight_decay(0.0), adagrad(weight_decay=0.1)),
    chain(decoupled_weight_decay(0.1), maximized(), adam().links[-1]),
]


def test_stages_that_do_nothing_count_as_absent() -> None:
    for optimizer in IDLE:
        with case(optimizer=optimizer):
            require_close(optimizer.stages, small_chunk(optimizer), 40, ULPS[torch.float32])


def test_the_order_of_stages_matters() -> None:
    optimizer = sgd(weight_decay=0.1, maximize=True)
    negate, decay, rule = optimizer.links
    chunk = small_chunk(optimizer)
    turned = chunk._replace(coefficients=tuple(chunk.coefficients[i] for i in (1, 0, 2)))
    stages = (decay.stage, negate.stage, rule.stage)
    why = KERNEL.supports(stages, turned)
    assert why == "torch's fused sgd negates the gradient once, before weight decay"
    assert KERNEL.supports(optimizer.stages, chunk) is None


def test_dtypes_that_are_not_taken() -> None:
    half, short = torch.float16, torch.bfloat16
    for optimizer, dtype in ((sgd(), short), (sgd(), half), (adam(), half), (adagrad(), half)):
        why = KERNEL.supports(optimizer.stages, small_chunk(optimizer, dtype))
        with case(optimizer=optimizer, dtype=dtype):
            assert "on cpu is used for torch.float32, torch.float64" in str(why)
            assert str(why).endswith(f"not for {dtype}")


def test_coupled_decay_in_bfloat16_is_refused() -> None:
    for factory in (adam, adagrad):
        decayed, plain = factory(weight_decay=0.1), factory()
        chunk = small_chunk(decayed, torch.bfloat16)
        assert "rounds weight_decay in its own way" in str(KERNEL.supports(decayed.stages, chunk))
        assert KERNEL.supports(plain.stages, small_chunk(plain, torch.bfloat16)) is None


def test_tensors_that_the_kernel_would_misread_are_refused() -> None:
    optimizer = adam()
    chunk = small_chunk(optimizer)
    state = chunk.states[-1]
    for spoilt, why in (
        (chunk._replace(param=torch.ones(80)[::2]), "contiguous"),
        (chunk._replace(grad=torch.ones(80)[::2]), "contiguous"),
        (chunk._replace(grad=torch.ones(39)), "one dtype and length"),
        (chunk._replace(grad=chunk.grad.double()), "one dtype and length"),
        (
            chunk._replace(states=(*chunk.states[:-1], state._replace(exp_avg=torch.ones(3)))),
            "one dtype and length",
        ),
        (chunk._replace(param=chunk.param.to("meta")), "on meta is used for nothing"),
        (chunk._replace(step=torch.tensor(1.0)), "a number as step count"),
    ):
        assert why in str(KERNEL.supports(optimizer.stages, spoilt))


def test_where_the_sign_is_turned_last_maximize_is_refused() -> None:
    plain, decayed, with_momentum = (
        sgd(maximize=True, **options) for options in ({}, {"weight_decay": 0.1}, {"momentum": 0.9})
    )

    class Elsewhere(torch.Tensor):
        """Tensor that reports another device."""

        is_cpu = False
        device = torch.device("cuda")

    def on_cuda(tensor: Tensor) -> Tensor:
        return tensor.as_subclass(Elsewhere)

    for optimizer, refused in ((plain, False), (decayed, True), (with_momentum, True)):
        why = KERNEL.supports(optimizer.stages, mapped(small_chunk(optimizer), on_cuda))
        assert ("negates after weight decay and momentum" in str(why)) is refused


def test_an_entry_of_a_chunk_is_for_its_hyper_parameters() -> None:
    entries: dict[Any, Any] = {}
    for decay in (0.1, 0.5):
        optimizer = adamw(0.1, weight_decay=decay)
        chunk = small_chunk(optimizer)._replace(entries=entries)
        want = reference_step(optimizer.stages, chunk)
        require_same("the fused step", made(fused_step(optimizer.stages, chunk)), made(want), 4.0)
