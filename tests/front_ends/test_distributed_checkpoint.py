"""torch.distributed.checkpoint.state_dict over a model that TorchOptimizer steps."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from functional_optim import TorchOptimizer, adamw, as_functional_optim, chain, clip_by_global_norm

from .support import CASES, Case, assert_same_entries, assert_same_tensors

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
every_option = pytest.mark.parametrize(
    "options",
    [
        StateDictOptions(),
        StateDictOptions(full_state_dict=True, cpu_offload=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
    ],
    ids=["plain", "full", "flat"],
)


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": 0.02}]


def pair_of(case: Case, ours: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    cls, options = case
    model = network()
    if ours:
        return model, TorchOptimizer(grouped(model), as_functional_optim(cls, **options))
    return model, cls(grouped(model), foreach=False, **options)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seeds: Any) -> None:
    for seed in seeds:
        data = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()


@every_case
@every_option
def test_saved_and_loaded_it_goes_on_as_torch_s_class(
    case: Case, options: StateDictOptions
) -> None:
    bare = "momentum" not in case[1] or "dampening" in case[1]
    if options.full_state_dict and case[0] is torch.optim.SGD and bare:
        options = StateDictOptions()  # torch's loading in full needs a tensor in the state
    trained = [pair_of(case, ours) for ours in (True, False)]
    resumed = [pair_of(case, ours) for ours in (True, False)]
    for (model, optimizer), (other, target) in zip(trained, resumed, strict=True):
        train(model, optimizer, range(3))
        written = get_state_dict(model, optimizer, options=options)
        model_state, optimizer_state = copy.deepcopy(written)
        set_state_dict(
            other,
            target,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=options,
        )
        train(other, target, range(10, 13))
        train(model, optimizer, range(10, 13))
        assert_same_tensors(list(other.parameters()), list(model.parameters()))
    ours, theirs = (list(model.parameters()) for model, _ in resumed)
    assert_same_tensors(ours, theirs)


@every_case
def test_entries_are_named_as_torch_s(case: Case) -> None:
    written = []
    for ours in (True, False):
        model, optimizer = pair_of(case, ours)
        train(model, optimizer, range(2))
        written.append(get_optimizer_state_dict(model, optimizer))
    got, want = written
    assert got.keys() == want.keys()
    for name, entries in want["state"].items():
        assert_same_entries(got["state"][name], entries)
    names = [[group["params"] for group in one["param_groups"]] for one in written]
    assert names[0] == names[1]


@every_case
@pytest.mark.parametrize("to_ours", [True, False])
def test_from_one_class_to_the_other(case: Case, to_ours: bool) -> None:
    model, optimizer = pair_of(case, ours=not to_ours)
    train(model, optimizer, range(3))
    other, target = pair_of(case, ours=to_ours)
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(
        other, target, copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    )
    for one, stepped in ((model, optimizer), (other, target)):
        train(one, stepped, range(10, 13))
    assert_same_tensors(list(other.parameters()), list(model.parameters()))


@every_option
def test_before_the_first_step(options: StateDictOptions) -> None:
    model, optimizer = pair_of(CASES["AdamW"], ours=True)
    before = [param.detach().clone() for param in model.parameters()]
    written = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert_same_tensors(list(model.parameters()), before)
    assert all(param.grad is None for param in model.parameters())
    assert {int(entries["step"]) for entries in optimizer.state.values()} == {0}
    other, target = pair_of(CASES["AdamW"], ours=True)
    set_optimizer_state_dict(other, target, written, options=options)
    for one, stepped in ((model, optimizer), (other, target)):
        train(one, stepped, range(2))
    assert_same_tensors(list(other.parameters()), list(model.parameters()))


@every_option
def test_a_chain_that_torch_does_not_know(options: StateDictOptions) -> None:
    optimizer = chain(clip_by_global_norm(0.1), adamw(0.1))
    trained, resumed = network(), network()
    one, two = (TorchOptimizer(model.parameters(), optimizer) for model in (trained, resumed))
    train(trained, one, range(2))
    one.param_groups[0]["max_norm"] = 0.05
    resumed.load_state_dict(trained.state_dict())
    written = copy.deepcopy(get_optimizer_state_dict(trained, one, options=options))
    set_optimizer_state_dict(resumed, two, written, options=options)
    assert two.param_groups[0]["max_norm"] == 0.05
    for model, stepped in ((trained, one), (resumed, two)):
        train(model, stepped, range(10, 12))
    assert_same_tensors(list(resumed.parameters()), list(trained.parameters()))
