"""The script executor steps chunks in no memory but its scratch, and says where it cannot."""

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
from functional_optim.kernels import script as executor
from functional_optim.kernels import script_chunk
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.script_chunk import PIECE, piece_elements, scripted_chunk

from ..choices import case, pairs
from .rules import Hyper, optimizer_of, stateless
from .support import Twins, assert_same, chunk_of, copied, noise

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


def branching(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    if c.lr > 0.05:
        return param - c.lr * grad, state
    return param + grad, state


def centred(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    return param - c.lr * (grad - grad.mean()), state


BRANCHING = stateless(branching, "branching")
CENTRED = stateless(centred, "centred", kind="per_matrix")


def programmed(optimizer: Optimizer, make: Callable[[], Any]) -> Twins:
    """The chain as one program, and ``update_`` over an equal list."""
    return Twins(optimizer, make, bind=Optimizer.script)


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


def require_scratch_alone(name: str, *, bound: bool) -> None:
    optimizer, params, grads = CHAINS[name], [noise(0, COUNT)], [noise(1, COUNT)]
    if bound:
        one = optimizer.using(executor="script").bind(params)
        one.gradients[0].copy_(grads[0])
        found = allocated(lambda: one.step(one.gradients))
    else:
        module = optimizer.script(params).module
        found = allocated(lambda: module.step(list(grads)))
    if "clip" in name:  # the squares for the norm, and no more
        found = sorted(found)[:-1] if not bound else found[1:]
    assert len(found) == SCRATCH.get(name, 1), found
    assert max(found, default=0) <= 4 * PIECE, found


def test_a_step_allocates_scratch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", str(PIECE))
    for one in pairs(name=CHAINS, bound=[True, False]):
        with case(**one):
            require_scratch_alone(**one)


def test_what_is_made_for_the_shortest_chunks_serves_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", str(PIECE))
    for elements in (0, 1):
        monkeypatch.setattr(script_chunk, "_MADE", Cache())
        short = CHAINS["adamw"].using(executor="script").bind([noise(0, elements)])
        short.step(short.gradients)
        assert "script" in short.explain()
        with case(elements=elements):
            require_scratch_alone("adamw", bound=True)
            assert len(script_chunk._MADE) == 1


def test_the_count_sees_what_a_chain_without_a_chunk_allocates() -> None:
    one = BRANCHING.using(executor="script").bind([noise(0, COUNT)])
    assert len(allocated(lambda: one.step(one.gradients))) >= 2
    assert "new memory for each operation; branching branches" in one.explain()


def test_no_operation_makes_a_tensor_to_copy_it() -> None:
    """Torch generates an ``out=`` for operations that have none: it makes a tensor and copies."""
    for name, optimizer in CHAINS.items():
        graph = optimizer.script([noise(0, 5)]).module._advance.inlined_graph
        found = filter(None, map(_overload, _nodes(graph)))
        written = [overload for overload in found if "out" in overload._overloadname]
        with case(name=name):
            assert written
            assert not any(torch.Tag.generated in overload.tags for overload in written)


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


def test_large_leaves_are_the_reference_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTIONAL_OPTIM_BLOCK", "50000")
    for place, (name, optimizer) in enumerate(CHAINS.items()):
        dtype = (torch.float32, torch.float64)[place % 2]

        def leaf(seed: int = 0, dtype: torch.dtype = dtype) -> list[Tensor]:
            return [noise(seed, 3, COUNT // 3, dtype=dtype)]

        bound, program = Twins(optimizer, leaf, "script"), programmed(optimizer, leaf)
        with case(name=name, dtype=dtype):
            for step in range(2):
                bound.step(leaf(step + 1))
                program.step(leaf(step + 1))
            assert bound.bound.explain().endswith("script")
            assert program.bound.explain() == "script"


def test_what_several_operations_pass_over_is_cut_for_the_cache() -> None:
    for optimizer, dtype, cut in (
        (sgd(0.1), torch.float32, False),
        (sgd(0.1, momentum=0.9), torch.float32, True),
        (sgd(0.1, momentum=0.9), torch.bfloat16, False),
        (lion(0.1), torch.float32, True),
    ):
        leaf = chunk_of(optimizer, noise(0, 100).to(dtype))
        made = scripted_chunk(optimizer.stages, leaf, ())
        with case(optimizer=optimizer, dtype=dtype):
            assert (piece_elements(made) < sys.maxsize) is cut


def test_gradients_that_share_memory_with_what_is_written() -> None:
    """The parameter itself, and a window that overlaps it: read before anything is written."""
    for one in pairs(name=CHAINS, shift=[0, 3, 40]):
        memory, optimizer = noise(0, 100), CHAINS[one["name"]]
        twins = Twins(
            optimizer,
            iter([[memory[:40]], [noise(0, 100)[:40].clone()]]).__next__,
            bind=Optimizer.script,
        )
        for _ in range(2):
            grad = memory[one["shift"] :][:40]
            with case(**one):
                twins.step([grad], [grad.clone()])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda one: one.t(),
    "strided": lambda one: one[:, ::2],
    "column": lambda one: one[:, :1],
    "0-d": lambda one: one[0, 0],
    "empty": lambda one: one[:0],
}


def test_layouts_that_are_no_chunk() -> None:
    for name, layout in LAYOUTS.items():
        twins = programmed(adamw(0.1), lambda layout=layout: [layout(noise(0, 6, 4))])
        for step in range(3):
            with case(name=name, step=step):
                twins.step([layout(noise(step + 1, 6, 4))])


def test_choices_that_the_chunks_were_not_made_for() -> None:
    """Flags that are set later: stepped all the same."""
    twins = programmed(sgd(0.1, momentum=0.9), lambda: [noise(0, 9)])
    for step, hyper in enumerate([{}, {"nesterov": True}, {"maximize": True}, {"lr": 0.5}]):
        twins.optimizer = twins.optimizer.replace(**hyper)
        twins.bound.set_hyper(**hyper)
        twins.step([noise(step, 9)])


def of_two_dtypes(seed: int, count: int) -> list[Tensor]:
    dtypes = [torch.float32] * (count - 1) + [torch.float64]
    return [noise(seed + k, 9, dtype=dtype) for k, dtype in enumerate(dtypes)]


def test_groups_have_chunks_of_their_own() -> None:
    optimizer = adamw(0.1).override((1,), amsgrad=True, lr=0.3).override((2,), maximize=True)
    twins = programmed(optimizer, lambda: of_two_dtypes(0, 4))
    for step in range(3):
        twins.step(of_two_dtypes(step + 5, 4))
    assert twins.bound.explain() == "script"


def test_more_kinds_of_leaves_than_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "KINDS", 1)
    twins = programmed(adamw(0.1), lambda: of_two_dtypes(0, 2))
    twins.step(of_two_dtypes(2, 2))
    assert "more than 1 kinds" in twins.bound.explain()


def test_a_chain_without_chunks_says_why_and_is_stepped() -> None:
    for optimizer, reason in (
        (BRANCHING, "branching branches on a number or on data"),
        (CENTRED, "centred needs its whole tensor"),
    ):
        twins = programmed(optimizer, lambda: [noise(0, COUNT)])
        twins.step([noise(1, COUNT)])
        said = twins.bound.explain()
        assert "new memory" in said and reason in said


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


def test_a_rule_may_use_the_names_that_a_program_uses() -> None:
    optimizer = optimizer_of(named, name="size", state=Named, init=named_init)
    twins = programmed(optimizer, lambda: [noise(0, COUNT)])
    for step in range(3):
        twins.step([noise(step, COUNT)])
    assert twins.bound.explain() == "script"


def test_a_tensor_after_numbers_is_refused_before_anything_is_written() -> None:
    """What is remembered of a chunk is of its numbers then."""
    bound = (
        sgd(0.1).override((0,), lr=0.2).using(executor="script").bind([noise(0, 9), noise(1, 5)])
    )
    grads = [noise(2, 9), noise(3, 5)]
    for _ in range(2):
        bound.step(grads)
    before = copied((bound.params, bound.state))
    with pytest.raises(TypeError, match="the script executor takes numbers"):
        bound.step(grads, lr=torch.tensor(0.1, requires_grad=True))
    assert_same((bound.params, bound.state), before)
    bound.step(grads)
    assert [int(leaf.step) for leaf in bound.state.leaves] == [3, 3]
