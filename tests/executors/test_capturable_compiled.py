"""Captured steps as compiled programs, into torch's own operations or on a device."""

from typing import Any

import optree
import pytest
import torch

from functional_optim import (
    adamw,
    chain,
    clip_by_global_norm,
    clip_by_value,
    lamb,
    lion,
    qhm,
    sgd,
    stored,
    weight_decay,
)
from functional_optim.kernels import leaf_program

from ..choices import case
from .bound_tree import full, parameters
from .capturing import (
    assert_close,
    gradients,
    recorded,
    replays,
    require_replayed,
    steps,
    tree,
)
from .graph_recorder import Graph
from .plain.test_capturable import MINUS, NORMED, PLAIN, SIGNED
from .support import assert_same, copied, noise

pytestmark = pytest.mark.usefixtures("without_loops", "captured_on_the_cpu")
F32 = torch.float32
COMPILED = {
    "adamw": adamw(0.1),
    "clipped": chain(clip_by_value(0.5), weight_decay(0.1), qhm(0.1)),
    "norm in between": chain(weight_decay(0.1), clip_by_global_norm(1.0), adamw(0.1)),
    # Each replay draws the random bits of its step. Blocks of 256 end within parameters.
    "stochastic": stored(adamw(0.01), param="bfloat16+stochastic"),
    "kahan": stored(lion(0.01), param="bfloat16+kahan"),
    "int8+stochastic": stored(sgd(0.01, momentum=0.9), state="int8+stochastic"),
}


def test_what_is_compiled_is_replayed_to_the_bit() -> None:
    for name, one in COMPILED.items():
        optimizer = one.using(executor="compiled")
        dtype = next((s.dtypes[0] for s in optimizer.stages if s.dtypes), F32)
        given = gradients(dtype, 600)
        with case(name=name):
            got = replays(optimizer, tree(dtype, 600), given)
            assert_same(got, steps(optimizer, tree(dtype, 600), given, capturable=True))
            if name in [*COMPILED][:3]:
                assert_close(got, steps(one, tree(dtype, 600), given), 32.0)


def test_chunks_of_any_length() -> None:
    for count in (2, 30, 646):
        with case(count=count):
            require_replayed(
                adamw(0.1).using(executor="compiled"),
                lambda count=count: tree(F32, count),
                gradients(F32, count),
            )


def test_rules_of_a_user_s_own() -> None:
    """Custom rules with torch functions, or with a sum as their only number, are replayed."""
    for optimizer in (chain(SIGNED(lr=0.1)), chain(NORMED(), MINUS())):
        with case(optimizer=optimizer):
            require_replayed(optimizer.using(executor="compiled"))


def test_parameters_of_every_kind_and_the_first_step_captured() -> None:
    require_replayed(
        adamw(0.01).using(executor="auto"), parameters, lambda k: full(50 + k), ulps=32.0
    )
    bound, given = adamw(0.01).using(executor="compiled"), full(50)
    bound = bound.bind(parameters(), capturable=True)
    assert bound.ready()
    recorded(bound, given, replayed=1)
    want = steps(adamw(0.01), parameters(), lambda _: given, count=2)
    assert_close((bound.params, bound.state), want, 32.0)


@pytest.mark.parametrize("executor", ["auto", "reference"])
def test_a_step_without_any_gradient_changes_nothing(executor: str) -> None:
    params = parameters()
    bound = adamw(0.1).using(executor=executor).bind(params, capturable=True)
    bound.step(full(0))
    before = copied((params, bound.state))
    bound.step(dict.fromkeys(params))
    assert_same((params, bound.state), before)


def test_memory_that_other_optimizers_use_again_is_not_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Captured steps do not use scratch memory, which other optimizers reuse."""

    def used(*_: Any) -> Any:
        raise AssertionError("scratch of the thread")

    monkeypatch.setattr(leaf_program, "scratch", used)
    params = {"apart": noise(1, 6, 5)[::2], "flat": noise(2, 4)}
    grads = {"apart": noise(3, 5, 3).t(), "flat": noise(4, 4)}
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1)).using(executor="compiled")
    bound = optimizer.bind(params, capturable=True)
    recorded(bound, grads)
    param, whole = noise(1, 30, 30), lamb(0.1).using(executor="blocked")
    with pytest.raises(AssertionError, match="scratch of the thread"):
        whole.update_(param, param.clone(), whole.init(param))


def test_numbers_in_tensors_of_a_tuple_are_not_compiled_elsewhere() -> None:
    betas: Any = (torch.tensor(0.9), 0.99)
    optimizer = chain(PLAIN(lr=0.1, betas=betas)).using(executor="compiled")
    said = optimizer.explain(noise(0, 70_000)).partition("each alone: ")[2]
    assert said.startswith("reference; plain has a hyper-parameter that is a tensor")


def test_it_is_said_what_would_be_captured() -> None:
    optimizer = adamw(0.1).using(executor="auto")
    bound = optimizer.using(executor="compiled").bind(tree(F32), capturable=True)
    assert "of torch.float32 on cpu: inductor" in bound.explain()
    half = tree(torch.float16)
    said = optimizer.bind(half, capturable=True).explain()
    assert ": reference; torch.float16 is not compiled" in said


def test_a_program_refuses_to_be_captured() -> None:
    params = [noise(0, 3)]
    program = adamw(0.1).script(params)
    program._on_cuda = params
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"), Graph().recording():
        program.step([noise(1, 3)])
    assert torch.equal(params[0], noise(0, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("executor", ["reference", "compiled"])
@pytest.mark.parametrize("name", ["clipped", "adamw", "norm in between"])
def test_graphs_of_a_device(name: str, executor: Any) -> None:
    def on_device(values: Any) -> Any:
        return optree.tree_map(lambda one: one.cuda(), values)

    optimizer = COMPILED[name].using(executor=executor)
    params = on_device(tree(F32))
    bound = optimizer.bind(params, capturable=True)
    assert bound.ready()
    into = bound.gradients
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    for k in range(6):
        optree.tree_map(lambda a, b: a.copy_(b), into, on_device(gradients(F32)(k)))
        if k < 3:
            with torch.cuda.stream(stream):
                stream.wait_stream(torch.cuda.default_stream())
                bound.step(into)
            torch.cuda.current_stream().wait_stream(stream)
        else:
            if k == 3:
                with torch.cuda.graph(graph):  # records, but does not run
                    bound.step(into)
            graph.replay()
    want = steps(COMPILED[name], tree(F32), gradients(F32), count=6)
    got = optree.tree_map(lambda one: one.cpu(), (params, bound.state))
    assert_close(got, want, 64.0)
