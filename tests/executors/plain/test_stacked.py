"""Matrices of one shape stepped together, with the reference's bits."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from functional_optim import (
    NoState,
    Optimizer,
    Rule,
    chain,
    clip_by_global_norm,
    muon,
    soap,
    weight_decay,
)
from functional_optim.core.stage import Link
from functional_optim.kernels import EXECUTORS, KernelExecutor, leaf_binder, stacks
from functional_optim.kernels.cache import Cache
from functional_optim.kernels.stacks import why_not_stacked
from functional_optim.plan import tree_steps
from functional_optim.testing.compare import require_same

from ...choices import case, pairs

SHAPES = (*((4, 6),) * 5, (3, 3), *((16, 8),) * 7, (6, 4), (3, 3), (2, 0), (2, 0))
LARGER = (*((16, 32),) * 5, (3, 3), *((32, 24),) * 7, (24, 16), (3, 3), (2, 0), (2, 0))
"""Shapes for which batched products round as single products do."""
CHAINS: dict[str, Any] = {
    "muon": lambda: muon(0.1),
    "muon without nesterov": lambda: muon(0.1, nesterov=False, weight_decay=0.0),
    "soap": lambda: soap(0.1, precondition_frequency=2),
    "clipped": lambda: chain(weight_decay(0.1), clip_by_global_norm(0.5), muon(0.1)),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def tensors(seed: int, dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draws).to(dtype) for shape in shapes]


def steps(
    optimizer: Optimizer, dtype: torch.dtype, count: int = 5, shapes: Any = SHAPES
) -> tuple[Any, Any]:
    """Step in place with one missing gradient per step, so that step counts differ."""
    params = tensors(0, dtype, shapes)
    state = optimizer.init(params)
    for step in range(count):
        grads: list[Any] = list(tensors(step + 1, dtype, shapes))
        grads[step] = None
        optimizer.update_(params, grads, state)
    return params, state


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of the stacks that are stepped."""
    found: list[int] = []
    plain, bound = stacks.step_stack, leaf_binder._step_stack

    def counted(stages: Any, stack: Any, totals: Any) -> None:
        found.append(len(stack))
        plain(stages, stack, totals)

    def counted_bound(known: Any, columns: Any, rest: Any) -> None:
        found.append(len(columns[0]))
        bound(known, columns, rest)

    monkeypatch.setattr(stacks, "step_stack", counted)
    monkeypatch.setattr(leaf_binder, "_step_stack", counted_bound)
    return found


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust stacks after two trials, and forget earlier trials."""
    monkeypatch.setattr(stacks, "EVIDENCE", 1)
    monkeypatch.setattr(stacks, "_EVIDENCE", Cache())


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust stacks without a trial."""
    trusted = SimpleNamespace(is_enough=lambda *_: True)
    monkeypatch.setattr(stacks, "_evidence_of", lambda *_: trusted)


@pytest.mark.usefixtures("trusting")
def test_auto_is_the_reference_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    for one in pairs(name=list(CHAINS), dtype=DTYPES):
        optimizer = CHAINS[one["name"]]()
        executor = KernelExecutor(stacks=True)
        monkeypatch.setitem(EXECUTORS, "auto", executor)
        with case(**one):
            got = steps(optimizer.using(executor="auto"), one["dtype"], shapes=LARGER)
            want = steps(optimizer.using(executor="reference"), one["dtype"], shapes=LARGER)
            require_same("auto and reference", got, want)
    assert max(sizes) == 4


class Hyper(NamedTuple):
    lr: float


def by_norm(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
    """Divide by the norm, which is wrong for a stack: the norm covers all its matrices."""
    return param - c.lr * grad / grad.norm(), state


BY_NORM = Rule(name="by_norm", hyper=Hyper, rule=by_norm, kind="per_matrix", stacked=True)


@pytest.mark.usefixtures("trusting")
def test_a_rule_that_only_says_so_is_found_out() -> None:
    """Stacks of this rule have different bits, so ``auto`` steps its matrices one by one."""
    optimizer = chain(BY_NORM(lr=0.1))
    want = steps(optimizer.using(executor="reference"), torch.float32, shapes=LARGER)
    got = steps(optimizer.using(executor="auto"), torch.float32, shapes=LARGER)
    require_same("auto", got, want)


def test_what_does_not_say_so_is_not_stacked(sizes: list[int]) -> None:
    link = Link(replace(BY_NORM, stacked=False), Hyper(0.1))
    optimizer = chain(link)
    assert why_not_stacked(optimizer.stages) == (
        "by_norm does not say that its matrices may be stacked"
    )
    want = steps(optimizer.using(executor="reference"), torch.float32)
    require_same("auto", steps(optimizer.using(executor="auto"), torch.float32), want)
    assert sizes == []


def test_layouts_go_one_by_one(always: None, sizes: list[int]) -> None:
    """Transposed and sliced matrices are stepped one by one, and the other four in a stack."""
    draws = torch.Generator().manual_seed(0)

    def made() -> list[Tensor]:
        return [torch.randn(4, 4, generator=draws) for _ in range(6)]

    params = made()
    params[0], params[1] = params[0].t(), torch.randn(4, 8, generator=draws)[:, ::2]
    grads = made()
    optimizer = muon(0.1)
    want, _ = optimizer.using(executor="reference").update(
        params[:2], grads[:2], optimizer.init(params[:2])
    )
    state = optimizer.init(params)
    optimizer.using(executor="auto").update_(params, grads, state)
    require_same("those laid out", params[:2], want)
    assert sizes == [4]


@pytest.mark.parametrize("seed", range(3))
def test_many_small_matrices_have_the_references_bits(seed: int) -> None:
    """Fault 12: batched products of small matrices round some elements differently."""
    draws = torch.Generator().manual_seed(seed)
    start = torch.randn(100, 10, 10, generator=draws).unbind()
    grads = [torch.randn(100, 10, 10, generator=draws).unbind() for _ in range(40)]
    got = []
    for executor in ("auto", "reference"):
        optimizer = muon(0.1).using(executor=executor)
        params = [one.clone() for one in start]
        state = optimizer.init(params)
        for grad in grads:
            optimizer.update_(params, list(grad), state)
        got.append((params, state))
    require_same("auto and reference", *got)


def test_a_stack_is_trusted_after_a_million_elements(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    """Fault 12: each step makes one trial, and the step after the last trial is stacked."""
    monkeypatch.setattr(stacks, "_EVIDENCE", Cache())
    draws = torch.Generator().manual_seed(0)
    params, grads = ([torch.randn(128, 128, generator=draws) for _ in range(4)] for _ in range(2))
    optimizer = muon(0.1, ns_steps=1).using(executor="auto")
    state = optimizer.init(params)
    counts = []
    for _ in range(18):
        optimizer.update_(params, grads, state)
        counts.append(len(sizes))
    wanted = (1 << 20) // (4 * 128 * 128)
    assert wanted == 16
    assert counts == [*range(1, wanted), wanted + 1, wanted + 2, wanted + 3]


@pytest.mark.usefixtures("trusting")
def test_a_step_that_changes_nothing_is_no_evidence(sizes: list[int]) -> None:
    """Fault 12: at learning rate 0, no product changes a parameter, so a trial proves nothing."""
    optimizer = chain(BY_NORM(lr=0.0)).using(executor="auto")
    params, grads = (tensors(seed, shapes=LARGER) for seed in (0, 1))
    state = optimizer.init(params)
    for _ in range(4):
        optimizer.update_(params, grads, state)
    tried = len(sizes)
    want = optimizer.using(executor="reference").update(params, grads, state, lr=0.1)
    optimizer.update_(params, grads, state, lr=0.1)
    require_same("auto", (params, state), want)
    assert tried == len(sizes) * 4 // 5


def test_temporaries_are_bounded(
    always: None, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    monkeypatch.setattr(stacks, "STACK", 4 * 6 * 2)
    steps(muon(0.1).using(executor="auto"), torch.float32, 1)
    assert set(sizes) == {2}
    sizes.clear()
    monkeypatch.setattr(stacks, "STACK", 1)
    monkeypatch.setattr(tree_steps, "_PLANS", [])
    steps(muon(0.1).using(executor="auto"), torch.float32, 1)
    assert sizes == []


def test_a_shape_that_a_rule_changes_is_refused_before_anything_is_written() -> None:
    def grows(param: Tensor, grad: Tensor, state: NoState, c: Hyper) -> tuple[Tensor, NoState]:
        return torch.cat([param, param], -1), state

    rule = Rule(name="grows", hyper=Hyper, rule=grows, kind="per_matrix", stacked=True)
    optimizer = chain(rule(lr=0.1)).using(executor="auto")
    params = tensors(0)
    with pytest.raises(RuntimeError, match="it must keep both"):
        optimizer.update_(params, tensors(1), optimizer.init(params))
    require_same("params", params, tensors(0))


def test_explained() -> None:
    params = tensors(0)
    said = muon().using(executor="auto").explain(params)
    assert said.endswith("one by one; muon needs its whole tensor; those of one shape in stacks")
