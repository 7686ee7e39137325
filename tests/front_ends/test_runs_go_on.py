"""Runs that continue in any form from the state dict of any other form, bit for bit."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_optim import (
    Optimizer,
    TorchOptimizer,
    adamw,
    apply_if_finite,
    as_functional_optim,
    chain,
    clip_by_global_norm,
    freeze,
    from_torch,
    if_any,
    labels,
    matching,
    partition,
    rprop,
    sgd,
)
from tests.choices import each, each_value

from .runs import FORMS, HISTORIES, KINDS, WAYS, History, begun, resumed
from .support import (
    CASES,
    ONE_EACH,
    assert_same_entries,
    assert_same_params,
    assert_same_tensors,
    assert_same_written,
    grouped,
    parameters,
    params_of,
    run,
    twins,
)


@each("history", history=HISTORIES, name=CASES, writer=KINDS, reader=KINDS, through=WAYS)
def test_a_run_goes_on(history: str, name: str, writer: str, reader: str, through: str) -> None:
    assert_goes_on(HISTORIES[history], name, writer, reader, through)


@each("form", form=FORMS, name=ONE_EACH, writer=KINDS, reader=KINDS, through=WAYS)
def test_a_run_of_any_form_does(
    form: str, name: str, writer: str, reader: str, through: str
) -> None:
    assert_goes_on(FORMS[form], name, writer, reader, through)


def assert_goes_on(made: History, name: str, writer: str, reader: str, through: str) -> None:
    """Check that a run goes on in both forms as an uninterrupted run of torch's class."""
    if is_torchs_own_break(made, name, {writer, reader}):
        return
    torchs, one = begun("torch", name, made), begun(writer, name, made)
    runs = [torchs, one]
    for seed, without in enumerate(made.steps):
        for stepped in runs:
            stepped.step(seed, without)
    # The run changes its form and changes back. torch's SGD keeps our step count unchanged.
    for seed, kind in enumerate([reader, writer], start=50):
        assert_same_written(runs[-1].state_dict(), torchs.state_dict())
        runs.append(resumed(kind, name, runs[-1], through))
        for stepped in runs:
            stepped.step(seed, made.after)
    for stepped in runs[1:]:
        assert_same_tensors(stepped.params, torchs.params)
        assert [p.stride() for p in stepped.params] == [p.stride() for p in torchs.params]
        assert_same_written(stepped.state_dict(), torchs.state_dict())


def is_torchs_own_break(made: History, name: str, kinds: set[str]) -> bool:
    """Return True if torch's class itself does not continue a run exactly.

    When torch loads a float32 number of the state, it casts the number to the parameter's dtype.
    Its Adafactor divides by the number of elements.
    """
    keeps_numbers = name.startswith(("NAdam", "ASGD")) and made.dtype != torch.float32
    is_empty = any(0 in shape for shape in made.shapes)
    loads = not kinds <= {"ours"}
    return (keeps_numbers and loads) or (name.startswith("Adafactor") and is_empty)


def parts(value: Any) -> list[Any]:
    """Return every dict, list and tensor inside a checkpoint."""
    found = [value] if isinstance(value, (dict, list, Tensor)) else []
    if isinstance(value, (dict, list, tuple)):
        for item in value.values() if isinstance(value, dict) else value:
            found += parts(item)
    return found


@each(name=["SGD momentum", "AdamW amsgrad maximize", "Rprop"], ours=[True, False])
def test_the_caller_s_dict_is_neither_changed_nor_kept(name: str, ours: bool) -> None:
    pair, fresh = (twins(name, groups=grouped(name)) for _ in range(2))
    pair.step(0)
    written = copy.deepcopy((pair.ours if ours else pair.theirs).state_dict())
    written["param_groups"][0]["lr"] = torch.tensor(0.1)
    written["param_groups"][0]["noted"] = [[1.0], {"nested": [2.0]}]
    before = repr(written)
    given = {id(part) for part in parts(written)}
    pointers = {part.data_ptr() for part in parts(written) if isinstance(part, Tensor)}
    fresh.ours.load_state_dict(written)
    kept = parts(list(fresh.ours.param_groups)) + parts(list(fresh.ours.state.values()))
    assert not [part for part in kept if id(part) in given]
    tensors = [part for part in kept if isinstance(part, Tensor)]
    assert not {tensor.data_ptr() for tensor in tensors if tensor.numel()} & pointers
    run(fresh.ours, 3)
    fresh.ours.param_groups[0]["noted"][0].append(3.0)
    fresh.ours.param_groups[0]["lr"].fill_(9.0)
    assert repr(written) == before


def test_names_are_kept_and_do_not_matter() -> None:
    def named(params: list[Any]) -> Any:
        return [(f"p{i}", param) for i, param in enumerate(params)]

    pair, fresh = twins("AdamW", groups=named), twins("AdamW")
    pair.step(0)
    assert pair.ours.state_dict()["param_groups"][0]["param_names"] == ["p0", "p1", "p2", "p3"]
    for source, target in zip(pair.both, fresh.both, strict=True):
        target.load_state_dict(source.state_dict())
    names = [one.param_groups[0].get("param_names") for one in fresh.both]
    assert names[0] == names[1]


def test_dtypes_follow_the_parameters() -> None:
    wide, narrow = twins("AdamW"), twins("AdamW", torch.bfloat16)
    wide.step(0)
    for source, target in zip(wide.both, narrow.both, strict=True):
        target.load_state_dict(source.state_dict())
    for param in params_of(narrow.ours):
        assert narrow.ours.state[param]["exp_avg"].dtype == torch.bfloat16
        assert int(narrow.ours.state[param]["step"]) == 1
    narrow.step(1)
    narrow.assert_same()


@each(names=[("AdamW", "Adam"), ("Adam", "AdamW")])
def test_a_decay_of_the_other_kind_is_not_taken_silently(names: Any) -> None:
    # The state dict says "decoupled_weight_decay", which this chain cannot do.
    source, target = (twins(name) for name in names)
    with pytest.raises(ValueError, match="decoupled"):
        target.ours.load_state_dict(source.theirs.state_dict())


def test_a_chain_with_more_than_the_rule() -> None:
    optimizer = chain(clip_by_global_norm(1.0), adamw(0.1))
    one, two = (TorchOptimizer(parameters(), optimizer) for _ in range(2))
    run(one, 0)
    one.param_groups[0]["max_norm"] = 0.5
    two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["max_norm"] == 0.5
    with torch.no_grad():
        for source, copied in zip(params_of(one), params_of(two), strict=True):
            copied.copy_(source)
    for optimizer_ in (one, two):
        run(optimizer_, 1, 2)
    assert_same_params(one, two)


def test_a_long_run_s_step_count_survives() -> None:
    ours, fresh = (TorchOptimizer(parameters(), adamw(0.1)) for _ in range(2))
    for entries in ours.state.values():
        entries["step"].fill_(2**24 + 1)
    fresh.load_state_dict(ours.state_dict())
    assert {int(entries["step"]) for entries in fresh.state.values()} == {2**24 + 1}


@each(name=["SGD momentum", "Adam amsgrad", "AdamW", "Adagrad decays"])
def test_to_and_from_fused_classes(name: str) -> None:
    cls, options = CASES[name]
    fused: Any = cls(parameters(), fused=True, **options)
    run(fused, 0, 1)
    pair = twins(name)
    pair.ours.load_state_dict(fused.state_dict())
    made = from_torch(fused)
    for ours, theirs, taken in zip(
        params_of(pair.ours), params_of(fused), made.state.leaves[0].values(), strict=True
    ):
        assert_same_entries(pair.ours.state[ours], fused.state[theirs])
        assert int(taken.step) == int(fused.state[theirs].get("step", 1))
    assert made.optimizer == as_functional_optim(cls, **options)
    fused.load_state_dict(pair.ours.state_dict())
    run(fused, 2)


LATE = {
    "alone": rprop(0.01),
    "beside what is frozen": chain(freeze(if_any(matching("c"))), rprop(0.01)),
    "behind a gate": chain(apply_if_finite(2), rprop(0.01)),
    "of a partition": partition(
        {"rprop": rprop(0.01), "sgd": sgd(0.1)},
        labels({"sgd": matching("a")}, default="rprop"),
    ),
}


@each_value(optimizer=LATE, resumed=[False, True])
def test_a_first_gradient_that_comes_late_finds_the_learning_rate_of_then(
    optimizer: Optimizer, resumed: bool
) -> None:
    """State that starts as ``lr`` uses the value of the first step with a gradient, as in torch."""
    ours, theirs = ([torch.nn.Parameter(torch.ones(3)) for _ in range(3)] for _ in range(2))
    named = list(zip("abc", ours, strict=True))
    pair = TorchOptimizer(named, optimizer), torch.optim.Rprop(theirs, lr=0.01)
    for step in range(6):
        for one, (first, late, _) in zip(pair, (ours, theirs), strict=True):
            first.grad = torch.full((3,), 0.5)
            late.grad = torch.full((3,), 0.5) if step > 3 else None
            one.step()
            if step == 1:
                for group in one.param_groups:
                    group.update({key: 0.1 for key in group if key.endswith("lr")})
        if step == 2 and resumed:
            written = pair[0].state_dict()
            pair = TorchOptimizer(named, optimizer), pair[1]
            pair[0].load_state_dict(written)
    assert torch.equal(ours[1], theirs[1])
