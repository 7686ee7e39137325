"""from_torch: parameter groups, checkpointed instances, and what it refuses."""

from typing import Any

import pytest
import torch

from functional_optim import TorchOptimizer, from_torch, qhm, registry, to_torch_state_dict

from .support import CASES, Case, assert_same_tensors, parameters, params_of
from .test_from_torch import assert_continued, every_case, live, run

OTHER: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "weight_decay": 0.5, "maximize": True},
    "Adam": {"lr": 0.01, "betas": (0.5, 0.6), "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.0, "eps": 1e-4},
    "Adagrad": {"lr": 0.01, "lr_decay": 0.1},
    "Adadelta": {"lr": 0.2, "rho": 0.5},
    "Adamax": {"lr": 0.01, "betas": (0.1, 0.2)},
    "RMSprop": {"lr": 0.01, "alpha": 0.5, "centered": True},
    "Rprop": {"etas": (0.3, 1.7), "step_sizes": (0.01, 0.02)},
}


def grouped(case: Case, *, named: bool = False) -> torch.optim.Optimizer:
    params: list[Any] = list(parameters(1))
    if named:
        params = [(f"p{i}", param) for i, param in enumerate(params)]
    other = OTHER[case[0].__name__]
    return live(
        case, [{"params": params[:1]}, {"params": params[1:3], **other}, {"params": params[3:]}]
    )


@every_case
@pytest.mark.parametrize("named", [False, True])
def test_groups_with_options_of_their_own(case: Case, named: bool) -> None:
    optimizer = grouped(case, named=named)
    run(optimizer, range(3), without={2})
    made = from_torch(optimizer)
    assert [len(group) for group in made.params] == [1, 2, 1]
    assert_continued(optimizer, made)


@every_case
def test_groups_before_the_first_step(case: Case) -> None:
    assert_continued(grouped(case))


def test_momentum_in_one_group_only() -> None:
    params = parameters(1)
    optimizer = torch.optim.SGD(
        [{"params": params[:2]}, {"params": params[2:], "momentum": 0.9, "dampening": 0.5}],
        lr=0.1,
        foreach=False,
    )
    assert_continued(optimizer)
    run(optimizer, range(2), without={3})
    assert_continued(optimizer)


def test_options_that_a_scheduler_changed() -> None:
    optimizer = torch.optim.Adam(parameters(1), lr=0.1, foreach=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9)
    for seed in range(4):
        run(optimizer, [seed])
        schedule.step()
    made = from_torch(optimizer)
    assert made.optimizer.hyper["lr"] == optimizer.param_groups[0]["lr"] != 0.1
    assert made.optimizer.hyper["betas"] == optimizer.param_groups[0]["betas"] != (0.9, 0.999)
    assert_continued(optimizer, made)


@every_case
def test_an_instance_that_loaded_a_checkpoint(case: Case) -> None:
    optimizer, loaded = live(case, parameters(1)), live(case, parameters(1))
    run(optimizer, range(3), without={1})
    loaded.load_state_dict(optimizer.state_dict())
    assert_continued(loaded)


def test_an_empty_group_keeps_its_options() -> None:
    optimizer = torch.optim.Adam([{"params": parameters(1)}, {"params": [], "lr": 0.5}], lr=0.1)
    made = from_torch(optimizer)
    assert made.params[1] == {}
    written = to_torch_state_dict(*made)
    assert [group["lr"] for group in written["param_groups"]] == [0.1, 0.5]
    made.optimizer.bind(made.params, made.state)


def test_groups_that_agree_are_changed_together() -> None:
    # A scheduler computes each group's lr for itself: equal numbers, but not one object.
    params = parameters(1, shapes=[(2,), (2,)])
    optimizer = torch.optim.SGD([{"params": [param]} for param in params], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    run(optimizer, [0])
    schedule.step()
    chain, tree, state = from_torch(optimizer)
    grads = tuple({name: torch.ones(2) for name in group} for group in tree)
    stepped, _ = chain.update(tree, grads, state, lr=0.0)
    assert torch.equal(stepped[0]["0"], params[0])
    assert torch.equal(stepped[1]["1"], params[1])


def test_two_parameters_of_one_name_are_refused() -> None:
    # torch takes them; a dict by name has room for one.
    one, two = parameters(1)[:2]
    with pytest.raises(ValueError, match="w"):
        from_torch(torch.optim.SGD([("w", one), ("w", two)], lr=0.1))


def test_one_parameter_twice_in_a_group_is_refused() -> None:
    # torch steps it twice; in a tree of parameters each has one place.
    one = parameters(1)[0]
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([one, one], lr=0.1)
    with pytest.raises(ValueError, match="twice|duplicate|also at"):
        from_torch(optimizer)


def test_groups_that_need_different_chains_are_refused() -> None:
    params = parameters(1)
    optimizer = torch.optim.Adam(
        [{"params": params[:2]}, {"params": params[2:], "decoupled_weight_decay": True}]
    )
    with pytest.raises(ValueError, match=r"group 1 .*two optimizers"):
        from_torch(optimizer)


def test_all_groups_decoupled_are_one_chain() -> None:
    params = parameters(1)
    other = {"params": params[2:], "decoupled_weight_decay": True, "weight_decay": 0.4}
    optimizer = torch.optim.Adam(
        [{"params": params[:2], "weight_decay": 0.2, "decoupled_weight_decay": True}, other],
        lr=0.1,
        foreach=False,
    )
    run(optimizer, [0])
    assert_continued(optimizer)


@pytest.mark.parametrize("cls", [torch.optim.NAdam, torch.optim.ASGD, TorchOptimizer])
def test_an_unregistered_class_is_refused(cls: Any) -> None:
    arguments = [qhm()] if cls is TorchOptimizer else []
    with pytest.raises(ValueError, match=cls.__name__):
        from_torch(cls(parameters(1), *arguments))


def test_a_subclass_of_a_registered_class_is_refused() -> None:
    class Mine(torch.optim.SGD):
        """Whose step may be another."""

    with pytest.raises(ValueError, match="Mine"):
        from_torch(Mine(parameters(1), lr=0.1))


def test_a_state_that_does_not_fit_is_refused_by_name() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.named_parameters())
    run(optimizer, [0])
    del optimizer.state[model.bias]["exp_avg"]
    with pytest.raises(ValueError, match=r"0\.bias.*exp_avg"):
        from_torch(optimizer)


def test_a_class_of_one_s_own_over_our_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    class QHM(TorchOptimizer):
        def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, nu: float = 0.7):
            super().__init__(params, qhm(lr, momentum, nu))

    monkeypatch.setitem(registry._REGISTERED, QHM, qhm)
    optimizer = QHM([{"params": parameters(1)[:2]}, {"params": parameters(1)[2:], "nu": 0.2}])
    run(optimizer, range(3), without={1})
    chain, params, state = from_torch(optimizer)
    grads = tuple({name: p.grad for name, p in group.items()} for group in params)
    stepped, _ = chain.update(params, grads, state)
    optimizer.step()
    made = [leaf for group in stepped for leaf in group.values()]
    assert all(torch.equal(a, b) for a, b in zip(made, params_of(optimizer), strict=True))


def test_sparse_momentum_buffers() -> None:
    table = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9, foreach=False)
    table(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    chain, params, state = from_torch(optimizer)
    stepped, _ = chain.update(params, ({"0": table.weight.grad},), state)
    optimizer.step()
    assert torch.equal(stepped[0]["0"], table.weight)


def test_momentum_turned_off_in_mid_run() -> None:
    # torch leaves the buffer where it is, and does not use it.
    optimizer = live(CASES["SGD momentum"], parameters(1))
    run(optimizer, range(2))
    optimizer.param_groups[0]["momentum"] = 0.0
    chain, params, state = from_torch(optimizer)
    grads = ({name: param.grad for name, param in params[0].items()},)
    stepped, _ = chain.update(params, grads, state)
    optimizer.step()
    assert_same_tensors(list(stepped[0].values()), params_of(optimizer))


def test_momentum_turned_on_in_mid_run() -> None:
    optimizer = live(CASES["SGD"], parameters(1))
    run(optimizer, range(2))
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.param_groups[0]["dampening"] = 0.5
    assert_continued(optimizer)
