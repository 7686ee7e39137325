"""to_torch_state_dict: a run of ours is continued by torch.optim, and there and back again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from functional_optim import (
    Optimizer,
    State,
    TorchOptimizer,
    adam,
    as_functional_optim,
    chain,
    clip_by_value,
    from_torch,
    lion,
    qhm,
    register_functional_optim,
    registry,
    sgd,
    to_torch_state_dict,
)

from .support import (
    CASES,
    Case,
    assert_same_entries,
    assert_same_tensors,
    noise,
    parameters,
    set_grads,
)

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
NAMES = ("weight", "bias", "alpha", "10", "9")
SHAPES = ((3, 4), (5,), (), (2, 3), (1,))

Run = tuple[Optimizer, dict[str, Tensor], State]


def started(case: Case, steps: int, without: Any = (), dtype: torch.dtype = torch.float32) -> Run:
    """Our own run, over a dict whose order of insertion is not its sorted order."""
    cls, options = case
    optimizer = as_functional_optim(cls, **options)
    params = dict(zip(NAMES, (p.detach() for p in parameters(1, dtype, SHAPES)), strict=True))
    state = optimizer.init(params)
    for seed in range(steps):
        params, state = optimizer.update(params, grads_of(params, seed, without), state)
    return optimizer, params, state


def grads_of(params: dict[str, Tensor], seed: int, without: Any = ()) -> dict[str, Any]:
    return {
        name: None if i in without else noise(1000 * seed + i, *param.shape, dtype=param.dtype)
        for i, (name, param) in enumerate(params.items())
    }


def theirs(case: Case, params: dict[str, Tensor], **other: Any) -> torch.optim.Optimizer:
    """A fresh torch optimizer over copies, with other options than the checkpoint's."""
    cls, options = case
    structure = {key: options[key] for key in ("amsgrad", "centered") if key in options}
    leaves = [torch.nn.Parameter(param.clone()) for param in params.values()]
    return cls(leaves, lr=0.7, foreach=False, **structure, **other)


def assert_continued(run: Run, live: torch.optim.Optimizer, without: Any = ()) -> Run:
    optimizer, params, state = run
    leaves = live.param_groups[0]["params"]
    for seed in range(70, 73):
        grads = grads_of(params, seed, without)
        params, state = optimizer.update(params, grads, state)
        for leaf, grad in zip(leaves, grads.values(), strict=True):
            leaf.grad = None if grad is None else grad.clone()
        live.step()
        assert_same_tensors(list(params.values()), leaves)
    return optimizer, params, state


@every_case
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_checkpoint_of_ours_is_continued_by_torch(case: Case, steps: int) -> None:
    run = started(case, steps)
    live = theirs(case, run[1])
    live.load_state_dict(to_torch_state_dict(*run, case[0]))
    assert_continued(run, live)


@every_case
def test_the_class_is_found_by_the_chain(case: Case) -> None:
    run = started(case, 3)
    cls = torch.optim.AdamW if "decoupled_weight_decay" in case[1] else case[0]
    live = theirs((cls, case[1] | {}), run[1])
    live.load_state_dict(to_torch_state_dict(*run))
    assert_continued(run, live)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    run = started(case, 3, dtype=dtype)
    live = theirs(case, run[1])
    live.load_state_dict(to_torch_state_dict(*run, case[0]))
    assert_continued(run, live)


@every_case
def test_parameters_that_never_got_a_gradient(case: Case) -> None:
    run = started(case, 3, without={0, 3})
    live = theirs(case, run[1])
    live.load_state_dict(to_torch_state_dict(*run, case[0]))
    assert_continued(run, live, without={3})


@every_case
def test_there_and_back_again(case: Case) -> None:
    run = started(case, 2, without={1})
    live = theirs(case, run[1])
    live.load_state_dict(to_torch_state_dict(*run, case[0]))
    assert_continued(run, live, without={4})
    optimizer, groups, state = from_torch(live)
    assert dict(optimizer.hyper) == dict(run[0].hyper)
    again = theirs(case, {name: p.detach() for name, p in groups[0].items()})
    again.load_state_dict(to_torch_state_dict(optimizer, groups, state, case[0]))
    for seed in range(3):
        for one in (live, again):
            set_grads(one.param_groups[0]["params"], seed)
            one.step()
        assert_same_tensors(again.param_groups[0]["params"], live.param_groups[0]["params"])


@every_case
def test_through_a_file_under_the_defaults_of_torch_load(case: Case, tmp_path: Path) -> None:
    run = started(case, 3)
    torch.save(to_torch_state_dict(*run, case[0]), tmp_path / "checkpoint.pt")
    live = theirs(case, run[1])
    live.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    assert_continued(run, live)


@every_case
def test_it_is_what_torch_writes(case: Case) -> None:
    run = started(case, 0)
    cls, options = case
    live = cls([torch.nn.Parameter(p.clone()) for p in run[1].values()], **options)
    written = to_torch_state_dict(*run, cls)
    assert written["param_groups"] == live.state_dict()["param_groups"]
    run = assert_continued(run, live, without={2})
    got, want = to_torch_state_dict(*run, cls)["state"], live.state_dict()["state"]
    for number, entries in want.items():
        assert_same_entries(got[number], entries)
        if "step" in entries:
            assert got[number]["step"].dtype == entries["step"].dtype


def test_its_tensors_are_those_of_the_state_and_nothing_is_changed() -> None:
    optimizer, params, state = started(CASES["Adam"], 2)
    before = {name: leaf.stages[-1].exp_avg.clone() for name, leaf in state.leaves.items()}
    written = to_torch_state_dict(optimizer, params, state)
    for number, name in enumerate(NAMES):
        assert written["state"][number]["exp_avg"] is state.leaves[name].stages[-1].exp_avg
        assert torch.equal(before[name], state.leaves[name].stages[-1].exp_avg)
    assert {leaf.step.dtype for leaf in state.leaves.values()} == {torch.int64}


def test_named_parameters_of_a_model_have_the_order_of_its_parameters() -> None:
    model = torch.nn.ModuleDict({"z": torch.nn.Linear(2, 3), "a": torch.nn.Linear(3, 1)})
    params = {name: p.detach() for name, p in model.named_parameters()}
    assert list(params) != sorted(params)
    optimizer = adam(0.1)
    state = optimizer.init(params)
    _, state = optimizer.update(params, grads_of(params, 0), state)
    live = torch.optim.Adam(model.parameters())
    live.load_state_dict(to_torch_state_dict(optimizer, params, state))
    for name, param in model.named_parameters():
        entry = live.state[param]["exp_avg"]
        assert torch.equal(entry, state.leaves[name].stages[-1].exp_avg)


def test_a_user_s_step_hooks_see_no_step_that_the_user_did_not_make() -> None:
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer)),
        register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer)),
    ]
    try:
        to_torch_state_dict(*started(CASES["Adam"], 1))
    finally:
        for handle in handles:
            handle.remove()
    assert seen == []


@pytest.mark.parametrize("optimizer", [lion(0.1), qhm(0.1), chain(clip_by_value(1.0), adam(0.1))])
def test_a_chain_that_torch_does_not_know_is_refused(optimizer: Optimizer) -> None:
    params = {"w": torch.ones(2)}
    with pytest.raises(ValueError, match="class"):
        to_torch_state_dict(optimizer, params, optimizer.init(params))


def test_a_chain_that_torch_does_not_know_for_a_class_of_one_s_own() -> None:
    class Clipped(TorchOptimizer):
        def __init__(self, params: Any, clip_value: float = 1.0, lr: float = 0.1) -> None:
            super().__init__(params, chain(clip_by_value(clip_value), adam(lr)))

    optimizer = chain(clip_by_value(0.25), adam(0.3))
    params = {"w": torch.ones(2)}
    state = optimizer.init(params)
    params, state = optimizer.update(params, {"w": torch.ones(2)}, state)
    live = Clipped([torch.nn.Parameter(params["w"].clone())])
    live.load_state_dict(to_torch_state_dict(optimizer, params, state, Clipped))
    assert live.param_groups[0]["clip_value"] == 0.25
    assert_continued((optimizer, params, state), live)


def test_a_registered_factory_with_required_arguments_is_in_nobody_s_way() -> None:
    def needs_lr(lr: float) -> Optimizer:
        return sgd(lr)

    optimizer = qhm(0.1)
    params = {"w": torch.ones(2)}
    state = optimizer.init(params)
    register_functional_optim(torch.optim.NAdam, needs_lr)
    try:
        with pytest.raises(ValueError, match="class"):
            to_torch_state_dict(optimizer, params, state)
    finally:
        del registry._REGISTERED[torch.optim.NAdam]
