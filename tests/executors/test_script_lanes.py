"""The script executor steps lanes in no memory but its scratch, and says where it cannot."""

import io
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    adadelta,
    adagrad,
    adamw,
    chain,
    clip_by_global_norm,
    lion,
    qhm,
    rmsprop,
    rprop,
    sgd,
)
from functional_optim.engine import coefficients_at
from functional_optim.executors import script as executor
from functional_optim.executors import script_lane
from functional_optim.executors.leaf import Leaf
from functional_optim.executors.script_lane import PIECE, piece_elements, scripted_lane
from functional_optim.initial import init_leaf

from .support import assert_same, noise

COUNT = 2 * PIECE + 77
"""Elements of a leaf that is stepped in three pieces where pieces are small."""

CHAINS: dict[str, Optimizer] = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.1, momentum=0.9),
    "nesterov": sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": adamw(0.1),
    "adamw amsgrad": adamw(0.1, amsgrad=True, maximize=True),
    "adagrad": adagrad(0.1, weight_decay=0.1),
    "adadelta": adadelta(0.1),
    "lion": lion(0.1),
    "rmsprop": rmsprop(0.1, centered=True, momentum=0.9),
    "rprop": rprop(0.1),
    "clipped qhm": chain(clip_by_global_norm(1.0), qhm(0.1, weight_decay=0.1)),
}


class Hyper(NamedTuple):
    lr: float


def branching(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    if c.lr > 0.05:
        return param - c.lr * grad, state
    return param + grad, state


def centred(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * (grad - grad.mean()), state


BRANCHING = chain(Rule(name="branching", hyper=Hyper, rule=branching)(lr=0.1))
CENTRED = chain(Rule(name="centred", hyper=Hyper, rule=centred, kind="per_matrix")(lr=0.1))


def allocated(step: Callable[[], object]) -> list[int]:
    """The bytes of each tensor of more than a few elements that a step allocates."""
    step()
    step()  # TorchScript compiles at the first calls
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    return [one.nbytes() for one in events if one.name() == "[memory]" and one.nbytes() > 1024]


SCRATCH = {"sgd": 0, "momentum": 0, "rprop": 4, "adadelta": 2, "adagrad": 2}
"""Pieces of scratch, where it is not one: values that are wanted later, and are no result."""


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "program"])
def test_a_step_allocates_scratch_alone(
    name: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", str(PIECE))
    optimizer, params, grads = CHAINS[name], [noise(0, COUNT)], [noise(1, COUNT)]
    step: Callable[[], object]
    if bound:
        one = optimizer.using(executor="script").bind(params)
        one.gradients[0].copy_(grads[0])
        step = lambda: one.step(one.gradients)  # noqa: E731
    else:
        module = optimizer.script(params).module
        step = lambda: module.step(list(grads))  # noqa: E731
    found = allocated(step)
    if "clip" in name:  # the squares for the norm, and no more
        found = sorted(found)[:-1] if not bound else found[1:]
    assert len(found) == SCRATCH.get(name, 1), found
    assert max(found, default=0) <= 4 * PIECE, found


@pytest.mark.parametrize("elements", [0, 1])
def test_what_is_made_for_the_shortest_lanes_serves_all(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_lane, "_MADE", {})
    short = CHAINS["adamw"].using(executor="script").bind([noise(0, elements)])
    short.step(short.gradients)
    assert "script" in short.explain()
    test_a_step_allocates_scratch_alone("adamw", True, monkeypatch)
    assert len(script_lane._MADE) == 1


def test_the_count_sees_what_a_chain_without_a_lane_allocates() -> None:
    one = BRANCHING.using(executor="script").bind([noise(0, COUNT)])
    assert len(allocated(lambda: one.step(one.gradients))) >= 3


@pytest.mark.parametrize("name", CHAINS)
def test_no_operation_makes_a_tensor_to_copy_it(name: str) -> None:
    """Torch generates an ``out=`` for operations that have none: it makes a tensor and copies."""
    module = CHAINS[name].script([noise(0, 5)]).module
    graph = module._advance.inlined_graph
    written = []
    for node in _nodes(graph):
        overload = _overload(node)
        if overload is not None and "out" in overload._overloadname:
            written.append(overload)
            assert torch.Tag.generated not in overload.tags, overload
    assert written


def _nodes(block: Any) -> list[Any]:
    found = []
    for node in block.nodes():
        found.append(node)
        for inner in node.blocks():
            found += _nodes(inner)
    return found


def _overload(node: Any) -> Any:
    schema = torch._C.parse_schema(node.schema()) if node.schema() != "(no schema)" else None
    if schema is None or not schema.name.startswith("aten::"):
        return None
    packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"), None)
    return getattr(packet, schema.overload_name or "default", None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CHAINS)
def test_large_leaves_are_the_reference_bit_for_bit(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", "50000")
    optimizer = CHAINS[name]
    shape = (3, COUNT // 3)
    wanted, stepped, scripted = ([noise(0, *shape, dtype=dtype)] for _ in range(3))
    state = optimizer.init(wanted)
    bound, program = optimizer.using(executor="script").bind(stepped), optimizer.script(scripted)
    for step in range(3):
        grads = [noise(step + 1, *shape, dtype=dtype)]
        optimizer.using(executor="reference").update_(wanted, grads, state)
        bound.step(grads)
        program.step(grads)
    assert_same([one.detach() for one in stepped], wanted)
    assert_same(scripted, wanted)
    assert_same(program.state, state)
    assert bound.explain().endswith("script")
    assert program.explain() == "script"


@pytest.mark.parametrize(
    ("optimizer", "dtype", "cut"),
    [
        (sgd(0.1), torch.float32, False),
        (sgd(0.1, momentum=0.9), torch.float32, True),
        (sgd(0.1, momentum=0.9), torch.bfloat16, False),
        (lion(0.1), torch.float32, True),
    ],
)
def test_what_several_operations_pass_over_is_cut_for_the_cache(
    optimizer: Optimizer, dtype: torch.dtype, cut: bool
) -> None:
    hypers = tuple(link.hyper for link in optimizer.links)
    param, grad = noise(0, 100).to(dtype), noise(1, 100).to(dtype)
    states = init_leaf(optimizer.stages, hypers, param).stages
    resolved, coefficients = coefficients_at(optimizer.stages, hypers, 1.0)
    leaf = Leaf(param, grad, states, coefficients, "p", resolved, 1.0)
    made = scripted_lane(optimizer.stages, leaf, ())
    assert (piece_elements(made) < sys.maxsize) is cut


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_that_share_memory_with_what_is_written(name: str) -> None:
    """The parameter itself, and a window that overlaps it: read before anything is written."""
    optimizer = CHAINS[name]
    for shift in (0, 3, 40):
        memory, other = noise(0, 100), noise(0, 100)
        param, wanted = memory[:40], other[:40].clone()
        program, state = optimizer.script([param]), optimizer.init([wanted])
        for _ in range(2):
            grad = memory[shift : shift + 40]
            optimizer.update_([wanted], [grad.clone()], state)
            program.step([grad])
        assert_same(param, wanted)


@pytest.mark.parametrize(
    "layout",
    [
        lambda one: one.t(),
        lambda one: one[:, ::2],
        lambda one: one[:, :1],
        lambda one: one[0, 0],
        lambda one: one[:0],
    ],
    ids=["transposed", "strided", "column", "0-d", "empty"],
)
def test_layouts_that_are_no_lane(layout: Any) -> None:
    params, wanted = layout(noise(0, 6, 4)), layout(noise(0, 6, 4))
    program, state = adamw(0.1).script([params]), adamw(0.1).init([wanted])
    for step in range(3):
        grads = [layout(noise(step + 1, 6, 4))]
        adamw(0.1).update_([wanted], grads, state)
        program.step(grads)
    assert_same(params, wanted)
    assert_same(program.state, state)


def test_choices_that_the_lanes_were_not_made_for() -> None:
    """Flags that are set later: stepped all the same."""
    params, wanted = [noise(0, 9)], [noise(0, 9)]
    optimizer = sgd(0.1, momentum=0.9)
    program, state = optimizer.script(params), optimizer.init(wanted)
    for step, hyper in enumerate([{}, {"nesterov": True}, {"maximize": True}, {"lr": 0.5}]):
        optimizer = optimizer.replace(**hyper)
        program.set_hyper(**hyper)
        optimizer.update_(wanted, [noise(step, 9)], state)
        program.step([noise(step, 9)])
    assert_same((params, program.state), (wanted, state))


def test_groups_have_lanes_of_their_own() -> None:
    optimizer = adamw(0.1).override((1,), amsgrad=True, lr=0.3).override((2,), maximize=True)
    params = [noise(k, 9, dtype=torch.float64 if k == 3 else torch.float32) for k in range(4)]
    wanted = [one.clone() for one in params]
    program, state = optimizer.script(params), optimizer.init(wanted)
    for step in range(3):
        grads = [noise(step + k, 9, dtype=one.dtype) for k, one in enumerate(params)]
        optimizer.update_(wanted, grads, state)
        program.step(grads)
    assert_same((params, program.state), (wanted, state))
    assert program.explain() == "script"


def test_more_kinds_of_leaves_than_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "LANES", 1)
    params = [noise(0, 9), noise(1, 9, dtype=torch.float64)]
    wanted = [one.clone() for one in params]
    program, state = adamw(0.1).script(params), adamw(0.1).init(wanted)
    grads = [noise(2, 9), noise(3, 9, dtype=torch.float64)]
    adamw(0.1).update_(wanted, grads, state)
    program.step(grads)
    assert_same((params, program.state), (wanted, state))
    assert "more than 1 kinds" in program.explain()


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (BRANCHING, "branching branches on a number or on data"),
        (CENTRED, "centred needs its whole tensor"),
    ],
)
def test_a_chain_without_lanes_says_why_and_is_stepped(optimizer: Optimizer, reason: str) -> None:
    params, wanted = [noise(0, COUNT)], [noise(0, COUNT)]
    program, state = optimizer.script(params), optimizer.init(wanted)
    grads = [noise(1, COUNT)]
    optimizer.update_(wanted, grads, state)
    program.step(grads)
    assert_same(params, wanted)
    assert "new memory" in program.explain()
    assert reason in program.explain()


def test_a_bound_chain_without_lanes_says_why() -> None:
    bound = BRANCHING.using(executor="script").bind([noise(0, COUNT)])
    assert "new memory for each operation; branching branches" in bound.explain()


@pytest.mark.filterwarnings("ignore:`torch.jit.(save|load)` is deprecated")
def test_a_loaded_program_allocates_no_more() -> None:
    params, grads = [noise(0, COUNT)], [noise(1, COUNT)]
    buffer = io.BytesIO()
    torch.jit.save(adagrad(0.1).script(params).module, buffer)
    buffer.seek(0)
    module: Any = torch.jit.load(buffer)
    assert len(allocated(lambda: module.step(grads))) == 1
    wanted = adagrad(0.1).script(params)
    for _ in range(3):
        wanted.step(grads)
    assert_same(list(module.params), params)


class Named(NamedTuple):
    count: Tensor  # of the parameter's shape and dtype
    piece: Tensor  # the same


def named_init(param: Tensor, hyper: Hyper) -> Named:
    return Named(torch.zeros_like(param), torch.ones_like(param))


def named(param: Tensor, grad: Tensor, state: Named, c: Hyper) -> tuple[Tensor, Named]:
    count = state.count + grad
    return param - c.lr * count * state.piece, Named(count, state.piece * 0.5)


NAMED = chain(Rule(name="size", hyper=Hyper, state=Named, init=named_init, rule=named)(lr=0.1))


def test_a_rule_may_use_the_names_that_a_program_uses() -> None:
    params, wanted = [noise(0, COUNT)], [noise(0, COUNT)]
    program, state = NAMED.script(params), NAMED.init(wanted)
    for step in range(3):
        NAMED.update_(wanted, [noise(step, COUNT)], state)
        program.step([noise(step, COUNT)])
    assert_same((params, program.state), (wanted, state))
    assert program.explain() == "script"
