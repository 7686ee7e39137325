"""The laws of all optimizers. Each law is a function of a subject and one run.

A broken law raises AssertionError. :data:`LAWS` lists the laws under the names that
``check_optimizer`` reports.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

from functional_optim.core.stage import block_size_of
from functional_optim.core.state import State
from functional_optim.core.views import real_view
from functional_optim.kernels import needs_total
from functional_optim.kernels.errors import NotPureError
from functional_optim.optimizer import Optimizer
from functional_optim.testing.compare import (
    require_near,
    require_same,
    snapshot,
    tensors_in,
    versions,
)
from functional_optim.testing.composition_laws import (
    accumulation,
    freezing,
    grouped,
    masking,
    partitioned,
    skipping,
)
from functional_optim.testing.executor_laws import (
    any_history,
    auto_is_reference,
    blocked_is_reference,
    bound_is_reference,
    capturable_is_close,
    coarsest_of,
    compiled_is_reference,
    script_is_reference,
    traced_is_close,
)
from functional_optim.testing.front_end_laws import front_ends
from functional_optim.testing.position_law import one_result
from functional_optim.testing.runs import Grads, Params, Run, replay_path, replay_steps
from functional_optim.testing.state_laws import declared_fields, named, own_memory
from functional_optim.testing.subject import Subject, as_real_tree, named_state, run_oracle


def pure(subject: Subject, run: Run) -> None:
    """``update`` does not change params, gradients and state."""
    built = subject.build(run)
    # The reference executor calls the rule itself. A compiled loop can hide writes of the rule.
    for executor in dict.fromkeys(("reference", built.executor)):
        optimizer = built.using(executor=executor)
        params = run.params()
        state = optimizer.init(params)
        for grads in run.grads():
            before = snapshot((params, grads, state))
            written = versions((params, grads, state))
            try:
                new_params, new_state = optimizer.update(params, grads, state)
            except NotPureError as error:
                raise AssertionError(f"update wrote to one of its inputs: {error}") from error
            require_same("inputs of update", (params, grads, state), before)
            assert versions((params, grads, state)) == written, "update wrote to one of its inputs"
            params, state = new_params, new_state


def in_place(subject: Subject, run: Run) -> None:
    """``update_`` gives the result of ``update``, in the same tensors."""
    optimizer, params = subject.build(run), run.params()
    state = optimizer.init(params)
    tensors = tensors_in((params, state))
    for grads in run.grads():
        kept = snapshot(grads)
        optimizer.update_(params, grads, state)
        require_same("gradients after update_", grads, kept)
    now = tensors_in((params, state))
    assert all(a is b for a, b in zip(tensors, now, strict=True)), "update_ replaced a tensor"
    want = replay_steps(optimizer, run.params(), run.grads())
    require_same("params and state of update_ and update", (params, state), want)


def same_as_oracle(subject: Subject, run: Run) -> None:
    """Parameters and state equal those of the oracle, for all options and missing gradients."""
    assert subject.oracle is not None
    optimizer = subject.build(run)
    params, state = replay_steps(optimizer, run.params(), run.grads())
    want_params, want_state = run_oracle(subject.oracle, run)
    for name in run.names:
        require_same(
            "params and the oracle's", {name: params[name]}, {name: want_params[name]}, subject.ulps
        )
        ours = named_state(optimizer, name, params[name], state.leaves[name])
        for key, value in want_state[name].items():
            if key == "step":
                assert int(ours["step"]) == int(value), (
                    f"step of {name!r} is {int(ours['step'])}, the oracle's {int(value)}"
                )
            else:
                assert key in ours, f"the oracle keeps {key!r} for {name!r}, our state does not"
                require_same(
                    f"state {key} and the oracle's", {name: ours[key]}, {name: value}, subject.ulps
                )


def split_by_leaves(subject: Subject, run: Run) -> None:
    """Leaves that are stepped in separate trees get the result of one tree."""
    optimizer, whole = subject.build(run), run.params()
    state = optimizer.init(whole)
    parts: list[tuple[Params, State]] = []
    for name, param in run.params().items():
        parts.append(({name: param}, optimizer.init({name: param})))
    for grads in run.grads():
        totals = _totals(optimizer, whole, grads, state)
        whole, state = optimizer.update(whole, grads, state, measured=totals)
        parts = [
            optimizer.update(p, {name: grads[name] for name in p}, s, measured=totals)
            for p, s in parts
        ]
    for params, part in parts:
        for name in params:
            require_same("a part's params and the whole's", params[name], whole[name])
            require_same("a part's state and the whole's", part.leaves[name], state.leaves[name])
        require_same("a part's shared numbers and the whole's", part.shared, state.shared)


def split_by_elements(subject: Subject, run: Run) -> None:
    """Two pieces of a flat tensor get the result of the whole, if every stage is ``pointwise``.

    This holds for the state too. Tensors are cut at a multiple of the block size of the chain.
    """
    optimizer = subject.build(run)
    if any(stage.kind != "pointwise" for stage in optimizer.stages):
        return
    flat = {name: param.reshape(-1).contiguous() for name, param in run.params().items()}
    block_size = block_size_of(optimizer.stages)
    state = optimizer.init(flat)
    cut = {name: _halves(param, block_size) for name, param in flat.items()}
    cut_state = optimizer.init(cut)
    for grads in run.grads():
        whole = {name: _flat(grad) for name, grad in grads.items()}
        pieces = {
            name: (None, None) if g is None else _halves(g, block_size) for name, g in whole.items()
        }
        totals = _totals(optimizer, flat, whole, state)
        flat, state = optimizer.update(flat, whole, state, measured=totals)
        cut, cut_state = optimizer.update(cut, pieces, cut_state, measured=totals)
    require_same("shared numbers, cut and whole", cut_state.shared, state.shared)
    joined = {name: torch.cat(pair) for name, pair in cut.items()}
    require_same("a cut tensor and the whole (not pointwise, then)", joined, flat)
    for name, leaf in state.leaves.items():
        kept: Any = optree.tree_map(_joined, leaf, *cut_state.leaves[name])
        require_same(f"the state of {name!r}, cut and whole (not pointwise, then)", kept, leaf)


def one_step_each(subject: Subject, run: Run) -> None:
    """A leaf is stepped if and only if it has a gradient. Else leaf and state do not change."""
    optimizer, params = subject.build(run), run.params()
    state = optimizer.init(params)
    counts = dict.fromkeys(run.names, 0)
    for grads in run.grads():
        new_params, new_state = optimizer.update(params, grads, state)
        for name in run.names:
            if grads[name] is None:
                require_same(
                    "a leaf without a gradient, before and after",
                    (new_params[name], new_state.leaves[name]),
                    (params[name], state.leaves[name]),
                )
            else:
                counts[name] += 1
        params, state = new_params, new_state
    found = {name: int(leaf.step) for name, leaf in state.leaves.items()}
    assert found == counts, f"step counts are {found}, gradients came {counts}"


def resumed(subject: Subject, run: Run) -> None:
    """A run that is saved and loaded after each step gives the result of a run without stops."""
    optimizer, params = subject.build(run), run.params()
    state = optimizer.init(params)
    for grads in run.grads():
        file = io.BytesIO()
        torch.save({"params": params, "state": state}, file)
        file.seek(0)
        loaded = torch.load(file)  # with its safe defaults
        params, state = optimizer.update(loaded["params"], grads, loaded["state"])
    want = replay_steps(optimizer, run.params(), run.grads())
    require_same("resumed and never stopped", (params, state), want)


def complex_is_real_view(subject: Subject, run: Run) -> None:
    """Complex parameters get the result of their real view.

    The law does not apply to an optimizer that refuses complex parameters before the first step. It
    also does not apply if selectors choose other stages for the real view, which has one more
    dimension.
    """
    optimizer, params = subject.build(run), run.params()
    seen = {name: real_view(param) for name, param in run.params().items()}
    for name, param in params.items():
        pair = (tuple(param.shape), tuple(seen[name].shape))
        own, other = (optimizer.chain_at((name,), shape) for shape in pair)
        if own.places != other.places or own.hypers != other.hypers:
            return
    try:
        optimizer.init(params)
    except (TypeError, ValueError):
        return
    views = [
        {name: None if g is None else real_view(g) for name, g in grads.items()}
        for grads in run.grads()
    ]
    got_params, got = replay_steps(optimizer, params, run.grads())
    want_params, want = replay_steps(optimizer, seen, views)
    got_views = {name: real_view(param) for name, param in got_params.items()}
    require_same("complex params and their real view's", got_views, want_params)
    require_same("complex state and its real view's", as_real_tree(got), as_real_tree(want))


def contained(subject: Subject, run: Run) -> None:
    """A gradient that is not finite changes no other leaf, except through a total."""
    optimizer = subject.build(run)
    shape = (2, 2) if subject.matrices else (2,)
    for poison in (float("nan"), float("inf")):
        like: Any = {"dtype": run.dtype, "device": run.device}
        params = {**run.params(), "poisoned": torch.ones(shape, **like)}
        state = optimizer.init(params)
        for grads in run.grads():
            totals = _totals(optimizer, params, {**grads, "poisoned": None}, state)
            bad = {**grads, "poisoned": torch.full(shape, poison, **like)}
            params, state = optimizer.update(params, bad, state, measured=totals)
        for name in run.names:
            assert bool(params[name].isfinite().all()), f"{poison} reached the leaf {name!r}"


def vmapped(subject: Subject, run: Run) -> None:
    """Vmap over a batch of params, gradients and state gives the results of a loop over it."""
    optimizer = subject.build(run)
    if not all(stage.differentiable for stage in optimizer.stages):
        return
    coarsest = coarsest_of(optimizer, run)
    run_grads = [
        {name: torch.zeros_like(run.params()[name]) if g is None else g for name, g in one.items()}
        for one in run.grads()
    ]
    scales = (1.0, -2.0, 0.5)
    starts = [_scaled(run.params(), factor) for factor in scales]
    params, state = _stacked(starts), _stacked([optimizer.init(one) for one in starts])
    for grads in run_grads:
        batch = _stacked([_scaled(grads, f) for f in scales])
        params, state = torch.func.vmap(optimizer.update)(params, batch, state)
    for index, factor in enumerate(scales):
        own: list[Grads] = [dict(_scaled(grads, factor)) for grads in run_grads]
        way = replay_path(optimizer, _scaled(run.params(), factor), own)
        # The value of a batched step count is hidden, so coefficients are tensors, and round
        # differently.
        member: Any = (params, state)
        got = optree.tree_map(lambda leaf, at=index: leaf[at], member)
        if coarsest is None:
            require_same("vmap and the loop", got, way[-1], ulps=64.0)
        else:
            # From zero, weight decay has no effect.
            beside = replay_path(optimizer, _scaled(run.params(), 0.0), own)
            require_near("vmap and the loop", got, way, coarsest, beside=beside)


def differentiable(subject: Subject, run: Run) -> None:
    """torch.func.grad through the updates equals the derivative of torch.autograd.

    On the CPU the bits are equal. On other devices kernels may add in another order.
    """
    optimizer, start = subject.build(run), run.params()
    if not all(stage.differentiable for stage in optimizer.stages):
        return

    def total(params: Params) -> Tensor:
        after, _ = replay_steps(optimizer, params, run.grads())
        return torch.stack([leaf.sum() for leaf in after.values()]).sum()

    got = torch.func.grad(total)(start)
    leaves = {name: param.detach().clone().requires_grad_() for name, param in start.items()}
    want = torch.autograd.grad(total(leaves), list(leaves.values()))
    ulps = 0.0 if run.device == "cpu" else 16.0
    require_same("torch.func.grad and autograd", list(got.values()), list(want), ulps=ulps)


def _totals(optimizer: Optimizer, params: Params, grads: Grads, state: State) -> list[Tensor]:
    """Return the totals of the measured stages of a chain over the whole tree."""
    totals: list[Tensor] = []
    for stage in optimizer.stages:
        if needs_total(stage):
            totals.append(optimizer.measure(params, grads, state, measured=totals))
    return totals


def _halves(tensor: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    middle = tensor.numel() // 2 // block_size * block_size
    return tensor[:middle].clone(), tensor[middle:].clone()


def _joined(whole: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Concatenate the states of two pieces. Tensors that were not cut are equal in both."""
    is_cut = whole.dim() > 0 and whole.numel() == one.numel() + other.numel()
    return torch.cat([one, other]) if is_cut else one


def _flat(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.reshape(-1)


def _scaled(tree: Params | Grads, factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in tree.items() if tensor is not None}


def _stacked(trees: Sequence[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


@dataclass(frozen=True)
class Law:
    """A law, and the runs that it applies to.

    Example::

        >>> from functional_optim import sgd
        >>> LAWS["same as the oracle"].concerns(Subject(sgd))  # needs an oracle
        False
    """

    check: Callable[[Subject, Run], None]
    complex_only: bool = False
    small_only: bool = False
    """No wide matrices: rounding alone determines the eigenvectors of a factor without full rank,
    which SOAP uses as a basis."""
    needs_oracle: bool = False
    double_only: bool = False
    not_16_bit: bool = False
    one_chain: bool = False
    """True if the law does not apply to an optimizer whose leaves have different stages."""
    slow: bool = False
    """True if the law is checked only by name, since each choice of options is compiled."""

    def concerns(self, subject: Subject) -> bool:
        """Return True if the law applies to a subject."""
        has_oracle = subject.oracle is not None or not self.needs_oracle
        is_real = subject.matrices or not subject.takes_complex
        return has_oracle and not (self.complex_only and is_real)


LAWS: dict[str, Law] = {
    "pure": Law(pure),
    "own memory": Law(own_memory),
    "declared fields": Law(declared_fields),
    "in place": Law(in_place),
    "by name": Law(named),
    "same as the oracle": Law(same_as_oracle, needs_oracle=True),
    "any split by leaves": Law(split_by_leaves),
    # In 16-bit floats torch's CPU kernels round by position: for elements after the last whole
    # vector they round alpha * y before they add. So a cut changes the result.
    "any split by elements": Law(split_by_elements, not_16_bit=True),
    "one result": Law(one_result, not_16_bit=True, small_only=True),
    "script is reference": Law(script_is_reference, one_chain=True),
    "blocked is reference": Law(blocked_is_reference),
    "any history": Law(any_history),
    "bound is reference": Law(bound_is_reference, one_chain=True),
    "auto is reference": Law(auto_is_reference),
    "capturable is close": Law(capturable_is_close, one_chain=True),
    "compiled is reference": Law(compiled_is_reference, slow=True),
    "traced is close": Law(traced_is_close, slow=True),
    "one step each": Law(one_step_each),
    "any moment": Law(resumed),
    "complex is its real view": Law(complex_is_real_view, complex_only=True),
    "contained": Law(contained),
    # The mean has the strides of the parameter, and in 16 bits rounding depends on strides.
    "accumulation": Law(accumulation, not_16_bit=True),
    "skipping": Law(skipping),
    "partition": Law(partitioned),
    "masking": Law(masking),
    "freezing": Law(freezing),
    "groups": Law(grouped),
    "front-ends": Law(front_ends),
    "vmap is the loop": Law(vmapped, small_only=True, double_only=True),
    "differentiable": Law(differentiable, small_only=True, double_only=True),
}
"""All laws, by name."""
