"""Laws that compare an optimizer X with another optimizer that contains X.

They find faults that every way to run X has in common.
"""

from typing import Any

import torch
from torch import Tensor

from functional_optim.composition import chain, freeze, masked, partition
from functional_optim.core.aliasing import match_strides
from functional_optim.core.hyper import is_plain
from functional_optim.core.selectors import if_any
from functional_optim.core.state import LeafState, Shared, State
from functional_optim.kernels import needs_total
from functional_optim.numeric import add, mul
from functional_optim.optimizer import Optimizer
from functional_optim.plan.leaf_inputs import input_names
from functional_optim.testing.compare import require_same
from functional_optim.testing.runs import Grads, Params, Run, replay_steps
from functional_optim.testing.subject import Subject
from functional_optim.transforms.clip_by_global_norm import clip_by_global_norm
from functional_optim.wrappers.accumulate import accumulate
from functional_optim.wrappers.apply_if_finite import apply_if_finite

CALLS = 2
"""Number of micro-batches per step in the law of accumulation."""

CLIPPED = 0.5
"""Norm to which gradients are clipped before a partition."""


def accumulation(subject: Subject, run: Run) -> None:
    """``chain(accumulate(k), X)`` over k micro-batches is X on their mean.

    A gradient that is missing in some of them counts as zero. A leaf whose gradient is missing in
    all of them is not changed. Gradients have the strides of their parameters, as in autograd,
    since a norm adds up in the order of memory.
    """
    plain = subject.build(run)
    if input_names(plain.links):
        return  # a gate refuses stages with inputs per leaf after it
    steps = [_match_strides(run, grads) for grads in (*run.grads(), *reversed(run.grads()))]
    wrapped = chain(accumulate(CALLS), plain)
    found = replay_steps(wrapped, run.params(), steps)
    pairs = [steps[k : k + CALLS] for k in range(0, len(steps), CALLS)]
    want = replay_steps(plain, run.params(), [_mean(pair) for pair in pairs])
    _require_same_after_gate("accumulate and X on the mean", wrapped, "accumulate", found, want)


def skipping(subject: Subject, run: Run) -> None:
    """``chain(apply_if_finite(n), X)`` over a run is X over its steps with finite gradients."""
    plain, poisoned = subject.build(run), []
    if input_names(plain.links):
        return
    for k, grads in enumerate(run.grads()):
        poison = float("nan") if k % 2 else float("inf")
        bad = {name: None if one is None else one * poison for name, one in grads.items()}
        if any(one is not None and not bool(one.isfinite().all()) for one in bad.values()):
            poisoned += [bad, bad] if k % 3 else [bad]
        poisoned.append(grads)
    wrapped = chain(apply_if_finite(len(poisoned)), plain)
    found = replay_steps(wrapped, run.params(), poisoned)
    want = replay_steps(plain, run.params(), run.grads())
    label = "apply_if_finite and X on finite steps"
    _require_same_after_gate(label, wrapped, "apply_if_finite", found, want)


def partitioned(subject: Subject, run: Run) -> None:
    """``partition({"a": X, "b": X}, ...)`` is X on the leaves of each part.

    A total of X is over the leaves of a part. A total before the partition is over all leaves.
    """
    plain = subject.build(run)
    names = sorted(run.names)
    first = names[::2]
    both = partition({"a": plain, "b": plain}, lambda path, _: "a" if path[0] in first else "b")
    params, state = replay_steps(_fed_as(plain, both), run.params(), run.grads())
    for part in (first, names[1::2]):
        _require_leaves("a part and X on its leaves", plain, run, part, (params, state))
    if any(map(needs_total, plain.stages)):
        return
    _require_leaves("both parts and X on all leaves", plain, run, names, (params, state))
    clipped = [chain(clip_by_global_norm(CLIPPED), one) for one in (both, plain)]
    made = [replay_steps(_fed_as(plain, one), run.params(), run.grads()) for one in clipped]
    require_same("clipped parts and clipped X: params", made[0][0], made[1][0])


def masking(subject: Subject, run: Run) -> None:
    """``chain(masked(X, where), freeze(not where))`` is X on the leaves that ``where`` selects."""
    plain = subject.build(run)
    names = sorted(run.names)
    chosen = names[::2]
    mask = masked(plain, if_any(lambda path: path[0] in chosen))
    optimizer = chain(mask, freeze(if_any(lambda path: path[0] not in chosen)))
    found = replay_steps(_fed_as(plain, optimizer), run.params(), run.grads())
    _require_leaves("a masked optimizer and X", plain, run, chosen, found)
    _require_kept(run, names[1::2], found)


def freezing(subject: Subject, run: Run) -> None:
    """``chain(X, freeze(where))`` is X on the leaves that are not frozen.

    Gradients of frozen leaves are NaN here, to show that totals do not contain them.
    """
    plain = subject.build(run)
    names = sorted(run.names)
    frozen = names[1::2]
    optimizer = _fed_as(plain, chain(plain, freeze(if_any(lambda path: path[0] in frozen))))
    steps: list[Grads] = []
    for grads in run.grads():
        bad = {k: None if g is None else g * float("nan") for k, g in grads.items() if k in frozen}
        steps.append({**grads, **bad})
    found = replay_steps(optimizer, run.params(), steps)
    _require_leaves("an optimizer with frozen leaves and X", plain, run, names[::2], found)
    _require_kept(run, frozen, found)


def grouped(subject: Subject, run: Run) -> None:
    """Leaves with other hyper-parameters step like leaves of a separate optimizer.

    The separate optimizer gets the same totals. ``init`` refuses an override of a hyper-parameter
    that shared scalars depend on.
    """
    plain = subject.build(run)
    names = sorted(run.names)
    few = names[::2]
    if len(names) == len(few) or input_names(plain.links) or plain.overrides:
        return
    for name, value in plain.hyper.items():
        if not is_plain((value,)) or isinstance(value, (bool, int)) or value is None:
            continue
        try:
            alone = plain.replace(**{name: _change(value)})
            together = plain.override(lambda path: path[0] in few, **{name: _change(value)})
        except (TypeError, ValueError):
            continue  # out of bounds, or not a number
        try:
            state = together.init(run.params())
        except ValueError as error:
            if "must be the same" not in str(error):
                raise
            continue
        _require_same_steps(
            name, run, together, state, {"few": (alone, few), "rest": (plain, names)}
        )


def _require_same_steps(
    name: str,
    run: Run,
    together: Optimizer,
    state: State,
    parts: dict[str, tuple[Optimizer, list[str]]],
) -> None:
    """Check that separate optimizers with the same totals make the same steps."""
    few = parts["few"][1]
    params: Params = run.params()
    own = {}
    for label, (optimizer, names) in parts.items():
        mine = {k: run.params()[k] for k in names if (k in few) == (label == "few")}
        own[label] = mine, optimizer.init(mine)
    for grads in run.grads():
        totals: list[Tensor] = []
        for stage in together.stages:
            if needs_total(stage):
                totals.append(together.measure(params, grads, state, measured=totals))
        params, state = together.update(params, grads, state, measured=totals)
        for label, (mine, kept) in own.items():
            given = {k: grads[k] for k in mine}
            own[label] = parts[label][0].update(mine, given, kept, measured=totals)
    for mine, kept in own.values():
        for k in mine:
            require_same(f"with another {name}, params of a group and alone", params[k], mine[k])
            require_same(f"with another {name}, state", state.leaves[k], kept.leaves[k])
        require_same(f"with another {name}, shared numbers", state.shared, kept.shared)


def _change(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_change, value))
    return value * 0.5 if value else 0.25


def _match_strides(run: Run, grads: Grads) -> Grads:
    """Return gradients with the strides of their parameters."""
    params = run.params()
    return {k: None if g is None else match_strides(g, params[k]) for k, g in grads.items()}


def _mean(pair: list[Grads]) -> Grads:
    """Return the mean of micro-batches, added in the order of ``accumulate``."""
    mean: Grads = {}
    for grads in pair:
        for name, grad in grads.items():
            before = mean.get(name)
            if before is None or grad is None:
                mean[name] = before if grad is None else mul(grad, 1 / len(pair))
            else:
                mean[name] = add(before, grad, 1 / len(pair))
    return mean


def _fed_as(plain: Optimizer, other: Optimizer) -> Optimizer:
    """Return ``other`` as an optimizer of the class of ``plain``, which may add inputs per leaf."""
    return type(plain)(other.links, plain.executor, plain.namespace, other.overrides)


def _require_same_after_gate(
    label: str,
    wrapped: Optimizer,
    gate: str,
    found: tuple[Params, State],
    want: tuple[Params, State],
) -> None:
    """Check that a gate changes nothing else: parameters, state and shared scalars are equal."""
    require_same(f"{label}: params", found[0], want[0])
    for name, leaf in found[1].leaves.items():
        stages = wrapped.chain_at((name,), tuple(found[0][name].shape)).stages
        place = [stage.name for stage in stages].index(gate)
        kept = LeafState(
            leaf.step, (*leaf.stages[:place], *leaf.stages[place + 1 :]), leaf.gates[1:]
        )
        require_same(f"{label}: the state of {name!r}", kept, want[1].leaves[name])
    shared, place = found[1].shared, [stage.name for stage in wrapped.stages].index(gate)
    if want[1].shared == ():
        return
    behind = Shared(
        shared.opened[place],
        (*shared.stages[:place], *shared.stages[place + 1 :]),
        (*shared.opened[:place], *shared.opened[place + 1 :]),
    )
    require_same(f"{label}: shared numbers", behind, want[1].shared)


def _require_leaves(
    label: str, plain: Optimizer, run: Run, names: list[str], found: tuple[Params, State]
) -> None:
    """Check that some leaves equal those of an optimizer that has only these leaves."""
    if not names:
        return
    params = {name: run.params()[name] for name in names}
    steps = [{name: grads[name] for name in names} for grads in run.grads()]
    want, state = replay_steps(plain, params, steps)
    for name in names:
        require_same(f"{label}: params", found[0][name], want[name])
        require_same(f"{label}: state of {name!r}", found[1].leaves[name], state.leaves[name])


def _require_kept(run: Run, names: list[str], found: tuple[Params, State]) -> None:
    """Check that frozen leaves are unchanged, and have no step counts and no state."""
    for name in names:
        require_same("a frozen leaf", found[0][name], run.params()[name])
        assert not int(found[1].leaves[name].step), f"the frozen leaf {name!r} counted a step"
        assert not any(isinstance(one, torch.Tensor) for one in found[1].leaves[name].stages)
